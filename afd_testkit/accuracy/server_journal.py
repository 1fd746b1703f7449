"""What a server has answered so far, kept in a file line by line, so that a run can go on.

The first line says what is asked and of whom; every other one is one finished question.  A line
is on disk as soon as its question is answered, so a killed run loses only what was in flight.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import IO, Any

from afd_testkit.accuracy.server_protocol import ServerError
from afd_testkit.accuracy.server_spec import Asked, ServerRun
from afd_testkit.strict_json import read_json


class ResumeRefused(ServerError):
    """The file holds answers to something else, or of another server; it is left as it was."""


class Journal:
    """The journal of one arm, open for one process; a context manager.

    ``answers``: by question id, the text and whether the limit of tokens ended it.
    ``logprobs``: by question id; ``None`` where the tokens do not spell the answer.
    ``resumed``: answers that an earlier process got.
    Raises :class:`ResumeRefused`; :class:`ServerError` for a file that is broken or in use.
    """

    def __init__(self, run: ServerRun) -> None:
        self.path = run.journal
        self.answers: dict[str, tuple[str, bool]] = {}
        self.logprobs: dict[str, list[float] | None] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = self.path.open("a+b")
        try:
            self._begin(run)
        except BaseException:
            self._file.close()
            raise
        self.resumed = len(self.answers)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add_answer(self, name: str, text: str, truncated: bool) -> None:
        """Keep one answer."""
        self.answers[name] = (text, truncated)
        self._write({"id": name, "text": text, "truncated": truncated})

    def add_logprobs(self, name: str, values: list[float] | None) -> None:
        """Keep the log-probabilities of one reference answer."""
        self.logprobs[name] = values
        self._write({"id": name, "logprobs": values})

    def _begin(self, run: ServerRun) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ServerError(
                f"another run is writing {self.path}; wait for it, or give another folder"
            ) from error
        self._file.seek(0)
        whole, newline, torn = self._file.read().rpartition(b"\n")
        if newline:
            lines = whole.split(b"\n")
            self._check_head(lines[0], run)
            for number, line in enumerate(lines[1:], start=2):
                self._take(number, line)
        if torn:  # the write that a killed process did not finish
            self._file.truncate(len(whole) + len(newline))
        if not newline:
            self._write({"url": run.served.url, "root": run.served.root, **asdict(run.asked)})

    def _check_head(self, line: bytes, run: ServerRun) -> None:
        head = self._object(1, line)
        served = {"url": run.served.url, "root": run.served.root}
        differences = [
            f"{name}: {head.get(name)!r} there, {value!r} here"
            for name, value in served.items()
            if head.get(name) != value
        ]
        try:
            before = Asked.read({k: v for k, v in head.items() if k not in served})
        except ServerError as error:
            raise ServerError(f"{self.path}, line 1: {error}; remove the file") from error
        differences += before.differences(run.asked)
        if differences:
            raise ResumeRefused(
                f"{self.path} holds answers of another run ({'; '.join(differences)}); ask the "
                "same again to go on with it, or remove the file to begin anew"
            )

    def _take(self, number: int, line: bytes) -> None:
        data = self._object(number, line)
        kept = self.logprobs if "logprobs" in data else self.answers
        if data.get("id") in kept:
            raise ServerError(
                f"{self.path}, line {number} answers {data['id']} a second time; remove the file"
            )
        match data:
            case {"id": str(name), "text": str(text), "truncated": bool(truncated)}:
                self.answers[name] = (text, truncated)
            case {"id": str(name), "logprobs": list() | None as values} if _numbers(values):
                self.logprobs[name] = values
            case _:
                raise ServerError(f"{self.path}, line {number} is no answer; remove the file")

    def _object(self, number: int, line: bytes) -> Mapping[str, Any]:
        try:
            data = read_json(line.decode("utf-8"))
        except ValueError as error:
            raise ServerError(
                f"{self.path}, line {number} is broken ({error}); remove the file to begin anew"
            ) from error
        if not isinstance(data, dict):
            raise ServerError(f"{self.path}, line {number} is no object; remove the file")
        return data

    def _write(self, data: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(data).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _numbers(values: list[Any] | None) -> bool:
    return all(type(one) in (int, float) for one in values or ())
