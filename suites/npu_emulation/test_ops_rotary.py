"""Rotary embedding on the emulated NPU: each pair of elements turned by its angle, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import KINDS, relaxed
from afd_testkit.npu.ops import rotary

pytestmark = pytest.mark.cpu

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angle(position: int, pair: int, width: int) -> float:
    return position / 100.0 ** (2 * pair / width)


def pairs(width: int, neox: bool) -> list[tuple[int, int]]:
    """Which two elements of a head turn together."""
    half = width // 2
    return [(i, i + half) if neox else (2 * i, 2 * i + 1) for i in range(half)]


def turned(head: list[float], position: int, neox: bool) -> list[float]:
    """``head`` with each pair turned by its angle at ``position``."""
    result = list(head)
    for number, (a, b) in enumerate(pairs(len(head), neox)):
        theta = angle(position, number, len(head))
        result[a] = head[a] * math.cos(theta) - head[b] * math.sin(theta)
        result[b] = head[b] * math.cos(theta) + head[a] * math.sin(theta)
    return result


def tables(positions: list[int], width: int, neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[positions, width]``, each element's own."""
    cos, sin = torch.empty(len(positions), width), torch.empty(len(positions), width)
    for row, position in enumerate(positions):
        for number, pair in enumerate(pairs(width, neox)):
            for element in pair:
                cos[row, element] = math.cos(angle(position, number, width))
                sin[row, element] = math.sin(angle(position, number, width))
    return cos, sin


def cache(positions: int, width: int) -> torch.Tensor:
    """``[positions, width]``: cosines of the frequencies, then their sines."""
    return torch.tensor(
        [
            [f(angle(p, i, width)) for f in (math.cos, math.sin) for i in range(width // 2)]
            for p in range(positions)
        ]
    )


def close(got: torch.Tensor, expected: list[list[float]]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64).view(got.shape)
    limit = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=limit, atol=4 * limit)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_vllm_form_turns_query_and_key_in_place(neox: bool, dtype: torch.dtype) -> None:
    positions = [3, 0, 11]
    query, key = random(3, 4 * 8, dtype=dtype), random(3, 2 * 8, dtype=dtype, seed=1)
    expected = [
        [
            turned(head, p, neox)
            for p, row in zip(positions, x.view(3, -1, 8).tolist(), strict=True)
            for head in row
        ]
        for x in (query, key)
    ]
    storage = query.data_ptr(), key.data_ptr()
    table = cache(12, 8).to(dtype)
    assert rotary.npu_rotary_embedding(torch.tensor(positions), query, key, 8, table, neox) is None
    assert (query.data_ptr(), key.data_ptr()) == storage
    close(query, expected[0])
    close(key, expected[1])


def test_the_vllm_form_takes_no_tokens() -> None:
    query, key = torch.empty(0, 16), torch.empty(0, 8)
    rotary.npu_rotary_embedding(torch.empty(0, dtype=torch.int64), query, key, 8, cache(4, 8), True)
    assert query.shape == (0, 16)


def test_the_vllm_form_turns_whole_heads_only() -> None:
    with relaxed("layout"), pytest.raises(KernelLimit, match="4 columns, head_size is 8"):
        rotary.npu_rotary_embedding(
            torch.tensor([0]), torch.ones(1, 8), torch.ones(1, 8), 8, cache(4, 4), True
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_interleave_rope_turns_neighbours_and_parts_them(dtype: torch.dtype) -> None:
    positions = [5, 2]
    x = random(2, 3, 1, 64, dtype=dtype)
    cos, sin = (table.view(2, 1, 1, 64).to(dtype) for table in tables(positions, 64, neox=True))
    expected = []
    for batch, position in enumerate(positions):
        for head in x[batch, :, 0].tolist():
            neighbours = turned(head, position, neox=False)
            expected.append(neighbours[::2] + neighbours[1::2])
    got = rotary.npu_interleave_rope(x, cos, sin)
    assert got.dtype == dtype
    close(got, expected)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_pairs_by_its_mode(mode: str) -> None:
    positions = [1, 4, 6]
    x = random(2, 3, 2, 8)  # B, S, N, D
    cos, sin = (table.view(1, 3, 1, 8) for table in tables(positions, 8, neox=mode == "half"))
    expected = [
        turned(head, positions[s], mode == "half")
        for b in range(2)
        for s in range(3)
        for head in x[b, s].tolist()
    ]
    close(rotary.npu_rotary_mul(x, cos, sin, mode), expected)


def test_rotary_mul_by_a_matrix() -> None:
    x, r1, r2 = random(1, 2, 1, 4), random(1, 2, 1, 4, seed=1), random(1, 2, 1, 4, seed=2)
    matrix = random(4, 4, seed=3)
    expected = []
    for s in range(2):
        row, a, b = x[0, s, 0].tolist(), r1[0, s, 0].tolist(), r2[0, s, 0].tolist()
        moved = [sum(row[i] * matrix[i, j].item() for i in range(4)) for j in range(4)]
        expected.append([a[j] * row[j] + b[j] * moved[j] for j in range(4)])
    close(rotary.npu_rotary_mul(x, r1, r2, "half", matrix), expected)


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("layout", ["BSH", "BSND"])
def test_apply_rotary_pos_emb_gives_new_tensors(mode: str, layout: str) -> None:
    positions = [2, 9]
    query, key = random(1, 2, 3, 8), random(1, 2, 1, 8, seed=1)
    before = query.clone(), key.clone()
    cos, sin = (table.view(1, 2, 1, 8) for table in tables(positions, 8, neox=mode == "half"))
    for got, x in zip(
        rotary.npu_apply_rotary_pos_emb(query, key, cos, sin, layout, mode),
        (query, key),
        strict=True,
    ):
        close(
            got,
            [turned(h, positions[s], mode == "half") for s in range(2) for h in x[0, s].tolist()],
        )
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


def in_place(**changed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tokens with two heads of four; what was turned."""
    given = {
        "positions": torch.tensor([1, 2]),
        "query": torch.ones(2, 8),
        "key": torch.ones(2, 8),
        "cos_sin_cache": cache(4, 4),
        **changed,
    }
    rotary.npu_rotary_embedding(head_size=4, is_neox_style=True, **given)
    return given["query"], given["key"]


def test_a_strided_view_is_turned_in_place_where_layout_is_relaxed() -> None:
    whole = random(2, 16)
    before = whole.clone()
    with relaxed("layout"):
        in_place(query=whole[:, :8])
    expected = [
        turned(head, position, neox=True)
        for position, row in zip((1, 2), before[:, :8].tolist(), strict=True)
        for head in (row[:4], row[4:])
    ]
    close(whole[:, :8].contiguous(), expected)
    assert torch.equal(whole[:, 8:], before[:, 8:])


def test_x_broadcasts_to_no_table_but_a_table_to_x() -> None:
    cos, sin = (table.view(1, 1, 1, 8) for table in tables([3], 8, neox=True))
    x = random(2, 3, 2, 8)
    got = rotary.npu_rotary_mul(x, cos, sin)
    assert got.shape == x.shape
    close(got, [turned(head, 3, neox=True) for head in x.view(-1, 8).tolist()])
    assert rotary.npu_rotary_mul(x[:0], cos, sin).shape == (0, 3, 2, 8)


FOUR = torch.ones(1, 1, 1, 64)
HALF = FOUR.half()
TOKENS5, BATCH4 = torch.ones(1, 1, 5, 64), torch.ones(4, 1, 1, 64)
APPLY7 = torch.ones(1, 7, 1, 64)
LIMITS: dict[str, tuple[str, Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]]] = {
    "interleave float32": ("dtype", lambda: rotary.npu_interleave_rope(FOUR, FOUR, FOUR)),
    "interleave mixed": ("dtype", lambda: rotary.npu_interleave_rope(HALF, FOUR, FOUR)),
    "interleave width": (
        "alignment",
        lambda: rotary.npu_interleave_rope(*[torch.ones(1, 1, 1, 16).half()] * 3),
    ),
    "interleave heads of cos": (
        "layout",
        lambda: rotary.npu_interleave_rope(*[torch.ones(1, 2, 1, 64).half()] * 3),
    ),
    "interleave batch": (
        "layout",
        lambda: rotary.npu_interleave_rope(torch.ones(2, 1, 1, 64).half(), HALF, HALF),
    ),
    "strided query": ("layout", lambda: in_place(query=torch.ones(2, 16)[:, :8])),
    "strided key": ("layout", lambda: in_place(key=torch.ones(8, 2).t())),
    "mixed cache": ("dtype", lambda: in_place(cos_sin_cache=cache(4, 4).half())),
    "mul axes": ("layout", lambda: rotary.npu_rotary_mul(FOUR[0], FOUR[0], FOUR[0])),
    "mul width": ("layout", lambda: rotary.npu_rotary_mul(*[torch.ones(1, 1, 1, 896)] * 3)),
    "apply cos": ("dtype", lambda: rotary.npu_apply_rotary_pos_emb(FOUR, FOUR, HALF, FOUR)),
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
        (lambda: rotary.npu_rotary_mul(*[torch.ones(1, 1, 1, 7)] * 3), "heads of 7 elements"),
        (lambda: rotary.npu_rotary_mul(*[torch.tensor(1.0)] * 3), "no axis"),
        (lambda: rotary.npu_rotary_mul(FOUR, TOKENS5, TOKENS5), r"r1 has shape \[1, 1, 5, 64\]"),
        (lambda: rotary.npu_rotary_mul(FOUR, FOUR, TOKENS5), r"r2 has shape \[1, 1, 5, 64\]"),
        (lambda: rotary.npu_rotary_mul(FOUR, FOUR[..., :1], FOUR), "r1 has shape"),
        (lambda: rotary.npu_rotary_mul(FOUR, FOUR[0], FOUR), "r1 has shape"),
        (lambda: rotary.npu_rotary_mul(FOUR[:0], BATCH4, FOUR), "r1 has shape"),
        (lambda: rotary.npu_rotary_mul(FOUR, FOUR[:0], FOUR), r"r1 has shape \[0, 1, 1, 64\]"),
        (
            lambda: rotary.npu_rotary_mul(*[FOUR] * 3, rotate=torch.ones(64, 1)),
            r"rotate has shape \[64, 1\]",
        ),
        (lambda: rotary.npu_rotary_mul(FOUR.double(), FOUR, FOUR), "input is float64"),
        (lambda: rotary.npu_rotary_mul(FOUR.int(), FOUR, FOUR), "input is int32"),
        (lambda: rotary.npu_rotary_mul(FOUR, FOUR.int(), FOUR), "r1 is int32"),
        (
            lambda: rotary.npu_interleave_rope(HALF, *[BATCH4.half()] * 2),
            r"cos has shape \[4, 1, 1, 64\]",
        ),
        (
            lambda: rotary.npu_interleave_rope(HALF, *[TOKENS5.half()] * 2),
            r"cos has shape \[1, 1, 5, 64\]",
        ),
        (lambda: rotary.npu_interleave_rope(HALF, HALF, TOKENS5.half()), "sin has shape"),
        (
            lambda: rotary.npu_apply_rotary_pos_emb(*[FOUR.expand(1, 1, 2, 64)] * 2, *[APPLY7] * 2),
            r"cos has shape \[1, 7, 1, 64\]",
        ),
        (lambda: rotary.npu_apply_rotary_pos_emb(FOUR, FOUR, FOUR, APPLY7), "sin has shape"),
        (
            lambda: rotary.npu_apply_rotary_pos_emb(FOUR, APPLY7, FOUR, FOUR),
            r"key has shape \[1, 7, 1, 64\]",
        ),
        (lambda: rotary.npu_apply_rotary_pos_emb(*[FOUR.double()] * 4), "query is float64"),
        (lambda: rotary.npu_apply_rotary_pos_emb(*[FOUR[..., :7]] * 4), "heads have 7"),
        (lambda: in_place(positions=torch.tensor([-1, 0])), r"positions holds \[-1, 0\]"),
        (lambda: in_place(positions=torch.tensor([0, 4])), "there are 4 rows of cos_sin_cache"),
        (lambda: in_place(positions=torch.tensor([1.0, 2.0])), "positions is float32"),
        (lambda: in_place(positions=torch.tensor([1])), "for 1 positions"),
        (lambda: in_place(positions=torch.tensor([1, 2, 3, 0])), "for 4 positions"),
        (lambda: in_place(key=torch.ones(1, 16)), r"key has shape \[1, 16\]"),
        (lambda: in_place(query=torch.ones(2, 6)), r"query has shape \[2, 6\]"),
        (lambda: in_place(query=torch.ones(2, 8).int()), "query is int32"),
        (
            lambda: rotary.npu_apply_rotary_pos_emb(FOUR[0], FOUR, FOUR, FOUR),
            "query has 3 axes and key 4",
        ),
    ],
)
def test_shapes_that_have_no_result_are_refused_even_relaxed(
    call: Callable[[], object], says: str
) -> None:
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=says):
        call()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rotary.npu_rotary_mul(FOUR, FOUR, FOUR, "quarter"), "rotary_mode='quarter'"),
        (lambda: rotary.npu_apply_rotary_pos_emb(*[FOUR] * 4, layout="TND"), "layout='TND'"),
        (
            lambda: rotary.npu_apply_rotary_pos_emb(*[FOUR] * 4, rotary_mode="quarter"),
            "rotary_mode='quarter'",
        ),
    ],
)
def test_what_is_not_emulated_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises(NotEmulated, match=says):
        call()
