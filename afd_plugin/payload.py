"""Routing as it travels from the attention side to the experts' side: checked, packed, restored.

Symbols: R rows (padding included), K experts a token, E experts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from afd_plugin.errors import RoutingPayloadError

Layout = Literal["batch", "experts"]
LAYOUTS: tuple[Layout, ...] = ("batch", "experts")
EXACT_IDS = 2**24  # whole numbers below it are exact in float32
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# magic, version, layout, dtype of logits (0: none), rows, real tokens, K, E; then their checksum
_HEADER = struct.Struct("<4sHBBQQII")
_CHECKSUM = struct.Struct("<I")
_MAGIC, _VERSION = b"AFDR", 1
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


class Packed(NamedTuple):
    """``header``: :data:`HEADER_BYTES` bytes.  ``buffers``: 1-D uint8 tensors, ids first."""

    header: bytes
    buffers: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """All that travels."""
        return len(self.header) + sum(int(buffer.numel()) for buffer in self.buffers)


@dataclass(frozen=True)
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
        _need(
            self.weights.shape == self.ids.shape,
            f"weights are {list(self.weights.shape)} and ids {list(self.ids.shape)}; they must "
            "have one shape, [rows, experts a token]",
        )
        if self.logits is not None:
            _check_tensor("logits", self.logits, LOGIT_DTYPES)
            _need(
                self.logits.shape[0] == self.rows,
                f"logits have {self.logits.shape[0]} rows and ids {self.rows}; give one row each",
            )
        for name, tensor in (("weights", self.weights), ("logits", self.logits)):
            _need(
                tensor is None or tensor.device == self.ids.device,
                f"{name} are on {None if tensor is None else tensor.device} and ids on "
                f"{self.ids.device}; move them to one device",
            )
        _need(
            0 <= self.num_tokens <= self.rows,
            f"num_tokens is {self.num_tokens}; allowed are 0 to the {self.rows} rows",
        )
        _need(
            self.layout in LAYOUTS,
            f"layout is {self.layout!r}; allowed are {', '.join(map(repr, LAYOUTS))}",
        )
        _need(
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
        _need(more >= 0, f"{self.rows} rows do not fit {rows}; pad to as many or more")
        return RoutingPayload(
            ids=torch.cat([self.ids, _choices(self.ids).expand(more, -1)]),
            weights=torch.nn.functional.pad(self.weights, (0, 0, 0, more)),
            num_tokens=self.num_tokens,
            layout=self.layout,
        )

    def pack(self) -> Packed:
        """A small header and the tensors' own storage: nothing is copied."""
        logits = self.logits
        fields = _HEADER.pack(
            _MAGIC,
            _VERSION,
            LAYOUTS.index(self.layout),
            0 if logits is None else 1 + LOGIT_DTYPES.index(logits.dtype),
            self.rows,
            self.num_tokens,
            self.top_k,
            0 if logits is None else logits.shape[1],
        )
        tensors = [self.ids, self.weights, *([] if logits is None else [logits])]
        return Packed(
            fields + _CHECKSUM.pack(zlib.crc32(fields)),
            tuple(tensor.view(-1).view(torch.uint8) for tensor in tensors),
        )


def unpack(header: bytes, buffers: Sequence[torch.Tensor]) -> RoutingPayload:
    """The payload whose tensors are views over the received ``buffers``.

    Raises :class:`RoutingPayloadError` where the header is not whole, or the buffers are not what
    it announces.
    """
    layout, dtype, rows, num_tokens, top_k, experts = _read_header(header)
    kinds = [("ids", torch.int32, top_k), ("weights", torch.float32, top_k)]
    if dtype is not None:
        kinds.append(("logits", dtype, experts))
    _need(
        len(buffers) == len(kinds),
        f"{len(buffers)} buffers arrived; the header announces {len(kinds)}: "
        f"{', '.join(name for name, _, _ in kinds)}",
    )
    found = {
        name: _typed(name, buffer, kind, rows, columns)
        for (name, kind, columns), buffer in zip(kinds, buffers, strict=True)
    }
    return RoutingPayload(**found, num_tokens=num_tokens, layout=layout)


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
    holders = torch.tensor(list(expert_ranks), dtype=torch.int64, device=payload.ids.device)
    experts = holders.numel()
    _need(
        bool(((holders >= 0) & (holders < ranks)).all()),
        f"experts are held by ranks {sorted(set(expert_ranks))}; allowed are 0 to {ranks - 1}",
    )
    ids = payload.ids.reshape(-1).to(torch.int64)
    outside = (ids < 0) | (ids >= experts)
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        raise RoutingPayloadError(
            f"row {place // payload.top_k} goes to expert {int(ids[place])}; allowed are 0 to "
            f"{experts - 1}"
        )
    held = holders[ids]
    assignments = torch.argsort(held * experts + ids, stable=True)
    counts = torch.bincount(held, minlength=ranks)
    return ExpertOrder(assignments, tuple(int(count) for count in counts), payload.top_k)


def by_experts(payload: RoutingPayload, order: ExpertOrder) -> RoutingPayload:
    """One row an assignment, in ``order``; every assignment counts as real."""
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
    _need(
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
    Raises :class:`RoutingPayloadError` for more experts than float32 can number.
    """
    _need(
        payload.top_k <= num_experts <= EXACT_IDS,
        f"{num_experts} experts cannot be numbered in float32 for rows that name {payload.top_k}; "
        f"allowed are {payload.top_k} to {EXACT_IDS}",
    )
    counted = (payload.ids - _choices(payload.ids)) % num_experts
    return torch.cat([payload.weights, counted.to(torch.float32)], dim=1)


def from_rows(rows: torch.Tensor, num_experts: int) -> RoutingPayload:
    """The inverse of :func:`as_rows`, for whichever rows there are now; all count as real."""
    _need(
        rows.dim() == 2 and rows.dtype == torch.float32 and rows.shape[1] % 2 == 0,
        f"rows are {list(rows.shape)} of {rows.dtype}; they must be [rows, 2 x experts a token] of "
        "torch.float32",
    )
    weights, counted = rows.chunk(2, dim=1)
    ids = counted.to(torch.int32)
    return RoutingPayload(
        ids=((ids + _choices(ids)) % num_experts).contiguous(),
        weights=weights.contiguous(),
        num_tokens=int(rows.shape[0]),
    )


def _choices(ids: torch.Tensor) -> torch.Tensor:
    """[1, K] int32: 0 to K - 1."""
    return torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)[None]


def _need(ok: bool, text: str) -> None:
    if not ok:
        raise RoutingPayloadError(f"{text}.")


def _check_tensor(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    _need(
        tensor.dtype in dtypes,
        f"{name} are {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}. Convert them first",
    )
    _need(
        tensor.dim() == 2 and tensor.shape[1] > 0,
        f"{name} have shape {list(tensor.shape)}; they must be [rows, 1 or more]",
    )
    _need(
        tensor.is_contiguous(),
        f"{name} of shape {list(tensor.shape)} have strides {list(tensor.stride())}; they must be "
        "contiguous. Call contiguous() first",
    )


def _read_header(
    header: bytes,
) -> tuple[Layout, torch.dtype | None, int, int, int, int]:
    _need(
        len(header) == HEADER_BYTES,
        f"the header has {len(header)} bytes; a routing payload's has {HEADER_BYTES}",
    )
    fields, (checksum,) = header[: _HEADER.size], _CHECKSUM.unpack(header[_HEADER.size :])
    magic, version, layout, dtype, rows, tokens, top_k, experts = _HEADER.unpack(fields)
    _need(magic == _MAGIC, f"the header begins with {magic!r}; a routing payload's with {_MAGIC!r}")
    _need(
        version == _VERSION,
        f"the header has version {version}; this side reads {_VERSION}. Run one release on both",
    )
    _need(checksum == zlib.crc32(fields), "the header's checksum is wrong: it arrived damaged")
    _need(
        layout < len(LAYOUTS) and dtype <= len(LOGIT_DTYPES),
        f"the header has layout {layout} and logits of type {dtype}; this side knows "
        f"{len(LAYOUTS)} layouts and {len(LOGIT_DTYPES)} types",
    )
    return (
        LAYOUTS[layout],
        LOGIT_DTYPES[dtype - 1] if dtype else None,
        rows,
        tokens,
        top_k,
        experts,
    )


def _typed(
    name: str, buffer: torch.Tensor, dtype: torch.dtype, rows: int, columns: int
) -> torch.Tensor:
    """[rows, columns] of ``dtype`` over ``buffer``."""
    need = rows * columns * dtype.itemsize
    _need(
        buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous(),
        f"the buffer of {name} is {list(buffer.shape)} of {buffer.dtype}; it must be flat, "
        "contiguous torch.uint8",
    )
    _need(
        buffer.numel() == need,
        f"the buffer of {name} has {buffer.numel()} bytes; [{rows}, {columns}] of {dtype} has "
        f"{need}",
    )
    _need(
        buffer.storage_offset() % dtype.itemsize == 0,
        f"the buffer of {name} begins at byte {buffer.storage_offset()} of its storage; {dtype} "
        f"needs a multiple of {dtype.itemsize}",
    )
    if need == 0:  # an empty buffer has no stride that a view could start from
        return buffer.new_empty((rows, columns), dtype=dtype)
    return buffer.view(dtype).view(rows, columns)
