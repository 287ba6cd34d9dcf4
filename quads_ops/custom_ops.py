"""The quantizers as operators of torch.library, so that torch.compile and vLLM's graphs see each as one node.

`quads_ops.dispatch` is what to call; it chooses the backend and hands it over by name. None has a gradient: the actor's
straight-through estimator is in `quads_ops.fake_quant`.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from quads_ops import arguments, packed_activation, residual, weights
from quads_ops.formats import BLOCK_SIZE
from quads_ops.packed_activation import ExpertRows
from quads_ops.residual_layout import ResidualForm

STATISTICS_SLOTS, EXPERT_LINES = 512, 1024
"""Lines of statistics on a GPU, of a matrix and of all experts together: as many programs add without waiting for each
other. About 132 multiprocessors hold four programs each. Experts get twice as many, as the one with the most rows is
waited for."""


def expert_slots(experts: int) -> int:
    """Lines of statistics of one expert on a GPU: few where there are many experts, many where a rank has few."""
    return max(4, EXPERT_LINES // max(experts, 1))


@torch.library.custom_op("quads::fake_quantize_weight", mutates_args=())
def fake_quantize_weight(w: torch.Tensor, g: torch.Tensor, backend: str) -> torch.Tensor:
    arguments.scale_values("fake_quantize_weight", g)
    if backend == "torch":
        return weights.fake_quantize_weight(w, g).contiguous()  # as the fake is: torch keeps strides of w
    from quads_kernels import weight_qdq

    return weight_qdq.quantize(w, g, values=True, packed=False)[0]


@fake_quantize_weight.register_fake
def _(w, g, backend):
    return w.new_empty(w.shape)


@torch.library.custom_op("quads::quantize_weight", mutates_args=())
def quantize_weight(w: torch.Tensor, g: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    arguments.scale_values("quantize_weight", g)
    if backend == "torch":
        packed = weights.quantize_weight(w, g)
        return packed.packed.contiguous(), packed.block_scales.contiguous()
    from quads_kernels import weight_qdq

    return weight_qdq.quantize(w, g, values=False, packed=True)[1:]


@quantize_weight.register_fake
def _(w, g, backend):
    return _bytes(w, w.shape[-1] // 2), _bytes(w, w.shape[-1] // BLOCK_SIZE)


@torch.library.custom_op("quads::dequantize_weight", mutates_args=())
def dequantize_weight(
    packed: torch.Tensor, block_scales: torch.Tensor, g: torch.Tensor, dtype: torch.dtype, backend: str
) -> torch.Tensor:
    arguments.scale_values("dequantize_weight", g)
    if backend == "torch":
        return weights.dequantize_weight(weights.PackedWeight(packed, block_scales, g)).to(dtype).contiguous()
    from quads_kernels import weight_qdq

    return weight_qdq.dequantize(packed, block_scales, g, dtype)


@dequantize_weight.register_fake
def _(packed, block_scales, g, dtype, backend):
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)


@torch.library.custom_op("quads::compensate", mutates_args=("stats",))
def compensate(
    x: torch.Tensor,
    keep: torch.Tensor | None,
    stats: torch.Tensor | None,
    everything: bool,
    token_ratio: float,
    token_granularity: str,
    backend: str,
) -> torch.Tensor:
    """A residual mode in simple types: keep (bool [K/16] or [K]), else everything, else a mask per token of
    token_granularity ("" for none), else nothing."""
    if backend == "torch":
        mode = _residual(x, keep, everything, token_ratio, token_granularity)
        return residual.compensate(x, "w4a4", mode, stats=stats)
    from quads_kernels import activation

    kept = x.shape[-1] // BLOCK_SIZE if everything or keep is not None else 0
    lines = None if stats is None else stats.new_zeros((min(STATISTICS_SLOTS, max(1, len(x))), *stats.shape))
    out = activation.quantize(x, kept=kept, keep=keep, stats=lines, values=torch.float32, packed=False)
    if stats is not None:
        stats += lines.sum(0)
    return out.values


@compensate.register_fake
def _(x, keep, stats, everything, token_ratio, token_granularity, backend):
    return x.new_empty(x.shape, dtype=torch.float32)


@torch.library.custom_op("quads::compensate_grouped", mutates_args=("stats",))
def compensate_grouped(
    x: torch.Tensor, counts: Sequence[int], keep: torch.Tensor, stats: torch.Tensor | None, backend: str
) -> torch.Tensor:
    if backend == "torch":
        return residual.compensate_grouped(x, counts, keep, stats=stats)
    residual.check_groups(x, counts, keep, stats)
    from quads_kernels import activation

    offsets = torch.tensor((0, *accumulate(counts)), dtype=torch.int32).to(x.device)
    lines = None if stats is None else stats.new_zeros((expert_slots(len(stats)), *stats.shape))
    out = activation.quantize(
        x, kept=x.shape[-1] // BLOCK_SIZE, keep=keep, experts=activation.Experts(offsets), stats=lines,
        values=torch.float32, packed=False,
    )  # fmt: skip
    if stats is not None:
        stats += lines.sum(0)
    return out.values


@compensate_grouped.register_fake
def _(x, counts, keep, stats, backend):
    return x.new_empty(x.shape, dtype=torch.float32)


def _residual(x, keep, everything: bool, token_ratio: float, token_granularity: str) -> residual.Residual:
    if keep is not None:
        name = "channels" if keep.shape[-1] == x.shape[-1] else "blocks"
        return residual.ResidualMask(**{name: keep})
    if everything:
        return "all"
    return residual.TokenMask(token_ratio, token_granularity) if token_granularity else None


@torch.library.custom_op("quads::quantize_activation", mutates_args=("stats",))
def quantize_activation(
    x: torch.Tensor,
    order: torch.Tensor | None,
    keep: torch.Tensor | None,
    offsets: torch.Tensor | None,
    members: torch.Tensor | None,
    stats: torch.Tensor | None,
    kept: int,
    swiglu: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of a PackedActivation, where [M, 0] stands for no residual."""
    if backend == "torch":
        experts = None if offsets is None else ExpertRows(offsets, members)
        found = packed_activation.quantize_activation(x, ResidualForm(kept, order, keep), experts, stats, swiglu)
        out = packed_activation.PackedActivation(*(None if part is None else part.contiguous() for part in found))
    else:
        from quads_kernels import activation

        experts = None if offsets is None else activation.Experts(offsets, members)
        out = activation.quantize(
            x, kept=kept, order=order, keep=keep, experts=experts, stats=stats, swiglu=swiglu
        )  # fmt: skip
    none = x.new_empty((x.shape[0], 0), dtype=torch.uint8)
    rest = (out.residual_packed, out.residual_block_scales) if kept else (none, none.clone())
    return out.global_scale_dec, out.packed, out.block_scales, *rest


@quantize_activation.register_fake
def _(x, order, keep, offsets, members, stats, kept, swiglu, backend):
    m, blocks = x.shape[0], x.shape[-1] // (2 * BLOCK_SIZE if swiglu else BLOCK_SIZE)
    sizes = (blocks * 8, blocks, kept * 8, kept)
    return x.new_empty((m,), dtype=torch.float32), *(x.new_empty((m, n), dtype=torch.uint8) for n in sizes)


def _bytes(w: torch.Tensor, last: int) -> torch.Tensor:
    return w.new_empty((*w.shape[:-1], last), dtype=torch.uint8)
