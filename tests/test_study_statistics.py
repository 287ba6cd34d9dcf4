"""Student's distribution against its closed forms, and t tests against figures worked out by hand."""

from __future__ import annotations

import math

import numpy
import pytest

from quads_recipe.study import statistics as stats

CLOSED = {  # degrees of freedom: P(T > t)
    1: lambda t: 0.5 - math.atan(t) / math.pi,
    2: lambda t: 0.5 - t / (2 * math.sqrt(2 + t * t)),
    3: lambda t: 0.5 - (math.atan(t / 3**0.5) + (t / 3**0.5) / (1 + t * t / 3)) / math.pi,
    4: lambda t: 0.5 - 0.375 * t / math.sqrt(1 + t * t / 4) * (1 - t * t / (1 + t * t / 4) / 12),
}


@pytest.mark.parametrize("df", CLOSED)
@pytest.mark.parametrize("t", [0.0, 0.1, 1.0, 3.0, 20.0])
def test_tail_has_the_closed_form(df, t):
    assert stats.upper_tail(t, df) == pytest.approx(CLOSED[df](t), rel=1e-10)


@pytest.mark.parametrize("df", [1.3, 2.7, 7.2, 400.5])
def test_tail_for_fractional_degrees_is_the_integral_of_the_density(df):
    x = numpy.linspace(0, 2.2, 400_001)
    log_norm = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    density = numpy.exp(log_norm - (df + 1) / 2 * numpy.log1p(x * x / df))
    assert stats.upper_tail(2.2, df) == pytest.approx(0.5 - numpy.trapezoid(density, x), abs=1e-10)


def test_many_degrees_of_freedom_are_the_normal_distribution():
    assert stats.upper_tail(1.96, 1e6) == pytest.approx(0.5 * math.erfc(1.96 / 2**0.5), rel=1e-4)
    assert stats.upper_tail(math.inf, 5) == 0


@pytest.mark.parametrize(("df", "t"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (30, 2.0423)])
def test_critical_values_are_those_of_the_tables(df, t):
    assert stats.critical(df) == pytest.approx(t, abs=5e-5)


def test_mean_and_error():
    mean, error = stats.mean_error([1.0, 2.0, 3.0])
    assert (mean, error) == pytest.approx((2.0, 1 / 3**0.5))
    assert math.isnan(stats.mean_error([1.0])[1])
    with pytest.raises(ValueError, match="at least one"):
        stats.mean_error([])


def test_paired_by_hand():
    """Differences 1, 2, 3: mean 2, error 1/sqrt(3), t = 2 sqrt(3) at 2 degrees of freedom."""
    test = stats.paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (test.effect, test.error, test.df, test.t) == pytest.approx((2, 1 / 3**0.5, 2, 2 * 3**0.5))
    assert test.p == pytest.approx(2 * CLOSED[2](2 * 3**0.5))
    half = 4.302652729 / 3**0.5
    assert (test.low, test.high) == pytest.approx((2 - half, 2 + half))
    assert test.describe() == "paired t over 3 seeds, p = 0.074"


def test_welch_by_hand():
    """Means 2 and 5, squared errors 1/3 and 4/3: t = -3/sqrt(5/3), 25/17*2 degrees of freedom."""
    test = stats.welch([1.0, 2.0, 3.0], [3.0, 5.0, 7.0])
    assert (test.effect, test.error, test.t) == pytest.approx((-3, (5 / 3) ** 0.5, -3 / (5 / 3) ** 0.5))
    assert test.df == pytest.approx(2 * 25 / 17)
    assert stats.welch([3.0, 5.0, 7.0], [1.0, 2.0, 3.0]).p == pytest.approx(test.p)


def test_pairs_take_out_what_they_share():
    """The same differences on different levels: certain when paired, hidden when not."""
    base = [0.1, 0.5, 0.9, 1.3]
    other = [value + 0.01 + 0.001 * i for i, value in enumerate(base)]
    assert stats.paired(other, base).p < 0.001 < 0.9 < stats.welch(other, base).p


def test_values_that_never_vary():
    assert stats.one_sample([0.0, 0.0]).p == pytest.approx(1)
    assert stats.one_sample([0.5, 0.5]).p == 0
    test = stats.welch([0.5, 0.5], [0.5, 0.5])
    assert (test.p, test.effect, test.low, test.high) == pytest.approx((1, 0, 0, 0))


def test_equivalence_is_the_larger_of_two_one_sided_tests():
    test = stats.paired([0.51, 0.52, 0.50], [0.50, 0.515, 0.505])  # mean 0.00333, error 0.0044096
    expected = CLOSED[2]((0.03 - test.effect) / test.error)
    assert stats.equivalence(test, 0.03) == pytest.approx(expected) and expected < 0.05
    assert stats.equivalence(test, 0.001) > 0.5
    exact = stats.one_sample([0.02, 0.02])
    assert stats.equivalence(exact, 0.03) == 0 and stats.equivalence(exact, 0.01) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stats.one_sample([1.0]), "two values or more, not 1"),
        (lambda: stats.paired([1.0, 2.0], [1.0]), "not 2 and 1"),
        (lambda: stats.welch([1.0, 2.0], [1.0]), "not 2 and 1"),
        (lambda: stats.equivalence(stats.one_sample([1.0, 2.0]), 0), "margin: 0"),
    ],
)
def test_too_little_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_false_alarms_come_as_often_as_the_level_says():
    rng = numpy.random.default_rng(5)
    alarms = sum(stats.paired(rng.normal(size=3), rng.normal(size=3)).p < 0.05 for _ in range(2000))
    assert 60 < alarms < 145  # 100 expected, 4.5 standard deviations
