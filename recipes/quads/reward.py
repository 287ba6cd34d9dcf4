"""The demo's reward, for verl's `reward.custom_reward_function`: reasoning-gym's own scorer, as 1 or 0."""

import functools
import json
from typing import Any

SPECIAL = ("<eos>", "<pad>")


def extract_answer(solution_str: str) -> str | None:
    """What stands after the last `=` (the last running sum), or None if there is no `=`."""
    for token in SPECIAL:
        solution_str = solution_str.replace(token, "")
    _, equals, answer = solution_str.rpartition("=")
    return answer.strip() if equals else None


@functools.cache
def _scorer(dataset: str):
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(dataset)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """1.0 if reasoning-gym gives the answer full marks, else 0.0 (its partial credit counts as wrong).

    Args:
        data_source: the name of the reasoning-gym dataset, such as "chain_sum".
        solution_str: the response as text.
        ground_truth: reasoning-gym's answer.
        extra_info: may hold `metadata` of the dataset entry, as a JSON string, for tasks whose scorer needs it.
    Raises:
        ValueError: reasoning-gym has no dataset of that name.
    """
    metadata = json.loads((extra_info or {}).get("metadata") or "{}")
    entry = {"answer": ground_truth, "metadata": metadata}
    return float(_scorer(data_source)(answer=extract_answer(solution_str), entry=entry) == 1.0)
