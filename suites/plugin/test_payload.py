"""Routing payloads: what may be one, bytes there and back, and order by expert and back."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afd_plugin.errors import RoutingError, RoutingPayloadError
from afd_plugin.payload import (
    EXACT_IDS,
    HEADER_BYTES,
    LOGIT_DTYPES,
    RoutingPayload,
    as_rows,
    by_experts,
    expert_order,
    from_rows,
    restore,
    unpack,
)

pytestmark = pytest.mark.cpu


def payload(rows: int = 5, top_k: int = 2, experts: int = 8, **more: Any) -> RoutingPayload:
    random = np.random.default_rng(rows * 100 + top_k)
    ids = np.stack([random.permutation(experts)[:top_k] for _ in range(rows)]) if rows else None
    given: dict[str, Any] = {
        "ids": torch.tensor(ids, dtype=torch.int32)
        if rows
        else torch.empty(0, top_k, dtype=torch.int32),
        "weights": torch.from_numpy(random.random((rows, top_k), dtype=np.float32)),
        "num_tokens": rows,
        **more,
    }
    return RoutingPayload(**given)


# --- what may be one ------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("dtype", [None, *LOGIT_DTYPES], ids=str)
def test_what_is_allowed(rows: int, top_k: int, dtype: torch.dtype | None) -> None:
    logits = None if dtype is None else torch.zeros(rows, 8, dtype=dtype)
    made = payload(rows, top_k, logits=logits)
    assert (made.rows, made.top_k, made.num_tokens, made.layout) == (rows, top_k, rows, "batch")


IDS = torch.zeros(4, 2, dtype=torch.int32)
WEIGHTS = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ids": IDS.long()}, "ids are torch.int64; allowed: torch.int32"),
        ({"ids": IDS.float()}, "ids are torch.float32"),
        ({"weights": WEIGHTS.double()}, "weights are torch.float64; allowed: torch.float32"),
        ({"weights": WEIGHTS.bfloat16()}, "weights are torch.bfloat16"),
        ({"ids": IDS[0]}, "ids have shape [2]"),
        ({"ids": IDS[None]}, "ids have shape [1, 4, 2]"),
        ({"ids": IDS[:, :0]}, "ids have shape [4, 0]; they must be [rows, 1 or more]"),
        ({"ids": torch.zeros(2, 4, dtype=torch.int32).t()}, "strides [1, 4]"),
        ({"weights": torch.zeros(4, 4)[:, ::2]}, "strides [4, 2]; they must be contiguous"),
        ({"weights": WEIGHTS[:3]}, "weights are [3, 2] and ids [4, 2]"),
        ({"weights": WEIGHTS.to("meta")}, "weights are on meta and ids on cpu"),
        ({"logits": torch.zeros(3, 8)}, "logits have 3 rows and ids 4"),
        ({"logits": torch.zeros(4, 8).double()}, "logits are torch.float64"),
        ({"logits": torch.zeros(4, 8, device="meta")}, "logits are on meta"),
        ({"num_tokens": 5}, "num_tokens is 5; allowed are 0 to the 4 rows"),
        ({"num_tokens": -1}, "num_tokens is -1"),
        ({"num_tokens": 2.5}, "num_tokens is 2.5; allowed are 0 to the 4 rows. Give how many"),
        ({"num_tokens": True}, "num_tokens is True"),
        ({"ids": [[1, 2]]}, "ids are list; give a torch.Tensor"),
        ({"weights": None}, "weights are NoneType"),
        ({"layout": "tokens"}, "layout is 'tokens'; allowed are 'batch', 'experts'"),
        ({"layout": "experts"}, "these name 2 experts; use layout 'batch'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(changed: dict[str, Any], said: str) -> None:
    given = {"ids": IDS, "weights": WEIGHTS, "num_tokens": 4, **changed}
    with pytest.raises(RoutingPayloadError) as caught:
        RoutingPayload(**given)
    assert said in str(caught.value)
    assert isinstance(caught.value, RoutingError)


def test_two_payloads_are_compared_by_who_they_are() -> None:
    """Tensors have no one answer to whether they are equal; comparing must not raise."""
    one = payload()
    assert one == one
    assert one != payload()
    assert len({one, one}) == 1


def test_padding_has_weight_zero_and_experts_that_differ_and_is_not_counted() -> None:
    made = payload(3)
    padded = made.padded(5)
    assert (padded.rows, padded.num_tokens) == (5, 3)
    assert torch.equal(padded.ids[:3], made.ids)
    assert torch.equal(padded.weights[:3], made.weights)
    assert padded.ids[3:].tolist() == [[0, 1], [0, 1]]
    assert not padded.weights[3:].any()
    with pytest.raises(RoutingPayloadError, match="3 rows do not fit 2"):
        made.padded(2)


# --- bytes there and back -------------------------------------------------------------------


@given(
    rows=st.integers(0, 20),
    top_k=st.integers(1, 4),
    dtype=st.sampled_from([None, *LOGIT_DTYPES]),
    real=st.floats(0, 1),
)
def test_bytes_there_and_back(
    rows: int, top_k: int, dtype: torch.dtype | None, real: float
) -> None:
    logits = None if dtype is None else torch.randn(rows, 8).to(dtype)
    sent = payload(rows, top_k, logits=logits, num_tokens=int(rows * real))
    packed = sent.pack()
    assert len(packed.header) == HEADER_BYTES
    size = rows * top_k * 8 + (0 if logits is None else logits.numel() * logits.itemsize)
    assert packed.nbytes == HEADER_BYTES + size
    # Over bytes, as a wire has them.
    wire = [bytearray(buffer.numpy().tobytes()) for buffer in packed.buffers]
    arrived = [torch.from_numpy(np.frombuffer(each, dtype=np.uint8)) for each in wire]
    got = unpack(packed.header, arrived)
    assert (got.num_tokens, got.layout) == (sent.num_tokens, sent.layout)
    for name in ("ids", "weights", "logits"):
        one, other = getattr(sent, name), getattr(got, name)
        if one is None:
            assert other is None
        else:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_nothing_is_copied() -> None:
    sent = payload(logits=torch.zeros(5, 8))
    packed = sent.pack()
    tensors = [sent.ids, sent.weights, sent.logits]
    assert [b.data_ptr() for b in packed.buffers] == [
        t.data_ptr() for t in tensors if t is not None
    ]
    # Received in one piece of memory, which the payload then looks at.
    memory = torch.cat(packed.buffers)
    parts = memory.split([buffer.numel() for buffer in packed.buffers])
    got = unpack(packed.header, parts)
    assert got.ids.data_ptr() == memory.data_ptr()
    memory.zero_()
    assert not got.ids.any()
    assert not got.weights.any()


def test_one_expert_a_token_with_any_stride() -> None:
    ids = torch.as_strided(torch.arange(4, dtype=torch.int32), (4, 1), (1, 7))
    sent = RoutingPayload(ids=ids, weights=torch.ones(4, 1), num_tokens=4)
    packed = sent.pack()
    assert packed.buffers[0].data_ptr() == ids.data_ptr()
    assert unpack(*packed).ids.tolist() == [[0], [1], [2], [3]]


def test_the_header_is_documented_and_stable() -> None:
    packed = payload(5, 2, logits=torch.zeros(5, 8, dtype=torch.bfloat16), num_tokens=4).pack()
    fields = struct.pack("<4sHBBQQII", b"AFDR", 1, 0, 2, 5, 4, 2, 8)
    assert packed.header == fields + struct.pack("<I", zlib.crc32(fields))


def header(*values: Any) -> bytes:
    fields = struct.pack("<4sHBBQQII", *values)
    return fields + struct.pack("<I", zlib.crc32(fields))


@pytest.mark.parametrize(
    ("bytes_", "said"),
    [
        (b"", "the header has 0 bytes"),
        (header(b"AFDR", 1, 0, 0, 5, 5, 2, 0)[:-1], f"has {HEADER_BYTES - 1} bytes"),
        (header(b"AFDX", 1, 0, 0, 5, 5, 2, 0), "begins with b'AFDX'"),
        (header(b"AFDR", 2, 0, 0, 5, 5, 2, 0), "has version 2; this side reads 1"),
        (header(b"AFDR", 1, 2, 0, 5, 5, 2, 0), "has layout 2"),
        (header(b"AFDR", 1, 0, 4, 5, 5, 2, 0), "logits of type 4"),
        (header(b"AFDR", 1, 0, 1, 5, 5, 2, 8), "2 buffers arrived; the header announces 3"),
        (header(b"AFDR", 1, 0, 0, 6, 5, 2, 0), "has 40 bytes; [6, 2] of torch.int32 has 48"),
        (header(b"AFDR", 1, 0, 0, 5, 6, 2, 0), "num_tokens is 6"),
        (header(b"AFDR", 1, 1, 0, 5, 5, 2, 0), "rows by experts are single assignments"),
        (header(b"AFDR", 1, 0, 0, 2**63, 0, 2, 0), "the buffer of ids has 40 bytes"),
        (header(b"AFDR", 1, 0, 0, 2**64 - 1, 0, 0, 0), "the header has 0 experts a token"),
        (header(b"AFDR", 1, 0, 0, 5, 5, 2, 7), "logits of type 0 for 7 experts"),
        (header(b"AFDR", 1, 0, 1, 5, 5, 2, 0), "logits of type 1 for 0 experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_headers_that_are_refused(bytes_: bytes, said: str) -> None:
    with pytest.raises(RoutingPayloadError) as caught:
        unpack(bytes_, payload(5, 2).pack().buffers)
    assert said in str(caught.value)


def test_a_header_of_bytes_of_any_kind_and_of_nothing_else() -> None:
    packed = payload(5, 2).pack()
    for kind in (bytes, bytearray, memoryview):
        assert torch.equal(unpack(kind(packed.header), packed.buffers).ids, payload(5, 2).ids)
    for other in ("x" * HEADER_BYTES, [0] * HEADER_BYTES, None):
        with pytest.raises(RoutingPayloadError, match=f"the header is {type(other).__name__}"):
            unpack(other, packed.buffers)  # type: ignore[arg-type]


def test_a_buffer_over_memory_that_begins_anywhere() -> None:
    packed = payload(5, 2).pack()
    memory = np.zeros(64, dtype=np.uint8)
    first = (-memory.ctypes.data) % 4  # of the first whole number in it
    for start, ok in ((first, True), (first + 1, False), (first + 2, False), (first + 4, True)):
        buffer = torch.from_numpy(memory[start : start + 40])
        buffer.copy_(packed.buffers[0])
        assert buffer.storage_offset() == 0
        if ok:
            assert unpack(packed.header, [buffer, packed.buffers[1]]).ids.equal(payload(5, 2).ids)
        else:
            with pytest.raises(RoutingPayloadError, match=r"at address 0x.*needs multiples of 4"):
                unpack(packed.header, [buffer, packed.buffers[1]])


def test_a_buffer_that_is_no_tensor() -> None:
    packed = payload(5, 2).pack()
    with pytest.raises(RoutingPayloadError, match="the buffer of weights is bytes; give a torch"):
        unpack(packed.header, [packed.buffers[0], bytes(40)])  # type: ignore[list-item]


@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_a_flipped_bit_of_the_header_is_noticed(place: int) -> None:
    packed = payload(5, 2).pack()
    damaged = bytearray(packed.header)
    damaged[place] ^= 1
    with pytest.raises(RoutingPayloadError):
        unpack(bytes(damaged), packed.buffers)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ids: ids[:-1], "the buffer of ids has 39 bytes"),
        (lambda ids: torch.cat([ids, ids]), "has 80 bytes; [5, 2] of torch.int32 has 40"),
        (lambda ids: ids.view(5, 8), "must be flat, contiguous torch.uint8"),
        (lambda ids: ids.view(torch.int8), "of torch.int8"),
        (lambda ids: torch.stack([ids, ids], 1).view(-1)[::2], "must be flat, contiguous"),
        (lambda ids: torch.cat([ids[:1], ids])[1:], "begins at byte 1"),
    ],
)
def test_buffers_that_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    packed = payload(5, 2).pack()
    with pytest.raises(RoutingPayloadError) as caught:
        unpack(packed.header, [change(packed.buffers[0]), packed.buffers[1]])
    assert said in str(caught.value)


# --- by expert and back ---------------------------------------------------------------------


@given(
    rows=st.integers(0, 30),
    top_k=st.integers(1, 4),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_order_by_expert_and_exactly_back(rows: int, top_k: int, ranks: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    experts = 8
    holders = [int(rank) for rank in random.integers(0, ranks, experts)]
    sent = RoutingPayload(
        ids=torch.from_numpy(random.integers(0, experts, (rows, top_k)).astype(np.int32)),
        weights=torch.from_numpy(random.random((rows, top_k), dtype=np.float32)),
        num_tokens=rows,
    )
    order = expert_order(sent, holders, ranks)
    # By the definition: rank, then expert, then the place in the batch.
    flat = [int(expert) for expert in sent.ids.reshape(-1)]
    places = sorted(range(len(flat)), key=lambda place: (holders[flat[place]], flat[place], place))
    assert order.assignments.tolist() == places
    assert order.tokens.tolist() == [place // top_k for place in places]
    assert order.counts == tuple(sum(holders[e] == rank for e in flat) for rank in range(ranks))

    moved = by_experts(sent, order)
    assert moved.layout == "experts"
    assert moved.ids.reshape(-1).tolist() == [flat[place] for place in places]
    assert torch.equal(restore(order, moved.ids.reshape(-1)), sent.ids)
    assert torch.equal(restore(order, moved.weights.reshape(-1)), sent.weights)
    rows_of_tokens = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    back = restore(order, rows_of_tokens[order.tokens])
    assert torch.equal(back, rows_of_tokens[:, None].expand(rows, top_k, 3))


@pytest.mark.parametrize("expert", [-1, 8, 2**31 - 1])
def test_ids_outside_of_the_experts_have_no_order(expert: int) -> None:
    ids = torch.tensor([[0, 1], [2, expert]], dtype=torch.int32)
    sent = RoutingPayload(ids=ids, weights=torch.zeros(2, 2), num_tokens=2)
    with pytest.raises(RoutingPayloadError, match=f"row 1 goes to expert {expert}; allowed are 0"):
        expert_order(sent, [0] * 8, 1)


def test_ranks_that_do_not_exist_hold_nothing() -> None:
    with pytest.raises(RoutingPayloadError, match=r"held by ranks \[0, 2\]; allowed are 0 to 1"):
        expert_order(payload(), [0] * 7 + [2], 2)
    with pytest.raises(RoutingPayloadError, match=r"held by ranks \[0.9, 1.9\].*whole numbers"):
        expert_order(payload(), [0.9] * 4 + [1.9] * 4, 2)  # type: ignore[list-item]


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize(("holders", "ranks"), [([], 2), ([0, 0], 0)])
def test_nothing_that_could_hold_them(rows: int, holders: list[int], ranks: int) -> None:
    said = f"{len(holders)} experts on {ranks} ranks hold nothing; there must be 1 or more of each"
    with pytest.raises(RoutingPayloadError, match=said):
        expert_order(payload(rows), holders, ranks)


@pytest.mark.parametrize(("rows", "top_k"), [(4, 2), (6, 2), (2, 5), (5, 1)])
def test_the_order_of_another_payload(rows: int, top_k: int) -> None:
    """Of fewer rows it would drop some, without a word."""
    order = expert_order(payload(5, 2), [0] * 8, 1)
    said = f"an order of 10 assignments, 2 a row, does not fit {rows} rows that name {top_k}"
    with pytest.raises(RoutingPayloadError, match=said):
        by_experts(payload(rows, top_k), order)


def test_rows_that_are_not_all_back() -> None:
    order = expert_order(payload(5, 2), [0] * 8, 1)
    with pytest.raises(RoutingPayloadError, match=r"\[9, 3\] rows came back of 10"):
        restore(order, torch.zeros(9, 3))


# --- as rows of numbers ---------------------------------------------------------------------


@given(rows=st.integers(0, 9), top_k=st.integers(1, 8), more=st.integers(0, 3))
def test_rows_of_numbers_and_padding_between(rows: int, top_k: int, more: int) -> None:
    sent = payload(rows, top_k)
    moved = as_rows(sent, 8)
    assert moved.shape == (rows, 2 * top_k)
    got = from_rows(torch.nn.functional.pad(moved, (0, 0, 0, more)), 8)
    assert got.num_tokens == rows + more
    assert torch.equal(got.ids[:rows], sent.ids)
    assert torch.equal(got.weights[:rows], sent.weights)
    # A row of zeros: no weight, and experts that differ.
    assert got.ids[rows:].tolist() == [list(range(top_k))] * more
    assert not got.weights[rows:].any()


def test_every_id_is_exact_as_a_float() -> None:
    ids = torch.tensor([[EXACT_IDS - 1, EXACT_IDS - 2, 0]], dtype=torch.int32)
    sent = RoutingPayload(ids=ids, weights=torch.zeros(1, 3), num_tokens=1)
    assert torch.equal(from_rows(as_rows(sent, EXACT_IDS), EXACT_IDS).ids, ids)
    for experts in (EXACT_IDS + 1, 2):
        with pytest.raises(RoutingPayloadError, match=f"{experts} experts cannot be numbered"):
            as_rows(sent, experts)


@pytest.mark.parametrize("expert", [-1, 8, 9, 2**31 - 1, -(2**31)])
def test_what_is_no_expert_does_not_travel_as_one(expert: int) -> None:
    ids = torch.tensor([[0, 1], [2, expert]], dtype=torch.int32)
    sent = RoutingPayload(ids=ids, weights=torch.zeros(2, 2), num_tokens=2)
    with pytest.raises(RoutingPayloadError, match=f"row 1 goes to expert {expert}; allowed are 0"):
        as_rows(sent, 8)


@pytest.mark.parametrize(
    "number", [0.5, -1.0, 8.0, 1e20, float("nan"), float("inf"), -float("inf"), 7.9999995]
)
def test_numbers_that_name_no_expert_do_not_become_one(number: float) -> None:
    rows = torch.tensor([[0.5, 0.5, 1.0, 2.0], [0.5, 0.5, 3.0, number]])
    with pytest.raises(RoutingPayloadError, match=r"row 1 names .* as its expert 1; allowed are w"):
        from_rows(rows, 8)


@pytest.mark.parametrize("experts", [8.5, 8.0, True, None])
def test_what_is_no_number_of_experts(experts: Any) -> None:
    for call in (
        lambda: as_rows(payload(), experts),
        lambda: from_rows(torch.zeros(2, 4), experts),
    ):
        with pytest.raises(RoutingPayloadError, match=f"{experts} experts cannot be numbered"):
            call()


def test_rows_of_more_experts_than_there_are() -> None:
    with pytest.raises(RoutingPayloadError, match=r"1 experts cannot be .* rows that name 2"):
        from_rows(torch.zeros(2, 4), 1)


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, 3), torch.zeros(2, 4).double(), torch.zeros(4), torch.zeros(2, 0)],
    ids=lambda rows: f"{list(rows.shape)} of {rows.dtype}",
)
def test_rows_that_are_no_routing(rows: torch.Tensor) -> None:
    with pytest.raises(RoutingPayloadError, match="rows are"):
        from_rows(rows, 8)
