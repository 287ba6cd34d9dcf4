"""The K loop of a product from FP16 sums: weights dequantized in registers, sums multiplied as they lie in memory."""

import triton
import triton.language as tl

from quads_kernels.gemm_sums_tile import weights_f16

SPARSE = tl.constexpr(32)
"""Tiles of so few tokens are mostly empty while decoding, and read only rows that are there."""


@triton.jit
def weight_rows(n, N: tl.constexpr, TN: tl.constexpr):
    """int64: rows n of a weight, or its last one. Where all exist, their distances stay known: fewer addresses."""
    if N % TN != 0:
        n = tl.minimum(n, N - 1)
    return n.to(tl.int64)


@triton.jit
def accumulate_sums(
    acc,
    x_ptr,
    x_rows,
    x_ok,
    w_ptr,
    ws_ptr,
    w_rows,
    k_begin,
    k_end,
    K: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    BK: tl.constexpr,
    WARPS: tl.constexpr,
    HW: tl.constexpr,
    E4M3: tl.constexpr,
):
    """acc + W x^T over k_begin <= k < k_end, a multiple of BK each, or K: FP32 [TN, TM], times 1 / SUMS_EPILOGUE_SCALE.

    x: FP16, rows of K in the order of sums. w, ws: bytes, rows of K/16 blocks. x_rows, w_rows: int64 [TM] and [TN],
    rows that exist: what is beside the matrix is multiplied like a row in it, and not stored. x_ok: bool [TM],
    whether a row is wanted; up to SPARSE rows a tile reads only those.
    """
    ALL_ROWS: tl.constexpr = TM > SPARSE
    PAIRS: tl.constexpr = K // 32 * 32
    MASK: tl.constexpr = PAIRS % BK != 0
    # As in `gemm_loop`: scales that cannot be copied asynchronously are loaded a step ahead.
    AHEAD: tl.constexpr = TN * BK < 2048 * WARPS or K % 64 != 0
    words = tl.arange(0, BK // 8)
    columns = tl.arange(0, BK)
    blocks = tl.arange(0, BK // 16)
    w_at = w_ptr.to(tl.pointer_type(tl.uint32)) + k_begin // 8 + w_rows[:, None] * (K // 8) + words[None, :]
    ws_at = ws_ptr + k_begin // 16 + w_rows[:, None] * (K // 16) + blocks[None, :]
    x_at = x_ptr + k_begin + x_rows[:, None] * K + columns[None, :]
    if AHEAD:
        scales = tl.load(ws_at, mask=(blocks < (PAIRS - k_begin) // 16)[None, :], other=0)
    for k0 in range(k_begin, min(k_end, PAIRS), BK):
        if MASK:
            w = tl.load(w_at, mask=(words < (PAIRS - k0) // 8)[None, :], other=0)
        else:
            w = tl.load(w_at)
        if MASK:
            x = tl.load(x_at, mask=(columns < PAIRS - k0)[None, :] & (x_ok | ALL_ROWS)[:, None], other=0.0)
        elif ALL_ROWS:
            x = tl.load(x_at)
        else:
            x = tl.load(x_at, mask=x_ok[:, None], other=0.0)
        if AHEAD:
            ws_at += BK // 16
            ahead = tl.load(ws_at, mask=(blocks < (PAIRS - k0 - BK) // 16)[None, :], other=0)
        elif MASK:
            scales = tl.load(ws_at, mask=(blocks < (PAIRS - k0) // 16)[None, :], other=0)
            ws_at += BK // 16
        else:
            scales = tl.load(ws_at)
            ws_at += BK // 16
        acc = tl.dot(weights_f16(w, scales, TN, BK, HW, E4M3), tl.trans(x), acc)
        if AHEAD:
            scales = ahead
        w_at += BK // 8
        x_at += BK
    if K != PAIRS and k_end == K:
        acc = add_last_block(acc, x_ptr, x_rows, w_ptr, ws_ptr, w_rows, K, TN, HW, E4M3)
    return acc


@triton.jit
def add_last_block(
    acc, x_ptr, x_rows, w_ptr, ws_ptr, w_rows, K: tl.constexpr, TN: tl.constexpr, HW: tl.constexpr, E4M3: tl.constexpr
):
    """The product of the last of an odd number of blocks, as half of a pair whose other half is zero."""
    words = tl.arange(0, 4)
    w_at = w_ptr.to(tl.pointer_type(tl.uint32)) + w_rows[:, None] * (K // 8) + (K // 8 - 2 + words)[None, :]
    w = tl.load(w_at, mask=(words < 2)[None, :], other=0)
    block = tl.arange(0, 2)
    ws_at = ws_ptr + w_rows[:, None] * (K // 16) + (K // 16 - 1 + block)[None, :]
    scales = tl.load(ws_at, mask=(block < 1)[None, :], other=0)
    columns = tl.arange(0, 32)
    x_at = x_ptr + x_rows[:, None] * K + (K - 16 + columns // 8 * 4 + columns % 4)[None, :]
    x = tl.load(x_at, mask=(columns % 8 < 4)[None, :], other=0.0)
    return tl.dot(weights_f16(w, scales, TN, 32, HW, E4M3), tl.trans(x), acc)
