"""The page of a run: one self-contained HTML file, without scripts and without links outward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from afd_testkit.charts import balance_bar, balance_words, profile_chart, profile_words
from afd_testkit.failure import extent, failure_text, number, printable, title
from afd_testkit.results import CheckResult, Outcome, StageBalance
from afd_testkit.summary import (
    GateRow,
    Verdict,
    count_outcomes,
    excess,
    failures,
    gate_rows,
    imbalance,
    is_split,
    worst_comparison,
)

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

    from afd_testkit.evidence import RunInfo

_MOST_FAILURES, _OPEN_FAILURES = 50, 3
_MOST_CHARTS = 10  # of one gate row; the figures of all its checks are in the table below it
_POINTS = 100  # of a chart that is not open from the start
_SYMBOL = {Verdict.PASSED: "✓", Verdict.FAILED: "✗", Verdict.INCOMPLETE: "!"}
_POLICY = {"token_balanced_tp": "token", "request_boundary": "request", "given": "given"}


@dataclass(frozen=True)
class Chart:
    """A drawn profile with its heading and the same in words."""

    heading: str
    words: str
    svg: Markup


@dataclass(frozen=True)
class Section:
    """One gate row with its charts: ``first`` is open from the start, if the row has a profile."""

    row: GateRow
    first: Chart | None
    others: list[Chart]
    undrawn: int


@dataclass(frozen=True)
class Bar:
    """One policy's step of a workload."""

    policy: str
    words: str
    svg: Markup
    imbalance: float | None


@dataclass(frozen=True)
class Workload:
    """The bars of one workload, next to each other."""

    case: str
    bars: list[Bar]


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("afd_testkit"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number, printable=printable, title=title, failure=_failure_body, extent=extent
    )
    return environment.get_template("page.html.j2")


def render_page(run: RunInfo, checks: Sequence[CheckResult]) -> str:
    """The page as text."""
    judgement = run.judge(checks)
    bad = failures(checks)
    rows = gate_rows(checks)
    return _template().render(
        run=run,
        symbol=_SYMBOL[judgement.verdict],
        verdict=str(judgement.verdict),
        reasons=judgement.reasons,
        counts=count_outcomes(checks),
        seconds=sum(check.seconds for check in checks),
        memory=_gib(run.machine.memory_bytes),
        command=_command(run.command),
        rows=rows,
        failures=[
            (check, _chart(check, _POINTS if n >= _OPEN_FAILURES else 200))
            for n, check in enumerate(bad[:_MOST_FAILURES])
        ],
        open_failures=_OPEN_FAILURES,
        more_failures=len(bad) - len(bad[:_MOST_FAILURES]),
        skipped=[check for check in checks if check.outcome is Outcome.SKIPPED],
        waived=[check for check in checks if check.outcome is Outcome.WAIVED],
        balance=_balance(rows),
        sections=[_section(row) for row in rows],
        worst_of=worst_comparison,
    )


def _failure_body(check: CheckResult) -> str:
    """The failure text without its first line, which the heading above it says already."""
    return failure_text(check).partition("\n")[2]


def _command(arguments: Sequence[str]) -> str:
    import shlex

    return shlex.join(arguments)


def _gib(count: int | None) -> str:
    return "memory unknown" if count is None else f"{count / 2**30:.0f} GiB"


def _chart(check: CheckResult, points: int) -> Chart | None:
    if check.profile is None or not check.profile.difference:
        return None
    heading = " · ".join(part for part in (check.case, check.variant) if part)
    return Chart(heading, profile_words(check.profile), profile_chart(check.profile, points))


def _section(row: GateRow) -> Section:
    """The checks of a row, those nearest to or over their limit first."""

    def reach(check: CheckResult) -> float:
        worst = worst_comparison(check)
        return 0.0 if worst is None else excess(worst)

    drawable = [check for check in row.checks if check.profile and check.profile.difference]
    # Failed checks are drawn where their text stands.
    passing = [check for check in drawable if check.outcome is not Outcome.FAILED]
    ordered = sorted(passing, key=reach, reverse=True)
    first = _chart(ordered[0], 200) if ordered else None
    others = [_chart(check, _POINTS) for check in ordered[1:_MOST_CHARTS]]
    return Section(
        row,
        first,
        [chart for chart in others if chart is not None],
        undrawn=max(0, len(ordered) - _MOST_CHARTS),
    )


def _balance(rows: Sequence[GateRow]) -> list[tuple[GateRow, list[Workload]]]:
    """For each row whose engine reported steps: its workloads, one bar a policy."""
    found = [(row, _workloads(row)) for row in rows]
    return [(row, workloads) for row, workloads in found if workloads]


def _workloads(row: GateRow) -> list[Workload]:
    """Each workload with the largest step of each policy, ``request`` before ``token``."""
    cases: dict[str, dict[str, StageBalance]] = {}
    for check in row.checks:
        # Where nothing was split, that and its reason are what there is to show.
        for step in list(filter(is_split, check.balance)) or check.balance:
            largest = cases.setdefault(check.case, {})
            known = largest.get(step.policy)
            if known is None or sum(step.tokens) > sum(known.tokens):
                largest[step.policy] = step
    return [_workload(case, sorted(steps.items())) for case, steps in cases.items()]


def _workload(case: str, steps: Sequence[tuple[str, StageBalance]]) -> Workload:
    widest = max(sum(map(max, step.tokens, step.input_tokens)) for _, step in steps)
    bars = [
        Bar(
            _POLICY.get(policy, policy),
            balance_words(step),
            balance_bar(step, widest),
            imbalance(step),
        )
        for policy, step in steps
    ]
    return Workload(case, bars)
