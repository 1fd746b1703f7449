"""How one field of attention metadata becomes two: the vocabulary of field rules.

A rule maps a parent's value to the values of stage 0 and stage 1.  Tables of rules for the
pinned upstream classes live in ``compat``; ``metadata`` applies them.  Small vectors that are
on the CPU are computed in numpy, which costs a third of as many tensor operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from afd_plugin.errors import MetadataMismatch, RefusedField
from afd_plugin.plan import SplitPlan

Pair = tuple[Any, Any]


class Pieces:
    """Integers of a plan that rules need, worked out once for all fields."""

    __slots__ = ("cut", "lead", "max_query_len", "num_reqs", "num_tokens", "owed", "plan", "rest")

    def __init__(self, plan: SplitPlan) -> None:
        batch, (first, second) = plan.batch, plan.stages
        starts, scheduled = batch.query_start_loc, batch.num_scheduled_tokens
        self.plan = plan
        self.cut = plan.cut
        self.num_tokens = batch.num_tokens
        self.num_reqs = batch.num_reqs
        self.lead = first.request_slice.stop  # requests of stage 0
        self.rest = second.request_slice.start  # first request of stage 1
        # Tokens that the cut request, last of stage 0, still owes to stage 1.
        self.owed = int(starts[self.lead]) - plan.cut
        self.max_query_len = (
            self._longest(scheduled[: self.lead], -1, plan.cut - int(starts[self.lead - 1])),
            self._longest(scheduled[self.rest :], 0, int(starts[self.rest + 1]) - plan.cut),
        )

    @staticmethod
    def _longest(lengths: NDArray[np.int64], end: int, piece: int) -> int:
        """Largest of ``lengths`` when the one at ``end`` (0 or -1) counts as ``piece``."""
        others = lengths[1:] if end == 0 else lengths[:-1]
        return max(piece, largest(others)) if others.size else piece


def largest(values: NDArray[Any]) -> int:
    """Maximum of a non-empty vector; a third of the call overhead of ``ndarray.max``."""
    return int(np.maximum.reduce(values))


def on_cpu(value: Any) -> NDArray[Any] | None:
    """The numpy view of a CPU tensor or array, ``None`` for a device tensor."""
    if isinstance(value, np.ndarray):
        return value
    if value.device.type == "cpu":
        view: NDArray[Any] = value.numpy()
        return view
    return None


def _like(value: Any, array: NDArray[Any]) -> Any:
    """``array`` as the kind of thing that ``value`` is."""
    return array if isinstance(value, np.ndarray) else torch.from_numpy(array)


class Rule(Protocol):
    """One field's rule."""

    def __call__(self, name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
        """Values of both stages.  Raises :class:`MetadataError` subclasses naming ``name``."""
        ...


def _need(name: str, value: Any, length: int, what: str, axis: int = 0) -> None:
    if value.ndim == 0 or value.shape[axis] < length:
        raise MetadataMismatch(
            f"field {name} has shape {tuple(value.shape)}; axis {axis} must hold the {length} "
            f"{what} of the batch. Build the metadata for the same batch as the plan."
        )


def per_request(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= R, ...] rows of the requests of each stage; the cut request's row goes to both."""
    if value is None:
        return None, None
    _need(name, value, pieces.num_reqs, "requests")
    return value[: pieces.lead], value[pieces.rest : pieces.num_reqs]


def per_request_if_array(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """A scalar holds for both stages; an array is cut by request."""
    if value is None or isinstance(value, bool | int):
        return value, value
    return per_request(name, value, parent, pieces)


def sequence_lengths(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= R] tokens up to the end of each piece: the cut request's first piece ends at the cut.

    Both results own their storage, since consumers adjust lengths in place.
    """
    if value is None:
        return None, None
    _need(name, value, pieces.num_reqs, "requests")
    view = on_cpu(value)
    if view is None:
        first = value[: pieces.lead].clone()
        second = value[pieces.rest : pieces.num_reqs].clone()
        if pieces.owed:
            first[-1:] -= pieces.owed
        return first, second
    lead = view[: pieces.lead].copy()
    lead[-1] -= pieces.owed
    return _like(value, lead), _like(value, view[pieces.rest : pieces.num_reqs].copy())


def query_offsets(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= R + 1] offsets, rebased to each stage's first token; both results own their storage."""
    if value is None:
        return None, None
    _need(name, value, pieces.num_reqs + 1, "offsets")
    view = on_cpu(value)
    if view is None:
        first = value[: pieces.lead + 1].clip(max=pieces.cut)
        return first, (value[pieces.rest : pieces.num_reqs + 1] - pieces.cut).clip(min=0)
    lead = view[: pieces.lead + 1].copy()
    lead[-1] = pieces.cut
    rest = view[pieces.rest : pieces.num_reqs + 1] - pieces.cut
    rest[0] = 0
    return _like(value, lead), _like(value, rest)


def per_token(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= T, ...] real tokens of each stage; padding rows of the parent are left out."""
    if value is None:
        return None, None
    _need(name, value, pieces.num_tokens, "tokens")
    return value[: pieces.cut], value[pieces.cut : pieces.num_tokens]


def positions(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= T] or [N, >= T] absolute positions: the token axis is the last; never shifted."""
    if value is None:
        return None, None
    _need(name, value, pieces.num_tokens, "tokens", axis=-1)
    return value[..., : pieces.cut], value[..., pieces.cut : pieces.num_tokens]


def carried(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """The same value for both stages: it does not depend on which tokens are there."""
    return value, value


def dropped(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """A private cache: both stages start without and recompute it for their own content."""
    return None, None


def num_reqs(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """Requests with a token in the stage."""
    return pieces.lead, pieces.num_reqs - pieces.rest


def num_real_tokens(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """Real tokens of the stage, never its padded extent."""
    return pieces.cut, pieces.num_tokens - pieces.cut


def max_query_len(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """Longest query piece of the stage."""
    return pieces.max_query_len


def max_seq_len(bound_field: str) -> Rule:
    """Longest sequence of the stage, from the per-request upper bounds in ``bound_field``.

    Where the parent has no bounds, the batch's own computed + scheduled tokens are used.
    """

    def rule(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
        bounds = getattr(parent, bound_field)
        batch = pieces.plan.batch
        lens = None if bounds is None else on_cpu(bounds)
        lens = batch.seq_lens if lens is None else lens[: batch.num_reqs]
        lead = int(lens[pieces.lead - 1]) - pieces.owed
        if pieces.lead > 1:
            lead = max(lead, largest(lens[: pieces.lead - 1]))
        return lead, largest(lens[pieces.rest :])

    return rule


@dataclass(frozen=True)
class refused:  # noqa: N801 - reads as a rule in the tables
    """A field that must be unset: its value for one stage cannot be derived from the parent's."""

    why: str
    remedy: str
    unset: Callable[[Any], bool] = lambda value: value is None

    def __call__(self, name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
        if not self.unset(value):
            raise RefusedField(
                f"field {name} is set, but {self.why}; it must be unset. {self.remedy}"
            )
        return value, value
