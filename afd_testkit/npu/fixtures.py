"""The fixtures ``npu_stubs`` and ``npu_device``.

Importing this module imports no torch: it is part of the pytest plugin.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from afd_testkit.device_pool import find_host, is_emulated, why_too_few

if TYPE_CHECKING:
    import torch

    from afd_testkit.npu.install import Emulation


@dataclass(frozen=True)
class NpuDevice:
    """What a test computes on.

    ``device``: where it puts its tensors, ``torch.device("npu")`` on a real NPU, the CPU's device
    on the emulated one.  ``emulated``: whether results are no evidence for a device.  ``name``:
    of the system on chip.
    """

    device: torch.device
    emulated: bool
    name: str


@pytest.fixture
def npu_stubs() -> Iterator[Emulation]:
    """The closed modules alone: ``import torch_npu`` works, and its operators on CPU tensors.

    Of torch only ``torch.npu`` is new; a tensor meant for ``npu`` is refused as ever.  In a process
    that is emulated as a whole, and beside ``npu_device``, there is the device as well.
    """
    from afd_testkit.npu.install import emulated

    with emulated(device=False) as emulation:
        yield emulation


@pytest.fixture
def npu_device() -> Iterator[NpuDevice]:
    """The real NPU where there is one and torch-npu is installed, else the emulated one.

    In a process that is emulated as a whole, that emulation.  A real torch-npu registers itself
    with torch for the rest of the process; nothing can undo that.  A default device or a process
    group that the test leaves on is an error behind it.
    """
    import torch

    from afd_testkit.npu.install import emulated

    if not is_emulated() and _has_npu():
        importlib.import_module("torch_npu")
        yield NpuDevice(torch.device("npu"), False, torch.npu.get_device_name())
        return
    with emulated() as emulation:
        yield NpuDevice(torch.device("npu"), True, emulation.devices.get_device_name())


def _has_npu() -> bool:
    """Whether the need ``npu`` is met: what is installed without a device cannot be imported."""
    return importlib.util.find_spec("torch_npu") is not None and why_too_few(1, find_host) is None
