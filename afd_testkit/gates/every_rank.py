"""A data-parallel engine as gates see it: every rank runs the whole batch.

Gates speak of the batch of one step.  An engine deals prompts out to its data-parallel ranks,
so that each rank is given a copy of every prompt; the first rank's results are judged, the
others must equal them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from afd_testkit.engines.base import (
    SERVING,
    PrefillEngine,
    Prompt,
    RequestResult,
    RoutingSetting,
    RunResult,
    SplitSetting,
    StepRecord,
    told,
)

# Fact of a run: largest difference of log-probabilities between the ranks, in nats.
RANK_DIFFERENCE = "data_rank_difference"


class EveryRank:
    """The engine, with every prompt given to each of its data-parallel ranks."""

    def __init__(self, engine: PrefillEngine) -> None:
        self._engine = engine
        self._ranks = engine.config.data_parallel
        self.name = engine.name
        self.config = engine.config

    def versions(self) -> dict[str, str]:
        """As the engine answers."""
        return self._engine.versions()

    def vocab_size(self) -> int:
        """As the engine answers."""
        return self._engine.vocab_size()

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As the engine answers."""
        return self._engine.tokenize(text)

    def reset_prefix_cache(self) -> None:
        """As the engine does, on all ranks."""
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """As the engine does."""
        self._engine.close()

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        split: SplitSetting = SplitSetting(),  # noqa: B008  # frozen, as in the Protocol
        fault: str | None = None,
        routing: RoutingSetting = SERVING,
    ) -> RunResult:
        """The first rank's requests; the steps of all ranks, under the prompts' own names."""
        copies = [
            replace(prompt, name=_name(prompt.name, rank))
            for prompt in prompts
            for rank in range(self._ranks)
        ]
        result = self._engine.run(copies, split=split, fault=fault, **told(routing))
        first, *others = (result.requests[rank :: self._ranks] for rank in range(self._ranks))
        differences = [
            _difference(one, other)
            for rank in others
            for one, other in zip(first, rank, strict=True)
        ]
        return replace(
            result,
            requests=first,
            steps=tuple(_own_names(step) for step in result.steps),
            facts={**result.facts, RANK_DIFFERENCE: max(differences, default=0.0)},
        )


def _name(name: str, rank: int) -> str:
    return f"{name}@{rank}" if rank else name


def _own_names(step: StepRecord) -> StepRecord:
    suffix = f"@{step.data_rank}" if step.data_rank else ""
    rows = tuple(replace(row, name=row.name.removesuffix(suffix)) for row in step.requests)
    return replace(step, requests=rows)


def _difference(one: RequestResult, other: RequestResult) -> float:
    """Largest difference of log-probabilities; infinite where other positions were computed."""
    if one.logprobs.shape != other.logprobs.shape:
        return float("inf")
    return float(np.abs(one.logprobs - other.logprobs).max())
