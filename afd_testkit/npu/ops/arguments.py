"""What every reference does with its arguments: refuse by name, and state dtype limits.

A reference honours an argument or refuses it; it never ignores one.  :func:`emulated_only` says
which values of an argument have a reference, :func:`limit_dtype` which dtypes the kernel takes,
:func:`limit_layout` which shapes and ranges, and :func:`require` what no relaxation can mend:
shapes that contradict each other and indices of what is not there.  Broadcasting of PyTorch would
turn both into a result; :func:`require_shape`, :func:`require_broadcast` and
:func:`require_indices` refuse them.
:func:`undefined` stands for memory that a kernel leaves unwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated, describe_value
from afd_testkit.npu.limits import limit

# The floating dtypes that most Ascend kernels take.
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)

# Memory that a kernel does not write holds whatever was there.  Here it holds a number that is
# finite, so that a weight of zero still cancels it, and that no result has by chance.
UNDEFINED = 97.0


def emulated_only(operator: str, **arguments: tuple[object, Sequence[object]]) -> None:
    """:class:`NotEmulated` that names the first argument whose value has no reference.

    Each argument is given as ``name=(value, values that have a reference)``.
    """
    for name, (value, known) in arguments.items():
        if not any(_same(value, one) for one in known):
            values = " or ".join(repr(one) for one in known)
            raise NotEmulated(
                f"{operator}: {name}={describe_value(value)} has no reference on the emulated NPU; "
                f"it takes {name}={values}. Call it so, or add the case to its reference in "
                "afd_testkit/npu/ops/."
            )


def _same(value: object, known: object) -> bool:
    if isinstance(value, torch.Tensor) or known is None or value is None:
        return value is known
    return value == known


def limit_dtype(
    operator: str, name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]
) -> None:
    """:class:`KernelLimit` of kind dtype unless ``tensor`` has one of the ``allowed`` dtypes.

    Relaxing the kind lets one of :data:`FLOATS` stand for another, which is what a comparison in
    fp32 needs.  Nothing else is relaxed: references compute in fp32, so that integers would be
    truncated and doubles rounded, and numbers are no indices.
    """
    listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    what = f"{name} is {describe_value(tensor)}, the kernel takes {listed}; cast {name} first"
    if tensor.dtype in FLOATS and any(dtype in FLOATS for dtype in allowed):
        limit(operator, "dtype", tensor.dtype in allowed, what)
    else:
        require(operator, tensor.dtype in allowed, what)


def limit_layout(operator: str, holds: bool, what: str) -> None:
    """:class:`KernelLimit` of kind layout unless ``holds`` or that kind is relaxed."""
    limit(operator, "layout", holds, what)


def require(operator: str, holds: bool, what: str) -> None:
    """:class:`KernelLimit` unless ``holds``: without it there is no result to compute."""
    if not holds:
        raise KernelLimit(f"{operator}: {what}.")


def require_shape(operator: str, name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    """:class:`KernelLimit` unless ``tensor`` has exactly ``shape``, as its partners want it."""
    require(
        operator,
        tuple(tensor.shape) == tuple(shape),
        f"{name} has shape {list(tensor.shape)}; with the other arguments it must be {list(shape)}",
    )


def require_broadcast(
    operator: str, name: str, table: torch.Tensor, to: str, target: torch.Tensor
) -> None:
    """:class:`KernelLimit` unless ``table`` broadcasts to ``target`` and leaves its shape alone.

    Both have equally many axes, and each extent of ``table`` is 1 or that of ``target``; the last
    one is that of ``target``.
    """
    given, wanted = list(table.shape), list(target.shape)
    require(
        operator,
        len(given) == len(wanted)
        and given[-1:] == wanted[-1:]
        and all(extent in (1, whole) for extent, whole in zip(given, wanted, strict=True)),
        f"{name} has shape {given} and {to} {wanted}; every axis of {name} must be as {to}'s, or "
        "(but for the last) 1",
    )


def require_indices(operator: str, name: str, indices: torch.Tensor, count: int, of: str) -> None:
    """:class:`KernelLimit` unless every one of ``indices`` is from 0 to ``count`` - 1."""
    require(
        operator,
        bool(((indices >= 0) & (indices < count)).all()),
        f"{name} holds {indices.flatten().tolist()[:16]}; there are {count} {of}, numbered from 0",
    )


def undefined(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``shape`` that stands for memory which the kernel leaves unwritten."""
    return torch.full(tuple(shape), UNDEFINED, dtype=dtype)
