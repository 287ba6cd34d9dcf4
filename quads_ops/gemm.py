"""W4A4 products with residual compensation, as the rest of the project calls them: a linear layer, and routed experts.

    weight = compensated_weight(packed_weight, residual)      once per weight sync: K reordered, so the mask is a prefix
    y = w4a4_linear(x, weight, bias=bias)                     each step: quantizes x and its residual, multiplies

Both are registered as `quads::w4a4_linear` and `quads::w4a4_moe` (torch.library), so torch.compile and vLLM's graphs
see one operator each. The backend (`quads_ops.dispatch`) is "torch" (any device, the definition), "emulated" (Triton,
FP16 tensor cores) or "native" (Triton, NVFP4 tensor cores); they agree but for the order of sums, and but for the
rounding of a residual's sum on "emulated" (`quads_ops.backends.sums_residual`). See `quads_kernels.gemm`,
`quads_kernels.gemm_sums`, `quads_kernels.moe`, docs/kernels.md.
"""

import torch

from quads_ops import arguments, dispatch, moe_reference, nvfp4
from quads_ops.residual import compensate
from quads_ops.residual_layout import (
    CompensatedWeight,
    ResidualForm,
    compensated_weight,
    reorder_columns,
    reorder_weight,
    residual_form,
    residual_of,
)
from quads_ops.weights import PackedWeight

__all__ = [
    "CompensatedWeight",
    "ResidualForm",
    "compensated_weight",
    "reorder_weight",
    "residual_form",
    "w4a4_linear",
    "w4a4_moe",
]


def w4a4_linear(
    x: torch.Tensor,
    weight: CompensatedWeight,
    *,
    bias: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    sum_residual: bool | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """(Xq + Rq) W^T + bias: [..., K] -> [..., N].

    x: FP32, FP16 or BF16. weight: [N, K], from `compensated_weight`; its global_scale_dec holds one number, or one for
        each row (matrices that were joined along N and scaled apart).
    bias: [N], added in FP32. out_dtype: by default that of x.
    stats: FP32 [SLOTS, K/16] or [SLOTS, K]; the sum over tokens of r^2 is added in place, spread over the lines.
    sum_residual: add activation and residual in FP16 and multiply once (backend emulated only), or, False, multiply
        twice, which is exact; None: what `quads_ops.backends.sums_residual` chooses.
    backend: "torch", "emulated" or "native"; None: what `quads_ops.dispatch` chooses.
    Raises TypeError or ValueError on a wrong argument, ValueError where the backend cannot run here.
    """
    arguments.tensor("w4a4_linear: x", x, arguments.FLOATS)
    n, k = arguments.compensated_weight("w4a4_linear", "weight", weight, 2, x.device)
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x
    arguments.activation("w4a4_linear", rows, k)
    if bias is not None:
        arguments.tensor("w4a4_linear: bias", bias, arguments.FLOATS, (n,), x.device)
    arguments.statistics("w4a4_linear", stats, k, (None,), x.device)
    arguments.out_dtype("w4a4_linear", out_dtype or x.dtype)
    form, packed = weight.form, weight.weight
    backend = dispatch.choose_gemm(rows, packed.packed.shape[-2], backend)
    y = _linear(
        rows, *packed, form.order, form.keep, stats, bias, form.kept, out_dtype or x.dtype, sum_residual, backend,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], y.shape[-1])


def w4a4_moe(
    x: torch.Tensor,
    w13: CompensatedWeight,
    w2: CompensatedWeight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    stats13: torch.Tensor | None = None,
    stats2: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    sum_residual: bool | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Routed experts, sum over a token's experts of weight * W2 (silu(gate) * up): [M, H] -> [M, H].

    x: [M, H], FP32, FP16 or BF16; gate, up and their product are rounded to its dtype.
    w13: [E, 2I, H], gate rows before up rows, one residual form for all experts. w2: [E, H, I], one form, or one per
        expert. Both have a global_scale_dec per expert.
    topk_weights: FP32 [M, topk]. topk_ids: int32 or int64 [M, topk]: local experts, or with expert_map (int32 [global
        experts]: the local number, -1 for another rank's) global ones. The result is this rank's share of the sum.
    stats13: FP32 [SLOTS, H/16] or [SLOTS, H]. stats2: FP32 [SLOTS, E, I/16] or [SLOTS, E, I]. As in `w4a4_linear`.
    out_dtype, sum_residual, backend: as in `w4a4_linear`.
    Raises TypeError or ValueError on a wrong argument, ValueError where the backend cannot run here. Whether topk_ids
    are experts that exist is checked on a CPU only.
    """
    _check_moe(x, w13, w2, topk_weights, topk_ids, expert_map, stats13, stats2)
    arguments.out_dtype("w4a4_moe", out_dtype or x.dtype)
    backend = dispatch.choose_gemm(x, w13.weight.packed.shape[-2], backend)
    return _moe(
        x, *w13.weight, *w2.weight, topk_weights, topk_ids, expert_map, w13.form.order, w13.form.keep, stats13,
        w2.form.order, w2.form.keep, stats2, w13.form.kept, w2.form.kept, out_dtype or x.dtype, sum_residual, backend,
    )  # fmt: skip


def linear_reference(
    x: torch.Tensor,
    weight: PackedWeight,
    form: ResidualForm,
    bias: torch.Tensor | None,
    stats: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The definition, in torch: one FP32 product of compensated activations with the dequantized weight.

    x: [M, K] in source order. weight: [N, K] in the order of the form. Other arguments as in `w4a4_linear`.
    """
    values = compensate(x, "w4a4", residual_of(form, x.shape[-1]), stats=None if stats is None else stats[0])
    g = weight.global_scale_dec.reshape(-1, 1)
    w = nvfp4.unscaled(nvfp4.unpack(weight.packed), weight.block_scales) * g
    y = reorder_columns(values, form) @ w.t()
    return (y if bias is None else y + bias.float()).to(out_dtype)


@torch.library.custom_op("quads::w4a4_linear", mutates_args=("stats",))
def _linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale_dec: torch.Tensor,
    order: torch.Tensor | None,
    keep: torch.Tensor | None,
    stats: torch.Tensor | None,
    bias: torch.Tensor | None,
    kept: int,
    out_dtype: torch.dtype,
    sum_residual: bool | None,
    backend: str,
) -> torch.Tensor:
    weight = PackedWeight(packed, block_scales, global_scale_dec)
    # Chosen here, where sizes are plain numbers: as an argument it would make torch.compile trace two graphs.
    sums = dispatch.takes_sums(backend, x.device, kept > 0, out_dtype, sum_residual)
    if backend == "torch":
        return linear_reference(x, weight, ResidualForm(kept, order, keep), bias, stats, out_dtype)
    from quads_kernels.gemm import w4a4_gemm

    rows = _quantized(x, kept, order, keep, stats, sums)
    return w4a4_gemm(rows, weight, bias=bias, out_dtype=out_dtype, native=backend == "native")


@_linear.register_fake
def _(x, packed, block_scales, global_scale_dec, order, keep, stats, bias, kept, out_dtype, sum_residual, backend):
    return x.new_empty((x.shape[0], packed.shape[0]), dtype=out_dtype)


@torch.library.custom_op("quads::w4a4_moe", mutates_args=("stats13", "stats2"))
def _moe(
    x: torch.Tensor,
    packed13: torch.Tensor,
    block_scales13: torch.Tensor,
    global_scale_dec13: torch.Tensor,
    packed2: torch.Tensor,
    block_scales2: torch.Tensor,
    global_scale_dec2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    order13: torch.Tensor | None,
    keep13: torch.Tensor | None,
    stats13: torch.Tensor | None,
    order2: torch.Tensor | None,
    keep2: torch.Tensor | None,
    stats2: torch.Tensor | None,
    kept13: int,
    kept2: int,
    out_dtype: torch.dtype,
    sum_residual: bool | None,
    backend: str,
) -> torch.Tensor:
    _check_ids(topk_ids, len(packed13), expert_map)
    w13 = PackedWeight(packed13, block_scales13, global_scale_dec13)
    w2 = PackedWeight(packed2, block_scales2, global_scale_dec2)
    sums = dispatch.takes_sums(backend, x.device, kept13 + kept2 > 0, out_dtype, sum_residual)
    if backend == "torch":
        return moe_reference.moe(
            x, w13, w2, topk_weights, topk_ids, expert_map, ResidualForm(kept13, order13, keep13), stats13,
            ResidualForm(kept2, order2, keep2), stats2, out_dtype,
        )  # fmt: skip
    from quads_kernels.moe import HiddenResidual, fused_moe

    rows = _quantized(x, kept13, order13, keep13, stats13, sums)
    experts = len(packed2)
    hidden = HiddenResidual(kept2, _per_expert(order2, experts), _per_expert(keep2, experts), stats2)
    return fused_moe(
        rows, w13, w2, topk_weights, topk_ids, hidden=hidden,
        native=backend == "native", out_dtype=out_dtype, hidden_dtype=x.dtype, expert_map=expert_map,
    )  # fmt: skip


@_moe.register_fake
def _(x, packed13, block_scales13, global_scale_dec13, packed2, *rest):
    return x.new_empty((x.shape[0], packed2.shape[1]), dtype=rest[-3])


def _quantized(x, kept: int, order, keep, stats, sums: bool):
    """Tokens as codes, or as sums."""
    from quads_kernels import activation

    return activation.quantize(x, kept=kept, order=order, keep=keep, stats=stats, packed=not sums, sums=sums)


def _per_expert(line: torch.Tensor | None, experts: int) -> torch.Tensor | None:
    """[n] -> [E, n]; what has a line per expert already stays."""
    return line if line is None or line.dim() == 2 else line.expand(experts, -1)


def _check_moe(x, w13, w2, topk_weights, topk_ids, expert_map, stats13, stats2) -> None:
    op = "w4a4_moe"
    arguments.activation(op, x)
    device = x.device
    experts, rows, hidden = arguments.compensated_weight(op, "w13", w13, 3, device)
    experts2, out, inner = arguments.compensated_weight(op, "w2", w2, 3, device)
    if (experts2, out, 2 * inner) != (experts, hidden, rows):
        raise ValueError(
            f"{op}: w13 [E, 2I, H] = {[experts, rows, hidden]} and w2 [E, H, I] = {[experts2, out, inner]} do not "
            "belong together"
        )
    arguments.activation(op, x, hidden)
    if any(line is not None and line.dim() != 1 for line in (w13.form.order, w13.form.keep)):
        raise ValueError("w13 needs one residual form for all experts: its input is quantized once per token, not pair")
    arguments.tensor(f"{op}: topk_ids", topk_ids, arguments.INTEGERS, (x.shape[0], None), device)
    arguments.tensor(f"{op}: topk_weights", topk_weights, torch.float32, topk_ids.shape, device)
    if expert_map is not None:
        arguments.tensor(f"{op}: expert_map", expert_map, arguments.INTEGERS, (None,), device)
    arguments.statistics(f"{op} (stats13)", stats13, hidden, (None,), device)
    arguments.statistics(f"{op} (stats2)", stats2, inner, (None, experts), device)


def _check_ids(topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> None:
    """Raise ValueError on an expert that does not exist, which would count for nothing. Negative ids are padding."""
    if topk_ids.device.type != "cpu" or not topk_ids.numel():
        return
    count, largest = experts if expert_map is None else len(expert_map), int(topk_ids.max())
    if largest >= count:
        raise ValueError(f"w4a4_moe: topk_ids holds expert {largest}; there are {count}, numbered from 0")
