"""What the fused inference attention refuses: limits, one by one, and what has no reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import VARIABLE, relaxed
from afd_testkit.npu.operators import load
from afd_testkit.npu.ops.attention import (
    FUSED,
    FUSED_V2,
)
from afd_testkit.npu.ops.attention import (
    npu_fused_infer_attention_score as fused,
)
from afd_testkit.npu.ops.attention import (
    npu_fused_infer_attention_score_v2 as fused_v2,
)

pytestmark = pytest.mark.cpu

BF16 = torch.bfloat16
MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


@pytest.fixture(autouse=True)
def limits_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def packed(dim: int = 16, tokens: int = 4, heads: int = 2, **changes: Any) -> dict[str, Any]:
    """A call that every limit allows, with changes."""
    call: dict[str, Any] = {
        "query": zeros(tokens, heads, dim),
        "key": zeros(tokens, heads, dim),
        "value": zeros(tokens, heads, dim),
        "num_query_heads": heads,
        "input_layout": "TND",
        "sparse_mode": 3,
        "atten_mask": MASK,
        "actual_seq_qlen": [tokens],
        "actual_seq_kvlen": [tokens],
    }
    return call | changes


def padded(dim: int = 16, queries: int = 2, heads: int = 2, **changes: Any) -> dict[str, Any]:
    tokens = zeros(1, heads, queries, dim)
    call: dict[str, Any] = {
        "query": tokens,
        "key": tokens,
        "value": tokens,
        "num_query_heads": heads,
        "input_layout": "BNSD",
    }
    return call | changes


def paged(block_size: int = 128, queries: int = 4, **changes: Any) -> dict[str, Any]:
    return (
        packed(tokens=queries)
        | {
            "key": zeros(3, block_size, 32),
            "value": zeros(3, block_size, 32),
            "block_table": torch.zeros(1, 2, dtype=torch.int32),
            "block_size": block_size,
            "actual_seq_kvlen": [block_size],
        }
        | changes
    )


def latent(
    block_size: int = 128, queries: int = 1, heads: int = 4, dim: int = 512, **changes: Any
) -> dict[str, Any]:
    cache, rope = zeros(2, 1, block_size, dim), zeros(2, 1, block_size, 64)
    call: dict[str, Any] = {
        "query": zeros(1, heads, queries, dim),
        "key": cache,
        "value": cache,
        "query_rope": zeros(1, heads, queries, 64),
        "key_rope": rope,
        "num_query_heads": heads,
        "num_key_value_heads": 1,
        "input_layout": "BNSD_NBSD",
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "block_size": block_size,
        "actual_seq_kvlen": [block_size],
    }
    if queries > 1:
        call |= {"sparse_mode": 3, "atten_mask": MASK}
    return call | changes


def with_dtype(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: given.to(dtype)
        if isinstance(given, torch.Tensor) and given.is_floating_point()
        else given
        for name, given in call.items()
    }


@pytest.mark.parametrize(
    "call",
    [packed(), padded(), paged(), latent(), latent(queries=2), latent(block_size=16)],
    ids=["packed", "padded", "paged", "latent", "latent-2", "latent-16"],
)
def test_the_calls_that_the_cases_change_are_allowed(call: dict[str, Any]) -> None:
    out, _ = fused_v2(**call)
    assert not out.isnan().any()


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "float32": (
        "dtype",
        "query is float32.*float16, bfloat16;",
        with_dtype(padded(), torch.float32),
    ),
    "packed-float16": (
        "dtype",
        "query is float16.* takes bfloat16;",
        with_dtype(packed(), torch.float16),
    ),
    "mask-shape": ("layout", "2048", packed(atten_mask=MASK[:128, :128])),
    "mask-missing": ("layout", "2048", packed(atten_mask=None)),
    "packed-whole-mask": (
        "layout",
        "packed layouts take 0 without",
        packed(sparse_mode=0, atten_mask=torch.zeros(4, 4, dtype=torch.bool)),
    ),
    "packed-mode-2": ("layout", "packed layouts take 0 without", packed(sparse_mode=2)),
    "packed-tail": ("layout", "query has 4 tokens", packed(actual_seq_qlen=[3])),
    "packed-more-queries": ("layout", "at least as many keys", packed(actual_seq_kvlen=[3])),
    "dim": ("alignment", "multiple of 16", padded(dim=24)),
    "packed-dim": ("alignment", "up to 496", packed(dim=512)),
    "heads": ("alignment", "at most 256", padded(heads=257)),
    "share": (
        "alignment",
        "at most 64 share",
        padded(heads=65, key=zeros(1, 1, 2, 16), value=zeros(1, 1, 2, 16), num_key_value_heads=1),
    ),
    "block-prefill": ("alignment", "multiple of 128", paged(block_size=64)),
    "block-decode": ("alignment", "multiple of 16 up to 512", paged(block_size=24, queries=1)),
    "cache-axes": (
        "layout",
        "BSH and BSND",
        padded(
            query=zeros(1, 2, 2, 16),
            input_layout="BSND",
            key=zeros(2, 2, 128, 16),
            value=zeros(2, 2, 128, 16),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            block_size=128,
            actual_seq_kvlen=[8],
        ),
    ),
    "sink-layout": ("layout", "learnable_sink goes with", padded(learnable_sink=zeros(2))),
    "sink-dim": ("alignment", "up to 128", packed(dim=144, learnable_sink=zeros(2))),
    "rope-dim": (
        "alignment",
        "they have 64",
        packed(dim=128, query_rope=zeros(4, 2, 32), key_rope=zeros(4, 2, 32)),
    ),
    "dim-with-rope": (
        "alignment",
        "they have 128",
        packed(dim=96, query_rope=zeros(4, 2, 64), key_rope=zeros(4, 2, 64)),
    ),
    "rope-layout": (
        "layout",
        "TND or NTD_TND",
        padded(dim=128, query_rope=zeros(1, 2, 2, 64), key_rope=zeros(1, 2, 2, 64)),
    ),
    "latent-dim": ("alignment", "they have 512", latent(dim=128)),
    "latent-heads": ("alignment", "power of 2", latent(heads=12)),
    "latent-queries": ("alignment", "at most 16", latent(queries=17)),
    "latent-block": ("alignment", "16 or 128", latent(block_size=64)),
    "latent-mask": (
        "layout",
        "more take 3",
        latent(queries=2, sparse_mode=0, atten_mask=None),
    ),
    "latent-output": ("layout", "they take a block table", latent(input_layout="BNSD_BSND")),
    "latent-fractal": (
        "layout",
        "fractal",
        latent(
            key=zeros(2, 1, 32, 128, 16),
            value=zeros(2, 1, 32, 128, 16),
            key_rope=zeros(2, 1, 4, 128, 16),
        ),
    ),
}


@pytest.mark.parametrize(("kind", "message", "call"), CASES.values(), ids=CASES)
def test_each_limit_and_its_relaxation(kind: str, message: str, call: dict[str, Any]) -> None:
    others = {"dtype", "alignment", "layout"} - {kind}
    with relaxed(*others), pytest.raises(KernelLimit, match=message):
        fused_v2(**call)
    with relaxed(kind):
        out, _ = fused_v2(**call)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("atten_mask is float32", packed(atten_mask=MASK.float())),
        ("block_table is int64.* takes int32", paged(block_table=torch.zeros(1, 2).long())),
    ],
)
def test_dtypes_that_no_relaxation_takes(message: str, call: dict[str, Any]) -> None:
    with relaxed("dtype", "alignment", "layout"), pytest.raises(KernelLimit, match=message):
        fused_v2(**call)


def test_a_compressed_mask_with_other_content_is_refused_always() -> None:
    with relaxed("dtype", "alignment", "layout"), pytest.raises(KernelLimit, match="other content"):
        fused_v2(**packed(atten_mask=1 - MASK))


def test_a_block_size_that_is_not_the_caches_is_refused() -> None:
    with pytest.raises(KernelLimit, match=r"block_size=256.*\[128, 128\]"):
        fused_v2(**paged() | {"block_size": 256})


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_beyond_the_cache_is_refused(block: int) -> None:
    table = torch.tensor([[block, 0]], dtype=torch.int32)
    with pytest.raises(KernelLimit, match="blocks 0 to 2"):
        fused_v2(**paged() | {"block_table": table})


def test_heads_that_contradict_a_tensor_are_refused() -> None:
    with pytest.raises(KernelLimit, match=r"key \[4, 2, 16\].*1 heads"):
        fused_v2(**packed(num_key_value_heads=1))
    with pytest.raises(KernelLimit, match="multiple of the second"):
        fused_v2(**packed(num_key_value_heads=3))
    with pytest.raises(KernelLimit, match="together or not at all"):
        fused_v2(**packed(query_rope=zeros(4, 2, 64)))


@pytest.mark.parametrize("mode", [5, 8])
def test_other_sparse_modes_and_layouts_have_no_reference(mode: int) -> None:
    with pytest.raises(NotEmulated, match=f"sparse_mode={mode}"):
        fused_v2(**packed(sparse_mode=mode))
    with pytest.raises(NotEmulated, match="input_layout='SBH'"):
        fused_v2(**packed(input_layout="SBH"))


def test_a_band_beside_a_whole_mask_has_no_reference() -> None:
    mask = torch.zeros(2, 2, dtype=torch.bool)
    with pytest.raises(NotEmulated, match="next_tokens=0"):
        fused_v2(**padded(atten_mask=mask, next_tokens=0))


def test_lengths_that_contradict_the_tensors_are_refused() -> None:
    tokens = zeros(4, 2, 16)

    def call(queries: list[int] | None, keys: list[int] | None) -> None:
        fused(
            tokens,
            tokens,
            tokens,
            num_heads=2,
            input_layout="TND",
            actual_seq_lengths=queries,
            actual_seq_lengths_kv=keys,
        )

    for queries, keys in (
        ([3, 2, 4], [3, 4, 4]),
        ([4], [5]),
        (None, [4]),
        ([4], None),
        ([4], [1, 4]),
    ):
        with pytest.raises(KernelLimit, match="lengths"):
            call(queries, keys)


HONOURED = [
    "query",
    "key",
    "value",
    "query_rope",
    "key_rope",
    "atten_mask",
    "block_table",
    "block_size",
    "pre_tokens",
    "next_tokens",
    "input_layout",
    "sparse_mode",
    "inner_precise",
    "learnable_sink",
    "num_heads",
    "num_query_heads",
    "num_key_value_heads",
    "scale",
    "softmax_scale",
    "softmax_lse_flag",
    "return_softmax_lse",
    "actual_seq_lengths",
    "actual_seq_lengths_kv",
    "actual_seq_qlen",
    "actual_seq_kvlen",
]


def unsupported(name: str) -> list[tuple[str, object]]:
    """Every argument of the schema that has no reference, and a value that is not its default."""
    found: list[tuple[str, object]] = []
    for argument in torch._C.parse_schema(load()[name].schema).arguments:
        kind = str(argument.type)
        given = zeros(1) if "Tensor" in kind else [1] if "List" in kind else 1
        if argument.name not in HONOURED:
            found.append((argument.name, given))
    return found


@pytest.mark.parametrize(
    ("argument", "given"),
    unsupported(FUSED),
    ids=lambda given: given if isinstance(given, str) else "given",
)
def test_arguments_without_a_reference_are_refused_by_name(argument: str, given: object) -> None:
    tokens = zeros(1, 2, 4, 16)
    with pytest.raises(NotEmulated, match=rf"\b{argument}\b"):
        fused(tokens, tokens, tokens, num_heads=2, input_layout="BNSD", **{argument: given})


@pytest.mark.parametrize(
    ("argument", "given"),
    unsupported(FUSED_V2),
    ids=lambda given: given if isinstance(given, str) else "given",
)
def test_the_second_version_refuses_by_name_too(argument: str, given: object) -> None:
    with pytest.raises(NotEmulated, match=rf"\b{argument}\b"):
        fused_v2(**padded(), **{argument: given})
