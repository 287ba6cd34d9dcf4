"""One step along K of a W4A4 product with residual: dequantize or hand over codes, multiply, accumulate.

`native` multiplies codes and E4M3 scales in the tensor core (`tl.dot_scaled`, Blackwell: PTX `kind::mxf4nvf4`).
`emulated` expands codes to FP16 in registers, exactly, and uses an FP16 product with an FP32 accumulator. It reads
codes as 32-bit words of eight and takes two of them per integer operation; the product runs over four interleaved
quarters of the tile, which permutes K alike on both sides and so changes only the order of the sum.
`quads_kernels.gemm_sums` has the emulated form with one product.

HW: as in `quads_kernels.rounding`; here it says that inline assembly can be used.
"""

import triton
import triton.language as tl

# e2m1 * s8 is a multiple of 2^-10 with at most 6 significant bits and at most 2688. The expansion below yields it
# times 2^-10: between 2^-20 and 2.63, exact in FP16. Two such operands leave 2^-20, undone in the epilogue.
_SCALE_BITS_TO_F16 = tl.constexpr(2.0**12)  # E4M3 bits read as FP16 are the value times 2^-8; wanted: times 2^4
EMULATED_EPILOGUE_SCALE = tl.constexpr(2.0**20)

# Triton 3.6 (tried) fails to compile for sm_100 where two products take their scales from one place in tensor memory;
# 3.9 does not. There the second product gets a copy that Triton's passes do not recognize as one.
COPY_SCALES = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9))


@triton.jit
def scales_f16(scales):
    """E4M3 bytes -> FP16, the value times 2^4, exact; 0x7F gives NaN. Shape is kept."""
    bits = (scales.to(tl.uint16) & 0x7F) << 7
    value = bits.to(tl.float16, bitcast=True) * _SCALE_BITS_TO_F16
    return tl.where(bits == (0x7F << 7), float("nan"), value).to(tl.float16)


@triton.jit
def halves_f16(bits, HW: tl.constexpr):
    """uint32 -> its low and its high half as FP16."""
    if HW:
        # The same as below in one instruction, which ptxas then removes; from shifts it makes two.
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [bits], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )
    low = bits.to(tl.uint16).to(tl.float16, bitcast=True)
    return low, (bits >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def quarter_f16(words, scales, QUARTER: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, HW: tl.constexpr):
    """Nibbles QUARTER and QUARTER + 4 of every word, dequantized: FP16 [ROWS, BK/4], the value times 2^-10, exact.

    words: uint32 [ROWS, BK/8]. scales: FP16 [ROWS, BK/16] from `scales_f16`.
    """
    # E2M1's exponent and mantissa, placed under FP16's, read as the value times 2^-14 (0.5 is subnormal in both).
    if QUARTER < 3:
        bits = (words << (9 - 4 * QUARTER)) & 0x0E000E00
    else:
        bits = (words >> 3) & 0x0E000E00
    bits = bits | ((words << (12 - 4 * QUARTER)) & 0x80008000)
    low, high = halves_f16(bits, HW)
    pairs = tl.reshape(tl.join(low, high), (ROWS, BK // 16, 4))
    return tl.reshape(pairs * scales[:, :, None], (ROWS, BK // 4))


@triton.jit
def dot_f16(acc, x, w, WEIGHTS_ON_M: tl.constexpr):
    """acc += x w^T as [TM, TN], or w x^T as [TN, TM] with the weights on the M side."""
    if WEIGHTS_ON_M:
        acc = tl.dot(w, tl.trans(x), acc)
    else:
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def dot_native(acc, x, xs, w, ws, WEIGHTS_ON_M: tl.constexpr):
    """The same from packed codes (uint8 [*, BK/2]) and E4M3 scales [*, BK/16]."""
    if WEIGHTS_ON_M:
        acc = tl.dot_scaled(w, ws, "e2m1", tl.trans(x), xs, "e2m1", acc)
    else:
        acc = tl.dot_scaled(x, xs, "e2m1", tl.trans(w), ws, "e2m1", acc)
    return acc


@triton.jit
def step(
    acc,
    x,
    xs,
    r,
    rs,
    w,
    ws,
    HAS_RESIDUAL: tl.constexpr,
    NATIVE: tl.constexpr,
    WEIGHTS_ON_M: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    BK: tl.constexpr,
    HW: tl.constexpr,
):
    """acc += x w^T (+ r w^T): the weight tile is expanded or handed over once and serves both products.

    x, r: tokens' codes (native: uint8 [TM, BK/2], emulated: uint32 [TM, BK/8]); w: weights' codes, [TN, ...];
    xs, rs, ws: E4M3 bytes [*, BK/16]. r and rs are ignored without residual.
    """
    if NATIVE:
        ws8 = ws.to(tl.float8e4nv, bitcast=True)
        acc = dot_native(acc, x, xs.to(tl.float8e4nv, bitcast=True), w, ws8, WEIGHTS_ON_M)
        if HAS_RESIDUAL:
            if COPY_SCALES:
                zero = (tl.program_id(0) >> 31).to(tl.uint8)
                ws8 = (ws ^ zero).to(tl.float8e4nv, bitcast=True)
            acc = dot_native(acc, r, rs.to(tl.float8e4nv, bitcast=True), w, ws8, WEIGHTS_ON_M)
    else:
        ws16 = scales_f16(ws)
        xs16 = scales_f16(xs)
        if HAS_RESIDUAL:
            rs16 = scales_f16(rs)
        for quarter in tl.static_range(4):
            w16 = quarter_f16(w, ws16, quarter, TN, BK, HW)
            x16 = quarter_f16(x, xs16, quarter, TM, BK, HW)
            if HAS_RESIDUAL:
                r16 = quarter_f16(r, rs16, quarter, TM, BK, HW)
                acc = dot_f16(acc, r16, w16, WEIGHTS_ON_M)
            acc = dot_f16(acc, x16, w16, WEIGHTS_ON_M)
    return acc
