"""What rules need of a plan, and the refusal of metadata that describe another step.

Small vectors that are on the CPU are computed in numpy, which costs a third of as many tensor
operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from afd_plugin.errors import MetadataMismatch
from afd_plugin.plan import SplitPlan


class Pieces:
    """What rules need of a plan, worked out once for all fields.

    ``requests``, ``tokens``: the slices of both stages, as in the plan's stages.
    ``cut``: first token of stage 1.  ``owed``: tokens that the cut request, last of stage 0,
    leaves to stage 1.  ``max_query_len``: longest query piece of each stage.
    """

    __slots__ = (
        "_views",
        "cut",
        "max_query_len",
        "num_reqs",
        "num_tokens",
        "owed",
        "plan",
        "requests",
        "tokens",
    )

    def __init__(self, plan: SplitPlan) -> None:
        batch, (first, second) = plan.batch, plan.stages
        self.plan = plan
        self.cut = plan.cut
        self.num_tokens = batch.num_tokens
        self.num_reqs = batch.num_reqs
        self.requests = first.request_slice, second.request_slice
        self.tokens = first.token_slice, second.token_slice
        starts, scheduled = batch.starts_i32, batch.scheduled_i32
        lead, rest = first.request_slice.stop, second.request_slice.start
        self.owed = starts.item(lead) - plan.cut
        piece = starts.item(rest + 1) - plan.cut
        self.max_query_len = (
            longest_with_last_cut(scheduled[:lead], self.owed),
            max(piece, largest(scheduled[rest + 1 :])) if rest + 1 < batch.num_reqs else piece,
        )
        self._views: dict[int, NDArray[Any] | None] = {}

    def view(self, value: Any) -> NDArray[Any] | None:
        """:func:`on_cpu` of a field's value, made once for all rules that read the field."""
        key = id(value)  # the parent keeps its values alive
        if key not in self._views:
            self._views[key] = on_cpu(value)
        return self._views[key]


def largest(values: NDArray[Any]) -> int:
    """Maximum of a non-empty vector, at half of the cost of ``values.max()``."""
    maximum: int = values.item(values.argmax())
    return maximum


def longest_with_last_cut(lengths: NDArray[Any], owed: int) -> int:
    """Largest of the non-empty ``lengths`` when the last one is shorter by ``owed``."""
    last: int = lengths.item(-1) - owed
    return max(last, largest(lengths[:-1])) if lengths.size > 1 else last


def on_cpu(value: Any) -> NDArray[Any] | None:
    """The numpy view of a CPU tensor or array, ``None`` for a device tensor."""
    if isinstance(value, np.ndarray):
        return value
    if value.is_cpu:
        view: NDArray[Any] = value.numpy()
        return view
    return None


def _equal(values: NDArray[Any], expected: NDArray[np.int32], raw: bytearray) -> bool:
    """Whether both hold the same numbers; ``raw``: the bytes of ``expected``.

    A bytearray compares with a buffer in place, which costs a fifth of comparing elements;
    it differs from a strided one, whatever that holds.
    """
    if values.dtype == expected.dtype and raw == values.data:
        return True
    return np.array_equal(values, expected)


def match_offsets(offsets: NDArray[Any], pieces: Pieces) -> None:
    """Refuse offsets of another step, and padding rows that hold anything but padding."""
    batch = pieces.plan.batch
    # Rows of padding are empty, or one of them holds the buffer's padding, which vLLM-Ascend
    # adds where a kernel wants the offsets to end with the buffer.
    extra = offsets[batch.num_reqs + 1 :]
    if not _equal(offsets[: batch.num_reqs + 1], batch.starts_i32, batch.starts_raw) or (
        extra.size and not np.isin(extra, (batch.num_tokens, batch.num_input_tokens)).all()
    ):
        raise MetadataMismatch(
            f"query_start_loc {short(offsets)} does not match the batch of the plan, "
            f"{short(batch.query_start_loc)}. Plan and metadata must describe the same step."
        )


def match_lengths(name: str, lens: NDArray[Any], pieces: Pieces) -> None:
    """Refuse lengths of another step: exact for prefilling rows, maybe higher for decodes."""
    batch = pieces.plan.batch
    lens = lens[: batch.num_reqs]
    if _equal(lens, batch.lens_i32, batch.lens_raw):
        return
    if (
        lens.shape != batch.seq_lens.shape
        or ((lens < batch.seq_lens) | (batch.is_prefilling & (lens != batch.seq_lens))).any()
    ):
        raise MetadataMismatch(
            f"{name} {short(lens)} does not match computed + scheduled "
            f"tokens of the batch, {short(batch.seq_lens)}."
        )


def short(values: Any) -> str:
    """A vector as a message shows it."""
    listed = np.asarray(values).tolist()
    return str(listed) if len(listed) <= 12 else f"{str(listed[:12])[:-1]}, … {len(listed)} in all]"
