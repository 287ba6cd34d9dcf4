"""From a checkpoint's config.json to a model without weights: what transformers refuses, and values that make no model.

This is where transformers reads the files, so whatever it raises becomes one line that names file and field.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quads_ops.settings import SettingsError
from quads_recipe import preflight_json, preflight_weights

_AT_LEAST_ONE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
# A model without experts, or without layers of plain MLPs, may have 0.
_NOT_NEGATIVE = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "sliding_window")
_WINDOWED = ("mixtral",)
"""Kinds of models for which transformers takes a `sliding_window` of 0 for a window, and vLLM for none."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")


def build(
    setting: str,
    path: str,
    *,
    trust: bool = False,
    change: Callable[[Any], None] | None = None,
    changed_by: str = "",
) -> nn.Module:
    """The model on the meta device: names and shapes, no weights.

    Args:
        setting: what holds `path`, for messages.
        path: a checkpoint's folder, or an id of the hub.
        trust: run the checkpoint's own code.
        change: what to do to the config before the model is made of it.
        changed_by: the setting that asks for the change, for messages.

    Raises:
        SettingsError: transformers can't build a causal language model from it, or a value makes no model.
    """
    from transformers import AutoConfig

    folder = Path(path)
    preflight_json.check(setting, folder, preflight_json.MODEL)
    _check_type(setting, folder)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        if change:
            change(config)
        check_values(setting, path, config)
        preflight_weights.check_depth(setting, folder, config)
        return _on_meta(config, trust)
    except SettingsError:
        raise
    except Exception as error:  # whatever a config.json or a model's own code can raise
        field = None if trust or change or not folder.is_dir() else preflight_json.culprit(folder, "config.json", _load)
        place = f" (with {changed_by})" if changed_by else f" ({field}; correct it)" if field else ""
        reason = preflight_json.one_line(error)
        raise SettingsError(
            setting, path, f"not a causal language model that transformers can build{place}: {reason}"
        ) from None


def _on_meta(config: Any, trust: bool = False) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust)


def _load(folder: Path) -> None:
    from transformers import AutoConfig

    _on_meta(AutoConfig.from_pretrained(folder))


def _check_type(setting: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        return
    kind = preflight_json.read(setting, folder, "config.json").get("model_type")
    if not isinstance(kind, str | None):
        raise SettingsError(
            setting,
            str(folder),
            f"config.json: model_type = {preflight_json.shown(kind)}: must be a name, such as 'qwen3_moe'",
        )


def check_values(setting: str, path: str, config: Any) -> None:
    """Values that transformers takes and that make no model, or one that computes nothing but NaN.

    Args:
        setting: what holds `path`, for messages.
        path: of the checkpoint.
        config: a transformers.PreTrainedConfig.

    Raises:
        SettingsError: names the field of config.json, its value and the remedy.
    """
    text = config.get_text_config()

    # Truth values are none here: transformers tells these from numbers itself, mostly.
    def number(name: str) -> int | None:
        return value if type(value := getattr(text, name, None)) is int else None

    def refuse(field: str, value: Any, remedy: str) -> None:
        raise SettingsError(setting, path, f"config.json: {field} = {preflight_json.shown(value)}: {remedy}")

    for names, least in ((_AT_LEAST_ONE, 1), (_NOT_NEGATIVE, 0), (EXPERT_COUNTS, 0)):
        for name in names:
            value = number(name)
            if value is not None and value < least:
                refuse(name, value, f"must be at least {least}; give the number that the weights have")
    if number("sliding_window") == 0 and getattr(text, "model_type", None) in _WINDOWED:
        refuse("sliding_window", 0, "set it to null for attention to all tokens; actor and rollout read 0 differently")
    for name in _EPSILONS:
        value = getattr(text, name, None)
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            refuse(name, value, "must be a number of at least 0; all logprobs would be NaN")
    rope = getattr(text, "rope_parameters", None)
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    if isinstance(theta, int | float) and not 0 < theta < math.inf:
        refuse("rope_theta", theta, "must be a number above 0; all logprobs would be NaN")
    heads, shared = number("num_attention_heads"), number("num_key_value_heads")
    if heads and shared and heads % shared:
        refuse("num_key_value_heads", shared, f"must divide num_attention_heads, which is {heads}")
    experts = next((count for name in EXPERT_COUNTS if (count := number(name)) is not None), None)
    if not experts:
        return
    chosen, step = number("num_experts_per_tok"), number("decoder_sparse_step")
    if chosen is not None and not 1 <= chosen <= experts:
        refuse("num_experts_per_tok", chosen, f"must be from 1 to the number of experts, which is {experts}")
    if step is not None and step < 1:
        refuse("decoder_sparse_step", step, "must be at least 1; with 1 every layer has experts")


def generation(setting: str, path: str) -> Any:
    """The checkpoint's transformers.GenerationConfig, or None if it has none.

    transformers, verl and vLLM go on without a file that they can't read, and so without its end tokens.

    Raises:
        SettingsError: there is a generation_config.json, and it can't be used.
    """
    from transformers import GenerationConfig

    folder, name = Path(path), "generation_config.json"
    if not (folder / name).is_file():
        return None
    preflight_json.check(setting, folder, (name,))
    remedy = "correct it, or remove the file, which need not be there"
    try:
        config = GenerationConfig.from_pretrained(path)
    except Exception as error:  # whatever its values make transformers raise
        field = preflight_json.culprit(folder, name, GenerationConfig.from_pretrained) or name
        raise SettingsError(setting, path, f"{field}: {remedy}: {preflight_json.one_line(error)}") from None
    ends = config.eos_token_id
    if not all(type(end) is int for end in (ends if isinstance(ends, list) else [] if ends is None else [ends])):
        raise SettingsError(
            setting,
            path,
            f"{name}: eos_token_id = {preflight_json.shown(ends)}: must be a token id or a list of them; {remedy}",
        )
    return config
