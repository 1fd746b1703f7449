"""Which rank holds which tokens: sequence-parallel shards of a step and of its stages.

Where the runtime shards tokens over the tensor-parallel ranks (FlashComm1), a buffer of ``n``
physical rows, a multiple of the TP size, lives as ``n / tp`` rows a rank, rank-major: rank ``r``
holds rows ``r * n / tp`` up to ``(r + 1) * n / tp``.  The buffers of the step and of each stage are
sharded alike but each on its own, so that most tokens of a stage belong on another rank than in
the step.  Everything here is pure integers; ``exchange.py`` moves the rows.

One layout holds for a step and both of its stages.  Real rows come first in every buffer, padding
after them, so padding lies with the last ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from afd_plugin.batch import ScheduledBatch
from afd_plugin.errors import LayoutError
from afd_plugin.plan import SplitPlan


@dataclass(frozen=True)
class Layout:
    """How this forward pass holds its tokens, as the runtime reports it for this very step.

    ``tp_size``, ``tp_rank``: the tensor-parallel group.  ``sharded``: whether each rank holds a
    shard of the tokens (True) or all of them (False).  Raises :class:`LayoutError` for a rank
    outside the group.
    """

    tp_size: int
    tp_rank: int
    sharded: bool

    def __post_init__(self) -> None:
        if self.tp_size < 1 or not 0 <= self.tp_rank < self.tp_size:
            raise LayoutError(
                f"rank {self.tp_rank} of {self.tp_size} does not exist; "
                "a group has 1 or more ranks, numbered from 0."
            )

    @property
    def shards(self) -> int:
        """Pieces that the tokens lie in: the TP size, or 1."""
        return self.tp_size if self.sharded else 1

    @property
    def shard(self) -> int:
        """The piece that this rank holds."""
        return self.tp_rank if self.sharded else 0

    @property
    def alignment(self) -> int:
        """Tokens that cuts and stage buffers must be multiples of: what to plan with."""
        return self.shards


class Shard(NamedTuple):
    """One rank's rows of a buffer.

    ``rows``: physical rows.  ``tokens``: the real tokens they hold, in batch numbering, from
    row 0 on; possibly none.  The other rows are padding.
    """

    rows: int
    tokens: slice

    @property
    def num_tokens(self) -> int:
        """Real rows."""
        return int(self.tokens.stop - self.tokens.start)


class Move(NamedTuple):
    """``rows`` consecutive tokens that lie in a batch shard and belong into a stage shard.

    ``peer``: the rank at the other end.  ``batch_row``: first row in the batch shard, at whoever
    holds it; ``stage_row``: first row in the shard of stage ``stage``.
    """

    peer: int
    stage: int
    batch_row: int
    stage_row: int
    rows: int


@dataclass(frozen=True)
class ExchangePlan:
    """What one rank sends, receives and keeps when batch shards become stage shards.

    ``sends`` and ``receives`` name other ranks only, in order of rank and then of stage; ``keeps``
    are copied on the rank itself.  The way back is the same with sends and receives swapped.
    ``moved_rows``: rows that change rank, summed over all ranks: 0 on one rank means 0 on all.
    """

    layout: Layout
    batch_shard: Shard
    stage_shards: tuple[Shard, Shard]
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    keeps: tuple[Move, ...]
    moved_rows: int

    @property
    def send_rows(self) -> list[int]:
        """[shards] rows this rank sends to each rank; 0 to itself."""
        return self._by_peer(self.sends)

    @property
    def receive_rows(self) -> list[int]:
        """[shards] rows this rank receives from each rank; 0 from itself."""
        return self._by_peer(self.receives)

    def _by_peer(self, moves: tuple[Move, ...]) -> list[int]:
        rows = [0] * self.layout.shards
        for move in moves:
            rows[move.peer] += move.rows
        return rows


def padded_rows(tokens: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that holds ``tokens``."""
    return -(-tokens // alignment) * alignment


def _shard(begin: int, end: int, rows: int, shards: int, shard: int) -> Shard:
    """Piece ``shard`` of ``rows`` rows, of which the first hold tokens ``begin`` to ``end``."""
    each = rows // shards
    first = min(begin + shard * each, end)
    return Shard(each, slice(first, min(first + each, end)))


def batch_shard(batch: ScheduledBatch, layout: Layout, shard: int | None = None) -> Shard:
    """This rank's rows of the whole step, or those of another ``shard``.

    The buffer has the step's padded extent, rounded up to a multiple of the number of shards.
    """
    rows = padded_rows(batch.num_input_tokens, layout.shards)
    return _shard(0, batch.num_tokens, rows, layout.shards, _which(layout, shard))


def stage_shard(plan: SplitPlan, stage: int, layout: Layout, shard: int | None = None) -> Shard:
    """This rank's rows of one stage, or those of another ``shard``.

    With ``n`` physical rows of the stage and ``start`` its first token, shard ``r`` holds tokens
    ``start + r * n / shards`` on, as far as the stage's real tokens go.

    Raises :class:`LayoutError` when ``n`` is no multiple of the number of shards.
    """
    piece = plan.stages[stage]
    if piece.num_input_tokens % layout.shards:
        raise LayoutError(
            f"stage {stage} has {piece.num_input_tokens} rows, which {layout.shards} ranks cannot "
            f"share evenly; the plan's alignment is {plan.alignment}. Plan with a multiple of "
            "Layout.alignment."
        )
    span = piece.token_slice
    return _shard(
        span.start, span.stop, piece.num_input_tokens, layout.shards, _which(layout, shard)
    )


def _which(layout: Layout, shard: int | None) -> int:
    if shard is None:
        return layout.shard
    if not 0 <= shard < layout.shards:
        raise LayoutError(f"shard {shard} does not exist; there are {layout.shards}.")
    return shard


def _overlap(peer: int, stage: int, source: Shard, target: Shard) -> Iterator[Move]:
    """The tokens that ``source`` holds of the batch and ``target`` of the stage, if any."""
    begin = max(source.tokens.start, target.tokens.start)
    end = min(source.tokens.stop, target.tokens.stop)
    if begin < end:
        yield Move(
            peer, stage, begin - source.tokens.start, begin - target.tokens.start, end - begin
        )


def plan_exchange(plan: SplitPlan, layout: Layout) -> ExchangePlan:
    """How the step's shards become those of both stages on this rank.

    Only real tokens move.  Raises :class:`LayoutError` as :func:`stage_shard` does.
    """
    ranks = range(layout.shards)
    mine = layout.shard
    held = [batch_shard(plan.batch, layout, rank) for rank in ranks]
    wanted = [
        (stage_shard(plan, 0, layout, rank), stage_shard(plan, 1, layout, rank)) for rank in ranks
    ]

    def moves(source: int, target: int, peer: int) -> Iterator[Move]:
        for stage in (0, 1):
            yield from _overlap(peer, stage, held[source], wanted[target][stage])

    others = [rank for rank in ranks if rank != mine]
    kept = sum(move.rows for rank in ranks for move in moves(rank, rank, rank))
    return ExchangePlan(
        layout=layout,
        batch_shard=held[mine],
        stage_shards=wanted[mine],
        sends=tuple(move for rank in others for move in moves(mine, rank, rank)),
        receives=tuple(move for rank in others for move in moves(rank, mine, rank)),
        keeps=tuple(moves(mine, mine, mine)),
        moved_rows=plan.batch.num_tokens - kept,
    )
