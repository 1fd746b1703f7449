"""The engine's own process: start ``_vllm_engine.ChildEngine``, answer requests over a pipe.

This module imports neither torch nor vLLM until :func:`child_main` runs, because the
parent imports it to name that function.

Protocol, one answer a request: ``("run", RunRequest)``, ``("tokenize", text)`` and
``("reset",)`` are answered by ``("result", value)`` or ``("error", message)``;
``("stop",)`` ends the process.  At start, any number of ``("progress", text)`` precede
``("result", info)`` or ``("error", message)``.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, current_process, parent_process, set_start_method
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from afd_testkit.engines.base import (
    SERVING,
    EngineConfig,
    EngineError,
    Prompt,
    RoutingSetting,
    SplitSetting,
)

if TYPE_CHECKING:
    from afd_testkit.engines._vllm_engine import ChildEngine

T = TypeVar("T")

# Asks a process of the engine for the stacks of all its threads.
STACK_SIGNAL = signal.SIGUSR1
STACKS = "stacks"  # the file in the scratch folder that they are written to

# Read when the named library is loaded or when the engine starts; set in the fork server
# and in the engine's process, never in the tests' process.
FIXED_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Ranks find each other on this host, and nothing asks a name server for its address.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Backend:
    """What tells one vLLM backend from another.

    ``afd_worker``: class path of the splitting worker.  ``versioned``: distributions whose
    versions decide the numbers.  ``preload``: module that a fork server imports; ``None`` where
    processes must not be forked.  ``facts``: said of the engine in its ``info`` and of each run.
    """

    name: str
    afd_worker: str
    versioned: tuple[str, ...]
    preload: str | None
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class ChildStart:
    """All that the process needs to start its engine.

    ``environment``: variables beside the fixed ones.  ``engine_args``: vLLM's arguments beside
    those that follow from ``config``.
    ``scratch``: folder for temporary files; the parent removes it when the process is gone.
    ``kv_cache_bytes``: size of the KV cache over all layers.
    ``threads``: OpenMP threads; fixed, because it decides the order of some sums.
    """

    backend: Backend
    config: EngineConfig
    model_path: str
    environment: Mapping[str, str]
    engine_args: Mapping[str, Any]
    needs_amx: bool
    log_path: str
    scratch: str
    kv_cache_bytes: int
    threads: int


@dataclass(frozen=True)
class RunRequest:
    """One ``PrefillEngine.run`` call, or the part of it that one data-parallel rank gets."""

    prompts: tuple[Prompt, ...]
    split: SplitSetting
    fault: str | None
    routing: RoutingSetting = SERVING


def child_main(pipe: connection.Connection, start: ChildStart) -> None:
    """Entry of the process; returns when the parent asks for it or is gone."""
    # Ctrl-C reaches the whole terminal group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A crash is reported from the log; writing a gigabyte of core file would only delay it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # multiprocessing lets only such a process have children.
    current_process().daemon = False
    _log_to(start.log_path)
    _end_with_parent()
    tempfile.tempdir = start.scratch
    write_stacks_to(start.scratch)
    os.environ.update({**FIXED_ENVIRONMENT, **start.environment})
    # vLLM lowers the thread count itself unless this is set.
    os.environ["OMP_NUM_THREADS"] = str(start.threads)
    # The lock that vLLM makes is then nameless, so that killing this process leaks nothing.
    set_start_method("fork", force=True)
    _emulate()
    from afd_testkit.engines._vllm_engine import ChildEngine

    try:
        engine = _attempt(pipe, lambda: ChildEngine(start, lambda text: _progress(pipe, text)))
        if engine is not None:
            pipe.send(("result", engine.info()))
            _serve(pipe, engine)
        # Nothing is left to save; taking engine and interpreter apart would take seconds.
        sys.stdout.flush()
        os.killpg(0, signal.SIGKILL)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os.killpg(0, signal.SIGKILL)  # the parent is gone; nobody is left to tell


def write_stacks_to(scratch: str) -> None:
    """From now on :data:`STACK_SIGNAL` appends this process's stacks to the file there."""
    file = (Path(scratch) / STACKS).open("a")
    faulthandler.register(STACK_SIGNAL, file, all_threads=True)
    _kept_open.append(file)


_kept_open: list[object] = []


def _emulate() -> None:
    """Put the emulated NPU under this process where its environment says so."""
    from afd_testkit.npu.process import EMULATED, install_with_torch

    if os.environ.get(EMULATED) == "1":
        install_with_torch()


def _serve(pipe: connection.Connection, engine: ChildEngine) -> None:
    """Answer requests until the parent sends ``stop``."""
    actions: dict[str, Callable[..., object]] = {
        "run": engine.run,
        "tokenize": engine.tokenize,
        "reset": engine.reset_prefix_cache,
    }
    while True:
        name, *arguments = pipe.recv()
        if name == "stop":
            return
        answer = _attempt(pipe, partial(_boxed, actions[name], arguments))
        if answer is not None:
            pipe.send(("result", answer[0]))


def _boxed(action: Callable[..., object], arguments: list[object]) -> tuple[object]:
    """The result in a tuple, which tells a result of ``None`` from no result."""
    return (action(*arguments),)


def _attempt(pipe: connection.Connection, work: Callable[[], T]) -> T | None:
    """Result of ``work``, or ``None`` after its failure was sent to the parent."""
    try:
        return work()
    except EngineError as error:
        traceback.print_exc()
        pipe.send(("error", str(error)))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("error", describe(error)))
    return None


def describe(error: Exception) -> str:
    """What was raised and where, in one line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (raised at {where.filename}:{where.lineno})"


def _progress(pipe: connection.Connection, text: str) -> None:
    pipe.send(("progress", text))


def _log_to(path: str) -> None:
    """Send everything this process prints, from Python, native code or a crash, to ``path``."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # Crash handlers of libraries print native frames for seconds; Python's says what ran.
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(file=2, all_threads=False)


def _end_with_parent() -> None:
    """Leave at once when the parent dies, even in the middle of a step, and take all along.

    This process leads a group from now on, which its worker processes join.
    """
    parent = parent_process()
    if parent is None:
        raise EngineError("child_main must run in a process started by multiprocessing")
    os.setpgid(0, 0)

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
