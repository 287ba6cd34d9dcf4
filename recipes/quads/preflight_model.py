"""Checks of the model: its kind, what would be quantized, and whether every shape allows it. Loads no weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn

from quads_ops.formats import BLOCK_SIZE
from quads_ops.listing import first_names
from quads_ops.matrix_plan import PlannedParameter, plan_parameters, quantizable_modules
from quads_ops.settings import QuadsSettings, SettingsError
from quads_ops.targets import Targets
from quads_recipe import preflight_config, preflight_rollout
from quads_recipe.preflight_values import MODEL, ROLLOUT, local_path, quantizes, select

PATH = MODEL + "path"
OVERRIDES = MODEL + "override_config"
HF_OVERRIDES = ROLLOUT + "engine_kwargs.vllm.hf_overrides"
TP = ROLLOUT + "tensor_model_parallel_size"
EP = ROLLOUT + "expert_parallel_size"

# Linears that vLLM cuts along K under tensor parallelism.
ROW_PARALLEL = ("o_proj", "down_proj", "dense", "out_proj")

# Whose fused experts liger-kernel gives a forward of its own.
_LIGER_EXPERTS = ("qwen3_moe", "mixtral")


def build(config: DictConfig) -> nn.Module:
    """The actor's model on the meta device, from its config.json and verl's overrides: names and shapes, no weights.

    Raises:
        SettingsError: no such folder; transformers can't build a causal language model from it; a value that makes no
            model; a generation_config.json that can't be used, which verl would do without.
    """
    name = MODEL + "hf_config_path" if select(config, MODEL + "hf_config_path") else PATH
    model = _build(config, name, OVERRIDES, overrides_of_actor(config))
    preflight_config.generation(PATH, str(local_path(PATH, select(config, PATH))))
    return model


def overrides_of_actor(config: DictConfig) -> dict[str, Any]:
    """What verl writes over the model's config, less the actor's kind of attention, which has no shape."""
    overrides = select(config, OVERRIDES, {})
    return {k: v for k, v in overrides.get("model_config", overrides).items() if k != "attn_implementation"}


def _build(config: DictConfig, name: str, setting: str, overrides: dict[str, Any]) -> nn.Module:
    """name: the setting that holds the folder. setting, overrides: what is written over the config.json in it."""
    trust = bool(select(config, MODEL + "trust_remote_code"))
    path = str(local_path(name, select(config, name)))
    if not Path(path).is_dir() and (path.startswith((".", "/")) or path.count("/") != 1):
        raise SettingsError(name, path, "no such folder; give a Hugging Face checkpoint folder or hub id")
    if not overrides:
        return preflight_config.build(name, path, trust=trust)
    return preflight_config.build(
        name, path, trust=trust, change=lambda hf_config: _override(hf_config, overrides), changed_by=setting
    )


def _override(hf_config: Any, values: dict[str, Any]) -> None:
    """As verl and vLLM do it: a mapping is written into a part that is a config itself, anything else replaces."""
    for key, value in values.items():
        part = getattr(hf_config, key, None)
        if isinstance(value, dict) and hasattr(part, "to_dict"):
            _override(part, value)
        else:
            setattr(hf_config, key, value)


def check_kind(config: DictConfig, settings: QuadsSettings, model: nn.Module) -> None:
    """What verl would make of the checkpoint: a decoder with one head over the vocabulary, in full precision.

    Raises:
        SettingsError: another kind of model, or a checkpoint that is quantized already.
    """
    path, hf_config = select(config, PATH), model.config
    problem = _not_causal(model)
    if problem is None and quantizes(settings) and getattr(hf_config, "quantization_config", None) is not None:
        problem = "is quantized already (quantization_config in config.json); give the checkpoint in full precision"
    if problem:
        raise SettingsError(PATH, path, problem)


def _not_causal(model: nn.Module) -> str | None:
    """Why verl would not take it for a causal language model, or None."""
    from transformers import AutoModelForCausalLM
    from verl.utils.model import get_hf_auto_model_class

    hf_config = model.config
    names = getattr(hf_config, "architectures", None) or []
    if len(names) != 1:
        return (
            f"verl needs one name under `architectures` in config.json, such as {type(model).__name__}; it has {names}"
        )
    kind = get_hf_auto_model_class(hf_config)
    # A layer of attention says whether it looks ahead; a model without attention says nothing.
    causal = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    decoder = not getattr(hf_config, "is_encoder_decoder", False) and (any(causal) or not causal)
    if kind is AutoModelForCausalLM and decoder:
        return None
    return f"{names[0]} is no causal language model; give a decoder whose architecture is named ...ForCausalLM"


def check_both_sides(config: DictConfig, model: nn.Module) -> None:
    """The rollout's model, which has overrides of its own, must have the actor's parameters.

    Raises:
        SettingsError: a parameter that one side lacks or has in another shape.
    """
    changes = {
        OVERRIDES: overrides_of_actor(config),
        HF_OVERRIDES: select(config, HF_OVERRIDES, {}),
        MODEL + "hf_config_path": select(config, MODEL + "hf_config_path"),
    }
    if not any(changes.values()):
        return
    of_vllm = ROLLOUT + "engine_kwargs.vllm.hf_config_path"
    rollout = _build(config, of_vllm if select(config, of_vllm) else PATH, HF_OVERRIDES, changes[HF_OVERRIDES])
    here, there = ({n: tuple(p.shape) for n, p in side.state_dict().items()} for side in (model, rollout))
    different = next((n for n in here | there if here.get(n) != there.get(n)), None)
    if different is None:
        return
    name, value = next(item for item in changes.items() if item[1])
    other = HF_OVERRIDES if name != HF_OVERRIDES else OVERRIDES
    raise SettingsError(
        name,
        value,
        f"parts the rollout from the actor: {different} is {_shape(here.get(different))} in the actor and "
        f"{_shape(there.get(different))} in the rollout; set the same in {other}",
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"{list(shape)}"


def check(config: DictConfig, settings: QuadsSettings, model: nn.Module) -> list[str]:
    """Plan what both sides quantize, and check the shapes under the rollout's parallelism.

    FSDP needs no check: it cuts along N and gathers whole matrices before they are quantized.

    Returns:
        Lines that tell what is quantized and what each pattern matched.

    Raises:
        SettingsError: what `quads_ops.matrix_plan.plan_parameters` refuses, a shard of K that is not a multiple of
            16, or experts that can't run in CUDA graphs, with these.
    """
    targets = Targets(settings.targets, settings.exclude)
    if not quantizes(settings):
        targets.match(quantizable_modules(model))  # a pattern that is wrong here is wrong in the arms compared with
        return ["nothing is quantized"]
    planned = plan_parameters(model, targets)
    if settings.actor.mode != "none":
        _check_liger(config, model, planned)
    for parameter in planned.values():
        _check_shards(parameter, config.actor_rollout_ref.rollout)
    preflight_rollout.check_graphs(config, settings, any(parameter.projections for parameter in planned.values()))
    return _describe(model, targets, planned)


def _describe(model: nn.Module, targets: Targets, planned: dict[str, PlannedParameter]) -> list[str]:
    modules = quantizable_modules(model)
    plan = targets.plan(modules)
    total = sum(p.numel() for module in modules.values() for p in module.parameters(recurse=False) if p.dim() > 1)
    chosen = sum(math.prod(parameter.shape) for parameter in planned.values())
    lines = [f"quantized: {len(plan.quantized)} modules, {chosen / 1e6:.2f}M of {total / 1e6:.2f}M linear parameters"]
    lines += [f"pattern {pattern!r} matched {_names(names)}" for pattern, names in plan.matches.items()]
    return lines + [f"kept in full precision: {_names(tuple(plan.kept))}"]


def _names(names: tuple[str, ...]) -> str:
    return f"{len(names)} module{'s' * (len(names) != 1)} ({first_names(names, 3)})" if names else "nothing"


def _check_liger(config: DictConfig, model: nn.Module, planned: dict[str, PlannedParameter]) -> None:
    name = MODEL + "use_liger"
    experts = next((p.module for p in planned.values() if p.projections), None)
    if select(config, name) and experts and model.config.model_type in _LIGER_EXPERTS:
        remedy = f"liger-kernel replaces the forward of {experts}, and with it fake quantization; set it to false"
        raise SettingsError(name, True, remedy)


def _check_shards(parameter: PlannedParameter, rollout: DictConfig) -> None:
    tp, ep, k = rollout.tensor_model_parallel_size, rollout.expert_parallel_size, parameter.shape[-1]
    if parameter.projections and ep > parameter.shape[0]:
        raise SettingsError(EP, ep, f"leaves workers without experts: {parameter.module} has {parameter.shape[0]}")
    if parameter.projections:  # expert parallelism leaves experts whole
        split = parameter.projections == ("down_proj",) and ep == 1
    else:
        split = parameter.module.rpartition(".")[2] in ROW_PARALLEL
    if split and (k % tp or k // tp % BLOCK_SIZE):
        whole = ", or whole experts (rollout.expert_parallel_size)" if parameter.projections else ""
        raise SettingsError(
            TP,
            tp,
            f"cuts {parameter.name} along K = {k} into shards that are not multiples of {BLOCK_SIZE}; use a smaller "
            f"one{whole}, or put {parameter.module} into quads.exclude",
        )
