"""Which rank holds which tokens, against tables written out token by token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin import ScheduledBatch, SplitPlan, Unsplit, plan_split, split_at
from afd_plugin.errors import LayoutError
from afd_plugin.layout import (
    ExchangePlan,
    Layout,
    batch_shard,
    padded_rows,
    plan_exchange,
    stage_shard,
)
from afd_testkit.strategies import batches_with_cut

pytestmark = pytest.mark.cpu

Table = list[list[int | None]]  # of each rank: the token in each row, None for padding


def table(tokens: range, rows: int, ranks: int) -> Table:
    """The definition: all rows in order, cut into as many equal pieces as there are ranks."""
    assert rows % ranks == 0
    whole: list[int | None] = [*tokens, *[None] * (rows - len(tokens))]
    each = rows // ranks
    return [whole[rank * each : (rank + 1) * each] for rank in range(ranks)]


def batch_table(plan: SplitPlan, ranks: int) -> Table:
    rows = plan.batch.num_input_tokens
    while rows % ranks:
        rows += 1
    return table(range(plan.batch.num_tokens), rows, ranks)


def stage_table(plan: SplitPlan, stage: int, ranks: int) -> Table:
    tokens = range(plan.cut) if stage == 0 else range(plan.cut, plan.batch.num_tokens)
    return table(tokens, plan.stages[stage].num_input_tokens, ranks)


def exchanges(plan: SplitPlan, ranks: int) -> list[ExchangePlan]:
    return [plan_exchange(plan, Layout(ranks, rank, True)) for rank in range(ranks)]


@st.composite
def sharded_plans(draw: st.DrawFn) -> tuple[SplitPlan, int]:
    """A plan and a TP size that its alignment is a multiple of; cuts anywhere, extents too."""
    batch, cut = draw(batches_with_cut(max_requests=4, max_scheduled=20))
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    extent = batch.num_tokens + draw(st.integers(0, 20))
    padded = ScheduledBatch(
        batch.num_scheduled_tokens, batch.num_computed_tokens, num_input_tokens=extent
    )
    return split_at(padded, cut, ranks * draw(st.sampled_from([1, 2]))), ranks


@given(case=sharded_plans())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_shards_are_those_of_the_definition(case: tuple[SplitPlan, int]) -> None:
    plan, ranks = case
    for rank in range(ranks):
        layout = Layout(ranks, rank, True)
        for shard, rows in [
            (batch_shard(plan.batch, layout), batch_table(plan, ranks)[rank]),
            (stage_shard(plan, 0, layout), stage_table(plan, 0, ranks)[rank]),
            (stage_shard(plan, 1, layout), stage_table(plan, 1, ranks)[rank]),
        ]:
            held = range(shard.tokens.start, shard.tokens.stop)
            assert shard.num_tokens == len(held)
            assert [*held, *[None] * (shard.rows - len(held))] == rows


@given(case=sharded_plans())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_moves_turn_one_table_into_the_other_and_back(case: tuple[SplitPlan, int]) -> None:
    plan, ranks = case
    whole, plans = batch_table(plan, ranks), exchanges(plan, ranks)
    wanted = [stage_table(plan, stage, ranks) for stage in (0, 1)]
    got: list[Table] = [[[None] * len(rows) for rows in stage] for stage in wanted]
    back: Table = [[None] * len(rows) for rows in whole]
    written: list[tuple[int, int, int]] = []
    for rank, exchange in enumerate(plans):
        for move in exchange.keeps + exchange.receives:
            for row in range(move.rows):
                place = (move.stage, rank, move.stage_row + row)
                written.append(place)
                token = whole[move.peer][move.batch_row + row]
                got[move.stage][rank][move.stage_row + row] = token
    assert got == wanted
    assert len(set(written)) == len(written) == plan.batch.num_tokens
    for rank, exchange in enumerate(plans):
        for move in exchange.keeps + exchange.sends:
            for row in range(move.rows):
                token = wanted[move.stage][move.peer][move.stage_row + row]
                back[rank][move.batch_row + row] = token
    assert back == whole


@given(case=sharded_plans())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_only_what_changes_rank_is_sent(case: tuple[SplitPlan, int]) -> None:
    plan, ranks = case
    owner = {t: rank for rank, rows in enumerate(batch_table(plan, ranks)) for t in rows}
    stage_owner = {
        t: rank
        for stage in (0, 1)
        for rank, rows in enumerate(stage_table(plan, stage, ranks))
        for t in rows
    }
    tokens = range(plan.batch.num_tokens)
    plans = exchanges(plan, ranks)
    pairs = [(owner[t], stage_owner[t]) for t in tokens if owner[t] != stage_owner[t]]
    for rank, exchange in enumerate(plans):
        assert exchange.send_rows == [pairs.count((rank, to)) for to in range(ranks)]
        assert exchange.receive_rows == [pairs.count((sender, rank)) for sender in range(ranks)]
        assert exchange.moved_rows == len(pairs)
        # What arrives is in the order in which it was sent.
        for peer in range(ranks):
            sent = [(m.stage, m.batch_row, m.rows) for m in plans[peer].sends if m.peer == rank]
            due = [(m.stage, m.batch_row, m.rows) for m in exchange.receives if m.peer == peer]
            assert sent == due
        order = [(move.peer, move.stage) for move in exchange.receives]
        assert order == sorted(set(order))


def test_d1_a_stage_is_sharded_on_its_own() -> None:
    plan = split_at(ScheduledBatch([8]), 2, 2)
    shards = [[stage_shard(plan, s, Layout(2, r, True)) for r in (0, 1)] for s in (0, 1)]
    held = [[list(range(*shard.tokens.indices(8))) for shard in stage] for stage in shards]
    assert held == [[[0], [1]], [[2, 3, 4], [5, 6, 7]]]


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        (2, [[[0, 1], [2, 3]], [[4, 5, 6], [7, 8]]]),
        (4, [[[0], [1], [2], [3]], [[4, 5], [6, 7], [8], []]]),
        (8, [[[0], [1], [2], [3], [], [], [], []], [[4], [5], [6], [7], [8], [], [], []]]),
    ],
)
def test_odd_counts_leave_padding_to_the_last_ranks(ranks: int, stages: Any) -> None:
    plan = split_at(ScheduledBatch([9]), 4, ranks)
    for stage in (0, 1):
        shards = [stage_shard(plan, stage, Layout(ranks, rank, True)) for rank in range(ranks)]
        assert [list(range(9))[shard.tokens] for shard in shards] == stages[stage]
        assert len({shard.rows for shard in shards}) == 1


def test_c1_105_tokens_over_8_ranks() -> None:
    plan = plan_split(ScheduledBatch([105]), policy="token", alignment=Layout(8, 0, True).alignment)
    assert isinstance(plan, SplitPlan)
    assert plan.cut == 56
    assert [s.num_tokens for s in plan.stages] == [56, 49]  # what attention is told
    assert [s.num_input_tokens for s in plan.stages] == [56, 56]
    for rank in range(8):
        layout = Layout(8, rank, True)
        first, second = stage_shard(plan, 0, layout), stage_shard(plan, 1, layout)
        assert (first.rows, second.rows) == (7, 7)
        assert first.num_tokens == 7
        assert second.num_tokens == (7 if rank < 7 else 0)


def test_c2_a_request_boundary_next_to_the_cut() -> None:
    plan = plan_split(ScheduledBatch([1, 1068]), policy="token", alignment=2)
    assert isinstance(plan, SplitPlan)
    assert plan.cut == 534
    assert [s.num_tokens for s in plan.stages] == [534, 535]
    assert [s.num_input_tokens for s in plan.stages] == [534, 536]
    shards = [stage_shard(plan, 1, Layout(2, rank, True)) for rank in (0, 1)]
    assert [(s.rows, s.num_tokens) for s in shards] == [(268, 268), (268, 267)]
    assert [s.tokens for s in shards] == [slice(534, 802), slice(802, 1069)]


@pytest.mark.parametrize("extent", [None, 16])
def test_c3_padding_moves_no_cut(extent: int | None) -> None:
    def plan(tokens: int, ranks: int, sharded: bool) -> SplitPlan | Unsplit:
        batch = ScheduledBatch([tokens], num_input_tokens=extent)
        return plan_split(batch, policy="token", alignment=Layout(ranks, 0, sharded).alignment)

    five = plan(5, 4, sharded=False)
    assert isinstance(five, SplitPlan)
    # Both are equally near to the middle of the real tokens; ties go to the later cut.
    assert [s.num_tokens for s in five.stages] == [3, 2]
    one, three = plan(1, 1, sharded=False), plan(3, 4, sharded=True)
    assert isinstance(one, Unsplit)
    assert one.reason == "one_token"
    assert isinstance(three, Unsplit)
    assert three.reason == "no_aligned_cut"


def test_d2_stages_are_no_longer_than_their_tokens_need() -> None:
    batch = ScheduledBatch([38, 2], num_input_tokens=112)
    plan = plan_split(batch, policy="token", alignment=2)
    assert isinstance(plan, SplitPlan)
    assert [(s.num_tokens, s.num_input_tokens) for s in plan.stages] == [(20, 20), (20, 20)]
    assert batch_shard(batch, Layout(2, 0, True)) == (56, slice(0, 40))
    assert batch_shard(batch, Layout(2, 1, True)) == (56, slice(40, 40))
    first, second = exchanges(plan, 2)
    assert (first.send_rows, first.receive_rows) == ([0, 20], [0, 0])
    assert (second.send_rows, second.receive_rows) == ([0, 0], [20, 0])


def test_padding_beyond_the_tokens_is_nobodys_business() -> None:
    # One token a stage, both on rank 0 before and after: nothing moves, and both ranks know.
    plan = split_at(ScheduledBatch([2], num_input_tokens=8), 1, 2)
    assert [exchange.moved_rows for exchange in exchanges(plan, 2)] == [0, 0]
    assert [exchange.keeps for exchange in exchanges(plan, 2)][1] == ()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_where_tokens_are_not_sharded_everything_is_here(ranks: int) -> None:
    plan = split_at(ScheduledBatch([5, 4], num_input_tokens=11), 3)
    for rank in range(ranks):
        layout = Layout(ranks, rank, False)
        assert (layout.shards, layout.shard, layout.alignment) == (1, 0, 1)
        assert batch_shard(plan.batch, layout) == (11, slice(0, 9))
        exchange = plan_exchange(plan, layout)
        assert exchange.stage_shards == ((3, slice(0, 3)), (6, slice(3, 9)))
        assert (exchange.sends, exchange.receives, exchange.moved_rows) == ((), (), 0)


def test_the_same_plan_has_both_layouts() -> None:
    # FlashComm may be on in one step and off in the next, of the same tokens.
    plan = split_at(ScheduledBatch([16]), 8, 4)
    assert stage_shard(plan, 1, Layout(4, 1, True)).tokens == slice(10, 12)
    assert stage_shard(plan, 1, Layout(4, 1, False)).tokens == slice(8, 16)


@pytest.mark.parametrize(
    ("tokens", "alignment", "rows"), [(1, 8, 8), (8, 8, 8), (9, 8, 16), (5, 1, 5), (0, 4, 0)]
)
def test_padded_rows(tokens: int, alignment: int, rows: int) -> None:
    assert padded_rows(tokens, alignment) == rows


def test_a_plan_that_is_not_aligned_is_refused() -> None:
    plan = split_at(ScheduledBatch([8]), 3)
    with pytest.raises(LayoutError, match=r"stage 0 has 3 rows, which 2 ranks .*alignment is 1"):
        plan_exchange(plan, Layout(2, 0, True))
    with pytest.raises(LayoutError, match=r"stage 1 has 5 rows.*multiple of Layout\.alignment"):
        stage_shard(plan, 1, Layout(2, 0, True))
    assert stage_shard(plan, 1, Layout(2, 0, False)).rows == 5


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1), (-1, -2)])
def test_ranks_that_do_not_exist(size: int, rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} of {size} does not exist"):
        Layout(size, rank, True)


@pytest.mark.parametrize("shard", [-1, 2])
def test_shards_that_do_not_exist(shard: int) -> None:
    plan = split_at(ScheduledBatch([8]), 4, 2)
    with pytest.raises(LayoutError, match=f"shard {shard} does not exist; there are 2"):
        batch_shard(plan.batch, Layout(2, 0, True), shard)
    with pytest.raises(LayoutError, match="does not exist"):
        stage_shard(plan, 0, Layout(2, 0, True), shard)
