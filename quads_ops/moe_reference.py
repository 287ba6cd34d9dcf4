"""Routed experts in W4A4 with residual compensation: the definition, in torch, one expert after the other.

Roundings are those of a model in the dtype of x: gate and up, silu(gate), their product. An expert's result is FP32,
and so is the sum over a token's experts, in the order of topk.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quads_ops.residual import compensate
from quads_ops.residual_layout import ResidualForm, reorder_columns, residual_of
from quads_ops.weights import PackedWeight, dequantize_weight


def moe(
    x: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    form13: ResidualForm,
    stats13: torch.Tensor | None,
    form2: ResidualForm,
    stats2: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Arguments as in `quads_ops.gemm.w4a4_moe`, with the weights in the order of their forms."""
    k = x.shape[-1]
    values = compensate(x, "w4a4", residual_of(form13, k), stats=None if stats13 is None else stats13[0])
    values = reorder_columns(values, form13)
    local = local_experts(topk_ids, expert_map)
    parts = torch.zeros(*topk_ids.shape, w2.packed.shape[1], dtype=torch.float32, device=x.device)
    for expert in range(len(w13.packed)):
        token, slot = (local == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        gate_up = (values[token] @ dequantize_weight(_one(w13, expert)).t()).to(x.dtype)
        stats = None if stats2 is None else stats2[0, expert]
        hidden = compensate(gated(gate_up), "w4a4", residual_of(form2, gate_up.shape[-1] // 2, expert), stats=stats)
        result = reorder_columns(hidden, form2, expert) @ dequantize_weight(_one(w2, expert)).t()
        parts[token, slot] = result * topk_weights[token, slot, None]
    total = parts.new_zeros(parts.shape[0], parts.shape[2])
    for slot in range(topk_ids.shape[1]):
        total += parts[:, slot]
    return total.to(out_dtype)


def gated(gate_up: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor] = F.silu) -> torch.Tensor:
    """act(gate) * up of [M, 2I] = [gate | up], rounded to its dtype after act and after the product, as models do.

    The one definition: the rollout's torch path and the reference of the kernels call it; the fused kernel
    (`quads_kernels.activation_tile.swiglu`) rounds at the same two places.
    """
    gate, up = gate_up.chunk(2, -1)
    return act(gate) * up


def local_experts(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """This rank's number of each expert, int64, -1 where it has none."""
    ids = topk_ids.long()
    if expert_map is None:
        return ids
    return torch.where(ids < 0, -1, expert_map.long()[ids.clamp(min=0)])


def _one(weight: PackedWeight, expert: int) -> PackedWeight:
    return PackedWeight(*(part[expert] for part in weight))
