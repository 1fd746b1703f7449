"""Moves rows between the shards of a step and the shards of its stages, over a process group.

Only rows that change rank travel, both stages in one all-to-all; the rest is copied in place.

Padding: rows of a shard beyond its real tokens belong to that shard alone.  They are neither
sent nor received, and are zeros in everything that is returned, in both directions.  So the way
there and back restores every real row of the step, and zeros its padding rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from afd_plugin.errors import LayoutError, StageTensorError
from afd_plugin.layout import ExchangePlan, Layout, Move, Shard, plan_exchange
from afd_plugin.plan import SplitPlan


class ShardExchange:
    """The exchange of one step on one rank; every rank of the group must make the same calls.

    ``layout``: how this step really lies.  ``group``: the tensor-parallel process group, of the
    backend of the tensors that will move; not needed where the tokens are not sharded.

    Raises :class:`LayoutError` when the plan does not fit the layout, or the layout the group.
    """

    def __init__(self, plan: SplitPlan, layout: Layout, group: Any = None) -> None:
        self.split = plan
        self.layout = layout
        self.plan: ExchangePlan = plan_exchange(plan, layout)
        self._group = group
        if layout.shards == 1:
            return
        if group is None:
            raise LayoutError(
                f"tokens are sharded over {layout.tp_size} ranks and no process group is given; "
                "give the tensor-parallel one."
            )
        place = (dist.get_rank(group), dist.get_world_size(group))
        if place != (layout.tp_rank, layout.tp_size):
            raise LayoutError(
                f"the layout is of rank {layout.tp_rank} of {layout.tp_size}, and the process "
                f"group says rank {place[0]} of {place[1]}; give the tensor-parallel group."
            )

    def check_batch_shard(self, name: str, tensor: Any, axis: int) -> None:
        """Raise :class:`StageTensorError` unless ``tensor`` has this rank's rows of the step."""
        _check_rows(name, tensor, axis, self.plan.batch_shard, self.layout)

    def to_stages(
        self, tensor: torch.Tensor, axis: int = 0, name: str = "the step's shard"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's shard of stage 0 and of stage 1, from its shard of the step.

        ``tensor``: the shard's rows on ``axis``, any other axes and dtype; it is only read.
        Raises :class:`StageTensorError` before anything is sent.
        """
        plan = self.plan
        self.check_batch_shard(name, tensor, axis)
        batch = tensor.movedim(axis, 0)
        stages = tuple(_buffer(batch, shard) for shard in plan.stage_shards)
        for move in plan.keeps:
            stages[move.stage][_stage_rows(move)] = batch[_batch_rows(move)]
        arrived = self._all_to_all(
            batch,
            [batch[_batch_rows(move)] for move in plan.sends],
            plan.send_rows,
            plan.receive_rows,
        )
        for move, rows in _pieces(plan.receives, arrived):
            stages[move.stage][_stage_rows(move)] = rows
        return stages[0].movedim(0, axis), stages[1].movedim(0, axis)

    def to_batch(
        self, first: torch.Tensor, second: torch.Tensor, axis: int = 0, name: str = "the shard"
    ) -> torch.Tensor:
        """This rank's shard of the step, from its shards of both stages: the inverse.

        Raises :class:`StageTensorError` before anything is sent.
        """
        plan = self.plan
        for index, tensor in enumerate((first, second)):
            shard = plan.stage_shards[index]
            _check_rows(f"{name} of stage {index}", tensor, axis, shard, self.layout)
        stages = (first.movedim(axis, 0), second.movedim(axis, 0))
        kinds = [(piece.dtype, piece.device, tuple(piece.shape[1:])) for piece in stages]
        if kinds[0] != kinds[1]:
            raise StageTensorError(
                f"{name} is {kinds[0]} in stage 0 and {kinds[1]} in stage 1; dtype, device and all "
                f"axes but axis {axis} must agree."
            )
        batch = _buffer(stages[0], plan.batch_shard)
        for move in plan.keeps:
            batch[_batch_rows(move)] = stages[move.stage][_stage_rows(move)]
        arrived = self._all_to_all(
            batch,
            [stages[move.stage][_stage_rows(move)] for move in plan.receives],
            plan.receive_rows,
            plan.send_rows,
        )
        for move, rows in _pieces(plan.sends, arrived):
            batch[_batch_rows(move)] = rows
        return batch.movedim(0, axis)

    def _all_to_all(
        self,
        like: torch.Tensor,
        pieces: list[torch.Tensor],
        send_rows: list[int],
        receive_rows: list[int],
    ) -> torch.Tensor:
        """[sum of ``receive_rows``, ...] what arrived, in order of rank and stage."""
        arrived = like.new_empty((sum(receive_rows), *like.shape[1:]))
        if self.plan.moved_rows:  # the same on every rank, so that all join or none
            sent = torch.cat(pieces) if pieces else like.new_empty((0, *like.shape[1:]))
            dist.all_to_all_single(arrived, sent, receive_rows, send_rows, group=self._group)
        return arrived


def _batch_rows(move: Move) -> slice:
    return slice(move.batch_row, move.batch_row + move.rows)


def _stage_rows(move: Move) -> slice:
    return slice(move.stage_row, move.stage_row + move.rows)


def _pieces(moves: tuple[Move, ...], arrived: torch.Tensor) -> Any:
    return zip(moves, arrived.split([move.rows for move in moves]), strict=True) if moves else ()


def _buffer(like: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Rows of ``shard`` in the manner of ``like``: padding zero, real rows still to be written."""
    rows = like.new_empty((shard.rows, *like.shape[1:]))
    rows[shard.num_tokens :] = 0
    return rows


def _check_rows(name: str, tensor: Any, axis: int, shard: Shard, layout: Layout) -> None:
    if not isinstance(tensor, torch.Tensor) or not -tensor.ndim <= axis < tensor.ndim:
        kind = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise StageTensorError(f"{name} is {kind}; it must be a tensor with tokens on axis {axis}.")
    if tensor.shape[axis] != shard.rows:
        raise StageTensorError(
            f"{name} has shape {tuple(tensor.shape)}; axis {axis} must hold the {shard.rows} rows "
            f"of rank {layout.tp_rank} of {layout.tp_size} ({shard.num_tokens} real tokens). If it "
            "holds the tokens of all ranks, declare it global."
        )
