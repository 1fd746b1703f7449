"""The text of a failed check, as pytest, terminal and page show it; and how numbers are written."""

from __future__ import annotations

import math

from afd_testkit.results import CheckResult, Comparison, Outcome, Worst
from afd_testkit.summary import ACCURACY, NO_ENGINE, severity

_MOST_COMPARISONS = 4


def number(value: float | None, digits: int = 2) -> str:
    """So many significant digits, short: ``0``, ``1.2e-6``, ``0.05``, ``NaN``; ``–`` for none."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if -2 <= int(exponent) <= 2:
        return f"{float(f'{mantissa}e{exponent}'):g}"
    return (
        f"{mantissa.rstrip('0').removesuffix('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    )


def extent(bounds: tuple[float, float] | None) -> str:
    """Whole numbers from smallest to largest: ``3–16``, ``3``; ``–`` for none."""
    if bounds is None:
        return "–"
    low, high = (f"{value:.0f}" for value in bounds)
    return low if low == high else f"{low}–{high}"


def printable(text: str) -> str:
    """``text`` on one line with control characters escaped: no name can steer a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def title(check: CheckResult) -> str:
    """Which check: gate, model, dtype and topology, engine, case, variant."""
    engine = "" if check.engine == NO_ENGINE else check.engine
    subject = " ".join(part for part in (check.model, check.dtype, check.topology) if part)
    parts = (check.gate, subject, engine, check.case, check.variant)
    return printable(" · ".join(part.strip() for part in parts if part.strip()))


def what(comparison: Comparison) -> str:
    """What a comparison found, in one clause."""
    limit = f"limit {number(comparison.limit)}"
    if comparison.quantity == "greedy" and not comparison.ok:
        return f"greedy token differs, expected to lead by {number(comparison.max_diff)}, {limit}"
    verb = "differs by" if not comparison.ok else "agrees within"
    return f"{comparison.quantity} {verb} {number(comparison.max_diff)}, {limit}"


def place(comparison: Comparison, gate: str) -> str:
    """Where it went furthest: request, token, stage, layer and index; empty where not known."""
    worst = comparison.worst
    return "" if worst is None else _position(worst, comparison.quantity, gate)


def _position(at: Worst, quantity: str, gate: str) -> str:
    if gate == ACCURACY:  # several steps compute an answer, and nobody sees which
        return f"question {at.request!r}, token {at.token} of its reference answer"
    token = f"request {at.request!r}, token {at.token}"
    if quantity == "greedy":  # sampled after the whole step, from one row
        return token
    stage = "in an unsplit step" if at.stage is None else f"stage {at.stage}"
    layer = "" if at.layer is None else f", layer {at.layer}"
    return f"{token}, {stage}{layer}, index {at.index}"


def failing(check: CheckResult) -> list[Comparison]:
    """The comparisons that are not ok, in the order of :func:`severity`."""
    return sorted((c for c in check.comparisons if not c.ok), key=severity, reverse=True)


def failure_text(check: CheckResult) -> str:
    """What failed, worst and first position, actual, expected, tolerance, noise, how to repeat it.

    Every failing comparison has its block, at most four of them.  ``check.message`` is
    appended, unless it is itself a text made here.
    """
    head = f"{check.outcome.upper()}: {title(check)}"
    bad = failing(check)
    lines = [head]
    for shown, comparison in enumerate(bad[:_MOST_COMPARISONS]):
        lines += [""] if shown else []
        lines += _block(comparison, check.gate)
    if len(bad) > _MOST_COMPARISONS:
        lines.append(f"  and {len(bad) - _MOST_COMPARISONS} more quantities differ")
    # A gate may store this very text as the message of its result.
    if check.message.strip() and head not in check.message:
        label = "reason" if not bad else "note"
        lines += _labelled(label, check.message.strip())
    if check.outcome is Outcome.FAILED and not bad and not check.message.strip():
        lines += _labelled("reason", "none given: the gate named neither comparison nor message")
    if check.repeat:
        lines += _labelled("repeat", check.repeat)
    return "\n".join(lines)


def _block(comparison: Comparison, gate: str) -> list[str]:
    lines = _labelled("what", f"{what(comparison)} ({comparison.compared:,} values compared)")
    worst = comparison.worst
    if worst is not None:
        lines += _labelled("worst", place(comparison, gate))
        lines += _labelled("actual", f"{worst.actual!r}")
        lines += _labelled("expected", f"{worst.expected!r}")
    if comparison.first is not None:
        same = comparison.first == worst
        where = "the same" if same else _position(comparison.first, comparison.quantity, gate)
        lines += _labelled("first", f"beyond the limit: {where}")
    rule = f" ({comparison.rule})" if comparison.rule else ""
    lines += _labelled("tolerance", f"{number(comparison.tolerance)}{rule}")
    noise = "not measured" if comparison.noise is None else number(comparison.noise)
    return lines + _labelled("noise", noise)


def _labelled(label: str, text: str) -> list[str]:
    first, *rest = map(printable, text.splitlines() or [""])
    return [f"  {label:<10}{first}", *(f"  {'':<10}{line}" for line in rest)]
