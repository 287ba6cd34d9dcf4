"""The device functions of `quads_kernels.rounding` against torch's casts and `quads_ops.nvfp4`, bit for bit."""

import pytest
import support_interpreter
import torch
import triton
import triton.language as tl
from support_interpreter import DEVICE, same_bits, skip_unless_fma_is_exact

from quads_kernels import launch, rounding
from quads_ops import formats, nvfp4

in_interpreter = support_interpreter.fixture()

INF, NAN = float("inf"), float("nan")


@triton.jit
def e4m3_kernel(x, value, byte, n: tl.constexpr):
    i = tl.arange(0, n)
    v, b = rounding.round_e4m3(tl.load(x + i))
    tl.store(value + i, v)
    tl.store(byte + i, b.to(tl.uint8))


@triton.jit
def e2m1_kernel(x, value, code, n: tl.constexpr):
    i = tl.arange(0, n)
    y = tl.load(x + i)
    c = rounding.round_e2m1(y)
    tl.store(value + i, rounding.signed_e2m1(c, y, 0) * 8.507059173023462e37)  # 2^126
    tl.store(code + i, (c - rounding.CODE_BASE).to(tl.uint8))


@triton.jit
def decode_kernel(byte, e4m3, e2m1, n: tl.constexpr):
    i = tl.arange(0, n)
    b = tl.load(byte + i)
    tl.store(e4m3 + i, rounding.decode_e4m3(b))
    tl.store(e2m1 + i, rounding.decode_e2m1(b.to(tl.int32)))


@triton.jit
def fp16_kernel(packed, scales, out, R: tl.constexpr, K: tl.constexpr):
    r = tl.arange(0, R)[:, None]
    p = tl.load(packed + r * (K // 2) + tl.arange(0, K // 2)[None, :])
    s = tl.load(scales + r * (K // 16) + tl.arange(0, K // 16)[None, :])
    tl.store(out + r * K + tl.arange(0, K)[None, :], rounding.dequantize_fp16(p, s, R, K))


@triton.jit
def cast_kernel(x, narrow, wide, n: tl.constexpr, HW: tl.constexpr):
    i = tl.arange(0, n)
    y = rounding.cast(tl.load(x + i), narrow.dtype.element_ty, HW)
    tl.store(narrow + i, y)
    tl.store(wide + i, rounding.to_fp32(y, HW))


@triton.jit
def widen_kernel(x, wide, n: tl.constexpr, HW: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(wide + i, rounding.to_fp32(tl.load(x + i), HW))


@triton.jit
def amax_kernel(x, amax, g, R: tl.constexpr, K: tl.constexpr):
    r = tl.arange(0, R)
    a = rounding.amax_last(tl.load(x + r[:, None] * K + tl.arange(0, K)[None, :]))
    tl.store(amax + r, a)
    tl.store(g + r, rounding.global_scale_dec(a))


@triton.jit
def codes_kernel(x, g, packed, scales, values, R: tl.constexpr, K: tl.constexpr, HW: tl.constexpr):
    r = tl.arange(0, R)[:, None]
    k = tl.arange(0, K)[None, :]
    tile = tl.reshape(tl.load(x + r * K + k), (R, K // 16, 16))
    scale_dec = tl.load(g + r)
    code, scale, byte = rounding.quantize_blocks(tile, rounding.block_amax(tile), scale_dec, HW)
    value = rounding.dequantize_blocks(rounding.signed_e2m1(code, tile, HW), scale, scale_dec, HW)
    words = tl.reshape(rounding.packed_codes(code, tile, byte, HW), (R, K // 8))
    tl.store(packed.to(tl.pointer_type(tl.uint32)) + r * (K // 8) + tl.arange(0, K // 8)[None, :], words)
    tl.store(scales + r * (K // 16) + tl.arange(0, K // 16)[None, :], byte.to(tl.uint8))
    tl.store(values + r * K + k, tl.reshape(value, (R, K)))


def around(points: torch.Tensor) -> torch.Tensor:
    """Each point and its two FP32 neighbours."""
    up, down = torch.tensor(INF), torch.tensor(-INF)
    return torch.cat((points, torch.nextafter(points, up), torch.nextafter(points, down)))


def padded(*parts: torch.Tensor) -> torch.Tensor:
    """One tensor, padded with zeros to a power of two elements."""
    x = torch.cat(parts)
    size = triton.next_power_of_2(x.numel())
    return torch.nn.functional.pad(x, (0, size - x.numel())).to(DEVICE)


def random_bits(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).int().view(torch.float32)


def poisoned(shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 0xEE if dtype == torch.uint8 else NAN, dtype=dtype, device=DEVICE)


DIVISIONS = pytest.mark.parametrize("hw", [False, True], ids=["portable", "hardware"])
"""Both ways to divide. The one of GPUs needs an exact FMA, which the interpreter has since Triton 3.9."""


def skip_unless_possible(hw: bool) -> None:
    if hw:
        skip_unless_fma_is_exact()
    elif DEVICE != "cpu":
        pytest.skip("the portable way is for the interpreter only")


def test_e4m3_rounds_every_midpoint_to_even():
    finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (finite[1:] + finite[:-1]) / 2
    spread = torch.exp(torch.randn(40000) * 8)
    special = torch.tensor([INF, NAN, 448.0, 464.0, 465.0, 1e38, 1e-45, 2.0**-10, 2.0**-149])
    x = padded(around(finite).abs(), around(midpoints), torch.rand(40000) * 500, spread, special)
    value, byte = poisoned(x.shape, torch.float32), poisoned(x.shape, torch.uint8)
    e4m3_kernel[(1,)](x, value, byte, x.numel())
    expected = x.cpu().clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    expected = torch.where(x.cpu().isnan(), formats.E4M3_NAN, expected).to(torch.uint8)
    same_bits(byte, expected)
    same_bits(value, nvfp4.decode_e4m3(expected))


def test_e2m1_rounds_every_midpoint_to_even():
    grid = torch.tensor(formats.E2M1_VALUES)
    midpoints = (grid[1:] + grid[:-1]) / 2
    x = padded(around(grid).clamp(0.0, 6.0), around(midpoints), torch.rand(60000) * 6, torch.rand(60000) ** 9 * 6)
    value, code = poisoned(x.shape, torch.float32), poisoned(x.shape, torch.uint8)
    e2m1_kernel[(1,)](x, value, code, x.numel())
    distance = (x.cpu()[:, None].double() - grid.double()).abs()
    # The nearest value, of two equally near ones that of even code: independent of the reference's thresholds.
    nearest = (distance * 2 + torch.arange(8) % 2 * 1e-12).argmin(1)
    same_bits(code, nearest.to(torch.uint8))
    same_bits(value, grid[nearest])


def test_decoding_of_all_bytes():
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(DEVICE)
    e4m3, e2m1 = poisoned((256,), torch.float32), poisoned((256,), torch.float32)
    decode_kernel[(1,)](byte, e4m3, e2m1, 256)
    same_bits(e4m3, nvfp4.decode_e4m3(byte.cpu() & 0x7F))
    same_bits(e2m1, nvfp4.decode_e2m1(byte.cpu() & 7))


def test_fp16_holds_every_product_of_code_and_scale():
    scales = torch.arange(128, dtype=torch.uint8).repeat_interleave(2).reshape(128, 2)
    packed = nvfp4.pack(torch.arange(16, dtype=torch.uint8).repeat(128, 2))
    out = poisoned((128, 32), torch.float16)
    fp16_kernel[(1,)](packed.to(DEVICE), scales.to(DEVICE), out, 128, 32)
    same_bits(out.float(), nvfp4.unscaled(nvfp4.unpack(packed), scales))


@pytest.mark.parametrize("dtype", launch.FLOATS, ids=str)
def test_casts_round_to_nearest_even(dtype):
    ties = (torch.arange(65536, dtype=torch.int32) << 16 | 0x8000).view(torch.float32)
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, 65504.0, 65520.0, 3.4e38, 1e-45])
    x = padded(ties, random_bits(50000), special)
    narrow, wide = poisoned(x.shape, dtype), poisoned(x.shape, torch.float32)
    cast_kernel[(1,)](x, narrow, wide, x.numel(), launch.HW)
    same_bits(narrow, x.cpu().to(dtype))
    same_bits(wide, x.cpu().to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_widening_of_all_16_bit_floats_is_exact(dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = poisoned((65536,), torch.float32)
    widen_kernel[(1,)](x.to(DEVICE), wide, 65536, launch.HW)
    same_bits(wide, x.float())


def test_amax_and_global_scale():
    x = torch.randn(16, 64)
    x[1] = 0.0
    x[2, 3], x[3, 4], x[4, 5] = NAN, INF, -INF
    x[5, 6], x[5, 7] = NAN, INF
    x[6] = 1e-40
    x[7] = -3e38
    x[8] = -0.0
    amax, g = poisoned((16,), torch.float32), poisoned((16,), torch.float32)
    amax_kernel[(1,)](x.to(DEVICE), amax, g, 16, 64)
    expected = x.abs().amax(1)
    same_bits(amax, torch.where(expected.isfinite(), expected, NAN))
    same_bits(g, nvfp4.global_scale_dec(expected))


def block_cases() -> dict[str, torch.Tensor]:
    """FP32 [64, 256]: what can go wrong in a block."""
    values = torch.tensor([0.0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -2.5])
    ties = values.repeat(64, 16) * torch.exp2(torch.randint(-3, 4, (64, 16)).float()).repeat_interleave(16, 1)
    ties[:, :16] = values * 448
    tiny = torch.randn(64, 256)
    tiny[0] = 0.0
    tiny[1, 16:32] = 0.0
    tiny[2, 16:32] *= 1e-6
    for row, factor in enumerate((1e-18, 1e-19, 1e-25, 1e-30, 1e-36, 1e-40, 1e-45, 1e37), start=3):
        tiny[row] *= factor
    tiny[12] = -0.0
    bad = torch.randn(64, 256)
    bad[1, 3], bad[2, 20], bad[3, 40] = NAN, INF, -INF
    bad[4, :16] = -NAN
    return {"randn": torch.randn(64, 256), "ties": ties, "tiny": tiny, "bits": random_bits(64, 256), "bad": bad}


@DIVISIONS
@pytest.mark.parametrize("scale", ["row", "static"])
@pytest.mark.parametrize("case", ["randn", "ties", "tiny", "bits", "bad"])
def test_blocks_equal_the_reference(case, scale, hw):
    skip_unless_possible(hw)
    x = block_cases()[case]
    g = nvfp4.global_scale_dec(x.abs().amax(1))
    if scale == "static":  # too small for some rows (saturates), too large for others (underflows)
        g = torch.full_like(g, g[g.isfinite()].median().item())
    packed, scales = (poisoned(s, torch.uint8) for s in ((64, 128), (64, 16)))
    values = poisoned((64, 256), torch.float32)
    codes_kernel[(1,)](x.to(DEVICE), g.to(DEVICE), packed, scales, values, 64, 256, hw)
    expected_codes, expected_scales = nvfp4.quantize(x, g)
    same_bits(packed, nvfp4.pack(expected_codes))
    same_bits(scales, expected_scales)
    same_bits(values, nvfp4.dequantize(expected_codes, expected_scales, g))


@DIVISIONS
def test_quotients_near_every_threshold(hw):
    """Numbers beside threshold * divisor, where a quotient off by one bit would give another code."""
    skip_unless_possible(hw)
    thresholds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    mantissa = torch.cat((torch.arange(64), 2**23 - 1 - torch.arange(64), torch.randint(0, 2**23, (896,))))
    divisor = (mantissa.int() | 0x3F800000).view(torch.float32)  # in [1, 2)
    centre = (divisor[:, None] * thresholds).view(torch.int32)
    x = (centre[:, :, None] + torch.arange(-4, 5)).int().view(torch.float32).flatten(1)  # [1024, 63]
    # One block's amax makes its scale byte 1.0, so that the divisor is g itself.
    amax = (divisor * 6.0)[:, None]
    x = torch.cat((x.unflatten(1, (-1, 9)), amax.unsqueeze(1).expand(-1, 7, 7)), 2).flatten(1)  # [1024, 7 * 16]
    x = torch.nn.functional.pad(x, (0, 16))
    packed, scales = (poisoned(s, torch.uint8) for s in ((1024, 64), (1024, 8)))
    values = poisoned((1024, 128), torch.float32)
    codes_kernel[(1,)](x.to(DEVICE), divisor.to(DEVICE), packed, scales, values, 1024, 128, hw)
    expected, expected_scales = nvfp4.quantize(x, divisor)
    assert (expected_scales[:, :7] == 0x38).all()  # 1.0
    same_bits(packed, nvfp4.pack(expected))
    # The plain product with the reciprocal would fail here: these inputs tell the two apart.
    assert (nvfp4._e2m1_magnitude(x.abs() * (1 / divisor)[:, None]) != expected).any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["randn", "ties", "tiny", "bits", "bad"])
def test_instructions_of_the_gpu_give_the_same_bits(case):
    """The estimate of the reciprocal, and on Blackwell the conversions, against what every GPU and the CPU compute."""
    if DEVICE == "cpu":
        pytest.skip("QUADS_TEST_DEVICE=cuda runs it; here is the interpreter, which has no instructions")
    x = block_cases()[case]
    g = nvfp4.global_scale_dec(x.abs().amax(1))
    expected_codes, expected_scales = nvfp4.quantize(x, g)
    for hw in {1, 2, launch.arithmetic(torch.device("cuda"))}:
        packed, scales = (torch.full(s, 0xEE, dtype=torch.uint8, device="cuda") for s in ((64, 128), (64, 16)))
        values = torch.full((64, 256), NAN, device="cuda")
        codes_kernel[(1,)](x.cuda(), g.cuda(), packed, scales, values, 64, 256, hw, enable_fp_fusion=False)
        same_bits(packed, nvfp4.pack(expected_codes))
        same_bits(scales, expected_scales)
        same_bits(values, nvfp4.dequantize(expected_codes, expected_scales, g))
