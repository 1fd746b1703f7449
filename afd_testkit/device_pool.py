"""Which physical NPUs a run may use, found without importing anything large.

The caller's ``ASCEND_RT_VISIBLE_DEVICES`` chooses among the devices of the host, which are the
nodes ``/dev/davinci0``, ``/dev/davinci1``, …, or, where no node can be seen, what ``npu-smi info
-l`` counts.

CANN numbers the devices that it can open from 0 in ascending order of their nodes, and the
variable speaks of those numbers.  On a host they are the nodes' own; in a container that was
given ``/dev/davinci4`` and ``/dev/davinci5`` they are 0 and 1.  Numbers that only exist as nodes
are taken as such.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
#: Set to 1 where the NPU is emulated.
EMULATED = "AFD_NPU_EMULATED"
_SMI_SECONDS = 20


class VisibleDevicesError(Exception):
    """``ASCEND_RT_VISIBLE_DEVICES`` does not name devices of this host."""


class Device(NamedTuple):
    """``physical``: number of the host's device node.  ``visible``: how
    ``ASCEND_RT_VISIBLE_DEVICES`` calls it here."""

    physical: int
    visible: int


class Host(NamedTuple):
    """Numbers of all devices, ascending, and where they were found or looked for."""

    numbers: tuple[int, ...]
    source: str


def is_emulated(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs on the emulated NPU, so that no device is what it seems."""
    return environment.get(EMULATED, "") not in ("", "0")


def list_npus() -> tuple[int, str]:
    """The number of chips that ``npu-smi info -l`` counts, and what it had to say."""
    program = shutil.which("npu-smi")
    if program is None:
        return 0, "npu-smi is not on PATH"
    try:
        ran = subprocess.run(
            [program, "info", "-l"], capture_output=True, text=True, timeout=_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 0, f"`npu-smi info -l` failed: {error}"
    if ran.returncode != 0:
        return 0, f"`npu-smi info -l` ended with status {ran.returncode}"
    # Two lines a card among others: "NPU ID : 0" and "Chip Count : 1".
    counts = re.findall(r"^\s*Chip Count\s*:\s*(\d+)\s*$", ran.stdout, re.MULTILINE)
    return sum(map(int, counts)), "`npu-smi info -l`"


def find_host(
    nodes: Path = Path("/dev"), list_npus: Callable[[], tuple[int, str]] = list_npus
) -> Host:
    """All devices of this host, or container."""
    matches = (re.fullmatch(r"davinci(\d+)", node.name) for node in nodes.glob("davinci[0-9]*"))
    numbers = sorted(int(match[1]) for match in matches if match)
    if numbers:
        return Host(tuple(numbers), f"{nodes}/davinci*")
    count, said = list_npus()
    return Host(tuple(range(count)), f"no {nodes}/davinci0 or higher; {said}")


def visible_numbers(text: str) -> tuple[int, ...]:
    """The numbers in a value of ``ASCEND_RT_VISIBLE_DEVICES``, in its order.

    Raises :class:`VisibleDevicesError` for anything but distinct numbers joined by commas: CANN
    would silently use only what stands before the first other character.
    """
    numbers = [int(part) for part in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else []
    if not numbers or len(set(numbers)) != len(numbers):
        raise VisibleDevicesError(
            f"{VISIBLE}={text!r}; allowed are distinct device numbers joined by commas, without "
            "spaces, as in 4,5,6. Correct the value, or unset the variable to use every device."
        )
    return tuple(numbers)


def choose(host: Host, text: str | None) -> tuple[Device, ...]:
    """The devices of ``host`` that a value of the variable leaves, ascending; all for ``None``.

    Raises :class:`VisibleDevicesError` for a value that names devices that do not exist.
    """
    if text is None:
        return tuple(Device(number, place) for place, number in enumerate(host.numbers))
    wanted = sorted(visible_numbers(text))
    if not host.numbers:
        return ()
    if wanted[-1] < len(host.numbers):
        return tuple(Device(host.numbers[number], number) for number in wanted)
    absent = [number for number in wanted if number not in host.numbers]
    if absent:
        raise VisibleDevicesError(
            f"{VISIBLE}={text!r} names {_list(absent)}, which {'are' if absent[1:] else 'is'} not "
            f"among the devices {_list(host.numbers)} ({host.source}). Name some of those, or "
            "unset the variable to use all of them."
        )
    return tuple(Device(number, number) for number in wanted)


def find_devices(
    host: Callable[[], Host] = find_host, environment: Mapping[str, str] = os.environ
) -> tuple[Device, ...]:
    """The devices that this process may use.  Raises :class:`VisibleDevicesError`."""
    return choose(host(), environment.get(VISIBLE))


def why_too_few(
    amount: int,
    host: Callable[[], Host] = find_host,
    environment: Mapping[str, str] = os.environ,
) -> str | None:
    """Why ``amount`` devices cannot be had at all, ``None`` when they can."""
    found, text = host(), environment.get(VISIBLE)
    try:
        usable = choose(found, text)
    except VisibleDevicesError as error:
        return str(error).rstrip(".")
    if len(usable) >= amount:
        return None
    lacking = f"{amount} NPU {'devices are' if amount > 1 else 'device is'} needed, "
    if not found.numbers:
        return f"{lacking}found none ({found.source})"
    of_all = f" of {len(found.numbers)} through {VISIBLE}={text!r}" if text is not None else ""
    return f"{lacking}found {len(usable)}{of_all}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
