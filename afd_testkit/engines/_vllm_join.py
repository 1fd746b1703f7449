"""What the ranks of one engine saw, as one observation; ranks that disagree are an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from afd_testkit.engines.base import (
    EngineError,
    FloatArray,
    Prompt,
    RequestResult,
    StepRecord,
)


@dataclass(frozen=True)
class LayerRows:
    """KV rows of one request in one layer on one rank: [tokens, columns].

    ``heads``: the rank's KV heads; ``total``: those of all ranks, replicated ones counted once;
    ``copies``: ranks that hold the same heads.  ``parts``: columns of each part of a row (keys,
    then values), which all heads share equally; the latent row of MLA has one head.
    """

    rows: FloatArray
    heads: int
    total: int
    parts: tuple[int, ...]


@dataclass
class Seen:
    """What was collected for one request on one rank.

    ``hidden``, ``logprobs`` of the prompt and ``decode`` of what follows it: on rank 0.
    """

    chunks: list[int] = field(default_factory=list)
    first: int | None = None
    end: int = 0
    hidden: list[FloatArray] = field(default_factory=list)
    logprobs: list[FloatArray] = field(default_factory=list)
    decode: list[FloatArray] = field(default_factory=list)
    kv: tuple[LayerRows, ...] = ()


@dataclass
class Observation:
    """Everything a rank saw of one run.

    ``ways``: by name, all the ways in which passes through the model went, as the backend says.
    """

    requests: dict[str, Seen] = field(default_factory=dict)
    ways: dict[str, set[str]] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    seconds: float = 0.0

    def with_evidence(self, evidence: Sequence[Any]) -> Observation:
        """Each step with the splitter's own record of it."""
        if len(evidence) != len(self.steps):
            raise EngineError(
                f"the worker recorded evidence for {len(evidence)} steps, "
                f"but {len(self.steps)} were executed"
            )
        steps = [
            replace(step, evidence=dict(record))
            for step, record in zip(self.steps, evidence, strict=True)
        ]
        return replace(self, steps=steps)


def joined(ranks: Sequence[Observation]) -> Observation:
    """Rank 0's observation with the KV rows of all; :class:`EngineError` where ranks disagree.

    Steps must be the same on every rank: requests, rows through the model, and the splitter's
    evidence, which holds the digest of the plan.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks[1:], 1):
        _check_same_steps(first, other, rank)
    for name, seen in first.requests.items():
        layers = zip(*(other.requests[name].kv for other in ranks), strict=True)
        seen.kv = tuple(
            join_layer(name, number, list(layer)) for number, layer in enumerate(layers)
        )
    return first


def _check_same_steps(first: Observation, other: Observation, rank: int) -> None:
    if len(first.steps) != len(other.steps):
        raise EngineError(
            f"rank 0 executed {len(first.steps)} steps, rank {rank} {len(other.steps)}"
        )
    views: dict[str, Callable[[StepRecord], Any]] = {
        "requests": lambda step: step.requests,
        "rows through the model": lambda step: step.forward_rows,
        "evidence": lambda step: step.evidence,
    }
    for number, (one, two) in enumerate(zip(first.steps, other.steps, strict=True)):
        for what, view in views.items():
            if view(one) != view(two):
                raise EngineError(
                    f"step {number}: the ranks disagree in {what}:\n"
                    f"rank 0: {view(one)}\nrank {rank}: {view(two)}"
                )


def join_layer(request: str, number: int, ranks: list[LayerRows]) -> LayerRows:
    """All heads of one layer, in order; copies of a head must be equal to the last bit."""
    first = ranks[0]
    copies = first.heads * len(ranks) // first.total
    for start in range(0, len(ranks), copies):
        for other in range(start + 1, start + copies):
            _check_copies(request, number, start, other, ranks)
    distinct = [ranks[rank].rows for rank in range(0, len(ranks), copies)]
    if len(distinct) == 1:
        return first
    edges = np.cumsum([0, *first.parts])
    parts = [
        rows[:, edges[part] : edges[part + 1]]
        for part in range(len(first.parts))
        for rows in distinct
    ]
    return replace(first, rows=np.concatenate(parts, axis=1))


def _check_copies(
    request: str, number: int, one: int, two: int, ranks: Sequence[LayerRows]
) -> None:
    same = ranks[one].rows == ranks[two].rows
    if not same.all():
        token, column = np.argwhere(~same)[0]
        raise EngineError(
            f"request {request}, layer {number}: ranks {one} and {two} must hold the same KV "
            f"rows, but at token {token}, column {column} they hold "
            f"{ranks[one].rows[token, column]} and {ranks[two].rows[token, column]}"
        )


def request_result(
    seen: Seen | None, prompt: Prompt, *, cached_tokens: int, generated: tuple[int, ...]
) -> RequestResult:
    """The result of ``prompt``; checks that each of its positions was seen once."""
    seen = seen or Seen()
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
        kv=tuple(layer.rows for layer in seen.kv),
        greedy_token=generated[0],
        generated=generated,
        decode_logprobs=np.concatenate([seen.logprobs[0][:0], *seen.decode]),
    )
