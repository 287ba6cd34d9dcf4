"""Activations in NVFP4 with residual compensation.

A token x is quantized with its own global scale g; the residual r = x - Xq, where a mask selects it, is quantized a
second time with the same g and its own block scales, and the rollout multiplies the same weights with both:
Xq W + Rq W = (Xq + Rq) W. `compensate` gives Xq + Rq, for which one ordinary GEMM does.

A mask is chosen per layer from statistics (sum of r^2) gathered while generating and kept frozen between two weight
syncs (`ResidualMask`), or anew for each token (`TokenMask`). It selects blocks of 16 channels, or single channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from quads_ops import cpu_qdq, nvfp4
from quads_ops.formats import BLOCK_SIZE

GRANULARITIES = ("block", "channel")
MODES = ("w4a16", "w4a4")


@dataclass(frozen=True)
class ResidualMask:
    """Where the residual is kept, for every token of a layer. Exactly one of the two is set."""

    blocks: torch.Tensor | None = None
    """bool [K/16]"""
    channels: torch.Tensor | None = None
    """bool [K]"""

    def __post_init__(self):
        if (self.blocks is None) == (self.channels is None):
            raise ValueError("ResidualMask: set either blocks (bool [K/16]) or channels (bool [K]), not both or none")
        if not isinstance(self.flags, torch.Tensor):
            raise TypeError(f"ResidualMask.{self.granularity}s must be a torch.Tensor, got {type(self.flags).__name__}")
        if self.flags.dtype != torch.bool or self.flags.dim() != 1:
            raise ValueError(
                f"ResidualMask.{self.granularity}s must be a 1-D bool tensor, got {self.flags.dtype} of shape "
                f"{tuple(self.flags.shape)}"
            )

    @property
    def granularity(self) -> str:
        return "channel" if self.blocks is None else "block"

    @property
    def flags(self) -> torch.Tensor:
        return self.channels if self.blocks is None else self.blocks


@dataclass(frozen=True)
class TokenMask:
    """The residual is kept, for each token, in the `ratio` of its blocks or channels where its energy is largest."""

    ratio: float
    granularity: str = "block"

    def __post_init__(self):
        _check_ratio(self.ratio)
        _check_granularity(self.granularity)


Residual = ResidualMask | TokenMask | str | None


def compensate(
    x: torch.Tensor, mode: str, residual: Residual = None, *, stats: torch.Tensor | None = None
) -> torch.Tensor:
    """What the rollout's activation is worth after quantization, as FP32 [M, K].

    x: [M, K], any float dtype.
    mode: "w4a4" quantizes; "w4a16" leaves activations as they are.
    residual: None (plain W4A4), "all" (ratio 1), a ResidualMask, or a TokenMask.
    stats: FP32 [K/16] or [K]; the sum over tokens of r^2, before the mask, is added in place.
    Raises ValueError on a wrong shape, mode or mask.
    """
    if mode == "w4a16":
        return x.float()
    if mode != "w4a4":
        raise ValueError(f"compensate: mode {mode!r} quantizes no activation; use one of {MODES}")
    _check_tokens(x)
    _check_residual(residual, x.shape[-1])
    if stats is not None:
        _check_stats(stats, x.shape[-1], ())
    if not isinstance(residual, TokenMask) and cpu_qdq.takes(x):
        return _compiled(x, residual, stats)
    return reference_compensate(x, residual, stats=stats)


def reference_compensate(
    x: torch.Tensor, residual: Residual = None, *, stats: torch.Tensor | None = None
) -> torch.Tensor:
    """`compensate` in mode w4a4, in torch on any device. Sums of statistics may differ from it in their last bits."""
    x = x.detach().float()
    g = token_scale(x)
    quantized = nvfp4.qdq(x, g)
    if residual is None and stats is None:
        return quantized
    rest = x - quantized
    if stats is not None:
        stats += _statistics(rest, stats.shape[-1])
    if residual is None:
        return quantized
    return quantized + nvfp4.qdq(_masked(rest, residual), g)


def compensate_grouped(
    x: torch.Tensor, counts: Sequence[int], keep: torch.Tensor, *, stats: torch.Tensor | None = None
) -> torch.Tensor:
    """`compensate` with a mask for each group of rows (the tokens of one expert): FP32 [M, K].

    x: [M, K], sorted by group; counts: rows of each group, adding up to M; keep: bool [groups, K/16] or [groups, K].
    stats: FP32 of the shape of keep; each group's sum of r^2 is added in place. Raises ValueError on a wrong shape.
    """
    check_groups(x, counts, keep, stats)
    k = x.shape[-1]
    if cpu_qdq.takes(x):
        kind = cpu_qdq.KEEP_CHANNELS if keep.shape[-1] == k else cpu_qdq.KEEP_BLOCKS
        return cpu_qdq.compensate(x, kind, keep, stats, counts)
    granularity = "channel" if keep.shape[-1] == k else "block"
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for group, rows in enumerate(x.split(list(counts))):
        mask = ResidualMask(**{f"{granularity}s": keep[group]})
        start = sum(counts[:group])
        out[start : start + rows.shape[0]] = reference_compensate(
            rows, mask, stats=None if stats is None else stats[group]
        )
    return out


def check_groups(x: torch.Tensor, counts: Sequence[int], keep: torch.Tensor, stats: torch.Tensor | None) -> None:
    """Raise ValueError unless the arguments of `compensate_grouped` fit together: a kernel would write elsewhere."""
    _check_tokens(x)
    k = x.shape[-1]
    if (
        keep.dtype != torch.bool
        or not keep.dim()
        or keep.shape[0] != len(counts)
        or keep.shape[1:] not in ((k,), (k // BLOCK_SIZE,))
    ):
        raise ValueError(
            f"the masks of {len(counts)} groups with K={k} are bool [{len(counts)}, {k // BLOCK_SIZE}] or "
            f"[{len(counts)}, {k}]; got {keep.dtype} {tuple(keep.shape)}"
        )
    if sum(counts) != x.shape[0] or min(counts, default=0) < 0:
        raise ValueError(f"the counts {list(counts)} of the groups do not add up to the {x.shape[0]} rows of x")
    if stats is not None:
        _check_stats(stats, k, (len(counts),))
        if stats.shape != keep.shape:
            raise ValueError(f"stats of shape {tuple(stats.shape)} must have the shape of keep, {tuple(keep.shape)}")


def token_scale(x: torch.Tensor) -> torch.Tensor:
    """global_scale_dec of each token: [M, K] -> FP32 [M]. A token's result so does not depend on its neighbours."""
    return nvfp4.global_scale_dec(x.abs().amax(-1))


def residual_statistics(x: torch.Tensor, granularity: str = "block") -> torch.Tensor:
    """Sum over tokens of r^2, FP32: [M, K] -> [K/16] ("block") or [K] ("channel").

    A token that holds NaN or Inf has no residual and does not count.
    """
    _check_granularity(granularity)
    _check_tokens(x)
    size = x.shape[-1] // (BLOCK_SIZE if granularity == "block" else 1)
    stats = torch.zeros(size, dtype=torch.float32, device=x.device)
    compensate(x, "w4a4", stats=stats)
    return stats


def select_mask(score: torch.Tensor, ratio: float, granularity: str = "block") -> ResidualMask:
    """The round(ratio * n) entries of largest score (at least one if ratio > 0); ties go to the lower index.

    score: [n] with n = K/16 ("block") or K ("channel"), finite. Raises TypeError where the score is no tensor or the
    ratio no number, ValueError on a bad ratio or score.
    """
    _check_ratio(ratio)
    _check_granularity(granularity)
    if not isinstance(score, torch.Tensor):
        raise TypeError(
            f"select_mask: the score must be a 1-D torch.Tensor, got {type(score).__name__} {score!r}; take it from "
            "residual_statistics"
        )
    if score.dim() != 1:
        raise ValueError(f"select_mask: the score must be a 1-D tensor, got shape {tuple(score.shape)}")
    return ResidualMask(**{f"{granularity}s": select_masks(score, ratio)})


def select_masks(score: torch.Tensor, ratio: float) -> torch.Tensor:
    """`select_mask` for each line of `score` ([..., n]): bool, same shape. One wait for the device, for the check."""
    _check_ratio(ratio)
    if not bool(score.isfinite().all()):
        raise ValueError(
            f"the score of a mask must be finite, got shape {tuple(score.shape)} with "
            f"{int((~score.isfinite()).sum())} non-finite entries; activations this large have no useful mask"
        )
    return _largest(score, ratio)


def _compiled(x: torch.Tensor, residual: Residual, stats: torch.Tensor | None) -> torch.Tensor:
    if isinstance(residual, ResidualMask):
        kind = cpu_qdq.KEEP_BLOCKS if residual.channels is None else cpu_qdq.KEEP_CHANNELS
        return cpu_qdq.compensate(x, kind, residual.flags, stats)
    return cpu_qdq.compensate(x, cpu_qdq.KEEP_NONE if residual is None else cpu_qdq.KEEP_ALL, None, stats)


def _check_tokens(x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"activations must be a torch.Tensor [M, K], got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"activations must have a floating point dtype, got {x.dtype}; cast them")
    if x.dim() != 2:
        raise ValueError(f"activations must have shape [M, K], got {tuple(x.shape)}; flatten the leading dimensions")
    nvfp4.check_k(x.shape)


def _check_stats(stats: torch.Tensor, k: int, leading: tuple[int, ...]) -> None:
    if stats.dtype != torch.float32 or stats.shape not in ((*leading, k), (*leading, k // BLOCK_SIZE)):
        raise ValueError(
            f"residual statistics of K={k} are float32 {[*leading, k // BLOCK_SIZE]} or {[*leading, k]}; got "
            f"{stats.dtype} {tuple(stats.shape)}"
        )


def _check_residual(residual: Residual, k: int) -> None:
    if isinstance(residual, ResidualMask):
        width = BLOCK_SIZE if residual.channels is None else 1
        if residual.flags.shape[0] * width != k:
            raise ValueError(
                f"the {residual.granularity} mask has {residual.flags.shape[0]} entries; activations of K={k} need "
                f"{k // width}"
            )
    elif not (residual is None or isinstance(residual, TokenMask) or (isinstance(residual, str) and residual == "all")):
        raise ValueError(f'residual must be None, "all", a ResidualMask or a TokenMask; got {residual!r}')


def _masked(rest: torch.Tensor, residual: Residual) -> torch.Tensor:
    """The residual with zeros where it is not kept."""
    if isinstance(residual, str):
        return rest
    keep = residual.flags if isinstance(residual, ResidualMask) else _token_flags(rest, residual)
    width = rest.shape[-1] // keep.shape[-1]
    # where, not a product: the residual of a non-finite token is NaN.
    return torch.where(keep.unsqueeze(-1), rest.unflatten(-1, (-1, width)), 0.0).flatten(-2)


def _token_flags(rest: torch.Tensor, mask: TokenMask) -> torch.Tensor:
    return _largest(_energy(rest, mask.granularity), mask.ratio)


def _energy(rest: torch.Tensor, granularity: str) -> torch.Tensor:
    squares = rest.square()
    return squares if granularity == "channel" else squares.unflatten(-1, (-1, BLOCK_SIZE)).sum(-1)


def _statistics(rest: torch.Tensor, size: int) -> torch.Tensor:
    return _pooled(rest.square().nan_to_num(nan=0.0, posinf=torch.inf).sum(0), size)


def _pooled(by_channel: torch.Tensor, size: int) -> torch.Tensor:
    """[K] summed to [size], which is K or K/16."""
    return by_channel if size == by_channel.shape[-1] else by_channel.unflatten(-1, (-1, BLOCK_SIZE)).sum(-1)


def _largest(score: torch.Tensor, ratio: float) -> torch.Tensor:
    """bool, same shape: the largest entries along the last dimension."""
    n = score.shape[-1]
    count = max(1, round(ratio * n)) if ratio > 0 else 0
    # A stable sort puts the lower index first among equals; topk promises nothing.
    order = score.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, True)


def _check_ratio(ratio: float) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, Real):
        raise TypeError(f"residual ratio must be a number in [0, 1], got {type(ratio).__name__} {ratio!r}")
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"residual ratio must lie in [0, 1], got {ratio!r}")


def _check_granularity(granularity: str) -> None:
    if granularity not in GRANULARITIES:
        raise ValueError(f"residual granularity must be one of {GRANULARITIES}, got {granularity!r}")
