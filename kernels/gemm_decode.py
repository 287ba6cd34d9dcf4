"""Dense W4A4 product with residual for few tokens: weights on the M side of the tile, K shared between programs.

Reading the weight is what takes time, and each of its tiles is read once, with or without residual. The tensor core's
M side wants 64 or 128 rows, which few tokens cannot fill and weights can. Where the output has too few tiles to
occupy the GPU, several programs share one along K and leave FP32 partial sums, added in a fixed order: the same inputs
give the same bits.
"""

import torch
import triton
import triton.language as tl

from quads_kernels import configs, launch
from quads_kernels.activation import Quantized
from quads_kernels.gemm_epilogue import biased, scaled
from quads_kernels.gemm_launch import kept_units, processors, run
from quads_kernels.gemm_loop import accumulate
from quads_kernels.gemm_shares import add_shares, shares_of
from quads_kernels.gemm_tile import EMULATED_EPILOGUE_SCALE
from quads_kernels.rounding import cast


@triton.jit(do_not_specialize=["kept_units", "M"])
def w4a4_decode_kernel(
    x_ptr,
    xs_ptr,
    g_ptr,
    r_ptr,
    rs_ptr,
    w_ptr,
    ws_ptr,
    gw_ptr,
    bias_ptr,
    out_ptr,
    kept_units,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    K_SHARE: tl.constexpr,
    KEPT_UNIT: tl.constexpr,
    GW_PER_ROW: tl.constexpr,
    NATIVE: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    BK: tl.constexpr,
    WARPS: tl.constexpr,
    HW: tl.constexpr,
):
    """One tile of the output, or of one of its partial sums. Grid: (tiles of N, tiles of M, shares of K).

    K_SHARE: channels of one program, a multiple of BK, or K. With more than one share, out is FP32 [shares, M, N] and
    holds unscaled sums.
    """
    n = tl.program_id(0) * TN + tl.arange(0, TN)
    m = tl.program_id(1) * TM + tl.arange(0, TM)
    share = tl.program_id(2)
    m_ok = m < M
    n_ok = n < N
    rows = m.to(tl.int64)
    acc = tl.zeros((TN, TM), tl.float32)
    acc = accumulate(
        acc, x_ptr, xs_ptr, rows, m_ok, r_ptr, rs_ptr, kept_units, w_ptr, ws_ptr, n.to(tl.int64), n_ok,
        share * K_SHARE, min(share * K_SHARE + K_SHARE, K),
        K, KEPT_UNIT, r_ptr is not None, NATIVE, True, TM, TN, BK, WARPS, HW,
    )  # fmt: skip
    out = tl.trans(acc)
    at = out_ptr + rows[:, None] * N + n[None, :]
    ok = m_ok[:, None] & n_ok[None, :]
    if K_SHARE < K:
        tl.store(at + share.to(tl.int64) * M * N, out, mask=ok)
    else:
        g = tl.load(g_ptr + m, mask=m_ok, other=0.0)
        out = scaled(out, g, gw_ptr, n, n_ok, GW_PER_ROW, 1.0 if NATIVE else EMULATED_EPILOGUE_SCALE)
        out = biased(out, bias_ptr, n, n_ok, HW)
        tl.store(at, cast(out, out_ptr.dtype.element_ty, HW), mask=ok)


def launch_decode(rows: Quantized, kept: int, weight, bias, out: torch.Tensor, tile, splits, native: bool) -> None:
    """Fill `out` [M, N]. Arguments are checked by `quads_kernels.gemm.w4a4_gemm`; splits: None for the default."""
    (m, n), k, device = out.shape, 2 * rows.packed.shape[1], out.device
    if splits is None:
        splits = configs.split_k(tile, m, n, k, processors(device))
    share, shares = shares_of(k, splits, tile)
    target = out if shares == 1 else launch.empty((shares, m, n), torch.float32, device)
    per_row = weight.global_scale_dec.numel() > 1
    units, unit = kept_units(kept)
    run(
        w4a4_decode_kernel,
        (triton.cdiv(n, tile.weights), triton.cdiv(m, tile.tokens), shares),
        device,
        native,
        rows.packed, rows.block_scales, rows.global_scale_dec, rows.residual_packed, rows.residual_block_scales,
        weight.packed, weight.block_scales, weight.global_scale_dec, bias, target, units, m,
        N=n, K=k, K_SHARE=share, KEPT_UNIT=unit, TM=tile.tokens, TN=tile.weights, BK=tile.k,
        WARPS=tile.warps, num_warps=tile.warps, num_stages=tile.stages, GW_PER_ROW=per_row, NATIVE=native,
    )  # fmt: skip
    if shares > 1:
        scale = 1.0 if native else EMULATED_EPILOGUE_SCALE.value
        add_shares(target, rows.global_scale_dec, weight.global_scale_dec, bias, out, scale)
