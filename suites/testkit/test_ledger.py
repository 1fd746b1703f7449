"""Waivers: malformed files, what an entry covers, sessions it turns red or leaves green."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from afd_testkit.ledger import Waiver, check_id, load_ledger
from afd_testkit.ledger_rule import Ledger
from afd_testkit.results import CheckResult, Outcome

pytestmark = pytest.mark.cpu

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-rxX")
TODAY = datetime.date(2026, 3, 1)
FIELDS = 'reason = "known"\nissue = "7"\nowner = "ann"\n'
CHECK = CheckResult("split", "vllm-cpu", "qwen3-moe", "float32", "equal", "token", Outcome.FAILED)


def write(folder: Path, text: str) -> Path:
    path = folder / "ledger.toml"
    path.write_text(text)
    return path


def waiver(match: str, expires: datetime.date | None = None) -> Waiver:
    return Waiver(match, "known", "7", "ann", expires)


def test_the_shipped_ledger_is_empty() -> None:
    assert load_ledger(Path(__file__).parents[2] / "fixtures" / "ledger.toml") == ()


def test_reads_entries(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f'[[waiver]]\nmatch = "a::b"\n{FIELDS}'
        f'[[waiver]]\nmatch = "split/*"\n{FIELDS}expires = 2026-03-01\n',
    )
    assert load_ledger(path) == (waiver("a::b"), waiver("split/*", TODAY))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[[waiver]\n", "cannot be read"),
        ("[other]\n", r"only \[\[waiver\]\] tables are allowed, not other"),
        ("waiver = 3\n", "not waiver, which is no list"),
        ("waiver = [3]\n", "entry 1 is no table"),
        (f"[[waiver]]\n{FIELDS}", "entry 1: match is None"),
        (f'[[waiver]]\nmatch = ""\n{FIELDS}', "entry 1: match is ''"),
        (f'[[waiver]]\nmatch = "a"\n{FIELDS}[[waiver]]\nmatch = 1\n', "entry 2: match is 1"),
        (f'[[waiver]]\nmatch = "a"\nwhy = "b"\n{FIELDS}', "entry 1: unknown key 'why'"),
        (f'[[waiver]]\nmatch = "a"\n{FIELDS}expires = "soon"', "entry 1: expires is 'soon'"),
    ],
)
def test_a_malformed_ledger_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(pytest.UsageError, match=rf"ledger\.toml.*{wrong}"):
        load_ledger(write(tmp_path, text))


def test_a_missing_ledger_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nafd_ledger = gone.toml")
    result = pytester.runpytest_inprocess(*QUIET)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*gone.toml cannot be read*"])


@pytest.mark.parametrize(
    ("match", "name", "covered"),
    [
        ("a.py::test_x[1-2]", "a.py::test_x[1-2]", True),
        ("a.py::test_x[1-2]", "a.py::test_x1", False),
        ("a.py::test_x[*]", "a.py::test_x[deep]", True),
        ("a.py::test_?", "a.py::test_xy", False),
        ("split/*/qwen3-moe/*", check_id(CHECK), True),
        ("chunked/*", check_id(CHECK), False),
    ],
)
def test_globs(match: str, name: str, covered: bool) -> None:
    assert waiver(match).covers(name) is covered


def test_expired_entries_waive_nothing_and_are_told() -> None:
    expired = waiver("a::*", TODAY - datetime.timedelta(days=1))
    ledger = Ledger([expired, waiver("b::*", TODAY)], TODAY)
    assert ledger.for_test("a::x") is None
    assert ledger.for_test("b::x") is not None
    [problem] = ledger.problems(whole_run=False, gates_ran=False)
    assert "'a::*' (issue 7, owner ann) expired on 2026-02-28" in problem


def test_entries_for_checks() -> None:
    ledger = Ledger([waiver("split/*"), waiver("chunked/*")], TODAY)
    assert ledger.problems(whole_run=True, gates_ran=False) == []
    ledger.saw_check(check_id(CHECK), passed=False)
    [stale] = ledger.problems(whole_run=True, gates_ran=True)
    assert stale.startswith("waiver 'chunked/*'")
    assert stale.endswith("matches nothing that ran; remove the entry.")
    ledger.saw_check(check_id(CHECK), passed=True)
    assert f"{check_id(CHECK)} passed" in ledger.problems(whole_run=True, gates_ran=True)[1]


SUITE = """
    import pytest
    def test_known(): assert 0
    def test_fine(): pass
    @pytest.mark.npu(64)
    def test_far(): assert 0
"""


def session(pytester: pytest.Pytester, ledger: str, *args: str) -> pytest.RunResult:
    """A run over ``testpaths`` with that ledger."""
    write(pytester.path, ledger)
    pytester.makeini("[pytest]\nafd_ledger = ledger.toml\ntestpaths = .")
    pytester.makepyfile(test_it=SUITE)
    return pytester.runpytest_inprocess(*QUIET, *args)


def entry(match: str) -> str:
    return f'[[waiver]]\nmatch = "{match}"\n{FIELDS}'


def test_a_waived_failure_leaves_the_session_green(pytester: pytest.Pytester) -> None:
    result = session(pytester, entry("test_it.py::test_known"))
    result.assert_outcomes(xfailed=1, passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["XFAIL *waiver 'test_it.py::test_known' (issue 7, owner ann): *"])


def test_a_waived_test_that_passes_is_red(pytester: pytest.Pytester) -> None:
    result = session(pytester, entry("test_it.py::test_known") + entry("*::test_fine"))
    result.assert_outcomes(xfailed=1, failed=1, skipped=1)


def test_a_stale_entry_turns_a_green_session_red(pytester: pytest.Pytester) -> None:
    result = session(pytester, entry("test_it.py::test_known") + entry("*::test_gone"))
    result.assert_outcomes(xfailed=1, passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*afd: ledger*", "waiver '*::test_gone' (issue 7, *matches nothing that ran*"]
    )


def test_what_could_not_run_is_not_stale(pytester: pytest.Pytester) -> None:
    result = session(pytester, entry("test_it.py::test_known") + entry("*::test_far"))
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize("args", [("-k", "fine"), ("test_it.py::test_fine",)])
def test_what_was_not_asked_for_is_not_stale(
    pytester: pytest.Pytester, args: tuple[str, ...]
) -> None:
    assert session(pytester, entry("test_it.py::test_known"), *args).ret == pytest.ExitCode.OK


def test_xfail_marks_need_an_entry(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_marked="import pytest\n@pytest.mark.xfail\ndef test_marked(): assert 0"
    )
    result = session(pytester, entry("test_it.py::test_known"))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_marked.py::test_marked: marked xfail without an entry*"])


def test_without_a_ledger_xfail_marks_are_free(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.xfail\ndef test_marked(): assert 0")
    pytester.runpytest_inprocess(*QUIET).assert_outcomes(xfailed=1)


def test_a_topology_is_part_of_a_checks_name() -> None:
    spread = replace(CHECK, topology="TP 2 + EP")
    assert check_id(spread) == check_id(CHECK).replace("/float32/", "/float32/TP 2 + EP/")
    assert check_id(spread) != check_id(CHECK)
