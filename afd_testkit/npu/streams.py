"""Streams and events of the emulated NPU: the surface of ``torch.npu``, without a device.

Kernels run on the host when they are called, so a stream holds no work and every wait returns at
once.  What is real is the bookkeeping: each thread has a current device and, for each device, a
current stream; events know whether, where and when they were recorded.  Whoever wants to judge
the *order* that a program asks for observes it (``stream_state.observe``); without an observer
nothing is recorded.

Where this differs from a device:

- every ``Stream()`` is a stream of its own; a device hands out a pool of them and may give two
  callers the same one;
- a thread that never chose a device uses the one that the process chose last, where a device
  would give it index 0; an emulated process has one device.
"""

from __future__ import annotations

import ctypes
import threading
import time
from types import TracebackType
from typing import Any

import torch

from afd_testkit.npu.errors import NotEmulated
from afd_testkit.npu.stream_state import current_device_index, device_index, process, thread

# The names that torch.npu has.
__all__ = [
    "Event",
    "ExternalEvent",
    "Stream",
    "StreamContext",
    "SyncLaunchStream",
    "current_stream",
    "default_stream",
    "set_stream",
    "stream",
    "synchronize",
]

# c10::DeviceType::PrivateUse1; torch prints it under the name that the backend was given.
PRIVATE_USE = 20


def _check_stream(value: object, what: str) -> None:
    if not isinstance(value, Stream):
        raise TypeError(f"{what} takes a torch.npu.Stream, not {type(value).__name__}")


def _check_event(value: object, what: str) -> None:
    if not isinstance(value, _EventBase):
        raise TypeError(f"{what} takes a torch.npu.Event, not {type(value).__name__}")


class Stream(torch.Stream):  # type: ignore[misc]
    """One queue of device work; equal to every object with the same device and ``stream_id``.

    ``device``: see :func:`device_index`.  ``priority``: kept, without effect.  The three
    keywords name an existing stream, as ``torch.Stream`` has them.  ``key``: device index and
    stream id.
    """

    priority: int
    key: tuple[int, int]

    def __new__(
        cls,
        device: object = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int | None = None,
    ) -> Stream:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority is an int, not {type(priority).__name__}")
        if device_type not in (None, PRIVATE_USE):
            raise ValueError(
                f"device_type {device_type} is no NPU; the NPU's is {PRIVATE_USE}, or leave it out."
            )
        made: Stream = super().__new__(
            cls,
            stream_id=next(process.stream_ids) if stream_id is None else stream_id,
            device_index=_index(device if device_index is None else device_index),
            device_type=PRIVATE_USE,
        )
        made.priority = priority
        made.key = (int(made.device_index), int(made.stream_id))
        return made

    def wait_event(self, event: Event | ExternalEvent) -> None:
        """Later work of this stream comes after what ``event`` has recorded."""
        _check_event(event, "wait_event")
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Later work of this stream comes after what ``stream`` has now."""
        _check_stream(stream, "wait_stream")
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | ExternalEvent | None = None) -> Any:
        """Record ``event``, or a new :class:`Event`, on this stream, and return it."""
        if event is None:
            event = Event()
        _check_event(event, "record_event")
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for all work of this stream."""
        if process.observer is not None:
            process.observer.drained(self)

    def query(self) -> bool:
        """Whether all work is done: always, and who asks may rely on the answer."""
        self.synchronize()
        return True

    def set_data_preprocess_stream(self, is_data_preprocess_stream: bool = False) -> None:
        """A hint to the device's scheduler, without effect."""

    def is_capturing(self) -> bool:
        """Whether a graph is captured on this stream: never."""
        return False

    @property
    def npu_stream(self) -> int:
        """The handle; 0 for the default stream of device 0."""
        return int(self.device_index) << 32 | int(self.stream_id)

    @property
    def native_handle(self) -> int:
        """The handle, under the name that ``torch.Stream`` gives it."""
        return self.npu_stream

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.npu_stream)

    def __enter__(self) -> Stream:
        _thread_contexts().append(entered := StreamContext(self))
        entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _thread_contexts().pop().__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.key == other.key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        name = f"torch.npu.{type(self).__name__}"
        return f"<{name} device=npu:{self.device_index} npu_stream={self.npu_stream:#x}>"


class SyncLaunchStream(Stream):
    """A stream whose launches bypass the host's task queue; no difference here."""


def _index(device: object) -> int:
    # Inside Stream.__new__ the name device_index is a parameter.
    return device_index(device)


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.entered: list[StreamContext] = []


_contexts = _Contexts()


def _thread_contexts() -> list[StreamContext]:
    return _contexts.entered


class _EventBase(torch.Event):  # type: ignore[misc]
    """What both kinds of events do."""

    _mark: object
    _stream: Stream | None
    _nanoseconds: int
    _number: int

    def _start(self) -> None:
        self._mark = None
        self._stream = None
        self._nanoseconds = 0
        self._number = next(process.event_ids)

    def record(self, stream: Stream | None = None) -> None:
        """Stand for all work that ``stream``, or the current one, has now."""
        stream = current_stream() if stream is None else stream
        _check_stream(stream, "record")
        if self._stream is not None and self._stream.device_index != stream.device_index:
            raise ValueError(
                f"the event belongs to npu:{self._stream.device_index}, where it was recorded "
                f"first, and cannot be recorded on npu:{stream.device_index}; make one there."
            )
        self._stream = stream
        self._nanoseconds = time.perf_counter_ns()
        observer = process.observer
        self._mark = None if observer is None else observer.recorded(stream)

    def wait(self, stream: Stream | None = None) -> None:
        """Later work of ``stream``, or the current one, comes after what is recorded."""
        stream = current_stream() if stream is None else stream
        _check_stream(stream, "wait")
        if self._mark is not None and process.observer is not None:
            process.observer.waited(stream, self._mark)

    def synchronize(self) -> None:
        """Wait on the host for what is recorded; at once where nothing is."""
        if self._mark is not None and process.observer is not None:
            process.observer.reached(self._mark)

    def query(self) -> bool:
        """Whether what is recorded is done: always, and who asks may rely on the answer."""
        self.synchronize()
        return True

    @property
    def npu_event(self) -> int:
        """The handle; 0 until the event is recorded."""
        return 0 if self._stream is None else self._number

    @property
    def event_id(self) -> int:
        """The handle, under the name that ``torch.Event`` gives it."""
        return self.npu_event

    @property
    def device(self) -> torch.device | None:
        """Where it was recorded; None before."""
        return None if self._stream is None else self._stream.device

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.npu_event)

    def __repr__(self) -> str:
        state = f"{self.npu_event:#x}" if self._stream is not None else "uninitialized"
        return f"<torch.npu.{type(self).__name__} {state}>"


class Event(_EventBase):
    """A point in a stream's work, that streams and the host can wait for.

    ``enable_timing``: whether :meth:`elapsed_time` may be asked.  ``blocking`` has no effect.
    ``interprocess`` events exist; their handles are not emulated.  ``device`` as ``torch.Event``
    has it; only checked.
    """

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        *,
        device: object = None,
    ) -> Event:
        # torch.Event takes the device first, torch.npu.Event the timing flag.
        if not isinstance(enable_timing, bool):
            device, enable_timing = enable_timing, False
        device_index(device)
        made: Event = super().__new__(cls, device="cpu")
        made._start()
        made._timed = enable_timing
        return made

    _timed: bool

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of host time between the two records."""
        if not isinstance(end_event, Event):
            raise TypeError(f"elapsed_time takes a torch.npu.Event, not {type(end_event).__name__}")
        for event, name in ((self, "start"), (end_event, "end")):
            if not event._timed:
                raise ValueError(
                    f"the {name} event takes no time; make both with enable_timing=True."
                )
            if event._stream is None:
                raise ValueError(f"the {name} event is not recorded; record both events first.")
        return (end_event._nanoseconds - self._nanoseconds) / 1e6

    def recorded_time(self) -> int:
        """Microseconds on a clock of this process at the record."""
        if self._stream is None:
            raise ValueError("the event is not recorded; record it first.")
        return self._nanoseconds // 1000

    def ipc_handle(self) -> bytes:
        """Refused: there is no other process that could open it."""
        raise NotEmulated("Event.ipc_handle: events are not shared between processes here.")

    @classmethod
    def from_ipc_handle(cls, device: object, handle: object) -> Event:
        """Refused, as :meth:`ipc_handle`."""
        raise NotEmulated("Event.from_ipc_handle: events are not shared between processes here.")


class ExternalEvent(_EventBase):
    """An event for graph tasks, that a device lets a stream wait for before it is recorded."""

    def __new__(cls) -> ExternalEvent:
        made: ExternalEvent = super().__new__(cls, device="cpu")
        made._start()
        return made

    def wait(self, stream: Stream | None = None) -> None:
        """As :meth:`Event.wait`, and refused before the record."""
        if self._stream is None:
            raise NotEmulated(
                "ExternalEvent.wait before its record: kernels run when they are called here and "
                "cannot wait for what comes later (graph capture). Run eagerly."
            )
        super().wait(stream)

    def reset(self, stream: Stream | None = None) -> None:
        """Make it as new."""
        _check_stream(current_stream() if stream is None else stream, "reset")
        self._mark = self._stream = None

    def elapsed_time(self, end_event: object) -> float:
        """Refused: an external event takes no time."""
        raise ValueError("an ExternalEvent takes no time; use two Event(enable_timing=True).")


def default_stream(device: object = None) -> Stream:
    """The stream that every thread of ``device`` starts with."""
    return Stream(stream_id=0, device_index=device_index(device))


def current_stream(device: object = None) -> Stream:
    """The stream that this thread launches on when it uses ``device``."""
    index = device_index(device)
    if index not in thread.streams:
        thread.streams[index] = default_stream(index)
    return thread.streams[index]


def set_stream(stream: Stream | None) -> None:
    """Make ``stream`` current, and its device; nothing for None."""
    if stream is None:
        return
    _check_stream(stream, "set_stream")
    thread.streams[int(stream.device_index)] = stream
    if current_device_index() != stream.device_index:
        thread.device = int(stream.device_index)


def synchronize(device: object = None) -> None:
    """Wait for all work of all streams of ``device``."""
    index = device_index(device)
    if process.observer is not None:
        process.observer.drained_device(index)


class StreamContext:
    """``with StreamContext(stream):`` that stream is current inside; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        if stream is not None:
            _check_stream(stream, "StreamContext")
        self.stream = stream
        self._before: list[tuple[int | None, Stream]] = []

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._before.append((thread.device, current_stream(self.stream.device_index)))
        set_stream(self.stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.stream is None:
            return
        device, stream = self._before.pop()
        set_stream(stream)
        thread.device = device


def stream(stream: Stream | None) -> StreamContext:
    """The context in which ``stream`` is current."""
    return StreamContext(stream)


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """``Tensor.record_stream``: the host's allocator needs no such advice; types are checked."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"record_stream takes a tensor, not {type(tensor).__name__}")
    _check_stream(stream, "record_stream")
