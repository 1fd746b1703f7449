"""What is asked where nothing else is said: the gate's own questions, and the arms of a run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

from afd_testkit.accuracy.judge import NOISE
from afd_testkit.accuracy.margins import margin_of, small_model
from afd_testkit.accuracy.problems import Level, Problem, problems
from afd_testkit.accuracy.questions import Question, question_id
from afd_testkit.accuracy.spec import BASELINE, Arm

PLAIN, HARD = 340, 110  # questions of the gate; the hard ones keep the score from saturating
GATE_QUESTIONS = PLAIN + HARD
SHOTS_POOL = 40  # examples to draw shots from
TEACHER_FORCED = 48  # reference answers whose log-probabilities are compared
FAULT_QUESTIONS = 200  # asked under a fault at most, and half of a run's: a fault must show in few
_SEED = 2026


def gate_questions(limit: int | None = None) -> tuple[Question, ...]:
    """The gate's questions, the same every time: held out from training, in a mixed order."""
    found = [*_distinct("plain", PLAIN), *_distinct("hard", HARD)]
    random.Random(_SEED).shuffle(found)
    return tuple(found[:limit])


def small_shots() -> tuple[Question, ...]:
    """Examples for prompts, of the training side."""
    return tuple(as_question(one) for one in islice(problems("train", _SEED), SHOTS_POOL))


def arms_of(questions: int, faults: Sequence[str]) -> tuple[Arm, ...]:
    """Unsplit, its noise, both policies, and every fault under the policy ``token``."""
    forced = min(questions, TEACHER_FORCED)
    faulty = min(max(1, questions // 2), FAULT_QUESTIONS)
    return (
        Arm(BASELINE, "off", questions, forced),
        Arm(NOISE, "off", 0, forced, backwards=True),
        Arm("token", "token", questions, forced),
        Arm("request", "request", questions, forced),
        *(Arm(name, "token", faulty, forced, fault=name) for name in faults),
    )


def held_out(count: int) -> tuple[Question, ...]:
    """Questions with small numbers that neither the training nor the gate has."""
    gate = {one.id for one in gate_questions()}
    found = [one for one in _distinct("plain", count + PLAIN) if one.id not in gate]
    return tuple(found[:count])


def few_shot_prompt(question: Question, shots: Sequence[Question]) -> str:
    """A prompt as lm-eval's gsm8k task writes it, for engines that are asked without lm-eval."""
    examples = [f"Question: {one.question}\nAnswer: {one.answer}\n\n" for one in shots]
    return "".join(examples) + f"Question: {question.question}\nAnswer:"


def easy_and_right(count: int) -> tuple[Question, ...]:
    """The first of the gate's questions with small numbers that the shipped model answers right."""
    recorded = margin_of(str(small_model())).baseline
    plain = {one.id for one in _distinct("plain", PLAIN)}
    right = [one for one in gate_questions() if one.id in plain and recorded[one.id]]
    return tuple(right[:count])


def as_question(problem: Problem) -> Question:
    """A generated problem as one of a file."""
    return Question(question_id(problem.question), problem.question, problem.answer)


def _distinct(level: Level, count: int) -> list[Question]:
    found: dict[str, Question] = {}
    for problem in problems("held-out", _SEED, levels=(level,)):
        one = as_question(problem)
        found.setdefault(one.id, one)
        if len(found) == count:
            break
    return list(found.values())
