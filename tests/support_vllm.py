"""Tiny random models and real vLLM CPU engines for the tests of the rollout."""

from __future__ import annotations

import copy
import os
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support_models import tiny_config
from transformers import AutoModelForCausalLM

from quads_ops import nvfp4, receipt
from quads_ops.weights import fake_quantize_weight, quantize_weight, weight_amax

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

# vLLM's CPU attention takes heads of 32 and more, and Qwen2 computes its head size from these.
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def vllm_cpu():
    """Mark for tests that start a vLLM engine on a CPU."""
    try:
        from vllm.platforms import current_platform

        return pytest.mark.skipif(not current_platform.is_cpu(), reason="needs the CPU build of vLLM")
    except ImportError:
        return pytest.mark.skip(reason="needs vLLM")


def make_model(folder: Path, family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides):
    """Write a random tiny model of a family of support_models to `folder` and return it (eval mode)."""
    config = tiny_config(family, **{**_HEADS, **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model, seed)
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def randomize(model, seed: int) -> None:
    """New random weights, large enough that the logits differ much between tokens."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.1 * noise if "norm" in name else noise * (0.3 if "embed" in name or "bias" in name else 0.15))


def checkpoint(model) -> list[tuple[str, torch.Tensor]]:
    """What the trainer sends: transformers 5 names in memory, with the fused experts taken apart."""
    sent = []
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach()
        base, _, last = name.rpartition(".")
        if not base.endswith(".experts"):
            sent.append((name, tensor))
            continue
        for e, matrix in enumerate(tensor):
            if last == "down_proj":
                sent.append((f"{base}.{e}.down_proj.weight", matrix.contiguous()))
            else:
                gate, up = matrix.chunk(2, 0)
                sent.append((f"{base}.{e}.gate_proj.weight", gate.contiguous()))
                sent.append((f"{base}.{e}.up_proj.weight", up.contiguous()))
    return sent


def quantized_groups(model, experts_only: bool = False) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Matrix -> (weight, global_scale_dec), written down apart from the product: which matrices share a scale."""
    groups: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def group(*named):
        g = nvfp4.global_scale_dec(torch.stack([weight_amax(w) for _, w in named]).amax())
        groups.update({name: (w, g) for name, w in named})

    for i, layer in enumerate(model.model.layers):
        base = f"model.layers.{i}"
        attention = [(f"{base}.self_attn.{x}_proj", getattr(layer.self_attn, f"{x}_proj").weight) for x in "qkvo"]
        if not experts_only:
            group(*attention[:3])
            group(attention[3])
        mlps = {f"{base}.mlp": layer.mlp, f"{base}.mlp.shared_expert": getattr(layer.mlp, "shared_expert", None)}
        for name, mlp in mlps.items():
            if hasattr(mlp, "gate_proj") and not experts_only:
                group((f"{name}.gate_proj", mlp.gate_proj.weight), (f"{name}.up_proj", mlp.up_proj.weight))
                group((f"{name}.down_proj", mlp.down_proj.weight))
        if hasattr(layer.mlp, "experts"):
            for e, gate_up in enumerate(layer.mlp.experts.gate_up_proj):
                name = f"{base}.mlp.experts.{e}"
                gate, up = gate_up.chunk(2, 0)
                group((f"{name}.gate_proj", gate), (f"{name}.up_proj", up))
                group((f"{name}.down_proj", layer.mlp.experts.down_proj[e]))
    return groups


def expected_receipts(model) -> dict[str, receipt.Entry]:
    """The trainer's side: digests of its quantized matrices."""
    entries = {}
    for name, (w, g) in quantized_groups(model).items():
        packed = quantize_weight(w.detach(), g)
        entries |= receipt.entries([name], receipt.digest(packed.packed, packed.block_scales), g)
    return entries


def fake_quantized(model, experts_only: bool = False):
    """A copy of the model whose matrices are replaced by their NVFP4 values."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for w, g in quantized_groups(model, experts_only).values():
            w.copy_(fake_quantize_weight(w, g))
    return model


def hf_logprobs(model, prompts: list[list[int]]) -> list[torch.Tensor]:
    """log-probability of each prompt token after the first, one tensor per prompt."""
    out = []
    with torch.no_grad():
        for ids in prompts:
            ids = torch.tensor([ids])
            logits = model(ids).logits.float()
            out.append(logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0])
    return out


def prompts(count: int = 6, length: int = 24, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, 128, (length - i,), generator=generator).tolist() for i in range(count)]


@contextmanager
def fresh_cpu_worker():
    """In it, the worker extensions that vLLM adds to its worker class for good go to a subclass."""
    from vllm.v1.worker import cpu_worker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_worker, "CPUWorker", type("CPUWorker", (cpu_worker.CPUWorker,), {}))
        yield


@contextmanager
def engine(folder: Path, options: dict | None, dtype: str = "float32", in_process: bool = True, **kwargs):
    """A vLLM engine that is shut down at the end. options: of quads_nvfp4, or None for vLLM without it."""
    from vllm import LLM, envs

    if options is not None:
        kwargs["hf_overrides"] = {"quantization_config": {"quant_method": "quads_nvfp4", **options}}
    settings = dict(max_model_len=128, max_num_seqs=16, enforce_eager=True, enable_prefix_caching=False, seed=0)
    envs.disable_envs_cache()  # an engine that ran in this process before made them permanent
    with fresh_cpu_worker(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if in_process else "1")
        patch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
        # What vLLM changes in a worker's process, which is the test's here.
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        for name in ("synchronize", "empty_cache"):
            patch.setattr(torch.accelerator, name, getattr(torch.accelerator, name))
        llm = LLM(
            model=str(folder), skip_tokenizer_init=True, dtype=dtype, disable_log_stats=True, **{**settings, **kwargs}
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            if in_process:
                from vllm.distributed import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()


@contextmanager
def model_loader():
    """load(folder, options of quads_nvfp4, **arguments of vLLM's engine) -> (model, VllmConfig), loaded by vLLM.

    Without the rest of an engine: nothing can be generated.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    settings = dict(max_model_len=128, enforce_eager=True, skip_tokenizer_init=True, dtype="float32")

    def load(folder: Path, options: dict, **kwargs):
        overrides = {"quantization_config": {"quant_method": "quads_nvfp4", **options}}
        arguments = EngineArgs(model=str(folder), hf_overrides=overrides, **{**settings, **kwargs})
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"tcp://127.0.0.1:{_free_port()}", 0, "gloo")
                initialize_model_parallel(1, 1)
            return get_model(vllm_config=config), config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        try:
            yield load
        finally:
            cleanup_dist_env_and_memory()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def model_runner(llm):
    """vLLM's model runner of an engine that runs in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def vllm_logprobs(llm, batch: list[list[int]], one_by_one: bool = False) -> list[torch.Tensor]:
    """As `hf_logprobs`, from the engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": ids} for ids in batch]
    groups = [[r] for r in requests] if one_by_one else [requests]
    outputs = [o for group in groups for o in llm.generate(group, params, use_tqdm=False)]
    return [
        torch.tensor([entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], ids[1:], strict=True)])
        for o, ids in zip(outputs, batch, strict=True)
    ]


def worst(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Largest absolute difference."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
