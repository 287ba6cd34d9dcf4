"""The way from the actor's forward to the rollout's, one change at a time.

    actor      (actor's weights,   actor's activations)     the training forward
    weights    (rollout's weights, actor's activations)
    activations(rollout's weights, rollout's activations, with its residual compensation)
    rollout                                                 what the engine reported

Each is a forward of the trainer; only the last step is the engine's own arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from quads_ops.settings import QuadsSettings

WEIGHTS = ("none", "nvfp4", "fp8")
ACTIVATIONS = ("none", "nvfp4", "fp8")


@dataclass(frozen=True)
class Leg:
    """One forward: how weights and activations of the quantized products are rounded."""

    weights: str = "none"
    """`none`, `nvfp4`, `fp8`"""
    activations: str = "none"
    """`none`, `nvfp4`, `fp8`"""
    compensated: bool = False
    """With the rollout's residual compensation (activations nvfp4 only)."""

    def __post_init__(self):
        if self.weights not in WEIGHTS or self.activations not in ACTIVATIONS:
            raise ValueError(f"{self}: weights are one of {WEIGHTS}, activations one of {ACTIVATIONS}")
        if self.compensated and self.activations != "nvfp4":
            raise ValueError(f"{self}: only activations in nvfp4 have a residual")


@dataclass(frozen=True)
class Path:
    """The three forwards of the trainer for one arm."""

    actor: Leg
    weights: Leg
    activations: Leg


_ACTOR = {"none": Leg(), "w4a16": Leg("nvfp4"), "w4a4": Leg("nvfp4", "nvfp4")}
_ROLLOUT = {"bf16": Leg(), "fp8": Leg("fp8", "fp8"), "w4a16": Leg("nvfp4"), "w4a4": Leg("nvfp4", "nvfp4")}


def path_of(settings: QuadsSettings) -> Path:
    """The path from `settings.actor` to `settings.rollout`."""
    actor, rollout = _ACTOR[settings.actor.mode], _ROLLOUT[settings.rollout.mode]
    compensated = settings.rollout.residual.ratio > 0
    return Path(
        actor=actor,
        weights=Leg(rollout.weights, actor.activations),
        activations=Leg(rollout.weights, rollout.activations, compensated),
    )
