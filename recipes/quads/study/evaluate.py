"""Held-out pass@1 of the starting policy and of every run's weights, in the arm's own rollout engine and in BF16.

Engines run in a process of their own (evaluate_worker), a few evaluations each, so that what an engine leaves behind
or breaks ends with it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quads_recipe import scratch
from quads_recipe.demo import POLL_SECONDS
from quads_recipe.demo_process import TrainerProcess, error_lines
from quads_recipe.study.layout import Layout, Run
from quads_recipe.study.plan import Plan, write_atomically
from quads_recipe.study.reading import StudyError, at_least, many, number, optional, read_object, shown, text, whole

PER_PROCESS = 12
START = "start"
REMEDY = "remove it, and the same command evaluates again"
_FIELDS = {
    "mode": text,
    "ratio": at_least(0),
    "pass_at_1": number,
    "per_problem": many(number),
    "problems": optional(whole(1)),
    "samples": optional(whole(1)),
    "length": optional(number),
    "energy_covered": optional(number),
    "seconds": optional(number),
}


@dataclass(frozen=True)
class Engine:
    """A rollout engine: mode of quads.rollout, residual ratio, and the whole `quads` block it belongs to."""

    mode: str
    ratio: float
    block: dict

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.ratio:g}" if self.ratio else self.mode


@dataclass(frozen=True)
class Job:
    """One evaluation. Its result goes to `result`, a JSON file."""

    name: str
    weights: str
    engine: dict
    result: str


@dataclass(frozen=True)
class Settings:
    """What all evaluations of a study share. See evaluate_worker for its use; dtype as vLLM names it."""

    heldout: str
    calibration: str
    calibration_prompts: int
    samples: int
    max_new: int
    max_prompt: int
    dtype: str
    reward_path: str | None
    reward_name: str
    seed: int = 0


def settings_of(config, plan: Plan, files) -> Settings:
    """From the hydra configuration of a run and its command.Files."""
    reward = config.reward.get("custom_reward_function") or {}
    return Settings(
        heldout=str(files.heldout),
        calibration=str(files.train),
        calibration_prompts=plan.calibration,
        samples=plan.samples,
        max_new=int(config.data.max_response_length),
        max_prompt=int(config.data.max_prompt_length),
        dtype=str(config.actor_rollout_ref.rollout.dtype),
        reward_path=reward.get("path"),
        reward_name=reward.get("name") or "compute_score",
    )


def engines(blocks: dict[str, dict]) -> dict[str, Engine]:
    """arm -> its engine, and "bf16" -> the plain one. blocks: arm -> `quads` block."""
    found = {}
    for arm, block in blocks.items():
        rollout = block["rollout"]
        found[arm] = Engine(rollout["mode"], rollout["residual"]["ratio"], block)
    any_block = next(iter(blocks.values()))
    return {"bf16": Engine("bf16", 0.0, any_block)} | found


def start_jobs(layout: Layout, policy: Path, of: dict[str, Engine]) -> list[Job]:
    """The starting policy in every engine; arms with the same engine share it."""
    unique = {engine.name: engine for engine in of.values()}
    return [_job(layout, f"{START}-{name}", policy, engine) for name, engine in unique.items()]


def run_jobs(layout: Layout, run: Run, of: dict[str, Engine]) -> list[Job]:
    """A run's weights in its own engine and in BF16."""
    own, plain = of[run.arm], of["bf16"]
    pairs = {"own": own} | ({} if own.name == plain.name else {"bf16": plain})
    return [_job(layout, f"{run.name}-{side}", run.weights, engine) for side, engine in pairs.items()]


def _job(layout: Layout, name: str, weights: Path, engine: Engine) -> Job:
    return Job(name, str(weights), asdict(engine), str(layout.evaluations / f"{name}.json"))


def result(layout: Layout, name: str) -> dict | None:
    """What an evaluation found; None if it was not made, or failed. Raises StudyError: its file is broken."""
    file = layout.evaluations / f"{name}.json"
    if not file.exists():
        return None
    found = read_object(file, REMEDY, _FIELDS)
    scores = found["per_problem"]
    if (count := found.get("problems")) not in (None, len(scores)):
        raise StudyError(f"{file}: is broken, per_problem has {len(scores)} scores of {count} problems; {REMEDY}")
    if not math.isclose(mean := math.fsum(scores) / len(scores), found["pass_at_1"], rel_tol=1e-6, abs_tol=1e-9):
        said = f"pass_at_1 is {shown(found['pass_at_1'])}, and the mean of per_problem is {mean:.6g}"
        raise StudyError(f"{file}: is broken, {said}; {REMEDY}")
    return found


def require_same(layout: Layout, found: Mapping[str, dict], plan: Plan) -> None:
    """Raises StudyError if evaluations (name -> result) are about different problems, or about too many."""
    counts = {name: len(of["per_problem"]) for name, of in found.items()}
    most = max(counts.values(), default=0)
    for name, count in counts.items():
        file = layout.evaluations / f"{name}.json"
        if count != most:
            raise StudyError(f"{file}: is broken, per_problem has {count} scores, others have {most}; {REMEDY}")
        if not plan.data and count > plan.heldout:
            said = f"per_problem has {count} scores of {plan.heldout} held-out problems"
            raise StudyError(f"{file}: is broken, {said}; {REMEDY}")


def pending(jobs: Sequence[Job]) -> list[Job]:
    """Those without a result."""
    return [job for job in jobs if not Path(job.result).is_file()]


def drop_weights(jobs: Sequence[Job], run: Run) -> None:
    """Removes a run's weights once all its evaluations are there."""
    if not pending(jobs):
        shutil.rmtree(run.weights, ignore_errors=True)


def evaluate(
    jobs: Sequence[Job], settings: Settings, layout: Layout, display, worker: Callable | None = None
) -> dict[str, list[str]]:
    """Makes the evaluations that have no result yet. Returns name -> cause, in lines, of those that failed.

    Raises KeyboardInterrupt when interrupted; the engine's process has been ended then.
    """
    failed: dict[str, list[str]] = {}
    layout.evaluations.mkdir(parents=True, exist_ok=True)
    while left := [job for job in pending(jobs) if job.name not in failed][:PER_PROCESS]:
        cause = _batch(left, settings, layout, display, worker or _worker)
        if cause:  # it ended at the first job without a result; those behind it are tried in another process
            first = pending(left)[0]
            failed[first.name] = cause
            display.note(f"evaluation {first.name} FAILED: {' | '.join(cause)}")
    return failed


def _batch(left: Sequence[Job], settings: Settings, layout: Layout, display, worker: Callable) -> list[str]:
    """Runs the worker on some jobs. Returns the cause, in lines, if it did not make all of them."""
    request, log = layout.evaluations / "request.json", layout.evaluations / "log.txt"
    write_atomically(request, json.dumps({"jobs": [asdict(job) for job in left], "settings": asdict(settings)}))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    shown: set[str] = set()
    with (
        scratch.made() as folder,
        TrainerProcess(worker(request), environment | {"TMPDIR": str(folder)}, log, folder) as process,
    ):
        # Not until it has ended: with all results there, taking engines down is not worth waiting for.
        while (status := process.poll()) is None and pending(left):
            _show(left, shown, layout, display)
            time.sleep(POLL_SECONDS)
    _show(left, shown, layout, display)
    return [f"the evaluation ended with status {status}", *error_lines(log)] if pending(left) else []


def _show(jobs: Sequence[Job], shown: set[str], layout: Layout, display) -> None:
    """Notes results that are new."""
    for job in jobs:
        if job.name not in shown and (found := result(layout, job.name)):
            shown.add(job.name)
            display.note(f"evaluated {job.name}: pass@1 {found['pass_at_1']:.3f}")
    if now := [job.name for job in jobs if job.name not in shown]:
        display.doing(f"evaluating {now[0]}")


def _worker(request: Path) -> list[str]:
    return [sys.executable, "-m", "quads_recipe.study.evaluate_worker", str(request)]
