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
import shutil
from dataclasses import dataclass
from pathlib import Path

from quads_recipe.study.plan import Plan, write_atomically
from quads_recipe.study.reading import Check, StudyError, at_least, many, optional, read_object, text, whole

_FACTS = {"attempt": optional(whole(1)), "code": optional(text), "date": optional(text)}
_DONE = {"seconds": at_least(0), **_FACTS}
_FAILED = {"cause": many(text), "seconds": optional(at_least(0)), **_FACTS}


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
        remedy = "remove it, and the same command trains this run again"
        return _read(self.folder / "done.json", _DONE, remedy)

    def failure(self) -> dict | None:
        """What failed.json says; None for a run that did not fail.

        A broken one is `broken`, and its cause says so: it is only a note, and the run is tried again in any case.
        """
        if self.done():
            return None
        try:
            remedy = "why the run failed is lost, and the same command tries it again"
            return _read(self.folder / "failed.json", _FAILED, remedy)
        except StudyError as error:
            said = str(error).replace(f"{self.folder}/", f"{self.name}/")  # reports name no folder of the machine
            return {"cause": [said], "broken": True}

    def mark_done(self, facts: dict) -> None:
        write_atomically(self.folder / "done.json", json.dumps(facts, indent=1) + "\n")
        self.forget_failure()

    def mark_failed(self, facts: dict) -> None:
        write_atomically(self.folder / "failed.json", json.dumps(facts, indent=1) + "\n")

    def forget_failure(self) -> None:
        """Removes failed.json, also where a folder has its name."""
        file = self.folder / "failed.json"
        if file.is_dir():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)

    def metrics_files(self) -> list[Path]:
        """Of all attempts, the oldest first. A later attempt's steps replace those of an earlier one."""
        attempts = {path: path.stem.removeprefix("metrics-") for path in self.folder.glob("metrics-*.jsonl")}
        return sorted((path for path, number in attempts.items() if number.isdecimal()), key=lambda p: int(attempts[p]))


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


def _read(path: Path, fields: dict[str, Check], remedy: str) -> dict | None:
    return read_object(path, remedy, fields) if path.exists() else None
