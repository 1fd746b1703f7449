"""What all gates of a run share: subjects, engines, and baselines with their noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import Any

from afd_testkit.engines.base import (
    BLOCK_SIZES,
    ONE_PROCESS,
    EngineConfig,
    PrefillEngine,
    Prompt,
    RunResult,
    SplitSetting,
    Topology,
)
from afd_testkit.gates.compare import Noise
from afd_testkit.gates.every_rank import EveryRank
from afd_testkit.gates.workloads import Corpus, user_prompts
from afd_testkit.prompts import UserPrompt

StartEngine = Callable[[EngineConfig], PrefillEngine]


@dataclass(frozen=True)
class Baseline:
    """Unsplit results of the stock engine: as submitted, and in another batch composition."""

    run: RunResult
    other: RunResult
    noise: Noise


@dataclass(frozen=True)
class Subject:
    """What is judged: a model on an engine in a dtype, over the ranks of a topology."""

    engine: str
    model: str
    dtype: str
    topology: Topology = ONE_PROCESS

    @property
    def short_model(self) -> str:
        """The recipe's name, or the last part of a checkpoint's path."""
        return Path(self.model).name

    @property
    def token_alignment(self) -> int:
        """Every pass has a multiple of so many rows: the ranks that its tokens are spread over."""
        return self.topology.tensor_parallel if self.topology.sequence_parallel else 1

    def realized(self, split: SplitSetting) -> SplitSetting:
        """``split`` with the alignment that spread tokens demand beside its own."""
        return replace(split, alignment=lcm(split.alignment, self.token_alignment))

    def config(self, **more: Any) -> EngineConfig:
        """An engine for it; ``more`` are further fields of the configuration."""
        return EngineConfig(
            model=self.model,
            dtype=self.dtype,
            block_size=BLOCK_SIZES.get(self.engine, EngineConfig.block_size),
            **asdict(self.topology),
            **more,
        )


@dataclass
class GateSession:
    """Engines and baselines of one run of gates.

    ``start``: gives the running engine of a configuration.  ``user``: the user's prompts, which
    then take the place of the built-in workloads.  ``fault``: injected into every run under
    test (never into a baseline).  ``rounds``: batches that the stability gate runs.
    """

    start: StartEngine
    paragraphs: Sequence[str]
    user: Sequence[UserPrompt] = ()
    progress: Callable[[str], None] = lambda line: None
    fault: str | None = None
    rounds: int = 10
    baselines: dict[tuple[Subject, str], Baseline] = field(default_factory=dict)
    kept: dict[tuple[Subject, str], Any] = field(default_factory=dict)  # a gate's own, by its name

    def stock(self, subject: Subject) -> PrefillEngine:
        """The engine with its own worker: whole steps, no prefix cache."""
        return self._start(subject.config())

    def split(self, subject: Subject, step_tokens: int | None = None) -> PrefillEngine:
        """The engine with the splitting worker and prefix caching."""
        return self._start(
            subject.config(worker="afd", prefix_caching=True, step_tokens=step_tokens)
        )

    def _start(self, config: EngineConfig) -> PrefillEngine:
        engine = self.start(config)
        return EveryRank(engine) if config.data_parallel > 1 else engine

    def corpus(self, subject: Subject) -> Corpus:
        """The prose under the subject's tokenizer."""
        return Corpus(self.stock(subject), self.paragraphs)

    def users(self, subject: Subject) -> tuple[Prompt, ...]:
        """The user's prompts under the subject's tokenizer."""
        return user_prompts(self.stock(subject), self.user)

    def baseline(self, subject: Subject, prompts: Sequence[Prompt]) -> Baseline:
        """Unsplit results and noise for ``prompts``, computed once a session.

        Noise: the same input twice, and the same prompts in two other batches, which changes
        every prompt's neighbours and the sizes of every matrix product.
        """

        def measure() -> Baseline:
            engine = self.stock(subject)
            run = engine.run(prompts)
            again = engine.run(prompts)
            other = joined([engine.run(batch) for batch in _other_batches(prompts)], prompts)
            return Baseline(run, other, Noise.between([(again, run), (other, run)]))

        return self.once(subject, f"together: {tuple(prompts)!r}", measure)

    def once(self, subject: Subject, name: str, measure: Callable[[], Baseline]) -> Baseline:
        """The baseline ``name`` of ``subject``, measured when first asked for."""
        key = (subject, name)
        if key not in self.baselines:
            self.baselines[key] = measure()
        return self.baselines[key]


def _other_batches(prompts: Sequence[Prompt]) -> list[tuple[Prompt, ...]]:
    """Every other prompt, and the rest, each behind a short neighbour."""
    neighbour = Prompt("another batch's neighbour", prompts[0].token_ids[:37])
    return [(neighbour, *half) for half in (prompts[::2], prompts[1::2]) if half]


def joined(runs: Sequence[RunResult], prompts: Sequence[Prompt]) -> RunResult:
    """The requests of several runs as one run's, those of ``prompts`` only, in their order."""
    found = {request.name: request for run in runs for request in run.requests}
    return RunResult(
        requests=tuple(found[prompt.name] for prompt in prompts),
        steps=(),
        seconds=sum(run.seconds for run in runs),
    )


def variant(split: SplitSetting) -> str:
    """How a setting is called where the alignment matters to the ``token`` policy only."""
    return split.policy + (f", alignment {split.alignment}" if split.policy == "token" else "")


def salted(prompts: Sequence[Prompt], salt: str) -> tuple[Prompt, ...]:
    """``prompts`` with their own prefix-cache entries, so that they hit nothing of others."""
    return tuple(replace(prompt, cache_salt=salt) for prompt in prompts)
