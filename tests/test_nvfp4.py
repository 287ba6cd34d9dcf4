"""The definition of NVFP4 against ml_dtypes and hand-written tables; the compiled CPU path against the definition."""

import logging
import math
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from support_tensors import ODD_INPUTS, ODD_SHAPES, SUBNORMAL, assert_same_bits, midpoints, neighbours
from torch.utils._python_dispatch import TorchDispatchMode

from quads_ops import cpu_build, cpu_qdq, nvfp4
from quads_ops.formats import BLOCK_SIZE, E2M1_VALUES, E4M3_MAX, GLOBAL_SCALE_MIN
from quads_ops.residual import compensate, reference_compensate
from quads_ops.weights import quantize_weight

NAN, INF = math.nan, math.inf


def decoded(dtype: type, codes: np.ndarray) -> torch.Tensor:
    """Values of ml_dtypes' format, FP32."""
    return torch.from_numpy(codes.astype(np.uint8).view(dtype).astype(np.float32))


def oracle(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale bytes, values) of x [M, K] with g [M], by numpy and ml_dtypes alone."""
    blocks = x.float().numpy().reshape(x.shape[0], -1, BLOCK_SIZE)
    g = g.numpy()[:, None]
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(-1)
        amax[~np.isfinite(blocks).all(-1)] = np.nan
        scale = np.minimum(amax / (np.float32(6) * g), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        s8 = scale.astype(np.float32)
        divisor = (s8 * g)[..., None]
        y = np.where(divisor > 0, np.abs(blocks) / divisor, np.float32(0))
        y = np.where(np.isnan(y), np.float32(0), np.minimum(y, np.float32(6)))
        e2m1 = y.astype(ml_dtypes.float4_e2m1fn)
        sign = np.signbit(blocks) & ~np.isnan(s8)[..., None]
        values = np.copysign(e2m1.astype(np.float32) * s8[..., None] * g[..., None], blocks)
    codes = (e2m1.view(np.uint8) & 7) | (sign.astype(np.uint8) << 3)
    scale_bytes = np.where(np.isnan(s8), np.uint8(0x7F), scale.view(np.uint8))
    return tuple(torch.from_numpy(a.reshape(x.shape[0], -1)) for a in (codes, scale_bytes, values))


def row_scale(x: torch.Tensor) -> torch.Tensor:
    return nvfp4.global_scale_dec(x.abs().amax(-1))


# ---- the definition


@pytest.mark.parametrize(
    "amax, expected",
    [
        (0.0, 1.0),
        (2688.0, 1.0),
        (1.0, float(np.float32(1) / np.float32(2688))),
        (3.0e38, float(np.float32(3.0e38) / np.float32(2688))),
        (2688.0 * GLOBAL_SCALE_MIN, GLOBAL_SCALE_MIN),
        (2688.0 * GLOBAL_SCALE_MIN / 2, GLOBAL_SCALE_MIN),
        (2.0**-149, GLOBAL_SCALE_MIN),
        (INF, NAN),
        (NAN, NAN),
    ],
)
def test_global_scale(amax, expected):
    assert_same_bits(nvfp4.global_scale_dec(torch.tensor([amax])), torch.tensor([expected]))


def test_nothing_is_divided_by_a_plain_number():
    """CUDA multiplies with the number's reciprocal instead, and a fifth of quotients by 2688 lose their last bit."""
    divisors = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket == torch.ops.aten.div:
                divisors.append(args[1])
            return func(*args, **(kwargs or {}))

    with Watch():
        x = torch.randn(4, 32)
        nvfp4.reference_qdq(x, row_scale(x))
    assert len(divisors) == 3 and all(isinstance(divisor, torch.Tensor) for divisor in divisors)


def test_global_scale_is_fp32_and_keeps_the_shape():
    g = nvfp4.global_scale_dec(torch.ones(2, 0, 3, dtype=torch.bfloat16))
    assert g.dtype == torch.float32 and g.shape == (2, 0, 3)


def test_every_e2m1_and_e4m3_value_decodes_as_in_ml_dtypes():
    codes, scales = np.arange(16), np.arange(256)
    e2m1 = nvfp4.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert_same_bits(e2m1, decoded(ml_dtypes.float4_e2m1fn, codes))
    assert tuple(e2m1[:8].tolist()) == E2M1_VALUES
    e4m3 = nvfp4.decode_e4m3(torch.arange(256, dtype=torch.uint8))
    assert_same_bits(e4m3, decoded(ml_dtypes.float8_e4m3fn, scales))


def test_e2m1_rounding_at_every_value_midpoint_and_neighbour():
    """With g = 1 and a 6 in the block, the scale is 1 and y is x itself."""
    grid = decoded(ml_dtypes.float4_e2m1fn, np.arange(8))
    y = torch.cat((neighbours(torch.cat((grid, midpoints(grid)))), torch.tensor([SUBNORMAL, 2.0**-149, 1e-30])))
    y = torch.cat((y, -y))
    y = y[y.abs() <= 6]
    x = torch.nn.functional.pad(y.unsqueeze(-1), (0, BLOCK_SIZE - 1), value=6.0)
    codes, scales = nvfp4.quantize(x, torch.ones(()))
    assert (scales == 0x38).all()
    expected = torch.from_numpy(y.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF)
    assert_same_bits(codes[:, 0], expected)


@pytest.mark.parametrize(
    "y, code",
    [
        (0.25, 0),
        (0.75, 2),
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (6.0, 7),
        (-0.25, 8),
        (-5.0, 14),
        (-0.0, 8),
    ],
)
def test_e2m1_ties_go_to_the_even_code(y, code):
    x = torch.tensor([y] + [6.0] * 15)
    assert nvfp4.quantize(x, torch.ones(()))[0][0] == code


def test_e2m1_saturates_at_six_under_a_stale_global_scale():
    x = torch.tensor([1e6, -1e6, 1e30, 1.0] * 4)
    codes, scales = nvfp4.quantize(x, torch.tensor(2.0**-6))
    assert scales.tolist() == [0x7E] and codes[:3].tolist() == [7, 15, 7]
    assert nvfp4.dequantize(codes, scales, torch.tensor(2.0**-6))[0] == 6 * 448 * 2.0**-6


def test_e4m3_rounding_at_every_value_midpoint_and_neighbour():
    """With g = 2/3 in FP32, 6 * g is exactly 4, so that amax / (6 * g) hits every number aimed at."""
    g = torch.tensor(2.0 / 3.0)
    assert float(6.0 * g) == 4.0
    grid = decoded(ml_dtypes.float8_e4m3fn, np.arange(127))
    s = neighbours(torch.cat((grid, midpoints(grid), torch.tensor([456.0, 464.0, 480.0, 1e4, 1e30]))))
    s = s[s >= 0]
    x = torch.zeros(len(s), BLOCK_SIZE)
    x[:, 5] = -4 * s
    expected = torch.from_numpy(s.clamp(max=E4M3_MAX).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert_same_bits(nvfp4.quantize(x, g)[1][:, 0], expected)


@pytest.mark.parametrize("name", ODD_INPUTS)
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_definition_equals_ml_dtypes(name, shape):
    x = ODD_INPUTS[name](*shape)
    for g in (row_scale(x), torch.full((shape[0],), 0.01), row_scale(x.flatten()).expand(shape[0])):
        codes, scales, values = oracle(x, g)
        assert_same_bits(nvfp4.quantize(x, g)[0], codes)
        assert_same_bits(nvfp4.quantize(x, g)[1], scales)
        assert_same_bits(nvfp4.reference_qdq(x, g), values)


SPECIAL = {
    # block of 16 (padded with its last element): codes of the first elements, scale byte, values; with g = 1
    "zeros": ([0.0, -0.0, 0.0], [0, 8, 0], 0x00, [0.0, -0.0, 0.0]),
    "nan": ([1.0, NAN, -1.0], [0, 0, 0], 0x7F, [NAN, NAN, NAN]),
    "inf": ([1.0, -INF, -1.0], [0, 0, 0], 0x7F, [NAN, NAN, NAN]),
    "scale rounds to 0": ([6 * 2.0**-10, -6 * 2.0**-10, 0.0], [0, 8, 0], 0x00, [0.0, -0.0, 0.0]),
    "smallest scale": ([6 * 1.01 * 2.0**-10, -(2.0**-9), 0.0], [5, 10, 0], 0x01, [3 * 2.0**-9, -(2.0**-9), 0.0]),
    "subnormal": ([SUBNORMAL, -SUBNORMAL, 0.0], [0, 8, 0], 0x00, [0.0, -0.0, 0.0]),
    "largest": ([2688.0, -2688.0, 224.0], [7, 15, 1], 0x7E, [2688.0, -2688.0, 224.0]),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("qdq", [nvfp4.reference_qdq, nvfp4.qdq], ids=["torch", "compiled"])
def test_special_blocks(name, qdq):
    start, codes, scale, values = SPECIAL[name]
    x = torch.tensor(start + [start[-1]] * (BLOCK_SIZE - len(start)))
    found, scales = nvfp4.quantize(x, torch.ones(()))
    assert scales.tolist() == [scale]
    assert found[:3].tolist() == codes
    assert_same_bits(qdq(x, torch.ones(()))[:3], torch.tensor(values))


@pytest.mark.parametrize("qdq", [nvfp4.reference_qdq, nvfp4.qdq], ids=["torch", "compiled"])
def test_a_non_finite_row_is_nan_throughout_and_its_neighbours_are_untouched(qdq):
    x = torch.randn(3, 64)
    clean = qdq(x, row_scale(x))
    x[1, 7] = INF
    out = qdq(x, row_scale(x))
    assert out[1].isnan().all()
    assert_same_bits(out[[0, 2]], clean[[0, 2]])


def test_subnormal_rows_become_signed_zeros():
    x = ODD_INPUTS["subnormal"](4, 64)
    g = row_scale(x)
    assert (g == GLOBAL_SCALE_MIN).all()
    assert_same_bits(nvfp4.qdq(x, g), torch.copysign(torch.zeros(4, 64), x))


def test_quantizing_twice_changes_nothing():
    x = torch.randn(64, 256)
    g = row_scale(x)
    once = nvfp4.qdq(x, g)
    assert_same_bits(nvfp4.qdq(once, g), once)


def test_relative_error_of_gaussian_numbers():
    """About 9.5% for NVFP4; a wrong scale, axis or code shows up here even if both sides share the mistake."""
    x = torch.randn(512, 1024)
    error = (nvfp4.qdq(x, row_scale(x)) - x).norm() / x.norm()
    assert 0.093 < error < 0.097


def test_unscaled_is_exact_in_half_precision():
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8).unsqueeze(-1)
    exact = nvfp4.unscaled(codes, scales)
    assert exact.abs().max() == 2688
    for dtype in (torch.float16, torch.bfloat16):
        assert_same_bits(exact.to(dtype).float(), exact)


def test_pack_and_unpack_every_byte():
    packed = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    codes = nvfp4.unpack(packed)
    assert codes[0, 34] == 1 and codes[0, 35] == 1 and codes[0, 32] == 0 and codes[0, 33] == 1  # byte 17, byte 16
    assert_same_bits(nvfp4.pack(codes), packed)


@pytest.mark.parametrize("function", [nvfp4.qdq, nvfp4.reference_qdq, nvfp4.quantize])
@pytest.mark.parametrize(
    "x, g, message",
    [
        (torch.ones(2, 24), torch.ones(2), r"\(2, 24\)"),
        (torch.ones(2, 0), torch.ones(2), r"\(2, 0\)"),
        (torch.ones(()), torch.ones(()), r"\(\)"),
        (torch.ones(2, 16), torch.ones(3), r"shape \(3,\) does not broadcast to \(2,\)"),
        (torch.ones(2, 16), torch.ones(2, 1), r"does not broadcast"),
        (torch.ones(2, 16), torch.ones(2).double(), "float64"),
    ],
)
def test_bad_shapes_and_dtypes(function, x, g, message):
    with pytest.raises(ValueError, match=message):
        function(x, g)


def test_nothing_is_differentiable_by_accident():
    x = torch.randn(2, 16, requires_grad=True)
    g = row_scale(x)
    assert not nvfp4.qdq(x, g).requires_grad and not nvfp4.reference_qdq(x, g).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("name", ODD_INPUTS)
def test_definition_on_a_gpu_equals_the_cpu(name):
    for shape in ODD_SHAPES:
        x = ODD_INPUTS[name](*shape)
        g = row_scale(x)
        assert_same_bits(row_scale(x.cuda()).cpu(), g)
        for on_gpu, on_cpu in zip(nvfp4.quantize(x.cuda(), g.cuda()), nvfp4.quantize(x, g), strict=True):
            assert_same_bits(on_gpu.cpu(), on_cpu)
        assert_same_bits(nvfp4.qdq(x.cuda(), g.cuda()).cpu(), nvfp4.reference_qdq(x, g))


# ---- the compiled path


@pytest.fixture(scope="module")
def _compiled():
    if cpu_qdq.path().name != "compiled":
        pytest.skip(f"no compiled path: {cpu_qdq.path().reason}")


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("name", ODD_INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_equals_definition(name, dtype):
    for shape in ODD_SHAPES:
        x = ODD_INPUTS[name](*shape).to(dtype)
        for g in (row_scale(x), torch.tensor(0.01), row_scale(x.flatten())):
            assert_same_bits(nvfp4.qdq(x, g), nvfp4.reference_qdq(x, g))


@pytest.mark.usefixtures("_compiled")
def test_compiled_takes_views_and_leading_dimensions():
    x = torch.randn(3, 80, 12, 4).permute(2, 0, 3, 1)
    g = torch.rand(12, 1, 1) / 100
    assert_same_bits(nvfp4.qdq(x, g), nvfp4.reference_qdq(x, g))
    assert nvfp4.qdq(torch.empty(0, 32), torch.empty(0)).shape == (0, 32)


@pytest.mark.usefixtures("_compiled")
def test_compiled_with_several_threads_equals_one():
    x = torch.randn(300, 1024)
    g = row_scale(x)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(nvfp4.qdq(x, g))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.usefixtures("_compiled")
def test_torch_compile_traces_the_definition_and_gets_the_same_bits():
    x = ODD_INPUTS["outliers"](16, 64)
    g = row_scale(x)
    traced = torch.compile(nvfp4.qdq, fullgraph=True)
    assert_same_bits(traced(x, g), nvfp4.qdq(x, g))


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """Loads the CPU path anew, with another environment and an empty cache."""

    def load(**environment: str):
        monkeypatch.delenv("QUADS_CPU_QDQ", raising=False)
        monkeypatch.setenv("QUADS_CACHE_DIR", str(tmp_path / "cache"))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return cpu_qdq._load.__wrapped__()

    return load


def test_choice_torch(choose):
    assert choose(QUADS_CPU_QDQ="torch") == (None, ("torch", "QUADS_CPU_QDQ=torch"))


def test_choice_unknown(choose):
    with pytest.raises(ValueError, match="QUADS_CPU_QDQ='fast'; choose one of auto, compiled, torch"):
        choose(QUADS_CPU_QDQ="fast")


def test_no_compiler_is_said_once_and_is_an_error_where_compiled_was_asked_for(choose, caplog):
    with caplog.at_level(logging.WARNING, logger="quads_ops.cpu_qdq"):
        library, path = choose(CXX="no-such-compiler")
    assert library is None and path.name == "torch"
    assert "'no-such-compiler' is not on PATH; install g++" in path.reason
    assert len(caplog.records) == 1 and "many times slower" in caplog.text
    with pytest.raises(cpu_build.BuildError, match="no-such-compiler"):
        choose(CXX="no-such-compiler", QUADS_CPU_QDQ="compiled")


@pytest.mark.usefixtures("_compiled")
def test_library_is_built_once(choose, tmp_path):
    choose(QUADS_CPU_QDQ="compiled")
    (library,) = (tmp_path / "cache").iterdir()
    built = library.stat().st_mtime_ns
    assert choose(QUADS_CPU_QDQ="compiled")[1].reason.endswith(str(library))
    assert library.stat().st_mtime_ns == built


def has_feature(name: str) -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and f" {name} " in cpuinfo.read_text()


def assert_compiled_so_equals_definition(flags, choose, monkeypatch):
    monkeypatch.setattr(cpu_build, "FLAGS", flags)
    built = choose(QUADS_CPU_QDQ="compiled")
    monkeypatch.setattr(cpu_qdq, "_load", lambda: built)
    for maker in ODD_INPUTS.values():
        x = maker(37, 1328)
        for source in (x, x.bfloat16()):
            assert_same_bits(nvfp4.qdq(source, row_scale(source)), nvfp4.reference_qdq(source, row_scale(source)))
            g = torch.tensor(0.01)
            codes, scales = nvfp4.quantize(source, g)
            assert_same_bits(quantize_weight(source, g).packed, nvfp4.pack(codes))
            assert_same_bits(quantize_weight(source, g).block_scales, scales)
            assert_same_bits(cpu_qdq.amax(source), source.float().abs().amax(-1))
            expected = nvfp4.reference_qdq(source, g).bfloat16()
            assert_same_bits(cpu_qdq.qdq(source, g.expand(37), torch.bfloat16), expected)
            assert_same_bits(compensate(source, "w4a4", "all"), reference_compensate(source, "all"))


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(
    "level, feature",
    [("x86-64", "sse2"), ("x86-64-v2", "sse4_2"), ("x86-64-v3", "avx2"), ("x86-64-v4", "avx512bw")],
)
def test_other_processors_get_the_same_bits(choose, monkeypatch, level, feature):
    """The library as it is compiled for processors with 128, 256 and 512-bit vectors."""
    if not has_feature(feature):
        pytest.skip(f"this processor has no {feature}")
    flags = [f"-march={level}" if flag == "-march=native" else flag for flag in cpu_build.FLAGS]
    assert flags != cpu_build.FLAGS
    assert_compiled_so_equals_definition(flags, choose, monkeypatch)


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_every_length_of_vector_gets_the_same_bits(choose, monkeypatch, lanes):
    """So the code for AVX-512 is tested where there is none: shorter registers compute the same, slowly."""
    assert_compiled_so_equals_definition([*cpu_build.FLAGS, f"-DLANES={lanes}"], choose, monkeypatch)


@pytest.mark.usefixtures("_compiled")
def test_a_cache_that_cannot_be_used_is_named(choose, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    library, path = choose(QUADS_CACHE_DIR=str(blocker / "cache"))
    assert library is not None and "rebuilt in every process" in path.reason and str(blocker) in path.reason


@pytest.mark.usefixtures("_compiled")
def test_a_library_that_computes_something_else_is_refused(choose, monkeypatch, tmp_path):
    wrong = tmp_path / "cpu_qdq.cpp"
    source = cpu_build.SOURCE.read_text()
    assert source.count("all(448.0f)") == 1
    wrong.write_text(source.replace("all(448.0f)", "all(416.0f)"))
    monkeypatch.setattr(cpu_build, "SOURCE", wrong)
    with pytest.raises(cpu_build.BuildError, match="does not equal the definition"):
        choose(QUADS_CPU_QDQ="compiled")


def test_compiler_errors_are_shown(choose, monkeypatch, tmp_path):
    broken = tmp_path / "cpu_qdq.cpp"
    broken.write_text("this is not C++")
    monkeypatch.setattr(cpu_build, "SOURCE", broken)
    if cpu_qdq.path().name != "compiled":
        pytest.skip(cpu_qdq.path().reason)
    library, path = choose()
    assert library is None and "failed with status 1" in path.reason
    assert not [name for name in os.listdir(tmp_path / "cache") if name.endswith(".so")]
