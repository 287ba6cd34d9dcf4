"""Device functions of NVFP4: E4M3 and E2M1 rounding, amax, packing, exact decoding. Every other kernel builds on these.

They do in FP32 and integer arithmetic what `quads_ops.nvfp4` does in torch, and equal it in every bit. No FP8 type is
used: Triton's interpreter rounds it wrongly, and GPUs before Hopper lack it.

`HW` (constexpr) says what a kernel may use. All levels give the same bits.
  0  Triton's interpreter, which truncates FP32 -> BF16 and garbles BF16 subnormals (all versions seen), and whose FMA
     rounds twice in 3.6: a slower way to the same bits
  1  an exact `tl.fma` and exact casts from and to BF16, as every GPU has them
  2  instructions of every GPU that only PTX names: the estimate of a reciprocal
  3  those of Blackwell, too: conversion to and from E2M1
Shapes below: R rows, B blocks of 16, so a tile is [R, B, 16].
"""

import triton
import triton.language as tl

MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
GLOBAL_SCALE_DIVISOR = tl.constexpr(2688.0)
GLOBAL_SCALE_MIN = tl.constexpr(6.018531076210112e-36)  # 2^-117
NAN_BYTE = tl.constexpr(0x7F)
CODE_BASE = tl.constexpr(0x4B000000)
"""What `round_e2m1` adds to a code: the bits of 2^23."""
CODE_BASES = tl.constexpr(0xFB000000)
"""What eight of them add up to, each 4 bits above the last, modulo 2^32."""


@triton.jit
def finite_or_nan(amax_bits):
    """Bits of a magnitude (int32) -> FP32, where Inf has become NaN."""
    return tl.where(amax_bits >= INF_BITS, float("nan"), amax_bits.to(tl.float32, bitcast=True))


@triton.jit
def load_tile(at, ok, stride_k):
    """[R, B, 16] from pointers [R, B, 1] to the first element of each block; zeros where not ok [R, B, 1].

    Loaded in pieces of 16 bytes which are then joined, so that a block lies within one thread.
    """
    R: tl.constexpr = at.shape[0]
    B: tl.constexpr = at.shape[1]
    if at.dtype.element_ty.primitive_bitwidth == 16:
        at += tl.arange(0, 8)[None, None, :] * stride_k
        x = tl.join(tl.load(at, mask=ok, other=0.0), tl.load(at + 8 * stride_k, mask=ok, other=0.0))
        x = tl.permute(x, (0, 1, 3, 2))
    else:
        at += tl.arange(0, 4)[None, None, :] * stride_k
        even = tl.join(tl.load(at, mask=ok, other=0.0), tl.load(at + 8 * stride_k, mask=ok, other=0.0))
        at += 4 * stride_k
        odd = tl.join(tl.load(at, mask=ok, other=0.0), tl.load(at + 8 * stride_k, mask=ok, other=0.0))
        x = tl.permute(tl.join(even, odd), (0, 1, 3, 4, 2))
    return tl.reshape(x, (R, B, 16))


@triton.jit
def store_tile(at, x, ok):
    """Store [R, B, 16] at pointers [R, B, 1] to the first element of each block, where ok [R, B, 1]: contiguous.

    In pieces of 16 bytes, as `load_tile`, so that no element changes its thread.
    """
    R: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    low, high = tl.split(tl.permute(tl.reshape(x, (R, B, 2, 8)), (0, 1, 3, 2)))
    if x.dtype.primitive_bitwidth == 16:
        at += tl.arange(0, 8)[None, None, :]
        tl.store(at, low, mask=ok)
        tl.store(at + 8, high, mask=ok)
    else:
        at += tl.arange(0, 4)[None, None, :]
        a, b = tl.split(tl.permute(tl.reshape(low, (R, B, 2, 4)), (0, 1, 3, 2)))
        c, d = tl.split(tl.permute(tl.reshape(high, (R, B, 2, 4)), (0, 1, 3, 2)))
        tl.store(at, a, mask=ok)
        tl.store(at + 4, b, mask=ok)
        tl.store(at + 8, c, mask=ok)
        tl.store(at + 12, d, mask=ok)


@triton.jit
def amax_last(x):
    """Largest magnitude along the last axis of an FP32 tile; NaN where the axis holds NaN or Inf.

    Taken as an integer maximum: magnitudes order like their bits, and NaN sorts above Inf, so none is lost.
    """
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS
    return finite_or_nan(tl.max(bits, axis=len(x.shape) - 1))


@triton.jit
def larger_magnitude(x):
    """FP32 [R, B, 2 * n] -> [R, B, n]: the larger magnitude of each two neighbours, NaN where one is NaN."""
    low, high = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
    return tl.maximum(tl.abs(low), tl.abs(high), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(x):
    """`amax_last` of FP32 [R, B, 16], each of whose blocks lies within one thread: one instruction an element."""
    x = larger_magnitude(larger_magnitude(larger_magnitude(x)))
    amax = tl.reshape(larger_magnitude(x), (x.shape[0], x.shape[1]))
    return tl.where(amax < float("inf"), amax, float("nan"))


@triton.jit
def global_scale_dec(amax):
    """FP32 amax -> decode scale g: amax / 2688; 1 for amax 0, NaN for a non-finite one, at least 2^-117."""
    g = tl.div_rn(amax, GLOBAL_SCALE_DIVISOR)
    g = tl.where(g < GLOBAL_SCALE_MIN, GLOBAL_SCALE_MIN, g)
    g = tl.where(amax == 0.0, 1.0, g)
    return tl.where(amax < float("inf"), g, float("nan"))


@triton.jit
def round_e4m3(s):
    """FP32 s >= 0 or NaN -> (value FP32, byte int32): nearest even, saturating at 448; NaN -> (NaN, 0x7F).

    Adding 2^(e+20) to a number of exponent e leaves 3 mantissa bits, rounded to nearest even by the adder itself.
    Below 2^-6 the exponent stays -6: the subnormal grid.
    """
    s = tl.minimum(s, 448.0, propagate_nan=tl.PropagateNan.ALL)
    exponent_bits = tl.maximum(s.to(tl.int32, bitcast=True) & INF_BITS, 0x3C800000)  # 2^-6
    magic = (exponent_bits + 0x0A000000).to(tl.float32, bitcast=True)  # times 2^20
    value = (s + magic) - magic
    # With the bias moved from 127 to 7 the byte stands 20 bits too high, and a NaN above it.
    byte = (value * 7.52316384526264e-37).to(tl.uint32, bitcast=True) >> 20  # 2^-120
    return value, tl.minimum(byte, NAN_BYTE).to(tl.int32)


@triton.jit
def decode_e4m3(byte):
    """uint8 or int32 byte -> FP32 value, exact; 0x7F and 0xFF -> NaN. The sign bit is ignored: scales have none."""
    b = byte.to(tl.int32) & 0x7F
    # Exponent and mantissa sit 20 bits higher in FP32; the product moves the bias from 7 to 127 and normalizes.
    value = (b << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(b == NAN_BYTE, float("nan"), value)


@triton.jit
def round_e2m1(y):
    """FP32 0 <= y <= 6 -> int32, of which the low 22 bits are the 3-bit code, nearest even. The caller saturates.

    The code is the smallest of 2y, y + 2 and y/2 + 4, rounded to an integer, to which 2^23 is added to that end. What
    the three share above is CODE_BASE.
    """
    below_2 = tl.fma(y, 2.0, 8388608.0).to(tl.int32, bitcast=True)
    below_4 = (y + 8388610.0).to(tl.int32, bitcast=True)
    above = tl.fma(y, 0.5, 8388612.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(below_2, below_4), above)


@triton.jit
def decode_e2m1(code):
    """int32 code, of which the 3 low bits count -> FP32 magnitude, exact."""
    bits = (code & 7) << 22
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126: bias 1 to 127


@triton.jit
def reciprocal(d, HW: tl.constexpr):
    """FP32 d -> (r, c): 1 / d within a unit, and what it lacks, so that 1 / d is r + r * c to nearly 48 bits.

    d in [2^-126, 2^126]. For 0, Inf and NaN one of the two is Inf or NaN. A Newton step follows the first estimate,
    which so may err by 3 units. c is enlarged by up to a part in 2^23, so that rounding it loses nothing.
    """
    if HW >= 2:
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [d], tl.float32, is_pure=True, pack=1)
    else:
        r = tl.div_rn(1.0, d)
    r = tl.fma(tl.fma(-d, r, 1.0), r, r)
    c = tl.fma(-d, r, 1.0)
    return r, tl.fma(c * 1.5, c, c)


@triton.jit
def quotient(x, r, c):
    """x / d for (r, c) = `reciprocal(d)`: two products and an FMA.

    It is on the right side of every threshold between two E2M1 codes, and between two E4M3 numbers, for every pair of
    mantissas (benchmarks/division_proof.py tries them all), and at every magnitude that is not far below the threshold,
    since nothing but a quotient is added to a quotient.
    """
    return tl.fma(x, r, (x * r) * c)


@triton.jit
def block_scales(amax, g, HW: tl.constexpr):
    """`round_e4m3(amax / (6 * g))`. amax: FP32 [R, B]. g: FP32 [R, 1], at least 2^-117."""
    six = 6.0 * g
    if HW:
        # A reciprocal has the range of FP32 to itself; from 2^64 on both sides of the quotient are lowered by 2^64.
        lower = tl.where(six < 1.8446744073709552e19, 1.0, 5.421010862427522e-20)
        r, c = reciprocal(six * lower, HW)
        infinite = six == float("inf")
        r, c = tl.where(infinite, 0.0, r), tl.where(infinite, 0.0, c)
        amax *= tl.broadcast_to(lower, amax.shape)
        s = quotient(amax, tl.broadcast_to(r, amax.shape), tl.broadcast_to(c, amax.shape))
    else:
        s = tl.div_rn(amax, tl.broadcast_to(six, amax.shape))
    return round_e4m3(s)


@triton.jit
def scaled_magnitude(x, scale, HW: tl.constexpr):
    """min(|x| / scale, 6), with IEEE division; 0 where scale is 0 or NaN. x [R, B, 16], scale [R, B], FP32."""
    top = tl.broadcast_to(tl.where(scale > 0.0, 6.0, 0.0)[:, :, None], x.shape)
    if HW:
        r, c = reciprocal(scale, HW)
        y = quotient(x, tl.broadcast_to(r[:, :, None], x.shape), tl.broadcast_to(c[:, :, None], x.shape))
        # NaN where the scale is 0 or NaN. The minimum is then `top`.
        y = tl.minimum(tl.abs(y), top)
    else:
        y = tl.div_rn(tl.abs(x), tl.broadcast_to(tl.where(scale > 0.0, scale, 1.0)[:, :, None], x.shape))
        y = tl.where(y < top, y, top)
    return y


@triton.jit
def quantize_blocks(x, amax, g, HW: tl.constexpr):
    """Quantize a tile with given global scales.

    x: FP32 [R, B, 16]. amax: FP32 [R, B], `block_amax(x)`. g: FP32 [R, 1], at least 2^-117.
    Returns (codes, scale FP32 [R, B], byte int32 [R, B]). The codes are for `packed_codes` and `signed_e2m1` alone:
    int32 [R, B, 16] of `round_e2m1`, or uint32 [R, B, 2] of `convert_e2m1`.
    """
    scale, byte = block_scales(amax, g, HW)
    if HW >= 3:
        codes = convert_e2m1(x, scale * g, byte, HW)
    else:
        codes = round_e2m1(scaled_magnitude(x, scale * g, HW))
    return codes, scale, byte


@triton.jit
def signed_e2m1(codes, x, HW: tl.constexpr):
    """Codes of `quantize_blocks` for x, FP32 [R, B, 16] -> FP32 e2m1 with the sign bit of x, exact: times
    2^-126, but not by Blackwell's conversion. `dequantize_blocks` and `unscaled_blocks` know."""
    if HW >= 3:
        e2m1 = unconvert_e2m1(codes)
    else:
        bits = (codes << 22) | (x.to(tl.int32, bitcast=True) & ~MAGNITUDE_BITS)
        e2m1 = bits.to(tl.float32, bitcast=True)
    return e2m1


@triton.jit
def dequantize_blocks(e2m1, scale, g, HW: tl.constexpr):
    """(e2m1 * s8) * g: FP32 [R, B, 16].

    e2m1: FP32 [R, B, 16], of `signed_e2m1`. scale: FP32 [R, B]. g: FP32 [R, 1].
    """
    if HW >= 3:
        value = e2m1 * scale[:, :, None]
    else:
        # The 2^126 that is missing in e2m1 is shared between the two factors so that neither overflows: s8 is at most
        # 448, and s8 * g at most a sixth of the largest number (from 2^121 and 2^125 on).
        share = tl.where(g < 2.658455991569832e36, 128.0, tl.where(g < 4.253529586511731e37, 8.0, 1.0))
        value = e2m1 * (scale * (8.507059173023462e37 / share))[:, :, None]
        g *= share
    return value * tl.broadcast_to(g[:, :, None], value.shape)


@triton.jit
def unscaled_blocks(e2m1, scale, HW: tl.constexpr):
    """e2m1 * s8 * 2^-10, exact: FP32 [R, B, 16]. Arguments as for `dequantize_blocks`."""
    return e2m1 * (scale * (0.0009765625 if HW >= 3 else 8.307674973655724e34))[:, :, None]  # 2^-10, 2^116


@triton.jit
def packed_codes(codes, x, byte, HW: tl.constexpr):
    """Codes of `quantize_blocks` for x -> uint32 [R, B, 2]: 8 codes a word, the first k lowest."""
    if HW >= 3:
        word = codes
    else:
        word = pack_codes(codes, x, byte)
    return word


@triton.jit
def eighths(x):
    """[R, B, 16] -> 8 tensors [R, B, 2]: elements 8 * i + j of each block."""
    low, high = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], 2, 4, 2)))
    a, b = tl.split(tl.reshape(low, (x.shape[0], x.shape[1], 2, 2, 2)))
    c, d = tl.split(tl.reshape(high, (x.shape[0], x.shape[1], 2, 2, 2)))
    x0, x4 = tl.split(a)
    x2, x6 = tl.split(b)
    x1, x5 = tl.split(c)
    x3, x7 = tl.split(d)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def whole_blocks(x0, x1, x2, x3, x4, x5, x6, x7):
    """The inverse of `eighths`."""
    low = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    high = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    x = tl.join(low, high)  # [R, B, 2, bit 2 of j, bit 1, bit 0]
    return tl.reshape(x, (x.shape[0], x.shape[1], 16))


@triton.jit
def top_nibbles(x):
    """32-bit [R, B, 16] -> uint32 [R, B, 2]: the 4 top bits of each element, the first one's lowest."""
    x0, x1, x2, x3, x4, x5, x6, x7 = eighths(x.to(tl.uint32, bitcast=True))
    word = x7 >> 28
    word = (word << 4) | (x6 >> 28)
    word = (word << 4) | (x5 >> 28)
    word = (word << 4) | (x4 >> 28)
    word = (word << 4) | (x3 >> 28)
    word = (word << 4) | (x2 >> 28)
    word = (word << 4) | (x1 >> 28)
    return (word << 4) | (x0 >> 28)


@triton.jit
def pack_codes(code, x, byte):
    """Codes of `round_e2m1` with the signs of FP32 x, both [R, B, 16] -> uint32 [R, B, 2], the first k lowest.

    byte: int32 [R, B]; where it is NAN_BYTE the codes are 0 already, and the signs are left out.
    """
    c0, c1, c2, c3, c4, c5, c6, c7 = eighths(code.to(tl.uint32, bitcast=True))
    word = (c0 + (c1 << 4)) + ((c2 + (c3 << 4)) << 8)
    word += ((c4 + (c5 << 4)) + ((c6 + (c7 << 4)) << 8)) << 16
    word -= CODE_BASES
    signs = tl.where(byte == NAN_BYTE, 0, 0x88888888).to(tl.uint32)
    return word | (top_nibbles(x) & tl.broadcast_to(signs[:, :, None], word.shape))


@triton.jit
def convert_e2m1(x, scale, byte, HW: tl.constexpr):
    """Codes of x / scale with the signs of x by Blackwell's conversion: uint32 [R, B, 2]. Arguments as elsewhere.

    The instruction saturates, and makes NaN a 6. So a mask leaves no code where the scale is 0 or NaN, and no sign
    where it is NaN. The sign is taken from x, since a quotient 0 may have lost it.
    """
    r, c = reciprocal(scale, HW)
    y = quotient(x, tl.broadcast_to(r[:, :, None], x.shape), tl.broadcast_to(c[:, :, None], x.shape))
    bits = (y.to(tl.int32, bitcast=True) & MAGNITUDE_BITS) | (x.to(tl.int32, bitcast=True) & ~MAGNITUDE_BITS)
    y0, y1, y2, y3, y4, y5, y6, y7 = eighths(bits.to(tl.float32, bitcast=True))
    word = tl.inline_asm_elementwise(
        """
        {
        .reg .b8 b0, b1, b2, b3;
        cvt.rn.satfinite.e2m1x2.f32 b0, $2, $1;
        cvt.rn.satfinite.e2m1x2.f32 b1, $4, $3;
        cvt.rn.satfinite.e2m1x2.f32 b2, $6, $5;
        cvt.rn.satfinite.e2m1x2.f32 b3, $8, $7;
        mov.b32 $0, {b0, b1, b2, b3};
        }
        """,
        "=r,r,r,r,r,r,r,r,r",
        [y0, y1, y2, y3, y4, y5, y6, y7],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )
    mask = tl.where(scale > 0.0, 0xFFFFFFFF, tl.where(byte == NAN_BYTE, 0, 0x88888888).to(tl.uint32)).to(tl.uint32)
    return word & tl.broadcast_to(mask[:, :, None], word.shape)


@triton.jit
def unconvert_e2m1(word):
    """uint32 [R, B, 2] of `convert_e2m1` -> FP32 e2m1 [R, B, 16], by Blackwell's conversion."""
    x0, x1, x2, x3, x4, x5, x6, x7 = tl.inline_asm_elementwise(
        """
        {
        .reg .b8 b0, b1, b2, b3;
        .reg .b32 h0, h1, h2, h3;
        .reg .f16 l, u;
        mov.b32 {b0, b1, b2, b3}, $8;
        cvt.rn.f16x2.e2m1x2 h0, b0;
        cvt.rn.f16x2.e2m1x2 h1, b1;
        cvt.rn.f16x2.e2m1x2 h2, b2;
        cvt.rn.f16x2.e2m1x2 h3, b3;
        mov.b32 {l, u}, h0;
        cvt.f32.f16 $0, l;
        cvt.f32.f16 $1, u;
        mov.b32 {l, u}, h1;
        cvt.f32.f16 $2, l;
        cvt.f32.f16 $3, u;
        mov.b32 {l, u}, h2;
        cvt.f32.f16 $4, l;
        cvt.f32.f16 $5, u;
        mov.b32 {l, u}, h3;
        cvt.f32.f16 $6, l;
        cvt.f32.f16 $7, u;
        }
        """,
        "=r,=r,=r,=r,=r,=r,=r,=r,r",
        [word],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    return whole_blocks(x0, x1, x2, x3, x4, x5, x6, x7)


@triton.jit
def unpack_nibbles(packed, R: tl.constexpr, K: tl.constexpr):
    """uint8 [R, K/2] -> uint8 codes [R, K]."""
    return tl.reshape(tl.join(packed & 0xF, packed >> 4), (R, K))


@triton.jit
def dequantize_fp16(packed, scale_bytes, R: tl.constexpr, K: tl.constexpr):
    """e2m1 * s8 as FP16 [R, K], exact: at most 6 significant bits, at most 2688. A scale byte 0x7F gives NaN.

    packed: uint8 [R, K/2]. scale_bytes: uint8 [R, K/16]. The global scale is left to the GEMM's epilogue.
    """
    code = unpack_nibbles(packed, R, K).to(tl.uint16)
    # The code's exponent and mantissa become FP16's; the product moves the bias from 1 to 15 and normalizes.
    value = (((code & 7) << 9) | ((code & 8) << 12)).to(tl.float16, bitcast=True) * 16384.0
    value = value.to(tl.float16)
    byte = scale_bytes.to(tl.uint16) & 0x7F
    scale = ((byte << 7).to(tl.float16, bitcast=True) * 256.0).to(tl.float16)
    scale = tl.where(byte == NAN_BYTE, float("nan"), scale).to(tl.float16)
    blocks = tl.reshape(value, (R, K // 16, 16)) * tl.reshape(scale, (R, K // 16, 1))
    return tl.reshape(blocks, (R, K))


@triton.jit
def to_fp32(x, HW: tl.constexpr):
    """BF16, FP16 or FP32 -> FP32, exact."""
    if x.dtype == tl.bfloat16 and not HW:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def cast(x, dtype: tl.constexpr, HW: tl.constexpr):
    """FP32 -> FP32, FP16 or BF16, to nearest even."""
    if dtype == tl.bfloat16 and not HW:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        narrow = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(dtype)
    return narrow
