"""Word problems in the manner of GSM8K: a story in one to three steps, worked, ``#### N``.

A story is an opening, one clause a step and a question.  Its *template* is the list of these
forms without names, things and numbers.  Templates and numbers are dealt to two sides by hash:
what a model is trained on and what it is asked later share neither a template nor the numbers of
a story.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["train", "held-out"]
Level = Literal["plain", "hard"]

NAMES = ("Tom", "Mia", "Ben", "Ana", "Sam", "Lea", "Max", "Eva", "Leo", "Amy", "Jon", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "toys", "roses")

OPENINGS = (
    "{name} has {a} {things}.",
    "{name} starts the day with {a} {things}.",
    "There are {a} {things} in the box of {name}.",
    "{name} counts {a} {things} in a bag.",
)
PACKED_OPENINGS = (
    "{name} has {a} boxes with {b} {things} in each box.",
    "{name} buys {a} bags of {b} {things} each.",
    "{a} friends bring {name} {b} {things} each.",
)
MORE = (
    "{name} buys {b} more {things}.",
    "Then {friend} gives {name} {b} more.",
    "{name} finds {b} {things} at home.",
    "The next day {name} gets {b} more {things}.",
)
LESS = (
    "{name} gives {b} {things} to {friend}.",
    "Then {name} loses {b} of them.",
    "{name} sells {b} {things}.",
    "The next day {friend} takes {b} of the {things}.",
)
TIMES = (
    "Then {name} gets {b} times as many {things}.",
    "A year later {name} has {b} times as many.",
)
QUESTIONS = (
    "How many {things} does {name} have now?",
    "How many {things} does {name} have in the end?",
    "What is the number of {things} that {name} has now?",
)

_STEPS: dict[str, tuple[tuple[str, ...], Callable[[int, int], int]]] = {
    "+": (MORE, lambda a, b: a + b),
    "-": (LESS, lambda a, b: a - b),
    "*": (TIMES, lambda a, b: a * b),
}
HELD_OUT_SHARE = 5  # one in so many templates, and one in so many lists of numbers


@dataclass(frozen=True)
class Problem:
    """One problem.  ``steps``: (left, operator, right, result), in order."""

    question: str
    answer: str
    template: str
    steps: tuple[tuple[int, str, int, int], ...]
    level: Level

    @property
    def result(self) -> int:
        """The number after ``####``."""
        return self.steps[-1][3]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that the story gives."""
        return (self.steps[0][0], *(step[2] for step in self.steps))


def is_held_out(text: str) -> bool:
    """Whether a template, or a list of numbers written out, belongs to the held-out side."""
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE == 0


def side_of(problem: Problem) -> Side | None:
    """The side of a problem; ``None`` where template and numbers belong to different ones."""
    sides = {
        is_held_out(problem.template),
        is_held_out(" ".join(map(str, problem.numbers))),
    }
    if len(sides) == 2:
        return None
    return "held-out" if sides.pop() else "train"


def problems(
    side: Side,
    seed: int,
    *,
    levels: Sequence[Level] = ("plain",),
    steps: Sequence[int] = (1, 2, 3),
) -> Iterator[Problem]:
    """Problems of one side without end, the same for the same seed."""
    draw = random.Random(f"{side} {seed}")
    while True:
        problem = _draw(draw, draw.choice(levels), draw.choice(steps))
        if problem is not None and side_of(problem) == side:
            yield problem


def _draw(draw: random.Random, level: Level, count: int) -> Problem | None:
    """A problem of ``count`` steps, or ``None`` where the numbers leave their range."""
    most = 99 if level == "plain" else 999
    name, friend = draw.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "things": draw.choice(THINGS)}
    packed = draw.random() < 0.3
    forms = [draw.choice(PACKED_OPENINGS if packed else OPENINGS)]
    if packed:
        a, b = draw.randint(2, 9), draw.randint(2, 9 if level == "plain" else 99)
        steps = [(a, "*", b, a * b)]
        story = [forms[0].format(a=a, b=b, **words)]
    else:
        a = draw.randint(2, most)
        steps = []
        story = [forms[0].format(a=a, **words)]
        now = a
    while len(steps) < count:
        now = steps[-1][3] if steps else a
        operator = draw.choices("+-*", (5, 5, 2))[0]
        operand = _operand(draw, operator, now, most)
        if operand is None:
            return None
        clauses, apply = _STEPS[operator]
        forms.append(draw.choice(clauses))
        story.append(forms[-1].format(b=operand, **words))
        steps.append((now, operator, operand, apply(now, operand)))
    forms.append(draw.choice(QUESTIONS))
    story.append(forms[-1].format(**words))
    if not all(0 < step[3] <= most for step in steps):
        return None
    return Problem(
        question=" ".join(story),
        answer=_worked(steps, words["things"]),
        template=" ".join(forms),
        steps=tuple(steps),
        level=level,
    )


def _operand(draw: random.Random, operator: str, now: int, most: int) -> int | None:
    """A second operand that keeps the result between 1 and ``most``; ``None`` if there is none."""
    if operator == "+":
        return draw.randint(1, most - now) if now < most else None
    if operator == "-":
        return draw.randint(1, now - 1) if now > 1 else None
    largest = min(9, most // now)
    return draw.randint(2, largest) if largest >= 2 else None


def _worked(steps: Sequence[tuple[int, str, int, int]], things: str) -> str:
    """The worked answer, with GSM8K's last line."""
    lines = [
        f"{left}{operator}{right}={result} {things}." for left, operator, right, result in steps
    ]
    return "\n".join([*lines, f"#### {steps[-1][3]}"])


def drill(draw: random.Random, level: Level = "plain") -> Problem:
    """Bare arithmetic in the form of a problem: for training only."""
    most = 99 if level == "plain" else 999
    while True:
        now, operator = draw.randint(1, most), draw.choices("+-*", (5, 5, 2))[0]
        b = _operand(draw, operator, now, most)
        if b is not None:
            break
    step = (now, operator, b, _STEPS[operator][1](now, b))
    things = draw.choice(THINGS)
    return Problem(
        question=f"{now}{operator}{b} {things}?",
        answer=_worked([step], things),
        template="drill",
        steps=(step,),
        level=level,
    )


def as_text(problem: Problem) -> str:
    """Question and answer as the gsm8k task of lm-eval writes an example."""
    return f"Question: {problem.question}\nAnswer: {problem.answer}"
