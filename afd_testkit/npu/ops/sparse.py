"""Attention of each query to the keys that an index lists (DeepSeek sparse attention)."""

from __future__ import annotations

import torch

from afd_testkit.npu.errors import KernelLimit
from afd_testkit.npu.limits import limit
from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import (
    HALVES,
    emulated_only,
    limit_dtype,
    limit_layout,
    require,
)
from afd_testkit.npu.ops.attention_core import attend, band
from afd_testkit.npu.ops.attention_requests import (
    PagedCache,
    as_lengths,
    per_request,
    spans,
)

_NAME = "_C_ascend.npu_sparse_flash_attention"
_UNBOUNDED = 9223372036854775807
_LATENT, _ROPE = 512, 64
_MOST_TOKENS_A_BLOCK = 1024


def _limits(
    query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, ropes: list[torch.Tensor]
) -> None:
    """What the kernel's documentation states of dtypes and shapes."""
    limit_dtype(_NAME, "query", query, HALVES)
    limit_dtype(_NAME, "sparse_indices", indices, (torch.int32,))
    for name, tensor in (("key", key), ("query_rope", ropes[0]), ("key_rope", ropes[1])):
        limit_dtype(_NAME, name, tensor, (query.dtype,))
    for name, tensor in (("query", query), ("key", key), ("sparse_indices", indices)):
        limit_layout(_NAME, tensor.is_contiguous(), f"{name} must be contiguous")
    heads, dim = query.shape[-2:]
    limit_layout(
        _NAME,
        dim == _LATENT and ropes[0].shape[-1] == _ROPE,
        f"head dimensions are {dim} and {ropes[0].shape[-1]}; the kernel takes {_LATENT} and "
        f"{_ROPE}",
    )
    limit_layout(
        _NAME,
        heads <= 128 and heads & (heads - 1) == 0,
        f"query has {heads} heads; the kernel takes a power of two up to 128",
    )
    limit(
        _NAME,
        "alignment",
        key.shape[1] % 16 == 0 and key.shape[1] <= _MOST_TOKENS_A_BLOCK,
        f"the cache has blocks of {key.shape[1]} tokens; the kernel takes multiples of 16 up to "
        f"{_MOST_TOKENS_A_BLOCK}",
    )


def _unlisted(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """True [queries, keys] where a key is not listed in the query's row of ``indices``.

    ``indices`` [queries, most]: valid entries first, then negative ones.
    """
    valid = indices >= 0
    require(
        _NAME,
        bool((valid.int().diff(dim=-1) <= 0).all()),
        "a row of sparse_indices has a valid entry behind an invalid one; valid entries come first",
    )
    require(
        _NAME,
        int(indices.max()) < keys,
        f"sparse_indices names key {int(indices.max())} of a request with {keys} keys",
    )
    counts = torch.zeros(indices.shape[0], keys, dtype=torch.int32)
    counts.scatter_add_(1, indices.clamp(min=0).long(), valid.int())
    require(
        _NAME,
        int(counts.max()) <= 1,
        "a row of sparse_indices lists a key twice; the kernel would weigh it twice",
    )
    return counts == 0


@operator(
    "_C_ascend.npu_sparse_flash_attention",
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices,"
    " float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None,"
    " Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None,"
    " int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', int sparse_mode=3,"
    " int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807,"
    " int attention_mode=2, bool return_softmax_lse=False)"
    " -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)",
    source="vllm-ascend 0.23.0 csrc/attention/sparse_flash_attention and its callers",
)
def npu_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = _UNBOUNDED,
    next_tokens: int = _UNBOUNDED,
    attention_mode: int = 2,
    return_softmax_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latent attention of packed queries to the listed keys of a paged cache.

    ``query`` [T, N, 512] and ``query_rope`` [T, N, 64], fp16 or bf16; ``key`` (also ``value``)
    [blocks, block_size, 1, 512] and ``key_rope`` [blocks, block_size, 1, 64], in the same dtype.
    ``sparse_indices`` int32 [T, 1, most]: positions within the query's own request, then -1.
    ``actual_seq_lengths_query`` [B] cumulative, ``actual_seq_lengths_kv`` [B] each request's own,
    ``block_table`` [B, n].  ``sparse_mode`` 0 sees every listed key, 3 the ones up to the query's
    own position, counted from the last key back.

    A query's scores are ``scale_value`` times the sum of both products.  Returns the output
    [T, N, 512] in the query's dtype (zeros for a query that sees nothing, and behind the last
    request), and two empty fp32 tensors.  Only this layout, and no softmax sums.
    """
    emulated_only(
        _NAME,
        layout_query=(layout_query, ("TND",)),
        layout_kv=(layout_kv, ("PA_BSND",)),
        sparse_block_size=(sparse_block_size, (1,)),
        sparse_mode=(sparse_mode, (0, 3)),
        pre_tokens=(pre_tokens, (_UNBOUNDED,)),
        next_tokens=(next_tokens, (_UNBOUNDED,)),
        attention_mode=(attention_mode, (2,)),
        return_softmax_lse=(return_softmax_lse, (False,)),
    )
    given = {
        "block_table": block_table,
        "actual_seq_lengths_query": actual_seq_lengths_query,
        "actual_seq_lengths_kv": actual_seq_lengths_kv,
        "query_rope": query_rope,
        "key_rope": key_rope,
    }
    missing = [name for name, tensor in given.items() if tensor is None]
    if (
        block_table is None
        or query_rope is None
        or key_rope is None
        or actual_seq_lengths_query is None
        or actual_seq_lengths_kv is None
    ):
        raise KernelLimit(f"{_NAME}: {', '.join(missing)} must be given with these layouts.")
    require(
        _NAME,
        value.data_ptr() == key.data_ptr() and value.shape == key.shape,
        "value is not key; with attention_mode 2 they are one tensor",
    )
    require(
        _NAME,
        key.shape[-2] == 1 and sparse_indices.shape[:2] == (query.shape[0], 1),
        f"key {list(key.shape)} and sparse_indices {list(sparse_indices.shape)} must have one head",
    )
    _limits(query, key, sparse_indices, [query_rope, key_rope])
    tokens = torch.cat([query, query_rope], dim=-1)
    # The page reader takes heads before tokens.
    pages = PagedCache(_NAME, "key", key.transpose(1, 2), 1)
    rope_pages = PagedCache(_NAME, "key_rope", key_rope.transpose(1, 2), 1)
    ends = as_lengths(actual_seq_lengths_query) or []
    places = spans(_NAME, "actual_seq_lengths_query", ends, query.shape[0])
    lengths = per_request(
        _NAME,
        "actual_seq_lengths_kv",
        as_lengths(actual_seq_lengths_kv),
        len(places),
        block_table.shape[1] * pages.block_size,
    )
    output = torch.zeros_like(query)
    for (start, end), length, row in zip(places, lengths, block_table, strict=True):
        if start == end or length == 0:
            continue
        latent = pages.read(row, length).transpose(0, 1)
        keys = torch.cat([latent, rope_pages.read(row, length).transpose(0, 1)], dim=-1)
        hidden = _unlisted(sparse_indices[start:end, 0], length)
        if sparse_mode == 3:
            later = band(end - start, length, before=_UNBOUNDED, after=0, right_aligned=True)
            hidden = hidden if later is None else hidden | later
        seen, _ = attend(
            tokens[start:end].transpose(0, 1),
            keys,
            latent,
            scale=scale_value,
            hidden=hidden,
        )
        output[start:end] = seen.transpose(0, 1).to(query.dtype)
    return output, torch.empty(0), torch.empty(0)
