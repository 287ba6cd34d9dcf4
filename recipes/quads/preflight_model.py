"""Checks of the model folder: what would be quantized, and whether every shape allows it. Loads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from quads_ops.settings import QuadsSettings, SettingsError
from quads_ops.targets import Targets, is_expert

# Linears that vLLM splits along K under tensor parallelism.
ROW_PARALLEL = ("o_proj", "down_proj", "dense", "out_proj")


@dataclass(frozen=True)
class Module:
    """One quantizable module: a linear, or the fused experts of a layer."""

    name: str
    reductions: dict[str, int]
    """Matrix within the module ("" for a linear) -> length of its reduction dimension K."""
    parameters: int


def inspect(model: DictConfig) -> list[Module]:
    """The quantizable modules of a checkpoint, from its config.json alone (built on the meta device).

    Raises:
        SettingsError: no such folder, or transformers can't build a causal language model from it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = str(Path(str(model.path)).expanduser())
    field = "actor_rollout_ref.model.path"
    if not Path(path).is_dir() and (path.startswith((".", "/")) or path.count("/") != 1):
        raise SettingsError(field, path, "no such folder; give a Hugging Face checkpoint folder or hub id")
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(field, path, f"not a causal language model that transformers can build: {reason}") from None
    return list(_modules(built))


def _modules(model: nn.Module):
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield Module(name, {"": module.in_features}, module.weight.numel())
        elif fused := {key: p for key, p in module.named_parameters(recurse=False) if p.dim() == 3}:
            sizes = {key: parameter.shape[-1] for key, parameter in fused.items()}
            yield Module(name, sizes, sum(p.numel() for p in fused.values()))


def check(config: DictConfig, settings: QuadsSettings, inventory: list[Module]) -> list[str]:
    """Match the targets and check the shapes under the rollout's tensor parallelism.

    Returns:
        Lines that tell what is quantized and what each pattern matched.

    Raises:
        SettingsError: a pattern without a match, or a shard of K that is not a multiple of 16.
    """
    if settings.actor.mode == "none" and settings.rollout.mode == "bf16":
        return ["nothing is quantized"]
    plan = Targets(settings.targets, settings.exclude).plan([module.name for module in inventory])
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    for module in inventory:
        if module.name in plan.quantized:
            _check_shape(module, tp)
    total = sum(module.parameters for module in inventory)
    chosen = sum(module.parameters for module in inventory if module.name in plan.quantized)
    lines = [f"quantized: {len(plan.quantized)} modules, {chosen / 1e6:.2f}M of {total / 1e6:.2f}M linear parameters"]
    lines += [f"pattern {pattern!r} matched {_names(names)}" for pattern, names in plan.matches.items()]
    return lines + [f"kept in full precision: {_names(tuple(plan.kept))}"]


def _names(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} module{'s' * (len(names) != 1)} ({shown})" if names else "nothing"


def _check_shape(module: Module, tp: int) -> None:
    for part, k in module.reductions.items():
        full = f"{module.name}.{part}" if part else module.name
        if k % 16:
            raise SettingsError(full, k, "its reduction dimension is not a multiple of 16; put it into quads.exclude")
        last = full.rsplit(".", 1)[-1]
        split = last in ROW_PARALLEL if not is_expert(module.name) else last.startswith("down")
        if split and (k % tp or (k // tp) % 16):
            raise SettingsError(
                "actor_rollout_ref.rollout.tensor_model_parallel_size",
                tp,
                f"splits {full} along K = {k} into shards that are not multiples of 16; use a smaller one",
            )
