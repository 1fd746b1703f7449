"""Reads KV cache rows of vLLM's attention backends by token position.

vLLM-Ascend keeps two tensors a layer, [blocks, block size, heads, columns]: keys and values, or
latent and rope.  CPU_ATTN packs keys inside a block in an order that depends on the instruction
set.  That order is not assumed: the backend's own cache writer is run once on a scratch block
whose every element carries its own number, and what lands where is the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from afd_testkit.engines._vllm_join import LayerRows
from afd_testkit.engines.base import EngineError, FloatArray

# Integers up to this are exact in bfloat16, the narrowest cache dtype read here.
_DIGIT = 128
# What blocks hold that no request has written: finite, since kernels may load what they then
# mask, and so large that a read of it cannot be mistaken for rounding.
POISON = 1024.0


class KvReader:
    """Per-layer KV rows through a request's block table."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._maps: dict[tuple[object, ...], torch.Tensor] = {}
        self._layers = self._attention_layers()

    def backends(self) -> list[str]:
        """Names of the attention backends in use, sorted."""
        return sorted({layer.attn_backend.get_name() for _, layer in self._layers})

    def read(self, row: int, tokens: int) -> tuple[LayerRows, ...]:
        """Positions 0..tokens-1 of batch row ``row`` in every layer.

        Columns: keys of this rank's KV heads, then values; or the latent row of MLA.
        """
        return tuple(self._read_layer(group, layer, row, tokens) for group, layer in self._layers)

    def blocks_of(self, row: int) -> set[int]:
        """Ids of the KV blocks that batch row ``row`` holds now, over all groups."""
        held: set[int] = set()
        for table in self._runner.input_batch.block_table.block_tables:
            held.update(table.block_table.np[row, : int(table.num_blocks_per_row[row])].tolist())
        return held

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrite ``blocks`` in every layer, so that nothing right is left in them by chance."""
        ids = torch.tensor(blocks, dtype=torch.int64)
        for _, layer in self._layers:
            for cache in _tensors(layer):
                cache.index_fill_(0, ids.to(cache.device), POISON)

    def _attention_layers(self) -> list[tuple[int, Any]]:
        """(KV cache group, attention layer) in model order."""
        groups = self._runner.kv_cache_config.kv_cache_groups
        group_of = {name: i for i, group in enumerate(groups) for name in group.layer_names}
        context = self._runner.compilation_config.static_forward_context
        return [(group_of[name], layer) for name, layer in context.items() if name in group_of]

    def _read_layer(self, group: int, layer: Any, row: int, tokens: int) -> LayerRows:
        table = self._runner.input_batch.block_table.block_tables[group]
        size = int(table.block_size)
        needed = -(-tokens // size)
        if int(table.num_blocks_per_row[row]) < needed:
            raise EngineError(
                f"batch row {row} has {table.num_blocks_per_row[row]} KV blocks of {size}, "
                f"too few for {tokens} prompt tokens"
            )
        ids = torch.from_numpy(table.block_table.np[row, :needed].astype(np.int64))
        parts = self._parts(layer, ids, size)
        rows = torch.cat([part.reshape(needed * size, -1)[:tokens] for part in parts], dim=1)
        array: FloatArray = rows.to(torch.float32).cpu().numpy().copy()
        return self._as_rows(layer, array, tuple(int(part[0].numel()) // size for part in parts))

    def _parts(self, layer: Any, ids: torch.Tensor, size: int) -> list[torch.Tensor]:
        """The blocks ``ids``: keys and values, latent and rope, or latent rows, token by token.

        Each is [blocks, size, ...].
        """
        tensors = _tensors(layer)
        if len(tensors) == 2 and all(cache.dim() == 4 for cache in tensors):
            if any(int(cache.shape[1]) != size for cache in tensors):
                raise EngineError(
                    f"the block table counts in blocks of {size}, the KV cache of backend "
                    f"{layer.attn_backend.get_name()} in blocks of {int(tensors[0].shape[1])}"
                )
            return [cache[ids.to(cache.device)] for cache in tensors]
        if len(tensors) == 1 and tensors[0].dim() == 3:  # MLA: [blocks, size, latent + rope]
            return [tensors[0][ids]]
        if len(tensors) == 1 and tensors[0].dim() == 4:  # CPU_ATTN: [blocks, heads, size, 2 * dim]
            ordered = tensors[0][ids].reshape(len(ids), -1)[:, self._order(layer, size)]
            return list(ordered.reshape(len(ids), size, 2, -1).unbind(dim=2))
        shapes = [tuple(cache.shape) for cache in tensors]
        raise EngineError(
            f"KV cache of shapes {shapes} under backend {layer.attn_backend.get_name()} is not "
            "one this adapter can read"
        )

    def _as_rows(self, layer: Any, rows: FloatArray, parts: tuple[int, ...]) -> LayerRows:
        config = self._runner.model_config
        if config.use_mla:
            return LayerRows(rows, heads=1, total=1, parts=parts)
        total = int(config.get_total_num_kv_heads())
        return LayerRows(rows, heads=int(layer.num_kv_heads), total=total, parts=parts)

    def _order(self, layer: Any, block_size: int) -> torch.Tensor:
        """Flat positions inside a block, ordered by token, then key and value columns."""
        cache = layer.kv_cache
        key = (layer.isa, cache.dtype, tuple(cache.shape[1:]), block_size)
        if key not in self._maps:
            self._maps[key] = _learn_order(layer, block_size)
        return self._maps[key]


def _tensors(layer: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that make up a layer's KV cache, blocks first."""
    cache = layer.kv_cache
    return (cache,) if isinstance(cache, torch.Tensor) else tuple(cache)


def _learn_order(layer: Any, block_size: int) -> torch.Tensor:
    """Number every element of one block, write it, and find where each number went."""
    from vllm import _custom_ops as ops

    cache = layer.kv_cache
    heads, head_size = int(cache.shape[1]), int(cache.shape[3]) // 2
    count = 2 * heads * block_size * head_size
    numbers = torch.arange(count).reshape(block_size, 2, heads, head_size)
    found = torch.zeros(count, dtype=torch.int64)
    slots = torch.arange(block_size)
    weight = 1
    while weight < count:  # one digit at a time, each exact in the cache's dtype
        digits = (numbers // weight % _DIGIT).to(cache.dtype)
        scratch = torch.zeros(1, heads, block_size, 2 * head_size, dtype=cache.dtype)
        # The backend's own split of a block into keys and values.
        halves = scratch.view(1, heads, 2 * block_size, head_size).chunk(2, dim=2)
        key, value = digits[:, 0].contiguous(), digits[:, 1].contiguous()
        ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, layer.isa)
        found += scratch.flatten().to(torch.int64) * weight
        weight *= _DIGIT
    order = torch.argsort(found)
    if not torch.equal(found[order], torch.arange(count)):
        raise EngineError(
            f"the cache writer of instruction set {layer.isa!r} does not place each element "
            "once; this adapter cannot read its KV rows"
        )
    return order
