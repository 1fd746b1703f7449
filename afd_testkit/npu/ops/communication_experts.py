"""MoE dispatch and combine: rows to the ranks that own their experts, and their results back.

Expert e belongs to rank ``e // (experts / ranks)``.  Received rows are ordered by local expert,
then by source rank, then by their order on the source (token, then place among its K).  A rank
without tokens takes part all the same: its peers' rows for its experts come in its calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from afd_testkit.npu.limits import limit
from afd_testkit.npu.ops.arguments import (
    HALVES,
    emulated_only,
    limit_dtype,
    limit_layout,
    require,
    require_shape,
    undefined,
)
from afd_testkit.npu.ops.exchange import gathered, group_of, swapped

CUMSUM, COUNT = 0, 1
Dispatched: TypeAlias = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]
# The wider of the documented limits of A2 and A3.
_MOST_TOKENS, _MOST_PLACES, _MOST_EXPERTS = 512, 16, 1024


@dataclass(frozen=True)
class Place:
    """Where an expert-parallel call says that it runs, as the operators are told it."""

    operator: str
    group_ep: str
    world_size: int
    rank: int
    experts: int
    global_bs: int


@dataclass(frozen=True)
class Experts:
    """Who owns which expert, and what one call moves between the ranks.

    ``active``: bool ``[BS, K]``, this rank's pairs that take part; ``counts``: ``[ranks,
    experts]``, rows that each rank sends to each expert.
    """

    group: dist.ProcessGroup
    ranks: int
    rank: int
    local: int
    active: torch.Tensor
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
        counts = self.received()
        of_source = counts.t().flatten()
        starts = (of_source.cumsum(0) - of_source).view(self.ranks, self.local)
        places = [
            torch.arange(int(counts[expert, source])) + starts[source, expert]
            for expert in range(self.local)
            for source in range(self.ranks)
        ]
        return torch.cat(places)


def refuse_shared(
    name: str,
    *,
    tp_world_size: int,
    tp_rank_id: int,
    expert_shard_type: int,
    shared_expert_num: int,
    shared_expert_rank_num: int,
) -> None:
    """Refuse TP within experts, and ranks that hold shared experts."""
    emulated_only(
        name,
        tp_world_size=(tp_world_size, (0, 1)),
        tp_rank_id=(tp_rank_id, (0,)),
        expert_shard_type=(expert_shard_type, (0,)),
        shared_expert_num=(shared_expert_num, (0, 1)),
        shared_expert_rank_num=(shared_expert_rank_num, (0,)),
    )


def unless_empty(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """``tensor``, or None for one without elements, which says as little."""
    return None if tensor is None or tensor.numel() == 0 else tensor


def _active_pairs(name: str, expert_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """bool ``[BS, K]``: pairs that take part.  ``mask``: ``[BS]`` or ``[BS, K]``."""
    if mask is None:
        return torch.ones_like(expert_ids, dtype=torch.bool)
    limit_dtype(name, "x_active_mask", mask, (torch.bool,))
    require(
        name,
        mask.shape in (expert_ids.shape, expert_ids.shape[:1]),
        f"x_active_mask has shape {list(mask.shape)}; it must be {list(expert_ids.shape[:1])} or "
        f"{list(expert_ids.shape)}, as expert_ids",
    )
    if mask.dim() == 2:
        return mask
    limit_layout(
        name,
        not bool((mask[1:] & ~mask[:-1]).any()),
        f"x_active_mask is {mask.tolist()[:16]}; active tokens must come before inactive ones",
    )
    return mask.unsqueeze(1).expand_as(expert_ids)


def _check_own(place: Place, expert_ids: torch.Tensor) -> None:
    """Limits on one rank's own arguments."""
    name = place.operator
    require(
        name,
        expert_ids.dim() == 2,
        f"expert_ids has shape {list(expert_ids.shape)}; it must be [tokens, K]",
    )
    tokens, top_k = expert_ids.shape
    limit_dtype(name, "expert_ids", expert_ids, (torch.int32,))
    limit_layout(
        name,
        tokens <= _MOST_TOKENS and top_k <= _MOST_PLACES and place.experts <= _MOST_EXPERTS,
        f"{tokens} tokens choose {top_k} of {place.experts} experts; the kernel takes "
        f"{_MOST_TOKENS} tokens, {_MOST_PLACES} of {_MOST_EXPERTS} experts",
    )
    ordered = expert_ids.sort(dim=1).values
    require(
        name,
        not bool((ordered[:, 1:] == ordered[:, :-1]).any()),
        "a row of expert_ids names one expert twice; the experts of a token must differ",
    )
    require(
        name,
        place.experts % place.world_size == 0,
        f"{place.experts} experts do not divide among {place.world_size} ranks",
    )


def agree(place: Place, expert_ids: torch.Tensor, mask: torch.Tensor | None) -> Experts:
    """Exchange the counts; what a rank tells wrongly is refused on every rank alike."""
    name = place.operator
    group = group_of(name, place.group_ep, place.world_size, place.rank)
    _check_own(place, expert_ids)
    active = _active_pairs(name, expert_ids, mask)
    chosen = expert_ids[active].long()
    valid = (chosen >= 0) & (chosen < place.experts)
    counts = torch.bincount(chosen[valid], minlength=place.experts)
    told = torch.tensor([expert_ids.shape[0], int((~valid).sum()), int(mask is not None)])
    everyone = gathered(torch.cat((counts, told)), group)
    sizes, wrong, masked = everyone[:, -3:].t().tolist()
    _check_everyone(place, sizes, wrong, masked)
    local = place.experts // place.world_size
    return Experts(group, place.world_size, place.rank, local, active, everyone[:, :-3])


def _check_everyone(place: Place, sizes: list[int], wrong: list[int], masked: list[int]) -> None:
    """By rank: tokens, entries of expert_ids that are no expert, whether there is a mask."""
    name, needed = place.operator, max(sizes) * len(sizes)
    require(
        name,
        not any(wrong),
        f"{wrong} entries of expert_ids, by rank, are no expert from 0 to {place.experts - 1}; "
        "make them so, or inactive",
    )
    require(
        name,
        place.global_bs >= needed or (place.global_bs == 0 and len(set(sizes)) == 1),
        f"ranks have {sizes} tokens and global_bs is {place.global_bs}; it must be at least the "
        f"largest number times the ranks, {needed}, or 0 if all have equally many",
    )
    limit_layout(
        name,
        len(set(sizes)) == 1 or not any(masked),
        f"ranks have {sizes} tokens and an x_active_mask; with unequal numbers all tokens must be "
        "active, leave it out",
    )


def dispatch(
    place: Place,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    expert_token_nums_type: int,
    tp_world_size: int,
    triples: bool,
) -> Dispatched:
    """The seven results; ``triples`` is how version 2 says where a row came from."""
    name = place.operator
    limit_dtype(name, "x", x, HALVES)
    require(
        name,
        x.dim() == expert_ids.dim() == 2 and x.shape[0] == expert_ids.shape[0],
        f"x has shape {list(x.shape)} and expert_ids {list(expert_ids.shape)}; they must be "
        "[tokens, hidden] and [tokens, K]",
    )
    tokens, top_k = expert_ids.shape
    limit(
        name,
        "alignment",
        x.shape[1] % 32 == 0 and x.shape[1] <= 8192,
        f"rows have {x.shape[1]} elements; the kernel takes multiples of 32 up to 8192",
    )
    experts = agree(place, expert_ids, mask)
    pairs = experts.active.flatten().nonzero().flatten()
    order = pairs[torch.sort(expert_ids.flatten()[pairs], stable=True).indices]
    received = experts.received()
    sent, receive = experts.sent(), [int(count) for count in received.sum(dim=0)]
    arrangement = experts.by_source()
    rows = swapped(x[order // top_k], sent, receive, experts.group)[arrangement]

    total = rows.shape[0]
    capacity = (place.global_bs or tokens * experts.ranks) * min(experts.local, top_k)
    expand_x = undefined((capacity, x.shape[1]), x.dtype)
    expand_x[:total] = rows
    origin = undefined((max(tokens * top_k, capacity * 128),), torch.int32)
    if triples:
        own = torch.stack(
            (torch.full_like(order, experts.rank), order // top_k, order % top_k), dim=1
        )
        came = swapped(own.to(torch.int32), sent, receive, experts.group)[arrangement]
        origin[: 3 * total] = came.flatten()
    else:
        origin[: tokens * top_k] = _ordinals(expert_ids, order)

    of_expert = received.sum(dim=1)
    return (
        expand_x,
        undefined((capacity,), torch.float32),
        origin,
        of_expert.cumsum(0) if expert_token_nums_type == CUMSUM else of_expert,
        received.flatten().cumsum(0).to(torch.int32),
        torch.full((tp_world_size,), total, dtype=torch.int32),
        torch.empty((0,), dtype=torch.float32),
    )


def _ordinals(expert_ids: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """int32 ``[BS * K]``: each pair's number among this rank's pairs of the same expert."""
    ordinals = torch.zeros(expert_ids.numel(), dtype=torch.int32)
    experts = expert_ids.flatten()[order]
    starts = torch.searchsorted(experts, experts)
    ordinals[order] = (torch.arange(order.numel()) - starts).to(torch.int32)
    return ordinals


def combine(
    place: Place,
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    mask: torch.Tensor | None,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    shared_expert_x: torch.Tensor | None,
    origin: torch.Tensor,
    *,
    triples: bool,
) -> torch.Tensor:
    """The weighted sum of what each token's experts computed, in the dtype of ``expand_x``."""
    name = place.operator
    limit_dtype(name, "expand_x", expand_x, HALVES)
    limit_dtype(name, "expert_scales", expert_scales, (torch.float32,))
    experts = agree(place, expert_ids, mask)
    require_shape(name, "expert_scales", expert_scales, expert_ids.shape)
    received = experts.received()
    expected = received.flatten().cumsum(0).tolist()
    require(
        name,
        ep_send_counts.tolist() == expected,
        f"ep_send_counts are {ep_send_counts.tolist()[:16]}, expert_ids of all ranks give "
        f"{expected[:16]}; pass what dispatch returned for the same expert_ids",
    )
    require(
        name,
        expand_x.dim() == 2 and expand_x.shape[0] >= expected[-1],
        f"expand_x has shape {list(expand_x.shape)}; it must be [rows, hidden] with the "
        f"{expected[-1]} rows that this rank received",
    )
    to_source = torch.empty(expected[-1], dtype=torch.int64)
    to_source[experts.by_source()] = torch.arange(expected[-1])
    sent, back = experts.sent(), [int(count) for count in received.sum(dim=0)]
    rows = swapped(expand_x[: expected[-1]][to_source], back, sent, experts.group)

    tokens, top_k = expert_ids.shape
    results = torch.zeros((tokens * top_k, expand_x.shape[1]), dtype=torch.float32)
    if triples:
        own = origin[: 3 * expected[-1]].view(expected[-1], 3)[to_source]
        came = swapped(own, back, sent, experts.group).long()
        results[came[:, 1] * top_k + came[:, 2]] = rows.float()
    else:
        pairs = experts.active.flatten().nonzero().flatten()
        counts = experts.counts[experts.rank]
        begins = (counts.cumsum(0) - counts)[expert_ids.flatten()[pairs].long()]
        results[pairs] = rows[begins + origin[pairs].long()].float()
    weights = expert_scales.float().masked_fill(~experts.active, 0.0).unsqueeze(-1)
    y = (results.view(tokens, top_k, expand_x.shape[1]) * weights).sum(dim=1)
    if shared_expert_x is not None:
        limit_dtype(name, "shared_expert_x", shared_expert_x, (expand_x.dtype,))
        require(
            name,
            shared_expert_x.numel() == y.numel() and shared_expert_x.shape[-1:] == y.shape[-1:],
            f"shared_expert_x has shape {list(shared_expert_x.shape)}; it must hold "
            f"{list(y.shape)}, one row a token",
        )
        y = y + shared_expert_x.float().view(y.shape)
    # The kernel skips tokens none of whose pairs takes part.
    written = experts.active.any(dim=1, keepdim=True)
    return torch.where(written, y, undefined(y.shape, y.dtype)).to(expand_x.dtype)
