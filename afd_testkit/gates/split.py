"""Gate ``split``: a step in two stages gives what the whole step gives.

Invariant: splitting changes no prompt position's result.  Oracle: the same engine with its own
worker, unsplit.  The realized cut is checked against the policy's definition, so that a run in
which nothing was split, or not where it should be, fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from afd_testkit.engines.base import Prompt, RunResult, SplitSetting, StepRecord
from afd_testkit.gates.session import Check, GateSession, Subject, expected_cut, run_check, salted
from afd_testkit.gates.workloads import LENGTHS, USER
from afd_testkit.results import CheckResult

NAME = "split"
SETTINGS: Sequence[SplitSetting] = (
    *(SplitSetting("token", alignment) for alignment in (1, 2, 4, 8)),
    *(SplitSetting("request", alignment) for alignment in (1, 8)),
)


def cases(session: GateSession) -> list[str]:
    """Workloads: the built-in ones, or the user's prompts in their place."""
    return [USER] if session.user else list(LENGTHS)


def prompts_of(session: GateSession, subject: Subject, case: str) -> tuple[Prompt, ...]:
    """The prompts of a workload."""
    if case == USER:
        return session.users(subject)
    return session.corpus(subject).prompts(LENGTHS[case])


def check_cuts(check: Check, run: RunResult, split: SplitSetting) -> None:
    """Every prefill step was cut where the policy says, into stages of the right extents."""
    prefill = [step for step in run.steps if _is_prefill(step)]
    check.need(bool(prefill), "no prefill step was executed")
    done = sum(_check_step(check, step, split) for step in prefill)
    check.facts["split_steps"] = done
    check.facts["steps_cut_inside_request"] = sum(
        bool(step.evidence and step.evidence["cuts_request"]) for step in prefill
    )


def _is_prefill(step: StepRecord) -> bool:
    return step.evidence is None or step.evidence["reason"] != "decode_only"


def _check_step(check: Check, step: StepRecord, split: SplitSetting) -> bool:
    """Whether the step was split; raises when that, or the place, is not as defined."""
    scheduled = [row.num_scheduled for row in step.requests]
    total = sum(scheduled)
    if step.evidence is None:
        check.need(False, "the step has no evidence: the engine did not run the splitting worker")
        return False
    evidence = step.evidence
    check.need(evidence["completed"], f"a step of {total} tokens did not complete")
    if split.policy == "token":
        cut = expected_cut(total, split.alignment)
    else:
        bounds = [sum(scheduled[:i]) for i in range(1, len(scheduled))]
        cut = min(bounds, key=lambda b: (abs(2 * b - total), -b), default=None)
    if cut is None:
        check.need(
            evidence["policy"] == "unsplit" and evidence["stage_tokens"] == (total,),
            f"a step of {total} tokens has no cut under {split}, yet ran as {evidence}",
        )
        return False
    rest = total - cut
    padded = tuple(-(-n // split.alignment) * split.alignment for n in (cut, rest))
    check.need(
        tuple(evidence["stage_tokens"]) == (cut, rest)
        and tuple(evidence["stage_input_tokens"]) == padded,
        f"a step of {scheduled} tokens must run as stages of {cut} and {rest} tokens in buffers "
        f"of {padded}; it ran as {evidence['stage_tokens']} in {evidence['stage_input_tokens']} "
        f"({evidence['policy']}, {evidence['detail'] or 'split'})",
    )
    return True


def variant(split: SplitSetting) -> str:
    """How a setting is called in results."""
    return f"{split.policy}, alignment {split.alignment}"


def run(
    session: GateSession, subject: Subject, case: str, settings: Sequence[SplitSetting] = SETTINGS
) -> Iterator[CheckResult]:
    """One check a split setting."""
    for number, split in enumerate(settings):

        def body(check: Check, split: SplitSetting = split, number: int = number) -> None:
            prompts = prompts_of(session, subject, case)
            baseline = session.baseline(subject, prompts)
            check.judging = True
            engine = session.split(subject)
            engine.reset_prefix_cache()
            result = check.run(engine, salted(prompts, f"split-{case}-{number}"), split)
            check.facts["prompt_tokens"] = [len(prompt.token_ids) for prompt in prompts]
            check.facts["cached_tokens"] = sum(r.cached_tokens for r in result.requests)
            check.compare(result, baseline)
            check_cuts(check, result, split)

        yield run_check(session, NAME, subject, case, variant(split), body)
