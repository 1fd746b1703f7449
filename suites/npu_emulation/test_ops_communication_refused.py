"""What MoE dispatch and combine refuse, on one rank and on all; limits and their relaxation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from afd_testkit.npu import groups
from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import relaxed
from afd_testkit.npu.ops import communication_v1 as v1
from afd_testkit.npu.ops import communication_v2 as v2
from afd_testkit.ranks import Rank, run_ranks

pytestmark = pytest.mark.cpu

X = torch.ones(2, 32).half()
IDS = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
WEIGHTS = torch.ones(2, 2)
ONE = torch.ones(1)

DISPATCH: dict[str, Any] = {
    "scales": ONE,
    "expert_scales": ONE,
    "tp_world_size": 2,
    "tp_rank_id": 1,
    "expert_shard_type": 1,
    "shared_expert_num": 2,
    "shared_expert_rank_num": 1,
    "quant_mode": 2,
    "expert_token_nums_type": 2,
}
DISPATCH_2: dict[str, Any] = {
    **DISPATCH,
    "elastic_info": ONE,
    "performance_info": ONE,
    "comm_alg": "hierarchy",
    "zero_expert_num": 1,
    "copy_expert_num": 1,
    "const_expert_num": 1,
    "y_dtype": 1,
    "x_dtype": 1,
    "scales_dtype": 1,
}
COMBINE: dict[str, Any] = {
    "expand_scales": ONE,
    "tp_world_size": 2,
    "tp_rank_id": 1,
    "expert_shard_type": 1,
    "shared_expert_num": 2,
    "shared_expert_rank_num": 1,
    "comm_quant_mode": 2,
}
COMBINE_1: dict[str, Any] = {
    **COMBINE,
    "activation_scale": ONE,
    "weight_scale": ONE,
    "group_list": ONE,
    "out_dtype": 1,
    "group_list_type": 1,
}
COMBINE_2: dict[str, Any] = {
    **COMBINE,
    "elastic_info": ONE,
    "ori_x": ONE,
    "const_expert_alpha_1": ONE,
    "const_expert_alpha_2": ONE,
    "const_expert_v": ONE,
    "performance_info": ONE,
    "comm_alg": "hierarchy",
    "zero_expert_num": 1,
    "copy_expert_num": 1,
    "const_expert_num": 1,
}


def dispatched(operator: Any, name: str = "no group", **changed: Any) -> Callable[[], object]:
    arguments = {"x": X, "expert_ids": IDS, "ep_world_size": 1, "moe_expert_num": 4, **changed}
    return lambda: operator(group_ep=name, ep_rank_id=0, **arguments)


def combined(operator: Any, name: str = "no group", **changed: Any) -> Callable[[], object]:
    version_2 = operator is v2.npu_moe_distribute_combine_v2
    origin = "assist_info_for_combine" if version_2 else "expand_idx"
    arguments = {
        "expand_x": torch.ones(4, 32).half(),
        "expert_ids": IDS,
        origin: torch.zeros(512, dtype=torch.int32),
        "ep_send_counts": torch.tensor([2, 4, 4, 4], dtype=torch.int32),
        "expert_scales": WEIGHTS,
        **changed,
    }
    return lambda: operator(
        group_ep=name, ep_world_size=1, ep_rank_id=0, moe_expert_num=4, **arguments
    )


@pytest.mark.parametrize(
    ("call", "operator", "name", "value"),
    [
        (make, operator, name, value)
        for make, operator, values in (
            (dispatched, v1.npu_moe_distribute_dispatch, DISPATCH),
            (dispatched, v2.npu_moe_distribute_dispatch_v2, DISPATCH_2),
            (combined, v1.npu_moe_distribute_combine, COMBINE_1),
            (combined, v2.npu_moe_distribute_combine_v2, COMBINE_2),
        )
        for name, value in values.items()
    ],
)
def test_what_is_not_emulated_is_named(
    call: Callable[..., Callable[[], object]], operator: Any, name: str, value: Any
) -> None:
    with pytest.raises(NotEmulated, match=f"{operator.__name__}: {name}="):
        call(operator, **{name: value})()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[str]:
    """The name of a group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield groups.hccl_comm_name(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"x": X.float()}, r"x is float32.*kind 'dtype'"),
        ({"x": torch.ones(2, 33).half()}, r"33 elements.*kind 'alignment'"),
        ({"x": torch.ones(2, 8224).half()}, r"8224 elements.*kind 'alignment'"),
        ({"x": X[:1]}, r"x has shape \[1, 32\]"),
        ({"expert_ids": IDS.long()}, "expert_ids is int64"),
        ({"expert_ids": IDS[0]}, r"expert_ids \[2\]"),
        ({"expert_ids": torch.zeros_like(IDS)}, "names one expert twice"),
        ({"x_active_mask": torch.ones(2)}, "x_active_mask is float32"),
        ({"x_active_mask": torch.ones(3, dtype=torch.bool)}, r"x_active_mask has shape \[3\]"),
        ({"x_active_mask": torch.tensor([False, True])}, r"before inactive.*kind 'layout'"),
        ({"moe_expert_num": 1025}, r"1025 experts.*kind 'layout'"),
        ({"moe_expert_num": 1}, "no expert from 0 to 0"),
        ({"ep_world_size": 2}, "told 2 ranks and to be rank 0"),
    ],
)
def test_limits_of_dispatch(alone: str, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(KernelLimit, match=says):
        dispatched(v2.npu_moe_distribute_dispatch_v2, alone, **changed)()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"x": X.int()}, "x is int32"),
        ({"x": X.double()}, "x is float64"),
        ({"expert_ids": IDS.long()}, "expert_ids is int64"),
        ({"x_active_mask": torch.ones(2)}, "x_active_mask is float32"),
    ],
)
def test_dtypes_that_no_relaxation_takes(alone: str, changed: dict[str, Any], says: str) -> None:
    with relaxed("dtype"), pytest.raises(KernelLimit, match=says):
        dispatched(v2.npu_moe_distribute_dispatch_v2, alone, **changed)()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"expand_x": torch.ones(4, 32)}, r"expand_x is float32.*kind 'dtype'"),
        ({"expert_scales": WEIGHTS.half()}, r"expert_scales is float16.*kind 'dtype'"),
        ({"shared_expert_x": X.float()}, r"shared_expert_x is float32.*kind 'dtype'"),
        ({"expert_ids": IDS[0]}, r"expert_ids has shape \[2\]"),
        ({"expert_scales": WEIGHTS[:1]}, r"expert_scales has shape \[1, 2\].*\[2, 2\]"),
        ({"expert_scales": WEIGHTS[:, :1]}, r"expert_scales has shape \[2, 1\]"),
        ({"expand_x": torch.ones(3, 32).half()}, r"expand_x has shape \[3, 32\].*the 4 rows"),
        ({"shared_expert_x": X[:1]}, r"shared_expert_x has shape \[1, 32\]"),
        ({"shared_expert_x": X.t()}, r"shared_expert_x has shape \[32, 2\]"),
        (
            {"ep_send_counts": torch.tensor([1, 2, 2, 2])},
            r"ep_send_counts are \[1, 2, 2, 2\].*give \[2, 4, 4, 4\]",
        ),
    ],
)
def test_limits_of_combine(alone: str, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(KernelLimit, match=says):
        combined(v2.npu_moe_distribute_combine_v2, alone, **changed)()


def test_shared_rows_may_have_three_axes(alone: str) -> None:
    rows, _, origin, _, counts, _, _ = v2.npu_moe_distribute_dispatch_v2(X, IDS, alone, 1, 0, 4)
    y = v2.npu_moe_distribute_combine_v2(
        rows, IDS, origin, counts, WEIGHTS, alone, 1, 0, 4, shared_expert_x=X.view(2, 1, 32)
    )
    assert y.unique().tolist() == [3.0]  # two experts that change nothing, and the shared rows


def refusal(operator: Any, *args: Any, **kwargs: Any) -> str:
    """Why the call is refused.  The error is dropped here: its frames would keep the group."""
    try:
        operator(*args, **kwargs)
    except KernelLimit as error:
        return str(error)
    raise AssertionError(f"{operator.__name__} took what it must refuse")


def refused_everywhere(place: Rank) -> list[str]:
    """The message of each call that one rank tells wrongly, as this rank sees it."""
    rank, world = place.rank, place.world_size
    x, ids = torch.ones(1, 32).half(), torch.tensor([[0, 1]], dtype=torch.int32)
    two_or_three = (2, 3)[rank]
    dispatch = v2.npu_moe_distribute_dispatch_v2
    with place.gloo() as group:
        name = groups.hccl_comm_name(group)
        del group
        messages = [
            refusal(
                dispatch,
                x.expand(tokens, 32),
                torch.tensor([chosen] * tokens, dtype=torch.int32),
                name,
                world,
                rank,
                8,
                x_active_mask=mask,
                global_bs=global_bs,
            )
            for tokens, chosen, mask, global_bs in (
                (2, [0, 9 if rank else 1], None, 0),
                (two_or_three, [0, 1], None, 0),
                (two_or_three, [0, 1], None, 5),
                (two_or_three, [0, 1], torch.ones(two_or_three, dtype=torch.bool), 6),
            )
        ]
        for told_rank, experts in ((rank, 5), (1 - rank, 8)):
            messages.append(
                refusal(v2.npu_moe_distribute_dispatch_v2, x, ids, name, world, told_rank, experts)
            )
        counts, origin = torch.full((8,), 9), torch.zeros(512, dtype=torch.int32)
        messages.append(
            refusal(
                v2.npu_moe_distribute_combine_v2,
                x.expand(4, 32),
                ids,
                origin,
                counts,
                torch.ones(1, 2),
                name,
                world,
                rank,
                8,
            )
        )
    return messages


def test_what_one_rank_tells_wrongly_is_refused_on_all() -> None:
    for messages in run_ranks(2, refused_everywhere):
        for message, says in zip(
            messages,
            (
                "[0, 2] entries of expert_ids, by rank, are no expert from 0 to 7",
                "ranks have [2, 3] tokens and global_bs is 0",
                "global_bs is 5; it must be at least the largest number times the ranks, 6",
                "ranks have [2, 3] tokens and an x_active_mask",
                "5 experts do not divide among 2 ranks",
                "told 2 ranks and to be rank",
                "ep_send_counts are [9, 9, 9, 9",
            ),
            strict=True,
        ):
            assert says in message


def relaxed_calls(place: Rank) -> list[list[int]]:
    """Counts of what arrives when each limit is relaxed."""
    rank, world = place.rank, place.world_size
    pairs = torch.tensor([[0, 1]] * 2, dtype=torch.int32)
    with place.gloo() as group, relaxed("dtype", "layout", "alignment"):
        name = groups.hccl_comm_name(group)
        del group
        return [
            v2.npu_moe_distribute_dispatch_v2(
                x, ids, name, world, rank, 8, x_active_mask=mask, global_bs=global_bs
            )[3].tolist()
            for x, ids, mask, global_bs in (
                (torch.ones(2, 32), pairs, None, 0),
                (torch.ones(2, 5).half(), pairs, None, 0),
                (torch.ones(2, 32).half(), pairs, torch.tensor([False, True]), 0),
                (
                    torch.ones(2 - rank, 32).half(),
                    pairs[rank:],
                    torch.ones(2 - rank, dtype=torch.bool),
                    4,
                ),
                (torch.ones(513, 32).half(), pairs[:1].expand(513, 2), None, 0),
            )
        ]


def test_relaxed_limits_let_the_exchange_happen() -> None:
    first, second = run_ranks(2, relaxed_calls)
    assert first == [[4, 4, 0, 0], [4, 4, 0, 0], [2, 2, 0, 0], [3, 3, 0, 0], [1026, 1026, 0, 0]]
    assert second == [[0, 0, 0, 0]] * 5
