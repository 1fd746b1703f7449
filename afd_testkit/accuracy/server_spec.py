"""What is asked of a server, and what makes two runs of such questions comparable."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from afd_testkit.accuracy.questions import digest, read_questions
from afd_testkit.accuracy.server_protocol import Served, ServerError, base_url
from afd_testkit.accuracy.spec import SEEDS, default_seeds
from afd_testkit.accuracy.task import MAX_NEW_TOKENS, MAX_SHOTS, task_hash


@dataclass(frozen=True)
class ServerSpec:
    """``model``: as the server names it.  ``task``: folder made by ``task.write_task``.

    ``questions``: how many are answered, the first ones; ``teacher_forced``: of how many the
    reference answer's log-probabilities are taken, in reverse order if ``backwards``.
    ``timeout``: whole seconds for one reply; ``tries``: how often a question is asked before the
    run gives up.  ``tokenizer``: folder of the tokenizer that prompts are sent with, as tokens
    and without special ones; with ``None`` they are sent as text.
    Raises :class:`ServerError` for a value that cannot be used.
    """

    url: str
    model: str
    task: str
    results: str
    shots: int
    questions: int
    teacher_forced: int = 0
    backwards: bool = False
    seeds: dict[str, int] = field(default_factory=default_seeds)
    timeout: int = 120
    tries: int = 2
    concurrency: int = 8
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", base_url(self.url))
        if not self.model:
            raise ServerError("no model was named; give the name that the server's models have")
        limits = {"shots": 0, "questions": 0, "teacher_forced": 0}
        limits |= dict.fromkeys(("timeout", "tries", "concurrency"), 1)
        for name, least in limits.items():
            given = asdict(self)[name]
            if not isinstance(given, int) or isinstance(given, bool) or given < least:
                raise ServerError(f"{name} is {given!r}; give a whole number, {least} or more")
        if self.shots > MAX_SHOTS:
            raise ServerError(f"{self.shots} shots; give at most {MAX_SHOTS}")
        if not self.questions and not self.teacher_forced:
            raise ServerError("no question is to be asked; ask at least one")
        if set(self.seeds) != set(SEEDS):
            raise ServerError(f"seeds of {sorted(self.seeds)}; state {', '.join(SEEDS)}")
        if self.tokenizer is not None and not Path(self.tokenizer).is_dir():
            raise ServerError(f"the tokenizer {self.tokenizer} is no folder; give its folder")

    @property
    def listed(self) -> int:
        """Questions that are read from the task's folder."""
        return max(self.questions, self.teacher_forced)


@dataclass(frozen=True)
class Asked:
    """What two runs must have in common; digests are SHA-256.

    ``examples``: digest of what shots are drawn from.  ``prompts``: ``text``, or the digest of
    the tokenizer they are sent with.  ``stack``: version of vLLM, ``None`` where unknown.
    """

    model: str
    questions: str
    count: int
    examples: str
    shots: int
    seeds: dict[str, int]
    task_hash: str
    lm_eval: str
    max_new_tokens: int
    prompts: str
    stack: str | None

    @classmethod
    def read(cls, data: object) -> Asked:
        """From JSON.  Raises :class:`ServerError` unless every field is there, and no other."""
        names = {one.name for one in fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            raise ServerError(f"what was asked is not said by {', '.join(sorted(names))}")
        return cls(**data)

    def differences(self, other: Asked) -> list[str]:
        """``name: mine there, other's here``; what is unknown on either side differs in nothing."""
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{name}: {mine[name]!r} there, {theirs[name]!r} here"
            for name in mine
            if mine[name] != theirs[name]
            and not (name == "stack" and None in (mine[name], theirs[name]))
        ]


def asked_of(spec: ServerSpec, served: Served) -> Asked:
    """What ``spec`` asks of a server that says ``served``.

    Raises ``QuestionsError`` where the task's files cannot be used, :class:`ServerError` where
    they hold fewer questions than are to be asked.
    """
    folder = Path(spec.task)
    questions = read_questions(folder / "test.jsonl", spec.listed)
    if len(questions) < spec.listed:
        raise ServerError(
            f"{spec.listed} questions are to be asked and {folder} has {len(questions)}; ask fewer"
        )
    return Asked(
        model=spec.model,
        questions=digest(questions),
        count=len(questions),
        examples=digest(read_questions(folder / "train.jsonl")),
        shots=spec.shots,
        seeds=spec.seeds,
        task_hash=task_hash(),
        lm_eval=importlib.metadata.version("lm_eval"),
        max_new_tokens=MAX_NEW_TOKENS,
        prompts="text" if spec.tokenizer is None else _tokenizer_digest(Path(spec.tokenizer)),
        stack=served.version,
    )


def _tokenizer_digest(folder: Path) -> str:
    """Of all files that say how text becomes tokens."""
    found = sorted([*folder.glob("*token*"), *folder.glob("vocab*"), *folder.glob("merges*")])
    if not found:
        raise ServerError(f"{folder} has no tokenizer's files; give the folder that has them")
    lines = [f"{one.name} {hashlib.sha256(one.read_bytes()).hexdigest()}" for one in found]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class ServerRun:
    """What the process of one arm is told."""

    name: str
    spec: ServerSpec
    served: Served
    asked: Asked

    @property
    def journal(self) -> Path:
        """File of what is finished."""
        return Path(self.spec.results) / f"{self.name}.journal.jsonl"

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ServerRun:
        """The inverse of :meth:`write`."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            name=data["name"],
            spec=ServerSpec(**data["spec"]),
            served=Served(**data["served"]),
            asked=Asked(**data["asked"]),
        )
