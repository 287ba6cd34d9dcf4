"""The demo's data: reasoning-gym problems as verl parquet files."""

import json
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path

from quads_recipe.policy.task import DATASET, Problem, chat, problems


def write_data(folder: Path, train: int, heldout: int = 256, seed: int = 0) -> tuple[Path, Path]:
    """Writes train.parquet (balanced, see `balance`) and heldout.parquet; returns both paths.

    Columns as verl's RLHFDataset reads them: prompt (chat messages), reward_model.ground_truth, data_source (the name
    of the reasoning-gym dataset, which the reward uses), extra_info (index, split, metadata as a JSON string).
    """
    import pandas

    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": balance(problems("train", train, seed)), "heldout": problems("heldout", heldout)}
    paths = []
    for split, chosen in splits.items():
        paths.append(folder / f"{split}.parquet")
        pandas.DataFrame([row(p, i, split) for i, p in enumerate(chosen)]).to_parquet(paths[-1])
    return paths[0], paths[1]


def row(problem: Problem, index: int, split: str) -> dict:
    """One line of a verl parquet."""
    return {
        "data_source": DATASET,
        "prompt": chat(problem.prompt),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split, "metadata": json.dumps(problem.entry["metadata"])},
    }


def balance(chosen: Iterable[Problem]) -> list[Problem]:
    """The same problems, reordered so that kinds (number of terms and of digits) take turns while they last.

    Every batch then is equally hard, and the reward of a step shows the policy and not the luck of the draw.
    """
    kinds: dict[tuple[int, int], deque[Problem]] = defaultdict(deque)
    for problem in chosen:
        metadata = problem.entry["metadata"]
        kinds[metadata["num_terms"], metadata["num_digits"]].append(problem)
    queues = [kinds[kind] for kind in sorted(kinds)]
    ordered = []
    while any(queues):
        ordered += [queue.popleft() for queue in queues if queue]
    return ordered
