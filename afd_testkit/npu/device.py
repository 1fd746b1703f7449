"""``torch.npu`` of the emulated device: selection, properties, memory, seeds.

Memory is the host's: nothing is counted, a device always reports its full capacity free and no
bytes allocated, so code that sizes a cache from it must be told the size instead.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from afd_testkit.npu.errors import EmulationError
from afd_testkit.npu.settings import SOCS, VISIBLE, EmulationSettings, visible_devices
from afd_testkit.npu.stream_state import current_device_index, device_index, set_device_index

_POOLS = itertools.count(1)


class DeviceProperties(NamedTuple):
    """What is reported of a device; bytes for memory, cores as in Huawei's data sheets."""

    name: str
    total_memory: int
    uuid: str
    cube_core_num: int
    vector_core_num: int
    L2_cache_size: int


class EmulatedDevices:
    """The devices that this process sees."""

    def __init__(self, settings: EmulationSettings) -> None:
        self._soc = SOCS[settings.soc]
        self._count = settings.devices

    def device_count(self) -> int:
        """Devices that ``ASCEND_RT_VISIBLE_DEVICES`` leaves visible."""
        visible = visible_devices(self._count)
        return self._count if visible is None else len(visible)

    def is_available(self) -> bool:
        """Whether any device is visible."""
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        """The emulated device needs no initialization."""
        return True

    def init(self) -> None:
        """Nothing to initialize."""

    def set_device(self, device: Any) -> None:
        """Select a device for this thread, and for threads that never select one."""
        index = device_index(device)
        check_visible(self, index)
        set_device_index(index)

    def current_device(self) -> int:
        """The index that this thread uses."""
        return current_device_index()

    def device(self, device: Any) -> AbstractContextManager[None]:
        """Select a device inside."""
        return _Selected(self, device_index(device))

    def get_device_name(self, device: Any = None) -> str:
        """Name of the emulated SoC."""
        return self._soc.device

    def get_device_capability(self, device: Any = None) -> None:
        """NPUs have no compute capability."""

    def get_soc_version(self) -> int:
        """The number by which vLLM-Ascend tells SoCs apart."""
        return self._soc.version

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        """What is reported of a device."""
        index = device_index(device)
        check_visible(self, index)
        return DeviceProperties(
            name=self._soc.device,
            total_memory=self._soc.memory,
            uuid=f"emulated-{self._soc.name}-{index}",
            cube_core_num=24,
            vector_core_num=48,
            L2_cache_size=192 << 20,
        )

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes: always all free."""
        return self._soc.memory, self._soc.memory

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Zero for the figures that are asked for: the host's allocator counts nothing."""
        return {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}


def zero_bytes(device: Any = None) -> int:
    """Bytes allocated or reserved: none is counted."""
    return 0


def nothing(*args: Any, **kwargs: Any) -> None:
    """For calls whose only effect is on a real device (caches, compile modes, peaks)."""


def no_pool(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """A memory pool of the host is the host's memory."""
    return nullcontext()


def graph_pool_handle() -> tuple[int, int]:
    """A new name for a pool, as torch makes them; capturing a graph into it is refused."""
    return (0, next(_POOLS))


def check_visible(devices: EmulatedDevices, index: int) -> None:
    """:class:`EmulationError` unless this process sees device ``index``."""
    if not 0 <= index < (count := devices.device_count()):
        raise EmulationError(
            f"device {index} is not visible; this process sees {count} emulated device(s). "
            f"Set AFD_NPU_DEVICES or {VISIBLE}."
        )


class _Selected(AbstractContextManager[None]):
    def __init__(self, devices: EmulatedDevices, index: int) -> None:
        self._devices = devices
        self._index = index

    def __enter__(self) -> None:
        self._before = self._devices.current_device()
        self._devices.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        self._devices.set_device(self._before)
