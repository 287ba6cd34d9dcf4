"""A layer's routed experts in W4A4 with residual: two grouped products, SwiGLU and quantization in between.

    sort pairs -> gate|up = rows W13^T -> silu(gate) * up, quantized with its residual -> W2^T, router's weight -> add

Only sizes are known to the host, so a CUDA graph can capture all of it.
"""

from typing import NamedTuple

import torch

from quads_kernels import activation, configs, launch
from quads_kernels.activation import Experts, Quantized
from quads_kernels.expert_sort import sort_by_expert
from quads_kernels.gemm_launch import gpu_name, processors
from quads_kernels.grouped import add_experts, grouped_gemm


class HiddenResidual(NamedTuple):
    """How the down projection's input is quantized: arguments of `quads_kernels.activation.quantize`."""

    kept: int = 0
    order: torch.Tensor | None = None
    """int32 [E, I/16], each expert's order of blocks, which `w2` must share; None: as they are."""
    keep: torch.Tensor | None = None
    """bool [E, I/16] or [E, I]: the residual is zeroed elsewhere; needs kept = I/16."""
    stats: torch.Tensor | None = None
    """FP32 [SLOTS, E, I/16] or [SLOTS, E, I]: sum of r^2 of each expert's rows is added."""


def fused_moe(
    rows: Quantized,
    w13,
    w2,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    hidden: HiddenResidual,
    native: bool,
    out_dtype: torch.dtype,
    hidden_dtype: torch.dtype,
    partial_dtype: torch.dtype = torch.float32,
    expert_map: torch.Tensor | None = None,
    tile: configs.Tile | None = None,
) -> torch.Tensor:
    """sum over a token's experts of weight * W2 (silu(gate) * up), as out_dtype [M, H].

    rows: quantized tokens [M, H], codes or sums, as in `quads_kernels.gemm.w4a4_gemm`; what the down projection gets
        is of the same kind. w13: experts' gate rows, then up rows, [E, 2I, H]; w2: [E, H, I]; each with `packed`,
        `block_scales` and `global_scale_dec` [E].
    topk_weights: FP32 [M, topk]. topk_ids: int32 or int64 [M, topk]; with expert_map (int32 [global experts], -1 for
        an expert of another rank) global numbers, else local ones. The result is this rank's share of the sum.
    hidden_dtype: of gate, up and their product. partial_dtype: of an expert's result before the sum, which is FP32.
    Raises ValueError on a wrong argument, RuntimeError where `native` was compiled to something else.
    """
    tokens, topk = topk_ids.shape
    device, experts = topk_ids.device, w13.packed.shape[0]
    launch.require_tensor("topk_weights", topk_weights, torch.float32, device, (tokens, topk))
    launch.require(
        w13.packed.shape[1] % 2 == 0, f"w13 holds gate and up rows, an even number; got {w13.packed.shape[1]}"
    )
    pairs = configs.local_pairs(tokens * topk, experts, None if expert_map is None else expert_map.numel())
    n, k = w13.packed.shape[1], 2 * w13.packed.shape[2]
    sm, sums = launch.capability(device), rows.sums is not None
    tile = tile or configs.choose_grouped(
        sm, native, pairs, experts, n, k, processors(device), gpu_name(device), sums=sums
    )
    plan = sort_by_expert(topk_ids, experts, tile.tokens, expert_map)
    gate_up = grouped_gemm(rows, w13, plan, tile, out_dtype=hidden_dtype, topk=topk, native=native)
    inner = activation.quantize(
        gate_up, swiglu=True, experts=Experts(plan.offsets), kept=hidden.kept, order=hidden.order, keep=hidden.keep,
        stats=hidden.stats, packed=not sums, sums=sums,
    )  # fmt: skip
    weight = topk_weights.contiguous().view(-1)
    partial = grouped_gemm(inner, w2, plan, tile, out_dtype=partial_dtype, pair_weight=weight, native=native)
    return add_experts(partial, plan, tokens, out_dtype)
