"""The ``reference`` engine: the oracle that gates and their faults are tried on.

It is a whole engine in small: :mod:`~afd_testkit.engines.reference_scheduler` forms the steps,
:mod:`~afd_testkit.engines.reference_runner` executes them on
:mod:`~afd_testkit.engines.reference_model` in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version

import numpy as np
import torch

from afd_testkit.engines.base import (
    SERVING,
    EngineConfig,
    EngineError,
    Prompt,
    RequestResult,
    RoutingSetting,
    RunResult,
    ScheduledRequest,
    SplitSetting,
    StepRecord,
    refuse_topology,
)
from afd_testkit.engines.reference_attention import PagedKVCache
from afd_testkit.engines.reference_model import (
    DecoderLayer,
    ReferenceModel,
    ReferenceModelConfig,
    Router,
    one_thread,
)
from afd_testkit.engines.reference_runner import AFDRunner, StepOutput, StockRunner
from afd_testkit.engines.reference_scheduler import Request, Scheduler, Step
from afd_testkit.faults import FAULTS

RECIPES: dict[str, ReferenceModelConfig] = {
    "reference": ReferenceModelConfig(scoring="softmax"),
    "reference-sigmoid": ReferenceModelConfig(scoring="sigmoid"),
}
"""Built-in models by name: softmax routing as in Qwen, sigmoid routing as in DeepSeek."""


NO_SPLIT = SplitSetting()


class ReferenceFaultTarget:
    """The parts of the engine that a fault may wrap for the time of one run."""

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model

    def decoder_layers(self) -> list[DecoderLayer]:
        """Modules called as ``layer(positions, hidden_states, residual, attention)``."""
        return list(self._model.layers)

    def moe_routers(self) -> list[Router]:
        """Objects with ``select_experts(hidden_states, router_logits)``, one a layer."""
        return [layer.mlp.router for layer in self._model.layers]


class ReferenceEngine:
    """A :class:`~afd_testkit.engines.base.PrefillEngine` in float64, on the CPU, in process.

    ``config.model`` names an entry of :data:`RECIPES`; ``config.dtype`` must be ``"float64"``.
    Equal ``seed``, equal weights.  Raises :class:`EngineError` for a configuration it
    cannot serve.
    """

    name = "reference"

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        _check_config(config)
        self.config = config
        self.seed = seed
        self.model = ReferenceModel(RECIPES[config.model], seed)
        self._num_blocks = _pool_size(config)
        self._closed = False
        self._passes: list[int] = []  # rows of each pass through the model in this step
        self.model.register_forward_pre_hook(self._count_pass)
        self._start_cold()

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("afd-testkit", "numpy", "torch")}

    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The UTF-8 bytes of ``text``; each byte is a token."""
        return tuple(text.encode())

    def reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        self._closed = True

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        split: SplitSetting = NO_SPLIT,
        fault: str | None = None,
        routing: RoutingSetting = SERVING,
    ) -> RunResult:
        """See :class:`PrefillEngine`.  A run that fails leaves a cold engine behind.

        A run with a fault does not: like any engine it keeps what it wrote, until
        :meth:`reset_prefix_cache`."""
        self._check_run(prompts, split)
        if routing != SERVING:
            raise EngineError(
                f"reference engine: it has no routing operator (asked for {routing}); "
                "use the engine vllm-cpu or ascend."
            )
        started = time.perf_counter()
        run = _Run(prompts)
        try:
            with self._injected(fault), one_thread():
                self._execute(run, self._runner(split))
        except EngineError:
            self._start_cold()
            raise
        except Exception as error:
            self._start_cold()
            raise EngineError(
                f"reference engine: step {len(run.steps)} of the run failed with "
                f"{type(error).__name__}: {error}"
            ) from error
        return RunResult(
            requests=run.results(),
            steps=tuple(run.steps),
            seconds=time.perf_counter() - started,
            facts={"seed": self.seed, "kv_blocks": self._num_blocks},
        )

    def _count_pass(self, model: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        positions = args[0]
        self._passes.append(positions.shape[-1])

    def _start_cold(self) -> None:
        config, model = self.config, self.model.config
        self._cache = PagedKVCache(
            num_layers=model.num_layers,
            num_blocks=self._num_blocks,
            block_size=config.block_size,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
        )
        self._scheduler = Scheduler(
            num_blocks=self._num_blocks,
            block_size=config.block_size,
            token_budget=config.step_tokens or config.max_step_tokens,
            max_num_seqs=config.max_num_seqs,
            prefix_caching=config.prefix_caching,
        )

    def _runner(self, split: SplitSetting) -> StockRunner:
        table_width = -(-self.config.max_model_len // self.config.block_size)
        if self.config.worker == "afd":
            return AFDRunner(self.model, self._cache, table_width, split)
        return StockRunner(self.model, self._cache, table_width)

    def _injected(self, fault: str | None) -> AbstractContextManager[None]:
        if fault is None:
            return nullcontext()
        if fault not in FAULTS:
            raise EngineError(
                f"reference engine: there is no fault {fault!r}; "
                f"known: {', '.join(sorted(FAULTS))}."
            )
        return FAULTS[fault].inject(ReferenceFaultTarget(self.model))

    def _execute(self, run: _Run, runner: StockRunner) -> None:
        for request in run.requests:
            self._scheduler.add(request)
        while self._scheduler.has_work:
            step = self._scheduler.schedule()
            self._passes.clear()
            output = runner.execute(step)
            passes = tuple(self._passes)
            logprobs = self.model.logprobs(output.hidden)
            sampled = run.record(step, output, passes, logprobs, self._cache.rows)
            self._scheduler.update(step, sampled)

    def _check_run(self, prompts: Sequence[Prompt], split: SplitSetting) -> None:
        if self._closed:
            raise EngineError("reference engine: it was closed; make a new one to run prompts.")
        if self.config.worker == "stock" and split.policy != "off":
            raise EngineError(
                f"reference engine: split policy {split.policy!r} was asked of a stock worker, "
                "which accepts only 'off'; start the engine with worker='afd'."
            )
        names = [prompt.name for prompt in prompts]
        for prompt in prompts:
            if names.count(prompt.name) > 1:
                raise EngineError(
                    f"reference engine: {names.count(prompt.name)} prompts are named "
                    f"{prompt.name!r}; give each prompt of a run its own name."
                )
            _check_prompt(prompt, self.vocab_size(), self.config.max_model_len)


@dataclass
class _Collected:
    """Prefill results of one request as its steps bring them."""

    hidden: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    kv: list[torch.Tensor] = field(default_factory=list)


class _Run:
    """What one ``run`` has produced so far."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.requests = [
            Request(
                name=prompt.name,
                token_ids=list(prompt.token_ids),
                num_prompt_tokens=len(prompt.token_ids),
                max_tokens=prompt.max_tokens,
                cache_salt=prompt.cache_salt,
            )
            for prompt in prompts
        ]
        self.steps: list[StepRecord] = []
        self._collected = {prompt.name: _Collected() for prompt in prompts}

    def record(
        self,
        step: Step,
        output: StepOutput,
        passes: tuple[int, ...],
        logprobs: torch.Tensor,
        read_kv: Callable[[torch.Tensor, int], list[torch.Tensor]],
    ) -> dict[str, int]:
        """Keep the step's prefill rows; greedy tokens by name of the requests that sample."""
        sampled: dict[str, int] = {}
        start = 0
        for index, row in enumerate(step.rows):
            rows = slice(start, start + row.num_scheduled)
            start = rows.stop
            request = row.request
            if row.is_prefilling:
                collected = self._collected[request.name]
                collected.hidden.append(output.hidden[rows])
                collected.logprobs.append(logprobs[rows])
                collected.chunks.append(row.num_scheduled)
            if row.ends_prefill:
                blocks = torch.tensor(request.blocks)
                self._collected[request.name].kv = read_kv(blocks, request.num_prompt_tokens)
            if row.samples:
                sampled[request.name] = int(logprobs[output.last_rows[index]].argmax())
        self.steps.append(
            StepRecord(
                tuple(
                    ScheduledRequest(row.request.name, row.num_computed, row.num_scheduled)
                    for row in step.rows
                ),
                output.evidence,
                passes,
            )
        )
        return sampled

    def results(self) -> tuple[RequestResult, ...]:
        """In prompt order."""
        return tuple(self._result(request) for request in self.requests)

    def _result(self, request: Request) -> RequestResult:
        collected = self._collected[request.name]
        prompt_tokens = request.token_ids[: request.num_prompt_tokens]
        return RequestResult(
            name=request.name,
            token_ids=tuple(prompt_tokens),
            cached_tokens=request.cached_tokens,
            chunks=tuple(collected.chunks),
            hidden=np.asarray(torch.cat(collected.hidden)),
            logprobs=np.asarray(torch.cat(collected.logprobs)),
            kv=tuple(np.asarray(rows) for rows in collected.kv),
            greedy_token=request.token_ids[request.num_prompt_tokens],
        )


def _pool_size(config: EngineConfig) -> int:
    """KV blocks, the null block included: some full steps, and a block for each request."""
    tokens = max(4 * config.max_step_tokens, 2 * config.max_model_len)
    return 1 + config.max_num_seqs + -(-tokens // config.block_size)


def _check_config(config: EngineConfig) -> None:
    refuse_topology("reference", config)
    if config.dtype != "float64":
        raise EngineError(
            f"reference engine: dtype is {config.dtype!r}; it computes in 'float64' only."
        )
    if config.compiled or config.afd or config.start_fault:
        raise EngineError(
            f"reference engine: {config.label()} was asked for; it compiles nothing, and takes "
            "options and faults in run() only."
        )
    if config.model not in RECIPES:
        raise EngineError(
            f"reference engine: model is {config.model!r}; it has {', '.join(sorted(RECIPES))}."
        )
    sizes = {
        "block_size": config.block_size,
        "max_model_len": config.max_model_len,
        "max_step_tokens": config.max_step_tokens,
        "max_num_seqs": config.max_num_seqs,
        "step_tokens": 1 if config.step_tokens is None else config.step_tokens,
    }
    for name, value in sizes.items():
        if value < 1:
            raise EngineError(f"reference engine: {name} is {value}; it must be 1 or more.")


def _check_prompt(prompt: Prompt, vocab_size: int, max_model_len: int) -> None:
    where = f"reference engine: prompt {prompt.name!r}"
    if not prompt.token_ids:
        raise EngineError(f"{where} has no tokens; give it 1 to {max_model_len - 1}.")
    for position, token in enumerate(prompt.token_ids):
        if not 0 <= token < vocab_size:
            raise EngineError(
                f"{where} has token {token} at position {position}; "
                f"token ids lie in 0 to {vocab_size - 1}."
            )
    if prompt.max_tokens < 1:
        raise EngineError(f"{where} asks for {prompt.max_tokens} tokens; ask for 1 or more.")
    total = len(prompt.token_ids) + prompt.max_tokens
    if total > max_model_len:
        raise EngineError(
            f"{where} has {len(prompt.token_ids)} tokens and asks for {prompt.max_tokens}: "
            f"{total} in all, more than max_model_len {max_model_len}. "
            "Shorten it or start the engine with a larger max_model_len."
        )
