"""What the engines on vLLM have in common on the parent's side: checks, processes, results.

The engine lives in child processes, so that its crash is an :class:`EngineDied` here and
nothing more: one process that holds vLLM's engine (its tensor-parallel workers are vLLM's own),
or one for each data-parallel rank.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from afd_testkit.engines._vllm_child import Backend, ChildStart, RunRequest
from afd_testkit.engines._vllm_environment import (
    caches,
    check_common,
    resolve_model,
    threads_of_model,
)
from afd_testkit.engines._vllm_process import EngineProcess, new_log
from afd_testkit.engines.base import (
    SERVING,
    EngineConfig,
    EngineDied,
    EngineError,
    Prompt,
    RoutingSetting,
    RunResult,
    SplitSetting,
)

KV_CACHE_BYTES = 256 << 20
START_SECONDS = 300.0
COMPILE_SECONDS = 900.0  # what compiling may add to a start, on a machine with much else to do
RUN_SECONDS = 900.0


class VllmEngine:
    """A :class:`~afd_testkit.engines.base.PrefillEngine` on a backend of vLLM.

    ``cache_dir`` holds made models, logs and vLLM's own caches.  The constructor returns
    when the engine is ready; it raises :class:`EngineError` for a configuration or a
    checkpoint that cannot work, before a process is started, and :class:`EngineDied` when
    a process ends while starting.  ``start_seconds`` (beside compiling) and ``run_seconds`` bound
    how long it may take to start and to answer; beyond them everything is killed, and
    :class:`EngineDied` shows the stacks of all its processes.
    """

    name: str
    runs_on_cpu = False  # whether what a recipe needs of a CPU's kernels concerns it

    def __init__(
        self,
        config: EngineConfig,
        cache_dir: Path,
        progress: Callable[[str], None] | None = None,
        *,
        kv_cache_bytes: int = KV_CACHE_BYTES,
        start_seconds: float = START_SECONDS,
        run_seconds: float = RUN_SECONDS,
    ) -> None:
        self.config = config
        self._say = progress if progress is not None else _silent
        check_common(self.name, config)
        self.check_config(config)
        start_seconds += COMPILE_SECONDS if config.compiled else 0.0
        backend = self.backend(config)
        model_path, environment, needs_amx = resolve_model(config, cache_dir, self._say)
        started = time.perf_counter()
        self._processes: list[EngineProcess] = []
        try:
            for rank, ranked in enumerate(self.rank_environments(config)):
                log = new_log(cache_dir / "logs", self.name)
                scratch = tempfile.mkdtemp(prefix="afd-vllm-")
                of = f", data-parallel rank {rank}" if config.data_parallel > 1 else ""
                self._say(f"{self.name}: {config.label()}{of} (log: {log})")
                start = ChildStart(
                    backend=backend,
                    config=config,
                    model_path=str(model_path),
                    environment={
                        **environment,
                        **self.environment(config),
                        **ranked,
                        **caches(config, cache_dir, scratch),
                    },
                    engine_args=self.engine_args(config),
                    needs_amx=needs_amx and self.runs_on_cpu,
                    log_path=str(log),
                    scratch=scratch,
                    kv_cache_bytes=kv_cache_bytes,
                    threads=threads_of_model(config),
                )
                title = f"{self.name}, {config.label()}{of}"
                self._processes.append(
                    EngineProcess(start, title, self._say, start_seconds, run_seconds)
                )
            for process in self._processes:
                process.wait_ready()
        except BaseException:
            self._kill()
            raise
        self.start_seconds = time.perf_counter() - started
        self._say(f"{self.name}: ready after {self.start_seconds:.1f} s")

    # What a backend says of itself.

    def check_config(self, config: EngineConfig) -> None:
        """Raise :class:`EngineError` for what this backend cannot do."""
        raise NotImplementedError

    def backend(self, config: EngineConfig) -> Backend:
        """What its processes must know of it."""
        raise NotImplementedError

    def environment(self, config: EngineConfig) -> dict[str, str]:
        """Variables of its processes."""
        return {}

    def rank_environments(self, config: EngineConfig) -> list[dict[str, str]]:
        """Further variables, one set for each data-parallel rank."""
        return [{}]

    def engine_args(self, config: EngineConfig) -> dict[str, Any]:
        """vLLM's arguments beside those that every backend gets."""
        return {}

    # What it tells and does.

    @property
    def pid(self) -> int:
        """Process id of the engine; of data-parallel rank 0 where there are several."""
        return int(self.info["pid"])

    @property
    def log_path(self) -> Path:
        """Where the engine (data-parallel rank 0) writes what it has to say."""
        return self._processes[0].log_path

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself: versions, attention backends, KV blocks, workers."""
        return dict(self._processes[0].info)

    def versions(self) -> dict[str, str]:
        """Versions of Python, of the packages that decide the numbers, and of this one."""
        return dict(self.info["versions"])

    def vocab_size(self) -> int:
        """Number of token ids that a prompt may use."""
        return int(self.info["vocab_size"])

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text`` under the checkpoint's tokenizer."""
        return tuple(self._ask(("tokenize", text), count=1)[0])

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, so that the next run is cold."""
        self._ask(("reset",))

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        split: SplitSetting = SplitSetting(),  # noqa: B008 - frozen value, the Protocol's default
        fault: str | None = None,
        routing: RoutingSetting = SERVING,
    ) -> RunResult:
        """See :class:`~afd_testkit.engines.base.PrefillEngine`.

        Data-parallel ranks get the prompts in turn, the first one the first.
        """
        self._check_run(prompts, split, routing)
        ranks = len(self._processes)
        requests = [
            ("run", RunRequest(tuple(prompts[rank::ranks]), split, fault, routing))
            for rank in range(ranks)
        ]
        answers = self._ask(*requests)
        for answer in answers:
            if not isinstance(answer, RunResult):
                raise EngineError(
                    f"the engine's process answered a run with {type(answer).__name__}"
                )
        return answers[0] if ranks == 1 else merged(answers, prompts)

    def close(self) -> None:
        """Stop the engine; calling it twice is harmless."""
        for process in self._processes:
            process.close()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _ask(self, *requests: tuple[Any, ...], count: int | None = None) -> list[Any]:
        """Answers of all processes (of the first ``count``) to one request each, or the same.

        One that cannot go on leaves the others waiting for it: all are stopped.
        """
        asked = self._processes[:count]
        try:
            for rank, process in enumerate(asked):
                process.send(*requests[rank if len(requests) > 1 else 0])
            return [process.receive() for process in asked]
        except EngineError as error:
            if isinstance(error, EngineDied) or len(asked) > 1:
                self._kill()
            raise
        except BaseException:
            self._kill()
            raise

    def _check_run(
        self, prompts: Sequence[Prompt], split: SplitSetting, routing: RoutingSetting
    ) -> None:
        """Refuse what vLLM would reject late, or accept and get wrong."""
        if self.config.worker == "stock" and routing != SERVING:
            raise EngineError(
                f"a stock worker has no routing operator (asked for {routing}); use worker='afd'"
            )
        if split.policy != "off" and ("async_moe_ubatching", False) in self.config.afd:
            raise EngineError(
                f"this engine was started with the split off (asked for {split.policy!r}); leave "
                "async_moe_ubatching out of its options"
            )
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


def merged(answers: Sequence[RunResult], prompts: Sequence[Prompt]) -> RunResult:
    """The parts of a run, one a data-parallel rank, as one: prompt order; steps name their rank."""
    found = {request.name: request for answer in answers for request in answer.requests}
    return RunResult(
        requests=tuple(found[prompt.name] for prompt in prompts),
        steps=tuple(
            replace(step, data_rank=rank)
            for rank, answer in enumerate(answers)
            for step in answer.steps
        ),
        seconds=max(answer.seconds for answer in answers),
        facts={
            **answers[0].facts,
            "data_parallel_prompts": [
                [request.name for request in answer.requests] for answer in answers
            ],
        },
    )


def _silent(_message: str) -> None:
    return None
