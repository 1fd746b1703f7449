"""Reference operator: decode attention over a paged cache, one query a request."""

from __future__ import annotations

import torch

from afd_testkit.npu.errors import KernelLimit
from afd_testkit.npu.limits import limit
from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import HALVES, limit_dtype
from afd_testkit.npu.ops.attention_core import attend
from afd_testkit.npu.ops.attention_requests import PagedCache, per_request

PAGED = "torch_npu._npu_paged_attention"


@operator(
    PAGED,
    "_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, "
    "int num_heads, float scale_value, Tensor block_table, Tensor context_lens, Tensor(a!) out, *, "
    "Tensor? workspace=None) -> ()",
    source="schema in libop_plugin_atb; torch_npu's documentation of _npu_paged_attention_v2; "
    "vllm_ascend attention_v1.py",
)
def _npu_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """Attention of the one query of each request over all of its tokens, written into ``out``.

    ``query`` float16 or bfloat16 [T, N, D]; ``key_cache`` [blocks, block_size, Nkv, D],
    ``value_cache`` alike with Dv; ``block_table`` int32 [B, n]; ``context_lens`` int32 [B], the
    tokens of each request; ``out`` [T, N, Dv] or [T, N * Dv].  Row b of ``query`` and ``out``
    belongs to request b; rows beyond B are left alone.  ``workspace`` is memory for a device's
    kernel and changes no value.
    """
    _check(query, key_cache, value_cache, num_kv_heads, num_heads, block_table, context_lens)
    requests = context_lens.numel()
    if query.shape[0] < requests or block_table.shape[0] < requests:
        raise KernelLimit(
            f"{PAGED}: {requests} context_lens, query {list(query.shape)}, block_table "
            f"{list(block_table.shape)}; both have a row for each request."
        )
    caches = [
        # Heads before tokens, as PagedCache takes caches of four axes.
        PagedCache(PAGED, name, cache.transpose(1, 2), num_kv_heads)
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache))
    ]
    width = num_heads * value_cache.shape[3]
    if out.dim() < 2 or out.shape[0] < requests or out.shape[1:].numel() != width:
        raise KernelLimit(
            f"{PAGED}: out {list(out.shape)} for query {list(query.shape)}; it holds {num_heads} "
            f"heads of {value_cache.shape[3]} elements for each of {requests} requests."
        )
    if key_cache.shape[3] != query.shape[2] or key_cache.shape[:2] != value_cache.shape[:2]:
        raise KernelLimit(
            f"{PAGED}: query {list(query.shape)} over key_cache {list(key_cache.shape)} and "
            f"value_cache {list(value_cache.shape)}; heads of query and keys are equally wide, "
            "and both caches have the same blocks."
        )
    most = block_table.shape[1] * caches[0].block_size
    lengths = per_request(PAGED, "context_lens", context_lens.tolist(), requests, most)
    rows = out.view(out.shape[0], num_heads, caches[1].dim)
    for request, length in enumerate(lengths):
        key, value = (cache.read(block_table[request], length) for cache in caches)
        attended, _ = attend(
            query[request].unsqueeze(1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            scale=scale_value,
        )
        rows[request] = attended.squeeze(1).to(out.dtype)


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_heads: int,
    heads: int,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    if query.dim() != 3 or query.shape[1] != heads or heads % kv_heads:
        raise KernelLimit(
            f"{PAGED}: query {list(query.shape)} with {heads} heads over {kv_heads} key heads; it "
            "is [T, N, D], N a multiple of the key heads."
        )
    for name, tensor in {"query": query, **caches}.items():
        limit_dtype(PAGED, name, tensor, HALVES)
    for name, tensor in (("block_table", block_table), ("context_lens", context_lens)):
        limit_dtype(PAGED, name, tensor, (torch.int32,))
    for name, cache in caches.items():
        if cache.dim() != 4 or cache.shape[2] != kv_heads:
            raise KernelLimit(
                f"{PAGED}: {name} {list(cache.shape)}; it is [blocks, block_size, {kv_heads}, D]."
            )
        size, dim = cache.shape[1], cache.shape[3]
        limit(
            PAGED,
            "alignment",
            size % 16 == 0 and size <= 128,
            f"{name} has blocks of {size} tokens; a block has a multiple of 16 up to 128",
        )
        limit(
            PAGED,
            "alignment",
            dim <= 576,
            f"{name} has heads of {dim} elements; at most 576 are taken",
        )
