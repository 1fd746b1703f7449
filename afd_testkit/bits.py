"""Where two trees of values differ, to the bit: -0.0 is not 0.0, and a NaN equals only itself.

A tree is what torch's pytree makes of it: tuples, lists and dictionaries of tensors and of the
plain values that an operator's schema knows.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

#: What stands in a tree beside tensors.
PLAIN = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def is_plain(value: object) -> bool:
    """Whether ``value`` is one of :data:`PLAIN`, and so can be compared."""
    return isinstance(value, PLAIN)


def difference(actual: Any, expected: Any) -> str:
    """Each place in which two trees differ, a line each; empty if they are equal to the bit."""
    ours, our_form = tree_flatten_with_path(actual)
    theirs, their_form = tree_flatten_with_path(expected)
    if our_form != their_form:
        return f"another structure: {our_form} instead of {their_form}"
    found = []
    for (place, mine), (_, other) in zip(ours, theirs, strict=True):
        if apart := _leaf(mine, other):
            found.append(f"at {keystr(place)}: {apart}" if place else apart)
    return "\n".join(found)


def _leaf(mine: Any, other: Any) -> str:
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        return _tensors(mine, other)
    if type(mine) is not type(other) or _key(mine) != _key(other):
        return f"{mine!r} instead of {other!r}"
    return ""


def _key(value: Any) -> Any:
    """What two equal plain values have in common, and others have not."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return value


def _tensors(mine: torch.Tensor, other: torch.Tensor) -> str:
    for what, a, b in (
        ("dtype", mine.dtype, other.dtype),
        ("shape", list(mine.shape), list(other.shape)),
        ("device", mine.device, other.device),
        ("layout", mine.layout, other.layout),
    ):
        if a != b:
            return f"{what} {a} instead of {b}"
    rows, their_rows = _bytes(mine), _bytes(other)
    apart = (rows != their_rows).any(dim=1).nonzero().flatten().tolist()
    if not apart:
        return ""
    first = apart[0]
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), mine.shape)]
    return (
        f"{len(apart)} of {mine.numel()} elements differ, first at {index}: "
        f"{_shown(mine, index, rows[first])} instead of {_shown(other, index, their_rows[first])}"
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[elements, bytes of one] of ``tensor``, on the host."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _shown(tensor: torch.Tensor, index: list[int], element: torch.Tensor) -> str:
    """Value and bits of one element."""
    bits = bytes(reversed(element.tolist())).hex()  # of a little-endian host, as all of torch's are
    return f"{tensor.detach()[tuple(index)].item()} (0x{bits})"
