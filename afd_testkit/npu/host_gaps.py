"""Calls that the host's kernels do not take as the device does, or far too slowly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from afd_testkit.npu import host_memory


def _histc(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.histc`` of integers; counts come in the input's dtype, as on the device.

    float64 holds every integer below 2**53 exactly.
    """
    if tensor.is_floating_point():
        return torch.histc(tensor, *args, **kwargs)
    return torch.histc(tensor.double(), *args, **kwargs).to(tensor.dtype)


ANSWERS: Mapping[Any, Callable[..., Any]] = {
    torch.histc: _histc,
    torch.Tensor.histc: _histc,
    torch.zeros: host_memory.zeros,
}
