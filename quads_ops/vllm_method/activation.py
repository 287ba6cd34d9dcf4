"""What happens to an activation before it meets a weight: nothing, FP8 per token, or NVFP4 with compensation.

All return FP32, which the emulated GEMM multiplies with FP32 weights. `grouped` takes rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quads_ops.fp8 import fp8_qdq, row_amax
from quads_ops.settings import RolloutSettings
from quads_ops.vllm_method.compensation import Compensation


class Activation(Protocol):
    """One per weight. `one`: [M, K] -> FP32 [M, K]. `grouped`: the same, where `counts[e]` rows belong to expert e."""

    def one(self, x: torch.Tensor) -> torch.Tensor: ...

    def grouped(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor: ...


@dataclass(frozen=True)
class PlainActivation:
    """W4A16: the activation in compute dtype."""

    def one(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()

    def grouped(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return x.float()


@dataclass(frozen=True)
class Fp8Activation:
    """E4M3 with a scale per token."""

    def one(self, x: torch.Tensor) -> torch.Tensor:
        return fp8_qdq(x, row_amax(x))

    def grouped(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self.one(x)


def make_activation(rollout: RolloutSettings, name: str, k: int, experts: int | None, width: float) -> Activation:
    """experts: number of masks, one per local expert, or None for one mask of the layer. width: see Compensation."""
    if rollout.mode == "w4a4":
        return Compensation(rollout.residual, name, k, experts, width)
    return Fp8Activation() if rollout.mode == "fp8" else PlainActivation()
