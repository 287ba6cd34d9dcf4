"""Trains the runs of a study, one after the other; whatever happens to one, the next one is tried."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from quads_recipe.demo import POLL_SECONDS, _write_script
from quads_recipe.demo_process import TrainerProcess, error_lines
from quads_recipe.study import collect, command, data, leftover
from quads_recipe.study.layout import Layout, Run
from quads_recipe.study.plan import Plan, StudyError

STALL_SECONDS = 3600.0
"""A run whose log does not grow for so long is ended and counts as failed."""


class Runner:
    """Trains what is missing.

    Args:
        plan, layout: the study.
        policy: folder of the starting policy. train, heldout: own parquet files, None for generated problems.
        display: told what happens (progress.StudyDisplay).
        code: digest of the sources, noted with each run.
        build: from a run, its metrics file and its files to (command, environment); tests give another one.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        policy: Path,
        display,
        code: str,
        own_data: tuple[Path, Path] | None = None,
        build: Callable | None = None,
        stall_seconds: float = STALL_SECONDS,
    ):
        self.plan, self.layout, self.policy, self.display, self.code = plan, layout, policy, display, code
        self.own_data, self.build, self.stall_seconds = own_data, build or self._build, stall_seconds

    def files(self, seed: int) -> command.Files:
        """What the runs of a seed read."""
        if self.own_data:
            return command.Files(self.policy, *self.own_data)
        folder = self.layout.data
        return command.Files(self.policy, data.train_file(folder, seed), folder / data.HELDOUT)

    def train(self, run: Run) -> bool:
        """Trains one run unless it is done. True if it is done afterwards; the cause of a failure is in failed.json.

        Raises KeyboardInterrupt when interrupted; the trainer has been ended then.
        """
        if run.done():
            return True
        self._prepare(run)
        attempt = len(run.metrics_files()) + 1
        metrics = run.folder / f"metrics-{attempt}.jsonl"
        metrics.touch()
        line, environment = self.build(run, metrics)
        _write_script(run.folder / "command.sh", line, environment)
        self.display.begin(run, metrics)
        started = time.monotonic()
        status, cause = self._watch(run, line, {**os.environ, **environment})
        facts = {"arm": run.arm, "seed": run.seed, "attempt": attempt, "code": self.code}
        facts["seconds"] = round(time.monotonic() - started, 1)
        facts["date"] = time.strftime("%Y-%m-%d %H:%M")
        if status == 0:
            cause = self._finish(run)
        if cause:
            run.mark_failed(facts | {"status": status, "cause": cause})
        else:
            run.mark_done(facts | {"steps": self.plan.steps})
        self.display.end(run, cause)
        return not cause

    def _build(self, run: Run, metrics: Path) -> tuple[list[str], dict[str, str]]:
        files = self.files(run.seed)
        line = command.command(self.plan, run.arm, run.seed, files, run.folder)
        return line, command.environment(self.plan, run.folder, metrics)

    def _prepare(self, run: Run) -> None:
        """An empty folder, or that of a run with checkpoints to resume from."""
        if pid := leftover.end(run.folder):
            self.display.note(f"ended the trainer {pid} of an earlier start of {run.name}, which was still running")
        if run.folder.exists() and not (self.plan.save_every and any(run.folder.glob("checkpoints/global_step_*"))):
            shutil.rmtree(run.folder)
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "failed.json").unlink(missing_ok=True)

    def _watch(self, run: Run, line: list[str], environment: dict[str, str]) -> tuple[int | None, list[str]]:
        """(exit status, None if it had to be ended; cause of a failure in lines)"""
        with TrainerProcess(line, environment, run.log) as trainer:
            leftover.remember(run.folder, trainer.process.pid)
            status = self._wait(trainer, run.log)
        leftover.forget(run.folder)
        if status is None:
            return None, [f"nothing was logged for {self.stall_seconds:g} s, so it was ended", *error_lines(run.log)]
        return status, [f"the trainer ended with status {status}", *error_lines(run.log)] if status else []

    def _wait(self, trainer: TrainerProcess, log: Path) -> int | None:
        """Exit status, or None if the log has not grown for too long."""
        size, grown = -1, time.monotonic()
        while (status := trainer.poll()) is None:
            self.display.update()
            if (now := log.stat().st_size) != size:
                size, grown = now, time.monotonic()
            elif time.monotonic() - grown > self.stall_seconds:
                return None
            time.sleep(POLL_SECONDS)
        self.display.update()
        return status

    def _finish(self, run: Run) -> list[str]:
        """Keeps the final weights, removes the checkpoints. Returns what is wrong, in lines."""
        steps = collect.steps(run.metrics_files())
        if len(steps) != self.plan.steps:
            return [f"the trainer logged {len(steps)} of {self.plan.steps} steps", *error_lines(run.log)]
        saved = run.folder / "checkpoints" / f"global_step_{self.plan.steps}" / "actor" / "huggingface"
        if not list(saved.glob("*.safetensors")):
            return [f"the trainer left no weights in {saved.relative_to(run.folder)}"]
        shutil.rmtree(run.weights, ignore_errors=True)
        saved.replace(run.weights)
        shutil.rmtree(run.folder / "checkpoints")
        return []


def lock(study: Path):
    """An open file that holds the lock on a study's folder; closing it releases it.

    Raises StudyError: another `quads study` works in the folder.
    """
    import fcntl

    file = (study / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StudyError(f"--out: another `quads study` is running in {study}; wait for it, or end it") from None
    return file
