"""Device functions for activations: load a tile of blocks, quantize it and its residual, store, gather statistics.

A tile is R rows by B blocks of 16, FP32 [R, B, 16]. The kernels that use it are in `activation_rows`.
"""

import triton
import triton.language as tl

from quads_kernels.rounding import (
    block_amax,
    cast,
    dequantize_blocks,
    load_tile,
    packed_codes,
    quantize_blocks,
    signed_e2m1,
    store_tile,
    to_fp32,
    unscaled_blocks,
)
from quads_kernels.sum_order import sum_columns


@triton.jit
def swiglu(gate, up, dtype: tl.constexpr, HW: tl.constexpr):
    """silu(gate) * up, rounded to dtype after silu and after the product, as a model in that dtype does. FP32 tiles."""
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    silu = to_fp32(cast(silu, dtype, HW), HW)
    return to_fp32(cast(silu * up, dtype, HW), HW)


@triton.jit
def load_blocks(x_ptr, stride_m, stride_k, rows, row_ok, source, block_ok, K, SWIGLU: tl.constexpr, HW: tl.constexpr):
    """FP32 [R, B, 16]: the blocks numbered `source` of `rows`; zeros where not ok. With SWIGLU x is [gate | up]."""
    line = x_ptr + rows.to(tl.int64) * stride_m
    at = line[:, None, None] + (source.to(tl.int64) * 16 * stride_k)[None, :, None]
    ok = row_ok[:, None, None] & block_ok[None, :, None]
    x = to_fp32(load_tile(at, ok, stride_k), HW)
    if SWIGLU:
        up = to_fp32(load_tile(at + K.to(tl.int64) * stride_k, ok, stride_k), HW)
        x = swiglu(x, up, x_ptr.dtype.element_ty, HW)
    return x


@triton.jit
def store_codes(
    packed_ptr, scales_ptr, code, x, byte, rows, row_ok, first, last, width, HW: tl.constexpr, B: tl.constexpr
):
    """Codes, with the signs of x, and scale bytes of destination blocks first .. last of lines of `width` blocks."""
    block = rows.to(tl.int64)[:, None] * width + (first + tl.arange(0, B))[None, :]
    ok = row_ok[:, None] & (first + tl.arange(0, B) < last)[None, :]
    words = packed_ptr.to(tl.pointer_type(tl.uint32)) + block[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    tl.store(words, packed_codes(code, x, byte, HW), mask=ok[:, :, None])
    tl.store(scales_ptr + block, byte.to(tl.uint8), mask=ok)


@triton.jit
def store_sums(sums_ptr, unscaled, rows, row_ok, first, block_ok, K, R: tl.constexpr, B: tl.constexpr):
    """FP32 [R, B, 16], rounded to FP16, at destination blocks first .. first + B of lines of K, in the order of
    `sum_order`. FP32 holds the sum of two products e2m1 * s8 exactly, so it is rounded once."""
    even, odd = tl.split(tl.reshape(unscaled.to(tl.float16), (R, B, 4, 2, 2)))
    q0, q2 = tl.split(even)
    q1, q3 = tl.split(odd)
    begin, step = sum_columns(first + tl.arange(0, B), K)
    at = sums_ptr + rows.to(tl.int64)[:, None, None] * K + begin[None, :, None] + tl.arange(0, 4)[None, None, :]
    ok = row_ok[:, None, None] & block_ok[None, :, None]
    step = step[None, :, None]
    tl.store(at, q0, mask=ok)
    tl.store(at + step, q1, mask=ok)
    tl.store(at + 2 * step, q2, mask=ok)
    tl.store(at + 3 * step, q3, mask=ok)


@triton.jit
def mask_residual(rest, keep_ptr, source, block_ok, CHANNELS: tl.constexpr):
    """Zeros where the mask (uint8 [K/16], or [K] with CHANNELS, in source order) is 0."""
    if CHANNELS:
        k = source[:, None] * 16 + tl.arange(0, 16)[None, :]
        keep = tl.load(keep_ptr + k, mask=block_ok[:, None], other=0)
    else:
        keep = tl.load(keep_ptr + source, mask=block_ok, other=0)[:, None]
    return tl.where(tl.broadcast_to((keep != 0)[None, :, :], rest.shape), rest, 0.0)


@triton.jit
def energy(rest, g, CHANNELS: tl.constexpr):
    """Sum of r^2 over the rows of a tile: [B], or [B, 16] with CHANNELS. A row that holds NaN or Inf does not count."""
    square = tl.where((g == g)[:, :, None], rest * rest, 0.0)
    total = tl.sum(square, axis=0)
    if not CHANNELS:
        total = tl.sum(total, axis=1)
    return total


@triton.jit
def add_statistics(stats_ptr, total, source, block_ok, CHANNELS: tl.constexpr):
    """Add to the program's own line of the statistics, in source order."""
    if CHANNELS:
        at = stats_ptr + source[:, None] * 16 + tl.arange(0, 16)[None, :]
        ok = tl.broadcast_to(block_ok[:, None], total.shape)
    else:
        at = stats_ptr + source
        ok = block_ok
    tl.store(at, tl.load(at, mask=ok, other=0.0) + total, mask=ok)


@triton.jit
def quantize_tile(
    x,
    amax,
    g,
    total,
    rows,
    row_ok,
    source,
    first,
    last,
    K,
    kept,
    keep_ptr,
    values_ptr,
    packed_ptr,
    scales_ptr,
    residual_packed_ptr,
    residual_scales_ptr,
    sums_ptr,
    KEPT: tl.constexpr,
    STATS: tl.constexpr,
    MASK_CHANNELS: tl.constexpr,
    STATS_CHANNELS: tl.constexpr,
    HW: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """Destination blocks first .. last of some rows, x [R, B, 16]: everything but g. Returns total + sum r^2."""
    block_ok = first + tl.arange(0, B) < last
    code, scale, byte = quantize_blocks(x, amax, g, HW)
    if packed_ptr is not None:
        store_codes(packed_ptr, scales_ptr, code, x, byte, rows, row_ok, first, last, K // 16, HW, B)
    e2m1 = signed_e2m1(code, x, HW)
    value = dequantize_blocks(e2m1, scale, g, HW)
    if sums_ptr is not None:
        unscaled = unscaled_blocks(e2m1, scale, HW)
    rest = x - value
    if STATS:
        total += energy(rest, g, STATS_CHANNELS)
    if KEPT:
        if keep_ptr is not None:
            rest = mask_residual(rest, keep_ptr, source, block_ok, MASK_CHANNELS)
        code, scale, byte = quantize_blocks(rest, block_amax(rest), g, HW)
        if packed_ptr is not None:
            store_codes(
                residual_packed_ptr, residual_scales_ptr, code, rest, byte, rows, row_ok, first, last, kept, HW, B
            )
        e2m1 = signed_e2m1(code, rest, HW)
        value += dequantize_blocks(e2m1, scale, g, HW)
        if sums_ptr is not None:
            unscaled += unscaled_blocks(e2m1, scale, HW)
    if sums_ptr is not None:
        store_sums(sums_ptr, unscaled, rows, row_ok, first, block_ok, K, R, B)
    if values_ptr is not None:
        at = values_ptr + rows.to(tl.int64)[:, None, None] * K + source[None, :, None] * 16
        value = cast(value, values_ptr.dtype.element_ty, HW)
        store_tile(at, value, row_ok[:, None, None] & block_ok[None, :, None])
    return total


@triton.jit
def zero_total(CHANNELS: tl.constexpr, B: tl.constexpr):
    if CHANNELS:
        zeros = tl.zeros((B, 16), tl.float32)
    else:
        zeros = tl.zeros((B,), tl.float32)
    return zeros
