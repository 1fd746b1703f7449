"""What the streams of a process share: devices that threads chose, current streams, an observer."""

from __future__ import annotations

import itertools
import re
import threading
from typing import TYPE_CHECKING, Protocol

import torch

from afd_testkit.npu.errors import EmulationConflict

if TYPE_CHECKING:
    from afd_testkit.npu.streams import Stream

# One object for each index, equal to the CPU's device; only its identity tells the index.
_NUMBERED: dict[int, torch.device] = {}
#: torch keeps an index in 8 bits with a sign.
_INDICES = 128
# A tensor of the emulated device is a CPU tensor, and its device may be handed in.
_DEVICE_TYPES = ("npu", "privateuseone", "cpu")
_DEVICE_TEXT = re.compile(r"(npu|privateuseone|cpu)(?::(\d+))?")


class StreamObserver(Protocol):
    """Who is told about everything that orders work.

    A mark, which :meth:`recorded` returns, stands for all work that the stream had then.
    """

    def recorded(self, stream: Stream) -> object:
        """An event is recorded on ``stream``."""

    def waited(self, stream: Stream, mark: object) -> None:
        """Later work of ``stream`` comes after ``mark``."""

    def reached(self, mark: object) -> None:
        """What the calling thread does from here comes after ``mark``."""

    def drained(self, stream: Stream) -> None:
        """What the calling thread does from here comes after the work of ``stream``."""

    def drained_device(self, index: int) -> None:
        """The same for every stream of device ``index``."""


class _Process:
    """What all threads share."""

    def __init__(self) -> None:
        self.device = 0
        self.observer: StreamObserver | None = None
        self.stream_ids = itertools.count(1)
        self.event_ids = itertools.count(1)


class _Thread(threading.local):
    """What each thread has of its own; ``device`` is None until it chooses one."""

    def __init__(self) -> None:
        self.device: int | None = None
        self.streams: dict[int, Stream] = {}


process = _Process()
thread = _Thread()


def observe(observer: StreamObserver) -> None:
    """Tell ``observer`` from now on; :class:`EmulationConflict` while there is another."""
    if process.observer is not None:
        raise EmulationConflict(
            "the streams of this process are observed already; leave the check that is on "
            "(check_streams) before another one is entered."
        )
    process.observer = observer


def stop_observing(observer: StreamObserver) -> None:
    """Tell ``observer`` no more."""
    if process.observer is observer:
        process.observer = None


def observer() -> StreamObserver | None:
    """Who observes now."""
    return process.observer


def current_device_index() -> int:
    """Index of the device that this thread uses."""
    return process.device if thread.device is None else thread.device


def set_device_index(index: int) -> None:
    """Use device ``index`` in this thread, and in threads that never choose one."""
    thread.device = process.device = device_index(index)


def reset_streams() -> None:
    """Forget this thread's and the process's device and current streams."""
    process.device = 0
    thread.device = None
    thread.streams.clear()


def numbered_device(index: int) -> torch.device:
    """The CPU's device as NPU ``index``: :func:`device_index` knows it again, nothing else does.

    It is the same object at every call.  A device that torch hands out, as of a tensor, has lost
    its index.  ``ValueError`` for an index that no ``torch.device`` can have.
    """
    if not 0 <= index < _INDICES:
        raise ValueError(f"device index {index} is out of range; torch knows 0 to {_INDICES - 1}.")
    if index not in _NUMBERED:
        # Not through torch.device, whose call the emulation answers.
        _NUMBERED[index] = torch.empty(0, device="cpu").device
    return _NUMBERED[index]


def index_of_numbered(device: object) -> int | None:
    """The index of what :func:`numbered_device` returned, None of anything else."""
    if isinstance(device, torch.device):
        for index, numbered in _NUMBERED.items():
            if device is numbered:
                return index
    return None


def device_index(device: object = None) -> int:
    """Index of ``device``: an int, ``"npu"``, ``"npu:1"``, a ``torch.device`` or None.

    None, a negative int and a device without an index mean the current device.  ``TypeError``
    for another type, ``ValueError`` for a device of another kind.
    """
    if device is None:
        return current_device_index()
    if isinstance(device, int) and not isinstance(device, bool):
        return current_device_index() if device < 0 else device
    if isinstance(device, str):
        if found := _DEVICE_TEXT.fullmatch(device):
            return current_device_index() if found[2] is None else int(found[2])
        raise ValueError(f'{device!r} is no NPU; give an index, "npu", "npu:1" or None.')
    if isinstance(device, torch.device):
        if device.type not in _DEVICE_TYPES:
            raise ValueError(f"{device} is no NPU; give an index, a device of type npu or None.")
        if (numbered := index_of_numbered(device)) is not None:
            return numbered
        # The CPU has one device; its index says nothing about which NPU is meant.
        known = device.index is not None and device.type != "cpu"
        return int(device.index) if known else current_device_index()
    raise TypeError(
        f"a device is an int, a str, a torch.device or None, not {type(device).__name__}"
    )
