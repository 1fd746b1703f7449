"""Attention over paged caches: fused, latent (MLA) and decode, against its formula.

Every slot that no request owns holds NaN, and block tables hold nonsense beyond the blocks that a
request uses: neither may be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from afd_testkit.npu.errors import KernelLimit
from afd_testkit.npu.limits import VARIABLE, relaxed
from afd_testkit.npu.ops.attention import (
    _npu_paged_attention as decode,
)
from afd_testkit.npu.ops.attention import (
    npu_fused_infer_attention_score as fused,
)
from afd_testkit.npu.ops.attention import (
    npu_fused_infer_attention_score_v2 as fused_v2,
)

pytestmark = pytest.mark.cpu

Axes = Callable[[torch.Tensor], torch.Tensor]
CLOSE = {"atol": 3e-6, "rtol": 3e-6}
BLOCKS = 12


@pytest.fixture(autouse=True)
def limits_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compressed_mask() -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def by_formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """One request, [S, N, D] each, causal from the last key backwards; float64."""
    share = query.shape[1] // key.shape[1]
    wide_key = key.double().repeat_interleave(share, dim=1)
    wide_value = value.double().repeat_interleave(share, dim=1)
    scores = scale * torch.einsum("ind,jnd->nij", query.double(), wide_key)
    seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    return torch.einsum("nij,jnd->ind", weights, wide_value)


@dataclass
class Pages:
    """Requests of ``lengths`` tokens, their blocks taken from a cache in no order."""

    lengths: list[int]
    block_size: int
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        free = [7, 2, 11, 0, 5, 9, 3, 10]
        most = max(-(-length // self.block_size) for length in self.lengths) + 1
        self.table = torch.full((len(self.lengths), most), 10**6, dtype=torch.int32)
        for request, length in enumerate(self.lengths):
            for block in range(-(-length // self.block_size)):
                self.table[request, block] = free.pop(0)

    def cache(self, tokens: list[torch.Tensor]) -> torch.Tensor:
        """[BLOCKS, block_size, N, D] with the tokens [length, N, D] of each request."""
        cache = torch.full((BLOCKS, self.block_size, *tokens[0].shape[1:]), math.nan)
        for request, own in enumerate(tokens):
            for position, token in enumerate(own):
                block = int(self.table[request, position // self.block_size])
                cache[block, position % self.block_size] = token
        return cache


def own_tokens(lengths: list[int], *shape: int, seed: int) -> list[torch.Tensor]:
    return [normal(length, *shape, seed=seed + n) for n, length in enumerate(lengths)]


def three_axes(cache: torch.Tensor) -> torch.Tensor:
    return cache.flatten(2)


def four_axes(cache: torch.Tensor) -> torch.Tensor:
    return cache.transpose(1, 2).contiguous()


def fractal(cache: torch.Tensor) -> torch.Tensor:
    """[blocks, size, N, D] as [blocks, N, D / 16, size, 16]."""
    blocks, size, heads, dim = cache.shape
    return cache.view(blocks, size, heads, dim // 16, 16).permute(0, 2, 3, 1, 4).contiguous()


@pytest.mark.parametrize("axes", [three_axes, four_axes, fractal])
def test_prefill_with_context(axes: Axes) -> None:
    lengths, queries = [130, 128, 3, 200], [2, 1, 3, 0]
    pages = Pages(lengths, 128)
    keys, values = own_tokens(lengths, 2, 16, seed=10), own_tokens(lengths, 2, 32, seed=20)
    query = normal(sum(queries), 4, 16, seed=1)
    ends = [2, 3, 6, 6]
    with relaxed("dtype"):
        out, _ = fused(
            query,
            axes(pages.cache(keys)),
            axes(pages.cache(values)),
            num_heads=4,
            num_key_value_heads=2,
            input_layout="TND",
            scale=0.25,
            sparse_mode=3,
            atten_mask=compressed_mask(),
            block_table=pages.table,
            block_size=128,
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=lengths,
        )
    for request, (end, count) in enumerate(zip(ends, queries, strict=True)):
        row = slice(end - count, end)
        expected = by_formula(query[row], keys[request], values[request], 0.25)
        torch.testing.assert_close(out[row].double(), expected, **CLOSE)


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("BNSD_NBSD", four_axes),
        ("BSND_NBSD", fractal),
        ("TND_NTD", four_axes),
        ("BSND", four_axes),
        ("BSH", four_axes),
    ],
)
def test_latent_decode(layout: str, axes: Axes) -> None:
    lengths = [130, 1, 128]
    pages = Pages(lengths, 128)
    latents, ropes = own_tokens(lengths, 1, 512, seed=10), own_tokens(lengths, 1, 64, seed=20)
    query, query_rope = normal(3, 1, 4, 512, seed=1), normal(3, 1, 4, 64, seed=2)
    given = layout.partition("_")[0]
    packed = given == "TND"

    def arranged(tokens: torch.Tensor) -> torch.Tensor:
        if given == "BNSD":
            return tokens.transpose(1, 2)
        return tokens.flatten(2) if given == "BSH" else tokens.squeeze(1) if packed else tokens

    cache = axes(pages.cache(latents))
    with relaxed("dtype"):
        out, _ = fused_v2(
            arranged(query),
            cache,
            cache,
            query_rope=arranged(query_rope),
            key_rope=axes(pages.cache(ropes)),
            num_query_heads=4,
            num_key_value_heads=1,
            input_layout=layout,
            softmax_scale=0.04,
            sparse_mode=3 if packed else 0,
            atten_mask=compressed_mask() if packed else None,
            block_table=pages.table,
            block_size=128,
            actual_seq_qlen=[1, 2, 3] if packed else None,
            actual_seq_kvlen=lengths,
        )
    expected = torch.stack(
        [
            by_formula(
                torch.cat([query[n], query_rope[n]], -1),
                torch.cat([latents[n], ropes[n]], -1),
                latents[n],
                0.04,
            )
            for n in range(3)
        ]
    )
    returned = {
        "BNSD_NBSD": expected.permute(2, 0, 1, 3),
        "BSND_NBSD": expected.permute(2, 0, 1, 3),
        "TND_NTD": expected[:, 0].transpose(0, 1),
        "BSND": expected,
        "BSH": expected.flatten(2),
    }[layout]
    torch.testing.assert_close(out.double(), returned, **CLOSE)


def decode_call(lengths: list[int], out: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    pages = Pages(lengths, 16)
    keys, values = own_tokens(lengths, 2, 16, seed=10), own_tokens(lengths, 2, 32, seed=20)
    query = normal(out.shape[0], 4, 16, seed=1)
    call = {
        "query": query,
        "key_cache": pages.cache(keys),
        "value_cache": pages.cache(values),
        "num_kv_heads": 2,
        "num_heads": 4,
        "scale_value": 0.25,
        "block_table": pages.table,
        "context_lens": torch.tensor(lengths, dtype=torch.int32),
        "out": out,
    }
    expected = torch.zeros(len(lengths), 4, 32, dtype=torch.float64)
    for request, length in enumerate(lengths):
        if length:
            expected[request] = by_formula(
                query[request : request + 1], keys[request], values[request], 0.25
            )[0]
    return call, expected


@pytest.mark.parametrize("flat", [False, True])
def test_decode_writes_its_rows_and_no_other(flat: bool) -> None:
    lengths = [17, 0, 16, 40]
    out = torch.full((5, 4 * 32) if flat else (5, 4, 32), 7.0)
    call, expected = decode_call(lengths, out)
    with relaxed("dtype"):
        assert decode(**call) is None
    rows = out.view(5, 4, 32)
    torch.testing.assert_close(rows[:4].double(), expected, **CLOSE)
    assert torch.equal(rows[4], torch.full((4, 32), 7.0))


def test_decode_takes_a_workspace_that_changes_nothing() -> None:
    first, second = torch.zeros(2, 4, 32), torch.zeros(2, 4, 32)
    with relaxed("dtype"):
        decode(**decode_call([9, 5], first)[0])
        decode(**decode_call([9, 5], second)[0], workspace=torch.full((64,), math.nan))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("kind", "message", "changes"),
    [
        ("dtype", "query is float32", {"query": normal(2, 4, 16, seed=1)}),
        (
            "alignment",
            "blocks of 24 tokens",
            {
                "key_cache": torch.zeros(4, 24, 2, 16, dtype=torch.bfloat16),
                "value_cache": torch.zeros(4, 24, 2, 32, dtype=torch.bfloat16),
            },
        ),
        (
            "alignment",
            "at most 576",
            {
                "key_cache": torch.zeros(12, 16, 2, 592, dtype=torch.bfloat16),
                "query": torch.zeros(2, 4, 592, dtype=torch.bfloat16),
            },
        ),
    ],
)
def test_decode_limits_and_their_relaxation(
    kind: str, message: str, changes: dict[str, object]
) -> None:
    call, _ = decode_call([9, 5], torch.zeros(2, 4, 32, dtype=torch.bfloat16))
    for name in ("query", "key_cache", "value_cache"):
        call[name] = torch.zeros_like(call[name], dtype=torch.bfloat16)
    call["block_table"] = torch.zeros(2, 2, dtype=torch.int32)
    decode(**call)
    with pytest.raises(KernelLimit, match=message):
        decode(**call | changes)
    with relaxed(kind):
        decode(**call | changes)


def test_decode_refuses_lengths_and_blocks_beyond_what_there_is() -> None:
    call, _ = decode_call([9, 5], torch.zeros(2, 4, 32))
    with relaxed("dtype"):
        with pytest.raises(KernelLimit, match=r"context_lens\[0\]=33"):
            decode(**call | {"context_lens": torch.tensor([33, 5], dtype=torch.int32)})
        with pytest.raises(KernelLimit, match="block table entries"):
            decode(**call | {"context_lens": torch.tensor([17, 5], dtype=torch.int32)})
        with pytest.raises(KernelLimit, match="context_lens is int64"):
            decode(**call | {"context_lens": torch.tensor([9, 5])})
        with pytest.raises(KernelLimit, match="block_table is int64"):
            decode(**call | {"block_table": torch.zeros(2, 2, dtype=torch.int64)})
        with pytest.raises(KernelLimit, match="equally wide"):
            decode(**call | {"query": normal(2, 4, 8, seed=1)})
        with pytest.raises(KernelLimit, match=r"out \[1, 4, 32\] for query"):
            decode(**call | {"out": torch.zeros(1, 4, 32)})
        with pytest.raises(KernelLimit, match=r"out \[2, 4, 16\] for query"):
            decode(**call | {"out": torch.zeros(2, 4, 16)})
        with pytest.raises(KernelLimit, match="a row for each request"):
            decode(**call | {"query": normal(1, 4, 16, seed=1)})
