"""Checks of the environment and of the hydra config, before Ray starts. Each failure is one SettingsError.

Here is what needs no more than the config; `preflight_{types,rollout,attention,training,data,code,fields}` have a
subject each, and `preflight_{model,config,json,weights,tokenizer}` look into the model's folder.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

import torch
from omegaconf import DictConfig

from quads_ops import compat
from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe import (
    preflight_attention,
    preflight_code,
    preflight_data,
    preflight_fields,
    preflight_ray,
    preflight_rollout,
    preflight_training,
    preflight_types,
)
from quads_recipe.preflight_values import ACTOR, MODEL, ROLLOUT, check_run, dtype_name, expect, quantizes, select

# Entry point group: our name in it, and the variable by which a user may choose among plugins.
PLUGINS = {
    "verl.plugins": ("quads", "VERL_USE_EXTERNAL_PLUGINS"),
    "vllm.general_plugins": ("quads_nvfp4", "VLLM_PLUGINS"),
}

# name: (allowed values, remedy)
_REQUIRED = {
    "trainer.use_v1": ((True,), "quads extends verl's v1 trainer; set it to true"),
    "trainer.v1.trainer_mode": (("sync", "quads_sync"), "only the synchronous trainer is supported"),
    ACTOR + "strategy": (("fsdp", "fsdp2"), "the actor engine is FSDP; use fsdp or fsdp2"),
    "actor_rollout_ref.hybrid_engine": ((True,), "actor and rollout are colocated; set it to true"),
    ROLLOUT + "name": (("vllm",), "the rollout is vLLM"),
    ROLLOUT + "checkpoint_engine.backend": (("naive",), "the colocated sync is the backend naive"),
    ROLLOUT + "pipeline_model_parallel_size": ((1,), "pipeline parallel rollouts are not supported"),
    ROLLOUT + "calculate_log_probs": ((True,), "the mismatch can't be measured without; set it to true"),
    ROLLOUT + "quantization": ((None,), "quads sets the rollout's quantization; use quads.rollout.mode"),
    ROLLOUT + "quantization_config_file": ((None,), "use the quads block instead"),
    ACTOR + "fsdp_config.qat.enable": ((False, None), "verl's own QAT can't be combined with quads"),
    MODEL + "mtp.enable": ((False, None), "multi-token prediction heads are not supported"),
    "algorithm.rollout_correction.bypass_mode": (
        (False, None),
        "verl then takes the rollout's logprobs for the actor's, and no mismatch can be seen; set it to false",
    ),
}


def check_environment(config: DictConfig) -> None:
    """Versions, both plugins, and a device that fits `trainer.device`."""
    compat.require_supported()
    for group, (name, variable) in PLUGINS.items():
        if not any(entry.name == name for entry in entry_points(group=group)):
            raise SettingsError(
                f"entry point {group}:{name}",
                "not registered",
                "install the package (`pip install --no-deps -e .`); a stale *.egg-info in the working folder hides it",
            )
        chosen = os.environ.get(variable, "auto")
        if chosen.strip().lower() != "auto" and name not in (part.strip() for part in chosen.split(",")):
            raise SettingsError(variable, chosen, f"switches the plugin {name} off; unset it, or add {name} to it")
    platform = os.environ.get("VERL_PLATFORM", "").lower()
    device = config.trainer.device
    if device == "cpu" and platform != "cpu":
        raise SettingsError("trainer.device", device, "set VERL_PLATFORM=cpu in the environment to run on a CPU")
    if device != "cpu" and platform == "cpu":
        raise SettingsError("VERL_PLATFORM", platform, f"unset it, or set trainer.device=cpu (it is {device})")
    # The machine that starts the run may be one without a GPU, of a cluster that has them.
    if device == "cuda" and not torch.cuda.is_available() and not preflight_ray.joins_cluster(config):
        raise SettingsError(
            "trainer.device", device, "no CUDA device is visible; on a CPU use VERL_PLATFORM=cpu and trainer.device=cpu"
        )


def check_config(config: DictConfig, settings: QuadsSettings, *, data: bool = True) -> list[str]:
    """Everything in the config that QUADS can't work with; lines for the terminal.

    data: the data files are there already, and are checked too.
    """
    for name, (allowed, remedy) in _REQUIRED.items():
        expect(config, name, allowed, remedy)
    for name in ("lora_rank", "lora.rank"):
        expect(config, MODEL + name, (0, None), "LoRA is not supported, in no arm; set it to 0")
    expect(config, MODEL + "lora_adapter_path", (None,), "LoRA is not supported, in no arm; remove it")
    preflight_rollout.check(config)
    if config.trainer.device != "cpu":
        settings.rollout.residual.require_kernels()
    if quantizes(settings):
        _check_quantization(config)
    check_run(config)
    preflight_types.check(config)
    lines = preflight_training.check(config)
    preflight_attention.check(config)
    preflight_code.check(config)
    preflight_fields.check(config)
    if data:
        preflight_data.check(config)
    return preflight_rollout.check_master_dtype(config) + lines


def _check_quantization(config: DictConfig) -> None:
    kv = ROLLOUT + "engine_kwargs.vllm.kv_cache_dtype"
    expect(config, kv, (None, "auto", "bfloat16", "float16"), "a quantized KV cache adds its own mismatch; use auto")
    rollout = dtype_name(config, ROLLOUT + "dtype", "bfloat16")
    compute = ACTOR + "fsdp_config.mixed_precision.param_dtype"
    actor = dtype_name(config, compute, "bf16")
    if actor not in ("bfloat16", "float32"):
        raise SettingsError(compute, actor, "NVFP4 weights are made from bf16 or fp32; use one of them")
    if rollout != actor:
        raise SettingsError(
            ROLLOUT + "dtype",
            select(config, ROLLOUT + "dtype"),
            f"must be the actor's compute dtype ({compute}, {actor}): both sides quantize the weight as cast to it",
        )
