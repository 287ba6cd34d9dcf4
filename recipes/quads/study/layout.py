"""Where a study keeps its things, and how it remembers what is finished.

plan.json                 the settings (plan.py)
data/, policy/            problems, and the policy if one was made
runs/ARM-seedN/           command.sh, log.txt, metrics-K.jsonl (K: attempt), tensorboard/, weights/,
                          then done.json, or failed.json with the cause
evaluations/NAME.json     pass@1 of the starting policy or of a run's weights in one engine
report/                   results.json, tables, drawings, study.html
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from quads_recipe.study.plan import Plan, read_object, write_atomically


@dataclass(frozen=True)
class Run:
    """One arm with one seed, and its folder."""

    arm: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def weights(self) -> Path:
        """The final weights, a Hugging Face checkpoint folder."""
        return self.folder / "weights"

    def done(self) -> dict | None:
        """What done.json says; None for a run that did not finish. Raises StudyError: the file is broken."""
        return _read(self.folder / "done.json", {"seconds": float})

    def failure(self) -> dict | None:
        """What failed.json says. Raises StudyError: the file is broken."""
        return None if self.done() else _read(self.folder / "failed.json", {"cause": list})

    def mark_done(self, facts: dict) -> None:
        write_atomically(self.folder / "done.json", json.dumps(facts, indent=1) + "\n")
        (self.folder / "failed.json").unlink(missing_ok=True)

    def mark_failed(self, facts: dict) -> None:
        write_atomically(self.folder / "failed.json", json.dumps(facts, indent=1) + "\n")

    def metrics_files(self) -> list[Path]:
        """Of all attempts, the oldest first. A later attempt's steps replace those of an earlier one."""
        return sorted(self.folder.glob("metrics-*.jsonl"), key=lambda path: int(path.stem.rpartition("-")[2]))


@dataclass(frozen=True)
class Layout:
    """The paths of a study folder."""

    study: Path

    @property
    def data(self) -> Path:
        return self.study / "data"

    @property
    def evaluations(self) -> Path:
        return self.study / "evaluations"

    @property
    def report(self) -> Path:
        return self.study / "report"

    def run(self, arm: str, seed: int) -> Run:
        return Run(arm, seed, self.study / "runs" / f"{arm}-seed{seed}")

    def runs(self, plan: Plan) -> list[Run]:
        """All runs of the plan, in the order they are trained."""
        return [self.run(arm, seed) for arm, seed in plan.runs()]


def _read(path: Path, fields: dict[str, type]) -> dict | None:
    remedy = "remove it, and the same command trains this run again"
    return read_object(path, remedy, fields) if path.is_file() else None
