"""Products, formats, sampling filters and the vocabulary mask, against loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import KINDS, relaxed
from afd_testkit.npu.ops import linear

pytestmark = pytest.mark.cpu

INF = float("inf")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("acl_format", [0, 2, 29])
def test_a_format_cast_keeps_values_shape_and_strides_in_new_storage(acl_format: int) -> None:
    x = random(3, 4, dtype=torch.bfloat16).t()
    got = linear.npu_format_cast(x, acl_format)
    assert torch.equal(got, x)
    assert got.stride() == x.stride()
    assert got.data_ptr() != x.data_ptr()


def test_a_parameter_is_cast_to_a_plain_tensor() -> None:
    got = linear.npu_format_cast(torch.nn.Parameter(random(2, 2)), 29)
    assert not got.requires_grad


def test_matmul_add_accumulates_in_place_in_float32() -> None:
    x, weight = random(5, 2, dtype=torch.float16), random(5, 3, dtype=torch.float16, seed=1)
    total = random(2, 3, seed=2)
    expected = [
        [
            total[k, n].item() + sum(x[t, k].item() * weight[t, n].item() for t in range(5))
            for n in range(3)
        ]
        for k in range(2)
    ]
    place = total.data_ptr()
    assert linear.npu_matmul_add_fp32(x, weight, total) is None
    assert total.data_ptr() == place
    torch.testing.assert_close(
        total.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("perm_x1", [None, (0, 1, 2), (1, 0, 2)])
@pytest.mark.parametrize("perm_x2", [None, (0, 1, 2), (0, 2, 1)])
@pytest.mark.parametrize("perm_y", [None, (1, 0, 2)])
def test_transpose_batchmatmul_permutes_factors_and_result(
    perm_x1: tuple[int, ...] | None,
    perm_x2: tuple[int, ...] | None,
    perm_y: tuple[int, ...] | None,
) -> None:
    left, right = random(2, 3, 128), random(2, 128, 128, seed=1)
    got = linear.npu_transpose_batchmatmul(
        left.transpose(0, 1).contiguous() if perm_x1 == (1, 0, 2) else left,
        right.transpose(1, 2).contiguous() if perm_x2 == (0, 2, 1) else right,
        perm_x1=perm_x1,
        perm_x2=perm_x2,
        perm_y=perm_y,
    )
    assert got.shape == (3, 2, 128)
    for m, b, n in ((0, 0, 0), (2, 1, 127), (1, 0, 64)):
        exact = sum(left[b, m, k].item() * right[b, k, n].item() for k in range(128))
        assert got[m, b, n].item() == pytest.approx(exact, abs=1e-4)


def test_batched_products_round_once() -> None:
    # 2048 + 1 - 2048 is 1 in fp32, 0 when each step is rounded to bf16.
    left = torch.tensor([[[2048.0, 1.0, -2048.0] + [0.0] * 125]], dtype=torch.bfloat16)
    right = torch.ones(1, 128, 128, dtype=torch.bfloat16)
    got = linear.npu_transpose_batchmatmul(left, right)
    assert got.dtype == torch.bfloat16
    assert got.unique().tolist() == [1.0]


@pytest.mark.parametrize("flat", [False, True])
def test_batch_matmul_transpose_writes_its_third_argument(flat: bool) -> None:
    a = random(3, 2, 4, dtype=torch.float16)
    b = random(2, 4, 5, dtype=torch.float16, seed=1)
    c = torch.full((3, 10) if flat else (3, 2, 5), INF, dtype=torch.float16)
    assert linear.batch_matmul_transpose(a, b, c) is None
    for m in range(3):
        for batch in range(2):
            for n in range(5):
                exact = sum(a[m, batch, k].item() * b[batch, k, n].item() for k in range(4))
                assert c.view(3, 2, 5)[m, batch, n].item() == pytest.approx(
                    exact, rel=2**-10, abs=1e-5
                )


def filtered(row: list[float], k: int | None, p: float | None) -> list[float]:
    """One row of logits after top-k, then top-p; ties at the k-th stay."""
    kept = set(range(len(row)))
    if k is not None:
        cutoff = sorted(row, reverse=True)[k - 1]
        kept = {i for i in kept if row[i] >= cutoff}
    if p is not None:
        weights = {i: math.exp(row[i]) for i in kept}
        total, cumulated = sum(weights.values()), 0.0
        # From the smallest; of equal ones the earlier goes first, as in a stable sort.
        ascending = sorted(kept, key=lambda i: (row[i], i))
        for i in ascending[:-1]:
            cumulated += weights[i] / total
            if cumulated <= 1 - p:
                kept.discard(i)
    return [value if i in kept else -INF for i, value in enumerate(row)]


@pytest.mark.parametrize("k", [None, [1, 3, 7, 2]])
@pytest.mark.parametrize("p", [None, [0.1, 0.5, 0.9, 1.0]])
def test_top_k_top_p_is_its_definition(k: list[int] | None, p: list[float] | None) -> None:
    if k is None and p is None:
        with pytest.raises(KernelLimit, match="neither p nor k"):
            linear.npu_top_k_top_p(random(4, 7))
        return
    logits = random(4, 7)
    before = logits.clone()
    got = linear.npu_top_k_top_p(
        logits,
        None if p is None else torch.tensor(p),
        None if k is None else torch.tensor(k, dtype=torch.int32),
    )
    assert got.tolist() == [
        filtered(row, None if k is None else k[i], None if p is None else p[i])
        for i, row in enumerate(logits.tolist())
    ]
    assert torch.equal(logits, before)


def test_ties_at_the_kth_logit_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 2.0, 2.0, 0.0]])
    got = linear.npu_top_k_top_p(logits, k=torch.tensor([2], dtype=torch.int32))
    assert got.tolist() == [[2.0, -INF, 2.0, 2.0, -INF]]


def test_the_largest_logit_stays_at_p_zero() -> None:
    got = linear.npu_top_k_top_p(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([0.0]))
    assert got.tolist() == [[-INF, 3.0, -INF]]


def test_prefetch_changes_nothing() -> None:
    x = random(4, 4)
    before = x.clone()
    assert linear.npu_prefetch(x, None, 1 << 20, 8) is None
    assert torch.equal(x, before)


def vocabulary_row(token: int, edges: tuple[int, int, int, int], padding: int) -> int | None:
    """Where ``token`` is in a shard of original rows, their padding, and added rows."""
    start, end, added_start, added_end = edges
    rows = [*range(start, end), *[None] * padding, *range(added_start, added_end)]
    return rows.index(token) if token in rows else None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("edges", "padding"),
    [((4, 8, 20, 20), 0), ((0, 4, 12, 15), 0), ((8, 11, 12, 14), 1), ((5, 5, 12, 12), 0)],
)
def test_the_vocabulary_mask_finds_each_tokens_row(
    edges: tuple[int, int, int, int], padding: int, dtype: torch.dtype
) -> None:
    tokens = torch.arange(16, dtype=dtype).view(2, 8)
    masked, mask = linear.get_masked_input_and_mask(
        tokens, edges[0], edges[1], padding, edges[2], edges[3]
    )
    expected = [vocabulary_row(token, edges, padding) for token in range(16)]
    assert masked.dtype == dtype
    assert masked.flatten().tolist() == [row or 0 for row in expected]
    assert mask.flatten().tolist() == [row is None for row in expected]
    assert mask.dtype == torch.bool


A = torch.ones(2, 1, 128)
B = torch.ones(1, 128, 128)
HALF = A.half(), B.half(), torch.ones(2, 1, 128).half()
ROW = torch.zeros(1, 4)
K3 = torch.tensor([3], dtype=torch.int32)
LIMITS: dict[str, tuple[str, Callable[[], object]]] = {
    "add x": ("dtype", lambda: linear.npu_matmul_add_fp32(A[0], A[0], torch.zeros(128, 128))),
    "add weight": (
        "dtype",
        lambda: linear.npu_matmul_add_fp32(A[0].half(), A[0], torch.zeros(128, 128)),
    ),
    "add C": (
        "dtype",
        lambda: linear.npu_matmul_add_fp32(*[A[0].half()] * 2, torch.zeros(128, 128).half()),
    ),
    "transpose weight": ("dtype", lambda: linear.npu_transpose_batchmatmul(A[:1], B.half())),
    "transpose K": (
        "alignment",
        lambda: linear.npu_transpose_batchmatmul(torch.ones(1, 1, 64), torch.ones(1, 64, 128)),
    ),
    "transpose N": (
        "alignment",
        lambda: linear.npu_transpose_batchmatmul(A[:1], torch.ones(1, 128, 64)),
    ),
    "transpose K times B": (
        "layout",
        lambda: linear.npu_transpose_batchmatmul(
            torch.ones(1, 512, 128), torch.ones(1, 1, 1).expand(512, 128, 128), perm_x1=(1, 0, 2)
        ),
    ),
    "bmm dtype": ("dtype", lambda: linear.batch_matmul_transpose(A, B, torch.ones(2, 1, 128))),
    "bmm mixed": ("dtype", lambda: linear.batch_matmul_transpose(HALF[0], B, HALF[2])),
    "bmm rows": (
        "layout",
        lambda: linear.batch_matmul_transpose(
            torch.ones(1025, 1, 4).half(), torch.ones(1, 4, 4).half(), torch.ones(1025, 1, 4).half()
        ),
    ),
    "p": ("dtype", lambda: linear.npu_top_k_top_p(ROW, torch.ones(1).half())),
    "k beyond the row": ("layout", lambda: linear.npu_top_k_top_p(ROW, k=K3 + 2)),
    "k of 0": ("layout", lambda: linear.npu_top_k_top_p(ROW, k=K3 - 3)),
    "k beyond 1024": ("layout", lambda: linear.npu_top_k_top_p(torch.zeros(1, 2000), k=K3 * 400)),
    "prefetch size": ("layout", lambda: linear.npu_prefetch(A, None, 0)),
    "prefetch offset": ("layout", lambda: linear.npu_prefetch(A, None, 8, 1 << 20)),
}


@pytest.mark.parametrize("case", list(LIMITS))
def test_limits_and_their_relaxation(case: str) -> None:
    kind, call = LIMITS[case]
    with pytest.raises(KernelLimit, match=f"kind '{kind}'"):
        call()
    with relaxed(kind):
        call()


def add(x: torch.Tensor, weight: torch.Tensor, c: torch.Tensor) -> Callable[[], object]:
    return lambda: linear.npu_matmul_add_fp32(x.half(), weight.half(), c)


def transposed(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    return lambda: linear.npu_transpose_batchmatmul(x, weight)


def bmm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], object]:
    return lambda: linear.batch_matmul_transpose(a.half(), b.half(), c.half())


TWO_ROWS = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (add(torch.ones(2, 1), torch.ones(2, 1), torch.zeros(3, 4)), r"C has shape \[3, 4\]"),
        (add(torch.ones(2, 3), torch.ones(1, 4), torch.zeros(3, 4)), r"weight \[1, 4\]"),
        (add(torch.ones(2), torch.ones(2), torch.zeros(1, 1)), r"x has shape \[2\]"),
        (transposed(A[:1].double(), B.double()), "input is float64"),
        (transposed(A[:1].int(), B.int()), "input is int32"),
        (transposed(A, B), r"input has shape \[2, 1, 128\]"),
        (transposed(A[:1, :, :64], B), r"weight \[1, 128, 128\]"),
        (transposed(A[0], B), "input has 2 axes"),
        (
            bmm(torch.ones(2, 3, 4), torch.ones(3, 4, 5), torch.zeros(3, 2, 5)),
            r"tensor_c has shape \[3, 2, 5\].*\[2, 3, 5\]",
        ),
        (
            bmm(torch.ones(2, 3, 4), torch.ones(3, 4, 5), torch.zeros(3, 10)),
            r"tensor_c has shape \[3, 10\].*\[2, 15\]",
        ),
        (bmm(torch.ones(2, 1, 4), torch.ones(3, 4, 5), torch.zeros(2, 3, 5)), "tensor_a has shape"),
        (lambda: linear.npu_top_k_top_p(ROW.double(), k=K3), "logits is float64"),
        (lambda: linear.npu_top_k_top_p(ROW.long(), k=K3), "logits is int64"),
        (lambda: linear.npu_top_k_top_p(ROW[0], k=K3), r"logits has shape \[4\]"),
        (lambda: linear.npu_top_k_top_p(ROW, k=K3.long()), "k is int64"),
        (lambda: linear.npu_top_k_top_p(TWO_ROWS, k=K3), r"k has shape \[1\]"),
        (lambda: linear.npu_top_k_top_p(TWO_ROWS, torch.ones(1)), r"p has shape \[1\]"),
        (
            lambda: linear.get_masked_input_and_mask(torch.ones(2), 0, 4, 0, 4, 4),
            "input is float32",
        ),
    ],
)
def test_what_has_no_result_is_refused_even_relaxed(call: Callable[[], object], says: str) -> None:
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=says):
        call()


def test_a_refused_product_leaves_its_target_alone() -> None:
    target = torch.zeros(3, 4)
    with pytest.raises(KernelLimit, match="C has shape"):
        linear.npu_matmul_add_fp32(torch.ones(2, 1).half(), torch.ones(2, 1).half(), target)
    assert torch.equal(target, torch.zeros(3, 4))


def test_a_relaxed_k_keeps_at_most_the_row_and_at_least_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    with relaxed("layout"):
        got = linear.npu_top_k_top_p(logits, k=torch.tensor([9, 0], dtype=torch.int32))
    assert got.tolist() == [[1.0, 3.0, 2.0], [-INF, 3.0, -INF]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((5, 4, 0, 9, 9), r"\[5, 4, 9, 9\]"),
        ((0, 4, 0, 3, 9), "not decrease"),
        ((0, 4, -1, 4, 4), "-1"),
    ],
)
def test_vocabulary_edges_that_make_no_sense(arguments: tuple[int, ...], says: str) -> None:
    with pytest.raises(KernelLimit, match=says):
        linear.get_masked_input_and_mask(torch.tensor([1]), *arguments)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: linear.npu_format_cast(A, 3), "acl_format=3"),
        (lambda: linear.npu_format_cast(A, 29, customize_dtype=2), "customize_dtype=2"),
        (lambda: linear.npu_format_cast(A, 29, input_dtype=2), "input_dtype=2"),
        (lambda: linear.npu_transpose_batchmatmul(A[:1], B, bias=A), "bias=float32"),
        (lambda: linear.npu_transpose_batchmatmul(A[:1], B, scale=A), "scale=float32"),
        (lambda: linear.npu_transpose_batchmatmul(A[:1], B, perm_x1=(2, 1, 0)), "perm_x1="),
        (lambda: linear.npu_transpose_batchmatmul(A[:1], B, perm_x2=(2, 1, 0)), "perm_x2="),
        (lambda: linear.npu_transpose_batchmatmul(A[:1], B, perm_y=(0, 1, 2)), "perm_y="),
        (
            lambda: linear.npu_transpose_batchmatmul(A[:1], B, batch_split_factor=2),
            "batch_split_factor=2",
        ),
        (lambda: linear.batch_matmul_transpose(*HALF, format_mode="NZ"), "format_mode='NZ'"),
        (
            lambda: linear.batch_matmul_transpose(*HALF, quant_mode="per_token_symm"),
            "quant_mode='per_token_symm'",
        ),
    ],
)
def test_what_is_not_emulated_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises(NotEmulated, match=says):
        call()
