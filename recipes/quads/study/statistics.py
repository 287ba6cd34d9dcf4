"""Means, standard errors and t tests, with the few lines of numerics they need.

The tests are Student's (paired, one sample) and Welch's (Welch 1947, degrees of freedom by Satterthwaite 1946).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

CONFIDENCE = 0.95
_PANELS = 128
_NODES, _WEIGHTS = numpy.polynomial.legendre.leggauss(32)


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error of the mean); the error is NaN below two values. Raises ValueError without values."""
    if not len(values):
        raise ValueError("a mean needs at least one value")
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def upper_tail(t: float, df: float) -> float:
    """P(T > t) of Student's distribution, for t >= 0 and df > 0 degrees of freedom.

    With T = sqrt(df) / tan(u) the density becomes sin(u)^(df-1), and the tail an integral from 0 to atan(sqrt(df)/t).
    u = v^2 takes the kink at 0 out for fractional df; Gauss-Legendre in panels, narrow enough for df up to 10^6.
    """
    if math.isinf(t):
        return 0.0
    half = 0.5 * math.sqrt(math.atan2(math.sqrt(df), t)) / _PANELS
    v = half * (2.0 * numpy.arange(_PANELS)[:, None] + 1.0 + _NODES)
    integral = half * float((_WEIGHTS * 2.0 * v * numpy.sin(v * v) ** (df - 1.0)).sum())
    log_norm = 0.5 * math.log(math.pi) + math.lgamma(df / 2) - math.lgamma((df + 1) / 2)
    return min(0.5, integral / math.exp(log_norm))


def two_sided(t: float, df: float) -> float:
    """P(|T| > |t|)."""
    return min(1.0, 2.0 * upper_tail(abs(t), df))


@functools.cache
def critical(df: float, confidence: float = CONFIDENCE) -> float:
    """t with P(|T| <= t) = confidence, by bisection."""
    low, high = 0.0, 1.0
    while two_sided(high, df) > 1 - confidence:
        high *= 2
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if two_sided(middle, df) > 1 - confidence else (low, middle)
    return high


@dataclass(frozen=True)
class Test:
    """A t test of `effect` = 0.

    kind: "paired", "welch" or "one sample". n: how many values, of both sides for Welch's. error: standard error.
    p: two-sided. low, high: the 95% confidence interval. unit: what n counts.
    """

    __test__ = False  # not one of pytest's

    kind: str
    n: tuple[int, ...]
    effect: float
    error: float
    df: float
    t: float
    p: float
    low: float
    high: float
    unit: str = "seeds"

    def describe(self) -> str:
        """`paired t over 3 seeds, p = 0.012`."""
        name = {"paired": "paired t", "welch": "Welch's t", "one sample": "t"}[self.kind]
        return f"{name} over {' and '.join(map(str, self.n))} {self.unit}, p = {format_p(self.p)}"


def format_p(p: float) -> str:
    """Two significant digits; tiny ones as a bound."""
    return "below 1e-6" if p < 1e-6 else f"{p:.2g}"


def one_sample(values: Sequence[float], kind: str = "one sample", unit: str = "seeds") -> Test:
    """Mean of `values` against 0. Raises ValueError below two values."""
    if len(values) < 2:
        raise ValueError(f"a t test needs two values or more, not {len(values)}")
    mean, error = mean_error(values)
    return _test(kind, (len(values),), mean, error, len(values) - 1, unit)


def paired(a: Sequence[float], b: Sequence[float], unit: str = "seeds") -> Test:
    """Mean of a - b against 0, a[i] belonging to b[i]. Raises ValueError for different lengths or below two pairs."""
    if len(a) != len(b):
        raise ValueError(f"a paired test needs as many values on both sides, not {len(a)} and {len(b)}")
    return one_sample([x - y for x, y in zip(a, b, strict=True)], "paired", unit)


def welch(a: Sequence[float], b: Sequence[float], unit: str = "seeds") -> Test:
    """Mean of a minus mean of b against 0, unequal variances. Raises ValueError below two values on a side."""
    if min(len(a), len(b)) < 2:
        raise ValueError(f"Welch's test needs two values or more on each side, not {len(a)} and {len(b)}")
    (mean_a, error_a), (mean_b, error_b) = mean_error(a), mean_error(b)
    square = error_a**2 + error_b**2
    spread = error_a**4 / (len(a) - 1) + error_b**4 / (len(b) - 1)
    df = square**2 / spread if spread else len(a) + len(b) - 2
    return _test("welch", (len(a), len(b)), mean_a - mean_b, math.sqrt(square), df, unit)


def _test(kind: str, n: tuple[int, ...], effect: float, error: float, df: float, unit: str) -> Test:
    if error > 0:
        t = effect / error
    else:  # every value the same: either exactly the hypothesis, or certainly not
        t = math.copysign(math.inf, effect) if effect else 0.0
    half = critical(df) * error
    return Test(kind, n, effect, error, df, t, two_sided(t, df), effect - half, effect + half, unit)


def equivalence(test: Test, margin: float) -> float:
    """p of the two one-sided tests (Schuirmann 1987) for |effect| < margin: the larger of both.

    Raises ValueError for a margin that is not above 0.
    """
    if not margin > 0:
        raise ValueError(f"margin: {margin} is not above 0")
    return max(_one_sided(test.effect + margin, test), _one_sided(margin - test.effect, test))


def _one_sided(distance: float, test: Test) -> float:
    """p of distance > 0."""
    if test.error > 0:
        tail = upper_tail(abs(distance) / test.error, test.df)
        return tail if distance >= 0 else 1 - tail
    return 0.0 if distance > 0 else 1.0
