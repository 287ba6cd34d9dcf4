"""The kernels that quantize activations (see `activation` for what they do and how they are launched)."""

import triton
import triton.language as tl

from quads_kernels.activation_tile import add_statistics, load_blocks, quantize_tile, zero_total
from quads_kernels.rounding import amax_last, block_amax, global_scale_dec


@triton.jit
def source_blocks(order_ptr, expert, first, last, K, B: tl.constexpr):
    """int32 [B]: the source of destination blocks first .. last."""
    block = first + tl.arange(0, B)
    if order_ptr is not None:
        block = tl.load(order_ptr + expert * (K // 16) + block, mask=block < last, other=0)
    return block


@triton.jit
def row_range(offsets_ptr, expert, M):
    """The members of an expert: first, last (int32). Without experts, all rows."""
    if offsets_ptr is None:
        first, last = M * 0, M
    else:
        first, last = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    return first, last


@triton.jit
def row_numbers(members_ptr, start, last, R: tl.constexpr):
    """Row numbers [R] of members start, start + 1, ..., and which of them exist."""
    member = start + tl.arange(0, R)
    ok = member < last
    if members_ptr is not None:
        member = tl.load(members_ptr + member, mask=ok, other=0)
    return member, ok


@triton.jit
def quantize_row_tile(
    start, last, kept_total, rest_total, kept_source, rest_source, x_ptr, keep_ptr, members_ptr, g_ptr, values_ptr,
    packed_ptr, scales_ptr, residual_packed_ptr, residual_scales_ptr, sums_ptr, K, kept, stride_m, stride_k,
    SWIGLU: tl.constexpr, STATS: tl.constexpr, MASK_CHANNELS: tl.constexpr, STATS_CHANNELS: tl.constexpr,
    HW: tl.constexpr, R: tl.constexpr, KEPT_TILE: tl.constexpr, REST_TILE: tl.constexpr,
):  # fmt: skip
    """R whole rows, held in registers. Returns the two totals plus sum r^2."""
    width = K // 16
    rows, row_ok = row_numbers(members_ptr, start, last, R)
    row_amax = tl.zeros((R,), tl.int32)
    if KEPT_TILE:
        kept_ok = tl.arange(0, KEPT_TILE) < kept
        x = load_blocks(x_ptr, stride_m, stride_k, rows, row_ok, kept_source, kept_ok, K, SWIGLU, HW)
        amax = block_amax(x)
        row_amax = tl.maximum(row_amax, amax_last(amax).to(tl.int32, bitcast=True))
    if REST_TILE:
        rest_ok = kept + tl.arange(0, REST_TILE) < width
        x2 = load_blocks(x_ptr, stride_m, stride_k, rows, row_ok, rest_source, rest_ok, K, SWIGLU, HW)
        amax2 = block_amax(x2)
        row_amax = tl.maximum(row_amax, amax_last(amax2).to(tl.int32, bitcast=True))
    g = global_scale_dec(row_amax.to(tl.float32, bitcast=True))
    tl.store(g_ptr + rows, g, mask=row_ok)
    g = g[:, None]
    if KEPT_TILE:
        kept_total = quantize_tile(
            x, amax, g, kept_total, rows, row_ok, kept_source, 0, kept, K, kept, keep_ptr, values_ptr,
            packed_ptr, scales_ptr, residual_packed_ptr, residual_scales_ptr, sums_ptr,
            True, STATS, MASK_CHANNELS, STATS_CHANNELS, HW, R, KEPT_TILE,
        )  # fmt: skip
    if REST_TILE:
        rest_total = quantize_tile(
            x2, amax2, g, rest_total, rows, row_ok, rest_source, kept, width, K, kept, None, values_ptr,
            packed_ptr, scales_ptr, None, None, sums_ptr,
            False, STATS, MASK_CHANNELS, STATS_CHANNELS, HW, R, REST_TILE,
        )  # fmt: skip
    return kept_total, rest_total


@triton.jit(do_not_specialize=["M"])
def quantize_rows_kernel(
    x_ptr,  # [M, K], or [M, 2K] with SWIGLU; float, any strides
    order_ptr,  # [E, K/16] int32, or None
    keep_ptr,  # [E, K/16] or [E, K] uint8, or None
    offsets_ptr,  # [E + 1] int32, or None
    members_ptr,  # [offsets[E]] int32, or None: row numbers sorted by expert
    g_ptr,  # [M] fp32, written
    values_ptr,  # [M, K] float in source order, or None
    packed_ptr,  # [M, K/2] uint8, or None
    scales_ptr,  # [M, K/16] uint8, or None
    residual_packed_ptr,  # [M, kept * 8] uint8, or None
    residual_scales_ptr,  # [M, kept] uint8, or None
    sums_ptr,  # [M, K] fp16, or None
    stats_ptr,  # [SLOTS, E, K/16] or [SLOTS, E, K] fp32, added to, or None
    M,
    K,
    kept,
    stride_m,
    stride_k,
    SWIGLU: tl.constexpr,
    MASK_CHANNELS: tl.constexpr,
    STATS_CHANNELS: tl.constexpr,
    HW: tl.constexpr,
    LOOP: tl.constexpr,  # whether a program may have several tiles of rows
    R: tl.constexpr,
    KEPT_TILE: tl.constexpr,  # blocks, a power of two >= kept, or 0
    REST_TILE: tl.constexpr,  # blocks, a power of two >= K/16 - kept, or 0
):
    """Whole rows: one read, one launch. Grid (slots, experts)."""
    slot, expert = tl.program_id(0), tl.program_id(1)
    STATS: tl.constexpr = stats_ptr is not None
    width = K // 16
    # A tile of no blocks stands for nothing, and is compiled to nothing.
    kept_source = source_blocks(order_ptr, expert, 0, kept, K, max(KEPT_TILE, 1))
    kept_total = zero_total(STATS_CHANNELS, max(KEPT_TILE, 1))
    rest_source = source_blocks(order_ptr, expert, kept, width, K, max(REST_TILE, 1))
    rest_total = zero_total(STATS_CHANNELS, max(REST_TILE, 1))
    if keep_ptr is not None:
        keep_ptr += expert * (K if MASK_CHANNELS else width)
    begin, last = row_range(offsets_ptr, expert, M)
    start = begin + slot * R
    if LOOP:
        for tile_start in range(start, last, tl.num_programs(0) * R):
            kept_total, rest_total = quantize_row_tile(
                tile_start, last, kept_total, rest_total, kept_source, rest_source, x_ptr, keep_ptr, members_ptr,
                g_ptr, values_ptr, packed_ptr, scales_ptr, residual_packed_ptr, residual_scales_ptr, sums_ptr, K, kept,
                stride_m, stride_k, SWIGLU, STATS, MASK_CHANNELS, STATS_CHANNELS, HW, R, KEPT_TILE, REST_TILE,
            )  # fmt: skip
    else:
        kept_total, rest_total = quantize_row_tile(
            start, last, kept_total, rest_total, kept_source, rest_source, x_ptr, keep_ptr, members_ptr,
            g_ptr, values_ptr, packed_ptr, scales_ptr, residual_packed_ptr, residual_scales_ptr, sums_ptr, K, kept,
            stride_m, stride_k, SWIGLU, STATS, MASK_CHANNELS, STATS_CHANNELS, HW, R, KEPT_TILE, REST_TILE,
        )  # fmt: skip
    if STATS:
        line = slot * tl.num_programs(1) + expert
        line_ptr = stats_ptr + line * (K if STATS_CHANNELS else width)
        if KEPT_TILE:
            kept_ok = tl.arange(0, KEPT_TILE) < kept
            add_statistics(line_ptr, kept_total, kept_source, kept_ok, STATS_CHANNELS)
        if REST_TILE:
            rest_ok = kept + tl.arange(0, REST_TILE) < width
            add_statistics(line_ptr, rest_total, rest_source, rest_ok, STATS_CHANNELS)


@triton.jit(do_not_specialize=["M"])
def row_scale_kernel(
    x_ptr,  # [M, K], or [M, 2K] with SWIGLU
    g_ptr,  # [M] fp32, written
    M,
    K,
    stride_m,
    stride_k,
    SWIGLU: tl.constexpr,
    HW: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """Global scale of rows of any width. Grid (row tiles)."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    row_ok = rows < M
    largest = tl.zeros((R, B), tl.int32)
    for first in range(0, K // 16, B):
        block = first + tl.arange(0, B)
        x = load_blocks(x_ptr, stride_m, stride_k, rows, row_ok, block, block < K // 16, K, SWIGLU, HW)
        largest = tl.maximum(largest, block_amax(x).to(tl.int32, bitcast=True))
    g = global_scale_dec(amax_last(largest.to(tl.float32, bitcast=True)))
    tl.store(g_ptr + rows, g, mask=row_ok)


@triton.jit
def quantize_part(
    part, kept_part, x_ptr, order_ptr, keep_ptr, offsets_ptr, members_ptr, g_ptr, values_ptr, packed_ptr, scales_ptr,
    residual_packed_ptr, residual_scales_ptr, sums_ptr, stats_ptr, M, K, kept, stride_m, stride_k,
    KEPT: tl.constexpr, SWIGLU: tl.constexpr, MASK_CHANNELS: tl.constexpr, STATS_CHANNELS: tl.constexpr,
    HW: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One part of all rows of this program, with or without residual."""
    slot, expert = tl.program_id(0), tl.program_id(1)
    STATS: tl.constexpr = stats_ptr is not None
    width = K // 16
    last_block = kept if KEPT else width
    first = part * B if KEPT else kept + (part - kept_part) * B
    source = source_blocks(order_ptr, expert, first, last_block, K, B)
    block_ok = first + tl.arange(0, B) < last_block
    if keep_ptr is not None:
        keep_ptr += expert * (K if MASK_CHANNELS else width)
    total = zero_total(STATS_CHANNELS, B)
    begin, last = row_range(offsets_ptr, expert, M)
    for start in range(begin + slot * R, last, tl.num_programs(0) * R):
        rows, row_ok = row_numbers(members_ptr, start, last, R)
        g = tl.load(g_ptr + rows, mask=row_ok, other=1.0)[:, None]
        x = load_blocks(x_ptr, stride_m, stride_k, rows, row_ok, source, block_ok, K, SWIGLU, HW)
        total = quantize_tile(
            x, block_amax(x), g, total, rows, row_ok, source, first, last_block, K, kept, keep_ptr, values_ptr,
            packed_ptr, scales_ptr, residual_packed_ptr, residual_scales_ptr, sums_ptr,
            KEPT, STATS, MASK_CHANNELS, STATS_CHANNELS, HW, R, B,
        )  # fmt: skip
    if STATS:
        line = slot * tl.num_programs(1) + expert
        add_statistics(stats_ptr + line * (K if STATS_CHANNELS else width), total, source, block_ok, STATS_CHANNELS)


@triton.jit(do_not_specialize=["M"])
def quantize_parts_kernel(
    x_ptr, order_ptr, keep_ptr, offsets_ptr, members_ptr, g_ptr, values_ptr, packed_ptr, scales_ptr,
    residual_packed_ptr, residual_scales_ptr, sums_ptr, stats_ptr, M, K, kept, stride_m, stride_k,
    SWIGLU: tl.constexpr, MASK_CHANNELS: tl.constexpr, STATS_CHANNELS: tl.constexpr,
    HW: tl.constexpr, R: tl.constexpr, B: tl.constexpr, ANY_KEPT: tl.constexpr,
):  # fmt: skip
    """As `quantize_rows_kernel`, for wide rows whose g is known. Grid (slots, experts, parts of B blocks); the kept
    blocks fill the first cdiv(kept, B) parts, the others the rest."""
    part = tl.program_id(2)
    kept_part = tl.cdiv(kept, B)
    if ANY_KEPT:
        if part < kept_part:
            quantize_part(
                part, kept_part, x_ptr, order_ptr, keep_ptr, offsets_ptr, members_ptr, g_ptr, values_ptr, packed_ptr,
                scales_ptr, residual_packed_ptr, residual_scales_ptr, sums_ptr, stats_ptr, M, K, kept, stride_m,
                stride_k, True, SWIGLU, MASK_CHANNELS, STATS_CHANNELS, HW, R, B,
            )  # fmt: skip
    if part >= kept_part:
        quantize_part(
            part, kept_part, x_ptr, order_ptr, None, offsets_ptr, members_ptr, g_ptr, values_ptr, packed_ptr,
            scales_ptr, None, None, sums_ptr, stats_ptr, M, K, kept, stride_m, stride_k,
            False, SWIGLU, MASK_CHANNELS, STATS_CHANNELS, HW, R, B,
        )  # fmt: skip
