"""Weights in NVFP4: amax, packed codes, the fake-quantized matrix, and what shares a scale."""

import pytest
import torch
from support_tensors import ODD_INPUTS, assert_same_bits

from quads_ops import cpu_qdq, nvfp4
from quads_ops.weights import (
    PackedWeight,
    dequantize_weight,
    fake_quantize_weight,
    quantize_weight,
    weight_amax,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["compiled", "torch"])
def _path(request, monkeypatch):
    """Every test runs on both CPU paths."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_qdq, "takes", lambda x: False)
    elif cpu_qdq.path().name != "compiled":
        pytest.skip(f"no compiled path: {cpu_qdq.path().reason}")


pytestmark = pytest.mark.usefixtures("_path")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 48), (3, 8, 272), (2, 3, 5, 7), (1, 300, 128)])
def test_amax_is_per_matrix(dtype, shape):
    w = torch.randn(shape).to(dtype)
    w.view(-1)[-1] = -100.0
    assert_same_bits(weight_amax(w), w.abs().float().flatten(-2).amax(-1))


def test_amax_of_non_finite_and_zero_weights():
    w = torch.zeros(4, 16, 16)
    w[1, 3, 3], w[2, 5, 5], w[3, 0, 0] = torch.nan, -torch.inf, -0.0
    assert_same_bits(weight_amax(w), torch.tensor([0.0, torch.nan, torch.inf, 0.0]))
    g = nvfp4.global_scale_dec(weight_amax(w))
    out = fake_quantize_weight(w, g)
    assert out[1:3].isnan().all() and (out[[0, 3]] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ODD_INPUTS)
def test_packed_weight_is_the_definition(name, dtype):
    w = torch.stack([ODD_INPUTS[name](24, 272) for _ in range(3)]).to(dtype)
    g = nvfp4.global_scale_dec(weight_amax(w))
    packed = quantize_weight(w, g)
    for expert in range(3):
        codes, scales = nvfp4.quantize(w[expert], g[expert])
        assert_same_bits(packed.packed[expert], nvfp4.pack(codes))
        assert_same_bits(packed.block_scales[expert], scales)
        values = nvfp4.dequantize(codes, scales, g[expert])
        assert_same_bits(dequantize_weight(packed)[expert], values)
        assert_same_bits(fake_quantize_weight(w, g)[expert], values.to(dtype))


def test_experts_do_not_share_a_scale():
    """A matrix next to one 1000 times larger keeps its precision."""
    w = torch.randn(2, 64, 64) * torch.tensor([1.0, 1000.0]).view(2, 1, 1)
    out = fake_quantize_weight(w, nvfp4.global_scale_dec(weight_amax(w)))
    alone = fake_quantize_weight(w[0], nvfp4.global_scale_dec(weight_amax(w[0])))
    assert_same_bits(out[0], alone)


def test_rows_of_a_group_quantize_like_the_fused_matrix():
    """q, k and v with the group's scale are the rows of the fused matrix with its own."""
    q, k, v = torch.randn(64, 128), torch.randn(32, 128) * 3, torch.randn(32, 128) / 3
    g = nvfp4.global_scale_dec(torch.stack([weight_amax(w) for w in (q, k, v)]).amax())
    fused = torch.cat((q, k, v))
    whole = quantize_weight(fused, nvfp4.global_scale_dec(weight_amax(fused)))
    parts = [quantize_weight(w, g) for w in (q, k, v)]
    assert_same_bits(torch.cat([p.packed for p in parts]), whole.packed)
    assert_same_bits(torch.cat([p.block_scales for p in parts]), whole.block_scales)


def test_a_bf16_weight_and_its_fp32_master_give_other_codes():
    """Why the source is always the compute dtype: 1 code in 100 differs."""
    master = torch.randn(256, 256)
    compute = master.bfloat16()
    of_master = quantize_weight(master, nvfp4.global_scale_dec(weight_amax(master)))
    of_compute = quantize_weight(compute, nvfp4.global_scale_dec(weight_amax(compute)))
    changed = (nvfp4.unpack(of_master.packed) != nvfp4.unpack(of_compute.packed)).float().mean()
    assert 0.002 < changed < 0.05
    again = quantize_weight(compute.float(), nvfp4.global_scale_dec(weight_amax(compute.float())))
    assert_same_bits(again.packed, of_compute.packed)


def test_views_and_parameters():
    fused = torch.nn.Parameter(torch.randn(4, 64, 48))
    gate, up = fused.chunk(2, dim=-2)
    g = nvfp4.global_scale_dec(weight_amax(fused))
    assert not g.requires_grad
    assert_same_bits(
        torch.cat([fake_quantize_weight(w, g) for w in (gate, up)], -2), fake_quantize_weight(fused.detach(), g)
    )
    assert not fake_quantize_weight(fused, g).requires_grad


@pytest.mark.parametrize("function", [quantize_weight, fake_quantize_weight])
@pytest.mark.parametrize(
    "shape, g_shape, message",
    [
        ((4, 8, 32), (), r"shape \(4,\)"),
        ((8, 32), (1,), r"shape \(\)"),
        ((32,), (), "at least two dimensions"),
        ((8, 24), (), r"\(8, 24\)"),
    ],
)
def test_bad_shapes(function, shape, g_shape, message):
    with pytest.raises(ValueError, match=message):
        function(torch.ones(shape), torch.ones(g_shape))


def test_dequantize_takes_what_a_checkpoint_would_hold():
    packed = PackedWeight(
        torch.full((2, 8), 0x21, dtype=torch.uint8), torch.full((2, 1), 0x40, dtype=torch.uint8), torch.tensor(0.5)
    )
    assert dequantize_weight(packed).tolist() == [[0.5, 1.0] * 8] * 2  # 0.5 * 2 * 0.5, 1 * 2 * 0.5
