"""Files of questions: what is read, and that each kind of bad line is named with its number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from afd_testkit.accuracy.questions import (
    Question,
    QuestionsError,
    digest,
    first,
    question_id,
    read_questions,
)

pytestmark = pytest.mark.cpu

Writer = Callable[..., Path]


def line(text: str = "How many?", answer: str = "1+1=2\n#### 2", **more: object) -> str:
    return json.dumps({"question": text, "answer": answer, **more})


@pytest.fixture
def written(tmp_path: Path) -> Writer:
    def write(*lines: str) -> Path:
        path = tmp_path / "questions.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def refusal(path: Path) -> str:
    with pytest.raises(QuestionsError) as found:
        read_questions(path)
    return str(found.value)


def test_questions_come_in_the_order_of_the_file(written: Writer) -> None:
    path = written(line("B?", "x\n#### 1"), "", line("A?", "y\n#### 2", id="own"), "   ")
    assert read_questions(path) == (
        Question(hashlib.sha256(b"B?").hexdigest()[:12], "B?", "x\n#### 1"),
        Question("own", "A?", "y\n#### 2"),
    )


def test_the_limit_takes_the_first_ones(written: Writer) -> None:
    path = written(line("A?"), line("B?"), line("C?"))
    assert [one.question for one in read_questions(path, 2)] == ["A?", "B?"]
    assert len(read_questions(path, 9)) == 3


def test_fewer_than_were_asked_for_are_not_taken_for_all() -> None:
    three = [Question(name, f"{name}?", "#### 1") for name in "abc"]
    assert first(three, 2) == tuple(three[:2])
    assert first(three, 3) == first(three, None) == tuple(three)
    with pytest.raises(QuestionsError, match="4 questions were asked for, and there are 3"):
        first(three, 4)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_asks_nothing_is_refused(written: Writer, limit: int) -> None:
    with pytest.raises(QuestionsError, match=f"{limit} questions were asked for; ask for 1"):
        read_questions(written(line()), limit)


@pytest.mark.parametrize("answer", ["#### 5", "so\n#### -12", "#### 1,234.50 ", "a #### 7\n"])
def test_numbers_that_the_task_reads_are_taken(written: Writer, answer: str) -> None:
    assert read_questions(written(line(answer=answer)))[0].answer == answer


@pytest.mark.parametrize(
    ("answer", "result"), [("#### 5", "5"), ("1 #### 2\n#### 3", "3"), ("#### 1,234 ", "1,234")]
)
def test_the_result_is_the_last_number(answer: str, result: str) -> None:
    assert Question("a", "b", answer).result == result


def test_a_question_without_a_result_names_itself() -> None:
    with pytest.raises(QuestionsError, match="the answer of q7 does not end"):
        _ = Question("q7", "b", "five").result


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('{"question": "cut of', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "a JSON list, not an object"),
        ("3", "a JSON int, not an object"),
        ('{"answer": "#### 1"}', "no text under 'question'"),
        ('{"question": "A?"}', "no text under 'answer'"),
        (line(" \t"), "no text under 'question'"),
        ('{"question": 3, "answer": "#### 1"}', "no text under 'question'"),
        (line("A?", "it is 5"), "the answer does not end in '#### number'"),
        (line("A?", "#### five"), "the answer does not end in '#### number'"),
        (line("A?", "#### 5 apples"), "the answer does not end in '#### number'"),
        (line("A?", "#### 1.2.3"), "the answer does not end in '#### number'"),
        (line("A?", "#### 18\nNote: 2 hours"), "the answer does not end in '#### number'"),
        ('{"question": "A?", "question": "B?", "answer": "#### 1"}', "names 'question' more than"),
        ("[" * 100_000, "nested too deeply"),
        (line("A?", id=7), "id 7 is not a text"),
        (line("A?", id=" "), "id ' ' is not a text"),
        ('{"question": "A\\ud800?", "answer": "#### 1"}', "half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named_with_its_number(written: Writer, bad: str, why: str) -> None:
    told = refusal(written(line("Fine?"), "", bad))
    assert "line 3: " in told
    assert why in told
    assert "line 1: " not in told


def test_every_bad_line_is_named_up_to_five(written: Writer) -> None:
    told = refusal(written(*["broken"] * 4, line(), *["broken"] * 3))
    for number in (1, 2, 3, 4, 6):
        assert f"line {number}: " in told
    assert "line 7: " not in told
    assert "and 2 more" in told


def test_bad_lines_beyond_the_limit_are_refused_too(written: Writer) -> None:
    with pytest.raises(QuestionsError, match="line 2: "):
        read_questions(written(line(), "broken"), 1)


def test_the_same_id_twice_names_both_lines(written: Writer) -> None:
    told = refusal(written(line("A?", id="x"), line("B?"), line("C?", id="x")))
    assert "line 3: the same id as line 1" in told


def test_the_same_question_twice_names_both_lines(written: Writer) -> None:
    assert "line 2: the same id as line 1" in refusal(written(line("A?"), line("A?")))
    told = refusal(written(line("A?", id="x"), line("A?", id="y")))
    assert "line 2: the same question as line 1" in told


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    assert refusal(path) == f"{path} has no question; give at least one"


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(line("Café?").encode() + b"\xe9\n")
    assert "give a UTF-8 file of JSON lines" in refusal(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl"):
        assert f"the questions in {path} cannot be read" in refusal(path)


def test_lines_of_another_system_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(f"{line('A?')}\r\n{line('B?')}\r\n".encode())
    assert [one.question for one in read_questions(path)] == ["A?", "B?"]


def test_ids_depend_on_the_question_alone(written: Writer) -> None:
    before = read_questions(written(line("A?"), line("Zoë?")))
    after = read_questions(written(line("Zoë?", "other\n#### 9")))
    assert after[0].id == before[1].id == question_id("Zoë?")
    assert before[0].id != before[1].id


def test_the_digest_tells_order_text_and_number_apart() -> None:
    first, second = Question("a", "A?", "#### 1"), Question("b", "B?", "#### 2")
    lists = [
        (first, second),
        (second, first),
        (first,),
        (replace(first, answer="#### 3"), second),
        (replace(first, id="c"), second),
        (Question("a\tA?", "#### 1", "#### 1"), second),
        (Question("a", "A?\t#### 1", "#### 1"), second),
    ]
    assert len({digest(each) for each in lists}) == len(lists)
    assert digest((first, second)) == digest((replace(first), replace(second)))
