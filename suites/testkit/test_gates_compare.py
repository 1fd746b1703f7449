"""Comparing two runs: what counts as a difference, and what must be there to be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from afd_testkit.engines.base import RequestResult, RunResult, ScheduledRequest, StepRecord
from afd_testkit.gates.compare import Noise, NotComparable, compare, lead, profile, stages_of
from afd_testkit.gates.tolerances import Tolerance, UnknownTolerance, tolerances
from afd_testkit.results import Comparison, Worst

pytestmark = pytest.mark.cpu

LIMITS = {name: Tolerance(1e-5, "test") for name in ("logprob", "kv", "hidden")}
QUIET = Noise(dict.fromkeys(("logprob", "kv", "hidden"), 0.0), {})
VOCABULARY = 5


def request(name: str = "r0", length: int = 4, cached: int = 0, **changes: Any) -> RequestResult:
    random = np.random.default_rng(length)
    logprobs = np.log(random.dirichlet(np.ones(VOCABULARY), length))
    whole = RequestResult(
        name=name,
        token_ids=tuple(range(length)),
        cached_tokens=cached,
        chunks=(length - cached,),
        hidden=random.normal(size=(length, 3))[cached:],
        logprobs=logprobs[cached:],
        kv=(random.normal(size=(length, 2)), random.normal(size=(length, 2))),
        greedy_token=int(logprobs[-1].argmax()),
    )
    return replace(whole, **changes)


def run(*requests: RequestResult, steps: tuple[StepRecord, ...] = ()) -> RunResult:
    return RunResult(requests=requests, steps=steps, seconds=0.0)


def by_quantity(actual: RunResult, expected: RunResult, noise: Noise = QUIET) -> dict[str, Any]:
    return {c.quantity: c for c in compare(actual, expected, noise, LIMITS)}


def test_equal_runs_agree() -> None:
    found = by_quantity(run(request()), run(request()))
    assert {name: c.max_diff for name, c in found.items()} == dict.fromkeys(found, 0.0)
    assert all(c.ok for c in found.values())
    assert found["logprob"].compared == 4 * VOCABULARY
    assert found["kv"].compared == 2 * 4 * 2


@pytest.mark.parametrize("quantity", ["logprob", "hidden", "kv"])
@pytest.mark.parametrize(("off", "ok"), [(9e-6, True), (1.1e-5, False), (np.nan, False)])
def test_one_wrong_number_is_found_and_named(quantity: str, off: float, ok: bool) -> None:
    good, bad = request(), request()
    array = bad.kv[1] if quantity == "kv" else bad.logprobs if quantity == "logprob" else bad.hidden
    array[2, 1] += off
    comparison: Comparison = by_quantity(run(bad), run(good))[quantity]
    assert comparison.ok is ok
    assert comparison.worst is not None
    assert (comparison.worst.request, comparison.worst.token, comparison.worst.index) == (
        "r0",
        2,
        1,
    )


def test_the_first_place_beyond_the_limit_comes_by_request_token_and_layer() -> None:
    good = (request("r0"), request("r1", length=6))
    bad = (request("r0"), request("r1", length=6))
    for array in (*(g.kv[n] for g in (*good, *bad) for n in (0, 1)),):
        array[:] = 0.0
    bad[0].kv[0][0, 0] = 9e-6  # within the limit
    bad[1].kv[0][4, 1] = 8.0  # the largest, but later
    bad[1].kv[0][3, 1] = 0.5
    bad[1].kv[1][3, 0] = 2.0  # same token, later layer
    step = StepRecord(
        (ScheduledRequest("r0", 0, 4), ScheduledRequest("r1", 0, 6)), {"cut": 7}, (7, 3)
    )
    found = by_quantity(run(*bad, steps=(step,)), run(*good))
    assert found["kv"].worst == Worst("r1", 4, 1, 1, 8.0, 0.0, layer=0)
    assert found["kv"].first == Worst("r1", 3, 1, 1, 0.5, 0.0, layer=0)
    assert (found["logprob"].first, found["hidden"].first) == (None, None)
    bad[1].kv[1][2, 0] = 0.25  # an earlier token of the later layer comes first
    found = by_quantity(run(*bad, steps=(step,)), run(*good))
    assert found["kv"].first == Worst("r1", 2, 0, 0, 0.25, 0.0, layer=1)
    bad[0].kv[1][3, 1] = 0.125  # and an earlier request before that
    found = by_quantity(run(*bad, steps=(step,)), run(*good))
    assert found["kv"].first == Worst("r0", 3, 0, 1, 0.125, 0.0, layer=1)


def test_the_first_place_after_a_hit_is_a_prompt_position() -> None:
    good, bad = request(cached=1), request(cached=1)
    bad.hidden[1, 2] += 1.0
    bad.hidden[2, 0] += 2.0
    first = by_quantity(run(bad), run(good))["hidden"].first
    assert (first.token, first.index, first.layer) == (2, 2, None)
    bad.hidden[0, 1] = np.nan
    first = by_quantity(run(bad), run(good))["hidden"].first
    assert (first.token, first.index) == (1, 1)


def test_the_first_flip_is_told_beside_the_worst() -> None:
    logprobs = np.array([[0.0, -1.0, -3.0, -6.0, -7.0]])
    good = [request(name, length=1, logprobs=logprobs, greedy_token=0) for name in "abc"]
    bad = [replace(each, greedy_token=flip) for each, flip in zip(good, (0, 1, 2), strict=True)]
    found = by_quantity(run(*bad), run(*good))["greedy"]
    assert (found.first.request, found.worst.request) == ("b", "c")
    assert found.max_diff == 3.0
    assert by_quantity(run(*good), run(*good))["greedy"].first is None


def test_nan_in_both_is_still_wrong() -> None:
    spoiled = request()
    spoiled.logprobs[0, 0] = np.nan
    assert not by_quantity(run(spoiled), run(spoiled))["logprob"].ok


def test_equal_infinities_are_equal() -> None:
    masked = request()
    masked.logprobs[0, 0] = -np.inf
    assert by_quantity(run(masked), run(masked))["logprob"].max_diff == 0.0


def test_a_hit_is_compared_from_where_it_was_computed() -> None:
    found = by_quantity(run(request(cached=3)), run(request()))
    assert found["logprob"].compared == VOCABULARY
    assert found["kv"].compared == 2 * 4 * 2  # the cached rows too


@pytest.mark.parametrize(
    "actual",
    [
        request(name="other"),
        request(token_ids=(9, 9, 9, 9)),
        request(logprobs=np.zeros((4, VOCABULARY + 1))),
        request(hidden=np.zeros((3, 3))),
        request(kv=(np.zeros((4, 2)),)),
    ],
    ids=["name", "tokens", "vocabulary", "rows", "layers"],
)
def test_what_does_not_fit_is_not_compared(actual: RequestResult) -> None:
    with pytest.raises(NotComparable):
        compare(run(actual), run(request()), QUIET, LIMITS)


def test_case_l1_a_flip_counts_only_beyond_the_noise() -> None:
    logprobs = np.array([[2.0, 1.9999, -5.0, -6.0, -7.0]])
    expected = request(length=1, logprobs=logprobs, greedy_token=0)
    flipped = replace(expected, greedy_token=1)
    strange = replace(expected, greedy_token=2)
    for noise, ok in ((6e-4, True), (9e-5, False)):
        measured = Noise({**QUIET.maximum, "logprob": noise}, {})
        assert by_quantity(run(flipped), run(expected), measured)["greedy"].ok is ok
        # Near the top is what may flip, not any token where the top is close.
        assert not by_quantity(run(strange), run(expected), measured)["greedy"].ok
    assert lead(logprobs[0], 2) == pytest.approx(7.0)


def test_noise_is_the_larger_of_all_pairs() -> None:
    one, two, three = request(), request(), request()
    two.logprobs[0, 0] += 0.25
    three.logprobs[1, 1] -= 0.5
    noise = Noise.between([(run(two), run(one)), (run(three), run(one))])
    assert noise.maximum["logprob"] == pytest.approx(0.5)
    assert noise.mean["logprob"] == pytest.approx(0.5 / (4 * VOCABULARY))
    assert noise.maximum["kv"] == 0.0


def test_stages_follow_from_rows_and_cut() -> None:
    step = StepRecord(
        (ScheduledRequest("r0", 0, 4), ScheduledRequest("r1", 2, 4)), {"cut": 6}, (6, 2)
    )
    found = stages_of(run(request("r0"), request("r1", length=6), steps=(step,)))
    assert found["r0"].tolist() == [0, 0, 0, 0]
    assert found["r1"].tolist() == [-1, -1, 0, 0, 1, 1]


def test_profile_marks_the_cut_and_keeps_the_largest() -> None:
    good, bad = request(), request()
    bad.logprobs[3, 2] += 0.125
    step = StepRecord((ScheduledRequest("r0", 0, 4),), {"cut": 1}, (1, 3))
    found = profile(run(bad, steps=(step,)), run(good), (run(good), run(good)), 1e-5)
    assert found.difference == pytest.approx((0, 0, 0, 0.125))
    assert found.noise == (0, 0, 0, 0)
    assert found.cut == 0.25


def test_every_tolerance_has_a_source_and_unknown_ones_are_refused() -> None:
    for dtype in ("float64", "float32", "bfloat16"):
        table = tolerances("split", dtype)
        assert {"logprob", "kv", "hidden"} <= set(table)
        assert all(len(tolerance.source) > 40 for tolerance in table.values())
    assert tolerances("split", "float32")["logprob"].limit == 1e-5
    with pytest.raises(UnknownTolerance, match=r"float8.*known.*float32/none"):
        tolerances("split", "float8")


def test_noise_widens_a_limit_only_where_the_table_says_so() -> None:
    fixed, by_noise = Tolerance(1e-5, "x"), Tolerance(0.03, "x", noise_factor=4)
    assert fixed.with_noise(1.0) == 1e-5
    assert by_noise.with_noise(0.001) == 0.03
    assert by_noise.with_noise(0.05) == pytest.approx(0.2)
