"""The demo's task: reasoning-gym's chain_sum, answered with worked running sums.

A problem is `98-93+77=`; a worked answer is `98-93=5;5+77=82`. The reward reads the number after the last `=`.
"""

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

DATASET = "chain_sum"
DATASET_SETTINGS = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2}
MAX_PROMPT_TOKENS = 16
MAX_RESPONSE_TOKENS = 40

# reasoning-gym seeds item i of a dataset with `seed + i`, so datasets with neighbouring seeds share items. Each
# use of the generator gets its own range of 2^24 items, and each policy seed its own set of ranges.
_RANGE = 1 << 24
_PURPOSES = {"demonstrations": 0, "imperfect_demonstrations": 1, "train": 2, "heldout": 3}

# One expression in HELDOUT_SHARE is kept out of all training, by a hash of the expression itself: short problems
# repeat within a few thousand draws, so different seeds alone would leak the held-out ones.
HELDOUT_SHARE = 8


@dataclass(frozen=True)
class Problem:
    """One problem: `prompt` as the policy reads it, and reasoning-gym's entry (question, answer, metadata)."""

    prompt: str
    entry: dict

    @property
    def answer(self) -> str:
        return self.entry["answer"]


def is_heldout(prompt: str) -> bool:
    """True for the expressions that are used for evaluation only."""
    return zlib.crc32(prompt.encode()) % HELDOUT_SHARE == 0


def problems(purpose: str, n: int, seed: int = 0) -> list[Problem]:
    """n problems for a purpose: "demonstrations", "imperfect_demonstrations", "train" or "heldout".

    The same arguments give the same problems. Held-out expressions never occur in the other three.
    Raises KeyError for an unknown purpose.
    """
    wanted = purpose == "heldout"
    return list(islice((p for p in _draw(purpose, seed) if is_heldout(p.prompt) == wanted), n))


def _draw(purpose: str, seed: int) -> Iterator[Problem]:
    import reasoning_gym

    first = (seed * len(_PURPOSES) + _PURPOSES[purpose]) * _RANGE
    dataset = reasoning_gym.create_dataset(DATASET, seed=first, size=_RANGE, **DATASET_SETTINGS)
    for i in count():
        entry = dataset[i]
        yield Problem(entry["metadata"]["expression"].replace(" ", "") + "=", entry)


def worked_answer(prompt: str, error_rate: float = 0.0, rng: random.Random | None = None) -> str:
    """The running sums for a prompt, `98-93=5;5+77=82`.

    With `error_rate` p each running sum is, with probability p, off by 1 or 10 either way, and the mistake is carried
    on: an imperfect demonstrator, whose errors a policy learns to sample and reinforcement learning can remove.
    """
    first, *rest = re.findall(r"[+-]?\d+", prompt)
    total, steps = int(first), []
    for term in rest:
        result = total + int(term)
        if error_rate and rng.random() < error_rate:
            result += rng.choice((-10, -1, 1, 10))
        steps.append(f"{total}{term}={result}")
        total = result
    return ";".join(steps)


def chat(prompt: str) -> list[dict[str, str]]:
    """The prompt as chat messages."""
    return [{"role": "user", "content": prompt}]
