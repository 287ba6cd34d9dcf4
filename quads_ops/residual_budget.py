"""One budget of extra GEMM FLOPs for the residuals of many layers: which of their blocks are worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Demand:
    """The entries (blocks or channels) of one quantized input that may be compensated."""

    score: torch.Tensor
    """FP32 [masks, entries]: what compensating the entry is worth for one token that meets it."""
    width: float
    """Output channels that an entry is multiplied with for each such token."""
    traffic: torch.Tensor
    """FP32 [masks]: tokens that meet each mask; only ratios matter. An expert has its own."""

    @property
    def cost(self) -> torch.Tensor:
        """FP64 [masks]: relative FLOPs of compensating one entry."""
        return self.traffic.double() * self.width


def spend(demands: Sequence[Demand], ratio: float) -> list[torch.Tensor]:
    """The entries of largest score per FLOP that `ratio` of the FLOPs of all entries pays for: bool like each score.

    Greedy: taken in falling order of score per FLOP, without those that do not fit into what is left. So the budget is
    never exceeded, and what is left of it pays for no other entry. Among equals the earlier demand, mask and entry
    comes first.

    Raises:
        ValueError: a score or traffic that is not finite.
    """
    if not demands:
        return []
    gains = torch.cat([demand.score.double().div(demand.width).flatten() for demand in demands])
    costs = torch.cat([demand.cost.unsqueeze(-1).expand(demand.score.shape).flatten() for demand in demands])
    if not bool(gains.isfinite().all() & costs.isfinite().all()):
        raise ValueError("a score or a number of tokens is not finite, so no residual budget can be spent by it")
    order = gains.sort(descending=True, stable=True).indices
    left = ratio * float(costs.sum()) * (1 + 1e-9)  # not to lose an entry to the rounding of a sum
    chosen = []
    for index, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        if cost <= left:
            chosen.append(index)
            left -= cost
    taken = torch.zeros_like(gains, dtype=torch.bool)
    taken[chosen] = True
    sizes = [demand.score.numel() for demand in demands]
    return [part.view(demand.score.shape) for part, demand in zip(taken.split(sizes), demands, strict=True)]
