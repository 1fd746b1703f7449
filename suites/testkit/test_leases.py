"""Leases between real processes: all or none, nobody starves, nobody waits for ever."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afd_testkit.device_pool import VISIBLE, Device
from afd_testkit.leases import LeaseError, NpuPool

pytestmark = pytest.mark.cpu

PAIR = (Device(0, 0), Device(1, 1))

#: Hold one of two devices for some seconds, again and again, saying each time when it has it.
HOLDER = """
import sys, time
from pathlib import Path
from afd_testkit.device_pool import Device
from afd_testkit.leases import NpuPool
folder, amount, seconds, times, pause = Path(sys.argv[1]), *map(float, sys.argv[2:])
pool = NpuPool((Device(0, 0), Device(1, 1)), folder, wait=120)
for _ in range(int(times)):
    with pool.lease(int(amount), "the holder"):
        print("holds", flush=True)
        time.sleep(seconds)
    time.sleep(pause)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_holder(tmp_path: Path) -> Iterator[Start]:
    """Start a holder; it has its first lease when this returns, and is ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(amount: int, seconds: float, times: int = 1) -> subprocess.Popen[str]:
        numbers = map(str, (amount, seconds, times, 0))
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), *numbers],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_free_devices_are_taken_in_order(tmp_path: Path) -> None:
    pool = NpuPool((Device(5, 1), Device(4, 0), Device(6, 2)), tmp_path, wait=0)
    with pool.lease(1, "one") as one, pool.lease(2, "two") as two:
        assert (one.devices, one.visible) == ((4,), "0")
        assert (two.devices, two.visible) == ((5, 6), "1,2")
        assert two.environment == {VISIBLE: "1,2"}
    with pool.lease(3, "three") as three:
        assert three.devices == (4, 5, 6)


def test_devices_come_back_after_an_error(tmp_path: Path) -> None:
    pool = NpuPool(PAIR, tmp_path, wait=0)
    with pytest.raises(ZeroDivisionError), pool.lease(2, "wrong"):
        raise ZeroDivisionError
    with pool.lease(2, "next") as lease:
        assert lease.devices == (0, 1)


@pytest.mark.parametrize(
    ("amount", "message"),
    [
        (0, "t asks for 0 NPUs; ask for 1 or more"),
        (3, "t asks for 3 NPUs, 2 can be used here; ask for fewer, or let ASCEND_RT_VISIBLE"),
    ],
)
def test_wishes_that_cannot_come_true(tmp_path: Path, amount: int, message: str) -> None:
    with pytest.raises(LeaseError, match=message), NpuPool(PAIR, tmp_path).lease(amount, "t"):
        pass


def test_all_or_none_within_bounds(tmp_path: Path, start_holder: Start) -> None:
    start_holder(1, 600)
    lines: list[str] = []
    began = time.monotonic()
    with (
        pytest.raises(LeaseError) as caught,
        NpuPool(PAIR, tmp_path, wait=0.5).lease(2, "test_it", lines.append),
    ):
        pass
    assert time.monotonic() - began >= 0.5
    message = str(caught.value)
    assert re.match(r"test_it needs 2 of the NPUs 0, 1: not free after \d+\.\d s", message)
    assert ", the holder." in message
    assert message.endswith("allow more time with --afd-npu-wait SECONDS.")
    # it was said while waiting, once, naming the holder
    assert len(lines) == 1
    assert "test_it needs 2 of the NPUs 0, 1: waiting for 0 of at most 0.5 s, 0 is held" in lines[0]
    # nothing was kept: the other device is free, and so is the right to collect
    with NpuPool(PAIR, tmp_path, wait=0).lease(1, "test_it") as lease:
        assert lease.devices == (1,)
        assert not (tmp_path / "collecting.lock").read_text()


def test_a_killed_holder_frees_its_devices(tmp_path: Path, start_holder: Start) -> None:
    holder = start_holder(2, 600)
    pool = NpuPool(PAIR, tmp_path, wait=60)
    killer = threading.Timer(0.3, holder.kill)
    killer.start()
    lines: list[str] = []
    with pool.lease(2, "heir", lines.append) as lease:
        assert lease.devices == (0, 1)
    killer.join()
    assert f"pid {holder.pid} of uid" in lines[0]
    assert holder.wait() == -9


def test_one_who_wants_all_has_a_turn_among_small_ones(tmp_path: Path, start_holder: Start) -> None:
    """Between them the two hold a device at any moment, and take the next at once."""
    holders = [start_holder(1, 0.35, times=60), start_holder(1, 0.25, times=60)]
    with NpuPool(PAIR, tmp_path, wait=15).lease(2, "large") as lease:
        assert lease.devices == (0, 1)
        assert [holder.poll() for holder in holders] == [None, None]


def test_two_who_want_all_do_not_block_each_other(tmp_path: Path, start_holder: Start) -> None:
    holders = [start_holder(2, 0.01, times=20)]
    holders.append(start_holder(2, 0.01, times=20))
    with NpuPool(PAIR, tmp_path, wait=60).lease(2, "third"):
        pass
    assert [holder.wait(timeout=60) for holder in holders] == [0, 0]


def test_ports_last_as_long_as_the_lease(tmp_path: Path) -> None:
    with NpuPool(PAIR, tmp_path, wait=0).lease(1, "ports") as lease:
        first, second = lease.ports(2), lease.ports(3, consecutive=True)
        assert len({*first.numbers, *second.numbers}) == 5
        start = second.numbers[0]
        assert second.numbers == (start, start + 1, start + 2)
        assert (first.held, second.held) == (True, True)
    assert (first.held, second.held) == (False, False)
