"""Where a step is cut: pure integers, the same on every rank that agrees on the batch."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from afd_plugin.batch import ScheduledBatch
from afd_plugin.config import POLICIES, Policy
from afd_plugin.errors import PlanError

PlanPolicy = Literal["token_balanced_tp", "request_boundary", "given"]


class Stage(NamedTuple):
    """One of the two pieces of a step.

    ``token_slice``: real tokens of the batch; ``request_slice``: requests with a token in it.
    ``num_tokens``: real tokens, all that attention may be told about.
    ``num_input_tokens``: rows of the stage's buffers, ``num_tokens`` rounded up to the alignment.
    """

    token_slice: slice
    request_slice: slice
    num_tokens: int
    num_input_tokens: int


@dataclass(frozen=True)
class Unsplit:
    """The step runs whole.  ``reason`` is a stable word, ``detail`` a sentence with the numbers."""

    batch: ScheduledBatch
    reason: str
    detail: str


@dataclass(frozen=True, eq=False, init=False)
class SplitPlan:
    """Two stages with at least one real token each.

    ``cut``: first token of stage 1.  ``alignment``: tokens that buffers are padded to.
    """

    batch: ScheduledBatch
    policy: PlanPolicy
    cut: int
    alignment: int
    stages: tuple[Stage, Stage]
    cuts_request: bool

    def __init__(
        self,
        batch: ScheduledBatch,
        policy: PlanPolicy,
        cut: int,
        alignment: int,
        stages: tuple[Stage, Stage],
        cuts_request: bool,
    ) -> None:
        # At once: the generated method of a frozen class pays for each field.
        self.__dict__.update(
            batch=batch,
            policy=policy,
            cut=cut,
            alignment=alignment,
            stages=stages,
            cuts_request=cuts_request,
        )

    @property
    def imbalance(self) -> float:
        """Real tokens of the larger stage over the mean of both: 1.0 is even, below 2.0 always."""
        return 2 * max(stage.num_tokens for stage in self.stages) / self.batch.num_tokens

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all integers that the plan follows from; equal plans, equal digests."""
        batch = self.batch
        head = f"afd-plan-1:{self.policy}:{self.cut}:{self.alignment}:{batch.num_input_tokens}:"
        state = hashlib.sha256(head.encode())
        for array in (batch.num_scheduled_tokens, batch.num_computed_tokens):
            state.update(array.astype("<i8", copy=False).tobytes())
        state.update(np.packbits(batch.is_prefilling).tobytes())
        return state.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SplitPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def moved(self, cut: int) -> SplitPlan:
        """The same plan cut elsewhere: same policy, alignment and batch."""
        return _plan(self.batch, self.policy, cut, self.alignment)


def _plan(batch: ScheduledBatch, policy: PlanPolicy, cut: int, alignment: int) -> SplitPlan:
    starts = batch.starts_i32
    first_after = bisect_left(starts.data, cut)  # requests that start before the cut
    on_boundary = starts.item(first_after) == cut
    first_of_rest = first_after if on_boundary else first_after - 1
    rest = batch.num_tokens - cut
    return SplitPlan(
        batch=batch,
        policy=policy,
        cut=cut,
        alignment=alignment,
        stages=(
            Stage(slice(0, cut), slice(0, first_after), cut, -(-cut // alignment) * alignment),
            Stage(
                slice(cut, batch.num_tokens),
                slice(first_of_rest, batch.num_reqs),
                rest,
                -(-rest // alignment) * alignment,
            ),
        ),
        cuts_request=not on_boundary,
    )


def nearest(low: int | None, high: int | None, goal_doubled: int) -> int | None:
    """Of two candidates the one nearer to ``goal_doubled / 2``; ties go to the later one."""
    if low is None or high is None:
        return high if low is None else low
    return high if 2 * high - goal_doubled <= goal_doubled - 2 * low else low


def _token_cut(batch: ScheduledBatch, alignment: int) -> int | None:
    """Multiple of ``alignment`` in (0, T) nearest to T / 2, ties to the later one."""
    tokens = batch.num_tokens
    low = tokens // (2 * alignment) * alignment
    high = low + alignment
    return nearest(low if low > 0 else None, high if high < tokens else None, tokens)


def _request_cut(batch: ScheduledBatch, alignment: int) -> int | None:
    """Inner request boundary nearest to T / 2, ties to the later one."""
    if batch.num_reqs == 1:
        return None
    inner = batch.query_start_loc[1:-1]
    place = int(np.searchsorted(2 * inner, batch.num_tokens))
    low = int(inner[place - 1]) if place > 0 else None
    high = int(inner[place]) if place < inner.size else None
    return nearest(low, high, batch.num_tokens)


_CUTS: dict[Policy, tuple[PlanPolicy, Callable[[ScheduledBatch, int], int | None], str, str]] = {
    "request": (
        "request_boundary",
        _request_cut,
        "one_request",
        "one request of {tokens} tokens has no inner request boundary",
    ),
    "token": (
        "token_balanced_tp",
        _token_cut,
        "no_aligned_cut",
        "no multiple of {alignment} lies inside the {tokens} real tokens",
    ),
}


def _whole(name: str, value: object, low: int) -> int:
    """``value`` as an int; raises :class:`PlanError`."""
    if type(value) is int and value >= low:
        return value
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < low:
        raise PlanError(f"{name} is {value!r}; it must be a whole number, {low} or more.")
    return int(value)


def plan_split(
    batch: ScheduledBatch,
    policy: Policy = "request",
    alignment: int = 1,
    min_tokens: int = 2,
) -> SplitPlan | Unsplit:
    """Cut a step into two stages, or say why it stays whole.

    ``token``: at the multiple of ``alignment`` nearest to half of the real tokens, ties to
    the later one.  ``request``: at the request boundary nearest to half.  ``alignment`` also
    sets what stage buffers are padded to (tokens).  Steps with fewer than ``min_tokens`` real
    tokens, steps of decodes only and single tokens are not split.

    Raises :class:`PlanError` for an unknown policy or numbers out of range.
    """
    if policy not in POLICIES:
        raise PlanError(f"policy is {policy!r}; allowed: {', '.join(map(repr, POLICIES))}.")
    alignment = _whole("alignment", alignment, 1)
    min_tokens = _whole("min_tokens", min_tokens, 1)
    tokens = batch.num_tokens
    if batch.is_decode_only:
        return Unsplit(batch, "decode_only", f"all {batch.num_reqs} requests are decoding")
    if tokens == 1:
        return Unsplit(batch, "one_token", "one real token cannot be split")
    if tokens < min_tokens:
        return Unsplit(
            batch, "below_min_tokens", f"{tokens} real tokens are fewer than {min_tokens}"
        )
    name, cut_of, reason, detail = _CUTS[policy]
    cut = cut_of(batch, alignment)
    if cut is None:
        return Unsplit(batch, reason, detail.format(tokens=tokens, alignment=alignment))
    return _plan(batch, name, cut, alignment)


def split_at(batch: ScheduledBatch, cut: int, alignment: int = 1) -> SplitPlan:
    """Cut at a given token, for tests and replays.

    ``cut``: first token of stage 1, inside (0, num_tokens); it need not be a multiple of
    ``alignment``, to which stage buffers are padded.  Raises :class:`PlanError`.
    """
    alignment = _whole("alignment", alignment, 1)
    if not isinstance(cut, int | np.integer) or isinstance(cut, bool):
        raise PlanError(f"cut is {cut!r}; it must be a whole number of tokens.")
    if not 0 < cut < batch.num_tokens:
        raise PlanError(
            f"cut is {cut}; it must lie inside (0, {batch.num_tokens}), "
            "so that both stages have a real token."
        )
    return _plan(batch, "given", int(cut), alignment)
