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
from types import MethodWrapperType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from afd_testkit.npu.host_gaps import ANSWERS
from afd_testkit.npu.stream_state import index_of_numbered, numbered_device

_NPU = re.compile(r"npu(?::(\d+))?")
_CPU = torch.device("cpu")
# Looked up once: every torch call of the process is compared with them.
_DEVICE_CLASS = torch.device
_TO = torch.Tensor.to

Scope = Callable[[], AbstractContextManager[None]]


def is_npu_name(value: object) -> bool:
    """Whether ``value`` is a string such as ``npu`` or ``npu:1``."""
    # Most names that torch is given are of other things.
    return isinstance(value, str) and value.startswith("npu") and _NPU.fullmatch(value) is not None


def is_npu(device: object) -> bool:
    """Whether a device argument means the accelerator: its name, or an index alone."""
    return is_npu_name(device) or (isinstance(device, int) and not isinstance(device, bool))


def npu_index(device: object) -> int | None:
    """The index that a device argument names, None where it names no NPU or no index."""
    if isinstance(device, str):
        found = _NPU.fullmatch(device)
        return int(found[1]) if found and found[1] else None
    if isinstance(device, torch.device):
        return index_of_numbered(device)
    return device if isinstance(device, int) and not isinstance(device, bool) else None


def _is_placed(value: object) -> bool:
    """A device by itself, wherever it stands among the arguments."""
    return is_npu_name(value) or index_of_numbered(value) is not None


def any_index(index: int) -> None:
    """Every device is there."""


class RedirectMode(TorchFunctionMode):  # type: ignore[misc]
    """Active on every thread of an emulated process, and inside bodies of custom operators.

    Every torch call of the process passes here: what most calls do not need is kept off their way.
    ``check`` raises for the index of a device that is not there.
    """

    def __init__(self, check: Callable[[int], None] = any_index) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.__class__ is MethodWrapperType:
            # An attribute of a tensor, read or set: it has no device argument.
            return func(*args)
        if func is _DEVICE_CLASS:
            return _device(*args, **(kwargs or {}))
        if kwargs:
            if kwargs.get("pin_memory") is True:
                kwargs = {**kwargs, "pin_memory": False}
            device = kwargs.get("device")
            if device is not None and (is_npu(device) or _is_placed(device)):
                kwargs = {**kwargs, "device": self._place(device)}
        for value in args:
            if ((kind := value.__class__) is str or kind is _DEVICE_CLASS) and _is_placed(value):
                args = tuple(self._place(value) if _is_placed(value) else value for value in args)
                break
        if func is _TO and len(args) > 1 and is_npu(args[1]):
            args = (args[0], self._place(args[1]), *args[2:])
        answer = _ANSWERS.get(func, func)
        return answer(*args, **kwargs) if kwargs else answer(*args)

    def _place(self, device: object) -> torch.device:
        """The CPU for the NPU that ``device`` means."""
        if (index := npu_index(device)) is not None:
            self._check(index)
        return _CPU


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """``torch.device`` of the emulated process: an index alone means the NPU, as on a device.

    It does not ask which devices are there, as on a device.
    """
    first = args[0] if args else kwargs.get("type", kwargs.get("device"))
    if isinstance(first, torch.device) and index_of_numbered(first) is not None:
        return first
    if not is_npu(first):
        return torch.device(*args, **kwargs)
    index = npu_index(first)
    if index is None:
        index = args[1] if len(args) > 1 else kwargs.get("index")
    return _CPU if index is None else numbered_device(index)


def _stays(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Pinned memory is a real accelerator's."""
    return tensor


_ANSWERS: dict[Any, Callable[..., Any]] = {**ANSWERS, torch.Tensor.pin_memory: _stays}


def inside(scope: Scope, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with ``scope`` around each call."""

    @wraps(function)
    def body(*args: Any, **kwargs: Any) -> Any:
        with scope():
            return function(*args, **kwargs)

    return body
