"""Shares of K: several programs share an output tile along K, and leave FP32 partial sums that are added in order."""

import torch
import triton
import triton.language as tl

from quads_kernels.gemm_epilogue import biased, scaled
from quads_kernels.gemm_launch import run
from quads_kernels.rounding import cast

REDUCE_COLUMNS = 1024


@triton.jit(do_not_specialize=["M"])
def add_shares_kernel(
    partial_ptr,
    g_ptr,
    gw_ptr,
    bias_ptr,
    out_ptr,
    M,
    N: tl.constexpr,
    SHARES: tl.constexpr,
    GW_PER_ROW: tl.constexpr,
    SCALE: tl.constexpr,
    TN: tl.constexpr,
    HW: tl.constexpr,
):
    """Add the partial sums of one row in their order, then scales and bias. Grid: (M, tiles of N)."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TN + tl.arange(0, TN)
    n_ok = n < N
    total = tl.zeros((TN,), tl.float32)
    for share in range(SHARES):
        total += tl.load(partial_ptr + (share * M + m) * N + n, mask=n_ok, other=0.0)
    g = tl.load(g_ptr + m + tl.zeros((1,), tl.int32))
    out = scaled(total[None, :], g, gw_ptr, n, n_ok, GW_PER_ROW, SCALE)
    out = biased(out, bias_ptr, n, n_ok, HW)
    tl.store(out_ptr + m * N + n[None, :], cast(out, out_ptr.dtype.element_ty, HW), mask=n_ok[None, :])


def shares_of(k: int, splits: int, tile) -> tuple[int, int]:
    """(channels of a share, number of shares): at most `splits`, each of whole steps of the tile but the last one."""
    share = min(k, triton.cdiv(triton.cdiv(k, splits), tile.k) * tile.k)
    return share, triton.cdiv(k, share)


def add_shares(
    partial: torch.Tensor, g: torch.Tensor, gw: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, scale: float
) -> None:
    """Fill `out` [M, N] with the sum of partial [shares, M, N] * scale * g of each row * gw, plus bias."""
    shares, m, n = partial.shape
    run(
        add_shares_kernel,
        (m, triton.cdiv(n, REDUCE_COLUMNS)),
        out.device,
        False,
        partial, g, gw, bias, out, m,
        N=n, SHARES=shares, TN=REDUCE_COLUMNS, num_warps=4, GW_PER_ROW=gw.numel() > 1, SCALE=scale,
    )  # fmt: skip
