"""Hypothesis strategies for scheduled steps, small enough to shrink and wide enough to hurt.

Everything that a scheduler may hand to the splitter occurs: fresh requests and requests with
computed tokens, one request and many, ragged lengths, single-token rests of prompts and decodes,
prefix hits (computed counts on a block boundary), later chunks (anywhere), padded extents, and,
in :func:`paged_batches`, blocks that requests share, also within the step that writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from afd_plugin.batch import ScheduledBatch

__all__ = ["PagedBatch", "Share", "batches", "batches_with_cut", "paged_batches"]

_BLOCK_SIZES = (1, 2, 4, 16, 32)


@dataclass(frozen=True)
class Share:
    """Request ``reader`` uses the first ``blocks`` blocks of request ``writer`` as its own.

    ``in_step``: some slot of them is written only in this step, so that the reader depends on
    the writer's part of the step.
    """

    reader: int
    writer: int
    blocks: int
    in_step: bool


@dataclass(frozen=True)
class PagedBatch:
    """A step and where its tokens live in a paged KV cache.

    ``block_tables``: int32 [R, W], block ids of each request in order; 0, which no request
    owns, fills the unused rest.  ``slot_mapping``: int64 [T], slot (block * block_size +
    offset) that each scheduled token writes.  No slot is written twice.
    """

    batch: ScheduledBatch
    block_size: int
    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    shares: tuple[Share, ...]


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    min_tokens: int = 1,
    max_requests: int = 8,
    max_scheduled: int = 70,
    max_computed: int = 200,
    padding: bool = True,
) -> ScheduledBatch:
    """Steps of 1 to ``max_requests`` requests with at least ``min_tokens`` real tokens.

    ``max_scheduled`` and ``max_computed`` bound each request.  With ``padding`` the padded
    extent may exceed the real tokens.  About half of the steps have nothing computed.
    ``is_prefilling`` is absent (inferred), or given so that any request may be in its prompt.
    """
    size = draw(st.integers(1, max_requests))
    # Lengths of one token, and of many, are both common in a real step.
    length = st.one_of(st.just(1), st.integers(1, max_scheduled))
    scheduled = draw(st.lists(length, min_size=size, max_size=size))
    scheduled[-1] += max(0, min_tokens - sum(scheduled))
    computed = [0] * size
    if draw(st.booleans()):
        block = draw(st.sampled_from(_BLOCK_SIZES))
        hit = st.integers(0, max_computed // block).map(lambda blocks: blocks * block)
        chunk = st.integers(0, max_computed)
        computed = draw(st.lists(st.one_of(hit, chunk), min_size=size, max_size=size))
    return ScheduledBatch(
        num_scheduled_tokens=scheduled,
        num_computed_tokens=computed,
        is_prefilling=draw(_prefilling(scheduled, computed)),
        num_input_tokens=draw(_extents(sum(scheduled))) if padding else None,
    )


@st.composite
def _prefilling(draw: st.DrawFn, scheduled: list[int], computed: list[int]) -> list[bool] | None:
    """Absent, or true for all but some of the requests that could be decoding."""
    if draw(st.booleans()):
        return None
    may_decode = [s == 1 and c > 0 for s, c in zip(scheduled, computed, strict=True)]
    return [not (may and draw(st.booleans())) for may in may_decode]


@st.composite
def _extents(draw: st.DrawFn, tokens: int) -> int | None:
    """Absent, the real tokens rounded up, or any extent above them."""
    kind = draw(st.sampled_from(("none", "rounded", "any")))
    if kind == "none":
        return None
    if kind == "rounded":
        unit = draw(st.sampled_from((2, 4, 8, 16)))
        return -(-tokens // unit) * unit
    return tokens + draw(st.integers(0, 40))


@st.composite
def batches_with_cut(
    draw: st.DrawFn, *, max_requests: int = 8, max_scheduled: int = 70, padding: bool = True
) -> tuple[ScheduledBatch, int]:
    """A step of two tokens or more and the first token of its second stage.

    Cuts at a request boundary and cuts inside a request are equally likely where both exist.
    """
    batch = draw(
        batches(
            min_tokens=2, max_requests=max_requests, max_scheduled=max_scheduled, padding=padding
        )
    )
    starts = {int(start) for start in batch.query_start_loc[1:-1]}
    inside = [token for token in range(1, batch.num_tokens) if token not in starts]
    choices = [st.sampled_from(sorted(group)) for group in (starts, inside) if group]
    return batch, draw(st.one_of(choices))


@st.composite
def paged_batches(
    draw: st.DrawFn,
    *,
    min_tokens: int = 2,
    max_requests: int = 6,
    max_scheduled: int = 40,
    block_sizes: tuple[int, ...] = (2, 4, 16),
) -> PagedBatch:
    """Steps with block tables and slot mapping, in any order of readers and writers.

    A reader shares only blocks that its writer has filled at the end of the step, and has
    exactly their tokens, or more, computed: as a prefix cache hands them out.  Block ids are
    shuffled, rows are wider than needed, and a writer may itself be a reader.
    """
    block_size = draw(st.sampled_from(block_sizes))
    size = draw(st.integers(1, max_requests))
    scheduled = draw(st.lists(st.integers(1, max_scheduled), min_size=size, max_size=size))
    scheduled[-1] += max(0, min_tokens - sum(scheduled))
    computed = [0] * size
    prefix: dict[int, tuple[int, int]] = {}  # reader -> (writer, blocks)
    # Requests are made in one order and put into the step in another, so that a reader may
    # stand on either side of its writer.
    order = draw(st.permutations(range(size)))
    for place, request in enumerate(order):
        full = [(w, (computed[w] + scheduled[w]) // block_size) for w in order[:place]]
        sources = [(writer, blocks) for writer, blocks in full if blocks > 0]
        shares = draw(st.booleans())
        if sources and shares:
            writer, most = draw(st.sampled_from(sources))
            blocks = draw(st.integers(1, most))
            prefix[request] = (writer, blocks)
            computed[request] = blocks * block_size
        if draw(st.booleans()):  # own blocks of earlier steps
            computed[request] += draw(st.integers(0, 3 * block_size))
    rows = _rows(draw, order, scheduled, computed, prefix, block_size)
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    tables = np.zeros((size, width), dtype=np.int32)
    for request, row in enumerate(rows):
        tables[request, : len(row)] = row
    slots = [
        rows[request][position // block_size] * block_size + position % block_size
        for request in range(size)
        for position in range(computed[request], computed[request] + scheduled[request])
    ]
    return PagedBatch(
        batch=ScheduledBatch(
            num_scheduled_tokens=scheduled,
            num_computed_tokens=computed,
            is_prefilling=[True] * size,
        ),
        block_size=block_size,
        block_tables=tables,
        slot_mapping=np.array(slots, dtype=np.int64),
        shares=_shares(prefix, rows, set(slots), block_size),
    )


def _rows(
    draw: st.DrawFn,
    order: list[int],
    scheduled: list[int],
    computed: list[int],
    prefix: dict[int, tuple[int, int]],
    block_size: int,
) -> list[list[int]]:
    """Block ids of each request: those it shares, then fresh ones."""
    needed = [-(-(c + s) // block_size) for c, s in zip(computed, scheduled, strict=True)]
    fresh = iter(draw(st.permutations(range(1, sum(needed) + 1))))
    rows: list[list[int]] = [[] for _ in order]
    for request in order:
        writer, blocks = prefix.get(request, (request, 0))
        shared = rows[writer][:blocks]
        rows[request] = shared + [next(fresh) for _ in range(needed[request] - blocks)]
    return rows


def _shares(
    prefix: dict[int, tuple[int, int]], rows: list[list[int]], written: set[int], block_size: int
) -> tuple[Share, ...]:
    def in_step(blocks: list[int]) -> bool:
        return any(b * block_size + i in written for b in blocks for i in range(block_size))

    return tuple(
        Share(reader, writer, blocks, in_step(rows[writer][:blocks]))
        for reader, (writer, blocks) in sorted(prefix.items())
    )
