"""Large zero-filled tensors whose pages cost nothing until they are used.

A device's memory is taken whole when a cache is made; on a host, filling gigabytes of which a test
uses a few blocks is most of the time that the test takes.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch

#: Bytes from which it is worth the detour.
LARGE = 32 << 20
_PLAIN = {"dtype", "device", "pin_memory"}
_CPU = torch.device("cpu")


def zeros(*size: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.zeros``, from the system's own zero pages where the tensor is large and plain.

    Plain: on the CPU by name, contiguous, no gradient asked for, and no dispatch mode that wants to
    see the tensor being filled.
    """
    if kwargs.get("device") != _CPU or not kwargs.keys() <= _PLAIN:
        return torch.zeros(*size, **kwargs)
    shape = size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size
    if not all(isinstance(extent, int) and extent > 0 for extent in shape):
        return torch.zeros(*size, **kwargs)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    count = math.prod(shape) * dtype.itemsize
    if count < LARGE or torch._C._len_torch_dispatch_stack() > 0:
        return torch.zeros(*size, **kwargs)
    pages = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8).untyped_storage()
    made = torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty(0, dtype=dtype).set_(pages, 0, shape, made.stride())
