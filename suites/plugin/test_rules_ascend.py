"""Field rules of vLLM-Ascend's metadata, on a class with its fields: no vLLM is needed.

As in ``test_metadata`` a step is a list of tokens and a stage a part of it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin import ScheduledBatch, register_metadata_rules, slice_metadata, split_at
from afd_plugin import rules as r
from afd_plugin.compat.known import RULES_0_23_0, RULES_ASCEND_0_23_0_POST1
from afd_plugin.errors import MetadataMismatch, RefusedField
from afd_plugin.metadata import unregister_metadata_rules
from afd_testkit.strategies import batches_with_cut

pytestmark = pytest.mark.cpu

examples = settings(deadline=None, derandomize=True, max_examples=100)


class State(enum.Enum):
    """The names of ``AscendAttentionState``; its numbers mean nothing here."""

    PrefillNoCache = 10
    PrefillCacheHit = 11
    DecodeOnly = 12
    ChunkedPrefill = 13
    SpecDecoding = 14


FRESH, HIT, DECODES, CHUNK = list(State)[:4]


@dataclasses.dataclass
class StepMetadata:
    """The fields and defaults of 0.23.0.post1's ``AscendCommonAttentionMetadata``."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: bool = True
    logits_indices_padded: Any = None
    num_logits_indices: Any = None
    encoder_seq_lens: Any = None
    encoder_seq_lens_cpu: Any = None
    dcp_local_seq_lens: Any = None
    dcp_local_seq_lens_cpu: Any = None
    positions: Any = None
    is_prefilling: Any = None
    seq_lens_cpu_upper_bound: Any = None
    _seq_lens_cpu: Any = None
    _num_computed_tokens_cpu: Any = None
    _num_computed_tokens_cache: Any = None
    seq_lens_cpu: Any = None
    num_computed_tokens_cpu: Any = None
    decode_token_per_req: int = 1
    actual_seq_lengths_q: list[int] = dataclasses.field(default_factory=list)
    positions_cpu: Any = None
    attn_state: Any = None
    graph_pad_size: int = -1
    num_input_tokens: int = 0
    prefill_context_parallel_metadata: Any = None
    kvcomp_metadata: Any = None


RULES = {**RULES_0_23_0, **RULES_ASCEND_0_23_0_POST1}
LENGTHS = ("seq_lens", "seq_lens_cpu", "_seq_lens_cpu", "seq_lens_cpu_upper_bound")
COMPUTED = ("num_computed_tokens_cpu", "_num_computed_tokens_cpu")


@pytest.fixture(autouse=True, scope="module")
def rules_of_step_metadata() -> Iterator[None]:
    register_metadata_rules(StepMetadata, RULES)
    yield
    unregister_metadata_rules(StepMetadata)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def parent_of(batch: ScheduledBatch, state: Any = None, padding_row: bool = False) -> StepMetadata:
    """Metadata of a step; ``padding_row``: one more request that holds the buffer's padding."""
    scheduled = batch.num_scheduled_tokens.tolist()
    computed = batch.num_computed_tokens.tolist() + [0] * padding_row
    tokens, extent = batch.num_tokens, batch.num_input_tokens
    offsets = [sum(scheduled[:i]) for i in range(len(scheduled) + 1)] + [extent] * padding_row
    lengths = batch.seq_lens.tolist() + [0] * padding_row
    rows = len(scheduled) + padding_row
    flat = [p for s, c in zip(scheduled, computed, strict=False) for p in range(c, c + s)]
    return StepMetadata(
        query_start_loc=ints(offsets),
        query_start_loc_cpu=ints(offsets),
        seq_lens=ints(lengths),
        num_reqs=rows,
        num_actual_tokens=tokens,
        max_query_len=max(scheduled),
        max_seq_len=max(lengths),
        block_table_tensor=ints([[100 * q + c for c in range(3)] for q in range(rows)]),
        slot_mapping=ints([1000 + 3 * t for t in range(tokens)]),
        positions=torch.tensor(flat + [0] * (extent - tokens)),
        is_prefilling=torch.tensor([*batch.is_prefilling.tolist(), *[False] * padding_row]),
        seq_lens_cpu_upper_bound=ints(lengths),
        _seq_lens_cpu=ints(lengths),
        _num_computed_tokens_cpu=ints(computed),
        seq_lens_cpu=ints(lengths),
        num_computed_tokens_cpu=ints(computed),
        attn_state=FRESH if state is None else state,
        num_input_tokens=extent,
    )


def test_the_class_has_the_fields_that_have_rules() -> None:
    assert {field.name for field in dataclasses.fields(StepMetadata)} == set(RULES)


# --- computed tokens --------------------------------------------------------------------


@pytest.mark.parametrize("padding_row", [False, True])
@pytest.mark.parametrize("name", COMPUTED)
def test_a1_computed_counts_advance_by_the_first_piece(name: str, padding_row: bool) -> None:
    batch = ScheduledBatch([3, 200, 17], [0, 64, 0], num_input_tokens=224)
    first, second = slice_metadata(
        parent_of(batch, CHUNK, padding_row=padding_row), split_at(batch, 110)
    )
    assert getattr(first, name).tolist() == [0, 64]
    assert getattr(second, name).tolist() == [171, 0]  # 64 + the 107 tokens of stage 0
    for lengths in LENGTHS:
        assert getattr(first, lengths).tolist() == [3, 171]
        assert getattr(second, lengths).tolist() == [264, 17]
    assert second.positions[0] == 171  # A2


def test_a3_pieces_of_a_chunk() -> None:
    batch = ScheduledBatch([8], [24])
    first, second = slice_metadata(parent_of(batch, CHUNK), split_at(batch, 4))
    assert (first.seq_lens_cpu.item(), first.num_computed_tokens_cpu.item()) == (28, 24)
    assert (second.seq_lens_cpu.item(), second.num_computed_tokens_cpu.item()) == (32, 28)


def test_nothing_advances_at_a_request_boundary() -> None:
    batch = ScheduledBatch([3, 200, 17], [5, 64, 9])
    first, second = slice_metadata(parent_of(batch, CHUNK), split_at(batch, 203))
    assert first.num_computed_tokens_cpu.tolist() == [5, 64]
    assert second.num_computed_tokens_cpu.tolist() == [9]


@pytest.mark.parametrize("kind", ["int64", "numpy"])
def test_computed_counts_keep_their_kind(kind: str) -> None:
    batch = ScheduledBatch([8, 3], [24, 0])
    parent = parent_of(batch, CHUNK)
    if kind == "int64":
        parent.num_computed_tokens_cpu = parent.num_computed_tokens_cpu.long()
    else:
        parent.num_computed_tokens_cpu = parent.num_computed_tokens_cpu.numpy()
    given_dtype = parent.num_computed_tokens_cpu.dtype
    for stage, expected in zip(
        slice_metadata(parent, split_at(batch, 4)), ([24], [28, 0]), strict=True
    ):
        assert type(stage.num_computed_tokens_cpu) is type(parent.num_computed_tokens_cpu)
        assert stage.num_computed_tokens_cpu.dtype == given_dtype
        assert stage.num_computed_tokens_cpu.tolist() == expected


@pytest.mark.parametrize("name", [*COMPUTED, *LENGTHS])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_may_write_what_it_got(name: str, stage: int) -> None:
    batch = ScheduledBatch([3, 7, 4], [0, 8, 1])
    parent = parent_of(batch, CHUNK)
    before = {each: getattr(parent, each).tolist() for each in (*COMPUTED, *LENGTHS)}
    stages = slice_metadata(parent, split_at(batch, 5))
    others = {each: getattr(stages[1 - stage], each).tolist() for each in before}
    getattr(stages[stage], name)[:] = -7
    assert {each: getattr(parent, each).tolist() for each in before} == before
    assert {each: getattr(stages[1 - stage], each).tolist() for each in before} == others


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, and whose content the host may not wait for."""

    is_cpu = False  # type: ignore[assignment]

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a device tensor has no numpy view")

    tolist = item = cpu = __array__ = __int__ = __bool__ = __index__ = numpy  # type: ignore[assignment]


@pytest.mark.parametrize("cut", [4, 8])
def test_computed_counts_on_the_device_are_not_waited_for(cut: int) -> None:
    batch = ScheduledBatch([8, 3], [24, 2])
    parent = parent_of(batch, CHUNK)
    parent.num_computed_tokens_cpu = parent.num_computed_tokens_cpu.as_subclass(OnDevice)
    first, second = slice_metadata(parent, split_at(batch, cut))
    counts = [
        stage.num_computed_tokens_cpu.as_subclass(torch.Tensor).tolist()
        for stage in (first, second)
    ]
    assert counts == ([[24], [28, 2]] if cut == 4 else [[24], [2]])
    second.num_computed_tokens_cpu.as_subclass(torch.Tensor)[:] = -7
    assert parent.num_computed_tokens_cpu.as_subclass(torch.Tensor).tolist() == [24, 2]


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_counts_of_another_step(name: str) -> None:
    batch = ScheduledBatch([3, 7, 4], [0, 8, 1])
    for counts, said in (([0, 9, 1], "does not match the computed tokens"), ([0], "has shape")):
        parent = dataclasses.replace(parent_of(batch, CHUNK), **{name: ints(counts)})
        with pytest.raises(MetadataMismatch, match=f"{name} .*{said}"):
            slice_metadata(parent, split_at(batch, 5))


@pytest.mark.parametrize("name", COMPUTED)
def test_absent_computed_counts_stay_absent(name: str) -> None:
    batch = ScheduledBatch([3, 7, 4], [0, 8, 1])
    parent = dataclasses.replace(parent_of(batch, CHUNK), **{name: None})
    for stage in slice_metadata(parent, split_at(batch, 5)):
        assert getattr(stage, name) is None


# --- attention state ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A step, its state as vLLM-Ascend would choose it, a cut, and the stages' own states."""

    scheduled: tuple[int, ...]
    computed: tuple[int, ...]
    prefilling: tuple[bool, ...]
    state: State
    cut: int
    stages: tuple[State, State]


T, F = True, False
# What each stage holds decides: tokens in the KV cache before it, and whether all of it decodes.
STATES = {
    # Stage 1 holds tokens 8 and 9 of request 0, behind the 8 that stage 0 writes.
    "fresh, cut inside": Case((10, 6), (0, 0), (T, T), FRESH, 8, (FRESH, CHUNK)),
    "fresh, cut at a boundary": Case((10, 6), (0, 0), (T, T), FRESH, 10, (FRESH, FRESH)),
    "fresh, second piece of one token": Case((2,), (0,), (T,), FRESH, 1, (FRESH, CHUNK)),
    "chunk": Case((8,), (24,), (T,), CHUNK, 4, (CHUNK, CHUNK)),
    "chunk, one token of it": Case((3,), (24,), (T,), CHUNK, 2, (CHUNK, CHUNK)),
    "prefix hit behind a fresh one": Case((10, 6), (0, 128), (T, T), CHUNK, 10, (FRESH, CHUNK)),
    "prefix hit before a fresh one": Case((6, 10), (128, 0), (T, T), CHUNK, 6, (CHUNK, FRESH)),
    "fresh one cut before a prefix hit": Case((10, 6), (0, 128), (T, T), CHUNK, 5, (FRESH, CHUNK)),
    "prefix hit, no chunked prefill": Case((10, 6), (0, 128), (T, T), HIT, 10, (FRESH, HIT)),
    "fresh one cut, no chunked prefill": Case((10, 6), (0, 128), (T, T), HIT, 5, (FRESH, HIT)),
    "decodes, then fresh": Case((1, 1, 10), (50, 60, 0), (F, F, T), CHUNK, 2, (DECODES, FRESH)),
    "one decode apart": Case((1, 1, 10), (50, 60, 0), (F, F, T), CHUNK, 1, (DECODES, CHUNK)),
    "decodes and a cut one": Case((1, 1, 10), (50, 60, 0), (F, F, T), CHUNK, 6, (CHUNK, CHUNK)),
    "decodes last": Case((10, 1, 1), (0, 50, 60), (T, F, F), CHUNK, 10, (FRESH, DECODES)),
    # As kernels see it, one token behind context is a decode, whatever it is a rest of.
    "single tokens only": Case((1, 1, 1), (50, 60, 70), (F, F, T), DECODES, 1, (DECODES, DECODES)),
    "rest of a prompt of one token": Case((1, 9), (70, 0), (T, T), CHUNK, 1, (CHUNK, FRESH)),
    # A preempted request computes its own output again: past its prompt, but many tokens.
    "output computed again": Case((6, 10), (200, 0), (F, T), CHUNK, 6, (CHUNK, FRESH)),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_is_that_of_the_stages_own_content(name: str) -> None:
    case = STATES[name]
    batch = ScheduledBatch(case.scheduled, case.computed, is_prefilling=case.prefilling)
    stages = slice_metadata(parent_of(batch, case.state), split_at(batch, case.cut))
    assert tuple(stage.attn_state for stage in stages) == case.stages


def test_every_state_but_that_of_speculation_occurs_above() -> None:
    found = {case.state for case in STATES.values()}
    found |= {state for case in STATES.values() for state in case.stages}
    assert found == set(State) - {State.SpecDecoding}


def test_speculation_is_refused() -> None:
    batch = ScheduledBatch([4, 4], [10, 20])
    with pytest.raises(RefusedField, match=r"attn_state is State\.SpecDecoding.*without specul"):
        slice_metadata(parent_of(batch, State.SpecDecoding), split_at(batch, 4))


@given(case=batches_with_cut(max_requests=6, max_scheduled=30))
@examples
def test_a_stage_is_fresh_exactly_if_no_token_of_it_has_context(case: Any) -> None:
    batch, cut = case
    state = CHUNK if batch.num_computed_tokens.any() else FRESH
    tokens = [(q, p) for q in range(batch.num_reqs) for p in positions_of(batch, q)]
    stages = slice_metadata(parent_of(batch, state), split_at(batch, cut))
    for stage, mine in zip(stages, (tokens[:cut], tokens[cut:]), strict=True):
        # A request's first token in the stage is at position 0 only without context.
        firsts = {}
        for request, position in mine:
            firsts.setdefault(request, position)
        assert (stage.attn_state is FRESH) == (not any(firsts.values()))


def positions_of(batch: ScheduledBatch, request: int) -> range:
    return range(int(batch.num_computed_tokens[request]), int(batch.seq_lens[request]))


# --- padding ------------------------------------------------------------------------------

# real tokens, alignment, real and physical tokens of the stages: C1 and C2 of the public cases
PADDED = {
    "C1": ((105,), 8, 56, (56, 49), (56, 56)),
    "C2": ((1, 1068), 2, 534, (534, 535), (534, 536)),
}


@pytest.mark.parametrize("padding_row", [False, True])
@pytest.mark.parametrize("name", PADDED)
def test_c_buffers_are_padded_and_metadata_is_not(name: str, padding_row: bool) -> None:
    scheduled, alignment, cut, real, physical = PADDED[name]
    tokens = sum(scheduled)
    batch = ScheduledBatch(scheduled, num_input_tokens=-(-tokens // alignment) * alignment)
    parent = parent_of(batch, padding_row=padding_row)
    stages = slice_metadata(parent, split_at(batch, cut, alignment))
    for stage, count, rows in zip(stages, real, physical, strict=True):
        assert stage.num_input_tokens == rows
        assert stage.num_actual_tokens == count == len(stage.slot_mapping) == len(stage.positions)
        assert stage.query_start_loc[-1] == stage.query_start_loc_cpu[-1] == count
        assert stage.num_reqs == len(stage.seq_lens) == len(stage.query_start_loc) - 1


@pytest.mark.parametrize(
    ("rows", "fits"),
    [([14], True), ([16], True), ([14, 16], True), ([15], False), ([17], False), ([0], False)],
    ids=str,
)
def test_rows_of_padding_are_empty_or_end_with_the_buffer(rows: list[int], fits: bool) -> None:
    """14 real tokens in a buffer of 16; a row that ends elsewhere holds tokens of its own."""
    batch = ScheduledBatch([3, 7, 4], num_input_tokens=16)
    parent = parent_of(batch)
    offsets = [0, 3, 10, 14, *rows]
    parent = dataclasses.replace(
        parent,
        query_start_loc=ints(offsets),
        query_start_loc_cpu=ints(offsets),
        num_reqs=3 + len(rows),
        **{name: ints([3, 7, 4] + [0] * len(rows)) for name in LENGTHS},
    )
    if fits:
        first, second = slice_metadata(parent, split_at(batch, 5))
        assert first.query_start_loc.tolist() == [0, 3, 5]
        assert second.query_start_loc.tolist() == [0, 5, 9]
        assert second.seq_lens.tolist() == [7, 4]
        return
    with pytest.raises(MetadataMismatch, match="query_start_loc"):
        slice_metadata(parent, split_at(batch, 5))


# --- what cannot be derived ------------------------------------------------------------------

SET: dict[str, Any] = {
    "decode_token_per_req": 2,
    "actual_seq_lengths_q": [3, 10, 14],
    "graph_pad_size": 16,
    "positions_cpu": torch.arange(14),
    "prefill_context_parallel_metadata": object(),
    "kvcomp_metadata": object(),
    "logits_indices_padded": torch.arange(3),
    "num_logits_indices": 3,
    "dcp_local_seq_lens": torch.zeros(3),
    "dcp_local_seq_lens_cpu": torch.zeros(3),
}


@pytest.mark.parametrize("name", SET)
def test_a_field_that_cannot_be_derived_is_refused(name: str) -> None:
    batch = ScheduledBatch([3, 7, 4])
    parent = dataclasses.replace(parent_of(batch), **{name: SET[name]})
    with pytest.raises(RefusedField, match=f"field {name} is set, but .*must be unset") as caught:
        slice_metadata(parent, split_at(batch, 5))
    rule = RULES[name]
    assert isinstance(rule, r.refused)
    assert rule.remedy in str(caught.value)


def test_every_refused_field_is_tried_above() -> None:
    assert {name for name, rule in RULES.items() if isinstance(rule, r.refused)} == set(SET)


def test_what_is_unset_stays_as_it_is() -> None:
    batch = ScheduledBatch([3, 7, 4])
    for stage in slice_metadata(parent_of(batch), split_at(batch, 5)):
        assert stage.decode_token_per_req == 1
        assert stage.actual_seq_lengths_q == []
        assert stage.graph_pad_size == -1


# --- any split --------------------------------------------------------------------------------


@given(
    case=batches_with_cut(max_requests=6, max_scheduled=30),
    alignment=st.sampled_from([1, 1, 2, 8]),
    padding_row=st.booleans(),
)
@examples
def test_stages_put_together_are_the_parent(case: Any, alignment: int, padding_row: bool) -> None:
    batch, cut = case
    state = CHUNK if batch.num_computed_tokens.any() else FRESH
    parent = parent_of(batch, state, padding_row=padding_row)
    plan = split_at(batch, cut, alignment)
    stages = slice_metadata(parent, plan)
    slots: list[int] = []
    places: list[tuple[int, int]] = []
    for stage, planned in zip(stages, plan.stages, strict=True):
        offsets = stage.query_start_loc_cpu.tolist()
        assert offsets == stage.query_start_loc.tolist()
        assert offsets[-1] == stage.num_actual_tokens == len(stage.positions)
        assert stage.num_input_tokens == planned.num_input_tokens >= stage.num_actual_tokens
        assert stage.num_reqs == len(offsets) - 1 == len(stage.block_table_tensor)
        for row in range(stage.num_reqs):
            begin, end = offsets[row], offsets[row + 1]
            request = int(stage.block_table_tensor[row, 0]) // 100
            for name in COMPUTED:  # computed == length − query, wherever either is kept
                for lengths in LENGTHS:
                    computed = int(getattr(stage, name)[row])
                    assert computed == int(getattr(stage, lengths)[row]) - (end - begin)
            assert stage.positions[begin:end].tolist() == [*range(computed, computed + end - begin)]
            assert bool(stage.is_prefilling[row]) == bool(batch.is_prefilling[request])
            places += [(request, position) for position in stage.positions[begin:end].tolist()]
        slots += stage.slot_mapping.tolist()
    assert slots == parent.slot_mapping.tolist()
    assert places == [(q, p) for q in range(batch.num_reqs) for p in positions_of(batch, q)]
