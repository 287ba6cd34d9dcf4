"""Checkpoints that transformers would fill with random numbers, or fail on late, are refused by their headers."""

import json
import math
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_models import FAMILIES, save_checkpoint, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from quads_ops.settings import SettingsError
from quads_recipe import preflight_weights
from quads_recipe.paths import POLICIES, policy_dir

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
L0 = "model.layers.0."
Q, DOWN, UP = L0 + "self_attn.q_proj.", L0 + "mlp.experts.1.down_proj.weight", L0 + "mlp.experts.1.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return save_checkpoint(tmp_path / "m", "qwen3_moe")


def check(folder, **kwargs):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return preflight_weights.check("path", folder, model, **kwargs)


def refused(folder, *parts, **kwargs):
    with pytest.raises(SettingsError) as caught:
        check(folder, **kwargs)
    message = str(caught.value)
    assert message.startswith(f"path = {str(folder)!r}: ") and "\n" not in message
    assert all(part in message for part in parts), message


def edit(folder, *without, **tensors):
    """Leave out what begins with one of `without`; add or replace `tensors`."""
    stored = {k: v for k, v in load_file(folder / FILE).items() if not (without and k.startswith(without))}
    save_file(stored | tensors, folder / FILE, {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_that_is_stored_too(tmp_path, dtype):
    """As some tools save it. transformers ties the two only if they are equal, vLLM always."""
    save_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True, dtype=dtype)
    head = load_file(tmp_path / FILE)["model.embed_tokens.weight"].clone()
    edit(tmp_path, **{"lm_head.weight": head})
    assert check(tmp_path) == []
    head[-1, -1] += 1
    edit(tmp_path, **{"lm_head.weight": head})
    with pytest.raises(SettingsError, match="lm_head.weight .* and model.embed_tokens.weight .*tie_word_embeddings"):
        check(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert check(tmp_path) == []


def test_only_a_head_is_stored(tmp_path):
    """transformers ties the embedding to it."""
    save_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    head = load_file(tmp_path / FILE)["model.embed_tokens.weight"].clone()
    edit(tmp_path, "model.embed_tokens", **{"lm_head.weight": head})
    assert check(tmp_path, finite_in=torch.bfloat16) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(folder, value):
    assert check(folder, finite_in=torch.bfloat16) == []
    weight = load_file(folder / FILE)[DOWN]
    weight[-1, -1] = value
    edit(folder, **{DOWN: weight})
    assert check(folder) == []  # by the headers
    refused(folder, f"{FILE} holds NaN or infinity in {DOWN} (in bfloat16); replace", finite_in=torch.bfloat16)
    refused(folder, f"in {DOWN}; replace", finite_in=torch.float32)


def test_values_that_the_computing_dtype_does_not_reach(folder):
    edit(folder, **{"model.norm.weight": torch.full((64,), torch.finfo(torch.float32).max)})
    assert check(folder, finite_in=torch.float32) == []
    refused(folder, "in model.norm.weight (in bfloat16)", finite_in=torch.bfloat16)


def test_values_of_what_the_model_does_not_load(folder):
    nan = torch.full((4,), math.nan)
    edit(folder, **{"v_head.summary.weight": nan, L0 + "self_attn.rotary_emb.inv_freq": nan.clone()})
    assert check(folder, finite_in=torch.bfloat16) == [
        "not part of the model, and ignored in the checkpoint: v_head.summary.weight"
    ]


def test_the_shard_with_the_value_is_named(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    model.save_pretrained(folder / "s", max_shard_size="100KB")
    where = json.loads((folder / "s" / INDEX).read_text())["weight_map"]["model.norm.weight"]
    refused(folder / "s", f"{where} holds NaN or infinity in model.norm.weight", finite_in=torch.float32)


UNUSUAL = {
    "one-layer": {"num_hidden_layers": 1},
    "one-expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "all-experts": {"num_experts_per_tok": 4},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "fp64": {"dtype": torch.float64},
    "some-dense": {"mlp_only_layers": [0]},
    "every-other": {"decoder_sparse_step": 2},
    "one-head": {"num_attention_heads": 1, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("case", UNUSUAL)
@pytest.mark.parametrize("shard", ["100KB", "50GB"])
def test_what_is_unusual_but_valid_passes(tmp_path, case, shard):
    model = tiny_model("qwen3_moe", **UNUSUAL[case])
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / INDEX).is_file() == (shard == "100KB")
    assert check(tmp_path, finite_in=torch.bfloat16) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_passes(tmp_path, family, tied):
    assert check(save_checkpoint(tmp_path, family, tie_word_embeddings=tied), finite_in=torch.bfloat16) == []


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_the_spelling_of_memory_passes_too(tmp_path, family):
    """Experts fused, as the model's state dict has them."""
    save_checkpoint(tmp_path, family)
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert any("gate_up_proj" in name for name in state)
    save_file({name: t.clone() for name, t in state.items()}, tmp_path / FILE, {"format": "pt"})
    assert check(tmp_path, finite_in=torch.bfloat16) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_the_shipped_policies_pass(policy):
    assert check(policy_dir(policy), finite_in=torch.bfloat16) == []


def test_shards_pass(tmp_path, folder):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder / "s", max_shard_size="100KB")
    assert (folder / "s" / INDEX).is_file() and check(folder / "s") == []
    first = sorted((folder / "s").glob("*.safetensors"))[0]
    first.unlink()
    refused(folder / "s", f"{first.name} is missing, which {INDEX} names")
    (folder / "s" / INDEX).write_text("{")
    refused(folder / "s", f"{INDEX} can't be read")


WRONG = {
    "missing": ((Q,), {}, f"lacks {Q}weight, which would start at random"),
    "missing-head": (("lm_head",), {}, "lacks lm_head.weight"),
    "missing-expert": ((L0 + "mlp.experts.3.",), {}, "as [3, "),
    "missing-part": ((UP,), {}, "its parts of model.layers.0.mlp.experts.gate_up_proj don't fit together"),
    "shape": ((), {Q + "weight": torch.zeros(4, 4)}, f"holds {Q}weight as [4, 4], but config.json asks for [128, 64]"),
    "expert-shape": ((), {DOWN: torch.zeros(4, 4)}, "its parts of model.layers.0.mlp.experts.down_proj don't fit"),
    "layer": (
        (),
        {"model.layers.7.self_attn.q_proj.weight": torch.zeros(4, 4)},
        "num_hidden_layers = 2, but the weights have 8 layers: they hold model.layers.7.self_attn.q_",
    ),
    "bias": ((), {Q + "bias": torch.zeros(128)}, f"holds {Q}bias, for which the model of config.json has no place"),
    "scale": ((), {Q + "weight_scale_inv": torch.zeros(1)}, "is quantized already"),
}


@pytest.mark.parametrize("case", WRONG)
def test_weights_that_do_not_fit_are_one_clear_error(folder, case):
    without, tensors, message = WRONG[case]
    edit(folder, *without, **tensors)
    refused(folder, message)


def test_what_is_no_part_of_the_model_is_said_and_ignored(folder):
    old_buffer, head = L0 + "self_attn.rotary_emb.inv_freq", "v_head.summary.weight"
    edit(folder, **{old_buffer: torch.zeros(4), head: torch.zeros(4)})
    assert check(folder) == [f"not part of the model, and ignored in the checkpoint: {head}"]


def test_layers_left_out_on_purpose(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    refused(folder, "config.json: num_hidden_layers = 1, but the weights have 2 layers: they hold model.layers.1.")
    assert check(folder, fewer_layers=True)[0].startswith("not part of the model")


def test_more_layers_than_are_stored(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    refused(folder, "config.json: num_hidden_layers = 3, but the weights have 2 layers: they lack model.layers.2.")


def test_more_layers_than_memory_has_room_for(folder):
    """Asked before the model is built."""
    config = AutoConfig.from_pretrained(folder)
    preflight_weights.check_depth("path", folder, config)
    preflight_weights.check_depth("path", folder / "hub" / "id", config)
    preflight_weights.check_depth("path", folder.parent, config)  # of a config that lies elsewhere
    config.num_hidden_layers = 10**12
    with pytest.raises(SettingsError, match="config.json: num_hidden_layers = 1000000000000, but the weights are"):
        preflight_weights.check_depth("path", folder, config)


@pytest.mark.parametrize("cut", [-100, 5])
def test_a_file_that_is_cut_off(folder, cut):
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:cut])
    refused(folder, f"{FILE} can't be read, copy it again: SafetensorError")


def test_no_weights_and_weights_that_are_not_read(folder, tmp_path):
    (folder / FILE).unlink()
    refused(folder, f"holds no weights: neither {FILE} nor {INDEX}")
    (folder / "pytorch_model.bin").touch()
    assert "were not checked" in check(folder)[0]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert "were not checked" in preflight_weights.check("path", tmp_path / "hub" / "id", model)[0]


def test_a_file_larger_than_this_machine_s_memory(tmp_path):
    """transformers 5 cuts files at 50 GB only, and the machine that starts a run may be the smallest of a cluster."""
    size = 1 << 40
    header = {"w": {"dtype": "BF16", "shape": [size >> 21, 1 << 20], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    with open(tmp_path / FILE, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)  # a hole
    [(name, tensor)] = preflight_weights._read(tmp_path / FILE)
    assert name == "w" and tensor.is_meta and tensor.shape == (size >> 21, 1 << 20) and tensor.dtype == torch.bfloat16


def test_a_dtype_that_transformers_can_not_load(folder):
    text = json.dumps({"w": {"dtype": "F8_E8M0", "shape": [16], "data_offsets": [0, 16]}}).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    refused(folder, "holds weights of dtype 'F8_E8M0', which transformers can't load")
