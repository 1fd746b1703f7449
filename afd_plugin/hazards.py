"""What makes a balanced plan unsafe: stage 0 reading KV slots that stage 1 writes.

The scheduler may give a request, in one step, prefix-cache blocks that another request of
the same step only now computes.  Run whole, a layer writes all keys and values before it
reads any, so the hit holds.  Cut between reader and writer, the reader sees stale slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afd_plugin.batch import MAX_TOKENS, IntArray, ScheduledBatch
from afd_plugin.errors import KVLayoutError
from afd_plugin.plan import SplitPlan, nearest


@dataclass(frozen=True)
class KVGroup:
    """Where one KV-cache group keeps its tokens.

    ``block_size``: tokens a block.  ``block_table``: [>= R, W] block ids, row r for request r.
    ``slot_mapping``: [>= T] slot (block id * block size + offset) that each batch token
    writes, negative where it writes none.  Numpy arrays or CPU tensors of whole numbers.
    ``window``: positions that a token attends to, its own included, where the group's layers
    have a sliding window.  Blocks before it may already belong to another request.
    """

    block_size: int
    block_table: Any
    slot_mapping: Any
    window: int | None = None


@dataclass(frozen=True)
class KVHazard:
    """A read of stage 0 that depends on a write of stage 1.

    ``reader`` and ``writer`` are request indices, ``position`` the reader's context position,
    ``slot`` the KV slot, ``writer_token`` the batch token whose stage writes it too late.
    """

    reader: int
    writer: int
    position: int
    slot: int
    writer_token: int

    def __str__(self) -> str:
        return (
            f"request {self.reader} reads position {self.position} from KV slot {self.slot}, "
            f"which token {self.writer_token} of request {self.writer} writes in this step"
        )


@dataclass(frozen=True)
class _Reads:
    """All reads of slots written in this step by another token, ordered by reader and position."""

    reader: IntArray
    position: IntArray
    slot: IntArray
    token: IntArray  # the writer, as a batch token

    def crossing(self, starts: IntArray, cut: int) -> NDArray[np.bool_]:
        """Which reads a cut at ``cut`` would break: reader begins before it, writer is not."""
        broken: NDArray[np.bool_] = (starts[self.reader] < cut) & (self.token >= cut)
        return broken


def _array(name: str, value: Any, ndim: int) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise KVLayoutError(
            f"{name} cannot be read as an array ({error}); give a numpy array or a CPU tensor "
            f"of whole numbers in {ndim} dimension(s)."
        ) from error
    if array.ndim != ndim or array.dtype.kind not in "iu":
        raise KVLayoutError(
            f"{name} is {array.dtype} with {array.ndim} dimensions; "
            f"give whole numbers in {ndim} dimension(s)."
        )
    return array


def _whole(name: str, value: Any) -> int:
    if (
        not isinstance(value, int | np.integer)
        or isinstance(value, bool)
        or not 1 <= value <= MAX_TOKENS
    ):
        raise KVLayoutError(
            f"{name} is {value!r}; give a whole number of tokens, 1 to {MAX_TOKENS}."
        )
    return int(value)


def _check(batch: ScheduledBatch, group: KVGroup) -> tuple[NDArray[Any], NDArray[Any]]:
    size = _whole("block_size", group.block_size)
    if group.window is not None:
        _whole("window", group.window)
    table = _array("block_table", group.block_table, 2)
    slots = _array("slot_mapping", group.slot_mapping, 1)
    if table.shape[0] < batch.num_reqs:
        raise KVLayoutError(
            f"block_table has {table.shape[0]} rows for {batch.num_reqs} requests; give one each."
        )
    if slots.shape[0] < batch.num_tokens:
        raise KVLayoutError(
            f"slot_mapping has {slots.shape[0]} slots for {batch.num_tokens} tokens; "
            "give one a real token (-1 where nothing is written)."
        )
    longest = int(batch.seq_lens.max())
    if table.shape[1] * size < longest:
        raise KVLayoutError(
            f"request {int(batch.seq_lens.argmax())} reaches {longest} tokens but its block row "
            f"holds {table.shape[1]} blocks of {size} tokens; widen the block table."
        )
    # Rows are padded to the widest: a row can be too short although the table is wide enough.
    last = (batch.seq_lens - 1) // size
    missing = table[np.arange(batch.num_reqs), last] < 0
    if missing.any():
        bad = int(np.argmax(missing))
        block = int(last[bad])
        raise KVLayoutError(
            f"request {bad} reaches {int(batch.seq_lens[bad])} tokens and needs blocks 0 to "
            f"{block} of {size} tokens, but its block row holds {int(table[bad, block])} for "
            f"block {block}; give the row an id for every block that holds tokens of the request."
        )
    return table, slots


def _reads_of_writes(batch: ScheduledBatch, group: KVGroup) -> _Reads | None:
    """Every context position whose slot is written in this step, or ``None`` if there is none.

    First by whole blocks, which settles nearly every step; then by slot, because a request
    that continues inside a block shares that block with its own new tokens.
    """
    table, all_slots = _check(batch, group)
    size = int(group.block_size)
    readers = np.flatnonzero(batch.num_computed_tokens)
    if readers.size == 0:
        return None
    slots = all_slots[: batch.num_tokens]
    written = slots[slots >= 0] // size

    computed = batch.num_computed_tokens[readers]
    # The request's first new token looks back furthest: `window` positions up to its own.
    first = np.maximum(computed - (group.window or MAX_TOKENS) + 1, 0)
    begin = first // size
    columns = -(-computed // size) - begin
    rows = np.repeat(np.arange(readers.size), columns)
    column = np.arange(rows.size) - np.repeat(np.cumsum(columns) - columns - begin, columns)
    if column.size == 0:  # windows of one token read no context
        return None
    block = table[readers[rows], column]
    if block.min() < 0:
        bad = int(readers[rows[np.argmax(block < 0)]])
        raise KVLayoutError(f"the block row of request {bad} holds a negative id in its context.")
    hit = np.isin(block, written)
    if not hit.any():
        return None
    rows, column, block = rows[hit], column[hit], block[hit].astype(np.int64)

    offset = np.arange(size)
    position = (column[:, None] * size + offset).ravel()
    slot = (block[:, None] * size + offset).ravel()
    row = np.repeat(rows, size)
    inside = (position >= first[row]) & (position < computed[row])
    position, slot, row = position[inside], slot[inside], row[inside]
    # Of several tokens that write a slot the last: a cut before it parts it from the reader.
    order = np.argsort(slots, kind="stable")
    place = np.searchsorted(slots, slot, side="right", sorter=order) - 1
    token = order[np.maximum(place, 0)]
    found = slots[token] == slot
    if not found.any():
        return None
    return _Reads(
        reader=readers[row[found]], position=position[found], slot=slot[found], token=token[found]
    )


def find_kv_hazard(
    plan: SplitPlan, *, block_size: int, block_tables: Any, slot_mapping: Any
) -> KVHazard | None:
    """The first request of stage 0 that reads a KV slot which stage 1 writes in this step.

    ``block_tables``: [>= R, W]; ``slot_mapping``: [>= T]; see :class:`KVGroup`.  Of that
    request the lowest position is reported.  ``None`` means that the plan is safe for this
    KV-cache group.  Raises :class:`KVLayoutError` when the arrays do not fit the batch.
    """
    return hazard_in(plan, [KVGroup(block_size, block_tables, slot_mapping)])


def hazard_in(plan: SplitPlan, groups: Sequence[KVGroup]) -> KVHazard | None:
    """:func:`find_kv_hazard` over several KV-cache groups; the first group with one wins."""
    batch = plan.batch
    for group in groups:
        reads = _reads_of_writes(batch, group)
        if reads is None:
            continue
        broken = reads.crossing(batch.query_start_loc, plan.cut)
        if broken.any():
            first = int(np.argmax(broken))
            token = int(reads.token[first])
            return KVHazard(
                reader=int(reads.reader[first]),
                writer=batch.request_of(token),
                position=int(reads.position[first]),
                slot=int(reads.slot[first]),
                writer_token=token,
            )
    return None


def _unsafe_intervals(batch: ScheduledBatch, groups: Sequence[KVGroup]) -> IntArray:
    """[N, 2] half-open intervals (low, high]: a cut inside one parts a reader from its writer."""
    pairs = []
    for group in groups:
        reads = _reads_of_writes(batch, group)
        if reads is not None:
            starts = batch.query_start_loc[reads.reader]
            later = reads.token > starts
            pairs.append(np.stack([starts[later], reads.token[later]], axis=1))
    if not pairs:
        return np.empty((0, 2), dtype=np.int64)
    spans = np.unique(np.concatenate(pairs), axis=0)
    return spans.astype(np.int64, copy=False)


def _merged(spans: IntArray) -> list[tuple[int, int]]:
    """Overlapping or touching intervals (low, high] joined, in ascending order."""
    joined: list[tuple[int, int]] = []
    for low, high in spans.tolist():
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined


def _move_down(cut: int, spans: list[tuple[int, int]], at_most: Callable[[int], int]) -> int:
    """Largest allowed cut up to ``cut`` that lies in no span; 0 when there is none."""
    for low, high in reversed(spans):
        if low < cut <= high:
            cut = at_most(low)
    return cut


def _move_up(cut: int, spans: list[tuple[int, int]], after: Callable[[int], int]) -> int:
    """Smallest allowed cut from ``cut`` on that lies in no span; the total when there is none."""
    for low, high in spans:
        if low < cut <= high:
            cut = after(high)
    return cut


def safe_plan(plan: SplitPlan, groups: Sequence[KVGroup]) -> SplitPlan | None:
    """``plan`` moved to the nearest cut that parts no reader from its writer.

    The ``request`` policy moves between request boundaries, the others between multiples of
    the alignment; ties go to the later cut.  ``None`` when no cut keeps both stages non-empty.
    """
    batch, step = plan.batch, plan.alignment
    starts = batch.query_start_loc
    spans = _merged(_unsafe_intervals(batch, groups))

    def at_most(token: int) -> int:
        if plan.policy == "request_boundary":
            return int(starts[np.searchsorted(starts, token, side="right") - 1])
        return token // step * step

    def after(token: int) -> int:
        if plan.policy == "request_boundary":
            return int(starts[np.searchsorted(starts, token, side="right")])
        return (token // step + 1) * step

    low = _move_down(plan.cut, spans, at_most)
    high = _move_up(plan.cut, spans, after)
    cut = nearest(low if low > 0 else None, high if high < batch.num_tokens else None, 2 * plan.cut)
    return None if cut is None else plan.moved(cut)
