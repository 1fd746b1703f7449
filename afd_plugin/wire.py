"""The bytes of a routing payload: a header that tells what its buffers are, and those buffers."""

from __future__ import annotations

import struct
import zlib
from typing import Literal, NamedTuple

import torch

from afd_plugin.errors import RoutingPayloadError

Layout = Literal["batch", "experts"]
LAYOUTS: tuple[Layout, ...] = ("batch", "experts")
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


class Header(NamedTuple):
    """What a header tells.  ``logits``: their dtype, and ``experts`` how many; none and 0."""

    layout: Layout
    logits: torch.dtype | None
    rows: int
    num_tokens: int
    top_k: int
    experts: int


def need(ok: bool, text: str) -> None:
    """Raises :class:`RoutingPayloadError` with ``text`` and a full stop, unless ``ok``."""
    if not ok:
        raise RoutingPayloadError(f"{text}.")


def write_header(header: Header) -> bytes:
    """:data:`HEADER_BYTES` bytes, a checksum last."""
    fields = _HEADER.pack(
        _MAGIC,
        _VERSION,
        LAYOUTS.index(header.layout),
        0 if header.logits is None else 1 + LOGIT_DTYPES.index(header.logits),
        header.rows,
        header.num_tokens,
        header.top_k,
        header.experts,
    )
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def read_header(given: object) -> Header:
    """What :func:`write_header` wrote.  Raises :class:`RoutingPayloadError` for anything else."""
    if not isinstance(given, (bytes, bytearray, memoryview)):
        raise RoutingPayloadError(
            f"the header is {type(given).__name__}; it must be bytes. Give those that arrived."
        )
    header = bytes(given)
    need(
        len(header) == HEADER_BYTES,
        f"the header has {len(header)} bytes; a routing payload's has {HEADER_BYTES}. Give it "
        "whole",
    )
    fields, (checksum,) = header[: _HEADER.size], _CHECKSUM.unpack(header[_HEADER.size :])
    magic, version, layout, dtype, rows, tokens, top_k, experts = _HEADER.unpack(fields)
    need(
        magic == _MAGIC,
        f"the header begins with {magic!r}; a routing payload's with {_MAGIC!r}. Give its own",
    )
    need(
        version == _VERSION,
        f"the header has version {version}; this side reads {_VERSION}. Run one release on both",
    )
    need(
        checksum == zlib.crc32(fields),
        "the header's checksum is wrong: it arrived damaged. Check the transport",
    )
    need(
        layout < len(LAYOUTS) and dtype <= len(LOGIT_DTYPES),
        f"the header has layout {layout} and logits of type {dtype}; this side knows "
        f"{len(LAYOUTS)} layouts and {len(LOGIT_DTYPES)} types. Run one release on both",
    )
    need(
        top_k >= 1 and (experts >= 1) == (dtype > 0),
        f"the header has {top_k} experts a token, and logits of type {dtype} for {experts} "
        "experts; there is 1 or more a token, and logits have a type and experts or neither. "
        "Check who packed it",
    )
    return Header(
        LAYOUTS[layout],
        LOGIT_DTYPES[dtype - 1] if dtype else None,
        rows,
        tokens,
        top_k,
        experts,
    )


def over_bytes(
    name: str, buffer: object, dtype: torch.dtype, rows: int, columns: int
) -> torch.Tensor:
    """[rows, columns] of ``dtype`` over the bytes in ``buffer``, without a copy.

    Raises :class:`RoutingPayloadError` where they are not just these.
    """
    size = rows * columns * dtype.itemsize
    if not isinstance(buffer, torch.Tensor):
        raise RoutingPayloadError(
            f"the buffer of {name} is {type(buffer).__name__}; give a torch.Tensor over the bytes."
        )
    need(
        buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous(),
        f"the buffer of {name} is {list(buffer.shape)} of {buffer.dtype}; it must be flat, "
        "contiguous torch.uint8. View the received bytes so",
    )
    need(
        buffer.numel() == size,
        f"the buffer of {name} has {buffer.numel()} bytes; [{rows}, {columns}] of {dtype} has "
        f"{size}. Give each buffer whole, in the order in which they were packed",
    )
    if size == 0:  # an empty buffer has no stride that a view could start from
        return buffer.new_empty((rows, columns), dtype=dtype)
    # Storage over memory of someone else may itself begin anywhere.
    begin, address = buffer.storage_offset(), buffer.data_ptr()
    need(
        begin % dtype.itemsize == 0 and address % dtype.itemsize == 0,
        f"the buffer of {name} begins at byte {begin} of its storage, at address {address:#x}; "
        f"{dtype} needs multiples of {dtype.itemsize}. Receive it into memory of its own",
    )
    return buffer.view(dtype).view(rows, columns)
