"""Collects what gates report, and writes the evidence when the session ends, however it ends.

Every check travels as a property of its test's report, so that a run under pytest-xdist
collects exactly as one without.  A gate item that ends without a check becomes one itself: an
error, or skipped.  One that never ran is listed as such.
"""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest

from afd_testkit.need_rule import PROPERTY, needs_key
from afd_testkit.settings import Settings, check_results_dir

if TYPE_CHECKING:
    from afd_testkit.evidence import RunFiles
    from afd_testkit.gate_item import GateItem
    from afd_testkit.ledger_rule import Ledger
    from afd_testkit.results import CheckResult
    from afd_testkit.run_info import RunInfo

CHECK = "afd_check"
GATE = "afd_gate"
_OUTPUT = "afd_gates"

#: The finished checks of the session, in the order in which they were reported.
checks_key = pytest.StashKey[list["CheckResult"]]()


def record(item: pytest.Item, result: CheckResult, ledger: Ledger) -> CheckResult:
    """Attach ``result`` to ``item``; a failure that the ledger waives comes back as waived."""
    from afd_testkit.ledger import check_id
    from afd_testkit.results import Outcome

    waiver = ledger.for_check(check_id(result))
    if waiver is not None and result.outcome is Outcome.FAILED:
        message = f"{waiver.label()}: {waiver.reason}\n{result.message}"
        result = replace(result, outcome=Outcome.WAIVED, message=message)
    item.user_properties.append((CHECK, json.dumps(result.as_dict())))
    return result


def check_from_dict(data: dict[str, Any]) -> CheckResult:
    """The inverse of ``CheckResult.as_dict``, also after a round trip through JSON."""
    from afd_testkit.results import CheckResult, Comparison, Outcome, Profile, StageBalance, Worst

    def comparison(entry: dict[str, Any]) -> Comparison:
        places = {
            key: None if entry[key] is None else Worst(**entry[key]) for key in ("worst", "first")
        }
        return Comparison(**{**entry, **places})

    def balance(entry: dict[str, Any]) -> StageBalance:
        pairs = {key: tuple(entry[key]) for key in ("tokens", "input_tokens")}
        return StageBalance(**{**entry, **pairs})

    def profile(entry: dict[str, Any]) -> Profile:
        pairs = {key: tuple(entry[key]) for key in ("difference", "noise")}
        return Profile(**{**entry, **pairs})

    return CheckResult(
        **{
            **data,
            "outcome": Outcome(data["outcome"]),
            "comparisons": tuple(map(comparison, data["comparisons"])),
            "balance": tuple(map(balance, data["balance"])),
            "profile": None if data["profile"] is None else profile(data["profile"]),
        }
    )


def gate_name(item: pytest.Item) -> str | None:
    """The gate that ``item`` belongs to; :class:`pytest.UsageError` for a marker without name."""
    mark = item.get_closest_marker(GATE)
    if mark is None:
        return None
    if len(mark.args) != 1 or mark.kwargs or not isinstance(mark.args[0], str):
        raise pytest.UsageError(f"{item.nodeid}: write @pytest.mark.{GATE}('name of the gate').")
    return mark.args[0]


class GateRun:
    """One session's gates: hooks only, one object a session."""

    def __init__(self, config: pytest.Config, settings: Settings, ledger: Ledger) -> None:
        self._config = config
        self._settings = settings
        self._ledger = ledger
        self._is_worker = hasattr(config, "workerinput")
        self._checks = config.stash.setdefault(checks_key, [])
        self._selected: dict[str, GateItem] = {}  # by test id
        self._ended: set[str] = set()
        self._taken: dict[str, int] = {}  # properties already read, by test id
        self._reported: set[str] = set()  # test ids with at least one check
        self._blamed: set[str] = set()  # test ids with a failed check, or one in error
        self._refusal = ""
        self._open: pytest.Item | None = None
        self._run: RunInfo | None = None
        self._files: RunFiles | None = None
        self._problem = ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """With gates to run, the result folder is tried first."""
        gates = [(item, gate) for item in session.items if (gate := gate_name(item)) is not None]
        if gates:
            from afd_testkit.gate_item import describe

            settings = self._settings
            self._selected = {item.nodeid: describe(item, gate, settings) for item, gate in gates}
        if not self._selected or self._config.option.collectonly:
            return
        try:
            check_results_dir(self._settings.results)
        except pytest.UsageError as error:
            if not self._is_worker:
                self._selected.clear()  # nothing runs, so there is nothing to write about
                raise
            self._refusal = str(error)  # a worker cannot stop the session; its gates refuse
        if not self._is_worker:
            self._run = self._begin()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Every report of a gate item says so, also that of a skipped one."""
        if (known := self._selected.get(item.nodeid)) is not None:
            item.user_properties.append((GATE, json.dumps(asdict(known))))
            self._open = item
            if self._refusal:
                pytest.fail(self._refusal, pytrace=False)

    def pytest_report_teststatus(
        self, report: pytest.TestReport | pytest.CollectReport, config: pytest.Config
    ) -> tuple[str, str, str] | None:
        """No dot for a gate that passed: each of its checks has a line of its own already."""
        if not isinstance(report, pytest.TestReport):
            return None
        quiet = config.get_verbosity() <= 0 and not config.pluginmanager.hasplugin("dsession")
        gate = quiet and any(name == GATE for name, _ in report.user_properties)
        return (
            ("passed", "", "PASSED") if gate and report.when == "call" and report.passed else None
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take over new checks, in the process that talks to the user."""
        if self._is_worker:
            return
        waived = report.when == "call" and report.skipped and hasattr(report, "wasxfail")
        self._take(report.nodeid, report.user_properties, waived=waived)
        if report.nodeid not in self._selected:
            return
        if report.when not in ("setup", "call"):  # teardown, or a crashed worker's report
            self._ended.add(report.nodeid)
        unexplained = report.failed and report.nodeid not in self._blamed
        unmentioned = report.skipped and report.nodeid not in self._reported
        if unexplained or unmentioned:
            self._add_missing(report)

    def _take(
        self, nodeid: str, properties: Sequence[tuple[str, object]], *, waived: bool = False
    ) -> None:
        start = self._taken.get(nodeid, 0)
        fresh = properties[start:]
        if not fresh:
            return
        from afd_testkit.gate_item import GateItem
        from afd_testkit.results import Outcome

        self._taken[nodeid] = len(properties)
        for name, value in fresh:
            if name == GATE:
                self._selected.setdefault(nodeid, GateItem(**json.loads(str(value))))
            elif name == CHECK:
                result = check_from_dict(json.loads(str(value)))
                if waived and result.outcome is Outcome.FAILED:
                    result = replace(result, outcome=Outcome.WAIVED)
                self._reported.add(nodeid)
                if result.outcome in (Outcome.FAILED, Outcome.ERROR):
                    self._blamed.add(nodeid)
                self._config.hook.pytest_afd_check(result=result)

    def _add_missing(self, report: pytest.TestReport) -> None:
        """A gate item that failed without a bad check, or was skipped without any."""
        from afd_testkit.results import CheckResult, Outcome

        self._reported.add(report.nodeid)
        if report.failed:
            self._blamed.add(report.nodeid)
        item = self._selected[report.nodeid]
        message, command = self._reason(report, item)
        result = CheckResult(
            gate=item.gate,
            engine=item.engine,
            model=item.model,
            dtype=item.dtype,
            topology=item.topology,
            case=item.case,
            variant="" if report.skipped else report.when or "",
            outcome=Outcome.SKIPPED if report.skipped else Outcome.ERROR,
            message=message,
            repeat=command,
            seconds=report.duration,
        )
        self._config.hook.pytest_afd_check(result=result)

    def _reason(self, report: pytest.TestReport, item: GateItem) -> tuple[str, str]:
        """Why there is no verdict, and the command that may give one."""
        missing = dict(report.user_properties).get(PROPERTY)
        if missing is None or not report.skipped:
            return _message(report), item.command
        from afd_testkit.gate_item import need_command

        name = str(missing).partition(":")[0]
        [need] = [need for need in self._config.stash[needs_key] if need.name == name]
        return f"needs {missing}", need_command(self._config, self._settings, need)

    def pytest_afd_check(self, result: CheckResult) -> None:
        """Keep it, and tell the ledger."""
        from afd_testkit.ledger import check_id
        from afd_testkit.results import Outcome

        self._checks.append(result)
        self._ledger.saw_check(check_id(result), passed=result.outcome is Outcome.PASSED)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """What a worker had selected; one that crashed cannot tell, the others can."""
        if hasattr(node, "workeroutput"):
            from afd_testkit.gate_item import GateItem

            found = node.workeroutput.get(_OUTPUT, {})
            self._selected.update({nodeid: GateItem(**known) for nodeid, known in found.items()})

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the record and the page; also after Ctrl-C and after an internal error."""
        if self._is_worker:
            known = {nodeid: asdict(item) for nodeid, item in self._selected.items()}
            session.config.workeroutput[_OUTPUT] = known  # type: ignore[attr-defined]
            return
        if self._open is not None and self._open.nodeid not in self._ended:
            self._take(self._open.nodeid, self._open.user_properties)  # interrupted in the middle
        if self._config.option.collectonly or not (self._selected or self._checks):
            return
        interrupted = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        try:
            self._write(interrupted=interrupted)
        except Exception:  # whatever it is, the test results must still be shown; see below
            self._problem = f"afd: no complete evidence was written\n{traceback.format_exc()}"
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        if exitstatus == pytest.ExitCode.OK and self._nothing_was_judged():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if exitstatus == pytest.ExitCode.INTERNAL_ERROR:  # pytest then has no closing summary
            reporter = session.config.pluginmanager.getplugin("terminalreporter")
            if reporter is not None:
                self.pytest_terminal_summary(reporter)

    def _nothing_was_judged(self) -> bool:
        """Whether answers were asked for in vain; recording a baseline is meant to judge none."""
        from afd_testkit.summary import lacks_a_split_arm

        servers = self._settings.servers
        recording = servers is not None and servers.arm is None
        return not recording and lacks_a_split_arm(
            (check.gate, check.case, check.outcome) for check in self._checks
        )

    def _begin(self) -> RunInfo:
        from afd_testkit.run_info import RunInfo

        configuration = {**asdict(self._settings), "require": list(self._settings.require)}
        seeds = {}
        if self._config.pluginmanager.hasplugin("randomly"):
            seed = self._config.getoption("randomly_seed")
            seeds = {"pytest-randomly": seed} if isinstance(seed, int) else {}
        return RunInfo.begin(
            ["pytest", *self._config.invocation_params.args],
            configuration=configuration,
            seeds=seeds,
            directory=self._config.rootpath,
        )

    def _write(self, *, interrupted: bool) -> None:
        from afd_testkit.evidence import write_run
        from afd_testkit.run_info import NotRun

        reason = "the run was interrupted" if interrupted else "the run ended before it"
        not_run = [
            NotRun(nodeid, reason, item.command)
            for nodeid, item in self._selected.items()
            if nodeid not in self._ended
        ]
        begun = self._run or self._begin()  # under pytest-xdist the controller learns late
        self._run = begun.end(interrupted=interrupted, not_run=not_run)
        self._files = write_run(self._run, self._checks, self._settings.results)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The verdict, or why there is none."""
        if self._problem:
            terminalreporter.write_line(self._problem, red=True)
        if self._run is None or (self._files is None and not self._problem):
            return
        from rich.console import Console

        from afd_testkit.report import terminal_summary

        console = Console(
            file=StringIO(),
            force_terminal=terminalreporter.hasmarkup,
            width=shutil.get_terminal_size((100, 24)).columns,
        )
        with console.capture() as shown:
            terminal_summary(self._checks, self._run, self._files, console)
        terminalreporter.section("afd: gates")
        terminalreporter.write(shown.get())


def _message(report: pytest.TestReport) -> str:
    """Why it was skipped, or the error's own line above the failure as pytest shows it.

    Of errors that caused one another, the line of the last: it is meant for the user.
    """
    if isinstance(report.longrepr, tuple):  # file, line, reason of a skip
        return report.longrepr[2].removeprefix("Skipped: ")
    text = report.longreprtext
    last = text.rpartition("direct cause of the following exception:")[2]
    told = [line[1:].strip() for line in last.splitlines() if line.startswith("E ")]
    return "\n".join([*told[:1], text])
