"""Evidence of whole sessions: every gate item ends up in the record, however the run ends."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

# The record and the page are written inside these sessions; pytester would import all that
# they need anew for each of them.
from afd_testkit import page, report  # noqa: F401
from afd_testkit.evidence import load_record
from afd_testkit.gate_item import repeat_command
from afd_testkit.gate_run import check_from_dict
from afd_testkit.plugin import settings_key
from afd_testkit.results import (
    CheckResult,
    Comparison,
    Outcome,
    Profile,
    StageBalance,
    Worst,
)

pytestmark = pytest.mark.cpu

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
HEAD = """
import os
import pytest
from afd_testkit.results import CheckResult, Comparison, Outcome

def check(case, outcome=Outcome.PASSED, ok=True):
    compared = Comparison("logprob", 0.0 if ok else 1.0, 1e-5, 1e-5, None, "limit", ok, 10)
    return CheckResult("split", "mine", "tiny", "float32", case, "token", outcome, (compared,))

pytestmark = pytest.mark.afd_gate("split")

"""
PASS = 'def test_pass(record_check): record_check(check("pass"))\n'
SUITE = (
    HEAD
    + PASS
    + """
def test_fail(record_check):
    result = record_check(check("fail", Outcome.FAILED, ok=False))
    if result.outcome is Outcome.FAILED:
        pytest.fail("differs")

def test_error(): raise ValueError("the engine is gone")

@pytest.mark.npu(64)
def test_skip(): pass

def test_late(record_check):
    record_check(check("late"))
    assert 0, "after its check"
"""
)


def record_of(folder: Path) -> dict[str, Any]:
    """The one record there; its page must lie beside it."""
    [path] = folder.glob("*.json")
    assert path.with_suffix(".html").is_file()
    return load_record(path)


PARAMETERS = (
    HEAD
    + """
class Subject:
    engine, model, dtype = "mine", "models/tiny", "bfloat16"

cases = pytest.mark.parametrize("case", ["25 %", "same-step, cut"])
subjects = pytest.mark.parametrize("subject", [Subject()], ids=["s"])

@cases
@subjects
@pytest.mark.npu(64)
def test_skip(subject, case): pass

@cases
@subjects
def test_error(subject, case): raise ValueError(case)
"""
)


def outcomes(record: dict[str, Any]) -> dict[str, list[str]]:
    """Outcomes by case; of a synthetic check, the case is the test's id."""
    found: dict[str, list[str]] = {}
    for entry in record["checks"]:
        found.setdefault(entry["case"].rpartition("::")[2], []).append(entry["outcome"])
    return found


def test_a_check_survives_the_way_to_the_controller() -> None:
    worst = Worst("r", 3, 1, 7, 0.5, 0.25)
    first = Worst("q", 2, None, 0, 0.5, 0.4, layer=1)
    result = CheckResult(
        *("split", "mine", "tiny", "float32", "case", "token", Outcome.FAILED),
        comparisons=(
            Comparison("logprob", 0.25, 1e-5, 1e-5, 1e-7, "rule", False, 12, worst, first),
            Comparison("kv", 0.0, 0.0, 0.0, None, "rule", True, 12),
        ),
        balance=(StageBalance("token_balanced_tp", (3, 4), (4, 4), True, None, "hazard"),),
        profile=Profile("logprob", (0.0, 0.25), (0.0, 0.0), 1e-5, 0.5),
        facts={"realized_chunks": [1, 2]},
        message="m",
        repeat="r",
        seconds=1.5,
    )
    assert check_from_dict(json.loads(json.dumps(result.as_dict()))) == result
    assert check_from_dict(result.as_dict()) == result
    bare = replace(result, comparisons=(), balance=(), profile=None)
    assert check_from_dict(json.loads(json.dumps(bare.as_dict()))) == bare


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_every_gate_item_is_in_the_record(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    pytester.makepyfile(SUITE)
    run = pytester.runpytest_subprocess if workers else pytester.runpytest_inprocess
    result = run(*QUIET, *workers, "--afd-results", "out")
    result.assert_outcomes(passed=1, failed=3, skipped=1)
    record = record_of(pytester.path / "out")
    assert outcomes(record) == {
        "pass": ["passed"],
        "fail": ["failed"],
        "test_error": ["error"],
        "test_skip": ["skipped"],
        "late": ["passed"],
        "test_late": ["error"],
    }
    assert record["verdict"] == "failed"
    assert record["not_run"] == []
    assert record["interrupted"] is False
    messages = {entry["case"].rpartition("::")[2]: entry["message"] for entry in record["checks"]}
    assert messages["test_error"].startswith("ValueError: the engine is gone\n")
    assert messages["test_late"].startswith("AssertionError: after its check\n")
    assert messages["test_skip"].startswith("needs npu: ")
    result.stdout.fnmatch_lines(["*afd: gates*", "*FAILED*", "record*", "page*"])


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_gate_without_checks_is_told_by_its_parameters(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_it=PARAMETERS)
    run = pytester.runpytest_subprocess if workers else pytester.runpytest_inprocess
    result = run(*QUIET, *workers, "test_it.py")
    result.assert_outcomes(failed=2, skipped=2)
    record = record_of(pytester.path / "afd-results")
    told = {
        (c["outcome"], c["engine"], c["model"], c["dtype"], c["case"]) for c in record["checks"]
    }
    assert told == {
        (outcome, "mine", "tiny", "bfloat16", case)
        for outcome in ("skipped", "error")
        for case in ("25 %", "same-step, cut")
    }
    elsewhere = {c["repeat"] for c in record["checks"] if c["outcome"] == "skipped"}
    assert elsewhere == {
        f"pytest {' '.join(QUIET)} test_it.py -m npu --afd-require=npu  # on a host with torch-npu"
    }
    result.stdout.fnmatch_lines(["AFD gates: INCOMPLETE * 2 skipped (needs npu)"])
    result.stdout.no_fnmatch_line("*not started*")


@pytest.mark.parametrize("options", [(), ("-c", "sub/own.toml", "--rootdir=sub")])
def test_the_command_of_an_item_runs_it_again(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    folder = pytester.mkdir("sub")
    (folder / "own.toml").write_text("[tool.pytest.ini_options]\n")
    (folder / "test_it.py").write_text(PARAMETERS)
    pytester.runpytest_inprocess(*QUIET, *options, "sub", "--afd-results=first")
    checks = record_of(pytester.path / "first")["checks"]
    [command] = [c["repeat"] for c in checks if (c["outcome"], c["case"]) == ("error", "25 %")]
    words = [word for word in shlex.split(command) if not word.startswith("--afd-results")]
    pytester.run(*words, "--afd-results=again")
    [check] = record_of(pytester.path / "again")["checks"]
    assert (check["outcome"], check["case"]) == ("error", "25 %")
    assert check["repeat"] == command.replace(
        "=" + str(pytester.path / "first"), "=" + str(pytester.path / "again")
    )


def test_the_command_names_an_installed_gate_by_its_module(pytester: pytest.Pytester) -> None:
    package = pytester.mkpydir("somewhere").joinpath("kit")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "test_it.py").write_text(PARAMETERS)
    pytester.syspathinsert()
    pytester.runpytest_inprocess(*QUIET, "--pyargs", "somewhere.kit", "--afd-engine=other")
    checks = record_of(pytester.path / "afd-results")["checks"]
    [command] = [c["repeat"] for c in checks if (c["outcome"], c["case"]) == ("error", "25 %")]
    words = shlex.split(command)
    assert words[words.index("--pyargs") + 1 :] == [
        "somewhere.kit.test_it::test_error[s-25 %]",
        "--afd-engine=other",
    ]


@pytest.mark.parametrize("tox", [False, True])
def test_the_command_starts_with_what_the_user_can_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest, tox: bool
) -> None:
    script = tmp_path / "pytest"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    python = str(tmp_path / "python")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.delenv("TOX_ENV_NAME", raising=False)
    settings = request.config.stash[settings_key]
    monkeypatch.setenv("PATH", "")
    assert repeat_command(request.node, settings).startswith(f"{python} -m pytest -")
    monkeypatch.setenv("PATH", str(tmp_path))
    if tox:
        monkeypatch.setenv("TOX_ENV_NAME", "gate")
    words = [python, "-m", "pytest"] if tox else ["pytest"]
    assert repeat_command(request.node, settings).startswith(" ".join([*words, "-"]))


def test_an_interrupted_run_keeps_what_had_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        HEAD
        + PASS
        + """
def test_stop(record_check):
    record_check(check("before"))
    raise KeyboardInterrupt

def test_never(): pass
"""
    )
    result = pytester.runpytest_inprocess(*QUIET, no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    record = record_of(pytester.path / "afd-results")
    assert outcomes(record) == {"pass": ["passed"], "before": ["passed"]}
    missed = [entry["item"].rpartition("::")[2] for entry in record["not_run"]]
    assert missed == ["test_stop", "test_never"]
    assert record["interrupted"] is True
    assert record["verdict"] == "incomplete"


def test_an_internal_error_keeps_what_had_run(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        def pytest_runtest_logstart(nodeid):
            if nodeid.endswith("test_zz"):
                raise LookupError("inside pytest")
        """
    )
    pytester.makepyfile(HEAD + PASS + "def test_zz(): pass")
    result = pytester.runpytest_inprocess(*QUIET)
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    record = record_of(pytester.path / "afd-results")
    assert outcomes(record) == {"pass": ["passed"]}
    assert [entry["item"].rpartition("::")[2] for entry in record["not_run"]] == ["test_zz"]
    result.stdout.fnmatch_lines(["*INCOMPLETE*", "record*", "page*"])


def test_a_worker_that_crashes_is_an_error_of_its_gate(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(HEAD + PASS + "def test_crash(): os._exit(3)")
    result = pytester.runpytest_subprocess(*QUIET, "-n", "1")
    result.assert_outcomes(passed=1, failed=1)
    record = record_of(pytester.path / "afd-results")
    assert outcomes(record) == {"pass": ["passed"], "test_crash": ["error"]}


def test_without_gates_nothing_is_written(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest_inprocess(*QUIET).assert_outcomes(passed=1)
    assert not (pytester.path / "afd-results").exists()


def test_collecting_gates_writes_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    pytester.runpytest_inprocess(*QUIET, "--collect-only")
    assert not (pytester.path / "afd-results").exists()


@pytest.fixture
def _read_only(pytester: pytest.Pytester) -> None:
    """A result folder that takes no file, for root too: its place is taken before it is made."""
    pytester.makeconftest(
        """
        import pathlib
        def pytest_collection_modifyitems():
            pathlib.Path("out").write_text("in the way")
        """
    )


@pytest.mark.usefixtures("_read_only")
def test_an_unwritable_folder_stops_gates_before_they_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess(*QUIET, "--afd-results", "out")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --afd-results: cannot write results into *out*"])
    result.assert_outcomes()


@pytest.mark.usefixtures("_read_only")
def test_an_unwritable_folder_is_no_matter_without_gates(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest_inprocess(*QUIET, "--afd-results", "out").assert_outcomes(passed=1)


@pytest.mark.usefixtures("_read_only")
def test_workers_refuse_their_gates(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(HEAD + PASS)
    result = pytester.runpytest_subprocess(*QUIET, "-n", "1", "--afd-results", "out")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*--afd-results: cannot write results into *out*"])


def test_evidence_that_cannot_be_written_is_told(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise ValueError("no page today")

    monkeypatch.setattr(page, "render_page", broken)
    pytester.makepyfile(HEAD + PASS)
    result = pytester.runpytest_inprocess(*QUIET)
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["afd: no complete evidence was written", "*ValueError: no page today*"]
    )
    assert len(list((pytester.path / "afd-results").glob("*.json"))) == 1


def test_finished_checks_are_announced(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "def pytest_afd_check(result): print('announced', result.case, result.outcome.value)"
    )
    pytester.makepyfile(HEAD + PASS)
    result = pytester.runpytest_inprocess(*QUIET, "-s")
    result.stdout.fnmatch_lines(["*announced pass passed*"])


def test_a_waived_check_is_recorded_as_waived(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nafd_ledger = ledger.toml")
    (pytester.path / "ledger.toml").write_text(
        '[[waiver]]\nmatch = "split/mine/*/fail/*"\nreason = "r"\nissue = "7"\nowner = "ann"\n'
    )
    source = SUITE[: SUITE.index("def test_error")]
    pytester.makepyfile(source)
    result = pytester.runpytest_inprocess(*QUIET)
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.OK
    record = record_of(pytester.path / "afd-results")
    assert outcomes(record) == {"pass": ["passed"], "fail": ["waived"]}
    assert record["checks"][1]["message"].startswith("waiver 'split/mine/*/fail/*' (issue 7")


def test_a_waived_check_that_passes_is_red(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nafd_ledger = ledger.toml")
    (pytester.path / "ledger.toml").write_text(
        '[[waiver]]\nmatch = "split/*"\nreason = "r"\nissue = "7"\nowner = "ann"\n'
    )
    pytester.makepyfile(HEAD + PASS)
    result = pytester.runpytest_inprocess(*QUIET)
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*afd: ledger*", "*split/mine/tiny/float32/pass/token passed*"])


@pytest.mark.parametrize("marker", ["afd_gate", "afd_gate()", "afd_gate(3)", "afd_gate(name='a')"])
def test_a_gate_needs_a_name(pytester: pytest.Pytester, marker: str) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass")
    result = pytester.runpytest_inprocess(*QUIET)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_it: write @pytest.mark.afd_gate('name of the gate')*"])


def test_of_errors_that_caused_one_another_the_last_is_told(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.afd_gate("split")
        def test_it():
            try:
                raise OSError("refused")
            except OSError as error:
                raise ValueError("start the server") from error
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:hypothesispytest", "-p", "no:randomly")
    [line] = [one for one in result.outlines if one.strip().startswith("ValueError")]
    assert line.strip() == "ValueError: start the server"
    assert not any(one.strip().startswith("OSError: refused") for one in result.outlines[-20:])


@pytest.mark.parametrize(
    ("options", "status"), [((), 1), (("--afd-baseline-server=http://a:1",), 0)]
)
def test_accuracy_without_a_split_arm_is_no_success(
    pytester: pytest.Pytester, options: tuple[str, ...], status: int
) -> None:
    """But where only the baseline was to be recorded."""
    pytester.makepyfile(
        """
        import pytest
        from afd_testkit.results import CheckResult, Outcome

        @pytest.mark.afd_gate("accuracy")
        def test_unsplit(record_check):
            share = {"strict_match": 1.0, "flexible_extract": 1.0, "interval": [0.025, 1.0]}
            counts = dict.fromkeys(("truncated", "balanced_routing", "split_steps"), 0)
            facts = {**share, **counts, "questions": 1}
            record_check(CheckResult("accuracy", "mine", "tiny", "float32", "baseline", "unsplit",
                                     Outcome.PASSED, facts=facts))
        """
    )
    ran = pytester.runpytest_inprocess(*QUIET, *options)
    ran.stdout.fnmatch_lines(["*AFD gates: INCOMPLETE*", "*1 passed*"])
    assert ran.ret == status
