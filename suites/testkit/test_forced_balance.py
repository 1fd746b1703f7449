"""Expert ids that were forced to be even never stand for a result: check, record and page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401  (imported here, so that no single test is the first to load it)
import pytest

from afd_testkit.engines.base import EngineConfig, Prompt, RunResult, SplitSetting
from afd_testkit.engines.reference import ReferenceEngine
from afd_testkit.evidence import InvalidRecordError, RecordError, RunInfo, load_record, write_run
from afd_testkit.gates.catalog import GATES
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.page import render_page
from afd_testkit.results import CheckResult, Outcome

pytestmark = pytest.mark.cpu

SUBJECT = Subject("reference", "reference", "float64")
TEXT = ("Bread is flour, water, salt and time. " * 30,)
CHECK = CheckResult(
    gate="split",
    engine="vllm-cpu",
    model="qwen3-moe",
    dtype="float32",
    case="unequal",
    variant="token, alignment 1",
    outcome=Outcome.PASSED,
)
ROUTING = replace(CHECK, gate="routing", case="engine", facts={"balanced_routing": 6})


class Forced(ReferenceEngine):
    """A reference engine whose splitting worker says that it forced some expert ids."""

    executions = 0

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        split: SplitSetting = SplitSetting(),  # noqa: B008  # frozen, as in the Protocol
        fault: str | None = None,
    ) -> RunResult:
        result = super().run(prompts, split=split, fault=fault)
        if self.config.worker == "stock":
            return result
        first, *rest = result.steps
        evidence = {**(first.evidence or {}), "balanced_routing": self.executions}
        return replace(result, steps=(replace(first, evidence=evidence), *rest))


def start_with(executions: int) -> Callable[[EngineConfig], Forced]:
    def start(config: EngineConfig) -> Forced:
        engine = Forced(config)
        engine.executions = executions
        return engine

    return start


@pytest.mark.parametrize(("gate", "case"), [("split", "equal"), ("chunked", "chunks of 100")])
def test_a_run_with_forced_ids_fails_its_check_though_its_numbers_are_right(
    gate: str, case: str
) -> None:
    session = GateSession(start=start_with(4), paragraphs=TEXT)
    first = next(iter(GATES[gate].run(session, SUBJECT, case)))
    assert first.outcome is Outcome.FAILED
    assert "4 executions of the routing operator made the expert ids even" in first.message
    assert first.facts["balanced_routing"] == 4


def test_a_run_without_them_passes_and_has_no_such_fact() -> None:
    session = GateSession(start=start_with(0), paragraphs=TEXT)
    first = next(iter(GATES["split"].run(session, SUBJECT, "equal")))
    assert first.outcome is Outcome.PASSED
    assert "balanced_routing" not in first.facts


def written(folder: Path, *checks: CheckResult) -> Path:
    return write_run(RunInfo.begin(["test"]).end(), checks, folder).record


def tampered(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_the_gate_that_asks_for_it_may_have_it(tmp_path: Path) -> None:
    record = load_record(written(tmp_path, CHECK, ROUTING))
    assert record["verdict"] == "passed"
    assert record["checks"][1]["facts"]["balanced_routing"] == 6


def test_a_result_of_another_gate_may_not(tmp_path: Path) -> None:
    def force(record: dict[str, Any]) -> None:
        record["checks"][0]["facts"]["balanced_routing"] = 1

    path = tampered(written(tmp_path, CHECK, ROUTING), force)
    with pytest.raises(RecordError, match=r"\$\.checks\[0\]\.facts\.balanced_routing") as refused:
        load_record(path)
    assert "forced to be even" in str(refused.value)


def test_nor_may_the_routing_check_under_another_name(tmp_path: Path) -> None:
    def rename(record: dict[str, Any]) -> None:
        record["checks"][1]["gate"] = "accuracy"

    path = tampered(written(tmp_path, CHECK, ROUTING), rename)
    with pytest.raises(RecordError, match=r"\$\.checks\[1\]\.facts\.balanced_routing"):
        load_record(path)


@pytest.mark.parametrize("value", [-1, "6", 0.5, True, None])
def test_no_odd_value_hides_it(tmp_path: Path, value: object) -> None:
    def bend(record: dict[str, Any]) -> None:
        record["checks"][0]["facts"]["balanced_routing"] = value

    path = tampered(written(tmp_path, CHECK, ROUTING), bend)
    with pytest.raises(RecordError, match="balanced_routing"):
        load_record(path)


def test_a_failed_check_may_say_so(tmp_path: Path) -> None:
    failed = replace(CHECK, outcome=Outcome.FAILED, facts={"balanced_routing": 3})
    record = load_record(written(tmp_path, failed))
    assert record["verdict"] == "failed"


def test_a_waiver_does_not_excuse_it(tmp_path: Path) -> None:
    waived = replace(CHECK, outcome=Outcome.WAIVED, facts={"balanced_routing": 3})
    with pytest.raises(InvalidRecordError, match="forced to be even"):
        written(tmp_path, CHECK, waived)


def page(*checks: CheckResult) -> str:
    return render_page(RunInfo.begin(["test"]).end(), checks)


def test_the_page_says_nothing_where_nothing_was_forced() -> None:
    shown = page(CHECK)
    assert "expert ids" not in shown
    assert "Forced balance" not in shown


def test_the_page_says_that_the_gate_routing_did_it() -> None:
    shown = page(CHECK, ROUTING, replace(ROUTING, facts={"balanced_routing": 5}))
    assert "forced expert ids to be even in 11 executions, as it must" in shown
    assert "Forced balance: not the model" not in shown


def test_the_page_warns_of_every_other_check() -> None:
    failed = replace(CHECK, outcome=Outcome.FAILED, facts={"balanced_routing": 3})
    shown = page(replace(CHECK, case="one-long"), failed, ROUTING)
    assert "Forced balance: not the model" in shown
    assert "in 1 check that does not ask for it" in shown
    warning = shown.partition("Forced balance")[2].partition("</aside>")[0]
    assert "split · qwen3-moe float32 · vllm-cpu · unequal" in warning
    assert "one-long" not in warning
    assert "as it must" not in shown
