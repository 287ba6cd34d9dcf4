"""The products of a GPU (quads_ops.gemm, weights in the order of the masks), run by their torch definition on a CPU:
equal to the CPU's product, and the same weights behind them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.forward_context import ForwardContext, override_forward_context  # noqa: E402

from quads_ops import gemm  # noqa: E402
from quads_ops.settings import ResidualSettings, RolloutSettings, SettingsError  # noqa: E402
from quads_ops.vllm_method import compensation as compensation_module  # noqa: E402
from quads_ops.vllm_method import moe, projection  # noqa: E402
from quads_ops.vllm_method.projection import Projection  # noqa: E402
from quads_ops.vllm_method.shards import Shard, expert_shards  # noqa: E402

TOKENS, HIDDEN, INNER, EXPERTS, TOP = 11, 64, 48, 4, 2


@pytest.fixture(autouse=True)
def without_engine(monkeypatch):
    monkeypatch.setattr(projection, "tp_reduce_", lambda tensor, op: tensor)
    monkeypatch.setattr(compensation_module, "serving_real_tokens", lambda: True)


def rollout(ratio: float, granularity: str, **residual) -> RolloutSettings:
    return RolloutSettings(mode="w4a4", residual=ResidualSettings(ratio=ratio, granularity=granularity, **residual))


def linear(ratio, granularity, w, **residual) -> Projection:
    shard = Shard("m", slice(0, len(w)), None, 0, 0, w.shape[1], tuple(w.shape))
    made = Projection("m", "weight", "weight", [shard], rollout(ratio, granularity, **residual), w.shape[1])
    reload(made, torch.nn.Module(), "weight", w)
    return made


def reload(made: Projection, layer: torch.nn.Module, name: str, w: torch.Tensor) -> None:
    layer.register_parameter(name, torch.nn.Parameter(w.clone(), requires_grad=False))
    made.load(layer)


def both(monkeypatch, build):
    """The same thing twice: as on a CPU, and with the operators."""
    cpu = build()
    monkeypatch.setattr(projection, "uses_operators", lambda device, mode: True)
    return cpu, build()


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_linear(ratio, granularity, monkeypatch):
    w, x, bias = torch.randn(40, HIDDEN), torch.randn(TOKENS, HIDDEN), torch.randn(40)
    cpu, gpu = both(monkeypatch, lambda: linear(ratio, granularity, w))
    for _ in range(2):
        # The same products in another order: off by rounding of sums, a share of the sum of magnitudes (1e-6, as for
        # all products: support_gemm.BOUND). One large block beside small results makes that more than 1e-5.
        error = (gpu.multiply(x, bias) - cpu.multiply(x, bias)).abs()
        assert (error <= 1e-6 * (x.abs() @ w.abs().t() + bias.abs())).all()
        assert gpu.weight.receipts() == cpu.weight.receipts()
        torch.testing.assert_close(gpu.compensation.energy, cpu.compensation.energy)
        assert gpu.compensation.tokens.tolist() == cpu.compensation.tokens.tolist()
        # The second round has new masks, and new weights in their order.
        x[:, 16:32] *= 30
        cpu.multiply(x), gpu.multiply(x)
        cpu.roll(), gpu.roll()
        assert torch.equal(gpu.compensation.mask, cpu.compensation.mask)


def test_reload_in_another_order_keeps_addresses_and_counts(monkeypatch):
    w = torch.randn(40, HIDDEN)
    cpu, gpu = both(monkeypatch, lambda: linear(0.5, "block", w))
    order = gpu.weight["order"].tolist()
    assert gpu.operand().form.order.tolist() == order
    assert sorted(order) == list(range(HIDDEN // 16)) and gpu.operand().form.kept == 2
    addresses = {name: t.data_ptr() for name, t in gpu.weight._tensors.items()}
    changed = w.clone()
    changed[3, 16:32] *= 5
    for made in (cpu, gpu):
        reload(made, torch.nn.Module(), "weight", changed)
    assert gpu.weight.changed == cpu.weight.changed != {"m": (0, w.numel())}
    assert gpu.weight.receipts() == cpu.weight.receipts()
    assert {name: t.data_ptr() for name, t in gpu.weight._tensors.items()} == addresses
    assert torch.equal(gpu.weight.dequantized(), cpu.weight.dequantized())


def experts(ratio, granularity, w13, w2) -> SimpleNamespace:
    gate_up, down = expert_shards("m.mlp.experts", range(EXPERTS), HIDDEN, INNER, 0, 1)
    settings = rollout(ratio, granularity)
    layer = torch.nn.Module()
    pair = (
        Projection("m.mlp.experts", "w13", "w13_weight", gate_up, settings, HIDDEN),
        Projection("m.mlp.experts", "w2", "w2_weight", down, settings, INNER, masks=EXPERTS),
    )
    reload(pair[0], layer, "w13_weight", w13)
    reload(pair[1], layer, "w2_weight", w2)
    return SimpleNamespace(quads_projections=pair, expert_map=None, local_num_experts=EXPERTS)


def forward_of(slots: list[int]):
    """A forward of vLLM's with these slots of the KV cache: -1 for the padding of a CUDA graph."""
    mapping = {"model.layers.0.self_attn.attn": torch.tensor(slots)}
    return override_forward_context(ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping=mapping))


PADDED = TOKENS + 5
SLOTS = [*range(40, 40 + TOKENS), *[-1] * (PADDED - TOKENS)]


def padded(x: torch.Tensor) -> torch.Tensor:
    """With rows after it that hold what memory may hold."""
    left = torch.full((PADDED - TOKENS, x.shape[1]), 3e38)
    left[0], left[1] = torch.nan, torch.inf
    return torch.cat((x, left))


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_padding_is_no_token_of_a_linear(granularity, monkeypatch):
    w, x = torch.randn(40, HIDDEN), torch.randn(TOKENS, HIDDEN)
    monkeypatch.setattr(projection, "uses_operators", lambda device, mode: True)
    plain, made = linear(0.5, granularity, w), linear(0.5, granularity, w)
    expected = plain.multiply(x)
    with forward_of(SLOTS):
        y = made.multiply(padded(x))
    assert torch.equal(y[:TOKENS], expected) and y[TOKENS:].isfinite().all()
    assert made.compensation.tokens.tolist() == [TOKENS]
    assert torch.equal(made.compensation.energy, plain.compensation.energy)
    made.roll()  # energies that overflow would end the sync


def test_padding_is_no_token_of_any_expert(monkeypatch):
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 8, torch.randn(EXPERTS, HIDDEN, INNER) / 7
    x, weights = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, TOP)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(TOKENS)]).int()
    monkeypatch.setattr(projection, "uses_operators", lambda device, mode: True)
    plain, layer = (experts(0.5, "block", w13, w2) for _ in range(2))
    method = moe.QuadsMoEMethod.__new__(moe.QuadsMoEMethod)
    expected = method.run(plain, x, weights, ids)
    # Of a row that is NaN the router makes weights that are NaN, and experts that need not exist.
    more = PADDED - TOKENS
    weights = torch.cat((weights, torch.full((more, TOP), torch.nan)))
    ids = torch.cat((ids, torch.full((more, TOP), EXPERTS + 7, dtype=torch.int32)))
    with forward_of(SLOTS):
        y = method.run(layer, padded(x), weights, ids)
    assert torch.equal(y[:TOKENS], expected) and not y[TOKENS:].any()
    for a, b in zip(plain.quads_projections, layer.quads_projections, strict=True):
        assert a.compensation.tokens.tolist() == b.compensation.tokens.tolist()
        torch.testing.assert_close(a.compensation.energy, b.compensation.energy, rtol=1e-6, atol=0)


def test_a_warm_up_is_what_is_captured_and_counts_nothing(monkeypatch):
    """vLLM runs every size once before it captures it; a kernel that is new in the capture could not be loaded."""
    monkeypatch.setattr(projection, "uses_operators", lambda device, mode: True)
    monkeypatch.setattr(compensation_module, "serving_real_tokens", lambda: False)
    seen = []
    product = gemm.w4a4_linear
    monkeypatch.setattr(gemm, "w4a4_linear", lambda *a, stats, **k: seen.append(stats) or product(*a, stats=stats, **k))
    made = linear(0.5, "block", torch.randn(40, HIDDEN))
    with forward_of([-1] * TOKENS):
        made.multiply(torch.randn(TOKENS, HIDDEN))
    assert seen[0] is made.compensation.statistics
    assert not made.compensation.energy.any() and not made.compensation.tokens.any()
    made.multiply(torch.randn(TOKENS, HIDDEN))  # the profiling run, before there is a KV cache
    assert seen[1] is None


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_experts(ratio, granularity, monkeypatch):
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 8, torch.randn(EXPERTS, HIDDEN, INNER) / 7
    x = torch.randn(TOKENS, HIDDEN)
    weights = torch.rand(TOKENS, TOP)
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:TOP] for _ in range(TOKENS)])  # the last expert gets no token
    cpu, gpu = both(monkeypatch, lambda: experts(ratio, granularity, w13, w2))
    method = moe.QuadsMoEMethod.__new__(moe.QuadsMoEMethod)
    method._act = torch.nn.functional.silu
    for _ in range(2):
        ours, operator = (method.run(layer, x, weights, ids) for layer in (cpu, gpu))
        # Both round gate, up and their product alike, but a last bit can move a value across a rounding boundary.
        assert float((ours - operator).abs().median()) < 1e-5
        assert float((ours - operator).norm() / ours.norm()) < 0.02
        for a, b in zip(cpu.quads_projections, gpu.quads_projections, strict=True):
            assert a.weight.receipts() == b.weight.receipts()
            assert a.compensation.tokens.tolist() == b.compensation.tokens.tolist()
            torch.testing.assert_close(a.compensation.energy, b.compensation.energy, rtol=1e-2, atol=1e-4)
            a.roll(), b.roll()
    if 0 < ratio < 1:
        assert cpu.quads_projections[1].compensation.known.tolist() == [True] * (EXPERTS - 1) + [False]


def test_the_form_of_the_residual_is_left_to_the_dispatch(monkeypatch):
    """No layer says whether the residual is added in FP16: `quads_ops.backends.takes_sums` does."""
    monkeypatch.setattr(projection, "uses_operators", lambda device, mode: True)
    asked = []
    monkeypatch.setattr(gemm.dispatch, "takes_sums", lambda *args: asked.append(args[-1]) or False)
    linear(0.5, "block", torch.randn(40, HIDDEN)).multiply(torch.randn(TOKENS, HIDDEN))
    layer = experts(0.5, "block", torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER))
    ids = torch.zeros(TOKENS, 1, dtype=torch.int64)
    moe.QuadsMoEMethod.__new__(moe.QuadsMoEMethod).run(layer, torch.randn(TOKENS, HIDDEN), torch.ones(TOKENS, 1), ids)
    assert asked == [None, None]


def test_a_budget_over_all_layers_is_refused(monkeypatch):
    """The number of kept blocks is an argument of the operator, fixed where a CUDA graph holds it."""
    monkeypatch.setattr(projection, "uses_operators", lambda device, mode: True)
    both = ResidualSettings(ratio=0.5, score="sensitivity", allocation="sensitivity")
    shard = Shard("m", slice(0, 16), None, 0, 0, 32, (16, 32))
    made = Projection("m", "weight", "weight", [shard], RolloutSettings(mode="w4a4", residual=both), 32)
    with pytest.raises(SettingsError, match="quads.rollout.residual.allocation = 'sensitivity'"):
        reload(made, torch.nn.Module(), "weight", torch.randn(16, 32))


def test_masks_by_sensitivity_keep_the_number_of_blocks(monkeypatch):
    w, x = torch.randn(40, HIDDEN), torch.randn(TOKENS, HIDDEN)
    cpu, gpu = both(monkeypatch, lambda: linear(0.5, "block", w, score="sensitivity"))
    kept = gpu.operand().form.kept
    for made in (cpu, gpu):
        made.multiply(x)
        made.compensation.set_gradient(torch.arange(HIDDEN).float())
        made.roll()
    assert torch.equal(gpu.compensation.mask, cpu.compensation.mask) and gpu.operand().form.kept == kept
    assert gpu.compensation.mask[0, -1] and not gpu.compensation.mask[0, 0]
    error = (gpu.multiply(x) - cpu.multiply(x)).abs()
    assert (error <= 1e-6 * (x.abs() @ w.abs().t())).all()


def test_a_mask_per_token_is_refused(monkeypatch):
    monkeypatch.setattr(projection, "uses_operators", lambda device, mode: True)
    settings = RolloutSettings(mode="w4a4", residual=ResidualSettings(ratio=0.5, scope="token"))
    shard = Shard("m", slice(0, 16), None, 0, 0, 32, (16, 32))
    made = Projection("m", "weight", "weight", [shard], settings, 32)
    with pytest.raises(ValueError, match="mask per token"):
        reload(made, torch.nn.Module(), "weight", torch.randn(16, 32))
