"""Sees what each step of a vLLM engine computed on one rank; identical for every worker.

The probe wraps ``execute_model`` of the model runner instance.  After a step has run it
reads the rows of the batch, the final hidden states of all prompt positions, the
log-probabilities under the model's own head, and, once a prompt is complete, its KV cache
rows through its block table.  It knows nothing of splitting.  Log-probabilities are computed by
all tensor-parallel ranks together; the first one keeps them.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from afd_testkit.devices import version_of
from afd_testkit.engines._vllm_join import Observation, Seen
from afd_testkit.engines._vllm_kv import KvReader
from afd_testkit.engines.base import (
    SERVING,
    EngineConfig,
    EngineError,
    FloatArray,
    IdArray,
    RoutingSetting,
    ScheduledRequest,
    StepRecord,
)

# Above this vocabulary size log-probabilities are stored in float32: the computation stays
# float64, and 1e-6 nats of rounding is below every tolerance, but memory halves.
_FLOAT64_VOCABULARY = 8192


def stack_versions(distributions: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of those of ``distributions`` that are installed."""
    versions = {name: version_of(name) for name in distributions}
    found = {name: version for name, version in versions.items() if version is not None}
    return {"python": platform.python_version(), **found}


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
    """Observes a vLLM model runner.  ``full``: whether hidden states and log-probabilities,
    which all ranks have alike, are kept here."""

    def __init__(self, runner: Any, config: EngineConfig, *, full: bool) -> None:
        from vllm.platforms import current_platform

        self._runner = runner
        self._config = config
        self._on_npu = current_platform.device_type == "npu"
        self._full = full
        self._kv = KvReader(runner)
        self._observed: Observation | None = None
        self._names: Mapping[str, str] = {}
        self._routing = SERVING
        self._expert_ids: list[IdArray] = []  # of each execution of the routing operator
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

    def begin(self, names: Mapping[str, str], routing: RoutingSetting = SERVING) -> None:
        """Observe the requests ``names`` (external request id to prompt name) from now on.

        ``routing``: what the routing operator is told in steps until :meth:`end`.
        """
        self._names = dict(names)
        self._observed = Observation()
        self._routing = routing

    def held_blocks(self) -> list[int]:
        """Blocks that a request held in some run and that were not poisoned since."""
        return sorted(self._touched)

    def poison(self, stale: Sequence[int]) -> None:
        """Overwrite ``stale`` blocks, which no request and no cached prefix uses.

        Prompts come again from run to run: a block that happened to hold the right rows
        already would hide that a run never wrote them.
        """
        if stale:
            self._kv.poison(stale)
        self._touched.difference_update(stale)

    def abandon(self) -> None:
        """Stop observing after a failed step; what was seen is of no use."""
        self._observed, self._routing = None, SERVING

    def end(self) -> Observation:
        """Stop observing; what was seen since :meth:`begin`."""
        if self._observed is None:
            raise EngineError("the probe was asked for results before it was started")
        observed, self._observed, self._routing = self._observed, None, SERVING
        return observed

    def _execute_and_observe(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._execute is None:
            raise EngineError("the probe is not installed on this model runner")
        self._passes.clear()
        self._expert_ids.clear()
        started = time.perf_counter()
        with self._told():
            output = self._execute(scheduler_output, *args, **kwargs)
        # An idle step (only finished requests to clean up) executes nothing.
        if self._observed is not None and scheduler_output.total_num_scheduled_tokens:
            self._observed.seconds += time.perf_counter() - started
            self._observe(self._observed, scheduler_output)
        return output

    @contextmanager
    def _told(self) -> Generator[None, None, None]:
        """The routing operator is told, and watched, as the run asks."""
        if self._routing == SERVING:
            yield
            return
        from afd_plugin.routing import profile_run, watch_routing

        with ExitStack() as stack:
            if self._routing.watch:
                stack.enter_context(watch_routing(self._keep_ids))
            if self._routing.profiling and not self._on_npu:
                stack.enter_context(profile_run())
            yield

    def _keep_ids(self, topk_ids: torch.Tensor, balanced: bool) -> None:
        self._expert_ids.append(topk_ids.cpu().numpy().astype(np.int64))

    def _count_pass(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each pass: its rows, seen at the model itself, and the way it goes."""
        self._passes.append(int(kwargs["positions"].shape[-1]))
        if self._routing.profiling and self._on_npu:
            from vllm.forward_context import get_forward_context

            get_forward_context().in_profile_run = True  # where vLLM-Ascend itself keeps it
        if self._observed is not None and self._on_npu:
            from afd_testkit.engines._ascend_passes import check_pass, way_of_pass

            for name, way in way_of_pass().items():
                self._observed.ways.setdefault(name, set()).add(way)
            check_pass(self._config, self._passes[-1])

    def _observe(self, observed: Observation, scheduler_output: Any) -> None:
        state = self._runner.execute_model_state
        if state is None:
            raise EngineError("the model runner left no state after a step; wrong vLLM version")
        rows = self._rows(self._names, scheduler_output.num_scheduled_tokens)
        observed.steps.append(
            StepRecord(
                requests=tuple(ScheduledRequest(r.name, r.computed, r.scheduled) for r in rows),
                forward_rows=tuple(self._passes),
                expert_ids=tuple(self._expert_ids),
            )
        )
        for row in rows:
            self._touched |= self._kv.blocks_of(row.index)
            seen = observed.requests.setdefault(row.name, Seen())
            if row.is_prefill:
                self._collect(seen, row, state.hidden_states)
            else:
                hidden = state.hidden_states[row.offset : row.offset + row.scheduled]
                logprobs = self._logprobs(hidden)
                if self._full:
                    seen.decode.append(logprobs)

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

    def _collect(self, seen: Seen, row: _Row, hidden_states: torch.Tensor) -> None:
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
        logprobs = self._logprobs(hidden)
        if self._full:
            seen.logprobs.append(logprobs)
            seen.hidden.append(hidden.to(torch.float32).cpu().numpy().copy())
        if seen.end == row.prompt_tokens:
            seen.kv = self._kv.read(row.index, row.prompt_tokens)

    def _logprobs(self, hidden: torch.Tensor) -> FloatArray:
        """[tokens, vocabulary] log-probabilities, computed in float64."""
        with torch.inference_mode():
            logits = self._runner.model.compute_logits(hidden).to(torch.float64)
            logprobs = torch.log_softmax(logits, dim=-1)
        if logprobs.shape[-1] > _FLOAT64_VOCABULARY:
            logprobs = logprobs.to(torch.float32)
        array: FloatArray = logprobs.cpu().numpy()
        return array
