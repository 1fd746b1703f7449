"""ScheduledBatch: what it accepts, what it derives, and every input that it must refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin import AfdError, ScheduledBatch
from afd_plugin.batch import MAX_REQUESTS, MAX_TOKENS
from afd_plugin.errors import BatchError

pytestmark = pytest.mark.cpu

FORMS = {
    "list": list,
    "tuple": tuple,
    "int8": lambda v: np.array(v, dtype=np.int8),
    "uint8": lambda v: np.array(v, dtype=np.uint8),
    "int32": lambda v: np.array(v, dtype=np.int32),
    "int64": lambda v: np.array(v, dtype=np.int64),
    "uint64": lambda v: np.array(v, dtype=np.uint64),
    "big-endian": lambda v: np.array(v, dtype=">i4"),
    "strided": lambda v: np.repeat(np.array(v), 2)[::2],
    "read-only": lambda v: np.frombuffer(np.array(v, dtype=np.int64).tobytes(), dtype=np.int64),
    "torch-int32": lambda v: torch.tensor(v, dtype=torch.int32),
    "torch-int64": lambda v: torch.tensor(v, dtype=torch.int64),
    "torch-uint8": lambda v: torch.tensor(v, dtype=torch.uint8),
    "numpy scalars": lambda v: [np.int32(x) for x in v],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_whole_numbers_is_the_same_batch(form: str) -> None:
    batch = ScheduledBatch(FORMS[form]([3, 100, 17]), FORMS[form]([0, 64, 0]))
    assert batch.num_scheduled_tokens.tolist() == [3, 100, 17]
    assert batch.num_computed_tokens.tolist() == [0, 64, 0]
    assert batch.seq_lens.tolist() == [3, 164, 17]
    assert batch.query_start_loc.tolist() == [0, 3, 103, 120]
    for vector in (batch.num_scheduled_tokens, batch.num_computed_tokens, batch.seq_lens):
        assert vector.dtype == np.int64


@given(
    rows=st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6)), min_size=1, max_size=40)
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_derived_values_follow_from_the_counts(rows: list[tuple[int, int]]) -> None:
    scheduled = [row[0] for row in rows]
    computed = [row[1] for row in rows]
    batch = ScheduledBatch(scheduled, computed)
    starts = [sum(scheduled[:i]) for i in range(len(rows) + 1)]
    assert batch.num_reqs == len(rows)
    assert batch.num_tokens == batch.num_input_tokens == sum(scheduled)
    assert batch.query_start_loc.tolist() == starts
    assert batch.seq_lens.tolist() == [s + c for s, c in rows]
    for request in range(len(rows)):
        assert batch.request_of(starts[request]) == request
        assert batch.request_of(starts[request + 1] - 1) == request
    prefilling = [s > 1 or c == 0 for s, c in rows]
    assert batch.is_prefilling.tolist() == prefilling
    assert batch.is_decode_only is (True not in prefilling)


def test_computed_counts_are_zero_when_absent() -> None:
    assert ScheduledBatch([2, 1]).num_computed_tokens.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["scheduled", "computed", "flags"])
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_the_batch_keeps_its_own_copy(name: str, make: Any) -> None:
    given_values = {
        "scheduled": make([4, 5]),
        "computed": make([1, 2]),
        "flags": make([True, True]),
    }
    batch = ScheduledBatch(
        given_values["scheduled"], given_values["computed"], is_prefilling=given_values["flags"]
    )
    given_values[name][0] = 0
    assert batch.num_scheduled_tokens.tolist() == [4, 5]
    assert batch.num_computed_tokens.tolist() == [1, 2]
    assert batch.is_prefilling.tolist() == [True, True]


@pytest.mark.parametrize(
    "vector",
    [
        "num_scheduled_tokens",
        "num_computed_tokens",
        "seq_lens",
        "query_start_loc",
        "is_prefilling",
    ],
)
@pytest.mark.parametrize("flags", [None, [True, False]])
@pytest.mark.parametrize("computed", [None, [3, 3]])
def test_vectors_are_read_only(vector: str, flags: Any, computed: Any) -> None:
    batch = ScheduledBatch([2, 1], computed, is_prefilling=flags)
    with pytest.raises(ValueError, match="read-only"):
        getattr(batch, vector)[0] = 1


@pytest.mark.parametrize(
    ("flags", "decode_only"),
    [
        (None, True),
        ([False, False], True),
        ([True, False], False),
        (np.array([False, True]), False),
        (torch.tensor([True, True]), False),
    ],
)
def test_given_flags_win_over_inference(flags: Any, decode_only: bool) -> None:
    batch = ScheduledBatch([1, 1], [7, 9], is_prefilling=flags)
    assert batch.is_decode_only is decode_only
    assert batch.is_prefilling.tolist() == (
        [False, False] if flags is None else [*map(bool, flags)]
    )


def test_a_long_step_of_given_decodes_is_decode_only() -> None:
    # Speculative verification schedules several tokens of a decode.
    assert ScheduledBatch([4, 4], [10, 10], is_prefilling=[False, False]).is_decode_only


# (scheduled, computed, what the message must say)
NOT_A_VECTOR_OF_WHOLE_NUMBERS = {
    "none": (None, "num_scheduled_tokens"),
    "number": (5, "num_scheduled_tokens"),
    "string": ("12", "num_scheduled_tokens"),
    "strings": (["1", "2"], "num_scheduled_tokens"),
    "floats": ([1.0, 2.0], "float64"),
    "half": ([1.5], "float64"),
    "nan": ([float("nan"), 1], "float64"),
    "infinity": ([float("inf")], "float64"),
    "bools": ([True, True], "bool"),
    "none inside": ([1, None], "object"),
    "empty": ([], "empty"),
    "empty array": (np.array([], dtype=np.int64), "empty"),
    "two dimensions": ([[1, 2]], "2 dimensions"),
    "column": (np.ones((3, 1), dtype=np.int64), "2 dimensions"),
    "scalar tensor": (torch.tensor(3), "0 dimensions"),
    "ragged": ([[1], [1, 2]], "array"),
    "float tensor": (torch.tensor([1.0]), "float32"),
    "bfloat16 tensor": (torch.tensor([1.0], dtype=torch.bfloat16), "array"),
    "bool tensor": (torch.tensor([True]), "bool"),
    "device tensor": (torch.empty(2, dtype=torch.int64, device="meta"), "array"),
    "complex": ([1j], "complex128"),
    "mapping": ({0: 1}, "num_scheduled_tokens"),
    "generator": ((i for i in [1]), "num_scheduled_tokens"),
    "uint64 overflow": (np.array([2**64 - 1], dtype=np.uint64), "2147483647"),
    "beyond 64 bits": ([2**70], "2147483647"),
}


@pytest.mark.parametrize("case", NOT_A_VECTOR_OF_WHOLE_NUMBERS)
def test_scheduled_counts_must_be_a_vector_of_whole_numbers(case: str) -> None:
    value, said = NOT_A_VECTOR_OF_WHOLE_NUMBERS[case]
    with pytest.raises(BatchError, match=said) as caught:
        ScheduledBatch(value)
    assert "num_scheduled_tokens" in str(caught.value)
    assert isinstance(caught.value, AfdError)


@pytest.mark.parametrize("case", [c for c in NOT_A_VECTOR_OF_WHOLE_NUMBERS if c != "none"])
def test_computed_counts_must_be_a_vector_of_whole_numbers(case: str) -> None:
    value, _ = NOT_A_VECTOR_OF_WHOLE_NUMBERS[case]
    with pytest.raises(BatchError, match="num_computed_tokens"):
        ScheduledBatch([1], value)


def test_a_bool_among_numbers_is_refused() -> None:
    with pytest.raises(BatchError, match="bool"):
        ScheduledBatch([True, 2])


@pytest.mark.parametrize(
    ("scheduled", "computed", "said"),
    [
        ([3, 0, 2], None, "request 1 schedules 0 tokens"),
        ([3, -4], None, "request 1 schedules -4 tokens"),
        ([-1], [5], "request 0 schedules -1 tokens"),
        ([0, 0], [8, 8], "request 0 schedules 0 tokens"),
        ([3, 2], [0, -1], "request 1 has -1 computed tokens"),
        ([1, 2], [0], "1 entries and num_scheduled_tokens 2"),
        ([1], [0, 7], "2 entries and num_scheduled_tokens 1"),
        ([1], [], "empty"),
    ],
)
def test_contradicting_counts(scheduled: Any, computed: Any, said: str) -> None:
    with pytest.raises(BatchError, match=said):
        ScheduledBatch(scheduled, computed)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_the_smallest_number_of_a_type_is_refused(dtype: Any) -> None:
    low = np.iinfo(dtype).min
    with pytest.raises(BatchError, match=str(low)):
        ScheduledBatch(np.array([1, low], dtype=dtype))
    with pytest.raises(BatchError, match=str(low)):
        ScheduledBatch([1, 1], np.array([0, low], dtype=dtype))


# --- extents ----------------------------------------------------------------------------


def test_as_many_requests_as_allowed() -> None:
    assert ScheduledBatch(np.ones(MAX_REQUESTS, dtype=np.uint8)).num_tokens == 65_536


def test_one_request_too_many() -> None:
    with pytest.raises(BatchError, match=r"65537 requests.*65536"):
        ScheduledBatch(np.ones(65_537, dtype=np.uint8))


@pytest.mark.parametrize(
    ("scheduled", "computed"),
    [
        ([2**31 - 1], [0]),
        ([2**31 - 2, 1], [1, 2**31 - 2]),
        (
            np.array([2**30, 2**30 - 1], dtype=np.int32),
            np.array([2**30 - 1, 2**30], dtype=np.int32),
        ),
    ],
)
def test_as_many_tokens_as_allowed(scheduled: Any, computed: Any) -> None:
    batch = ScheduledBatch(scheduled, computed)
    assert batch.num_tokens == MAX_TOKENS == 2_147_483_647
    assert max(batch.seq_lens.tolist()) == MAX_TOKENS


@pytest.mark.parametrize(
    ("scheduled", "computed", "said"),
    [
        ([2**31], None, "2147483648"),
        ([1, 2**31 - 1], None, "2147483648 tokens in one step"),
        (np.array([2**30, 2**30], dtype=np.int32), None, "2147483648 tokens in one step"),
        (np.full(9, 2**31 - 1, dtype=np.int32), None, str(9 * (2**31 - 1))),
        ([1, 1], [0, 2**31 - 1], "request 1 would reach 2147483648 tokens"),
        (
            np.array([2**31 - 1], dtype=np.int32),
            np.array([2**31 - 1], dtype=np.int32),
            "4294967294",
        ),
        ([1, 1], [0, 2**31], "request 1 has 1 scheduled and 2147483648 computed"),
        ([2**63 - 1], [0], str(2**63 - 1)),
        ([2**62, 2**62, 2**62], None, str(2**62)),
        ([1], [2**63 - 1], str(2**63 - 1)),
        (np.array([2**31], dtype=np.uint32), None, "2147483648"),
    ],
)
def test_too_many_tokens(scheduled: Any, computed: Any, said: str) -> None:
    with pytest.raises(BatchError, match=said) as caught:
        ScheduledBatch(scheduled, computed)
    assert "2147483647" in str(caught.value)


@pytest.mark.parametrize("extent", [5, 6, np.int32(8), np.uint8(255), 2**31 - 1])
def test_padded_extent(extent: Any) -> None:
    batch = ScheduledBatch([2, 3], num_input_tokens=extent)
    assert batch.num_input_tokens == int(extent)
    assert type(batch.num_input_tokens) is int
    assert batch.num_tokens == 5


@pytest.mark.parametrize(
    "extent", [4, 0, -1, 2**31, 5.0, True, "8", [8], float("nan"), np.float32(8), torch.tensor(8)]
)
def test_padded_extent_refused(extent: Any) -> None:
    with pytest.raises(BatchError, match="num_input_tokens"):
        ScheduledBatch([2, 3], num_input_tokens=extent)


@pytest.mark.parametrize(
    "flags",
    [
        [1, 0],
        [True],
        [True, True, False],
        [[True, False]],
        [],
        True,
        "yes",
        ["a", "b"],
        [None, True],
        np.array([1.0, 0.0]),
        torch.tensor([1, 0]),
    ],
)
def test_flags_refused(flags: Any) -> None:
    with pytest.raises(BatchError, match="is_prefilling"):
        ScheduledBatch([2, 3], is_prefilling=flags)


@pytest.mark.parametrize(
    "flags",
    [[[True], [True, False]], torch.empty(2, dtype=torch.bool, device="meta")],
    ids=["ragged", "device"],
)
def test_flags_that_are_no_array_refused(flags: Any) -> None:
    with pytest.raises(BatchError, match="is_prefilling"):
        ScheduledBatch([2, 3], is_prefilling=flags)
