"""The matcher that decides what is quantized on both sides."""

import pytest

from quads_ops.settings import SettingsError
from quads_ops.targets import Targets, is_expert, never_quantized

LAYER = "model.layers.0."
MODULES = (
    "model.embed_tokens",
    LAYER + "self_attn.q_proj",
    LAYER + "self_attn.o_proj",
    LAYER + "mlp.gate",
    LAYER + "mlp.experts",
    LAYER + "mlp.shared_expert.gate_proj",
    LAYER + "mlp.shared_expert_gate",
    "lm_head",
)


@pytest.mark.parametrize(
    "module",
    [
        "lm_head",
        "model.embed_tokens",
        "transformer.wte",
        "model.word_embeddings",
        LAYER + "mlp.gate",
        LAYER + "block_sparse_moe.gate",
        LAYER + "mixer.gate",
        LAYER + "mlp.shared_expert_gate",
        LAYER + "feed_forward.router",
        LAYER + "mlp.router.layer",
    ],
)
def test_never_quantized_however_spelled(module):
    assert never_quantized(module)
    assert not Targets([f"re:{module}", module]).wants(module)


@pytest.mark.parametrize("module", [LAYER + "mlp.gate_proj", LAYER + "mlp.gate_up_proj", LAYER + "mlp.experts"])
def test_names_that_only_look_like_a_gate(module):
    assert not never_quantized(module)
    assert Targets("all_linear").wants(module)


def test_all_linear_takes_all_but_the_excluded():
    plan = Targets("all_linear", [LAYER + "self_attn.o_proj"]).plan(MODULES)
    assert plan.quantized == (MODULES[1], MODULES[4], MODULES[5])
    assert plan.kept[LAYER + "self_attn.o_proj"].startswith("excluded by")
    assert plan.kept["lm_head"] == "never quantized"


def test_experts_are_the_routed_ones():
    assert Targets("experts").plan(MODULES).quantized == (LAYER + "mlp.experts",)
    assert is_expert(LAYER + "mlp.experts.3.gate_proj")
    assert not is_expert(LAYER + "mlp.shared_expert.gate_proj")


def test_patterns_match_whole_names_and_are_shown():
    plan = Targets([LAYER + "mlp.experts", "re:.*self_attn.*"], ["re:.*o_proj"]).plan(MODULES)
    assert plan.quantized == (LAYER + "self_attn.q_proj", LAYER + "mlp.experts")
    assert plan.matches["re:.*self_attn.*"] == (LAYER + "self_attn.q_proj", LAYER + "self_attn.o_proj")


def test_a_model_without_the_targets_is_no_fault_of_exclude():
    with pytest.raises(SettingsError, match="^quads.targets = 'experts': nothing is left to quantize"):
        Targets("experts").plan(MODULES[1:3])


def test_the_setting_that_keeps_a_module():
    assert Targets("all_linear", ["re:.*q_proj"]).setting_of(MODULES[1]) == ("quads.exclude", "re:.*q_proj")
    assert Targets(["re:.*k_proj", "re:.*v_proj"]).setting_of(MODULES[1]) == (
        "quads.targets",
        "re:.*k_proj, re:.*v_proj",
    )


@pytest.mark.parametrize(
    ("targets", "exclude", "field"),
    [
        (["self_attn"], [], "quads.targets"),
        (["re:self_attn"], [], "quads.targets"),
        ("all_linear", ["re:.*w1"], "quads.exclude"),
        (["re:("], [], "quads.targets"),
        (["lm_head"], [], "quads.targets"),
        ("experts", ["re:.*experts"], "quads.exclude"),
        ("all_linear", ["re:.*"], "quads.exclude"),
        ([LAYER + "mlp.experts"], [LAYER + "mlp.experts"], "quads.exclude"),
    ],
)
def test_patterns_that_do_nothing_are_errors(targets, exclude, field):
    with pytest.raises(SettingsError, match=f"^{field} = "):
        Targets(targets, exclude).plan(MODULES)
