"""Tiny random models and real vLLM CPU engines for the tests of the rollout."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch

VOCAB = 96
_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, intermediate_size=64, decoder_sparse_step=1)


def model_config(kind: str, **changes):
    """Configuration of a tiny model: qwen3_moe, qwen2_moe (shared expert, biases), mixtral, qwen3, llama."""
    import transformers

    table = {
        "qwen3_moe": (transformers.Qwen3MoeConfig, {**_COMMON, **_MOE, "norm_topk_prob": True}),
        "qwen2_moe": (transformers.Qwen2MoeConfig, {**_COMMON, **_MOE, "shared_expert_intermediate_size": 48}),
        "mixtral": (
            transformers.MixtralConfig,
            {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        ),
        "qwen3": (transformers.Qwen3Config, {**_COMMON, "intermediate_size": 96}),
        "llama": (transformers.LlamaConfig, {**_COMMON, "intermediate_size": 96}),
    }
    cls, values = table[kind]
    values = {"tie_word_embeddings": False, **values, **changes}
    if kind == "qwen2_moe":
        values.pop("head_dim")  # Qwen2 has none: it is hidden_size / heads
    return cls(**values)


def make_model(folder: Path, kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """Write a random tiny model to `folder` and return it (Hugging Face, eval mode)."""
    import transformers

    torch.manual_seed(seed)
    config = model_config(kind, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    randomize(model, seed)
    model.save_pretrained(folder)
    return model


def randomize(model, seed: int) -> None:
    """New random weights, large enough that the logits differ much between tokens."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.1 * noise if "norm" in name else noise * (0.3 if "embed" in name or "bias" in name else 0.15))


def checkpoint(model) -> dict[str, torch.Tensor]:
    """What the trainer sends: transformers 5 names in memory, with the fused experts taken apart."""
    sent = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach()
        if name.endswith(".mlp.experts.gate_up_proj"):
            base = name.removesuffix(".gate_up_proj")
            for e, pair in enumerate(tensor):
                gate, up = pair.chunk(2, 0)
                sent[f"{base}.{e}.gate_proj.weight"] = gate.contiguous()
                sent[f"{base}.{e}.up_proj.weight"] = up.contiguous()
        elif name.endswith(".mlp.experts.down_proj"):
            base = name.removesuffix(".down_proj")
            for e, down in enumerate(tensor):
                sent[f"{base}.{e}.down_proj.weight"] = down.contiguous()
        else:
            sent[name] = tensor
    return sent


def hf_logprobs(model, prompts: list[list[int]]) -> list[torch.Tensor]:
    """log-probability of each prompt token after the first, one tensor per prompt."""
    out = []
    with torch.no_grad():
        for ids in prompts:
            ids = torch.tensor([ids])
            logits = model(ids).logits.float()
            picked = logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])
            out.append(picked[:, 0])
    return out


def prompts(count: int = 6, length: int = 24, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length - i,), generator=generator).tolist() for i in range(count)]


@contextmanager
def engine(folder: Path, options: dict | None, dtype: str = "float32", in_process: bool = True, **kwargs):
    """A vLLM engine that is shut down at the end. options: of quads_nvfp4, or None for vLLM without it."""
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    if options is not None:
        kwargs["hf_overrides"] = {"quantization_config": {"quant_method": "quads_nvfp4", **options}}
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=16,
        enforce_eager=kwargs.pop("enforce_eager", True),
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=True,
        **kwargs,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        _forget_parallel_state()


def _forget_parallel_state() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


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
