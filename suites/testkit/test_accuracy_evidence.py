"""Records of the accuracy gate that say "passed" and hold figures that do not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401  (imported here, so that no single test is the first to load it)
import pytest

from afd_testkit.evidence import RecordError, RunInfo, load_record, write_run
from afd_testkit.results import CheckResult, Comparison, Outcome

pytestmark = pytest.mark.cpu

N, RIGHT = 200, 190
# No flip of 200: Clopper-Pearson's bound has a closed form, 1 - 0.025^(1/n).
LOWEST = 0.025 ** (1 / N) - 1
FACTS: dict[str, Any] = {
    "questions": N,
    "strict_match": RIGHT / N,
    "truncated": 0,
    "balanced_routing": 0,
    "shots": 5,
}
SPLIT_FACTS = {
    **FACTS,
    "split_steps": 7,
    "broken": 0,
    "mended": 0,
    "margin": 0.02,
    "baseline_score": RIGHT / N,
    "score": RIGHT / N,
    "lowest_difference": LOWEST,
}
FAULT_FACTS = {
    **FACTS,
    "split_steps": 7,
    "fault": "positions-off-by-one",
    "seen_by": ["logprob"],
    "logprob_difference": 0.5,
    "logprob_limit": 1e-4,
}


def comparison(quantity: str, value: float, limit: float) -> Comparison:
    return Comparison(quantity, value, limit, limit, None, "a rule", True, N)


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


BASE = check("baseline", "unsplit", {**FACTS, "split_steps": 0, "floor": 0.93})
SPLIT = check(
    "split",
    "token",
    SPLIT_FACTS,
    comparison("logprob", 1e-7, 1e-4),
    comparison("score drop, 95 % bound", -LOWEST, 0.02),
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
        (0, "questions", None, "nothing was asked"),
        (0, "strict_match", 1.2, "no share"),
        (0, "strict_match", 0.92, "below the floor 0.93"),
        (0, "split_steps", 3, "in the unsplit arm"),
        (0, "balanced_routing", "none", "forced to be even"),
        (0, "truncated", 5, "truncated is 5 of 200"),
        (1, "truncated", None, "truncated is None"),
        (1, "split_steps", 0, "no step was split"),
        (1, "split_steps", True, "no step was split"),
        (1, "broken", -1, "do not say what flipped"),
        (1, "broken", 191, "cannot be where 190 of 200"),
        (1, "broken", 1, "beyond the margin 0.02"),  # 277 questions for one broken answer
        (1, "mended", 11, "cannot be where 190 of 200"),
        (1, "mended", 2, "the flips give"),
        (1, "margin", 0.03, "0.02 was compared with"),
        (1, "baseline_score", 0.9, "180 right answers are too few; 183"),
        (1, "lowest_difference", -0.001, "lowest_difference is -0.001"),
        (1, "score", 0.99, "score is 0.99"),
        (1, "strict_match", 0.9, "strict_match is 0.9"),
        (2, "fault", "", "no fault is named"),
        (2, "seen_by", [], "seen by one or both"),
        (2, "seen_by", ["me"], "seen by one or both"),
        (2, "seen_by", ["score"], "moved by 0.5"),
        (2, "logprob_difference", 1e-5, "moved by 1e-05"),
        (2, "logprob_limit", None, "of None allowed"),
    ],
)
def test_a_figure_that_contradicts_the_pass_is_refused(
    good: dict[str, Any], tmp_path: Path, place: int, name: str, value: Any, words: str
) -> None:
    record = copy.deepcopy(good)
    record["checks"][place]["facts"][name] = value
    told = refused(record, tmp_path)
    assert f"$.checks[{place}].facts" in told
    assert words in told


@pytest.mark.parametrize("name", sorted({*SPLIT_FACTS} - {"shots"}))
def test_a_figure_that_is_not_there_is_missed(
    good: dict[str, Any], tmp_path: Path, name: str
) -> None:
    record = copy.deepcopy(good)
    del record["checks"][1]["facts"][name]
    assert "$.checks[1].facts" in refused(record, tmp_path)


def _without(place: int) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["checks"][1]["comparisons"].pop(place)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without(0), "nothing was compared by logprob"),
        (_without(1), "nothing was compared by score drop"),
        (lambda r: r["checks"][0].update(case="other"), "the case 'other' is none of"),
        (
            lambda r: r["checks"][1]["comparisons"][0].update(max_diff=1e-3),
            "comparisons[0].ok: true, but max_diff is 0.001",
        ),
        (lambda r: r["checks"][1]["comparisons"][0].update(max_diff="NaN"), "max_diff is NaN"),
    ],
    ids=["no tokens", "no score", "unknown case", "beyond its limit", "no number"],
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
