"""Calls of an operator whose contract is judged: what is passed, and how it is copied.

Every run gets arguments of its own; one that is called twice gets two inputs in one storage.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from afd_testkit.bits import is_plain

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class OpCase:
    """One call: ``args`` and ``kwargs`` of the operator, under a ``name`` for messages.

    Every run gets deep copies, with the same strides and shared storage; these stay as they are.
    ``then``: arguments of a second call into the buffers of the first, with tensors of the same
    shapes.  Without it floating values are one larger then, integers stay between the smallest and
    the largest of their tensor (or one less than that where all are one positive number), booleans
    are the others: give it where the operator does not take that, for example sorted offsets.

    Raises :class:`TypeError` for one argument in the place of a tuple of them.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    then: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("args", "then"):
            given = getattr(self, name)
            if not isinstance(given, tuple | list) and not (name == "then" and given is None):
                raise TypeError(
                    f"case {self.name!r}: {name} is a {type(given).__qualname__}; it must be a "
                    "tuple of the operator's arguments. One argument is written (argument,)"
                )

    def copied(self) -> Arguments:
        """Arguments that a run may write to."""
        return copy.deepcopy((self.args, dict(self.kwargs)))

    def second(self) -> Arguments:
        """Arguments of a second call, in storage of their own that is laid out as the first's.

        Raises :class:`ValueError` where ``then`` does not fit into the buffers of ``args``.
        """
        args, kwargs = self.copied()
        if self.then is None:
            _change(tensors_of((args, kwargs)))
            return args, kwargs
        into, values = tensors_of(args), tensors_of(self.then)
        if [_form(tensor) for tensor in into] != [_form(tensor) for tensor in values]:
            raise ValueError(
                f"case {self.name!r}: `then` has tensors {[_form(t) for t in values]}, args has "
                f"{[_form(t) for t in into]}; give as many, of the same shapes and dtypes, since "
                "they are written into the same buffers"
            )
        with torch.no_grad():
            for buffer, tensor in zip(into, values, strict=True):
                buffer.copy_(tensor)
        return args, kwargs


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree of arguments or results, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def load(buffers: Any, values: Any) -> None:
    """Write what ``values`` hold into ``buffers``, which are laid out alike: storage by storage."""
    for buffer, value in zip(tensors_of(buffers), tensors_of(values), strict=True):
        _whole(buffer).copy_(_whole(value))


def check_arguments(op: torch._ops.OpOverload, case: OpCase) -> None:
    """Raises :class:`TypeError` for an argument that cannot be copied and compared."""
    named = {argument.name: place for place, argument in enumerate(op._schema.arguments)}
    places = dict(zip(named, case.args, strict=False)) | dict(case.kwargs)
    for name, value in places.items():
        for leaf in tree_leaves(value):
            if not (isinstance(leaf, torch.Tensor) or is_plain(leaf)):
                raise TypeError(
                    f"case {case.name!r}: argument {name!r} of {op} is or holds a "
                    f"{type(leaf).__qualname__}, which cannot be copied for each run and compared "
                    "to the bit; allowed are tensors, numbers, strings, None, torch's dtypes, "
                    "devices, layouts and memory formats, and lists of them. Leave the argument at "
                    "its default, or judge an operator without it"
                )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The storage behind ``tensor`` in one dimension, gaps and neighbours included."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)


def _change(tensors: list[torch.Tensor]) -> None:
    """Other values of the same kind, each storage once: views of it change alike."""
    changed = set()
    for tensor in tensors:
        place = tensor.untyped_storage().data_ptr()
        if tensor.numel() and place not in changed:
            changed.add(place)
            whole = _whole(tensor)
            whole.copy_(_others(whole, tensor.detach()))


def _others(whole: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """As many values as ``whole`` has, which fit where those of ``seen`` do."""
    if seen.dtype is torch.bool:
        return ~whole
    if seen.is_complex():
        return whole + 1
    if seen.is_floating_point():
        return whole.to(torch.float32 if seen.element_size() < 4 else seen.dtype) + 1
    low, high = (int(seen.to(torch.int64).aminmax()[place]) for place in (0, 1))
    if low == high:
        return whole - (1 if high > 0 else 0)
    return low + high - whole.to(torch.int64)
