"""Checkpoints that transformers would fill with random numbers, or fail on late, are refused by their headers."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_models import FAMILIES, save_checkpoint
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


def refused(folder, *parts):
    with pytest.raises(SettingsError) as caught:
        check(folder)
    message = str(caught.value)
    assert message.startswith(f"path = {str(folder)!r}: ") and "\n" not in message
    assert all(part in message for part in parts), message


def edit(folder, *without, **tensors):
    """Leave out what begins with one of `without`; add or replace `tensors`."""
    stored = {k: v for k, v in load_file(folder / FILE).items() if not (without and k.startswith(without))}
    save_file(stored | tensors, folder / FILE, {"format": "pt"})


def test_a_tied_head_that_is_stored_too(tmp_path):
    """As some tools save it. transformers compares the two, and headers have no values."""
    save_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    stored = load_file(tmp_path / "model.safetensors")
    head = {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(stored | head, tmp_path / "model.safetensors", {"format": "pt"})
    assert check(tmp_path) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_passes(tmp_path, family, tied):
    assert check(save_checkpoint(tmp_path, family, tie_word_embeddings=tied)) == []


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_the_spelling_of_memory_passes_too(tmp_path, family):
    """Experts fused, as the model's state dict has them."""
    save_checkpoint(tmp_path, family)
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert any("gate_up_proj" in name for name in state)
    save_file({name: t.clone() for name, t in state.items()}, tmp_path / FILE, {"format": "pt"})
    assert check(tmp_path) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_the_shipped_policies_pass(policy):
    assert check(policy_dir(policy)) == []


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
    "layer": ((), {"model.layers.7.self_attn.q_proj.weight": torch.zeros(4, 4)}, "holds model.layers.7.self_attn.q_"),
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
    refused(folder, "holds model.layers.1.")
    assert check(folder, fewer_layers=True)[0].startswith("not part of the model")


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
