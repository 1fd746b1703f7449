"""How one field of attention metadata becomes two: the vocabulary of field rules.

A rule maps a parent's value to the values of stage 0 and stage 1.  Tables of rules for the
pinned upstream classes live in ``compat``; ``metadata`` applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from afd_plugin.errors import MetadataMismatch, RefusedField
from afd_plugin.pieces import (
    Pieces,
    largest,
    longest_with_last_cut,
    match_lengths,
    match_offsets,
    short,
)

Pair = tuple[Any, Any]


def _like(value: Any, first: NDArray[Any], second: NDArray[Any]) -> Pair:
    """Two new arrays as the kind of thing that ``value`` is."""
    if isinstance(value, np.ndarray):
        return first, second
    return torch.from_numpy(first), torch.from_numpy(second)


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
    first, second = pieces.requests
    return value[first], value[second]


def prefill_flags(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= R] whether each request is in its prompt; those of the plan's batch.

    A piece keeps its request's class: one token of a prompt is not a decode.  What is told apart
    by the batch's flags elsewhere must not contradict these.  Raises :class:`MetadataMismatch`.
    """
    pair = per_request(name, value, parent, pieces)
    flags = None if value is None else pieces.view(value)
    batch = pieces.plan.batch
    if flags is not None and not np.array_equal(flags[: batch.num_reqs], batch.is_prefilling):
        raise MetadataMismatch(
            f"{name} {short(flags[: batch.num_reqs])} does not match the batch of the plan, "
            f"{short(batch.is_prefilling)}. Give ScheduledBatch the step's flags: "
            "is_prefilling=[...]."
        )
    return pair


def per_request_if_array(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """A scalar holds for both stages; an array is cut by request."""
    if value is None or isinstance(value, int):  # a bool is an int
        return value, value
    return per_request(name, value, parent, pieces)


# ``metadata`` has compared these with the batch before any rule is asked.
_COMPARED = ("query_start_loc_cpu", "seq_lens_cpu_upper_bound")


def sequence_lengths(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= R] tokens up to the end of each piece: the cut request's first piece ends at the cut.

    Both results own their storage, since consumers adjust lengths in place.
    """
    if value is None:
        return None, None
    first, second = pieces.requests
    view = pieces.view(value)
    if view is None:
        _need(name, value, pieces.num_reqs, "requests")
        lead, rest = value[first].clone(), value[second].clone()
        if pieces.owed:
            lead[-1:] -= pieces.owed
        return lead, rest
    _need(name, view, pieces.num_reqs, "requests")
    if name not in _COMPARED:
        match_lengths(name, view, pieces)
    shorter = view[first].copy()
    if pieces.owed:
        shorter[-1] = shorter.item(-1) - pieces.owed
    return _like(value, shorter, view[second].copy())


def computed_tokens(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= R] tokens before each piece: the cut request's second piece starts after its first.

    Both results own their storage.
    """
    if value is None:
        return None, None
    _need(name, value, pieces.num_reqs, "requests")
    batch = pieces.plan.batch
    view = pieces.view(value)
    if view is not None and not np.array_equal(view[: pieces.num_reqs], batch.num_computed_tokens):
        raise MetadataMismatch(
            f"{name} {short(view[: pieces.num_reqs])} does not match the computed tokens of the "
            f"batch, {short(batch.num_computed_tokens)}."
        )
    first, second = pieces.requests
    if view is not None:
        lead, rest = _like(value, view[first].copy(), view[second].copy())
    else:
        lead, rest = value[first].clone(), value[second].clone()
    if pieces.owed:
        rest[:1] += batch.scheduled_i32.item(second.start) - pieces.owed
    return lead, rest


def query_offsets(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= R + 1] offsets, rebased to each stage's first token; both results own their storage."""
    if value is None:
        return None, None
    first = slice(0, pieces.requests[0].stop + 1)
    second = slice(pieces.requests[1].start, pieces.num_reqs + 1)
    view = pieces.view(value)
    if view is None:
        _need(name, value, pieces.num_reqs + 1, "offsets")
        return value[first].clip(max=pieces.cut), (value[second] - pieces.cut).clip(min=0)
    _need(name, view, pieces.num_reqs + 1, "offsets")
    if name not in _COMPARED:
        match_offsets(view, pieces)
    lead = view[first].copy()
    lead[-1] = pieces.cut
    rest = view[second] - pieces.cut
    rest[0] = 0
    return _like(value, lead, rest)


def per_token(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= T, ...] real tokens of each stage; padding rows of the parent are left out."""
    if value is None:
        return None, None
    _need(name, value, pieces.num_tokens, "tokens")
    first, second = pieces.tokens
    return value[first], value[second]


def positions(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """[>= T] or [N, >= T] absolute positions: the token axis is the last; never shifted."""
    if value is None:
        return None, None
    _need(name, value, pieces.num_tokens, "tokens", axis=-1)
    first, second = pieces.tokens
    if value.ndim == 1:  # the same, without the cost of an index tuple
        return value[first], value[second]
    return value[..., first], value[..., second]


def carried(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """The same value for both stages: it does not depend on which tokens are there."""
    return value, value


def dropped(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """A private cache: both stages start without and recompute it for their own content."""
    return None, None


def num_reqs(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """Requests with a token in the stage."""
    first, second = pieces.requests
    return first.stop, second.stop - second.start


def num_real_tokens(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """Real tokens of the stage, never its padded extent."""
    return pieces.cut, pieces.num_tokens - pieces.cut


def num_input_tokens(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """Rows of the stage's buffers, its own padding included."""
    first, second = pieces.plan.stages
    return first.num_input_tokens, second.num_input_tokens


def attention_state(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """vLLM-Ascend's attention state of each stage, from that stage's own content.

    ``value``: a member of ``AscendAttentionState``.  The step's state says of a stage neither
    more nor less than of the step: the second piece of a fresh prompt has context, and a kernel
    told ``PrefillNoCache`` would not look for it.  A stage without context is
    ``PrefillNoCache``; a stage of decodes of one token each is ``DecodeOnly``; any other reads its
    context through the block table, ``ChunkedPrefill``, or ``PrefillCacheHit`` where the step does.
    """
    states = type(value)
    if value is states["SpecDecoding"]:
        raise RefusedField(
            f"field {name} is {value}; speculative decoding has no state for a stage. "
            "Run without speculative decoding."
        )
    if value is states["DecodeOnly"]:
        return value, value  # whole requests of one token each
    batch = pieces.plan.batch
    general = value if value is states["PrefillCacheHit"] else states["ChunkedPrefill"]
    found = []
    for index, rows in enumerate(pieces.requests):
        has_context = bool(batch.num_computed_tokens[rows].any()) or (index == 1 and pieces.owed)
        if not has_context:
            found.append(states["PrefillNoCache"])
        elif pieces.max_query_len[index] == 1 and not batch.is_prefilling[rows].any():
            found.append(states["DecodeOnly"])
        else:
            found.append(general)
    return found[0], found[1]


def max_query_len(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
    """Longest query piece of the stage."""
    return pieces.max_query_len


def max_seq_len(bound_field: str) -> Rule:
    """Longest sequence of the stage, from the per-request upper bounds in ``bound_field``.

    Where the parent has no bounds, the batch's own computed + scheduled tokens are used.
    """

    def rule(name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
        bounds = getattr(parent, bound_field)
        lens = None if bounds is None else pieces.view(bounds)
        if lens is None:
            lens = pieces.plan.batch.lens_i32
        first, second = pieces.requests
        return longest_with_last_cut(lens[first], pieces.owed), largest(lens[second])

    return rule


def _is_none(value: Any) -> bool:
    return value is None


@dataclass(frozen=True)
class refused:  # noqa: N801 - reads as a rule in the tables
    """A field that must be unset: its value for one stage cannot be derived from the parent's."""

    why: str
    remedy: str
    unset: Callable[[Any], bool] = _is_none

    def __call__(self, name: str, value: Any, parent: Any, pieces: Pieces) -> Pair:
        if not self.unset(value):
            raise RefusedField(
                f"field {name} is set, but {self.why}; it must be unset. {self.remedy}"
            )
        return value, value


_NONE_STAYS: tuple[Rule, ...] = (
    per_request,
    per_request_if_array,
    sequence_lengths,
    computed_tokens,
    query_offsets,
    per_token,
    positions,
    carried,
    dropped,
)


def none_stays_none(rule: Rule) -> bool:
    """Whether ``rule`` gives ``None`` to both stages for ``None``, so that it need not be asked."""
    if isinstance(rule, refused):
        return rule.unset is _is_none
    return any(rule is known for known in _NONE_STAYS)
