"""Free TCP ports, taken from the system and held until they are used.

A port that is merely looked up may be taken by the next process before it is used.  These are
bound, so that nobody else gets them; they are let go right before the use, and a use that finds
its port taken all the same is tried again with others.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Self, TypeVar

from afd_testkit.forks import drop_in_children

T = TypeVar("T")

_BLOCK_ATTEMPTS = 200
_HIGHEST = 65535


class PortError(Exception):
    """No free ports of the wanted kind, or a senseless wish."""


class HeldPorts:
    """``numbers`` are bound on all addresses, IPv4 and IPv6, until :meth:`release`."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self.numbers: tuple[int, ...] = tuple(held.getsockname()[1] for held in sockets)
        self._sockets = sockets
        drop_in_children(self)

    @property
    def held(self) -> bool:
        """Whether they are still bound."""
        return bool(self._sockets)

    def release(self) -> tuple[int, ...]:
        """Let the ports go and return their numbers; call it right before using them."""
        while self._sockets:
            self._sockets.pop().close()
        return self.numbers

    def drop_after_fork(self) -> None:
        """In a forked child: let go of the copies."""
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold_ports(count: int, *, consecutive: bool = False) -> HeldPorts:
    """``count`` different free ports; ``consecutive`` ones for a setting that takes a first port
    or a range, such as ``HCCL_IF_BASE_PORT`` and ``HCCL_HOST_SOCKET_PORT_RANGE``.

    Raises :class:`PortError`.
    """
    if count < 1:
        raise PortError(f"{count} ports were asked for; ask for 1 or more.")
    if consecutive:
        return _block(count)
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(_bound(0))
    except OSError as error:
        _close(sockets)
        raise PortError(
            f"the system gave {len(sockets)} of {count} free ports ({error.strerror}); ask for "
            "fewer, or end what holds them."
        ) from error
    return HeldPorts(sockets)


def with_free_ports(
    count: int,
    start: Callable[[tuple[int, ...]], T],
    *,
    consecutive: bool = False,
    attempts: int = 5,
) -> T:
    """What ``start`` returns when it is given ``count`` free ports that were just let go.

    It is called again with others when it raises that an address is in use, ``attempts`` times
    in all; any other error, and the last, is raised as it is.
    """
    if attempts < 1:
        raise PortError(f"{attempts} attempts; allow 1 or more.")
    attempt = 1
    while True:
        numbers = hold_ports(count, consecutive=consecutive).release()
        try:
            return start(numbers)
        except Exception as error:
            if not is_address_in_use(error):
                raise
            if attempt >= attempts:
                error.add_note(f"{attempts} times free ports were taken, the last were {numbers}.")
                raise
        attempt += 1


def is_address_in_use(error: BaseException) -> bool:
    """Whether ``error`` says so: by its number, or, as torch's stores and HCCL do, by its text."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return True
    text = str(error).lower()
    return "eaddrinuse" in text or "address already in use" in text


def _block(count: int) -> HeldPorts:
    """Ports that follow each other: a free one from the system, and the next ones if free."""
    for _ in range(_BLOCK_ATTEMPTS):
        sockets = [_bound(0)]
        first = sockets[0].getsockname()[1]
        try:
            if first + count - 1 > _HIGHEST:
                raise OSError(errno.EADDRINUSE, "no ports beyond the highest")
            for number in range(first + 1, first + count):
                sockets.append(_bound(number))
        except OSError as error:
            _close(sockets)
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise PortError(f"port {first + len(sockets)}: {error.strerror}.") from error
        else:
            return HeldPorts(sockets)
    raise PortError(
        f"no {count} free ports in a row were found in {_BLOCK_ATTEMPTS} places; ask for fewer, "
        "or end what holds ports."
    )


def _bound(number: int) -> socket.socket:
    """A socket bound to ``number`` (0: any free one) on all addresses; it does not listen."""
    if socket.has_dualstack_ipv6():
        held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        address = "::"
    else:
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        address = ""
    try:
        if address:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind((address, number))
    except OSError:
        held.close()
        raise
    return held


def _close(sockets: list[socket.socket]) -> None:
    for held in sockets:
        held.close()
