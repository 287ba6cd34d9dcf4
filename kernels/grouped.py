"""Grouped W4A4 product with residual: each block of sorted rows multiplies its own expert's weight.

The layout comes from `quads_kernels.expert_sort`. The grid covers the most blocks that any routing may need, and a
program whose block is not needed returns at once, so the host never waits to learn the routing.
"""

import torch
import triton
import triton.language as tl

from quads_kernels import configs, launch
from quads_kernels.activation import Quantized
from quads_kernels.expert_sort import SortedPairs
from quads_kernels.gemm_epilogue import scaled
from quads_kernels.gemm_launch import (
    check_form,
    check_out_dtype,
    check_rows,
    check_weight,
    converts_e4m3,
    kept_units,
    run,
)
from quads_kernels.gemm_loop import accumulate
from quads_kernels.gemm_sums_loop import accumulate_sums, weight_rows
from quads_kernels.gemm_sums_tile import SUMS_EPILOGUE_SCALE
from quads_kernels.gemm_tile import EMULATED_EPILOGUE_SCALE
from quads_kernels.rounding import cast, to_fp32

ADD_COLUMNS = 1024
WIDEST_STORE = tl.constexpr(2**14)
"""Elements of a tile that a program transposes and stores at once."""


@triton.jit(do_not_specialize=["kept_units"])
def w4a4_grouped_kernel(
    x_ptr,
    xs_ptr,
    g_ptr,
    r_ptr,
    rs_ptr,
    w_ptr,
    ws_ptr,
    gw_ptr,
    members_ptr,
    offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    pair_weight_ptr,
    out_ptr,
    kept_units,
    N: tl.constexpr,
    K: tl.constexpr,
    KEPT_UNIT: tl.constexpr,
    TOPK: tl.constexpr,
    SUMS: tl.constexpr,
    NATIVE: tl.constexpr,
    WEIGHTS_ON_M: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    BK: tl.constexpr,
    WARPS: tl.constexpr,
    E4M3: tl.constexpr,
    HW: tl.constexpr,
):
    """One [TM, TN] tile of out [L, N], in sorted rows. Grid (blocks * tiles of N,).

    SUMS: x holds FP16 sums, and there is no xs, r or rs.

    TOPK > 0: x holds tokens, and sorted row i reads token members[i] // TOPK. TOPK = 0: x holds sorted rows.
    pair_weight: FP32 [P], multiplied to the row of its pair, or None.
    """
    tiles_n = tl.cdiv(N, TN)
    block = tl.program_id(0) // tiles_n
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(block_row_ptr + block)
    end = tl.load(offsets_ptr + expert + 1)
    row = first + tl.arange(0, TM)
    row_ok = row < end
    source = row
    if TOPK:
        source = tl.load(members_ptr + row, mask=row_ok, other=0) // TOPK
    n = tl.program_id(0) % tiles_n * TN + tl.arange(0, TN)
    n_ok = n < N
    if WEIGHTS_ON_M:
        acc = tl.zeros((TN, TM), tl.float32)
    else:
        acc = tl.zeros((TM, TN), tl.float32)
    w_ptr += expert * (N * (K // 2))
    ws_ptr += expert * (N * (K // 16))
    if SUMS:
        x_rows = tl.where(row_ok, source, 0).to(tl.int64)
        acc = accumulate_sums(
            acc, x_ptr, x_rows, row_ok, w_ptr, ws_ptr, weight_rows(n, N, TN), 0, K, K, TM, TN, BK, WARPS, HW, E4M3,
        )  # fmt: skip
        SCALE: tl.constexpr = SUMS_EPILOGUE_SCALE
    else:
        acc = accumulate(
            acc, x_ptr, xs_ptr, source.to(tl.int64), row_ok, r_ptr, rs_ptr, kept_units,
            w_ptr, ws_ptr, n.to(tl.int64), n_ok,
            0, K, K, KEPT_UNIT, r_ptr is not None, NATIVE, WEIGHTS_ON_M, TM, TN, BK, WARPS, HW,
        )  # fmt: skip
        SCALE: tl.constexpr = 1.0 if NATIVE else EMULATED_EPILOGUE_SCALE
    if WEIGHTS_ON_M and TM * TN > WIDEST_STORE:
        # One half after the other: all at once would take more registers than there are.
        one, other = tl.split(tl.permute(tl.reshape(acc, (TN, 2, TM // 2)), (0, 2, 1)))
        store_rows(
            tl.trans(one), first, end, n, g_ptr, gw_ptr + expert, members_ptr, pair_weight_ptr, out_ptr,
            N, TOPK, SCALE, TM // 2, HW,
        )  # fmt: skip
        store_rows(
            tl.trans(other), first + TM // 2, end, n, g_ptr, gw_ptr + expert, members_ptr, pair_weight_ptr, out_ptr,
            N, TOPK, SCALE, TM // 2, HW,
        )  # fmt: skip
    else:
        if WEIGHTS_ON_M:
            acc = tl.trans(acc)
        store_rows(
            acc, first, end, n, g_ptr, gw_ptr + expert, members_ptr, pair_weight_ptr, out_ptr, N, TOPK, SCALE, TM, HW
        )


@triton.jit
def store_rows(
    acc,
    first,
    end,
    n,
    g_ptr,
    gw_ptr,
    members_ptr,
    pair_weight_ptr,
    out_ptr,
    N: tl.constexpr,
    TOPK: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    HW: tl.constexpr,
):
    """Scale acc [ROWS, TN], the product of sorted rows first, first + 1, ... with columns n, and store rows < end."""
    row = first + tl.arange(0, ROWS)
    row_ok = row < end
    n_ok = n < N
    source = row
    if TOPK or pair_weight_ptr is not None:
        pair = tl.load(members_ptr + row, mask=row_ok, other=0)
    if TOPK:
        source = pair // TOPK
    g = tl.load(g_ptr + source, mask=row_ok, other=0.0)
    if pair_weight_ptr is not None:
        g = g * tl.load(pair_weight_ptr + pair, mask=row_ok, other=0.0)
    out = scaled(acc, g, gw_ptr, n, n_ok, False, SCALE)
    at = out_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, cast(out, out_ptr.dtype.element_ty, HW), mask=row_ok[:, None] & n_ok[None, :])


@triton.jit
def add_experts_kernel(
    rows_ptr, place_ptr, out_ptr, N, TOPK: tl.constexpr, TN: tl.constexpr, HW: tl.constexpr
):  # fmt: skip
    """out[m] = sum of the rows of token m's pairs, in FP32 and in the order of topk. Grid (M, tiles of N)."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TN + tl.arange(0, TN)
    total = tl.zeros((TN,), tl.float32)
    for t in tl.static_range(TOPK):  # unrolled, so that the rows are waited for together
        row = tl.load(place_ptr + m * TOPK + t).to(tl.int64)
        columns = tl.where(row < 0, 0, N)
        total += to_fp32(tl.load(rows_ptr + row * N + n, mask=n < columns, other=0.0), HW)
    tl.store(out_ptr + m * N + n, cast(total, out_ptr.dtype.element_ty, HW), mask=n < N)


def grouped_gemm(
    rows: Quantized,
    weight,
    plan: SortedPairs,
    tile: configs.Tile,
    *,
    out_dtype: torch.dtype,
    native: bool,
    topk: int = 0,
    pair_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each sorted row with its expert's weight: out_dtype [P, N]. Rows from L on are not written.

    rows: quantized tokens [M, K] with topk > 0, or sorted rows [P, K] with topk = 0; codes or sums, as in `w4a4_gemm`.
    weight: `packed` uint8 [E, N, K/2], `block_scales` uint8 [E, N, K/16], `global_scale_dec` FP32 [E].
    plan: from `sort_by_expert` with block = tile.tokens. pair_weight: FP32 [P], the router's weights, or None.
    Raises ValueError on a wrong argument, RuntimeError where `native` was compiled to something else.
    """
    m, k, kept, device = check_rows(rows)
    experts, pairs = plan.offsets.numel() - 1, plan.place.numel()
    n = check_weight(weight, (experts,), k, device)
    check_out_dtype(out_dtype)
    launch.require_tensor("global_scale_dec of the experts", weight.global_scale_dec, torch.float32, device, (experts,))
    launch.require_contiguous("global_scale_dec of the experts", weight.global_scale_dec)
    launch.require(m * max(topk, 1) == pairs, f"{m} rows with topk={topk} do not match the plan's {pairs} pairs")
    if pair_weight is not None:
        launch.require_tensor("pair_weight", pair_weight, torch.float32, device, (pairs,))
        launch.require_contiguous("pair_weight", pair_weight)
    sums = rows.sums is not None
    check_form(tile, launch.capability(device), native, sums)
    out = launch.empty((pairs, n), out_dtype, device)
    units, unit = kept_units(kept)
    run(
        w4a4_grouped_kernel,
        (plan.block_expert.numel() * triton.cdiv(n, tile.weights),),
        device,
        native,
        rows.sums if sums else rows.packed, rows.block_scales, rows.global_scale_dec,
        rows.residual_packed, rows.residual_block_scales,
        weight.packed, weight.block_scales, weight.global_scale_dec,
        plan.members, plan.offsets, plan.block_expert, plan.block_row, pair_weight, out, units,
        N=n, K=k, KEPT_UNIT=unit, TOPK=topk, SUMS=sums, NATIVE=native, WEIGHTS_ON_M=tile.weights_on_m,
        TM=tile.tokens, TN=tile.weights, BK=tile.k,
        WARPS=tile.warps, E4M3=sums and converts_e4m3(device), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def add_experts(rows: torch.Tensor, plan: SortedPairs, tokens: int, out_dtype: torch.dtype) -> torch.Tensor:
    """Sum over each token's experts: sorted rows [P, N] -> out_dtype [tokens, N]. Zero for a token with none here."""
    n, topk = rows.shape[1], plan.place.numel() // max(tokens, 1)
    out = launch.empty((tokens, n), out_dtype, rows.device)
    run(
        add_experts_kernel,
        (tokens, triton.cdiv(n, ADD_COLUMNS)),
        rows.device,
        False,
        rows, plan.place, out, n, TOPK=topk, TN=ADD_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
