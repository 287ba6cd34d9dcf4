"""Residual compensation in the layout of the kernels: blocks of K reordered, so that a mask is a prefix of K.

The weight is reordered once, when the mask changes; activations are reordered while they are quantized. The content of
a block does not change, so neither do its codes and scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quads_ops.formats import BLOCK_SIZE
from quads_ops.residual import Residual, ResidualMask, TokenMask
from quads_ops.weights import PackedWeight


@dataclass(frozen=True)
class ResidualForm:
    """Residual compensation in the layout of the kernels: the residual of the first `kept` blocks of K is kept."""

    kept: int = 0
    """Blocks of 16; 0 is plain W4A4."""
    order: torch.Tensor | None = None
    """int32 [K/16], or [E, K/16]: the source block of each block of K; None: K is not reordered."""
    keep: torch.Tensor | None = None
    """bool [K] or [K/16], or [E, ...]: within the kept blocks, the residual is zeroed elsewhere. Needs kept = K/16."""


@dataclass(frozen=True)
class CompensatedWeight:
    """A weight together with the residual form of its input, whose order of K it has."""

    weight: PackedWeight
    form: ResidualForm


def residual_form(residual: Residual | Sequence[ResidualMask], k: int) -> ResidualForm:
    """The layout for a residual mode.

    residual: None, "all", a ResidualMask, or a ResidualMask per expert, of equally many entries.
    A mask of blocks becomes an order with the kept blocks first. A mask of single channels cannot be a prefix: every
    block's residual is multiplied, which costs as much as "all". Raises ValueError on a TokenMask, for the same reason.
    """
    if residual is None:
        return ResidualForm()
    if isinstance(residual, str) and residual == "all":
        return ResidualForm(kept=k // BLOCK_SIZE)
    if isinstance(residual, TokenMask):
        raise ValueError(
            "a mask per token (scope: token) runs in torch only: on a GPU it saves no work, so take ratio 1, which is "
            "more accurate at the same cost, or scope: step"
        )
    single = isinstance(residual, ResidualMask)
    masks = [residual] if single else list(residual)
    _check_masks(masks, k)
    flags = torch.stack([mask.flags for mask in masks])
    if masks[0].granularity == "channel":
        return ResidualForm(kept=k // BLOCK_SIZE, keep=flags[0] if single else flags)
    kept = int(masks[0].flags.sum())
    if kept in (0, flags.shape[1]):
        return ResidualForm(kept=kept)
    # A stable sort keeps the source order within the two parts, so that neighbours stay neighbours in memory.
    order = torch.argsort((~flags).to(torch.uint8), dim=-1, stable=True).int()
    return ResidualForm(kept=kept, order=order[0] if single else order)


def compensated_weight(weight: PackedWeight, residual: Residual | Sequence[ResidualMask]) -> CompensatedWeight:
    """Bring a weight into the order that `residual` asks for. To be repeated when either changes."""
    form = residual_form(residual, 2 * weight.packed.shape[-1])
    return CompensatedWeight(weight if form.order is None else reorder_weight(weight, form.order), form)


def reorder_weight(weight: PackedWeight, order: torch.Tensor) -> PackedWeight:
    """Permute the blocks of K: block j of the result is block order[j] of `weight`. Bytes move, none changes.

    weight: [..., N, K]. order: integer [K/16], or [E, K/16] for a weight [E, N, K], a permutation of each line.
    Raises ValueError where the shapes do not fit or order is no permutation.
    """
    blocks = weight.block_scales.shape[-1]
    lead = weight.packed.shape[:-2]
    if order.shape[-1] != blocks or order.shape[:-1] not in ((), lead):
        raise ValueError(
            f"order has shape {tuple(order.shape)}; a weight of shape {(*weight.packed.shape[:-1], 16 * blocks)} needs "
            f"({blocks},), or {(*lead, blocks)}"
        )
    index = order.long()
    if not torch.equal(index.sort(-1).values, torch.arange(blocks, device=order.device).expand_as(index)):
        raise ValueError(f"order must be a permutation of 0..{blocks - 1} along its last dimension")
    index = index.unsqueeze(-2).expand(weight.block_scales.shape)
    codes = weight.packed.unflatten(-1, (blocks, BLOCK_SIZE // 2))
    codes = codes.gather(-2, index.unsqueeze(-1).expand(codes.shape)).flatten(-2)
    return PackedWeight(codes, weight.block_scales.gather(-1, index), weight.global_scale_dec)


def residual_of(form: ResidualForm, k: int, expert: int = 0) -> Residual:
    """The residual mode, in source order, that a form stands for; `expert` picks a line where there are several."""
    if form.kept == 0:
        return None
    if form.keep is not None:
        keep = form.keep if form.keep.dim() == 1 else form.keep[expert]
        return ResidualMask(channels=keep) if keep.shape[0] == k else ResidualMask(blocks=keep)
    if form.kept == k // BLOCK_SIZE:
        return "all"
    blocks = torch.arange(k // BLOCK_SIZE, device=None if form.order is None else form.order.device)
    flags = torch.zeros_like(blocks, dtype=torch.bool)
    flags[source_blocks(form, blocks, expert)[: form.kept]] = True
    return ResidualMask(blocks=flags)


def source_blocks(form: ResidualForm, blocks: torch.Tensor, expert: int = 0) -> torch.Tensor:
    """Source block of each of the given blocks, int64."""
    if form.order is None:
        return blocks.long()
    order = form.order if form.order.dim() == 1 else form.order[expert]
    return order.long()[blocks.long()]


def reorder_columns(x: torch.Tensor, form: ResidualForm, expert: int = 0) -> torch.Tensor:
    """x [M, K] in source order -> in the order of the form."""
    if form.order is None:
        return x
    blocks = torch.arange(x.shape[-1] // BLOCK_SIZE, device=x.device)
    return x.unflatten(-1, (-1, BLOCK_SIZE))[:, source_blocks(form, blocks, expert)].flatten(-2)


def _check_masks(masks: list[ResidualMask], k: int) -> None:
    if not masks or any(not isinstance(mask, ResidualMask) for mask in masks):
        raise ValueError(f'residual must be None, "all", a ResidualMask or one per expert; got {masks!r}')
    granularity = masks[0].granularity
    if any(mask.granularity != granularity for mask in masks):
        raise ValueError("the experts' masks must be all of blocks or all of channels")
    size = k if granularity == "channel" else k // BLOCK_SIZE
    if any(mask.flags.shape[0] != size for mask in masks):
        raise ValueError(f"the {granularity} mask of K={k} needs {size} entries, got {masks[0].flags.shape[0]}")
    counts = {int(mask.flags.sum()) for mask in masks}
    if granularity == "block" and len(counts) > 1:
        raise ValueError(f"the experts' masks must keep equally many blocks, got {sorted(counts)}")
