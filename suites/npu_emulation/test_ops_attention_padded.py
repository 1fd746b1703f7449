"""The fused inference attention in padded layouts and under whole masks, against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from afd_testkit.npu.limits import VARIABLE, relaxed
from afd_testkit.npu.ops.attention import npu_fused_infer_attention_score as fused

pytestmark = pytest.mark.cpu

CLOSE = {"atol": 3e-6, "rtol": 3e-6}


@pytest.fixture(autouse=True)
def limits_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compressed_mask(dtype: torch.dtype = torch.int8) -> torch.Tensor:
    rows = torch.arange(2048)
    return (rows.unsqueeze(0) > rows.unsqueeze(1)).to(dtype)


def by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request, [S, N, D] each, in float64; ``seen`` bool [Sq, Skv].  Output and logarithms."""
    share = query.shape[1] // key.shape[1]
    wide_key = key.double().repeat_interleave(share, dim=1)
    wide_value = value.double().repeat_interleave(share, dim=1)
    weights = torch.exp(scale * torch.einsum("ind,jnd->nij", query.double(), wide_key))
    if seen is not None:
        weights = weights * seen
    total = weights.sum(-1)
    out = torch.einsum("nij,jnd->ind", weights, wide_value) / total.clamp_min(1e-300).T[..., None]
    return out, total.log().T


def causal(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def to_layout(tokens: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, S, N, D] in another layout."""
    if layout == "BSH":
        return tokens.reshape(*tokens.shape[:2], -1)
    order = {"BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "NBSD": (2, 0, 1, 3)}[layout]
    return tokens.permute(order).contiguous()


PADDED = ["BSH", "BSND", "BNSD", "BNSD_BSND", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD"]


@pytest.mark.parametrize("layout", PADDED)
def test_padded_layouts(layout: str) -> None:
    given, _, returned = layout.partition("_")
    query = normal(3, 5, 4, 16, seed=1)
    key, value = normal(3, 8, 2, 16, seed=2), normal(3, 8, 2, 32, seed=3)
    key[1, 6:] = value[1, 6:] = math.nan
    with relaxed("dtype"):
        out, lse = fused(
            to_layout(query, given),
            to_layout(key, given),
            to_layout(value, given),
            num_heads=4,
            num_key_value_heads=2,
            input_layout=layout,
            scale=0.3,
            sparse_mode=3,
            atten_mask=compressed_mask(torch.uint8),
            actual_seq_lengths_kv=[8, 6, 8],
            softmax_lse_flag=True,
        )
    assert list(lse.shape) == [3, 4, 5, 1]
    expected = torch.zeros(3, 5, 4, 32, dtype=torch.float64)
    for request, keys in enumerate([8, 6, 8]):
        expected[request], logs = by_formula(
            query[request],
            key[request, :keys],
            value[request, :keys],
            0.3,
            causal(5, keys),
        )
        torch.testing.assert_close(lse[request, :, :, 0].double(), logs.T, **CLOSE)
    torch.testing.assert_close(out.double(), to_layout(expected, returned or given), **CLOSE)


def test_padded_queries_beyond_their_length_are_zero() -> None:
    query = normal(2, 4, 2, 16, seed=1, dtype=torch.bfloat16)
    out, _ = fused(query, query, query, num_heads=2, input_layout="BSND", actual_seq_lengths=[4, 1])
    assert torch.equal(out[1, 1:], torch.zeros(3, 2, 16, dtype=torch.bfloat16))
    assert out[1, 0].abs().sum() > 0


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_whole_masks_and_a_query_that_sees_nothing(mode: int, axes: int) -> None:
    query = normal(2, 2, 3, 16, seed=1)
    key, value = normal(2, 2, 5, 16, seed=2), normal(2, 2, 5, 16, seed=3)
    mask = torch.zeros(2, 1, 3, 5, dtype=torch.bool)
    mask[:, 0, 0, 2:] = True
    mask[:, 0, 1] = True
    if axes == 4:
        mask[1, 0, 2, 0] = True
    given = mask if axes == 4 else mask[0, 0] if axes == 2 else mask[:1, 0]
    with relaxed("dtype"):
        out, lse = fused(
            query,
            key,
            value,
            num_heads=2,
            input_layout="BNSD",
            sparse_mode=mode,
            atten_mask=given,
            softmax_lse_flag=True,
        )
    assert torch.equal(out[:, :, 1], torch.zeros(2, 2, 16))
    assert torch.equal(lse[:, :, 1], torch.full((2, 2, 1), -math.inf))
    for request in range(2):
        expected, _ = by_formula(
            query[request].transpose(0, 1),
            key[request].transpose(0, 1),
            value[request].transpose(0, 1),
            1.0,
            ~mask[request, 0],
        )
        torch.testing.assert_close(out[request].transpose(0, 1).double(), expected, **CLOSE)


def test_more_queries_than_keys_leaves_the_first_without_any() -> None:
    query, key, value = normal(1, 5, 2, 16, seed=1), *(normal(1, 3, 2, 16, seed=n) for n in (2, 3))
    with relaxed("dtype"):
        out, _ = fused(
            query,
            key,
            value,
            num_heads=2,
            input_layout="BSND",
            sparse_mode=3,
            atten_mask=compressed_mask(),
        )
    expected, _ = by_formula(query[0], key[0], value[0], 1.0, causal(5, 3))
    assert torch.equal(out[0, :2], torch.zeros(2, 2, 16))
    torch.testing.assert_close(out[0].double(), expected, **CLOSE)


def test_mode_2_is_causal_from_the_first_key() -> None:
    query, key, value = normal(1, 3, 2, 16, seed=1), *(normal(1, 6, 2, 16, seed=n) for n in (2, 3))
    with relaxed("dtype"):
        out, _ = fused(
            query,
            key,
            value,
            num_heads=2,
            input_layout="BSND",
            sparse_mode=2,
            atten_mask=compressed_mask(),
        )
    expected, _ = by_formula(query[0], key[0], value[0], 1.0, torch.ones(3, 6).tril().bool())
    torch.testing.assert_close(out[0].double(), expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    query, key, value = (normal(1, 2, 7, 64, seed=n, dtype=dtype) for n in (1, 2, 3))
    out, _ = fused(query, key, value, num_heads=2, input_layout="BNSD", scale=0.125)
    expected, _ = by_formula(*(x[0].transpose(0, 1) for x in (query, key, value)), 0.125)
    # Half a unit in the last place, and the float32 arithmetic before it.
    unit = torch.finfo(dtype).eps / 2
    error = (out[0].transpose(0, 1).double() - expected).abs()
    assert out.dtype == dtype
    assert bool((error <= unit * expected.abs() + 2e-6).all())


def test_nan_in_what_is_read_is_not_hidden() -> None:
    tokens = normal(1, 2, 4, 16, seed=1, dtype=torch.bfloat16)
    key = tokens.clone()
    key[0, 0, 1] = math.nan
    out, _ = fused(tokens, key, tokens, num_heads=2, input_layout="BNSD")
    assert bool(out[0, 0].isnan().all())
    assert not bool(out[0, 1].isnan().any())
