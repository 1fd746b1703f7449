"""lm-eval's stock gsm8k task over questions of ours, and what it says of each of them.

The task, its prompt, its stop strings and its two filters are lm-eval's; only where the data
comes from is replaced, by a YAML file that includes the stock one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afd_testkit.accuracy.questions import Question, write_questions

TASK = "afd_gsm8k"
STRICT, FLEXIBLE = "strict-match", "flexible-extract"
METRIC = "exact_match"
MAX_SHOTS = 5
MAX_NEW_TOKENS = 256  # lm-eval's own limit where a task names none, as gsm8k does


class TaskError(RuntimeError):
    """lm-eval's results are not what this reads; the message says which part."""


@dataclass(frozen=True)
class Answer:
    """What an arm answered to one question.

    ``strict``, ``flexible``: right by lm-eval's two filters.  ``got``: what the strict one found.
    ``truncated``: no stop string came before the limit of generated tokens.
    """

    id: str
    text: str
    got: str
    strict: bool
    flexible: bool
    truncated: bool
    question: str = ""


def stock_file() -> Path:
    """lm-eval's own gsm8k.yaml, found without importing lm-eval."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        raise TaskError("lm-eval is not installed here; install lm-eval 0.4.13")
    path = Path(found.origin).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    if not path.is_file():
        raise TaskError(f"lm-eval has no {path}; install lm-eval 0.4.13")
    return path


def task_hash() -> str:
    """SHA-256 of the stock task's file."""
    return hashlib.sha256(stock_file().read_bytes()).hexdigest()


def write_task(folder: Path, questions: Sequence[Question], shots: Sequence[Question]) -> Path:
    """The task over ``questions``, with ``shots`` to draw examples from, as files in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", shots), ("test", questions)):
        write_questions(folder / f"{name}.jsonl", rows)
    settings = {
        "include": str(stock_file()),
        "task": TASK,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {name: str(folder / f"{name}.jsonl") for name in ("train", "test")}
        },
    }
    # JSON is YAML, and quotes what must be quoted.
    (folder / f"{TASK}.yaml").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return folder


def facts_of(evaluated: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """What a record says of how lm-eval asked the first ``limit`` questions."""
    return {
        "task_version": evaluated["versions"][TASK],
        "task_hash": task_hash(),
        "lm_eval": evaluated["lm_eval_version"],
        "generation": evaluated["configs"][TASK]["generation_kwargs"],
        "generated_tokens_limit": MAX_NEW_TOKENS,
        "chat_template": None,  # prompts are sent as the task writes them
        "limit": limit,
    }


def answers(samples: Sequence[Mapping[str, Any]], truncated: Collection[str]) -> list[Answer]:
    """By question, in the order asked, from the samples in lm-eval's result object.

    ``truncated``: ids of questions whose answer ended at the token limit.
    Raises :class:`TaskError` where a question lacks one of the filters' verdicts.
    """
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for sample in samples:
        rows.setdefault(str(sample["doc"]["id"]), {})[sample["filter"]] = sample
    found = []
    for name, by_filter in rows.items():
        if set(by_filter) != {STRICT, FLEXIBLE}:
            raise TaskError(
                f"question {name} was judged by {sorted(by_filter)}, not by {STRICT} and "
                f"{FLEXIBLE}; the stock task has changed"
            )
        strict, text = by_filter[STRICT], by_filter[STRICT]["resps"][0][0]
        found.append(
            Answer(
                id=name,
                text=text,
                got=str(strict["filtered_resps"][0]),
                strict=bool(strict[METRIC]),
                flexible=bool(by_filter[FLEXIBLE][METRIC]),
                truncated=name in truncated,
                question=strict["doc"]["question"],
            )
        )
    return found
