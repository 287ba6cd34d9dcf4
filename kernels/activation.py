"""Activations in NVFP4 with their quantized residual, in one launch.

Per token (row): global scale g, block scales and codes, the residual r = x - Xq, the statistics sum r^2, and a second
quantization of the part of r that is kept, with the same g. The row is read once and stays in registers. Rows too
wide for that take two launches and two reads: first g, then parts of the row.

Layout of the codes: with `order` (int32 [K/16]) destination block j holds source block order[j], and the residual is
kept for the first `kept` destination blocks, so a GEMM over equally reordered weights sees the mask as a prefix of K.
The kept and the other blocks are two tiles, so that no arithmetic is spent on residuals that are not kept.

Experts (input of the down projection): rows of one expert share an order or a mask, and statistics. A program works for
one expert and finds its rows between two offsets, so nothing is decided on the host.

Statistics need no atomics: program `slot` adds to its own line of stats [SLOTS, ...]; the sum over lines is the score.
Equal in every bit to `quads_ops.residual`, but for the statistics, whose sums are taken in another order.
"""

from typing import NamedTuple

import torch
import triton

from quads_kernels import launch
from quads_kernels.activation_rows import quantize_parts_kernel, quantize_rows_kernel, row_scale_kernel

WIDEST_ROW = 8192
"""Elements that a row may have, rounded up to two powers of two (kept and not kept), to stay in registers."""

PART_BLOCKS = 128
"""Blocks in a part of a wider row."""

REGISTERS = 128
"""Most registers a thread may have: what 16 warps can. Left to itself the assembler aims lower, and spills one."""

MORE_REGISTERS = 168
"""With statistics, which a program carries over its rows. Their lines limit the programs anyway, so they have room."""


class Experts(NamedTuple):
    """Which rows belong to which expert."""

    offsets: torch.Tensor
    """int32 [E + 1]: expert e has the members offsets[e] .. offsets[e + 1]."""
    members: torch.Tensor | None = None
    """int32 [M]: row number of each member; None where the rows themselves are sorted by expert."""


class Quantized(NamedTuple):
    """What `quantize` gives back; None where it was not asked for."""

    global_scale_dec: torch.Tensor
    """FP32 [M]"""
    values: torch.Tensor | None
    """[M, K]: Xq + Rq in source order"""
    packed: torch.Tensor | None
    """uint8 [M, K/2], in destination order"""
    block_scales: torch.Tensor | None
    """uint8 [M, K/16]"""
    residual_packed: torch.Tensor | None
    """uint8 [M, kept * 8]: the residual's codes of the first `kept` destination blocks"""
    residual_block_scales: torch.Tensor | None
    """uint8 [M, kept]"""
    sums: torch.Tensor | None = None
    """FP16 [M, K], destination blocks in the order of `quads_kernels.sum_order`: (e2m1 * s8 + the same of the residual,
    where kept) * 2^-10. Both terms are exact in FP16, and their sum is rounded once; NaN where the scale byte is 0x7F.
    Without `global_scale_dec`."""


def quantize(
    x: torch.Tensor,
    *,
    kept: int = 0,
    order: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    experts: Experts | None = None,
    stats: torch.Tensor | None = None,
    swiglu: bool = False,
    values: torch.dtype | None = None,
    packed: bool = True,
    sums: bool = False,
) -> Quantized:
    """Quantize tokens and the kept part of their residual.

    x: [M, K], FP32, FP16 or BF16, any strides; with swiglu [M, 2K] = [gate | up], quantized is silu(gate) * up.
    kept: number of destination blocks whose residual is kept; 0 is plain W4A4, K/16 is ratio 1.
    order: int32 [K/16], or [E, K/16] with experts: a permutation of the blocks, trusted.
    keep: bool [K/16] or [K] (single channels), or [E, ...]: the residual is zeroed elsewhere; needs kept = K/16.
    stats: FP32 [SLOTS, K/16] or [SLOTS, K], or [SLOTS, E, ...]: sum r^2 before the mask is added, in source order.
    values: dtype in which Xq + Rq is wanted. packed: whether codes and scales are wanted. sums: whether the sums are.
    Rows that belong to no expert are not written. Raises ValueError on a wrong dtype, device or shape.
    """
    m, k = _check_input(x, swiglu, kept)
    count = 1 if experts is None else _check_experts(experts, x.device)
    lead = () if experts is None else (count,)
    mask_channels = _check_mask(order, keep, kept, lead, k, x.device)
    stats_channels = _check_stats(stats, lead, k, x.device)
    out = _outputs(m, k, kept, values, packed, sums, x.device)
    shared = dict(SWIGLU=swiglu, HW=launch.arithmetic(x.device))
    flags = dict(MASK_CHANNELS=mask_channels, STATS_CHANNELS=stats_channels, **shared)
    inputs = (
        x,
        None if order is None else order.contiguous(),
        None if keep is None else keep.contiguous().view(torch.uint8),
        None if experts is None else experts.offsets.contiguous(),
        None if experts is None or experts.members is None else experts.members.contiguous(),
    )
    args = (*inputs, *out, stats, m, k, kept, *x.stride())
    tile = row_tile(k, kept, heavy=keep is not None or swiglu or stats_channels, statistics=stats is not None)
    slots = grid_slots(m, tile["R"], count, stats)
    if "KEPT_TILE" in tile:
        loop = experts is not None or slots * tile["R"] < m
        launch.start(quantize_rows_kernel, (slots, count), x.device, *args, **flags, LOOP=loop, **tile)
        return out
    scale_args = (x, out.global_scale_dec, m, k, *x.stride())
    launch.start(row_scale_kernel, (triton.cdiv(m, tile["R"]),), x.device, *scale_args, **shared, **tile)
    parts = triton.cdiv(kept, tile["B"]) + triton.cdiv(k // 16 - kept, tile["B"])
    grid = (slots, count, parts)
    launch.start(quantize_parts_kernel, grid, x.device, *args, **flags, ANY_KEPT=kept > 0, **tile)
    return out


def row_tile(k: int, kept: int, heavy: bool, statistics: bool = False) -> dict[str, int]:
    """Tile and warps: with KEPT_TILE and REST_TILE for rows that stay in registers, else with B, the blocks of a part.

    heavy: with a mask, SwiGLU or statistics of channels, which need more registers: then 1 or 2 blocks a thread, else 2
    to 4, since what a thread does once is a good part of its work. Chosen by compiling (benchmarks/compile_report.py):
    no spills on any architecture. A GPU's program takes one row, or several short ones; one of the interpreter, where a
    program costs milliseconds, takes many.
    """
    kept_tile, rest_tile = _power_of_two(kept), _power_of_two(k // 16 - kept)
    elements = 16 * (kept_tile + rest_tile)
    if elements > WIDEST_ROW:
        rows = 16 if launch.INTERPRETED else 1
        return dict(R=rows, B=PART_BLOCKS, num_warps=8 if heavy else 4, maxnreg=REGISTERS)
    tiles = dict(KEPT_TILE=kept_tile, REST_TILE=rest_tile)
    if launch.INTERPRETED:
        return dict(R=2**17 // _power_of_two(elements), num_warps=4, maxnreg=REGISTERS, **tiles)
    rows = max(1, 64 // (kept_tile + rest_tile))
    blocks = rows * (kept_tile + rest_tile)
    # A block lies within one thread: what threads there are beyond the blocks of the smaller part repeat its work.
    smaller = rows * min(kept_tile or rest_tile, rest_tile or kept_tile)
    warps = min(smaller // 32, blocks // (32 * (1 if heavy else 2)))
    warps = max(1, warps, triton.cdiv(blocks, 32 * (2 if heavy else 4)))
    warps = min(16, _power_of_two(warps))
    registers = MORE_REGISTERS if statistics and warps <= 8 else REGISTERS
    return dict(R=rows, num_warps=warps, maxnreg=registers, **tiles)


def grid_slots(m: int, rows: int, experts: int, stats: torch.Tensor | None) -> int:
    """Programs per expert. Each needs a line of its own of the statistics; with fewer it takes several row tiles."""
    tiles = triton.cdiv(m, rows)
    # Nobody here knows how many rows each expert has: enough programs for twice the average.
    slots = tiles if experts == 1 else min(tiles, _power_of_two(triton.cdiv(2 * tiles, experts)))
    return slots if stats is None else min(slots, stats.shape[0])


def _power_of_two(n: int) -> int:
    return triton.next_power_of_2(n) if n else 0


def _outputs(
    m: int, k: int, kept: int, values: torch.dtype | None, packed: bool, sums: bool, device: torch.device
) -> Quantized:
    launch.require(values is not None or packed or sums, "nothing to compute: ask for values, packed codes or sums")
    launch.require(values is None or values in launch.FLOATS, f"values must be one of {launch.FLOATS}, got {values}")
    byte = torch.uint8
    return Quantized(
        launch.empty((m,), torch.float32, device),
        None if values is None else launch.empty((m, k), values, device),
        launch.empty((m, k // 2), byte, device) if packed else None,
        launch.empty((m, k // 16), byte, device) if packed else None,
        launch.empty((m, kept * 8), byte, device) if packed and kept else None,
        launch.empty((m, kept), byte, device) if packed and kept else None,
        launch.empty((m, k), torch.float16, device) if sums else None,
    )


def _check_input(x: torch.Tensor, swiglu: bool, kept: int) -> tuple[int, int]:
    launch.require(x.dim() == 2, f"activations must have shape [M, K], got {tuple(x.shape)}; flatten the leading dims")
    launch.require_tensor("activations", x, launch.FLOATS, x.device)
    m, width = x.shape
    launch.require(not swiglu or width % 2 == 0, f"swiglu needs [M, 2K], gate beside up; got {tuple(x.shape)}")
    k = width // 2 if swiglu else width
    launch.require_k(k)
    launch.require(0 <= kept <= k // 16, f"kept must lie between 0 and K/16 = {k // 16} blocks, got {kept}")
    return m, k


def _check_experts(experts: Experts, device: torch.device) -> int:
    launch.require_tensor("experts.offsets", experts.offsets, torch.int32, device, (None,))
    launch.require(experts.offsets.numel() >= 2, "experts.offsets needs one entry more than there are experts")
    if experts.members is not None:
        launch.require_tensor("experts.members", experts.members, torch.int32, device, (None,))
    return experts.offsets.numel() - 1


def _check_mask(order, keep, kept: int, lead: tuple[int, ...], k: int, device: torch.device) -> bool:
    """Raises on a wrong order or mask; returns whether the mask is of single channels."""
    if order is not None:
        launch.require_tensor("order", order, torch.int32, device, (*lead, k // 16))
    if keep is None:
        return False
    launch.require(kept == k // 16, f"keep zeroes within the residual of all blocks: set kept={k // 16}, not {kept}")
    launch.require(keep.shape[-1] in (k // 16, k), f"keep needs {k // 16} or {k} entries, got {tuple(keep.shape)}")
    launch.require_tensor("keep", keep, torch.bool, device, (*lead, keep.shape[-1]))
    return keep.shape[-1] == k


def _check_stats(stats, lead: tuple[int, ...], k: int, device: torch.device) -> bool:
    """Raises on wrong statistics; returns whether they are of single channels."""
    if stats is None:
        return False
    sizes = (k // 16, k)
    launch.require(stats.shape[-1] in sizes, f"stats needs {sizes[0]} or {sizes[1]} entries, got {tuple(stats.shape)}")
    launch.require_tensor("stats", stats, torch.float32, device, (None, *lead, stats.shape[-1]))
    launch.require(stats.is_contiguous() and len(stats) > 0, "stats must be contiguous and have at least one line")
    return stats.shape[-1] == k
