"""Slicing vLLM's own ``CommonAttentionMetadata``: field by field, and through its consumers.

Expected values come from a list of single tokens, each with its request, position and slot;
a stage is a part of that list.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from afd_plugin import ScheduledBatch, SplitPlan, slice_metadata, split_at
from afd_plugin.errors import MissingFieldRule, RefusedField, StaleFieldRule
from afd_plugin.plan import plan_split

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

ConfigMaker = Callable[..., Any]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_loaded")]

BLOCK = 32


@dataclass(frozen=True)
class Step:
    """A step by tokens; ``prefilling`` and the counts are per request."""

    scheduled: tuple[int, ...]
    computed: tuple[int, ...]
    prefilling: tuple[bool, ...]

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(request, position) of each token of the step, in order."""
        return [
            (request, self.computed[request] + i)
            for request, count in enumerate(self.scheduled)
            for i in range(count)
        ]

    def plan(self, cut: int, alignment: int = 1) -> SplitPlan:
        batch = ScheduledBatch(self.scheduled, self.computed, is_prefilling=self.prefilling)
        return split_at(batch, cut, alignment)


# A decode, a cut-off prompt with context, a fresh prompt, a prompt's last single token.
MIXED = Step((1, 9, 5, 1), (40, 64, 0, 31), (False, True, True, True))
A1 = Step((3, 200, 17), (0, 64, 0), (True, True, True))
STEPS = {"mixed": MIXED, "A1": A1, "A3": Step((8,), (24,), (True,))}


def block_row(request: int, width: int = 40) -> list[int]:
    """Block ids of a request: no two requests share one."""
    return [1 + request * width + i for i in range(width)]


def slot(request: int, position: int) -> int:
    """Where a token's keys go: in its request's own block row."""
    return block_row(request)[position // BLOCK] * BLOCK + position % BLOCK


def sentinels(step: Step, extra_rows: int = 0) -> dict[str, Any]:
    """One value a field of the class, all distinct; ``extra_rows`` padding rows and tokens."""
    rows, tokens = len(step.scheduled), step.tokens
    starts = [sum(step.scheduled[:i]) for i in range(rows + 1)] + [len(tokens)] * extra_rows
    lengths = [c + s for c, s in zip(step.computed, step.scheduled, strict=True)]
    lengths += [0] * extra_rows

    def each(base: int) -> list[int]:
        return [base + row for row in range(rows + extra_rows)]

    return {
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        "query_start_loc_cpu": torch.tensor(starts, dtype=torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "num_reqs": rows + extra_rows,
        "num_actual_tokens": len(tokens) + extra_rows,
        "max_query_len": max(step.scheduled),
        "max_seq_len": max(lengths),
        "block_table_tensor": torch.tensor(
            [block_row(r) for r in range(rows + extra_rows)], dtype=torch.int32
        ),
        "slot_mapping": torch.tensor([slot(*token) for token in tokens] + [-1] * extra_rows),
        "causal": torch.tensor([row % 2 == 0 for row in range(rows + extra_rows)]),
        "logits_indices_padded": None,
        "num_logits_indices": None,
        "max_logits_per_req": None,
        "encoder_seq_lens": torch.tensor(each(5000), dtype=torch.int32),
        "encoder_seq_lens_cpu": np.array(each(6000), dtype=np.int32),
        "dcp_local_seq_lens": None,
        "dcp_local_seq_lens_cpu_upper_bound": None,
        "positions": torch.tensor([position for _, position in tokens] + [0] * extra_rows),
        "is_prefilling": torch.tensor([*step.prefilling, *[False] * extra_rows]),
        "seq_lens_cpu_upper_bound": torch.tensor(lengths, dtype=torch.int32),
        "req_idx": np.array(each(700), dtype=np.int32),
        "mm_req_doc_ranges": None,
        "rswa_prefix_lens": torch.tensor(each(8000), dtype=torch.int32),
        "replayssm_decode_base_cpu": torch.tensor(each(9000), dtype=torch.int32),
        "_num_computed_tokens_cache": torch.tensor(each(11000), dtype=torch.int32),
        "_token_to_req_indices_cache": torch.full((len(tokens) + extra_rows,), 12000),
    }


# Fields that a stage cannot derive, each with a value that vLLM would give it.
REFUSED = {
    "logits_indices_padded": torch.tensor([0, 9, 9]),
    "num_logits_indices": 2,
    "max_logits_per_req": 1,
    "dcp_local_seq_lens": torch.tensor([21, 37, 3, 16]),
    "dcp_local_seq_lens_cpu_upper_bound": torch.tensor([21, 37, 3, 16]),
    "mm_req_doc_ranges": {1: [(2, 5)]},
}


def expected(step: Step, parent: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Every field of the stage with tokens ``begin`` to ``end``, from its tokens alone."""
    mine = step.tokens[begin:end]
    rows = sorted({request for request, _ in mine})
    counts = [sum(request == row for request, _ in mine) for row in rows]
    ends = [1 + max(position for request, position in mine if request == row) for row in rows]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]

    def of_rows(name: str) -> list[Any]:
        return [parent[name].tolist()[row] for row in rows]

    per_request = (
        "causal",
        "encoder_seq_lens",
        "encoder_seq_lens_cpu",
        "req_idx",
        "rswa_prefix_lens",
        "replayssm_decode_base_cpu",
    )
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": ends,
        "num_reqs": len(rows),
        "num_actual_tokens": len(mine),
        "max_query_len": max(counts),
        "max_seq_len": max(ends),
        "block_table_tensor": [block_row(row) for row in rows],
        "slot_mapping": [slot(*token) for token in mine],
        "positions": [position for _, position in mine],
        "is_prefilling": [step.prefilling[row] for row in rows],
        "seq_lens_cpu_upper_bound": ends,
        **{name: of_rows(name) for name in per_request},
        **dict.fromkeys(REFUSED),
        # Private caches start empty and are filled from the stage's own content.
        "_num_computed_tokens_cache": None,
        "_token_to_req_indices_cache": None,
    }


def metadata(step: Step, extra_rows: int = 0, **changes: Any) -> CommonAttentionMetadata:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    return CommonAttentionMetadata(**{**sentinels(step, extra_rows), **changes})


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


def values(piece: Any) -> dict[str, Any]:
    return {f.name: plain(getattr(piece, f.name)) for f in dataclasses.fields(piece)}


# --- B1: every field ----------------------------------------------------------------------


@pytest.mark.parametrize("extra_rows", [0, 2])
@pytest.mark.parametrize("name", STEPS)
def test_every_field_at_every_kind_of_cut(name: str, extra_rows: int) -> None:
    step = STEPS[name]
    total = len(step.tokens)
    cuts = range(1, total) if total < 50 else (1, 3, 4, 110, 202, 203, 204, total - 1)
    given = sentinels(step, extra_rows)
    for cut in cuts:
        parent = metadata(step, extra_rows)
        stages = slice_metadata(parent, step.plan(cut))
        for piece, (begin, end) in zip(stages, [(0, cut), (cut, total)], strict=True):
            assert type(piece) is type(parent)
            assert values(piece) == expected(step, given, begin, end), cut


def test_this_suite_knows_every_field() -> None:
    """A field of the class without a sentinel here would not be judged at all."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    fields = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    given = sentinels(MIXED)
    assert set(given) == fields == set(expected(MIXED, given, 0, 4))
    assert {name for name, value in given.items() if value is None} == set(REFUSED)
    own = [repr(plain(value)) for name, value in given.items() if name not in REFUSED]
    twins = 3  # offsets and bounds come twice by definition, on the device and on the CPU
    assert len(set(own)) >= len(own) - twins


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_derived_is_refused(name: str) -> None:
    with pytest.raises(RefusedField, match=rf"field {name} is set, but .* must be unset\. \w+"):
        slice_metadata(metadata(MIXED, **{name: REFUSED[name]}), MIXED.plan(6))


def test_fields_keep_their_kind_and_type() -> None:
    parent = metadata(MIXED)
    for piece in slice_metadata(parent, MIXED.plan(6)):
        for field in dataclasses.fields(parent):
            before, after = getattr(parent, field.name), getattr(piece, field.name)
            if after is not None:
                assert type(after) is type(before), field.name
            if isinstance(after, torch.Tensor | np.ndarray):
                assert after.dtype == before.dtype, field.name


def test_what_the_parent_leaves_out_stays_out() -> None:
    given = sentinels(MIXED)
    needed = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs")
    needed += ("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor")
    needed += ("slot_mapping",)
    bare = {name: given[name] for name in needed}
    from vllm.v1.attention.backend import CommonAttentionMetadata

    for piece, (begin, end) in zip(
        slice_metadata(CommonAttentionMetadata(**bare), MIXED.plan(6)),
        [(0, 6), (6, 16)],
        strict=True,
    ):
        wanted = expected(MIXED, given, begin, end)
        for field, value in values(piece).items():
            if field == "causal":
                assert value is True
            else:
                assert value == (wanted[field] if field in needed else None), field


def test_positions_of_several_axes() -> None:
    axes = torch.stack([torch.arange(16), torch.arange(16) + 100, torch.arange(16) + 200])
    first, second = slice_metadata(metadata(MIXED, positions=axes), MIXED.plan(6))
    assert first.positions.tolist() == [[a + t for t in range(6)] for a in (0, 100, 200)]
    assert second.positions.tolist() == [[a + t for t in range(6, 16)] for a in (0, 100, 200)]


def test_the_parent_is_not_written() -> None:
    parent = metadata(MIXED, extra_rows=2)
    before = {
        name: copy.deepcopy(value)
        for name, value in ((f.name, getattr(parent, f.name)) for f in dataclasses.fields(parent))
    }
    for piece in slice_metadata(parent, MIXED.plan(6)):
        # What vLLM's consumers write into: offsets, lengths and the private caches.
        for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens"):
            getattr(piece, name).add_(1)
        piece.seq_lens_cpu_upper_bound.add_(1)
        piece.compute_num_computed_tokens().add_(1)
    assert values(parent) == {name: plain(value) for name, value in before.items()}


# --- the class's own methods on a piece -----------------------------------------------------


def by_search(offsets: torch.Tensor, out: torch.Tensor, mapped: int, total: int) -> torch.Tensor:
    """vLLM's token-to-request kernel in plain torch; the kernel itself needs Triton."""
    ends = offsets[1:].tolist()
    out[:mapped] = torch.tensor([sum(end <= t for end in ends) for t in range(mapped)])
    return out[:total]


def test_private_caches_of_the_parent_do_not_reach_a_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.attention.ops import metadata as kernels

    monkeypatch.setattr(kernels, "compute_token_to_req_indices", by_search)
    empty = {"_num_computed_tokens_cache": None, "_token_to_req_indices_cache": None}
    parent = metadata(A1, **empty)
    assert parent.compute_num_computed_tokens().tolist() == [0, 64, 0]
    whole = parent.token_to_req_indices(torch.zeros(220, dtype=torch.int32))
    assert whole.tolist() == [request for request, _ in A1.tokens]

    first, second = slice_metadata(parent, A1.plan(110))
    assert first.compute_num_computed_tokens().tolist() == [0, 64]
    assert second.compute_num_computed_tokens().tolist() == [171, 0]
    buffer = torch.zeros(110, dtype=torch.int32)
    assert first.token_to_req_indices(buffer.clone()).tolist() == [0] * 3 + [1] * 107
    assert second.token_to_req_indices(buffer.clone()).tolist() == [0] * 93 + [1] * 17
    assert parent.compute_num_computed_tokens().tolist() == [0, 64, 0]


@pytest.mark.parametrize("cut", range(1, 16))
def test_counts_that_consumers_derive(cut: int) -> None:
    for piece, (begin, end) in zip(
        slice_metadata(metadata(MIXED), MIXED.plan(cut)), [(0, cut), (cut, 16)], strict=True
    ):
        mine = MIXED.tokens[begin:end]
        rows = sorted({request for request, _ in mine})
        assert piece.batch_size() == len(rows)
        assert piece.naive_query_lens().tolist() == [
            sum(request == row for request, _ in mine) for row in rows
        ]
        assert piece.compute_num_computed_tokens().tolist() == [
            min(position for request, position in mine if request == row) for row in rows
        ]
        assert values(piece.unpadded(len(mine), len(rows)))["seq_lens"] == piece.seq_lens.tolist()


# --- public cases ---------------------------------------------------------------------------


def test_a1_a2_computed_counts_advance_and_positions_stay() -> None:
    first, second = slice_metadata(metadata(A1), A1.plan(110))
    assert second.query_start_loc.tolist() == [0, 93, 110]
    assert second.seq_lens.tolist() == [264, 17]
    assert second.compute_num_computed_tokens().tolist() == [171, 0]
    assert first.seq_lens.tolist() == first.seq_lens_cpu_upper_bound.tolist() == [3, 171]
    assert first.max_seq_len == 171
    assert second.positions[0].item() == 171


def test_a3_pieces_of_a_chunk() -> None:
    first, second = slice_metadata(metadata(STEPS["A3"]), STEPS["A3"].plan(4))
    assert (first.seq_lens.item(), first.compute_num_computed_tokens().item()) == (28, 24)
    assert (second.seq_lens.item(), second.compute_num_computed_tokens().item()) == (32, 28)


PADDED = {
    "C1": ((105,), 8, (56, 49), (56, 56)),
    "C2": ((1, 1068), 2, (534, 535), (534, 536)),
}


@pytest.mark.parametrize("case", PADDED)
def test_c_padding_is_never_told_to_attention(case: str) -> None:
    scheduled, alignment, real, physical = PADDED[case]
    plan = plan_split(ScheduledBatch(scheduled), policy="token", alignment=alignment)
    assert isinstance(plan, SplitPlan)
    step = Step(scheduled, (0,) * len(scheduled), (True,) * len(scheduled))
    stages = slice_metadata(metadata(step), plan)
    assert tuple(stage.num_input_tokens for stage in plan.stages) == physical
    for piece, tokens in zip(stages, real, strict=True):
        assert piece.num_actual_tokens == tokens == piece.slot_mapping.shape[0]
        assert piece.query_start_loc[-1].item() == tokens == piece.positions.shape[0]
        assert piece.max_query_len <= tokens


# --- classes that are not the pinned one ----------------------------------------------------


def test_a_subclass_field_without_a_rule_is_named() -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    extended = dataclasses.make_dataclass(
        "Extended", [("kv_scale_table", Any, None)], bases=(CommonAttentionMetadata,)
    )
    with pytest.raises(MissingFieldRule, match=r"Extended has field.* kv_scale_table\."):
        slice_metadata(extended(**sentinels(MIXED)), MIXED.plan(6))


def test_a_subclass_without_fields_comes_back_as_itself() -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    @dataclasses.dataclass
    class Renamed(CommonAttentionMetadata):
        pass

    stages = slice_metadata(Renamed(**sentinels(MIXED)), MIXED.plan(6))
    assert [type(piece) for piece in stages] == [Renamed, Renamed]
    assert values(stages[1]) == expected(MIXED, sentinels(MIXED), 6, 16)


def test_a_field_that_the_class_has_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another class under the pinned name, as an upgrade would bring it."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    kept = [
        (field.name, Any, None)
        for field in dataclasses.fields(CommonAttentionMetadata)
        if field.name != "req_idx"
    ]
    shrunk = dataclasses.make_dataclass(
        "CommonAttentionMetadata", kept, namespace={"__module__": "vllm.v1.attention.backend"}
    )
    with pytest.raises(StaleFieldRule, match="req_idx"):
        slice_metadata(shrunk(**{name: None for name, *_ in kept}), MIXED.plan(6))


# --- beside vLLM's own ----------------------------------------------------------------------


def upstream(parent: Any, plan: SplitPlan) -> Sequence[Any]:
    from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

    parts = [UBatchSlice(stage.request_slice, stage.token_slice) for stage in plan.stages]
    return split_attn_metadata(parts, parent)


# What vLLM's own split keeps and gets right for a piece.
AGREED = (
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "seq_lens_cpu_upper_bound",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "block_table_tensor",
    "slot_mapping",
)


@pytest.mark.parametrize("name", STEPS)
def test_agrees_with_vllms_own_split_where_that_is_right(name: str) -> None:
    step = STEPS[name]
    total = len(step.tokens)
    for cut in range(1, total, max(1, total // 40)):
        plan = step.plan(cut)
        theirs = upstream(metadata(step), plan)
        for ours, other in zip(slice_metadata(metadata(step), plan), theirs, strict=True):
            mine, their = values(ours), values(other)
            for field in AGREED:
                assert mine[field] == their[field], (cut, field)
            assert ours.compute_num_computed_tokens().tolist() == (
                other.compute_num_computed_tokens().tolist()
            )


def test_where_vllms_own_split_is_not_right_for_a_piece() -> None:
    """Stage 0 of case A1 is at most 171 tokens long; vLLM says what the whole step is, 264.

    It also drops the fields below, so that their readers see defaults: this is why the plugin
    does not build on it.  When this fails, vLLM has been mended, and both can be compared there.
    """
    plan = A1.plan(110)
    ours, theirs = slice_metadata(metadata(A1), plan), upstream(metadata(A1), plan)
    assert ([p.max_seq_len for p in ours], [p.max_seq_len for p in theirs]) == (
        [171, 264],
        [264, 264],
    )
    lost = {
        name
        for name, value in values(theirs[1]).items()
        if value is None and values(ours[1])[name] is not None
    }
    assert lost == {
        "encoder_seq_lens",
        "encoder_seq_lens_cpu",
        "positions",
        "is_prefilling",
        "req_idx",
        "rswa_prefix_lens",
        "replayssm_decode_base_cpu",
    }
    assert theirs[1].causal is True  # the parent's differs by request


# --- the real builders read a piece ---------------------------------------------------------


def test_the_cpu_builder_builds_each_piece(make_config: ConfigMaker) -> None:
    """What it makes of a piece is what it makes of a step that is nothing but the piece."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = make_config("qwen3-moe", block_size=BLOCK)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    builder = CPUAttentionMetadataBuilder(spec, [], config, torch.device("cpu"))
    pieces = slice_metadata(metadata(A1, causal=True), A1.plan(110))
    alone = [((3, 107), (0, 64), [0, 1]), ((93, 17), (171, 0), [1, 2])]
    for piece, (scheduled, computed, requests) in zip(pieces, alone, strict=True):
        step = Step(scheduled, computed, (True, True))
        rows = torch.tensor([block_row(request) for request in requests], dtype=torch.int32)
        slots = torch.tensor([slot(requests[row], position) for row, position in step.tokens])
        whole = metadata(step, causal=True, block_table_tensor=rows, slot_mapping=slots)
        built, wanted = values(builder.build(0, piece)), values(builder.build(0, whole))
        # The kernel's own schedule holds addresses and unused bytes; its size is what it covers.
        schedules = [len(made.pop("scheduler_metadata")) for made in (built, wanted)]
        assert built == wanted
        assert schedules[0] == schedules[1]
        assert built["max_seq_len"] == max(map(sum, zip(scheduled, computed, strict=True)))
