"""The verdicts on the paper's claims: from figures whose verdict is known."""

from __future__ import annotations

import pytest

from quads_recipe.study import claims
from quads_recipe.study.claims import CONTRADICTED, NOT_SHOWN, NOT_TESTABLE, SHOWN


def values(metric, **arms):
    """values("own", naive=[0.4, 0.41]) with seeds 0, 1, ..."""
    return {metric: {arm: dict(enumerate(many)) for arm, many in arms.items()}}


def outcome(name, found, start=None):
    return next(o for o in claims.judge(found, start or {}) if o.name == name)


LOW, MIDDLE, HIGH = [0.010, 0.011, 0.012], [0.020, 0.021, 0.023], [0.040, 0.043, 0.045]


def test_a_clear_difference_is_shown_and_its_opposite_contradicted():
    shown = claims.ratio_below(values("d_mean", a=LOW, b=HIGH), "d_mean", "a", "b", "|d|")
    assert shown.status == SHOWN and shown.test.kind == "paired" and shown.test.p < 0.01
    assert shown.value == pytest.approx(3.88, abs=0.01) and shown.low < shown.value < shown.high
    opposite = claims.ratio_below(values("d_mean", a=HIGH, b=LOW), "d_mean", "a", "b", "|d|")
    assert opposite.status == CONTRADICTED and opposite.value == pytest.approx(1 / shown.value)


def test_noise_is_not_shown():
    part = claims.below(values("own", a=[0.5, 0.4, 0.6], b=[0.52, 0.55, 0.5]), "own", "a", "b", "pass@1")
    assert part.status == NOT_SHOWN and part.test.p > 0.3
    assert "difference -0.023 (95%:" in part.text and "p = " in part.text


@pytest.mark.parametrize("judge", [claims.below, claims.ratio_below, claims.equal])
def test_one_seed_is_not_testable_but_has_its_number(judge):
    part = judge(values("own", a=[0.4], b=[0.5]), "own", "a", "b", "pass@1")
    assert part.status == NOT_TESTABLE and part.test is None and part.low is None
    assert part.value == pytest.approx(1.25 if judge is claims.ratio_below else -0.1)
    assert "one seed" in part.text and "0.4" in part.text and "0.5" in part.text


def test_a_missing_arm_is_named():
    part = claims.below(values("own", a=[0.4, 0.5]), "own", "a", "b", "pass@1")
    assert part.status == NOT_TESTABLE and "no figure of b" in part.text


def test_seeds_are_paired_by_number_and_lost_ones_left_out():
    found = {"own": {"a": {0: 0.40, 1: 0.50, 3: 9.0}, "b": {1: 0.55, 0: 0.45, 2: 7.0}}}
    part = claims.below(found, "own", "a", "b", "pass@1")
    assert part.test.kind == "paired" and part.test.n == (2,) and part.test.effect == pytest.approx(-0.05)


def test_without_common_seeds_the_test_is_welchs():
    found = {"own": {"a": {0: 0.40, 1: 0.41, 2: 0.42}, "b": {3: 0.50, 4: 0.51, 5: 0.52}}}
    part = claims.below(found, "own", "a", "b", "pass@1")
    assert part.test.kind == "welch" and part.test.n == (3, 3) and part.status == SHOWN


@pytest.mark.parametrize(
    ("difference", "status"),
    [
        ([0.001, -0.002, 0.002], SHOWN),
        ([0.010, 0.011, 0.012], SHOWN),  # different, but by less than the margin
        ([0.08, -0.09, 0.02], NOT_SHOWN),  # could be anything
        ([-0.10, -0.11, -0.12], CONTRADICTED),
        ([0.10, 0.11, 0.12], CONTRADICTED),  # better is not equal either
    ],
)
def test_equality_needs_more_than_a_missing_difference(difference, status):
    base = [0.5, 0.52, 0.54]
    arm = [b + d for b, d in zip(base, difference, strict=True)]
    part = claims.equal(values("own", quads=arm, bf16=base), "own", "quads", "bf16", "pass@1")
    assert part.status == status


@pytest.mark.parametrize(
    ("statuses", "together"),
    [
        ([SHOWN, SHOWN], SHOWN),
        ([SHOWN, NOT_SHOWN], NOT_SHOWN),
        ([NOT_SHOWN, NOT_TESTABLE, SHOWN], NOT_TESTABLE),
        ([SHOWN, NOT_TESTABLE, CONTRADICTED], CONTRADICTED),
        ([], NOT_TESTABLE),
    ],
)
def test_a_claim_is_as_weak_as_its_weakest_part(statuses, together):
    assert claims.overall(statuses) == together


def test_the_ordering_needs_every_neighbour():
    steps = dict(zip(claims.ORDER, (1.0, 2.0, 3.0, 5.0, 8.0), strict=True))
    noise = (1.0, 1.02, 0.98)
    found = values("d_mean", **{arm: [d * n for n in noise] for arm, d in steps.items()})
    assert outcome("ordering", found).status == SHOWN
    found["d_mean"]["qat"], found["d_mean"]["quads"] = found["d_mean"]["quads"], found["d_mean"]["qat"]
    swapped = outcome("ordering", found)
    assert swapped.status == CONTRADICTED
    assert [part.status for part in swapped.parts] == [SHOWN, SHOWN, CONTRADICTED, SHOWN]
    del found["d_mean"]["naive"]
    assert [part.status for part in outcome("ordering", found).parts][-1] == NOT_TESTABLE


def test_a_rising_naive_contradicts_the_collapse():
    assert outcome("naive_collapse", values("gain", naive=[0.05, 0.06, 0.055])).status == CONTRADICTED
    assert outcome("naive_collapse", values("gain", naive=[-0.3, -0.35, -0.28])).status == SHOWN
    assert outcome("naive_collapse", values("gain", naive=[-0.1, 0.12, 0.03])).status == NOT_SHOWN


def test_a_weight_part_that_is_not_zero_contradicts_qat():
    found = values("d_mean", qat=MIDDLE, naive=HIGH)
    zero, broken = (values("part_weight_max", qat=[0.0, 0.0, last]) for last in (0.0, 1e-7))
    assert outcome("qat_weight", found | zero).status == SHOWN
    assert outcome("qat_weight", found | broken).status == CONTRADICTED
    assert outcome("qat_weight", found).status == NOT_TESTABLE


def test_the_gap_before_training_is_tested_over_problems():
    bf16 = [1.0, 0.5] * 60
    naive = [0.5, 0.5] * 60
    got = outcome("start_gap", {}, {"naive": naive, "bf16": bf16})
    assert got.status == SHOWN and got.parts[0].test.unit == "problems" and got.parts[0].test.n == (120,)
    assert got.parts[0].value == pytest.approx(-0.25)
    assert outcome("start_gap", {}, {"naive": bf16, "bf16": naive}).status == CONTRADICTED
    assert outcome("start_gap", {}, {"bf16": bf16}).status == NOT_TESTABLE


def test_nothing_at_all_is_not_testable():
    assert {o.status for o in claims.judge({}, {})} == {NOT_TESTABLE}
    assert len({o.name for o in claims.judge({}, {})}) == len(claims.CLAIMS)
