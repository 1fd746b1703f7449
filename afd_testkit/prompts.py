"""The user's own prompts: a JSONL file, checked line by line before anything runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEYS = ("name", "text", "token_ids")


class PromptFileError(ValueError):
    """A prompt file cannot be used; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class UserPrompt:
    """One prompt, either as ``text`` or as ``token_ids``; the other is ``None``.

    ``name`` is the line's own or ``line-N`` (N counts from 1); names are unique in a file.
    """

    name: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


def load_prompts(path: Path) -> tuple[UserPrompt, ...]:
    """The prompts of ``path``, in file order; blank lines are allowed.

    Each line is a JSON object with exactly one of ``text`` (non-empty string) and
    ``token_ids`` (non-empty list of whole numbers, 0 or more), and optionally ``name``.
    Raises :class:`PromptFileError` for a missing, unreadable, non-UTF-8 or empty file and for
    the first broken line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PromptFileError(
            f"prompt file {path} cannot be read: {error.strerror or error}; "
            'give a file of JSON lines such as {"text": "Hello"} or {"token_ids": [1, 2, 3]}.'
        ) from error
    prompts: dict[str, UserPrompt] = {}
    # Split on newlines only: splitlines() also splits at characters that JSON allows unescaped.
    for number, raw in enumerate(content.split(b"\n"), start=1):
        line = _decode(raw, path, number)
        if not line.strip():
            continue
        try:
            prompt = _parse(line, number)
            if prompt.name in prompts:
                raise ValueError(f"the name {prompt.name!r} is used by an earlier line")
        except ValueError as error:
            raise PromptFileError(f"{path}, line {number}: {error}.") from error
        prompts[prompt.name] = prompt
    if not prompts:
        raise PromptFileError(f"{path} holds no prompt; give at least one JSON object a line.")
    return tuple(prompts.values())


def _decode(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise PromptFileError(
            f"{path}, line {number}: byte {error.start} is not UTF-8; save the file as UTF-8."
        ) from error


def _parse(line: str, number: int) -> UserPrompt:
    """One line as a prompt; ``ValueError`` says what is wrong with it."""
    try:
        value = json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("not JSON of a prompt (nested too deeply)") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is wanted, not {_kind(value)}")
    if unknown := sorted(value.keys() - set(_KEYS)):
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    if ("text" in value) == ("token_ids" in value):
        given = "both" if "text" in value else "neither"
        raise ValueError(f"exactly one of text and token_ids is wanted, {given} is given")
    name = value.get("name", f"line-{number}")
    if not isinstance(name, str) or not name:
        raise ValueError(f"name is {_kind(name)}; give a non-empty string")
    if "text" in value:
        text = value["text"]
        if not isinstance(text, str) or not text:
            raise ValueError(f"text is {_kind(text)}; give a non-empty string")
        if not _is_encodable(text):
            raise ValueError("text holds half of a surrogate pair; write whole characters")
        return UserPrompt(name, text=text)
    return UserPrompt(name, token_ids=_token_ids(value["token_ids"]))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ``ValueError`` for a key that stands twice, of which one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice; give it once")
    return found


def _is_encodable(text: str) -> bool:
    """Whether ``text`` is whole Unicode, as tokenizers want it."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"token_ids is {_kind(value)}; give a non-empty list of whole numbers")
    for place, token in enumerate(value):
        # bool is an int to Python, but true is no token id
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(
                f"token_ids[{place}] is {json.dumps(token)}; give whole numbers, 0 or more"
            )
    return tuple(value)


def _kind(value: Any) -> str:
    """How a JSON value is called in a message."""
    if value in ("", [], {}):
        return f"an empty {'string' if value == '' else 'list' if value == [] else 'object'}"
    names = {str: "a string", list: "a list", dict: "an object", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")
