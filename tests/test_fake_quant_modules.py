"""What conversion finds, refuses, leaves untouched, and how it proves that every module runs fake-quantized."""

from __future__ import annotations

import copy

import pytest
import support_models
import torch
from torch import nn

from quads_ops.fake_quant import QuadsLinear, convert
from quads_ops.fake_quant_control import NotFakeQuantized
from quads_ops.matrix_plan import plan_parameters, quantizable_modules
from quads_ops.settings import SettingsError
from quads_ops.targets import Targets

ATTENTION = [f"self_attn.{p}_proj" for p in "qkvo"]
DENSE = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SHARED = [f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")]
EXPECTED = {
    "qwen3": ATTENTION + DENSE,
    "llama": ATTENTION + DENSE,
    "qwen3_moe": [*ATTENTION, "mlp.experts"],
    "mixtral": [*ATTENTION, "mlp.experts"],
    "qwen2_moe": [*ATTENTION, "mlp.experts", *SHARED],
}
ALL = Targets("all_linear")


@pytest.mark.parametrize("family", support_models.FAMILIES)
def test_converts_every_linear_and_expert_and_nothing_else(family):
    model = support_models.tiny_model(family)
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    control = convert(model, ALL, "w4a16")
    layers = range(model.config.num_hidden_layers)
    assert sorted(control.names) == sorted(f"model.layers.{i}.{m}" for i in layers for m in EXPECTED[family])
    kept = {n for n in quantizable_modules(model) if n not in control.names}
    assert kept == {"lm_head"} | {f"model.layers.{i}.mlp.shared_expert_gate" for i in layers if "qwen2" in family}
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_experts_keep_their_class_name_for_wrap_policies():
    model = support_models.tiny_model("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    before = type(experts)
    convert(model, ALL, "w4a16")
    assert type(experts) is not before
    assert isinstance(experts, before) and type(experts).__name__ == before.__name__
    assert "nvfp4 w4a16" in repr(experts)


def test_targets_experts_leaves_linears_alone():
    model = support_models.tiny_model("qwen2_moe")
    control = convert(model, Targets("experts"), "w4a16")
    assert control.names == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert not [m for m in model.modules() if isinstance(m, QuadsLinear)]


def test_a_copy_of_a_converted_model_is_independent():
    model = support_models.tiny_model("qwen3_moe")
    control = convert(model, ALL, "w4a16")
    twin = copy.deepcopy(model)
    batch = support_models.tiny_batch()
    logits = model(batch).logits
    control.start()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(100)  # the scale of q, k and v hangs on it
    assert torch.equal(twin(batch).logits, logits)
    assert not control.runs


def test_plan_names_matrices_and_groups():
    plan = plan_parameters(support_models.tiny_model("qwen2_moe", num_hidden_layers=1), ALL)
    layer = "model.layers.0"
    qkv = tuple(f"{layer}.self_attn.{p}_proj.weight" for p in "qkv")
    assert all(plan[name].group == qkv for name in qkv)
    assert plan[f"{layer}.self_attn.o_proj.weight"].group == (f"{layer}.self_attn.o_proj.weight",)
    shared = f"{layer}.mlp.shared_expert"
    assert plan[f"{shared}.up_proj.weight"].group == (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
    assert plan[f"{shared}.down_proj.weight"].matrices() == ((f"{shared}.down_proj",),)
    experts = f"{layer}.mlp.experts"
    assert plan[f"{experts}.gate_up_proj"].matrices() == tuple(
        tuple(f"{experts}.{e}.{p}_proj" for e in range(4)) for p in ("gate", "up")
    )
    assert plan[f"{experts}.down_proj"].matrices() == (tuple(f"{experts}.{e}.down_proj" for e in range(4)),)


def test_plan_needs_no_weights():
    with torch.device("meta"):
        model = support_models.AutoModelForCausalLM.from_config(support_models.tiny_config("mixtral"))
    assert list(plan_parameters(model, ALL)) == list(plan_parameters(support_models.tiny_model("mixtral"), ALL))


def test_a_k_that_is_not_a_multiple_of_16_is_refused_by_name():
    model = support_models.tiny_model("qwen3_moe", moe_intermediate_size=24)
    with pytest.raises(SettingsError, match=r"layers\.0\.mlp\.experts.*down_proj has K = 24"):
        convert(model, ALL, "w4a16")
    assert not [m for m in model.modules() if hasattr(m, "quads")]  # refused before anything was changed


def test_unknown_fused_experts_are_refused_by_class():
    class StrangeExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 32, 16))
            self.down_proj = nn.Parameter(torch.zeros(2, 16, 16))

    model = support_models.tiny_model("qwen3_moe")
    model.model.layers[1].mlp.experts = StrangeExperts()
    with pytest.raises(SettingsError, match=r"layers\.1\.mlp\.experts.*StrangeExperts"):
        convert(model, ALL, "w4a16")
    control = convert(model, Targets("all_linear", ["model.layers.1.mlp.experts"]), "w4a16")
    assert "model.layers.1.mlp.experts" not in control.names


def test_a_linear_of_another_class_is_refused():
    class LoraLinear(nn.Linear):
        pass

    model = support_models.tiny_model("qwen3")
    model.model.layers[0].self_attn.o_proj = LoraLinear(128, 64, bias=False)
    with pytest.raises(SettingsError, match="LoraLinear"):
        convert(model, ALL, "w4a16")


def test_part_of_a_fused_group_is_refused():
    model = support_models.tiny_model("qwen3")
    with pytest.raises(SettingsError, match=r"v_proj.*quantize all of"):
        convert(model, Targets("all_linear", ["re:.*v_proj"]), "w4a16")
    convert(model, Targets("all_linear", ["re:.*[qkv]_proj"]), "w4a16")


@pytest.mark.parametrize("mode,message", [("none", "converts nothing"), ("w4a8", "must be one of")])
def test_wrong_modes_are_refused(mode, message):
    with pytest.raises(SettingsError, match=message):
        convert(support_models.tiny_model("qwen3"), ALL, mode)


def test_a_forward_that_was_replaced_is_refused():
    """As liger-kernel does it to fused experts; the first forward would end with NotFakeQuantized."""
    model = support_models.tiny_model("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    experts.__dict__["forward"] = type(experts).forward.__get__(experts)
    with pytest.raises(SettingsError, match="quads.targets = 'model.layers.1.mlp.experts': has a forward of its own"):
        convert(model, ALL, "w4a16")
    assert not hasattr(model.model.layers[0].self_attn.q_proj, "quads")
    convert(model, Targets("all_linear", ["re:.*layers.1.mlp.experts"]), "w4a16")


def test_a_model_is_converted_once():
    model = support_models.tiny_model("qwen3_moe")
    convert(model, Targets("experts"), "w4a16")
    with pytest.raises(SettingsError, match="already"):
        convert(model, ALL, "w4a16")


def test_check_names_the_modules_that_did_not_run_fake_quantized():
    """The failure this guards against: experts that train unquantized because their forward was replaced."""
    model = support_models.tiny_model("qwen3_moe")
    control = convert(model, ALL, "w4a16")
    batch = support_models.tiny_batch()
    model(batch)
    control.check()
    experts = model.model.layers[1].mlp.experts
    experts.forward = type(experts).quads_original.forward.__get__(experts)
    control.start()
    model(batch)
    with pytest.raises(NotFakeQuantized, match=r"1 of 10 .*model\.layers\.1\.mlp\.experts"):
        control.check()


def test_check_in_mode_none_expects_no_fake_quantized_run():
    model = support_models.tiny_model("qwen3_moe")
    control = convert(model, ALL, "w4a16")
    model(support_models.tiny_batch())
    with control.use_mode("none"):
        with pytest.raises(NotFakeQuantized, match="mode none"):
            control.check()
        control.start()
        model(support_models.tiny_batch())
        control.check()


@pytest.mark.parametrize(
    "family,weight,message",
    [
        ("qwen3", "self_attn.v_proj.weight", r"self_attn\.v_proj is not gathered while .*q_proj.* run, .*wrap_policy"),
        ("qwen3", "mlp.down_proj.weight", r"mlp\.down_proj is not gathered while it runs"),
        ("qwen3_moe", "mlp.experts.down_proj", r"layers\.0\.mlp\.experts are not gathered"),
    ],
)
def test_a_weight_that_is_not_gathered_is_an_error(family, weight, message):
    model = support_models.tiny_model(family)
    convert(model, ALL, "w4a16")
    model.model.layers[0].get_parameter(weight).untyped_storage().resize_(0)  # as FSDP1 frees an unsharded weight
    with pytest.raises(RuntimeError, match=message):
        model(support_models.tiny_batch())


def test_a_weight_freed_between_forward_and_backward_is_an_error():
    model = support_models.tiny_model("qwen3")
    convert(model, ALL, "w4a16")
    batch = support_models.tiny_batch()
    loss = model(batch, labels=batch).loss
    model.model.layers[0].mlp.down_proj.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="FSDP has freed it"):
        loss.backward()
