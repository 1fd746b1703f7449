"""The real engine: vLLM on CPU, one process for each configuration.

The engine lives in a child process, so that its crash is an :class:`EngineDied` here and
nothing more.  Children come from a fork server that imports vLLM once; where that server
cannot run, a fresh interpreter is started instead, and ``progress`` says so.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from afd_testkit.engines._vllm_child import ChildStart, RunRequest, child_main
from afd_testkit.engines.base import (
    EngineConfig,
    EngineDied,
    EngineError,
    Prompt,
    RunResult,
    SplitSetting,
)

KV_CACHE_BYTES = 256 << 20
_PRELOAD = "afd_testkit.engines._vllm_preload"
_TAIL_LINES = 15
_STOP_SECONDS = 5.0
_LOG_SECONDS = 7 * 24 * 3600.0


class VllmCpuEngine:
    """A :class:`~afd_testkit.engines.base.PrefillEngine` on vLLM's CPU backend.

    ``cache_dir`` holds made models, logs and vLLM's own caches.  The constructor returns
    when the engine is ready; it raises :class:`EngineError` for a configuration or a
    checkpoint that cannot work, before a process is started, and :class:`EngineDied` when
    the process ends while starting.
    """

    name = "vllm-cpu"

    def __init__(
        self,
        config: EngineConfig,
        cache_dir: Path,
        progress: Callable[[str], None] | None = None,
        *,
        kv_cache_bytes: int = KV_CACHE_BYTES,
    ) -> None:
        self.config = config
        self._say = progress if progress is not None else _silent
        _check_config(config)
        model_path, environment, needs_amx = _resolve_model(config, cache_dir, self._say)
        self.log_path = _new_log(cache_dir / "logs")
        environment = {**environment, "VLLM_CACHE_ROOT": str(cache_dir / "vllm")}
        self._scratch = tempfile.mkdtemp(prefix="afd-vllm-")
        start = ChildStart(
            config=config,
            model_path=str(model_path),
            environment=environment,
            needs_amx=needs_amx,
            log_path=str(self.log_path),
            scratch=self._scratch,
            kv_cache_bytes=kv_cache_bytes,
            threads=_threads(config),
        )
        self._closed = False
        self._info: dict[str, Any] = {}
        started = time.perf_counter()
        self._say(f"vllm-cpu: {config.label()} (log: {self.log_path})")
        try:
            self._process, self._pipe = _start_process(start, self._say)
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        self._info = self._receive()
        self.start_seconds = time.perf_counter() - started
        self._say(f"vllm-cpu: ready after {self.start_seconds:.1f} s")

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return int(self._info["pid"])

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself: attention backends, KV blocks, threads, CPU kind."""
        return dict(self._info)

    def versions(self) -> dict[str, str]:
        """Versions of Python, vLLM, torch, transformers, numpy and this package."""
        return dict(self._info["versions"])

    def vocab_size(self) -> int:
        """Number of token ids that a prompt may use."""
        return int(self._info["vocab_size"])

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text`` under the checkpoint's tokenizer."""
        return tuple(self._ask("tokenize", text))

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, so that the next run is cold."""
        self._ask("reset")

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        split: SplitSetting = SplitSetting(),  # noqa: B008 - frozen value, the Protocol's default
        fault: str | None = None,
    ) -> RunResult:
        """See :class:`~afd_testkit.engines.base.PrefillEngine`."""
        self._check_run(prompts, split)
        result = self._ask("run", RunRequest(tuple(prompts), split, fault))
        if not isinstance(result, RunResult):
            raise EngineError(f"the engine's process answered a run with {type(result).__name__}")
        return result

    def close(self) -> None:
        """Stop the engine; calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):  # already gone, which is what was wanted
            self._pipe.send(("stop",))
        self._process.join(_STOP_SECONDS)
        self._end()

    def _check_run(self, prompts: Sequence[Prompt], split: SplitSetting) -> None:
        """Refuse what vLLM would reject late, or accept and get wrong."""
        if self.config.worker == "stock" and split.policy != "off":
            raise EngineError(
                f"a stock worker cannot split (asked for {split.policy!r}); use worker='afd'"
            )
        if not prompts:
            raise EngineError("no prompts were given; give at least one")
        names = [prompt.name for prompt in prompts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise EngineError(f"prompt names must differ; given twice: {', '.join(twice)}")
        for prompt in prompts:
            self._check_prompt(prompt)

    def _check_prompt(self, prompt: Prompt) -> None:
        count, vocabulary = len(prompt.token_ids), self.vocab_size()
        if prompt.max_tokens < 1:
            raise EngineError(
                f"prompt {prompt.name}: max_tokens is {prompt.max_tokens}; it must be at least 1"
            )
        longest = self.config.max_model_len - prompt.max_tokens
        if not 1 <= count <= longest:
            raise EngineError(
                f"prompt {prompt.name} has {count} tokens; allowed are 1 to {longest} (model "
                f"length {self.config.max_model_len} less {prompt.max_tokens} generated); "
                "cut it or raise max_model_len"
            )
        for position, token in enumerate(prompt.token_ids):
            if not 0 <= token < vocabulary:
                raise EngineError(
                    f"prompt {prompt.name} has token id {token} at position {position}; "
                    f"allowed are 0 to {vocabulary - 1}"
                )

    def _ask(self, *request: Any) -> Any:
        """Send a request and wait for its answer.

        When the wait is interrupted (Ctrl-C), the engine is stopped: its answer would be
        taken for the next request's.
        """
        if self._closed:
            raise EngineDied(
                f"the engine {self.config.label()} was stopped before; start a new one"
            )
        try:
            self._pipe.send(request)
        except (BrokenPipeError, ConnectionResetError):
            self._raise_died()
        return self._receive()

    def _receive(self) -> Any:
        try:
            while True:
                connection.wait([self._pipe, self._process.sentinel])
                if not self._pipe.poll():
                    self._raise_died()
                try:
                    kind, value = self._pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._raise_died()
                if kind == "progress":
                    self._say(f"vllm-cpu: {value}")
                elif kind == "error":
                    raise EngineError(f"vllm-cpu, {self.config.label()}: {value}")
                else:
                    return value
        except EngineError:
            if not self._info:  # failed to start: nothing will use the process
                self._closed = True
                self._end()
            raise
        except BaseException:
            self._closed = True
            self._end()
            raise

    def _raise_died(self) -> NoReturn:
        self._process.join(_STOP_SECONDS)
        how = _exit_text(self._process.exitcode)
        self._closed = True
        self._end()
        raise EngineDied(
            f"the engine's process ended ({how}): vllm-cpu, {self.config.label()}\n"
            f"end of its log {self.log_path}:\n{_tail(self.log_path)}"
        )

    def _end(self) -> None:
        """Make sure that the process is gone and nothing of it is kept open."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_STOP_SECONDS)
        self._pipe.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _check_config(config: EngineConfig) -> None:
    if config.dtype not in ("float32", "bfloat16"):
        raise EngineError(
            f"vllm-cpu computes in float32 or bfloat16, not {config.dtype}; "
            "float64 is the reference engine's"
        )
    if config.block_size < 32 or config.block_size % 32:
        raise EngineError(
            f"block size {config.block_size} is not a multiple of 32, which CPU attention needs"
        )
    if config.step_tokens is None and config.max_step_tokens < config.max_model_len:
        raise EngineError(
            f"without chunks a step of {config.max_step_tokens} tokens cannot hold a prompt of "
            f"{config.max_model_len}; raise max_step_tokens or set step_tokens"
        )
    if config.step_tokens is not None and config.step_tokens < 1:
        raise EngineError(f"step_tokens is {config.step_tokens}; it must be at least 1")


def _resolve_model(
    config: EngineConfig, cache_dir: Path, progress: Callable[[str], None]
) -> tuple[Path, dict[str, str], bool]:
    """Checked checkpoint folder, environment for its process, whether it needs AMX."""
    from afd_testkit.models import RECIPES, check_checkpoint, ensure_model, recipe

    folder = Path(config.model).expanduser()
    if config.model not in RECIPES and (folder.exists() or os.sep in config.model):
        info = check_checkpoint(folder)
        # Multi-head attention serves latent-attention models in every dtype; the CPU's MLA
        # kernels only some of them.
        latent = "kv_lora_rank" in info.config
        return info.path, {"VLLM_MLA_DISABLE": "1" if latent else "0"}, False
    made = recipe(config.model)
    if config.dtype not in made.dtypes:
        raise EngineError(
            f"model {made.name} runs in {' or '.join(made.dtypes)}, not in {config.dtype}"
        )
    path = ensure_model(made.name, cache_dir / "models", progress)
    check_checkpoint(path)
    return path, dict(made.environment), made.needs_amx


def _new_log(folder: Path) -> Path:
    """An empty log file; logs older than a week make room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("vllm-cpu-*.log"):
            if time.time() - old.stat().st_mtime > _LOG_SECONDS:
                old.unlink(missing_ok=True)
        handle, path = tempfile.mkstemp(prefix="vllm-cpu-", suffix=".log", dir=folder)
    except OSError as error:
        raise EngineError(
            f"cannot write an engine log in {folder}: {error}; choose another cache folder"
        ) from error
    os.close(handle)
    return Path(path)


def _start_process(
    start: ChildStart, progress: Callable[[str], None]
) -> tuple[BaseProcess, connection.Connection]:
    """Start the child from the fork server, or afresh when there is none to be had."""
    methods = multiprocessing.get_all_start_methods()
    if "forkserver" in methods:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PRELOAD])
        try:
            return _spawn(context, start)
        except (OSError, EOFError) as error:
            progress(f"vllm-cpu: no fork server ({error}); starting a fresh interpreter (slower)")
    return _spawn(multiprocessing.get_context("spawn"), start)


def _spawn(context: Any, start: ChildStart) -> tuple[BaseProcess, connection.Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=child_main, args=(theirs, start), daemon=True, name="vllm-cpu")
    try:
        process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def _threads(config: EngineConfig) -> int:
    """OpenMP threads of an engine.

    One for the built-in models: they gain nothing from more, and on a busy machine threads
    that wait for each other take a hundred times as long.
    """
    from afd_testkit.models import RECIPES

    return 1 if config.model in RECIPES else min(8, len(os.sched_getaffinity(0)))


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


def _silent(_message: str) -> None:
    return None
