"""Runs the arms of a specification in a process of their own, and reads what they leave.

The process imports vLLM and lm-eval, so that neither is ever loaded here, and a crash of the
engine costs the arm in progress, not what was finished.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from afd_testkit.accuracy.processes import end_of, offline_environment
from afd_testkit.accuracy.recipe import LATENT, ROTARY
from afd_testkit.accuracy.spec import ArmResult, Spec
from afd_testkit.models.check import check_checkpoint
from afd_testkit.models.errors import BrokenConfig

CHILD = "afd_testkit.engines._lm_eval"
SAY = "afd: "  # what the child puts before each line of progress
SILENT_SECONDS = 600.0  # without a line of output, the child is taken to hang
_SMALL = 256  # hidden size
_TOKENIZERS = ("*tokenizer*", "vocab*", "*.tiktoken", "*.model")  # by the names of their files


class AccuracyRunError(RuntimeError):
    """The arms could not be run to their end; the message says which are done."""


def run_arms(
    spec: Spec, say: Callable[[str], None], silent_seconds: float = SILENT_SECONDS
) -> dict[str, ArmResult]:
    """All arms by name; those that an earlier run of the same specification finished are read.

    Raises :class:`AccuracyRunError` when the process ends early or says nothing for
    ``silent_seconds``; finished arms stay in ``spec.results``, and the same call goes on there.
    """
    if importlib.util.find_spec("vllm") is None:
        raise AccuracyRunError(
            "vLLM is not installed here; install it (tox -e accuracy does), or judge a running "
            "server with --afd-server"
        )
    folder = Path(spec.results)
    environment = _environment(Path(spec.model), folder)
    folder.mkdir(parents=True, exist_ok=True)
    said, log = folder / "spec.json", folder / "engine.log"
    if said.exists() and not _is(said, spec):
        raise AccuracyRunError(
            f"{folder} holds arms of another specification; give an empty folder, or remove it"
        )
    spec.write(said)
    left = [arm for arm in spec.arms if not (folder / f"{arm.name}.json").exists()]
    if left:
        problem = _run(said, log, say, environment, silent_seconds)
        missing = [arm.name for arm in left if not (folder / f"{arm.name}.json").exists()]
        if problem or missing:
            raise AccuracyRunError(
                f"{problem or 'the engine ended early'}; {len(spec.arms) - len(missing)} of "
                f"{len(spec.arms)} arms are done, missing: {', '.join(missing) or 'none'}. The "
                f"whole output is in {log}; its end:\n{end_of(log)}"
            )
    return {arm.name: ArmResult.read(folder / f"{arm.name}.json") for arm in spec.arms}


def _is(path: Path, spec: Spec) -> bool:
    """Whether the file holds this very specification."""
    try:
        return Spec.read(path) == spec
    except (ValueError, LookupError, TypeError):
        return False  # half a file, or one of another version


def _environment(model: Path, folder: Path) -> dict[str, str]:
    """One process, no network, nothing written outside of ``folder``.

    Raises ``CheckpointError`` for a folder that an engine could not load.
    """
    config = check_checkpoint(model).config
    hidden = config.get("hidden_size", _SMALL + 1)
    if type(hidden) is not int or hidden < 1:
        raise BrokenConfig(
            f"{model / 'config.json'} says hidden_size {hidden!r}; it must be a whole number"
        )
    if not any(any(model.glob(name)) for name in _TOKENIZERS):
        raise AccuracyRunError(
            f"{model} has no tokenizer ({', '.join(_TOKENIZERS)}), so that nothing can be asked; "
            "copy the tokenizer's files beside the weights"
        )
    # Multi-head attention serves latent attention in float32; the CPU's MLA kernels take one size.
    widened = (config.get("kv_lora_rank"), config.get("qk_rope_head_dim")) == (LATENT, ROTARY)
    # A small model gains nothing from threads, which on a busy machine wait for each other.
    small = hidden <= _SMALL
    return {
        **offline_environment(folder),
        **({"OMP_NUM_THREADS": "1"} if small else {}),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_MLA_DISABLE": "1" if "kv_lora_rank" in config and not widened else "0",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "PYTHONUNBUFFERED": "1",
    }


def _run(
    spec: Path,
    log: Path,
    say: Callable[[str], None],
    environment: Mapping[str, str],
    silent_seconds: float,
) -> str:
    """Run the child to its end; why it failed, or empty."""
    child = subprocess.Popen(
        [sys.executable, "-m", CHILD, str(spec)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    output = child.stdout
    if output is None:
        raise AccuracyRunError("the engine's output cannot be read")
    reader = threading.Thread(target=_read, args=(output, lines), daemon=True)
    reader.start()
    try:
        with log.open("a", encoding="utf-8") as kept:
            while True:
                line = lines.get(timeout=silent_seconds)
                if line is None:
                    break
                kept.write(line)
                kept.flush()
                if line.startswith(SAY):
                    say(line.removeprefix(SAY).rstrip())
        # It may close its output and live on.
        code = child.wait(timeout=silent_seconds)
    except (queue.Empty, subprocess.TimeoutExpired):
        return f"the engine said nothing for {silent_seconds:.0f} s and was stopped"
    finally:
        # Also where it has ended: what it started holds the output open, and would stay.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        reader.join()
        output.close()
    return "" if code == 0 else f"the engine ended with status {code}"


def _read(pipe: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(None)
