"""G1: ranks with and without routed rows, with and without rows for the shared expert.

Four ranks have (routed, shared) rows (2, 2), (2, 0), (0, 2) and (0, 0), in fp16 and with every
limit in force.  Rows hold small whole numbers and weights powers of two, so that fp16 is exact
and what is expected follows from lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from afd_testkit.npu import groups
from afd_testkit.npu.limits import relaxed_kinds
from afd_testkit.npu.ops.communication_v1 import (
    npu_moe_distribute_combine,
    npu_moe_distribute_dispatch,
)
from afd_testkit.npu.ops.communication_v2 import (
    npu_moe_distribute_combine_v2,
    npu_moe_distribute_dispatch_v2,
)
from afd_testkit.npu.ops.moe_finalize import npu_moe_finalize_routing
from afd_testkit.npu.ops.moe_gating import moe_gating_top_k
from afd_testkit.npu.ops.moe_matmul import npu_grouped_matmul
from afd_testkit.npu.ops.moe_rows import (
    npu_moe_init_routing_custom,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
)
from afd_testkit.npu.ops.norm import npu_rms_norm, npu_swiglu
from afd_testkit.ranks import Rank, RanksFailed, run_ranks

pytestmark = pytest.mark.cpu

ROWS = ((2, 2), (2, 0), (0, 2), (0, 0))  # routed and shared, by rank
WORLD, EXPERTS, HIDDEN, TOP_K = len(ROWS), 8, 32, 2
HALF = torch.float16
# The experts that every token chooses: of the ranks without routed rows, of those with, of both.
CHOICES = {"idle": (7, 4), "busy": (0, 3), "both": (1, 6)}
WEIGHTS = (0.5, 0.25)
VERSIONS = {
    1: (npu_moe_distribute_dispatch, npu_moe_distribute_combine),
    2: (npu_moe_distribute_dispatch_v2, npu_moe_distribute_combine_v2),
}


@dataclass(frozen=True)
class Result:
    """What one rank has after one layer; ``received``: routed rows of its own experts."""

    routed: torch.Tensor
    shared: torch.Tensor
    received: list[int]


def values(rank: int, rows: int) -> torch.Tensor:
    """Row t of rank r holds 4 r + t + 1."""
    return (torch.arange(rows) + 4.0 * rank + 1).unsqueeze(1).expand(rows, HIDDEN).to(HALF)


def diagonal(*factors: int) -> torch.Tensor:
    """One weight an expert, which multiplies by its factor."""
    return torch.stack([torch.eye(HIDDEN, dtype=HALF) * factor for factor in factors])


def grouped(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    (product,) = npu_grouped_matmul(
        [rows], [weights], group_list=counts, group_list_type=1, group_type=0, split_item=2
    )
    return product


def layer(place: Rank, group: str, choice: str, version: int) -> Result:
    """Routed rows through dispatch, grouped product and combine; shared rows on their rank."""
    routed, shared = ROWS[place.rank]
    ids = torch.tensor(CHOICES[choice], dtype=torch.int32).repeat(routed, 1)
    arguments = {
        "group_ep": group,
        "ep_world_size": WORLD,
        "ep_rank_id": place.rank,
        "moe_expert_num": EXPERTS,
        "global_bs": 2 * WORLD,
        "group_tp": group,
        "tp_world_size": 1,
    }
    dispatch, combine = VERSIONS[version]
    rows, _, origin, counts, sent, tp_counts, _ = dispatch(  # type: ignore[operator]
        values(place.rank, routed), ids, expert_token_nums_type=1, **arguments
    )
    first = place.rank * EXPERTS // WORLD
    computed = grouped(rows, counts, diagonal(first + 1, first + 2))
    scales = torch.tensor(WEIGHTS).repeat(routed, 1)
    y = combine(  # type: ignore[operator]
        computed, ids, origin, sent, scales, tp_send_counts=tp_counts, **arguments
    )
    own = torch.tensor([shared])
    return Result(y, grouped(values(place.rank, shared), own, diagonal(3)), counts.tolist())


def layers(place: Rank, left_out: int | None = None) -> dict[tuple[str, int], Result]:
    with place.gloo() as group:
        name = groups.hccl_comm_name(group)
        del group
        if place.rank == left_out:
            return {}
        return {
            (choice, version): layer(place, name, choice, version)
            for choice in CHOICES
            for version in VERSIONS
        }


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, int], Result]]:
    assert not relaxed_kinds()
    return run_ranks(WORLD, layers, timeout=120.0)


@pytest.mark.parametrize("version", list(VERSIONS))
@pytest.mark.parametrize("choice", list(CHOICES))
def test_g1_every_rank_joins_and_gets_its_own_rows_back(
    ranks: list[dict[tuple[str, int], Result]], choice: str, version: int
) -> None:
    routed_anywhere = sum(routed for routed, _ in ROWS)
    for rank, (routed, shared) in enumerate(ROWS):
        got = ranks[rank][choice, version]
        assert (got.routed.shape, got.routed.dtype) == ((routed, HIDDEN), HALF)
        assert (got.shared.shape, got.shared.dtype) == ((shared, HIDDEN), HALF)
        factor = sum(
            weight * (expert + 1) for weight, expert in zip(WEIGHTS, CHOICES[choice], strict=True)
        )
        for token in range(routed):
            assert got.routed[token].tolist() == [(4 * rank + token + 1) * factor] * HIDDEN
        for token in range(shared):
            assert got.shared[token].tolist() == [(4 * rank + token + 1) * 3.0] * HIDDEN
        # An idle rank still computes for the others.
        assert got.received == [
            routed_anywhere if expert in CHOICES[choice] else 0
            for expert in (2 * rank, 2 * rank + 1)
        ]


def test_g1_a_rank_that_stays_away_is_an_error_not_a_result() -> None:
    """The other ranks wait for the idle one: what (0, 0) does in the exchange is not nothing."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(WORLD, layers, 3, timeout=60.0)
    assert failed.value.results.keys() <= {3}
    assert {failure.rank for failure in failed.value.failures} >= {0, 1, 2}


def test_g1_empty_in_is_empty_out_of_every_operator_on_the_way() -> None:
    x, ids = torch.empty(0, HIDDEN, dtype=HALF), torch.empty(0, TOP_K, dtype=torch.int32)
    weights, experts, _ = moe_gating_top_k(
        torch.empty(0, EXPERTS, dtype=HALF), TOP_K, 1, 1, 0, 0, 0, False, 1.0, 1e-20
    )
    assert (weights.shape, weights.dtype) == ((0, TOP_K), HALF)
    assert (experts.shape, experts.dtype) == ((0, TOP_K), torch.int32)
    copies, places, counts, _ = npu_moe_init_routing_custom(
        x,
        ids,
        expert_num=EXPERTS,
        quant_mode=-1,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
    )
    assert (copies.shape, copies.dtype) == ((0, HIDDEN), HALF)
    assert (places.shape, places.dtype) == ((0,), torch.int32)
    assert counts.tolist() == [0] * EXPERTS
    product = grouped(copies, counts, diagonal(*range(EXPERTS)))
    assert (product.shape, product.dtype) == ((0, HIDDEN), HALF)
    halved = npu_swiglu(product)
    assert (halved.shape, halved.dtype) == ((0, HIDDEN // 2), HALF)
    normed, rstd = npu_rms_norm(x, torch.ones(HIDDEN, dtype=HALF))
    assert (normed.shape, normed.dtype) == ((0, HIDDEN), HALF)
    assert (rstd.shape, rstd.dtype) == ((0, 1), torch.float32)
    permuted, index = npu_moe_token_permute(x, ids)
    assert (permuted.shape, permuted.dtype) == ((0, HIDDEN), HALF)
    scales = torch.empty(0, TOP_K, dtype=HALF)
    for result in (
        npu_moe_token_unpermute(permuted, index, scales),
        npu_moe_finalize_routing(permuted, x, None, None, scales, index, None),
    ):
        assert (result.shape, result.dtype) == ((0, HIDDEN), HALF)
