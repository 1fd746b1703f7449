"""The merge of partial attention, and the attention of packed requests for encoders."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import VARIABLE, relaxed
from afd_testkit.npu.ops.arguments import UNDEFINED
from afd_testkit.npu.ops.attention import npu_attention_update as update
from afd_testkit.npu.ops.attention import npu_fusion_attention as fusion

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def limits_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def softmax_part(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [rows, D] over some keys, and the logarithm of its denominator, in float64."""
    weights = scores.double().exp()
    total = weights.sum(-1)
    return (weights @ values.double()) / total.unsqueeze(-1), total.log()


@pytest.mark.parametrize("cuts", [[4], [1, 7], [2, 3, 9]])
def test_parts_merge_to_the_whole(cuts: list[int]) -> None:
    scores, values = normal(6, 10, seed=1), normal(10, 8, seed=2)
    edges = [0, *cuts, 10]
    parts = [
        softmax_part(scores[:, start:end], values[start:end]) for start, end in pairwise(edges)
    ]
    out, lse = update([log.float() for _, log in parts], [out.float() for out, _ in parts], 1)
    expected, log = softmax_part(scores, values)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), log, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("nothing", [-math.inf, math.inf])
def test_a_part_that_saw_nothing_does_not_count(nothing: float) -> None:
    out = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.full((2, 2), math.nan)]
    lse = [torch.tensor([0.5, nothing]), torch.full((2,), nothing)]
    merged, total = update(lse, out, 1)
    assert torch.equal(merged, torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    assert torch.equal(total, torch.tensor([0.5, -math.inf]))


def test_without_update_type_1_there_are_no_logarithms() -> None:
    out, lse = update((torch.zeros(3),), (torch.ones(3, 2),), 0)
    assert torch.equal(out, torch.ones(3, 2))
    assert lse.numel() == 0


def test_nan_of_a_part_that_counts_shows() -> None:
    out, _ = update([torch.tensor([math.nan]), torch.zeros(1)], [torch.ones(1, 2)] * 2, 0)
    assert bool(out.isnan().all())


def test_what_the_merge_refuses() -> None:
    with pytest.raises(NotEmulated, match="update_type=2"):
        update([torch.zeros(1)], [torch.zeros(1, 2)], 2)
    with pytest.raises(KernelLimit, match="1 lse and 2 local_out"):
        update([torch.zeros(1)], [torch.zeros(1, 2)] * 2, 0)
    with pytest.raises(KernelLimit, match=r"\[M\] and \[M, D\]"):
        update([torch.zeros(1, 1)], [torch.zeros(1, 2)], 0)
    with pytest.raises(KernelLimit, match=r"lse\[0\] is float16"):
        update([torch.zeros(1, dtype=torch.float16)], [torch.zeros(1, 2)], 0)
    with relaxed("dtype"):
        out, _ = update([torch.zeros(1, dtype=torch.float16)], [torch.ones(1, 2)], 0)
    assert torch.equal(out, torch.ones(1, 2))


def packed(**changes: Any) -> dict[str, Any]:
    call = {
        "query": normal(7, 4, 16, seed=1),
        "key": normal(9, 2, 16, seed=2),
        "value": normal(9, 2, 8, seed=3),
        "head_num": 4,
        "input_layout": "TND",
        "scale": 0.3,
        "actual_seq_qlen": [3, 3, 7],
        "actual_seq_kvlen": [4, 4, 9],
    }
    return call | changes


def expected_of(call: dict[str, Any], causal: bool) -> torch.Tensor:
    """A loop over requests, tokens and heads."""
    query, key, value = (call[name].double() for name in ("query", "key", "value"))
    out = torch.zeros(len(query), 4, 8, dtype=torch.float64)
    for row, seen in ((range(3), range(4)), (range(3, 7), range(4, 9))):
        for i in row:
            last = seen.stop - (row.stop - 1 - i) if causal else seen.stop
            for head in range(4):
                scores = 0.3 * key[seen.start : last, head // 2] @ query[i, head]
                weights = scores.exp() / scores.exp().sum()
                out[i, head] = weights @ value[seen.start : last, head // 2]
    return out


@pytest.mark.parametrize("causal", [False, True])
def test_packed_requests(causal: bool) -> None:
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1) if causal else None
    call = packed(atten_mask=mask, sparse_mode=3, next_tockens=0)
    results = fusion(**call)
    torch.testing.assert_close(results[0].double(), expected_of(call, causal), atol=2e-6, rtol=2e-6)
    assert [list(part.shape) for part in results[1:4]] == [[7, 4, 8], [7, 4, 8], [0]]
    assert all(torch.equal(part, torch.full((7, 4, 8), UNDEFINED)) for part in results[1:3])
    assert results[4:] == (0, 0, 0)


def test_requests_left_out_at_the_end_are_zero() -> None:
    call = packed(actual_seq_qlen=[3, 0, 0], actual_seq_kvlen=[4, 0, 0])
    out = fusion(**call)[0]
    torch.testing.assert_close(out[:3].double(), expected_of(call, False)[:3], atol=2e-6, rtol=2e-6)
    assert torch.equal(out[3:], torch.zeros(4, 4, 8))


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("pse", torch.zeros(1)),
        ("padding_mask", torch.zeros(1)),
        ("keep_prob", 0.9),
        ("inner_precise", 2),
        ("prefix", [1]),
        ("softmax_layout", "NTD"),
        ("sink", torch.zeros(4)),
        ("dropout_mask", torch.zeros(1)),
        ("seed", 1),
        ("offset", 1),
        ("input_layout", "BSH"),
        ("sparse_mode", 6),
    ],
)
def test_what_has_no_reference_is_refused_by_name(argument: str, given: object) -> None:
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    with pytest.raises(NotEmulated, match=rf"\b{argument}\b"):
        fusion(**packed(atten_mask=mask) | {argument: given})


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            "alignment",
            "768",
            packed(query=torch.zeros(7, 4, 784), key=torch.zeros(9, 2, 784)),
        ),
        ("alignment", "no wider than keys", packed(value=torch.zeros(9, 2, 32))),
    ],
)
def test_limits_of_packed_attention(kind: str, message: str, call: dict[str, Any]) -> None:
    with pytest.raises(KernelLimit, match=message):
        fusion(**call)
    with relaxed(kind):
        assert fusion(**call)[0].shape == (7, 4, call["value"].shape[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_dtypes_that_no_relaxation_takes(dtype: torch.dtype) -> None:
    call = packed(**{name: packed()[name].to(dtype) for name in ("query", "key", "value")})
    with relaxed("dtype"), pytest.raises(KernelLimit, match=r"query is (float64|int32)"):
        fusion(**call)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("actual_seq_qlen", {"actual_seq_qlen": None}),
        ("2 requests in actual_seq_qlen and 3", {"actual_seq_qlen": [3, 7]}),
        ("actual_seq_kvlen is cumulative", {"actual_seq_kvlen": [4, 3, 9]}),
        ("multiple of the key heads", {"key": torch.zeros(9, 3, 16)}),
        ("of one dtype", {"key": torch.zeros(9, 2, 16, dtype=torch.bfloat16)}),
    ],
)
def test_contradictions_are_refused(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(KernelLimit, match=message):
        fusion(**packed(**changes))
