"""Questions from a file: GSM8K's own layout, one JSON object a line, checked before any is asked.

    {"question": "...", "answer": "... #### 42"}

An ``id`` may be given; without one it is made of the text, so that the same question has the same
id in every run and arm.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from afd_testkit.strict_json import read_json

# What the gsm8k task compares: the number after the last ####.
RESULT = re.compile(r"#### (-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")
HUB_DATASET = "openai/gsm8k"
_SHOWN = 5  # faulty lines named in one message


class QuestionsError(ValueError):
    """A file of questions cannot be used; the message names the lines."""


@dataclass(frozen=True)
class Question:
    """One question with its worked answer, which ends in ``#### number``."""

    id: str
    question: str
    answer: str

    @property
    def result(self) -> str:
        """The number after ``####``."""
        found = RESULT.search(self.answer)
        if found is None:
            raise QuestionsError(f"the answer of {self.id} does not end in '#### number'")
        return found[1]


def read_questions(path: Path, limit: int | None = None) -> tuple[Question, ...]:
    """The first ``limit`` questions of ``path``, or all.

    The whole file is checked in any case.  Raises :class:`QuestionsError` for a file that is
    missing, not UTF-8 or empty; lines that are not JSON objects, lack a text or a final
    ``#### number``; ids or questions that occur twice.
    """
    if limit is not None and limit < 1:
        raise QuestionsError(f"{limit} questions were asked for; ask for 1 or more")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionsError(
            f"the questions in {path} cannot be read ({error}); give a UTF-8 file of JSON lines"
        ) from error
    found: list[Question] = []
    wrong: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            one = _question(line)
        except QuestionsError as error:
            wrong.append(f"line {number}: {error}")
            continue
        for what, key in (("id", f"id {one.id}"), ("question", f"text {one.question}")):
            if key in seen:
                wrong.append(f"line {number}: the same {what} as line {seen[key]}")
                break
            seen[key] = number
        found.append(one)
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise QuestionsError(f"{path}: {'; '.join(wrong[:_SHOWN])}{more}. Correct the file.")
    if not found:
        raise QuestionsError(f"{path} has no question; give at least one")
    return tuple(found[:limit])


def first(questions: Sequence[Question], count: int | None) -> tuple[Question, ...]:
    """The first ``count`` of them, or all; raises :class:`QuestionsError` where there are fewer."""
    if count is not None and count > len(questions):
        raise QuestionsError(
            f"{count} questions were asked for, and there are {len(questions)}; ask for as many"
        )
    return tuple(questions[:count])


def hub_questions() -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """The 1,319 public test questions and the training ones, from the Hugging Face hub.

    Raises :class:`QuestionsError` where it cannot be reached.
    """
    import datasets

    try:
        both = [datasets.load_dataset(HUB_DATASET, "main", split=s) for s in ("test", "train")]
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise QuestionsError(
            f"{HUB_DATASET} cannot be had from the hub ({error}); give its test file by path"
        ) from error
    test, train = (
        tuple(Question(question_id(row["question"]), row["question"], row["answer"]) for row in one)
        for one in both
    )
    return test, train


def _question(line: str) -> Question:
    try:
        data = read_json(line)
    except ValueError as error:  # also numbers of thousands of digits
        raise QuestionsError(f"not JSON ({error})") from error
    if not isinstance(data, dict):
        raise QuestionsError(f"a JSON {type(data).__name__}, not an object")
    for name in ("question", "answer"):
        if not isinstance(data.get(name), str) or not data[name].strip():
            raise QuestionsError(f"no text under {name!r}")
        if not _is_text(data[name]):
            raise QuestionsError(f"half a surrogate pair under {name!r}, which is no character")
    given = data.get("id", question_id(data["question"]))
    if not isinstance(given, str) or not given.strip() or not _is_text(given):
        raise QuestionsError(f"id {given!r} is not a text; leave it out, or give a text")
    if not RESULT.search(data["answer"]):
        raise QuestionsError("the answer does not end in '#### number'")
    return Question(given, data["question"], data["answer"])


def _is_text(value: str) -> bool:
    """JSON's escapes can spell half a surrogate pair, which no tokenizer and no file takes."""
    return not any("\ud800" <= char <= "\udfff" for char in value)


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """As :func:`read_questions` reads them."""
    lines = [json.dumps(asdict(one), ensure_ascii=False) for one in questions]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def question_id(question: str) -> str:
    """The id of a question that has none of its own: 12 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(question.encode()).hexdigest()[:12]


def digest(questions: Sequence[Question]) -> str:
    """SHA-256 of a list of questions with its order: equal where the same was asked."""
    # As JSON, so that no text can reach from one field into the next.
    text = json.dumps([(one.id, one.question, one.answer) for one in questions])
    return hashlib.sha256(text.encode()).hexdigest()
