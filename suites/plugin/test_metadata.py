"""Sliced attention metadata against a list of tokens, cut by hand.

The oracle knows nothing of rules: a step is a list of (request, position, slot), a stage is a
part of that list, and every field of a stage is worked out from its part alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin import (
    ScheduledBatch,
    SplitPlan,
    register_metadata_rules,
    slice_metadata,
    split_at,
)
from afd_plugin import rules as r
from afd_plugin.compat.known import RULES_0_32_0
from afd_plugin.errors import MetadataMismatch, RefusedField
from afd_plugin.metadata import unregister_metadata_rules
from afd_testkit.strategies import batches_with_cut

pytestmark = pytest.mark.cpu

examples = settings(deadline=None, derandomize=True, max_examples=100)


@dataclasses.dataclass
class StepMetadata:
    """The fields, order and defaults of vLLM 0.32.0's ``CommonAttentionMetadata``."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True
    logits_indices_padded: Any = None
    num_logits_indices: Any = None
    max_logits_per_req: Any = None
    encoder_seq_lens: Any = None
    encoder_seq_lens_cpu: Any = None
    dcp_local_seq_lens: Any = None
    dcp_local_seq_lens_cpu_upper_bound: Any = None
    positions: Any = None
    is_prefilling: Any = None
    seq_lens_cpu_upper_bound: Any = None
    req_idx: Any = None
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None
    replayssm_decode_base_cpu: Any = None
    _num_computed_tokens_cache: Any = None
    _token_to_req_indices_cache: Any = None


@pytest.fixture(autouse=True, scope="module")
def rules_of_step_metadata() -> Iterator[None]:
    register_metadata_rules(StepMetadata, RULES_0_32_0)
    yield
    unregister_metadata_rules(StepMetadata)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def parent_of(
    batch: ScheduledBatch,
    *,
    pad_requests: int = 0,
    pad_tokens: int = 0,
    axes: int = 1,
    bounds: bool = True,
    scalar_causal: bool = True,
) -> StepMetadata:
    """Metadata with a distinct value in every field that may be set, padding rows last.

    The slot of token t is 1000 + 3 t, block id c of request q is 100 q + c, and so on.
    ``axes``: 1 for positions [T], otherwise [axes, T].
    """
    scheduled = batch.num_scheduled_tokens.tolist()
    computed = batch.num_computed_tokens.tolist()
    size, tokens = len(scheduled), sum(scheduled)
    offsets = [sum(scheduled[:i]) for i in range(size + 1)] + [tokens] * pad_requests
    lengths = [s + c for s, c in zip(scheduled, computed, strict=True)] + [0] * pad_requests
    rows, extent = size + pad_requests, tokens + pad_tokens
    flat = [p for s, c in zip(scheduled, computed, strict=True) for p in range(c, c + s)]
    flat += [0] * pad_tokens
    positions = torch.tensor(flat)
    if axes > 1:
        positions = torch.stack([positions + 10_000 * axis for axis in range(axes)])
    return StepMetadata(
        query_start_loc=ints(offsets),
        query_start_loc_cpu=ints(offsets),
        seq_lens=ints(lengths),
        num_reqs=rows,
        num_actual_tokens=extent,
        max_query_len=max(scheduled),
        max_seq_len=max(lengths),
        block_table_tensor=ints([[100 * q + c for c in range(5)] for q in range(rows)]),
        slot_mapping=torch.tensor([1000 + 3 * t for t in range(tokens)] + [-1] * pad_tokens),
        causal=True if scalar_causal else torch.tensor([q % 2 == 0 for q in range(rows)]),
        encoder_seq_lens=ints([2000 + q for q in range(rows)]),
        encoder_seq_lens_cpu=np.array([3000 + q for q in range(rows)], dtype=np.int32),
        positions=positions,
        is_prefilling=torch.tensor([*batch.is_prefilling.tolist(), *[False] * pad_requests]),
        seq_lens_cpu_upper_bound=ints(lengths) if bounds else None,
        req_idx=np.array([4000 - 2 * q for q in range(rows)], dtype=np.int32),
        rswa_prefix_lens=ints([5000 + q for q in range(rows)]),
        replayssm_decode_base_cpu=ints([6000 + q for q in range(rows)]),
        _num_computed_tokens_cache=ints([7000 + q for q in range(rows)]),
        _token_to_req_indices_cache=ints([8000 + t for t in range(extent)]),
    )


def by_hand(parent: StepMetadata, batch: ScheduledBatch, begin: int, end: int) -> dict[str, Any]:
    """Every field of the stage that holds tokens ``begin`` to ``end`` of the step."""
    tokens = [
        (request, position)
        for request in range(batch.num_reqs)
        for position in range(int(batch.num_computed_tokens[request]), int(batch.seq_lens[request]))
    ]
    triples = [
        (request, position, int(parent.slot_mapping[place]))
        for place, (request, position) in enumerate(tokens)
    ][begin:end]
    rows = sorted({request for request, _, _ in triples})
    mine = {q: [position for request, position, _ in triples if request == q] for q in rows}
    counts = [len(mine[q]) for q in rows]
    ends = [max(mine[q]) + 1 for q in rows]
    axes = 1 if parent.positions.ndim == 1 else parent.positions.shape[0]
    places = [position for _, position, _ in triples]
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]

    def of_rows(name: str) -> list[Any]:
        return [getattr(parent, name).tolist()[q] for q in rows]

    return {
        "query_start_loc": offsets,
        "query_start_loc_cpu": offsets,
        "seq_lens": ends,
        "num_reqs": len(rows),
        "num_actual_tokens": len(triples),
        "max_query_len": max(counts),
        "max_seq_len": max(ends),
        "block_table_tensor": of_rows("block_table_tensor"),
        "slot_mapping": [slot for _, _, slot in triples],
        "causal": True if parent.causal is True else of_rows("causal"),
        "logits_indices_padded": None,
        "num_logits_indices": None,
        "max_logits_per_req": None,
        "encoder_seq_lens": of_rows("encoder_seq_lens"),
        "encoder_seq_lens_cpu": of_rows("encoder_seq_lens_cpu"),
        "dcp_local_seq_lens": None,
        "dcp_local_seq_lens_cpu_upper_bound": None,
        "positions": places
        if parent.positions.ndim == 1
        else [[p + 10_000 * axis for p in places] for axis in range(axes)],
        "is_prefilling": [bool(batch.is_prefilling[q]) for q in rows],
        "seq_lens_cpu_upper_bound": None if parent.seq_lens_cpu_upper_bound is None else ends,
        "req_idx": of_rows("req_idx"),
        "mm_req_doc_ranges": None,
        "rswa_prefix_lens": of_rows("rswa_prefix_lens"),
        "replayssm_decode_base_cpu": of_rows("replayssm_decode_base_cpu"),
        "_num_computed_tokens_cache": None,
        "_token_to_req_indices_cache": None,
    }


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


def check(parent: StepMetadata, plan: SplitPlan) -> tuple[StepMetadata, StepMetadata]:
    """Every field of both stages is right in value, kind and type."""
    stages = slice_metadata(parent, plan)
    check_stages(parent, plan, stages)
    return stages


def check_stages(parent: StepMetadata, plan: SplitPlan, stages: Any) -> None:
    tokens = plan.batch.num_tokens
    for stage, (begin, end) in zip(stages, [(0, plan.cut), (plan.cut, tokens)], strict=True):
        assert type(stage) is type(parent)
        expected = by_hand(parent, plan.batch, begin, end)
        for field in dataclasses.fields(StepMetadata):
            value, before = getattr(stage, field.name), getattr(parent, field.name)
            assert plain(value) == expected[field.name], field.name
            if value is not None:
                assert type(value) is type(before), field.name
            if isinstance(value, torch.Tensor | np.ndarray):
                assert value.dtype == before.dtype, field.name


# --- against the list of tokens ---------------------------------------------------------

variants = st.fixed_dictionaries(
    {
        "pad_requests": st.integers(0, 3),
        "pad_tokens": st.integers(0, 5),
        "axes": st.sampled_from([1, 1, 3]),
        "bounds": st.booleans(),
        "scalar_causal": st.booleans(),
    }
)
cases = batches_with_cut(max_requests=6, max_scheduled=30)


@given(case=cases, variant=variants)
@examples
def test_every_field_of_both_stages(case: Any, variant: Any) -> None:
    batch, cut = case
    check(parent_of(batch, **variant), split_at(batch, cut))


@given(case=cases, variant=variants)
@examples
def test_invariants(case: Any, variant: Any) -> None:
    batch, cut = case
    parent = parent_of(batch, **variant)
    stages = slice_metadata(parent, split_at(batch, cut))
    joined: list[tuple[int, int]] = []
    for stage in stages:
        offsets = stage.query_start_loc.tolist()
        positions = stage.positions if stage.positions.ndim == 1 else stage.positions[0]
        assert offsets[0] == 0
        assert offsets[-1] == stage.num_actual_tokens == len(stage.slot_mapping) == len(positions)
        assert len(offsets) - 1 == stage.num_reqs == len(stage.seq_lens) == len(stage.req_idx)
        for row in range(stage.num_reqs):
            begin, end = offsets[row], offsets[row + 1]
            assert end > begin
            computed = int(stage.seq_lens[row]) - (end - begin)
            # Positions are absolute: they go on where the computed tokens end.
            assert positions[begin:end].tolist() == [*range(computed, int(stage.seq_lens[row]))]
            request = (4000 - int(stage.req_idx[row])) // 2
            joined += [(request, slot) for slot in stage.slot_mapping[begin:end].tolist()]
    assert [slot for _, slot in joined] == parent.slot_mapping[: batch.num_tokens].tolist()
    assert [q for q, _ in joined] == [
        q for q, count in enumerate(batch.num_scheduled_tokens) for _ in range(count)
    ]


def test_every_cut_of_a_small_step() -> None:
    batch = ScheduledBatch([1, 3, 1, 4], [6, 0, 2, 5], is_prefilling=[False, True, True, True])
    for cut in range(1, 9):
        for bounds in (True, False):
            check(parent_of(batch, pad_requests=1, bounds=bounds), split_at(batch, cut))


@pytest.mark.parametrize("alignment", [1, 4, 8])
def test_metadata_never_speaks_of_padding(alignment: int) -> None:
    batch = ScheduledBatch([105], num_input_tokens=112)
    plan = split_at(batch, 56, alignment)
    first, second = check(parent_of(batch, pad_tokens=7), plan)
    assert (first.num_actual_tokens, second.num_actual_tokens) == (56, 49)
    assert second.query_start_loc.tolist() == [0, 49]


@pytest.mark.parametrize("kind", ["numpy", "int64", "uint32"])
def test_other_kinds_of_array(kind: str) -> None:
    batch = ScheduledBatch([3, 20, 7], [0, 64, 0])
    parent = parent_of(batch, pad_requests=1, pad_tokens=2)
    per_request = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound")
    for name in (*per_request, "slot_mapping", "positions", "block_table_tensor", "is_prefilling"):
        value = getattr(parent, name).numpy()
        if kind == "uint32" and name in per_request:
            value = value.astype(np.uint32)
        if kind == "int64" and name in per_request:
            value = torch.from_numpy(value.astype(np.int64))
        setattr(parent, name, value)
    for cut in (1, 3, 4, 22, 23, 29):
        check(parent, split_at(batch, cut))


def test_lengths_near_the_end_of_32_bits() -> None:
    most = 2**31 - 1
    batch = ScheduledBatch([8, 4], [most - 8, most - 4])
    plan = split_at(batch, 5)
    stages = slice_metadata(
        StepMetadata(
            query_start_loc=ints([0, 8, 12]),
            query_start_loc_cpu=ints([0, 8, 12]),
            seq_lens=ints([most, most]),
            num_reqs=2,
            num_actual_tokens=12,
            max_query_len=8,
            max_seq_len=most,
            block_table_tensor=ints([[1], [2]]),
            slot_mapping=torch.arange(12),
            seq_lens_cpu_upper_bound=ints([most, most]),
        ),
        plan,
    )
    assert stages[0].seq_lens.tolist() == [most - 3]
    assert stages[1].seq_lens.tolist() == [most, most]
    assert (stages[0].max_seq_len, stages[1].max_seq_len) == (most - 3, most)


def test_offsets_near_the_end_of_32_bits() -> None:
    tokens, cut = 2**31 - 1, 2**31 - 3
    batch = ScheduledBatch([2**30, 2**30 - 1])
    slots = torch.zeros(1, dtype=torch.int64).expand(tokens)
    parent = dataclasses.replace(
        parent_of(ScheduledBatch([1, 1])),
        query_start_loc=ints([0, 2**30, tokens]),
        query_start_loc_cpu=ints([0, 2**30, tokens]),
        seq_lens=ints([2**30, 2**30 - 1]),
        seq_lens_cpu_upper_bound=ints([2**30, 2**30 - 1]),
        num_actual_tokens=tokens,
        slot_mapping=slots,
        positions=None,
    )
    first, second = slice_metadata(parent, split_at(batch, cut))
    assert first.query_start_loc.tolist() == [0, 2**30, cut]
    assert first.seq_lens.tolist() == [2**30, cut - 2**30]
    assert second.query_start_loc.tolist() == [0, 2]
    assert second.seq_lens.tolist() == [2**30 - 1]
    assert (first.slot_mapping.shape[0], second.slot_mapping.shape[0]) == (cut, 2)


# --- public cases -----------------------------------------------------------------------


def test_a1_computed_counts_advance() -> None:
    batch = ScheduledBatch([3, 200, 17], [0, 64, 0])
    first, second = check(parent_of(batch), split_at(batch, 110))
    assert first.seq_lens.tolist() == [3, 171]
    assert first.seq_lens_cpu_upper_bound.tolist() == [3, 171]
    assert first.max_seq_len == 171
    assert second.query_start_loc.tolist() == [0, 93, 110]
    assert second.seq_lens.tolist() == [264, 17]
    queries = second.query_start_loc[1:] - second.query_start_loc[:-1]
    assert (second.seq_lens - queries).tolist() == [171, 0]


def test_a2_positions_are_not_rebased() -> None:
    batch = ScheduledBatch([3, 200, 17], [0, 64, 0])
    _, second = slice_metadata(parent_of(batch), split_at(batch, 110))
    assert int(second.positions[0]) == 171
    assert second.positions.tolist() == [*range(171, 264), *range(17)]


def test_a3_pieces_of_one_request_with_context() -> None:
    batch = ScheduledBatch([8], [24])
    first, second = check(parent_of(batch), split_at(batch, 4))
    assert (first.seq_lens.tolist(), first.query_start_loc.tolist()) == ([28], [0, 4])
    assert (second.seq_lens.tolist(), second.query_start_loc.tolist()) == ([32], [0, 4])


def test_a_piece_of_one_token_keeps_its_prefill_class() -> None:
    batch = ScheduledBatch([5, 1], [64, 9], is_prefilling=[True, False])
    _, second = check(parent_of(batch), split_at(batch, 4))
    assert second.query_start_loc.tolist() == [0, 1, 2]
    assert second.is_prefilling.tolist() == [True, False]


def test_b1_no_field_is_left_out_of_this_suite() -> None:
    batch = ScheduledBatch([3, 2])
    parent = parent_of(batch)
    refused = {name for name, rule in RULES_0_32_0.items() if isinstance(rule, r.refused)}
    unset = {f.name for f in dataclasses.fields(parent) if getattr(parent, f.name) is None}
    assert unset == refused
    assert set(by_hand(parent, batch, 0, 3)) == {f.name for f in dataclasses.fields(parent)}
    assert set(RULES_0_32_0) == {f.name for f in dataclasses.fields(StepMetadata)}


# --- the parent, and storage ------------------------------------------------------------


def contents(parent: StepMetadata) -> dict[str, Any]:
    """Identity and every byte of every field, storage beyond the view included."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(parent):
        value = getattr(parent, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = (id(value), value.shape, bytes(value.untyped_storage()))
        elif isinstance(value, np.ndarray):
            found[field.name] = (id(value), value.shape, value.tobytes())
        else:
            found[field.name] = copy.deepcopy(value)
    return found


@given(case=cases, variant=variants)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_the_parent_is_not_touched(case: Any, variant: Any) -> None:
    batch, cut = case
    parent = parent_of(batch, **variant)
    before = contents(parent)
    slice_metadata(parent, split_at(batch, cut))
    assert contents(parent) == before


OWNED = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound")


@pytest.mark.parametrize("numpy_fields", [False, True])
@pytest.mark.parametrize("cut", [3, 10, 5])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", OWNED)
def test_a_stage_may_write_its_offsets_and_lengths(
    name: str, stage: int, cut: int, numpy_fields: bool
) -> None:
    batch = ScheduledBatch([3, 7, 4], [0, 8, 1])
    parent = parent_of(batch)
    if numpy_fields:
        for field in OWNED:
            setattr(parent, field, getattr(parent, field).numpy())
    else:  # as CPU runners do: both names hold one tensor
        parent.query_start_loc = parent.query_start_loc_cpu
        parent.seq_lens = parent.seq_lens_cpu_upper_bound
    stages = slice_metadata(parent, split_at(batch, cut))
    expected = by_hand(parent, batch, *((cut, 14) if stage == 0 else (0, cut)))
    before = contents(parent)
    getattr(stages[stage], name)[:] = -7
    assert contents(parent) == before
    for field in OWNED:
        assert plain(getattr(stages[1 - stage], field)) == expected[field]
        if field != name:
            assert -7 not in plain(getattr(stages[stage], field))


def test_read_only_numpy_fields() -> None:
    batch = ScheduledBatch([3, 7])
    parent = parent_of(batch)
    for field in OWNED:
        value = getattr(parent, field).numpy().copy()
        value.setflags(write=False)
        setattr(parent, field, value)
    check(parent, split_at(batch, 5))


# --- device tensors ---------------------------------------------------------------------


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, and whose content the host may not wait for."""

    is_cpu = False  # type: ignore[assignment]
    device = torch.device("meta")  # type: ignore[assignment]

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a device tensor has no numpy view")

    tolist = item = cpu = __array__ = __int__ = __bool__ = __index__ = numpy  # type: ignore[assignment]


ON_DEVICE = (
    "query_start_loc",
    "seq_lens",
    "block_table_tensor",
    "slot_mapping",
    "positions",
    "encoder_seq_lens",
    "rswa_prefix_lens",
)


def moved_to_device(parent: StepMetadata) -> StepMetadata:
    moved = {name: getattr(parent, name).as_subclass(OnDevice) for name in ON_DEVICE}
    return dataclasses.replace(parent, **moved)


def fetched(stage: StepMetadata) -> StepMetadata:
    """The stage with its device tensors on the CPU; all of them must still be on the device."""
    assert {type(getattr(stage, name)) for name in ON_DEVICE} == {OnDevice}
    values = {name: getattr(stage, name).as_subclass(torch.Tensor) for name in ON_DEVICE}
    return dataclasses.replace(stage, **values)


@given(case=cases, variant=variants)
@examples
def test_device_tensors_are_cut_alike_and_never_waited_for(case: Any, variant: Any) -> None:
    batch, cut = case
    parent = parent_of(batch, **variant)
    plan = split_at(batch, cut)
    stages = tuple(fetched(stage) for stage in slice_metadata(moved_to_device(parent), plan))
    check_stages(parent, plan, stages)


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens"])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("cut", [3, 10, 5])
def test_a_stage_may_write_its_device_tensors(name: str, stage: int, cut: int) -> None:
    batch = ScheduledBatch([3, 7, 4], [0, 8, 1])
    parent = parent_of(batch)
    before = contents(parent)
    stages = slice_metadata(moved_to_device(parent), split_at(batch, cut))
    getattr(stages[stage], name).fill_(-7)
    assert contents(parent) == before
    expected = by_hand(parent, batch, *((cut, 14) if stage == 0 else (0, cut)))
    assert plain(getattr(fetched(stages[1 - stage]), name)) == expected[name]


@pytest.mark.parametrize("name", ["query_start_loc_cpu", "seq_lens_cpu_upper_bound"])
def test_what_must_be_on_the_cpu(name: str) -> None:
    batch = ScheduledBatch([3, 2])
    parent = parent_of(batch)
    setattr(parent, name, getattr(parent, name).as_subclass(OnDevice))
    with pytest.raises(MetadataMismatch, match=f"{name} is on meta.*CPU"):
        slice_metadata(parent, split_at(batch, 2))


# --- metadata of another step -----------------------------------------------------------

BATCH = ScheduledBatch([3, 7, 4], [0, 8, 1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"query_start_loc_cpu": ints([0, 3, 9, 14])}, r"query_start_loc \[0, 3, 9, 14\]"),
        ({"query_start_loc_cpu": ints([0, 3, 10])}, r"\[0, 3, 10\].*\[0, 3, 10, 14\]"),
        ({"query_start_loc_cpu": ints([])}, "query_start_loc"),
        ({"query_start_loc_cpu": ints([0, 3, 10, 14, 15])}, "query_start_loc"),
        ({"query_start_loc_cpu": ints([1, 4, 11, 15])}, "query_start_loc"),
        ({"query_start_loc": ints([0, 3, 10])}, "query_start_loc has shape .*4 offsets"),
        ({"seq_lens": ints([3, 15])}, "seq_lens has shape .*3 requests"),
        ({"seq_lens_cpu_upper_bound": ints([3, 15])}, r"seq_lens_cpu_upper_bound \[3, 15\]"),
        ({"seq_lens_cpu_upper_bound": ints([3, 14, 5])}, r"\[3, 14, 5\].*\[3, 15, 5\]"),
        ({"seq_lens_cpu_upper_bound": ints([3, 16, 5])}, r"\[3, 16, 5\]"),
        ({"num_reqs": 2}, "2 requests and 14 tokens, the plan of 3 and 14"),
        ({"num_actual_tokens": 13}, "3 requests and 13 tokens, the plan of 3 and 14"),
        ({"slot_mapping": torch.arange(13)}, "slot_mapping has shape .*14 tokens"),
        ({"slot_mapping": torch.tensor(3)}, "slot_mapping has shape"),
        ({"positions": torch.arange(13)}, "positions has shape .*14 tokens"),
        ({"positions": torch.zeros(14, 3, dtype=torch.int64)}, "positions has shape .*axis -1"),
        ({"block_table_tensor": ints([[1], [2]])}, "block_table_tensor has shape .*3 requests"),
        ({"is_prefilling": torch.tensor([True])}, "is_prefilling has shape"),
        (
            {"is_prefilling": torch.tensor([True, True, False])},
            r"is_prefilling \[True, True, False\] .* \[True, True, True\]",
        ),
        ({"req_idx": np.array([1, 2])}, "req_idx has shape"),
        ({"encoder_seq_lens_cpu": np.array([1, 2])}, "encoder_seq_lens_cpu has shape"),
        ({"causal": torch.tensor([True, False])}, "causal has shape"),
        ({"rswa_prefix_lens": ints([1])}, "rswa_prefix_lens has shape"),
    ],
)
def test_a_field_that_does_not_fit_is_named(change: dict[str, Any], said: str) -> None:
    parent = dataclasses.replace(parent_of(BATCH), **change)
    with pytest.raises(MetadataMismatch, match=said):
        slice_metadata(parent, split_at(BATCH, 5))


def test_a_padded_row_with_tokens_is_no_padding() -> None:
    parent = parent_of(BATCH, pad_requests=2)
    parent.query_start_loc_cpu[-1] = 15
    with pytest.raises(MetadataMismatch, match="query_start_loc"):
        slice_metadata(parent, split_at(BATCH, 5))


def test_offsets_of_another_step_in_the_other_copy() -> None:
    parent = dataclasses.replace(parent_of(BATCH), query_start_loc=ints([0, 2, 10, 14]))
    with pytest.raises(MetadataMismatch, match="query_start_loc"):
        slice_metadata(parent, split_at(BATCH, 5))


def test_lengths_of_another_step() -> None:
    parent = dataclasses.replace(
        parent_of(BATCH), seq_lens=ints([3, 14, 5]), seq_lens_cpu_upper_bound=None
    )
    with pytest.raises(MetadataMismatch, match="seq_lens"):
        slice_metadata(parent, split_at(BATCH, 5))


def test_bounds_of_a_decode_may_be_loose() -> None:
    batch = ScheduledBatch([6, 1], [0, 9], is_prefilling=[True, False])
    parent = parent_of(batch)
    parent.seq_lens_cpu_upper_bound = ints([6, 12])
    first, second = slice_metadata(parent, split_at(batch, 4))
    assert first.seq_lens_cpu_upper_bound.tolist() == [4]
    assert second.seq_lens_cpu_upper_bound.tolist() == [6, 12]
    assert (first.max_seq_len, second.max_seq_len) == (4, 12)
    parent.seq_lens_cpu_upper_bound = ints([6, 9])
    with pytest.raises(MetadataMismatch, match="upper_bound"):
        slice_metadata(parent, split_at(batch, 4))


REFUSED: dict[str, Any] = {
    "logits_indices_padded": torch.arange(3),
    "num_logits_indices": 3,
    "max_logits_per_req": 0,
    "dcp_local_seq_lens": torch.zeros(3),
    "dcp_local_seq_lens_cpu_upper_bound": torch.zeros(3),
    "mm_req_doc_ranges": {},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_derived_is_refused(name: str) -> None:
    parent = dataclasses.replace(parent_of(BATCH), **{name: REFUSED[name]})
    with pytest.raises(RefusedField, match=f"field {name} is set, but .*must be unset") as caught:
        slice_metadata(parent, split_at(BATCH, 5))
    rule = RULES_0_32_0[name]
    assert isinstance(rule, r.refused)
    assert rule.remedy in str(caught.value)


def test_every_refused_field_is_tried_above() -> None:
    refused = {name for name, rule in RULES_0_32_0.items() if isinstance(rule, r.refused)}
    assert refused == set(REFUSED)


@pytest.mark.parametrize(
    "name",
    [f.name for f in dataclasses.fields(StepMetadata) if f.default is None],
)
def test_any_optional_field_may_be_absent(name: str) -> None:
    parent = dataclasses.replace(parent_of(BATCH), **{name: None})
    for stage in slice_metadata(parent, split_at(BATCH, 5)):
        assert getattr(stage, name) is None
