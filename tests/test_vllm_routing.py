"""Routing in torch, as the CPU rollout does it."""

from types import SimpleNamespace

import pytest
import torch

from quads_ops.vllm_method.routing import check_routing, route


def layer(**changes) -> SimpleNamespace:
    defaults = dict(
        use_grouped_topk=False,
        custom_routing_function=None,
        apply_router_weight_on_input=False,
        scoring_func="softmax",
        e_score_correction_bias=None,
        top_k=2,
        renormalize=True,
        routed_scaling_factor=1.0,
    )
    return SimpleNamespace(**{**defaults, **changes})


def sorted_by_expert(weights, ids):
    ids, order = ids.sort(-1)
    return weights.gather(-1, order), ids


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_as_in_the_model(renormalize):
    logits = torch.randn(7, 5)
    weights, ids = sorted_by_expert(*route(layer(renormalize=renormalize), logits))
    expected, indices = logits.softmax(-1).topk(2, -1)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    expected, indices = sorted_by_expert(expected, indices)
    assert torch.equal(ids, indices)
    torch.testing.assert_close(weights, expected)


def test_sigmoid_with_a_bias_that_only_chooses():
    logits, bias = torch.zeros(3, 4), torch.tensor([0.0, 3.0, 1.0, 2.0])
    weights, ids = sorted_by_expert(
        *route(layer(scoring_func="sigmoid", e_score_correction_bias=bias, routed_scaling_factor=2.5), logits)
    )
    assert ids.tolist() == [[1, 3]] * 3
    torch.testing.assert_close(weights, torch.full((3, 2), 0.5 * 2.5))


@pytest.mark.parametrize(
    ("changes", "on_cpu", "message"),
    [
        ({"use_grouped_topk": True}, True, "m.experts routes with grouped top-k, which is not supported on a CPU"),
        ({"custom_routing_function": print}, True, "a custom routing function"),
        ({"scoring_func": "sqrtsoftplus"}, True, "scoring function 'sqrtsoftplus'"),
        ({"apply_router_weight_on_input": True}, False, "router weights on the input"),
    ],
)
def test_what_is_not_supported(changes, on_cpu, message):
    with pytest.raises(ValueError, match=message):
        check_routing(layer(**changes), "m.experts", on_cpu)


def test_a_gpu_routes_itself():
    check_routing(layer(use_grouped_topk=True), "m.experts", on_cpu=False)
