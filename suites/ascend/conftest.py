"""Prompts, and what transformers says of them; engines run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from afd_testkit.engines.base import Prompt
from afd_testkit.models import byte_tokens, ensure_model, paragraphs
from afd_testkit.settings import Settings

MakePrompt = Callable[..., Prompt]
Answer = dict[str, np.ndarray]
Ask = Callable[[str, tuple[int, ...]], Answer]


@pytest.fixture(scope="session")
def cache(afd_settings: Settings) -> Path:
    """Where made models and logs are."""
    return afd_settings.cache


@pytest.fixture(scope="session")
def make_prompt() -> MakePrompt:
    """``make_prompt(name, length, skip)``: tokens of the shipped prose, from token skip on."""
    tokens = byte_tokens(" ".join(paragraphs()))

    def make(name: str, length: int, skip: int = 0, **options: object) -> Prompt:
        return Prompt(name, tokens[skip : skip + length], **options)  # type: ignore[arg-type]

    return make


class _Oracle:
    """A process that answers for one model."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._scratch = scratch
        script = Path(__file__).with_name("oracle.py")
        self._process = subprocess.Popen(
            [sys.executable, script, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # What it answers is to be independent of the emulation.
            env={name: os.environ[name] for name in os.environ if not name.startswith("AFD_NPU_")},
        )

    def ask(self, token_ids: tuple[int, ...]) -> Answer:
        tokens, out = self._scratch / "tokens.npy", self._scratch / "out.npz"
        np.save(tokens, np.array(token_ids, dtype=np.int64))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{tokens} {out}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"
        with np.load(out) as found:
            return dict(found)

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="session")
def ask_transformers(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """``ask_transformers(model, token_ids)``; see ``oracle.py``.  Sequences are asked once."""
    oracles: dict[str, _Oracle] = {}
    known: dict[tuple[str, tuple[int, ...]], Answer] = {}
    with ExitStack() as stack:

        def ask(model: str, token_ids: tuple[int, ...]) -> Answer:
            if model not in oracles:
                folder = ensure_model(model, cache / "models")
                oracles[model] = _Oracle(folder, tmp_path_factory.mktemp("oracle"))
                stack.callback(oracles[model].close)
            key = (model, token_ids)
            if key not in known:
                known[key] = oracles[model].ask(token_ids)
            return known[key]

        yield ask
