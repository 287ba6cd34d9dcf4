"""Checks of the environment and of the hydra config, before Ray starts. Each failure is one SettingsError."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from quads_ops import compat
from quads_ops.settings import QuadsSettings, SettingsError

# Entry point group: our name in it, and the variable by which a user may choose among plugins.
PLUGINS = {
    "verl.plugins": ("quads", "VERL_USE_EXTERNAL_PLUGINS"),
    "vllm.general_plugins": ("quads_nvfp4", "VLLM_PLUGINS"),
}
ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
MODEL = "actor_rollout_ref.model."


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
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError(
            "trainer.device", device, "no CUDA device is visible; on a CPU use VERL_PLATFORM=cpu and trainer.device=cpu"
        )


def _expect(config: DictConfig, name: str, allowed: tuple, remedy: str) -> None:
    value = OmegaConf.select(config, name, default=None)
    if value not in allowed:
        raise SettingsError(name, value, remedy)


def check_config(config: DictConfig, settings: QuadsSettings) -> None:
    """Everything in the config that QUADS can't work with."""
    _expect(config, "trainer.use_v1", (True,), "quads extends verl's v1 trainer; set it to true")
    _expect(config, "trainer.v1.trainer_mode", ("sync", "quads_sync"), "only the synchronous trainer is supported")
    _expect(config, ACTOR + "strategy", ("fsdp", "fsdp2"), "the actor engine is FSDP; use fsdp or fsdp2")
    _expect(config, "actor_rollout_ref.hybrid_engine", (True,), "actor and rollout are colocated; set it to true")
    _expect(config, ROLLOUT + "name", ("vllm",), "the rollout is vLLM")
    _expect(config, ROLLOUT + "checkpoint_engine.backend", ("naive",), "the colocated sync is the backend naive")
    _expect(config, ROLLOUT + "pipeline_model_parallel_size", (1,), "pipeline parallel rollouts are not supported")
    _expect(config, ROLLOUT + "calculate_log_probs", (True,), "the mismatch can't be measured without; set it to true")
    _expect(config, ROLLOUT + "quantization", (None,), "quads sets the rollout's quantization; use quads.rollout.mode")
    _expect(config, ROLLOUT + "quantization_config_file", (None,), "use the quads block instead")
    _expect(config, ACTOR + "fsdp_config.qat.enable", (False, None), "verl's own QAT can't be combined with quads")
    _expect(config, MODEL + "mtp.enable", (False, None), "multi-token prediction heads are not supported")
    bypass = "verl then takes the rollout's logprobs for the actor's, and no mismatch can be seen; set it to false"
    _expect(config, "algorithm.rollout_correction.bypass_mode", (False, None), bypass)
    _check_engine_kwargs(config)
    _check_parallelism(config)
    _check_quantization_only(config, settings)
    _check_files(config)


# Options of vLLM that may not be given by themselves: quads or verl sets them, or the rollout can't serve them.
_ENGINE_KWARGS = {
    "worker_extension_cls": "quads brings its own, which takes the weights; remove it",
    "quantization": "quads sets the rollout's quantization; use quads.rollout.mode",
    "hf_overrides.quantization_config": "quads sets the rollout's quantization; use the quads block",
    "dtype": f"it would part the rollout from the actor; use {ROLLOUT}dtype",
    "tensor_parallel_size": f"verl counts workers by its own setting; use {ROLLOUT}tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline parallel rollouts are not supported; remove it",
    "data_parallel_size": "verl starts as many engines as there is room for; remove it",
    "enable_expert_parallel": f"verl overwrites it; use {ROLLOUT}expert_parallel_size",
    "enable_eplb": "expert load balancing moves experts between syncs; remove it",
    "speculative_config": "speculative decoding is not supported; remove it",
}


def _check_engine_kwargs(config: DictConfig) -> None:
    for name in ("engine_kwargs", "engine_kwargs.vllm", "engine_kwargs.vllm.hf_overrides"):
        value = OmegaConf.select(config, ROLLOUT + name)
        if not isinstance(value, DictConfig) and (value is not None or not name.endswith("hf_overrides")):
            raise SettingsError(ROLLOUT + name, value, "must be a mapping; leave it out, or set single keys of it")
    for name, remedy in _ENGINE_KWARGS.items():
        _expect(config, f"{ROLLOUT}engine_kwargs.vllm.{name}", (None, False), remedy)


def _check_parallelism(config: DictConfig) -> None:
    """Tensor parallel, with whole experts on each worker or without."""
    counts = (ROLLOUT + "tensor_model_parallel_size", ROLLOUT + "n", "trainer.n_gpus_per_node", "trainer.nnodes")
    for name in (*counts, "data.train_batch_size", "data.max_prompt_length", "data.max_response_length"):
        value = OmegaConf.select(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingsError(name, value, "must be a whole number, 1 or more")
    tp = OmegaConf.select(config, ROLLOUT + "tensor_model_parallel_size")
    _expect(
        config,
        ROLLOUT + "data_parallel_size",
        (1,),
        "an engine that spans data parallel ranks is not supported; set it to 1, and verl starts an engine for every "
        f"{tp} devices",
    )
    _expect(
        config,
        ROLLOUT + "expert_parallel_size",
        (1, tp),
        f"must be 1 (each expert is cut over the workers) or {ROLLOUT}tensor_model_parallel_size, {tp} (whole experts)",
    )


def _check_quantization_only(config: DictConfig, settings: QuadsSettings) -> None:
    if settings.actor.mode == "none" and settings.rollout.mode == "bf16":
        return
    for name in ("lora_rank", "lora.rank"):
        _expect(config, MODEL + name, (0, None), "LoRA can't be combined with quantization; set it to 0")
    _expect(config, MODEL + "lora_adapter_path", (None,), "LoRA can't be combined with quantization; remove it")
    kv = ROLLOUT + "engine_kwargs.vllm.kv_cache_dtype"
    _expect(config, kv, (None, "auto", "bfloat16", "float16"), "a quantized KV cache adds its own mismatch; use auto")
    rollout = _dtype(config, ROLLOUT + "dtype", "bfloat16")
    compute = ACTOR + "fsdp_config.mixed_precision.param_dtype"
    actor = _dtype(config, compute, "bf16")
    if actor not in ("bfloat16", "float32"):
        raise SettingsError(compute, actor, "NVFP4 weights are made from bf16 or fp32; use one of them")
    if rollout != actor:
        raise SettingsError(
            ROLLOUT + "dtype",
            OmegaConf.select(config, ROLLOUT + "dtype"),
            f"must be the actor's compute dtype ({compute}, {actor}): both sides quantize the weight as cast to it",
        )


def _dtype(config: DictConfig, name: str, default: str) -> str:
    value = str(OmegaConf.select(config, name, default=None) or default)
    names = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    return names.get(value, value).removeprefix("torch.")


def _check_files(config: DictConfig) -> None:
    for name in ("data.train_files", "data.val_files"):
        value = OmegaConf.select(config, name)
        files = value if isinstance(value, list | ListConfig) else [value]
        if not files or not all(isinstance(file, str) and file for file in files):
            raise SettingsError(name, value, "no file; give a verl parquet, or a list of them")
        local = [Path(file).expanduser() for file in files if "://" not in file]
        rows = sum(_rows(name, file, config.data.prompt_key) for file in local)
        if name == "data.train_files" and len(local) == len(files) and rows < config.data.train_batch_size:
            few = f"holds {rows} rows, which is no batch; lower data.train_batch_size ({config.data.train_batch_size})"
            raise SettingsError(name, value if isinstance(value, str) else list(files), few)


def _rows(name: str, file: Path, prompt_key: str) -> int:
    """Rows of a file of data; of one that is no parquet, none are counted as missing."""
    from pyarrow import ArrowException, parquet

    if not file.is_file():
        raise SettingsError(name, str(file), "no such file; give a verl parquet")
    if file.suffix != ".parquet":
        return sys.maxsize
    try:
        metadata = parquet.read_metadata(file)
        columns = parquet.read_schema(file).names
    except (ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(name, str(file), f"not a parquet that can be read: {reason}") from None
    if prompt_key not in columns:
        there = ", ".join(columns)
        raise SettingsError(name, str(file), f"has no column {prompt_key} (data.prompt_key); it has {there}")
    if not metadata.num_rows:
        raise SettingsError(name, str(file), "has no rows; give one that has")
    return metadata.num_rows
