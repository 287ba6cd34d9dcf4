"""What to do about a mismatch, by the part of d that makes most of it (see quads_recipe.probe)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quads_ops.settings import QuadsSettings
from quads_recipe.analysis.decompose import PARTS

_EXCLUDE = "leave out the layers that `quads diagnose` names (quads.exclude)"


@dataclass(frozen=True)
class Split:
    """mean |d_weight|, |d_act| and |d_num| of the latest probe, in nats."""

    step: int
    means: Mapping[str, float]

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, float]) -> Split | None:
        """From the metrics of a step; None if no probe ran in it."""
        names = {part: f"quads/probe_{part}_abs_mean" for part in PARTS}
        if not all(name in metrics for name in names.values()):
            return None
        return cls(step, {part: float(metrics[name]) for part, name in names.items()})

    @property
    def largest(self) -> str:
        return max(self.means, key=self.means.__getitem__)


def mismatch(split: Split | None, settings: QuadsSettings) -> str:
    """One or two sentences: what the latest probe found, and the setting that lowers the largest part."""
    if split is None:
        return "No probe has run: quads.probe.every=N tells every N steps which part of d it is, and so what helps"
    found = ", ".join(f"d_{part} {mean:.2g}" for part, mean in split.means.items())
    remedy = {"weight": _weight, "act": _act, "num": _num}[split.largest](settings)
    return f"Probe of step {split.step}: {found} nats; {remedy}"


def _weight(settings: QuadsSettings) -> str:
    if settings.rollout.mode == "fp8":
        return "the actor can't train with FP8 weights; arm quads_full has no d_weight"
    if settings.actor.mode == "none":
        return "set quads.actor.mode=w4a16, which makes d_weight 0"
    return "d_weight must be 0 with this actor; please report it"


def _act(settings: QuadsSettings) -> str:
    ratio = settings.rollout.residual.ratio
    if settings.rollout.mode == "fp8":
        return "compare the arms on this model with `quads diagnose`; arm quads_full usually has a smaller d_act"
    if ratio < 1:
        return f"raise quads.rollout.residual.ratio (now {ratio:g}), or {_EXCLUDE}"
    return f"quads.rollout.residual.ratio is 1 already; {_EXCLUDE}"


def _num(settings: QuadsSettings) -> str:
    noise = "engine noise: other kernels and the rounding of bf16"
    if settings.rollout.mode not in ("w4a4", "fp8"):
        return f"{noise}; nothing to gain by quantization settings"
    # Where activations are rounded on both sides of the noise, it flips codes, and d_num is more than BF16's own.
    if settings.rollout.mode == "w4a4" and settings.rollout.residual.ratio < 1:
        return f"{noise}, which also flips 4-bit codes of activations; ratio 1 (arm quads_full) makes those matter less"
    return f"{noise}, which also flips codes of activations; little to gain by quantization settings"
