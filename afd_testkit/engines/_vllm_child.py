"""What runs in the engine's own process: start vLLM, then answer requests over a pipe.

This module imports neither torch nor vLLM until :func:`child_main` runs, because the
parent imports it to name that function.

Protocol, one answer a request: ``("run", RunRequest)``, ``("tokenize", text)``,
``("reset",)`` and ``("stop",)`` are answered by ``("result", value)`` or
``("error", message)``.  At start, any number of ``("progress", text)`` precede
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
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, parent_process, set_start_method
from typing import TYPE_CHECKING, Any, TypeVar

from afd_testkit.engines.base import (
    EngineConfig,
    EngineError,
    Prompt,
    RunResult,
    SplitSetting,
    StepRecord,
)

if TYPE_CHECKING:
    from afd_testkit.engines._vllm_probe import StepProbe

T = TypeVar("T")

AFD_WORKER = "afd_plugin.workers.cpu.AFDCPUWorker"

# Read when the named library is loaded or when the engine starts; set in the fork server
# and in the engine's process, never in the tests' process.
FIXED_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class ChildStart:
    """All that the process needs to start its engine.

    ``scratch``: folder for temporary files; the parent removes it when the process is gone.
    ``kv_cache_bytes``: size of the KV cache over all layers.
    ``threads``: OpenMP threads; fixed, because it decides the order of some sums.
    """

    config: EngineConfig
    model_path: str
    environment: Mapping[str, str]
    needs_amx: bool
    log_path: str
    scratch: str
    kv_cache_bytes: int
    threads: int


@dataclass(frozen=True)
class RunRequest:
    """One ``PrefillEngine.run`` call."""

    prompts: tuple[Prompt, ...]
    split: SplitSetting
    fault: str | None


def child_main(pipe: connection.Connection, start: ChildStart) -> None:
    """Entry of the process; returns when the parent asks for it or is gone."""
    # Ctrl-C reaches the whole terminal group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A crash is reported from the log; writing a gigabyte of core file would only delay it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _log_to(start.log_path)
    _end_with_parent()
    tempfile.tempdir = start.scratch
    os.environ.update({**FIXED_ENVIRONMENT, **start.environment})
    # vLLM lowers the thread count itself unless this is set.
    os.environ["OMP_NUM_THREADS"] = str(start.threads)
    # The lock that vLLM makes is then nameless, so that killing this process leaks nothing.
    set_start_method("fork", force=True)
    try:
        engine = _attempt(pipe, lambda: ChildEngine(start, lambda text: _progress(pipe, text)))
        if engine is not None:
            pipe.send(("result", engine.info()))
            _serve(pipe, engine)
            # Nothing is left to save; taking engine and interpreter apart would take seconds.
            sys.stdout.flush()
            os._exit(0)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone; nobody is left to tell


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
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename}:{where.lineno}"
        pipe.send(("error", f"{type(error).__name__}: {error} (raised at {place})"))
    return None


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
    """Leave at once when the parent dies, even in the middle of a step."""
    parent = parent_process()
    if parent is None:
        raise EngineError("child_main must run in a process started by multiprocessing")

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


class ChildEngine:
    """The vLLM engine of this process with its probe."""

    def __init__(self, start: ChildStart, progress: Callable[[str], None]) -> None:
        self._config = start.config
        self._model_path = start.model_path
        self._tokenizer: Any = None
        self._runs = 0
        progress("importing vLLM")
        import torch
        from vllm import EngineArgs, LLMEngine

        from afd_testkit.engines._vllm_probe import StepProbe

        torch.set_num_threads(start.threads)
        if start.needs_amx and not torch.cpu._is_amx_tile_supported():
            raise EngineError(
                f"model {start.config.model} needs a CPU with AMX for its MLA kernels, and this "
                "CPU has none; use model deepseek-v3 instead, or run on such a CPU"
            )
        progress("starting the engine")
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**_engine_args(start)))
        self._worker: Any = self._engine.model_executor.driver_worker.worker
        self._runner: Any = self._worker.model_runner
        self._probe: StepProbe = StepProbe(self._runner)
        self._probe.install()

    def info(self) -> dict[str, Any]:
        """Facts that the parent keeps: versions, vocabulary, cache size, process id."""
        import torch

        from afd_testkit.engines._vllm_probe import stack_versions

        return {
            "pid": os.getpid(),
            "versions": stack_versions(),
            "vocab_size": int(self._runner.model_config.get_vocab_size()),
            "attention": self._probe.attention_backends(),
            "kv_blocks": int(self._runner.kv_cache_config.num_blocks),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids under the checkpoint's own tokenizer, no special token added."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(
                    self._model_path, local_files_only=True
                )
            except (OSError, ValueError) as error:
                raise EngineError(
                    f"the checkpoint {self._model_path} has no usable tokenizer ({error}); "
                    "give prompts as token_ids"
                ) from error
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return tuple(int(token) for token in encoded)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; refused by vLLM only while requests hold blocks."""
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM refused to reset its prefix cache; the log says which blocks")

    def run(self, request: RunRequest) -> RunResult:
        """Submit, step until finished, and hand over what the probe saw."""
        self._runs += 1
        self._configure_split(request.split)
        outputs: dict[str, Any] = {}
        with self._fault(request.fault):
            started = time.perf_counter()
            names = self._submit(request.prompts)
            self._probe.begin(names)
            try:
                while self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        outputs[names[output.request_id]] = output
            except BaseException:
                self._recover(list(names))
                raise
            finally:
                seen = self._probe.end()
            seconds = time.perf_counter() - started
        results = tuple(
            seen.request_result(
                prompt,
                cached_tokens=int(outputs[prompt.name].num_cached_tokens),
                greedy_token=int(outputs[prompt.name].outputs[0].token_ids[0]),
            )
            for prompt in request.prompts
        )
        steps = self._with_evidence(seen.steps)
        facts = {"run": self._runs, "step_seconds": seen.seconds}
        return RunResult(requests=results, steps=steps, seconds=seconds, facts=facts)

    def _submit(self, prompts: tuple[Prompt, ...]) -> dict[str, str]:
        """Queue all prompts; external request id to prompt name."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        names = {}
        for index, prompt in enumerate(prompts):
            request_id = f"{self._runs}.{index}"
            tokens = TokensPrompt(prompt_token_ids=list(prompt.token_ids))
            if prompt.cache_salt is not None:
                tokens["cache_salt"] = prompt.cache_salt
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=prompt.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self._engine.add_request(request_id, tokens, sampling)
            names[request_id] = prompt.name
        return names

    def _recover(self, request_ids: list[str]) -> None:
        """After a failed step, drop its requests and caches, so that the next run is sound."""
        self._engine.abort_request(request_ids)
        self._runner.execute_model_state = None
        self.reset_prefix_cache()

    def _configure_split(self, split: SplitSetting) -> None:
        if self._config.worker != "afd":
            return
        self._worker.afd_take_evidence()
        self._worker.afd_configure(
            {
                "async_moe_ubatching": split.policy != "off",
                "async_moe_split": "request" if split.policy == "off" else split.policy,
                "async_moe_token_alignment": split.alignment,
                "async_moe_min_tokens": split.min_tokens,
            }
        )

    def _with_evidence(self, steps: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
        if self._config.worker != "afd":
            return steps
        evidence = self._worker.afd_take_evidence()
        if len(evidence) != len(steps):
            raise EngineError(
                f"the worker recorded evidence for {len(evidence)} steps, "
                f"but {len(steps)} were executed"
            )
        return tuple(
            StepRecord(requests=step.requests, evidence=dict(record))
            for step, record in zip(steps, evidence, strict=True)
        )

    def _fault(self, name: str | None) -> AbstractContextManager[None]:
        if name is None:
            return nullcontext()
        from afd_testkit.engines._vllm_probe import VllmFaultTarget
        from afd_testkit.faults import FAULTS

        if name not in FAULTS:
            raise EngineError(f"unknown fault {name!r}; known: {', '.join(sorted(FAULTS))}")
        return FAULTS[name].inject(VllmFaultTarget(self._runner))


def _engine_args(start: ChildStart) -> dict[str, Any]:
    """vLLM's arguments for an :class:`EngineConfig`."""
    config = start.config
    step_tokens = config.step_tokens or config.max_step_tokens
    args: dict[str, Any] = {
        "model": start.model_path,
        "dtype": config.dtype,
        "seed": 0,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "block_size": config.block_size,
        "max_model_len": config.max_model_len,
        # vLLM refuses more; a step holds at least one token a request anyway.
        "max_num_seqs": min(config.max_num_seqs, step_tokens),
        "max_num_batched_tokens": step_tokens,
        "enable_chunked_prefill": config.step_tokens is not None,
        "enable_prefix_caching": config.prefix_caching,
        "kv_cache_memory_bytes": start.kv_cache_bytes,
    }
    if config.worker == "afd":
        args["worker_cls"] = AFD_WORKER
        args["additional_config"] = {"afd": {"async_moe_ubatching": True}}
    return args
