"""Mismatch metrics in log space."""

import math

import pytest
import torch

from quads_recipe.metrics import logprob_difference, merge_ranks


def test_difference_is_in_log_space_and_can_exceed_one():
    rollout = torch.tensor([[-9.0, -1.0, -50.0]])
    actor = torch.tensor([[-12.0, -1.5, 0.0]])
    metrics = logprob_difference(rollout, actor, torch.tensor([[1, 1, 0]]))
    assert metrics["quads/logprob_abs_diff_max"] == 3.0
    assert metrics["quads/logprob_abs_diff_mean"] == 1.75
    assert metrics["quads/logprob_nonfinite_sum"] == 0


def test_nonfinite_values_are_counted_not_hidden():
    rollout = torch.tensor([[float("nan"), -1.0, float("-inf")]])
    metrics = logprob_difference(rollout, torch.full((1, 3), -1.25), torch.ones(1, 3))
    assert metrics["quads/logprob_nonfinite_sum"] == 2
    assert metrics["quads/logprob_abs_diff_mean"] == 0.25


def test_nothing_to_compare():
    assert logprob_difference(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)) == {
        "quads/logprob_nonfinite_sum": 0.0
    }


def test_k3_estimates_the_divergence_from_rollout_to_actor():
    torch.manual_seed(0)
    p, q = torch.softmax(torch.randn(5), -1), torch.softmax(torch.randn(5), -1)
    tokens = torch.multinomial(p, 200_000, replacement=True)
    metrics = logprob_difference(p.log()[tokens][None], q.log()[tokens][None], torch.ones(1, len(tokens)))
    exact = (p * (p / q).log()).sum().item()
    assert metrics["quads/logprob_k3_mean"] == pytest.approx(exact, rel=0.02)
    assert metrics["quads/logprob_diff_mean"] == pytest.approx(exact, rel=0.05)


def test_p99_of_a_known_distribution():
    size = torch.arange(1, 1001).float()
    metrics = logprob_difference(size[None], torch.zeros(1, 1000), torch.ones(1, 1000))
    assert math.isclose(metrics["quads/logprob_abs_diff_p99"], 990.01, rel_tol=1e-4)


def test_ranks_are_merged_by_the_rule_of_the_name():
    merged = merge_ranks(
        [{"a_max": 1.0, "b_min": 1.0, "c_mean": 1.0}, None, {"a_max": 3.0, "b_min": 0.0, "c_mean": 2.0}]
    )
    assert merged == {"a_max": 3.0, "b_min": 0.0, "c_mean": 1.5}


def test_every_metric_is_documented():
    """docs/metrics.md lists single names; of layers it writes `quads/layers_KIND_act_error_mean`."""
    from quads_ops.settings import QuadsSettings
    from quads_recipe import probe_layers
    from quads_recipe.analysis.layers import SiteErrors
    from quads_recipe.analysis.sites import Site
    from quads_recipe.paths import configs_dir

    text = (configs_dir().parent / "docs" / "metrics.md").read_text()
    ones = torch.ones(1, 2)
    names = set(logprob_difference(ones, ones, ones)) | {"quads/alarms_sum", "quads/layers_seconds_max"}
    for arm in ("quads", "naive", "fp8"):
        rollout = QuadsSettings.from_dict({"arm": arm}).rollout
        errors = SiteErrors(Site("m.self_attn.qkv_proj", ("w",), ("m.self_attn.qkv_proj",), 64, 48), output=1.0)
        for table in (errors.error, errors.covered, errors.left):
            table |= {0.0: 1.0, rollout.residual.ratio: 1.0}
        names |= set(probe_layers.metrics({"a": errors}, rollout))
    assert len(names) == 13
    missing = [name for name in names if f"`{name.replace('attention_qkv', 'KIND')}`" not in text]
    assert not missing, f"not in docs/metrics.md: {missing}"
