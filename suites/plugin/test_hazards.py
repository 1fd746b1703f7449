"""Hazards and moved cuts against a brute force over readers, context slots and writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from afd_plugin import (
    KVGroup,
    KVHazard,
    ScheduledBatch,
    SplitPlan,
    find_kv_hazard,
    plan_split,
    safe_plan,
    split_at,
)
from afd_plugin.errors import KVLayoutError
from afd_plugin.hazards import hazard_in
from afd_testkit.strategies import PagedBatch, paged_batches

pytestmark = pytest.mark.cpu

examples = settings(deadline=None, derandomize=True, max_examples=100)


@dataclass(frozen=True)
class Paged:
    """A step in plain lists: [R] counts, [R][W] block ids, [T] slots."""

    scheduled: list[int]
    computed: list[int]
    block_size: int
    tables: list[list[int]]
    slots: list[int]

    @property
    def batch(self) -> ScheduledBatch:
        return ScheduledBatch(self.scheduled, self.computed)

    @property
    def group(self) -> KVGroup:
        return KVGroup(self.block_size, np.array(self.tables), np.array(self.slots))

    @property
    def owner(self) -> list[int]:
        return [r for r, count in enumerate(self.scheduled) for _ in range(count)]


def plain(paged: PagedBatch) -> Paged:
    return Paged(
        scheduled=paged.batch.num_scheduled_tokens.tolist(),
        computed=paged.batch.num_computed_tokens.tolist(),
        block_size=paged.block_size,
        tables=paged.block_tables.tolist(),
        slots=paged.slot_mapping.tolist(),
    )


@st.composite
def clashing(draw: st.DrawFn) -> Paged:
    """Few blocks, held by anybody: slots that several tokens write, and tokens that write none.

    No scheduler should do this; a check that finds hazards must not rely on it.
    """
    size = draw(st.integers(1, 4))
    block_size = draw(st.sampled_from([1, 2, 3, 4]))
    scheduled = draw(st.lists(st.integers(1, 6), min_size=size, max_size=size))
    scheduled[-1] += sum(scheduled) == 1
    computed = draw(st.lists(st.integers(0, 8), min_size=size, max_size=size))
    width = max(-(-(s + c) // block_size) for s, c in zip(scheduled, computed, strict=True))
    row = st.lists(st.integers(0, 6), min_size=width, max_size=width)
    tables = draw(st.lists(row, min_size=size, max_size=size))
    slots = [
        -1
        if draw(st.integers(0, 4)) == 0
        else tables[r][p // block_size] * block_size + p % block_size
        for r in range(size)
        for p in range(computed[r], computed[r] + scheduled[r])
    ]
    return Paged(scheduled, computed, block_size, tables, slots)


layouts = st.one_of(paged_batches().map(plain), clashing())


# --- oracle -----------------------------------------------------------------------------


def broken_reads(step: Paged, cut: int) -> list[tuple[int, int, int, set[int]]]:
    """(request, context position, slot, tokens of stage 1 that write it), in that order.

    Only requests with a token before the cut read in stage 0.
    """
    owner, found = step.owner, []
    for request, computed in enumerate(step.computed):
        if request not in owner[:cut]:
            continue
        for position in range(computed):
            block = step.tables[request][position // step.block_size]
            slot = block * step.block_size + position % step.block_size
            late = {token for token in range(cut, len(owner)) if step.slots[token] == slot}
            if late:
                found.append((request, position, slot, late))
    return found


def safe(steps: list[Paged], cut: int) -> bool:
    return not any(broken_reads(step, cut) for step in steps)


def expect(hazard: KVHazard | None, step: Paged, cut: int) -> None:
    reads = broken_reads(step, cut)
    if not reads:
        assert hazard is None
        return
    request, position, slot, late = reads[0]
    assert hazard is not None
    assert (hazard.reader, hazard.position, hazard.slot) == (request, position, slot)
    assert hazard.writer_token in late
    assert hazard.writer == step.owner[hazard.writer_token]
    parts = (hazard.reader, hazard.position, hazard.slot, hazard.writer, hazard.writer_token)
    assert {type(part) for part in parts} == {int}


def nearest_safe(steps: list[Paged], plan: SplitPlan) -> int | None:
    """Of all cuts that the policy may take, the safe one nearest to the plan's."""
    owner = steps[0].owner
    allowed = [
        cut
        for cut in range(1, len(owner))
        if cut == plan.cut
        or (
            owner[cut - 1] != owner[cut]
            if plan.policy == "request_boundary"
            else cut % plan.alignment == 0
        )
    ]
    good = [cut for cut in allowed if safe(steps, cut)]
    return min(good, key=lambda cut: (abs(cut - plan.cut), -cut), default=None)


# --- find_kv_hazard ---------------------------------------------------------------------


@given(step=layouts, data=st.data())
@examples
def test_found_exactly_where_a_read_is_broken(step: Paged, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(step.owner) - 1))
    plan = split_at(step.batch, cut)
    hazard = find_kv_hazard(
        plan,
        block_size=step.block_size,
        block_tables=np.array(step.tables),
        slot_mapping=np.array(step.slots),
    )
    expect(hazard, step, cut)


@given(step=paged_batches().map(plain))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_every_cut_of_a_scheduler_like_step(step: Paged) -> None:
    for cut in range(1, len(step.owner)):
        expect(hazard_in(split_at(step.batch, cut), [step.group]), step, cut)


FORMS: dict[str, Any] = {
    "list": lambda v: v,
    "int32": lambda v: np.array(v, dtype=np.int32),
    "uint8": lambda v: np.array(v, dtype=np.uint8),
    "torch int32": lambda v: torch.tensor(v, dtype=torch.int32),
    "torch int64": lambda v: torch.tensor(v, dtype=torch.int64),
}
# Request 0 hits block 1, which request 1 writes as its first block.
SHARED = Paged([2, 4], [4, 0], 4, [[1, 2], [1, 3]], [8, 9, 4, 5, 6, 7])


@pytest.mark.parametrize("slots", FORMS)
@pytest.mark.parametrize("table", FORMS)
def test_arrays_of_every_form(table: str, slots: str) -> None:
    hazard = find_kv_hazard(
        split_at(SHARED.batch, 3),
        block_size=4,
        block_tables=FORMS[table](SHARED.tables),
        slot_mapping=FORMS[slots](SHARED.slots),
    )
    assert hazard == KVHazard(reader=0, writer=1, position=1, slot=5, writer_token=3)


def test_text_of_a_hazard_names_all_parts() -> None:
    hazard = hazard_in(split_at(SHARED.batch, 3), [SHARED.group])
    assert str(hazard) == (
        "request 0 reads position 1 from KV slot 5, which token 3 of request 1 writes in this step"
    )


def test_rows_and_slots_of_padding_are_not_read() -> None:
    padded = KVGroup(
        4,
        np.array([*SHARED.tables, [1, 1], [-1, -1]]),
        np.array([*SHARED.slots, 4, 4, -1]),
    )
    for cut in range(1, 6):
        expect(hazard_in(split_at(SHARED.batch, cut), [padded]), SHARED, cut)


def test_slots_beyond_32_bits() -> None:
    block = 2**31 - 1
    step = Paged([1, 2], [2, 0], 2, [[block, 1], [block, 3]], [2, 2 * block, 2 * block + 1])
    group = KVGroup(2, np.array(step.tables, dtype=np.int32), np.array(step.slots))
    for cut in (1, 2):
        hazard = hazard_in(split_at(step.batch, cut), [group])
        expect(hazard, step, cut)
        assert hazard is not None


def test_only_context_is_read() -> None:
    # Request 0's own new tokens go to block 2, which request 1 also writes: no context read.
    step = Paged([2, 2], [0, 0], 4, [[2], [2]], [8, 9, 8, 9])
    for cut in (1, 2, 3):
        assert hazard_in(split_at(step.batch, cut), [step.group]) is None


def test_the_last_of_two_writers_counts() -> None:
    # Tokens 1 and 3 write the slot that request 0 reads; only the second is in stage 1.
    step = Paged([1, 1, 2], [1, 0, 0], 1, [[5, 1], [5, 0], [2, 5]], [1, 5, 2, 5])
    hazard = hazard_in(split_at(step.batch, 2), [step.group])
    assert hazard == KVHazard(reader=0, writer=2, position=0, slot=5, writer_token=3)


def test_a_hazard_in_the_second_group_is_found() -> None:
    clean = Paged([2, 4], [4, 0], 4, [[9, 2], [1, 3]], SHARED.slots)
    plan = split_at(SHARED.batch, 3)
    assert hazard_in(plan, [clean.group]) is None
    assert hazard_in(plan, []) is None
    expect(hazard_in(plan, [clean.group, SHARED.group]), SHARED, 3)


# --- safe_plan --------------------------------------------------------------------------


@given(step=layouts, data=st.data(), policy=st.sampled_from(["token", "request", "given"]))
@settings(deadline=None, derandomize=True, max_examples=100)
@example(step=SHARED, data=None, policy="token")
def test_moved_to_the_nearest_safe_cut(
    step: Paged, data: st.DataObject | None, policy: Any
) -> None:
    alignment = 1 if data is None else data.draw(st.sampled_from([1, 1, 2, 3, 4]))
    if policy == "given":
        cut = 1 if data is None else data.draw(st.integers(1, len(step.owner) - 1))
        plan: Any = split_at(step.batch, cut, alignment)
    else:
        plan = plan_split(step.batch, policy, alignment)
    if not isinstance(plan, SplitPlan):
        return
    moved = safe_plan(plan, [step.group])
    cut_to = nearest_safe([step], plan)
    if cut_to is None:
        assert moved is None
        return
    assert moved is not None
    assert moved.cut == cut_to
    assert (moved.policy, moved.alignment) == (plan.policy, plan.alignment)
    assert moved.batch is plan.batch
    assert hazard_in(moved, [step.group]) is None
    if cut_to == plan.cut:
        assert moved == plan


@given(step=paged_batches().map(plain), data=st.data())
@examples
def test_safe_in_every_group_at_once(step: Paged, data: st.DataObject) -> None:
    rows = st.lists(st.integers(0, 5), min_size=len(step.tables[0]), max_size=len(step.tables[0]))
    tables = data.draw(st.lists(rows, min_size=len(step.tables), max_size=len(step.tables)))
    other = Paged(
        step.scheduled,
        step.computed,
        step.block_size,
        tables,
        [
            tables[r][p // step.block_size] * step.block_size + p % step.block_size
            for r in range(len(tables))
            for p in range(step.computed[r], step.computed[r] + step.scheduled[r])
        ],
    )
    plan = plan_split(step.batch, "token", data.draw(st.sampled_from([1, 2, 4])))
    if isinstance(plan, SplitPlan):
        moved = safe_plan(plan, [step.group, other.group])
        assert (None if moved is None else moved.cut) == nearest_safe([step, other], plan)


def test_a_tie_goes_to_the_later_cut() -> None:
    # Request 1 (tokens 3, 4) reads what token 5 writes: cuts 4 and 5 are unsafe.
    step = Paged(
        [3, 2, 3], [0, 1, 0], 1, [[0] * 3, [9, 1, 2], [9, 4, 5]], [*range(20, 25), 9, 4, 5]
    )
    assert [cut for cut in range(1, 8) if safe([step], cut)] == [1, 2, 3, 6, 7]
    four = safe_plan(split_at(step.batch, 4), [step.group])
    five = safe_plan(split_at(step.batch, 5), [step.group])
    assert four is not None
    assert five is not None
    assert (four.cut, five.cut) == (3, 6)
    # With request boundaries 3 and 5 only 3 is safe; aligned to 2, cuts 2 and 6 are as near.
    by_request = safe_plan(plan_split(step.batch, "request"), [step.group])  # type: ignore[arg-type]
    aligned = safe_plan(split_at(step.batch, 4, 2), [step.group])
    assert by_request is not None
    assert aligned is not None
    assert (by_request.cut, aligned.cut) == (3, 6)


# --- the public case --------------------------------------------------------------------


def f1(order: tuple[int, int, int]) -> Paged:
    """Scheduled [17, 17, 704] after [672, 672, 0], block 32: 0 and 1 hit what 2 writes."""
    scheduled, computed = [17, 17, 704], [672, 672, 0]
    hit = list(range(1, 22))
    rows = [[*hit, 30], [*hit, 31], [*hit, 40]]
    slots = [
        [rows[r][p // 32] * 32 + p % 32 for p in range(computed[r], computed[r] + scheduled[r])]
        for r in range(3)
    ]
    return Paged(
        [scheduled[r] for r in order],
        [computed[r] for r in order],
        32,
        [rows[r] for r in order],
        [slot for r in order for slot in slots[r]],
    )


def test_f1_readers_before_their_writer() -> None:
    step = f1((0, 1, 2))
    plan = plan_split(step.batch, "token")
    assert isinstance(plan, SplitPlan)
    assert plan.cut == 369
    hazard = hazard_in(plan, [step.group])
    # Request 2 begins at token 34 and holds position p in token 34 + p: 335 is the first late one.
    assert hazard == KVHazard(reader=0, writer=2, position=335, slot=335 + 32, writer_token=369)
    moved = safe_plan(plan, [step.group])
    assert moved is not None
    assert moved.cut == 706  # the last written position that is read is 671, in token 705
    assert hazard_in(moved, [step.group]) is None
    assert safe_plan(plan_split(step.batch, "request"), [step.group]) is None  # type: ignore[arg-type]


def test_f1_writer_before_its_readers() -> None:
    step = f1((2, 0, 1))
    plan = plan_split(step.batch, "token")
    assert isinstance(plan, SplitPlan)
    assert plan.cut == 369
    assert hazard_in(plan, [step.group]) is None
    assert safe_plan(plan, [step.group]) == plan


# --- refusals ---------------------------------------------------------------------------

PLAN = split_at(SHARED.batch, 3)


def both(group: KVGroup) -> list[Any]:
    return [lambda: hazard_in(PLAN, [group]), lambda: safe_plan(PLAN, [group])]


@pytest.mark.parametrize("size", [0, -1, 1.5, 4.0, True, "4", None, np.float32(4)], ids=repr)
def test_block_size_refused(size: Any) -> None:
    for call in both(KVGroup(size, SHARED.tables, SHARED.slots)):
        with pytest.raises(KVLayoutError, match=r"block_size is .*1 to 2147483647") as caught:
            call()
        assert repr(size) in str(caught.value)


@pytest.mark.parametrize(
    ("table", "slots", "said"),
    [
        (SHARED.tables[:1], SHARED.slots, "block_table has 1 rows for 2 requests"),
        (SHARED.tables, SHARED.slots[:5], "slot_mapping has 5 slots for 6 tokens"),
        (SHARED.tables, [], "slot_mapping"),
        ([[1], [1]], SHARED.slots, "request 0 reaches 6 tokens.*1 blocks of 4"),
        ([[], []], SHARED.slots, "block_table"),
        ([1, 2], SHARED.slots, "block_table is .*1 dimensions"),
        ([SHARED.tables], SHARED.slots, "block_table is .*3 dimensions"),
        (SHARED.tables, [SHARED.slots], "slot_mapping is .*2 dimensions"),
        (None, SHARED.slots, "block_table"),
        (SHARED.tables, None, "slot_mapping"),
        ([[1.0, 2.0], [1.0, 3.0]], SHARED.slots, "block_table is float64"),
        (SHARED.tables, [float("nan")] * 6, "slot_mapping is float64"),
        ([[True, True]] * 2, SHARED.slots, "block_table is bool"),
        (SHARED.tables, ["8"] * 6, "slot_mapping is <U1"),
        ([[-1, 2], [1, 3]], SHARED.slots, "request 0 holds a negative id"),
        ([[1, 2], [1]], SHARED.slots, "block_table"),
        (torch.empty((2, 2), dtype=torch.int32, device="meta"), SHARED.slots, "block_table"),
        (SHARED.tables, torch.empty(6, dtype=torch.int64, device="meta"), "slot_mapping"),
        (SHARED.tables, torch.zeros(6, dtype=torch.bfloat16), "slot_mapping"),
    ],
)
def test_layout_refused(table: Any, slots: Any, said: str) -> None:
    for call in both(KVGroup(4, table, slots)):
        with pytest.raises(KVLayoutError, match=said):
            call()


@pytest.mark.parametrize(
    ("scheduled", "computed", "rows", "said"),
    [
        # 33 tokens in blocks of 4 are 9 blocks; 32 are 8.
        (
            [1, 2],
            [32, 0],
            [[*range(1, 9), -1], [9] * 9],
            "request 0 reaches 33 .*holds -1 for block 8",
        ),
        (
            [2, 33],
            [0, 0],
            [[9] * 9, [*range(1, 9), -7]],
            "request 1 reaches 33 .*holds -7 for block 8",
        ),
        ([1, 1], [0, 0], [[1] * 9, [-1] * 9], "request 1 reaches 1 .*needs blocks 0 to 0"),
        ([1, 1], [4, 0], [[1, -1], [2, -1]], "request 0 reaches 5 .*holds -1 for block 1"),
    ],
)
def test_a_row_that_ends_before_its_request(
    scheduled: list[int], computed: list[int], rows: list[list[int]], said: str
) -> None:
    batch = ScheduledBatch(scheduled, computed)
    plan = split_at(batch, 1)
    group = KVGroup(4, np.array(rows), np.full(batch.num_tokens, -1))
    for call in (hazard_in, safe_plan):
        with pytest.raises(KVLayoutError, match=said + ".*give the row an id"):
            call(plan, [group])


def test_padding_after_the_last_needed_block_is_fine() -> None:
    # 32 tokens fill 8 blocks of 4 to the last slot; the ninth entry is padding.
    group = KVGroup(4, np.array([[*range(1, 9), -1], [9, *[-1] * 8]]), np.full(5, -1))
    plan = split_at(ScheduledBatch([1, 4], [31, 0]), 1)
    assert hazard_in(plan, [group]) is None
    assert safe_plan(plan, [group]) == plan


def test_a_layout_is_checked_even_without_context() -> None:
    plan = split_at(ScheduledBatch([2, 4]), 3)
    with pytest.raises(KVLayoutError, match="slot_mapping has 5 slots"):
        hazard_in(plan, [KVGroup(4, SHARED.tables, SHARED.slots[:5])])


# Blocks of 4.  Request 0 continues at position 12; its first blocks were freed and given to
# request 1, which writes them now.  Which of them it still reads depends on the window.
WINDOWED = ScheduledBatch([2, 8], [12, 0])
WINDOWED_TABLE = np.array([[1, 2, 3, 4], [1, 2, 0, 0]])
WINDOWED_SLOTS = np.array([16, 17, 4, 5, 6, 7, 8, 9, 10, 11])


@pytest.mark.parametrize(
    ("window", "position"),
    [(None, 4), (13, 4), (9, 4), (8, 5), (6, 7), (5, None), (1, None)],
)
def test_a_read_outside_of_the_sliding_window_is_none(
    window: int | None, position: int | None
) -> None:
    """The token at 12 attends to positions 12 - window + 1 on; the cut is at token 6, so that
    request 1 writes positions 4 to 7 (its tokens 6 to 9) in stage 1."""
    group = KVGroup(4, WINDOWED_TABLE, WINDOWED_SLOTS, window=window)
    hazard = hazard_in(split_at(WINDOWED, 6), [group])
    assert (None if hazard is None else hazard.position) == position


@pytest.mark.parametrize("window", [0, -1, 2.0, True, 2**31])
def test_a_window_that_is_none(window: object) -> None:
    group = KVGroup(4, WINDOWED_TABLE, WINDOWED_SLOTS, window=window)  # type: ignore[arg-type]
    with pytest.raises(KVLayoutError, match="window is"):
        hazard_in(split_at(WINDOWED, 6), [group])


@pytest.mark.parametrize("size", [np.uint8(16), np.int8(16), np.int64(16)])
def test_small_integer_types_of_the_block_size_do_not_overflow(size: object) -> None:
    plan = split_at(ScheduledBatch([1, 8], [8, 0]), 5)
    tables, slots = np.ones((2, 16), int), np.arange(9)
    assert find_kv_hazard(
        plan,
        block_size=size,
        block_tables=tables,
        slot_mapping=slots,  # type: ignore[arg-type]
    ) == find_kv_hazard(plan, block_size=16, block_tables=tables, slot_mapping=slots)
