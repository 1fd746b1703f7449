"""The verdict on two arms of the same questions, against sums of binomial terms."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_testkit.accuracy.verdict import (
    Judgement,
    NotPaired,
    Paired,
    detectable_drop,
    fewest_questions,
    lower_bound,
    paired,
    upper_bound,
)

pytestmark = pytest.mark.cpu


def at_most(k: int, n: int, p: float) -> float:
    """P(X <= k) of a binomial variable, term by term."""
    return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def arms(n: int, correct: int, broken: int, mended: int) -> tuple[dict[str, bool], dict[str, bool]]:
    """Right answers by question: the first ``broken`` break, ``mended`` of the wrong ones mend."""
    baseline = {f"q{i:04d}": i < correct for i in range(n)}
    arm = {f"q{i:04d}": broken <= i < correct or correct <= i < correct + mended for i in range(n)}
    return baseline, arm


def test_the_public_case_fails() -> None:
    # 200 questions, 0.885 unsplit and 0.635 split, passed by a floor of 0.15.
    found = paired(*arms(200, 177, 50, 0))
    assert (found.baseline_score, found.score) == (0.885, 0.635)
    assert found.p_value == pytest.approx(2 * 0.5**50, rel=1e-9)
    assert found.judge(0.05) is Judgement.FAILED
    # 177 right answers are too few to pass a margin of 0.02, and enough to see such a fall.
    assert found.judge(0.02) is Judgement.FAILED


def test_few_flips_of_too_few_answers_show_nothing() -> None:
    # Five one-sided flips have p = 2 / 2^5 = 0.0625, six 0.03125.
    assert paired(*arms(200, 100, 5, 0)).judge(0.02) is Judgement.TOO_FEW
    assert paired(*arms(200, 100, 6, 0)).judge(0.02) is Judgement.FAILED
    assert paired(*arms(200, 100, 0, 6)).judge(0.02) is Judgement.TOO_FEW


def test_flips_are_named_and_counted() -> None:
    found = paired(*arms(10, 7, 2, 1))
    assert found.broken == ("q0000", "q0001")
    assert found.mended == ("q0007",)
    assert (found.baseline_score, found.score) == (0.7, 0.6)


@settings(deadline=None)  # exact tests of large counts take their time
@given(st.integers(0, 30), st.integers(0, 30))
def test_mcnemar_is_the_exact_binomial_test(broken: int, mended: int) -> None:
    flips = broken + mended
    tail = at_most(min(broken, mended), flips, 0.5)
    expected = 1.0 if broken == mended else min(1.0, 2 * tail)
    assert paired(*arms(100, 50, broken, mended)).p_value == pytest.approx(expected, rel=1e-9)


@settings(deadline=None)
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_bounds_leave_a_tail_of_one_in_forty(case: tuple[int, int]) -> None:
    k, n = case
    if k < n:
        assert at_most(k, n, upper_bound(k, n)) == pytest.approx(0.025, rel=1e-5)
    else:
        assert upper_bound(k, n) == 1
    if k > 0:
        assert 1 - at_most(k - 1, n, lower_bound(k, n)) == pytest.approx(0.025, rel=1e-5)
    else:
        assert lower_bound(k, n) == 0


def test_the_lower_bound_holds_as_often_as_it_says() -> None:
    draw = np.random.default_rng(11)
    n, broken, mended = 400, 0.03, 0.01
    held = 0
    for _ in range(400):
        rows = draw.choice(3, size=n, p=[broken, mended, 1 - broken - mended])
        b, m = int((rows == 0).sum()), int((rows == 1).sum())
        held += Paired(n, 300, ("",) * b, ("",) * m).lowest_difference <= mended - broken
    assert held >= 0.95 * 400


@pytest.mark.parametrize("margin", [0.01, 0.02, 0.05, 0.2])
def test_too_few_questions_are_no_pass(margin: float) -> None:
    n = fewest_questions(margin)
    assert (1 - margin) ** n <= 0.025 < (1 - margin) ** (n - 1)
    assert paired(*arms(n + 1, n, 0, 0)).judge(margin) is Judgement.PASSED
    assert paired(*arms(n - 1, n - 1, 0, 0)).judge(margin) is Judgement.TOO_FEW
    assert detectable_drop(n - 1, margin) is None


def test_the_drop_that_so_many_questions_see() -> None:
    n, margin = 400, 0.02
    drop = detectable_drop(n, margin)
    assert drop is not None
    passing = [k for k in range(40) if paired(*arms(n, n, k, 0)).judge(margin) is Judgement.PASSED]
    assert passing == list(range(len(passing)))
    assert 1 - at_most(passing[-1], n, drop) == pytest.approx(0.8, abs=1e-6)


def test_mended_questions_count_for_less_than_broken_ones() -> None:
    # As many mended as broken leave the score; the bound still shrinks with every pair of them.
    bounds = [paired(*arms(1000, 500, k, k)).lowest_difference for k in (0, 5, 20, 80)]
    assert bounds == sorted(bounds, reverse=True)
    assert all(bound < 0 for bound in bounds)


@pytest.mark.parametrize(
    ("baseline", "arm", "says"),
    [
        ({}, {}, "no question"),
        ({"a": True}, {"b": True}, "1 only in the baseline (a), 1 only in the arm (b)"),
        ({"a": True, "b": False}, {"a": True}, "1 only in the baseline (b), 0 only in the arm"),
    ],
)
def test_arms_with_other_questions_are_refused(
    baseline: dict[str, bool], arm: dict[str, bool], says: str
) -> None:
    with pytest.raises(NotPaired) as caught:
        paired(baseline, arm)
    assert says in str(caught.value)


@pytest.mark.parametrize("margin", [0.0, 1.0, -0.1, float("nan")])
def test_a_margin_is_a_share(margin: float) -> None:
    with pytest.raises(ValueError, match="margin"):
        fewest_questions(margin)
    with pytest.raises(ValueError, match="margin"):
        detectable_drop(100, margin)


def test_only_right_answers_can_break() -> None:
    few, enough = Paired(1000, 182, (), ()), Paired(1000, 183, (), ())
    assert few.judge(0.02) is Judgement.TOO_FEW
    assert enough.judge(0.02) is Judgement.PASSED
    assert Paired(200, 0, (), ("q",) * 50).judge(0.02) is Judgement.TOO_FEW


@pytest.mark.parametrize(
    ("n", "correct", "broken", "mended"),
    [(0, 0, 0, 0), (10, 3, 4, 0), (10, 3, 0, 8), (10, 11, 0, 0), (10, -1, 0, 0)],
)
def test_flips_that_cannot_be_are_refused(n: int, correct: int, broken: int, mended: int) -> None:
    with pytest.raises(ValueError, match="cannot be where"):
        Paired(n, correct, ("q",) * broken, ("q",) * mended)
