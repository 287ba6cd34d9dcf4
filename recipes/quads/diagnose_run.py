"""The measurements behind `quads diagnose`: from a request to the contents of diagnose.json."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe.analysis.prompts import Prompt, fitting, tokenize, unknown_warning

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
LAYER_TOKENS = 4096
"""Tokens that the errors of single products are measured on."""


class DiagnoseError(Exception):
    """A wrong argument: the message names it and the remedy."""


@dataclass(frozen=True)
class Request:
    """What to diagnose."""

    model: str
    """Checkpoint folder."""
    prompts: list[Prompt]
    arms: tuple[str, ...]
    ratios: tuple[float, ...]
    settings: QuadsSettings
    dtype: str
    """A key of DTYPES."""
    count: int
    """Prompts to measure on."""
    max_new: int
    seed: int
    raw: bool
    leave_out: int
    worst: int


def prepare(request: Request, say: Callable[[str], None]):
    """The engines' job (`quads_recipe.analysis.rollouts.Job`), once the model and the prompts are known to suit.

    Raises:
        DiagnoseError, PromptError, SettingsError: they don't. Nothing was started or written.
    """
    for line in check_model(request.model, request.settings, request.dtype):
        say(line)
    job = make_job(request)
    for warning in prompt_warnings(request.model, job):
        say(f"WARNING: {warning}")
    return job


def prompt_warnings(folder: str, job) -> list[str]:
    """What is odd about the prompts of a job, but stops nothing."""
    from transformers import AutoTokenizer

    warning = unknown_warning(job.prompts, AutoTokenizer.from_pretrained(folder))
    return [warning] if warning else []


def diagnose(request: Request, job, say: Callable[[str], None]) -> dict:
    """Run the engines on `prepare`'s job, then the trainer's forwards."""
    from quads_recipe.analysis.rollouts import collect

    collected = collect(job, say)
    return measure(request, job, collected, say)


def check_model(folder: str, settings: QuadsSettings, dtype: str) -> list[str]:
    """Fail before any engine starts where the model is unsuitable; lines for the terminal.

    Args:
        folder: the checkpoint's.
        settings: targets and exclude are used.
        dtype: a key of DTYPES; all weights are read, and must be finite in it.

    Raises:
        SettingsError: not a causal language model, values that make no model, unknown experts, patterns without a
            match, K not a multiple of 16, weights that are missing, of another shape or not finite.
    """
    import torch

    from quads_ops.matrix_plan import plan_parameters
    from quads_ops.targets import Targets
    from quads_recipe import preflight_config, preflight_weights

    model = preflight_config.build("--model", folder)
    _check_architecture(folder, model)
    plan_parameters(model, Targets(settings.targets, settings.exclude))
    return preflight_weights.check("--model", Path(folder), model, finite_in=getattr(torch, DTYPES[dtype]))


def _check_architecture(folder: str, model) -> None:
    """vLLM goes by the name of the class alone; some models have another there."""
    names, usual = getattr(model.config, "architectures", None) or [], type(model).__name__
    if usual not in names and not _vllm_generates(names):
        raise SettingsError(
            "--model",
            folder,
            f"config.json: architectures = {names or None}: names no language model of vLLM's; give [{usual!r}]",
        )


def _vllm_generates(names: list[str]) -> bool:
    """Whether vLLM has a model of that name that generates text. By its table, without importing the model."""
    if not names:
        return False
    from quads_recipe.analysis.rollout_engine import prepare_environment

    prepare_environment()
    from vllm.model_executor.models.registry import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    return any(name in known and name.endswith("ForCausalLM") for name in names)


def make_job(request: Request):
    """The engines' job (`quads_recipe.analysis.rollouts.Job`).

    Raises:
        SettingsError: no tokenizer, or a generation_config.json that can't be used.
        DiagnoseError: no prompt fits into the model, or a token of one has no embedding.
        PromptError: a prompt that can't be tokenized.
    """
    from quads_recipe import preflight_tokenizer
    from quads_recipe.analysis.rollout_engine import EngineOptions
    from quads_recipe.analysis.rollouts import Job, RolloutKey, key_of

    tokenizer = preflight_tokenizer.load("--model", request.model, "save the model's tokenizer there")
    # Scoring a whole response generates one more token.
    extra = request.max_new + 1
    # As many again for the masks' statistics, which in training come from other prompts too.
    prompts = tokenize(request.prompts[: 2 * request.count], tokenizer, request.raw)
    ids = _fitting(request, prompts, extra)
    keys = [key_of(arm) for arm in request.arms]
    if request.ratios:
        keys.append(RolloutKey("w4a4", max(request.ratios)))
    return Job(
        options=EngineOptions(
            model=request.model,
            dtype=DTYPES[request.dtype],
            max_model_len=max(map(len, ids)) + extra,
            stop_token_ids=stop_tokens(request.model, tokenizer),
        ),
        settings=request.settings,
        keys=tuple(dict.fromkeys(keys)),
        ratios=request.ratios,
        prompts=ids[: request.count],
        calibration=ids[request.count :] or ids,
        max_new=request.max_new,
        seed=request.seed,
    )


def _fitting(request: Request, prompts: list[list[int]], extra: int) -> list[list[int]]:
    """The prompts that leave room for `extra` tokens in the model's context. Raises DiagnoseError."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(request.model).get_text_config()
    if not any(prompts):
        raise DiagnoseError(f"--data: the tokenizer of {request.model} makes no token of any prompt")
    context = getattr(config, "max_position_embeddings", None)
    ids = fitting(prompts, (1 << 20 if context is None else context) - extra)
    if not ids:
        raise DiagnoseError(
            f"--data: no prompt leaves room for --max-new {request.max_new} tokens in the model's context"
            f"{'' if context is None else f' of {context}'}; lower --max-new or give shorter prompts"
        )
    highest = max(map(max, ids))
    if highest >= config.vocab_size:
        raise DiagnoseError(
            f"--model {request.model}: its tokenizer gives a prompt token {highest}, but config.json: vocab_size = "
            f"{config.vocab_size}; use the tokenizer that belongs to the model"
        )
    return ids


def stop_tokens(folder: str, tokenizer) -> tuple[int, ...]:
    """What ends a response: by generation_config.json, or else by the tokenizer. Raises SettingsError."""
    from quads_recipe import preflight_config

    config = preflight_config.generation("--model", folder)
    ids = None if config is None else config.eos_token_id
    ids = ids if ids is not None else tokenizer.eos_token_id
    return tuple(ids if isinstance(ids, list) else [] if ids is None else [ids])


def measure(request: Request, job, collected, say: Callable[[str], None]) -> dict:
    """Everything on the trainer's side; returns the contents of diagnose.json."""
    import torch
    from transformers import AutoTokenizer

    from quads_recipe import diagnose_report
    from quads_recipe.analysis import tokens, verdict
    from quads_recipe.analysis.measure import Measurements, arm_settings, series_settings
    from quads_recipe.analysis.rollouts import RolloutKey, key_of
    from quads_recipe.analysis.trainer_side import TrainerSide

    say("trainer: loading the model")
    settings = request.settings
    measurements = Measurements(TrainerSide(request.model, getattr(torch, DTYPES[request.dtype]), settings))
    arms = {}
    for arm in request.arms:
        arms[arm] = measurements.arm(arm_settings(settings, arm), collected.own[key_of(arm)])
        say(f"arm {arm}: mean |d| {arms[arm].summary['d'].mean:.4g}")
    series = {r: measurements.arm(series_settings(settings, r), t) for r, t in collected.series.items()}
    own = {r: measurements.arm(series_settings(settings, r), collected.own[RolloutKey("w4a4", r)]) for r in series}
    layers, left_out = None, []
    if series:
        layers, left_out = _layers(request, measurements, verdict.choose(arms, own).ratio, series, say)
    tokenizer = AutoTokenizer.from_pretrained(request.model)
    return diagnose_report.contents(
        about=about(request, job),
        settings=settings,
        arms=arms,
        series=series,
        own=own,
        layers=layers,
        left_out=left_out,
        tokens=[report for arm in arms.values() for report in tokens.worst(arm, tokenizer, request.worst)],
        verdict=verdict.judge(arms, series, own, left_out, request.dtype, prompt_warnings(request.model, job)),
        shape=measurements.shape,
    )


def _layers(request: Request, measurements, ratio: float, series: Mapping, say: Callable[[str], None]):
    """Errors of every product, and the most erroneous layers left out in turn at `ratio`."""
    say("layers: errors of every product")
    layers = measurements.layers({r: result.tokens for r, result in series.items()}, LAYER_TOKENS)
    units = most_erroneous(layers, measurements.trainer.sites, ratio, request.leave_out)
    if units:
        say(f"layers: leaving out {len(units)} in turn at ratio {ratio:g}")
    return layers, measurements.left_out(series[ratio].settings, series[ratio].tokens, units)


def most_erroneous(layers, sites: Mapping, ratio: float, count: int) -> list[str]:
    """The units of largest relative error at `ratio`, at most `count`, in the model's order."""
    from quads_recipe.analysis.sites import exclusion_units

    error = {}
    for unit, members in exclusion_units(sites).items():
        found = [layers.by_site[site].activation_error(ratio) for site in members if site in layers.by_site]
        if found:
            error[unit] = max(found)
    chosen = set(sorted(error, key=lambda unit: -error[unit])[:count])
    return [unit for unit in error if unit in chosen]


def about(request: Request, job) -> dict:
    """Model, sizes, machine and versions."""
    import torch
    import transformers
    import vllm

    on_gpu = torch.cuda.is_available()
    return {
        "model": Path(request.model).name,
        "dtype": request.dtype,
        "prompts": len(job.prompts),
        "prompts_in_file": len(request.prompts),
        "calibration_prompts": len(job.calibration),
        "max_new": request.max_new,
        "seed": request.seed,
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "vllm": vllm.__version__,
        },
    }
