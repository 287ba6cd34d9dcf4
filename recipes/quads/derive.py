"""From the `quads:` block to the settings of verl and vLLM that follow from it."""

from __future__ import annotations

import os

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe import (
    preflight,
    preflight_model,
    preflight_ray,
    preflight_resume,
    preflight_rollout,
    preflight_tokenizer,
    preflight_weights,
    ray_folder,
    run_id,
    scratch,
)
from quads_recipe.preflight_values import ACTOR, MODEL, dtype_name, local_path

ENGINE_LIB = "quads_recipe.engine"
ENGINE_CONFIG = "quads_recipe.engine_config.QuadsFSDPEngineConfig"
EXTENSION = "quads_recipe.rollout_extension.QuadsWorkerExtension"
TRAINER_MODE = "quads_sync"


def prepare(config: DictConfig) -> list[str]:
    """Check `config` and complete it in place.

    Returns:
        Lines that tell what was decided, for the terminal.

    Raises:
        quads_ops.settings.SettingsError: a wrong setting.
        quads_ops.compat.UnsupportedVersion: a package version that was not tried.
    """
    settings = settings_of(config)
    preflight.check_environment(config)
    lines = _describe(settings) + preflight.check_config(config, settings) + _check_model(config, settings)
    preflight_ray.check(config)
    lines += preflight_resume.check(config, settings)
    with open_dict(config):
        _write(config, settings)
    return lines


def settings_of(config: DictConfig) -> QuadsSettings:
    """The `quads:` block. Raises SettingsError."""
    block = OmegaConf.select(config, "quads")
    if not isinstance(block, DictConfig):
        raise SettingsError("quads", block, "must be a mapping (configs/quads_base.yaml); arm bf16 quantizes nothing")
    return QuadsSettings.from_dict(OmegaConf.to_container(block, resolve=True))


def _check_model(config: DictConfig, settings: QuadsSettings) -> list[str]:
    model = preflight_model.build(config)
    return check_matrices(config, settings, model) + check_folder(config, model)


def check_matrices(config: DictConfig, settings: QuadsSettings, model: nn.Module) -> list[str]:
    """The model with an arm: its kind and shapes, and what is quantized; lines for the terminal.

    model: of `preflight_model.build`.

    Raises:
        quads_ops.settings.SettingsError.
    """
    preflight_model.check_kind(config, settings, model)
    preflight_model.check_both_sides(config, model)
    preflight_rollout.check_positions(config, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    return preflight_model.check(config, settings, model)


def check_folder(config: DictConfig, model: nn.Module, *, finite: bool = False) -> list[str]:
    """The model's folder: its tokenizer, and the headers of its weights; lines for the terminal.

    model: of `preflight_model.build`; its parameters are replaced.
    finite: read all weights, and refuse what is NaN or infinite in the dtype that the actor computes in. Without, the
    first weight sync looks for them (`weight_finite`).

    Raises:
        quads_ops.settings.SettingsError.
    """
    preflight_tokenizer.check(config)
    folder = local_path(MODEL + "path", config.actor_rollout_ref.model.path)
    fewer = "num_hidden_layers" in preflight_model.overrides_of_actor(config)
    compute = dtype_name(config, ACTOR + "fsdp_config.mixed_precision.param_dtype", "bf16")
    finite_in = getattr(torch, compute, torch.float32) if finite else None
    return preflight_weights.check(MODEL + "path", folder, model, fewer_layers=fewer, finite_in=finite_in)


def _describe(settings: QuadsSettings) -> list[str]:
    rollout, residual = settings.rollout, settings.rollout.residual
    allocation = "" if residual.allocation == "uniform" else f", allocation {residual.allocation}"
    how = f"{residual.granularity}, per {residual.scope}, score {residual.score}{allocation}"
    rac = f"residual ratio {residual.ratio:g} ({how})" if residual.ratio else "no residual compensation"
    return [f"arm {settings.arm}: actor {settings.actor.mode}, rollout {rollout.mode}, {rac}"]


def _write(config: DictConfig, settings: QuadsSettings) -> None:
    actor, rollout, model = (config.actor_rollout_ref[key] for key in ("actor", "rollout", "model"))
    config.quads = settings.to_dict()
    if config.trainer.resume_mode == "resume_path":  # verl takes all that follows global_step_ for the number
        config.trainer.resume_from_path = config.trainer.resume_from_path.rstrip("/")
    config.trainer.v1.trainer_mode = TRAINER_MODE
    actor.fsdp_config._target_ = ENGINE_CONFIG
    actor.fsdp_config.quads = settings.to_dict()
    libs = model.external_lib or []
    model.external_lib = [ENGINE_LIB, *([libs] if isinstance(libs, str) else libs)]
    vllm = rollout.engine_kwargs.vllm
    vllm.worker_extension_cls = EXTENSION
    if settings.rollout.mode != "bf16":
        overrides = OmegaConf.to_container(vllm.get("hf_overrides") or OmegaConf.create({}), resolve=True)
        vllm.hf_overrides = overrides | {"quantization_config": settings.vllm_quantization_config()}
    _write_ray(config)


def _write_ray(config: DictConfig) -> None:
    """One id for the run in every process; on a CPU a private folder for Ray."""
    os.environ[run_id.ENV] = run_id.new_run_id()
    env, defaults = {run_id.ENV: os.environ[run_id.ENV]}, {}
    ray_init = config.ray_kwargs.ray_init
    if os.environ.get("VERL_PLATFORM", "").lower() == "cpu":
        env["VERL_PLATFORM"] = "cpu"
        if not ray_init.get("_temp_dir") and not ray_init.get("address"):
            ray_init._temp_dir = ray_folder.make()
            defaults = _temporary(ray_init._temp_dir)
    runtime_env = ray_init.get("runtime_env") or {}
    env_vars = OmegaConf.create({str(k): str(v) for k, v in (runtime_env.get("env_vars") or {}).items()})
    ray_init.runtime_env = {**runtime_env, "env_vars": {**defaults, **env_vars, **env}}


def _temporary(folder: str) -> dict[str, str]:
    """Temporary files of Ray's workers lie in Ray's own folder; what they compile stays where it is without this."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    compiled = os.environ.get(scratch.COMPILED) or default_cache_dir()
    return {"TMPDIR": ray_folder.temporary(folder), scratch.COMPILED: compiled}
