"""Trains the demo's policy from nothing: a Qwen3-MoE of about a million parameters.

Two stages of supervised training. Clean demonstrations teach the arithmetic; then an imperfect demonstrator, whose
running sums are sometimes off, makes the policy sample mistakes while its best guess stays right. So sampling is right
in 0.4 to 0.5 of the cases and greedy decoding in about 0.8: reinforcement learning has something to gain quickly.

Everything is counted in steps and runs on one thread, so the same seed on the same kind of machine gives the same
weights bit for bit. On another kind of machine the sums round differently and the figures agree only closely.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quads_recipe.policy.task import MAX_RESPONSE_TOKENS, Problem, chat, problems, worked_answer
from quads_recipe.policy.tokenizer import VOCAB_SIZE, build_tokenizer

IGNORE = -100


@dataclass(frozen=True)
class TrainingSettings:
    """`layers` of the model; `*_steps`: optimizer steps of each stage; `*_lr`: peak learning rate, falling linearly to
    a tenth; `error_rate`: probability of a wrong running sum in the second stage; `batch_size` in sequences."""

    seed: int = 0
    layers: int = 4
    clean_steps: int = 1600
    imperfect_steps: int = 1400
    clean_lr: float = 3e-3
    imperfect_lr: float = 2e-3
    error_rate: float = 0.25
    batch_size: int = 64
    warmup_steps: int = 30


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are rounded in an order that depends on the number of threads; with one it is always the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_model(seed: int, layers: int = 4):
    """A fresh fp32 Qwen3MoeForCausalLM, initialised from `seed`. 4 layers have 996,736 parameters."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        rope_theta=10000.0,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    return model


def train(settings: TrainingSettings, report: Callable[[str], None] = print):
    """Returns (model fp32, tokenizer) after both stages. Reproducible in every bit inside `one_thread()`."""
    model, tokenizer = build_model(settings.seed, settings.layers), build_tokenizer()
    rng = random.Random(settings.seed)
    stages = (
        ("demonstrations", settings.clean_steps, settings.clean_lr, 0.0),
        ("imperfect_demonstrations", settings.imperfect_steps, settings.imperfect_lr, settings.error_rate),
    )
    for name, steps, lr, error_rate in stages:
        data = problems(name, steps * settings.batch_size, settings.seed)
        examples = [encode_example(tokenizer, p, worked_answer(p.prompt, error_rate, rng)) for p in data]
        _train_stage(model, name, _batches(examples, settings.batch_size), steps, lr, settings, report)
    return model, tokenizer


def encode_example(tokenizer, problem: Problem, answer: str) -> tuple[list[int], list[int]]:
    """(prompt ids, response ids): the chat template's prompt, and the answer ended with <eos>."""
    prompt = prompt_ids(tokenizer, problem)
    return prompt, tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]


def prompt_ids(tokenizer, problem: Problem) -> list[int]:
    """Token ids of the chat template's prompt, generation prompt included."""
    text = tokenizer.apply_chat_template(chat(problem.prompt), add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _batches(examples: list, size: int) -> Iterator[list]:
    """Batches of `size` in order, each sorted by length for `_loss_and_gradient`."""
    for first in range(0, len(examples), size):
        yield sorted(examples[first : first + size], key=lambda e: len(e[0]) + len(e[1]))


def _collate(batch: list) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), int64 [B, L], right-padded; only responses have labels. Causal attention needs no mask here."""
    length = max(len(p) + len(r) for p, r in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    for i, (prompt, response) in enumerate(batch):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor(prompt + response)
        labels[i, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def _train_stage(model, name, batches, steps, lr, settings, report) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    start = time.monotonic()
    for step, batch in enumerate(batches):
        warmup = min(1.0, (step + 1) / settings.warmup_steps)
        optimizer.param_groups[0]["lr"] = lr * warmup * (1 - 0.9 * step / steps)
        optimizer.zero_grad()
        loss = _loss_and_gradient(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            report(f"{name}: step {step + 1}/{steps}, loss {loss:.4f}, {time.monotonic() - start:.0f} s")


def _loss_and_gradient(model, batch: list, micro: int = 32) -> float:
    """Mean loss over the batch's response tokens, its gradient left in the parameters.

    Goes through the sorted batch in parts, which saves padding and stays in the cache.
    """
    tokens = sum(len(response) for _, response in batch)
    total = 0.0
    for first in range(0, len(batch), micro):
        ids, labels = _collate(batch[first : first + micro])
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
        )
        (loss / tokens).backward()
        total += loss.item() / tokens
    return total


@torch.no_grad()
def round_to_bf16(model) -> None:
    """Rounds every weight to bf16, as it will be stored, and keeps computing in the model's dtype."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


@dataclass(frozen=True)
class PassRate:
    """Share of right answers on held-out problems, with the standard error over problems."""

    mean: float
    standard_error: float


def pass_rate(model, tokenizer, n_problems: int = 512, samples: int = 4, greedy: bool = False, seed: int = 0):
    """pass@1 on held-out problems: sampling at temperature 1 (`samples` each), or greedy decoding (one each)."""
    samples = 1 if greedy else samples
    chosen = problems("heldout", n_problems)
    responses = sample_responses(model, tokenizer, [p for p in chosen for _ in range(samples)], greedy, seed)
    from quads_recipe.reward import compute_score

    scores = torch.tensor(
        [
            compute_score(p.entry["metadata"]["source_dataset"], responses[i * samples + j], p.answer)
            for i, p in enumerate(chosen)
            for j in range(samples)
        ]
    )
    per_problem = scores.view(n_problems, samples).mean(1)
    return PassRate(per_problem.mean().item(), (per_problem.std() / n_problems**0.5).item())


@torch.no_grad()
def sample_responses(model, tokenizer, chosen: list[Problem], greedy: bool, seed: int) -> list[str]:
    """One response per problem, as text."""
    model.eval()
    torch.manual_seed(seed)
    encoded = [prompt_ids(tokenizer, p) for p in chosen]
    length = max(map(len, encoded))
    ids = torch.tensor([[tokenizer.pad_token_id] * (length - len(e)) + e for e in encoded])
    mask = torch.tensor([[0] * (length - len(e)) + [1] * len(e) for e in encoded])
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=MAX_RESPONSE_TOKENS, **how)
    return tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
