"""MoE dispatch and combine, version 1: version 2 with another way to say where a row came from."""

from __future__ import annotations

import torch

from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import emulated_only
from afd_testkit.npu.ops.communication_experts import (
    COUNT,
    CUMSUM,
    Dispatched,
    Place,
    combine,
    dispatch,
    refuse_shared,
    unless_empty,
)
from afd_testkit.npu.ops.communication_v2 import SOURCE


@operator(
    "torch_npu.npu_moe_distribute_dispatch",
    "npu_moe_distribute_dispatch(Tensor x, Tensor expert_ids, str group_ep, int ep_world_size,"
    " int ep_rank_id, int moe_expert_num, *, Tensor? scales=None, Tensor? x_active_mask=None,"
    ' Tensor? expert_scales=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0,'
    " int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0,"
    " int quant_mode=0, int global_bs=0, int expert_token_nums_type=1)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    source=SOURCE,
)
def npu_moe_distribute_dispatch(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> Dispatched:
    """As ``npu_moe_distribute_dispatch_v2``, but for result 2.

    It is int32 and holds, for each of this rank's own pairs (token, place), its number among
    those that go to the same expert.
    """
    name = "npu_moe_distribute_dispatch"
    emulated_only(
        name,
        scales=(scales, (None,)),
        expert_scales=(expert_scales, (None,)),
        quant_mode=(quant_mode, (0,)),
        expert_token_nums_type=(expert_token_nums_type, (CUMSUM, COUNT)),
    )
    refuse_shared(
        name,
        tp_world_size=tp_world_size,
        tp_rank_id=tp_rank_id,
        expert_shard_type=expert_shard_type,
        shared_expert_num=shared_expert_num,
        shared_expert_rank_num=shared_expert_rank_num,
    )
    return dispatch(
        Place(name, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs),
        x,
        expert_ids,
        x_active_mask,
        expert_token_nums_type=expert_token_nums_type,
        tp_world_size=tp_world_size,
        triples=False,
    )


@operator(
    "torch_npu.npu_moe_distribute_combine",
    "npu_moe_distribute_combine(Tensor expand_x, Tensor expert_ids, Tensor expand_idx,"
    " Tensor ep_send_counts, Tensor expert_scales, str group_ep, int ep_world_size,"
    " int ep_rank_id, int moe_expert_num, *, Tensor? tp_send_counts=None,"
    " Tensor? x_active_mask=None, Tensor? activation_scale=None, Tensor? weight_scale=None,"
    " Tensor? group_list=None, Tensor? expand_scales=None, Tensor? shared_expert_x=None,"
    ' str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0,'
    " int shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0, int out_dtype=0,"
    " int comm_quant_mode=0, int group_list_type=0) -> Tensor",
    source=SOURCE,
)
def npu_moe_distribute_combine(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    expand_idx: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    group_list: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    out_dtype: int = 0,
    comm_quant_mode: int = 0,
    group_list_type: int = 0,
) -> torch.Tensor:
    """As ``npu_moe_distribute_combine_v2``; ``expand_idx`` is version 1's result 2 of dispatch.

    Not emulated besides: ``activation_scale``, ``weight_scale``, ``group_list``, ``out_dtype``.
    """
    name = "npu_moe_distribute_combine"
    emulated_only(
        name,
        activation_scale=(activation_scale, (None,)),
        weight_scale=(weight_scale, (None,)),
        group_list=(group_list, (None,)),
        expand_scales=(unless_empty(expand_scales), (None,)),
        out_dtype=(out_dtype, (0,)),
        comm_quant_mode=(comm_quant_mode, (0,)),
        group_list_type=(group_list_type, (0,)),
    )
    refuse_shared(
        name,
        tp_world_size=tp_world_size,
        tp_rank_id=tp_rank_id,
        expert_shard_type=expert_shard_type,
        shared_expert_num=shared_expert_num,
        shared_expert_rank_num=shared_expert_rank_num,
    )
    return combine(
        Place(name, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs),
        expand_x,
        expert_ids,
        x_active_mask,
        ep_send_counts,
        expert_scales,
        shared_expert_x,
        expand_idx,
        triples=False,
    )
