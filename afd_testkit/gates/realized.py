"""What a run under test must have realized, and what it says of its steps; no oracle involved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from afd_testkit.engines.base import Prompt, RunResult, SplitSetting, StepRecord
from afd_testkit.forced_balance import BALANCED
from afd_testkit.results import StageBalance


class Requirement(Exception):
    """A realized fact is not what the gate needs; the check fails with this text."""


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


def can_be_cut(step: StepRecord, split: SplitSetting) -> bool:
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
