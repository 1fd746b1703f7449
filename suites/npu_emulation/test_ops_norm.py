"""Normalization and activation on the emulated NPU, against float64 loops over their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from afd_testkit.npu.errors import KernelLimit
from afd_testkit.npu.limits import KINDS, relaxed
from afd_testkit.npu.ops import norm

pytestmark = pytest.mark.cpu

# One rounding of a dtype moves a value by half of this much of itself.
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
DTYPES = pytest.mark.parametrize("dtype", list(EPSILON))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(got: torch.Tensor, expected: list[float], dtype: torch.dtype) -> None:
    """``got`` has ``dtype`` and is ``expected`` (row by row) to four roundings of it."""
    assert got.dtype == dtype
    wanted = torch.tensor(expected, dtype=torch.float64).view(got.shape)
    torch.testing.assert_close(got.double(), wanted, rtol=4 * EPSILON[dtype], atol=1e-7)


def rms_rows(
    rows: list[list[float]], gamma: list[float], epsilon: float, beta: list[float] | None = None
) -> tuple[list[float], list[float]]:
    """The RMS norm of each row, row by row, and the reciprocal root mean squares."""
    values, factors = [], []
    for row in rows:
        factor = 1 / math.sqrt(sum(x * x for x in row) / len(row) + epsilon)
        factors.append(factor)
        for i, (x, g) in enumerate(zip(row, gamma, strict=True)):
            values.append(x * factor * g + (beta[i] if beta else 0.0))
    return values, factors


@DTYPES
def test_rms_norm_is_its_formula(dtype: torch.dtype) -> None:
    x, gamma = random(5, 8, dtype=dtype), random(8, dtype=dtype, seed=1)
    y, rstd = norm.npu_rms_norm(x, gamma, 0.25)
    values, factors = rms_rows(x.tolist(), gamma.tolist(), 0.25)
    check(y, values, dtype)
    check(rstd, factors, torch.float32)
    assert rstd.shape == (5, 1)


def test_rms_norm_goes_over_all_axes_of_gamma() -> None:
    x, gamma = random(3, 2, 4), random(2, 4, seed=1)
    y, rstd = norm.npu_rms_norm(x, gamma)
    values, factors = rms_rows(x.view(3, 8).tolist(), gamma.flatten().tolist(), 1e-6)
    check(y, values, torch.float32)
    check(rstd, factors, torch.float32)
    assert rstd.shape == (3, 1, 1)


@pytest.mark.parametrize("gemma", [norm.npu_gemma_rms_norm, norm.ascend_gemma_rms_norm])
def test_gemma_adds_one_to_gamma(gemma: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    x, gamma = random(4, 6), random(6, seed=1)
    y, rstd = gemma(x, gamma, 1e-3)
    values, factors = rms_rows(x.tolist(), [1 + g for g in gamma.tolist()], 1e-3)
    check(y, values, torch.float32)
    check(rstd, factors, torch.float32)


@DTYPES
@pytest.mark.parametrize("with_beta", [False, True])
def test_add_rms_norm_is_its_formula(dtype: torch.dtype, with_beta: bool) -> None:
    x1, x2 = random(5, 8, dtype=dtype), random(5, 8, dtype=dtype, seed=1)
    gamma, beta = random(8, dtype=dtype, seed=2), random(8, dtype=dtype, seed=3)
    if with_beta:
        y, rstd, total = norm.npu_add_rms_norm_bias(x1, x2, gamma, beta, 0.25)
    else:
        y, rstd, total = norm.npu_add_rms_norm(x1, x2, gamma, 0.25)
    sums = [
        [a + b for a, b in zip(*rows, strict=True)]
        for rows in zip(x1.tolist(), x2.tolist(), strict=True)
    ]
    values, factors = rms_rows(sums, gamma.tolist(), 0.25, beta.tolist() if with_beta else None)
    # Near the zeros of y + beta a rounding of beta's size is what remains.
    assert y.dtype == dtype
    wanted = torch.tensor(values, dtype=torch.float64).view(5, 8)
    torch.testing.assert_close(
        y.double(), wanted, rtol=4 * EPSILON[dtype], atol=4 * EPSILON[torch.float32]
    )
    check(rstd, factors, torch.float32)
    check(total, [value for row in sums for value in row], dtype)


def test_without_beta_the_two_additions_agree() -> None:
    x1, x2, gamma = random(3, 4), random(3, 4, seed=1), random(4, seed=2)
    plain = norm.npu_add_rms_norm(x1, x2, gamma, 1e-5)
    for got, expected in zip(
        norm.npu_add_rms_norm_bias(x1, x2, gamma, None, 1e-5), plain, strict=True
    ):
        assert torch.equal(got, expected)


def test_the_sum_is_normalized_before_it_is_rounded() -> None:
    x1 = torch.tensor([[256.0, 0.0]], dtype=torch.bfloat16)
    x2 = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    y, _, total = norm.npu_add_rms_norm(x1, x2, torch.ones(2, dtype=torch.bfloat16), 0.0)
    assert total.tolist() == [[256.0, 3.0]]  # 257 has no bf16
    exact = 3 / math.sqrt((257**2 + 3**2) / 2)
    rounded_first = 3 / math.sqrt((256**2 + 3**2) / 2)
    assert y[0, 1] == torch.tensor(exact).bfloat16() != torch.tensor(rounded_first).bfloat16()


@DTYPES
def test_swiglu_is_its_formula(dtype: torch.dtype) -> None:
    x = random(3, 10, dtype=dtype)
    rows = x.tolist()
    expected = [row[i] / (1 + math.exp(-row[i])) * row[5 + i] for row in rows for i in range(5)]
    check(norm.npu_swiglu(x), expected, dtype)


def test_swiglu_halves_the_axis_that_it_is_told() -> None:
    x = random(4, 3)
    got = norm.npu_swiglu(x, dim=0)
    expected = [
        x[i, j].item() / (1 + math.exp(-x[i, j].item())) * x[i + 2, j].item()
        for i in range(2)
        for j in range(3)
    ]
    check(got, expected, torch.float32)
    assert got.shape == (2, 3)


def test_fast_gelu_is_its_formula_and_finite_far_out() -> None:
    x = torch.tensor([-200.0, -2.0, -0.5, 0.0, 0.5, 2.0, 200.0])
    expected = [
        0.0 if value == -200 else value / (1 + math.exp(-1.702 * value)) for value in x.tolist()
    ]
    check(norm.npu_fast_gelu(x), expected, torch.float32)


def test_no_rows_give_no_rows() -> None:
    x, gamma = torch.empty(0, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    y, rstd = norm.npu_rms_norm(x, gamma)
    assert (y.shape, y.dtype, rstd.shape) == ((0, 8), torch.bfloat16, (0, 1))
    y, rstd, total = norm.npu_add_rms_norm_bias(x, x, gamma)
    assert (y.shape, rstd.shape, total.shape) == ((0, 8), (0, 1), (0, 8))
    assert norm.npu_swiglu(x).shape == (0, 4)


ONES64 = torch.ones(2, 4, dtype=torch.float64)
DTYPE_LIMITS = {
    "rms input": lambda: norm.npu_rms_norm(ONES64, ONES64[0]),
    "rms gamma": lambda: norm.npu_rms_norm(ONES64.float(), ONES64[0]),
    "gemma": lambda: norm.npu_gemma_rms_norm(ONES64.float(), ONES64[0]),
    "add x2": lambda: norm.npu_add_rms_norm(ONES64.float(), ONES64, ONES64[0].float()),
    "add beta": lambda: norm.npu_add_rms_norm_bias(
        *[ONES64.float()] * 2, ONES64[0].float(), ONES64[0]
    ),
    "swiglu": lambda: norm.npu_swiglu(ONES64),
    "fast gelu": lambda: norm.npu_fast_gelu(ONES64),
}


@pytest.mark.parametrize("case", list(DTYPE_LIMITS))
def test_doubles_are_refused_even_relaxed(case: str) -> None:
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=r"is float64"):
        DTYPE_LIMITS[case]()


def test_a_gamma_of_another_floating_dtype_is_a_limit() -> None:
    x, gamma = random(5, 8), random(8, seed=1).bfloat16()
    with pytest.raises(KernelLimit, match=r"gamma is bfloat16.*kind 'dtype'"):
        norm.npu_rms_norm(x, gamma)
    with relaxed("dtype"):
        y, _ = norm.npu_rms_norm(x, gamma)
    check(y, rms_rows(x.tolist(), gamma.tolist(), 1e-6)[0], torch.float32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "call",
    [
        norm.npu_swiglu,
        norm.npu_fast_gelu,
        lambda x: norm.npu_rms_norm(x, torch.ones(4)),
        lambda x: norm.npu_rms_norm(x, x[0]),
        lambda x: norm.npu_gemma_rms_norm(x, x[0]),
        lambda x: norm.npu_add_rms_norm(x, x, x[0]),
    ],
    ids=["swiglu", "gelu", "rms", "rms both", "gemma", "add"],
)
def test_integers_are_refused_even_relaxed(
    call: Callable[[torch.Tensor], object], dtype: torch.dtype
) -> None:
    """They would be truncated: half of a unit becomes zero, without an error."""
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=str(dtype).removeprefix("torch.")):
        call(torch.ones(2, 4, dtype=dtype))


def test_more_than_eight_axes_are_a_limit() -> None:
    nine = random(*[1] * 8, 2)
    for call in (norm.npu_swiglu, norm.npu_fast_gelu):
        with pytest.raises(KernelLimit, match=r"input has 9 axes.*kind 'layout'"):
            call(nine)
        with relaxed("layout"):
            assert call(nine).dim() == 9


def test_a_negative_epsilon_is_a_limit() -> None:
    ones = torch.ones(2, 4)
    with pytest.raises(KernelLimit, match=r"epsilon is -0.5.*kind 'layout'"):
        norm.npu_add_rms_norm_bias(ones, ones, ones[0], None, -0.5)
    with relaxed("layout"):
        y, _, _ = norm.npu_add_rms_norm_bias(ones, ones, ones[0], None, -0.5)
    check(y, [2 / math.sqrt(4 - 0.5)] * 8, torch.float32)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: norm.npu_rms_norm(torch.ones(2, 4), torch.ones(3)), r"gamma has shape \[3\]"),
        (lambda: norm.npu_rms_norm(torch.ones(4), torch.ones(1, 4)), r"gamma has shape \[1, 4\]"),
        (
            lambda: norm.npu_add_rms_norm(torch.ones(2, 4), torch.ones(1, 4), torch.ones(4)),
            r"x2 \[1, 4\]",
        ),
        (
            lambda: norm.npu_add_rms_norm_bias(
                torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), torch.ones(1)
            ),
            r"beta has shape \[1\]",
        ),
        (lambda: norm.npu_swiglu(torch.ones(2, 5)), "5 elements along dim -1"),
        (lambda: norm.npu_swiglu(torch.tensor(1.0)), "input has 0 axes"),
        (lambda: norm.npu_swiglu(torch.ones(2, 4), 2), "2 axes and dim is 2"),
        (lambda: norm.npu_swiglu(torch.ones(2, 4), -3), "2 axes and dim is -3"),
        (lambda: norm.npu_rms_norm(torch.ones(2, 4), torch.tensor(1.0)), r"gamma has shape \[\]"),
        (lambda: norm.npu_rms_norm(*[torch.tensor(1.0)] * 2), r"gamma has shape \[\]"),
    ],
)
def test_shapes_that_have_no_result_are_refused_even_relaxed(
    call: Callable[[], object], says: str
) -> None:
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=says):
        call()
