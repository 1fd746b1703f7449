"""One lock in one file, held by one process, gone with that process however it ends.

``flock`` and not a file that exists or not: the kernel drops the lock of a killed process.  The
files are shared by all users of the host, and stay where they are; what is written in one tells
the others who holds it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

from afd_testkit.forks import drop_in_children

_FOLDER_MODE = 0o1777
_FILE_MODE = 0o666


class LockError(Exception):
    """A lock file cannot be used: what was tried, why it failed, what to do."""


class FileLock:
    """A lock that one process takes without waiting."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def try_take(self, note: str) -> bool:
        """Take the lock if it is free, and leave ``note`` for those who find it taken.

        Raises :class:`LockError` when the file or its folder cannot be made or opened.
        """
        if self.held:
            raise LockError(f"{self.path} is already held by this object; release it first.")
        try:
            descriptor = _open(self.path)
        except OSError as error:
            raise LockError(
                f"the lock {self.path} cannot be opened ({error.strerror}); name another folder "
                "with --afd-npu-locks, the same one for all who share the devices."
            ) from error
        try:
            taken = _lock(descriptor, self.path)
            if taken:
                _write(descriptor, note)
        except BaseException:
            os.close(descriptor)
            raise
        if not taken:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        drop_in_children(self)
        return True

    def holder(self) -> str:
        """The note of whoever holds the lock; empty where nobody has ever held it."""
        try:
            return self.path.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return ""

    def release(self) -> None:
        """Give the lock up; nothing when it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            _write(descriptor, "")
            # Said explicitly: closing alone frees nothing while a copy is open somewhere.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def drop_after_fork(self) -> None:
        """In a forked child: close the copy, which leaves the parent's lock alone."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _open(path: Path) -> int:
    """A descriptor of the file, which is made, with its folder, where it does not exist."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            # Without O_CREAT: Linux refuses that flag for other users' files in such a folder.
            return os.open(path, flags)
        except FileNotFoundError:
            _make_folder(path.parent)
            _make_file(path)


def _make_folder(folder: Path) -> None:
    """The folder appears with its permissions, which everybody on the host may use."""
    if folder.is_dir():
        return
    fresh = tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent)
    try:
        os.chmod(fresh, _FOLDER_MODE)
        os.rename(fresh, folder)
    except OSError:
        os.rmdir(fresh)
        if not folder.is_dir():  # otherwise somebody else was first
            raise


def _make_file(path: Path) -> None:
    """The file appears with its permissions too, whatever the umask."""
    descriptor, fresh = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        os.fchmod(descriptor, _FILE_MODE)
        os.link(fresh, path)
    except FileExistsError:
        return
    finally:
        os.close(descriptor)
        os.unlink(fresh)


def _lock(descriptor: int, path: Path) -> bool:
    """Lock the open file, unless another process has it or it is no longer the one at ``path``."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise LockError(
            f"{path} cannot be locked ({error.strerror}); name a folder on a local file system "
            "with --afd-npu-locks."
        ) from error
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:  # tidied away between opening and locking
        return False


def _write(descriptor: int, note: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, note.encode(), 0)
