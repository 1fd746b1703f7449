"""Finds accesses to device memory that nothing orders (``--afd-npu-streams=check``).

On the emulated NPU kernels run when they are called, so a program with a missing wait computes
the right result here and the wrong one on a device.  Inside :func:`check_streams` every kernel's
reads and writes are noted on the stream that is current, and everything that orders streams is
followed with vector clocks (``happens_before.py``).  What is judged is the order that the program
asks for, so one run finds a fault that a device shows once in a while.

**Where memory is** cannot be told from an emulated tensor, so it is followed:

- tensors made of the host's values (``tensor``, ``from_numpy``) without a device, or with
  ``device="cpu"``, are host memory (``HOST``), with ``pin_memory`` pinned (``PINNED``); results
  of operators that touch host memory only are too;
- everything else is on the device, until :func:`mark` says otherwise, and so is what
  ``to(device)`` returns.

**Accesses.**  A kernel accesses the device tensors of its schema on the current stream and host
tensors on the host, at the launch.  Operators on host tensors only run on the host.  Copies
access both sides on the stream (a pageable source at the launch), and make the host wait for that
stream when one side is the host's and they are blocking, as ``item``, ``tolist``, ``numpy``,
``cpu``, ``nonzero`` and their like do.  Collectives count as kernels on the current stream.

Views and factories read nothing, and ``empty`` writes nothing.

**Not seen**: what numpy or C code does to memory; asynchronous collectives before their ``wait``;
memory that one stream frees and another gets from the allocator while the first still uses it
(what ``record_stream`` is for); order between host threads, unless ``host_threads="apart"``:
by default threads are taken to hand over to one another correctly.  Query of an event answers
True here, and the program may rely on it, so it orders like a wait.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from afd_testkit.npu import stream_state
from afd_testkit.npu.errors import StreamHazard
from afd_testkit.npu.stream_footprints import kernel
from afd_testkit.npu.stream_judge import HostThreads, OnHazard, StreamCheck
from afd_testkit.npu.stream_memory import Place

__all__ = ["Place", "StreamCheck", "check_streams", "enter_thread", "mark", "op_body"]

_ON_HAZARD = ("raise", "collect")
_HOST_THREADS = ("together", "apart")


@contextmanager
def check_streams(
    *,
    on_hazard: OnHazard = "raise",
    host_threads: HostThreads = "together",
    unplaced: Place = Place.DEVICE,
) -> Generator[StreamCheck, None, None]:
    """Check this thread, and those that :func:`enter_thread` adds, inside.

    ``on_hazard``: ``"raise"`` raises :class:`StreamHazard` from the second access, and again at
    the end when what was raised did not leave the block (another thread, an ``except``);
    ``"collect"`` only keeps it in ``hazards``.  ``host_threads``: see above.  ``unplaced``: where
    factories without a device argument put their tensors; on a device that is the host, unless
    the device is the default.  One check at a time:
    :class:`EmulationConflict` otherwise.
    """
    _one_of("on_hazard", on_hazard, _ON_HAZARD)
    _one_of("host_threads", host_threads, _HOST_THREADS)
    check = StreamCheck(on_hazard, host_threads, unplaced)
    stream_state.observe(check)
    try:
        with _Modes(check):
            yield check
    finally:
        stream_state.stop_observing(check)
    if on_hazard == "raise" and check.hazards:
        raise StreamHazard(check.hazards[0].message)


@contextmanager
def enter_thread() -> Generator[None, None, None]:
    """Check the calling thread too while a check is on; for the first lines of a thread."""
    check = _active()
    if check is None:
        yield
        return
    check.meet_threads()
    try:
        with _Modes(check):
            yield
    finally:
        check.meet_threads()


@contextmanager
def op_body() -> Generator[None, None, None]:
    """Inside the Python body of an operator that calls kernels: check those, not the operator.

    torch turns modes off in such a body, and the whole operator would count as one kernel, on
    the stream that is current at its end.
    """
    check = _active()
    if check is None or not _thread.bodies:
        yield
        return
    _thread.bodies[-1] = True
    with _Modes(check):
        yield


def mark(tensor: torch.Tensor, place: Place) -> None:
    """Say where the memory of ``tensor`` is, right after it is made; nothing without a check."""
    if (check := _active()) is not None:
        check.place(tensor, place)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; choose {' or '.join(map(repr, allowed))}.")


def _active() -> StreamCheck | None:
    observer = stream_state.observer()
    return observer if isinstance(observer, StreamCheck) else None


class _Thread(threading.local):
    """``bodies``: for each operator that runs, whether :func:`op_body` opened it.  ``asked``:
    where the function that runs was asked to make its result."""

    def __init__(self) -> None:
        self.bodies: list[bool] = []
        self.asked: Place | None = None


_thread = _Thread()


class _Modes:
    """Both modes of one thread, entered and left together."""

    def __init__(self, check: StreamCheck) -> None:
        self._host = _HostMode(check)
        self._kernels = _KernelMode(check)

    def __enter__(self) -> None:
        self._host.__enter__()
        try:
            self._kernels.__enter__()
        except BaseException:
            self._host.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._kernels.__exit__(*error)
        finally:
            self._host.__exit__(*error)


class _KernelMode(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operator below autograd."""

    def __init__(self, check: StreamCheck) -> None:
        super().__init__()
        self._check = check

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if stream_state.observer() is not self._check:
            return func(*args, **kwargs)  # The thread outlived the check.
        described = kernel(func)
        if described.changes_memory:
            self._check.forget(args[0])
        _thread.bodies.append(False)
        try:
            out = func(*args, **kwargs)
        finally:
            opened = _thread.bodies.pop()
        if not opened:
            self._check.ran(described, args, kwargs, out, _thread.asked)
        return out


_READS = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "__array__",
    torch.Tensor.cpu: "cpu",
}


class _HostMode(TorchFunctionMode):  # type: ignore[misc]
    """Sees what reaches no operator on the CPU: reads by the host, and what a device was asked."""

    def __init__(self, check: StreamCheck) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if stream_state.observer() is not self._check:
            return func(*args, **kwargs)
        if func is torch.Tensor.to:
            out = func(*args, **kwargs)
            self._moved(args, kwargs, out)
            return out
        before, _thread.asked = _thread.asked, _place_asked(kwargs)
        try:
            out = func(*args, **kwargs)
        finally:
            _thread.asked = before
        if func in _READS:
            self._check.host_reads(args[0], _READS[func])
        elif func is torch.Tensor.pin_memory:
            self._check.place(out, Place.PINNED)
        return out

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
        """``tensor.to(...)``, which copies nothing on the CPU when nothing else changes."""
        source, asked = args[0], kwargs.get("device", args[1] if len(args) > 1 else None)
        if not isinstance(asked, str | torch.device | int):
            return
        # to(device, dtype, non_blocking), or to(other-free keywords).
        waits = not (kwargs.get("non_blocking") or (len(args) > 3 and args[3]))
        was = self._check.place_of(source)
        place = _place_named(asked)
        if place is Place.HOST and was is Place.DEVICE:
            self._check.host_reads(source, "to", waits=waits)
            if out.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
                self._check.place(out, Place.HOST, moved=True)
        elif place is Place.DEVICE and was is not Place.DEVICE:
            # The same memory may now be used by kernels; the host's tensor is rarely used again.
            self._check.place(out, Place.DEVICE, moved=True)


def _place_asked(kwargs: dict[str, Any]) -> Place | None:
    if not kwargs:
        return None
    if kwargs.get("pin_memory") is True:
        return Place.PINNED
    device = kwargs.get("device")
    return None if device is None else _place_named(device)


def _place_named(device: object) -> Place:
    """An emulated device's ``torch.device`` is the CPU's: only the plain name means the host."""
    return Place.HOST if isinstance(device, str) and device.startswith("cpu") else Place.DEVICE
