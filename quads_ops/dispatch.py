"""The quantizers, on every device: what the actor and the rollout call.

On a CPU they run `quads_ops` (compiled C++, or torch), on a GPU the Triton kernels; see `quads_ops.backends` for the
choice, and how to demand one. Each is one operator to torch.compile. Results are equal in every bit on all backends,
but for statistics, whose sums are taken in another order. The products are in `quads_ops.gemm`.
"""

from collections.abc import Sequence

import torch

from quads_ops import arguments, custom_ops
from quads_ops.backends import BACKENDS, GEMM, can_run, choose, describe, set_backend, sums_residual, takes_sums
from quads_ops.formats import BLOCK_SIZE
from quads_ops.packed_activation import ExpertRows, PackedActivation
from quads_ops.residual import Residual, ResidualMask, TokenMask
from quads_ops.residual_layout import ResidualForm
from quads_ops.weights import PackedWeight

__all__ = [
    "BACKENDS",
    "GEMM",
    "can_run",
    "choose_gemm",
    "compensate",
    "compensate_grouped",
    "dequantize_weight",
    "describe",
    "fake_quantize_weight",
    "new_statistics",
    "quantize_activation",
    "quantize_weight",
    "set_backend",
    "sums_residual",
    "takes_sums",
]


def fake_quantize_weight(w: torch.Tensor, g: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Quantize and dequantize each matrix with its scale, rounded once to the dtype of w.

    w: [..., N, K], FP32, FP16 or BF16. g: FP32 [...], positive. backend: see `quads_ops.backends.choose`.
    Raises TypeError where one is no tensor, ValueError on a wrong dtype or device, where K is not a multiple of 16 or
    the shape of g not w.shape[:-2], where g on a CPU is not positive or infinite (NaN makes every value NaN), or the
    backend cannot run.
    """
    arguments.weight_and_scale("fake_quantize_weight", w, g)
    return custom_ops.fake_quantize_weight(w, g, _for(w, "fake_quantize_weight", backend))


def quantize_weight(w: torch.Tensor, g: torch.Tensor, *, backend: str | None = None) -> PackedWeight:
    """Packed codes and block scales. Arguments and errors as for `fake_quantize_weight`."""
    arguments.weight_and_scale("quantize_weight", w, g)
    return PackedWeight(*custom_ops.quantize_weight(w, g, _for(w, "quantize_weight", backend)), g)


def dequantize_weight(
    weight: PackedWeight, dtype: torch.dtype = torch.float32, *, backend: str | None = None
) -> torch.Tensor:
    """(e2m1 * s8) * g as [..., N, K], rounded once to dtype (FP32, FP16 or BF16).

    Raises TypeError or ValueError on a wrong argument.
    """
    arguments.packed_weight("dequantize_weight", weight)
    arguments.out_dtype("dequantize_weight", dtype, "dtype")
    backend = choose("dequantize_weight", weight.packed.device, dtype, 2 * weight.packed.shape[-1], backend=backend)
    return custom_ops.dequantize_weight(*weight, dtype, backend)


def compensate(
    x: torch.Tensor, residual: Residual = None, *, stats: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """Xq + Rq as FP32 [M, K], for an ordinary GEMM. See `quads_ops.residual.compensate`, mode w4a4.

    x: FP32, FP16 or BF16. stats: FP32 [K/16] or [K]; the sum over tokens of r^2, before the mask, is added in place.
    Raises TypeError or ValueError on a wrong argument.
    """
    arguments.activation("compensate", x)
    arguments.statistics("compensate", stats, x.shape[-1], (), x.device)
    keep, ratio, granularity = None, 0.0, ""
    if isinstance(residual, ResidualMask):
        keep = residual.flags
    elif isinstance(residual, TokenMask):
        ratio, granularity = residual.ratio, residual.granularity
    elif residual not in (None, "all"):
        raise ValueError(f'residual must be None, "all", a ResidualMask or a TokenMask; got {residual!r}')
    backend = choose("compensate", x.device, x.dtype, x.shape[-1], bool(granularity), backend)
    return custom_ops.compensate(x, keep, stats, residual == "all", ratio, granularity, backend)


def compensate_grouped(
    x: torch.Tensor,
    counts: Sequence[int],
    keep: torch.Tensor,
    *,
    stats: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Xq + Rq of rows sorted by group, each with its own mask: FP32 [M, K]. See `quads_ops.residual`.

    Raises TypeError or ValueError on a wrong argument.
    """
    arguments.activation("compensate_grouped", x)
    arguments.tensor("compensate_grouped: keep", keep, torch.bool, device=x.device)
    arguments.statistics("compensate_grouped", stats, x.shape[-1], (len(counts),), x.device)
    backend = choose("compensate", x.device, x.dtype, x.shape[-1], backend=backend)
    return custom_ops.compensate_grouped(x, counts, keep, stats, backend)


def quantize_activation(
    x: torch.Tensor,
    form: ResidualForm,
    *,
    experts: ExpertRows | None = None,
    stats: torch.Tensor | None = None,
    swiglu: bool = False,
    backend: str | None = None,
) -> PackedActivation:
    """Quantize tokens and the kept part of their residual, packed, for a W4A4 product.

    x: [M, K], FP32, FP16 or BF16; with swiglu [M, 2K] = [gate | up], and silu(gate) * up is quantized, rounded to the
        dtype of x after silu and after the product.
    form: order of the blocks and what is kept; with experts, order and keep have a line for each.
    experts: rows by expert (the input of the down projection). Rows of no expert are undefined.
    stats: FP32, from `new_statistics`: [SLOTS, K/16] or [SLOTS, K], or [SLOTS, E, ...]; sum r^2 is added, in the order
        of x, spread over the lines.
    Raises TypeError where an argument is no tensor or no form, ValueError on a wrong dtype, device or shape, or where
    the backend cannot run.
    """
    arguments.activation("quantize_activation", x)
    k = x.shape[-1] // 2 if swiglu else x.shape[-1]
    count = _number_of_experts(experts, x)
    lead = (None,) if count is None else (None, count)
    arguments.residual_form("quantize_activation", form, k, count, x.device)
    arguments.statistics("quantize_activation", stats, k, lead, x.device)
    backend = choose("quantize_activation", x.device, x.dtype, k, backend=backend)
    offsets, members = (None, None) if experts is None else experts
    g, packed, scales, packed_r, scales_r = custom_ops.quantize_activation(
        x, form.order, form.keep, offsets, members, stats, form.kept, swiglu, backend
    )
    return PackedActivation(g, packed, scales, *((packed_r, scales_r) if form.kept else (None, None)))


def new_statistics(k: int, granularity: str, device: torch.device, experts: int | None = None) -> torch.Tensor:
    """Zeroed statistics for `quantize_activation` and the products; their sum over dimension 0 is the score.

    FP32 [SLOTS, K/16] ("block") or [SLOTS, K] ("channel"), or [SLOTS, E, ...] with experts.
    """
    size = k // BLOCK_SIZE if granularity == "block" else k
    on_gpu = torch.device(device).type == "cuda"
    if experts is None:
        shape = (custom_ops.STATISTICS_SLOTS if on_gpu else 1, size)
    else:
        shape = (custom_ops.expert_slots(experts) if on_gpu else 1, experts, size)
    return torch.zeros(shape, dtype=torch.float32, device=device)  # vLLM loads models with another default dtype


def choose_gemm(x: torch.Tensor, n: int, backend: str | None = None) -> str:
    """The backend of a W4A4 product of activations x [M, K] with a weight of n rows; see `backends.choose`."""
    return choose(GEMM, x.device, x.dtype, x.shape[-1], backend=backend)


def _number_of_experts(experts: ExpertRows | None, x: torch.Tensor) -> int | None:
    if experts is None:
        return None
    arguments.tensor("quantize_activation: experts.offsets", experts.offsets, torch.int32, (None,), x.device)
    if experts.members is not None:
        arguments.tensor("quantize_activation: experts.members", experts.members, torch.int32, (None,), x.device)
    return experts.offsets.shape[0] - 1


def _for(w: torch.Tensor, op: str, backend: str | None) -> str:
    return choose(op, w.device, w.dtype, w.shape[-1], backend=backend)
