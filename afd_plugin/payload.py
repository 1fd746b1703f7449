"""Routing as it travels from the attention side to the experts' side: checked, packed, restored.

Symbols: R rows (padding included), K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from afd_plugin.errors import RoutingPayloadError
from afd_plugin.wire import (
    HEADER_BYTES,
    LAYOUTS,
    LOGIT_DTYPES,
    Header,
    Layout,
    Packed,
    need,
    over_bytes,
    read_header,
    write_header,
)

__all__ = [
    "EXACT_IDS",
    "HEADER_BYTES",
    "LAYOUTS",
    "LOGIT_DTYPES",
    "ExpertOrder",
    "Layout",
    "Packed",
    "RoutingPayload",
    "as_rows",
    "by_experts",
    "expert_order",
    "from_rows",
    "restore",
    "unpack",
]

EXACT_IDS = 2**24  # whole numbers below it are exact in float32


@dataclass(frozen=True, eq=False)
class RoutingPayload:
    """Which experts each row goes to, and with what weight.

    ``ids``: [R, K] int32 expert ids.  ``weights``: [R, K] float32.  ``num_tokens``: the first so
    many rows are real, the others padding.  ``layout``: rows are tokens in ``batch`` order, or
    single assignments by ``experts`` (K is 1).  ``logits``: [R, E] of a floating type, or none.
    All contiguous and on one device.  Of values nothing is read here: that would wait for a
    device.

    Raises :class:`RoutingPayloadError` at construction.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    num_tokens: int
    layout: Layout = "batch"
    logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_tensor("ids", self.ids, (torch.int32,))
        _check_tensor("weights", self.weights, (torch.float32,))
        need(
            self.weights.shape == self.ids.shape,
            f"weights are {list(self.weights.shape)} and ids {list(self.ids.shape)}; they must "
            "have one shape, [rows, experts a token]",
        )
        if self.logits is not None:
            _check_tensor("logits", self.logits, LOGIT_DTYPES)
            need(
                self.logits.shape[0] == self.rows,
                f"logits have {self.logits.shape[0]} rows and ids {self.rows}; give one row each",
            )
        for name, tensor in (("weights", self.weights), ("logits", self.logits)):
            need(
                tensor is None or tensor.device == self.ids.device,
                f"{name} are on {None if tensor is None else tensor.device} and ids on "
                f"{self.ids.device}; move them to one device",
            )
        need(
            type(self.num_tokens) is int and 0 <= self.num_tokens <= self.rows,
            f"num_tokens is {self.num_tokens!r}; allowed are 0 to the {self.rows} rows. Give how "
            "many of them are real, as a whole number",
        )
        need(
            self.layout in LAYOUTS,
            f"layout is {self.layout!r}; allowed are {', '.join(map(repr, LAYOUTS))}. Give one of "
            "them",
        )
        need(
            self.layout == "batch" or self.top_k == 1,
            f"rows by experts are single assignments, and these name {self.top_k} experts; use "
            "layout 'batch'",
        )

    @property
    def rows(self) -> int:
        """R."""
        return int(self.ids.shape[0])

    @property
    def top_k(self) -> int:
        """K."""
        return int(self.ids.shape[1])

    def padded(self, rows: int) -> RoutingPayload:
        """A copy without logits that has ``rows`` rows; new ones have weight 0.

        Their experts are 0 to K - 1: operators that exchange tokens want those of a row to differ.
        Raises :class:`RoutingPayloadError` for fewer rows than there are.
        """
        more = rows - self.rows
        need(more >= 0, f"{self.rows} rows do not fit {rows}; pad to as many or more")
        return RoutingPayload(
            ids=torch.cat([self.ids, _choices(self.ids).expand(more, -1)]),
            weights=torch.nn.functional.pad(self.weights, (0, 0, 0, more)),
            num_tokens=self.num_tokens,
            layout=self.layout,
        )

    def pack(self) -> Packed:
        """A small header and the tensors' own storage: nothing is copied."""
        logits = self.logits
        header = write_header(
            Header(
                self.layout,
                None if logits is None else logits.dtype,
                self.rows,
                self.num_tokens,
                self.top_k,
                0 if logits is None else int(logits.shape[1]),
            )
        )
        tensors = [self.ids, self.weights, *([] if logits is None else [logits])]
        return Packed(header, tuple(tensor.view(-1).view(torch.uint8) for tensor in tensors))


def unpack(header: bytes, buffers: Sequence[torch.Tensor]) -> RoutingPayload:
    """The payload whose tensors are views over the received ``buffers``.

    Raises :class:`RoutingPayloadError` where the header is not whole, or the buffers are not what
    it announces.
    """
    announced = read_header(header)
    kinds = [
        ("ids", torch.int32, announced.top_k),
        ("weights", torch.float32, announced.top_k),
    ]
    if announced.logits is not None:
        kinds.append(("logits", announced.logits, announced.experts))
    need(
        len(buffers) == len(kinds),
        f"{len(buffers)} buffers arrived; the header announces {len(kinds)}: "
        f"{', '.join(name for name, _, _ in kinds)}. Give all that were packed, in order",
    )
    found = {
        name: over_bytes(name, buffer, kind, announced.rows, columns)
        for (name, kind, columns), buffer in zip(kinds, buffers, strict=True)
    }
    return RoutingPayload(**found, num_tokens=announced.num_tokens, layout=announced.layout)


class ExpertOrder(NamedTuple):
    """Assignments sorted by expert-parallel rank, then expert, then token and choice.

    ``assignments``: [R * K] int64; place i holds assignment ``assignments[i]``, which is choice
    ``assignments[i] % K`` of row ``assignments[i] // K``.  ``counts``: assignments of each rank.
    """

    assignments: torch.Tensor
    counts: tuple[int, ...]
    top_k: int

    @property
    def tokens(self) -> torch.Tensor:
        """[R * K] int64: the row that each place's assignment is of."""
        return self.assignments // max(self.top_k, 1)


def expert_order(payload: RoutingPayload, expert_ranks: Sequence[int], ranks: int) -> ExpertOrder:
    """How the assignments of ``payload`` lie on the experts' side.

    ``expert_ranks``: for each expert the rank, of ``ranks``, that holds it.
    Raises :class:`RoutingPayloadError` for ids outside of the experts, or ranks that do not exist.
    """
    experts = len(expert_ranks)
    need(
        experts >= 1 and ranks >= 1,
        f"{experts} experts on {ranks} ranks hold nothing; there must be 1 or more of each. Name "
        "for every expert of the layer the rank that holds it",
    )
    need(
        all(type(rank) is int and 0 <= rank < ranks for rank in expert_ranks),
        f"experts are held by ranks {sorted(set(expert_ranks), key=str)}; allowed are 0 to "
        f"{ranks - 1}. Give ranks of the group that holds the experts, as whole numbers",
    )
    _check_ids(payload.ids, experts)
    ids = payload.ids.reshape(-1).to(torch.int64)
    held = torch.tensor(expert_ranks, dtype=torch.int64, device=ids.device)[ids]
    assignments = torch.argsort(held * experts + ids, stable=True)
    counts = torch.bincount(held, minlength=ranks)
    return ExpertOrder(assignments, tuple(int(count) for count in counts), payload.top_k)


def by_experts(payload: RoutingPayload, order: ExpertOrder) -> RoutingPayload:
    """One row an assignment, in ``order``; every assignment counts as real.

    Raises :class:`RoutingPayloadError` for the order of a payload of another shape.
    """
    need(
        order.top_k == payload.top_k and order.assignments.numel() == payload.ids.numel(),
        f"an order of {order.assignments.numel()} assignments, {order.top_k} a row, does not fit "
        f"{payload.rows} rows that name {payload.top_k} experts; give the order of this payload",
    )
    return RoutingPayload(
        ids=payload.ids.reshape(-1, 1)[order.assignments],
        weights=payload.weights.reshape(-1, 1)[order.assignments],
        num_tokens=int(order.assignments.numel()),
        layout="experts",
    )


def restore(order: ExpertOrder, rows: torch.Tensor) -> torch.Tensor:
    """[R, K, ...] from [R * K, ...] in ``order``: the exact inverse.

    Raises :class:`RoutingPayloadError` for another number of rows.
    """
    count = int(order.assignments.numel())
    need(
        rows.dim() >= 1 and rows.shape[0] == count,
        f"{list(rows.shape)} rows came back of {count} assignments; give one row each",
    )
    restored = torch.empty_like(rows)
    restored[order.assignments] = rows
    return restored.view(count // max(order.top_k, 1), order.top_k, *rows.shape[1:])


def as_rows(payload: RoutingPayload, num_experts: int) -> torch.Tensor:
    """[R, 2 K] float32, for engines that move a row of numbers a token: weights, then experts.

    Experts are counted from the number of the choice, modulo ``num_experts``, so that a row of
    zeros, as engines pad with, has weight 0 and the experts 0 to K - 1, which differ.
    Ids are looked at, which waits for a device once: what is no expert would come back as one.
    Raises :class:`RoutingPayloadError` for ids outside of the experts, or for more experts than
    float32 can number.
    """
    _check_numbered(payload.top_k, num_experts)
    _check_ids(payload.ids, num_experts)
    counted = (payload.ids - _choices(payload.ids)) % num_experts
    return torch.cat([payload.weights, counted.to(torch.float32)], dim=1)


def from_rows(rows: torch.Tensor, num_experts: int) -> RoutingPayload:
    """The inverse of :func:`as_rows`, for whichever rows there are now; all count as real.

    Waits for a device once, as that does.
    Raises :class:`RoutingPayloadError` for what it cannot have made.
    """
    need(
        rows.dim() == 2
        and rows.dtype == torch.float32
        and rows.shape[1] > 0
        and rows.shape[1] % 2 == 0,
        f"rows are {list(rows.shape)} of {rows.dtype}; they must be [rows, 2 x experts a token] of "
        "torch.float32. Give what as_rows made, padded or not",
    )
    weights, counted = rows.chunk(2, dim=1)
    _check_numbered(counted.shape[1], num_experts)
    is_id = (counted >= 0) & (counted < num_experts) & (counted == counted.floor())
    if not bool(is_id.all()):
        row, choice = (~is_id).nonzero()[0].tolist()
        raise RoutingPayloadError(
            f"row {row} names {float(counted[row, choice])} as its expert {choice}; allowed are "
            f"whole numbers from 0 to {num_experts - 1}. The rows did not arrive as as_rows made "
            "them: check what padded or moved them."
        )
    ids = counted.to(torch.int32)
    return RoutingPayload(
        ids=((ids + _choices(ids)) % num_experts).contiguous(),
        weights=weights.contiguous(),
        num_tokens=int(rows.shape[0]),
    )


def _choices(ids: torch.Tensor) -> torch.Tensor:
    """[1, K] int32: 0 to K - 1."""
    return torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)[None]


def _check_numbered(top_k: int, num_experts: int) -> None:
    need(
        type(num_experts) is int and top_k <= num_experts <= EXACT_IDS,
        f"{num_experts} experts cannot be numbered in float32 for rows that name {top_k}; allowed "
        f"are {top_k} to {EXACT_IDS}. Give the layer's number of experts, as a whole number",
    )


def _check_ids(ids: torch.Tensor, num_experts: int) -> None:
    """Raises :class:`RoutingPayloadError` for [R, K] ``ids`` outside of the experts; waits."""
    outside = (ids < 0) | (ids >= num_experts)
    if bool(outside.any()):
        row, choice = outside.nonzero()[0].tolist()
        raise RoutingPayloadError(
            f"row {row} goes to expert {int(ids[row, choice])}; allowed are 0 to "
            f"{num_experts - 1}. Route among the experts of this layer."
        )


def _check_tensor(name: str, tensor: object, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise RoutingPayloadError(f"{name} are {type(tensor).__name__}; give a torch.Tensor.")
    need(
        tensor.dtype in dtypes,
        f"{name} are {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}. Convert them first",
    )
    need(
        tensor.dim() == 2 and tensor.shape[1] > 0,
        f"{name} have shape {list(tensor.shape)}; they must be [rows, 1 or more]. Give one "
        "row a token",
    )
    need(
        tensor.is_contiguous(),
        f"{name} of shape {list(tensor.shape)} have strides {list(tensor.stride())}; they must be "
        "contiguous. Call contiguous() first",
    )
