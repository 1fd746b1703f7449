"""The fused inference attention against its definition, written out as loops over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from afd_testkit.npu.limits import VARIABLE, relaxed
from afd_testkit.npu.ops.attention import (
    npu_fused_infer_attention_score as fused,
)
from afd_testkit.npu.ops.attention import (
    npu_fused_infer_attention_score_v2 as fused_v2,
)

pytestmark = pytest.mark.cpu

Sees = Callable[[int, int], bool]
CLOSE = {"atol": 3e-6, "rtol": 3e-6}


@pytest.fixture(autouse=True)
def limits_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compressed_mask(dtype: torch.dtype = torch.int8) -> torch.Tensor:
    rows = torch.arange(2048)
    return (rows.unsqueeze(0) > rows.unsqueeze(1)).to(dtype)


def by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sees: Sees = lambda i, j: True,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request, [S, N, D] each; exponentials as they stand, in float64."""
    queries, heads, _ = query.shape
    share = heads // key.shape[1]
    out = torch.zeros(queries, heads, value.shape[2], dtype=torch.float64)
    lse = torch.full((queries, heads), -math.inf, dtype=torch.float64)
    for i in range(queries):
        for head in range(heads):
            total = 0.0 if sink is None else math.exp(float(sink[head]))
            for j in range(key.shape[0]):
                if not sees(i, j):
                    continue
                dot = torch.dot(query[i, head].double(), key[j, head // share].double())
                weight = math.exp(scale * float(dot))
                total += weight
                out[i, head] += weight * value[j, head // share].double()
            if total:
                out[i, head] /= total
                lse[i, head] = math.log(total)
    return out, lse


def causal(queries: int, keys: int) -> Sees:
    return lambda i, j: j <= i + keys - queries


# Requests of a packed batch: (queries, keys).
FRESH = [(5, 5), (1, 1), (0, 0), (7, 7)]
CONTEXT = [(5, 9), (1, 6), (0, 0), (3, 3)]


def packed(lengths: list[int]) -> tuple[list[int], list[slice]]:
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    return ends, [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("requests", [FRESH, CONTEXT], ids=["fresh", "context"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_packed_causal(requests: list[tuple[int, int]], heads: int, kv_heads: int) -> None:
    query_ends, query_rows = packed([q for q, _ in requests])
    key_ends, key_rows = packed([k for _, k in requests])
    query = normal(query_ends[-1], heads, 16, seed=1)
    key = normal(key_ends[-1], kv_heads, 16, seed=2)
    value = normal(key_ends[-1], kv_heads, 32, seed=3)
    with relaxed("dtype"):
        out, lse = fused(
            query,
            key,
            value,
            num_heads=heads,
            num_key_value_heads=kv_heads,
            input_layout="TND",
            scale=0.3,
            sparse_mode=3,
            atten_mask=compressed_mask(),
            actual_seq_lengths=query_ends,
            actual_seq_lengths_kv=key_ends,
            softmax_lse_flag=True,
        )
    assert out.dtype == lse.dtype == torch.float32
    assert list(out.shape) == [query_ends[-1], heads, 32]
    assert list(lse.shape) == [query_ends[-1], heads, 1]
    for row, seen, (queries, keys) in zip(query_rows, key_rows, requests, strict=True):
        expected, logs = by_hand(query[row], key[seen], value[seen], 0.3, causal(queries, keys))
        torch.testing.assert_close(out[row].double(), expected, **CLOSE)
        torch.testing.assert_close(lse[row, :, 0].double(), logs, **CLOSE)


def test_packed_without_mask_sees_every_key_and_nothing_of_an_empty_context() -> None:
    query = normal(6, 2, 16, seed=1)
    key, value = normal(4, 2, 16, seed=2), normal(4, 2, 16, seed=3)
    with relaxed("dtype"):
        out, lse = fused(
            query,
            key,
            value,
            num_heads=2,
            input_layout="TND",
            scale=0.2,
            actual_seq_lengths=[2, 6],
            actual_seq_lengths_kv=[0, 4],
            softmax_lse_flag=True,
        )
    assert torch.equal(out[:2], torch.zeros(2, 2, 16))
    assert torch.equal(lse[:2], torch.full((2, 2, 1), -math.inf))
    expected, logs = by_hand(query[2:], key, value, 0.2)
    torch.testing.assert_close(out[2:].double(), expected, **CLOSE)
    torch.testing.assert_close(lse[2:, :, 0].double(), logs, **CLOSE)


def test_without_its_flag_the_logarithms_are_one_zero() -> None:
    tokens = normal(3, 2, 16, seed=1, dtype=torch.bfloat16)
    _, lse = fused(
        tokens,
        tokens,
        tokens,
        num_heads=2,
        input_layout="TND",
        actual_seq_lengths=[3],
        actual_seq_lengths_kv=[3],
    )
    assert torch.equal(lse, torch.zeros(1))


@pytest.mark.parametrize("window", [1, 4, 100])
def test_packed_sliding_window(window: int) -> None:
    requests = [(6, 11), (1, 9)]
    query_ends, query_rows = packed([q for q, _ in requests])
    key_ends, key_rows = packed([k for _, k in requests])
    query = normal(query_ends[-1], 2, 16, seed=1)
    key, value = normal(key_ends[-1], 2, 16, seed=2), normal(key_ends[-1], 2, 16, seed=3)
    with relaxed("dtype"):
        out, _ = fused(
            query,
            key,
            value,
            num_heads=2,
            input_layout="TND",
            scale=0.4,
            sparse_mode=4,
            pre_tokens=window,
            next_tokens=0,
            atten_mask=compressed_mask(torch.bool),
            actual_seq_lengths=query_ends,
            actual_seq_lengths_kv=key_ends,
        )
    for row, seen, (queries, keys) in zip(query_rows, key_rows, requests, strict=True):
        expected, _ = by_hand(
            query[row],
            key[seen],
            value[seen],
            0.4,
            lambda i, j, at=keys - queries: i + at - window <= j <= i + at,
        )
        torch.testing.assert_close(out[row].double(), expected, **CLOSE)


def test_rope_parts_add_to_the_scores() -> None:
    query, key, value = (normal(9, 2, 128, seed=n) for n in (1, 2, 3))
    query_rope, key_rope = normal(9, 2, 64, seed=4), normal(9, 2, 64, seed=5)
    with relaxed("dtype"):
        out, lse = fused(
            query,
            key,
            value,
            query_rope=query_rope,
            key_rope=key_rope,
            num_heads=2,
            input_layout="TND",
            scale=0.05,
            sparse_mode=3,
            atten_mask=compressed_mask(),
            actual_seq_lengths=[4, 9],
            actual_seq_lengths_kv=[4, 9],
            softmax_lse_flag=True,
        )
    whole_query, whole_key = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)
    for row in (slice(0, 4), slice(4, 9)):
        size = row.stop - row.start
        expected, logs = by_hand(
            whole_query[row], whole_key[row], value[row], 0.05, causal(size, size)
        )
        torch.testing.assert_close(out[row].double(), expected, **CLOSE)
        torch.testing.assert_close(lse[row, :, 0].double(), logs, **CLOSE)


def test_a_learnable_sink_takes_weight_and_gives_nothing() -> None:
    query, key, value = (normal(6, 2, 16, seed=n) for n in (1, 2, 3))
    sink = torch.tensor([0.5, -1.0])
    with relaxed("dtype"):
        out, _ = fused_v2(
            query,
            key,
            value,
            num_query_heads=2,
            input_layout="TND",
            softmax_scale=0.3,
            sparse_mode=3,
            atten_mask=compressed_mask(),
            actual_seq_qlen=torch.tensor([2, 6]),
            actual_seq_kvlen=[2, 6],
            learnable_sink=sink,
        )
    for row in (slice(0, 2), slice(2, 6)):
        size = row.stop - row.start
        expected, _ = by_hand(query[row], key[row], value[row], 0.3, causal(size, size), sink)
        torch.testing.assert_close(out[row].double(), expected, **CLOSE)
