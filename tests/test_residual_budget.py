"""One budget of FLOPs over many layers: what it buys, in which order, and what it leaves."""

import itertools

import pytest
import torch

from quads_ops.residual_budget import Demand, spend


def demand(score, width=1.0, traffic=None) -> Demand:
    score = torch.tensor(score, dtype=torch.float32)
    return Demand(score, width, torch.ones(len(score)) if traffic is None else torch.tensor(traffic))


def cost(demands, masks) -> float:
    return sum(float((m.sum(-1) * d.cost).sum()) for d, m in zip(demands, masks, strict=True))


def worth(demands, masks) -> float:
    """Of all tokens together."""
    each = zip(demands, masks, strict=True)
    return sum(float((d.score.double() * m * d.traffic.double().unsqueeze(-1)).sum()) for d, m in each)


def test_by_hand():
    demands = [demand([[4.0, 1.0, 2.0]], width=2.0), demand([[1.0, 1.0], [3.0, 0.0]], traffic=[2.0, 1.0])]
    # Scores per FLOP: 2, 0.5, 1 | 1, 1 and 3, 0. Costs: 2, 2, 2 | 2, 2 and 1, 1. Half of the 12 is 6.
    masks = spend(demands, 0.5)
    # 3 (cost 1), 2 (2), then of the three with score 1 the first (2): 5. Of the others only the last fits.
    assert [m.tolist() for m in masks] == [[[True, False, True]], [[False, False], [True, True]]]
    assert cost(demands, masks) == 6


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.37, 0.5, 0.9, 1.0])
def test_the_budget_is_kept_and_what_is_left_pays_for_nothing(ratio):
    generator = torch.Generator().manual_seed(0)
    demands = [
        Demand(torch.rand(rows, 8, generator=generator), width, torch.rand(rows, generator=generator) * 100)
        for rows, width in ((1, 384.0), (1, 128.0), (4, 64.0), (8, 256.0))
    ]
    masks = spend(demands, ratio)
    total = cost(demands, [torch.ones_like(m) for m in masks])
    assert cost(demands, masks) <= ratio * total * (1 + 1e-6)
    left = ratio * total - cost(demands, masks)
    for d, m in zip(demands, masks, strict=True):
        assert bool((m.all(-1) | (d.cost > left * (1 - 1e-6))).all())
    assert [m.shape for m in masks] == [d.score.shape for d in demands] and all(m.dtype == torch.bool for m in masks)
    if ratio in (0.0, 1.0):
        assert all(bool((m == (ratio == 1)).all()) for m in masks)


def test_no_choice_of_the_same_cost_is_worth_more():
    """Against all choices; with equal costs greedy is the best there is."""
    scores = torch.rand(12, generator=torch.Generator().manual_seed(1))
    demands = [Demand(scores[:6].view(1, 6), 5.0, torch.ones(1)), Demand(scores[6:].view(2, 3), 5.0, torch.ones(2))]
    masks = spend(demands, 5 / 12)
    best = max(sum(scores[i].item() for i in chosen) for chosen in itertools.combinations(range(12), 5))
    assert worth(demands, masks) == pytest.approx(best, rel=1e-6)


def test_it_is_worth_more_than_the_same_ratio_everywhere():
    generator = torch.Generator().manual_seed(2)
    demands = [
        Demand(torch.rand(1, 16, generator=generator) * 10.0**layer, 64.0, torch.ones(1)) for layer in range(-2, 2)
    ]
    uniform = [d.score >= d.score.sort(descending=True).values[:, 7:8] for d in demands]
    masks = spend(demands, 0.5)
    assert cost(demands, masks) == cost(demands, uniform)
    assert worth(demands, masks) > 1.2 * worth(demands, uniform)
    assert bool(masks[-1].all()) and not bool(masks[0].any())


def test_ties_go_to_the_earlier_layer_mask_and_entry():
    demands = [demand([[1.0] * 4]), demand([[1.0] * 4, [1.0] * 4])]
    masks = spend(demands, 0.5)
    assert masks[0].tolist() == [[True] * 4]
    assert masks[1].tolist() == [[True, True, False, False], [False] * 4]
    assert all(torch.equal(a, b) for a, b in zip(masks, spend(demands, 0.5), strict=True))


def test_an_expert_that_gets_few_tokens_costs_little():
    score = [[1.0, 1.0], [1.0, 1.0]]
    few = spend([demand([[2.0, 2.0]], width=10.0), demand(score, width=10.0, traffic=[0.01, 1.0])], 0.51)
    assert few[0].tolist() == [[True, True]] and few[1].tolist() == [[True, True], [False, False]]


def test_what_cannot_be_compared_is_an_error():
    with pytest.raises(ValueError, match="not finite"):
        spend([demand([[1.0, float("nan")]])], 0.5)
    with pytest.raises(ValueError, match="not finite"):
        spend([demand([[1.0]], traffic=[float("inf")])], 0.5)
    assert spend([], 0.5) == []
