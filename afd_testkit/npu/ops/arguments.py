"""What every reference does with its arguments: refuse by name, and state dtype limits.

A reference honours an argument or refuses it; it never ignores one.  :func:`emulated_only` says
which values of an argument have a reference, :func:`limit_dtype` which dtypes the kernel takes,
:func:`limit_layout` which shapes and ranges, and :func:`require` what no relaxation can mend.
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
    """:class:`KernelLimit` of kind dtype unless ``tensor`` has one of the ``allowed`` dtypes."""
    listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    limit(
        operator,
        "dtype",
        tensor.dtype in allowed,
        f"{name} is {describe_value(tensor)}, the kernel takes {listed}; cast {name} first",
    )


def limit_layout(operator: str, holds: bool, what: str) -> None:
    """:class:`KernelLimit` of kind layout unless ``holds`` or that kind is relaxed."""
    limit(operator, "layout", holds, what)


def require(operator: str, holds: bool, what: str) -> None:
    """:class:`KernelLimit` unless ``holds``: without it there is no result to compute."""
    if not holds:
        raise KernelLimit(f"{operator}: {what}.")


def undefined(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``shape`` that stands for memory which the kernel leaves unwritten."""
    return torch.full(tuple(shape), UNDEFINED, dtype=dtype)
