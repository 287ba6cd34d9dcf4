"""Checks of the rollout's settings: what vLLM may be given, how many workers there are, how long a sequence is."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe.preflight_values import ACTOR, MODEL, ROLLOUT, devices, expect, is_number, select

# Ways to fill a model that is synced before its first use. The rest of vLLM's want files that verl does not write.
_LOAD_FORMATS = (None, "auto", "dummy", "hf", "safetensors", "fastsafetensors", "runai_streamer", "pt")

EAGER_MODES = ("fp8", "w4a16")
"""Modes of the rollout whose experts don't run in CUDA graphs."""

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
    "enable_lora": f"it renames the weights that the actor sends; use {MODEL}lora_rank",
    "model": f"verl passes the actor's; use {MODEL}path",
}


def check(config: DictConfig) -> None:
    """Raises SettingsError."""
    _check_engine_kwargs(config)
    _check_load_format(config)
    _check_parallelism(config)
    _check_memory(config)
    _check_lengths(config)


def _check_engine_kwargs(config: DictConfig) -> None:
    for name in ("engine_kwargs", "engine_kwargs.vllm", "engine_kwargs.vllm.hf_overrides"):
        value = OmegaConf.select(config, ROLLOUT + name)
        if not isinstance(value, DictConfig) and (value is not None or not name.endswith("hf_overrides")):
            raise SettingsError(ROLLOUT + name, value, "must be a mapping; leave it out, or set single keys of it")
    for name, remedy in _ENGINE_KWARGS.items():
        expect(config, f"{ROLLOUT}engine_kwargs.vllm.{name}", (None, False), remedy)
    own = (None, select(config, MODEL + "tokenizer_path"), select(config, MODEL + "path"))
    remedy = f"the rollout would number tokens differently than the actor; use {MODEL}tokenizer_path"
    expect(config, f"{ROLLOUT}engine_kwargs.vllm.tokenizer", own, remedy)


def _check_load_format(config: DictConfig) -> None:
    for name in (ROLLOUT + "load_format", ROLLOUT + "engine_kwargs.vllm.load_format"):
        usable = ", ".join(filter(None, _LOAD_FORMATS))
        expect(config, name, _LOAD_FORMATS, f"the rollout gets its weights from the actor; use dummy (of {usable})")


def _check_parallelism(config: DictConfig) -> None:
    """Tensor parallel, with whole experts on each worker or without."""
    counts = (ROLLOUT + "tensor_model_parallel_size", ROLLOUT + "n", "trainer.n_gpus_per_node", "trainer.nnodes")
    for name in (*counts, "data.train_batch_size", "data.max_prompt_length", "data.max_response_length"):
        value = OmegaConf.select(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingsError(name, value, "must be a whole number, 1 or more")
    tp = OmegaConf.select(config, ROLLOUT + "tensor_model_parallel_size")
    expect(
        config,
        ROLLOUT + "data_parallel_size",
        (1,),
        "an engine that spans data parallel ranks is not supported; set it to 1, and verl starts an engine for every "
        f"{tp} devices",
    )
    expect(
        config,
        ROLLOUT + "expert_parallel_size",
        (1, tp),
        f"must be 1 (each expert is cut over the workers) or {ROLLOUT}tensor_model_parallel_size, {tp} (whole experts)",
    )
    count = devices(config)
    if count % tp:
        raise SettingsError(
            ROLLOUT + "tensor_model_parallel_size",
            tp,
            f"does not divide the {count} device{'s' * (count > 1)} of the run (trainer.n_gpus_per_node x "
            "trainer.nnodes); use a divisor, or more devices",
        )


def _check_memory(config: DictConfig) -> None:
    for name in (ROLLOUT + "gpu_memory_utilization", ROLLOUT + "engine_kwargs.vllm.gpu_memory_utilization"):
        value = select(config, name)
        if value is None and "engine_kwargs" in name:
            continue
        if not is_number(value) or not 0 < value <= 1:
            raise SettingsError(name, value, "is a share of the device's memory; give a number above 0, at most 1")


def _check_lengths(config: DictConfig) -> None:
    """verl cuts responses to the room that is left, without a word."""
    needed = config.data.max_prompt_length + config.data.max_response_length
    for name in (ROLLOUT + "max_model_len", ROLLOUT + "engine_kwargs.vllm.max_model_len"):
        value = select(config, name)
        automatic = value == -1 and "engine_kwargs" in name  # vLLM's word for as long as the memory allows
        if is_number(value) and value < needed and not automatic:
            raise SettingsError(
                name,
                value,
                f"is shorter than data.max_prompt_length + data.max_response_length = {needed}, and responses would "
                f"be cut; raise it to {needed}, or lower those",
            )


def check_positions(config: DictConfig, positions: int | None) -> None:
    """positions: of the model (`max_position_embeddings`), or None if it says none. verl's own limit on max_model_len.

    Raises:
        SettingsError.
    """
    name = ROLLOUT + "max_model_len"
    value = select(config, name)
    if positions is not None and is_number(value) and value > positions:
        raise SettingsError(
            name, value, f"is more than the model's max_position_embeddings, {positions}; lower it, or leave it out"
        )


def check_graphs(config: DictConfig, settings: QuadsSettings, experts: bool) -> None:
    """experts: whether the rollout quantizes any.

    Raises:
        SettingsError: a mode whose experts can't run in vLLM's CUDA graphs, with these graphs.
    """
    mode, name = settings.rollout.mode, ROLLOUT + "enforce_eager"
    eager = select(config, ROLLOUT + "engine_kwargs.vllm.enforce_eager", select(config, name))
    if experts and mode in EAGER_MODES and config.trainer.device != "cpu" and not eager:
        raise SettingsError(
            name,
            False,
            f"quads.rollout.mode={mode} reads on the host how many tokens each expert has, which CUDA graphs can't "
            "hold; set it to true",
        )


def check_master_dtype(config: DictConfig) -> list[str]:
    """The dtype of the weights that the optimizer updates; lines for the terminal.

    Raises:
        SettingsError: not a dtype that verl knows.
    """
    name = ACTOR + "fsdp_config.model_dtype"
    value = select(config, name)
    known = {"fp32": ("32", "fp32", "float32"), "bf16": ("bf16", "bfloat16"), "fp16": ("16", "fp16", "float16")}
    found = next((dtype for dtype, names in known.items() if value is None or str(value) in names), None)
    if found is None:
        raise SettingsError(name, value, "is no dtype that verl knows; use fp32, or bf16")
    if found == "fp32":
        return []
    return [f"master weights are {found} ({name}): updates smaller than its rounding are lost; fp32 is the default"]
