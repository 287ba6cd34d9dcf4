"""Metrics under `quads/`, in log space. docs/metrics.md has the list with units and what to do when one is high.

verl reduces a metric over the updates of a step by a substring of its name, in this order: max, min, sum/total,
mean/avg (verl/trainer/ppo/v1/utils.py). Names here end accordingly.
"""

from __future__ import annotations

import torch


def logprob_difference(rollout: torch.Tensor, actor: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """d = logp_rollout - logp_actor over the response tokens, in nats.

    verl's `training/rollout_probs_diff_*` compare probabilities: at most 1, and near 0 for unlikely tokens.

    Args:
        rollout, actor: logprobs of the sampled tokens, [batch, response], any float dtype.
        mask: 1 where there is a token, [batch, response].
    """
    d = (rollout.float() - actor.float())[mask.bool()]
    finite = d.isfinite()
    metrics = {"quads/logprob_nonfinite_sum": float((~finite).sum())}
    d = d[finite]
    if d.numel() == 0:
        return metrics
    size = d.abs()
    metrics |= {
        "quads/logprob_abs_diff_mean": size.mean().item(),
        "quads/logprob_abs_diff_p99": torch.quantile(size, 0.99).item() if size.numel() < 1 << 24 else _p99(size),
        "quads/logprob_abs_diff_max": size.max().item(),
        "quads/logprob_diff_mean": d.mean().item(),
        # k3 estimate of KL(rollout || actor): E[exp(-d) - 1 + d] with tokens drawn from the rollout (Schulman 2020).
        "quads/logprob_k3_mean": (torch.expm1(-d) + d).mean().item(),
    }
    return metrics


def _p99(size: torch.Tensor) -> float:
    """The 99th percentile where torch.quantile refuses the size (above 2^24 elements)."""
    return size.kthvalue(max(1, round(0.99 * size.numel()))).values.item()


def merge_ranks(results: list[dict[str, float] | None]) -> dict[str, float]:
    """One dict from those of all trainer ranks, reduced by the rule of the name."""
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in (result or {}).items():
            values.setdefault(name, []).append(float(value))
    return {name: _reduce(name, many) for name, many in values.items()}


def _reduce(name: str, many: list[float]) -> float:
    if "max" in name:
        return max(many)
    if "min" in name:
        return min(many)
    if "sum" in name or "total" in name:
        return sum(many)
    return sum(many) / len(many)
