"""Choosing experts, against the definition in plain Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import KINDS, relaxed
from afd_testkit.npu.ops import moe_gating

pytestmark = pytest.mark.cpu

SOFTMAX, SIGMOID = 0, 1
MAXIMUM, TWO_BEST = 0, 1


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def best(scores: list[float], k: int) -> list[int]:
    """The k largest, descending; of equal ones the lower index first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def scores_of(row: list[float], norm_type: int) -> list[float]:
    if norm_type == SIGMOID:
        return [1 / (1 + math.exp(-x)) for x in row]
    weights = [math.exp(x - max(row)) for x in row]
    return [w / sum(weights) for w in weights]


def chosen(
    row: list[float],
    k: int,
    *,
    bias: list[float] | None = None,
    k_group: int = 1,
    group_count: int = 1,
    mode: int = MAXIMUM,
    renorm: int = 0,
    norm_type: int = SOFTMAX,
    scale: float = 1.0,
    eps: float = 1e-20,
) -> tuple[list[float], list[int]]:
    """Weights and experts of one row."""
    scores = scores_of(row, norm_type)
    ranked = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(row) // group_count
    groups = [sorted(ranked[g * size : (g + 1) * size], reverse=True) for g in range(group_count)]
    of_group = [sum(group[: 2 if mode == TWO_BEST else 1]) for group in groups]
    kept = best(of_group, k_group)
    if group_count > 1:
        ranked = [r if i // size in kept else -math.inf for i, r in enumerate(ranked)]
    experts = best(ranked, k)
    weights = [scores[expert] for expert in experts]
    if norm_type == SIGMOID or renorm:
        weights = [w / (sum(weights) + eps) for w in weights]
    return [w * scale for w in weights], experts


def ascend(x: torch.Tensor, k: int, **changed: object) -> tuple[torch.Tensor, ...]:
    arguments: dict[str, object] = {
        "k_group": 1,
        "group_count": 1,
        "group_select_mode": MAXIMUM,
        "renorm": 0,
        "norm_type": SOFTMAX,
        "out_flag": False,
        "routed_scaling_factor": 1.0,
        "eps": 1e-20,
    }
    return moe_gating.moe_gating_top_k(x, k, **{**arguments, **changed})  # type: ignore[arg-type]


def check(got: tuple[torch.Tensor, ...], expected: list[tuple[list[float], list[int]]]) -> None:
    weights, experts = got[0], got[1]
    assert experts.dtype == torch.int32
    assert experts.tolist() == [row[1] for row in expected]
    wanted = torch.tensor([row[0] for row in expected], dtype=torch.float64)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("norm_type", [SOFTMAX, SIGMOID])
@pytest.mark.parametrize("renorm", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("groups", "k_group", "mode"),
    [(1, 1, MAXIMUM), (1, 1, TWO_BEST), (4, 2, MAXIMUM), (4, 2, TWO_BEST), (4, 4, TWO_BEST)],
)
def test_gating_is_its_definition(
    norm_type: int, renorm: int, with_bias: bool, groups: int, k_group: int, mode: int
) -> None:
    x, bias = random(9, 16), random(16, seed=1) if with_bias else None
    got = ascend(
        x,
        4,
        k_group=k_group,
        group_count=groups,
        group_select_mode=mode,
        renorm=renorm,
        norm_type=norm_type,
        routed_scaling_factor=2.5,
        eps=0.125,
        bias_opt=bias,
    )
    expected = [
        chosen(
            row,
            4,
            bias=None if bias is None else bias.tolist(),
            k_group=k_group,
            group_count=groups,
            mode=mode,
            renorm=renorm,
            norm_type=norm_type,
            scale=2.5,
            eps=0.125,
        )
        for row in x.tolist()
    ]
    check(got, expected)


def test_ties_go_to_the_lower_expert_and_the_lower_group() -> None:
    _, experts, _ = ascend(torch.zeros(1, 8), 3)
    assert experts.tolist() == [[0, 1, 2]]
    _, experts, _ = ascend(torch.zeros(1, 8), 3, k_group=2, group_count=4, group_select_mode=1)
    assert experts.tolist() == [[0, 1, 2]]


def test_many_equal_scores_stay_in_order() -> None:
    x = torch.zeros(1, 256)
    x[0, 200] = 1.0
    _, experts, _ = ascend(x, 8)
    assert experts.tolist() == [[200, 0, 1, 2, 3, 4, 5, 6]]


def test_a_negative_bias_never_lets_another_group_in() -> None:
    bias = torch.tensor([-5.0, -5.0, -5.0, -5.0, -9.0, -9.0, -9.0, -9.0])
    _, experts, _ = ascend(
        torch.zeros(1, 8), 3, k_group=1, group_count=2, norm_type=SIGMOID, bias_opt=bias
    )
    assert experts.tolist() == [[0, 1, 2]]


def test_the_bias_chooses_but_does_not_weigh() -> None:
    x = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    bias = torch.tensor([0.0, 9.0, 0.0, 0.0])
    weights, experts, _ = ascend(x, 2, norm_type=SIGMOID, bias_opt=bias)
    assert experts.tolist() == [[1, 0]]
    high, low = 1 / (1 + math.exp(-2)), 0.5
    assert weights.tolist()[0] == pytest.approx([low / (low + high), high / (low + high)])


def test_scores_come_out_only_when_asked_for() -> None:
    x = random(3, 8).bfloat16()
    weights, _, scores = ascend(x, 2, out_flag=True)
    assert (weights.dtype, scores.dtype) == (torch.bfloat16, torch.float32)
    expected = torch.tensor([scores_of(row, SOFTMAX) for row in x.tolist()])
    torch.testing.assert_close(scores, expected)
    _, _, nothing = ascend(x, 2)
    assert nothing.shape == scores.shape
    assert not torch.isclose(nothing, expected).any()


def test_no_rows() -> None:
    weights, experts, _ = ascend(torch.empty(0, 8), 2, k_group=1, group_count=2)
    assert weights.shape == experts.shape == (0, 2)


def test_torch_npus_operator_is_the_same_without_renorm() -> None:
    x, bias = random(5, 12), random(12, seed=1)
    got = moe_gating.npu_moe_gating_top_k(
        x, 3, bias=bias, k_group=2, group_count=3, group_select_mode=1, norm_type=1,
        routed_scaling_factor=0.5,
    )  # fmt: skip
    expected = [
        chosen(row, 3, bias=bias.tolist(), k_group=2, group_count=3, mode=TWO_BEST,
               norm_type=SIGMOID, scale=0.5)
        for row in x.tolist()
    ]  # fmt: skip
    check(got, expected)


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
def test_gating_softmax_with_row_numbers(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    weights, experts, rows = moe_gating.npu_moe_gating_top_k_softmax(x, k=2)
    flat = x.view(-1, 6).tolist()
    check((weights.view(-1, 2), experts.view(-1, 2)), [chosen(row, 2) for row in flat])
    assert weights.shape == (*shape[:-1], 2)
    assert rows.dtype == torch.int32
    assert rows.view(-1, 2).tolist() == [[i, len(flat) + i] for i in range(len(flat))]


LOGITS = torch.zeros(2, 8)
LIMITS: dict[str, tuple[str, Callable[[], object]]] = {
    "bias": ("dtype", lambda: ascend(LOGITS, 2, bias_opt=torch.zeros(8).half())),
    "axes": ("layout", lambda: ascend(LOGITS[None], 2)),
    "experts": ("layout", lambda: ascend(torch.zeros(1, 2049), 2)),
    "two best of one": (
        "layout",
        lambda: ascend(LOGITS, 2, group_count=8, k_group=8, group_select_mode=1),
    ),
    "padded groups": ("alignment", lambda: ascend(torch.zeros(1, 260), 2, group_count=65)),
    "torch_npu renorm": ("layout", lambda: moe_gating.npu_moe_gating_top_k(LOGITS, 2, renorm=1)),
    "torch_npu small groups": (
        "layout",
        lambda: moe_gating.npu_moe_gating_top_k(LOGITS, 2, k_group=4, group_count=4),
    ),
    "softmax axes": ("layout", lambda: moe_gating.npu_moe_gating_top_k_softmax(LOGITS[0])),
    "softmax k": (
        "layout",
        lambda: moe_gating.npu_moe_gating_top_k_softmax(torch.zeros(1, 2000), k=1025),
    ),
}


@pytest.mark.parametrize("case", list(LIMITS))
def test_limits_and_their_relaxation(case: str) -> None:
    kind, call = LIMITS[case]
    with pytest.raises(KernelLimit, match=f"kind '{kind}'"):
        call()
    with relaxed(kind):
        call()


def test_all_groups_kept_need_no_padding() -> None:
    ascend(torch.zeros(1, 260), 2, group_count=65, k_group=65)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ascend(LOGITS, 0), "k=0"),
        (lambda: ascend(LOGITS.double(), 2), "x is float64"),
        (lambda: ascend(LOGITS.int(), 2), "x is int32"),
        (lambda: moe_gating.npu_moe_gating_top_k_softmax(LOGITS.long()), "x is int64"),
        (lambda: ascend(LOGITS, 3, group_count=4), "k=3 .* 4 groups of 2"),
        (lambda: ascend(LOGITS, 1, k_group=5, group_count=4), "k_group=5"),
        (lambda: ascend(LOGITS, 1, group_count=3), "do not divide into 3"),
        (lambda: ascend(LOGITS, 1, bias_opt=torch.zeros(7)), r"bias has shape \[7\]"),
        (lambda: moe_gating.npu_moe_gating_top_k_softmax(LOGITS, k=9), "k is 9"),
    ],
)
def test_what_has_no_result_is_refused_even_relaxed(call: Callable[[], object], says: str) -> None:
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=says):
        call()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ascend(LOGITS, 1, group_select_mode=2), "group_select_mode=2"),
        (lambda: ascend(LOGITS, 1, renorm=2), "renorm=2"),
        (lambda: ascend(LOGITS, 1, norm_type=2), "norm_type=2"),
        (
            lambda: moe_gating.npu_moe_gating_top_k_softmax(
                LOGITS, torch.zeros(2, dtype=torch.bool)
            ),
            "finished=bool",
        ),
    ],
)
def test_what_is_not_emulated_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises(NotEmulated, match=says):
        call()
