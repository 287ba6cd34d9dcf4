"""Kinds of models that can't be trained, sides that are told different shapes, and folders without a tokenizer."""

import json
import shutil

import pytest
from support_models import FAMILIES, save_checkpoint
from support_preflight import MODEL, ROLLOUT, changed, compose_config, of, save_data, save_inputs
from transformers import AutoModelForMaskedLM, BertConfig, RobertaConfig, RobertaForCausalLM

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe import derive, preflight_model, preflight_tokenizer

OVERRIDES = MODEL + "override_config."
HF_OVERRIDES = ROLLOUT + "engine_kwargs.vllm.hf_overrides."
BERT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return save_inputs(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(inputs):
    return compose_config(inputs)


def check(config, **block):
    return derive._check_model(config, QuadsSettings.from_dict(block))


def refused(config, start, *parts, **block):
    with pytest.raises(SettingsError) as caught:
        check(config, **block)
    message = str(caught.value)
    assert message.startswith(start) and "\n" not in message
    assert all(part in message for part in parts), message


def rewritten(inputs, folder, **values):
    """A copy of the checkpoint with other values in its config.json."""
    shutil.copytree(inputs[0], folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return of(MODEL, path=str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_passes(config, tmp_path, family):
    folder = save_checkpoint(tmp_path / "m", family)
    assert check(changed(config, **of(MODEL, path=str(folder))))


def test_encoders_are_no_language_models(config, tmp_path):
    AutoModelForMaskedLM.from_config(BertConfig(**BERT)).save_pretrained(tmp_path / "bert")
    path = of(MODEL, path=str(tmp_path / "bert"))
    refused(changed(config, **path), MODEL + "path = ", "BertForMaskedLM is no causal language model")
    # Named like a decoder, but its attention looks ahead; the same as a decoder is fine.
    for is_decoder in (False, True):
        roberta = RobertaForCausalLM(RobertaConfig(**BERT, is_decoder=is_decoder))
        roberta.config.architectures = ["RobertaForCausalLM"]
        assert (preflight_model._not_causal(roberta) is None) == is_decoder


KINDS = {
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "is quantized already"),
    "experts": (
        {"num_experts_per_tok": 5},
        "config.json: num_experts_per_tok = 5: must be from 1 to the number of experts, which is 4",
    ),
    "no-experts": ({"num_experts_per_tok": 0}, "config.json: num_experts_per_tok = 0: must be from 1"),
    "no-name": ({"architectures": None}, "verl needs one name under `architectures`"),
    "base": ({"architectures": ["Qwen3MoeModel"]}, "Qwen3MoeModel is no causal language model"),
}


@pytest.mark.parametrize("case", KINDS)
def test_checkpoints_of_another_kind(config, inputs, tmp_path, case):
    values, message = KINDS[case]
    refused(changed(config, **rewritten(inputs, tmp_path / "m", **values)), MODEL + "path = ", message)


def test_as_many_experts_as_there_are(config, inputs, tmp_path):
    check(changed(config, **rewritten(inputs, tmp_path / "m", num_experts_per_tok=4)))


def test_overrides_of_one_side_must_leave_the_shapes_alone(config):
    refused(
        changed(config, **of(OVERRIDES, num_hidden_layers=1)),
        f"{MODEL}override_config = ",
        "model.layers.1.",
        "missing in the actor and [",
    )
    refused(
        changed(config, **of(HF_OVERRIDES, vocab_size=256)),
        f"{HF_OVERRIDES[:-1]} = {{'vocab_size': 256}}: parts the rollout from the actor",
        "[128, 64] in the actor and [256, 64] in the rollout",
    )
    check(changed(config, **of(HF_OVERRIDES, rope_theta=5e5, max_position_embeddings=512)))
    check(changed(config, **of(OVERRIDES, attention_dropout=0.1)))


def test_overrides_of_both_sides_may_change_shapes(config):
    """A model cut to its first layer: what is left out of the checkpoint is left out on purpose."""
    assert check(changed(config, **of(OVERRIDES, num_hidden_layers=1), **of(HF_OVERRIDES, num_hidden_layers=1)))


def test_an_override_that_no_model_can_have(config):
    refused(changed(config, **of(OVERRIDES, hidden_size="wide")), MODEL + "path = ", f"(with {OVERRIDES[:-1]})")


def test_longer_sequences_than_the_model_has_positions_for(config):
    refused(changed(config, **of(ROLLOUT, max_model_len=257)), ROLLOUT + "max_model_len = 257", "256")
    check(changed(config, **of(ROLLOUT, max_model_len=256)))


def test_patterns_are_looked_at_in_the_arm_that_quantizes_nothing(config):
    refused(config, "quads.exclude = 're:.*nothing': matches no module", arm="bf16", exclude=["re:.*nothing"])
    refused(config, "quads.targets = 're:(': is not a regular", arm="bf16", targets=["re:("])
    assert (
        check(config, arm="bf16", targets=["re:.*q_proj"])[0] == "nothing is quantized"
    )  # a part of a group is no harm
    assert check(config, arm="bf16", targets="experts", exclude=["re:.*experts"])


def test_the_setting_that_splits_a_group_is_named(config):
    refused(config, "quads.targets = 're:.*q_proj': splits", "k_proj", targets=["re:.*q_proj"])
    refused(config, "quads.exclude = 're:.*v_proj': splits", "v_proj is not", exclude=["re:.*v_proj"])
    refused(config, "quads.exclude = ['re:.*']: takes out every module", exclude=["re:.*"])


def test_a_folder_without_a_tokenizer(config, inputs, tmp_path):
    shutil.copytree(inputs[0], tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*", "special*", "chat*"))
    bare = changed(config, **of(MODEL, path=str(tmp_path / "m")))
    refused(bare, MODEL + "path = ", "has no tokenizer: no file with its vocabulary; save the model's tokenizer there")
    check(changed(bare, **of(MODEL, tokenizer_path=str(inputs[0]))))
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    refused(bare, MODEL + "path = ", "tokenizer.json is not JSON (", "copy it again")


def test_a_generation_config_that_verl_would_do_without(config, inputs, tmp_path):
    shutil.copytree(inputs[0], tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text("{")
    refused(changed(config, **of(MODEL, path=str(tmp_path / "m"))), MODEL + "path = ", "generation_config.json is not")


def test_a_tokenizer_without_a_chat_template(config, inputs, tmp_path):
    shutil.copytree(inputs[0], tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    bare = changed(config, **of(MODEL, path=str(tmp_path / "m")))
    with pytest.raises(SettingsError, match="has no chat template, which verl needs.*custom_chat_template"):
        preflight_tokenizer.check(bare)
    preflight_tokenizer.check(changed(bare, **of(MODEL, custom_chat_template="{{ messages }}")))


def test_the_demos_own_configuration_passes(tmp_path, monkeypatch):
    """As `quads demo` starts it, with both of its policies."""
    from hydra import compose, initialize_config_dir

    from quads_recipe import demo
    from quads_recipe.paths import POLICIES, configs_dir, policy_dir

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    data = save_data(tmp_path / "d.parquet")
    for policy in POLICIES:
        command = demo.build_command(demo.parser().parse_args([]), policy_dir(policy), tmp_path, (data, data))
        with initialize_config_dir(str(configs_dir()), version_base=None):
            run = compose("quads_demo", [part for part in command[7:] if not part.startswith("hydra.")])
        assert not [line for line in derive.prepare(run) if "not checked" in line or "ignored" in line]


@pytest.mark.parametrize(
    ("family", "block", "fits"),
    [
        ("qwen3_moe", {}, False),
        ("mixtral", {}, False),
        ("qwen3_moe", {"arm": "naive"}, True),
        ("qwen3_moe", {"targets": ["re:.*self_attn.*"]}, True),
        ("qwen3", {}, True),
    ],
)
def test_liger_kernels_in_place_of_fake_quantized_experts(config, tmp_path, family, block, fits):
    given = of(MODEL, path=str(save_checkpoint(tmp_path / "m", family)), use_liger=True)
    if fits:
        check(changed(config, **given), **block)
    else:
        refused(changed(config, **given), MODEL + "use_liger = True: ", "liger-kernel replaces the forward", **block)
