"""What an OpenAI-compatible server says, read and checked: its models, its completions.

Nothing here asks for completions; lm-eval does.  Its replies pass through :func:`read_reply`
before lm-eval sees them, so that a refusal is told with its status and what the server said.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

_SHOWN = 200  # characters of a body in a message
_ASIDE_SECONDS = 30.0  # for what a server says of itself; it has nothing to compute
_VISIBLE = re.compile(r"[!-~]+")  # what a URL may be written in
_ENDED = ("stop", "length")


class ServerError(RuntimeError):
    """A server, or what it left, cannot be used as evidence of accuracy."""


class BadReply(ServerError):
    """A reply that is no completion.  ``status``: HTTP's, 200 where only the body is wrong."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


class NotOffered(BadReply):
    """The server answers, but does not give log-probabilities of a prompt's tokens."""


@dataclass(frozen=True)
class Served:
    """What a server says of the model asked of it; ``None`` where it does not say.

    ``root``: what it loaded the model from.  ``max_model_len``: in tokens.  ``version``: of vLLM.
    """

    url: str
    model: str
    root: str | None
    max_model_len: int | None
    version: str | None


def base_url(given: str) -> str:
    """``http://host:port`` of ``given``, with or without a ``/v1`` or ``/`` behind.

    Raises :class:`ServerError` for anything else.
    """
    if not isinstance(given, str) or set(given) & set("?#") or not _VISIBLE.fullmatch(given):
        raise ServerError(_no_server(given))
    try:
        parts = urlsplit(given)
        (parts.hostname or "").encode("idna")
        fits = bool(parts.hostname) and parts.port != 0  # also reads what is no port
    except ValueError as error:
        raise ServerError(_no_server(given, f" ({error})")) from error
    if not fits or parts.scheme not in ("http", "https"):
        raise ServerError(_no_server(given))
    base = given.rstrip("/").removesuffix("/v1").rstrip("/")
    if base.endswith("completions") or "/v1/" in base:
        raise ServerError(_no_server(given, ": what comes behind it is added here"))
    return base


def _no_server(given: str, why: str = "") -> str:
    return f"{given!r} is no server{why}; give http://HOST:PORT, as vllm serve prints it"


def models_of(url: str) -> tuple[str, ...]:
    """Names of the models that ``url`` lists.  Raises :class:`ServerError`."""
    return tuple(one["id"] for one in _list(base_url(url)))


def ask_server(url: str, model: str) -> Served:
    """What the server at ``url`` says of ``model``, and of itself.

    Raises :class:`ServerError` where it cannot be reached or serves another model.
    """
    base = base_url(url)
    listed = {one["id"]: one for one in _list(base)}
    if model not in listed:
        raise ServerError(
            f"{base} serves {', '.join(sorted(listed)) or 'nothing'}, not {model!r}; name the "
            "model as the server does, or start the server with that model"
        )
    root, length = listed[model].get("root"), listed[model].get("max_model_len")
    version = _get(base, "/version", missing_is_none=True)
    return Served(
        url=base,
        model=model,
        root=root if isinstance(root, str) else None,
        max_model_len=length if isinstance(length, int) else None,
        version=version.get("version") if isinstance(version, dict) else None,
    )


def check_pair(arm: Served, baseline: Served) -> None:
    """Two servers may differ in how they split and in nothing else that they tell.

    Raises :class:`ServerError` where they are one, or differ in model, its folder or version.
    """
    if _address(arm.url) & _address(baseline.url):
        raise ServerError(
            f"{arm.url} and {baseline.url} are one server, both the arm and the baseline; give "
            "--afd-baseline-server another one, which does not split"
        )
    roots = [PurePosixPath(one.root).name if one.root else None for one in (arm, baseline)]
    for what, ours, theirs in (
        ("model", arm.model, baseline.model),
        ("folder of the model", *roots),
        ("version of vLLM", arm.version, baseline.version),
    ):
        if ours is not None and theirs is not None and ours != theirs:
            raise ServerError(
                f"the servers differ in the {what}: {ours!r} at {arm.url}, {theirs!r} at "
                f"{baseline.url}; only the splitting may differ"
            )


def _address(url: str) -> set[tuple[str, int]]:
    """Where ``url`` leads; by its own words where no name service knows the host."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return {(host, port)}
    return {(str(address[0]), port) for *_, address in found}


def read_reply(status: int, kind: str, body: str, model: str) -> dict[str, Any]:
    """The completion in a reply of HTTP status ``status`` and content type ``kind``.

    Raises :class:`BadReply` for an error status, a body that is no JSON or no completion of one
    choice, and an answer by another model than ``model``.
    """
    if status >= 400:
        raise BadReply(f"the server answered HTTP {status}: {first_line(body)}", status)
    try:
        reply: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadReply(
            f"the server's reply is not JSON ({error}); it begins: {first_line(body)}"
        ) from error
    if not kind.endswith("json"):
        raise BadReply(f"the server calls its reply {kind}, not JSON: {first_line(body)}")
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadReply(f"the server's reply has not one choice: {first_line(body)}")
    if not isinstance(choices[0].get("text"), str) or choices[0].get("index") != 0:
        raise BadReply(f"the choice has no text or not the index 0: {first_line(body)}")
    if reply.get("model", model) != model:
        raise BadReply(f"the model {reply['model']!r} answered, not {model!r}")
    checked: dict[str, Any] = reply
    return checked


def generation(reply: dict[str, Any]) -> tuple[str, bool]:
    """The text of a checked completion, and whether the limit of tokens ended it.

    Raises :class:`BadReply` where the server does not say how it ended, or it was broken off.
    """
    choice = reply["choices"][0]
    reason = choice.get("finish_reason")
    if reason not in _ENDED:
        raise BadReply(
            f"the answer ended by {reason!r}, not by one of {', '.join(_ENDED)}; it is unknown "
            "whether it is complete"
        )
    return choice["text"], reason == "length"


def answer_logprobs(reply: dict[str, Any], prompt: str, answer: str) -> list[float] | None:
    """Log-probability, in nats, of each token of ``answer`` after ``prompt``, from their echo.

    ``None`` where the echoed tokens do not spell the text that was sent (a character that is
    several tokens has no spelling), so that nobody can say where the answer begins.
    Raises :class:`NotOffered` where there are none.
    """
    given = reply["choices"][0].get("logprobs")
    if not isinstance(given, dict):
        raise NotOffered("the server gave no log-probabilities")
    if prompt + answer not in reply["choices"][0]["text"]:
        raise NotOffered("the server did not echo what it was sent")
    columns: list[list[Any]] = [
        given[name]
        for name in ("tokens", "token_logprobs", "text_offset")
        if isinstance(given.get(name), list)
    ]
    if len(columns) < 3 or len({len(one) for one in columns}) != 1:
        raise NotOffered("tokens, token_logprobs and text_offset are not three equally long lists")
    tokens, values, offsets = columns
    # What stands before the text (a token that begins every text) has offsets of its own.
    text = "".join(map(str, tokens))
    start = text.find(prompt + answer)
    lengths = accumulate((len(str(one)) for one in tokens[:-1]), initial=0)
    if start < 0 or offsets != [offsets[0] + length for length in lengths]:
        return None
    first, end = start + len(prompt), start + len(prompt) + len(answer)
    found = [
        value
        for value, offset in zip(values, offsets, strict=True)
        if first <= offset - offsets[0] < end
    ]
    if not all(isinstance(one, float | int) and math.isfinite(one) for one in found):
        raise BadReply(f"a log-probability of the answer is no number: {found}")
    return [float(one) for one in found]


def first_line(body: str) -> str:
    """What a message shows of a body."""
    line = next((line.strip() for line in body.splitlines() if line.strip()), "(empty)")
    return line[:_SHOWN] + ("..." if len(line) > _SHOWN else "")


def _list(base: str) -> list[dict[str, Any]]:
    listed = _get(base, "/v1/models")
    data = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(data, list) or not all(
        isinstance(one, dict) and isinstance(one.get("id"), str) for one in data
    ):
        raise ServerError(
            f"{base}/v1/models gave no list of models; is it an OpenAI-compatible server?"
        )
    return data


def _body(error: urllib.error.HTTPError) -> str:
    """What a refusal says, as far as it comes."""
    try:
        return error.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException) as broken:
        return f"(its body breaks off: {broken!r})"


def _get(base: str, path: str, *, missing_is_none: bool = False) -> Any:
    """JSON at ``path``; without a proxy, as lm-eval asks, and with the key that it sends."""
    request = urllib.request.Request(base + path)
    if key := os.environ.get("OPENAI_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ASIDE_SECONDS) as reply:
            body = reply.read().decode("utf-8", errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            if missing_is_none and error.code in (404, 405):
                return None
            said = first_line(_body(error))
        raise ServerError(f"{base}{path} answered HTTP {error.code}: {said}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # also what is no HTTP
        raise ServerError(
            f"{base}{path} cannot be reached ({error}); start the server, or correct the URL"
        ) from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{base}{path} is not JSON; it begins: {first_line(body)}") from error
