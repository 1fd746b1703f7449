"""Sorting rows by expert and back, against lists that are sorted pair by pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import KINDS, relaxed
from afd_testkit.npu.ops import moe_rows

pytestmark = pytest.mark.cpu

CUMSUM, COUNT, PAIRS = 0, 1, 2
EXPERTS = 6
# Rows of K different experts; all to one, none, and anything between.
CHOICES = st.integers(1, 3).flatmap(
    lambda k: st.lists(
        st.permutations(range(EXPERTS)).map(lambda order: list(order[:k])), max_size=7
    ).map(lambda rows: torch.tensor(rows, dtype=torch.int32).view(len(rows), k))
)


def numbered(rows: int, width: int = 3) -> torch.Tensor:
    """Rows that tell which they are: row r holds r + 1, and nothing else does."""
    return torch.arange(1, rows + 1.0).unsqueeze(1).expand(rows, width).clone()


def sorted_pairs(ids: torch.Tensor, first: int, end: int) -> list[tuple[int, int, int]]:
    """(expert, pair, row) of every active pair, by expert, then by pair."""
    top_k = ids.shape[1]
    return sorted(
        (expert, pair, pair // top_k)
        for pair, expert in enumerate(ids.flatten().tolist())
        if first <= expert < end
    )


def routed(x: torch.Tensor, ids: torch.Tensor, **changed: object) -> tuple[torch.Tensor, ...]:
    arguments: dict[str, object] = {
        "expert_num": EXPERTS,
        "quant_mode": -1,
        "expert_tokens_num_type": COUNT,
        "expert_tokens_num_flag": True,
    }
    return moe_rows.npu_moe_init_routing_custom(x, ids, **{**arguments, **changed})  # type: ignore[arg-type]


@settings(deadline=None)  # time is the machine's, not the reference's
@given(CHOICES, st.sampled_from([(0, 6), (0, 3), (2, 5), (5, 6)]))
def test_copies_are_sorted_by_expert_then_pair(ids: torch.Tensor, active: tuple[int, int]) -> None:
    x, scale = numbered(ids.shape[0]), torch.arange(ids.shape[0]) + 0.5
    copies, places, counts, scales = routed(x, ids, scale=scale, active_expert_range=active)
    expected = sorted_pairs(ids, *active)
    assert copies.shape == (ids.numel(), 3)
    assert copies[: len(expected)].tolist() == [x[row].tolist() for _, _, row in expected]
    assert scales[: len(expected)].tolist() == [row + 0.5 for _, _, row in expected]
    place_of = {pair: place for place, (_, pair, _) in enumerate(expected)}
    assert places.dtype == torch.int32
    assert places.tolist() == [place_of.get(pair, -1) for pair in range(ids.numel())]
    assert counts.dtype == torch.int64
    assert counts.tolist() == [
        sum(expert == wanted for expert, _, _ in expected) for wanted in range(*active)
    ]


@settings(deadline=None)
@given(CHOICES)
def test_scatter_places_tell_the_pair_of_each_copy(ids: torch.Tensor) -> None:
    _, pairs, _, _ = routed(numbered(ids.shape[0]), ids, row_idx_type=1, active_expert_range=[1, 4])
    expected = [pair for _, pair, _ in sorted_pairs(ids, 1, 4)]
    assert pairs.shape == (ids.numel(),)
    assert pairs[: len(expected)].tolist() == expected


IDS = torch.tensor([[2, 0], [2, 4], [0, 2]], dtype=torch.int32)
FORMS = {
    CUMSUM: [2, 2, 5, 5, 6],
    COUNT: [2, 0, 3, 0, 1],
    PAIRS: [[0, 2], [2, 3], [4, 1], [0, 0], [0, 0], [0, 0]],
}


@pytest.mark.parametrize("kind", list(FORMS))
def test_rows_of_each_expert_in_three_forms(kind: int) -> None:
    _, _, tokens, _ = routed(
        numbered(3), IDS, expert_tokens_num_type=kind, active_expert_range=[0, 5]
    )
    assert tokens.tolist() == FORMS[kind]


def test_pairs_name_the_expert_not_its_place_in_the_range() -> None:
    _, _, tokens, _ = routed(
        numbered(3), IDS, expert_tokens_num_type=PAIRS, active_expert_range=[1, 5]
    )
    assert tokens.tolist()[:3] == [[2, 3], [4, 1], [0, 0]]


def test_rows_of_experts_are_undefined_unless_asked_for() -> None:
    _, _, tokens, _ = routed(numbered(3), IDS, expert_tokens_num_flag=False)
    assert tokens.shape == (EXPERTS,)
    assert not {0, 1, 2, 3} & set(tokens.tolist())


def test_active_num_cuts_the_copies_only() -> None:
    copies, places, _, _ = routed(numbered(3), IDS, active_num=4)
    assert copies[:, 0].tolist() == [1, 3, 1, 2]  # experts 0, 0, 2, 2
    assert places.tolist() == [2, 0, 3, 5, 1, 4]


def test_rows_after_the_active_ones_are_conspicuous_and_finite() -> None:
    copies, _, _, scales = routed(numbered(3), IDS, active_expert_range=[4, 5])
    assert copies[0].tolist() == [2.0] * 3
    for rest in (copies[1:], scales):
        assert torch.isfinite(rest).all()
        assert not torch.isin(rest, torch.arange(4.0)).any()


def test_one_expert_gets_all_and_others_nothing() -> None:
    ids = torch.full((4, 1), 3, dtype=torch.int32)
    copies, places, counts, _ = routed(numbered(4), ids)
    assert copies[:, 0].tolist() == [1, 2, 3, 4]
    assert places.tolist() == [0, 1, 2, 3]
    assert counts.tolist() == [0, 0, 0, 4, 0, 0]


def test_version_two_is_the_same_within_its_limits() -> None:
    x = numbered(3)
    got = moe_rows.npu_moe_init_routing_v2(
        x,
        IDS,
        active_num=6,
        expert_num=EXPERTS,
        expert_tokens_num_type=COUNT,
        expert_tokens_num_flag=True,
        active_expert_range=[0, 3],
    )
    for one, other in zip(
        got, routed(x, IDS, active_num=6, active_expert_range=[0, 3]), strict=True
    ):
        assert torch.equal(one, other)


@settings(deadline=None)
@given(CHOICES, st.sampled_from([torch.int32, torch.int64]))
def test_permute_copies_by_expert_and_tells_each_pairs_place(
    ids: torch.Tensor, dtype: torch.dtype
) -> None:
    x = numbered(ids.shape[0])
    copies, places = moe_rows.npu_moe_token_permute(x, ids.to(dtype))
    expected = sorted_pairs(ids, 0, EXPERTS)
    assert copies.tolist() == [x[row].tolist() for _, _, row in expected]
    assert places.dtype == torch.int32
    assert [expected[place][1] for place in places.tolist()] == list(range(ids.numel()))


@pytest.mark.parametrize(("kept", "left"), [(None, 6), (0, 6), (4, 4), (9, 6), (-2, 4)])
def test_permute_keeps_as_many_copies_as_it_is_told(kept: int | None, left: int) -> None:
    copies, places = moe_rows.npu_moe_token_permute(numbered(3), IDS, kept)
    assert copies[:, 0].tolist() == [1, 3, 1, 2, 3, 2][:left]
    assert places.tolist() == [2, 0, 3, 5, 1, 4]


def test_permute_takes_one_expert_a_row() -> None:
    copies, places = moe_rows.npu_moe_token_permute(numbered(3), torch.tensor([2, 0, 1]))
    assert copies[:, 0].tolist() == [2, 3, 1]
    assert places.tolist() == [2, 0, 1]


@settings(deadline=None)
@given(CHOICES)
def test_unpermute_undoes_permute_with_weights(ids: torch.Tensor) -> None:
    rows, top_k = ids.shape
    x = numbered(rows)
    copies, places = moe_rows.npu_moe_token_permute(x, ids)
    probs = (torch.arange(float(ids.numel())) + 1).view(rows, top_k)
    got = moe_rows.npu_moe_token_unpermute(copies, places, probs)
    assert got.shape == x.shape
    assert got.tolist() == [
        [(row + 1) * sum(row * top_k + j + 1 for j in range(top_k))] * 3 for row in range(rows)
    ]


def test_unpermute_without_probs_only_reorders() -> None:
    got = moe_rows.npu_moe_token_unpermute(numbered(3), torch.tensor([2, 0, 1], dtype=torch.int32))
    assert got[:, 0].tolist() == [3, 1, 2]


def test_unpermute_adds_in_float32() -> None:
    copies = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    got = moe_rows.npu_moe_token_unpermute(copies, torch.tensor([0, 1, 2]), torch.ones(1, 3))
    assert (got.item(), got.dtype) == (258.0, torch.bfloat16)  # 256 if each sum were rounded


def test_a_weight_of_zero_cancels_what_is_undefined() -> None:
    """How vLLM-Ascend calls it with expert parallelism: -1 becomes 1, with a weight of 0."""
    copies, places, _, _ = routed(numbered(3), IDS, active_expert_range=[4, 5])
    probs = torch.ones(3, 2) * (places.view(3, 2) >= 0)
    got = moe_rows.npu_moe_token_unpermute(copies, places.abs(), probs)
    assert got[:, 0].tolist() == [0, 2, 0]


def version_two(**changed: object) -> Callable[[], object]:
    arguments: dict[str, object] = {
        "active_num": 6,
        "expert_num": EXPERTS,
        "expert_tokens_num_type": COUNT,
        "expert_tokens_num_flag": True,
    }
    return lambda: moe_rows.npu_moe_init_routing_v2(
        numbered(3),
        IDS,
        **{**arguments, **changed},  # type: ignore[arg-type]
    )


ROWS = numbered(3)
PLACES = torch.tensor([0, 1, 2])


def unpermuted(*given: torch.Tensor) -> Callable[[], object]:
    return lambda: moe_rows.npu_moe_token_unpermute(*given)


def permuted(*given: torch.Tensor) -> Callable[[], object]:
    return lambda: moe_rows.npu_moe_token_permute(*given)


LIMITS: dict[str, tuple[str, Callable[[], object]]] = {
    "routing scale": ("dtype", lambda: routed(ROWS, IDS, scale=torch.ones(3).half())),
    "version 2 active_num": ("layout", version_two(active_num=5)),
    "version 2 cumulated": ("layout", version_two(expert_tokens_num_type=CUMSUM)),
    "version 2 flag": ("layout", version_two(expert_tokens_num_flag=False)),
    "permute columns": (
        "layout",
        lambda: moe_rows.npu_moe_token_permute(numbered(1), torch.zeros(1, 513, dtype=torch.int32)),
    ),
}


@pytest.mark.parametrize("case", list(LIMITS))
def test_limits_and_their_relaxation(case: str) -> None:
    kind, call = LIMITS[case]
    with pytest.raises(KernelLimit, match=f"kind '{kind}'"):
        call()
    with relaxed(kind):
        call()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: routed(ROWS, IDS[:2]), r"expert_idx \[2, 2\]"),
        (lambda: routed(ROWS, IDS, active_expert_range=[2, 7]), r"\[2, 7\]"),
        (lambda: routed(ROWS, IDS, active_expert_range=[3, 3]), r"\[3, 3\]"),
        (lambda: routed(ROWS, IDS, expert_num=-1), "expert_num, -1"),
        (lambda: routed(ROWS.double(), IDS), "x is float64"),
        (lambda: routed(ROWS.int(), IDS), "x is int32"),
        (lambda: routed(ROWS, IDS.long()), "expert_idx is int64"),
        (lambda: routed(ROWS, IDS, scale=torch.ones(1)), r"scale has shape \[1\]"),
        (lambda: routed(ROWS, IDS, scale=torch.ones(3, 1)), r"scale has shape \[3, 1\]"),
        (lambda: routed(ROWS, IDS + 2), "expert_idx holds .*6, 2.* 6 experts"),
        (lambda: routed(ROWS, IDS - 1, active_expert_range=[0, 3]), "expert_idx holds .*-1"),
        (version_two(expert_num=4, active_expert_range=[0, 4]), "there are 4 experts"),
        (permuted(ROWS.double(), IDS), "tokens is float64"),
        (permuted(ROWS, IDS.float()), "indices is float32"),
        (permuted(numbered(5), IDS), r"tokens has shape \[5, 3\] and indices \[3, 2\]"),
        (permuted(numbered(2), IDS), r"tokens has shape \[2, 3\] and indices \[3, 2\]"),
        (permuted(ROWS[0], IDS[:, 0]), r"tokens has shape \[3\]"),
        (permuted(ROWS, IDS[..., None]), r"indices \[3, 2, 1\]"),
        (permuted(ROWS, IDS - 1), "indices holds .*-1"),
        (unpermuted(ROWS, PLACES + 1), "there are 3 rows"),
        (unpermuted(ROWS, PLACES - 1), "there are 3 rows"),
        (unpermuted(ROWS.double(), PLACES), "permuted_tokens is float64"),
        (unpermuted(ROWS, PLACES.float()), "sorted_indices is float32"),
        (unpermuted(ROWS, PLACES[None]), r"sorted_indices \[1, 3\]"),
        (unpermuted(ROWS, PLACES, torch.ones(3, 2)), r"probs has shape \[3, 2\] for 3"),
        (unpermuted(ROWS, PLACES, torch.ones(3)), r"probs has shape \[3\]"),
        (unpermuted(ROWS, PLACES, torch.ones(3, 1).int()), "probs is int32"),
    ],
)
def test_what_has_no_result_is_refused_even_relaxed(call: Callable[[], object], says: str) -> None:
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=says):
        call()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: routed(ROWS, IDS, quant_mode=1), "quant_mode=1"),
        (lambda: routed(ROWS, IDS, quant_mode=0), "quant_mode=0"),
        (lambda: routed(ROWS, IDS, offset=ROWS), "offset=float32"),
        (lambda: routed(ROWS, IDS, drop_pad_mode=1), "drop_pad_mode=1"),
        (lambda: routed(ROWS, IDS, expert_tokens_num_type=3), "expert_tokens_num_type=3"),
        (lambda: routed(ROWS, IDS, row_idx_type=2), "row_idx_type=2"),
        (version_two(x_dtype=290), "x_dtype=290"),
        (version_two(quant_mode=1), "quant_mode=1"),
        (version_two(offset=ROWS), "offset=float32"),
        (version_two(drop_pad_mode=1), "drop_pad_mode=1"),
        (lambda: moe_rows.npu_moe_token_permute(ROWS, IDS, None, True), "padded_mode=True"),
        (
            lambda: moe_rows.npu_moe_token_unpermute(ROWS, PLACES, padded_mode=True),
            "padded_mode=True",
        ),
    ],
)
def test_what_is_not_emulated_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises(NotEmulated, match=says):
        call()
