"""lm-eval's stock task over questions of ours: what it asks, and how answers are read from it.

lm-eval runs in a process of its own, with a model that answers from a list.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from afd_testkit.accuracy.questions import Question
from afd_testkit.accuracy.task import Answer, TaskError, answers

SHOTS = tuple(
    Question(f"s{n}", f"Shot {n}: what is {n}+1?", f"{n}+1={n + 1}\n#### {n + 1}") for n in range(6)
)
ASKED = (
    Question("right", 'Tom says "2+2". What is it?', "2+2=4\n#### 4"),
    Question("wrong", "What is 2+3?", "2+3=5\n#### 5"),
    Question("comma", "What is 1000+1?", "1000+1=1001\n#### 1,001"),
    Question("loose", "Wie groß ist 6+1? 😀", "6+1=7\n#### 7"),
    Question("none", "What is 8+1?", "8+1=9\n#### 9"),
)
GIVEN = {
    "right": " 2+2=4\n#### 4",
    "wrong": " 2+3=6\n#### 6",
    "comma": " 1000+1=1001\n#### 1001",
    "loose": " It is 7.",  # only the filter that takes the last number finds it
    "none": " I do not know",
}
# Writes the task, evaluates it, and gives samples, prompts and scores as JSON.
INSIDE = """
import json, sys
from pathlib import Path
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from afd_testkit.accuracy.questions import Question
from afd_testkit.accuracy.task import task_hash, write_task

folder = Path(sys.argv[1])
told = json.loads((folder / "in.json").read_text())
write_task(folder / "task", *([Question(*one) for one in told[key]] for key in ("asked", "shots")))
asked = []

class Listed(LM):
    def generate_until(self, requests, disable_tqdm=False):
        asked.extend((r.doc["id"], *r.args) for r in requests)
        return [told["given"][r.doc["id"]] for r in requests]
    def loglikelihood(self, requests): raise NotImplementedError
    def loglikelihood_rolling(self, requests): raise NotImplementedError

found = simple_evaluate(
    model=Listed(), tasks=["afd_gsm8k"], num_fewshot=5, bootstrap_iters=0, log_samples=True,
    task_manager=TaskManager(include_path=str(folder / "task"), include_defaults=False),
)
keys = ("doc", "filter", "resps", "filtered_resps", "exact_match")
result = {
    "asked": asked,
    "samples": [{k: one[k] for k in keys} for one in found["samples"]["afd_gsm8k"]],
    "scores": found["results"]["afd_gsm8k"],
    "hash": task_hash(),
}
(folder / "out.json").write_text(json.dumps(result, default=str))
"""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What lm-eval makes of the questions and answers above."""
    folder = tmp_path_factory.mktemp("task")
    lists = {
        key: [[one.id, one.question, one.answer] for one in each]
        for key, each in (("asked", ASKED), ("shots", SHOTS))
    }
    (folder / "in.json").write_text(json.dumps({**lists, "given": GIVEN}), encoding="utf-8")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INSIDE, str(folder)],
        env={**os.environ, **offline, "HF_DATASETS_CACHE": str(folder / "datasets")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.accuracy
def test_every_question_is_asked_once_in_order_after_five_examples(
    evaluated: dict[str, Any],
) -> None:
    assert [name for name, _, _ in evaluated["asked"]] == [one.id for one in ASKED]
    shots = {f"Question: {one.question}\nAnswer: {one.answer}" for one in SHOTS}
    for question, (_, prompt, _) in zip(ASKED, evaluated["asked"], strict=True):
        *before, last = prompt.split("\n\n")
        assert last == f"Question: {question.question}\nAnswer:"
        assert len(before) == len(set(before)) == 5
        assert set(before) <= shots


@pytest.mark.accuracy
def test_generation_is_greedy_and_stops_where_the_next_question_would_begin(
    evaluated: dict[str, Any],
) -> None:
    for _, _, options in evaluated["asked"]:
        assert options["do_sample"] is False
        assert options["temperature"] == 0.0
        assert "Question:" in options["until"]


@pytest.mark.accuracy
def test_answers_are_judged_by_both_filters(evaluated: dict[str, Any]) -> None:
    found = {one.id: one for one in answers(evaluated["samples"], {"none"})}
    assert list(found) == [one.id for one in ASKED]
    judged = {name: (one.strict, one.flexible) for name, one in found.items()}
    assert judged == {
        "right": (True, True),
        "wrong": (False, False),
        "comma": (True, True),
        "loose": (False, True),
        "none": (False, False),
    }
    assert {name: one.text for name, one in found.items()} == GIVEN
    assert (found["right"].got, found["comma"].got) == ("4", "1001")
    assert [name for name, one in found.items() if one.truncated] == ["none"]


@pytest.mark.accuracy
def test_lm_eval_s_own_scores_are_the_share_of_right_answers(evaluated: dict[str, Any]) -> None:
    scores = evaluated["scores"]
    assert scores["exact_match,strict-match"] == pytest.approx(2 / 5)
    assert scores["exact_match,flexible-extract"] == pytest.approx(3 / 5)
    assert len(evaluated["hash"]) == 64


# --- without lm-eval: samples as its result object has them


def sample(name: str, by: str, *, right: float = 1.0, text: str = "4") -> dict[str, Any]:
    return {
        "doc": {"id": name, "question": f"{name}?"},
        "filter": by,
        "resps": [[text]],
        "filtered_resps": ["4"],
        "exact_match": right,
    }


@pytest.mark.cpu
def test_samples_of_a_question_are_brought_together_in_the_order_asked() -> None:
    samples = [
        sample("b", "strict-match", right=0.0),
        sample("a", "strict-match"),
        sample("b", "flexible-extract"),
        sample("a", "flexible-extract", right=0.0),
    ]
    assert answers(samples, ["a"]) == [
        Answer("b", "4", "4", strict=False, flexible=True, truncated=False, question="b?"),
        Answer("a", "4", "4", strict=True, flexible=False, truncated=True, question="a?"),
    ]


@pytest.mark.cpu
@pytest.mark.parametrize(
    "filters", [["strict-match"], ["flexible-extract"], ["strict-match", "another"]]
)
def test_a_question_that_lacks_a_filter_s_verdict_is_named(filters: list[str]) -> None:
    with pytest.raises(TaskError, match=r"question q7 was judged by \["):
        answers([sample("q7", by) for by in filters], ())


@pytest.mark.cpu
def test_no_samples_are_no_answers() -> None:
    assert answers([], ()) == []
