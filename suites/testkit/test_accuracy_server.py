"""A server asked through lm-eval, against a small HTTP server whose every answer is known.

The server looks the last question of a prompt up and gives the answer it was made with; in an
echo, each word has the log-probability -(its length)/8.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from afd_testkit.accuracy.questions import Question, digest
from afd_testkit.accuracy.server import run_server_arm
from afd_testkit.accuracy.server_journal import Journal
from afd_testkit.accuracy.server_protocol import (
    Served,
    ServerError,
    ask_server,
    check_pair,
    models_of,
)
from afd_testkit.accuracy.server_spec import ServerRun, ServerSpec, asked_of
from afd_testkit.accuracy.spec import ArmResult
from afd_testkit.accuracy.task import write_task

needs_lm_eval = pytest.mark.accuracy

WORD = re.compile(r"\s*\S+|\s+")
QUESTIONS = tuple(
    Question(f"q{i}", f"Ann has {i} pens and gets {i} more?", f"{i} + {i} = {2 * i}\n#### {2 * i}")
    for i in range(6)
)
SHOTS = tuple(
    Question(f"s{i}", f"Bob sees {i} cows and {i} hens?", f"{i} + {i}\n#### {2 * i}")
    for i in range(30, 38)
)


@dataclass
class Completions:
    """What the server answers, and what it was asked."""

    model: str = "small"
    listed: tuple[str, ...] = ("small",)
    root: str = "/models/small"
    version: str | None = "0.32.0"
    length: int = 2048
    wrong: frozenset[str] = frozenset()
    endless: frozenset[str] = frozenset()
    finish: str = "stop"
    dies_after: int | None = None
    hangs: bool = False
    says: tuple[int, str, str] | None = None  # status, content type and body, in place of answers
    logprobs: bool = True
    begins_with: str = ""  # a token that the server's tokenizer puts first
    asked: list[str] = field(default_factory=list)
    echoed: list[str] = field(default_factory=list)

    def about(self, path: str) -> tuple[int, Any]:
        """Reply to a GET."""
        if path == "/v1/models":
            one = {"root": self.root, "max_model_len": self.length}
            return 200, {"object": "list", "data": [{"id": name, **one} for name in self.listed]}
        if path == "/version" and self.version is not None:
            return 200, {"version": self.version}
        return 404, {"detail": "Not Found"}

    def complete(self, told: dict[str, Any]) -> tuple[int, str, str]:
        """Reply to a completion."""
        prompt = told["prompt"]
        if not isinstance(prompt, str):  # tokens, or one text, of a single request
            prompt = prompt[0] if isinstance(prompt[0], str) else "".join(map(chr, prompt[0]))
        (self.echoed if told.get("echo") else self.asked).append(prompt)
        if self.says is not None:
            return self.says
        choice = self._echo(prompt) if told.get("echo") else self._answer(prompt)
        body = {"model": self.model, "choices": [{"index": 0, **choice}]}
        return 200, "application/json", json.dumps(body)

    def _answer(self, prompt: str) -> dict[str, Any]:
        text = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
        one = next(one for one in QUESTIONS if one.question == text)
        if one.id in self.endless:
            return {"text": " and so on", "finish_reason": "length"}
        answer = "no\n#### 77" if one.id in self.wrong else one.answer
        return {"text": f" {answer}\n\n", "finish_reason": self.finish}

    def _echo(self, text: str) -> dict[str, Any]:
        if not self.logprobs:
            return {"text": " x", "finish_reason": "length", "logprobs": None}
        tokens = [*filter(None, [self.begins_with]), *WORD.findall(text), " x"]
        offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        values = [None, *(-len(token) / 8 for token in tokens[1:])]
        given = {"tokens": tokens, "token_logprobs": values, "text_offset": offsets}
        return {"text": f"{text} x", "finish_reason": "length", "logprobs": given}


class Running(ThreadingHTTPServer):
    """The server on a port of this host; ``stopped`` frees what hangs."""

    def __init__(self, completions: Completions, port: int = 0) -> None:
        self.completions, self.stopped = completions, threading.Event()
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Running

    def do_GET(self) -> None:
        status, data = self.server.completions.about(self.path)
        self.reply(status, "application/json", json.dumps(data))

    def do_POST(self) -> None:
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        completions = self.server.completions
        if completions.hangs:
            self.server.stopped.wait(60)
            return
        with self.server.lock:
            done = len(completions.asked) + len(completions.echoed)
            if completions.dies_after is not None and done >= completions.dies_after:
                return  # the connection closes without a word
            reply = completions.complete(told)
        self.reply(*reply)

    def reply(self, status: int, kind: str, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(completions: Completions, port: int = 0) -> Iterator[str]:
    """The URL of a running server, inside."""
    with Running(completions, port) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield running.url
        finally:
            running.stopped.set()
            running.shutdown()
            thread.join()


Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(completions)``: the URL it is served at until the test's end."""
    with ExitStack() as stack:
        yield lambda *given: stack.enter_context(serving(*given))


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task over the questions above."""
    return write_task(tmp_path_factory.mktemp("task"), QUESTIONS, SHOTS)


Specify = Callable[..., ServerSpec]


@pytest.fixture
def specify(task_folder: Path, tmp_path: Path) -> Specify:
    """``specify(url, **fields)``: all questions, asked once, results in this test's folder."""

    def specification(url: str, **given: Any) -> ServerSpec:
        plain = {"shots": 2, "questions": len(QUESTIONS), "timeout": 60, "tries": 1}
        folders = {"task": str(task_folder), "results": str(tmp_path / "arms")}
        return ServerSpec(url=url, model="small", **{**folders, **plain, **given})

    return specification


Ask = Callable[..., ArmResult]


@pytest.fixture
def ask(specify: Specify) -> Ask:
    """``ask(url, **fields)``: an arm of such a specification."""
    return lambda url, **given: run_server_arm("token", specify(url, **given), lambda text: None)


def right(result: ArmResult) -> set[str]:
    return {name for name, ok in result.right().items() if ok}


def word_logprobs(question: Question) -> list[float]:
    return [-len(word) / 8 for word in WORD.findall(f" {question.answer}")]


@needs_lm_eval
def test_answers_are_asked_judged_and_kept(serve: Serve, ask: Ask, tmp_path: Path) -> None:
    completions = Completions(wrong=frozenset({"q1"}), endless=frozenset({"q4"}), begins_with="<s>")
    url = serve(completions)
    found = ask(f"{url}/v1/", teacher_forced=3)
    assert [one.id for one in found.answers] == [one.id for one in QUESTIONS]
    assert right(found) == {"q0", "q2", "q3", "q5"}
    assert {one.id for one in found.answers if one.truncated} == {"q4"}
    assert {one.id: one.got for one in found.answers}["q1"] == "77"
    assert found.logprobs == {one.id: word_logprobs(one) for one in QUESTIONS[:3]}
    assert found.facts["logprobs"] == "of 3"
    assert found.facts["server"] == {
        "url": url,
        "model": "small",
        "root": "/models/small",
        "max_model_len": 2048,
        "version": "0.32.0",
    }
    assert found.facts["asked"]["questions"] == digest(QUESTIONS)
    assert (found.steps, found.split_steps, found.cut_requests) == (0, 0, 0)
    assert found.arm.policy == "unseen"
    assert ArmResult.read(tmp_path / "arms" / "token.json") == found
    # Two examples before the question, each once, and every question once.
    assert len(completions.asked) == len(set(completions.asked)) == len(QUESTIONS)
    assert {prompt.count("Question: ") for prompt in completions.asked} == {3}


@needs_lm_eval
def test_a_server_that_dies_halfway_is_asked_only_what_is_missing(
    serve: Serve, ask: Ask, tmp_path: Path
) -> None:
    first, second = Completions(dies_after=4), Completions()
    with serving(first) as url, pytest.raises(ServerError) as told:
        ask(url, concurrency=1)
    assert "4 of 6 questions of token are answered and kept in" in str(told.value)
    assert "the same command again goes on there" in str(told.value)
    port = int(url.rpartition(":")[2])
    assert serve(second, port) == url
    found = ask(url, concurrency=1)
    assert right(found) == {one.id for one in QUESTIONS}
    assert found.facts["answers_of_an_earlier_run"] == 4
    assert len(second.asked) == 2
    assert not set(first.asked) & set(second.asked)


@needs_lm_eval
def test_a_run_that_asks_something_else_does_not_go_on(
    serve: Serve, ask: Ask, specify: Specify, tmp_path: Path
) -> None:
    completions = Completions()
    url = serve(completions)
    spec, served = specify(url), ask_server(url, "small")
    run = ServerRun("token", spec, served, asked_of(spec, served))
    with Journal(run) as journal:
        journal.add_answer("q0", " 0", False)
    kept = run.journal.read_bytes()
    for given, message in (
        ({"shots": 1}, "shots: 2 there, 1 here"),
        ({"questions": 5}, "questions: '[0-9a-f]{64}' there, '[0-9a-f]{64}' here; count: 6"),
        ({"seeds": dict.fromkeys(spec.seeds, 7)}, "seeds: .*1234.* there, .*7.* here"),
    ):
        with pytest.raises(ServerError, match=message):
            ask(url, **given)
    completions.root = "/models/other"
    with pytest.raises(ServerError, match="root: '/models/small' there, '/models/other' here"):
        ask(url)
    assert run.journal.read_bytes() == kept
    assert completions.asked == []


@needs_lm_eval
@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            {"says": (500, "text/plain", "\nengine died\nmore")},
            r"HTTP 500: engine died\. 0 of 6",
            id="HTTP 500",
        ),
        pytest.param(
            {"says": (200, "application/json", '{"choices": [')},
            r'not JSON .* it begins: \{"choices": \[\. 0 of 6',
            id="half a JSON",
        ),
        pytest.param({"hangs": True}, r"no reply within 1 s, asked 1 times.* 0 of 6", id="hangs"),
    ],
)
def test_what_is_no_answer_is_told(
    serve: Serve, ask: Ask, given: dict[str, Any], message: str
) -> None:
    url = serve(Completions(**given))
    with pytest.raises(ServerError, match=message):
        ask(url, timeout=1 if "hangs" in given else 60)


@needs_lm_eval
def test_one_failure_is_tried_again(serve: Serve, ask: Ask) -> None:
    class Once(Completions):
        def complete(self, told: dict[str, Any]) -> tuple[int, str, str]:
            reply = super().complete(told)
            return reply if len(self.asked) > 1 else (503, "text/plain", "busy")

    completions = Once()
    found = ask(serve(completions), tries=2)
    assert right(found) == {one.id for one in QUESTIONS}
    assert len(completions.asked) == len(QUESTIONS) + 1


@pytest.fixture
def characters(tmp_path: Path) -> Callable[[str | None], str]:
    """``characters(normalizer)``: folder of a tokenizer whose tokens are ASCII's characters."""

    def make(normalizer: str | None) -> str:
        data = {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": normalizer and {"type": normalizer},
            "pre_tokenizer": None,
            "decoder": {"type": "Fuse"},
            "post_processor": None,
            "model": {"type": "BPE", "vocab": {chr(i): i for i in range(128)}, "merges": []},
        }
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(data))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(kind))
        return str(folder)

    return make


@needs_lm_eval
def test_prompts_may_be_sent_as_tokens(
    serve: Serve, ask: Ask, characters: Callable[[str | None], str]
) -> None:
    completions = Completions()
    found = ask(serve(completions), tokenizer=characters(None), teacher_forced=1)
    assert right(found) == {one.id for one in QUESTIONS}
    assert found.logprobs == {"q0": word_logprobs(QUESTIONS[0])}
    assert found.facts["asked"]["prompts"] != "text"


@needs_lm_eval
@pytest.mark.parametrize(
    ("normalizer", "length", "message"),
    [
        ("Lowercase", 2048, "gives another text back than the prompt of question q0"),
        (None, 300, r"q0 has \d+ tokens, and the server takes 44 before an answer"),
    ],
)
def test_tokens_are_the_whole_prompt(
    serve: Serve,
    ask: Ask,
    characters: Callable[[str | None], str],
    normalizer: str | None,
    length: int,
    message: str,
) -> None:
    completions = Completions(length=length)
    with pytest.raises(ServerError, match=message):
        ask(serve(completions), tokenizer=characters(normalizer))
    assert completions.asked == []


@needs_lm_eval
def test_a_server_without_logprobs_gives_none(serve: Serve, ask: Ask) -> None:
    completions = Completions(logprobs=False)
    found = ask(serve(completions), questions=0, teacher_forced=3, backwards=True)
    said = "not offered by the server: the server gave no log-probabilities"
    assert (found.facts["logprobs"], found.logprobs, found.answers) == (said, {}, ())
    # One was tried, and it was the last of the three.
    assert [QUESTIONS[2].answer in text for text in completions.echoed] == [True]


@pytest.mark.cpu
def test_a_server_says_what_it_serves(serve: Serve) -> None:
    url = serve(Completions(listed=("small", "lora"), version=None))
    assert models_of(f"{url}/v1") == ("small", "lora")
    assert ask_server(f"{url}/", "lora") == Served(url, "lora", "/models/small", 2048, None)
    with pytest.raises(ServerError, match="serves lora, small, not 'big'; name the model as"):
        ask_server(url, "big")


@needs_lm_eval
def test_another_model_than_claimed_is_asked_nothing(serve: Serve, ask: Ask) -> None:
    completions = Completions(listed=("big",))
    with pytest.raises(ServerError, match="serves big, not 'small'"):
        ask(serve(completions))
    assert completions.asked == []


@pytest.mark.cpu
def test_a_server_that_is_not_there_is_told() -> None:
    with serving(Completions()) as url:
        pass
    with pytest.raises(ServerError, match=f"{url}/v1/models cannot be reached .* start the server"):
        ask_server(url, "small")


@pytest.mark.cpu
def test_two_servers_differ_in_nothing_else() -> None:
    one = Served("http://a:1", "small", "/models/small", 2048, "0.32.0")
    check_pair(one, replace(one, url="http://b:1", root="/elsewhere/small"))
    check_pair(one, replace(one, url="http://b:1", root=None, version=None))
    for other, message in (
        (one, "http://a:1 are one server, both the arm and the baseline"),
        (replace(one, url="http://b:1", model="big"), "model: 'small' at http://a:1, 'big' at"),
        (replace(one, url="http://b:1", root="/models/big"), "folder of the model: 'small'"),
        (replace(one, url="http://b:1", version="0.31.0"), "version of vLLM: '0.32.0'"),
    ):
        with pytest.raises(ServerError, match=message):
            check_pair(one, other)


@pytest.mark.cpu
def test_the_words_of_the_server_are_those_of_the_text() -> None:
    # The stand-in itself: nothing of a text is lost, and offsets are where the words begin.
    text = f"Question: {QUESTIONS[0].question}\nAnswer: {QUESTIONS[0].answer}"
    given = Completions()._echo(text)["logprobs"]
    assert "".join(given["tokens"]) == f"{text} x"
    assert all(a < b for a, b in pairwise(given["text_offset"]))
