"""What a study will take, from times measured on 2 Xeon cores (AVX-512) that had nothing else to do.

`quick` took 13 min 20 s there, and `paper-mini` with `--jobs 2` 74 min.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quads_ops.settings import ARMS
from quads_recipe.paths import POLICIES, policy_dir
from quads_recipe.study.command import DEMO_CONFIG
from quads_recipe.study.plan import Plan
from quads_recipe.study.presets import STRESSES, combine

START_SECONDS = 97.0
"""From the command to the first step: Ray, verl, vLLM, first sync; and the end."""
STEP_SECONDS = {
    "bf16": 6.4,
    "fp8": 6.6,
    "naive": 6.4,
    "qat": 7.0,
    "symmetric": 7.4,
    "quads": 7.0,
    "quads_full": 7.0,
}
TWO_JOBS = 1.53
"""How much longer a run takes beside another one on 2 cores."""
MOST_JOBS = 2
EVALUATION_SECONDS, RESPONSES_PER_SECOND = 3.0, 300.0
ENGINE_SECONDS = 10.0
"""For the first evaluation of trained weights in each engine, more than for the others."""
PROCESS_SECONDS = 35.0
"""To start evaluating, once before the training and once after it."""
WITHOUT_AVX512 = 1.8
"""How much longer it takes on 2 EPYC cores with AVX2 alone, where torch has no fast BF16 product."""


def seconds(plan: Plan, jobs: int = 1) -> tuple[float, float]:
    """(training, evaluation) of the whole study with the demo's batch: 16 prompts, 8 responses each.

    jobs: runs at a time, 1 or 2.
    """
    engines = {("bf16", 0.0), *(ARMS[arm][1:] for arm in plan.arms)}
    evaluations = len(engines) + sum(1 if arm == "bf16" else 2 for arm, _ in plan.runs())
    each = EVALUATION_SECONDS + plan.heldout * plan.samples / RESPONSES_PER_SECOND
    return _training(plan, jobs), evaluations * each + len(engines) * ENGINE_SECONDS + 2 * PROCESS_SECONDS


def _training(plan: Plan, jobs: int) -> float:
    """Until the last run has ended; each starts as soon as one of the `jobs` places is free."""
    jobs = min(jobs, len(plan.runs()))
    busy = [0.0] * jobs
    for arm, _ in plan.runs():
        place = busy.index(min(busy))
        busy[place] += (START_SECONDS + plan.steps * STEP_SECONDS[arm]) * (TWO_JOBS if jobs > 1 else 1.0)
    return max(busy)


def describe(plan: Plan, policy: Path | None = None, jobs: int = 1) -> list[str]:
    """A line with the estimate, or that there is none and why.

    policy: folder of the starting policy; None if it is made when the study starts.
    """
    if others := _never_timed(plan, policy, jobs):
        return [f"no estimate of the time: nothing was timed with {', '.join(others)}"]
    training, evaluation = seconds(plan, jobs)
    minutes = (training + evaluation) / 60
    line = f"about {minutes:.0f} min on 2 cores ({training / 60:.0f} training, {evaluation / 60:.0f} evaluation)"
    if _capability() != "AVX512":
        line += f"; about {WITHOUT_AVX512 * minutes:.0f} on this CPU, which has no AVX-512 and so no fast BF16 product"
    return [line]


def _never_timed(plan: Plan, policy: Path | None, jobs: int) -> list[str]:
    """The options that make a study another one than those that were timed."""
    if plan.config != DEMO_CONFIG:
        return [f"--preset {plan.preset}"]
    stressed = [f"--stress {name}" for name in plan.stress if STRESSES[name].overrides]
    found = ["--data"] if plan.data else []
    found += [f"--policy {plan.policy}"] if policy and not _shipped(policy, plan) else []
    found += [*stressed, *_set(plan)]
    return found + ([f"--jobs {jobs}"] if min(jobs, len(plan.runs())) > MOST_JOBS else [])


def _shipped(policy: Path, plan: Plan) -> bool:
    """Or of the same shape: made for this study from a shipped one."""
    return bool(plan.outliers) or policy in [policy_dir(name) for name in POLICIES]


def _set(plan: Plan) -> Sequence[str]:
    return ["--set"] if len(plan.overrides) > len(combine(plan.stress).overrides) else []


def _capability() -> str:
    from torch.backends import cpu

    return cpu.get_cpu_capability()
