"""The closing report and the page of a run on the emulated NPU, and of several topologies."""

import dataclasses
import io
import re
from html import unescape
from pathlib import Path

import jinja2  # noqa: F401  (imported here, so that no single test is the first to load it)
import pytest
from rich.console import Console

from afd_testkit.evidence import RunFiles, RunInfo
from afd_testkit.failure import title
from afd_testkit.own_code import Code, Relation
from afd_testkit.page import render_page
from afd_testkit.provenance import Machine, Source
from afd_testkit.report import terminal_summary
from afd_testkit.results import CheckResult, Comparison, Outcome
from afd_testkit.summary import failed_cases, gate_rows, skipped_subjects

pytestmark = pytest.mark.cpu

RUN = RunInfo(
    run_id="run-1",
    started="2025-01-31T23:59:59.000Z",
    finished="2025-02-01T00:03:04.125Z",
    command=("tox", "-e", "gate-ascend"),
    source=Source("0123456789abcdef0123456789abcdef01234567", dirty=False, untracked=0),
    code=Code("ab" * 32, "0.1.0", Relation.SAME),
    versions={"python": "3.11.9", "torch": "2.13.0"},
    machine=Machine("Linux", "Some CPU", 2, 4, None, ()),
)
FILES = RunFiles(Path("results/afd-run-1.json"), Path("results/afd-run-1.html"))
A2 = {
    "soc": "A2",
    "device": "Ascend910B1",
    "relaxed_limits": ["alignment", "dtype"],
    "mla_cast": "lifted",
    "streams": "unchecked",
    "cannot_show": ["races (all of them)", "precision: rounding", "graph capture"],
}
A3 = {
    **A2,
    "soc": "A3",
    "device": "Ascend910_9391",
    "relaxed_limits": [],
    "mla_cast": "kept",
    "streams": "checked",
    "cannot_show": ["graph capture", "speed"],
}


def check(fact=None, engine="ascend", **changes):
    known = {
        "gate": "split",
        "model": "qwen3-moe",
        "dtype": "float32",
        "case": "one long request",
        "variant": "token",
        "outcome": Outcome.PASSED,
        "comparisons": (Comparison("logprob", 0.0, 1e-5, 1e-5, None, "tolerance", True, 10),),
    }
    facts = {} if fact is None else {"emulated_npu": fact}
    return CheckResult(engine=engine, facts=facts, **{**known, **changes})


def shown(checks, width=200, **console):
    stream = io.StringIO()
    terminal_summary(checks, RUN, FILES, Console(file=stream, width=width, **console))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def words_of(checks):
    """The page's text, without what it says in its style sheet."""
    text = re.sub(r"<style>.*?</style>", "", render_page(RUN, checks), flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", text))).replace(" .", ".")


# --- the terminal


def test_the_second_line_says_what_an_emulated_run_cannot_show():
    assert shown([check(A2)])[:2] == [
        "AFD gates: PASSED · 1 passed",
        "EMULATED NPU (A2 Ascend910B1): not device evidence; "
        "cannot show races, precision, graph capture",
    ]


def test_nothing_is_said_where_nothing_was_emulated():
    assert "emulated" not in " ".join(shown([check(engine="vllm-cpu"), check()])).lower()


def test_several_emulations_share_the_line_each_limit_once():
    checks = [check(A2), check(engine="vllm-cpu"), check(A3), check({**A2, "mla_cast": "kept"})]
    told = [line for line in shown(checks) if line.startswith("EMULATED NPU")]
    assert told == [
        "EMULATED NPU (A2 Ascend910B1, A3 Ascend910_9391): not device evidence; "
        "cannot show races, precision, graph capture, speed"
    ]


def test_a_failed_run_says_so_too():
    lines = shown([check(A2, outcome=Outcome.FAILED)])
    assert lines[0].startswith("AFD gates: FAILED")
    assert lines[1].startswith("EMULATED NPU (A2 Ascend910B1)")


def test_it_is_a_warning_where_there_is_colour():
    text = "\n".join(shown([check(A2)], force_terminal=True, color_system="standard"))
    assert "\x1b[1;33mEMULATED NPU (A2 Ascend910B1)" in text


def test_a_long_list_is_folded_not_cropped_and_the_report_still_fits():
    limits = [f"limit number {n} of the emulation" for n in range(12)]
    checks = [
        check({**A2, "cannot_show": limits}, model=f"m{n}", case=f"c{n}", outcome=outcome)
        for n in range(40)
        for outcome in (Outcome.PASSED, Outcome.FAILED)
    ]
    lines = shown(checks, width=100)
    assert len(lines) <= 40
    assert all(limit in " ".join(lines) for limit in limits)


@pytest.mark.parametrize("odd", ["yes", 1, [], {}, {"soc": 3, "cannot_show": "all"}])
def test_an_emulation_that_is_told_in_another_form_is_shown_all_the_same(odd):
    assert any(line.startswith("EMULATED NPU (") for line in shown([check(odd)]))
    assert "Emulated NPU: not device evidence" in words_of([check(odd)])


# --- the page


def test_the_banner_comes_before_the_verdict_and_says_everything():
    text = words_of([check(A2)] * 3)
    banner = text[: text.index("AFD gates passed", text.index("Emulated NPU: not device"))]
    for words in (
        "Everything below ran on a CPU that stands in for A2 Ascend910B1.",
        "Nothing from this page may stand where evidence of a device is required.",
        "It cannot show:",
        "races (all of them)",
        "precision : rounding",
        "graph capture",
        "A2 Ascend910B1 3 alignment, dtype lifted: MLA prefill keeps float32",
        "unchecked",
    ):
        assert words in banner


def test_the_title_of_the_page_says_it():
    assert "<title>AFD gates passed on an emulated NPU ·" in render_page(RUN, [check(A2)])
    assert "<title>AFD gates passed ·" in render_page(RUN, [check()])


def test_there_is_no_banner_where_nothing_was_emulated():
    text = words_of([check(engine="vllm-cpu"), check(engine="reference"), check()])
    assert "emulated" not in text.lower()


def test_the_banner_tells_emulations_apart_and_counts_what_ran():
    skipped = check(engine="vllm-cpu", outcome=Outcome.SKIPPED, message="needs amx")
    text = words_of([check(A2), check(A2), check(A3), check(engine="reference"), skipped])
    assert "3 of 4 checks ran on a CPU that stands in for A2 Ascend910B1, A3 Ascend910_9391" in text
    assert "Nothing from them may stand" in text
    assert "A2 Ascend910B1 2 alignment, dtype lifted" in text
    assert "A3 Ascend910_9391 1 none kept, as in the real code checked" in text
    assert text.count("graph capture") == 1


def test_a_skipped_check_does_not_keep_the_banner_from_saying_everything():
    skipped = check(outcome=Outcome.SKIPPED, message="needs two NPUs")
    assert "Everything below ran on" in words_of([check(A2), skipped])


def test_only_rows_that_were_emulated_are_marked():
    text = words_of([check(A2), check(engine="reference")])
    assert "qwen3-moe float32, ascend emulated NPU 1 passed" in text
    assert "qwen3-moe float32, reference 1 passed" in text


def test_hostile_facts_stay_text():
    hostile = "<script>x</script>"
    fact = {**A2, "soc": hostile, "device": hostile, "mla_cast": hostile, "streams": hostile}
    fact |= {"relaxed_limits": [hostile], "cannot_show": [hostile]}
    assert "<script" not in render_page(RUN, [check(fact, topology=hostile)])


# --- topologies


def test_topologies_are_rows_of_their_own_and_named_where_the_model_is():
    checks = [check(), check(topology="TP 2 + EP on A3"), check(topology="TP 2 + EP on A3")]
    assert [(row.topology, len(row.checks)) for row in gate_rows(checks)] == [
        ("", 1),
        ("TP 2 + EP on A3", 2),
    ]
    lines = [" ".join(line.split()) for line in shown(checks)]
    assert any(line.startswith("split qwen3-moe f32 1 ok") for line in lines)
    spread = [
        n for n, line in enumerate(lines) if line.startswith("split qwen3-moe f32 TP 2 + 2 ok")
    ]
    assert [lines[n + 1] for n in spread] == ["EP on A3"]
    text = words_of(checks)
    assert "qwen3-moe float32, ascend 1 passed" in text
    assert "qwen3-moe float32, TP 2 + EP on A3, ascend 2 passed" in text
    assert "Topology one process; TP 2 + EP on A3" in text


def test_a_run_in_one_process_keeps_the_run_s_own_topology():
    assert "Topology TP 1, DP 1, EP 1, PP 1" in words_of([check()])


def test_failures_and_skips_of_topologies_are_told_apart():
    bad = check(outcome=Outcome.FAILED)
    spread = dataclasses.replace(bad, topology="TP 2")
    assert title(spread) == "split · qwen3-moe float32 TP 2 · ascend · one long request · token"
    assert len(failed_cases([bad, spread, bad])) == 2
    none = check(outcome=Outcome.SKIPPED, message="needs npu: none")
    skips = gate_rows([none, dataclasses.replace(none, topology="TP 2")])
    assert [(s.topology, s.count) for s in skipped_subjects(skips)[1]] == [("", 1), ("TP 2", 1)]
    assert "split qwen3-moe f32 TP 2 1 skip needs npu" in [
        " ".join(line.split()) for line in shown([none, dataclasses.replace(none, topology="TP 2")])
    ]
