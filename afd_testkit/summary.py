"""What a run amounts to: the verdict, the counts, and one row a gate and subject.

A subject is an engine, model, dtype and topology.

Record, terminal summary and page all show what is computed here, so that they cannot disagree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from afd_testkit.device_evidence import is_emulated
from afd_testkit.results import CheckResult, Comparison, Outcome, StageBalance

#: Facts that the summary shows when a gate reports them.
FACT_HIT_PERCENT = "realized_percent"  # number: prompt tokens served from the prefix cache
FACT_CHUNKS = "chunks"  # request name to the scheduled tokens of each of its prefill steps

#: The gate that compares answers; its case of the arm that others are compared with, and theirs.
ACCURACY, ACCURACY_BASELINE, ACCURACY_SPLIT = "accuracy", "baseline", "split"

#: Why a step was not split that was not to be split: what the splitter says then.
SPLIT_OFF = "disabled"

#: Stands for the engine of a test that names none, in a run that names none.
NO_ENGINE = "no engine named"
_REASON_LENGTH = 32


class Verdict(StrEnum):
    """What a run says: only ``PASSED`` may be relied on."""

    PASSED = "passed"
    FAILED = "failed"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True)
class Judgement:
    """A verdict and, one sentence each, why it is not better."""

    verdict: Verdict
    reasons: tuple[str, ...]


def count_outcomes(checks: Iterable[CheckResult]) -> dict[str, int]:
    """Number of checks of each outcome, zeros included, and ``total``."""
    seen = Counter(check.outcome for check in checks)
    counts = {str(outcome): seen[outcome] for outcome in Outcome}
    return {"total": sum(counts.values()), **counts}


def judge(
    counts: dict[str, int], *, not_run: int, interrupted: bool, no_split_arm: bool
) -> Judgement:
    """The verdict on a run.

    A failed check fails the run, whatever else happened.  Without one, the run is incomplete
    if it was interrupted, if selected items did not run, if a check ended in an error (then
    nothing was judged), if no check passed, or if answers were asked for and of no split arm
    (``no_split_arm``).  Skipped and waived checks leave the verdict as it is; they are counted
    beside it.
    """
    failed = counts[Outcome.FAILED]
    reasons = [
        text
        for count, text in (
            (failed, f"{_checks(failed)} failed"),
            (
                counts[Outcome.ERROR],
                f"{_checks(counts[Outcome.ERROR])} ended in an error, judging nothing",
            ),
            (int(interrupted), "the run was interrupted"),
            (not_run, f"{not_run} selected {'item' if not_run == 1 else 'items'} did not run"),
            (int(counts[Outcome.PASSED] == 0), "no check passed"),
            (int(no_split_arm), f"{ACCURACY}: no split arm was compared with the unsplit one"),
        )
        if count
    ]
    if failed:
        return Judgement(Verdict.FAILED, tuple(reasons))
    return Judgement(Verdict.INCOMPLETE if reasons else Verdict.PASSED, tuple(reasons))


def lacks_a_split_arm(checks: Iterable[tuple[str, str, str]]) -> bool:
    """Whether accuracy was judged, and of no split arm; ``checks``: gate, case, outcome each."""
    judged = {
        case
        for gate, case, outcome in checks
        if gate == ACCURACY and outcome in (Outcome.PASSED, Outcome.FAILED)
    }
    return bool(judged) and ACCURACY_SPLIT not in judged


def _checks(count: int) -> str:
    return f"{count} {'check' if count == 1 else 'checks'}"


def excess(comparison: Comparison) -> float:
    """How far a comparison went: difference as a multiple of its limit; NaN counts as infinite.

    A limit of zero (exact comparison) makes every difference infinite, and no difference 0.
    """
    if math.isnan(comparison.max_diff) or math.isnan(comparison.limit):
        return math.inf
    if comparison.max_diff == 0.0:
        return 0.0
    return comparison.max_diff / comparison.limit if comparison.limit > 0 else math.inf


def severity(comparison: Comparison) -> tuple[bool, bool, float]:
    """Sort key: failing above passing, measured above exact, then by :func:`excess`.

    An exact comparison (tolerance 0) is over its limit by any factor at the first difference,
    and says less about where things went wrong than a measured one.
    """
    return (not comparison.ok, comparison.tolerance > 0, excess(comparison))


def is_split(step: StageBalance) -> bool:
    """Whether a step really ran as more than one stage."""
    return step.policy != "unsplit" and sum(tokens > 0 for tokens in step.tokens) > 1


def imbalance(step: StageBalance) -> float:
    """Real tokens of the largest stage over the mean of all: 1.0 is even; 0.0 without tokens."""
    total = sum(step.tokens)
    return max(step.tokens) * len(step.tokens) / total if total else 0.0


@dataclass(frozen=True)
class GateRow:
    """The checks of one gate on one subject, in the order they ran."""

    gate: str
    engine: str
    model: str
    dtype: str
    topology: str
    checks: tuple[CheckResult, ...]

    @property
    def emulated(self) -> bool:
        """Whether any of them ran on the emulated NPU."""
        return any(is_emulated(check.facts) for check in self.checks)

    @property
    def counts(self) -> dict[str, int]:
        """As :func:`count_outcomes`."""
        return count_outcomes(self.checks)

    @property
    def bad(self) -> int:
        """Number of checks that failed or ended in an error."""
        return sum(check.outcome in (Outcome.FAILED, Outcome.ERROR) for check in self.checks)

    @property
    def steps(self) -> tuple[int, int] | None:
        """Steps that were really split, and those of them cut inside a request.

        ``None`` where no step was to be split: none was reported, or in all of them it was off.
        """
        if self.gate == ACCURACY:
            return self._counted_steps()
        steps = [step for check in self.checks for step in check.balance]
        if all(step.reason == SPLIT_OFF for step in steps):
            return None
        split = list(filter(is_split, steps))
        return len(split), sum(step.cuts_request for step in split)

    def _counted_steps(self) -> tuple[int, int] | None:
        """Of the arms that were to be split: thousands of steps, of which facts tell the number."""
        arms = [check.facts for check in self.checks if check.case != ACCURACY_BASELINE]
        told = [(a.get("split_steps"), a.get("cut_requests")) for a in arms if "fault" not in a]
        counts = [(all_, cut) for all_, cut in told if is_number(all_) and is_number(cut)]
        if not counts:
            return None
        return int(sum(all_ for all_, _ in counts)), int(sum(cut for _, cut in counts))

    def worst(self, quantity: str) -> Comparison | None:
        """The comparison of ``quantity`` nearest to, or furthest over, its limit."""
        found = (c for check in self.checks for c in check.comparisons if c.quantity == quantity)
        return max(found, key=severity, default=None)

    @property
    def hit_percent(self) -> tuple[float, float] | None:
        """Smallest and largest realized prefix hit, in percent of prompt tokens."""
        facts = (check.facts.get(FACT_HIT_PERCENT) for check in self.checks)
        return _extent([float(value) for value in facts if is_number(value)])

    @property
    def chunks(self) -> tuple[float, float] | None:
        """Smallest and largest realized number of prefill steps of a request."""
        facts = (check.facts.get(FACT_CHUNKS) for check in self.checks)
        requests = [sizes for fact in facts if isinstance(fact, dict) for sizes in fact.values()]
        return _extent([float(len(sizes)) for sizes in requests if isinstance(sizes, list | tuple)])


def is_number(value: Any) -> TypeGuard[float]:
    """Facts are free form: only a finite number, no larger than floats are, can be shown as one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _extent(values: Sequence[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


def gate_rows(checks: Iterable[CheckResult]) -> list[GateRow]:
    """Checks grouped by engine, gate and the rest of the subject, in order of first appearance."""
    groups: dict[tuple[str, str, str, str, str], list[CheckResult]] = {}
    for check in checks:
        key = (check.engine, check.gate, check.model, check.dtype, check.topology)
        groups.setdefault(key, []).append(check)
    engines = list(dict.fromkeys(key[0] for key in groups))
    ordered = sorted(groups.items(), key=lambda item: engines.index(item[0][0]))
    return [
        GateRow(gate, engine, model, dtype, topology, tuple(members))
        for (engine, gate, model, dtype, topology), members in ordered
    ]


@dataclass(frozen=True)
class SkippedSubject:
    """A subject of which whole gates were skipped, for one reason."""

    engine: str
    model: str
    dtype: str
    topology: str
    reason: str
    gates: tuple[str, ...]
    count: int

    @property
    def label(self) -> str:
        """The gate's name, or how many there are."""
        return self.gates[0] if len(self.gates) == 1 else f"({len(self.gates)} gates)"


def skipped_subjects(rows: Iterable[GateRow]) -> tuple[list[GateRow], list[SkippedSubject]]:
    """The rows in which something was judged, and the others gathered by subject and reason."""
    judged: list[GateRow] = []
    gathered: dict[tuple[str, str, str, str, str], Counter[str]] = {}
    for row in rows:
        if row.counts[Outcome.SKIPPED] < len(row.checks):
            judged.append(row)
            continue
        for check in row.checks:
            key = (row.engine, row.model, row.dtype, row.topology, skip_reason(check))
            gathered.setdefault(key, Counter())[row.gate] += 1
    return judged, [
        SkippedSubject(*key, gates=tuple(gates), count=gates.total())
        for key, gates in gathered.items()
    ]


def skip_reason(check: CheckResult) -> str:
    """Why a check was skipped, in a few words: ``needs amx``."""
    told = check.message.strip().partition("\n")[0].partition(":")[0].strip()
    return told if len(told) <= _REASON_LENGTH else f"{told[: _REASON_LENGTH - 1]}…"


def skip_reasons(checks: Iterable[CheckResult]) -> str:
    """The reasons of all skipped checks, the most frequent first; at most two in full."""
    found = Counter(skip_reason(c) for c in checks if c.outcome is Outcome.SKIPPED)
    ranked = [reason for reason, _ in found.most_common() if reason]
    more = len(ranked) - 2
    rest = [f"{more} more {'reason' if more == 1 else 'reasons'}"] if more > 0 else []
    return ", ".join(ranked[:2] + rest)


def failed_cases(checks: Iterable[CheckResult]) -> list[list[CheckResult]]:
    """:func:`failures`, with the variants of one case together behind the worst of them."""
    cases: dict[tuple[str, ...], list[CheckResult]] = {}
    for check in failures(checks):
        subject = (check.engine, check.model, check.dtype, check.topology)
        key = (check.gate, *subject, check.case, check.outcome)
        cases.setdefault(key, []).append(check)
    return list(cases.values())


def failures(checks: Iterable[CheckResult]) -> list[CheckResult]:
    """Failed checks, then checks that ended in an error; the largest excess first."""
    bad = [check for check in checks if check.outcome in (Outcome.FAILED, Outcome.ERROR)]
    return sorted(bad, key=lambda c: (c.outcome is Outcome.ERROR, -_check_excess(c)))


def worst_comparison(check: CheckResult) -> Comparison | None:
    """The comparison of a check that went furthest."""
    return max(check.comparisons, key=severity, default=None)


def _check_excess(check: CheckResult) -> float:
    worst = worst_comparison(check)
    return excess(worst) if worst is not None else 0.0
