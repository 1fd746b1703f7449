"""Rows between the ranks of a group: what the communicating operators share.

Every rank of the group must take part in every call, also with no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from afd_testkit.npu.groups import group_named
from afd_testkit.npu.ops.arguments import require


def group_of(operator: str, name: str, world_size: int, rank: int | None) -> dist.ProcessGroup:
    """The group called ``name``; :class:`KernelLimit` where size or own rank are told wrongly."""
    group = group_named(name)
    require(
        operator,
        group.size() == world_size and rank in (None, group.rank()),
        f"told {world_size} ranks and to be rank {rank}; the group {name!r} has {group.size()} "
        f"ranks and this is rank {group.rank()}, pass these",
    )
    return group


def gathered(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``values`` of all ranks, ``[ranks, *values.shape]``."""
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.stack(parts)


def swapped(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """``rows`` ``[sum(send), ...]``, of which ``send[r]`` go to rank r; those received, by rank."""
    # As bytes, so that every dtype travels alike.
    width = rows[:1].numel() if rows.shape[0] else rows.new_empty((1, *rows.shape[1:])).numel()
    flat = rows.contiguous().view(rows.shape[0], width).view(torch.uint8)
    result = torch.empty((sum(receive), width), dtype=rows.dtype).view(torch.uint8)
    dist.all_to_all_single(result, flat, list(receive), list(send), group=group)
    return result.view(rows.dtype).view(sum(receive), *rows.shape[1:])


def summed(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of ``values`` over all ranks, in their dtype."""
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total
