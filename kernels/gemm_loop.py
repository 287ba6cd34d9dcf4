"""The K loop of a W4A4 product with residual: one pass over K in which each weight tile is loaded once.

K is ordered by importance (weights offline, activations while they are quantized), so the channels that keep their
residual are the prefix k < k_res. The pass is split there: [k_begin, k_res) multiplies each weight tile twice, with
the quantized activations and with their quantized residual; [k_res, k_end) once. Two plain loops pipeline; one loop
with a branch does not.
"""

import triton
import triton.language as tl

from quads_kernels.gemm_tile import step


@triton.jit
def load_codes(ptr, rows, ok, blocks, k0, MASK_K: tl.constexpr, NATIVE: tl.constexpr, BK: tl.constexpr):
    """Packed codes of k0 <= k < k0 + BK: uint8 [R, BK/2], or uint32 [R, BK/8] for the emulated form.

    rows: int64 [R]; rows of the matrix have `blocks` blocks of 16. Zero where a row is not ok or has no such k.
    """
    if NATIVE:
        CODES: tl.constexpr = 2
    else:
        CODES: tl.constexpr = 8
        ptr = ptr.to(tl.pointer_type(tl.uint32))
    k = k0 // CODES + tl.arange(0, BK // CODES)
    mask = ok[:, None]
    if MASK_K:
        mask = mask & (k < blocks * (16 // CODES))[None, :]
    return tl.load(ptr + rows[:, None] * (blocks * (16 // CODES)) + k[None, :], mask=mask, other=0)


@triton.jit
def load_scales(ptr, rows, ok, blocks, k0, MASK_K: tl.constexpr, BK: tl.constexpr):
    """E4M3 bytes of the blocks in k0 <= k < k0 + BK: uint8 [R, BK/16]; otherwise as `load_codes`."""
    block = k0 // 16 + tl.arange(0, BK // 16)
    mask = ok[:, None]
    if MASK_K:
        mask = mask & (block < blocks)[None, :]
    return tl.load(ptr + rows[:, None] * blocks + block[None, :], mask=mask, other=0)


@triton.jit
def accumulate(
    acc,
    x_ptr,
    xs_ptr,
    x_rows,
    x_ok,
    r_ptr,
    rs_ptr,
    kept_units,
    w_ptr,
    ws_ptr,
    w_rows,
    w_ok,
    k_begin,
    k_end,
    K: tl.constexpr,
    KEPT_UNIT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NATIVE: tl.constexpr,
    WEIGHTS_ON_M: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    BK: tl.constexpr,
    WARPS: tl.constexpr,
    HW: tl.constexpr,
):
    """acc plus the product over k_begin <= k < k_end; k_begin is a multiple of BK.

    acc: FP32 [TM, TN], or [TN, TM] with WEIGHTS_ON_M. x, w: rows of K/16 blocks; r: rows of kept = kept_units *
    KEPT_UNIT blocks, the residual for k < k_res = 16 * kept. x_rows, w_rows: int64 rows of the tile, x_ok, w_ok:
    whether they exist.
    """
    MASK_K: tl.constexpr = K % BK != 0
    BLOCKS: tl.constexpr = K // 16
    # An asynchronous copy moves 4 bytes a thread at least, from an address that is known to be a multiple of 4. Scales
    # that are too few for that, or lie otherwise, are loaded one step ahead: each step would wait for its own.
    X_AHEAD: tl.constexpr = TM * BK < 2048 * WARPS
    R_AHEAD: tl.constexpr = X_AHEAD or KEPT_UNIT < 4
    W_AHEAD: tl.constexpr = TN * BK < 2048 * WARPS
    if X_AHEAD:
        xs = load_scales(xs_ptr, x_rows, x_ok, BLOCKS, k_begin, True, BK)
    if W_AHEAD:
        ws = load_scales(ws_ptr, w_rows, w_ok, BLOCKS, k_begin, True, BK)
    k_mid = k_begin
    if HAS_RESIDUAL:
        kept = kept_units * KEPT_UNIT
        k_mid = max(k_begin, min(tl.cdiv(kept * 16, BK) * BK, k_end))
        if R_AHEAD:
            rs = load_scales(rs_ptr, x_rows, x_ok, kept, k_begin, True, BK)
        for k0 in range(k_begin, k_mid, BK):
            w = load_codes(w_ptr, w_rows, w_ok, BLOCKS, k0, MASK_K, NATIVE, BK)
            x = load_codes(x_ptr, x_rows, x_ok, BLOCKS, k0, MASK_K, NATIVE, BK)
            r = load_codes(r_ptr, x_rows, x_ok, kept, k0, True, NATIVE, BK)
            if W_AHEAD:
                ws_next = load_scales(ws_ptr, w_rows, w_ok, BLOCKS, k0 + BK, True, BK)
            else:
                ws = load_scales(ws_ptr, w_rows, w_ok, BLOCKS, k0, MASK_K, BK)
            if X_AHEAD:
                xs_next = load_scales(xs_ptr, x_rows, x_ok, BLOCKS, k0 + BK, True, BK)
            else:
                xs = load_scales(xs_ptr, x_rows, x_ok, BLOCKS, k0, MASK_K, BK)
            if R_AHEAD:
                rs_next = load_scales(rs_ptr, x_rows, x_ok, kept, k0 + BK, True, BK)
            else:
                rs = load_scales(rs_ptr, x_rows, x_ok, kept, k0, True, BK)
            acc = step(acc, x, xs, r, rs, w, ws, True, NATIVE, WEIGHTS_ON_M, TM, TN, BK, HW)
            if W_AHEAD:
                ws = ws_next
            if X_AHEAD:
                xs = xs_next
            if R_AHEAD:
                rs = rs_next
    for k0 in range(k_mid, k_end, BK):
        w = load_codes(w_ptr, w_rows, w_ok, BLOCKS, k0, MASK_K, NATIVE, BK)
        x = load_codes(x_ptr, x_rows, x_ok, BLOCKS, k0, MASK_K, NATIVE, BK)
        if W_AHEAD:
            ws_next = load_scales(ws_ptr, w_rows, w_ok, BLOCKS, k0 + BK, True, BK)
        else:
            ws = load_scales(ws_ptr, w_rows, w_ok, BLOCKS, k0, MASK_K, BK)
        if X_AHEAD:
            xs_next = load_scales(xs_ptr, x_rows, x_ok, BLOCKS, k0 + BK, True, BK)
        else:
            xs = load_scales(xs_ptr, x_rows, x_ok, BLOCKS, k0, MASK_K, BK)
        acc = step(acc, x, xs, x, xs, w, ws, False, NATIVE, WEIGHTS_ON_M, TM, TN, BK, HW)
        if W_AHEAD:
            ws = ws_next
        if X_AHEAD:
            xs = xs_next
    return acc
