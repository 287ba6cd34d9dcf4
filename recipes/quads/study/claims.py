"""The paper's claims, each judged by a test over the seeds of this study.

Every claim is about figures of runs (results.Values: metric -> arm -> seed -> value). Runs of one seed share prompts
and starting policy, so arms are compared by a paired t test over the seeds that both have, or by Welch's test where
they share fewer than two. "Training reward" is that of the last third of the steps. The level is 5%, two-sided:

- shown: the effect has the claimed sign and p < 0.05. An equality is shown by two one-sided tests against a margin.
- contradicted here: p < 0.05 with the opposite sign; an equality: different at p < 0.05 and by more than the margin.
- not shown: neither. not testable: an arm or a metric is missing, or there is one seed.

A claim of several parts is shown if all parts are, contradicted if one is. Nothing is corrected for the number of
claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quads_recipe.study import statistics
from quads_recipe.study.statistics import Test
from quads_recipe.words import plural

LEVEL = 0.05
MARGIN = 0.03
"""Rewards (shares of right answers) that differ by less count as equal. The paper's BF16 and QUADS differ by 0.003."""

SHOWN, NOT_SHOWN, CONTRADICTED, NOT_TESTABLE = "shown", "not shown", "contradicted here", "not testable"
ORDER = ("bf16", "quads_full", "quads", "qat", "naive")

SECOND_SEED = "second seed"

Values = Mapping[str, Mapping[str, Mapping[int, float]]]


@dataclass(frozen=True)
class Part:
    """One comparison: what was compared, in words with numbers; the test where there could be one.

    For drawings: `label` in a few words, `scale` ("factor", "difference" or ""), and on that scale the estimate `value`
    with its 95% interval, where there is one. `claimed`: where the claim has it ("above", "below", "within").
    `lacks`: what keeps it from being tested: names of arms without the figure, or SECOND_SEED.
    """

    text: str
    status: str
    test: Test | None = None
    label: str = ""
    scale: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    claimed: str = ""
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """A claim and what became of it."""

    name: str
    claim: str
    paper: str
    status: str
    parts: list[Part] = field(default_factory=list)


def judge(values: Values, start: Mapping[str, Sequence[float]]) -> list[Outcome]:
    """All claims. start: arm -> score of the starting policy on each held-out problem, in the arm's rollout engine."""
    return [
        _outcome(name, claim, paper, parts(values, start))
        for name, (claim, paper, parts) in CLAIMS.items()
    ]  # fmt: skip


def _outcome(name: str, claim: str, paper: str, parts: list[Part]) -> Outcome:
    return Outcome(name, claim, paper, overall([part.status for part in parts]), parts)


def overall(statuses: Sequence[str]) -> str:
    """The status of a claim from those of its parts."""
    for status in (CONTRADICTED, NOT_TESTABLE, NOT_SHOWN):
        if status in statuses:
            return status
    return SHOWN if statuses else NOT_TESTABLE


# -- comparisons


def below(values: Values, metric: str, low: str, high: str, what: str) -> Part:
    """Claim: `metric` of arm `low` is below that of arm `high`, as a difference."""
    pair = _common(values, metric, low, high)
    if pair is None:
        return _missing(values, metric, (low, high), what)
    a, b = pair
    numbers = f"{what}: {low} {_spread(a)}, {high} {_spread(b)}"
    shown = {"label": f"{low} - {high}, {what}", "scale": "difference", "claimed": "below"}
    test = _test(a, b)
    if test is None:
        return Part(f"{numbers}; one seed", NOT_TESTABLE, lacks=(SECOND_SEED,), value=_mean(a) - _mean(b), **shown)
    shown |= {"value": test.effect, "low": test.low, "high": test.high}
    return Part(f"{numbers}; difference {_effect(test)}; {test.describe()}", _directed(test, -1), test, **shown)


def ratio_below(values: Values, metric: str, low: str, high: str, what: str) -> Part:
    """As `below` for positive figures that differ by factors: the test is on logarithms, so the factor is that of the
    geometric means."""
    pair = _common(values, metric, low, high)
    if pair is None:
        return _missing(values, metric, (low, high), what)
    a, b = pair
    numbers = f"{what}: {low} {_spread(a)}, {high} {_spread(b)}"
    if min(*a.values(), *b.values()) <= 0:
        return Part(f"{numbers}; a figure is not above 0, so there is no factor", NOT_TESTABLE)
    shown = {"label": f"{high} / {low}, {what}", "scale": "factor", "claimed": "above"}
    test = _test({s: math.log(v) for s, v in a.items()}, {s: math.log(v) for s, v in b.items()})
    if test is None:
        factor = math.exp(_mean({s: math.log(v) for s, v in b.items()}) - _mean({s: math.log(v) for s, v in a.items()}))
        return Part(
            f"{numbers}, {factor:.2f} times that; one seed", NOT_TESTABLE, lacks=(SECOND_SEED,), value=factor, **shown
        )
    shown |= {"value": math.exp(-test.effect), "low": math.exp(-test.high), "high": math.exp(-test.low)}
    times = f"{shown['value']:.2f} times that (95%: {shown['low']:.2f} to {shown['high']:.2f})"
    return Part(f"{numbers}, {times}; {test.describe()}", _directed(test, -1), test, **shown)


def equal(values: Values, metric: str, arm: str, base: str, what: str, margin: float = MARGIN) -> Part:
    """Claim: `metric` of both arms is the same within `margin`."""
    pair = _common(values, metric, arm, base)
    if pair is None:
        return _missing(values, metric, (arm, base), what)
    a, b = pair
    numbers = f"{what}: {arm} {_spread(a)}, {base} {_spread(b)}"
    shown = {"label": f"{arm} - {base}, {what}", "scale": "difference", "claimed": "within"}
    test = _test(a, b)
    if test is None:
        value = _mean(a) - _mean(b)
        return Part(
            f"{numbers}, difference {value:+.3f}; one seed", NOT_TESTABLE, lacks=(SECOND_SEED,), value=value, **shown
        )
    p = statistics.equivalence(test, margin)
    status = SHOWN if p < LEVEL else NOT_SHOWN
    if test.p < LEVEL and abs(test.effect) > margin:
        status = CONTRADICTED
    shown |= {"value": test.effect, "low": test.low, "high": test.high}
    inside = f"within {margin:g}: p = {statistics.format_p(p)}; different: {test.describe()}"
    return Part(f"{numbers}; difference {_effect(test)}; {inside}", status, test, **shown)


def negative(values: Values, metric: str, arm: str, what: str) -> Part:
    """Claim: `metric` of an arm is below 0."""
    by_seed = values.get(metric, {}).get(arm)
    if not by_seed:
        return _missing(values, metric, (arm,), what)
    shown = {"label": what, "scale": "difference", "claimed": "below"}
    if len(by_seed) < 2:
        value = _mean(by_seed)
        return Part(f"{what}: {value:+.3f}; one seed", NOT_TESTABLE, lacks=(SECOND_SEED,), value=value, **shown)
    test = statistics.one_sample(list(by_seed.values()))
    shown |= {"value": test.effect, "low": test.low, "high": test.high}
    return Part(f"{what}: {_effect(test)}; {test.describe()}", _directed(test, -1), test, **shown)


def exactly_zero(values: Values, metric: str, arm: str, what: str) -> Part:
    """Claim: a figure is 0 in every run. A single other value contradicts it, so one seed is enough."""
    by_seed = values.get(metric, {}).get(arm)
    if not by_seed:
        return _missing(values, metric, (arm,), what)
    largest = max(by_seed.values())
    text = f"{what}: {'exactly 0' if largest == 0 else f'up to {largest:.3g}'} in {plural(len(by_seed), 'seed')}"
    return Part(text, SHOWN if largest == 0 else CONTRADICTED)


def _directed(test: Test, sign: int) -> str:
    if test.p >= LEVEL:
        return NOT_SHOWN
    return SHOWN if test.effect * sign > 0 else CONTRADICTED


def _common(values: Values, metric: str, a: str, b: str) -> tuple[dict[int, float], dict[int, float]] | None:
    """The figures of the seeds that both arms have; of all seeds where they share fewer than two but have two each."""
    first, second = (dict(values.get(metric, {}).get(arm, {})) for arm in (a, b))
    if not first or not second:
        return None
    shared = first.keys() & second.keys()
    if len(shared) < 2 and min(len(first), len(second)) >= 2:
        return first, second
    return ({s: first[s] for s in shared}, {s: second[s] for s in shared}) if shared else (first, second)


def _test(a: Mapping[int, float], b: Mapping[int, float]) -> Test | None:
    if min(len(a), len(b)) < 2:
        return None
    if a.keys() == b.keys():
        seeds = sorted(a)
        return statistics.paired([a[s] for s in seeds], [b[s] for s in seeds])
    return statistics.welch(list(a.values()), list(b.values()))


def _missing(values: Values, metric: str, arms: Sequence[str], what: str) -> Part:
    lacking = [arm for arm in arms if not values.get(metric, {}).get(arm)]
    return Part(f"{what}: no figure of {' and '.join(lacking)}", NOT_TESTABLE, lacks=tuple(lacking))


def _mean(by_seed: Mapping[int, float]) -> float:
    return statistics.mean_error(list(by_seed.values()))[0]


def _spread(by_seed: Mapping[int, float]) -> str:
    mean, error = statistics.mean_error(list(by_seed.values()))
    return f"{mean:.3g}" if math.isnan(error) else f"{mean:.3g} \u00b1 {error:.1g}"


def _effect(test: Test) -> str:
    return f"{test.effect:+.3f} (95%: {test.low:+.3f} to {test.high:+.3f})"


# -- the claims


def _start_gap(values: Values, start: Mapping[str, Sequence[float]]) -> list[Part]:
    what = "pass@1 of the starting policy"
    if lacking := [arm for arm in ("naive", "bf16") if arm not in start]:
        return [Part(f"{what}: was not evaluated in both engines", NOT_TESTABLE, lacks=tuple(lacking))]
    test = statistics.paired(start["naive"], start["bf16"], unit="problems")
    means = [statistics.mean_error(start[arm])[0] for arm in ("naive", "bf16")]
    text = f"{what}: in NVFP4 {means[0]:.3f}, in BF16 {means[1]:.3f}; gap {_effect(test)}; {test.describe()}"
    shown = {"label": "naive - bf16, before training", "scale": "difference", "claimed": "below"}
    return [Part(text, _directed(test, -1), test, value=test.effect, low=test.low, high=test.high, **shown)]


def _naive_reward(values: Values, start: Mapping) -> list[Part]:
    return [
        below(values, "reward_last", "naive", "bf16", "training reward"),
        below(values, "own", "naive", "bf16", "held-out, own engine"),
    ]


def _naive_learning(values: Values, start: Mapping) -> list[Part]:
    return [below(values, "in_bf16", "naive", "bf16", "held-out, both in BF16")]


def _naive_collapse(values: Values, start: Mapping) -> list[Part]:
    return [negative(values, "gain", "naive", "naive, reward of the last third minus the first")]


def _qat_weight(values: Values, start: Mapping) -> list[Part]:
    return [
        exactly_zero(values, "part_weight_max", "qat", "largest |d_weight| of arm qat"),
        ratio_below(values, "d_mean", "qat", "naive", "mean |d|"),
    ]


def _rac(values: Values, start: Mapping) -> list[Part]:
    return [
        ratio_below(values, "d_mean", "quads", "qat", "mean |d|"),
        ratio_below(values, "d_mean", "quads_full", "quads", "mean |d|"),
    ]


def _largest(values: Values, start: Mapping) -> list[Part]:
    pairs = (("bf16", "quads_full"), ("quads_full", "quads"), ("quads", "naive"))
    return [ratio_below(values, "d_max", low, high, "largest |d| of a step") for low, high in pairs]


def _symmetric(values: Values, start: Mapping) -> list[Part]:
    return [ratio_below(values, "d_mean", "bf16", "symmetric", "mean |d|")]


def _symmetric_qat(values: Values, start: Mapping) -> list[Part]:
    return [ratio_below(values, "d_mean", "qat", "symmetric", "mean |d|")]


def _equal_reward(arm: str) -> Callable[[Values, Mapping], list[Part]]:
    def parts(values: Values, start: Mapping) -> list[Part]:
        return [
            equal(values, "reward_last", arm, "bf16", "training reward"),
            equal(values, "own", arm, "bf16", "held-out, own engine"),
        ]

    return parts


def _rac_reward(values: Values, start: Mapping) -> list[Part]:
    return [below(values, "own", "qat", "quads", "held-out, own engine")]


def _below_fp8(values: Values, start: Mapping) -> list[Part]:
    return [ratio_below(values, "d_mean", "quads_full", "fp8", "mean |d|")]


def _ordering(values: Values, start: Mapping) -> list[Part]:
    pairs = zip(ORDER, ORDER[1:], strict=False)
    return [ratio_below(values, "d_mean", low, high, "mean |d|") for low, high in pairs]


# name: (claim, what the paper has, the comparisons)
CLAIMS: dict[str, tuple[str, str, Callable[[Values, Mapping], list[Part]]]] = {
    "ordering": (
        "The mismatch is ordered bf16 < quads_full < quads < qat < naive",
        "largest per-step |d|: BF16 0.74, QUADS 0.759 (ratio 1), 0.854 (ratio 0.5), naive 1.3",
        _ordering,
    ),
    "qat_weight": (
        "Weight-only QAT removes the weights' part of the mismatch",
        "d_weight is zero by construction",
        _qat_weight,
    ),
    "rac": (
        "Residual compensation lowers the mismatch, and the more the higher its ratio",
        "largest |d| 0.923 / 0.901 / 0.854 / 0.812 / 0.759 at ratio 0.125 / 0.25 / 0.5 / 0.75 / 1",
        _rac,
    ),
    "largest": (
        "The largest mismatch of a step is ordered bf16 < quads_full < quads < naive",
        "0.74, 0.759, 0.854, 1.3",
        _largest,
    ),
    "below_fp8": ("QUADS at ratio 1 has a smaller mismatch than FP8", "not stated; this project's claim", _below_fp8),
    "symmetric": (
        "Symmetric QAT does not survive different engines: its mismatch is above BF16's, not equal to it",
        "activations are recomputed with engine noise, which the coarse grid amplifies",
        _symmetric,
    ),
    "symmetric_qat": (
        "Symmetric QAT has a larger mismatch than weight-only QAT",
        "larger in every layer",
        _symmetric_qat,
    ),
    "start_gap": (
        "Before any training, the naive NVFP4 rollout answers worse than BF16",
        "not separated from learning",
        _start_gap,
    ),
    "naive_reward": (
        "Training with a naive NVFP4 rollout ends below BF16",
        "average pass@1 51.37 against 73.15",
        _naive_reward,
    ),
    "naive_learning": (
        "Naive NVFP4 also learns less: its weights are worse even in BF16",
        "not separated from the engine's loss",
        _naive_learning,
    ),
    "naive_collapse": ("Naive NVFP4 collapses: its reward falls", "collapse near step 150", _naive_collapse),
    "quads_reward": (
        f"QUADS reaches BF16's reward (within {MARGIN:g})",
        "average pass@1 72.86 against 73.15",
        _equal_reward("quads"),
    ),
    "quads_full_reward": (
        f"QUADS at ratio 1 reaches BF16's reward (within {MARGIN:g})",
        "largest |d| at BF16's level",
        _equal_reward("quads_full"),
    ),
    "fp8_reward": (
        f"FP8 reaches BF16's reward (within {MARGIN:g})",
        "average pass@1 72.88 against 73.15",
        _equal_reward("fp8"),
    ),
    "rac_reward": (
        "Residual compensation adds reward to weight-only QAT",
        "average pass@1 71.1 without, 72.86 with",
        _rac_reward,
    ),
}
