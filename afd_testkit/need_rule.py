"""The skip rule at work: refuse tests without needs, skip or fail, count, tell.

One object a session.  Counts travel as report properties and worker output, so that a run under
pytest-xdist tells the same as one without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from afd_testkit.devices import Demand, MarkerError, Needs

PROPERTY = "afd_missing"
_OUTPUT = "afd_deselected"
_TITLE = "afd: not run here"


class NeedRule:
    """Hooks that hold every test to the needs it names."""

    def __init__(self, needs: Needs, required: Sequence[str], *, strict: bool) -> None:
        self._needs = needs
        self._required = frozenset(required)
        self._strict = strict
        self._missing: Counter[tuple[str, str]] = Counter()
        self._deselected: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """A test without a need, or with a senseless one, is a collection error naming it."""
        report = yield
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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what was not run, in the process that talks to the user."""
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

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every worker collects the same tests, so that one worker's counts are the run's."""
        if hasattr(node, "workeroutput"):  # a crashed worker has none
            self._deselected |= Counter(node.workeroutput.get(_OUTPUT, {}))

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
        if rows:
            terminalreporter.section(_TITLE)
            for line in _table(("need", "tests", "why", "to run them"), rows):
                terminalreporter.write_line(line)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines with aligned columns; the last column is not padded."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def fail_collection(report: pytest.CollectReport, errors: Sequence[str]) -> pytest.CollectReport:
    """``report`` as it is, or turned into an error that shows ``errors``."""
    if errors:
        report.outcome = "failed"
        report.longrepr = "\n".join(errors)
        report.result = []
    return report
