"""Steps to measure on: counts, KV layout and metadata as vLLM 0.32.0's CPU runner fills them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from afd_plugin.hazards import KVGroup

BLOCK_SIZE = 32
_MAX_SCHEDULED = 60
_MAX_PREFIX_BLOCKS = 4


class Hits(StrEnum):
    """What the requests of a step find in the prefix cache."""

    NONE = "no hits"
    EARLIER = "prefix hits"  # in every second request, computed by earlier steps
    SAME_STEP = "same-step hits"  # in every second request, only now computed by the one before


@dataclass(frozen=True)
class Step:
    """One scheduled step.

    ``scheduled``, ``computed``: [R] int32, ``is_prefilling``: [R] bool, numpy, as the runner has
    them.  ``metadata``: the whole step's common attention metadata.  ``group``: its KV layout.
    """

    scheduled: NDArray[np.int32]
    computed: NDArray[np.int32]
    is_prefilling: NDArray[np.bool_]
    metadata: Any
    group: KVGroup


def make_step(metadata_class: Any, requests: int, hits: Hits, *, seed: int = 0) -> Step:
    """A prefill step of ``requests`` requests of 1 to 60 new tokens each."""
    rng = np.random.default_rng(seed)
    scheduled = rng.integers(1, _MAX_SCHEDULED, requests).astype(np.int32)
    prefix = np.zeros(requests, dtype=np.int32)  # blocks
    if hits is Hits.EARLIER:
        prefix[::2] = rng.integers(1, _MAX_PREFIX_BLOCKS + 1, prefix[::2].size)
    elif hits is Hits.SAME_STEP:
        prefix[1::2] = 1
        scheduled[:-1:2] = np.maximum(scheduled[:-1:2], BLOCK_SIZE)  # fills what the next reads
    computed = prefix * BLOCK_SIZE
    lens = scheduled + computed
    width = int(-(-lens.max() // BLOCK_SIZE))
    table = (1 + np.arange(requests * width, dtype=np.int32)).reshape(requests, width)
    if hits is Hits.SAME_STEP:
        table[1::2, 0] = table[: requests // 2 * 2 : 2, 0]
    starts = np.zeros(requests + 1, dtype=np.int32)
    np.cumsum(scheduled, out=starts[1:])
    row = np.repeat(np.arange(requests), scheduled)
    position = np.arange(starts[-1]) - np.repeat(starts[:-1] - computed, scheduled)
    slots = table[row, position // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    slots += position % BLOCK_SIZE
    prefilling = np.ones(requests, dtype=np.bool_)
    # The CPU runner has one buffer for the offsets of host and device, the others apart; all
    # fields are views of the first rows of longer buffers.
    offsets = _buffer(starts)
    metadata = metadata_class(
        query_start_loc=offsets[: requests + 1],
        query_start_loc_cpu=offsets[: requests + 1],
        seq_lens=_buffer(lens)[:requests],
        seq_lens_cpu_upper_bound=_buffer(lens)[:requests],
        num_reqs=requests,
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(scheduled.max()),
        max_seq_len=int(lens.max()),
        block_table_tensor=_buffer(table)[:requests],
        slot_mapping=_buffer(slots)[: slots.size],
        causal=True,
        positions=_buffer(position)[: position.size],
        is_prefilling=torch.from_numpy(prefilling.copy()),
    )
    return Step(scheduled, computed, prefilling, metadata, KVGroup(BLOCK_SIZE, table, slots))


def _buffer(values: NDArray[Any]) -> torch.Tensor:
    """A tensor of the rows of ``values`` and 64 more."""
    rows = torch.from_numpy(values)
    return torch.cat([rows, torch.zeros((64, *rows.shape[1:]), dtype=rows.dtype)])
