"""MoE dispatch and combine on gloo with 2 and 4 ranks, against the same exchange done with lists.

All calls of one world run in one set of processes; each test looks at one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from afd_testkit.npu import groups
from afd_testkit.npu.ops.communication_v1 import (
    npu_moe_distribute_combine,
    npu_moe_distribute_dispatch,
)
from afd_testkit.npu.ops.communication_v2 import (
    npu_moe_distribute_combine_v2,
    npu_moe_distribute_dispatch_v2,
)
from afd_testkit.ranks import Rank, run_ranks

pytestmark = pytest.mark.cpu

EXPERTS, HIDDEN, TOP_K = 8, 32, 2
CUMSUM, COUNT = 0, 1


@dataclass(frozen=True)
class Call:
    """One dispatch and combine.

    ``tokens``: of each rank, in turn.  ``favoured``: the experts that every token chooses.
    ``active``: of a rank, how many of its tokens take part, or "pairs" for a mask of pairs.
    """

    version: int = 2
    tokens: tuple[int, ...] = (3,)
    favoured: tuple[int, ...] | None = None
    active: int | str | None = None
    nums_type: int = COUNT
    shared: bool = False
    algorithm: str = ""

    def tokens_of(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]

    def global_bs(self, world: int) -> int:
        return 0 if len(set(self.tokens)) == 1 else max(self.tokens) * world

    def ids(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + rank)
        rows = [
            self.favoured or torch.randperm(EXPERTS, generator=generator)[:TOP_K].tolist()
            for _ in range(self.tokens_of(rank))
        ]
        return torch.tensor(rows, dtype=torch.int32).view(len(rows), TOP_K)

    def x(self, rank: int) -> torch.Tensor:
        """Rows that tell where they come from, exact in fp16."""
        numbers = torch.arange(self.tokens_of(rank)) + 16.0 * rank + 1
        return numbers.unsqueeze(1).expand(-1, HIDDEN).half()

    def weights(self, rank: int) -> torch.Tensor:
        """Powers of two, so that sums are exact; of pairs that take no part, no number."""
        shape = self.tokens_of(rank), TOP_K
        weights = torch.full(shape, float("nan"))
        for _, token, place in self.pairs(rank):
            weights[token, place] = 2.0 ** -((token * TOP_K + place) % 3)
        return weights

    def shared_x(self, rank: int) -> torch.Tensor | None:
        return self.x(rank) * 2 if self.shared else None

    def mask(self, rank: int) -> torch.Tensor | None:
        if self.active is None:
            return None
        tokens = self.tokens_of(rank)
        if self.active == "pairs":
            return (torch.arange(tokens * TOP_K) % 3 != 1).view(tokens, TOP_K)
        return torch.arange(tokens) < int(self.active)

    def pairs(self, rank: int) -> list[tuple[int, int, int]]:
        """(expert, token, place) of each pair that takes part."""
        mask = self.mask(rank)
        return [
            (expert, token, place)
            for token, row in enumerate(self.ids(rank).tolist())
            for place, expert in enumerate(row)
            if mask is None or (mask[token, place] if mask.dim() == 2 else mask[token])
        ]

    def arriving(self, rank: int, world: int) -> list[list[list[int]]]:
        """For each local expert and source rank, the tokens that arrive, in order."""
        local = EXPERTS // world
        return [
            [
                [token for chosen, token, _ in self.pairs(source) if chosen == expert]
                for source in range(world)
            ]
            for expert in range(rank * local, (rank + 1) * local)
        ]


CALLS = {
    "equal": Call(),
    "version 1": Call(version=1),
    "cumulated": Call(nums_type=CUMSUM),
    "unequal": Call(tokens=(2, 5)),
    "unequal, version 1": Call(version=1, tokens=(2, 5)),
    "one rank without tokens": Call(tokens=(3, 0)),
    "one rank without tokens, version 1": Call(version=1, tokens=(0, 3)),
    "no tokens at all": Call(tokens=(0,)),
    "two experts get all": Call(favoured=(1, 0)),
    "the last expert's rank gets half": Call(version=1, favoured=(7, 0)),
    "first tokens active": Call(tokens=(4,), active=2),
    "first tokens active, version 1": Call(version=1, tokens=(4,), active=2),
    "no token active": Call(active=0),
    "some pairs active": Call(tokens=(4,), active="pairs"),
    "shared experts": Call(shared=True),
    "shared experts without routed rows": Call(tokens=(0,), shared=True),
    "fullmesh": Call(algorithm="fullmesh"),
}


def computed(call: Call, expand_x: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """What the experts make of the rows that dispatch gave: expert e multiplies by e + 1."""
    result = torch.full_like(expand_x, float("nan"))
    begin, local = 0, EXPERTS // world
    for expert, sources in enumerate(call.arriving(rank, world)):
        end = begin + sum(len(tokens) for tokens in sources)
        result[begin:end] = expand_x[begin:end] * (rank * local + expert + 1)
        begin = end
    return result


def exchanged(call: Call, place: Rank, name: str) -> dict[str, torch.Tensor]:
    rank, world = place.rank, place.world_size
    group: dict[str, Any] = {
        "group_ep": name,
        "ep_world_size": world,
        "ep_rank_id": rank,
        "moe_expert_num": EXPERTS,
        "x_active_mask": call.mask(rank),
        "global_bs": call.global_bs(world),
        "group_tp": name,
        "tp_world_size": 1,
    }
    dispatch: Any = npu_moe_distribute_dispatch
    combine: Any = npu_moe_distribute_combine
    if call.version == 2:
        dispatch, combine = npu_moe_distribute_dispatch_v2, npu_moe_distribute_combine_v2
        group["comm_alg"] = call.algorithm
    rows, scales, origin, nums, counts, tp_counts, expand_scales = dispatch(
        call.x(rank), call.ids(rank), expert_token_nums_type=call.nums_type, **group
    )
    y = combine(
        computed(call, rows, rank, world),
        call.ids(rank),
        origin,
        counts,
        call.weights(rank),
        tp_send_counts=tp_counts,
        expand_scales=expand_scales,
        shared_expert_x=call.shared_x(rank),
        **group,
    )
    return {
        "rows": rows,
        "scales": scales,
        "origin": origin,
        "nums": nums,
        "counts": counts,
        "tp_counts": tp_counts,
        "expand_scales": expand_scales,
        "y": y,
    }


def every_call(place: Rank) -> dict[str, dict[str, torch.Tensor]]:
    with place.gloo() as group:
        name = groups.hccl_comm_name(group)
        del group
        return {title: exchanged(call, place, name) for title, call in CALLS.items()}


@pytest.fixture(scope="module", params=[2, 4])
def worlds(request: pytest.FixtureRequest) -> list[dict[str, dict[str, torch.Tensor]]]:
    return run_ranks(request.param, every_call, timeout=120.0)


EVERY_CALL = pytest.mark.parametrize("title", list(CALLS))


@EVERY_CALL
def test_rows_arrive_by_expert_source_and_order(
    worlds: list[dict[str, dict[str, torch.Tensor]]], title: str
) -> None:
    call, world = CALLS[title], len(worlds)
    for rank, results in enumerate(worlds):
        got = results[title]
        expected = [
            call.x(source)[token].tolist()
            for sources in call.arriving(rank, world)
            for source, tokens in enumerate(sources)
            for token in tokens
        ]
        assert got["rows"][: len(expected)].tolist() == expected
        assert got["rows"].dtype == torch.float16
        most = call.global_bs(world) or call.tokens_of(rank) * world
        capacity = most * min(EXPERTS // world, TOP_K)
        assert got["rows"].shape == (capacity, HIDDEN)
        assert got["scales"].shape == (capacity,)
        assert got["origin"].shape == (max(call.tokens_of(rank) * TOP_K, capacity * 128),)
        assert got["expand_scales"].shape == (0,)


@EVERY_CALL
def test_counts_say_what_arrived(
    worlds: list[dict[str, dict[str, torch.Tensor]]], title: str
) -> None:
    call, world = CALLS[title], len(worlds)
    for rank, results in enumerate(worlds):
        got = results[title]
        counts = [[len(tokens) for tokens in e] for e in call.arriving(rank, world)]
        of_expert = [sum(sources) for sources in counts]
        if call.nums_type == CUMSUM:
            of_expert = [sum(of_expert[: i + 1]) for i in range(len(of_expert))]
        assert got["nums"].tolist() == of_expert
        assert got["nums"].dtype == torch.int64
        flat = [count for sources in counts for count in sources]
        assert got["counts"].tolist() == [sum(flat[: i + 1]) for i in range(len(flat))]
        assert got["counts"].dtype == torch.int32
        assert got["tp_counts"].tolist() == [sum(flat)]


@EVERY_CALL
def test_combine_weighs_and_adds_each_tokens_experts(
    worlds: list[dict[str, dict[str, torch.Tensor]]], title: str
) -> None:
    call = CALLS[title]
    for rank, results in enumerate(worlds):
        y, x, weights = results[title]["y"], call.x(rank), call.weights(rank)
        assert (y.shape, y.dtype) == (x.shape, torch.float16)
        expected = {}
        for expert, token, place in call.pairs(rank):
            part = weights[token, place].item() * x[token, 0].item() * (expert + 1)
            expected[token] = expected.get(token, 0.0) + part
        for token in range(call.tokens_of(rank)):
            if token in expected:
                shared = call.shared_x(rank)
                exact = expected[token] + (0.0 if shared is None else shared[token, 0].item())
                assert y[token].tolist() == [torch.tensor(exact).half().item()] * HIDDEN
            else:  # undefined: finite, and nothing that could be taken for a result
                assert y[token].unique().tolist() == [97.0]


@pytest.mark.parametrize("title", [title for title, call in CALLS.items() if call.version == 2])
def test_version_2_tells_rank_token_and_place_of_each_row(
    worlds: list[dict[str, dict[str, torch.Tensor]]], title: str
) -> None:
    call, world = CALLS[title], len(worlds)
    for rank, results in enumerate(worlds):
        local = EXPERTS // world
        expected = [
            [source, token, place]
            for expert in range(rank * local, (rank + 1) * local)
            for source in range(world)
            for chosen, token, place in call.pairs(source)
            if chosen == expert
        ]
        origin = results[title]["origin"][: 3 * len(expected)]
        assert origin.view(-1, 3).tolist() == expected


@pytest.mark.parametrize("title", [title for title, call in CALLS.items() if call.version == 1])
def test_version_1_numbers_each_pair_among_those_of_its_expert(
    worlds: list[dict[str, dict[str, torch.Tensor]]], title: str
) -> None:
    call = CALLS[title]
    for rank, results in enumerate(worlds):
        seen = [0] * EXPERTS
        for expert, token, place in call.pairs(rank):
            assert results[title]["origin"][token * TOP_K + place].item() == seen[expert]
            seen[expert] += 1
