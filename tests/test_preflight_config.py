"""Values of a config.json that make no model: refused by transformers or by us, in one line that names the field."""

import json

import pytest
import torch
from support_models import FAMILIES, save_checkpoint

from quads_ops.settings import SettingsError
from quads_recipe import preflight_config
from quads_recipe.paths import POLICIES, policy_dir


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("models") / "m", "qwen3_moe")


def rewritten(checkpoint, folder, name="config.json", **values):
    """The same files, but for other values in one of them."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    document = json.loads((checkpoint / name).read_text()) | values
    (folder / name).unlink()
    (folder / name).write_text(json.dumps(document))
    return str(folder)


def refused(folder, *parts, call=preflight_config.build):
    with pytest.raises(SettingsError) as caught:
        call("--model", folder)
    text = str(caught.value)
    assert text.startswith(f"--model = {folder!r}: ") and text.isprintable()
    assert all(part in text for part in parts), text


WRONG = {
    "num_experts_per_tok": (0, -1, 5, "two"),
    "max_position_embeddings": (0, -1),
    "vocab_size": (0, -1, 1.5),
    "hidden_size": (0, -64, "wide", None, [64]),
    "num_hidden_layers": (0, -1, None, "2", 10**12),
    "num_attention_heads": (0, -4),
    "num_key_value_heads": (0, 3),
    "head_dim": (0, -1),
    "intermediate_size": (-1,),
    "moe_intermediate_size": (-32, {}),
    "decoder_sparse_step": (0, -1),
    "rms_norm_eps": (-1e-6, float("nan"), float("inf"), "small"),
    "hidden_act": ("nope", 1),
    "dtype": ("wide", 7),
    "model_type": (7, [], {}),
    "architectures": ("Qwen3MoeForCausalLM", [1]),
    "rope_parameters": ([1], {"rope_type": "nope", "rope_theta": 1e4}),
    "tie_word_embeddings": ("yes",),
    "pad_token_id": (128, "<pad>"),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_value_that_makes_no_model(checkpoint, tmp_path, field, value):
    refused(rewritten(checkpoint, tmp_path, **{field: value}), f"config.json: {field} = ")


def test_a_window_that_both_sides_read_differently(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "m", "mixtral")

    def with_window(value):
        folder = tmp_path / f"window_{value}"
        folder.mkdir()
        return rewritten(checkpoint, folder, sliding_window=value)

    for window in (0, -1):
        refused(with_window(window), f"config.json: sliding_window = {window}: ")
    for window in (None, 1, 4096):
        preflight_config.build("--model", with_window(window))


@pytest.mark.parametrize("theta", [0.0, -1.0, float("nan")])
def test_positions_that_are_not_finite(checkpoint, tmp_path, theta):
    rope = {"rope_type": "default", "rope_theta": theta}
    refused(rewritten(checkpoint, tmp_path, rope_parameters=rope), "config.json: rope_theta = ")


def test_a_kind_of_model_that_is_unknown(checkpoint, tmp_path):
    refused(rewritten(checkpoint, tmp_path, model_type="nope"), "model type `nope`")


def test_a_change_is_named_in_place_of_the_file(checkpoint):
    def change(config):
        config.hidden_size = "wide"

    with pytest.raises(SettingsError, match=r"can build \(with override_config\): "):
        preflight_config.build("path", str(checkpoint), change=change, changed_by="override_config")


VALID = (
    {"num_experts_per_tok": 4},
    {"num_experts_per_tok": 1},
    {"num_key_value_heads": 1},
    {"intermediate_size": 0},
    {"sliding_window": None},
    {"sliding_window": 0},
    {"sliding_window": 4096, "use_sliding_window": False},
    {"eos_token_id": [1, 2]},
    {"eos_token_id": None},
    {"pad_token_id": -1},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    {"max_position_embeddings": 1},
    {"an_unknown_field": {"a": [None, 1e300]}},
    {"architectures": None},
)


@pytest.mark.parametrize("values", VALID)
def test_what_is_unusual_but_valid(checkpoint, tmp_path, values):
    model = preflight_config.build("--model", rewritten(checkpoint, tmp_path, **values))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [1, 3])
def test_every_supported_family_passes(tmp_path, family, layers):
    preflight_config.build("--model", str(save_checkpoint(tmp_path, family, num_hidden_layers=layers)))
    assert preflight_config.generation("--model", str(tmp_path)).eos_token_id == 1


def test_a_mixture_without_experts_is_dense(tmp_path):
    folder = save_checkpoint(tmp_path, "qwen3_moe", num_experts=0, num_experts_per_tok=0)
    model = preflight_config.build("--model", str(folder))
    assert not any(parameter.dim() == 3 for parameter in model.parameters())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_shipped_policies_pass(policy):
    preflight_config.build("--model", str(policy_dir(policy)))
    preflight_config.generation("--model", str(policy_dir(policy)))


# --- generation_config.json

GENERATION = "generation_config.json"


@pytest.mark.parametrize(
    ("field", "value"),
    [*(("eos_token_id", value) for value in ("<eos>", 1.5, True, {}, [1, "a"], [[1]])), ("pad_token_id", [1])],
)
def test_end_tokens_that_are_none(checkpoint, tmp_path, field, value):
    folder = rewritten(checkpoint, tmp_path, GENERATION, **{field: value})
    refused(folder, f"{GENERATION}: {field} = ", "remove the file", call=preflight_config.generation)


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_generation_config_that_is_broken(checkpoint, tmp_path, content):
    folder = rewritten(checkpoint, tmp_path, GENERATION)
    (tmp_path / GENERATION).write_text(content)
    refused(folder, f"{GENERATION} ", "copy it again", call=preflight_config.generation)
    refused(folder, f"{GENERATION} ", "copy it again")


@pytest.mark.parametrize("value", [None, 1, [1, 2], []])
def test_end_tokens(checkpoint, tmp_path, value):
    folder = rewritten(checkpoint, tmp_path, GENERATION, eos_token_id=value)
    assert preflight_config.generation("--model", folder).eos_token_id == value
    (tmp_path / GENERATION).unlink()
    assert preflight_config.generation("--model", folder) is None


def test_no_weights_are_loaded(checkpoint):
    model = preflight_config.build("--model", str(checkpoint))
    assert {parameter.device for parameter in model.parameters()} == {torch.device("meta")}
