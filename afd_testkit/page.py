"""The page of a run: one self-contained HTML file, without scripts and without links outward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from afd_testkit.accuracy_view import UNSEEN_STEPS, accuracy_runs, fell, share
from afd_testkit.charts import (
    balance_bar,
    balance_words,
    is_flat,
    profile_chart,
    profile_words,
    score_chart,
)
from afd_testkit.device_evidence import Emulation, cannot_show, emulations, is_emulated
from afd_testkit.failure import extent, failure_text, number, printable, title
from afd_testkit.forced_balance import asks_for_it, forced_count
from afd_testkit.results import CheckResult, Outcome, StageBalance
from afd_testkit.summary import (
    GateRow,
    Verdict,
    count_outcomes,
    excess,
    failed_cases,
    gate_rows,
    is_split,
    skip_reasons,
    skipped_subjects,
    worst_comparison,
)

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

    from afd_testkit.run_info import RunInfo

_MOST_FAILURES, _OPEN_FAILURES = 50, 3
_MOST_CHARTS = 10  # of one gate row; the figures of all its checks are in the table below it
_POINTS = 100  # of a chart that is not open from the start
_SYMBOL = {Verdict.PASSED: "✓", Verdict.FAILED: "✗", Verdict.INCOMPLETE: "!"}
_MLA_CAST = {
    "lifted": "lifted: MLA prefill keeps float32, where the real code casts to bfloat16",
    "kept": "kept, as in the real code",
}
_POLICY = {"token_balanced_tp": "token", "request_boundary": "request", "given": "given"}


@dataclass(frozen=True)
class Chart:
    """A drawn profile with its heading and the same in words; flat ones are not drawn."""

    heading: str
    words: str
    svg: Markup | None


@dataclass(frozen=True)
class Failure:
    """A failed case: its worst check with its chart, and the other variants that failed."""

    check: CheckResult
    chart: Chart | None
    others: list[CheckResult]


@dataclass(frozen=True)
class Idle:
    """Items that gave no verdict for one reason.

    ``command`` runs all of them; where it is empty, each item, a name and a command, has its own.
    """

    state: str
    reason: str
    command: str
    items: list[tuple[str, str]]


@dataclass(frozen=True)
class Emulated:
    """What ran on the emulated NPU: ``checks`` of ``total`` that ran at all, by ``kinds``.

    ``cannot_show``: each limit in a few words, and what more there is to say of it.
    """

    devices: list[str]
    cannot_show: list[tuple[str, str]]
    kinds: list[tuple[Emulation, int]]
    checks: int
    total: int

    @staticmethod
    def mla_cast(kind: Emulation) -> str:
        """Whether the cast took place, in words."""
        return _MLA_CAST.get(kind.mla_cast, kind.mla_cast)


@dataclass(frozen=True)
class Forced:
    """Executions that forced expert ids to be even: ``asked`` by the gate for it, and in others."""

    asked: int
    others: list[CheckResult]


@dataclass(frozen=True)
class Section:
    """One gate row with its charts: ``first`` is open from the start, if there is one to draw.

    ``quantity`` is what its profiles are of.  ``flat``: checks of which every difference in it
    is exactly 0.  ``partial``: checks whose profile shows no difference though they found one,
    in a comparison that the profile is not of.
    """

    row: GateRow
    first: Chart | None
    others: list[Chart]
    undrawn: int
    quantity: str
    flat: int
    partial: int


@dataclass(frozen=True)
class Bar:
    """One policy's step of a workload."""

    policy: str
    words: str
    svg: Markup


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
    environment.filters.update(share=share, fell=fell, score_chart=score_chart)
    return environment.get_template("page.html.j2")


def render_page(run: RunInfo, checks: Sequence[CheckResult]) -> str:
    """The page as text."""
    judgement = run.judge(checks)
    rows = gate_rows(checks)
    judged, skipped = skipped_subjects(rows)
    cases = failed_cases(checks)
    return _template().render(
        run=run,
        emulated=_emulated(checks),
        forced=_forced(checks),
        topologies=list(dict.fromkeys(row.topology for row in rows)),
        symbol=_SYMBOL[judgement.verdict],
        verdict=str(judgement.verdict),
        reasons=judgement.reasons,
        counts=count_outcomes(checks),
        skip_reasons=skip_reasons(checks),
        seconds=sum(check.seconds for check in checks),
        memory=_gib(run.machine.memory_bytes),
        command=_command(run.command),
        rows=judged,
        skipped=skipped,
        failures=[
            Failure(case[0], _chart(case[0], _POINTS if n >= _OPEN_FAILURES else 200), case[1:])
            for n, case in enumerate(cases[:_MOST_FAILURES])
        ],
        open_failures=_OPEN_FAILURES,
        more_failures=sum(map(len, cases[_MOST_FAILURES:])),
        idle=_idle(run, checks),
        accuracy=accuracy_runs(checks),
        unseen_steps=UNSEEN_STEPS,
        balance=_balance(judged),
        sections=[_section(row) for row in judged],
        worst_of=worst_comparison,
    )


def _emulated(checks: Sequence[CheckResult]) -> Emulated | None:
    """What the banner says; ``None`` where nothing ran on the emulated NPU."""
    found = emulations(checks)
    if not found:
        return None
    return Emulated(
        devices=list(dict.fromkeys(kind.label for kind in found)),
        cannot_show=[_in_short(limit) for limit in cannot_show(found)],
        kinds=list(found.items()),
        checks=sum(found.values()),
        total=sum(c.outcome is not Outcome.SKIPPED or is_emulated(c.facts) for c in checks),
    )


def _forced(checks: Sequence[CheckResult]) -> Forced | None:
    """``None`` where every expert id was the router's own."""
    told = [check for check in checks if forced_count(check.facts)]
    if not told:
        return None
    asked = [check for check in told if asks_for_it(check.gate, check.case, check.variant)]
    return Forced(
        sum(forced_count(check.facts) for check in asked),
        [check for check in told if check not in asked],
    )


def _in_short(limit: str) -> tuple[str, str]:
    """``"memory: capacity"`` as ``("memory", "capacity")``."""
    head, _, rest = limit.partition(":")
    return head.strip(), rest.strip()


def _idle(run: RunInfo, checks: Sequence[CheckResult]) -> list[Idle]:
    """What was not run, skipped or waived, by state and reason."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for item in run.not_run:
        groups.setdefault(("not run", item.reason), []).append((item.item, item.command))
    for outcome in (Outcome.SKIPPED, Outcome.WAIVED):
        for check in checks:
            if check.outcome is outcome:
                key = (str(outcome), check.message)
                groups.setdefault(key, []).append((title(check), check.repeat))
    return [
        Idle(state, reason, _common(command for _, command in items), items)
        for (state, reason), items in groups.items()
    ]


def _common(commands: Iterable[str]) -> str:
    found = set(commands)
    return found.pop() if len(found) == 1 else ""


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
    flat = is_flat(check.profile)
    svg = None if flat else profile_chart(check.profile, points)
    return Chart(heading, profile_words(check.profile), svg)


def _section(row: GateRow) -> Section:
    """The checks of a row, those nearest to or over their limit first."""

    def reach(check: CheckResult) -> float:
        worst = worst_comparison(check)
        return 0.0 if worst is None else excess(worst)

    # Failed checks are drawn where their text stands.
    passing = [check for check in row.checks if check.outcome is not Outcome.FAILED]
    profiles = [(check, check.profile) for check in passing if check.profile is not None]
    measured = [(check, profile) for check, profile in profiles if profile.difference]
    drawable = [check for check, profile in measured if not is_flat(profile)]
    empty = [check for check, profile in measured if is_flat(profile)]
    ordered = sorted(drawable, key=reach, reverse=True)
    first = _chart(ordered[0], 200) if ordered else None
    others = [_chart(check, _POINTS) for check in ordered[1:_MOST_CHARTS]]
    return Section(
        row,
        first,
        [chart for chart in others if chart is not None],
        undrawn=max(0, len(ordered) - _MOST_CHARTS),
        quantity=measured[0][1].quantity if measured else "",
        flat=sum(not _differs(check) for check in empty),
        partial=sum(map(_differs, empty)),
    )


def _differs(check: CheckResult) -> bool:
    """Whether the quantity that a check draws differs at all."""
    drawn = check.profile.quantity if check.profile is not None else ""
    return any(c.quantity == drawn and c.max_diff != 0.0 for c in check.comparisons)


def _balance(rows: Sequence[GateRow]) -> list[tuple[list[GateRow], list[Workload]]]:
    """The workloads of each gate, one bar a policy.

    Subjects whose engine reported the same steps share one drawing.
    """
    shared: dict[tuple[str, str, str], list[GateRow]] = {}
    for row in rows:
        steps = _steps(row)
        if steps:
            shared.setdefault((row.gate, row.engine, repr(steps)), []).append(row)
    return [(alike, _workloads(alike[0])) for alike in shared.values()]


def _workloads(row: GateRow) -> list[Workload]:
    return [_workload(case, sorted(steps.items())) for case, steps in _steps(row).items()]


def _steps(row: GateRow) -> dict[str, dict[str, StageBalance]]:
    """The largest step of each policy, by workload."""
    cases: dict[str, dict[str, StageBalance]] = {}
    for check in row.checks:
        # Where nothing was split, that and its reason are what there is to show.
        for step in list(filter(is_split, check.balance)) or check.balance:
            largest = cases.setdefault(check.case, {})
            known = largest.get(step.policy)
            if known is None or sum(step.tokens) > sum(known.tokens):
                largest[step.policy] = step
    return cases


def _workload(case: str, steps: Sequence[tuple[str, StageBalance]]) -> Workload:
    widest = max(sum(map(max, step.tokens, step.input_tokens)) for _, step in steps)
    bars = [
        Bar(
            _POLICY.get(policy, policy),
            balance_words(step),
            balance_bar(step, widest),
        )
        for policy, step in steps
    ]
    return Workload(case, bars)
