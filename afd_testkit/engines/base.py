"""What a gate asks of an engine, and what it gets back.

An engine adapter implements :class:`PrefillEngine`.  All arrays are numpy, so that
results can cross a process boundary and be compared without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Policy = Literal["off", "request", "token"]
FloatArray = NDArray[np.floating[Any]]
IdArray = NDArray[np.int64]


class EngineError(Exception):
    """An engine could not do what it was asked; the message says which engine and why."""


class EngineDied(EngineError):
    """The engine's process is gone; what it had returned before is still valid."""


# KV blocks of engines that do not take the usual 32 tokens, by name.
BLOCK_SIZES: Mapping[str, int] = {"ascend": 128}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Over how many processes an engine runs, and what is spread over them.

    ``tensor_parallel``, ``data_parallel``: ranks.  ``expert_parallel``: experts lie on different
    ranks instead of being cut.  ``sequence_parallel``: between attention and experts each
    tensor-parallel rank holds a part of the tokens (FlashComm1 on Ascend).
    ``soc``: generation of the NPU, ``A2`` or ``A3``.
    """

    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    sequence_parallel: bool = False
    soc: str = "A2"

    def topology(self) -> Topology:
        """This part of a larger configuration by itself."""
        return Topology(**{each.name: getattr(self, each.name) for each in fields(Topology)})

    @property
    def ranks(self) -> int:
        """Processes that hold a part of the model."""
        return self.tensor_parallel * self.data_parallel

    def topology_label(self) -> str:
        """What differs from one process on an A2, as in ``TP 2 + EP on A3``; else empty."""
        parts = [
            f"TP {self.tensor_parallel}" if self.tensor_parallel != 1 else "",
            f"DP {self.data_parallel}" if self.data_parallel != 1 else "",
            "EP" if self.expert_parallel else "",
            "SP" if self.sequence_parallel else "",
        ]
        label = " + ".join(part for part in parts if part)
        return label if self.soc == Topology.soc else f"{label} on {self.soc}".strip()


ONE_PROCESS = Topology()


@dataclass(frozen=True)
class EngineConfig(Topology):
    """Everything fixed when an engine starts; equal configurations share one engine.

    ``model``: name of a built-in recipe or a checkpoint directory.
    ``dtype``: ``"float64"`` (reference only), ``"float32"`` or ``"bfloat16"``.
    ``worker``: ``"stock"`` is the upstream worker, untouched; ``"afd"`` is the splitting one.
    ``step_tokens``: most tokens of one step, i.e. the chunk size of chunked prefill;
    ``None`` means that any batch up to ``max_step_tokens`` fits one step.
    ``max_num_seqs``: most requests in one step.
    ``compiled``: the model runs through vLLM's own compile path instead of eagerly.
    ``afd``: further options of the splitting worker, as (name, value), fixed at its start.
    ``start_fault``: an entry of ``afd_testkit.faults`` that is in force from before the start on,
    as one in what is registered or compiled then must be.
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
    compiled: bool = False
    afd: tuple[tuple[str, Any], ...] = ()
    start_fault: str | None = None

    def label(self) -> str:
        """One short line for progress output and records."""
        chunk = "unchunked" if self.step_tokens is None else f"chunks of {self.step_tokens}"
        prefix = "prefix caching" if self.prefix_caching else "no prefix caching"
        parts = [
            f"{self.model} {self.dtype}",
            self.topology_label(),
            f"{self.worker} worker",
            *(f"{name} {value}" for name, value in self.afd),
            "compiled" if self.compiled else "",
            f"fault {self.start_fault}" if self.start_fault else "",
        ]
        return ", ".join([*(part for part in parts if part), prefix, chunk])


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
class RoutingSetting:
    """What the routing operator is told in one ``run``, and whether its ids are kept.

    ``profiling``: the stack's profile flag is set for the run.  ``watch``: each step keeps the
    expert ids that the operator left (``StepRecord.expert_ids``).
    """

    profiling: bool = False
    watch: bool = False


SERVING = RoutingSetting()


def told(routing: RoutingSetting) -> dict[str, Any]:
    """``routing`` as an argument of ``run``; none while it asks for nothing.

    Engines of other projects need not know of routing until it is asked for.
    """
    return {} if routing == SERVING else {"routing": routing}


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
    ``generated``: all tokens that it sampled, G of them, where the engine tells them.
    ``decode_logprobs``: [G - 1, V] as ``logprobs``, at the positions of ``generated[:-1]``.
    """

    name: str
    token_ids: tuple[int, ...]
    cached_tokens: int
    chunks: tuple[int, ...]
    hidden: FloatArray
    logprobs: FloatArray
    kv: tuple[FloatArray, ...]
    greedy_token: int
    generated: tuple[int, ...] = ()
    decode_logprobs: FloatArray | None = None


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
    ``data_rank``: the data-parallel rank that executed it; ranks step at the same time, each
    with requests of its own.
    ``evidence``: the splitter's own record (``afd_plugin.StepEvidence.as_dict()``), ``None``
    on a stock worker.
    ``expert_ids``: [rows, experts a token] of every execution of the routing operator in the
    step, in order, where the run was asked to watch it.
    """

    requests: tuple[ScheduledRequest, ...]
    evidence: dict[str, Any] | None = None
    forward_rows: tuple[int, ...] = ()
    data_rank: int = 0
    expert_ids: tuple[IdArray, ...] = ()


@dataclass(frozen=True)
class RunResult:
    """Results in prompt order, steps in execution order (by rank where there are several)."""

    requests: tuple[RequestResult, ...]
    steps: tuple[StepRecord, ...]
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


def refuse_topology(name: str, config: EngineConfig) -> None:
    """:class:`EngineError` unless ``config`` asks for one process, all that ``name`` can do."""
    if config.topology() != ONE_PROCESS:
        raise EngineError(
            f"{name} runs in one process; {config.topology_label()} was asked for. Leave the "
            "topology at its defaults, or use the engine ascend"
        )


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
        routing: RoutingSetting = SERVING,
    ) -> RunResult:
        """Submit all prompts at once, in order, and run until each has its tokens.

        ``fault`` names an entry of ``afd_testkit.faults`` that is injected for this run
        only.  ``routing``: what the routing operator is told in this run.

        Raises :class:`EngineDied` when the process is gone, :class:`EngineError`
        for anything else that keeps a result from being produced.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, so that the next run is cold."""
        ...

    def close(self) -> None:
        """Stop the engine; calling it twice is harmless."""
        ...
