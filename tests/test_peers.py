"""NVFP4 of other libraries against the definition: where they agree, and how often not.

compressed-tensors and vLLM are always here; the tests of torchao and ModelOpt run where these are installed.

docs/numerics.md ("Peers") gives the reasons. A test that fails after an upgrade of a peer means that the table there
needs a new number.
"""

import functools
from typing import NamedTuple

import pytest
import torch
from support_tensors import assert_same_bits

from quads_ops import nvfp4

pytest.importorskip("compressed_tensors")
pytest.importorskip("vllm")

SEEDS = range(8)


class Quantized(NamedTuple):
    codes: torch.Tensor
    """values on the E2M1 grid, FP32"""
    scales: torch.Tensor
    """values on the E4M3 grid, FP32"""
    values: torch.Tensor


def ours(x: torch.Tensor) -> Quantized:
    """One global scale for the tensor, as the peers have it."""
    g = nvfp4.global_scale_dec(x.abs().amax())
    codes, scales = nvfp4.quantize(x, g)
    return Quantized(nvfp4.decode_e2m1(codes), nvfp4.decode_e4m3(scales), nvfp4.dequantize(codes, scales, g))


def compressed_tensors(x: torch.Tensor) -> Quantized:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize, quantize
    from compressed_tensors.quantization.quant_scheme import NVFP4
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    args = NVFP4["weights"]
    enc = generate_gparam(x.amin(), x.amax())
    scales, zero = compute_dynamic_scales_and_zp(x, args, None, global_scale=enc)
    codes = quantize(x, scales, zero, args, global_scale=enc)
    values = fake_quantize(x, scales, zero, args, global_scale=enc)
    return Quantized(codes.float(), scales.float(), values)


def vllm(x: torch.Tensor) -> Quantized:
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as reference

    enc = (2688.0 / x.abs().amax().float()).reshape(1)
    codes, scales = reference.ref_nvfp4_quant(x, enc, 16)
    return Quantized(codes, scales, reference.ref_nvfp4_quant_dequant(x, enc, 16))


PEERS = [compressed_tensors, vllm]


def differing(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a != b).float().mean())


@functools.cache
def compare(peer, *, source: torch.dtype, compute: torch.dtype) -> tuple[list[float], list[float], list[float]]:
    """Shares of scales, codes and values that differ, for each of 8 Gaussian tensors given in `source` precision."""
    rows = []
    for seed in SEEDS:
        x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(seed)).to(source).to(compute)
        a, b = ours(x), peer(x)
        rows.append([differing(a.scales, b.scales), differing(a.codes, b.codes), differing(a.values, b.values.float())])
    return tuple(zip(*rows, strict=True))


@pytest.mark.parametrize("peer", PEERS)
def test_equal_where_the_reciprocal_is_exact(peer):
    """The peers keep 1/g = 2688/amax, rounded; with an amax of 2688 there is nothing to round. (-0 aside.)"""
    for seed in SEEDS:
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)) * 400
        x = x.clamp(-2688, 2688)
        x[0, 0] = -2688
        for mine, theirs in zip(ours(x), peer(x), strict=True):
            assert_same_bits(theirs + 0.0, mine + 0.0)


@pytest.mark.parametrize("peer", PEERS)
def test_fp32_source(peer):
    """No scale and at most one code in 100 000 differ; a quarter of the values do in their last bit."""
    scales, codes, values = compare(peer, source=torch.float32, compute=torch.float32)
    assert max(scales) == 0 and max(codes) < 1e-5
    assert 0.15 < sum(values) / len(SEEDS) < 0.35


@pytest.mark.parametrize("peer", PEERS)
def test_bf16_source_in_fp32(peer):
    """BF16 numbers fall on midpoints, which the rounding of 1/g decides: up to 0.7% of scales and 0.14% of codes."""
    scales, codes, values = compare(peer, source=torch.bfloat16, compute=torch.float32)
    assert 0.005 < max(scales) < 0.009 and min(scales) == 0
    assert 0.0010 < max(codes) < 0.0018
    assert 0.3 < sum(values) / len(SEEDS) < 0.5


def test_compressed_tensors_computes_in_the_dtype_of_its_input():
    """In BF16 its scales are BF16: 3 to 6% of the scale bytes and 0.9 to 2% of the codes are others."""
    scales, codes, values = compare(compressed_tensors, source=torch.bfloat16, compute=torch.bfloat16)
    assert 0.025 < min(scales) and max(scales) < 0.07
    assert 0.007 < min(codes) and max(codes) < 0.025


def test_vllm_computes_in_fp32_and_returns_the_dtype_of_its_input():
    scales, codes, _ = compare(vllm, source=torch.bfloat16, compute=torch.bfloat16)
    in_fp32 = compare(vllm, source=torch.bfloat16, compute=torch.float32)
    assert (scales, codes) == in_fp32[:2]


def test_zero_blocks():
    """compressed-tensors stores 0.125 as the scale of a zero block; the values are zeros all the same."""
    x = torch.randn(4, 64)
    x[:, 16:32] = 0
    assert (ours(x).scales[:, 1] == 0).all() and (vllm(x).scales[:, 1] == 0).all()
    assert (compressed_tensors(x).scales[:, 1] == 0.125).all()
    for quantized in (ours(x), vllm(x), compressed_tensors(x)):
        assert (quantized.values[:, 16:32] == 0).all()


def test_non_finite_numbers():
    """One NaN or Inf makes a tensor with one scale NaN; compressed-tensors goes on after a NaN, with a scale of 1."""
    x = torch.randn(4, 64)
    x[0, 5] = torch.inf
    for quantized in (ours(x), vllm(x), compressed_tensors(x)):
        assert quantized.values.isnan().all()
    x[0, 5] = torch.nan
    assert ours(x).values.isnan().all() and vllm(x).values.isnan().all()
    theirs = compressed_tensors(x).values
    assert theirs[0, :16].isnan().all() and theirs[1:].isfinite().all()


def test_non_finite_numbers_mark_the_scale_only_here():
    """A checkpoint of the peers does not show it: their scale bytes of a tensor with Inf are ordinary numbers."""
    x = torch.randn(4, 64)
    x[0, 5] = torch.inf
    assert ours(x).scales.isnan().all()
    assert (vllm(x).scales[1:] == 0).all() and (compressed_tensors(x).scales[1:] == 0.125).all()


@pytest.mark.parametrize("peer", PEERS)
def test_negative_zero(peer):
    """-0 keeps its sign here; the peers make it +0. A small negative number becomes -0 everywhere."""
    x = torch.tensor([[1.0, -0.0, -1e-4] + [0.5] * 13])
    assert ours(x).values.signbit().tolist()[0][:3] == [False, True, True]
    assert peer(x).values.signbit().tolist()[0][:3] == [False, False, True]


def test_packing_is_the_same():
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import break_fp4_bytes

    packed = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    values = nvfp4.decode_e2m1(nvfp4.unpack(packed))
    assert_same_bits(pack_fp4_to_uint8(values), packed)
    assert_same_bits(break_fp4_bytes(packed, torch.float32), values)


def test_vllm_decodes_with_another_order_of_products():
    """e2m1 * (s8 * g) there, (e2m1 * s8) * g here: 18% of Gaussian weights differ in the last bit, none by more."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    g = nvfp4.global_scale_dec(w.abs().amax())
    codes, scales = nvfp4.quantize(w, g)
    theirs = dequantize_to_dtype(nvfp4.pack(codes), scales, g, torch.float32, 16, swizzle=False)
    mine = nvfp4.dequantize(codes, scales, g)
    assert 0.15 < differing(mine, theirs) < 0.22
    apart = (mine.view(torch.int32) - theirs.view(torch.int32)).abs().max()
    assert apart == 1


# ---- peers that are not part of the installation


def torchao(x: torch.Tensor) -> Quantized:
    nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", exc_type=ImportError)
    g = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().amax())
    scales, packed = nvfp4_tensor.nvfp4_quantize(x, 16, g)
    values = nvfp4_tensor.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=g).dequantize(x.dtype)
    return Quantized(nvfp4.decode_e2m1(nvfp4.unpack(packed)), scales.float().reshape(x.shape[0], -1), values)


def modelopt(x: torch.Tensor) -> Quantized:
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor", exc_type=ImportError)
    q, scales, g = qtensor.NVFP4QTensor.quantize(x.clone(), 16)
    values = q.dequantize(x.dtype, scale=scales, double_scale=g, block_sizes={-1: 16})
    return Quantized(nvfp4.decode_e2m1(nvfp4.unpack(q._quantized_data)), scales.float(), values)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
def test_modelopt_has_the_same_codes_and_scales(source):
    scales, codes, values = compare(modelopt, source=source, compute=torch.float32)
    assert max(scales) == max(codes) == 0
    assert 0.05 < sum(values) / len(SEEDS) < 0.12  # e2m1 * (s8 * g): the last bit


def test_torchao_multiplies_with_a_reciprocal():
    """The same scales; of a BF16 source up to 0.3% of the codes are others."""
    scales, codes, _ = compare(torchao, source=torch.float32, compute=torch.float32)
    assert max(scales) == 0 and max(codes) < 1e-5
    scales, codes, _ = compare(torchao, source=torch.bfloat16, compute=torch.float32)
    assert max(scales) == 0 and 0.002 < max(codes) < 0.004


@pytest.mark.parametrize("peer, zero, least", [(torchao, 2.0**-6, 2.0**-6), (modelopt, 1.0, 2.0**-9)])
def test_small_blocks_elsewhere(peer, zero, least):
    """Both raise small scales; here a scale may round to 0, and the block with it."""
    x = torch.full((1, 64), 1e-4)
    x[0, 0], x[0, 16:32] = 2688.0, 0.0
    assert ours(x).scales.tolist() == [[448.0, 0.0, 0.0, 0.0]]
    assert peer(x).scales.tolist() == [[448.0, zero, least, least]]
