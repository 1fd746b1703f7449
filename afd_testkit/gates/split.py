"""Gate ``split``: a step in two stages gives what the whole step gives.

Invariant: splitting changes no prompt position's result.  Oracle: the same engine with its own
worker, unsplit.  The realized cut is checked against the policy's definition, so that a run in
which nothing was split, or not where it should be, fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from afd_testkit.engines.base import Prompt, RunResult, SplitSetting, StepRecord
from afd_testkit.gates.check import Check, need_split, run_check
from afd_testkit.gates.realized import defined_cut, is_prefill
from afd_testkit.gates.session import GateSession, Subject, salted
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
    split = check.subject.realized(split)
    prefill = [step for step in run.steps if is_prefill(step)]
    check.need(bool(prefill), "no prefill step was executed")
    for step in prefill:
        _check_step(check, step, split)
    check.facts["split_steps"] = sum(len(step.forward_rows) == 2 for step in prefill)
    check.facts["steps_cut_inside_request"] = sum(
        bool(step.evidence and step.evidence["cuts_request"]) for step in prefill
    )


def _check_step(check: Check, step: StepRecord, split: SplitSetting) -> None:
    """Raises when the step was not split, or not where or as the definition says."""
    scheduled = [row.num_scheduled for row in step.requests]
    total = sum(scheduled)
    evidence = step.evidence
    if evidence is None:
        check.need(False, "the step has no evidence: the engine did not run the splitting worker")
        return
    check.need(evidence["completed"], f"a step of {total} tokens did not complete")
    cut = defined_cut(step, split)
    if cut is None:
        rows = check.subject.token_alignment
        check.need(
            evidence["policy"] == "unsplit" and step.forward_rows == (-(-total // rows) * rows,),
            f"a step of {total} tokens has no cut under {split}, yet ran as {evidence}",
        )
        return
    rest = total - cut
    padded = tuple(-(-n // split.alignment) * split.alignment for n in (cut, rest))
    check.need(
        tuple(evidence["stage_tokens"]) == (cut, rest) and step.forward_rows == padded,
        f"a step of {scheduled} tokens must run as stages of {cut} and {rest} tokens in buffers "
        f"of {padded}; it ran as {evidence['stage_tokens']} in {step.forward_rows} "
        f"({evidence['policy']}, {evidence['detail'] or 'split'})",
    )


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
            if session.user:
                need_split(check, [result], split)

        yield run_check(
            session, NAME, subject, case, f"{split.policy}, alignment {split.alignment}", body
        )
