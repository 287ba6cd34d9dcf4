"""What follows the K loop: scales, bias, and the one rounding to the output's dtype."""

import triton
import triton.language as tl

from quads_kernels.rounding import to_fp32


@triton.jit
def scaled(acc, g_rows, gw_ptr, columns, columns_ok, GW_PER_ROW: tl.constexpr, SCALE: tl.constexpr):
    """acc [TM, TN] * SCALE, a power of two, * g of each token [TM] * g of the weight: one for the matrix, or one for
    each of its rows."""
    if SCALE != 1:
        acc = acc * SCALE
    acc = acc * g_rows[:, None]
    if GW_PER_ROW:
        return acc * tl.load(gw_ptr + columns, mask=columns_ok, other=0.0)[None, :]
    return acc * tl.load(gw_ptr)


@triton.jit
def biased(out, bias_ptr, columns, columns_ok, HW: tl.constexpr):
    """out [TM, TN] plus a bias per column, in FP32; None: no bias."""
    if bias_ptr is not None:
        out = out + to_fp32(tl.load(bias_ptr + columns, mask=columns_ok, other=0.0), HW)[None, :]
    return out
