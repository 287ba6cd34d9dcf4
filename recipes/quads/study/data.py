"""The problems of a study as verl parquet files: training problems per seed, shared by all arms; one held-out set."""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path

HELDOUT = "heldout.parquet"
_RANGE = 1 << 24


def train_file(folder: Path, seed: int) -> Path:
    return folder / f"train-seed{seed}.parquet"


def write(folder: Path, seeds: tuple[int, ...], train: int, heldout: int, terms: tuple[int, int] | None) -> None:
    """Writes the files that are not there yet. train, heldout: how many problems. terms: see presets.Stress."""
    from quads_recipe.demo_data import balance

    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        if not train_file(folder, seed).is_file():
            _write(train_file(folder, seed), balance(_problems("train", train, seed, terms)), "train")
    if not (folder / HELDOUT).is_file():
        _write(folder / HELDOUT, _problems("heldout", heldout, 0, terms), "heldout")


def sample(purpose: str, count: int, terms: tuple[int, int] | None) -> list[list[dict[str, str]]]:
    """The prompts of the first problems, as chat messages. purpose: train or heldout. terms: see presets.Stress."""
    from quads_recipe.policy.task import chat

    return [chat(problem.prompt) for problem in _problems(purpose, count, 0, terms)]


def _write(path: Path, problems: list, split: str) -> None:
    import pandas

    from quads_recipe.demo_data import row

    part = path.with_name(path.name + ".part")
    pandas.DataFrame([row(problem, i, split) for i, problem in enumerate(problems)]).to_parquet(part)
    part.replace(path)


def _problems(purpose: str, n: int, seed: int, terms: tuple[int, int] | None) -> list:
    from quads_recipe.policy import task

    if terms is None:
        return task.problems(purpose, n, seed)
    import reasoning_gym

    # As task.problems does it: item i of a dataset is seeded with `seed + i`, so every use has its own range.
    first = (2 * seed + (purpose == "heldout")) * _RANGE
    settings = task.DATASET_SETTINGS | {"min_terms": terms[0], "max_terms": terms[1]}
    dataset = reasoning_gym.create_dataset(task.DATASET, seed=first, size=_RANGE, **settings)
    entries = (dataset[i] for i in count())
    drawn = (task.Problem(entry["metadata"]["expression"].replace(" ", "") + "=", entry) for entry in entries)
    return list(islice((p for p in drawn if task.is_heldout(p.prompt) == (purpose == "heldout")), n))
