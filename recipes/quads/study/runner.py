"""Trains the runs of a study, one or several at a time; whatever happens to one, the next one is tried."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from quads_recipe import scratch
from quads_recipe.demo import POLL_SECONDS, _write_script
from quads_recipe.demo_process import TrainerProcess, error_lines
from quads_recipe.ending_signals import undisturbed
from quads_recipe.study import collect, command, data, leftover, results
from quads_recipe.study.layout import Layout, Run
from quads_recipe.study.plan import LOCK, Plan, StudyError
from quads_recipe.words import plural

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

    Raises StudyError: a file of the study is damaged, or TMPDIR too long.
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
        self._check()

    def _check(self) -> None:
        """Everything is read that an earlier start left, before anything is trained. Raises StudyError."""
        results.load(self.layout.study)
        for run in self.layout.runs(self.plan):
            leftover.read(run.folder)
        if self.plan.config == command.DEMO_CONFIG:
            try:
                scratch.require_room()
            except scratch.ScratchError as error:
                raise StudyError(str(error)) from None

    def files(self, seed: int) -> command.Files:
        """What the runs of a seed read."""
        if self.own_data:
            return command.Files(self.policy, *self.own_data)
        folder = self.layout.data
        return command.Files(self.policy, data.train_file(folder, seed), folder / data.HELDOUT)

    def train(self, runs: Sequence[Run], jobs: int = 1) -> Iterator[tuple[Run, bool]]:
        """Trains those that are not done, at most `jobs` at a time.

        Yields each run when it has ended, and whether it is done; the cause of a failure is in its failed.json. Closing
        the generator ends the trainers that still work.
        """
        waiting, active = list(runs), []
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    if (run := waiting.pop(0)).done():
                        yield run, True
                    else:
                        active.append(self._start(run))
                for attempt in [a for a in active if not a.working()]:
                    done = self._close(attempt)
                    active.remove(attempt)  # only now: interrupted in between, it is ended below
                    yield attempt.run, done
                self.display.update()
                time.sleep(POLL_SECONDS if active else 0)
        finally:
            with undisturbed():  # also between two of them
                for attempt in active:
                    attempt.end()

    def _start(self, run: Run) -> Attempt:
        self._prepare(run)
        number = len(run.metrics_files()) + 1
        metrics = run.folder / f"metrics-{number}.jsonl"
        metrics.touch()
        line, environment = self.build(run, metrics)
        _write_script(run.folder / "command.sh", line, environment)
        self.display.begin(run, metrics)
        return Attempt(run, number, line, {**os.environ, **environment}, self.stall_seconds)

    def _close(self, attempt: Attempt) -> bool:
        """Keeps what a trainer left that has ended. True if the run is done."""
        run, status, cause = attempt.run, *attempt.end()
        facts = {"arm": run.arm, "seed": run.seed, "attempt": attempt.number, "code": self.code}
        facts["seconds"] = round(time.monotonic() - attempt.started, 1)
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
        if (failure := run.failure()) and failure.get("broken"):
            self.display.note(failure["cause"][0])
        if run.folder.exists() and not (self.plan.save_every and any(run.folder.glob("checkpoints/global_step_*"))):
            shutil.rmtree(run.folder)
        run.folder.mkdir(parents=True, exist_ok=True)
        run.forget_failure()

    def _finish(self, run: Run) -> list[str]:
        """Keeps the final weights, removes the checkpoints. Returns what is wrong, in lines."""
        try:
            steps = collect.steps(run.metrics_files())
        except StudyError as error:
            return [str(error)]
        if len(steps) != self.plan.steps:
            return [f"the trainer logged {len(steps)} of {plural(self.plan.steps, 'step')}", *error_lines(run.log)]
        saved = run.folder / "checkpoints" / f"global_step_{self.plan.steps}" / "actor" / "huggingface"
        if not list(saved.glob("*.safetensors")):
            return [f"the trainer left no weights in {saved.relative_to(run.folder)}"]
        shutil.rmtree(run.weights, ignore_errors=True)
        saved.replace(run.weights)
        shutil.rmtree(run.folder / "checkpoints")
        return []


class Attempt:
    """A trainer at work on a run, its temporary files in a folder of their own.

    Args:
        number: of the attempt. line, environment: the command. stall_seconds: it may log nothing for so long.
    """

    def __init__(self, run: Run, number: int, line: list[str], environment: dict[str, str], stall_seconds: float):
        self.run, self.number, self.stall_seconds = run, number, stall_seconds
        self.started = self._grown = time.monotonic()
        self._size, self._stalled = -1, False
        self._scratch = scratch.Scratch()
        environment = environment | scratch.environment(self._scratch.path, environment)
        try:
            self._trainer = TrainerProcess(line, environment, run.log, self._scratch.path)
        except BaseException:
            self._scratch.remove()
            raise
        leftover.remember(run.folder, self._trainer.process.pid)

    def working(self) -> bool:
        """False once it has ended, or has logged nothing for too long."""
        if self._trainer.poll() is not None:
            return False
        if (size := self.run.log.stat().st_size) != self._size:
            self._size, self._grown = size, time.monotonic()
        self._stalled = time.monotonic() - self._grown > self.stall_seconds
        return not self._stalled

    def end(self) -> tuple[int | None, list[str]]:
        """Ends its whole session. Returns (exit status, None if it stalled; cause of a failure in lines)."""
        status = self._trainer.poll()
        self._trainer.end()
        self._scratch.remove()
        leftover.forget(self.run.folder)
        if self._stalled:
            return None, [
                f"nothing was logged for {self.stall_seconds:g} s, so it was ended",
                *error_lines(self.run.log),
            ]
        return status, [f"the trainer ended with status {status}", *error_lines(self.run.log)] if status else []


def lock(study: Path):
    """An open file that holds the lock on a study's folder, which is made; closing it releases it.

    Raises StudyError: another `quads study` works in the folder.
    """
    import fcntl

    study.mkdir(parents=True, exist_ok=True)
    if (study / LOCK).is_dir():
        raise StudyError(f"--out: {study / LOCK} is a folder, and must be a file; remove it")
    file = (study / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StudyError(f"--out: another `quads study` is running in {study}; wait for it, or end it") from None
    return file


def working(study: Path) -> bool:
    """Whether a `quads study` works in this folder now. Writes nothing."""
    import fcntl

    if not (study / LOCK).is_file():
        return False
    with (study / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # goes with the file
        except OSError:
            return True
    return False
