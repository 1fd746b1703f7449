"""What a server says and what is kept of it, read line by line; no server is asked here."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from afd_testkit.accuracy.questions import Question
from afd_testkit.accuracy.server import BaselineRefused, load_baseline
from afd_testkit.accuracy.server_journal import Journal, ResumeRefused
from afd_testkit.accuracy.server_protocol import (
    BadReply,
    NotOffered,
    Served,
    ServerError,
    answer_logprobs,
    base_url,
    generation,
    read_reply,
)
from afd_testkit.accuracy.server_spec import Asked, ServerRun, ServerSpec
from afd_testkit.accuracy.spec import Arm, ArmResult
from afd_testkit.accuracy.task import Answer

pytestmark = pytest.mark.cpu

SEEDS = dict.fromkeys(
    ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 5
)
ASKED = Asked("small", "a" * 64, 2, "b" * 64, 5, SEEDS, "c" * 64, "0.4.13", 256, "text", "0.32.0")
QUESTIONS = tuple(Question(name, f"{name}?", "#### 1") for name in ("q1", "q2"))
SERVED = Served("http://host:1", "small", "/models/small", 1024, "0.32.0")


def spec(folder: Path, **given: Any) -> ServerSpec:
    plain = {"url": "http://host:1", "model": "small", "shots": 5, "questions": 2, "seeds": SEEDS}
    return ServerSpec(**{**plain, "task": str(folder), "results": str(folder), **given})


@pytest.fixture
def run(tmp_path: Path) -> ServerRun:
    return ServerRun("arm", spec(tmp_path), SERVED, ASKED)


def test_what_was_finished_is_there_again(run: ServerRun) -> None:
    with Journal(run) as journal:
        journal.add_answer("q1", "a\nb “ü”", True)
        journal.add_logprobs("q1", [-0.1, -2.0])
        journal.add_logprobs("q2", None)
    with Journal(run) as journal:
        assert journal.answers == {"q1": ("a\nb “ü”", True)}
        assert journal.logprobs == {"q1": [-0.1, -2.0], "q2": None}
        assert journal.resumed == 1
    run.journal.unlink()
    with Journal(run) as journal:
        assert (journal.answers, journal.logprobs) == ({}, {})


def test_a_write_cut_anywhere_costs_one_answer(run: ServerRun) -> None:
    with Journal(run) as journal:
        journal.add_answer("q1", "one", False)
        whole = run.journal.read_bytes()
        journal.add_answer("q2", "two", False)
    both = run.journal.read_bytes()
    for length in range(len(whole), len(both)):
        run.journal.write_bytes(both[:length])
        with Journal(run) as journal:
            assert set(journal.answers) == {"q1"}
            journal.add_answer("q2", "two", False)
        assert run.journal.read_bytes() == both
    # A header that was not finished is no header.
    run.journal.write_bytes(whole[:30])
    with Journal(run) as journal:
        assert journal.answers == {}


@pytest.mark.parametrize(
    ("field", "other", "message"),
    [
        ("model", "big", "model: 'small' there, 'big' here"),
        ("questions", "d" * 64, "questions: "),
        ("count", 3, "count: 2 there, 3 here"),
        ("examples", "d" * 64, "examples: "),
        ("shots", 3, "shots: 5 there, 3 here"),
        ("seeds", {**SEEDS, "random_seed": 6}, "seeds: "),
        ("task_hash", "d" * 64, "task_hash: "),
        ("lm_eval", "0.4.14", "lm_eval: "),
        ("max_new_tokens", 64, "max_new_tokens: 256 there, 64 here"),
        ("prompts", "d" * 64, "prompts: 'text' there"),
        ("stack", "0.33.0", r"stack: '0\.32\.0' there, '0\.33\.0' here"),
    ],
)
def test_another_run_is_refused_by_name(
    run: ServerRun, tmp_path: Path, field: str, other: object, message: str
) -> None:
    with Journal(run) as journal:
        journal.add_answer("q1", "one", False)
    kept = run.journal.read_bytes() + b"torn"
    run.journal.write_bytes(kept)
    changed = replace(ASKED, **{field: other})  # type: ignore[arg-type]
    with pytest.raises(ResumeRefused, match=message):
        Journal(replace(run, asked=changed))
    assert run.journal.read_bytes() == kept
    path = stored(tmp_path)
    with pytest.raises(BaselineRefused, match=message):
        load_baseline(path, changed, QUESTIONS)


@pytest.mark.parametrize(
    "other", [replace(SERVED, url="http://host:2"), replace(SERVED, root="/models/other")]
)
def test_another_server_does_not_go_on(run: ServerRun, other: Served) -> None:
    Journal(run).__exit__(None, None, None)
    with pytest.raises(ResumeRefused, match=r"(url|root): .* there, .* here"):
        Journal(replace(run, served=other))


ANSWER = '{"id": "q1", "text": "a", "truncated": false}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is broken"),
        ("[1]", "line 2 is no object"),
        ('{"id": "q1"}', "line 2 is no answer"),
        ('{"id": "q1", "text": "a", "truncated": 1}', "line 2 is no answer"),
        ('{"id": "q1", "logprobs": ["x"]}', "line 2 is no answer"),
        ("[" * 100_000, "line 2 is broken"),
        (f"{ANSWER}\n{ANSWER}", "line 3 answers q1 a second time"),
        ('{"id": "q1", "logprobs": [1]}\n{"id": "q1", "logprobs": [2]}', "line 3 answers q1"),
    ],
)
def test_a_broken_line_is_named(run: ServerRun, line: str, message: str) -> None:
    Journal(run).__exit__(None, None, None)
    with run.journal.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ServerError, match=message):
        Journal(run)


def test_a_file_of_another_kind_is_refused(run: ServerRun) -> None:
    for text in ('{"model": "small"}\n', '{"url": "http://host:1", "root": "/models/small"}\n'):
        run.journal.write_text(text)
        with pytest.raises(ServerError, match="line 1: what was asked is not said"):
            Journal(run)
        assert run.journal.read_text() == text


def test_two_runs_do_not_write_one_file(run: ServerRun) -> None:
    with Journal(run), pytest.raises(ServerError, match="another run is writing"):
        Journal(run)
    Journal(run).__exit__(None, None, None)


def test_a_run_comes_back_from_its_file(run: ServerRun, tmp_path: Path) -> None:
    run.write(tmp_path / "arm.run")
    assert ServerRun.read(tmp_path / "arm.run") == run


def told(*names: str, **changes: Any) -> tuple[Answer, ...]:
    return tuple(
        replace(Answer(name, "t", "1", True, True, False, question=f"{name}?"), **changes)
        for name in names
    )


def stored(folder: Path, **given: Any) -> Path:
    answers = told("q1", "q2")
    plain: dict[str, Any] = {
        "arm": Arm("unsplit", "unseen", 2, 0),
        "answers": answers,
        "logprobs": {},
        **dict.fromkeys(("steps", "split_steps", "cut_requests", "balanced_routing"), 0),
        "seconds": 1.0,
        "facts": {"asked": asdict(ASKED)},
    }
    result = ArmResult(**{**plain, **given})
    result.write(folder)
    return folder / f"{result.arm.name}.json"


def test_a_baseline_of_the_same_run_is_read(tmp_path: Path) -> None:
    found = load_baseline(stored(tmp_path), ASKED, QUESTIONS)
    assert [one.id for one in found.answers] == ["q1", "q2"]
    # Which vLLM it was is compared only where both sides know it.
    for mine, theirs in (("0.32.0", None), (None, "0.32.0"), (None, None)):
        path = stored(tmp_path, facts={"asked": asdict(replace(ASKED, stack=mine))})
        load_baseline(path, replace(ASKED, stack=theirs), QUESTIONS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"facts": {}}, "what was asked is not said by"),
        ({"answers": ()}, "answers: 0 there, 2 here"),
        ({"arm": Arm("unsplit", "unseen", 2, 0, fault="x")}, "fault: 'x' there"),
        ({"arm": Arm("server", "unseen", 2, 0)}, "arm: 'server' there, 'unsplit' here"),
        ({"split_steps": 3, "steps": 3}, "steps: 3 there"),
        ({"steps": 3}, "steps: 3 there"),
        ({"arm": Arm("unsplit", "token", 2, 0)}, "arm: 'unsplit' there"),
        ({"arm": Arm("unsplit", "unseen", 2, 0, backwards=True)}, "arm: 'unsplit' there"),
        ({"answers": told("q1", "q2", got="2")}, "say otherwise than their text: q1, q2"),
        ({"answers": told("q1", "q2", strict=False)}, "say otherwise than their text: q1, q2"),
        ({"answers": told("q1", "q2", question="?")}, "say otherwise than their text: q1, q2"),
        ({"answers": told("q1", "q1")}, "answers: 1 there, 2 here"),
        ({"logprobs": {"q1": [-1.0], "q9": [-1.0]}}, "ids that no question has: q9"),
        ({"balanced_routing": 3}, "forced balancing: 3 times there"),
    ],
)
def test_what_is_no_baseline_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(BaselineRefused, match=message):
        load_baseline(stored(tmp_path, **given), ASKED, QUESTIONS)


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", DEEP, '{"arm": 1, "arm": 2}'])
def test_a_baseline_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "unsplit.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BaselineRefused, match=r"unsplit\.json cannot be read"):
        load_baseline(path, ASKED, QUESTIONS)


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("facts", None, "facts"),
        ("logprobs", {"q1": ["-1"]}, "logprobs.q1"),
        ("answers", [{}], "answers"),
        ("split_steps", -1, "split_steps"),
        ("arm", {"name": "unsplit"}, "arm"),
        ("seconds", "1", "seconds"),
        ("more", 1, r"\$"),
    ],
)
def test_a_baseline_of_another_form_is_told_by_its_place(
    tmp_path: Path, name: str, value: object, place: str
) -> None:
    path = stored(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(BaselineRefused, match=rf"cannot be read.*at \$?\.?{place}"):
        load_baseline(path, ASKED, QUESTIONS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "localhost:8000"}, "give http://HOST:PORT"),
        ({"url": "http://[::1"}, "give http://HOST:PORT"),
        ({"url": "http://:8000"}, "give http://HOST:PORT"),
        ({"url": "http://host:80x"}, "give http://HOST:PORT"),
        ({"url": "http://host:70000"}, "give http://HOST:PORT"),
        ({"url": "http://host:0"}, "give http://HOST:PORT"),
        ({"url": "http://host:80?"}, "give http://HOST:PORT"),
        ({"url": "http://host:80/#"}, "give http://HOST:PORT"),
        ({"url": " http://host:80"}, "give http://HOST:PORT"),
        ({"url": "http://host:80/a b"}, "give http://HOST:PORT"),
        ({"url": "http://..:80"}, "give http://HOST:PORT"),
        ({"url": "http://" + "h" * 300 + ":80"}, "give http://HOST:PORT"),
        ({"url": 5}, "give http://HOST:PORT"),
        ({"url": "http://host:8000/v1/completions"}, "what comes behind it is added here"),
        ({"model": ""}, "no model was named"),
        ({"timeout": 0}, "timeout is 0; give a whole number, 1 or more"),
        ({"timeout": 0.5}, "timeout is 0.5"),
        ({"concurrency": True}, "concurrency is True"),
        ({"shots": 6}, "6 shots; give at most 5"),
        ({"questions": 0}, "no question is to be asked"),
        ({"seeds": {"random_seed": 1}}, "state random_seed, numpy_random_seed"),
        ({"tokenizer": "/nowhere"}, "the tokenizer /nowhere is no folder"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServerError, match=message):
        spec(tmp_path, **given)


def test_urls_are_one() -> None:
    for given in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert base_url(given) == "http://h:1"


def reply(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "t", **choice}]}


JSON = "application/json"


@pytest.mark.parametrize(
    ("status", "kind", "body", "message"),
    [
        (404, JSON, '{"detail": "no"}', 'HTTP 404: {"detail": "no"}'),
        (500, "text/plain", "", r"HTTP 500: \(empty\)"),
        (500, "text/plain", "x" * 300, "x{200}\\.\\.\\.$"),
        (200, "text/html", "<html>\n<p>gateway</p>", "not JSON .* begins: <html>"),
        (200, "text/html", json.dumps(reply()), "calls its reply text/html"),
        (200, JSON, "[]", "has not one choice"),
        (200, JSON, '{"choices": []}', "has not one choice"),
        (200, JSON, json.dumps(reply(text=None)), "has no text"),
        (200, JSON, json.dumps(reply(index=1)), "not the index 0"),
        (200, JSON, json.dumps({**reply(), "model": "big"}), "'big' answered, not 'small'"),
    ],
)
def test_what_is_no_completion_is_told(status: int, kind: str, body: str, message: str) -> None:
    with pytest.raises(BadReply, match=message) as told:
        read_reply(status, kind, body, "small")
    assert told.value.status == status


def test_how_an_answer_ended() -> None:
    assert generation(reply(finish_reason="stop")) == ("t", False)
    assert generation(reply(finish_reason="length")) == ("t", True)
    for reason in (None, "abort"):
        with pytest.raises(BadReply, match=f"ended by {reason!r}"):
            generation(reply(finish_reason=reason))


def echo(tokens: list[str], values: list[Any], first: int = 0) -> dict[str, Any]:
    offsets = [first + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    given = {"tokens": tokens, "token_logprobs": values, "text_offset": offsets}
    return reply(text="Q A is six.", logprobs=given)


def test_logprobs_are_of_the_answer_alone() -> None:
    tokens, values = ["Q", " A", " is", " six", "."], [None, -1.0, -2.0, -3.0, -4.0]
    assert answer_logprobs(echo(tokens, values), "Q A", " is six") == [-2.0, -3.0]
    # A token that begins every text is not in the text.
    begun = echo(["<s>", *tokens], [None, -9.0, *values[1:]])
    assert answer_logprobs(begun, "Q A", " is six") == [-2.0, -3.0]
    # A token over the border belongs to the prompt, in every arm.
    crossing = echo(["Q", " A is", " six", "."], [None, -1.0, -3.0, -4.0])
    assert answer_logprobs(crossing, "Q A", " is six") == [-3.0]


def test_logprobs_that_cannot_be_placed_are_left_out() -> None:
    unspelled = echo(["Q", " A", " is", " ?ix", "."], [None, -1.0, -2.0, -3.0, -4.0])
    assert answer_logprobs(unspelled, "Q A", " is six") is None
    shifted = echo(["Q", " A is six", "."], [None, -1.0, -2.0])
    shifted["choices"][0]["logprobs"]["text_offset"][1] += 1
    assert answer_logprobs(shifted, "Q A", " is six") is None


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf"), "x"])
def test_a_logprob_that_is_no_number_is_told(value: object) -> None:
    given = echo(["Q", " A", " is", " six", "."], [None, -1.0, value, -3.0, -4.0])
    with pytest.raises(BadReply, match="is no number"):
        answer_logprobs(given, "Q A", " is six")


@pytest.mark.parametrize(
    "given",
    [
        reply(),
        reply(logprobs={"tokens": ["t"], "token_logprobs": [-1.0], "text_offset": [0]}),
        reply(text="Q A is six.", logprobs={"tokens": ["Q"], "token_logprobs": []}),
    ],
)
def test_logprobs_that_are_not_there_are_not_offered(given: dict[str, Any]) -> None:
    with pytest.raises(NotOffered):
        answer_logprobs(given, "Q A", " is six")
