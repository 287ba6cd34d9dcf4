"""d = logp_rollout - logp_actor, token by token, as a sum of three parts.

    d_weight = logp(rollout's weights, actor's activations)      - logp(actor)
    d_act    = logp(rollout's weights, rollout's activations)    - logp(rollout's weights, actor's activations)
    d_num    = logp that the rollout reported                    - logp(rollout's weights, rollout's activations)

The three forwards in between are the trainer's (see `legs` and `emulation`). Differences are taken in FP64 of FP32
logprobs, so the parts add up to d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PARTS = ("weight", "act", "num")


@dataclass(frozen=True)
class Parts:
    """Differences in nats, FP64 [tokens] each."""

    d: torch.Tensor
    weight: torch.Tensor
    act: torch.Tensor
    num: torch.Tensor

    def error(self) -> float:
        """Largest |d - (d_weight + d_act + d_num)| with every part rounded to FP32, as it is stored and logged."""
        total = self.weight.float() + self.act.float() + self.num.float()
        return (self.d.float() - total).abs().max().item() if self.d.numel() else 0.0

    def named(self) -> dict[str, torch.Tensor]:
        return {"d": self.d, "weight": self.weight, "act": self.act, "num": self.num}


def decompose(rollout: torch.Tensor, actor: torch.Tensor, weights: torch.Tensor, activations: torch.Tensor) -> Parts:
    """The parts from four logprobs of the same tokens, [tokens] each, any float dtype.

    rollout: as the engine reported them. actor, weights, activations: of the three forwards of a `legs.Path`.

    Raises:
        ValueError: shapes differ.
    """
    shapes = {tuple(t.shape) for t in (rollout, actor, weights, activations)}
    if len(shapes) > 1:
        raise ValueError(f"logprobs of the same tokens must have one shape; got {sorted(shapes)}")
    r, a, w, x = (t.detach().double() for t in (rollout, actor, weights, activations))
    # Each end is the next one's beginning, so the sum is that of d up to the rounding of FP64.
    return Parts(d=r - a, weight=w - a, act=x - w, num=r - x)


@dataclass(frozen=True)
class Summary:
    """Of one difference over tokens, in nats."""

    mean: float
    """Of the magnitude, as are the next three."""
    error: float
    """Standard error of `mean`; tokens of one sequence count as one observation."""
    p99: float
    max: float
    signed_mean: float
    share: float | None
    """Of the variance of d: cov(part, d) / var(d), so that the parts' shares add up to 1. None where d doesn't vary."""


def summarize(parts: Parts, sequence: torch.Tensor | None = None) -> dict[str, Summary]:
    """`d`, `weight`, `act`, `num` -> Summary, over the tokens where all are finite.

    sequence: int64 [tokens], which sequence each token belongs to; None: every token by itself.

    Raises:
        ValueError: no token is left.
    """
    finite = torch.stack(list(parts.named().values())).isfinite().all(0)
    if not bool(finite.any()):
        raise ValueError("no token has finite logprobs on both sides")
    if sequence is None:
        sequence = torch.arange(finite.numel(), device=finite.device)
    sequence = sequence.to(finite.device)[finite]
    d = parts.d[finite]
    return {name: _summary(values[finite], d, sequence) for name, values in parts.named().items()}


def nonfinite(parts: Parts) -> int:
    """How many tokens `summarize` leaves out."""
    return int((~torch.stack(list(parts.named().values())).isfinite().all(0)).sum())


def mean_and_error(values: torch.Tensor, sequence: torch.Tensor) -> tuple[float, float]:
    """Mean over tokens, and its standard error with sequences as clusters (a ratio estimator's linearized variance).

    values: FP64 [tokens]. sequence: int64 [tokens]. The error is NaN with a single sequence.
    """
    mean = values.mean()
    _, index = sequence.unique(return_inverse=True)
    count = int(index.max()) + 1
    if count < 2:
        return mean.item(), float("nan")
    sums = torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, index, values - mean)
    return mean.item(), ((count / (count - 1) * sums.square().sum()).sqrt() / values.numel()).item()


def mean_exp_abs(d: torch.Tensor) -> float:
    """mean exp|d| over finite tokens: NeMo-RL's `token_mult_prob_error`, on which it raises an alarm above 1.05."""
    d = d[d.isfinite()]
    return d.abs().exp().mean().item()


def k3(d: torch.Tensor) -> float:
    """Estimate of KL(rollout || actor) with tokens drawn from the rollout, nats: E[exp(-d) - 1 + d] (Schulman 2020)."""
    d = d[d.isfinite()]
    return (torch.expm1(-d) + d).mean().item()


def quantile(values: torch.Tensor, q: float) -> float:
    """The smallest value with at least a share q of the values at or below it. Any size, unlike torch.quantile."""
    rank = max(1, -int(-q * values.numel() // 1))
    return values.kthvalue(min(rank, values.numel())).values.item()


def _summary(values: torch.Tensor, d: torch.Tensor, sequence: torch.Tensor) -> Summary:
    size = values.abs()
    mean, error = mean_and_error(size, sequence)
    centred = d - d.mean()
    variance = centred.square().sum()
    share = ((values - values.mean()) * centred).sum() / variance if variance > 0 else None
    return Summary(
        mean=mean,
        error=error,
        p99=quantile(size, 0.99),
        max=size.max().item(),
        signed_mean=values.mean().item(),
        share=None if share is None else share.item(),
    )
