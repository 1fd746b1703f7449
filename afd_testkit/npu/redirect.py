"""Sends what is meant for the NPU to the CPU, where the emulated device keeps its tensors.

Tensors of the emulated device are plain CPU tensors.  A ``TorchFunctionMode`` rewrites every
device argument of a torch call, the ``torch.device`` constructor included, and drops pinned
memory, which only a real accelerator has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from afd_testkit.npu.host_gaps import ANSWERS

_NPU = re.compile(r"npu(:\d+)?")
_CPU = torch.device("cpu")

Scope = Callable[[], AbstractContextManager[None]]


def is_npu_name(value: object) -> bool:
    """Whether ``value`` is a string such as ``npu`` or ``npu:1``."""
    return isinstance(value, str) and _NPU.fullmatch(value) is not None


def _is_npu(device: object) -> bool:
    """A device argument that means the accelerator: its name, or an index alone."""
    return is_npu_name(device) or (isinstance(device, int) and not isinstance(device, bool))


def _here(value: Any) -> Any:
    return _CPU if is_npu_name(value) else value


class RedirectMode(TorchFunctionMode):  # type: ignore[misc]
    """Active on every thread of an emulated process, and inside bodies of custom operators."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return _device(*args, **kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if kwargs:
            if kwargs.get("pin_memory") is True:
                kwargs = {**kwargs, "pin_memory": False}
            if _is_npu(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_npu(args[1]):
            return func(args[0], _CPU, *args[2:], **kwargs)
        for value in args:
            if is_npu_name(value):
                args = tuple(_here(value) for value in args)
                break
        return ANSWERS.get(func, func)(*args, **kwargs)


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """``torch.device`` of the emulated process: an index alone means the NPU, as on a device."""
    first = args[0] if args else kwargs.get("type", kwargs.get("device"))
    if _is_npu(first):
        return _CPU
    return torch.device(*args, **kwargs)


def inside(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with ``scope`` around each call."""

    @wraps(function)
    def body(*args: Any, **kwargs: Any) -> Any:
        with scope():
            return function(*args, **kwargs)

    return body
