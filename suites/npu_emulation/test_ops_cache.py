"""Writes to and reads from paged caches, against loops over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import KINDS, VARIABLE, relaxed
from afd_testkit.npu.ops.arguments import UNDEFINED
from afd_testkit.npu.ops.cache import (
    _npu_reshape_and_cache as reshape_and_cache,
)
from afd_testkit.npu.ops.cache import (
    npu_kv_rmsnorm_rope_cache as norm_rope,
)
from afd_testkit.npu.ops.cache import (
    npu_paged_cache_load as load_pages,
)

pytestmark = pytest.mark.cpu

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def limits_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write_call(**changes: Any) -> dict[str, Any]:
    call = {
        "key": normal(4, 2, 8, seed=1, dtype=BF16),
        "value": normal(4, 2, 4, seed=2, dtype=BF16),
        "key_cache": torch.full((3, 16, 2, 8), 5.0, dtype=BF16),
        "value_cache": torch.full((3, 16, 2, 4), 6.0, dtype=BF16),
        "slot_indices": torch.tensor([33, 0, -1, 47], dtype=torch.int32),
    }
    return call | changes


def test_tokens_land_in_their_slots_and_padding_nowhere() -> None:
    call = write_call()
    keys, values = call["key_cache"].clone(), call["value_cache"].clone()
    for token, slot in ((0, 33), (1, 0), (3, 47)):
        keys[slot // 16, slot % 16] = call["key"][token]
        values[slot // 16, slot % 16] = call["value"][token]
    assert reshape_and_cache(**call) is None
    assert torch.equal(call["key_cache"], keys)
    assert torch.equal(call["value_cache"], values)


def test_a_cache_that_is_a_view_is_written_in_place() -> None:
    both = torch.zeros(2, 3, 16, 2, 8, dtype=BF16)
    call = write_call(
        key_cache=both[0], value_cache=both[1], value=normal(4, 2, 8, seed=2).to(BF16)
    )
    reshape_and_cache(**call)
    assert torch.equal(both[0, 2, 1], call["key"][0])
    assert torch.equal(both[1, 2, 15], call["value"][3])


def test_no_tokens_write_nothing() -> None:
    call = write_call(
        key=torch.zeros(0, 2, 8, dtype=BF16),
        value=torch.zeros(0, 2, 4, dtype=BF16),
        slot_indices=torch.zeros(0, dtype=torch.int32),
    )
    reshape_and_cache(**call)
    assert torch.equal(call["key_cache"], torch.full((3, 16, 2, 8), 5.0, dtype=BF16))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("slot 48", {"slot_indices": torch.tensor([0, 48, 1, 2], dtype=torch.int32)}),
        ("for 3 slots", {"slot_indices": torch.tensor([0, 1, 2], dtype=torch.int32)}),
        ("key is torch.bfloat16", {"key_cache": torch.zeros(3, 16, 2, 8)}),
        ("into value_cache", {"value": torch.zeros(4, 2, 8, dtype=BF16)}),
        ("blocks and block", {"value_cache": torch.zeros(2, 16, 2, 4, dtype=BF16)}),
        ("blocks and block", {"value_cache": torch.zeros(6, 8, 2, 4, dtype=BF16)}),
        ("slot_indices is int64", {"slot_indices": torch.tensor([0, 1, 2, 3])}),
        ("slot_indices is float32", {"slot_indices": torch.tensor([0.0, 1.7, 2.0, 3.0])}),
    ],
)
def test_writes_that_contradict_themselves_are_refused(
    message: str, changes: dict[str, Any]
) -> None:
    call = write_call(**changes)
    before = call["key_cache"].clone()
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=message):
        reshape_and_cache(**call)
    assert torch.equal(call["key_cache"], before)


def test_limits_of_writes() -> None:
    changes = {"key": normal(4, 2, 8, seed=1), "key_cache": torch.zeros(3, 16, 2, 8)}
    with pytest.raises(KernelLimit, match="key is float32"):
        reshape_and_cache(**write_call(**changes))
    call = write_call(**changes)
    with relaxed("dtype"):
        reshape_and_cache(**call)
    slot = int(call["slot_indices"][1])
    assert torch.equal(call["key_cache"][0, slot], call["key"][1])


def norm_rope_call(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    angles = normal(3, 1, 2, 8, seed=9)
    call = {
        "kv": normal(3, 1, 2, 32 + 16, seed=1, dtype=dtype),
        "gamma": normal(32, seed=2, dtype=dtype),
        "cos": torch.cat([angles, angles], -1).cos().to(dtype),
        "sin": torch.cat([angles, angles], -1).sin().to(dtype),
        "index": torch.tensor([17, 0, 31, -1, 5, 16]),
        "k_cache": torch.full((2, 16, 1, 16), 5.0, dtype=dtype),
        "ckv_cache": torch.full((2, 16, 1, 32), 6.0, dtype=dtype),
        "epsilon": 1e-3,
        "cache_mode": "PA",
    }
    return call | changes


def expected_rows(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated [6, 16] and normalised [6, 32] in float64, token by token."""
    rotated, normed = [], []
    for batch in range(3):
        for step in range(2):
            row = call["kv"][batch, 0, step].double()
            mean = sum(float(x) ** 2 for x in row[:32]) / 32
            normed.append(row[:32] / math.sqrt(mean + call["epsilon"]) * call["gamma"].double())
            token = torch.zeros(16, dtype=torch.float64)
            for pair in range(8):
                real, imaginary = row[32 + 2 * pair], row[32 + 2 * pair + 1]
                cos = call["cos"][batch, 0, step, pair].double()
                sin = call["sin"][batch, 0, step, pair].double()
                token[pair] = real * cos - imaginary * sin
                token[pair + 8] = imaginary * cos + real * sin
            rotated.append(token)
    return torch.stack(rotated), torch.stack(normed)


def test_latent_kv_is_normalised_rotated_and_cached() -> None:
    call = norm_rope_call()
    with relaxed("dtype"):
        k_cache, ckv_cache, rotated, normed = norm_rope(**call, is_output_kv=True)
    assert k_cache is call["k_cache"]
    assert ckv_cache is call["ckv_cache"]
    expected_rotated, expected_normed = expected_rows(call)
    torch.testing.assert_close(rotated.view(6, 16).double(), expected_rotated, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(normed.view(6, 32).double(), expected_normed, atol=1e-6, rtol=1e-6)
    written = {17: 0, 0: 1, 31: 2, 5: 4, 16: 5}
    for slot in range(32):
        key, latent = k_cache[slot // 16, slot % 16, 0], ckv_cache[slot // 16, slot % 16, 0]
        if slot in written:
            assert torch.equal(key, rotated.view(6, 16)[written[slot]])
            assert torch.equal(latent, normed.view(6, 32)[written[slot]])
        else:
            assert torch.equal(key, torch.full((16,), 5.0))
            assert torch.equal(latent, torch.full((32,), 6.0))


def test_the_fractal_mode_holds_the_same_in_another_order() -> None:
    plain, fractal = norm_rope_call(), norm_rope_call(cache_mode="PA_NZ")
    with relaxed("dtype"):
        norm_rope(**plain)
        norm_rope(**fractal)
    for name, dim in (("k_cache", 16), ("ckv_cache", 32)):
        memory = fractal[name].view(2, dim // 16, 16, 16)
        for block in range(2):
            for offset in range(16):
                token = torch.cat([memory[block, part, offset] for part in range(dim // 16)])
                assert torch.equal(token, plain[name][block, offset, 0])


def test_without_output_the_last_two_results_are_unset() -> None:
    with relaxed("dtype"):
        _, _, rotated, normed = norm_rope(**norm_rope_call())
    assert torch.equal(rotated, torch.full((3, 1, 2, 16), UNDEFINED))
    assert torch.equal(normed, torch.full((3, 1, 2, 32), UNDEFINED))


def test_low_precision_is_rounded_once() -> None:
    call = norm_rope_call(dtype=BF16)
    _, _, rotated, normed = norm_rope(**call, is_output_kv=True)
    for got, expected in zip((rotated, normed), expected_rows(call), strict=True):
        error = (got.double().view_as(expected) - expected).abs()
        assert bool((error <= torch.finfo(BF16).eps / 2 * expected.abs() + 1e-6).all())


@pytest.mark.parametrize(
    "name", ["k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "v"]
)
def test_quantisation_has_no_reference(name: str) -> None:
    with pytest.raises(NotEmulated, match=rf"\b{name}\b"):
        norm_rope(**norm_rope_call(dtype=BF16), **{name: torch.ones(1)})


@pytest.mark.parametrize("mode", ["Norm", "PA_BNSD", "PA_BLK_NZ"])
def test_other_cache_modes_have_no_reference(mode: str) -> None:
    with pytest.raises(NotEmulated, match=mode):
        norm_rope(**norm_rope_call(dtype=BF16, cache_mode=mode))


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        ("dtype", "kv is float32", norm_rope_call()),
        (
            "alignment",
            "k_cache has blocks of 8 tokens",
            norm_rope_call(
                BF16,
                k_cache=torch.zeros(4, 8, 1, 16, dtype=BF16),
                ckv_cache=torch.zeros(4, 8, 1, 32, dtype=BF16),
            ),
        ),
    ],
)
def test_limits_of_latent_writes(kind: str, message: str, call: dict[str, Any]) -> None:
    with pytest.raises(KernelLimit, match=message):
        norm_rope(**call)
    with relaxed(kind):
        norm_rope(**call)
    assert bool((call["ckv_cache"] != 6.0).any())


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("slot 32", {"index": torch.tensor([32, 0, 1, 2, 3, 4])}),
        ("index has 5 slots", {"index": torch.arange(5)}),
        ("kv is \\[B, 1, S, 47\\]", {"gamma": torch.ones(31, dtype=BF16)}),
        ("ckv_cache is", {"ckv_cache": torch.zeros(2, 16, 1, 16, dtype=BF16)}),
        ("even Dk", {"sin": torch.zeros(3, 1, 2, 14, dtype=BF16)}),
        *[
            ("even Dk", dict.fromkeys(("cos", "sin"), torch.zeros(shape, dtype=BF16)))
            for shape in ((6, 1, 2, 16), (3, 1, 1, 16), (3, 2, 2, 16), (1, 1, 2, 16))
        ],
        ("index is int32", {"index": torch.arange(6, dtype=torch.int32)}),
    ],
)
def test_latent_writes_that_contradict_themselves(message: str, changes: dict[str, Any]) -> None:
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=message):
        norm_rope(**norm_rope_call(BF16, **changes))


def read_call(**changes: Any) -> dict[str, Any]:
    call = {
        "key_cache": normal(6, 16, 1, 32, seed=1, dtype=BF16),
        "value_cache": normal(6, 16, 1, 16, seed=2, dtype=BF16),
        # Entries beyond a request's tokens are nonsense.
        "block_table": torch.tensor([[4, 1, 3], [9999, 5, -7], [2, 9999, -7]], dtype=torch.int32),
        "context_lens": torch.tensor([20, 0, 3], dtype=torch.int32),
    }
    return call | changes


def expected_tokens(call: dict[str, Any], wanted: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Key and value of (block, offset) pairs."""
    return [
        torch.stack([call[name][block, offset] for block, offset in wanted])
        for name in ("key_cache", "value_cache")
    ]


FROM_START = [(4, n) for n in range(16)] + [(1, n) for n in range(4)] + [(2, n) for n in range(3)]


def test_tokens_are_read_through_the_block_table() -> None:
    call = read_call()
    key, value = load_pages(**call)
    expected = expected_tokens(call, FROM_START)
    assert torch.equal(key, expected[0])
    assert torch.equal(value, expected[1])


def test_a_running_sum_says_the_same_lengths() -> None:
    call = read_call()
    sums = torch.tensor([0, 20, 20, 23], dtype=torch.int32)
    summed = load_pages(**call | {"context_lens": sums}, cumsum=True)
    assert all(torch.equal(a, b) for a, b in zip(summed, load_pages(**call), strict=True))
    with pytest.raises(KernelLimit, match="starts at 0"):
        load_pages(**call, cumsum=True)


def test_reads_start_where_they_are_told_to_and_fill_what_is_given() -> None:
    call = read_call(
        context_lens=torch.tensor([18, 4, 0], dtype=torch.int32),
        seq_starts=torch.tensor([16, 16, 0], dtype=torch.int32),
    )
    key, value = torch.zeros(22, 1, 32, dtype=BF16), torch.zeros(22, 1, 16, dtype=BF16)
    results = load_pages(**call, key=key, value=value)
    assert results[0] is key
    assert results[1] is value
    wanted = [(1, n) for n in range(16)] + [(3, 0), (3, 1)] + [(5, n) for n in range(4)]
    expected = expected_tokens(call, wanted)
    assert torch.equal(key, expected[0])
    assert torch.equal(value, expected[1])


def test_a_read_of_nothing_is_empty() -> None:
    key, value = load_pages(**read_call(context_lens=torch.zeros(3, dtype=torch.int32)))
    assert list(key.shape) == [0, 1, 32]
    assert list(value.shape) == [0, 1, 16]


@pytest.mark.parametrize(
    ("kind", "message", "changes"),
    [
        ("dtype", "key_cache is float32", {"key_cache": normal(6, 16, 1, 32, seed=1)}),
        ("alignment", "takes 16 bytes", {"value_cache": torch.zeros(6, 16, 1, 8, dtype=BF16)}),
        (
            "alignment",
            r"seq_starts\[0\]=4",
            {"seq_starts": torch.tensor([4, 0, 0], dtype=torch.int32)},
        ),
    ],
)
def test_limits_of_reads(kind: str, message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(KernelLimit, match=message):
        load_pages(**read_call(**changes))
    with relaxed(kind):
        key, _ = load_pages(**read_call(**changes))
    start = 4 if "seq_starts" in changes else 0
    assert torch.equal(key[0], read_call(**changes)["key_cache"][4, start])


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("context_lens is int64", {"context_lens": torch.tensor([20, 0, 3])}),
        ("covers 48", {"context_lens": torch.tensor([49, 0, 3], dtype=torch.int32)}),
        ("blocks 9999", {"context_lens": torch.tensor([20, 1, 3], dtype=torch.int32)}),
        ("1 starts", {"seq_starts": torch.tensor([0], dtype=torch.int32)}),
        ("these lengths need", {"key": torch.zeros(22, 1, 32, dtype=BF16)}),
        ("same blocks", {"value_cache": torch.zeros(5, 16, 1, 16, dtype=BF16)}),
    ],
)
def test_reads_that_contradict_themselves(message: str, changes: dict[str, Any]) -> None:
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=message):
        load_pages(**read_call(**changes))
