"""The ledger at work: waived tests must fail; stale entries and bare xfail marks are refused."""

from __future__ import annotations

import datetime
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import pytest

from afd_testkit.need_rule import fail_collection

if TYPE_CHECKING:
    from afd_testkit.ledger import Waiver


class Ledger:
    """The waivers in force, and what became of them in this session."""

    def __init__(self, waivers: Sequence[Waiver], today: datetime.date) -> None:
        self._expired = [w for w in waivers if w.expired(today)]
        self._live = [w for w in waivers if not w.expired(today)]
        self._used: set[Waiver] = set()
        self._excused: set[Waiver] = set()  # its tests could not, or were not to, run
        self._wrong: list[str] = []

    def for_test(self, nodeid: str) -> Waiver | None:
        """The waiver that covers a test, if any."""
        return next((w for w in self._live if w.is_for_test and w.covers(nodeid)), None)

    def for_check(self, name: str) -> Waiver | None:
        """The waiver that covers a check, if any."""
        return next((w for w in self._live if not w.is_for_test and w.covers(name)), None)

    def saw_test(self, nodeid: str, *, ran: bool) -> None:
        """A test ran, or did not because of a missing need or the user's selection."""
        for waiver in self._live:
            if waiver.is_for_test and waiver.covers(nodeid):
                (self._used if ran else self._excused).add(waiver)

    def saw_check(self, name: str, *, passed: bool) -> None:
        """A check ended; that a waived one passes is an error."""
        waiver = self.for_check(name)
        if waiver is not None:
            self._used.add(waiver)
            if passed:
                self._wrong.append(f"{waiver.label()}: {name} passed; remove the entry.")

    def problems(self, *, whole_run: bool, gates_ran: bool) -> list[str]:
        """What fails the session, one sentence each.

        Of a run over part of the tests (``whole_run`` false) nothing can be said of entries
        for the other tests, and without gates nothing of entries for checks.
        """
        found = [f"{w.label()} expired on {w.expires}; fix it or renew it." for w in self._expired]
        for waiver in self._live:
            judged = whole_run if waiver.is_for_test else gates_ran
            if judged and waiver not in self._used | self._excused:
                found.append(f"{waiver.label()} matches nothing that ran; remove the entry.")
        return found + self._wrong


class LedgerRule:
    """Hooks that hold the session to its ledger; one object a session."""

    def __init__(self, ledger: Ledger, *, strict: bool) -> None:
        self._ledger = ledger
        self._strict = strict  # a ledger file is configured: xfail marks need an entry
        self._problems: list[str] = []
        self._deselected = False
        self._gates_ran = False

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """A mark says nothing about issue and owner; the ledger does."""
        report = yield
        if not self._strict:
            return report
        return fail_collection(
            report,
            [
                f"{node.nodeid}: marked xfail without an entry in the ledger; "
                "add one with match, reason, issue and owner."
                for node in report.result or ()
                if isinstance(node, pytest.Item)
                and node.get_closest_marker("xfail") is not None
                and self._ledger.for_test(node.nodeid) is None
            ],
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """A waived test is a strict xfail: pytest itself turns an unexpected pass red."""
        for item in items:
            if (waiver := self._ledger.for_test(item.nodeid)) is not None:
                reason = f"{waiver.label()}: {waiver.reason}"
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True), append=False)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Left out on purpose: that says nothing against an entry."""
        for item in items:
            self._ledger.saw_test(item.nodeid, ran=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What ran, and what could not."""
        skipped = report.skipped and not hasattr(report, "wasxfail")
        if report.when == "call" or skipped:
            self._ledger.saw_test(report.nodeid, ran=not skipped)

    def pytest_afd_check(self) -> None:
        """At least one gate ran: entries for checks can be judged."""
        self._gates_ran = True

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Stale entries fail a session that was otherwise green."""
        if hasattr(session.config, "workerinput") or session.config.option.collectonly:
            return
        whole = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
        finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        self._problems = self._ledger.problems(
            whole_run=whole and finished, gates_ran=self._gates_ran and finished
        )
        if self._problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What is wrong with the ledger."""
        if self._problems:
            terminalreporter.section("afd: ledger", red=True)
            for problem in self._problems:
                terminalreporter.write_line(problem, red=True)
