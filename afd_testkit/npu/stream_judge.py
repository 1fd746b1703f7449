"""One stream check: follows the orders and the memory, and judges every access.

What counts as an access, and where, is written in ``stream_check.py``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from afd_testkit.npu import stream_state, streams
from afd_testkit.npu.errors import StreamHazard
from afd_testkit.npu.happens_before import Actor, Clock, HappensBefore
from afd_testkit.npu.stream_footprints import (
    Kernel,
    has_memory,
    host_waits,
    region,
    tensors_of,
    touched,
)
from afd_testkit.npu.stream_memory import Block, Memory, Place
from afd_testkit.npu.stream_report import Hazard, Note, call_site
from afd_testkit.npu.streams import Stream

OnHazard = Literal["raise", "collect"]
HostThreads = Literal["together", "apart"]
_Given = list[tuple[torch.Tensor, bool, Block]]
_Fresh = list[tuple[torch.Tensor, Block]]


class StreamCheck(stream_state.StreamObserver):
    """One check: the clocks, the memory, and the hazards found so far, each pair of sites once."""

    def __init__(self, on_hazard: OnHazard, host_threads: HostThreads, unplaced: Place) -> None:
        self.on_hazard = on_hazard
        self.host_threads = host_threads
        self.unplaced = unplaced
        self._found: dict[tuple[Any, ...], Hazard] = {}
        self._lock = threading.RLock()
        self._order = HappensBefore()
        self._memory = Memory(self._order)
        self._thread = threading.local()
        self._thread_numbers = itertools.count()
        self._host()

    @property
    def hazards(self) -> list[Hazard]:
        """What was found, in the order in which it was."""
        return list(self._found.values())

    # Order: what streams.py tells.

    def recorded(self, stream: Stream) -> object:
        with self._lock:
            return _Mark(self, self._order.clock(self._launch(stream)))

    def waited(self, stream: Stream, mark: object) -> None:
        with self._lock:
            if clock := self._clock_of(mark):
                self._order.join(stream.key, clock)

    def reached(self, mark: object) -> None:
        with self._lock:
            if clock := self._clock_of(mark):
                self._order.join(self._host(), clock)

    def drained(self, stream: Stream) -> None:
        with self._lock:
            self._order.follow(self._host(), self._launch(stream))

    def drained_device(self, index: int) -> None:
        with self._lock:
            for actor in self._order.actors:
                if isinstance(actor, tuple) and actor[0] == index:
                    self._order.follow(self._host(), actor)

    def meet_threads(self) -> None:
        """A thread starts or ends: who started it, or joins it, is not known, so all meet it."""
        with self._lock:
            own = self._host()
            for other in list(self._order.witnesses):
                self._order.follow(own, other)
            for other in self._order.witnesses:
                self._order.follow(other, own)

    def _clock_of(self, mark: object) -> Clock | None:
        # An event may have been recorded under an earlier check, whose clocks are others.
        return mark.clock if isinstance(mark, _Mark) and mark.check is self else None

    def _host(self) -> Actor:
        if self.host_threads == "together":
            name = "the host"
        else:
            if "name" not in vars(self._thread):
                self._thread.name = f"host thread {next(self._thread_numbers)}"
            name = str(self._thread.name)
        self._order.witnesses.add(name)
        return name

    def _launch(self, stream: Stream) -> Actor:
        """The stream, whose next command comes after what this host thread did."""
        self._order.follow(stream.key, self._host())
        return stream.key

    # Accesses: what the modes tell.

    def ran(
        self,
        described: Kernel,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        out: object,
        asked: Place | None = None,
    ) -> None:
        """An operator ran, on the device or on the host; ``asked``: where its result shall be."""
        results = [tensor for tensor in tensors_of(out) if has_memory(tensor)]
        with self._lock:
            given = [
                (tensor, writes, self._memory.block(tensor))
                for tensor, writes in touched(described, args, kwargs)
                if has_memory(tensor)
            ]
            fresh = self._fresh(results, given)
            if results and not fresh and not any(writes for _, writes, _ in given):
                if described.from_host and given:
                    given[0][2].place = asked or Place.HOST
                return  # A view.
            self._place_results(given, fresh, asked)
            call = _Call(self, described.name)
            on_host = all(block.place is not Place.DEVICE for _, _, block in given) and all(
                block.place is not Place.DEVICE for _, block in fresh
            )
            given = given if described.reads else []
            fresh = fresh if described.fills else []
            if on_host:
                call.all_on_host(given, fresh)
            elif described.is_copy:
                self._copy(call, given, fresh, not _non_blocking(described, args, kwargs))
            else:
                self._on_device(call, given, fresh)
                if host_waits(described, args, kwargs):
                    self.drained(call.stream)
        self._report(call.hazards)

    def host_reads(self, tensor: torch.Tensor, operator: str, *, waits: bool = True) -> None:
        """The host gets the tensor's values, and ``waits`` for them if they are on the device."""
        if not has_memory(tensor):
            return
        with self._lock:
            block = self._memory.block(tensor)
            call = _Call(self, operator)
            if block.place is Place.DEVICE:
                call.on_stream(tensor, block, writes=False)
                if waits:
                    self.drained(call.stream)
            else:
                call.on_host(tensor, block, writes=False)
        self._report(call.hazards)

    def place(self, tensor: torch.Tensor, place: Place, *, moved: bool = False) -> None:
        """The tensor's memory is at ``place``.

        Accesses until now were noted as if it were elsewhere and are forgotten, unless the
        tensor has ``moved`` there.
        """
        if has_memory(tensor):
            with self._lock:
                block = self._memory.block(tensor)
                if not moved and block.place is not place:
                    self._order.forget(block.number)
                block.place = place

    def place_of(self, tensor: torch.Tensor) -> Place:
        """Where the tensor's memory is taken to be."""
        with self._lock:
            return self._memory.block(tensor).place if has_memory(tensor) else Place.DEVICE

    def forget(self, tensor: torch.Tensor) -> None:
        """The tensor is about to get other memory."""
        with self._lock:
            if has_memory(tensor):
                self._memory.forget(tensor)

    def _fresh(self, results: list[torch.Tensor], given: _Given) -> _Fresh:
        """Results in memory of their own; schemas do not always tell (reshape, contiguous)."""
        known = {block.number for _, _, block in given}
        fresh = [(tensor, self._memory.block(tensor)) for tensor in results]
        return [(tensor, block) for tensor, block in fresh if block.number not in known]

    def _place_results(self, given: _Given, fresh: _Fresh, asked: Place | None) -> None:
        """Results are where it is asked, else on the device if an argument is there."""
        place = asked or self.unplaced
        if given and asked is None:
            device = any(block.place is Place.DEVICE for _, _, block in given)
            place = Place.DEVICE if device else Place.HOST
        for _, block in fresh:
            block.place = place

    def _on_device(self, call: _Call, given: _Given, fresh: _Fresh) -> None:
        for tensor, writes, block in given:
            if block.place is not Place.DEVICE and not writes:
                call.on_host(tensor, block, writes=False)
        for tensor, writes, block in given:
            if block.place is Place.DEVICE or writes:
                call.on_stream(tensor, block, writes=writes)
        for tensor, block in fresh:
            call.on_stream(tensor, block, writes=True)

    def _copy(self, call: _Call, given: _Given, fresh: _Fresh, blocking: bool) -> None:
        places = [block.place for _, _, block in given]
        for tensor, writes, block in given:
            if block.place is Place.HOST and not writes:
                call.on_host(tensor, block, writes=False)
            else:
                call.on_stream(tensor, block, writes=writes)
        for tensor, block in fresh:
            call.on_stream(tensor, block, writes=True)
        if blocking and any(place is not Place.DEVICE for place in places):
            self.drained(call.stream)

    def _report(self, hazards: list[Hazard]) -> None:
        for hazard in hazards:
            self._found.setdefault(hazard.key, hazard)
        if hazards and self.on_hazard == "raise":
            raise StreamHazard(hazards[0].message)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What an event keeps: whose clocks, and how far they were."""

    check: StreamCheck
    clock: Clock


class _Call:
    """One operator's accesses, which are one step of the stream, of the host, or of both."""

    def __init__(self, check: StreamCheck, operator: str) -> None:
        self.stream = streams.current_stream()
        self.hazards: list[Hazard] = []
        self._check = check
        self._operator = operator
        self._site = call_site()
        self._ticks: dict[Actor, int] = {}

    def all_on_host(self, given: _Given, fresh: _Fresh) -> None:
        """The operator runs on the host."""
        for tensor, writes, block in given:
            self.on_host(tensor, block, writes=writes)
        for tensor, block in fresh:
            self.on_host(tensor, block, writes=True)

    def on_stream(self, tensor: torch.Tensor, block: Block, *, writes: bool) -> None:
        """The kernel accesses ``tensor`` on the current stream."""
        key = self.stream.key
        if key not in self._ticks:
            self._check._launch(self.stream)
        self._access(key, f"stream {key[1]} of npu:{key[0]}", tensor, block, writes)

    def on_host(self, tensor: torch.Tensor, block: Block, *, writes: bool) -> None:
        """This thread accesses ``tensor``."""
        host = self._check._host()
        self._access(host, str(host), tensor, block, writes)

    def _access(
        self, actor: Actor, name: str, tensor: torch.Tensor, block: Block, writes: bool
    ) -> None:
        order = self._check._order
        if actor not in self._ticks:
            self._ticks[actor] = order.tick(actor)
        note = Note(self._operator, name, self._site, tensor.dtype, tuple(tensor.shape))
        later, conflicts = order.access(
            block.number,
            region(tensor),
            actor,
            writes=writes,
            tick=self._ticks[actor],
            note=note,
        )
        self.hazards += [Hazard(earlier, later, block.nbytes) for earlier in conflicts]


def _non_blocking(described: Kernel, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    # aten::copy_(self, src, non_blocking=False); aten::_to_copy has it by name only.
    if described.name == "aten::copy_" and len(args) > 2:
        return bool(args[2])
    return bool(kwargs.get("non_blocking", False))
