"""Generated word problems: a reader of the English finds what the worked answer says."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from afd_testkit.accuracy.problems import (
    Problem,
    as_text,
    drill,
    is_held_out,
    problems,
    side_of,
)

pytestmark = pytest.mark.cpu


def read(question: str) -> int:
    """The answer, from the sentences alone."""
    now = None
    for sentence in re.findall(r"[^.?]+[.?]", question):
        numbers = [int(n) for n in re.findall(r"\d+", sentence)]
        if sentence.strip().startswith(("How many", "What is")):
            assert not numbers
        elif now is None:
            now = numbers[0] * (numbers[1] if len(numbers) == 2 else 1)
            assert len(numbers) == 1 or re.search(r"\b(each|of)\b", sentence)
        elif "times as many" in sentence:
            now *= numbers[0]
        elif re.search(r"\b(loses|sells|takes)\b", sentence) or (
            "gives" in sentence and "more" not in sentence
        ):
            now -= numbers[0]
        else:
            assert re.search(r"\b(more|finds)\b", sentence), sentence
            now += numbers[0]
    assert now is not None
    return now


def some(side: str, count: int, **options: object) -> list[Problem]:
    return list(islice(problems(side, 5, **options), count))  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["train", "held-out"])
@pytest.mark.parametrize("level", ["plain", "hard"])
def test_the_worked_answer_is_what_the_story_says(side: str, level: str) -> None:
    most = 99 if level == "plain" else 999
    counts = set()
    for problem in some(side, 300, levels=(level,)):
        assert problem.answer.splitlines()[-1] == f"#### {read(problem.question)}"
        for line in problem.answer.splitlines()[:-1]:
            found = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+) \w+\.", line)
            assert found, line
            left, operator, right, result = found.groups()
            expected = {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
            }[operator]
            assert expected == int(result)
            assert 0 < expected <= most
        counts.add(problem.answer.count("="))
        assert problem.result == read(problem.question)
    assert counts == {1, 2, 3}


def test_the_sides_share_neither_template_nor_numbers() -> None:
    train, held_out = some("train", 2000), some("held-out", 500)
    assert not {p.template for p in train} & {p.template for p in held_out}
    assert not {p.numbers for p in train} & {p.numbers for p in held_out}
    assert {side_of(p) for p in train} == {"train"}
    assert {side_of(p) for p in held_out} == {"held-out"}


def test_a_problem_between_the_sides_belongs_to_none() -> None:
    held = next(p for p in some("held-out", 1))
    numbers = next((n, 1) for n in range(2, 99) if not is_held_out(f"{n} 1"))
    mixed = Problem(held.question, held.answer, held.template, ((numbers[0], "+", 1, 0),), "plain")
    assert side_of(mixed) is None


def test_the_same_seed_gives_the_same_problems_and_another_one_others() -> None:
    assert some("train", 50) == some("train", 50)
    other = list(islice(problems("train", 6), 50))
    assert other != some("train", 50)


def test_only_the_steps_that_are_asked_for() -> None:
    assert {p.answer.count("=") for p in some("train", 100, steps=(2,))} == {2}


def test_a_drill_is_one_sum_and_its_result() -> None:
    import random

    draw = random.Random(3)
    for _ in range(200):
        problem = drill(draw, "hard")
        found = re.fullmatch(r"(\d+)([-+*])(\d+) \w+\?", problem.question)
        assert found
        left, operator, right = int(found[1]), found[2], int(found[3])
        expected = {"+": left + right, "-": left - right, "*": left * right}[operator]
        assert problem.answer.endswith(f"\n#### {expected}")
        assert 0 < expected <= 999


def test_an_example_reads_as_the_gsm8k_task_writes_it() -> None:
    problem = some("train", 1)[0]
    assert as_text(problem) == f"Question: {problem.question}\nAnswer: {problem.answer}"
