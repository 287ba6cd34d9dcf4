"""Packed activations with their packed residual, in torch: what the Triton kernels of `quads_kernels.activation` do.

Slow and plain; on a CPU nothing multiplies packed activations but the tests.
"""

from typing import NamedTuple

import torch

from quads_ops import nvfp4
from quads_ops.formats import BLOCK_SIZE
from quads_ops.moe_reference import gated
from quads_ops.residual import token_scale
from quads_ops.residual_layout import ResidualForm


class PackedActivation(NamedTuple):
    """Quantized tokens and the kept part of their residual, in the order of a `ResidualForm`."""

    global_scale_dec: torch.Tensor
    """FP32 [M]"""
    packed: torch.Tensor
    """uint8 [M, K/2]: two E2M1 codes a byte, the even k in the low nibble"""
    block_scales: torch.Tensor
    """uint8 [M, K/16]: E4M3 bytes"""
    residual_packed: torch.Tensor | None
    """uint8 [M, kept * 8]: codes of the residual's first `kept` blocks; None where kept is 0"""
    residual_block_scales: torch.Tensor | None
    """uint8 [M, kept]"""


class ExpertRows(NamedTuple):
    """Which rows belong to which expert, for forms and statistics that differ by expert."""

    offsets: torch.Tensor
    """int32 [E + 1]: expert e has the members offsets[e] .. offsets[e + 1]."""
    members: torch.Tensor | None = None
    """int32 [M]: row number of each member; None where the rows themselves are sorted by expert."""


def quantize_activation(
    x: torch.Tensor,
    form: ResidualForm,
    experts: ExpertRows | None = None,
    stats: torch.Tensor | None = None,
    swiglu: bool = False,
) -> PackedActivation:
    """The reference. Arguments as in `quads_ops.dispatch.quantize_activation`; rows of no expert become zeros."""
    if swiglu:
        x = gated(x)
    if experts is None:
        return _quantize_rows(x, form, stats)
    m, blocks = x.shape[0], x.shape[-1] // BLOCK_SIZE
    byte = dict(dtype=torch.uint8, device=x.device)
    out = PackedActivation(
        torch.zeros(m, dtype=torch.float32, device=x.device),
        torch.zeros(m, blocks * 8, **byte),
        torch.zeros(m, blocks, **byte),
        torch.zeros(m, form.kept * 8, **byte) if form.kept else None,
        torch.zeros(m, form.kept, **byte) if form.kept else None,
    )
    limits = experts.offsets.tolist()
    members = torch.arange(limits[-1], device=x.device) if experts.members is None else experts.members.long()
    for expert, (first, last) in enumerate(zip(limits[:-1], limits[1:], strict=True)):
        rows = members[first:last]
        line = ResidualForm(form.kept, _line(form.order, expert), _line(form.keep, expert))
        part = _quantize_rows(x[rows], line, None if stats is None else stats[:, expert])
        for whole, piece in zip(out, part, strict=True):
            if whole is not None:
                whole[rows] = piece
    return out


def sums(rows: PackedActivation) -> torch.Tensor:
    """(e2m1 * s8 of the activation + the same of its residual, where kept) * 2^-10, FP16 [M, K], the form's blocks in
    the order of `quads_kernels.sum_order`.

    What `sums` of `quads_kernels.activation.quantize` must equal: each term is exact in FP16, the sum is rounded once,
    to nearest even, and NaN where the scale byte is 0x7F. The global scale is not in it.
    """
    total = nvfp4.unscaled(nvfp4.unpack(rows.packed), rows.block_scales)
    if rows.residual_packed is not None:
        total[:, : 2 * rows.residual_packed.shape[1]] += nvfp4.unscaled(
            nvfp4.unpack(rows.residual_packed), rows.residual_block_scales
        )
    from quads_kernels.sum_order import in_sum_order

    return in_sum_order((total * 2.0**-10).half())


def _quantize_rows(x: torch.Tensor, form: ResidualForm, stats: torch.Tensor | None) -> PackedActivation:
    blocks = x.float().unflatten(-1, (-1, BLOCK_SIZE))
    g = token_scale(x)
    codes, scales = nvfp4.quantize(x, g)
    rest = blocks - nvfp4.dequantize(codes, scales, g).view_as(blocks)
    if stats is not None:
        _add_energy(stats[0], rest)
    if form.keep is not None:
        rest = torch.where(form.keep.reshape(blocks.shape[1], -1), rest, 0.0)
    order = slice(None) if form.order is None else form.order.long()
    codes, scales, rest = codes.view_as(blocks)[:, order].flatten(-2), scales[:, order], rest[:, order]
    if not form.kept:
        return PackedActivation(g, nvfp4.pack(codes), scales, None, None)
    codes_r, scales_r = nvfp4.quantize(rest[:, : form.kept].flatten(-2), g)
    return PackedActivation(g, nvfp4.pack(codes), scales, nvfp4.pack(codes_r), scales_r)


def _add_energy(total: torch.Tensor, rest: torch.Tensor) -> None:
    """Add sum r^2 over tokens to FP32 [K/16] or [K]; a token that holds NaN or Inf does not count."""
    energy = rest.square().nan_to_num(nan=0.0, posinf=torch.inf).sum(0)
    total += energy.sum(-1) if total.numel() == energy.shape[0] else energy.flatten()


def _line(per_expert: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return per_expert if per_expert is None or per_expert.dim() == 1 else per_expert[expert]
