"""Device functions of NVFP4: E4M3 and E2M1 rounding, amax, packing, exact decoding. Every other kernel builds on these.

They do in FP32 and integer arithmetic what `quads_ops.nvfp4` does in torch, and equal it in every bit. No FP8 type is
used: Triton's interpreter rounds it wrongly, and GPUs before Hopper lack it.

`HW` (constexpr) says whether `tl.fma` and casts from and to BF16 are exact. They are on every GPU. Triton's interpreter
truncates FP32 -> BF16 and garbles BF16 subnormals (all versions seen), and 3.6 rounds an FMA twice; there HW=False
takes a slower way to the same bits. Shapes below: R rows, B blocks of 16, so a tile is [R, B, 16].
"""

import triton
import triton.language as tl

MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
GLOBAL_SCALE_DIVISOR = tl.constexpr(2688.0)
GLOBAL_SCALE_MIN = tl.constexpr(6.018531076210112e-36)  # 2^-117
NAN_BYTE = tl.constexpr(0x7F)
CODE_BASE = tl.constexpr(0x4B000000)


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

    Adding 2^(e+20) to a number of exponent e leaves 3 mantissa bits, rounded to nearest even by the adder itself, and
    the low bits of the sum count steps of 2^(e-3). Below 2^-6 the exponent stays -6: the subnormal grid.
    """
    s = tl.minimum(s, 448.0, propagate_nan=tl.PropagateNan.ALL)
    exponent_bits = tl.maximum(s.to(tl.int32, bitcast=True) & INF_BITS, 0x3C800000)  # 2^-6
    magic_bits = exponent_bits + 0x0A000000  # times 2^20
    magic = magic_bits.to(tl.float32, bitcast=True)
    total = s + magic
    value = total - magic
    # The low bits of the sum count steps of a binade of 8; byte 8 * n is the first of binade n.
    byte = (total.to(tl.int32, bitcast=True) - magic_bits) + ((exponent_bits >> 20) - 0x3C8)
    return value, tl.where(s != s, NAN_BYTE, byte)


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
def signed_e2m1(code, x):
    """int32 of `round_e2m1` and FP32 x -> FP32 e2m1 * 2^-126, exact, with the sign bit of x."""
    bits = (code << 22) | (x.to(tl.int32, bitcast=True) & ~MAGNITUDE_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def quotient(x, divisor, usable, HW: tl.constexpr):
    """min(|x| / divisor, 6) with IEEE division, 0 where not usable. x: FP32 [R, B, 16]. divisor, usable: [R, B].

    With HW the reciprocal and what it lacks are taken once a block, and each quotient then costs two products and an
    FMA. It gives the right E2M1 code for every pair of mantissas (benchmarks/division_proof.py tries them all), and at
    every magnitude, since nothing small is added to anything but a quotient.
    """
    divisor = tl.where(usable, divisor, 1.0)
    top = tl.broadcast_to(tl.where(usable, 6.0, 0.0)[:, :, None], x.shape)
    if HW:
        inverse = tl.div_rn(1.0, divisor)
        lacking = tl.fma(-divisor, inverse, 1.0)
        lacking = tl.fma(lacking, lacking, lacking)
        inverse = tl.broadcast_to(inverse[:, :, None], x.shape)
        y = tl.fma(x, inverse, (x * inverse) * lacking[:, :, None])
        # Inf and NaN in a block whose scale is NaN. The minimum is then `top`.
        y = tl.minimum(tl.abs(y), top)
    else:
        y = tl.div_rn(tl.abs(x), tl.broadcast_to(divisor[:, :, None], x.shape))
        y = tl.where(y < top, y, top)
    return y


@triton.jit
def quantize_blocks(x, amax, g, HW: tl.constexpr):
    """Quantize a tile with given global scales.

    x: FP32 [R, B, 16]. amax: FP32 [R, B], `block_amax(x)`. g: FP32 [R, 1].
    Returns (code int32 [R, B, 16], see `round_e2m1`, scale FP32 [R, B], byte int32 [R, B]).
    """
    s = tl.div_rn(amax, tl.broadcast_to(6.0 * g, amax.shape))
    scale, byte = round_e4m3(s)
    y = quotient(x, scale * g, scale > 0.0, HW)
    return round_e2m1(y), scale, byte


@triton.jit
def dequantize_blocks(e2m1, scale, g):
    """(e2m1 * s8) * g: FP32 [R, B, 16].

    e2m1: FP32 [R, B, 16], of `signed_e2m1`. scale: FP32 [R, B]. g: FP32 [R, 1]. The 2^126 that is missing in e2m1 is
    shared between the two factors so that neither overflows: s8 <= 448, and s8 * g is at most the largest number / 6.
    """
    share = tl.where(g < 2.658455991569832e36, 128.0, tl.where(g < 4.253529586511731e37, 8.0, 1.0))  # 2^121, 2^125
    value = e2m1 * (scale * (8.507059173023462e37 / share))[:, :, None]  # 2^126
    return value * tl.broadcast_to((g * share)[:, :, None], value.shape)


@triton.jit
def unscaled_blocks(e2m1, scale):
    """e2m1 * s8 * 2^-10, exact: FP32 [R, B, 16]. Arguments as for `dequantize_blocks`."""
    return e2m1 * (scale * 8.307674973655724e34)[:, :, None]  # 2^116


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
    # What CODE_BASE adds up to.
    word -= 0xFB000000
    signs = tl.where(byte == NAN_BYTE, 0, 0x88888888).to(tl.uint32)
    return word | (top_nibbles(x) & tl.broadcast_to(signs[:, :, None], word.shape))


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
