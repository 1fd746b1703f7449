"""The skip rule at work: refuse tests without needs, skip or fail, count, tell.

A skip that did not come from this rule (``pytest.skip``, ``importorskip``, the marks ``skip`` and
``skipif``, of a test or of a whole module) is a failure where needs are strict or any is required,
and a row of the closing table elsewhere.  An expected failure is no skip.

One object a session.  Counts travel as report properties and worker output, so that a run under
pytest-xdist tells the same as one without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from afd_testkit.devices import Demand, MarkerError, Needs

needs_key = pytest.StashKey[Needs]()

PROPERTY = "afd_missing"
UNNAMED = "no need named"
_OUTPUT = "afd_deselected"
_OUTPUT_UNNAMED = "afd_unnamed_collectors"
_TITLE = "afd: not run here"


class NeedRule:
    """Hooks that hold every test to the needs it names."""

    def __init__(self, needs: Needs, required: Sequence[str], *, strict: bool) -> None:
        self._needs = needs
        self._required = frozenset(required)
        self._strict = strict
        self._missing: Counter[tuple[str, str]] = Counter()
        self._deselected: Counter[str] = Counter()
        self._unnamed_tests: set[str] = set()
        self._unnamed_collectors: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """A test without a need, or with a senseless one, is a collection error naming it.

        So is a module that skips itself, where such a skip may not pass.
        """
        report = yield
        if report.skipped and self._refusing:
            return fail_collection(report, [self._refusal(report)])
        wrong = []
        for node in report.result or ():
            if isinstance(node, pytest.Item):
                try:
                    named = self._needs.demands(node)
                except MarkerError as error:
                    wrong.append(f"{node.nodeid}: {error}.")
                    continue
                if self._strict and not named:
                    wrong.append(
                        f"{node.nodeid}: no need is named; mark the test, its class or its "
                        f"module with one of {', '.join(self._needs.names())}."
                    )
        return fail_collection(report, wrong)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """The one place where a test is skipped."""
        missing = self._needs.first_missing(item)
        if missing is None:
            return
        demand, why = missing
        item.user_properties.append((PROPERTY, f"{demand.need.name}: {why}"))
        reason = f"needs {demand.label()}: {why}; to run it: {demand.need.command}"
        if demand.need.name in self._required:
            pytest.fail(f"{reason} (required by --afd-require)", pytrace=False)
        pytest.skip(reason)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Outermost, when all others have judged: a skip from elsewhere, where none may pass."""
        report = yield
        if self._refusing and _is_unnamed(report):
            report.longrepr = self._refusal(report)
            report.outcome = "failed"
        return report

    @property
    def _refusing(self) -> bool:
        return self._strict or bool(self._required)

    def _refusal(self, report: pytest.TestReport | pytest.CollectReport) -> str:
        where, why = _skip(report)
        held = ["afd_strict_needs"] * self._strict
        held += [f"--afd-require {name}" for name in sorted(self._required)]
        return (
            f"{report.nodeid}: skipped at {where} ({why}) without a need; under "
            f"{', '.join(held)} only a need may skip. Take the skip out, mark the test, its class "
            f"or its module with what it needs ({', '.join(self._needs.names())}), and import "
            "what may be absent inside the test."
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that skipped itself."""
        if report.skipped:
            self._unnamed_collectors.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what was not run, in the process that talks to the user."""
        if _is_unnamed(report):
            self._unnamed_tests.add(report.nodeid)
        if report.when == "setup":
            for name, value in report.user_properties:
                if name == PROPERTY:
                    need, _, why = str(value).partition(": ")
                    self._missing[need, why] += 1

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """A test left out by ``-m`` or ``-k`` could not run here either; cpu ones could."""
        for item in items:
            demand = self._telling(self._needs.demands(item))
            if demand is not None:
                self._deselected[demand.need.name] += 1

    def _telling(self, demands: Sequence[Demand]) -> Demand | None:
        """The demand under which a deselected test is counted: a missing one, else any but cpu."""
        special = [demand for demand in demands if demand.need.name != "cpu"]
        absent = [d for d in special if self._needs.why_missing(d) is not None]
        return next(iter(absent or special), None)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker hands its counts to the controller."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_OUTPUT] = dict(self._deselected)
            session.config.workeroutput[_OUTPUT_UNNAMED] = sorted(self._unnamed_collectors)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every worker collects the same tests, so that one worker's counts are the run's."""
        if hasattr(node, "workeroutput"):  # a crashed worker has none
            self._deselected |= Counter(node.workeroutput.get(_OUTPUT, {}))
            # pytest-xdist itself passes only one of several with the same place and reason.
            self._unnamed_collectors.update(node.workeroutput.get(_OUTPUT_UNNAMED, ()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The closing table: need, number of tests, why, and the command that runs them."""
        rows = []
        for need in self._needs:
            for (name, why), count in sorted(self._missing.items()):
                if name == need.name:
                    verdict = "FAILED, required: " if name in self._required else ""
                    rows.append((name, str(count), verdict + why, need.command))
            if count := self._deselected[need.name]:
                rows.append((need.name, str(count), "not selected here", need.command))
        tests, modules = len(self._unnamed_tests), len(self._unnamed_collectors)
        if tests or modules:
            parts = [f"{tests} by a mark or a call"] * bool(tests)
            parts += [f"{modules} whole, module or folder, at its import"] * bool(modules)
            told = f"skipped all the same: {', '.join(parts)}"
            rows.append((UNNAMED, str(tests + modules), told, "pytest -rs shows where and why"))
        if rows:
            terminalreporter.section(_TITLE)
            for line in _table(("need", "tests", "why", "to run them"), rows):
                terminalreporter.write_line(line)


def _is_unnamed(report: pytest.TestReport) -> bool:
    """Whether a test was skipped by something else than a missing need."""
    by_need = any(name == PROPERTY for name, _ in report.user_properties)
    return report.skipped and not hasattr(report, "wasxfail") and not by_need


def _skip(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str]:
    """Place and reason of a skip."""
    if isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        return f"{path}:{line}", reason.removeprefix("Skipped: ")
    return "an unknown place", report.longreprtext


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines with aligned columns; the last column is not padded."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def fail_collection(report: pytest.CollectReport, errors: Sequence[str]) -> pytest.CollectReport:
    """``report`` as it is, or turned into an error that shows ``errors`` after its own."""
    if errors:
        own = [report.longreprtext] if report.failed else []
        report.outcome = "failed"
        report.longrepr = "\n".join([*own, *errors])
        report.result = []
    return report
