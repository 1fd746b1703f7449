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


def int_vector(name: str, values: Any) -> IntArray:
    """``values`` (list, numpy array or CPU tensor) as a fresh read-only int64 vector.

    Raises :class:`BatchError` for anything that is not a 1-D vector of whole numbers.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(
            f"{name} cannot be read as an array ({error}); give a list, a numpy array "
            "or a CPU tensor of whole numbers, one a request."
        ) from error
    if array.ndim != 1:
        raise BatchError(f"{name} has {array.ndim} dimensions; give one number a request.")
    if array.size == 0:
        raise BatchError(f"{name} is empty; a step has 1 to {MAX_REQUESTS} requests.")
    if array.dtype.kind not in "iu" or (array.dtype == np.uint64 and array.max() > MAX_TOKENS):
        raise BatchError(
            f"{name} holds {array.dtype} values; give whole numbers up to {MAX_TOKENS}, "
            "one a request."
        )
    vector: IntArray = array.astype(np.int64)
    vector.setflags(write=False)
    return vector


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
    and read-only.  Raises :class:`BatchError` naming the request that is wrong.
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
        if num_computed_tokens is None:
            computed = np.zeros(scheduled.size, dtype=np.int64)
            computed.setflags(write=False)
        else:
            computed = int_vector("num_computed_tokens", num_computed_tokens)
        self._check_counts(scheduled, computed)
        lens = scheduled + computed
        starts = np.zeros(scheduled.size + 1, dtype=np.int64)
        np.cumsum(scheduled, out=starts[1:])
        self._check_extents(lens, int(starts[-1]))
        lens.setflags(write=False)
        starts.setflags(write=False)
        self.num_scheduled_tokens = scheduled
        self.num_computed_tokens = computed
        self.seq_lens = lens  # [R] tokens of each request after this step
        self.query_start_loc = starts  # [R + 1] first token of each request, then the total
        self.num_reqs = scheduled.size
        self.num_tokens = int(starts[-1])
        self.num_input_tokens = self._extent(num_input_tokens, self.num_tokens)
        self._given_prefilling = self._flags(is_prefilling, scheduled)

    @staticmethod
    def _check_counts(scheduled: IntArray, computed: IntArray) -> None:
        if scheduled.size > MAX_REQUESTS:
            raise BatchError(f"{scheduled.size} requests in one step; at most {MAX_REQUESTS}.")
        if computed.size != scheduled.size:
            raise BatchError(
                f"num_computed_tokens has {computed.size} entries and num_scheduled_tokens "
                f"{scheduled.size}; give one of each a request."
            )
        if np.minimum.reduce(scheduled) < 1:
            bad = int(np.argmax(scheduled < 1))
            raise BatchError(
                f"request {bad} schedules {scheduled[bad]} tokens; every request of a step "
                "schedules at least 1. Leave requests without work out of the batch."
            )
        if np.minimum.reduce(computed) < 0:
            bad = int(np.argmax(computed < 0))
            raise BatchError(
                f"request {bad} has {computed[bad]} computed tokens; it must be 0 or more."
            )
        # The bitwise or is as large as the larger of both, so one maximum checks the two.
        if np.maximum.reduce(scheduled | computed) > MAX_TOKENS:
            bad = int(np.argmax(scheduled | computed))
            raise BatchError(
                f"request {bad} has {scheduled[bad]} scheduled and {computed[bad]} computed "
                f"tokens; positions go up to {MAX_TOKENS}."
            )

    @staticmethod
    def _check_extents(lens: IntArray, num_tokens: int) -> None:
        if num_tokens > MAX_TOKENS:
            raise BatchError(f"{num_tokens} tokens in one step; at most {MAX_TOKENS}.")
        if np.maximum.reduce(lens) > MAX_TOKENS:
            bad = int(np.argmax(lens))
            raise BatchError(
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
    def _flags(given: Any, scheduled: IntArray) -> NDArray[np.bool_] | None:
        if given is None:
            return None
        flags = np.array(np.asarray(given))
        if flags.dtype != np.bool_ or flags.shape != scheduled.shape:
            raise BatchError(
                f"is_prefilling is {flags.dtype} of shape {flags.shape}; give one bool a "
                f"request, shape {scheduled.shape}."
            )
        flags.setflags(write=False)
        return flags

    @cached_property
    def is_prefilling(self) -> NDArray[np.bool_]:
        """[R] whether each request is in its prompt, as given or inferred."""
        if self._given_prefilling is not None:
            return self._given_prefilling
        flags: NDArray[np.bool_] = (self.num_scheduled_tokens > 1) | (self.num_computed_tokens == 0)
        flags.setflags(write=False)
        return flags

    @property
    def is_decode_only(self) -> bool:
        """Whether no request of the step is in its prompt."""
        if self._given_prefilling is None and self.num_tokens > self.num_reqs:
            return False
        return not self.is_prefilling.any()

    def request_of(self, token: int) -> int:
        """Index of the request that owns batch token ``token`` (0 <= token < num_tokens)."""
        return int(np.searchsorted(self.query_start_loc, token, side="right")) - 1

    def __repr__(self) -> str:
        return f"ScheduledBatch({self.num_reqs} requests, {self.num_tokens} tokens)"
