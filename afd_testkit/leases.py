"""Physical NPUs on loan: each device to one test at a time, on the whole host.

A lease takes all of its devices or none.  Whoever cannot have all at once gives back what it
got and tries again, except one: the first to find the collecting lock free keeps what it gets
until it has all, so that a test that wants many devices has its turn among tests that want few;
newcomers let it look first.  Only that one holds some while it waits for others, so that no two
can wait for each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from afd_testkit.device_pool import VISIBLE, Device
from afd_testkit.file_lock import FileLock
from afd_testkit.ports import HeldPorts, hold_ports

#: The same for every user and every TMPDIR of the host.
DEFAULT_LOCKS = Path("/tmp/afd-npu-locks")
DEFAULT_WAIT = 600.0
_POLL_SECONDS = 0.05
_COLLECT_SECONDS = 0.01
_REPEAT_SECONDS = 30.0


class LeaseError(Exception):
    """Devices cannot be leased: what was asked for, what there is, what to do."""


@dataclass
class Lease:
    """Devices that no other test of this host uses until the lease ends.

    ``devices``: physical numbers, ascending.  ``visible``: the value of
    ``ASCEND_RT_VISIBLE_DEVICES`` that shows just these, in the same order: device 0 of a process
    that is started with it is ``devices[0]``.
    """

    devices: tuple[int, ...]
    visible: str
    _ports: list[HeldPorts] = field(default_factory=list, repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment."""
        return {VISIBLE: self.visible}

    def ports(self, count: int, *, consecutive: bool = False) -> HeldPorts:
        """Free ports, held until they are released or the lease ends; see ``ports.hold_ports``."""
        held = hold_ports(count, consecutive=consecutive)
        self._ports.append(held)
        return held

    def _release_ports(self) -> None:
        for held in self._ports:
            held.release()


@dataclass(frozen=True)
class NpuPool:
    """What leases are taken from: ``devices``, locked by files in the folder ``locks``.

    ``wait``: seconds after which a lease that others keep from being had is an error.
    """

    devices: tuple[Device, ...]
    locks: Path = DEFAULT_LOCKS
    wait: float = DEFAULT_WAIT

    @contextmanager
    def lease(
        self, amount: int, who: str, tell: Callable[[str], None] = lambda _line: None
    ) -> Iterator[Lease]:
        """``amount`` devices for the time inside, in ascending order those that are free first.

        ``who`` is shown to others that wait; ``tell`` gets a line when this one has to.
        Raises :class:`LeaseError` when there are too few devices, or others held them too long.
        A lease inside a lease may wait for itself, until the time is over.
        """
        if amount < 1:
            raise LeaseError(f"{who} asks for {amount} NPUs; ask for 1 or more.")
        if amount > len(self.devices):
            raise LeaseError(
                f"{who} asks for {amount} NPUs, {len(self.devices)} can be used here; ask for "
                f"fewer, or let {VISIBLE} show more."
            )
        taking = _Taking(self, amount, who, tell)
        try:
            taking.wait_for_all()
            devices = taking.devices()
            lease = Lease(
                tuple(device.physical for device in devices),
                ",".join(str(device.visible) for device in devices),
            )
            try:
                yield lease
            finally:
                lease._release_ports()
        finally:
            taking.release()


class _Taking:
    """One attempt to get ``amount`` devices, from its start to the end of its lease."""

    def __init__(self, pool: NpuPool, amount: int, who: str, tell: Callable[[str], None]) -> None:
        self._pool = pool
        self._amount = amount
        self._who = who
        self._tell = tell
        self._note = f"pid {os.getpid()} of uid {os.getuid()}, {who}"
        ordered = sorted(pool.devices)
        self._locks = {d: FileLock(pool.locks / f"npu-{d.physical}.lock") for d in ordered}
        self._collecting = FileLock(pool.locks / "collecting.lock")

    def devices(self) -> Sequence[Device]:
        """Those that are held, ascending."""
        return [device for device, lock in self._locks.items() if lock.held]

    def wait_for_all(self) -> None:
        """Return when all are held; :class:`LeaseError` after the pool's time."""
        start = time.monotonic()
        told: float | None = None
        if self._somebody_collects():
            # A device that was let go a moment ago is for that one to find.
            time.sleep(_POLL_SECONDS)
        while not self._take():
            waited = time.monotonic() - start
            if waited >= self._pool.wait:
                raise LeaseError(
                    f"{self._asks()}: not free after {waited:.1f} s, {self._others()}. End what "
                    "holds them, or allow more time with --afd-npu-wait SECONDS."
                )
            if told is None or waited - told >= _REPEAT_SECONDS:
                told = waited
                self._tell(
                    f"afd: {self._asks()}: waiting for {waited:.0f} of at most "
                    f"{self._pool.wait:g} s, {self._others()}"
                )
            pause = _COLLECT_SECONDS if self._collecting.held else _POLL_SECONDS
            time.sleep(min(pause, self._pool.wait - waited))
        self._collecting.release()

    def release(self) -> None:
        """Give everything back."""
        for lock in (*self._locks.values(), self._collecting):
            lock.release()

    def _take(self) -> bool:
        """Take what is free; keep it when it is all, or when this is the one that collects."""
        for lock in self._locks.values():
            if len(self.devices()) < self._amount and not lock.held:
                lock.try_take(self._note)
        if len(self.devices()) == self._amount:
            return True
        if not self._collecting.held and not self._collecting.try_take(self._note):
            self.release()
        return False

    def _somebody_collects(self) -> bool:
        free = self._collecting.try_take(self._note)
        self._collecting.release()
        return not free

    def _asks(self) -> str:
        names = ", ".join(str(device.physical) for device in self._locks)
        return f"{self._who} needs {self._amount} of the NPUs {names}"

    def _others(self) -> str:
        """Who holds what this one does not, as far as they say."""
        notes = [
            f"{device.physical} is held by {lock.holder() or 'somebody who left no note'}"
            for device, lock in self._locks.items()
            if not lock.held
        ]
        return "; ".join(notes) or "all free by now"
