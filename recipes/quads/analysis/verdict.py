"""Plain words from the measurements, by explicit rules (docs/diagnose.md gives them with reasons)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quads_recipe.analysis.cost import Cost
from quads_recipe.analysis.decompose import mean_and_error, mean_exp_abs
from quads_recipe.analysis.evidence import Evidence, errors_needed, evidence, percentiles
from quads_recipe.analysis.measure import ArmResult, LeftOut
from quads_recipe.words import plural

ALARM = 1.05
"""On mean exp|d|: where NeMo-RL raises its alarm."""
MIN_REMOVED = 0.10
"""A layer is worth leaving out if it alone makes up this share of mean |d_act|."""
REMOVED_PER_COST = 2.0
"""... and removes this share per share of GEMM time added, where there is no larger ratio to compare with."""
ROUTING_SHARE = 0.25
"""Share of the mismatch that must come from routing flips before replaying them is advised."""


@dataclass(frozen=True)
class Candidate:
    """A rollout in NVFP4 that could be recommended."""

    arm: str
    ratio: float
    result: ArmResult

    @property
    def mean(self) -> float:
        return self.result.summary["d"].mean

    @property
    def name(self) -> str:
        return f"{self.arm} (ratio {self.ratio:g})" if self.arm == "quads" else self.arm


@dataclass(frozen=True)
class Finding:
    """One statement: a few words, and the sentences behind them."""

    title: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """`arm` and `ratio` are None if no NVFP4 rollout was measured."""

    headline: str
    findings: tuple[Finding, ...]
    cautions: tuple[str, ...] = ()
    """What to know before the headline, a reason to distrust it each."""
    arm: str | None = None
    ratio: float | None = None
    meets_target: bool | None = None
    target: str | None = None
    leave_out: tuple[str, ...] = ()
    cost: Cost | None = None


class Target:
    """How small the mismatch has to be.

    With arm fp8 measured: its mean |d|, since FP8 rollouts are used as they are. Without: mean exp|d| <= 1.05.
    """

    def __init__(self, arms: Mapping[str, ArmResult]):
        self._fp8 = arms["fp8"].summary["d"].mean if "fp8" in arms else None

    def met_by(self, candidate: Candidate) -> bool:
        if self._fp8 is not None:
            return candidate.mean <= self._fp8
        return mean_exp_abs(candidate.result.parts.d) <= ALARM

    def __str__(self) -> str:
        return self.beside(None)[0]

    def beside(self, mean: float | None) -> tuple[str, str]:
        """The target in words, and a mean |d| beside it: where they differ, their digits do too."""
        if self._fp8 is None:
            return f"mean exp|d| of {ALARM} (NeMo-RL's alarm)", "" if mean is None else f"{mean:.2g}"
        fp8, own = distinct([self._fp8, self._fp8 if mean is None else mean])
        return f"mean |d| of an FP8 rollout, {fp8} nats", own


def judge(
    arms: Mapping[str, ArmResult],
    series: Mapping[float, ArmResult],
    own: Mapping[float, ArmResult],
    left_out: Sequence[LeftOut],
    dtype: str,
    warnings: Sequence[str] = (),
) -> Verdict:
    """All rules in their order.

    series: ratios on common tokens. own: the same ratios, each on the tokens that its rollout sampled. left_out: on the
    common tokens, at the ratio that `choose` gives. warnings: of the prompts; they become cautions of the verdict.
    """
    data = evidence([*arms.values(), *own.values()])
    cautions = tuple(text for text in (data.caution(), *warnings) if text)
    findings = [f for f in (_origin(arms), _qat(arms)) if f]
    chosen = choose(arms, own)
    if chosen is None:
        return Verdict("No NVFP4 rollout was measured.", (*findings, _trust(arms, dtype, data)), cautions)
    target = Target(arms)
    met = target.met_by(chosen)
    leave = [] if data.few else worth_leaving_out(left_out, chosen, series)
    layers = _unjudged_layers() if data.few and left_out else _layers(leave, left_out, chosen, met)
    findings += [_ratio(chosen, series, own, met), _cost(chosen, arms), layers]
    findings += [f for f in (_routing(chosen.result, data), _symmetric(arms, dtype), _trust(arms, dtype, data)) if f]
    return Verdict(
        headline=_headline(chosen, target, met, data),
        findings=tuple(findings),
        cautions=cautions,
        arm=chosen.arm,
        ratio=chosen.ratio,
        meets_target=met,
        target=str(target),
        leave_out=() if met else tuple(module for found in leave for module in found.modules),
        cost=chosen.result.cost,
    )


def _headline(chosen: Candidate, target: Target, met: bool, data: Evidence) -> str:
    wanted, mean = target.beside(chosen.mean)
    if not met:
        start = "On so little data no" if data.few else "No"
        return f"{start} measured rollout reaches the target ({wanted}). Closest: {chosen.name}, {mean} nats."
    start = "On so little data the cheapest is" if data.few else "Use"
    return f"{start} arm {chosen.name}: mean |d| is {mean} nats, within the target ({wanted})."


def candidates(arms: Mapping[str, ArmResult], own: Mapping[float, ArmResult]) -> list[Candidate]:
    """NVFP4 rollouts from the cheapest to the dearest, on their own tokens. At equal cost (masks that save nothing) the
    larger ratio comes first, but naive before qat.

    Arm symmetric is never one: its agreement needs both sides to round every activation alike.
    """
    found = [Candidate("naive", 0.0, arms["naive"])] if "naive" in arms else []
    if own:
        found += [Candidate(_arm_at(ratio), ratio, result) for ratio, result in own.items()]
    else:
        ratios = {"qat": 0.0, "quads": 0.5, "quads_full": 1.0}
        found += [Candidate(arm, ratio, arms[arm]) for arm, ratio in ratios.items() if arm in arms]
    return sorted(found, key=lambda c: (c.result.cost.products, -c.ratio))  # stable: naive stays before qat


def choose(arms: Mapping[str, ArmResult], own: Mapping[float, ArmResult]) -> Candidate | None:
    """The first candidate that meets the target; if none does, the one of least mean |d|."""
    found = candidates(arms, own)
    target = Target(arms)
    return next((c for c in found if target.met_by(c)), min(found, key=lambda c: c.mean, default=None))


def worth_leaving_out(
    left_out: Sequence[LeftOut], chosen: Candidate, series: Mapping[float, ArmResult]
) -> list[LeftOut]:
    """Layers that remove at least MIN_REMOVED of mean |d_act|, beyond two standard errors, and more per added GEMM time
    than a ratio of 1 would. The largest gain first."""
    rate = REMOVED_PER_COST
    if 1.0 in series and chosen.ratio < 1:
        full, now = series[1.0], series[chosen.ratio]
        gain = 1 - full.summary["act"].mean / now.summary["act"].mean
        rate = gain / (full.cost.products - now.cost.products)
    found = [
        one
        for one in left_out
        if one.removed >= MIN_REMOVED
        and one.removed > 2 * one.error
        and one.removed >= rate * (one.cost.products - chosen.result.cost.products)
    ]
    return sorted(found, key=lambda one: -one.removed)


def _arm_at(ratio: float) -> str:
    return {0.0: "qat", 1.0: "quads_full"}.get(ratio, "quads")


def _origin(arms: Mapping[str, ArmResult]) -> Finding | None:
    arm = next((a for a in ("naive", "qat", "quads", "symmetric", "fp8") if a in arms), None)
    if arm is None:
        return None
    summary = arms[arm].summary
    d = summary["d"]
    if d.max == 0:
        return Finding("Where it comes from", f"Under arm {arm} rollout and actor agree on every token.")
    if d.share is None:
        text = f"Under arm {arm}, d is {d.signed_mean:.2g} nats on every token, which has no variance to be shared out."
        return Finding("Where it comes from", f"{text} Give more tokens: raise --prompts or --max-new.")
    shares = ", ".join(
        f"{what} {_percent(summary[part].share)}"
        for part, what in (("weight", "the weights"), ("act", "the activations"), ("num", "the engine's arithmetic"))
    )
    tail = f"99% of tokens below {d.p99:.2g}, " if percentiles(evidence([arms[arm]]).tokens) else ""
    return Finding(
        "Where it comes from",
        f"Under arm {arm}, d has mean magnitude {d.mean:.2g} nats ({tail}largest {d.max:.2g}). Shares of its "
        f"variance: {shares}.",
    )


def _qat(arms: Mapping[str, ArmResult]) -> Finding | None:
    if not {"naive", "qat"} <= arms.keys():
        return None
    state = "exactly zero" if arms["qat"].summary["weight"].max == 0 else "not zero, which is a defect"
    rest = f"d_weight is {state}: the rest comes from the activations and the engine."
    return Finding("Fake-quantized weights", f"{_change(arms['naive'], arms['qat'])} {rest}")


def _ratio(chosen: Candidate, series: Mapping[float, ArmResult], own: Mapping[float, ArmResult], met: bool) -> Finding:
    if not series:
        return Finding("Residual compensation", "No ratios were measured; give --ratios for advice on the ratio.")
    means = distinct([own[ratio].summary["d"].mean for ratio in sorted(own)])
    steps = ", ".join(f"{ratio:g}: {mean}" for ratio, mean in zip(sorted(own), means, strict=True))
    text = f"Mean |d| by ratio: {steps} nats. "
    if met and chosen.ratio > 0:
        text += f"{chosen.ratio:g} is the smallest ratio that meets the target."
    elif met:
        text += "No compensation is needed to meet the target."
    else:
        text += f"None meets the target; ratio {chosen.ratio:g} comes closest."
    if 0.0 in series and 1.0 in series and series[0.0].summary["act"].mean > 0:
        removed = 1 - series[1.0].summary["act"].mean / series[0.0].summary["act"].mean
        text += f" On the same tokens ratio 1 removes {_share(removed)} of mean |d_act|."
    return Finding("Residual compensation", text)


def _cost(chosen: Candidate, arms: Mapping[str, ArmResult]) -> Finding:
    mine = chosen.result.cost
    text = (
        f"At peak rates the matrix products of a rollout with {chosen.name} take {mine.products:.0%} of BF16's time"
        f"{f' ({mine.residual / mine.products:.0%} of that for the residual)' if mine.residual else ''} and read "
        f"{mine.weights:.0%} of its weight bytes."
    )
    if "fp8" in arms:
        other = arms["fp8"].cost
        text += f" FP8: {other.products:.0%} and {other.weights:.0%}."
    return Finding(
        "What it costs", text + " Decoding is bound by the bytes, prefill by the products; counted, not timed."
    )


def _unjudged_layers() -> Finding:
    return Finding("Which layers to leave out", "Not judged: too little data to tell one layer's share from chance.")


def _layers(leave: Sequence[LeftOut], measured: Sequence[LeftOut], chosen: Candidate, met: bool) -> Finding:
    title = "Which layers to leave out"
    if not measured:
        return Finding(title, "Not measured.")
    text = "None: the target is met. " if met else ""
    if not leave:
        most = max(measured, key=lambda one: one.removed)
        if most.removed <= 0:
            return Finding(title, f"{text}None pays: none lowers mean |d_act| when it alone is left out.")
        text += f"None pays: the most that one alone removes is {_share(most.removed)} of mean |d_act| ({most.unit})."
        return Finding(title, text)
    parts = "; ".join(
        f"{one.unit} removes {one.removed:.0%} of mean |d_act| for "
        f"{one.cost.products - chosen.result.cost.products:+.1%} of GEMM time"
        for one in leave[:4]
    )
    lead = "The first to leave out if you want less" if met else "Leave out by quads.exclude"
    return Finding(title, f"{text}{lead}, each measured alone: {parts}.")


def _routing(result: ArmResult, data: Evidence) -> Finding | None:
    share = result.flip_share()
    if share is None:
        return None
    flips = result.flips
    own = flips.layers.any(-1).double().mean().item()
    text = f"Under the recommended rollout {own:.1%} of tokens go to other experts in some layer than in the actor. "
    text += (
        f"With the actor's experts replayed, mean |d_weight + d_act| would be {_share(share)} lower. "
        if share > 0
        else "Replaying the actor's experts would not lower mean |d_weight + d_act|. "
    )
    if data.few:
        return Finding("Routing", f"{text}Too little data to advise for or against replaying.")
    text += (
        "Replaying the rollout's routing in the trainer is worth more than a larger ratio here."
        if share >= ROUTING_SHARE
        else "Routing flips are not the main cause."
    )
    return Finding("Routing", text)


def _symmetric(arms: Mapping[str, ArmResult], dtype: str) -> Finding | None:
    if "symmetric" not in arms:
        return None
    mean = arms["symmetric"].summary["d"].mean
    text = f"Arm symmetric has mean |d| {mean:.2g} nats. "
    text += (
        "In FP32 both sides round every activation alike, which says nothing about training in BF16 with other "
        "kernels: run with --dtype bf16 before you trust it."
        if dtype == "fp32"
        else "It needs the trainer to round every activation as the engine does; small differences between the two "
        "flip codes, so expect more with other kernels."
    )
    return Finding("The symmetric arm", text)


def _trust(arms: Mapping[str, ArmResult], dtype: str, data: Evidence) -> Finding:
    some = next(iter(arms.values()))
    tokens, responses = plural(some.parts.d.numel(), "token"), plural(len(some.tokens.samples), "response")
    text = f"{tokens} of {responses} per arm, compute dtype {dtype}."
    if data.few:
        text = (
            f"Hardly: a rollout has only {plural(data.tokens, 'token')} of {plural(data.responses, 'response')}, "
            f"compute dtype {dtype}. Read means with their standard errors."
        )
    if "bf16" in arms:
        text += f" The floor, a BF16 rollout against a BF16 trainer, is {arms['bf16'].summary['d'].mean:.2g} nats here."
    return Finding("How far to trust this", text)


def distinct(values: Sequence[float]) -> list[str]:
    """With two significant digits, or with as many, up to five, as it takes to tell apart those that differ."""
    for digits in range(2, 6):
        shown = [f"{value:.{digits}g}" for value in values]
        if len(set(shown)) == len(set(values)):
            break
    return shown


def _change(before: ArmResult, after: ArmResult) -> str:
    """What becomes of mean |d| on the same tokens, as a sentence."""
    first, second = before.summary["d"].mean, after.summary["d"].mean
    shown = distinct([first, second])
    if shown[0] == shown[1]:
        return f"Mean |d| stays at {shown[0]} nats."
    error, responses = _error_of_difference(before, after)
    needed = errors_needed(responses)
    if not abs(second - first) > needed * error:  # also where one response gives no error
        times = "two" if needed == 2 else f"{needed:.1f}"
        doubt = f"within {times} standard errors, {needed * error:.2g}" if math.isfinite(error) else "of one response"
        return f"Mean |d| is {shown[0]} nats without and {shown[1]} with them: no clear difference ({doubt})."
    return f"Mean |d| goes from {shown[0]} to {shown[1]} nats ({second / first - 1:+.0%})."


def _error_of_difference(before: ArmResult, after: ArmResult) -> tuple[float, int]:
    """Standard error of the difference between two means of |d| on the same tokens, and the responses behind it."""
    difference = after.parts.d.abs() - before.parts.d.abs()
    finite = difference.isfinite()
    sequence = after.tokens.sequence.to(difference.device)[finite]
    return mean_and_error(difference[finite], sequence)[1], sequence.unique().numel()


def _percent(share: float) -> str:
    return f"{round(share * 100)}%"


def _share(share: float) -> str:
    """A positive share in percent, never 0."""
    return _percent(share) if share >= 0.005 else "less than 1%"
