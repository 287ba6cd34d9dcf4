"""What a study will take, from times measured on a machine with 2 Xeon cores (AVX-512) and nothing else to do."""

from __future__ import annotations

from quads_recipe.study.command import DEMO_CONFIG
from quads_recipe.study.plan import Plan

START_SECONDS = 75.0
"""From the command to the first step: Ray, verl, vLLM, first sync; and the end."""
STEP_SECONDS = {
    "bf16": 4.0,
    "fp8": 4.5,
    "naive": 4.5,
    "qat": 4.8,
    "symmetric": 5.5,
    "quads": 5.0,
    "quads_full": 5.0,
}
ENGINE_SECONDS, RESPONSES_PER_SECOND = 5.0, 60.0
PROCESS_SECONDS = 15.0
WITHOUT_AVX512 = 1.8
"""How much longer it takes on 2 EPYC cores with AVX2 alone, where torch has no fast BF16 product."""


def seconds(plan: Plan) -> tuple[float, float]:
    """(training, evaluation) of the whole study with the demo's batch: 16 prompts, 8 responses each."""
    training = sum(START_SECONDS + plan.steps * STEP_SECONDS[arm] for arm, _ in plan.runs())
    starts = len(set(plan.arms) & {"bf16", "fp8", "quads", "quads_full"}) + 1
    evaluations = starts + sum(1 if arm == "bf16" else 2 for arm, _ in plan.runs())
    each = ENGINE_SECONDS + plan.heldout * plan.samples / RESPONSES_PER_SECOND
    return training, evaluations * each + 2 * PROCESS_SECONDS


def describe(plan: Plan) -> list[str]:
    """A line with the estimate; none for what was never measured."""
    if plan.config != DEMO_CONFIG or plan.overrides:
        return []
    training, evaluation = seconds(plan)
    minutes = (training + evaluation) / 60
    line = f"about {minutes:.0f} min on 2 cores ({training / 60:.0f} training, {evaluation / 60:.0f} evaluation)"
    if _capability() != "AVX512":
        line += f"; about {WITHOUT_AVX512 * minutes:.0f} on this CPU, which has no AVX-512 and so no fast BF16 product"
    return [line]


def _capability() -> str:
    from torch.backends import cpu

    return cpu.get_cpu_capability()
