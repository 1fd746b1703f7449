"""Records of the accuracy gate that say "passed" and hold figures that do not."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401  (imported here, so that no single test is the first to load it)
import pytest
from scipy.stats import beta

from afd_testkit.evidence import RecordError, RunInfo, load_record, write_run
from afd_testkit.results import CheckResult, Comparison, Outcome

pytestmark = pytest.mark.cpu

N, RIGHT = 200, 190
# No flip of 200: Clopper-Pearson's bound has a closed form, 1 - 0.025^(1/n).
LOWEST = 0.025 ** (1 / N) - 1


def facts(right: int, **more: Any) -> dict[str, Any]:
    """Of an arm with ``right`` of 200; Clopper-Pearson's bounds as quantiles of beta."""
    share = right / N
    return {
        "questions": N,
        "strict_match": share,
        "flexible_extract": share,
        "interval": [
            float(beta.ppf(0.025, right, N - right + 1)),
            float(beta.ppf(0.975, right + 1, N - right)),
        ],
        "truncated": 0,
        "balanced_routing": 0,
        "questions_digest": "ab" * 32,
        "shots": 5,
        "seeds": {"random_seed": 1234},
        **more,
    }


SPLIT_FACTS = facts(
    RIGHT,
    split_steps=7,
    broken=0,
    mended=0,
    flips=[],
    flips_not_shown=0,
    p_value=1.0,
    margin=0.02,
    baseline_score=RIGHT / N,
    score=RIGHT / N,
    lowest_difference=LOWEST,
)
FAULT_FACTS = facts(
    RIGHT - 100,
    split_steps=7,
    fault="positions-off-by-one",
    seen_by=["score", "logprob"],
    broken=100,
    mended=0,
    baseline_score=RIGHT / N,
    logprob_difference=0.5,
    logprob_limit=1e-5,
)


def comparison(quantity: str, value: float, limit: float, noise: float | None) -> Comparison:
    return Comparison(quantity, value, limit, limit, noise, "a rule", True, N)


def check(case: str, variant: str, facts: dict[str, Any], *compared: Comparison) -> CheckResult:
    return CheckResult(
        gate="accuracy",
        engine="vllm-cpu",
        model="small",
        dtype="float32",
        case=case,
        variant=variant,
        outcome=Outcome.PASSED,
        comparisons=compared,
        facts=facts,
    )


BASE = check("baseline", "unsplit", facts(RIGHT, split_steps=0, floor=0.93))
SPLIT = check(
    "split",
    "token",
    SPLIT_FACTS,
    comparison("logprob", 1e-7, 1e-5, 1e-8),  # float32 may differ by 1e-5
    comparison("score drop, 95 % bound", -LOWEST, 0.02, None),
)
FAULT = check("sensitivity", "positions-off-by-one", FAULT_FACTS)
CHECKS = (BASE, SPLIT, FAULT)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = write_run(RunInfo.begin(["x"]).end(), CHECKS, tmp_path_factory.mktemp("run")).record
    record: dict[str, Any] = load_record(path)
    return record


def refused(record: dict[str, Any], folder: Path) -> str:
    path = folder / "record.json"
    path.write_text(json.dumps(record))
    with pytest.raises(RecordError) as error:
        load_record(path)
    return str(error.value)


def test_figures_that_agree_are_a_record(good: dict[str, Any]) -> None:
    assert good["verdict"] == "passed"


def test_arms_behind_a_server_have_no_steps_to_show(good: dict[str, Any], tmp_path: Path) -> None:
    record = copy.deepcopy(good)
    for one in record["checks"][:2]:
        one["engine"] = "server"
        del one["facts"]["split_steps"]
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    assert load_record(path) == record


@pytest.mark.parametrize(
    ("place", "name", "value", "words"),
    [
        (0, "questions", 0, "nothing was asked"),
        (0, "questions", None, "no count"),
        (0, "questions", 10**400, "no count"),
        (0, "questions", 10**30, "no count"),
        (0, "strict_match", 1.2, "no share of 200"),
        (0, "strict_match", 0.9501, "no share of 200"),
        (0, "strict_match", -0.0001, "no share of 200"),
        (0, "strict_match", 0.94, "an end of interval"),
        (0, "flexible_extract", 3, "no share of 200"),
        (0, "interval", [0, 0.1], "an end of interval"),
        (0, "interval", [0.9], "no two numbers"),
        (0, "floor", 0.96, "below the floor 0.96"),
        (0, "floor", "x", "no number"),
        (0, "floor", None, "no number"),
        (0, "split_steps", 3, "in the unsplit arm"),
        (0, "split_steps", None, "no count"),
        (0, "balanced_routing", "none", "forced to be even"),
        (0, "truncated", 5, "truncated is 5 of 200"),
        (0, "questions_digest", "cd" * 32, "questions_digest is"),
        (0, "shots", 3, "shots is 5, and 3 in the unsplit arm"),
        (1, "truncated", None, "truncated is None"),
        (1, "split_steps", 0, "no step was split"),
        (1, "split_steps", True, "no count"),
        (1, "broken", -1, "no count"),
        (1, "broken", 10**12, "no count"),
        (1, "broken", 191, "cannot be where 190 of 200"),
        (1, "broken", 1, "beyond the margin 0.02"),  # 277 questions for one broken answer
        (1, "mended", 11, "cannot be where 190 of 200"),
        (1, "mended", 2, "the figures give"),
        (1, "margin", 0.01, "0.02 was compared with"),
        (1, "margin", 0.4, "0.02 is this model's"),
        (1, "margin", 1e-300, "was compared with"),
        (1, "baseline_score", 0.9, "180 right answers are too few; 183"),
        (1, "baseline_score", 0.9523, "no share of 200"),
        (1, "lowest_difference", -0.001, "lowest_difference is -0.001"),
        (1, "score", 0.99, "score is 0.99"),
        (1, "p_value", 17, "p_value is 17"),
        (1, "flips", [{}] * 3, "3 flips are shown and 0 not, of 0"),
        (1, "flips_not_shown", 900, "900 not, of 0"),
        (2, "fault", "", "no fault is named"),
        (2, "split_steps", 0, "never acted"),
        (2, "seen_by", [], "seen_by is []"),
        (2, "seen_by", ["me"], "seen_by is ['me']"),
        (2, "seen_by", ["score"], "seen_by is ['score']"),
        (2, "broken", -4, "no count"),
        (2, "broken", 0, "strict_match is 0.45"),
        (2, "logprob_difference", 1e-6, "moved by 1e-06"),
        (2, "logprob_difference", "-Infinity", "moved by '-Infinity'"),
        (2, "logprob_limit", None, "no number"),
        (2, "logprob_limit", -1e9, "of -1000000000.0 allowed"),
    ],
)
def test_a_figure_that_contradicts_the_pass_is_refused(
    good: dict[str, Any], tmp_path: Path, place: int, name: str, value: Any, words: str
) -> None:
    record = copy.deepcopy(good)
    record["checks"][place]["facts"][name] = value
    told = refused(record, tmp_path)
    assert ".facts" in told
    assert words in told


def test_a_difference_without_end_is_seen(good: dict[str, Any], tmp_path: Path) -> None:
    record = copy.deepcopy(good)
    record["checks"][2]["facts"]["logprob_difference"] = "Infinity"
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    assert load_record(path) == record


def test_sampled_answers_need_seeds(good: dict[str, Any], tmp_path: Path) -> None:
    record = copy.deepcopy(good)
    for one in record["checks"]:
        one["facts"] |= {"generation": {"do_sample": True}, "seeds": {}}
    assert "sampled without stated seeds" in refused(record, tmp_path)


@pytest.mark.parametrize("name", sorted(SPLIT_FACTS))
def test_a_figure_that_is_not_there_is_missed(
    good: dict[str, Any], tmp_path: Path, name: str
) -> None:
    record = copy.deepcopy(good)
    del record["checks"][1]["facts"][name]
    assert "$.checks[1].facts" in refused(record, tmp_path)


def _without(place: int) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["checks"][1]["comparisons"].pop(place)


def _compared(place: int, **values: object) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["checks"][1]["comparisons"][place].update(values)


WORST = {
    "request": "q",
    "token": 0,
    "stage": None,
    "index": 0,
    "layer": None,
    "actual": -1.0,
    "expected": -4.0,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without(0), "nothing was compared by logprob"),
        (_without(1), "nothing was compared by score drop"),
        (lambda r: r["checks"][0].update(case="other"), "the case 'other' is none of"),
        (_compared(0, max_diff=1e-3), "comparisons[0].ok: true, but max_diff is 0.001"),
        (_compared(0, max_diff="NaN"), "max_diff is NaN"),
        (_compared(0, max_diff=-5), "logprob differs by -5"),
        (_compared(0, limit=50, max_diff=49), "limit of logprob is 50"),
        (_compared(0, limit="Infinity", max_diff="Infinity"), "max_diff is 'Infinity'"),
        (_compared(0, noise="Infinity"), "noise is 'Infinity'"),
        (_compared(0, noise=None), "noise is None"),
        (_compared(0, noise=1.0), "limit of logprob is 1e-05, and the figures give 0.0001"),
        (_compared(0, compared=0), "no token was compared"),
        (_compared(0, worst=WORST), "worst of logprob is 3.0"),
        (_compared(1, compared=5), "5 of 200 questions were compared"),
        (_compared(1, max_diff=0.001), "max_diff of score drop, 95 % bound is 0.001"),
        (
            lambda r: r["checks"][1]["comparisons"].insert(0, r["checks"][1]["comparisons"][0]),
            "logprob was compared twice",
        ),
    ],
)
def test_what_was_not_compared_did_not_pass(
    good: dict[str, Any], tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    record = copy.deepcopy(good)
    change(record)
    assert words in refused(record, tmp_path)


@pytest.mark.parametrize("checks", [[BASE], [FAULT], [BASE, FAULT]], ids=["a", "b", "c"])
def test_without_a_split_arm_nothing_passed(checks: list[CheckResult], tmp_path: Path) -> None:
    run = RunInfo.begin(["x"]).end()
    told = run.judge(checks)
    assert told.verdict == "incomplete"
    assert told.reasons == ("accuracy: no split arm was compared with the unsplit one",)
    record = load_record(write_run(run, checks, tmp_path).record)
    record["verdict"] = "passed"
    assert "$.verdict" in refused(record, tmp_path)


@pytest.mark.parametrize("outcome", [Outcome.SKIPPED, Outcome.WAIVED, Outcome.ERROR])
def test_a_split_arm_that_was_not_judged_is_none(outcome: Outcome) -> None:
    checks = [BASE, dataclasses.replace(SPLIT, outcome=outcome)]
    told = RunInfo.begin(["x"]).end().judge(checks)
    assert told.verdict == "incomplete"
    assert "accuracy: no split arm was compared with the unsplit one" in told.reasons


def test_a_split_arm_that_failed_was_judged() -> None:
    told = RunInfo.begin(["x"]).end().judge([BASE, dataclasses.replace(SPLIT, outcome="failed")])
    assert told.verdict == "failed"
    assert told.reasons == ("1 check failed",)
