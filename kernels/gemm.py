"""Dense W4A4 product with residual for many tokens, from codes: tokens on the M side of the tile.

    y[m, n] = g[m] * gw * (sum_k x[m, k] w[n, k] + sum_{k < k_res} r[m, k] w[n, k]) + bias[n]

x, r, w are E2M1 codes times E4M3 block scales, exact in FP16 and in the tensor core; sums are FP32. See
`quads_kernels.gemm_loop` for the K loop, `quads_kernels.gemm_decode` for few tokens, and `quads_kernels.gemm_sums` for
activations whose residual is in a sum. `w4a4_gemm` picks the form.
"""

import torch
import triton
import triton.language as tl

from quads_kernels import configs, launch
from quads_kernels.activation import Quantized
from quads_kernels.gemm_decode import launch_decode
from quads_kernels.gemm_epilogue import biased, scaled
from quads_kernels.gemm_grid import GROUP, tile_of_program
from quads_kernels.gemm_launch import (
    check_form,
    check_out_dtype,
    check_rows,
    check_weight,
    gpu_name,
    kept_units,
    processors,
    run,
)
from quads_kernels.gemm_loop import accumulate
from quads_kernels.gemm_sums import launch_sums
from quads_kernels.gemm_tile import EMULATED_EPILOGUE_SCALE
from quads_kernels.rounding import cast


@triton.jit(do_not_specialize=["kept_units", "M"])
def w4a4_gemm_kernel(
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
    KEPT_UNIT: tl.constexpr,
    GW_PER_ROW: tl.constexpr,
    NATIVE: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
    HW: tl.constexpr,
):
    """One [TM, TN] tile of the output. Grid: (tiles,). Shapes as in `w4a4_gemm`; kept_units * KEPT_UNIT: blocks of the
    residual."""
    m, n = tile_of_program(M, N, TM, TN, GROUP)
    m_ok = m < M
    n_ok = n < N
    rows = m.to(tl.int64)
    acc = tl.zeros((TM, TN), tl.float32)
    acc = accumulate(
        acc, x_ptr, xs_ptr, rows, m_ok, r_ptr, rs_ptr, kept_units,
        w_ptr, ws_ptr, n.to(tl.int64), n_ok, 0, K, K, KEPT_UNIT, r_ptr is not None, NATIVE, False,
        TM, TN, BK, WARPS, HW,
    )  # fmt: skip
    g = tl.load(g_ptr + m, mask=m_ok, other=0.0)
    out = scaled(acc, g, gw_ptr, n, n_ok, GW_PER_ROW, 1.0 if NATIVE else EMULATED_EPILOGUE_SCALE)
    out = biased(out, bias_ptr, n, n_ok, HW)
    out = cast(out, out_ptr.dtype.element_ty, HW)
    tl.store(out_ptr + rows[:, None] * N + n[None, :], out, mask=m_ok[:, None] & n_ok[None, :])


def w4a4_gemm(
    rows: Quantized,
    weight,
    *,
    out_dtype: torch.dtype,
    native: bool,
    bias: torch.Tensor | None = None,
    tile: configs.Tile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Multiply quantized activations with a quantized weight, with or without residual: out_dtype [M, N].

    rows: activations [M, K] from `quads_kernels.activation.quantize`: packed codes, or, emulated only, sums (in the
        order of `quads_kernels.sum_order`), which have the residual in them and cost one product.
    weight: has `packed` uint8 [N, K/2], `block_scales` uint8 [N, K/16], both with K in the order of the activations,
        and `global_scale_dec` FP32: one number ([] or [1]) or one for each row of the weight ([N]).
    out_dtype: FP32, FP16 or BF16. bias: any of them, [N], added in FP32.
    native: multiply in the NVFP4 tensor core (Blackwell) instead of emulating.
    tile, splits: override the choice of `quads_kernels.configs`; splits needs a tile with weights on the M side.
    Raises ValueError on a wrong argument, RuntimeError where `native` was compiled to something else.
    """
    m, k, kept, device = check_rows(rows)
    n = check_weight(weight, (), k, device)
    _check_epilogue(weight.global_scale_dec, bias, out_dtype, n, device)
    bias = None if bias is None else bias.contiguous()
    sm, sums = launch.capability(device), rows.sums is not None
    tile = tile or configs.choose_dense(sm, native, m, n, k, processors(device), gpu_name(device), sums=sums)
    check_form(tile, sm, native, sums)
    splittable = tile.weights_on_m or splits in (None, 1)
    launch.require(splittable, f"splits={splits} needs a tile with weights on the M side, not {tile}")
    out = launch.empty((m, n), out_dtype, device)
    if m == 0:
        return out
    if sums:
        launch_sums(rows, weight, bias, out, tile, splits)
    elif tile.weights_on_m:
        launch_decode(rows, kept, weight, bias, out, tile, splits, native)
    else:
        _launch_prefill(rows, kept, weight, bias, out, tile, native)
    return out


def _launch_prefill(rows: Quantized, kept: int, weight, bias, out: torch.Tensor, tile, native: bool) -> None:
    m, n = out.shape
    units, unit = kept_units(kept)
    run(
        w4a4_gemm_kernel,
        (triton.cdiv(m, tile.tokens) * triton.cdiv(n, tile.weights),),
        out.device,
        native,
        rows.packed, rows.block_scales, rows.global_scale_dec, rows.residual_packed, rows.residual_block_scales,
        weight.packed, weight.block_scales, weight.global_scale_dec, bias, out,
        units, m,
        N=n, K=2 * rows.packed.shape[1], KEPT_UNIT=unit, GW_PER_ROW=weight.global_scale_dec.numel() > 1,
        NATIVE=native, TM=tile.tokens, TN=tile.weights, BK=tile.k, GROUP=GROUP,
        WARPS=tile.warps, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _check_epilogue(gw: torch.Tensor, bias, out_dtype: torch.dtype, n: int, device: torch.device) -> None:
    check_out_dtype(out_dtype)
    launch.require_tensor("global_scale_dec of the weight", gw, torch.float32, device)
    launch.require(
        gw.numel() == 1 or tuple(gw.shape) == (n,),
        f"global_scale_dec of the weight must hold one number, or one per row of the weight ({n}); "
        f"got shape {tuple(gw.shape)}",
    )
    launch.require_contiguous("global_scale_dec of the weight", gw)
    if bias is not None:
        launch.require_tensor("bias", bias, launch.FLOATS, device, (n,))
