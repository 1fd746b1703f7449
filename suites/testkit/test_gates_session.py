"""What a check demands of an engine before it believes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from afd_testkit.engines.base import (
    EngineConfig,
    EngineDied,
    EngineError,
    Prompt,
    RunResult,
    SplitSetting,
)
from afd_testkit.engines.reference import ReferenceEngine
from afd_testkit.gates.catalog import GATES
from afd_testkit.gates.realized import expected_cut
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.prompts import UserPrompt
from afd_testkit.results import CheckResult, Outcome

pytestmark = pytest.mark.cpu

SUBJECT = Subject("reference", "reference", "float64")
TEXT = ("Bread is flour, water, salt and time. " * 30,)
Bend = Callable[[RunResult], RunResult]


class Bent(ReferenceEngine):
    """A reference engine whose splitting worker answers something else."""

    bend: Bend
    closed = False

    def close(self) -> None:
        super().close()
        self.closed = True

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        split: SplitSetting = SplitSetting(),  # noqa: B008  # frozen, as in the Protocol
        fault: str | None = None,
    ) -> RunResult:
        result = super().run(prompts, split=split, fault=fault)
        return self.bend(result) if self.config.worker == "afd" else result


def session(bend: Bend, **options: Any) -> GateSession:
    engines: dict[EngineConfig, Bent] = {}

    def start(config: EngineConfig) -> Bent:
        if config not in engines or engines[config].closed:
            engines[config] = Bent(config)
            engines[config].bend = bend  # type: ignore[method-assign]
        return engines[config]

    return GateSession(start=start, paragraphs=TEXT, **options)


def checks(gate: str, case: str, bend: Bend, **options: Any) -> list[CheckResult]:
    return list(GATES[gate].run(session(bend, **options), SUBJECT, case))


def outcomes(results: list[CheckResult]) -> set[Outcome]:
    return {result.outcome for result in results}


def test_an_honest_engine_passes() -> None:
    assert outcomes(checks("split", "unequal", lambda run: run)) == {Outcome.PASSED}


def never_split_but_say_so(run: RunResult) -> RunResult:
    """Passes as an unsplit worker has them, under evidence of a split one."""
    whole = tuple(
        replace(step, forward_rows=(sum(row.num_scheduled for row in step.requests),))
        for step in run.steps
    )
    return replace(run, steps=whole)


def without_passes(run: RunResult) -> RunResult:
    return replace(run, steps=tuple(replace(step, forward_rows=()) for step in run.steps))


def without_evidence(run: RunResult) -> RunResult:
    return replace(run, steps=tuple(replace(step, evidence=None) for step in run.steps))


def first_request_only(run: RunResult) -> RunResult:
    return replace(run, requests=run.requests[:1])


def last_rows_missing(run: RunResult) -> RunResult:
    cut = tuple(replace(r, hidden=r.hidden[:-1], logprobs=r.logprobs[:-1]) for r in run.requests)
    return replace(run, requests=cut)


def kv_of_the_last_token_missing(run: RunResult) -> RunResult:
    cut = tuple(replace(r, kv=tuple(rows[:-1] for rows in r.kv)) for r in run.requests)
    return replace(run, requests=cut)


@pytest.mark.parametrize(
    ("bend", "said"),
    [
        (never_split_but_say_so, "the model saw (404,)"),
        (without_passes, "the model saw ()"),
        (without_evidence, "the splitter says it ran passes of (404,)"),
        (first_request_only, "and returned ['r0']"),
        (last_rows_missing, "there must be 3 rows of results"),
        (kv_of_the_last_token_missing, "3 KV rows in every layer"),
    ],
)
def test_an_engine_that_leaves_something_out_fails(bend: Bend, said: str) -> None:
    results = checks("split", "unequal", bend)
    assert outcomes(results) == {Outcome.FAILED}
    assert said in results[0].message


@pytest.mark.parametrize("gate", ["split", "prefix-hit", "chunked", "stability"])
def test_no_gate_believes_the_splitter_alone(gate: str) -> None:
    case = {"split": "equal", "prefix-hit": "50 %", "chunked": "chunks of 100"}
    results = checks(gate, case.get(gate, "interleaved"), never_split_but_say_so, rounds=2)
    assert Outcome.FAILED in outcomes(results)


def test_an_engine_that_dies_is_no_verdict_on_the_split() -> None:
    def dead(run: RunResult) -> RunResult:
        raise EngineDied("gone with signal 9")

    results = checks("split", "one-long", dead)
    assert outcomes(results) == {Outcome.ERROR}
    assert "signal 9" in results[0].message


def test_a_split_run_that_raises_has_failed() -> None:
    def raising(run: RunResult) -> RunResult:
        raise EngineError("step 0 went wrong")

    results = checks("split", "one-long", raising)
    assert outcomes(results) == {Outcome.FAILED}
    assert "step 0 went wrong" in results[0].message


def user(*lengths: int) -> tuple[UserPrompt, ...]:
    return tuple(
        UserPrompt(f"line-{i}", token_ids=tuple((7 * j + i) % 250 for j in range(length)))
        for i, length in enumerate(lengths)
    )


@pytest.mark.parametrize("gate", list(GATES))
@pytest.mark.parametrize("lengths", [(21,), (1,), (40, 30)])
def test_healthy_prompts_of_the_user_never_turn_a_gate_red(
    gate: str, lengths: tuple[int, ...]
) -> None:
    with_user = session(lambda run: run, user=user(*lengths), rounds=2)
    for case in GATES[gate].cases_of(with_user, SUBJECT):
        results = list(GATES[gate].run(with_user, SUBJECT, case))
        bad = [(r.case, r.variant, r.message) for r in results if r.outcome is Outcome.FAILED]
        assert bad == []


def test_what_the_users_prompts_cannot_show_is_skipped_with_the_reason() -> None:
    one = session(lambda run: run, user=user(1), rounds=2)
    results = list(GATES["split"].run(one, SUBJECT, "user-prompts"))
    assert outcomes(results) == {Outcome.SKIPPED}
    assert "no step of these prompts can be cut" in results[0].message
    short = list(GATES["chunked"].run(one, SUBJECT, "user-prompts, chunks of 64"))
    assert outcomes(short) == {Outcome.SKIPPED}
    assert "no prompt is longer than 64 tokens" in short[0].message


def test_prompts_of_the_user_that_can_be_cut_are_judged() -> None:
    two = session(lambda run: run, user=user(40, 30), rounds=2)
    results = list(GATES["split"].run(two, SUBJECT, "user-prompts"))
    assert outcomes(results) == {Outcome.PASSED}
    assert all(result.facts["split_steps"] == 1 for result in results)


def given_up(run: RunResult) -> RunResult:
    """As if every cut had been a hazard: each step ran whole, and its evidence says why."""
    steps = []
    for step in run.steps:
        rows = sum(row.num_scheduled for row in step.requests)
        whole = {"policy": "unsplit", "stage_tokens": (rows,), "stage_input_tokens": (rows,)}
        why = {"reason": "kv_hazard", "hazard": "a reads b", "hazard_action": "unsplit"}
        evidence = {**(step.evidence or {}), **whole, **why}
        steps.append(replace(step, forward_rows=(rows,), evidence=evidence))
    return replace(run, steps=tuple(steps))


def test_hazards_in_every_cut_are_no_failure_of_the_users_prompts_alone() -> None:
    two = session(given_up, user=user(40, 30), rounds=2)
    results = list(GATES["prefix-hit"].run(two, SUBJECT, "user-prompts"))
    whole = [result for result in results if "off" in result.variant]
    split = [result for result in results if "off" not in result.variant]
    assert outcomes(whole) == {Outcome.PASSED}
    assert outcomes(split) == {Outcome.SKIPPED}
    assert "no step of these prompts can be cut" in split[0].message
    own = [r for r in checks("prefix-hit", "50 %", given_up) if "token" in r.variant]
    assert outcomes(own) == {Outcome.FAILED}


@pytest.mark.parametrize(
    ("tokens", "alignment", "cut"),
    [(105, 8, 56), (1069, 2, 534), (5, 1, 3), (3, 4, None), (1, 1, None), (40, 2, 20)],
)
def test_expected_cut_by_hand(tokens: int, alignment: int, cut: int | None) -> None:
    assert expected_cut(tokens, alignment) == cut


def spoiled(run: RunResult) -> RunResult:
    for request in run.requests:
        request.logprobs[-1, 0] += 0.5
    return run


@pytest.mark.parametrize(
    ("gate", "case"), [("split", "user-prompts"), ("chunked", "user-prompts, chunks of 64")]
)
def test_a_difference_is_a_failure_also_where_the_rest_does_not_apply(gate: str, case: str) -> None:
    one = session(spoiled, user=user(1), rounds=2)
    assert outcomes(list(GATES[gate].run(one, SUBJECT, case))) == {Outcome.FAILED}
