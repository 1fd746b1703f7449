"""What a record says of the emulated NPU, and which records are evidence of a device."""

import dataclasses
import json

import pytest

from afd_testkit.engines.base import ONE_PROCESS, EngineConfig, RunResult, SplitSetting, Topology
from afd_testkit.evidence import (
    InvalidRecordError,
    RecordError,
    RunInfo,
    build_record,
    load_record,
    write_run,
)
from afd_testkit.gates.check import progress_line, run_check
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.own_code import Code, Relation
from afd_testkit.provenance import Machine, Source
from afd_testkit.results import CheckResult, Comparison, Outcome

pytestmark = pytest.mark.cpu

A2 = {
    "soc": "A2",
    "device": "Ascend910B1",
    "relaxed_limits": ["alignment", "dtype"],
    "mla_cast": "lifted",
    "streams": "unchecked",
    "cannot_show": ["device precision", "graph capture"],
}
A3 = {**A2, "soc": "A3", "device": "Ascend910_9391"}
OTHER_CAST = {**A2, "mla_cast": "kept"}
COMMAND = "pytest --pyargs afd_testkit.gates --afd-engine=ascend"

RUN = RunInfo(
    run_id="run-1",
    started="2025-01-31T23:59:59.000Z",
    finished="2025-02-01T00:03:04.125Z",
    command=("tox", "-e", "gate-ascend"),
    source=Source("0123456789abcdef0123456789abcdef01234567", dirty=False, untracked=0),
    code=Code("ab" * 32, "0.1.0", Relation.SAME),
    versions={"python": "3.11.9", "afd-testkit": "0.1.0", "torch-npu": None},
    machine=Machine("Linux", "Some CPU", 2, 4, None, ()),
)
#: Where torch-npu is installed, as on every host with an NPU.
ON_HOST = dataclasses.replace(RUN, versions={**RUN.versions, "torch-npu": "2.10.0"})


def check(engine="ascend", outcome=Outcome.PASSED, facts=None, **changes):
    return CheckResult(
        "split", engine, "qwen3-moe", "float32", "case", "token", outcome,
        facts=facts or {}, **changes,
    )  # fmt: skip


def emulated(fact=A2, **changes):
    return check(facts={"emulated_npu": fact}, **changes)


def written(run, checks, folder):
    return write_run(run, checks, folder).record


# --- the record


def test_a_record_tells_no_emulation_where_there_was_none(tmp_path):
    record = load_record(written(RUN, [check("vllm-cpu"), check("reference")], tmp_path))
    assert record["emulated_npu"] == []


def test_a_record_tells_each_emulation_of_its_checks_once_and_in_order(tmp_path):
    checks = [emulated(), check("reference"), emulated(A3), emulated(), emulated(OTHER_CAST)]
    record = load_record(written(RUN, checks, tmp_path))
    assert record["emulated_npu"] == [A2, A3, OTHER_CAST]
    assert record["checks"][0]["facts"] == {"emulated_npu": A2}


def test_tuples_and_lists_tell_the_same_emulation():
    tuples = {**A2, "cannot_show": tuple(A2["cannot_show"])}
    assert build_record(RUN, [emulated(tuples), emulated()])["emulated_npu"] == [A2]


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_counts(outcome):
    assert build_record(RUN, [emulated(outcome=outcome)])["emulated_npu"] == [A2]


@pytest.mark.parametrize(
    ("change", "json_path"),
    [
        ({"mla_cast": "unknown"}, "$.emulated_npu[0].mla_cast"),
        ({"cannot_show": []}, "$.emulated_npu[0].cannot_show"),
        ({"relaxed_limits": "dtype"}, "$.emulated_npu[0].relaxed_limits"),
        ({"soc": ""}, "$.emulated_npu[0].soc"),
        ({"device": None}, "$.emulated_npu[0].device"),
        ({"speed": "good"}, "$.emulated_npu[0]"),
    ],
)
def test_an_emulation_of_another_form_is_an_invalid_record(tmp_path, change, json_path):
    with pytest.raises(InvalidRecordError, match="bug") as caught:
        write_run(RUN, [emulated({**A2, **change})], tmp_path)
    assert f"at {json_path}: " in str(caught.value)


def altered(record, folder, change):
    record = json.loads(json.dumps(record))  # a deep copy would keep what is shared in it
    change(record)
    path = folder / "altered.json"
    path.write_text(json.dumps(record), "utf-8")
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(emulated_npu=[]),
        lambda record: record.update(emulated_npu=[A3]),
        lambda record: record["emulated_npu"].append(A3),
        lambda record: record["checks"][0]["facts"].clear(),
        lambda record: record["checks"][0]["facts"]["emulated_npu"].update(relaxed_limits=[]),
    ],
)
@pytest.mark.parametrize("device", [False, True])
def test_a_record_whose_emulation_is_not_that_of_its_checks_is_refused(tmp_path, change, device):
    path = altered(build_record(ON_HOST, [emulated()]), tmp_path, change)
    with pytest.raises(RecordError, match=r"at \$\.emulated_npu: "):
        load_record(path, device=device)


# --- evidence of a device


def test_an_emulated_record_loads_but_is_no_device_evidence(tmp_path):
    path = written(ON_HOST, [emulated(), emulated()], tmp_path)
    assert load_record(path)["verdict"] == "passed"
    with pytest.raises(RecordError) as caught:
        load_record(path, device=True)
    text = str(caught.value)
    assert str(path) in text
    assert "2 checks of engine 'ascend' ran on the emulated NPU (A2 Ascend910B1)" in text
    assert COMMAND in text
    assert "torch-npu" in text
    assert "docs/devices.md" in text


@pytest.mark.parametrize("engine", ["reference", "vllm-cpu", "mine"])
def test_an_engine_without_npu_is_no_device_evidence(tmp_path, engine):
    path = written(ON_HOST, [check(engine)], tmp_path)
    with pytest.raises(RecordError) as caught:
        load_record(path, device=True)
    assert f"1 check of engine '{engine}' ran on no NPU" in str(caught.value)
    assert COMMAND in str(caught.value)


def test_a_run_on_a_real_device_is_device_evidence(tmp_path):
    skipped = check("vllm-cpu", Outcome.SKIPPED, message="needs amx: no amx_tile")
    path = written(ON_HOST, [check(), check(), skipped], tmp_path)
    assert load_record(path, device=True) == load_record(path)


@pytest.mark.parametrize("outcome", [Outcome.PASSED, Outcome.FAILED, Outcome.ERROR, Outcome.WAIVED])
def test_one_check_elsewhere_is_enough_to_refuse_all(tmp_path, outcome):
    path = written(ON_HOST, [*[check()] * 3, check("vllm-cpu", outcome)], tmp_path)
    with pytest.raises(RecordError, match="1 check of engine 'vllm-cpu' ran on no NPU"):
        load_record(path, device=True)


def test_a_skipped_check_that_had_run_on_the_emulated_npu_is_refused(tmp_path):
    path = written(ON_HOST, [check(), emulated(outcome=Outcome.SKIPPED)], tmp_path)
    with pytest.raises(RecordError, match="1 check of engine 'ascend' ran on the emulated NPU"):
        load_record(path, device=True)


def test_without_torch_npu_nothing_ran_on_a_device_whatever_the_checks_omit(tmp_path):
    path = written(RUN, [check()], tmp_path)
    with pytest.raises(RecordError, match="engine 'ascend' ran without torch-npu"):
        load_record(path, device=True)


@pytest.mark.parametrize("checks", [[], [check(outcome=Outcome.SKIPPED)]], ids=["none", "skipped"])
def test_where_no_check_ran_there_is_no_evidence(tmp_path, checks):
    with pytest.raises(RecordError, match="no check ran"):
        load_record(written(ON_HOST, checks, tmp_path), device=True)


def test_every_place_is_named(tmp_path):
    path = written(ON_HOST, [check("reference"), emulated(), emulated(A3)], tmp_path)
    with pytest.raises(RecordError) as caught:
        load_record(path, device=True)
    for words in ("engine 'reference'", "(A2 Ascend910B1)", "(A3 Ascend910_9391)"):
        assert words in str(caught.value)


# --- from an engine's run to the record


class Engine:
    """Returns one empty run, with the facts that it was given."""

    def __init__(self, facts):
        self.facts = facts
        self.config = EngineConfig(model="tiny")

    def run(self, prompts, *, split, fault):
        return RunResult(requests=(), steps=(), seconds=0.0, facts=self.facts)


def judged(facts, body=lambda check: None, topology=ONE_PROCESS):
    def run(check):
        check.run(Engine(facts), [], SplitSetting())
        body(check)

    lines = []
    session = GateSession(start=lambda config: None, paragraphs=(), progress=lines.append)
    subject = Subject("ascend", "/models/tiny", "float32", topology)
    result = run_check(session, "split", subject, "case", "token", run)
    return result, lines


def test_a_check_takes_over_what_its_engine_says_is_emulated():
    result, _ = judged({"emulated_npu": A2, "run": 7})
    assert (result.outcome, result.facts) == (Outcome.PASSED, {"emulated_npu": A2})
    result, _ = judged({"run": 7})
    assert result.facts == {}


def test_a_check_that_fails_says_so_too():
    result, _ = judged({"emulated_npu": A2}, lambda check: check.need(False, "wrong"))
    assert (result.outcome, result.facts) == (Outcome.FAILED, {"emulated_npu": A2})


def test_a_check_and_its_line_name_the_topology_where_there_is_one():
    spread = Topology(tensor_parallel=2, expert_parallel=True, soc="A3")
    result, lines = judged({}, topology=spread)
    assert result.topology == "TP 2 + EP on A3"
    assert lines == [progress_line(result)]
    assert " tiny float32 TP 2 + EP on A3  case  token  " in lines[0]
    result, lines = judged({})
    assert result.topology == ""
    assert " tiny float32  case  token  " in lines[0]


def test_the_topology_of_a_check_is_in_the_record(tmp_path):
    compared = Comparison("kv", 0.0, 1.0, 1.0, None, "", True, 1)
    checks = [check(topology="TP 2", comparisons=(compared,)), check()]
    record = load_record(written(RUN, checks, tmp_path))
    assert [each["topology"] for each in record["checks"]] == ["TP 2", ""]
