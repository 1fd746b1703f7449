"""Run a function on several ranks, each in a process of its own, within a bounded time.

    def body(rank: Rank, factor: int) -> int:
        with rank.gloo() as group:
            ...
        return rank.rank * factor

    assert run_ranks(4, body, 10) == [0, 10, 20, 30]

A rank that hangs is asked for the stacks of all its threads and killed, with every process of
its process group; so is everything else when a rank fails or the caller is interrupted.  When
the caller itself is killed, the ranks see its pipe close and end.  POSIX only.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from afd_testkit import rank_main
from afd_testkit.rank_main import STACK_SIGNAL, Outcome, Request

__all__ = ["Rank", "RankFailure", "RanksFailed", "run_ranks"]

Result = TypeVar("Result")

_POLL = 0.01  # seconds between two looks at the processes
_STACK_WAIT = 3.0  # seconds for a rank to write its stacks
_STACK_SETTLE = 0.1  # seconds without a further line after which they are complete
_OUTPUT_TAIL = 4000  # characters of a failed rank's output that are shown
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Rank:
    """Where the function runs: its first argument.

    ``folder``: a directory that all ranks of this run share, removed afterwards.
    ``timeout``: seconds that the whole run may take.
    """

    rank: int
    world_size: int
    folder: Path
    timeout: float

    @property
    def init_method(self) -> str:
        """A rendezvous for ``torch.distributed.init_process_group``, of this run alone."""
        return f"file://{self.folder / 'rendezvous'}"

    @contextmanager
    def gloo(self, timeout: float | None = None) -> Iterator[Any]:
        """torch's default process group on gloo over loopback, destroyed at the end.

        ``timeout``: seconds a collective may take; by default the run's own.
        """
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=self.init_method,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout if timeout is None else timeout),
        )
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True)
class RankFailure:
    """Why one rank has no result.

    ``kind``: it ``raised``; it ``died`` (exit or signal without an outcome); it ``hung`` until
    the time was over; or it was ``stopped`` because another rank had failed.
    ``error``: what it raised, if that can be pickled.  ``text``: traceback, or the stacks of all
    threads where the process could still write them, and the end of its output.
    """

    rank: int
    kind: Literal["raised", "died", "hung", "stopped"]
    text: str
    error: BaseException | None = None


class RanksFailed(Exception):
    """At least one rank has no result; the message shows each such rank's stack.

    ``failures``: in order of ranks; ``results``: what the other ranks returned.
    """

    def __init__(self, failures: tuple[RankFailure, ...], results: dict[int, Any]) -> None:
        self.failures = failures
        self.results = results
        told = "\n".join(f"--- rank {f.rank} {f.kind}\n{f.text.rstrip()}" for f in failures)
        kinds = ", ".join(f"rank {f.rank} {f.kind}" for f in failures)
        super().__init__(f"{kinds} of {len(failures) + len(results)} ranks\n{told}")


class _Process:
    """One rank's process, and the files that it leaves."""

    def __init__(self, rank: int, folder: Path, env: Mapping[str, str]) -> None:
        self.rank = rank
        self._folder = folder
        self._outcome: Outcome | None = None
        self.was_running = False  # when it was asked for its stacks
        with self._file("output").open("wb") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", rank_main.__file__, str(folder), str(rank)],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(env),
            )

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}-{self.rank}"

    def _stack(self) -> str:
        file = self._file("stack")
        return file.read_text(errors="replace") if file.exists() else ""

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def outcome(self) -> Outcome | None:
        """What it left behind; ``None`` where it died, or has not finished."""
        if self._outcome is None and self._popen.poll() == 0:
            with suppress(FileNotFoundError):  # ended by os._exit(0), say
                self._outcome = Outcome(*pickle.loads(self._file("outcome").read_bytes()))
        return self._outcome

    def ask_for_stack(self) -> None:
        if not self.has_ended():
            self.was_running = True
            # Before it has said where to write, the signal would only end it.
            if self._file("stack").exists():
                self._popen.send_signal(STACK_SIGNAL)

    def stack_size(self) -> int:
        """Characters of its stacks so far; -1 where none can come any more."""
        return -1 if self.has_ended() else len(self._stack())

    def kill(self) -> None:
        """End it and all processes of its group, and wait for it."""
        with suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self._popen.pid, signal.SIGKILL)
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._popen.wait()

    def text(self) -> str:
        stack = self._stack() or "(no stack: it had not started, or answers no signal)"
        output = self._file("output").read_text(errors="replace")[-_OUTPUT_TAIL:]
        return f"{stack.rstrip()}\n{_output(output)}"

    def failure(self, timed_out: bool) -> RankFailure:
        """Call after :meth:`kill`."""
        outcome = self.outcome()
        if self.was_running:
            kind: Literal["hung", "stopped"] = "hung" if timed_out else "stopped"
            return RankFailure(self.rank, kind, self.text())
        if outcome is None:
            code = self._popen.returncode
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            return RankFailure(self.rank, "died", f"ended {how}\n{self.text()}")
        output = self._file("output").read_text(errors="replace")[-_OUTPUT_TAIL:]
        return RankFailure(self.rank, "raised", outcome.text + _output(output), outcome.error)


def _output(text: str) -> str:
    return f"its output ended:\n{text}" if text.strip() else ""


def _request(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Request:
    if not inspect.isfunction(function) or (
        "<" in function.__qualname__ or function.__module__ == "__main__"
    ):
        raise ValueError(
            f"{function!r} cannot be found by another process; give a plain function at the top "
            "level of a module that can be imported."
        )
    return Request(
        path=[os.path.abspath(entry) for entry in sys.path],
        module=function.__module__,
        file=inspect.getsourcefile(function),
        function=function.__qualname__,
        payload=pickle.dumps(arguments),
    )


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment; one thread a rank, gloo on loopback, and ``extra``."""
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _LOOPBACK}
    return {**defaults, **os.environ, **extra}


def _wait(processes: list[_Process], deadline: float, grace: float) -> bool:
    """Until all have ended, or one failed and the others had their ``grace``; True if too late."""
    failed = False
    while not all(process.has_ended() for process in processes):
        if time.monotonic() >= deadline:
            return not failed
        if not failed and any(_has_failed(process) for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(_POLL)
    return False


def _has_failed(process: _Process) -> bool:
    if not process.has_ended():
        return False
    outcome = process.outcome()
    return outcome is None or not outcome.returned


def _end(processes: list[_Process]) -> None:
    """Collect the stacks of what still runs, then kill everything."""
    for process in processes:
        process.ask_for_stack()
    deadline = time.monotonic() + _STACK_WAIT
    before: list[int] = []
    while time.monotonic() < deadline:
        sizes = [process.stack_size() for process in processes]
        if 0 not in sizes and sizes == before:
            break
        before = sizes
        time.sleep(0 if max(sizes) < 0 else _STACK_SETTLE)
    for process in processes:
        process.kill()


def run_ranks(
    world_size: int,
    function: Callable[..., Result],
    *args: Any,
    timeout: float = 120.0,
    grace: float = 5.0,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """``function(rank, *args)`` on every rank, ``rank`` being a :class:`Rank`; results by rank.

    ``function`` must stand at the top level of a module; ``args`` and results are pickled.
    ``timeout``: seconds for everything, start of the processes included (importing torch takes
    seconds where ranks outnumber cores).  ``grace``: seconds that the other ranks have to end by
    themselves once one failed.  ``env``: variables added to the caller's environment.

    Raises :class:`RanksFailed` unless every rank returned, :class:`ValueError` for a function
    that another process cannot find.  No process is left in either case.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; give 1 or more.")
    deadline = time.monotonic() + timeout
    processes: list[_Process] = []
    with tempfile.TemporaryDirectory(prefix="afd-ranks-") as name:
        folder = Path(name)
        timed_out = False
        try:
            for number in range(world_size):
                place = Rank(number, world_size, folder, timeout)
                request = _request(function, (place, *args))
                (folder / f"request-{number}").write_bytes(pickle.dumps(tuple(request)))
                processes.append(_Process(number, folder, _environment(env or {})))
            timed_out = _wait(processes, deadline, grace)
        finally:
            _end(processes)
        outcomes = [None if p.was_running else p.outcome() for p in processes]
        results = {i: o.value for i, o in enumerate(outcomes) if o is not None and o.returned}
        if len(results) < world_size:
            failed = (p for p in processes if p.rank not in results)
            raise RanksFailed(tuple(p.failure(timed_out) for p in failed), results)
    return [results[number] for number in range(world_size)]
