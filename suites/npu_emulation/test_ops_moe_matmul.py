"""Grouped products, against one loop over rows and their group's own weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import KINDS, relaxed
from afd_testkit.npu.ops.moe_matmul import npu_grouped_matmul

pytestmark = pytest.mark.cpu

CUMSUM, COUNT = 0, 1
DEPTH, WIDTH = 3, 4


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def groups_of(sizes: Sequence[int], kind: int) -> torch.Tensor:
    counts = torch.tensor(sizes, dtype=torch.int64)
    return counts.cumsum(0) if kind == CUMSUM else counts


def product(
    x: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """float64 ``[sum(sizes), N]``: each row by the weight of the group that it is in."""
    owner = [group for group, size in enumerate(sizes) for _ in range(size)]
    rows = [
        [
            sum(x[row, k].item() * weights[group, k, n].item() for k in range(x.shape[1]))
            + (0.0 if bias is None else bias[group, n].item())
            for n in range(weights.shape[2])
        ]
        for row, group in enumerate(owner)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(len(owner), weights.shape[2])


def close(got: torch.Tensor, expected: torch.Tensor, rounding: float = 1e-6) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=rounding, atol=1e-5)


@settings(deadline=None)  # time is the machine's, not the reference's
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.sampled_from([CUMSUM, COUNT]),
    st.sampled_from([2, 3]),
    st.booleans(),
)
def test_rows_meet_their_groups_weight(
    sizes: list[int], kind: int, split_item: int, with_bias: bool
) -> None:
    x, weights = random(sum(sizes), DEPTH), random(len(sizes), DEPTH, WIDTH, seed=1)
    bias = random(len(sizes), WIDTH, seed=2) if with_bias else None
    (got,) = npu_grouped_matmul(
        [x],
        [weights],
        bias=None if bias is None else [bias],
        group_list=groups_of(sizes, kind),
        group_list_type=kind,
        group_type=0,
        split_item=split_item,
    )
    close(got, product(x, weights, sizes, bias))


@pytest.mark.parametrize("sizes", [[0, 5, 0], [5, 0, 0], [0, 0, 5], [0, 0, 0]])
def test_one_group_has_all_rows_or_none_has(sizes: list[int]) -> None:
    x, weights = random(sum(sizes), DEPTH), random(3, DEPTH, WIDTH, seed=1)
    (got,) = npu_grouped_matmul(
        [x], [weights], group_list=groups_of(sizes, COUNT), group_list_type=COUNT, group_type=0,
        split_item=2,
    )  # fmt: skip
    assert got.shape == (sum(sizes), WIDTH)
    close(got, product(x, weights, sizes))


def test_rows_after_the_last_group_are_undefined() -> None:
    x, weights = random(5, DEPTH), random(2, DEPTH, WIDTH, seed=1)
    (got,) = npu_grouped_matmul(
        [x], [weights], group_list=groups_of([1, 2], CUMSUM), group_type=0, split_item=2
    )
    close(got[:3], product(x, weights, [1, 2]))
    assert got.shape == (5, WIDTH)
    assert torch.isfinite(got[3:]).all()
    assert not torch.isclose(got[3:], x[3:] @ weights[1]).any()


def test_weights_and_biases_may_be_lists() -> None:
    x, weights, bias = random(4, DEPTH), random(2, DEPTH, WIDTH, seed=1), random(2, WIDTH, seed=2)
    (got,) = npu_grouped_matmul(
        [x],
        list(weights),
        bias=list(bias),
        group_list=groups_of([3, 1], CUMSUM),
        group_type=0,
        split_item=3,
    )
    close(got, product(x, weights, [3, 1], bias))


def test_several_x_are_one_group_each() -> None:
    x, weights = random(5, DEPTH), random(2, DEPTH, WIDTH, seed=1)
    (got,) = npu_grouped_matmul([x[:2], x[2:]], list(weights), group_type=0, split_item=2)
    close(got, product(x, weights, [2, 3]))


@pytest.mark.parametrize("split_item", [0, 1])
def test_whole_tensors_are_paired(split_item: int) -> None:
    xs = [random(2, 2, DEPTH), random(3, 2, 5, seed=1)]
    weights = [random(DEPTH, WIDTH, seed=2), random(5, 2, seed=3)]
    biases = [random(WIDTH, seed=4), random(2, seed=5)]
    got = npu_grouped_matmul(xs, weights, bias=biases, group_type=-1, split_item=split_item)
    for y, x, weight, bias in zip(got, xs, weights, biases, strict=True):
        assert y.shape == (*x.shape[:-1], weight.shape[1])
        flat = x.reshape(-1, x.shape[-1])
        close(
            y.view(-1, weight.shape[1]),
            product(flat, weight[None], [flat.shape[0]], bias[None]),
        )


@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)],
)
def test_halves_are_added_in_float32_and_rounded_once(
    dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    x = torch.tensor([[2048.0, 1.0, -2048.0]], dtype=dtype)
    (got,) = npu_grouped_matmul(
        [x], [torch.ones(1, 3, 1, dtype=dtype)], bias=[torch.full((1, 1), 0.5, dtype=bias_dtype)],
        group_list=torch.tensor([1]), group_type=0, split_item=2,
    )  # fmt: skip
    assert (got.item(), got.dtype) == (1.5, dtype)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(None, torch.bfloat16), (torch.float32, torch.float32), (5, torch.float16),
     (6, torch.float32), (15, torch.bfloat16)],
)  # fmt: skip
def test_output_dtype_as_a_dtype_or_as_its_number(
    given: torch.dtype | int | None, dtype: torch.dtype
) -> None:
    x, weight = random(2, DEPTH, dtype=torch.bfloat16), random(1, DEPTH, WIDTH).bfloat16()
    (got,) = npu_grouped_matmul(
        [x], [weight], group_list=torch.tensor([2]), group_type=0, split_item=2, output_dtype=given
    )
    assert got.dtype == dtype


def test_an_output_dtype_number_is_what_torch_makes_of_a_dtype() -> None:
    library = torch.library.Library("afd_output_dtype", "DEF")
    seen: list[int | None] = []
    library.define("see(int? output_dtype) -> ()")
    library.impl("see", seen.append, "CompositeExplicitAutograd")
    try:
        for dtype in (torch.float16, torch.float32, torch.bfloat16):
            torch.ops.afd_output_dtype.see(dtype)
    finally:
        library._destroy()
    assert seen == [5, 6, 15]


X = torch.ones(2, DEPTH)
W = torch.ones(1, DEPTH, WIDTH)
TWO = torch.tensor([2])
HALVES = torch.tensor([1, 2])
SIZES = torch.tensor([3, 4])  # cumulated: 3 and 1


def call(**changed: object) -> Callable[[], object]:
    arguments: dict[str, object] = {
        "x": [X],
        "weight": [W],
        "group_list": TWO,
        "group_type": 0,
        "split_item": 2,
    }
    return lambda: npu_grouped_matmul(**{**arguments, **changed})  # type: ignore[arg-type]


LIMITS: dict[str, tuple[str, Callable[[], object]]] = {
    "weight": ("dtype", call(weight=[W.half()])),
    "bias": ("dtype", call(bias=[torch.ones(1, WIDTH).half()])),
    "tensors": (
        "layout",
        call(x=[X[:1]] * 129, weight=[W[0]] * 129, group_list=None, split_item=2),
    ),
    "groups": (
        "layout",
        call(weight=[W.expand(1025, DEPTH, WIDTH)], group_list=torch.full((1025,), 2)),
    ),
}


@pytest.mark.parametrize("case", list(LIMITS))
def test_limits_and_their_relaxation(case: str) -> None:
    kind, refused = LIMITS[case]
    with pytest.raises(KernelLimit, match=f"kind '{kind}'"):
        refused()
    with relaxed(kind):
        refused()


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (call(group_list=torch.tensor([2, 1]), weight=[W.expand(2, DEPTH, WIDTH)]), "not decrease"),
        (call(group_list=torch.tensor([-1]), group_list_type=COUNT), "no negatives"),
        (call(group_list=torch.tensor([3])), "2 rows of x"),
        (call(group_list=torch.tensor([1, 2])), "gives weight for 1 groups, there are 2"),
        (call(x=[X.double()], weight=[W.double()]), "x is float64"),
        (call(x=[X.int()], weight=[W.int()]), "x is int32"),
        (call(group_list=TWO.int()), "group_list is int32"),
        (call(x=[]), "lists no tensor"),
        (call(x=[X[:, :1]]), r"rows of 1; every group"),
        (call(x=[X[0]]), r"x is \[float32\[3\]\]"),
        (
            call(x=[X[:1], torch.cat([X, X[:1]])], weight=[W[0], W[0]], group_list=SIZES),
            r"tensors of \[1, 3\] rows and group_list gives groups of \[3, 1\]",
        ),
        (
            call(weight=[W.expand(2, DEPTH, WIDTH)], group_list=HALVES, bias=[W[0, 0]]),
            "gives bias for 1 groups, there are 2",
        ),
        (
            call(group_type=-1, split_item=0, group_list=None, bias=[W[0, 0]] * 2),
            "gives bias for 2 groups, there are 1",
        ),
        (call(bias=[torch.ones(1, 1)]), r"bias of a group has shape \[1\]"),
        (call(weight=[W[0], W[0]]), "gives weight for 2 groups, there are 1"),
        (
            call(weight=[W[0], W[0, :, :2]], group_list=HALVES),
            "one N",
        ),
        (call(group_list=None), "needs a group_list"),
        (call(split_item=0), "split_item 2 or 3, not 0"),
        (call(group_type=-1, split_item=0), "no group_list"),
        (call(group_type=-1, split_item=2, group_list=None), "split_item 0 or 1"),
        (call(group_type=-1, split_item=0, group_list=None, x=[X, X]), "2 tensors of x"),
    ],
)
def test_what_has_no_result_is_refused_even_relaxed(
    refused: Callable[[], object], says: str
) -> None:
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=says):
        refused()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            (name, [X])
            for name in (
                "scale",
                "offset",
                "antiquant_scale",
                "antiquant_offset",
                "per_token_scale",
                "activation_input",
                "activation_quant_scale",
                "activation_quant_offset",
            )
        ],
        ("split_item", 4),
        ("group_type", 2),
        ("group_type", None),
        ("group_list_type", 2),
        ("act_type", 1),
        ("output_dtype", 1),
        ("output_dtype", torch.int32),
        ("x_dtype", 290),
        ("weight_dtype", 290),
        ("scale_dtype", 290),
        ("per_token_scale_dtype", 290),
    ],
)
def test_what_is_not_emulated_is_named(name: str, value: object) -> None:
    with pytest.raises(NotEmulated, match=f"{name}="):
        call(**{name: value})()
