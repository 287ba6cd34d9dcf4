"""What the spawned ranks of test_engine_fsdp.py do; each job returns plain data for the test to judge."""

from __future__ import annotations

import json
import shutil
import traceback
from contextlib import nullcontext
from pathlib import Path

import support_engine
import torch

# name -> (family folder, arguments of build_engine). Every model has three experts: they do not divide by two ranks.
RUNS: dict[str, tuple[str, dict]] = {
    "fsdp2-fp32": ("qwen3_moe", {"strategy": "fsdp2"}),
    "fsdp2-bf16": ("qwen3_moe", {"strategy": "fsdp2", "param_dtype": "bf16"}),
    "fsdp2-bf16-checkpointing": (
        "qwen3_moe",
        {"strategy": "fsdp2", "param_dtype": "bf16", "gradient_checkpointing": True},
    ),
    "fsdp2-keep-gathered": ("qwen3_moe", {"strategy": "fsdp2", "reshard_after_forward": False}),
    "fsdp2-hybrid": ("qwen3_moe", {"strategy": "fsdp2", "fsdp_size": 1}),  # two ranks: replicated, not sharded
    "fsdp1-fp32": ("qwen3_moe", {"strategy": "fsdp"}),
    "fsdp1-bf16": ("qwen3_moe", {"strategy": "fsdp", "param_dtype": "bf16"}),
    "fsdp1-bf16-checkpointing": (
        "qwen3_moe",
        {"strategy": "fsdp", "param_dtype": "bf16", "gradient_checkpointing": True},
    ),
    "fsdp1-orig-params": ("qwen3_moe", {"strategy": "fsdp", "use_orig_params": True}),
    "mixtral": ("mixtral", {"strategy": "fsdp2"}),
    "qwen2_moe": ("qwen2_moe", {"strategy": "fsdp"}),
    "qwen3": ("qwen3", {"strategy": "fsdp2"}),
}
QUADS = {"arm": "quads"}


def attempt(function, *args, **kwargs):
    """The result, or {"error": traceback}: one failure must not hide the others."""
    try:
        return function(*args, **kwargs)
    except Exception:
        return {"error": traceback.format_exc()}


def sent(engine) -> tuple[dict[str, torch.Tensor], dict | None]:
    """The weight stream, and the receipt after it."""
    weights, config = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    assert config is None
    weights = {name: tensor.clone() for name, tensor in weights}
    return weights, engine.last_receipt


def one_run(folder: Path, family: str, arguments: dict) -> dict:
    """Logprobs, a step, and the weights sent before and after it. All ranks get the same batch."""
    engine = support_engine.build_engine(folder / family, quads=QUADS, **arguments)
    data = support_engine.batch()
    result = {"keys": list(engine.module.state_dict()), "receipt_before_export": engine.last_receipt}
    result["quantized"] = support_engine.logprobs(engine, data)
    result["runs"] = dict(engine.fake_quant.runs)
    with engine.unquantized():
        result["unquantized"] = support_engine.logprobs(engine, data)
    result["again"] = support_engine.logprobs(engine, data)
    result["sent"], result["receipt"] = sent(engine)
    result["grad_norm"] = support_engine.train_step(engine, data)
    result["sent_after_step"], result["receipt_after_step"] = sent(engine)
    result["quantized_after_step"] = support_engine.logprobs(engine, data)
    return result


def all_runs(folder: Path) -> dict:
    """Every entry of RUNS; for any number of ranks."""
    return {name: attempt(one_run, folder, *run) for name, run in RUNS.items()}


def resume(folder: Path, strategy: str) -> dict:
    """Save, step; then load and step again."""
    data = support_engine.batch()
    # verl 0.9.1 can't write a Hugging Face folder from FSDP1 shards on a CPU, with or without QUADS.
    save = ("model", "optimizer", "extra", *(("hf_model",) if strategy == "fsdp2" else ()))
    engine = support_engine.build_engine(
        folder / "qwen3_moe", strategy=strategy, quads=QUADS, param_dtype="bf16", save=save
    )
    support_engine.train_step(engine, data)
    checkpoint = str(folder / f"checkpoint-{strategy}")
    with engine.train_mode():
        engine.save_checkpoint(checkpoint)
    saved_weights, at_save = sent(engine)
    support_engine.train_step(engine, data)
    weights, receipt = sent(engine)
    other = support_engine.build_engine(folder / "qwen3_moe", strategy=strategy, quads=QUADS, param_dtype="bf16")
    with other.train_mode():
        other.load_checkpoint(checkpoint, del_local_after_load=False)
    at_load = sent(other)[1]
    support_engine.train_step(other, data)
    resumed_weights, resumed = sent(other)
    equal = all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
    return {
        "saved": at_save,
        "loaded": at_load,
        "next": receipt,
        "resumed": resumed,
        "equal": equal,
        "checkpoint": checkpoint,
        "saved_weights": saved_weights,
    }


def resumes(folder: Path) -> dict:
    """`resume` for FSDP1 and FSDP2."""
    return {strategy: attempt(resume, folder, strategy) for strategy in ("fsdp2", "fsdp")}


def two_ranks(folder: Path) -> dict:
    return {"runs": all_runs(folder), "resume": resumes(folder)}


def one_rank(folder: Path) -> dict:
    return {
        "batched": batched(folder),
        "runs": all_runs(folder),
        "resume": resumes(folder),
        "stock": {s: attempt(stock, folder, s) for s in ("fsdp2", "fsdp")},
        "arms": {arm: attempt(arm_run, folder, arm) for arm in ("bf16", "fp8", "naive", "symmetric")},
        "refused": refusals(folder),
        "registry": attempt(registry),
        "unpatched": {s: attempt(unpatched, folder, s) for s in ("fsdp2", "fsdp")},
    }


def stock(folder: Path, strategy: str) -> dict:
    """An engine without the quads block beside verl's own class; and the reference model (forward only)."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    data = support_engine.batch()
    engine = support_engine.build_engine(folder / "qwen3_moe", strategy=strategy)
    ours = sent(engine)[0]
    theirs = {n: t.clone() for n, t in FSDPEngineWithLMHead.get_per_tensor_param(engine)[0]}
    reference = support_engine.build_engine(
        folder / "qwen3_moe", strategy=strategy, quads=QUADS, forward_only=True, model_dtype="fp32"
    )
    return {
        "same_stream": list(ours) == list(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours),
        "fake_quant": engine.fake_quant,
        "logprobs": support_engine.logprobs(engine, data),
        "reference": support_engine.logprobs(reference, data),
        "reference_fake_quant": reference.fake_quant,
        "receipt": engine.last_receipt,
        "grad_norm": support_engine.train_step(engine, data),
    }


def arm_run(folder: Path, arm: str) -> dict:
    engine = support_engine.build_engine(folder / "qwen3_moe", quads={"arm": arm})
    weights, receipt = sent(engine)
    return {
        "converted": None if engine.fake_quant is None else (engine.fake_quant.mode, len(engine.fake_quant.names)),
        "receipt": receipt,
        "dtypes": {name: t.dtype for name, t in weights.items()},
        "logprobs": support_engine.logprobs(engine, support_engine.batch()),
        "mode_none": attempt(lambda: engine.unquantized().__enter__()),
        "mode_w4a16": attempt(lambda: engine.fake_quant_mode("w4a16").__enter__()),
    }


def batched_run(folder: Path, arm: str) -> dict:
    """A step with the experts' implementation `batched_mm`, which the checkpoint's config.json asks for."""
    copy = folder / f"batched-{arm}"
    shutil.copytree(folder / "qwen3_moe", copy)
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"experts_implementation": "batched_mm"}))
    steps = {}
    for name in ("qwen3_moe", copy.name):
        engine = support_engine.build_engine(folder / name, quads={"arm": arm})
        steps[engine.module.config._experts_implementation] = support_engine.train_step(engine, support_engine.batch())
    return {"grad_norms": steps}


def batched(folder: Path) -> dict:
    """Comes before any conversion, which would let `batched_mm` train in the whole process; so does bf16."""
    return {arm: attempt(batched_run, folder, arm) for arm in ("bf16", "quads")}


def refusals(folder: Path) -> dict[str, str]:
    """Message of the error that each wrong setup ends with."""

    def message(function) -> str:
        try:
            function()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def build(**kwargs):
        return support_engine.build_engine(folder / "qwen3_moe", **{"quads": QUADS, **kwargs})

    def run(**kwargs):
        support_engine.logprobs(build(**kwargs), support_engine.batch())

    def bypassed():
        engine = build()
        experts = engine.module.model.layers[0].mlp.experts
        experts.forward = type(experts).quads_original.forward.__get__(experts)
        support_engine.logprobs(engine, support_engine.batch())

    return {
        "lora": message(lambda: build(model={"lora_rank": 4})),
        "fp16": message(lambda: build(param_dtype="fp16")),
        "arm": message(lambda: build(quads={"arm": "nvfp4"})),
        "pattern": message(lambda: build(quads={"arm": "quads", "targets": ["model.layers.7.mlp.experts"]})),
        "wrapped_apart": message(lambda: run(wrap_policy={"transformer_layer_cls_to_wrap": ["QuadsLinear"]})),
        "bypassed": message(bypassed),
    }


def registry() -> dict:
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from quads_recipe.engine import QuadsFSDPEngine

    classes = EngineRegistry._engines["language_model"]
    return {
        backend: (
            classes[backend]["cpu"] is QuadsFSDPEngine,
            classes[backend]["cuda", "nvidia"] is QuadsFSDPEngine,
            classes[backend]["cuda"] is FSDPEngineWithLMHead,
        )
        for backend in ("fsdp", "fsdp2")
    }


def unpatched(folder: Path, strategy: str) -> dict:
    """Build without the patches of quads_recipe.cpu.fsdp: the actor under FSDP1, the reference model under FSDP2."""
    from unittest import mock

    import quads_recipe.engine

    with mock.patch.object(quads_recipe.engine, "_cpu_patches", nullcontext):
        engine = support_engine.build_engine(folder / "qwen3_moe", strategy=strategy, forward_only=strategy == "fsdp2")
        support_engine.logprobs(engine, support_engine.batch())
    return {"error": None}
