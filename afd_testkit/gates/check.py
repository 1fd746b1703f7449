"""One check of a gate: how it runs, what it believes of a run, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from afd_testkit.device_evidence import FACT
from afd_testkit.engines.base import (
    SERVING,
    EngineDied,
    EngineError,
    PrefillEngine,
    Prompt,
    RoutingSetting,
    RunResult,
    SplitSetting,
    told,
)
from afd_testkit.forced_balance import BALANCED
from afd_testkit.gates.compare import NotComparable, compare, profile
from afd_testkit.gates.every_rank import RANK_DIFFERENCE
from afd_testkit.gates.realized import (
    Requirement,
    balances,
    can_be_cut,
    check_passes,
    check_whole,
    forced_balance,
    is_prefill,
)
from afd_testkit.gates.session import Baseline, GateSession, Subject
from afd_testkit.gates.tolerances import tolerances
from afd_testkit.results import CheckResult, Comparison, Outcome, Profile, StageBalance


class NotApplicable(Exception):
    """The user's prompts cannot show what the check is about; it is skipped with this text."""


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
    if check.session.user and not any(can_be_cut(step, split) for step in steps):
        raise NotApplicable(
            f"no step of these prompts can be cut by {split.policy} at alignment {split.alignment}"
        )
    check.need(done > 0, "no step was really split")


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
