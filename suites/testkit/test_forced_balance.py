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
from afd_testkit.results import CheckResult, Comparison, Outcome, Profile

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
ROUTING = replace(
    CHECK, gate="routing", case="engine", variant="profiling", facts={"balanced_routing": 6}
)
LAYER = replace(ROUTING, case="guards kept", variant="int32 ids")


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


@pytest.mark.parametrize("case", ["guards kept", "guards dropped"])
@pytest.mark.parametrize("variant", ["int32 ids", "int64 ids"])
def test_a_layer_by_itself_too(tmp_path: Path, case: str, variant: str) -> None:
    layer = replace(LAYER, case=case, variant=variant)
    assert load_record(written(tmp_path, layer))["verdict"] == "passed"


def test_what_the_gate_really_reports_is_what_may_have_it(tmp_path: Path) -> None:
    session = GateSession(start=start_with(0), paragraphs=TEXT)
    checks = list(GATES["routing"].run(session, SUBJECT, "guards dropped"))
    assert [check.facts["balanced_routing"] for check in checks] == [2, 2]
    assert load_record(written(tmp_path, *checks))["verdict"] == "passed"


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


@pytest.mark.parametrize("check", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        {"gate": "routing"},
        {"gate": "routing", "case": "engine"},
        {"gate": "routing", "case": "engine", "variant": "serving, first batch"},
        {"gate": "routing", "case": "guards kept", "variant": "profiling"},
        {"gate": "Routing", "case": "engine", "variant": "profiling"},
    ],
)
def test_nor_a_result_under_the_name_of_that_gate(
    tmp_path: Path, change: dict[str, str], check: int
) -> None:
    """The name of the gate does not make a check one that asks for even ids."""

    def rename(record: dict[str, Any]) -> None:
        renamed = record["checks"][check]
        renamed["facts"]["balanced_routing"] = 5
        renamed.update({"case": "unequal", "variant": "token, alignment 1"} | change)

    path = tampered(written(tmp_path, CHECK, ROUTING), rename)
    with pytest.raises(RecordError, match=rf"\$\.checks\[{check}\]\.facts\.balanced_routing: 5"):
        load_record(path)


def test_nor_a_check_that_compares_results_whatever_it_is_called(tmp_path: Path) -> None:
    compared = Comparison("logprob", 0.0, 1e-5, 1e-5, 0.0, "tolerance", True, 10)
    drawn = Profile("logprob", (0.0,), (0.0,), 1e-5)
    for more in ({"comparisons": (compared,)}, {"profile": drawn}):
        with pytest.raises(InvalidRecordError, match="compare no results"):
            written(tmp_path, replace(ROUTING, **more))


def test_nor_where_it_stands_deeper_in_the_facts(tmp_path: Path) -> None:
    facts = {"steps": [{"policy": "unsplit"}, {"balanced_routing": 2}]}
    with pytest.raises(InvalidRecordError, match="balanced_routing: 2 times"):
        written(tmp_path, replace(CHECK, facts=facts))


def test_a_fact_that_is_named_twice_hides_nothing(tmp_path: Path) -> None:
    """Readers of JSON take the last of two members; which one a person sees is another matter."""
    path = written(tmp_path, CHECK)
    text = path.read_text(encoding="utf-8")
    for name, member, twice in (
        ("facts", '"facts": {}', '"facts": {"balanced_routing": 7}, "facts": {}'),
        (
            "balanced_routing",
            '"facts": {}',
            '"facts": {"balanced_routing": 7, "balanced_routing": 0}',
        ),
        ("gate", '"gate": "split"', '"gate": "routing", "gate": "split"'),
    ):
        assert text.count(member) == 1
        path.write_text(text.replace(member, twice), encoding="utf-8")
        with pytest.raises(RecordError, match=f"names '{name}' more than once"):
            load_record(path)
    path.write_text(text, encoding="utf-8")
    assert load_record(path)["verdict"] == "passed"


FORCING = [
    {"afd": {"force_balanced_routing": True}},
    {"additional_config": {"afd": {"force_balanced_routing": 1}}},
    {"additional_config": '{"afd": {"force_balanced_routing": true}}'},
    {"additional_config": "{'afd': {'force_balanced_routing': True}}"},
    {"afd": [["connector", "none"], ["force_balanced_routing", True]]},
    {"afd": "AFDConfig(policy='token', force_balanced_routing=True)"},
    {"engines": [{"options": {"force_balanced_routing": "on"}}]},
    {"afd": {"force_balanced_routing": None}},
]


@pytest.mark.parametrize("configuration", FORCING)
def test_no_result_of_a_run_that_was_configured_so(
    tmp_path: Path, configuration: dict[str, Any]
) -> None:
    def configure(record: dict[str, Any]) -> None:
        record["configuration"] = configuration

    path = tampered(written(tmp_path, CHECK), configure)
    with pytest.raises(RecordError, match=r"at \$\.configuration\..*force_balanced_routing is"):
        load_record(path)
    waived = replace(CHECK, outcome=Outcome.WAIVED)
    path = tampered(written(tmp_path, waived), configure)
    with pytest.raises(RecordError, match=r"at \$\.configuration"):
        load_record(path)


def test_nor_of_one_whose_command_says_so(tmp_path: Path) -> None:
    def command(record: dict[str, Any]) -> None:
        record["command"] = ["run", '--additional-config={"afd":{"force_balanced_routing":true}}']

    with pytest.raises(RecordError, match=r"at \$\.command\[1\]: force_balanced_routing is true"):
        load_record(tampered(written(tmp_path, CHECK), command))


def test_a_run_that_has_the_option_off_or_only_names_it_is_a_result(tmp_path: Path) -> None:
    def configure(record: dict[str, Any]) -> None:
        record["command"] = ["pytest", "-k", "force_balanced_routing"]
        record["configuration"] = {
            "afd": {"force_balanced_routing": False},
            "more": '{"force_balanced_routing": false}',
            "pairs": [["force_balanced_routing", False]],
            "told": "force_balanced_routing=False",
        }

    record = load_record(tampered(written(tmp_path, CHECK), configure))
    assert record["verdict"] == "passed"


def test_failed_checks_of_a_forced_run_may_be_kept(tmp_path: Path) -> None:
    def configure(record: dict[str, Any]) -> None:
        record["configuration"] = {"afd": {"force_balanced_routing": True}}

    failed = replace(CHECK, outcome=Outcome.FAILED)
    assert load_record(tampered(written(tmp_path, failed), configure))["verdict"] == "failed"


@pytest.mark.parametrize("value", [-1, "6", "", 0.5, 0.0, True, False, None, [], {}])
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
