"""A weight tile for `quads_kernels.gemm_sums`: packed codes dequantized to FP16, where the tensor core takes them from
registers. K comes in the order of `quads_kernels.sum_order`.

E4M3: whether the GPU converts E4M3 to FP16 (sm_89 and later); without it, as in the interpreter, integers do.
HW: as in `quads_kernels.gemm_tile`.
"""

import triton
import triton.language as tl

from quads_kernels.gemm_tile import halves_f16, scales_f16

SUMS_EPILOGUE_SCALE = tl.constexpr(2.0**24)
"""Sums are times 2^-10; a weight's codes and scales come out as e2m1 * s8 * 2^-14, a multiple of 2^-24: exact."""


# A byte for each of the even and of the odd nibbles: sign, three zeros, E2M1's exponent and mantissa, zero. Above a
# byte of zeros this reads as FP16 as the value times 2^-14. Outputs are $0 to $7, the word is $8, its scale's byte $9.
EIGHT_VALUES = tl.constexpr("""
{
    .reg .b32 even, odd, t, s, v;
    .reg .b16 one, other;
    shl.b32 t, $8, 4;
    and.b32 t, t, 0x80808080;
    shl.b32 even, $8, 1;
    lop3.b32 even, even, 0x0E0E0E0E, t, 0xEA;
    shr.b32 t, $8, 3;
    and.b32 t, t, 0x0E0E0E0E;
    lop3.b32 odd, $8, 0x80808080, t, 0xEA;
    cvt.rn.f16x2.e4m3x2 s, $9;
    mov.b32 {one, other}, s;
    mov.b32 s, {one, one};
    prmt.b32 v, even, 0, 0x2404;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$0, $1}, v;
    prmt.b32 v, odd, 0, 0x2404;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$2, $3}, v;
    prmt.b32 v, even, 0, 0x3414;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$4, $5}, v;
    prmt.b32 v, odd, 0, 0x3414;
    mul.rn.f16x2 v, v, s;
    mov.b32 {$6, $7}, v;
}
""")


@triton.jit
def eight_values(words, scales):
    """Eight FP16 tensors like `words`: nibble i of each word, times 2^-14 and its scale, in the order 0 4 1 5 2 6 3 7.

    words: uint32. scales: uint16, the E4M3 byte of each word.
    """
    return tl.inline_asm_elementwise(
        EIGHT_VALUES,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h",
        [words, scales],
        dtype=(tl.float16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def pair_values(words, scales, QUARTER: tl.constexpr, HW: tl.constexpr):
    """Nibbles QUARTER and QUARTER + 4 of each word, times 2^-14 and the FP16 scale of the word."""
    if QUARTER < 3:
        bits = (words << (9 - 4 * QUARTER)) & 0x0E000E00
    else:
        bits = (words >> 3) & 0x0E000E00
    low, high = halves_f16(bits | ((words << (12 - 4 * QUARTER)) & 0x80008000), HW)
    return (low * scales).to(tl.float16), (high * scales).to(tl.float16)


@triton.jit
def weights_f16(words, scales, ROWS: tl.constexpr, BK: tl.constexpr, HW: tl.constexpr, E4M3: tl.constexpr):
    """A weight tile dequantized, K in the order of sums: FP16 [ROWS, BK], the value times 2^-14, exact.

    words: uint32 [ROWS, BK/8]. scales: uint8 [ROWS, BK/16], E4M3.
    """
    # Two words a block.
    scales = tl.reshape(tl.broadcast_to(scales[:, :, None], (ROWS, BK // 16, 2)), (ROWS, BK // 8))
    if E4M3:
        a0, a1, b0, b1, c0, c1, d0, d1 = eight_values(words, scales.to(tl.uint16))
    else:
        s = (scales_f16(scales) * 0.0625).to(tl.float16)
        a0, a1 = pair_values(words, s, 0, HW)
        b0, b1 = pair_values(words, s, 1, HW)
        c0, c1 = pair_values(words, s, 2, HW)
        d0, d1 = pair_values(words, s, 3, HW)
    first = tl.join(tl.join(a0, c0), tl.join(b0, d0))
    second = tl.join(tl.join(a1, c1), tl.join(b1, d1))
    # [row, pair of blocks, word, quarter, which of two] -> the quarter before the word.
    values = tl.reshape(tl.join(first, second), (ROWS, BK // 32, 4, 4, 2))
    return tl.reshape(tl.permute(values, (0, 1, 3, 2, 4)), (ROWS, BK))
