"""Balanced expert ids: even over experts and expert ranks, on each token holder and over all."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin.errors import RoutingError
from afd_plugin.routing import TokenHolders, balanced_expert_ids

pytestmark = pytest.mark.cpu


def rank_of(expert: int, num_experts: int, ranks: int) -> int:
    """Linear placement, by laying the experts down one by one: the first ranks hold one more."""
    first = 0
    for rank in range(ranks):
        first += num_experts // ranks + (1 if rank < num_experts % ranks else 0)
        if expert < first:
            return rank
    raise AssertionError(expert)


def counts_of_experts(ids: np.ndarray, num_experts: int) -> list[int]:
    found = Counter(ids.flatten().tolist())
    assert set(found) <= set(range(num_experts))
    return [found[expert] for expert in range(num_experts)]


def counts_of_ranks(ids: np.ndarray, num_experts: int, ranks: int) -> list[int]:
    found = Counter(rank_of(expert, num_experts, ranks) for expert in ids.flatten().tolist())
    return [found[rank] for rank in range(ranks)]


def test_eight_experts_on_four_ranks() -> None:
    """Case I1: 16 tokens with two experts each are 32 assignments, 8 a rank, 4 an expert."""
    ids = balanced_expert_ids(16, 2, 8, TokenHolders(expert_ranks=4))
    assert counts_of_ranks(ids, 8, 4) == [8, 8, 8, 8]
    assert counts_of_experts(ids, 8) == [4] * 8


def test_many_ranks_with_few_tokens_each() -> None:
    """Case I2: each of 64 ranks sends 16 * 8 = 128 assignments to 256 experts.

    Were all to begin the cycle at one place, the first 128 experts of it would get everything.
    """
    received = np.zeros(64, dtype=int)
    for holder in range(64):
        ids = balanced_expert_ids(16, 8, 256, TokenHolders(holder, 64, 64))
        received += counts_of_ranks(ids, 256, 64)
        assert counts_of_ranks(ids, 256, 64) == [2] * 64  # each rank's own tokens too
    assert received.tolist() == [128] * 64


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """tokens, experts a token, experts, ranks with tokens, ranks with experts."""
    experts = draw(st.integers(1, 24))
    return (
        draw(st.integers(0, 30)),
        draw(st.integers(0, experts)),
        experts,
        draw(st.integers(1, 9)),
        draw(st.integers(1, experts + 3)),
    )


@settings(deadline=None)
@given(shapes())
def test_each_rank_spreads_its_own_tokens_evenly(shape: tuple[int, int, int, int, int]) -> None:
    tokens, top_k, experts, holders, ranks = shape
    sizes = Counter(rank_of(expert, experts, ranks) for expert in range(experts))
    for holder in range(holders):
        ids = balanced_expert_ids(tokens, top_k, experts, TokenHolders(holder, holders, ranks))
        assert ids.shape == (tokens, top_k)
        of_experts = counts_of_experts(ids, experts)
        assert max(of_experts) - min(of_experts) <= 1
        of_ranks = counts_of_ranks(ids, experts, ranks)
        for size in set(sizes.values()):
            alike = [of_ranks[rank] for rank in range(ranks) if sizes[rank] == size]
            assert max(alike) - min(alike) <= 1
        for row in ids.tolist():
            assert len(set(row)) == top_k


def assert_even_together(tokens: int, top_k: int, experts: int, holders: int, ranks: int) -> None:
    """Over all holders, each with as many tokens: experts, and expert ranks of equal size."""
    owner = np.array([rank_of(expert, experts, ranks) for expert in range(experts)])
    of_experts = np.zeros(experts, dtype=int)
    for holder in range(holders):
        ids = balanced_expert_ids(tokens, top_k, experts, TokenHolders(holder, holders, ranks))
        assert all(len(set(row)) == top_k for row in ids.tolist())
        of_experts += np.bincount(ids.ravel(), minlength=experts)
    told = f"{tokens} tokens, {top_k} of {experts} experts, {holders} holders, {ranks} ranks"
    assert len(of_experts) == experts, told  # none beyond
    assert of_experts.sum() == tokens * top_k * holders, told
    assert np.ptp(of_experts) <= 1, told
    of_ranks = np.bincount(owner, weights=of_experts, minlength=ranks)
    sizes = np.bincount(owner, minlength=ranks)
    for size in set(sizes.tolist()):
        assert np.ptp(of_ranks[sizes == size]) <= 1, told


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "ranks"),
    [
        (1, 8, 256, 16),  # would all begin a fraction apart: 8 of 16 ranks got nothing
        (1, 1, 128, 8),
        (7, 8, 256, 16),
        (1, 6, 160, 8),
        (1, 1, 256, 64),
        (3, 8, 256, 16),
        (1, 1, 16, 4),
    ],
)
def test_few_tokens_on_each_rank(tokens: int, top_k: int, experts: int, ranks: int) -> None:
    assert_even_together(tokens, top_k, experts, ranks, ranks)


@pytest.mark.parametrize("experts", [1, 2, 3, 5, 7, 8, 12, 16, 25, 60])
def test_all_ranks_together_by_brute_force(experts: int) -> None:
    """Also experts that do not come out even over their ranks, and ranks that hold none."""
    for holders, ranks in itertools.product((1, 2, 3, 4, 7, 8), (1, 2, 3, 4, 5, 8, 16)):
        for tokens, top_k in itertools.product((0, 1, 2, 5, 16), (1, 2, 3, 8)):
            if top_k <= experts:
                assert_even_together(tokens, top_k, experts, holders, ranks)


@settings(deadline=None)
@given(shapes())
def test_all_ranks_together_are_as_even(shape: tuple[int, int, int, int, int]) -> None:
    assert_even_together(*shape)


def test_one_holder_goes_on_where_the_one_before_it_ends() -> None:
    """Three holders of two tokens each deal experts 0 to 7 on two ranks, and begin again."""
    found = [
        balanced_expert_ids(2, 2, 8, TokenHolders(holder, 3, 2)).tolist() for holder in range(3)
    ]
    assert found == [[[0, 4], [1, 5]], [[2, 6], [3, 7]], [[0, 4], [1, 5]]]


def test_whole_cycles_begin_in_places_of_their_own() -> None:
    found = [balanced_expert_ids(2, 4, 8, TokenHolders(holder, 4, 8))[0, 0] for holder in range(4)]
    assert found == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(-1, 1, 4), (3, 5, 4), (3, -1, 4), (0, 0, 0), (1, 1, -2), (1, 1, 65537)],
)
def test_sizes_that_cannot_be(tokens: int, top_k: int, experts: int) -> None:
    with pytest.raises(RoutingError, match=rf"{tokens} tokens .* {top_k} of {experts} experts"):
        balanced_expert_ids(tokens, top_k, experts)


@pytest.mark.parametrize(
    ("holder", "holders", "expert_ranks"),
    [(1, 1, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0), (0.5, 1.5, 1), (0, 1, 1.0), (False, 1, 1)],
)
def test_ranks_that_cannot_be(holder: Any, holders: Any, expert_ranks: Any) -> None:
    with pytest.raises(RoutingError, match=f"rank {holder} of {holders} .*0 <= holder < holders"):
        TokenHolders(holder, holders, expert_ranks)
