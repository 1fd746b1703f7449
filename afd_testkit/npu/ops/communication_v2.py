"""MoE dispatch and combine, version 2: what vLLM-Ascend calls where torch_npu has it."""

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

SOURCE = (
    "torch_npu 2.10.0 shape functions and schemas; op-plugin operator documentation;"
    " vllm-ascend 0.23.0 ops/fused_moe/token_dispatcher.py"
)
_ALGORITHMS = ("", "fullmesh", "fullmesh_v1")


@operator(
    "torch_npu.npu_moe_distribute_dispatch_v2",
    "npu_moe_distribute_dispatch_v2(Tensor x, Tensor expert_ids, str group_ep,"
    " int ep_world_size, int ep_rank_id, int moe_expert_num, *, Tensor? scales=None,"
    " Tensor? x_active_mask=None, Tensor? expert_scales=None, Tensor? elastic_info=None,"
    ' Tensor? performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0,'
    " int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0,"
    " int quant_mode=0, int global_bs=0, int expert_token_nums_type=1,"
    ' str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0,'
    " int? y_dtype=None, int? x_dtype=None, int? scales_dtype=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    source=SOURCE,
)
def npu_moe_distribute_dispatch_v2(
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
    elastic_info: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> Dispatched:
    """Send each token to the ranks of its K experts.

    ``x``: ``[BS, H]``, fp16 or bf16, H a multiple of 32; ``expert_ids``: int32 ``[BS, K]``, K
    different experts a row; ``x_active_mask``: bool ``[BS]`` (active tokens first) or
    ``[BS, K]``, only where every rank has the same BS.  ``global_bs`` is 0 there, or else at
    least the largest BS times the ranks.  BS may be 0, beyond the documentation.  With L local
    experts and ``A = global_bs * min(L, K)`` (or ``BS * ranks * min(L, K)``) it returns

    0. the received rows ``[A, H]``, by local expert, source rank and source order; rows after
       the last are undefined, as are the results 1 and what is left of 2;
    1. fp32 ``[A]``;
    2. int32 ``[max(BS * K, 128 A)]``: for each received row (source rank, token, place);
    3. int64 ``[L]``: rows of each local expert, cumulated (``expert_token_nums_type`` 0) or
       counts (1);
    4. int32 ``[L * ranks]``: rows by local expert and source rank, cumulated;
    5. int32 ``[tp_world_size]``: all received rows;
    6. an empty fp32 tensor.

    ``group_tp`` has no meaning while ``tp_world_size`` is 0 or 1; the ``fullmesh`` algorithms are
    ways to the same result.  Not emulated: quantization, hierarchical communication
    (``expert_scales``), TP within experts, ranks for shared experts, elastic groups, and zero,
    copy and constant experts.
    """
    name = "npu_moe_distribute_dispatch_v2"
    emulated_only(
        name,
        scales=(scales, (None,)),
        expert_scales=(expert_scales, (None,)),
        elastic_info=(elastic_info, (None,)),
        performance_info=(performance_info, (None,)),
        quant_mode=(quant_mode, (0,)),
        expert_token_nums_type=(expert_token_nums_type, (CUMSUM, COUNT)),
        comm_alg=(comm_alg, _ALGORITHMS),
        zero_expert_num=(zero_expert_num, (0,)),
        copy_expert_num=(copy_expert_num, (0,)),
        const_expert_num=(const_expert_num, (0,)),
        y_dtype=(y_dtype, (None,)),
        x_dtype=(x_dtype, (None,)),
        scales_dtype=(scales_dtype, (None,)),
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
        triples=True,
    )


@operator(
    "torch_npu.npu_moe_distribute_combine_v2",
    "npu_moe_distribute_combine_v2(Tensor expand_x, Tensor expert_ids,"
    " Tensor assist_info_for_combine, Tensor ep_send_counts, Tensor expert_scales, str group_ep,"
    " int ep_world_size, int ep_rank_id, int moe_expert_num, *, Tensor? tp_send_counts=None,"
    " Tensor? x_active_mask=None, Tensor? expand_scales=None, Tensor? shared_expert_x=None,"
    " Tensor? elastic_info=None, Tensor? ori_x=None, Tensor? const_expert_alpha_1=None,"
    " Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None,"
    ' Tensor? performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0,'
    " int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0,"
    ' int global_bs=0, int comm_quant_mode=0, str comm_alg="", int zero_expert_num=0,'
    " int copy_expert_num=0, int const_expert_num=0) -> Tensor",
    source=SOURCE,
)
def npu_moe_distribute_combine_v2(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    ori_x: torch.Tensor | None = None,
    const_expert_alpha_1: torch.Tensor | None = None,
    const_expert_alpha_2: torch.Tensor | None = None,
    const_expert_v: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> torch.Tensor:
    """Send the experts' results back and add each token's, weighted by ``expert_scales``.

    ``expand_x``: ``[A, H]``, the experts' results in the order that dispatch gave;
    ``assist_info_for_combine`` and ``ep_send_counts``: dispatch's results 2 and 4;
    ``expert_ids``, ``expert_scales`` (fp32) ``[BS, K]`` and ``x_active_mask``: of this rank's own
    tokens; ``shared_expert_x``: ``[BS, H]``, or three axes of as many rows, is added.  Returns
    ``[BS, H]`` in the dtype of ``expand_x``, added in fp32; tokens that take no part are
    undefined.

    ``tp_send_counts`` has no meaning while ``tp_world_size`` is 0 or 1, nor an empty
    ``expand_scales`` without hierarchical communication.  Not emulated: as for dispatch.
    """
    name = "npu_moe_distribute_combine_v2"
    emulated_only(
        name,
        expand_scales=(unless_empty(expand_scales), (None,)),
        elastic_info=(elastic_info, (None,)),
        ori_x=(ori_x, (None,)),
        const_expert_alpha_1=(const_expert_alpha_1, (None,)),
        const_expert_alpha_2=(const_expert_alpha_2, (None,)),
        const_expert_v=(const_expert_v, (None,)),
        performance_info=(performance_info, (None,)),
        comm_quant_mode=(comm_quant_mode, (0,)),
        comm_alg=(comm_alg, _ALGORITHMS),
        zero_expert_num=(zero_expert_num, (0,)),
        copy_expert_num=(copy_expert_num, (0,)),
        const_expert_num=(const_expert_num, (0,)),
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
        assist_info_for_combine,
        triples=True,
    )
