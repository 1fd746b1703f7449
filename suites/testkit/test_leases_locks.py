"""Lock files: shared by users, held by one process, gone with it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afd_testkit.file_lock import FileLock, LockError

pytestmark = pytest.mark.cpu

HOLDER = """
import subprocess, sys, time, os
from pathlib import Path
from afd_testkit.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.try_take("the holder")
reading, writing = os.pipe()
child = {child}
print(child, flush=True)
time.sleep(600)
"""
#: How the holder starts a child that outlives it; each leaves the child's process id.
CHILDREN = {
    "none": "0",
    "fork": (
        "os.fork()\nif child == 0:\n    os.write(writing, b'.')\n    time.sleep(600)\n"
        "os.read(reading, 1)"
    ),
    "program": "subprocess.Popen(['sleep', '600'], close_fds=False).pid",
}


Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start_holder(tmp_path: Path) -> Iterator[Start]:
    """Start a process that holds ``tmp_path/lock``; it and its child are ended afterwards."""
    processes: list[subprocess.Popen[str]] = []
    children: list[int] = []

    def start(child: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER.format(child=CHILDREN[child]), str(tmp_path / "lock")],
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        # Its line comes when the lock is held and the child runs.
        children.append(int(process.stdout.readline()))
        return process

    yield start
    for process in processes:
        process.kill()
    for pid in filter(None, children):  # first: they have the pipe too
        os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.communicate()


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert (first.holder(), first.held) == ("", False)
    assert first.try_take("one")
    assert not second.try_take("two")
    assert (first.held, second.held, second.holder()) == (True, False, "one")
    first.release()
    assert (first.held, second.holder()) == (False, "")
    assert second.try_take("2")
    assert first.holder() == "2"
    second.release()
    second.release()


def test_taking_twice_is_refused(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.try_take("")
    with pytest.raises(LockError, match="already held by this object"):
        lock.try_take("")
    lock.release()


@pytest.mark.parametrize("child", sorted(CHILDREN))
def test_a_killed_holder_frees_the_lock(tmp_path: Path, start_holder: Start, child: str) -> None:
    lock = FileLock(tmp_path / "lock")
    holder = start_holder(child)
    assert not lock.try_take("mine")
    assert lock.holder() == "the holder"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert lock.try_take("mine")
    lock.release()


FORKING = """
import os, sys
from pathlib import Path
from afd_testkit.file_lock import FileLock
lock, other = FileLock(Path(sys.argv[1])), FileLock(Path(sys.argv[1]))
assert lock.try_take("parent")
child = os.fork()
if child == 0:
    lock.release()
    os._exit(int(lock.held))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), other.try_take("other"), other.holder())
"""


def test_a_forked_child_cannot_free_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKING, str(tmp_path / "lock")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "0 False parent\n"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_other_users_may_use_folder_and_file(tmp_path: Path, umask: int) -> None:
    lock = FileLock(tmp_path / "locks" / "npu-0.lock")
    before = os.umask(umask)
    try:
        assert lock.try_take("")
    finally:
        os.umask(before)
    lock.release()
    assert stat.S_IMODE(lock.path.stat().st_mode) == 0o666
    assert stat.S_IMODE(lock.path.parent.stat().st_mode) == 0o1777
    assert [entry.name for entry in tmp_path.iterdir()] == ["locks"]
    assert [entry.name for entry in lock.path.parent.iterdir()] == ["npu-0.lock"]


def test_a_file_that_was_tidied_away_is_made_anew(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.try_take("")
    lock.release()
    lock.path.unlink()
    assert lock.try_take("again")
    assert lock.holder() == "again"
    lock.release()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(LockError, match="--afd-npu-locks"):
        FileLock(tmp_path / "lock").try_take("note")
    assert (tmp_path / "precious").read_text() == "keep"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "lock"
    with pytest.raises(LockError, match=rf"{path} cannot be opened \(Not a directory\)"):
        FileLock(path).try_take("")
