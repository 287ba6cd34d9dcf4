"""The tokens on which rollout and actor differ most, and why."""

from __future__ import annotations

from dataclasses import dataclass

from quads_recipe.analysis.measure import ArmResult

CAUSES = {
    "routing": "another expert was chosen",
    "weights": "rounding of the weights",
    "activations": "rounding of the activations",
    "engine": "the engine's own arithmetic",
}
_CONTEXT = 24


@dataclass(frozen=True)
class TokenReport:
    """One token of a response. Differences and logprobs in nats."""

    arm: str
    sample: int
    position: int
    """In the response, from 0."""
    token: str
    context: str
    """What comes right before it, prompt included."""
    rollout: float
    actor: float
    d: float
    d_weight: float
    d_act: float
    d_num: float
    flipped_layers: tuple[int, ...]
    """Router layers, counted from 0, in which the predicting token's experts changed."""
    flips_before: int
    """Earlier tokens of the sequence whose experts changed."""
    replayed: float | None
    """d_weight + d_act when the actor's experts are used; None for a dense model."""
    cause: str
    """A key of CAUSES, by the rules of `cause_of`."""


def cause_of(weight: float, act: float, num: float, replayed: float | None, flips: int) -> str:
    """The rules, in this order.

    1. |d_num| is larger than |d_weight + d_act|: `engine`.
    2. Experts changed, at this token or before it, and using the actor's experts halves |d_weight + d_act|: `routing`.
    3. The larger of |d_weight| and |d_act|: `weights` or `activations`.
    """
    emulated = weight + act
    if abs(num) > abs(emulated):
        return "engine"
    if replayed is not None and flips and abs(replayed) <= abs(emulated) / 2:
        return "routing"
    return "weights" if abs(weight) > abs(act) else "activations"


def causes(result: ArmResult) -> list[str]:
    """The cause for every token."""
    parts = [part.tolist() for part in (result.parts.weight, result.parts.act, result.parts.num)]
    flips = result.flips
    if flips is None:
        return [cause_of(w, a, n, None, 0) for w, a, n in zip(*parts, strict=True)]
    counts = (flips.layers.sum(-1) + flips.before).tolist()
    rows = zip(*parts, flips.replayed.tolist(), counts, strict=True)
    return [cause_of(*row) for row in rows]


def worst(result: ArmResult, tokenizer, count: int) -> list[TokenReport]:
    """The `count` tokens of largest |d|, the largest first."""
    order = result.parts.d.abs().argsort(descending=True, stable=True)[:count].tolist()
    reasons = causes(result)
    starts = result.tokens.sequence.bincount(minlength=len(result.tokens.samples)).cumsum(0)
    reports = []
    for index in order:
        number = int(result.tokens.sequence[index])
        sample = result.tokens.samples[number]
        position = index - int(starts[number]) + len(sample.response)
        reports.append(_report(result, index, number, position, reasons[index], tokenizer))
    return reports


def _report(result: ArmResult, index: int, number: int, position: int, cause: str, tokenizer) -> TokenReport:
    sample, parts, flips = result.tokens.samples[number], result.parts, result.flips
    before = [*sample.prompt, *sample.response[:position]][-_CONTEXT:]
    rollout = float(result.tokens.logprobs[index])
    return TokenReport(
        arm=result.arm,
        sample=number,
        position=position,
        token=tokenizer.decode([sample.response[position]]),
        context=tokenizer.decode(before),
        rollout=rollout,
        actor=rollout - float(parts.d[index]),
        d=float(parts.d[index]),
        d_weight=float(parts.weight[index]),
        d_act=float(parts.act[index]),
        d_num=float(parts.num[index]),
        flipped_layers=() if flips is None else tuple(flips.layers[index].nonzero().flatten().tolist()),
        flips_before=0 if flips is None else int(flips.before[index]),
        replayed=None if flips is None else float(flips.replayed[index]),
        cause=cause,
    )
