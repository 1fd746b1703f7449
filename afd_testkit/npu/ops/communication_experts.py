"""MoE dispatch and combine: rows to the ranks that own their experts, and their results back.

Expert e belongs to rank ``e // (experts / ranks)``.  Received rows are ordered by local expert,
then by source rank, then by their order on the source (token, then place among its K).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from afd_testkit.npu.errors import KernelLimit
from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import (
    HALVES,
    emulated_only,
    limit_dtype,
    limit_shape,
    undefined,
)
from afd_testkit.npu.ops.exchange import gathered, group_of, swapped

_SOURCE = "torch_npu 2.10.0 shape functions; vllm-ascend 0.23.0 ops/fused_moe/token_dispatcher.py"
_CUMSUM, _COUNT = 0, 1

Dispatched = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]


@dataclass(frozen=True)
class Experts:
    """Who owns which expert, and what one call moves between the ranks.

    ``counts``: ``[ranks, experts]``, rows that each rank sends to each expert.
    """

    group: dist.ProcessGroup
    ranks: int
    rank: int
    local: int
    counts: torch.Tensor

    def sent(self) -> list[int]:
        """Rows that this rank sends to each rank."""
        per_rank = self.counts[self.rank].view(self.ranks, self.local).sum(dim=1)
        return [int(count) for count in per_rank]

    def received(self) -> torch.Tensor:
        """``[local experts, ranks]``: rows that each of this rank's experts gets from each rank."""
        first = self.rank * self.local
        return self.counts[:, first : first + self.local].t().contiguous()

    def by_source(self) -> torch.Tensor:
        """For each received row in expert order, its place when ordered by source rank first."""
        received = self.received()
        starts = (received.t().flatten().cumsum(0) - received.t().flatten()).view(
            self.ranks, self.local
        )
        places = [
            torch.arange(int(received[expert, source])) + starts[source, expert]
            for expert in range(self.local)
            for source in range(self.ranks)
        ]
        return torch.cat(places)


def _active_pairs(name: str, expert_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """bool ``[BS, K]``: pairs that take part.  ``mask``: ``[BS]`` or ``[BS, K]``."""
    if mask is None:
        return torch.ones_like(expert_ids, dtype=torch.bool)
    limit_dtype(name, "x_active_mask", mask, (torch.bool,))
    if mask.shape not in (expert_ids.shape, expert_ids.shape[:1]):
        raise KernelLimit(
            f"{name}: x_active_mask has shape {list(mask.shape)}; it must be "
            f"{list(expert_ids.shape[:1])} or {list(expert_ids.shape)}, as expert_ids."
        )
    if mask.dim() == 2:
        return mask
    limit_shape(
        name,
        not bool((mask[1:] & ~mask[:-1]).any()),
        f"x_active_mask is {mask.tolist()[:16]}; active tokens must come before inactive ones",
    )
    return mask.unsqueeze(1).expand_as(expert_ids)


def _experts(
    name: str,
    expert_ids: torch.Tensor,
    active: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    global_bs: int,
) -> Experts:
    """Exchange the counts; refuse what any rank does wrong on every rank alike."""
    group = group_of(name, group_ep, ep_world_size, ep_rank_id)
    limit_dtype(name, "expert_ids", expert_ids, (torch.int32,))
    if moe_expert_num % ep_world_size:
        raise KernelLimit(
            f"{name}: {moe_expert_num} experts do not divide among {ep_world_size} ranks."
        )
    chosen = expert_ids[active].long()
    wrong = int(((chosen < 0) | (chosen >= moe_expert_num)).sum())
    inside = chosen[(chosen >= 0) & (chosen < moe_expert_num)]
    counts = torch.bincount(inside, minlength=moe_expert_num)
    told = torch.tensor([expert_ids.shape[0], wrong])
    everyone = gathered(torch.cat((counts, told)), group)
    _check_everyone(name, everyone[:, -2:], global_bs, moe_expert_num)
    local = moe_expert_num // ep_world_size
    return Experts(group, ep_world_size, ep_rank_id, local, everyone[:, :-2])


def _check_everyone(name: str, told: torch.Tensor, global_bs: int, experts: int) -> None:
    sizes, wrong = told[:, 0].tolist(), told[:, 1].tolist()
    if any(wrong):
        raise KernelLimit(
            f"{name}: ranks choose {wrong} experts outside of 0 to {experts - 1}; every entry of "
            "expert_ids must lie in it."
        )
    if global_bs == 0 and len(set(sizes)) > 1:
        raise KernelLimit(
            f"{name}: ranks have {sizes} tokens and global_bs is 0, which says equally many; pass "
            f"the largest number times the ranks, {max(sizes) * len(sizes)}."
        )
    if global_bs and max(sizes) * len(sizes) > global_bs:
        raise KernelLimit(
            f"{name}: ranks have {sizes} tokens and global_bs is {global_bs}; it must be at least "
            f"the largest number times the ranks, {max(sizes) * len(sizes)}."
        )


def _refuse(
    name: str,
    *,
    tp_world_size: int,
    tp_rank_id: int,
    expert_shard_type: int,
    shared_expert_num: int,
    shared_expert_rank_num: int,
) -> None:
    """What dispatch and combine refuse alike; ``group_tp`` is not looked at without TP."""
    emulated_only(
        name,
        tp_world_size=(tp_world_size, (0, 1)),
        tp_rank_id=(tp_rank_id, (0,)),
        expert_shard_type=(expert_shard_type, (0,)),
        shared_expert_num=(shared_expert_num, (0, 1)),
        shared_expert_rank_num=(shared_expert_rank_num, (0,)),
    )


def _dispatch(
    name: str,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    experts: Experts,
    active: torch.Tensor,
    *,
    global_bs: int,
    expert_token_nums_type: int,
    tp_world_size: int,
    triples: bool,
) -> Dispatched:
    """The seven results; ``triples`` is how version 2 says where a row came from."""
    limit_dtype(name, "x", x, HALVES)
    tokens, top_k = expert_ids.shape
    if x.dim() != 2 or x.shape[0] != tokens:
        raise KernelLimit(
            f"{name}: x has shape {list(x.shape)} and expert_ids {list(expert_ids.shape)}; they "
            "must be [tokens, hidden] and [tokens, K]."
        )
    pairs = active.flatten().nonzero().flatten()
    order = pairs[torch.sort(expert_ids.flatten()[pairs], stable=True).indices]
    received = experts.received()
    receive = received.sum(dim=0).tolist()
    arrangement = experts.by_source()
    rows = swapped(x[order // top_k], experts.sent(), receive, experts.group)[arrangement]

    total = rows.shape[0]
    capacity = (global_bs or tokens * experts.ranks) * min(experts.local, top_k)
    expand_x = undefined((capacity, x.shape[1]), x.dtype)
    expand_x[:total] = rows
    origin = undefined((max(tokens * top_k, capacity * 128),), torch.int32)
    if triples:
        own = torch.stack(
            (torch.full_like(order, experts.rank), order // top_k, order % top_k), dim=1
        )
        came = swapped(own.to(torch.int32), experts.sent(), receive, experts.group)[arrangement]
        origin[: 3 * total] = came.flatten()
    else:
        origin[: tokens * top_k] = _places(expert_ids, order)

    of_expert = received.sum(dim=1)
    nums = of_expert.cumsum(0) if expert_token_nums_type == _CUMSUM else of_expert
    return (
        expand_x,
        undefined((capacity,), torch.float32),
        origin,
        nums,
        received.flatten().cumsum(0).to(torch.int32),
        torch.full((tp_world_size,), total, dtype=torch.int32),
        torch.empty((0,), dtype=torch.float32),
    )


def _places(expert_ids: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """int32 ``[BS * K]``: each pair's place among this rank's pairs of the same expert."""
    places = torch.zeros(expert_ids.numel(), dtype=torch.int32)
    sorted_ids = expert_ids.flatten()[order]
    starts = torch.searchsorted(sorted_ids, sorted_ids)
    places[order] = (torch.arange(order.numel()) - starts).to(torch.int32)
    return places


def _combine(
    name: str,
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    experts: Experts,
    active: torch.Tensor,
    shared_expert_x: torch.Tensor | None,
    origin: torch.Tensor,
    triples: bool,
) -> torch.Tensor:
    """The weighted sum of what each token's experts computed, in the dtype of ``expand_x``."""
    limit_dtype(name, "expand_x", expand_x, HALVES)
    limit_dtype(name, "expert_scales", expert_scales, (torch.float32,))
    received = experts.received()
    expected = received.flatten().cumsum(0)
    if ep_send_counts.tolist() != expected.tolist():
        raise KernelLimit(
            f"{name}: ep_send_counts are {ep_send_counts.tolist()[:16]}, expert_ids of all ranks "
            f"give {expected.tolist()[:16]}; pass what dispatch returned for the same expert_ids."
        )
    total = int(expected[-1])
    to_source = torch.empty(total, dtype=torch.int64)
    to_source[experts.by_source()] = torch.arange(total)
    back = received.sum(dim=0).tolist()
    rows = swapped(expand_x[:total][to_source], back, experts.sent(), experts.group)

    tokens, top_k = expert_ids.shape
    results = torch.zeros((tokens * top_k, expand_x.shape[1]), dtype=torch.float32)
    if triples:
        own = origin[: 3 * total].view(total, 3)[to_source]
        came = swapped(own, back, experts.sent(), experts.group).long()
        results[came[:, 1] * top_k + came[:, 2]] = rows.float()
    else:
        pairs = active.flatten().nonzero().flatten()
        begins = experts.counts[experts.rank].cumsum(0) - experts.counts[experts.rank]
        results[pairs] = rows[
            begins[expert_ids.flatten()[pairs].long()] + origin[pairs].long()
        ].float()
    weights = expert_scales.masked_fill(~active, 0.0).unsqueeze(-1)
    y = (results.view(tokens, top_k, expand_x.shape[1]) * weights).sum(dim=1)
    if shared_expert_x is not None:
        y = y + shared_expert_x.float()
    # The kernel skips tokens none of whose pairs takes part.
    written = active.any(dim=1, keepdim=True)
    return torch.where(written, y, undefined(y.shape, y.dtype)).to(expand_x.dtype)


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
    source=_SOURCE,
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

    ``x``: ``[BS, H]``, fp16 or bf16; ``expert_ids``: int32 ``[BS, K]``; ``x_active_mask``: bool
    ``[BS]`` (active tokens first) or ``[BS, K]``.  ``global_bs`` is 0 where every rank has the
    same BS, else at least the largest BS times the ranks.  With L local experts and
    ``A = global_bs * min(L, K)`` (or ``BS * ranks * min(L, K)``) it returns

    0. the received rows ``[A, H]``, by local expert, source rank and source order; rows after
       the last are undefined, as are the results 1 and what is left of 2;
    1. fp32 ``[A]``;
    2. int32 ``[max(BS * K, 128 A)]``: for each received row (source rank, token, place);
    3. int64 ``[L]``: rows of each local expert, cumulated (``expert_token_nums_type`` 0) or
       counts (1);
    4. int32 ``[L * ranks]``: rows by local expert and source rank, cumulated;
    5. int32 ``[tp_world_size]``: all received rows;
    6. an empty fp32 tensor.

    ``group_tp`` has no meaning while ``tp_world_size`` is 0 or 1; ``comm_alg`` ``fullmesh`` is
    another way to the same result.  Not emulated: quantization, hierarchical communication
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
        expert_token_nums_type=(expert_token_nums_type, (_CUMSUM, _COUNT)),
        comm_alg=(comm_alg, ("", "fullmesh")),
        zero_expert_num=(zero_expert_num, (0,)),
        copy_expert_num=(copy_expert_num, (0,)),
        const_expert_num=(const_expert_num, (0,)),
        y_dtype=(y_dtype, (None,)),
        x_dtype=(x_dtype, (None,)),
        scales_dtype=(scales_dtype, (None,)),
    )
    _refuse(
        name,
        tp_world_size=tp_world_size,
        tp_rank_id=tp_rank_id,
        expert_shard_type=expert_shard_type,
        shared_expert_num=shared_expert_num,
        shared_expert_rank_num=shared_expert_rank_num,
    )
    active = _active_pairs(name, expert_ids, x_active_mask)
    experts = _experts(
        name, expert_ids, active, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs
    )
    return _dispatch(
        name,
        x,
        expert_ids,
        experts,
        active,
        global_bs=global_bs,
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
    source=_SOURCE,
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
    tokens; ``shared_expert_x``: ``[BS, H]``, added.  Returns ``[BS, H]`` in the dtype of
    ``expand_x``, added in fp32; tokens that take no part are undefined.

    ``tp_send_counts`` has no meaning while ``tp_world_size`` is 0 or 1, nor an empty
    ``expand_scales`` without hierarchical communication.  Not emulated: as for dispatch.
    """
    name = "npu_moe_distribute_combine_v2"
    emulated_only(
        name,
        expand_scales=(_unless_empty(expand_scales), (None,)),
        elastic_info=(elastic_info, (None,)),
        ori_x=(ori_x, (None,)),
        const_expert_alpha_1=(const_expert_alpha_1, (None,)),
        const_expert_alpha_2=(const_expert_alpha_2, (None,)),
        const_expert_v=(const_expert_v, (None,)),
        performance_info=(performance_info, (None,)),
        comm_quant_mode=(comm_quant_mode, (0,)),
        comm_alg=(comm_alg, ("", "fullmesh")),
        zero_expert_num=(zero_expert_num, (0,)),
        copy_expert_num=(copy_expert_num, (0,)),
        const_expert_num=(const_expert_num, (0,)),
    )
    _refuse(
        name,
        tp_world_size=tp_world_size,
        tp_rank_id=tp_rank_id,
        expert_shard_type=expert_shard_type,
        shared_expert_num=shared_expert_num,
        shared_expert_rank_num=shared_expert_rank_num,
    )
    active = _active_pairs(name, expert_ids, x_active_mask)
    experts = _experts(
        name, expert_ids, active, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs
    )
    return _combine(
        name,
        expand_x,
        expert_ids,
        ep_send_counts,
        expert_scales,
        experts,
        active,
        shared_expert_x,
        assist_info_for_combine,
        triples=True,
    )


def _unless_empty(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None or tensor.numel() == 0 else tensor
