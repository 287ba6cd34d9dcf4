"""Routing in torch, as the CPU rollout does it, and which experts are refused."""

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


def experts_method(mode: str, monkeypatch, graphs: bool):
    """The method of supported experts, and their layer as vLLM makes it."""
    pytest.importorskip("vllm")
    from quads_ops.settings import RolloutSettings
    from quads_ops.vllm_method import moe

    monkeypatch.setattr(moe, "get_current_vllm_config", lambda: None)
    monkeypatch.setattr(moe, "captures_graphs", lambda config: graphs)
    method = moe.QuadsMoEMethod.__new__(moe.QuadsMoEMethod)
    method.module, method.rollout = "m.experts", RolloutSettings(mode=mode)
    method.moe = SimpleNamespace(tp_size=1, is_act_and_mul=True, has_bias=False)
    return method, layer(activation="silu", swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None)


@pytest.mark.parametrize("mode", ["w4a16", "fp8"])
def test_experts_that_ask_the_host_are_refused_under_cuda_graphs(mode, monkeypatch):
    method, experts = experts_method(mode, monkeypatch, graphs=True)
    with pytest.raises(ValueError, match=f"mode {mode} reads on the host .* Set enforce_eager"):
        method._check(experts, 64, 32)
    for allowed in ((mode, False), ("w4a4", True)):
        experts_method(allowed[0], monkeypatch, graphs=allowed[1])[0]._check(experts, 64, 32)


def test_a_changed_swiglu_is_refused(monkeypatch):
    method, experts = experts_method("w4a4", monkeypatch, graphs=False)
    method._check(experts, 64, 32)
    experts.swiglu_limit = 7.0
    with pytest.raises(ValueError, match="m.experts has a SwiGLU with swiglu_limit 7.0"):
        method._check(experts, 64, 32)
