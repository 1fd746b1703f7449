"""Processes of one group, as ``/proc`` shows them: who runs, in what state, and with what stacks.

Linux only, as the engines are.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from afd_testkit.engines._vllm_child import STACK_SIGNAL

_STACK_SECONDS = 3.0  # for one process to begin to write its stacks
_SETTLED = 0.1  # seconds without a further line after which they are complete
_GONE_SECONDS = 5.0
_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
}


def is_running(pid: int) -> bool:
    """Whether ``pid`` exists and is no zombie that nobody has collected."""
    return _state(pid) not in ("Z", "X", None)


def group(leader: int) -> list[int]:
    """The running processes of the group that ``leader`` leads, in the order of their ids."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(place.name))
        if fields is not None and int(fields[2]) == leader and fields[0] != "Z":
            found.append(int(place.name))
    return sorted(found)


def kill_group(leader: int) -> None:
    """Kill every process of the group and wait until the last one has ended."""
    deadline = time.monotonic() + _GONE_SECONDS
    while True:
        with suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(leader, signal.SIGKILL)
        if not group(leader) or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def shared_memory(leader: int) -> set[str]:
    """Names of the POSIX shared memory that Python processes of the group have mapped."""
    names: set[str] = set()
    for pid in group(leader):
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                place = line.partition(" /dev/shm/")[2].removesuffix(" (deleted)")
                if place.startswith("psm_"):
                    names.add(place)
    return names


def remove_shared_memory(names: set[str]) -> None:
    """Remove what killed processes could not; their resource tracker then has nothing to mend."""
    for name in names:
        with suppress(FileNotFoundError):
            memory = SharedMemory(name)
            memory.close()
            memory.unlink()


def stacks(leader: int, file: Path, names: Mapping[int, str]) -> str:
    """The stacks of all threads of all processes of the group, and of those that give none why.

    ``file``: where the processes write them when they are asked.  ``names``: of processes that
    are known by name.
    """
    texts = []
    for pid in group(leader):
        state = _STATES.get(_state(pid) or "", "in an unknown state")
        title = f"--- {names.get(pid, 'helper process')} (pid {pid}), {state}"
        texts.append(f"{title}\n{_stack(pid, file)}")
    return "\n".join(texts)


def _stack(pid: int, file: Path) -> str:
    if not _catches(pid):
        return "    (no stack: it does not listen for the question)"
    if _state(pid) in ("T", "t"):
        return "    (no stack: a stopped process cannot answer)"
    before = _size(file)
    os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_SECONDS
    size = before
    while time.monotonic() < deadline:
        time.sleep(_SETTLED)
        now = _size(file)
        if now == size and now > before:
            break
        size = now
    with file.open("rb") as opened:
        opened.seek(before)
        text = opened.read().decode(errors="replace")
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    (no stack: no answer)"


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _catches(pid: int) -> bool:
    """Whether the process has a handler for the question; to others it would be deadly."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)


def _state(pid: int) -> str | None:
    fields = _stat(pid)
    return None if fields is None else fields[0]


def _stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the state on: state, parent, group, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
