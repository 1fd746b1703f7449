"""What the scheduler decided for one step, checked once."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afd_plugin.errors import BatchError

IntArray = NDArray[np.int64]

MAX_REQUESTS = 65_536
MAX_TOKENS = 2**31 - 1  # offsets and lengths are int32 in attention metadata
_INT32, _BOOL = np.dtype(np.int32), np.dtype(np.bool_)


def _read(name: str, values: Any, what: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(
            f"{name} cannot be read as an array ({error}); give a list, a numpy array "
            f"or a CPU tensor of {what}, one a request."
        ) from error


def int_vector(name: str, values: Any) -> NDArray[Any]:
    """``values`` (list, numpy array or CPU tensor) as a vector of whole numbers, not copied.

    Raises :class:`BatchError` for anything else.
    """
    array = values if type(values) is np.ndarray else _read(name, values, "whole numbers")
    if array.dtype == _INT32 and array.ndim == 1 and array.size:
        return array
    if array.ndim != 1:
        raise BatchError(f"{name} has {array.ndim} dimensions; give one number a request.")
    if array.size == 0:
        raise BatchError(f"{name} is empty; a step has 1 to {MAX_REQUESTS} requests.")
    held = "bool" if _has_bool(values) else str(array.dtype)
    if (
        held == "bool"
        or array.dtype.kind not in "iu"
        or (held == "uint64" and array.max() > MAX_TOKENS)
    ):
        raise BatchError(
            f"{name} holds {held} values; give whole numbers up to {MAX_TOKENS}, one a request."
        )
    return array


def _has_bool(values: Any) -> bool:
    """Whether a list hides a bool among its numbers, where an array would make it 0 or 1."""
    return isinstance(values, list | tuple) and any(isinstance(v, bool | np.bool_) for v in values)


def _wide(values: NDArray[np.int32]) -> IntArray:
    """A read-only int64 copy."""
    copy = values.astype(np.int64)
    copy.setflags(write=False)
    return copy


def _least(values: NDArray[Any]) -> int:
    """Minimum, at half of the cost of ``values.min()``."""
    minimum: int = values.item(values.argmin())
    return minimum


def _is_within(values: NDArray[Any], low: int) -> bool:
    """Whether all of ``values`` lie in [low, MAX_TOKENS]."""
    if _least(values) < low:
        return False
    return values.dtype == _INT32 or int(values.max()) <= MAX_TOKENS


class ScheduledBatch:
    """Token counts of one scheduled step, in batch order.

    ``num_scheduled_tokens``: [R] tokens each request computes in this step, each at least 1.
    ``num_computed_tokens``: [R] tokens each request already has in the KV cache (earlier
    chunks and prefix-cache hits); all zero when absent.
    ``is_prefilling``: [R] whether the request is still in its prompt.  When absent, a request
    counts as decoding exactly if it schedules one token and has some computed: a one-token
    rest of a prompt then looks like a decode, so pass the truth where it is known.
    ``num_input_tokens``: padded extent of the step's buffers; the real tokens when absent.

    1 to 65,536 requests, up to 2^31 - 1 tokens and positions.  All arrays are copied, int64
    and read-only.  ``scheduled_i32``, ``lens_i32`` and ``starts_i32`` hold the same in the type
    of attention metadata, which is compared with them at every step; ``lens_raw`` and
    ``starts_raw`` are the memory of the latter two.
    Raises :class:`BatchError` naming the request that is wrong.
    """

    def __init__(
        self,
        num_scheduled_tokens: Any,
        num_computed_tokens: Any = None,
        *,
        is_prefilling: Any = None,
        num_input_tokens: int | None = None,
    ) -> None:
        scheduled = int_vector("num_scheduled_tokens", num_scheduled_tokens)
        if scheduled.size > MAX_REQUESTS:
            raise BatchError(f"{scheduled.size} requests in one step; at most {MAX_REQUESTS}.")
        if num_computed_tokens is None:
            computed: NDArray[Any] = np.zeros(scheduled.size, dtype=_INT32)
        else:
            computed = int_vector("num_computed_tokens", num_computed_tokens)
        if computed.size != scheduled.size:
            raise BatchError(
                f"num_computed_tokens has {computed.size} entries and num_scheduled_tokens "
                f"{scheduled.size}; give one of each a request."
            )
        if not (_is_within(scheduled, 1) and _is_within(computed, 0)):
            raise self._fault(scheduled, computed)
        self.scheduled_i32 = scheduled.astype(_INT32)
        self.lens_raw = bytearray(4 * scheduled.size)
        self.lens_i32 = np.frombuffer(self.lens_raw, _INT32)
        np.add(self.scheduled_i32, computed.astype(_INT32, copy=False), self.lens_i32)
        self.starts_raw = bytearray(4 * scheduled.size + 4)
        self.starts_i32 = np.frombuffer(self.starts_raw, _INT32)
        np.add.accumulate(self.scheduled_i32, out=self.starts_i32[1:])
        # The first sum of two such numbers that does not fit wraps to a negative one.
        if _least(self.lens_i32) < 0 or _least(self.starts_i32) < 0:
            raise self._fault(scheduled, computed)
        self.num_reqs = scheduled.size
        self.num_tokens: int = self.starts_i32.item(-1)
        self.num_input_tokens = self._extent(num_input_tokens, self.num_tokens)
        self._flags_given = is_prefilling is not None
        if self._flags_given:
            self.is_prefilling = self._flags(is_prefilling, scheduled.size)
        for array in (self.scheduled_i32, self.lens_i32, self.starts_i32):
            array.setflags(False)  # by place, at half the cost of write=False

    @staticmethod
    def _fault(given_scheduled: NDArray[Any], given_computed: NDArray[Any]) -> BatchError:
        """What is wrong with counts of which something is: the first fault, by request."""
        scheduled, computed = given_scheduled.astype(np.int64), given_computed.astype(np.int64)
        if scheduled.min() < 1:
            bad = int(np.argmax(scheduled < 1))
            return BatchError(
                f"request {bad} schedules {scheduled[bad]} tokens; every request of a step "
                "schedules at least 1. Leave requests without work out of the batch."
            )
        if computed.min() < 0:
            bad = int(np.argmax(computed < 0))
            return BatchError(
                f"request {bad} has {computed[bad]} computed tokens; it must be 0 or more."
            )
        either = scheduled | computed  # as large as the larger of both
        if either.max() > MAX_TOKENS:
            bad = int(either.argmax())
            return BatchError(
                f"request {bad} has {scheduled[bad]} scheduled and {computed[bad]} computed "
                f"tokens; positions go up to {MAX_TOKENS}."
            )
        num_tokens = int(scheduled.sum())
        if num_tokens > MAX_TOKENS:
            return BatchError(f"{num_tokens} tokens in one step; at most {MAX_TOKENS}.")
        lens = scheduled + computed
        bad = int(lens.argmax())
        return BatchError(
            f"request {bad} would reach {lens[bad]} tokens; positions go up to {MAX_TOKENS}."
        )

    @staticmethod
    def _extent(num_input_tokens: int | None, num_tokens: int) -> int:
        if num_input_tokens is None:
            return num_tokens
        if not isinstance(num_input_tokens, int | np.integer) or isinstance(num_input_tokens, bool):
            raise BatchError(f"num_input_tokens is {num_input_tokens!r}; give a whole number.")
        if not num_tokens <= num_input_tokens <= MAX_TOKENS:
            raise BatchError(
                f"num_input_tokens is {num_input_tokens}; the padded extent lies between the "
                f"{num_tokens} real tokens of the step and {MAX_TOKENS}."
            )
        return int(num_input_tokens)

    @staticmethod
    def _flags(given: Any, num_reqs: int) -> NDArray[np.bool_]:
        flags: NDArray[np.bool_] = _read("is_prefilling", given, "bools").copy()
        if flags.dtype != _BOOL or flags.shape != (num_reqs,):
            raise BatchError(
                f"is_prefilling is {flags.dtype} of shape {flags.shape}; give one bool a "
                f"request, shape {(num_reqs,)}."
            )
        flags.setflags(write=False)
        return flags

    @cached_property
    def num_scheduled_tokens(self) -> IntArray:
        """[R] tokens each request computes in this step."""
        return _wide(self.scheduled_i32)

    @cached_property
    def num_computed_tokens(self) -> IntArray:
        """[R] tokens each request had before this step."""
        return _wide(self.lens_i32 - self.scheduled_i32)

    @cached_property
    def seq_lens(self) -> IntArray:
        """[R] tokens of each request after this step."""
        return _wide(self.lens_i32)

    @cached_property
    def query_start_loc(self) -> IntArray:
        """[R + 1] first token of each request, then the total."""
        return _wide(self.starts_i32)

    @cached_property
    def is_prefilling(self) -> NDArray[np.bool_]:
        """[R] whether each request is in its prompt, as given or inferred."""
        flags: NDArray[np.bool_] = (self.num_scheduled_tokens > 1) | (self.num_computed_tokens == 0)
        flags.setflags(write=False)
        return flags

    @property
    def is_decode_only(self) -> bool:
        """Whether no request of the step is in its prompt."""
        if self.num_tokens > self.num_reqs and not self._flags_given:
            return False
        flags = self.is_prefilling
        return not flags[flags.argmax()]

    def request_of(self, token: int) -> int:
        """Index of the request that owns batch token ``token`` (0 <= token < num_tokens)."""
        return int(np.searchsorted(self.query_start_loc, token, side="right")) - 1

    def __repr__(self) -> str:
        return f"ScheduledBatch({self.num_reqs} requests, {self.num_tokens} tokens)"
