"""What terminal and page show of the accuracy gate, from the facts of its checks.

Facts are free form: what a record lacks, or has in another form, is shown as not told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from afd_testkit.accuracy.spec import BEHIND_A_SERVER, SCORE, TOKENS
from afd_testkit.failure import number, printable
from afd_testkit.results import CheckResult, Comparison
from afd_testkit.summary import ACCURACY, ACCURACY_BASELINE, GateRow, gate_rows, is_number

UNSEEN_STEPS = "not seen: steps of servers; that the arm splits is for whoever started it to show"
_ASKED = {
    "lm_eval": "lm-eval",
    "task_version": "gsm8k version",
    "generated_tokens_limit": "generated tokens at most",
    "chat_template": "chat template",
}
_MOST_TEXT = 2000  # characters of an answer


@dataclass(frozen=True)
class Flip:
    """A question that one arm answers right and the other does not, with both answers."""

    id: str
    way: str
    question: str
    unsplit: str
    split: str


@dataclass(frozen=True)
class ArmScore:
    """One arm.  Shares are of the questions asked; ``interval`` holds with 95 % confidence.

    What compares it with the unsplit arm is ``None`` of that arm itself.
    """

    name: str
    outcome: str
    score: float
    interval: tuple[float, float]
    flexible: float | None
    truncated: int | None
    floor: float | None
    broken: int | None
    mended: int | None
    p_value: float | None
    lowest_difference: float | None
    tokens: Comparison | None
    flips: tuple[Flip, ...]
    flips_not_shown: int


@dataclass(frozen=True)
class FaultSeen:
    """A fault and which signal saw it.

    ``difference``: of log-probabilities, in nats, and the ``limit`` that it is held to.
    ``questions``: how many were asked under it, and the ``unsplit`` arm's score on those.
    """

    name: str
    outcome: str
    by_score: bool
    by_tokens: bool
    score: float | None
    broken: int | None
    mended: int | None
    difference: float | None
    limit: float | None
    questions: int | None
    unsplit: float | None


@dataclass(frozen=True)
class AccuracyRun:
    """All that one subject was asked.  ``detectable``: a drop that is refused 4 times of 5.

    ``unseen``: the arms are servers, whose steps nobody sees.  ``asked``: by what, and how.
    """

    row: GateRow
    questions: int
    shots: int | None
    margin: float | None
    source: str
    detectable: float | None
    arms: tuple[ArmScore, ...]
    faults: tuple[FaultSeen, ...]
    unseen: bool
    asked: str

    @property
    def flips(self) -> list[tuple[ArmScore, Flip]]:
        """Every flip that is told, with its arm."""
        return [(arm, flip) for arm in self.arms for flip in arm.flips]

    @property
    def flips_not_shown(self) -> int:
        """Flips that are counted only."""
        return sum(arm.flips_not_shown for arm in self.arms)

    @property
    def seen(self) -> tuple[int, int, int]:
        """Faults that any signal saw, that the score did, and that log-probabilities did."""
        return (
            sum(fault.by_score or fault.by_tokens for fault in self.faults),
            sum(fault.by_score for fault in self.faults),
            sum(fault.by_tokens for fault in self.faults),
        )


def accuracy_runs(checks: Iterable[CheckResult]) -> list[AccuracyRun]:
    """One for each subject that answered questions."""
    rows = [row for row in gate_rows(checks) if row.gate == ACCURACY]
    return [run for run in map(_run, rows) if run is not None]


def _run(row: GateRow) -> AccuracyRun | None:
    arms = [arm for check in row.checks if (arm := _arm(check)) is not None]
    faults = [_fault(check) for check in row.checks if isinstance(check.facts.get("fault"), str)]
    if not arms and not faults:
        return None
    asked = [n for check in row.checks if (n := _count(check.facts, "questions")) is not None]
    rules = [c.rule for check in row.checks for c in check.comparisons if _is_score(c) and c.rule]
    return AccuracyRun(
        row=row,
        questions=max(asked, default=0),
        shots=_first(row, "shots", _count),
        margin=_first(row, "margin", _share),
        source=rules[0] if rules else "",
        detectable=_first(row, "detectable_drop", _share),
        arms=tuple(arms),
        faults=tuple(faults),
        unseen=row.engine == BEHIND_A_SERVER,
        asked=_asked(row.checks[0].facts),
    )


def _asked(facts: Mapping[str, Any]) -> str:
    """lm-eval's settings, as far as they are told."""
    told = [f"{words} {facts[name]}" for name, words in _ASKED.items() if name in facts]
    seeds = facts.get("seeds")
    if isinstance(seeds, Mapping) and seeds:
        told.append("seeds " + ", ".join(f"{name} {value}" for name, value in seeds.items()))
    return printable("; ".join(told))


def _is_score(comparison: Comparison) -> bool:
    return comparison.quantity.startswith(SCORE)


def _first(row: GateRow, name: str, read: Any) -> Any:
    found = (read(check.facts, name) for check in row.checks)
    return next((value for value in found if value is not None), None)


def _arm(check: CheckResult) -> ArmScore | None:
    """``None`` for a faulty arm, and for a check that ended before it had a score."""
    facts = check.facts
    score, interval = _share(facts, "strict_match"), _interval(facts.get("interval"))
    if score is None or interval is None or "fault" in facts:
        return None
    told = facts.get("flips")
    flips = [_flip(one) for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    base = check.case == ACCURACY_BASELINE
    return ArmScore(
        name=check.variant,
        outcome=str(check.outcome),
        score=score,
        interval=interval,
        flexible=_share(facts, "flexible_extract"),
        truncated=_count(facts, "truncated"),
        floor=_share(facts, "floor"),
        broken=None if base else _count(facts, "broken"),
        mended=None if base else _count(facts, "mended"),
        p_value=_share(facts, "p_value"),
        lowest_difference=_share(facts, "lowest_difference"),
        tokens=next((c for c in check.comparisons if c.quantity == TOKENS), None),
        flips=tuple(flips),
        flips_not_shown=_count(facts, "flips_not_shown") or 0,
    )


def _fault(check: CheckResult) -> FaultSeen:
    facts = check.facts
    seen = facts.get("seen_by")
    by = seen if isinstance(seen, list) else []
    difference = facts.get("logprob_difference")
    return FaultSeen(
        name=str(facts["fault"]),
        outcome=str(check.outcome),
        by_score=SCORE in by,
        by_tokens=TOKENS in by,
        score=_share(facts, "strict_match"),
        broken=_count(facts, "broken"),
        mended=_count(facts, "mended"),
        # An engine that gives no number at all is a difference without end.
        difference=difference if isinstance(difference, float) else None,
        limit=_share(facts, "logprob_limit"),
        questions=_count(facts, "questions"),
        unsplit=_share(facts, "baseline_score"),
    )


def _flip(told: Mapping[str, Any]) -> Flip:
    return Flip(
        id=printable(str(told.get("id", ""))),
        way=printable(str(told.get("way", ""))),
        question=_lines(str(told.get("question", ""))),
        unsplit=_lines(str(told.get("unsplit", ""))),
        split=_lines(str(told.get("split", ""))),
    )


def _lines(text: str) -> str:
    """A model may answer anything: control characters are spelled out, and it ends somewhere."""
    more = "…" if len(text) > _MOST_TEXT else ""
    return "\n".join(map(printable, text[:_MOST_TEXT].splitlines())) + more


def _count(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return int(value) if is_number(value) else None


def _share(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    return float(value) if is_number(value) else None


def _interval(told: Any) -> tuple[float, float] | None:
    if isinstance(told, list | tuple) and len(told) == 2 and all(map(is_number, told)):
        return float(told[0]), float(told[1])
    return None


def share(value: float | None) -> str:
    """Four digits, which tell one of 1,319 questions; ``–`` for none."""
    return "–" if value is None else f"{value:.4f}"


def fell(lowest: float | None) -> str:
    """What a lower bound of (split - unsplit) says in words."""
    if lowest is None:
        return "not compared"
    return (
        f"fell by less than {abs(lowest):.4f}" if lowest <= 0 else f"rose by {lowest:.4f} or more"
    )


def accuracy_lines(run: AccuracyRun) -> list[str]:
    """A run in a few lines of plain text."""
    asked = f"{run.questions} questions" + ("" if run.shots is None else f", {run.shots}-shot")
    sees = "too few right answers to pass"
    if run.detectable is not None:
        sees = f"refuses a drop of {share(run.detectable)}"
    margin = "" if run.margin is None else f"; margin {run.margin:g}, {sees}"
    name = " ".join(filter(None, (run.row.model, run.row.dtype, run.row.topology)))
    lines = [f"accuracy of {printable(name)}: {asked}{margin}"]
    widest = max((len(printable(arm.name)) for arm in run.arms), default=0)
    lines += [f"  {printable(arm.name):<{widest}} {_arm_line(arm)}" for arm in run.arms]
    if run.unseen:
        lines.append(f"  {UNSEEN_STEPS}")
    if run.faults:
        any_, score, tokens = run.seen
        lines.append(
            f"  faults seen {any_} of {len(run.faults)}: {score} by the score, "
            f"{tokens} by log-probabilities"
        )
    return lines


def _arm_line(arm: ArmScore) -> str:
    low, high = arm.interval
    text = f"{share(arm.score)} [{share(low)}, {share(high)}]"
    if arm.floor is not None:
        text += f" floor {share(arm.floor)}"
    if arm.broken is not None and arm.mended is not None:
        text += f" {arm.broken} broken, {arm.mended} mended, p {number(arm.p_value)}, "
        text += fell(arm.lowest_difference)
    word = arm.outcome if arm.outcome == "passed" else arm.outcome.upper()
    return f"{text}: {word}"
