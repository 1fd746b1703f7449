"""Ports that nobody else gets while they are held, and a use that is tried again."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from afd_testkit.ports import PortError, hold_ports, is_address_in_use, with_free_ports

pytestmark = pytest.mark.cpu

ADDRESSES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")]
if socket.has_dualstack_ipv6():
    ADDRESSES += [(socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]


@contextmanager
def listening(port: int, family: int = socket.AF_INET, address: str = "") -> Iterator[None]:
    with closing(socket.socket(family, socket.SOCK_STREAM)) as server:
        server.bind((address, port))
        server.listen()
        yield


@pytest.mark.parametrize(("family", "address"), ADDRESSES)
def test_held_ports_are_nobody_elses_until_released(family: int, address: str) -> None:
    with hold_ports(2) as held:
        assert len(set(held.numbers)) == 2
        for port in held.numbers:
            with pytest.raises(OSError, match="in use"), listening(port, family, address):
                pass
        assert held.release() == held.numbers
        for port in held.numbers:
            with listening(port, family, address):
                pass


def test_many_are_all_different() -> None:
    with hold_ports(100) as one, hold_ports(100) as two:
        assert len({*one.numbers, *two.numbers}) == 200
        assert all(1024 <= port <= 65535 for port in one.numbers)


def test_consecutive_ports() -> None:
    with hold_ports(16, consecutive=True) as held:
        first = held.numbers[0]
        assert held.numbers == tuple(range(first, first + 16))
        with pytest.raises(OSError, match="in use"), listening(first + 15):
            pass


@pytest.mark.parametrize("count", [0, -1])
def test_senseless_counts_are_refused(count: int) -> None:
    with pytest.raises(PortError, match=f"{count} ports were asked for; ask for 1 or more"):
        hold_ports(count)


def test_blocks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(PortError, match="no 65000 free ports in a row"):
        hold_ports(65000, consecutive=True)


#: The parent lets its ports go while a child that was forked before is still alive.
FORKED = """
import os, signal, socket
from afd_testkit.ports import hold_ports
held = hold_ports(2)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b".")
    signal.pause()
try:
    os.read(reading, 1)  # from here on the child runs
    held.release()
    for port in held.numbers:
        socket.socket().bind(("", port))
    os.kill(child, 0)
    print("free")
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_a_forked_child_does_not_keep_them() -> None:
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", FORKED]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.stderr) == ("free\n", "")


def test_a_store_starts_on_a_released_port() -> None:
    import torch.distributed as dist

    store = with_free_ports(1, lambda ports: dist.TCPStore("127.0.0.1", ports[0], 1, True))
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_taken_port_is_tried_again_with_another() -> None:
    import torch.distributed as dist

    tried: list[int] = []

    def start(ports: tuple[int, ...]) -> int:
        tried.append(ports[0])
        if len(tried) < 3:  # somebody was faster
            with listening(ports[0]):
                dist.TCPStore("127.0.0.1", ports[0], 1, True)
        return ports[0]

    assert with_free_ports(1, start) == tried[2]
    assert len(tried) == 3


def test_the_last_attempt_raises() -> None:
    tried: list[tuple[int, ...]] = []

    def start(ports: tuple[int, ...]) -> None:
        tried.append(ports)
        with listening(ports[0]), listening(ports[0]):
            pass

    with pytest.raises(OSError, match="in use") as caught:
        with_free_ports(3, start, consecutive=True, attempts=2)
    assert len(tried) == 2
    assert all(len(ports) == 3 for ports in tried)
    assert caught.value.__notes__ == [f"2 times free ports were taken, the last were {tried[1]}."]


def test_other_errors_are_not_tried_again() -> None:
    calls = []

    def start(ports: tuple[int, ...]) -> None:
        calls.append(ports)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no")

    with pytest.raises(ConnectionRefusedError):
        with_free_ports(1, start)
    assert len(calls) == 1


def test_no_attempts_are_refused() -> None:
    with pytest.raises(PortError, match="0 attempts; allow 1 or more"):
        with_free_ports(1, lambda ports: ports, attempts=0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EADDRINUSE, "taken"), True),
        (RuntimeError("useIpv6: 0, code: -98, name: EADDRINUSE, message: address"), True),
        (RuntimeError("bind: Address already in use"), True),
        (OSError(errno.EACCES, "not allowed"), False),
        (RuntimeError("the address is not in use"), False),
    ],
)
def test_addresses_in_use_are_told_apart(error: Exception, expected: bool) -> None:
    assert is_address_in_use(error) is expected
