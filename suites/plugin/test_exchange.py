"""The exchange between shards on real gloo ranks, with token ids as payload."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from afd_plugin import ScheduledBatch, merge_stage_outputs, slice_stage_inputs, split_at
from afd_plugin.errors import LayoutError, StageTensorError
from afd_plugin.exchange import ShardExchange
from afd_plugin.layout import Layout
from afd_plugin.stage_inputs import TOKEN_AXIS
from afd_testkit.ranks import Rank, run_ranks

pytestmark = pytest.mark.cpu

JUNK = -7  # what padding rows hold before; it must never arrive anywhere
HIDDEN = 3


class Case(NamedTuple):
    """Scheduled tokens, the cut, and the padded extent of the step."""

    scheduled: list[int]
    cut: int
    extent: int | None = None


CASES = [
    Case([8], 2),  # D1
    Case([8], 4),
    Case([5], 3),  # odd
    Case([37], 19),
    Case([3, 200, 17], 110),  # A1's step, cut inside a request
    Case([105], 56),  # C1
    Case([1, 1068], 534),  # C2
    Case([38, 2], 20, 112),  # D2
    Case([1, 1], 1),  # two stages of one token
    Case([2], 1, 64),
    Case([40], 1),  # a stage of one token beside a long one
    Case([40], 39, 48),
    Case([7, 9], 7),  # a request boundary that no rank's shard begins at
]


def shards(tokens: range, extent: int, ranks: int, junk: int) -> list[list[int]]:
    """The definition: real tokens, then padding up to a multiple of the ranks, in equal pieces."""
    rows = [*tokens, *[junk] * (extent - len(tokens))]
    rows += [junk] * (-len(rows) % ranks)
    each = len(rows) // ranks
    return [rows[rank * each : (rank + 1) * each] for rank in range(ranks)]


def before(case: Case, ranks: int, junk: int = JUNK) -> list[list[int]]:
    total = sum(case.scheduled)
    return shards(range(total), case.extent or total, ranks, junk)


def after(case: Case, ranks: int) -> list[list[list[int]]]:
    """By stage and rank; padding is zero."""
    total = sum(case.scheduled)
    stages = (range(case.cut), range(case.cut, total))
    return [shards(tokens, len(tokens), ranks, 0) for tokens in stages]


def wide(ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """[rows, HIDDEN] of one id a row, in another multiple in each column; zeros stay zeros."""
    column = torch.tensor(ids).reshape(-1, 1)
    return (column * torch.tensor([1, 2, 3])).to(dtype)


def there_and_back(rank: Rank, dtype: torch.dtype) -> list[Any]:
    """For each case: whether the shards are right, and the rows given to all-to-all."""
    real, sent = dist.all_to_all_single, 0

    def counting(output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += given.nbytes
        return real(output, given, *args, **kwargs)

    said: list[Any] = []
    with rank.gloo() as group:
        dist.all_to_all_single = counting
        try:
            for case in CASES:
                sent = 0
                batch = ScheduledBatch(case.scheduled, num_input_tokens=case.extent)
                plan = split_at(batch, case.cut, rank.world_size)
                exchange = ShardExchange(plan, Layout(rank.world_size, rank.rank, True), group)
                given = wide(before(case, rank.world_size)[rank.rank], dtype)
                untouched = given.clone()
                stages = exchange.to_stages(given)
                back = exchange.to_batch(*stages)
                same = torch.equal(given, untouched)
                ids = [piece[:, 0].long().tolist() for piece in (*stages, back)]
                for piece, column in zip((*stages, back), ids, strict=True):
                    same &= torch.equal(piece, wide(column, dtype))
                said.append((same, ids, sent))
        finally:
            dist.all_to_all_single = real
    return said


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, torch.float32), (4, torch.bfloat16), (8, torch.int64)]
)
def test_token_ids_arrive_and_return(ranks: int, dtype: torch.dtype) -> None:
    cases = [case for case in CASES if dtype != torch.bfloat16 or sum(case.scheduled) <= 85]
    everyone = run_ranks(ranks, there_and_back, dtype, timeout=120)
    size = HIDDEN * torch.empty((), dtype=dtype).element_size()
    for index, case in enumerate(CASES):
        if case not in cases:  # beyond the whole numbers that the type has
            continue
        start, goal = before(case, ranks, junk=0), after(case, ranks)
        moved = 0
        for rank in range(ranks):
            same, (first, second, back), sent = everyone[rank][index]
            assert same, (case, rank)
            assert first == goal[0][rank], (case, rank)
            assert second == goal[1][rank], (case, rank)
            assert back == start[rank], (case, rank)  # padding rows come back as zeros
            moved += sent
        home = {token: r for r, rows in enumerate(before(case, ranks)) for token in rows}
        away = {
            token: r
            for stage, tokens in enumerate((range(case.cut), range(case.cut, sum(case.scheduled))))
            for r, rows in enumerate(shards(tokens, len(tokens), ranks, JUNK))
            for token in rows
        }
        change = sum(home[t] != away[t] for t in range(sum(case.scheduled)))
        assert moved == 2 * change * size, case  # there and back, and not a row more


def model_inputs(rank: Rank) -> list[Any]:
    """Slice and merge a step of 9 tokens in 10 rows, cut at 4, on 2 ranks; 3 columns of ids."""
    ids = list(range(1, 10))
    mine = [ids[:5], [*ids[5:], JUNK]][rank.rank]
    plan = split_at(ScheduledBatch([5, 4]), 4, 2)
    local = {
        "positions": TOKEN_AXIS["positions"]._replace(place="local"),
        "llama_4_scaling": TOKEN_AXIS["llama_4_scaling"]._replace(axis=1, place="local"),
    }
    with rank.gloo() as group:
        exchange = ShardExchange(plan, Layout(2, rank.rank, True), group)
        said = []
        for declared, positions, scaling in [
            (None, torch.tensor(ids), torch.tensor(ids).reshape(-1, 1)),
            (None, torch.tensor([ids, ids]), torch.tensor(ids).reshape(-1, 1, 1)),
            (local, torch.tensor(mine), torch.tensor([mine])),
            (local, torch.tensor([mine, mine]), torch.tensor([mine, mine])),
        ]:
            inputs = {
                "hidden_states": wide(mine, torch.float32),
                "residual": wide(mine, torch.float64),
                "positions": positions,
                "llama_4_scaling": scaling,
                "input_ids": None,
            }
            stages = slice_stage_inputs(plan, exchange=exchange, declared=declared, **inputs)
            merged = merge_stage_outputs(plan, stages, exchange=exchange, declared=declared)
            said.append((stages, merged))
        pair = [(stage["hidden_states"], stage["residual"]) for stage in stages]
        said.append(merge_stage_outputs(plan, pair, exchange=exchange))
    return said


def test_inputs_under_sequence_parallelism() -> None:
    everyone = run_ranks(2, model_inputs)
    # Stage 0 has tokens 1-4 in 4 rows, stage 1 tokens 5-9 in 6 rows.
    local = [[[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 0]]]
    whole = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 0]]
    step = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    for rank, said in enumerate(everyone):
        for stages, merged in said[:4]:
            for stage, values in enumerate(stages):
                mine = local[stage][rank]
                assert torch.equal(values["hidden_states"], wide(mine, torch.float32))
                assert torch.equal(values["residual"], wide(mine, torch.float64))
                assert values["input_ids"] is None
            assert torch.equal(merged["hidden_states"], wide(step[rank], torch.float32))
            assert torch.equal(merged["residual"], wide(step[rank], torch.float64))
        for stage in (0, 1):
            full, mine = whole[stage], local[stage][rank]
            one_d, two_d, one_local, two_local = (case[0][stage] for case in said[:4])
            assert one_d["positions"].tolist() == full
            assert one_d["llama_4_scaling"].tolist() == [[token] for token in full]
            assert two_d["positions"].tolist() == [full, full]
            assert two_d["llama_4_scaling"].tolist() == [[[token]] for token in full]
            assert one_local["positions"].tolist() == mine
            assert one_local["llama_4_scaling"].tolist() == [mine]
            assert two_local["positions"].tolist() == [mine, mine]
            assert two_local["llama_4_scaling"].tolist() == [mine, mine]
        assert said[0][1]["positions"].tolist() == list(range(1, 10))
        assert said[3][1]["positions"].tolist() == [step[rank]] * 2
        assert said[3][1]["llama_4_scaling"].tolist() == [step[rank]] * 2
        hidden, residual = said[4]
        assert torch.equal(hidden, wide(step[rank], torch.float32))
        assert torch.equal(residual, wide(step[rank], torch.float64))


def nothing_to_move(rank: Rank) -> list[Any]:
    """Two stages of one token on rank 0, before and after; rank 1 has padding only."""
    plan = split_at(ScheduledBatch([2], num_input_tokens=8), 1, 2)
    with rank.gloo() as group:
        exchange = ShardExchange(plan, Layout(2, rank.rank, True), group)
        # Only rank 0 asks: were there a collective, it would never return.
        if rank.rank == 1:
            dist.barrier()
            return []
        pair = exchange.to_stages(torch.tensor([5, 6, JUNK, JUNK]))
        dist.barrier()
        return [piece.tolist() for piece in pair]


def test_without_a_row_to_move_nobody_communicates() -> None:
    assert run_ranks(2, nothing_to_move, timeout=40) == [[[5], [6]], []]


def wrong_group(rank: Rank) -> list[str]:
    plan = split_at(ScheduledBatch([8]), 4, 4)
    said = []
    with rank.gloo() as group:
        for layout in (Layout(4, rank.rank, True), Layout(2, 1 - rank.rank, True)):
            with pytest.raises(LayoutError) as caught:
                ShardExchange(plan, layout, group)
            said.append(str(caught.value))
    return said


def test_a_layout_of_another_group_is_refused() -> None:
    first, _ = run_ranks(2, wrong_group)
    assert "rank 0 of 4, and the process group says rank 0 of 2" in first[0]
    assert "rank 1 of 2, and the process group says rank 0 of 2" in first[1]


PLAN = split_at(ScheduledBatch([5, 4], num_input_tokens=11), 4)


def whole() -> ShardExchange:
    return ShardExchange(PLAN, Layout(4, 2, False))


def test_not_sharded_is_the_plain_slice() -> None:
    ids = torch.tensor([*range(9), JUNK, JUNK])
    first, second = whole().to_stages(ids)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7, 8])
    assert whole().to_batch(first, second).tolist() == [*range(9), 0, 0]
    hidden = wide(list(range(9)), torch.float32)
    plain = slice_stage_inputs(PLAN, hidden_states=hidden)
    with_layout = slice_stage_inputs(PLAN, exchange=whole(), hidden_states=hidden)
    for one, other in zip(plain, with_layout, strict=True):
        assert torch.equal(one["hidden_states"], other["hidden_states"])
    outputs = [stage["hidden_states"] for stage in plain]
    merged = merge_stage_outputs(PLAN, outputs, exchange=whole())
    assert torch.equal(merged, merge_stage_outputs(PLAN, outputs))


def test_a_sharded_layout_needs_a_group() -> None:
    plan = split_at(ScheduledBatch([8]), 4, 2)
    with pytest.raises(LayoutError, match="sharded over 2 ranks and no process group is given"):
        ShardExchange(plan, Layout(2, 0, True))
    ShardExchange(plan, Layout(1, 0, True))  # one rank shares with nobody


@pytest.mark.parametrize(
    ("tensor", "axis", "said"),
    [
        (
            torch.zeros(10),
            0,
            r"shape \(10,\); axis 0 must hold the 11 rows of rank 2 of 4 \(9 real",
        ),
        (torch.zeros(11, 3), 1, "axis 1 must hold the 11 rows"),
        (torch.zeros(11), 1, "must be a tensor with tokens on axis 1"),
        ([1, 2], 0, "is list; it must be a tensor"),
    ],
)
def test_wrong_shards_are_refused(tensor: Any, axis: int, said: str) -> None:
    with pytest.raises(StageTensorError, match=said):
        whole().to_stages(tensor, axis)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ((torch.zeros(5), torch.zeros(5)), r"out of stage 0 has shape \(5,\)"),
        ((torch.zeros(4), torch.zeros(6)), r"out of stage 1 has shape \(6,\)"),
        ((torch.zeros(4), None), "out of stage 1 is NoneType"),
        ((torch.zeros(4), torch.zeros(5).int()), "out is .*float32.* in stage 0 and .*int32"),
        ((torch.zeros(4, 2), torch.zeros(5, 3)), r"all axes but axis 0 must agree"),
    ],
)
def test_wrong_stages_are_refused(pair: Any, said: str) -> None:
    with pytest.raises(StageTensorError, match=said):
        whole().to_batch(*pair, 0, "out")


@pytest.mark.parametrize("other", [split_at(PLAN.batch, 5), split_at(ScheduledBatch([9]), 4)])
def test_an_exchange_of_another_plan_is_refused(other: Any) -> None:
    with pytest.raises(StageTensorError, match="make an exchange for each step's plan"):
        slice_stage_inputs(other, exchange=whole(), positions=torch.arange(9))
    with pytest.raises(StageTensorError, match="make an exchange for each step's plan"):
        merge_stage_outputs(other, [torch.zeros(5), torch.zeros(4)], exchange=whole())


def refuse_before_sending(rank: Rank) -> str:
    """Each input that is fine would be sent; the one that is not stands last."""
    plan = split_at(ScheduledBatch([8]), 4, 2)
    with rank.gloo() as group:
        exchange = ShardExchange(plan, Layout(2, rank.rank, True), group)
        dist.all_to_all_single = None  # any use is an error of another type
        with pytest.raises(StageTensorError) as caught:
            slice_stage_inputs(
                plan,
                exchange=exchange,
                hidden_states=torch.zeros(4, HIDDEN),
                residual=torch.zeros(8, HIDDEN),
            )
    return str(caught.value)


def test_all_inputs_are_checked_before_one_is_sent() -> None:
    for rank, said in enumerate(run_ranks(2, refuse_before_sending)):
        assert said.startswith("residual has shape (8, 3); axis 0 must hold the 4 rows")
        assert f"rank {rank} of 2" in said
        assert "declare it global" in said
