"""The gate's own questions and arms."""

from __future__ import annotations

from itertools import islice

import pytest

from afd_testkit.accuracy.plan import (
    FAULT_QUESTIONS,
    HARD,
    PLAIN,
    TEACHER_FORCED,
    arms_of,
    as_question,
    gate_questions,
    small_shots,
)
from afd_testkit.accuracy.problems import problems
from afd_testkit.accuracy.questions import digest
from afd_testkit.accuracy.task import MAX_SHOTS
from afd_testkit.accuracy.verdict import fewest_questions

pytestmark = pytest.mark.cpu


def test_there_are_enough_questions_each_once() -> None:
    asked = gate_questions()
    assert len(asked) == PLAIN + HARD >= 400
    assert len({one.id for one in asked}) == len({one.question for one in asked}) == len(asked)


def test_the_questions_are_the_same_every_time_and_a_limit_takes_the_first() -> None:
    assert digest(gate_questions()) == digest(gate_questions())
    assert gate_questions(17) == gate_questions()[:17]


def test_hard_ones_are_mixed_in_from_the_start() -> None:
    large = [any(int(n) > 99 for n in _numbers(one.answer)) for one in gate_questions(100)]
    assert 10 <= sum(large) <= 50


def _numbers(text: str) -> list[str]:
    return "".join(c if c.isdigit() else " " for c in text).split()


def test_no_question_is_one_of_training() -> None:
    trained = {one.question for one in islice(problems("train", 1, levels=("plain", "hard")), 3000)}
    assert not trained & {one.question for one in gate_questions()}
    # While examples in prompts are what the model was trained on.
    shots = islice(problems("train", 2026), len(small_shots()))
    assert list(small_shots()) == [as_question(one) for one in shots]
    assert len(small_shots()) >= MAX_SHOTS


def test_a_question_is_worked_as_its_problem_is() -> None:
    problem = next(problems("held-out", 3))
    one = as_question(problem)
    assert (one.question, one.answer) == (problem.question, problem.answer)
    assert one.result == str(problem.result)


def test_the_arms_of_a_run() -> None:
    arms = {arm.name: arm for arm in arms_of(450, ["a-fault", "another"])}
    assert list(arms) == ["unsplit", "noise", "token", "request", "a-fault", "another"]
    assert [arm.policy for arm in arms.values()] == ["off", "off", "token", "request"] + [
        "token"
    ] * 2
    assert [arm.fault for arm in arms.values()] == [None] * 4 + ["a-fault", "another"]
    # All that is compared is asked of both: questions in order, tokens of the same answers.
    assert arms["unsplit"].questions == arms["token"].questions == arms["request"].questions == 450
    assert {arm.teacher_forced for arm in arms.values()} == {TEACHER_FORCED}
    assert arms["a-fault"].questions == FAULT_QUESTIONS == 200
    assert arms_of(200, ["a"])[-1].questions == 100
    # The noise is what other batches give; it is the only arm that runs in another order.
    assert [arm.name for arm in arms.values() if arm.backwards] == ["noise"]
    assert arms["noise"].questions == 0


def test_few_questions_bound_every_arm() -> None:
    assert [arm.questions for arm in arms_of(3, ["a"])] == [3, 0, 3, 3, 1]
    assert arms_of(1, ["a"])[-1].questions == 1
    assert {arm.teacher_forced for arm in arms_of(3, ["a"])} == {3}


def test_the_gate_s_questions_are_enough_for_its_margin() -> None:
    assert len(gate_questions()) >= fewest_questions(0.02)
