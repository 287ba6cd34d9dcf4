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


@triton.jit
def finite_or_nan(amax_bits):
    """Bits of a magnitude (int32) -> FP32, where Inf has become NaN."""
    return tl.where(amax_bits >= INF_BITS, float("nan"), amax_bits.to(tl.float32, bitcast=True))


@triton.jit
def amax_last(x):
    """Largest magnitude along the last axis of an FP32 tile; NaN where the axis holds NaN or Inf.

    Taken as an integer maximum: magnitudes order like their bits, and NaN sorts above Inf, so none is lost.
    """
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS
    return finite_or_nan(tl.max(bits, axis=len(x.shape) - 1))


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
    is_nan = s != s
    s = tl.where(is_nan, 0.0, s)
    s = tl.where(s > 448.0, 448.0, s)
    exponent = ((s.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    exponent = tl.where(exponent < -6, -6, exponent)
    magic_bits = (exponent + 147) << 23
    magic = magic_bits.to(tl.float32, bitcast=True)
    total = s + magic
    steps = total.to(tl.int32, bitcast=True) - magic_bits
    value = tl.where(is_nan, float("nan"), total - magic)
    byte = tl.where(is_nan, NAN_BYTE, ((exponent + 6) << 3) + steps)
    return value, byte


@triton.jit
def decode_e4m3(byte):
    """uint8 or int32 byte -> FP32 value, exact; 0x7F and 0xFF -> NaN. The sign bit is ignored: scales have none."""
    b = byte.to(tl.int32) & 0x7F
    # Exponent and mantissa sit 20 bits higher in FP32; the product moves the bias from 7 to 127 and normalizes.
    value = (b << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(b == NAN_BYTE, float("nan"), value)


@triton.jit
def round_e2m1(y):
    """FP32 0 <= y <= 6 -> (value FP32, 3-bit code int32), nearest even. The caller saturates.

    As in `round_e4m3`, with one mantissa bit and smallest exponent 0, whose step of 0.5 covers [0, 2).
    """
    exponent_bits = y.to(tl.int32, bitcast=True) & INF_BITS
    exponent_bits = tl.where(exponent_bits < 0x3F800000, 0x3F800000, exponent_bits)
    magic_bits = exponent_bits + 0x0B000000  # times 2^22
    magic = magic_bits.to(tl.float32, bitcast=True)
    total = y + magic
    # The low bits of the sum count steps. Twice the exponent turns them into the code, of which 3 bits are left.
    code = (total.to(tl.int32, bitcast=True) + (exponent_bits >> 22) + 2) & 7
    return total - magic, code


@triton.jit
def decode_e2m1(code):
    """int32 code, of which the 3 low bits count -> FP32 magnitude, exact."""
    bits = (code & 7) << 22
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126: bias 1 to 127


@triton.jit
def sign_nibble(x):
    """8 where x is negative or -0, else 0 (int32). NaN counts as positive: its sign differs between machines."""
    top = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32)
    return tl.where(x == x, top, 0) & ~7


@triton.jit
def scaled_magnitude(x, scale, HW: tl.constexpr):
    """min(|x| / scale, 6), with IEEE division; 0 where scale is 0 or NaN. x [R, B, 16], scale [R, B], FP32.

    With HW the reciprocal is taken once a block, and each quotient then costs a product and two FMAs (Markstein). The
    two agree in every E2M1 code for every pair of mantissas (benchmarks/division_proof.py tries them all). Small
    operands are first scaled up by 2^64, so that the remainder is never subnormal.
    """
    usable = scale > 0.0
    top = tl.broadcast_to(tl.where(usable, 6.0, 0.0)[:, :, None], x.shape)
    magnitude = (x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS).to(tl.float32, bitcast=True)
    if HW:
        lift = tl.where(scale < 8.673617379884035e-19, 1.8446744073709552e19, 1.0)  # 2^-60, 2^64
        divisor = tl.where(usable, scale * lift, 1.0)
        inverse = tl.where(usable, tl.div_rn(1.0, divisor), 0.0)
        a = magnitude * lift[:, :, None]
        d = tl.broadcast_to(divisor[:, :, None], x.shape)
        inv = tl.broadcast_to(inverse[:, :, None], x.shape)
        y = a * inv
        y = tl.fma(tl.fma(-y, d, a), inv, y)
        # Inf/Inf, and Inf or NaN in the block, give NaN here. The minimum is then `top`.
        y = tl.minimum(y, top)
    else:
        divisor = tl.where(usable, scale, 1.0)
        y = tl.div_rn(magnitude, tl.broadcast_to(divisor[:, :, None], x.shape))
        y = tl.where(y < top, y, top)
    return y


@triton.jit
def quantize_blocks(x, amax, g, HW: tl.constexpr):
    """Quantize a tile with given global scales.

    x: FP32 [R, B, 16]. amax: FP32 [R, B], `amax_last(x)`. g: FP32 [R, 1].
    Returns (magnitude FP32 [R, B, 16], code int32 [R, B, 16] with its sign bit, scale FP32 [R, B], byte int32 [R, B]).
    """
    s = tl.div_rn(amax, tl.broadcast_to(6.0 * g, amax.shape))
    scale, byte = round_e4m3(s)
    y = scaled_magnitude(x, scale * g, HW)
    magnitude, code = round_e2m1(y)
    return magnitude, code | sign_nibble(x), scale, byte


@triton.jit
def with_sign(magnitude, x):
    """FP32 magnitude >= 0 (or NaN) with the sign bit of FP32 x."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & ~MAGNITUDE_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dequantize_blocks(magnitude, sign, scale, g):
    """(e2m1 * s8) * g: FP32 [R, B, 16].

    magnitude [R, B, 16] and scale [R, B], FP32: e2m1 and s8. sign: int32, bit 31 counts. g: FP32 [R, 1].
    """
    value = magnitude * scale[:, :, None]
    value = value * tl.broadcast_to(g[:, :, None], value.shape)
    bits = value.to(tl.int32, bitcast=True) | (sign & ~MAGNITUDE_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def pack_nibbles(code, R: tl.constexpr, K: tl.constexpr):
    """Codes int32 of R*K elements, any shape, k fastest -> uint8 [R, K/2]; the even k in the low nibble."""
    low, high = tl.split(tl.reshape(code, (R, K // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


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
