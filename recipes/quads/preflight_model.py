"""Checks of the model folder: what would be quantized, and whether every shape allows it. Loads no weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from quads_ops.formats import BLOCK_SIZE
from quads_ops.matrix_plan import PlannedParameter, plan_parameters, quantizable_modules
from quads_ops.settings import QuadsSettings, SettingsError
from quads_ops.targets import Targets

PATH = "actor_rollout_ref.model.path"
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
EP = "actor_rollout_ref.rollout.expert_parallel_size"

# Linears that vLLM cuts along K under tensor parallelism.
ROW_PARALLEL = ("o_proj", "down_proj", "dense", "out_proj")


def build(model: DictConfig) -> nn.Module:
    """The model of a checkpoint on the meta device, from its config.json alone: names and shapes, no weights.

    model: verl's `actor_rollout_ref.model`.

    Raises:
        SettingsError: no such folder, or transformers can't build a causal language model from it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = str(Path(str(model.path)).expanduser())
    if not Path(path).is_dir() and (path.startswith((".", "/")) or path.count("/") != 1):
        raise SettingsError(PATH, path, "no such folder; give a Hugging Face checkpoint folder or hub id")
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # whatever a config.json or a model's own code can raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        raise SettingsError(PATH, path, f"not a causal language model that transformers can build: {reason}") from None


def check(config: DictConfig, settings: QuadsSettings, model: nn.Module) -> list[str]:
    """Plan what both sides quantize, and check the shapes under the rollout's parallelism.

    FSDP needs no check: it cuts along N and gathers whole matrices before they are quantized.

    Returns:
        Lines that tell what is quantized and what each pattern matched.

    Raises:
        SettingsError: what `quads_ops.matrix_plan.plan_parameters` refuses, or a shard of K that is not a multiple
            of 16.
    """
    if settings.actor.mode == "none" and settings.rollout.mode == "bf16":
        return ["nothing is quantized"]
    targets = Targets(settings.targets, settings.exclude)
    planned = plan_parameters(model, targets)
    for parameter in planned.values():
        _check_shards(parameter, config.actor_rollout_ref.rollout)
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
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} module{'s' * (len(names) != 1)} ({shown})" if names else "nothing"


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
