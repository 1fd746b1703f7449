"""What the page and the closing report show of the accuracy gate."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401  (imported here, so that no single test is the first to load it)
import pytest
from rich.console import Console
from scipy.stats import beta

from afd_testkit.accuracy_view import accuracy_lines, accuracy_runs, fell
from afd_testkit.charts import score_chart
from afd_testkit.evidence import RunFiles, RunInfo, load_record, write_run
from afd_testkit.own_code import Code, Relation
from afd_testkit.page import render_page
from afd_testkit.provenance import Machine, Source
from afd_testkit.report import terminal_summary
from afd_testkit.results import CheckResult, Comparison, Outcome
from afd_testkit.summary import gate_rows

pytestmark = pytest.mark.cpu

RUN = RunInfo(
    run_id="run-1",
    started="2025-01-31T23:59:59.000Z",
    finished="2025-02-01T00:03:04.125Z",
    command=("tox", "-e", "accuracy"),
    source=Source("0123456789abcdef0123456789abcdef01234567", dirty=False, untracked=0),
    code=Code("ab" * 32, "0.1.0", Relation.SAME),
    versions={"python": "3.11.9", "torch": "2.13.0"},
    machine=Machine("Linux", "Some CPU", 2, 4, None, ()),
)
FILES = RunFiles(Path("results/afd-run-1.json"), Path("results/afd-run-1.html"))
SOURCE = "the source of the margin"
TOKENS = Comparison("logprob", 2e-7, 1e-5, 1e-5, 1e-7, "tolerance", True, 500)
DROP = Comparison("score drop, 95 % bound", 0.0082, 0.02, 0.02, None, SOURCE, True, 450)
FLIPS = [
    {
        "id": "q-lost",
        "way": "broken",
        "question": "What is 2+2?",
        "unsplit": "2+2=4\n#### 4",
        "split": "2+2=5\n#### 5",
    },
    {"id": "q-won", "way": "mended", "unsplit": "#### 8", "split": "#### 9"},
]


def check(case: str, variant: str, facts: dict[str, Any], **changes: Any) -> CheckResult:
    plain = CheckResult(
        gate="accuracy",
        engine="vllm-cpu",
        model="small",
        dtype="float32",
        case=case,
        variant=variant,
        outcome=Outcome.PASSED,
        facts={"questions": 450, "shots": 5, "split_steps": 0, "cut_requests": 0, **facts},
    )
    return dataclasses.replace(plain, **changes)


def scored(score: float, low: float, high: float, **facts: Any) -> dict[str, Any]:
    return {
        "strict_match": score,
        "flexible_extract": score,
        "interval": [low, high],
        "truncated": 0,
        **facts,
    }


BASE = check("baseline", "unsplit", scored(0.95, 0.925, 0.968, floor=0.9333))
SPLIT = check(
    "split",
    "token",
    scored(
        0.95,
        0.925,
        0.968,
        split_steps=60,
        cut_requests=40,
        broken=1,
        mended=1,
        p_value=1.0,
        lowest_difference=-0.0123,
        margin=0.02,
        detectable_drop=0.0122,
        flips=FLIPS,
        flips_not_shown=0,
    ),
    comparisons=(TOKENS, DROP),
)


def faulty(name: str, seen: list[str], **facts: Any) -> CheckResult:
    told = {
        **scored(0.25, 0.2, 0.3, broken=140, mended=2, split_steps=9, cut_requests=9),
        "questions": 200,
        "fault": name,
        "seen_by": seen,
        "logprob_difference": 14.5,
        "logprob_limit": 1e-5,
        **facts,
    }
    outcome = Outcome.PASSED if seen else Outcome.FAILED
    return check("sensitivity", name, told, outcome=outcome)


BOTH = faulty("positions-moved", ["score", "logprob"])
SMALL = faulty("a-little-noise", ["logprob"], broken=0, mended=0, logprob_difference=0.071)
ALL = [BASE, SPLIT, BOTH, SMALL]


def shown(checks: list[CheckResult], width: int = 100) -> list[str]:
    stream = io.StringIO()
    terminal_summary(checks, RUN, FILES, Console(file=stream, width=width))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def section(checks: list[CheckResult]) -> str:
    """The accuracy section as the page has it."""
    page = render_page(RUN, checks)
    found = re.search(r'<section aria-labelledby="accuracy">.*?</section>', page, re.DOTALL)
    return found[0] if found else ""


def words_of(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))


def other_gate() -> CheckResult:
    return dataclasses.replace(SPLIT, gate="split", comparisons=(TOKENS,))


def split_by(outcome: Outcome = Outcome.PASSED, **facts: Any) -> CheckResult:
    return dataclasses.replace(SPLIT, outcome=outcome, facts={**SPLIT.facts, **facts})


# --- the closing report


def test_scores_flips_intervals_and_verdicts_take_a_line_an_arm() -> None:
    lines = shown(ALL)
    begin = lines.index(
        "accuracy of small float32: 450 questions, 5-shot; margin 0.02, refuses a drop of 0.0122"
    )
    assert lines[begin + 1 : begin + 4] == [
        "  unsplit 0.9500 [0.9250, 0.9680] floor 0.9333: passed",
        "  token   0.9500 [0.9250, 0.9680] 1 broken, 1 mended, p 1, fell by less than 0.0123: "
        "passed",
        "  faults seen 2 of 2: 1 by the score, 2 by log-probabilities",
    ]


def test_nothing_is_said_where_nobody_was_asked() -> None:
    skipped = dataclasses.replace(SPLIT, outcome=Outcome.SKIPPED, facts={}, comparisons=())
    for checks in ([other_gate()], [skipped], []):
        assert not [line for line in shown(checks) if line.startswith("accuracy of ")]
        assert section(checks) == ""


def test_a_failed_arm_is_told_loudly() -> None:
    bad = split_by(Outcome.FAILED, strict_match=0.6, broken=150, lowest_difference=-0.4)
    line = next(line for line in shown([BASE, bad]) if line.startswith("  token"))
    assert line.endswith("150 broken, 1 mended, p 1, fell by less than 0.4000: FAILED")


def test_too_few_questions_are_named() -> None:
    few = split_by(Outcome.FAILED, detectable_drop=None)
    lines = accuracy_lines(accuracy_runs([few])[0])
    assert lines[0].endswith("margin 0.02, too few right answers to pass")
    assert "no result of theirs would pass" in words_of(section([few]))


def test_it_fits_a_screen_whatever_was_asked() -> None:
    checks = [
        dataclasses.replace(one, model=f"model-{n}", outcome=outcome)
        for n in range(12)
        for one in ALL
        for outcome in (Outcome.PASSED, Outcome.FAILED)
    ]
    lines = shown(checks)
    assert len(lines) <= 40
    assert any(re.fullmatch(r"accuracy of \d+ more models on the page", line) for line in lines)
    assert any(line.startswith("FAILED accuracy") for line in lines)


def test_names_cannot_steer_the_terminal() -> None:
    lines = shown([dataclasses.replace(SPLIT, model="a\x1b[31m", variant="b\nc")])
    assert not [line for line in lines if "\x1b" in line]
    assert any(line.startswith("  b\\nc 0.9500") for line in lines)


@pytest.mark.parametrize(
    ("lowest", "words"),
    [
        (-0.0082, "fell by less than 0.0082"),
        (0.0, "fell by less than 0.0000"),
        (0.03, "rose by 0.0300 or more"),
        (None, "not compared"),
    ],
)
def test_a_bound_in_words(lowest: float | None, words: str) -> None:
    assert fell(lowest) == words


def test_split_steps_are_those_of_the_arms_that_were_to_be_split() -> None:
    assert gate_rows(ALL)[0].steps == (60, 40)
    assert gate_rows([BASE])[0].steps is None
    assert gate_rows([split_by(split_steps=0, cut_requests=0)])[0].steps == (0, 0)


# --- the page


def test_the_page_says_how_it_was_asked_and_what_is_not_seen() -> None:
    told = {"lm_eval": "0.4.13", "chat_template": None, "seeds": {"random_seed": 7}}
    base = dataclasses.replace(BASE, facts={**BASE.facts, **told})
    words = words_of(section([base, SPLIT]))
    assert "Asked by lm-eval 0.4.13; chat template None; seeds random_seed 7" in words
    assert "not seen" not in words
    servers = [dataclasses.replace(one, engine="server") for one in (base, SPLIT)]
    assert "not seen: steps of servers" in words_of(section(servers))
    assert any("not seen: steps of servers" in line for line in shown(servers))


def test_faults_are_told_beside_the_unsplit_score_of_the_same_questions() -> None:
    fault = dataclasses.replace(BOTH, facts={**BOTH.facts, "baseline_score": 0.94})
    words = words_of(section([BASE, SPLIT, fault]))
    assert "asked the first 200 questions, of which the unsplit arm answers 0.9400" in words


def test_the_section_has_every_figure() -> None:
    text = words_of(section(ALL))
    for words in (
        "small float32 · vllm-cpu · 450 questions, 5-shot",
        "unsplit 0.9500 floor 0.9333 0.9500",
        "token 0.9500 0.9500 1 broken 1 mended 1 fell by less than 0.0123 2e-7 of 1e-5",
        "noise 1e-7",
        f"less than 0.02 : {SOURCE}",
        "A true drop of 0.0122 is refused four times of five",
        "2 questions that flipped",
        "2 of 2 faults in the same engine are seen: 1 by the score, 2 by log-probabilities",
        "positions-moved 0.2500 140 broken 2 mended ✓ yes 14 of 1e-5 ✓ yes",
        "a-little-noise 0.2500 0 broken 0 mended no 0.071 of 1e-5 ✓ yes",
    ):
        assert words in text, words


def test_flips_have_both_answers_side_by_side() -> None:
    html = section(ALL)
    row = re.search(r"<tr><th[^>]*><code>q-lost</code>.*?</tr>", html, re.DOTALL)
    assert row is not None
    assert "What is 2+2?" in row[0]
    assert re.findall(r"<pre>(.*?)</pre>", row[0], re.DOTALL) == ["2+2=4\n#### 4", "2+2=5\n#### 5"]
    assert "token: broken" in words_of(row[0])
    assert html.index("q-lost") < html.index("q-won")


def test_further_flips_are_counted() -> None:
    assert "(31 more are only counted)" in words_of(section([split_by(flips_not_shown=31)]))


def test_no_flip_is_said_so() -> None:
    assert "No question flipped." in words_of(section([BASE, split_by(flips=[])]))


def test_a_fault_that_nothing_saw_is_marked() -> None:
    text = words_of(section([BASE, SPLIT, faulty("unseen", [])]))
    assert "unseen failed 0.2500" in text
    assert "0 of 1 faults" in text


def test_a_difference_without_end_is_shown() -> None:
    text = words_of(section([faulty("nan", ["logprob"], logprob_difference=math.inf)]))
    assert "no inf of 1e-5 ✓ yes" in text


def test_models_have_an_article_each() -> None:
    other = [dataclasses.replace(one, model="large") for one in ALL]
    assert section([*ALL, *other]).count("<article") == 2


HOSTILE = "<script>x</script>\x1b[31m"


def test_hostile_facts_stay_text() -> None:
    flips = [
        {"id": HOSTILE, "way": HOSTILE, "question": HOSTILE, "unsplit": HOSTILE, "split": HOSTILE}
    ]
    checks = [
        dataclasses.replace(split_by(flips=flips), variant=HOSTILE, model=HOSTILE),
        dataclasses.replace(faulty(HOSTILE, ["score"]), model=HOSTILE),
    ]
    page = render_page(RUN, checks)
    assert "<script" not in page
    assert "\x1b" not in page


ODD = (None, "high", -1, True, [], {}, [1, 2, 3], ["a", "b"], math.nan, math.inf)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_facts_in_another_form_are_shown_as_not_told(odd: Any) -> None:
    for one in (BASE, SPLIT, BOTH):
        for name in one.facts:
            changed = dataclasses.replace(one, facts={**one.facts, name: odd})
            assert shown([changed])
            render_page(RUN, [changed])
    for name in ("strict_match", "interval"):
        bare = {key: value for key, value in SPLIT.facts.items() if key != name}
        assert section([dataclasses.replace(SPLIT, facts=bare)]) == ""


def test_long_answers_end_somewhere() -> None:
    flip = {"id": "q", "way": "broken", "unsplit": "a" * 9999, "split": "b"}
    page = section([split_by(flips=[flip])])
    assert "a" * 2000 + "…" in page
    assert "a" * 2001 not in page


# --- the picture


def arms_of(*scores: tuple[float, float, float]) -> Any:
    checks = [check("split", f"arm-{n}", scored(*one)) for n, one in enumerate(scores)]
    return accuracy_runs(checks)[0].arms


def drawn(svg: str) -> list[tuple[float, float, float]]:
    """Low end, dot and high end of each arm, in pixels."""
    spans = re.findall(r'class="span" d="M([\d.]+) \d+H([\d.]+)"', svg)
    dots = re.findall(r'<circle class="\w+" cx="([\d.]+)"', svg)
    return [(float(a), float(c), float(b)) for (a, b), c in zip(spans, dots, strict=True)]


def test_scores_are_drawn_to_one_scale() -> None:
    (low, dot, high), (low2, dot2, high2) = drawn(
        score_chart(arms_of((0.90, 0.88, 0.92), (0.80, 0.76, 0.84)))
    )
    pixel = (dot - dot2) / 0.10
    for left, right, apart in (
        (low, dot, 0.02),
        (dot, high, 0.02),
        (low2, dot2, 0.04),
        (dot2, high2, 0.04),
    ):
        assert right - left == pytest.approx(apart * pixel, abs=0.2)


@pytest.mark.parametrize("score", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.5, 0.0, 1.0)])
def test_every_score_has_a_place(score: tuple[float, float, float]) -> None:
    ((low, dot, high),) = drawn(score_chart(arms_of(score)))
    assert 130 <= low <= dot <= high <= 450
    assert "<text" in score_chart(arms_of(score))


def test_the_picture_is_told_in_words() -> None:
    svg = score_chart(accuracy_runs([BASE, SPLIT])[0].arms)
    assert 'role="img"' in svg
    assert (
        'aria-label="scores with 95 % intervals: unsplit 0.9500 [0.9250, 0.9680], floor 0.9333; '
        'token 0.9500 [0.9250, 0.9680]"'
    ) in svg
    assert svg.count('class="limit"') == 1


def test_a_failed_arm_is_drawn_as_such() -> None:
    svg = score_chart(accuracy_runs([BASE, split_by(Outcome.FAILED)])[0].arms)
    assert re.findall(r'<circle class="(\w+)"', svg) == ["passed", "failed"]


# --- the record


def test_a_record_of_the_gate_fits_the_schema(tmp_path: Path) -> None:
    # Clopper-Pearson's bounds as quantiles of beta distributions.
    def bounds(n: int, of: int) -> list[float]:
        ends = beta.ppf(0.025, n, of - n + 1), beta.ppf(0.975, n + 1, of - n)
        return list(map(float, ends))

    lowest = bounds(1, 450)[0] - bounds(1, 450)[1]
    shared = {"balanced_routing": 0, "seeds": {}, "baseline_score": 428 / 450}
    exact = {
        **dict.fromkeys(("strict_match", "flexible_extract", "score"), 428 / 450),
        "interval": bounds(428, 450),
        "lowest_difference": lowest,
        **shared,
    }
    drop = dataclasses.replace(DROP, max_diff=-lowest)
    faulty = {
        **dict.fromkeys(("strict_match", "flexible_extract"), 50 / 200),
        "interval": bounds(50, 200),
        **shared,
        "baseline_score": 188 / 200,  # of which 140 broke, and 2 others were mended
    }
    checks = [
        dataclasses.replace(BASE, facts={**BASE.facts, **exact}),
        dataclasses.replace(SPLIT, facts={**SPLIT.facts, **exact}, comparisons=(TOKENS, drop)),
        dataclasses.replace(BOTH, facts={**BOTH.facts, **faulty}),
    ]
    files = write_run(RunInfo.begin(["example"]).end(), checks, tmp_path)
    record = load_record(files.record)
    assert record["checks"][1]["facts"]["flips"] == FLIPS
    assert '<section aria-labelledby="accuracy">' in files.page.read_text(encoding="utf-8")
