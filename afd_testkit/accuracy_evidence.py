"""What a record's accuracy checks must hold to stand for a pass: the figures, not the word.

Every figure that a verdict rests on is worked out again from counts, with the margins and limits
of this release.  Nothing here keeps a forger out who invents counts that agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afd_testkit.accuracy.margins import TRUNCATED_SHARE, listed, token_limit
from afd_testkit.accuracy.spec import (
    BEHIND_A_SERVER,
    BOUND,
    SCORE,
    SENSITIVITY_CASE,
    TOKENS,
)
from afd_testkit.accuracy.verdict import (
    Judgement,
    Paired,
    fewest_questions,
    lower_bound,
    upper_bound,
)
from afd_testkit.summary import ACCURACY, ACCURACY_BASELINE, ACCURACY_SPLIT, is_number

_ROUNDING = 1e-9
_MOST = 10_000_000  # questions; more are a mistake, and would take hours to judge
_SAME = ("questions", "questions_digest", "shots", "seeds")  # of an arm and its baseline


class _Wrong(ValueError):
    """A figure is missing, or contradicts the others."""


def why_no_accuracy(record: Mapping[str, Any]) -> str:
    """Where a passed accuracy check lacks or contradicts what it passed by; empty if none does."""
    baselines: dict[tuple[str, ...], Mapping[str, Any]] = {}
    passed = [
        (number, check)
        for number, check in enumerate(record["checks"])
        if check["gate"] == ACCURACY and check["outcome"] == "passed"
    ]
    for number, check in sorted(passed, key=lambda one: one[1]["case"] != ACCURACY_BASELINE):
        try:
            _check(check, baselines)
        except _Wrong as error:
            return f"at $.checks[{number}].facts: passed, but {error}"
    return ""


def _check(check: Mapping[str, Any], baselines: dict[tuple[str, ...], Mapping[str, Any]]) -> None:
    """One passed check, and how it fits its baseline among ``baselines``, by subject."""
    case, facts = check["case"], check["facts"]
    asked = _count(facts, "questions")
    _require(asked > 0, f"questions is {asked}, so that nothing was asked")
    right = _whole(facts, "strict_match", asked)
    _whole(facts, "flexible_extract", asked)
    ends = facts.get("interval")
    if not isinstance(ends, list) or len(ends) != 2:
        raise _Wrong(f"interval is {_short(ends)}, and no two numbers")
    for given, bound in zip(ends, (lower_bound, upper_bound), strict=True):
        _equal(given, bound(right, asked), "an end of interval")
    _count(facts, "balanced_routing")
    generation = facts.get("generation")
    sampled = isinstance(generation, Mapping) and generation.get("do_sample")
    _require(not sampled or bool(facts.get("seeds")), "answers were sampled without stated seeds")
    subject = tuple(check[name] for name in ("engine", "model", "dtype", "topology"))
    if case == SENSITIVITY_CASE:
        _sensitivity(check["model"], facts, asked, right)
        return
    cut = _count(facts, "truncated")
    _require(
        cut <= TRUNCATED_SHARE * asked,
        f"truncated is {cut} of {asked} answers, beyond {TRUNCATED_SHARE:.0%}",
    )
    if case == ACCURACY_BASELINE:
        _baseline(check["engine"], facts)
        baselines[subject] = facts
    elif case == ACCURACY_SPLIT:
        _split(check, facts, asked, right)
        if subject in baselines:
            _fits(facts, baselines[subject])
    else:
        known = ", ".join((ACCURACY_BASELINE, ACCURACY_SPLIT, SENSITIVITY_CASE))
        raise _Wrong(f"the case {case!r} is none of {known}")


def _baseline(engine: str, facts: Mapping[str, Any]) -> None:
    if engine != BEHIND_A_SERVER or "split_steps" in facts:
        steps = _count(facts, "split_steps")
        _require(steps == 0, f"split_steps is {steps} in the unsplit arm")
    if "floor" in facts:
        floor = _number(facts, "floor")
        score = facts["strict_match"]
        _require(score >= floor, f"strict_match {score} is below the floor {floor}")


def _split(check: Mapping[str, Any], facts: Mapping[str, Any], asked: int, right: int) -> None:
    compared = {}
    for one in check["comparisons"]:
        _require(one["quantity"] not in compared, f"{one['quantity']} was compared twice")
        compared[one["quantity"]] = one
    lacking = {BOUND, TOKENS} - set(compared)
    _require(not lacking, f"nothing was compared by {', '.join(sorted(lacking))}")
    if check["engine"] != BEHIND_A_SERVER or "split_steps" in facts:
        steps = _count(facts, "split_steps")
        _require(steps > 0, f"split_steps is {steps}, so that no step was split")
    _tokens(compared[TOKENS], check["dtype"])
    margin, bound = _number(facts, "margin"), compared[BOUND]
    allowed = listed(check["model"]).drop
    _require(0 < margin <= allowed, f"the margin is {margin}, and {allowed} is this model's")
    _require(bound["limit"] == margin, f"{bound['limit']} was compared with, and not {margin}")
    _require(bound["compared"] == asked, f"{bound['compared']} of {asked} questions were compared")
    pair = _pair(facts, asked)
    _require(
        pair.judge(margin) is not Judgement.TOO_FEW,
        f"{pair.correct} right answers are too few; {fewest_questions(margin)} show a drop below "
        f"{margin}",
    )
    _require(
        pair.judge(margin) is Judgement.PASSED,
        f"{len(pair.broken)} broken and {len(pair.mended)} mended of {asked} allow a drop of "
        f"{-pair.lowest_difference:.4f}, beyond the margin {margin}",
    )
    for name, expected in (
        ("lowest_difference", pair.lowest_difference),
        ("score", pair.score),
        ("strict_match", pair.score),
        ("p_value", pair.p_value),
    ):
        _equal(facts.get(name), expected, name)
    _equal(bound["max_diff"], max(0.0, -pair.lowest_difference), f"max_diff of {BOUND}")
    flips, more = facts.get("flips"), _count(facts, "flips_not_shown")
    shown = len(flips) if isinstance(flips, list) else -1
    _require(
        shown + more == len(pair.broken) + len(pair.mended),
        f"{shown} flips are shown and {more} not, of {len(pair.broken) + len(pair.mended)}",
    )


def _tokens(compared: Mapping[str, Any], dtype: str) -> None:
    noise, apart, limit = (_number(compared, name) for name in ("noise", "max_diff", "limit"))
    _require(compared["compared"] > 0, f"no token was compared by {TOKENS}")
    _require(noise >= 0 and apart >= 0, f"{TOKENS} differs by {apart}, with a noise of {noise}")
    _equal(limit, token_limit(dtype, noise)[1], f"limit of {TOKENS}")
    _require(apart <= limit, f"{TOKENS} differs by {apart}, beyond {limit}")
    if (worst := compared["worst"]) is not None:
        _equal(abs(worst["actual"] - worst["expected"]), apart, f"worst of {TOKENS}")


def _fits(facts: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    for name in _SAME:
        mine, its = facts.get(name), base.get(name)
        _require(mine == its, f"{name} is {mine!r}, and {its!r} in the unsplit arm")
    _equal(facts["baseline_score"], base["strict_match"], "baseline_score")


def _sensitivity(model: str, facts: Mapping[str, Any], asked: int, right: int) -> None:
    fault, seen = facts.get("fault"), facts.get("seen_by")
    _require(isinstance(fault, str) and fault != "", "no fault is named")
    steps = _count(facts, "split_steps")
    _require(steps > 0, f"split_steps is {steps}, so that the fault never acted")
    pair = _pair(facts, asked)
    _equal(right / asked, pair.score, "strict_match")
    apart, limit = facts.get("logprob_difference"), _number(facts, "logprob_limit")
    far = apart == "Infinity" or (is_number(apart) and apart > limit > 0)
    expected = [
        name
        for name, told in (
            (SCORE, pair.judge(listed(model).drop) is Judgement.FAILED),
            (TOKENS, far),
        )
        if told
    ]
    _require(
        bool(expected) and seen == expected,
        f"seen_by is {seen!r}, and the figures show the fault by {expected} "
        f"({len(pair.broken)} broken, log-probabilities moved by {apart!r} of {limit!r} allowed)",
    )


def _pair(facts: Mapping[str, Any], asked: int) -> Paired:
    broken, mended = _count(facts, "broken"), _count(facts, "mended")
    correct = _whole(facts, "baseline_score", asked)
    _require(
        broken <= correct and mended <= asked - correct,
        f"{broken} broken and {mended} mended cannot be where {correct} of {asked} were right",
    )
    return Paired(asked, correct, ("",) * broken, ("",) * mended)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Wrong(otherwise)


def _equal(given: Any, expected: float, name: str) -> None:
    """``given`` must be the number that the counts give."""
    if not is_number(given) or abs(given - expected) > _ROUNDING:
        raise _Wrong(f"{name} is {_short(given)}, and the figures give {expected}")


def _count(facts: Mapping[str, Any], name: str) -> int:
    value = facts.get(name)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise _Wrong(f"{name} is {_short(value)}, which is no count")
    return value


def _whole(facts: Mapping[str, Any], name: str, asked: int) -> int:
    """How many of ``asked`` the share under ``name`` is."""
    share = _number(facts, name)
    count = round(share * asked) if 0 <= share <= 1 else -1
    if not 0 <= count <= asked or abs(count / asked - share) > _ROUNDING:
        raise _Wrong(f"{name} is {share}, which is no share of {asked}")
    return count


def _number(facts: Mapping[str, Any], name: str) -> float:
    value = facts.get(name)
    if not is_number(value):
        raise _Wrong(f"{name} is {_short(value)}, which is no number")
    return value


def _short(value: Any) -> str:
    return (
        repr(value)[:60] if not isinstance(value, int) or abs(value) < 10**18 else "far too large"
    )
