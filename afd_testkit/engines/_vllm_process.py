"""The parent's side of one engine process: start it, ask it, time it, end it with its workers.

The engine's process leads a process group that its workers join, so that nothing of it can
stay behind.  A process that does not answer in time is asked for the stacks of its threads,
and so are its workers, before all of them are killed.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from afd_testkit.engines import _processes
from afd_testkit.engines._vllm_child import STACKS, ChildStart, child_main
from afd_testkit.engines.base import EngineDied, EngineError

_TAIL_LINES = 15
_STOP_SECONDS = 5.0
_LOOK = 1.0  # seconds between two looks at the worker processes
_NOTICE_SECONDS = 10.0  # for an engine to report that a worker is gone
_LOG_SECONDS = 7 * 24 * 3600.0


class EngineProcess:
    """One engine process; ``title`` says in messages whose it is.

    ``start_seconds`` and ``run_seconds``: how long it may take to start, and to answer.
    """

    def __init__(
        self,
        start: ChildStart,
        title: str,
        say: Callable[[str], None],
        start_seconds: float,
        run_seconds: float,
    ) -> None:
        self._start = start
        self._title = title
        self._say = say
        self._run_seconds = run_seconds
        self._closed = False
        self.info: dict[str, Any] = {}
        self.log_path = Path(start.log_path)
        try:
            self._process, self._pipe = start_process(start, self._progress)
        except BaseException:
            shutil.rmtree(start.scratch, ignore_errors=True)
            raise
        self._deadline = time.monotonic() + start_seconds
        self._allowed = start_seconds

    def wait_ready(self) -> None:
        """Until the engine answers; then ``info`` is there."""
        self.info = self.receive()

    def send(self, *request: Any) -> None:
        """Send a request whose answer :meth:`receive` will wait for."""
        if self._closed:
            raise EngineDied(f"the engine {self._title} was stopped before; start a new one")
        self._deadline = time.monotonic() + self._run_seconds
        self._allowed = self._run_seconds
        try:
            self._pipe.send(request)
        except (BrokenPipeError, ConnectionResetError):
            self._raise_died()

    def receive(self) -> Any:
        """The answer to the last request.

        When the wait is interrupted (Ctrl-C), the engine is stopped: its answer would be
        taken for the next request's.
        """
        try:
            while True:
                left = max(0.0, self._deadline - time.monotonic())
                if not connection.wait([self._pipe, self._process.sentinel], min(left, _LOOK)):
                    self._check_time(left)
                    continue
                if not self._pipe.poll():
                    self._raise_died()
                try:
                    kind, value = self._pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._raise_died()
                if kind == "progress":
                    self._progress(value)
                elif kind == "error":
                    if gone := self._dead_workers():
                        self._raise_workers_died(gone)
                    raise EngineError(f"{self._title}: {value}")
                else:
                    return value
        except EngineError:
            if not self.info:  # failed to start: nothing will use the process
                self.kill()
            raise
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        """Stop the process; calling it twice is harmless."""
        if self._closed:
            return
        shared = self._shared_memory()
        with suppress(OSError):  # already gone, which is what was wanted
            self._pipe.send(("stop",))
        self._process.join(_STOP_SECONDS)
        self.kill()
        _processes.remove_shared_memory(shared)

    def kill(self) -> None:
        """Make sure that all processes of the engine are gone and nothing is kept open."""
        if self._closed:
            return
        self._closed = True
        shared = self._shared_memory()
        if self._process.pid is not None:
            _processes.kill_group(self._process.pid)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_STOP_SECONDS)
        self._pipe.close()
        _processes.remove_shared_memory(shared)
        shutil.rmtree(self._start.scratch, ignore_errors=True)

    def _shared_memory(self) -> set[str]:
        pid = self._process.pid
        return set() if pid is None else _processes.shared_memory(pid)

    def _progress(self, text: str) -> None:
        self._say(f"{self._start.backend.name}: {text}")

    def _check_time(self, left: float) -> None:
        """After some time without an answer: raise if there will be none."""
        gone = self._dead_workers()
        if gone:  # the engine notices by itself, and then says more than we could
            self._deadline = min(self._deadline, time.monotonic() + _NOTICE_SECONDS)
        if left <= 0:
            if gone:
                self._raise_workers_died(gone)
            self._raise_hung()

    def _dead_workers(self) -> list[str]:
        """Worker processes that are gone."""
        workers = self.info.get("workers", {})
        return [
            f"{name} (pid {pid})" for name, pid in workers.items() if not _processes.is_running(pid)
        ]

    def _raise_workers_died(self, gone: list[str]) -> NoReturn:
        self.kill()
        raise EngineDied(
            f"the engine's process ended: {', '.join(gone)}: {self._title}\n{self._log_text()}"
        )

    def _raise_died(self) -> NoReturn:
        self._process.join(_STOP_SECONDS)
        how = _exit_text(self._process.exitcode)
        self.kill()
        raise EngineDied(f"the engine's process ended ({how}): {self._title}\n{self._log_text()}")

    def _raise_hung(self) -> NoReturn:
        pid = self._process.pid
        names = {pid: "engine" for pid in (pid,) if pid is not None}
        names |= {pid: name for name, pid in self.info.get("workers", {}).items()}
        stacks = _processes.stacks(pid, Path(self._start.scratch) / STACKS, names) if pid else ""
        self.kill()
        raise EngineDied(
            f"the engine's process gave no answer in {self._allowed:g} s and was killed: "
            f"{self._title}\n{stacks}\n{self._log_text()}"
        )

    def _log_text(self) -> str:
        return f"end of its log {self.log_path}:\n{_tail(self.log_path)}"


def new_log(folder: Path, name: str) -> Path:
    """An empty log file; logs older than a week make room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{name}-*.log"):
            if time.time() - old.stat().st_mtime > _LOG_SECONDS:
                old.unlink(missing_ok=True)
        handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=folder)
    except OSError as error:
        raise EngineError(
            f"cannot write an engine log in {folder}: {error}; choose another cache folder"
        ) from error
    os.close(handle)
    return Path(path)


def start_process(
    start: ChildStart, progress: Callable[[str], None]
) -> tuple[BaseProcess, connection.Connection]:
    """Start the child from the fork server, or afresh when there is none to be had."""
    methods = multiprocessing.get_all_start_methods()
    if start.backend.preload is not None and "forkserver" in methods:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([start.backend.preload])
        try:
            return _spawn(context, start)
        except (OSError, EOFError) as error:
            progress(f"no fork server ({error}); starting a fresh interpreter (slower)")
    return _spawn(multiprocessing.get_context("spawn"), start)


def _spawn(context: Any, start: ChildStart) -> tuple[BaseProcess, connection.Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(
        target=child_main, args=(theirs, start), daemon=True, name=start.backend.name
    )
    try:
        process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def _exit_text(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _tail(path: Path) -> str:
    """The last lines of a log; after a crash, those that say where Python was."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    crashes = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    shown = lines[crashes[-1] :][:_TAIL_LINES] if crashes else lines[-_TAIL_LINES:]
    return "\n".join(f"    {line[:200]}" for line in shown) or "    (empty)"
