"""What a record's accuracy checks must hold to stand for a pass: the figures, not the word."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeGuard

from afd_testkit.accuracy.margins import TRUNCATED_SHARE
from afd_testkit.accuracy.spec import (
    BEHIND_A_SERVER,
    BOUND,
    SCORE,
    SENSITIVITY_CASE,
    TOKENS,
)
from afd_testkit.accuracy.verdict import Judgement, Paired, fewest_questions
from afd_testkit.summary import ACCURACY, ACCURACY_BASELINE, ACCURACY_SPLIT

_SIGNALS = (SCORE, TOKENS)
_ROUNDING = 1e-9


def why_no_accuracy(record: Mapping[str, Any]) -> str:
    """Where a passed accuracy check lacks or contradicts what it passed by; empty if none does."""
    for number, check in enumerate(record["checks"]):
        if check["gate"] != ACCURACY or check["outcome"] != "passed":
            continue
        if why := _why_not(check):
            return f"at $.checks[{number}].facts: passed, but {why}"
    return ""


def _why_not(check: Mapping[str, Any]) -> str:
    judges = {
        ACCURACY_BASELINE: _baseline,
        ACCURACY_SPLIT: _split,
        SENSITIVITY_CASE: _sensitivity,
    }
    case, facts = check["case"], check["facts"]
    if case not in judges:
        return f"the case {case!r} is none of {', '.join(sorted(judges))}"
    asked, cut = facts.get("questions"), facts.get("truncated")
    if not _is_count(asked) or asked == 0:
        return f"questions is {asked!r}, so that nothing was asked"
    if not _is_share(facts.get("strict_match")):
        return f"strict_match is {facts.get('strict_match')!r}, which is no share"
    if not _is_count(facts.get("balanced_routing")):
        return "balanced_routing does not say how often expert ids were forced to be even"
    if case != SENSITIVITY_CASE and (not _is_count(cut) or cut > TRUNCATED_SHARE * asked):
        return f"truncated is {cut!r} of {asked} answers, beyond {TRUNCATED_SHARE:.0%}"
    return judges[case](check, facts)


def _baseline(_check: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    if facts.get("split_steps", 0) != 0:
        return f"split_steps is {facts['split_steps']!r} in the unsplit arm"
    floor = facts.get("floor")
    if floor is not None and facts["strict_match"] < floor:
        return f"strict_match {facts['strict_match']} is below the floor {floor}"
    return ""


def _split(check: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    compared = {one["quantity"]: one for one in check["comparisons"]}
    if lacking := {BOUND, TOKENS} - set(compared):
        return f"nothing was compared by {', '.join(sorted(lacking))}"
    steps = facts.get("split_steps")
    if check["engine"] != BEHIND_A_SERVER and (not _is_count(steps) or steps == 0):
        return f"split_steps is {steps!r}, so that no step was split"
    broken, mended, margin = (facts.get(name) for name in ("broken", "mended", "margin"))
    before = facts.get("baseline_score")
    if not (_is_count(broken) and _is_count(mended) and _is_share(before)):
        return "broken, mended and baseline_score do not say what flipped"
    if margin != compared[BOUND]["limit"] or not _is_share(margin) or margin in (0, 1):
        return f"the margin is {margin!r}, and {compared[BOUND]['limit']!r} was compared with"
    asked = facts["questions"]
    try:
        pair = Paired(asked, round(before * asked), _names(broken), _names(mended))
    except ValueError as error:
        return str(error)
    if pair.judge(margin) is Judgement.TOO_FEW:
        least = fewest_questions(margin)
        return f"{pair.correct} right answers are too few; {least} show a drop below {margin}"
    if pair.judge(margin) is not Judgement.PASSED:
        return (
            f"{broken} broken and {mended} mended of {asked} allow a drop of "
            f"{-pair.lowest_difference:.4f}, beyond the margin {margin}"
        )
    for name, expected in (
        ("lowest_difference", pair.lowest_difference),
        ("score", pair.score),
        ("strict_match", pair.score),
    ):
        if not _is_number(facts.get(name)) or abs(facts[name] - expected) > _ROUNDING:
            return f"{name} is {facts.get(name)!r}, and the flips give {expected}"
    return ""


def _sensitivity(_check: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    if not isinstance(facts.get("fault"), str) or not facts["fault"]:
        return "no fault is named"
    seen = facts.get("seen_by")
    if not isinstance(seen, list) or not seen or not all(one in _SIGNALS for one in seen):
        return f"seen_by is {seen!r}; a fault is seen by one or both of {', '.join(_SIGNALS)}"
    apart, limit = facts.get("logprob_difference"), facts.get("logprob_limit")
    far = apart in ("Infinity", "NaN") or (
        _is_number(apart) and _is_number(limit) and apart > limit
    )
    if (TOKENS in seen) != far:
        return f"seen_by is {seen}, and log-probabilities moved by {apart!r} of {limit!r} allowed"
    return ""


def _names(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and isfinite(value)


def _is_share(value: Any) -> TypeGuard[float]:
    return _is_number(value) and 0 <= value <= 1
