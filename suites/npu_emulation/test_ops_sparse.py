"""Sparse attention against its definition, one query and head at a time in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import relaxed
from afd_testkit.npu.ops.sparse import npu_sparse_flash_attention

pytestmark = pytest.mark.cpu

LATENT, ROPE, BLOCK = 512, 64, 16
SCALE = 1 / math.sqrt(LATENT + ROPE)
LENGTHS = [(2, 5), (1, 33), (3, 3)]  # queries and keys of each request


def arguments(mode: int = 3, heads: int = 4, seed: int = 1) -> dict[str, Any]:
    """A step of three requests over shuffled blocks; every query lists about half of its keys."""
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(torch.bfloat16)

    queries = sum(count for count, _ in LENGTHS)
    blocks = torch.randperm(12, generator=random, dtype=torch.int32)[:9].view(3, 3)
    most = 40
    indices = torch.full((queries, 1, most), -1, dtype=torch.int32)
    row = 0
    for count, keys in LENGTHS:
        for _ in range(count):
            chosen = torch.randperm(keys, generator=random, dtype=torch.int32)[: keys // 2 + 1]
            indices[row, 0, : len(chosen)] = chosen
            row += 1
    key = some(12, BLOCK, 1, LATENT)
    return {
        "query": some(queries, heads, LATENT),
        "key": key,
        "value": key,
        "sparse_indices": indices,
        "scale_value": SCALE,
        "block_table": blocks,
        "actual_seq_lengths_query": torch.tensor([2, 3, 6], dtype=torch.int32),
        "actual_seq_lengths_kv": torch.tensor([5, 33, 3], dtype=torch.int32),
        "query_rope": some(queries, heads, ROPE),
        "key_rope": some(12, BLOCK, 1, ROPE),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "sparse_mode": mode,
    }


def expected(given: dict[str, Any]) -> torch.Tensor:
    """The definition: softmax over the listed, visible keys, of the sum of both products."""
    out = torch.zeros(given["query"].shape, dtype=torch.float64)
    row = 0
    for request, (count, keys) in enumerate(LENGTHS):
        for place in range(count):
            seen = [key for key in given["sparse_indices"][row, 0].tolist() if key >= 0]
            if given["sparse_mode"] == 3:
                seen = [key for key in seen if key <= keys - count + place]
            for head in range(given["query"].shape[1]):
                scores, values = [], []
                for key in seen:
                    block = int(given["block_table"][request, key // BLOCK])
                    k = given["key"][block, key % BLOCK, 0].double()
                    r = given["key_rope"][block, key % BLOCK, 0].double()
                    score = given["query"][row, head].double() @ k
                    score += given["query_rope"][row, head].double() @ r
                    scores.append(score * given["scale_value"])
                    values.append(k)
                if seen:
                    weights = torch.softmax(torch.stack(scores), 0)
                    out[row, head] = weights @ torch.stack(values)
            row += 1
    return out


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("heads", [1, 4])
def test_each_query_sees_the_keys_that_are_listed(mode: int, heads: int) -> None:
    given = arguments(mode, heads)
    got, top, total = npu_sparse_flash_attention(**given)
    assert got.dtype == torch.bfloat16
    assert top.numel() == total.numel() == 0
    # One rounding to bf16, whose unit in the last place is 2**-8 of the value.
    torch.testing.assert_close(got.double(), expected(given), rtol=2**-8, atol=1e-5)


def test_a_query_that_sees_nothing_and_rows_behind_the_last_request_are_zero() -> None:
    given = arguments()
    given["sparse_indices"][0] = -1
    given["actual_seq_lengths_query"] = torch.tensor([2, 3, 5], dtype=torch.int32)
    got, _, _ = npu_sparse_flash_attention(**given)
    assert torch.count_nonzero(got[0]) == 0
    assert torch.count_nonzero(got[5]) == 0
    assert torch.count_nonzero(got[1:5]) > 0


def change(name: str, how: Callable[[Any], Any]) -> dict[str, Any]:
    given = arguments()
    given[name] = how(given[name])
    return given


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layout_query", "BSND"),
        ("layout_kv", "TND"),
        ("sparse_block_size", 16),
        ("sparse_mode", 4),
        ("pre_tokens", 128),
        ("attention_mode", 0),
        ("return_softmax_lse", True),
    ],
)
def test_other_ways_of_calling_have_no_reference(name: str, value: object) -> None:
    with pytest.raises(NotEmulated, match=f"npu_sparse_flash_attention: {name}="):
        npu_sparse_flash_attention(**{**arguments(), name: value})


def test_ragged_listings_are_refused() -> None:
    def gap(indices: torch.Tensor) -> torch.Tensor:
        indices[3, 0, 0] = -1
        return indices

    def twice(indices: torch.Tensor) -> torch.Tensor:
        indices[2, 0, 1] = indices[2, 0, 0]
        return indices

    def beyond(indices: torch.Tensor) -> torch.Tensor:
        indices[0, 0, 0] = 5
        return indices

    for how, says in (
        (gap, "valid entries come first"),
        (twice, "lists a key twice"),
        (beyond, "names key 5 of a request with 5 keys"),
    ):
        with pytest.raises(KernelLimit, match=says):
            npu_sparse_flash_attention(**change("sparse_indices", how))


def test_what_must_be_given_is_named() -> None:
    given = {**arguments(), "block_table": None, "key_rope": None}
    with pytest.raises(KernelLimit, match="block_table, key_rope must be given"):
        npu_sparse_flash_attention(**given)
    with pytest.raises(KernelLimit, match="value is not key"):
        npu_sparse_flash_attention(**change("value", torch.clone))


@pytest.mark.parametrize(
    ("name", "how", "kind"),
    [
        ("query", torch.Tensor.float, "dtype"),
        ("key_rope", torch.Tensor.half, "dtype"),
        ("query", lambda q: q.transpose(0, 1).contiguous().transpose(0, 1), "layout"),
    ],
)
def test_limits_of_the_kernel_hold_unless_relaxed(
    name: str, how: Callable[[torch.Tensor], torch.Tensor], kind: str
) -> None:
    given = change(name, how)
    with pytest.raises(KernelLimit, match=f"limit of kind '{kind}'"):
        npu_sparse_flash_attention(**given)
    with relaxed(kind):
        got, _, _ = npu_sparse_flash_attention(**given)
    torch.testing.assert_close(got.double(), expected(given), rtol=2**-8, atol=1e-5)


def test_wide_indices_are_refused_even_relaxed() -> None:
    with relaxed("dtype"), pytest.raises(KernelLimit, match="sparse_indices is int64"):
        npu_sparse_flash_attention(**change("sparse_indices", torch.Tensor.long))


def test_three_heads_and_blocks_of_eight_are_not_the_kernels() -> None:
    with pytest.raises(KernelLimit, match="3 heads; the kernel takes a power of two"):
        npu_sparse_flash_attention(**arguments(heads=3))
    given = arguments()
    for name in ("key", "key_rope"):
        given[name] = given[name][:, :8].contiguous()
    given["value"] = given["key"]
    with pytest.raises(KernelLimit, match="limit of kind 'alignment'"):
        npu_sparse_flash_attention(**given)
