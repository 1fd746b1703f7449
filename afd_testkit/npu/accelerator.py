"""``torch.accelerator``, generators and tensor methods of a process whose device is emulated."""

from __future__ import annotations

from typing import Any

import torch

from afd_testkit.npu import device, streams
from afd_testkit.npu.device import EmulatedDevices
from afd_testkit.npu.patches import PatchSet
from afd_testkit.npu.redirect import is_npu_name
from afd_testkit.npu.settings import CANN_VERSION


class HostGenerator(torch.Generator):  # type: ignore[misc]
    """``torch.Generator`` that takes the NPU for the CPU."""

    def __new__(cls, device: Any = "cpu") -> HostGenerator:
        if is_npu_name(device):
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


def _npu(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``tensor.npu()`` and ``module.npu()``: it is there already."""
    return self
