"""What all gates of a run share: engines, baselines with their noise, and how a check is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import Any

from afd_testkit.device_evidence import FACT
from afd_testkit.engines.base import (
    BLOCK_SIZES,
    ONE_PROCESS,
    SERVING,
    EngineConfig,
    EngineDied,
    EngineError,
    PrefillEngine,
    Prompt,
    RoutingSetting,
    RunResult,
    SplitSetting,
    StepRecord,
    Topology,
    told,
)
from afd_testkit.forced_balance import BALANCED
from afd_testkit.gates.compare import Noise, NotComparable, compare, profile
from afd_testkit.gates.every_rank import RANK_DIFFERENCE, EveryRank
from afd_testkit.gates.tolerances import tolerances
from afd_testkit.gates.workloads import Corpus, user_prompts
from afd_testkit.prompts import UserPrompt
from afd_testkit.results import CheckResult, Comparison, Outcome, Profile, StageBalance

StartEngine = Callable[[EngineConfig], PrefillEngine]


class Requirement(Exception):
    """A realized fact is not what the gate needs; the check fails with this text."""


class NotApplicable(Exception):
    """The user's prompts cannot show what the check is about; it is skipped with this text."""


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


@dataclass
class Check:
    """One check while it runs; see :func:`run_check`."""

    session: GateSession
    gate: str
    subject: Subject
    case: str
    variant: str
    comparisons: list[Comparison] = field(default_factory=list)
    balance: list[StageBalance] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    profile: Profile | None = None
    judging: bool = False  # set once the baseline stands: from then on an error is a failure

    def run(
        self,
        engine: PrefillEngine,
        prompts: Sequence[Prompt],
        split: SplitSetting,
        routing: RoutingSetting = SERVING,
    ) -> RunResult:
        """Run under test, with the session's fault; what it returns must be whole.

        Every prompt is there with every position, and every step passed through the model as
        often, and with as many rows, as the splitter says it did.  Expert ids were the router's
        own, unless ``routing`` asks for others.
        Raises :class:`Requirement`.
        """
        # An engine that started with the fault is faulty by itself.
        fault = None if engine.config.start_fault else self.session.fault
        result = engine.run(prompts, split=split, fault=fault, **told(routing))
        self.balance.extend(balances(result))
        if forced := forced_balance(result):  # said before it is judged, so that no record hides it
            self.facts[BALANCED] = self.facts.get(BALANCED, 0) + forced
        if FACT in result.facts:  # before the run is judged: it says what the judgement is worth
            self.facts[FACT] = result.facts[FACT]
        self.need(
            routing.profiling or not forced,
            f"{forced} executions of the routing operator made the expert ids even, though the "
            "model was not being profiled: these are not the model's own results",
        )
        check_whole(result, prompts)
        check_passes(result)
        if RANK_DIFFERENCE in result.facts:
            apart = self.facts[RANK_DIFFERENCE] = result.facts[RANK_DIFFERENCE]
            limit = tolerances(self.gate, self.subject.dtype)["logprob"].limit
            self.need(
                apart <= limit,
                f"data-parallel ranks ran the same prompts; they differ by {apart:g} in "
                f"log-probability, allowed are {limit:g}",
            )
        return result

    def compare(self, actual: RunResult, baseline: Baseline) -> None:
        """Compare with the baseline; the run that differs most gives the profile."""
        limits = tolerances(self.gate, self.subject.dtype)
        self.comparisons.extend(compare(actual, baseline.run, baseline.noise, limits))
        found = profile(
            actual,
            baseline.run,
            (baseline.other, baseline.run),
            limits["logprob"].with_noise(baseline.noise.maximum["logprob"]),
        )
        if self.profile is None or max(found.difference) > max(self.profile.difference):
            self.profile = found

    def need(self, ok: bool, text: str) -> None:
        """A realized fact that the check stands on.  Raises :class:`Requirement`."""
        if not ok:
            raise Requirement(text)


def check_whole(run: RunResult, prompts: Sequence[Prompt]) -> None:
    """The requests are the prompts, in order, with all their rows.  Raises :class:`Requirement`."""
    submitted = [(prompt.name, prompt.token_ids) for prompt in prompts]
    if [(request.name, request.token_ids) for request in run.requests] != submitted:
        raise Requirement(
            f"the engine was given prompts {[name for name, _ in submitted]} and returned "
            f"{[request.name for request in run.requests]}, or other tokens"
        )
    for request in run.requests:
        length = len(request.token_ids)
        rows = length - request.cached_tokens
        found = {len(request.hidden), len(request.logprobs)}
        if not 0 < rows <= length or found != {rows} or {len(kv) for kv in request.kv} != {length}:
            raise Requirement(
                f"{request.name}: of {length} tokens {request.cached_tokens} were cached, so there "
                f"must be {rows} rows of results and {length} KV rows in every layer; there are "
                f"{sorted(found)} and {sorted({len(kv) for kv in request.kv})}"
            )


def check_passes(run: RunResult) -> None:
    """What the model saw is what the splitter says it ran.  Raises :class:`Requirement`.

    The splitter's word alone would let a worker that never splits pass.
    """
    for number, step in enumerate(run.steps):
        scheduled = sum(row.num_scheduled for row in step.requests)
        said = (scheduled,) if step.evidence is None else tuple(step.evidence["stage_input_tokens"])
        if step.forward_rows != said:
            raise Requirement(
                f"step {number} of {scheduled} tokens: the splitter says it ran passes of {said} "
                f"rows, the model saw {step.forward_rows}"
            )


def forced_balance(run: RunResult) -> int:
    """Executions of the routing operator that made expert ids even, as the splitter says."""
    return sum(step.evidence.get(BALANCED, 0) for step in run.steps if step.evidence is not None)


def balances(run: RunResult) -> Iterator[StageBalance]:
    """Realized stage sizes of every step with a prefill in it."""
    for step in run.steps:
        evidence = step.evidence
        if evidence is None or evidence["reason"] == "decode_only":
            continue
        yield StageBalance(
            policy=evidence["policy"],
            tokens=tuple(evidence["stage_tokens"]),
            input_tokens=tuple(evidence["stage_input_tokens"]),
            cuts_request=evidence["cuts_request"],
            reason=evidence["reason"],
            hazard=evidence["hazard"],
        )


def run_check(
    session: GateSession,
    gate: str,
    subject: Subject,
    case: str,
    variant: str,
    body: Callable[[Check], None],
) -> CheckResult:
    """Run ``body`` as one check and say how it ended.

    A run under test that raises has failed; an engine that died, or a baseline that raised,
    judged nothing and is an error.
    """
    check = Check(session, gate, subject, case, variant)
    started = time.perf_counter()
    outcome, message = Outcome.PASSED, ""
    try:
        body(check)
    except NotApplicable as error:
        outcome, message = Outcome.SKIPPED, str(error)
    except (Requirement, NotComparable) as error:
        outcome, message = Outcome.FAILED, str(error)
    except EngineDied as error:
        outcome, message = Outcome.ERROR, str(error)
    except EngineError as error:
        outcome = Outcome.FAILED if check.judging else Outcome.ERROR
        message = f"the run raised: {error}"
    # What was compared counts, also where the rest of the check then did not apply.
    if outcome in (Outcome.PASSED, Outcome.SKIPPED) and not all(c.ok for c in check.comparisons):
        outcome, message = Outcome.FAILED, ""
    result = CheckResult(
        gate=gate,
        engine=subject.engine,
        model=subject.short_model,
        dtype=subject.dtype,
        topology=subject.topology.topology_label(),
        case=case,
        variant=variant,
        outcome=outcome,
        comparisons=tuple(check.comparisons),
        balance=tuple(check.balance),
        profile=check.profile,
        facts=check.facts,
        message=message,
        seconds=time.perf_counter() - started,
    )
    session.progress(progress_line(result))
    return result


def progress_line(result: CheckResult) -> str:
    """One line a check: what, how far apart, how it ended."""
    logprob = next((c for c in result.comparisons if c.quantity == "logprob"), None)
    figures = "" if logprob is None else f"  |dlogp| {logprob.max_diff:.1e} <= {logprob.limit:.1e}"
    subject = (result.model, result.dtype, result.topology)
    return (
        f"  {result.gate:11s} {' '.join(part for part in subject if part)}  {result.case}"
        f"  {result.variant}{figures}  {result.outcome.upper()}  {result.seconds:.1f} s"
    )


def defined_cut(step: StepRecord, split: SplitSetting) -> int | None:
    """Where the policy's definition cuts ``step`` if there is no hazard, ``None`` for nowhere."""
    scheduled = [row.num_scheduled for row in step.requests]
    if split.policy == "token":
        return expected_cut(sum(scheduled), split.alignment)
    bounds = [sum(scheduled[:i]) for i in range(1, len(scheduled))]
    return min(bounds, key=lambda bound: (abs(2 * bound - sum(scheduled)), -bound), default=None)


def is_prefill(step: StepRecord) -> bool:
    """Whether the splitter saw a prompt in the step."""
    return step.evidence is None or step.evidence["reason"] != "decode_only"


def need_split(check: Check, runs: Sequence[RunResult], split: SplitSetting) -> None:
    """Some step was really split.

    With the user's prompts there may be nothing to cut, or only where a request reads what
    another of its step writes; the check is then not applicable.
    Raises :class:`Requirement` or :class:`NotApplicable`.
    """
    if split.policy == "off":
        return
    split = check.subject.realized(split)
    steps = [step for run in runs for step in run.steps if is_prefill(step)]
    done = sum(len(step.forward_rows) == 2 for step in steps)
    check.facts["split_steps"] = done
    if check.session.user and not any(_can_be_cut(step, split) for step in steps):
        raise NotApplicable(
            f"no step of these prompts can be cut by {split.policy} at alignment {split.alignment}"
        )
    check.need(done > 0, "no step was really split")


def _can_be_cut(step: StepRecord, split: SplitSetting) -> bool:
    """Whether the definition cuts ``step``, and no request reads what another one writes there.

    That the splitter does not call a hazard what is none, the ``same-step`` cases judge.
    """
    hazard = step.evidence is not None and step.evidence["hazard_action"] == "unsplit"
    return defined_cut(step, split) is not None and not hazard


def expected_cut(num_tokens: int, alignment: int) -> int | None:
    """Where the token policy must cut an unhazardous step, by its definition.

    The multiple of ``alignment`` inside (0, T) nearest to T / 2, ties to the later one.
    """
    inside = range(alignment, num_tokens, alignment)
    return min(inside, key=lambda cut: (abs(2 * cut - num_tokens), -cut), default=None)
