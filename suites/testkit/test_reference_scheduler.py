"""Scheduler facts of the reference engine, worked out by hand."""

from __future__ import annotations

import pytest

from afd_testkit.engines.reference_scheduler import (
    BatchRows,
    BlockPool,
    Request,
    Scheduler,
    Step,
    hash_blocks,
)

pytestmark = pytest.mark.cpu


def request(name: str, length: int, *, first: int = 0, max_tokens: int = 1) -> Request:
    """A prompt of the tokens ``first, first + 1, ...``."""
    return Request(name, list(range(first, first + length)), length, max_tokens)


def scheduler(**changes: int | bool) -> Scheduler:
    options: dict[str, int | bool] = {
        "num_blocks": 65,
        "block_size": 4,
        "token_budget": 64,
        "max_num_seqs": 8,
        "prefix_caching": True,
    }
    return Scheduler(**(options | changes))  # type: ignore[arg-type]


def facts(step: Step) -> list[tuple[str, int, int]]:
    return [(row.request.name, row.num_computed, row.num_scheduled) for row in step.rows]


def advance(subject: Scheduler) -> list[tuple[str, int, int]]:
    """Run one step in which every sampled token is 7."""
    step = subject.schedule()
    subject.update(step, {row.request.name: 7 for row in step.rows if row.samples})
    return facts(step)


def test_running_requests_come_first_and_prompts_are_chunked() -> None:
    subject = scheduler(token_budget=6, prefix_caching=False)
    for name, length in (("a", 8), ("b", 3), ("c", 2)):
        subject.add(request(name, length))
    assert advance(subject) == [("a", 0, 6)]
    assert advance(subject) == [("a", 6, 2), ("b", 0, 3), ("c", 0, 1)]
    assert advance(subject) == [("c", 1, 1)]
    assert not subject.has_work


def test_no_more_requests_than_allowed() -> None:
    subject = scheduler(max_num_seqs=2)
    for name in "abc":
        subject.add(request(name, 2))
    assert advance(subject) == [("a", 0, 2), ("b", 0, 2)]
    assert advance(subject) == [("c", 0, 2)]


def test_decode_steps_until_max_tokens() -> None:
    subject = scheduler()
    generated = request("a", 3, max_tokens=3)
    subject.add(generated)
    assert [advance(subject) for _ in range(3)] == [[("a", 0, 3)], [("a", 3, 1)], [("a", 4, 1)]]
    assert generated.token_ids == [0, 1, 2, 7, 7, 7]
    assert not subject.has_work


@pytest.mark.parametrize(
    ("length", "cached"),
    [(4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12), (40, 12)],
)
def test_at_least_one_token_is_computed(length: int, cached: int) -> None:
    """Three blocks of 4 are cached by a 12-token prompt."""
    subject = scheduler()
    subject.add(request("first", 12))
    advance(subject)
    subject.add(request("second", length))
    assert advance(subject) == [("second", cached, length - cached)]


def test_same_step_hits_only_what_the_writer_has_allocated() -> None:
    """Cached at allocation: a's first chunk fills 2 of its 4 blocks, its second the rest."""
    subject = scheduler(token_budget=11)
    subject.add(request("a", 16))
    assert advance(subject) == [("a", 0, 11)]
    subject.add(request("b", 16))
    assert advance(subject) == [("a", 11, 5), ("b", 12, 4)]

    subject = scheduler(token_budget=11)
    subject.add(request("a", 10))
    subject.add(request("b", 16))
    assert advance(subject) == [("a", 0, 10), ("b", 8, 1)]


def test_second_block_row_holds_hits_and_new_blocks() -> None:
    subject = scheduler(block_size=32, token_budget=256)
    first, second = request("first", 81), request("second", 81)
    subject.add(first)
    assert advance(subject) == [("first", 0, 81)]
    subject.add(second)
    assert advance(subject) == [("second", 64, 17)]
    assert second.blocks[:2] == first.blocks[:2]
    assert len(second.blocks) == 3
    assert second.blocks[2] not in first.blocks


def test_a_request_waits_for_blocks_to_its_end() -> None:
    """4 usable blocks: a takes 2, b needs 3 (8 prompt + 1 generated that is fed back)."""
    subject = scheduler(num_blocks=5, prefix_caching=False)
    subject.add(request("a", 8))
    subject.add(request("b", 8, max_tokens=2))
    assert advance(subject) == [("a", 0, 8)]
    assert advance(subject) == [("b", 0, 8)]


def test_the_last_generated_token_needs_no_block() -> None:
    """2 + 2 blocks fit the 4 usable ones, because 8 prompt tokens and one sampled one need 2."""
    subject = scheduler(num_blocks=5, prefix_caching=False)
    subject.add(request("a", 8))
    subject.add(request("b", 8))
    assert advance(subject) == [("a", 0, 8), ("b", 0, 8)]


def test_generated_blocks_are_cached_too() -> None:
    """3 prompt tokens and two 7s: the last is never fed back, so the block of 4 is complete."""
    subject = scheduler()
    subject.add(request("a", 3, max_tokens=2))
    advance(subject), advance(subject)
    subject.add(Request("b", [0, 1, 2, 7, 5], 5, 1))
    assert advance(subject) == [("b", 4, 1)]


def test_new_requests_take_the_lowest_free_row() -> None:
    a, b, c, d, e = (request(name, 1) for name in "abcde")
    rows = BatchRows()
    assert rows.arrange([a, b, c]) == [a, b, c]
    assert rows.arrange([b, c, d, e]) == [d, b, c, e]


def test_open_rows_are_filled_from_the_end() -> None:
    a, b, c, d, e = (request(name, 1) for name in "abcde")
    rows = BatchRows()
    rows.arrange([a, b, c, d])
    assert rows.arrange([b, c, d]) == [d, b, c]
    assert rows.arrange([c, e]) == [e, c]
    assert rows.arrange([]) == []


def test_free_blocks_are_reused_oldest_first_and_tails_before_prefixes() -> None:
    pool = BlockPool(5)
    first, second = [pool.take(), pool.take()], [pool.take(), pool.take()]
    assert (first, second) == ([1, 2], [3, 4])
    pool.release(second)
    pool.release(first)
    assert [pool.take() for _ in range(4)] == [4, 3, 2, 1]


def test_a_cache_entry_lives_until_its_block_is_handed_out() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.register(block, b"x")
    pool.release([block])
    assert pool.lookup(b"x") == block
    pool.share(block)
    assert pool.num_free == 1
    pool.release([block])
    assert [pool.take(), pool.take()] == [2, block]
    assert pool.lookup(b"x") is None


def test_shared_blocks_are_free_only_when_all_let_go() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_block_hashes_depend_on_parent_tokens_and_salt() -> None:
    base = hash_blocks([1, 2, 3, 4, 5], 2, None)
    assert len(base) == 2
    assert hash_blocks([1, 2, 3, 4], 2, None) == base
    assert hash_blocks([3, 4], 2, None)[0] not in base
    assert hash_blocks([1, 2], 2, "s")[0] != base[0]
    assert hash_blocks([9, 2, 3, 4], 2, None)[1] != base[1]
