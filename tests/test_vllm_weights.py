"""One weight of the rollout: quantization in place, digests, changed codes, FP8, and the emulated product."""

import pytest
import torch

pytest.importorskip("vllm")

from quads_ops import nvfp4, weights  # noqa: E402
from quads_ops.settings import ResidualSettings, RolloutSettings  # noqa: E402
from quads_ops.vllm_method import projection as projection_module  # noqa: E402
from quads_ops.vllm_method import source_amax  # noqa: E402
from quads_ops.vllm_method.projection import Projection  # noqa: E402
from quads_ops.vllm_method.shards import Shard, expert_shards  # noqa: E402
from quads_ops.vllm_method.weight_fp8 import Fp8Weight  # noqa: E402
from quads_ops.vllm_method.weight_nvfp4 import Nvfp4Weight  # noqa: E402

N, K, EXPERTS = 24, 32, 3


@pytest.fixture(autouse=True)
def one_worker(monkeypatch):
    """Without an engine there is no tensor parallel group."""
    monkeypatch.setattr(projection_module, "tp_reduce_", lambda tensor, op: tensor)


def pair() -> list[Shard]:
    return [Shard(name, slice(a, a + N), None, 0, 0, K, (N, K)) for name, a in (("gate", 0), ("up", N))]


def addresses(weight) -> list[int]:
    return [t.data_ptr() for t in weight._tensors.values()]


def test_joined_matrices_share_the_larger_scale():
    w = torch.randn(2 * N, K)
    w[:N] *= 4
    weight = Nvfp4Weight(pair())
    weight.load(w)
    g = nvfp4.global_scale_dec(w.abs().max())
    assert weight["global_scale_dec"].shape == () and torch.equal(weight["global_scale_dec"], g)
    expected = weights.quantize_weight(w, g)
    assert torch.equal(weight["packed"], expected.packed)
    assert torch.equal(weight["block_scales"], expected.block_scales)
    assert torch.equal(weight.dequantized(), weights.dequantize_weight(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_have_a_scale_each(dtype):
    gate_up, _ = expert_shards("m", range(EXPERTS), K, N, 0, 1)
    w = (torch.randn(EXPERTS, 2 * N, K) * torch.tensor([1.0, 5.0, 0.1])[:, None, None]).to(dtype)
    weight = Nvfp4Weight(gate_up)
    weight.load(w)
    expected = weights.quantize_weight(w, nvfp4.global_scale_dec(weights.weight_amax(w)))
    assert all(torch.equal(a, b) for a, b in zip(weight.packed, expected, strict=True))
    assert set(weight.receipts()) == {shard.name for shard in gate_up}


def test_reload_keeps_addresses_and_counts_changed_codes():
    w = torch.randn(2 * N, K)
    weight = Nvfp4Weight(pair())
    weight.load(w)
    before = addresses(weight)
    assert weight.changed == {}
    changed = w.clone()
    changed[0, :2] = -w[0, :2]  # two codes of gate change their sign
    assert bool((w[0, :2].abs() > 0.1).all())
    weight.load(changed)
    assert weight.changed == {"gate": (2, N * K), "up": (0, N * K)}
    assert addresses(weight) == before


@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_changed_codes_are_estimated_where_the_codes_before_were_discarded(experts):
    """As by a sleep at level 2. An eighth of the blocks of gate change, along columns; nothing of up does."""
    n, k = 256, 512  # 32 times the sample
    shards = [
        Shard(f"{name}{e}", slice(a, a + n), None if experts is None else e, 0, 0, k, (n, k))
        for e in range(experts or 1)
        for name, a in (("gate", 0), ("up", n))
    ]
    w = torch.randn(experts or 1, 2 * n, k).squeeze(0) if experts is None else torch.randn(experts, 2 * n, k)
    changed = w.clone()
    changed[..., :n, : k // 8] *= -1
    exact, weight = Nvfp4Weight(shards), Nvfp4Weight(shards)
    for one in (exact, weight):
        one.load(w)
    weight["packed"].random_(0, 255)
    for one in (exact, weight):
        one.load(changed)
    assert weight.changed.keys() == exact.changed.keys() == {shard.name for shard in shards}
    for name, (count, size) in exact.changed.items():
        estimate, same_size = weight.changed[name]
        assert same_size == size == n * k
        standard_error = (count / size * (1 - count / size) / 4096) ** 0.5
        assert abs(estimate - count) / size <= 4 * standard_error
    assert all(torch.equal(a, b) for a, b in zip(weight.packed, exact.packed, strict=True))


def test_amax_of_the_stream_is_that_of_whole_matrices():
    w = torch.randn(2 * N, K)
    weight = Nvfp4Weight(pair())
    with source_amax.amaxes_of_stream({"gate": torch.tensor(20.0), "up": torch.tensor(3.0)}):
        weight.load(w)
        with pytest.raises(RuntimeError, match="already in progress"):
            source_amax.amaxes_of_stream({}).__enter__()
    assert torch.equal(weight["global_scale_dec"], nvfp4.global_scale_dec(torch.tensor(20.0)))
    assert not source_amax.streaming()


@pytest.mark.parametrize("cls", [Nvfp4Weight, Fp8Weight])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(cls, bad):
    w = torch.randn(2 * N, K)
    w[3, 4] = bad
    with pytest.raises(ValueError, match="NaN or Inf.*gate"):
        cls(pair()).load(w)


def test_fp8_has_a_scale_for_each_channel():
    w = torch.randn(2 * N, K) * torch.logspace(-3, 3, 2 * N)[:, None]
    w[5] = 0
    weight = Fp8Weight(pair())
    weight.load(w)
    assert torch.equal(weight["scales"][5], torch.tensor(1.0))
    error = (weight.dequantized() - w).abs() / w.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    assert float(error.max()) < 1 / 16  # three bits of mantissa
    assert weight.receipts() == {}


def test_fp8_stream_has_the_channels_of_whole_matrices():
    shards = [Shard("o", slice(0, N), None, 0, 16, 16, (N, 32))]
    w = torch.randn(N, 32)
    weight = Fp8Weight(shards)
    with source_amax.amaxes_of_stream({"o": Fp8Weight.observe(w)}):
        weight.load(w[:, 16:].contiguous())
    assert torch.equal(weight["scales"], w.abs().amax(-1) / 448)


def projection(mode: str, ratio: float = 0.0) -> tuple[Projection, torch.nn.Module, torch.Tensor]:
    rollout = RolloutSettings(mode=mode, residual=ResidualSettings(ratio=ratio))
    layer = torch.nn.Module()
    w = torch.randn(2 * N, K)
    layer.register_parameter("weight", torch.nn.Parameter(w.clone(), requires_grad=False))
    joined = Projection("m.gate_up_proj", "weight", "weight", pair(), rollout, K)
    joined.load(layer)
    return joined, layer, w


@pytest.mark.parametrize("mode", ["fp8", "w4a16", "w4a4"])
def test_the_product_is_fp32_rounded_once(mode):
    joined, layer, w = projection(mode, 1.0 if mode == "w4a4" else 0.0)
    assert layer.weight.dtype in (torch.uint8, torch.float8_e4m3fn), "no copy of the source is kept"
    x, bias = torch.randn(5, K).bfloat16(), torch.randn(2 * N).bfloat16()
    y = joined.multiply(x, bias)
    exact = joined.activation.one(x).double() @ joined.weight.dequantized().double().t() + bias.double()
    assert y.dtype == torch.bfloat16 and y.shape == (5, 2 * N)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)
    relative = (y.double() - (x.double() @ w.double().t() + bias.double())).norm() / exact.norm()
    assert relative < {"fp8": 0.06, "w4a16": 0.2, "w4a4": 0.2}[mode]


def test_masks_are_buffers_that_are_not_saved():
    joined, layer, _ = projection("w4a4", 0.5)
    buffers = dict(layer.named_buffers())
    assert torch.equal(buffers["weight_rac_mask"], joined.compensation.mask)
    assert not any("rac" in name for name in layer.state_dict())
    squares = weights.dequantize_weight(joined.weight.packed).square().sum(0).unflatten(-1, (-1, 16)).sum(-1)
    torch.testing.assert_close(joined.compensation.weight_energy[0], squares)
