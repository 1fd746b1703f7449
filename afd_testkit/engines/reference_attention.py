"""Paged KV storage and the attention that reads it, told what to do by metadata alone.

Written for the reader: one request after the other, one head after the other.  It obeys its
metadata as literally as a kernel does, wrong metadata included, because its purpose is
to make such metadata visible in the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from afd_testkit.engines.base import EngineError
from afd_testkit.engines.reference_metadata import ReferenceAttentionMetadata


class PagedKVCache:
    """Keys and values of all layers.  Slot ``b * block_size + o`` is row ``o`` of block ``b``.

    ``layers[i]``: [num_blocks * block_size, 2, kv_heads, head_dim] float64; index 0 of the
    second axis is the (rotated) key, 1 the value.
    """

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int
    ) -> None:
        self.block_size = block_size
        shape = (num_blocks * block_size, 2, kv_heads, head_dim)
        self.layers = [torch.zeros(shape, dtype=torch.float64) for _ in range(num_layers)]

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store rows [n, kv_heads, head_dim] at ``slots`` [n]; negative slots are padding."""
        real = slots >= 0
        self.layers[layer][slots[real]] = torch.stack((key[real], value[real]), dim=1)

    def slots(self, block_row: torch.Tensor, length: int) -> torch.Tensor:
        """[length] slots of positions ``0 .. length - 1`` of the request with this block row.

        Raises :class:`EngineError` when the row is too short for them.
        """
        position = torch.arange(length)
        if length > block_row.numel() * self.block_size:
            raise EngineError(
                f"reference engine: {length} KV positions were asked of a block row of "
                f"{block_row.numel()} blocks of {self.block_size}; the row holds at most "
                f"{block_row.numel() * self.block_size}. Give each request all of its blocks."
            )
        block = block_row.long()[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def rows(self, block_row: torch.Tensor, length: int) -> list[torch.Tensor]:
        """One [length, 2 * kv_heads * head_dim] copy a layer, read through the block row."""
        slots = self.slots(block_row, length)
        return [layer[slots].flatten(1) for layer in self.layers]

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero the blocks, so that nobody finds by luck what an earlier owner left there.

        Engines do not do this.  The oracle does: a reader that comes before its writer
        must see nothing, also where the block happens to hold the very same prompt.
        """
        offsets = torch.arange(self.block_size)
        slots = (
            torch.tensor(blocks, dtype=torch.long)[:, None] * self.block_size + offsets
        ).ravel()
        for layer in self.layers:
            layer[slots] = 0.0


class PagedAttention:
    """The attention of one step or stage: metadata bound to the cache.

    Calling it writes the step's keys and values, then attends.  These fields decide:
    ``slot_mapping`` where rows are written, ``query_start_loc`` where a request's queries
    begin and its host copy how many there are, ``seq_lens`` and ``block_table_tensor`` which
    keys are read, the computed count at which absolute position a query stands,
    ``is_prefilling`` whether more than one query is served, and the ``max_*`` and upper bounds
    what is cut off.
    """

    def __init__(self, metadata: ReferenceAttentionMetadata, cache: PagedKVCache) -> None:
        self.metadata = metadata
        self.cache = cache

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """[rows, heads, head_dim] of ``query`` [rows, heads, head_dim] over the paged keys.

        ``key``, ``value``: [rows, kv_heads, head_dim].  Rows that no request owns come
        back as zeros.
        """
        meta = self.metadata
        # Kernels take the number of rows to write from the slot mapping, which may
        # be shorter than padded key and value buffers.
        written = min(meta.num_actual_tokens, meta.slot_mapping.numel(), key.shape[0])
        self.cache.write(layer, meta.slot_mapping[:written], key[:written], value[:written])

        output = torch.zeros_like(query)
        for request in range(meta.num_reqs):
            rows, positions = self._queries(request, query.shape[0])
            keys, values = self._context(layer, request)
            output[rows] = _attend(query[rows], positions, keys, values, causal=meta.causal)
        return output

    def _queries(self, request: int, available: int) -> tuple[slice, torch.Tensor]:
        """Rows of the request's queries and their absolute positions [n] int64."""
        meta = self.metadata
        start = int(meta.query_start_loc[request])
        length = int(meta.query_start_loc_cpu[request + 1] - meta.query_start_loc_cpu[request])
        if meta.is_prefilling is not None and not bool(meta.is_prefilling[request]):
            length = min(length, 1)  # a decode kernel serves one query a request
        stop = min(start + min(length, meta.max_query_len), meta.num_actual_tokens, available)
        first = int(meta.compute_num_computed_tokens()[request])
        return slice(start, stop), first + torch.arange(max(stop - start, 0))

    def _context(self, layer: int, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [length, kv_heads, head_dim] of the request's readable positions."""
        meta = self.metadata
        length = min(int(meta.seq_lens[request]), meta.max_seq_len)
        if meta.seq_lens_cpu_upper_bound is not None:
            length = min(length, int(meta.seq_lens_cpu_upper_bound[request]))
        slots = self.cache.slots(meta.block_table_tensor[request], length)
        rows = self.cache.layers[layer][slots]
        return rows[:, 0], rows[:, 1]


def _attend(
    query: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool,
) -> torch.Tensor:
    """Grouped-query attention of [n, heads, d] over [length, kv_heads, d]; zeros for a query
    that may see no key."""
    heads, head_dim = query.shape[1:]
    group = heads // keys.shape[1]
    visible = torch.ones(query.shape[0], keys.shape[0], dtype=torch.bool)
    if causal:
        visible = torch.arange(keys.shape[0])[None, :] <= positions[:, None]
    blind = ~visible.any(dim=1, keepdim=True)
    output = torch.empty_like(query)
    for head in range(heads):
        scores = query[:, head] @ keys[:, head // group].T / head_dim**0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        output[:, head] = weights.masked_fill(blind, 0.0) @ values[:, head // group]
    return output
