"""How much data a verdict stands on, and what may be said from that much."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quads_recipe.study.statistics import critical
from quads_recipe.words import plural

if TYPE_CHECKING:  # drawings need no model
    from quads_recipe.analysis.measure import ArmResult

FEW_RESPONSES = 16
"""Standard errors count a response as one observation; of fewer, they are themselves uncertain by 19% or
more, 1 / sqrt(2 (n - 1))."""
FEW_TOKENS = 500
"""Of fewer tokens, less than five lie above the 99th percentile, and one of them decides what it is."""


@dataclass(frozen=True)
class Evidence:
    """The least data of any rollout that was measured, in finite tokens and the responses that they belong to."""

    responses: int
    tokens: int

    @property
    def few(self) -> bool:
        """Too little for a verdict."""
        return self.responses < FEW_RESPONSES or self.tokens < FEW_TOKENS

    def caution(self) -> str | None:
        """The sentences that a verdict on too little data begins with."""
        if not self.few:
            return None
        return (
            f"Too little data for a verdict: a rollout has only {plural(self.tokens, 'token')} of "
            f"{plural(self.responses, 'response')}; it takes {FEW_TOKENS} tokens of {FEW_RESPONSES} responses. No "
            f"layer is named for quads.exclude{'' if percentiles(self.tokens) else ', and percentiles are left out'}. "
            "Before you decide, raise --prompts (--data needs twice as many) or --max-new."
        )


def evidence(results: Iterable[ArmResult]) -> Evidence:
    """The least of several results. Raises ValueError for none."""
    sizes = [_size(result) for result in results]
    return Evidence(min(size.responses for size in sizes), min(size.tokens for size in sizes))


def _size(result: ArmResult) -> Evidence:
    finite = result.parts.d.isfinite().cpu()
    return Evidence(result.tokens.sequence.cpu()[finite].unique().numel(), int(finite.sum()))


def percentiles(tokens: int) -> bool:
    """Whether that many tokens have a 99th percentile worth telling."""
    return tokens >= FEW_TOKENS


def has_percentiles(arm: Mapping) -> bool:
    """Whether an entry of `arms` or `ratios` in diagnose.json has them."""
    return percentiles(arm["tokens"] - arm["nonfinite"])


def errors_needed(responses: int) -> float:
    """Standard errors that a difference must exceed to be a clear one: two, or where responses are few the quantile of
    Student's t that a two-sided test at 5% takes. Infinite below two responses, which have no standard error."""
    if responses >= FEW_RESPONSES:
        return 2.0
    return critical(responses - 1) if responses > 1 else math.inf
