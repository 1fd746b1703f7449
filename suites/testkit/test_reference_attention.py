"""The reference attention obeys every field of its metadata.

With all keys zero each query weighs what it sees equally, so with value ``p`` at position p
a query that sees positions 0..p answers p / 2.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch

from afd_testkit.engines.base import EngineError
from afd_testkit.engines.reference_attention import PagedAttention, PagedKVCache
from afd_testkit.engines.reference_metadata import ReferenceAttentionMetadata
from afd_testkit.engines.reference_model import (
    ReferenceModel,
    ReferenceModelConfig,
    one_thread,
)
from afd_testkit.engines.reference_runner import StockRunner, build_inputs
from afd_testkit.engines.reference_scheduler import Request, Step, StepRow

pytestmark = pytest.mark.cpu

TABLE = [[3, 1, 4], [2, 5, 0]]  # blocks of 2 tokens
COMPUTED, SCHEDULED = [2, 0], [3, 4]


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _one_thread() -> Generator[None, None, None]:
    with one_thread():
        yield


def metadata() -> ReferenceAttentionMetadata:
    """Request 0: 2 computed, 3 scheduled; request 1: 4 scheduled."""
    return ReferenceAttentionMetadata(
        query_start_loc=int32([0, 3, 7]),
        query_start_loc_cpu=int32([0, 3, 7]),
        seq_lens=int32([5, 4]),
        num_reqs=2,
        num_actual_tokens=7,
        max_query_len=4,
        max_seq_len=5,
        block_table_tensor=int32(TABLE),
        slot_mapping=torch.tensor([2, 3, 8, 4, 5, 10, 11]),
        is_prefilling=torch.tensor([True, True]),
        seq_lens_cpu_upper_bound=int32([5, 4]),
    )


def cache() -> PagedKVCache:
    """Positions 0 and 1 of request 0 are there: block 3, slots 6 and 7; 99 everywhere else."""
    stored = PagedKVCache(num_layers=1, num_blocks=7, block_size=2, kv_heads=1, head_dim=2)
    stored.layers[0][:, 1] = 99.0
    stored.layers[0][6, 1], stored.layers[0][7, 1] = 0.0, 1.0
    return stored


def answers(meta: ReferenceAttentionMetadata, stored: PagedKVCache, rows: int = 7) -> list[float]:
    """One number a row: both components of both heads agree on it."""
    value = torch.tensor([2.0, 3, 4, 0, 1, 2, 3] + [55.0] * (rows - 7), dtype=torch.float64)
    value = value[:, None, None].expand(rows, 1, 2)
    query = torch.ones(rows, 2, 2, dtype=torch.float64)
    output = PagedAttention(meta, stored)(0, query, torch.zeros_like(value), value)
    assert bool((output == output[:, :1, :1]).all())
    return [round(float(number), 12) for number in output[:, 0, 0]]


RIGHT = [1.0, 1.5, 2.0, 0.0, 0.5, 1.0, 1.5]


def test_queries_see_their_context_and_no_more() -> None:
    stored = cache()
    assert answers(metadata(), stored) == RIGHT
    written = {2: 2.0, 3: 3.0, 8: 4.0, 4: 0.0, 5: 1.0, 10: 2.0, 11: 3.0, 6: 0.0, 7: 1.0}
    found = stored.layers[0][:, 1, 0, 0].tolist()
    assert found == [written.get(slot, 99.0) for slot in range(14)]


def test_rows_beyond_the_real_tokens_are_zero() -> None:
    assert answers(metadata(), cache(), rows=9) == [*RIGHT, 0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # Four keys at most: positions 3 and 4 of request 0 see 0..3.
        ({"max_seq_len": 4}, [1.0, 1.5, 1.5, *RIGHT[3:]]),
        ({"seq_lens_cpu_upper_bound": int32([4, 4])}, [1.0, 1.5, 1.5, *RIGHT[3:]]),
        ({"max_query_len": 2}, [1.0, 1.5, 0.0, 0.0, 0.5, 0.0, 0.0]),
        ({"num_actual_tokens": 6}, [*RIGHT[:6], 0.0]),
        ({"num_reqs": 1}, [*RIGHT[:3], 0.0, 0.0, 0.0, 0.0]),
        ({"causal": False}, [2.0, 2.0, 2.0, 1.5, 1.5, 1.5, 1.5]),
        # A decode kernel serves one query a request.
        ({"is_prefilling": torch.tensor([True, False])}, [*RIGHT[:4], 0.0, 0.0, 0.0]),
        # A stale computed count puts request 0's queries at positions 0, 1, 2.
        ({"_num_computed_tokens_cache": int32([0, 0])}, [0.0, 0.5, 1.0, *RIGHT[3:]]),
        # Before the first key there is nothing to see.
        ({"_num_computed_tokens_cache": int32([-2, 0])}, [0.0, 0.0, 0.0, *RIGHT[3:]]),
        # A sequence length that was not advanced: 3 keys, positions 0, 1, 2.
        ({"seq_lens": int32([3, 4])}, [0.0, 0.5, 1.0, *RIGHT[3:]]),
        # Request 1 reads request 0's blocks: 0, 1, 2, 3 happen to be the same values there ...
        ({"block_table_tensor": int32([TABLE[0], TABLE[0]])}, RIGHT),
        # ... while request 0 on request 1's row finds its 0, 1, 2, 3 and the null block's 99.
        ({"block_table_tensor": int32([TABLE[1], TABLE[1]])}, [1.0, 1.5, 21.0, *RIGHT[3:]]),
        # Both copies of the offsets count.
        ({"query_start_loc_cpu": int32([0, 2, 6])}, [1.0, 1.5, 0.0, *RIGHT[3:]]),
    ],
)
def test_each_field_shows(change: dict[str, object], expected: list[float]) -> None:
    assert answers(replace(metadata(), **change), cache()) == expected


def test_a_token_without_a_slot_is_not_written() -> None:
    meta = replace(metadata(), slot_mapping=torch.tensor([2, 3, -1, 4, 5, 10, 11]))
    stored = cache()
    assert answers(meta, stored)[2] == (0 + 1 + 2 + 3 + 99) / 5
    assert stored.layers[0][[8, 13], 1, 0, 0].tolist() == [99.0, 99.0]  # nor at the end, as -1


def test_block_row_too_short() -> None:
    meta = replace(metadata(), seq_lens=int32([5, 7]), max_seq_len=7, seq_lens_cpu_upper_bound=None)
    with pytest.raises(EngineError, match=r"7 KV positions .* 3 blocks of 2.* at most 6"):
        answers(meta, cache())


def test_scrubbed_blocks_are_zero_and_others_untouched() -> None:
    stored = cache()
    stored.scrub([3, 5])
    assert stored.layers[0][:, 1, 0, 0].tolist() == [99.0] * 6 + [
        0.0,
        0.0,
        99.0,
        99.0,
        0.0,
        0.0,
        99.0,
        99.0,
    ]


class Halves:
    """A 48-token prompt in two steps of 24, with a place in between to do harm."""

    def __init__(self) -> None:
        config = ReferenceModelConfig()
        self.model = ReferenceModel(config, seed=3)
        self.cache = PagedKVCache(
            num_layers=3, num_blocks=13, block_size=4, kv_heads=2, head_dim=16
        )
        self.runner = StockRunner(self.model, self.cache, table_width=12)
        tokens = torch.randint(0, 300, (48,), generator=torch.Generator().manual_seed(5))
        self.request = Request("p", tokens.tolist(), 48, 1, blocks=list(range(1, 13)))
        self.runner.execute(self.half(0))

    def half(self, start: int) -> Step:
        return Step((StepRow(self.request, start, 24, samples=start > 0),), ())

    def second(self, *, shift: int = 0) -> torch.Tensor:
        """Log-probabilities [24, 300] of the second half, its positions shifted."""
        step = self.half(24)
        inputs = build_inputs(step, block_size=4, table_width=12)
        self.runner.attention = PagedAttention(inputs.metadata, self.cache)
        moved = replace(inputs, positions=inputs.positions + shift)
        return self.model.logprobs(self.runner.compute(step, moved)[0])


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("position", [0, 11, 23])
def test_one_wrong_kv_row_is_seen(layer: int, position: int) -> None:
    right = Halves().second()
    harmed = Halves()
    slots = harmed.cache.slots(torch.tensor(harmed.request.blocks), 48)
    harmed.cache.layers[layer][slots[position]] = 0.0
    assert float((harmed.second() - right).abs().max()) > 1e-2


def test_shifted_positions_are_seen() -> None:
    right = Halves().second()
    assert float((Halves().second(shift=1) - right).abs().max()) > 1e-2
