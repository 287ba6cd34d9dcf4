"""The conditions that the log warns of, and when each counts as begun, doubled and over."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quads_ops.settings import AlarmSettings

MISMATCH = "quads/logprob_abs_diff_mean"
FLOOR = 0.005
"""mean |d| in nats below which growth is no alarm: what FP8 rollouts, used as they are, differ by."""
OVER = 0.9
"""An alarm is over below this share of its threshold, so that a figure at the threshold does not come and go."""

Metrics = Mapping[str, float]


@dataclass
class Watch:
    """One figure against its threshold, over steps.

    window: how many steps it looks at. whole: all of them must be above the threshold; otherwise their median.
    """

    window: int
    whole: bool = False
    recent: deque[float] = field(default_factory=deque)
    since: int | None = None
    """The step in which the alarm began; None while there is none."""
    reported: float = 0.0
    """The level when it was last said."""

    def level(self) -> float | None:
        """None while too few steps are known: all of the window, or half of it for a median."""
        if len(self.recent) < (self.window if self.whole else (self.window + 1) // 2):
            return None
        return min(self.recent) if self.whole else statistics.median(self.recent)

    def update(self, step: int, figure: float, threshold: float) -> str | None:
        """Take the step's figure; returns what is worth saying: "begun", "doubled", "over" or None."""
        self.recent.append(figure)
        while len(self.recent) > self.window:
            self.recent.popleft()
        level = self.level()
        if level is None:
            return None
        if self.since is None:
            if level <= threshold:
                return None
            self.since, self.reported = step, level
            return "begun"
        if level <= OVER * threshold:
            self.since = None
            return "over"
        if level > self.reported and level >= 2 * self.reported:  # the first for an infinite level, which stays it
            self.reported = level
            return "doubled"
        return None


@dataclass
class Baseline:
    """mean |d| of the run's first `count` steps."""

    count: int
    values: list[float] = field(default_factory=list)

    def add(self, metrics: Metrics) -> None:
        """Take a step's metrics; does nothing once there are enough."""
        mean = metrics.get(MISMATCH)
        if mean is not None and math.isfinite(mean) and len(self.values) < self.count:
            self.values.append(float(mean))

    def median(self) -> float | None:
        """None while there are too few."""
        return statistics.median(self.values) if len(self.values) >= self.count else None


@dataclass(frozen=True)
class Rule:
    """One condition.

    figure: of a step's metrics, None where it was not measured. found, gone: texts from level and threshold.
    advice: sentences, the first of them the rule's own.
    """

    watch: Watch
    figure: Callable[[Metrics], float | None]
    threshold: Callable[[], float | None]
    found: Callable[[float, float], str]
    gone: Callable[[float, float], str]
    advice: Callable[[], tuple[str, ...]]


def rules(alarms: AlarmSettings, baseline: Baseline, advice: Callable[[], str]) -> dict[str, Rule]:
    """Name -> rule, without those that are switched off. advice: what to do about a mismatch, asked when needed."""
    found = {}
    if alarms.error:
        found["error"] = _error(alarms, advice)
    if alarms.growth:
        found["growth"] = _growth(alarms, baseline, advice)
    if alarms.kl:
        found["kl"] = _kl(alarms, advice)
    return found | {
        "nonfinite": _nonfinite(),
        "lost": _lost(),
        "codes": _codes(alarms.window),
        "prior": _prior(alarms.stuck),
    }


def _named(metric: str) -> Callable[[Metrics], float | None]:
    return lambda metrics: metrics.get(metric)


def _median(name: str, level: float, watch: Watch) -> str:
    return f"{name} is {level:.3g} nats (median of {len(watch.recent)} steps)"


def _error(alarms: AlarmSettings, advice: Callable[[], str]) -> Rule:
    watch = Watch(alarms.window)
    limit = f"log({alarms.error:g}) = {math.log(alarms.error):.3g}"
    return Rule(
        watch=watch,
        figure=_named(MISMATCH),
        threshold=lambda: math.log(alarms.error),
        found=lambda level, _: f"{_median('mean |d|', level, watch)}, above {limit}",
        gone=lambda level, _: f"{_median('mean |d|', level, watch)} again, below {limit}",
        advice=lambda: (advice(),),
    )


def _growth(alarms: AlarmSettings, baseline: Baseline, advice: Callable[[], str]) -> Rule:
    watch = Watch(alarms.window)

    def threshold() -> float | None:
        start = baseline.median()
        return None if start is None else max(alarms.growth * start, FLOOR)

    def found(level: float, _: float) -> str:
        start = baseline.median()
        grown = f"{level / start:.3g} times that" if start else "up from that"
        return f"{_median('mean |d|', level, watch)}, {grown} of the run's first {alarms.baseline} steps ({start:.3g})"

    return Rule(
        watch=watch,
        figure=_named(MISMATCH),
        threshold=threshold,
        found=found,
        gone=lambda level, limit: f"{_median('mean |d|', level, watch)} again, below {limit:.3g}",
        advice=lambda: (advice(),),
    )


def _kl(alarms: AlarmSettings, advice: Callable[[], str]) -> Rule:
    watch = Watch(alarms.window)

    def what(level: float) -> str:
        return _median("KL(rollout || actor), k3,", level, watch)

    remedy = "algorithm.rollout_correction of verl weighs tokens by it"
    return Rule(
        watch=watch,
        figure=_named("quads/logprob_k3_mean"),
        threshold=lambda: alarms.kl,
        found=lambda level, limit: f"{what(level)}, above {limit:g}: the updates are off-policy",
        gone=lambda level, limit: f"{what(level)} again, below {limit:g}",
        advice=lambda: (remedy, advice()),
    )


def _count(metric: str, found: str, gone: str, remedy: str) -> Rule:
    """A figure of one step that must be 0. found: what comes after the number."""
    return Rule(
        watch=Watch(1),
        figure=_named(metric),
        threshold=lambda: 0.0,
        found=lambda level, _: f"{level:.0f} {found}",
        gone=lambda *_: gone,
        advice=lambda: (remedy,),
    )


def _nonfinite() -> Rule:
    return _count(
        "quads/logprob_nonfinite_sum",
        found="tokens have a logprob that is NaN or infinite",
        gone="all logprobs are finite again",
        remedy="Weights or an activation overflowed: look at actor/grad_norm, and go back to an earlier checkpoint",
    )


def _lost() -> Rule:
    return _count(
        "quads/sequences_lost_sum",
        found="responses of this step are missing",
        gone="no response is missing again",
        remedy="verl drops what failed and trains on the rest: look in the log for the error of the reward or "
        "agent loop",
    )


def _codes(window: int) -> Rule:
    def figure(metrics: Metrics) -> float | None:
        changed = metrics.get("quads/changed_codes_mean")
        return None if changed is None else float(changed == 0)

    remedy = (
        "The rollout does not see the updates, which are too small to cross the 4-bit grid: raise "
        "actor_rollout_ref.actor.optim.lr, or wait, since master weights accumulate (unless the learning rate is 0)"
    )
    return Rule(
        watch=Watch(window, whole=True),
        figure=figure,
        threshold=lambda: 0.0,
        found=lambda *_: f"no NVFP4 code has changed in {window} weight syncs",
        gone=lambda *_: "NVFP4 codes change again",
        advice=lambda: (remedy,),
    )


def _prior(steps: int) -> Rule:
    remedy = "Its layer or expert has seen no token: an expert that is never chosen, or too few prompts a step"
    return Rule(
        watch=Watch(steps, whole=True),
        figure=_named("quads/rac_from_prior_mean"),
        threshold=lambda: 0.0,
        found=lambda *_: f"for {steps} steps some residual mask has come from the weights alone",
        gone=lambda *_: "every residual mask comes from activations now",
        advice=lambda: (remedy,),
    )
