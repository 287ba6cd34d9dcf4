"""`quads_kernels.weight_qdq` against `quads_ops.weights`, bit for bit, every output poisoned and guarded beforehand."""

import pytest
import support_interpreter
import torch
from support_interpreter import DEVICE, GuardedOutputs, same_bits

from quads_kernels import launch, weight_qdq
from quads_ops import nvfp4, weights

in_interpreter = support_interpreter.fixture()

SHAPES = [(1, 16), (7, 48), (63, 2880), (130, 256), (5, 33, 80), (2, 3, 9, 64), (0, 32), (3, 0, 32)]


def check_all(w: torch.Tensor, g: torch.Tensor, monkeypatch) -> None:
    """Values, codes and scales in one pass and apart, and decoding, against the reference on the CPU."""
    guarded = GuardedOutputs(monkeypatch)
    on_device = w.to(DEVICE), g.to(DEVICE)
    expected = weights.quantize_weight(w, g)
    expected_values = weights.fake_quantize_weight(w, g)
    for values, packed in ((True, True), (True, False), (False, True)):
        out, codes, scales = weight_qdq.quantize(*on_device, values=values, packed=packed)
        assert (out is not None) == values and (codes is not None) == packed
        if values:
            same_bits(out, expected_values)
        if packed:
            same_bits(codes, expected.packed)
            same_bits(scales, expected.block_scales)
    codes, scales = expected.packed.to(DEVICE), expected.block_scales.to(DEVICE)
    decoded = weights.dequantize_weight(expected)
    for dtype in {torch.float32, w.dtype}:
        same_bits(weight_qdq.dequantize(codes, scales, on_device[1], dtype), decoded.to(dtype))
    guarded.check_margins()


def scale_of(w: torch.Tensor) -> torch.Tensor:
    return nvfp4.global_scale_dec(w.float().abs().amax((-2, -1))) if w.numel() else torch.ones(w.shape[:-2])


@pytest.mark.parametrize("dtype", launch.FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape, dtype, monkeypatch):
    w = torch.randn(shape).to(dtype)
    check_all(w, scale_of(w), monkeypatch)


def outliers() -> torch.Tensor:
    return torch.randn(2, 40, 128).bfloat16() * torch.where(torch.rand(128) < 0.05, 30.0, 1.0).bfloat16()


def zeros_and_subnormals() -> torch.Tensor:
    w = torch.randn(4, 8, 64)
    w[0] = 0.0
    w[1, 2] = -0.0
    w[1, 3, 16:32] *= 1e-7
    w[2] *= 1e-38
    w[3] *= 1e-42
    return w


def ties() -> torch.Tensor:
    values = torch.tensor([0.0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -2.5])
    w = values.repeat(1, 16, 8) * torch.exp2(torch.randint(-3, 4, (16, 8)).float()).repeat_interleave(16, 1)
    w[0, 0, :16] = values * 448  # amax 2688, so that g is 1 and every product is exact
    return w


def not_finite() -> torch.Tensor:
    w = torch.randn(5, 4, 48).bfloat16()
    w[1, 0, 3], w[2, 1, 20], w[3, 2, 40] = float("nan"), float("inf"), float("-inf")
    return w


def random_bits() -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (3, 32, 64), dtype=torch.int64).int().view(torch.float32)


def random_bf16_bits() -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, (3, 32, 64)).to(torch.int16).view(torch.bfloat16)


CASES = [outliers, zeros_and_subnormals, ties, not_finite, random_bits, random_bf16_bits]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_hard_inputs(case, monkeypatch):
    w = case()
    check_all(w, scale_of(w), monkeypatch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_scale_that_is_not_of_this_matrix(case, monkeypatch):
    """Matrices that share a scale with larger ones, or (a stale scale) with smaller ones: underflow, saturation."""
    w = case()
    g = scale_of(w.nan_to_num(0.0, 1.0, -1.0))
    check_all(w, (g * 37.0).clamp(min=2.0**-117), monkeypatch)
    check_all(w, (g / 41.0).clamp(min=2.0**-117), monkeypatch)


def test_strided_weights(monkeypatch):
    base = torch.randn(6, 40, 192).bfloat16()
    for w in (
        base[::2, 3:40:2, 16:160],
        base[:, :7].transpose(0, 1),
        base[:, :32].transpose(1, 2),
        base[0].t()[:, 6:38],
    ):
        assert not w.is_contiguous()
        check_all(w, scale_of(w), monkeypatch)


def test_bad_arguments_are_named():
    w, g = torch.randn(4, 32, device=DEVICE), torch.ones((), device=DEVICE)
    for arguments, words in (
        ((w[:, :24], g), "multiple of 16; got 24"),
        ((w[0], g), r"at least two dimensions .* \(32,\)"),
        ((w.int(), g), "weight must be .*int32"),
        ((w, g.half()), "global_scale_dec must be torch.float32, got torch.float16"),
        ((w, torch.ones(4, device=DEVICE)), r"global_scale_dec must have shape \(\), got \(4,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            weight_qdq.quantize(*arguments, values=True, packed=False)
    packed, scales = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"block_scales must have shape \(4, 2\), got \(4, 3\)"):
        weight_qdq.dequantize(packed.to(DEVICE), scales.to(DEVICE), g, torch.float32)


def test_more_matrices_than_a_grid_holds_are_refused():
    """Before anything is allocated; CUDA would only say "invalid argument"."""
    w, g = torch.zeros(1, 1, 16, device=DEVICE).expand(65536, 1, 16), torch.ones(65536, device=DEVICE)
    with pytest.raises(ValueError, match="may have .* 65535 matrices, got 1 and 65536; quantize parts of it"):
        weight_qdq.quantize(w, g, values=True, packed=True)
    codes, scales = (torch.zeros(1, 1, n, dtype=torch.uint8, device=DEVICE).expand(65536, 1, n) for n in (8, 1))
    with pytest.raises(ValueError, match="65535 matrices"):
        weight_qdq.dequantize(codes, scales, g, torch.float32)
    assert weight_qdq.quantize(w[:3], g[:3], values=True, packed=False)[0].shape == (3, 1, 16)


def test_more_rows_than_a_grid_holds_are_refused(monkeypatch):
    monkeypatch.setattr(weight_qdq, "MOST_PROGRAMS", 2)
    monkeypatch.setattr(weight_qdq, "tile_shape", lambda n, k: (4, 1, 4))
    w, g = torch.zeros(9, 16, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    with pytest.raises(ValueError, match="a weight with K=16 may have 8 rows and 2 matrices, got 9 and 1"):
        weight_qdq.quantize(w, g, values=True, packed=False)
    assert weight_qdq.quantize(w[:8], g, values=True, packed=False)[0].shape == (8, 16)
