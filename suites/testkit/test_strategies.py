"""The strategies keep their promises, and reach every kind of step that they claim to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample

from afd_plugin.batch import ScheduledBatch
from afd_testkit.strategies import PagedBatch, batches, batches_with_cut, paged_batches

pytestmark = pytest.mark.cpu

CHECKED = settings(max_examples=100, database=None, deadline=None)
SOUGHT = settings(
    max_examples=2000,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@given(batches(min_tokens=3, max_requests=5, max_scheduled=9, max_computed=20))
@CHECKED
def test_batches_keep_their_bounds(batch: ScheduledBatch) -> None:
    assert 1 <= batch.num_reqs <= 5
    assert batch.num_tokens >= 3
    assert batch.num_scheduled_tokens.min() >= 1
    assert batch.num_scheduled_tokens.max() <= 9
    assert 0 <= batch.num_computed_tokens.min() <= batch.num_computed_tokens.max() <= 20
    assert batch.num_input_tokens >= batch.num_tokens


@given(batches(padding=False))
@CHECKED
def test_padding_can_be_left_out(batch: ScheduledBatch) -> None:
    assert batch.num_input_tokens == batch.num_tokens


@given(batches_with_cut())
@CHECKED
def test_cuts_leave_both_stages_a_token(pair: tuple[ScheduledBatch, int]) -> None:
    batch, cut = pair
    assert 0 < cut < batch.num_tokens


KINDS: dict[str, Callable[[ScheduledBatch], Any]] = {
    "one request": lambda b: b.num_reqs == 1,
    "nothing computed": lambda b: b.num_reqs > 1 and not b.num_computed_tokens.any(),
    "ragged": lambda b: len(set(b.num_scheduled_tokens.tolist())) >= 3,
    "only single tokens": lambda b: b.num_reqs > 2 and b.num_scheduled_tokens.max() == 1,
    "long among short": lambda b: (
        b.num_scheduled_tokens.max() >= 40 and b.num_scheduled_tokens.min() == 1
    ),
    "prefix hit": lambda b: ((b.num_computed_tokens > 0) & (b.num_computed_tokens % 32 == 0)).any(),
    "later chunk": lambda b: (b.num_computed_tokens % 2 == 1).any(),
    "decode beside prefill": lambda b: b.is_prefilling.any() and not b.is_prefilling.all(),
    "decode only": lambda b: b.is_decode_only,
    "last token of a prompt": lambda b: (
        (b.num_scheduled_tokens == 1) & (b.num_computed_tokens > 0) & b.is_prefilling
    ).any(),
    "padded": lambda b: b.num_input_tokens > b.num_tokens,
    "padded to 16": lambda b: b.num_input_tokens > b.num_tokens and b.num_input_tokens % 16 == 0,
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_reach(kind: str) -> None:
    find(batches(), KINDS[kind], settings=SOUGHT)


def test_cuts_reach_boundaries_and_insides() -> None:
    def on_boundary(pair: tuple[ScheduledBatch, int]) -> bool:
        return pair[1] in pair[0].query_start_loc

    find(batches_with_cut(), on_boundary, settings=SOUGHT)
    find(batches_with_cut(), lambda pair: not on_boundary(pair), settings=SOUGHT)


@given(paged_batches())
@CHECKED
def test_slots_follow_the_block_tables(paged: PagedBatch) -> None:
    """From the definition: the slot of position p is its block's, at p modulo the block size."""
    batch, size = paged.batch, paged.block_size
    expected = []
    for request in range(batch.num_reqs):
        start = batch.num_computed_tokens[request]
        for position in range(start, start + batch.num_scheduled_tokens[request]):
            block = paged.block_tables[request, position // size]
            assert block > 0
            expected.append(block * size + position % size)
    assert paged.slot_mapping.tolist() == expected
    assert len(set(expected)) == len(expected)
    assert (paged.slot_mapping.dtype, paged.block_tables.dtype) == (np.int64, np.int32)


@given(paged_batches())
@CHECKED
def test_only_declared_prefixes_share_blocks(paged: PagedBatch) -> None:
    """A context block is read by its owner and by declared readers, and by no one else."""
    batch, size = paged.batch, paged.block_size
    shares = {share.reader: share for share in paged.shares}
    owned: list[int] = []
    for request in range(batch.num_reqs):
        blocks = -(-int(batch.seq_lens[request]) // size)
        row = paged.block_tables[request]
        assert not row[blocks:].any()
        shared = 0
        if request in shares:
            share = shares[request]
            shared = share.blocks
            assert shared >= 1
            assert share.writer != request
            assert row[:shared].tolist() == paged.block_tables[share.writer, :shared].tolist()
            assert batch.num_computed_tokens[request] >= shared * size
            assert batch.seq_lens[share.writer] >= shared * size
        owned += row[shared:blocks].tolist()
    assert len(set(owned)) == len(owned)


@given(paged_batches())
@CHECKED
def test_in_step_sharing_is_told(paged: PagedBatch) -> None:
    written = set(paged.slot_mapping.tolist())
    for share in paged.shares:
        positions = range(share.blocks * paged.block_size)
        row = paged.block_tables[share.reader]
        read = {int(row[p // paged.block_size]) * paged.block_size + p % paged.block_size
                for p in positions}  # fmt: skip
        assert share.in_step == bool(read & written)


PAGED_KINDS: dict[str, Callable[[PagedBatch], Any]] = {
    "no sharing": lambda p: p.batch.num_reqs > 1 and not p.shares,
    "reads what an earlier step wrote": lambda p: any(not s.in_step for s in p.shares),
    "reader before its writer": lambda p: any(s.in_step and s.reader < s.writer for s in p.shares),
    "reader after its writer": lambda p: any(s.in_step and s.reader > s.writer for s in p.shares),
    "two readers of one writer": lambda p: (
        len({s.writer for s in p.shares if s.in_step}) < len([s for s in p.shares if s.in_step])
    ),
    "reader of a reader": lambda p: {s.reader for s in p.shares} & {s.writer for s in p.shares},
    "unused table columns": lambda p: (p.block_tables[:, -1] == 0).all(),
}


@pytest.mark.parametrize("kind", PAGED_KINDS)
def test_paged_batches_reach(kind: str) -> None:
    find(paged_batches(), PAGED_KINDS[kind], settings=SOUGHT)


def test_what_cannot_be_is_not_found() -> None:
    """The search above can fail: it is no proof by construction."""
    with pytest.raises(NoSuchExample):
        find(
            batches(),
            lambda b: b.num_tokens < b.num_reqs,
            settings=settings(SOUGHT, max_examples=50),
        )
