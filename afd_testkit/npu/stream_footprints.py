"""What a kernel reads and writes, from its schema, and which bytes a tensor occupies."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from afd_testkit.npu.happens_before import Region

# Collectives change their first argument without saying so in their schemas; these do not.
_COLLECTIVES_THAT_ONLY_READ = ("send", "barrier", "monitored_barrier_", "check_for_nan")
# They take shape and dtype from an argument, not its values; the second sort writes nothing.
_FACTORIES = re.compile(r"aten::(new_\w+|\w+_like)")
_EMPTY = re.compile(r"aten::(new_)?empty(_like|_strided)?")
# Without a tag of torch's, because they are composed of operators that have one.
_ANSWERS_ON_THE_HOST = ("aten::is_nonzero", "aten::argwhere", "aten::nonzero_numpy", "aten::where")


@dataclass(frozen=True)
class Kernel:
    """One operator: its name, which arguments it writes, whether the host waits for it.

    ``written``: positions and names of arguments.  ``answers``: the host needs a value or a
    shape from the device before the call returns.  ``changes_memory``: a tensor gets other
    memory (``resize_``).  ``is_copy``: between host and device, blocking unless told otherwise.
    ``reads``: it reads its arguments' values.  ``fills``: its results have values.
    ``from_host``: its argument was just made of the host's values (``tensor``, ``from_numpy``).
    """

    name: str
    written: frozenset[int | str]
    answers: bool
    changes_memory: bool
    is_copy: bool
    reads: bool
    fills: bool
    from_host: bool


@functools.cache
def kernel(func: Any) -> Kernel:
    """What the schema of ``func``, a ``torch._ops.OpOverload``, says."""
    schema = func._schema
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {position, argument.name}
    space, _, plain = schema.name.partition("::")
    if space == "c10d" and plain not in _COLLECTIVES_THAT_ONLY_READ and schema.arguments:
        written |= {0, schema.arguments[0].name}
    answers = torch.Tag.data_dependent_output in func.tags or (
        torch.Tag.dynamic_output_shape in func.tags
    )
    if schema.name in _ANSWERS_ON_THE_HOST:
        # where(condition) answers with indices, where(condition, a, b) does not.
        answers = plain != "where" or len(schema.arguments) == 1
    # Views in place change a tensor's metadata, not its memory.
    if torch.Tag.inplace_view in func.tags:
        written.clear()
    return Kernel(
        name=f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name,
        written=frozenset(written),
        answers=answers,
        changes_memory=schema.name in ("aten::resize_", "aten::resize_as_", "aten::set_"),
        is_copy=schema.name in ("aten::copy_", "aten::_to_copy"),
        reads=_FACTORIES.fullmatch(schema.name) is None,
        fills=_EMPTY.fullmatch(schema.name) is None,
        from_host=schema.name == "aten::lift_fresh",
    )


def host_waits(described: Kernel, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether this call of an operator that ``answers`` makes the host wait for the device."""
    if not described.answers:
        return False
    if described.name.startswith("aten::index."):
        indices = args[1] if len(args) > 1 else kwargs["indices"]
        return any(item.dtype in (torch.bool, torch.uint8) for item in tensors_of(indices))
    if described.name.startswith("aten::repeat_interleave."):
        return kwargs.get("output_size") is None
    return True


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """The tensors in one argument or result: itself, or in (nested) lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def touched(
    described: Kernel, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Each tensor among the arguments, and whether it is written."""
    for position, value in enumerate(args):
        for tensor in tensors_of(value):
            yield tensor, position in described.written
    for name, value in kwargs.items():
        for tensor in tensors_of(value):
            yield tensor, name in described.written


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor is backed by host memory (not fake, meta or sparse) and not empty."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel() > 0
    )


def region(tensor: torch.Tensor) -> Region:
    """The bytes of the tensor's storage that its elements occupy.

    Exact for dense tensors and for rows at one distance (a slice of the columns of a matrix, of
    the last dimension of anything contiguous); else the smallest such set that holds them.
    """
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return Region(start, tensor.numel() * size)
    dims = sorted(
        (stride * size, extent)
        for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)
        if extent > 1 and stride > 0
    )
    length, outer = size, 0
    while outer < len(dims) and dims[outer][0] <= length:
        stride, extent = dims[outer]
        length += stride * (extent - 1)
        outer += 1
    if outer == len(dims):
        return Region(start, length)
    stride, count = dims[outer]
    for wider, extent in dims[outer + 1 :]:
        if wider != stride * count:
            # Not one distance: the outermost dimension's rows, whole.
            inner = sum(step * (n - 1) for step, n in dims[:-1]) + size
            widest, rows = dims[-1]
            hull = widest * (rows - 1) + inner
            return Region(start, inner, widest, rows) if inner <= widest else Region(start, hull)
        count *= extent
    return Region(start, length, stride, count)
