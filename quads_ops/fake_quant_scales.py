"""Global scales of the actor's weights, from the gathered weights of the running forward.

FSDP gathers a whole layer before its forward, so every rank has the whole matrices, in compute dtype, right here: the
amax needs no collective, is the same on all ranks and for every sharding, and can't be stale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quads_ops.nvfp4 import global_scale_dec
from quads_ops.weights import weight_amax

_REMEDY = "Let FSDP wrap whole decoder layers (fsdp_config.wrap_policy) and run them through their forward"


@dataclass(frozen=True, eq=False)
class ScaleGroup:
    """Linears that the rollout multiplies as one matrix (q, k, v; gate, up), or a single linear."""

    names: tuple[str, ...]
    modules: tuple[nn.Linear, ...]

    @torch.no_grad()
    def scale(self, dtype: torch.dtype) -> torch.Tensor:
        """global_scale_dec, FP32 [], of the largest magnitude in the group in compute dtype.

        Raises RuntimeError where a member's weight is not gathered.
        """
        amaxes = []
        for name, module in zip(self.names, self.modules, strict=True):
            if not is_gathered(module.weight, (module.out_features, module.in_features)):
                raise RuntimeError(f"the weight of {name} is not gathered while {self._users(name)}. {_REMEDY}")
            amaxes.append(weight_amax(module.weight))
        return _scale(torch.stack(amaxes).amax(), dtype)

    def _users(self, name: str) -> str:
        others = ", ".join(n for n in self.names if n != name)
        return f"{others} run, which share one global scale with it" if others else "it runs"


@torch.no_grad()
def expert_scales(w: torch.Tensor, dtype: torch.dtype, name: str = "fused experts") -> torch.Tensor:
    """global_scale_dec of each expert, FP32 [E]. w: [E, N, K]; `name` is for the error if it is not gathered."""
    if w.dim() != 3 or not is_gathered(w, w.shape):
        raise RuntimeError(f"the weights of {name} are not gathered while they run. {_REMEDY}")
    return _scale(weight_amax(w), dtype)


def is_gathered(w: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether `w` is a whole weight of that shape with its memory, not FSDP1's freed view nor a shard of FSDP1 or 2."""
    if hasattr(w, "placements") or w.shape != torch.Size(shape):  # a DTensor has placements
        return False
    return w.is_meta or w.numel() == 0 or w.untyped_storage().nbytes() > 0


def _scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Rounding is monotonic, so the amax of the rounded weight is the rounded amax of the weight.
    return global_scale_dec(amax.to(dtype))
