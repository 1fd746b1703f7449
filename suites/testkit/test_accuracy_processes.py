"""Processes of the accuracy gate end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.cpu

CHILD = (
    "import time; from afd_testkit.accuracy.processes import end_with_parent; end_with_parent();"
    "print('up', flush=True); time.sleep(60)"
)
PARENT = (
    "import subprocess, sys, time;"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE,"
    " start_new_session=True);"
    "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
)


def test_a_child_does_not_outlive_a_killed_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert _lives(child)
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while _lives(child) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
