"""The comparison of two runs of strangers' tests, and its ledger."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cpu

HERE = Path(__file__).parents[1] / "strangers"

JUNIT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.a.TestA" name="test_good"/>
<testcase classname="tests.a.TestA" name="test_bad[1-x]"><failure message="no"/></testcase>
<testcase classname="tests.a" name="test_left"><skipped message="later"/></testcase>
<testcase classname="tests.a" name="test_torn"/>
<testcase classname="tests.a" name="test_torn"><error message="teardown"/></testcase>
<testcase classname="" name="tests.b"><error message="import"/></testcase>
</testsuite></testsuites>"""


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of the folder as the module ``name``, as the script imports its neighbours."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield load("outcomes", monkeypatch)
    monkeypatch.undo()


@pytest.fixture
def script(outcomes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("run_vllm_ascend_ut", monkeypatch)


def test_the_worst_outcome_of_a_test_counts(outcomes: Any, tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    read = outcomes.read_outcomes(tmp_path / "junit.xml")
    assert read == {
        "tests.a.TestA::test_good": "passed",
        "tests.a.TestA::test_bad[1-x]": "failed",
        "tests.a::test_left": "skipped",
        "tests.a::test_torn": "error",
        "tests.b": "error",
    }
    assert outcomes.count(read) == {"passed": 1, "failed": 1, "error": 2, "skipped": 1}


TIMED = """<?xml version="1.0"?><testsuites><testsuite time="99">
<testcase classname="tests.a.TestA" name="test_good" time="1.25"/>
<testcase classname="tests.a.TestA" name="test_good" time="0.5"><error message="end"/></testcase>
<testcase classname="tests.a" name="test_bad[1-x]" time="0.25"><failure message="no"/></testcase>
<testcase classname="" name="tests.b"><error message="import"/></testcase>
</testsuite><testsuite time="7">
<testcase classname="tests.c" name="test_other" time="2.0"/>
</testsuite></testsuites>"""


def test_the_seconds_of_a_test_are_those_of_all_its_records(outcomes: Any, tmp_path: Path) -> None:
    """Those of call and teardown together, of every suite, and none where the file names none."""
    (tmp_path / "junit.xml").write_text(TIMED)
    assert outcomes.read_seconds(tmp_path / "junit.xml") == {
        "tests.a.TestA::test_good": 1.75,
        "tests.a::test_bad[1-x]": 0.25,
        "tests.b": 0.0,
        "tests.c::test_other": 2.0,
    }


def test_seconds_and_outcomes_name_the_same_tests(outcomes: Any, tmp_path: Path) -> None:
    for text in (JUNIT, TIMED):
        (tmp_path / "junit.xml").write_text(text)
        seconds = outcomes.read_seconds(tmp_path / "junit.xml")
        assert seconds.keys() == outcomes.read_outcomes(tmp_path / "junit.xml").keys()


def test_a_test_is_lost_that_passes_in_one_run_alone(outcomes: Any) -> None:
    own = {"a": "passed", "b": "passed", "c": "passed", "d": "failed", "e": "passed"}
    emulated = {"a": "passed", "b": "failed", "c": "skipped", "d": "failed"}
    assert outcomes.lost(own, emulated) == {"b": "failed", "c": "skipped", "e": "missing"}


def test_every_lost_test_needs_an_entry_and_every_entry_a_lost_test(outcomes: Any) -> None:
    ledger = outcomes.Ledger(
        0,
        (
            outcomes.Entry("tests.a::test_x[1]", "why"),
            outcomes.Entry("tests.b::*", "why"),
            outcomes.Entry("tests.c::test_now_passes", "why"),
        ),
    )
    names = ["tests.a::test_x[1]", "tests.a::test_x1", "tests.b::one", "tests.b::two"]
    assert ledger.unexplained(names) == ["tests.a::test_x1"]
    assert [entry.tests for entry in ledger.stale(names)] == ["tests.c::test_now_passes"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[lost]]\ntests = 'a'\n", "entry 1"),
        ("[[lost]]\ntests = 'a'\nreason = ''\n", "entry 1"),
        ("[[lost]]\ntests = 'a'\nreason = 'b'\nowner = 'c'\n", "entry 1"),
        ("at_least = -1\n", "at_least is -1"),
        ("waived = 3\n", "waived"),
        ("= 3\n", "cannot be read"),
    ],
)
def test_a_ledger_that_says_nothing_is_refused(
    outcomes: Any, tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "ledger.toml").write_text(text)
    with pytest.raises(outcomes.LedgerError, match=says):
        outcomes.read_ledger(tmp_path / "ledger.toml")


def test_our_ledger_can_be_read(outcomes: Any) -> None:
    ledger = outcomes.read_ledger(HERE / "ledger.toml")
    assert ledger.at_least == 2250


def test_the_batches_are_all_of_their_tests_each_once(script: Any, tmp_path: Path) -> None:
    for folder in ("ops", "ops/a2", "ops/a3_2", "worker/310p", "_310p", "kv_offload"):
        (tmp_path / "tests" / "ut" / folder).mkdir(parents=True)
    given = {batch.name: batch.arguments for batch in script.batches(tmp_path)}
    devices = ("tests/ut/ops/a2", "tests/ut/ops/a3_2", "tests/ut/worker/310p")
    assert given["device"] == devices
    assert given["host"][0] == "tests/ut"
    ignored = {part.removeprefix("--ignore=") for part in given["host"][1:]}
    assert ignored == {*devices, *(name for name in given["alone"])}
    assert given["alone"] == tuple(script.ALONE)


def column(script: Any, **batches: dict[str, str]) -> Any:
    return script.Column(batches, {}, 0.0, 0.0)


@pytest.mark.parametrize(
    ("others", "common"),
    [
        ([], ["a", "b", "c"]),
        ([{"host": {"a": "passed", "b": "passed", "c": "passed", "d": "passed"}}], ["a", "b", "c"]),
        ([{"host": {"a": "passed", "b": "failed", "c": "skipped"}}], ["a"]),
        ([{"host": {"b": "passed"}, "alone": {"c": "passed", "e": "passed"}}], ["b", "c"]),
        (
            [{"host": {"a": "passed", "b": "passed"}}, {"host": {"b": "passed", "c": "error"}}],
            ["b"],
        ),
        ([{"host": {}}], []),
    ],
)
def test_what_passes_everywhere_passes_in_every_column(
    script: Any, others: list[dict[str, dict[str, str]]], common: list[str]
) -> None:
    """In whatever batch it ran there; what is missing in a column does not pass in it."""
    first = column(
        script,
        host={"a": "passed", "b": "passed", "d": "failed"},
        alone={"c": "passed", "f": "skipped"},
    )
    columns = [first, *(column(script, **other) for other in others)]
    assert sorted(script.passed_everywhere(columns)) == common
    assert sorted(script.passed_everywhere(columns[::-1])) == common


def test_model_configurations_are_found_as_a_hub_cache(script: Any, tmp_path: Path) -> None:
    hub = script.hub_cache(tmp_path / "hub", ["models"])
    model = hub / "models--deepseek-ai--DeepSeek-V3.2-Exp"
    revision = (model / "refs" / "main").read_text()
    assert (model / "snapshots" / revision / "config.json").is_file()
    assert [home.name for home in hub.iterdir()] == [model.name]
    more = script.hub_cache(tmp_path / "more", ["models", "models_large"])
    assert {home.name for home in more.iterdir()} == {
        model.name,
        "models--Qwen--Qwen3-8B",
        "models--deepseek-ai--DeepSeek-V2",
    }


def test_what_is_no_checkout_is_said(script: Any, tmp_path: Path) -> None:
    with pytest.raises(script.CannotRun, match="give a checkout of vLLM-Ascend"):
        script.check(tmp_path, {})
