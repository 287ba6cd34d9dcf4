"""Logprobs of given responses in the trainer's forward (a plain Hugging Face model)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

_LOGITS = 1 << 27  # most logits (tokens x vocabulary) of one batch: half a GiB in FP32
_TOKENS = 1 << 13


@dataclass(frozen=True)
class Sample:
    """A prompt and a response, as token ids."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class Batch:
    """Samples padded on the right."""

    samples: tuple[Sample, ...]
    ids: torch.Tensor
    """int64 [B, T]"""
    mask: torch.Tensor
    """bool [B, T], False where padded"""
    row: torch.Tensor
    position: torch.Tensor
    """int64 [response tokens]: where the token lies that predicts each response token, sample after sample."""

    @property
    def targets(self) -> torch.Tensor:
        return self.ids[self.row, self.position + 1]

    @property
    def flat(self) -> torch.Tensor:
        """int64 [response tokens]: the predicting tokens among all B * T."""
        return self.row * self.ids.shape[1] + self.position


def batches(samples: Sequence[Sample], vocab_size: int, device: torch.device | str = "cpu") -> Iterator[Batch]:
    """The samples in their order, a bounded number at a time."""
    limit = max(1, min(_TOKENS, _LOGITS // vocab_size))
    chosen: list[Sample] = []
    longest = 0
    for sample in samples:
        longest = max(longest, len(sample))
        if chosen and longest * (len(chosen) + 1) > limit:
            yield make_batch(chosen, device)
            chosen, longest = [], len(sample)
        chosen.append(sample)
    if chosen:
        yield make_batch(chosen, device)


def make_batch(samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
    """One batch of samples; each has at least one prompt token."""
    width = max(map(len, samples))
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    rows, positions = [], []
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = torch.tensor([*sample.prompt, *sample.response])
        mask[row, : len(sample)] = True
        rows += [row] * len(sample.response)
        positions += range(len(sample.prompt) - 1, len(sample) - 1)
    index = (torch.tensor(part, dtype=torch.int64, device=device) for part in (rows, positions))
    return Batch(tuple(samples), ids.to(device), mask.to(device), *index)


@torch.no_grad()
def logprobs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of the response tokens, FP64 [response tokens], from FP32 log-softmax. bf16 models run under autocast, as verl's.

    Raises:
        ValueError: the model's logits are not finite.
    """
    return differentiable_logprobs(model, batch)


def differentiable_logprobs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """`logprobs`, with the graph of a backward pass unless gradients are switched off."""
    with _autocast(model):
        logits = model(input_ids=batch.ids, attention_mask=batch.mask.long(), use_cache=False).logits
    picked = logits[batch.row, batch.position].float().log_softmax(-1)
    result = picked.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    if not bool(result.isfinite().all()):
        raise ValueError("the model's logprobs are not finite; use --dtype bf16 or fp32, or check the checkpoint")
    return result.double()


def _autocast(model: nn.Module):
    parameter = next(model.parameters())
    if parameter.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device_type=parameter.device.type, dtype=parameter.dtype)
