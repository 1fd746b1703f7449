"""The routing operator: balanced while profiling or forced, otherwise not a bit changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin.errors import RoutingError
from afd_plugin.routing import (
    RoutingCalls,
    TokenHolders,
    balance_routing_ids_,
    balanced_expert_ids,
    profile_run,
)

pytestmark = pytest.mark.cpu

Counted = Callable[[], AbstractContextManager[list[RoutingCalls]]]
DTYPES = (torch.int32, torch.int64)


def counts_of_experts(ids: np.ndarray, num_experts: int) -> list[int]:
    found = Counter(ids.flatten().tolist())
    assert set(found) <= set(range(num_experts))
    return [found[expert] for expert in range(num_experts)]


def skewed(tokens: int, top_k: int, dtype: torch.dtype) -> torch.Tensor:
    """A gate that favours the first experts."""
    return torch.arange(top_k, dtype=dtype).repeat(tokens, 1)


@pytest.mark.usefixtures("routing_op")
@pytest.mark.parametrize("dtype", DTYPES)
def test_live_ids_stay_and_forced_or_profiled_ones_are_even(dtype: torch.dtype) -> None:
    """Case I1, through the operator."""
    ids = skewed(16, 2, dtype)
    balance_routing_ids_(ids, 8)
    assert torch.equal(ids, skewed(16, 2, dtype))
    balance_routing_ids_(ids, 8, force_balance=True)
    assert counts_of_experts(ids.numpy() // 2, 4) == [8] * 4  # two experts a rank
    assert ids.dtype is dtype
    profiled = skewed(16, 2, dtype)
    with profile_run():
        balance_routing_ids_(profiled, 8)
    assert torch.equal(profiled, ids)


@pytest.mark.usefixtures("routing_op")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", range(9))
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_every_count_of_experts_a_token(dtype: torch.dtype, top_k: int, tokens: int) -> None:
    ids = torch.full((tokens, top_k), -7, dtype=dtype)
    balance_routing_ids_(ids, 8, force_balance=True)
    counts = counts_of_experts(ids.numpy(), 8)
    assert sum(counts) == tokens * top_k
    assert max(counts) - min(counts) <= 1
    assert all(len(set(row)) == top_k for row in ids.tolist())


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second column": lambda base: base[:, ::2],
    "every third row": lambda base: base[::3],
    "transposed": lambda base: base.T,
    "inside": lambda base: base[2:-1, 1:4],
}


@pytest.mark.usefixtures("routing_op")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_strided_ids_are_written_and_nothing_beside_them(dtype: torch.dtype, view: str) -> None:
    base = torch.full((8, 8), -1, dtype=dtype)
    ids = VIEWS[view](base)
    contiguous = torch.full(ids.shape, -1, dtype=dtype)
    balance_routing_ids_(ids, 8, force_balance=True)
    balance_routing_ids_(contiguous, 8, force_balance=True)
    assert torch.equal(ids, contiguous)
    assert int((base == -1).sum()) == base.numel() - ids.numel()


OVERLAPPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one row for all": lambda base: base[:1, :2].expand(4, 2),
    "one id for a row": lambda base: base[:4, :1].expand(4, 2),
    "one id": lambda base: base[0, 0].expand(4, 2),
    "windows": lambda base: base.view(-1).as_strided((4, 2), (1, 1)),
    "wider windows": lambda base: base.view(-1).as_strided((5, 4), (3, 2)),
}


@pytest.mark.usefixtures("routing_op")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("view", OVERLAPPING)
def test_ids_that_share_their_memory_are_refused(
    dtype: torch.dtype, view: str, force: bool, counted: Counted
) -> None:
    """Written in place, one id would overwrite another; checked against each id's address."""
    base = torch.full((8, 8), -1, dtype=dtype)
    ids = OVERLAPPING[view](base)
    with (
        counted() as told,
        pytest.raises(RoutingError, match=r"share their memory.*contiguous\(\)"),
    ):
        balance_routing_ids_(ids, 8, force)
    assert told == [RoutingCalls()]
    assert bool((base == -1).all())


@pytest.mark.usefixtures("routing_op")
@settings(deadline=None)
@given(
    rows=st.integers(0, 5),
    columns=st.integers(0, 5),
    down=st.integers(0, 9),
    right=st.integers(0, 9),
)
def test_any_strides_by_which_ids_lie_apart(rows: int, columns: int, down: int, right: int) -> None:
    """By brute force over the addresses of all ids."""
    ids = torch.zeros(128, dtype=torch.int64).as_strided((rows, columns), (down, right))
    places = [i * down + j * right for i in range(rows) for j in range(columns)]
    if len(set(places)) == len(places):
        balance_routing_ids_(ids, 8, force_balance=True)
        assert (
            ids.tolist()
            == balanced_expert_ids(rows, columns, 8, TokenHolders(expert_ranks=4)).tolist()
        )
    else:
        with pytest.raises(RoutingError, match="share their memory"):
            balance_routing_ids_(ids, 8, force_balance=True)


@pytest.mark.usefixtures("routing_op")
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 9),
    top_k=st.integers(0, 8),
)
def test_live_not_a_bit_changes(seed: int, dtype: torch.dtype, tokens: int, top_k: int) -> None:
    """Whatever bits are there, also such as are no id: serving never looks at them."""
    width = {torch.int32: 4, torch.int64: 8}[dtype]
    bits = np.random.default_rng(seed).integers(0, 256, (tokens, top_k * width), dtype=np.uint8)
    ids = torch.empty(tokens, top_k, dtype=dtype)
    ids.numpy().reshape(-1).view(np.uint8)[:] = bits.reshape(-1)
    version = ids._version
    balance_routing_ids_(ids, 8)
    assert ids.numpy().tobytes() == bits.tobytes()
    assert ids._version == version  # nor is it written to with what it holds


@pytest.mark.usefixtures("routing_op")
@pytest.mark.parametrize(
    ("ids", "experts", "said"),
    [
        (torch.zeros(3, 5, dtype=torch.int32), 4, "gives each token 5 experts of 4"),
        (torch.zeros(3, 0, dtype=torch.int32), 0, "gives each token 0 experts of 0"),
        (torch.zeros(3, 2), 4, r"\[3, 2\] of torch.float32; .*torch.int32 or torch.int64"),
        (torch.zeros(3, 2, dtype=torch.int16), 4, "of torch.int16"),
        (torch.zeros(6, dtype=torch.int64), 4, r"topk_ids is \[6\]"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), 4, r"topk_ids is \[1, 2, 3\]"),
        (None, 4, "topk_ids is None"),
        (torch.zeros(3, 2, dtype=torch.int32), 2**33, "2 experts of 8589934592; .*than 65536"),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor) else str(value)[:12],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_routing_is_refused_real_and_traced(
    ids: torch.Tensor | None,
    experts: int,
    said: str,
    device: str,
    force: bool,
    counted: Counted,
) -> None:
    there: Any = None if ids is None else ids.to(device)
    with counted() as told, pytest.raises(RoutingError, match=said):
        balance_routing_ids_(there, experts, force)
    assert told == [RoutingCalls()]
