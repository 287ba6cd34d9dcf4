"""Masks of the rollout: frozen between syncs, from statistics, from the weights before there are any."""

import pytest
import torch

pytest.importorskip("vllm")

from quads_ops import residual  # noqa: E402
from quads_ops.settings import ResidualSettings, SettingsError  # noqa: E402
from quads_ops.vllm_method import compensation as module  # noqa: E402
from quads_ops.vllm_method.compensation import Compensation  # noqa: E402

K, BLOCKS = 128, 8


@pytest.fixture(autouse=True)
def real_tokens(monkeypatch):
    monkeypatch.setattr(module, "serving_real_tokens", lambda: True)


def make(experts=None, **settings) -> Compensation:
    compensation = Compensation(ResidualSettings(**{"ratio": 0.5, **settings}), "layer", K, experts)
    compensation.create(torch.device("cpu"))
    weights = torch.rand(*(() if experts is None else (experts,)), K)
    compensation.set_weight_energy(weights)
    compensation.roll()
    return compensation


def spiky(rows: int, block: int) -> torch.Tensor:
    """Tokens whose residual is large in one block."""
    x = torch.randn(rows, K) * 0.01
    x[:, 16 * block : 16 * block + 16] = torch.randn(rows, 16) * 10
    return x


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("scope", ["step", "token"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_equal_to_the_reference(granularity, scope, ratio):
    compensation = make(ratio=ratio, granularity=granularity, scope=scope)
    x = torch.randn(9, K)
    if ratio in (0.0, 1.0):
        mode = "all" if ratio else None
    elif scope == "token":
        mode = residual.TokenMask(ratio, granularity)
    else:
        mode = residual.ResidualMask(**{f"{granularity}s": compensation.mask[0]})
    assert torch.equal(compensation.one(x), residual.compensate(x, "w4a4", mode))


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_experts_have_their_own_masks_and_statistics(granularity):
    compensation = make(experts=3, granularity=granularity)
    x, counts = torch.randn(10, K), [4, 0, 6]
    out = compensation.grouped(x, counts)
    for expert, rows in ((0, slice(0, 4)), (2, slice(4, 10))):
        mask = residual.ResidualMask(**{f"{granularity}s": compensation.mask[expert]})
        assert torch.equal(out[rows], residual.compensate(x[rows], "w4a4", mask))
        expected = residual.residual_statistics(x[rows], granularity)
        torch.testing.assert_close(compensation.energy[expert], expected)
    assert compensation.tokens.tolist() == counts
    assert not compensation.energy[1].any()


def test_before_statistics_the_mask_comes_from_the_weights():
    compensation = make()
    blocks = compensation.weight_energy[0]
    assert torch.equal(compensation.mask[0], residual.select_mask(blocks, 0.5).flags)
    assert compensation.roll().summary(0.5)["from_prior"] is True
    assert compensation.describe()["from_prior"] == [True]


def test_frozen_between_syncs_then_chosen_from_statistics():
    compensation = make(ratio=1 / BLOCKS)
    before = compensation.mask.clone()
    addresses = [t.data_ptr() for t in compensation._state.values()]
    spike = int((~before[0]).nonzero()[0])
    for _ in range(3):
        compensation.one(spiky(7, spike))
    assert torch.equal(compensation.mask, before)
    report = compensation.roll()
    assert compensation.mask[0].nonzero().tolist() == [[spike]]
    assert (report.moved, report.entries, report.from_prior) == (2, BLOCKS, 0)
    assert report.summary(0.125)["energy_covered"] < 0.05  # the old mask was elsewhere
    compensation.one(spiky(7, spike))
    assert compensation.roll().summary(0.125)["energy_covered"] > 0.95
    assert [t.data_ptr() for t in compensation._state.values()] == addresses
    assert not compensation.energy.any() and not compensation.tokens.any()


def test_moving_average_is_per_token():
    compensation = make(ema=0.75)
    x, y = torch.randn(5, K), 3 * torch.randn(50, K)
    compensation.one(x)
    compensation.roll()
    compensation.one(y)
    compensation.roll()
    expected = 0.75 * residual.residual_statistics(x) / 5 + 0.25 * residual.residual_statistics(y) / 50
    torch.testing.assert_close(compensation.average[0], expected)


def test_a_period_without_tokens_keeps_the_average():
    compensation = make()
    compensation.one(spiky(5, 3))
    compensation.roll()
    average, mask = compensation.average.clone(), compensation.mask.clone()
    report = compensation.roll()
    assert report.measured == 0 and report.summary(0.5)["energy_covered"] is None
    assert torch.equal(compensation.average, average) and torch.equal(compensation.mask, mask)


def test_weighted_score():
    plain, weighted = make(ratio=1 / BLOCKS), make(ratio=1 / BLOCKS, score="weighted")
    x = spiky(5, 2) + 0.5 * spiky(5, 6)
    for compensation in (plain, weighted):
        squares = torch.ones(K)
        squares[96:112] = 100.0
        compensation.set_weight_energy(squares)
        compensation.one(x)
        compensation.roll()
    assert plain.mask[0].nonzero().tolist() == [[2]]
    assert weighted.mask[0].nonzero().tolist() == [[6]]


def test_sensitivity_is_the_residual_score_until_a_gradient_comes():
    compensation = make(ratio=1 / BLOCKS, score="sensitivity")
    x = spiky(5, 2) + 0.5 * spiky(5, 6)
    compensation.one(x)
    report = compensation.roll()
    assert compensation.mask[0].nonzero().tolist() == [[2]] and report.summary(0.125)["by_sensitivity"] == 0
    gradient = torch.ones(K)
    gradient[96:112] = torch.arange(16) * 100.0  # the mean of a block counts
    compensation.set_gradient(gradient)
    assert compensation.mask[0].nonzero().tolist() == [[2]], "masks are frozen between syncs"
    report = compensation.roll()
    assert compensation.mask[0].nonzero().tolist() == [[6]] and report.summary(0.125)["by_sensitivity"] == 1
    torch.testing.assert_close(compensation.gradient[0], torch.tensor([1.0] * 6 + [750.0, 1.0]))


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_every_expert_has_its_own_gradient(granularity):
    compensation = make(experts=2, granularity=granularity, ratio=1 / BLOCKS, score="sensitivity")
    gradient = torch.zeros(2, K)
    gradient[0, 16:32], gradient[1, 48:64] = 1.0, 1.0
    compensation.set_gradient(gradient)
    compensation.grouped(torch.randn(10, K), [4, 6])
    compensation.roll()
    first = 16 if granularity == "channel" else 1
    assert compensation.mask[0].nonzero().flatten().tolist() == list(range(first, 2 * first))
    assert compensation.mask[1].nonzero().flatten().tolist() == list(range(3 * first, 4 * first))


def test_demand_is_about_what_is_known():
    compensation = make(experts=3, score="sensitivity", ema=0.5)
    assert not compensation.demand().score.any() and not compensation.demand().traffic.any()
    gradient = torch.rand(3, K)
    compensation.set_gradient(gradient)
    x = torch.randn(10, K)
    compensation.grouped(x, [4, 0, 6])
    compensation.end_period()
    demand = compensation.demand()
    energy = residual.residual_statistics(x[4:]) / 6
    torch.testing.assert_close(demand.score[2], energy * gradient[2].unflatten(-1, (-1, 16)).mean(-1))
    assert demand.traffic.tolist() == [4.0, 0.0, 6.0] and not demand.score[1].any()
    compensation.grouped(x, [0, 2, 8])
    compensation.end_period()
    # An expert without tokens keeps its statistics, and costs less.
    assert compensation.demand().traffic.tolist() == [2.0, 1.0, 7.0] and compensation.demand().score[0].any()
    compensation.end_period()
    assert compensation.demand().traffic.tolist() == [2.0, 1.0, 7.0], "nothing was served: no news"


def test_allocated_masks_where_known_and_the_ratio_elsewhere():
    compensation = make(experts=2, score="sensitivity", allocation="sensitivity")
    compensation.set_gradient(torch.rand(2, K))
    compensation.grouped(torch.randn(10, K), [10, 0])
    compensation.end_period()
    allocated = torch.zeros(2, BLOCKS, dtype=torch.bool)
    allocated[:, 0] = True
    report = compensation.choose(allocated)
    assert compensation.mask.sum(-1).tolist() == [1, 4]
    assert torch.equal(compensation.mask[1], residual.select_mask(compensation.weight_energy[1], 0.5).flags)
    # The expert that saw no token costs nothing.
    assert report.spent_ratio == pytest.approx(1 / BLOCKS)
    found = report.summary(report.spent_ratio)
    assert found["ratio"] == pytest.approx(1 / BLOCKS) and found["ratio_min"] == found["ratio_max"] == 5 / 16
    assert found["from_prior"] is True and found["by_sensitivity"] == 0.5


def test_profiling_runs_are_not_counted(monkeypatch):
    compensation = make()
    monkeypatch.setattr(module, "serving_real_tokens", lambda: False)
    compensation.one(torch.randn(5, K))
    assert not compensation.energy.any() and not compensation.tokens.any()


def test_ratio_can_be_changed_and_statistics_forgotten():
    compensation = make()
    compensation.one(spiky(5, 1))
    compensation.roll()
    compensation.set_ratio(0.25)
    assert int(compensation.mask.sum()) == 2 and bool(compensation.mask[0, 1])
    compensation.set_ratio(1.0)
    x = torch.randn(3, K)
    assert torch.equal(compensation.one(x), residual.compensate(x, "w4a4", "all"))
    compensation.forget()
    compensation.set_ratio(0.5)
    assert torch.equal(compensation.mask[0], residual.select_mask(compensation.weight_energy[0], 0.5).flags)
    with pytest.raises(SettingsError, match="residual.ratio"):
        compensation.set_ratio(1.5)


def test_statistics_that_overflow_name_the_layer():
    compensation = make()
    compensation.one(torch.full((2, K), 3e38) * torch.linspace(-1, 1, K))
    with pytest.raises(ValueError, match="layer: .*non-finite"):
        compensation.roll()
