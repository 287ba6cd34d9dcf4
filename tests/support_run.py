"""Whole runs of `python -m verl.trainer.main_ppo`, started as the demo starts them, for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from quads_recipe import demo
from quads_recipe.demo_process import error_lines

TIMEOUT_S = 1500
PRECISION = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
EXACT = (f"{PRECISION}=fp32", "actor_rollout_ref.rollout.dtype=float32", "quads.rollout.mode=w4a16")
"""Both sides compute in FP32, and the rollout quantizes weights alone."""


class Run:
    """What a run left in its folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = (folder / "log.txt").read_text()
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.steps = {row["step"]: row["data"] for row in rows if "critic/score/mean" in row["data"]}

    def checksums(self) -> dict[int, str]:
        """Step -> checksum of the weights that both sides held after the sync that followed it."""
        return {int(s): c for s, c in re.findall(r"weights of step (\d+) synced .*checksum (\w+)", self.log)}

    def values(self, name: str) -> list[float]:
        """One for each step."""
        return [data[name] for _, data in sorted(self.steps.items())]


def quads_demo(folder: Path, *arguments: str, overrides: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """`quads demo` in `folder`, to its end."""
    sets = [argument for override in overrides for argument in ("--set", override)]
    command = [sys.executable, "-m", "quads_recipe.cli", "demo", "--run-dir", str(folder), *arguments, *sets]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.terminate()  # not kill: it ends its trainer, which has a session of its own
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, *output)


def finished(folder: Path, *arguments: str, overrides: tuple[str, ...] = ()) -> Run:
    """The same, of a run that must succeed."""
    result = quads_demo(folder, *arguments, overrides=overrides)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return Run(folder)


@dataclass
class Killed:
    """The end of a run whose rollout worker was killed."""

    run: Run
    status: int | None
    """Exit status of main_ppo; None if it still ran after the time allowed."""
    seconds: float
    """From the kill to its end."""
    errors: list[str]
    """The last lines of the log that state an error."""
    left: list[str] = field(default_factory=list)
    """Command lines of processes of the run that were still there some seconds after its end."""


def run_and_kill(folder: Path, temporary: Path, *arguments: str, after_step: int, allowed: float = 60) -> Killed:
    """Start main_ppo by itself, and send SIGKILL to its vLLM worker right after the sync of step `after_step`."""
    run_dir, command, environment = demo.prepare(demo.parser().parse_args(["--run-dir", str(folder), *arguments]))
    log = run_dir / "log.txt"
    with log.open("wb") as output:
        trainer = subprocess.Popen(
            command,
            env={**environment, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family = [psutil.Process(trainer.pid)]
    try:
        _wait_for(log, f"weights of step {after_step} synced", trainer)
        family += family[0].children(recursive=True)
        _worker(family).send_signal(signal.SIGKILL)
        start = time.monotonic()
        try:
            status = trainer.wait(allowed)
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.monotonic() - start
        _, left = psutil.wait_procs(family, timeout=10)
        left = [_describe(process) for process in left if process.status() != psutil.STATUS_ZOMBIE]
        return Killed(Run(run_dir), status, seconds, error_lines(log), left)
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        trainer.wait()


def _wait_for(log: Path, text: str, trainer: subprocess.Popen, seconds: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + seconds
    while text not in log.read_text(errors="replace"):
        if trainer.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"no {text!r} in the log: {error_lines(log)}")
        time.sleep(0.1)


def _worker(family: list[psutil.Process]) -> psutil.Process:
    """The one process in which vLLM holds the model."""
    [worker] = [process for process in family if process.is_running() and "VLLM::Worker" in _describe(process)]
    assert worker.pid != os.getpid()
    return worker


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.name()} {' '.join(process.cmdline())}"
    except psutil.Error:
        return ""
