"""Tiny random models of the supported families, a character tokenizer, and checkpoint folders, for tests.

No test should care about the exact sizes; pass what matters as a keyword (for example `num_hidden_layers=4`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "qwen3", "llama")
MOE_FAMILIES = FAMILIES[:3]
VOCAB_SIZE = 128

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_FAMILY = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
        },
    ),
    "mixtral": (MixtralConfig, {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": (Qwen3Config, {"intermediate_size": 96}),
    "llama": (LlamaConfig, {"intermediate_size": 96}),
}


def tiny_config(family: str, **overrides):
    """Configuration of a tiny model; `overrides` are passed to the family's config class."""
    config_class, values = _FAMILY[family]
    return config_class(**{**_COMMON, **values, **overrides})


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 4.0, **overrides):
    """A random causal language model in eval mode.

    scale: factor on the initial weights of all matrices; at 1 the logits of a tiny model are all but uniform, and
    differences in the layers would hardly show.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02 * scale)
    return model.to(dtype).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, `<pad>` 0, `<eos>` 1, chat template with role tokens; VOCAB_SIZE entries."""
    roles = ["<|user|>", "<|assistant|>", "<|system|>"]
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    characters = [*"0123456789+-*/=?.,:;!()[]{}'\"\n ", *letters, *(c.upper() for c in letters)]
    tokens = ["<pad>", "<eos>", "<unk>", *roles, *characters]
    tokens += [f"<unused{i}>" for i in range(len(tokens), VOCAB_SIZE)]
    tokenizer = Tokenizer(tokenizer_models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=roles,
    )
    fast.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
        "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return fast


def save_checkpoint(folder: Path, family: str, **kwargs) -> Path:
    """Write model (as `tiny_model` builds it), tokenizer and generation config into `folder`, which is returned."""
    model = tiny_model(family, **kwargs)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


def tiny_batch(*, rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random token ids, int64 [rows, length], without the special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, VOCAB_SIZE, (rows, length), generator=generator)
