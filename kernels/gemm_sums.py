"""Dense W4A4 product from FP16 sums of activation and residual: emulated, weights on the M side.

    y[m, n] = g[m] * gw * sum_k s[m, k] w[n, k] + bias[n]        s = x, or x + r where the residual is kept

The quantizer leaves s in FP16 (`quads_kernels.activation`, in the order of `quads_kernels.sum_order`): it is copied
asynchronously into shared memory and multiplied as it is, so a residual costs nothing here. The weight is the tensor
core's first operand, which comes from registers: it never goes through shared memory, and is dequantized while the
product of the step before still runs.
"""

import torch
import triton
import triton.language as tl

from quads_kernels import configs, launch
from quads_kernels.activation import Quantized
from quads_kernels.gemm_epilogue import biased, scaled
from quads_kernels.gemm_grid import GROUP, tile_of_program
from quads_kernels.gemm_launch import converts_e4m3, processors, run
from quads_kernels.gemm_shares import add_shares, shares_of
from quads_kernels.gemm_sums_loop import accumulate_sums, weight_rows
from quads_kernels.gemm_sums_tile import SUMS_EPILOGUE_SCALE
from quads_kernels.rounding import cast


@triton.jit(do_not_specialize=["M"])
def w4a4_sums_kernel(
    s_ptr,
    g_ptr,
    w_ptr,
    ws_ptr,
    gw_ptr,
    bias_ptr,
    out_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    K_SHARE: tl.constexpr,
    GW_PER_ROW: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
    E4M3: tl.constexpr,
    HW: tl.constexpr,
):
    """One [TM, TN] tile of the output, or of one of its partial sums. Grid: (tiles, shares of K).

    s: FP16 [M, K]; other shapes as in `w4a4_gemm`, K_SHARE and partial sums as in `quads_kernels.gemm_decode`.
    """
    m, n = tile_of_program(M, N, TM, TN, GROUP)
    m_ok = m < M
    n_ok = n < N
    share = tl.program_id(1)
    k_begin, k_end = share * K_SHARE, min(share * K_SHARE + K_SHARE, K)
    if K_SHARE == K:
        k_begin, k_end = 0, K
    acc = tl.zeros((TN, TM), tl.float32)
    acc = accumulate_sums(
        acc, s_ptr, tl.minimum(m, M - 1).to(tl.int64), m_ok, w_ptr, ws_ptr, weight_rows(n, N, TN),
        k_begin, k_end, K, TM, TN, BK, WARPS, HW, E4M3,
    )  # fmt: skip
    out = tl.trans(acc)
    at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    ok = m_ok[:, None] & n_ok[None, :]
    if K_SHARE < K:
        tl.store(at + share.to(tl.int64) * M * N, out, mask=ok)
    else:
        g = tl.load(g_ptr + m, mask=m_ok, other=0.0)
        out = scaled(out, g, gw_ptr, n, n_ok, GW_PER_ROW, SUMS_EPILOGUE_SCALE)
        out = biased(out, bias_ptr, n, n_ok, HW)
        tl.store(at, cast(out, out_ptr.dtype.element_ty, HW), mask=ok)


def launch_sums(rows: Quantized, weight, bias, out: torch.Tensor, tile, splits: int | None) -> None:
    """Fill `out` [M, N]. Arguments are checked by `quads_kernels.gemm.w4a4_gemm`; splits: None for the default."""
    (m, n), k, device = out.shape, rows.sums.shape[1], out.device
    if splits is None:
        splits = configs.split_k(tile, m, n, k, processors(device), sums=True)
    share, shares = shares_of(k, splits, tile)
    target = out if shares == 1 else launch.empty((shares, m, n), torch.float32, device)
    run(
        w4a4_sums_kernel,
        (triton.cdiv(m, tile.tokens) * triton.cdiv(n, tile.weights), shares),
        device,
        False,
        rows.sums, rows.global_scale_dec, weight.packed, weight.block_scales, weight.global_scale_dec, bias, target, m,
        N=n, K=k, K_SHARE=share, GW_PER_ROW=weight.global_scale_dec.numel() > 1,
        TM=tile.tokens, TN=tile.weights, BK=tile.k, GROUP=GROUP, E4M3=converts_e4m3(device),
        WARPS=tile.warps, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if shares > 1:
        add_shares(target, rows.global_scale_dec, weight.global_scale_dec, bias, out, SUMS_EPILOGUE_SCALE.value)
