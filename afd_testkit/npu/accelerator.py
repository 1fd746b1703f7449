"""``torch.accelerator``, generators and tensor methods of a process whose device is emulated."""

from __future__ import annotations

import functools
from typing import Any

import torch

from afd_testkit.npu import device, streams
from afd_testkit.npu.device import EmulatedDevices
from afd_testkit.npu.patches import PatchSet
from afd_testkit.npu.redirect import is_npu, is_npu_name
from afd_testkit.npu.settings import CANN_VERSION
from afd_testkit.npu.stream_state import index_of_numbered

_Generator = torch.Generator
_CPU = torch.device("cpu")


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    """What torch itself makes, its default generator included, is one of the class, too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)


class HostGenerator(torch.Generator, metaclass=_AnyGenerator):  # type: ignore[misc]
    """``torch.Generator`` that takes the NPU for the CPU."""

    def __new__(cls, device: Any = "cpu") -> HostGenerator:
        if is_npu(device):
            device = "cpu"
        made: HostGenerator = super().__new__(cls, device=device)
        return made


def install(patches: PatchSet, devices: EmulatedDevices) -> None:
    """Answer for the emulated device where torch asks for the current accelerator."""
    answers = {
        "is_available": devices.is_available,
        "device_count": devices.device_count,
        "current_accelerator": lambda check_available=False: torch.device("cpu"),
        "current_device_index": devices.current_device,
        "current_device_idx": devices.current_device,
        "set_device_index": devices.set_device,
        "set_device_idx": devices.set_device,
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
        "synchronize": streams.synchronize,
        "device_index": devices.device,
        "empty_cache": device.nothing,
        "memory_allocated": device.zero_bytes,
        "max_memory_allocated": device.zero_bytes,
        "memory_reserved": device.zero_bytes,
        "max_memory_reserved": device.zero_bytes,
        "memory_stats": devices.memory_stats,
        "reset_peak_memory_stats": device.nothing,
    }
    for name, answer in answers.items():
        patches.attribute(torch.accelerator, name, answer)
    # dist.barrier and others ask the C++ side for the device of the accelerator.
    patches.attribute(torch._C, "_get_accelerator", lambda check=None: torch.device("cpu"))
    patches.attribute(torch, "Generator", HostGenerator)
    patches.attribute(torch, "Stream", streams.Stream)
    patches.attribute(torch, "Event", streams.Event)
    patches.attribute(torch.version, "cann", CANN_VERSION)
    patches.attribute(torch.Tensor, "record_stream", streams.record_stream)
    patches.attribute(torch.Tensor, "npu", _npu)
    patches.attribute(torch.nn.Module, "npu", _npu)
    patches.attribute(torch.nn.Module, "to", _module_to(torch.nn.Module.to))
    patches.attribute(torch.Tensor, "is_npu", property(lambda tensor: tensor.is_cpu))
    patches.attribute(torch, "get_device_module", _device_module(torch.get_device_module))
    _restore_storages(patches)


def _npu(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``tensor.npu()`` and ``module.npu()``: it is there already."""
    return self


def _module_to(original: Any) -> Any:
    @functools.wraps(original)
    def to(module: Any, *args: Any, **kwargs: Any) -> Any:
        """``Module.to``, in which an index alone means the NPU."""
        if args and is_npu(args[0]):
            args = (_CPU, *args[1:])
        if is_npu(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return original(module, *args, **kwargs)

    return to


def _device_module(original: Any) -> Any:
    @functools.wraps(original)
    def get_device_module(device: Any = None) -> Any:
        """``torch.npu`` for the NPU; a device without an index is the CPU's by now."""
        if device is None or is_npu_name(device) or index_of_numbered(device) is not None:
            return torch.npu
        return original(device)

    return get_device_module


def _restore_storages(patches: PatchSet) -> None:
    """``torch.load`` of what was saved on an NPU, or is to come onto it."""

    def restore(storage: Any, location: str) -> Any:
        return storage if is_npu_name(location) else None

    # Asked in the order of their numbers; the CPU's has 10.
    entry = (9, lambda storage: None, restore)
    registry = torch.serialization._package_registry
    registry.insert(0, entry)
    patches.later(lambda: registry.remove(entry))
