"""Prompts, what transformers says of them, and vLLM-Ascend in the tests' own process.

Engines run in processes of their own; in this one are classes and configurations only.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afd_testkit.device_pool import is_emulated
from afd_testkit.engines.ascend import real_device
from afd_testkit.engines.base import Prompt
from afd_testkit.models import byte_tokens, ensure_model, paragraphs
from afd_testkit.settings import Settings

MakePrompt = Callable[..., Prompt]
Answer = dict[str, np.ndarray]
Ask = Callable[[str, tuple[int, ...]], Answer]
ConfigMaker = Callable[..., Any]

# What vLLM reads while it is imported or configured: quiet and offline.
VLLM_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


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


@contextmanager
def _vllm_environment() -> Iterator[None]:
    """The variables above inside; afterwards none of them, nor what vLLM itself has set."""
    before = dict(os.environ)
    try:
        os.environ.update(VLLM_ENVIRONMENT)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def ascend_loaded() -> None:
    """vLLM-Ascend and the plugin's modules for it are imported, once a run."""
    if not is_emulated() and not real_device():
        pytest.fail(
            "vLLM-Ascend cannot be imported in this process: run the suite under the emulation, "
            "afd-testkit emulate -- pytest -m ascend",
            pytrace=False,
        )
    with _vllm_environment(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that vLLM imports
        for module in ("afd_plugin.workers.npu", "vllm.engine.arg_utils"):
            importlib.import_module(module)


@contextmanager
def _in_force(config: Any) -> Iterator[None]:
    """``config`` is vLLM's current one, and what vLLM-Ascend remembers of others is forgotten."""
    from vllm.config import set_current_vllm_config
    from vllm_ascend.ascend_config import clear_ascend_config, init_ascend_config
    from vllm_ascend.attention.utils import enable_cp

    def forget() -> None:
        clear_ascend_config()
        enable_cp.cache_clear()

    forget()
    try:
        with _vllm_environment(), set_current_vllm_config(config):
            init_ascend_config(config)
            yield
    finally:
        forget()


@pytest.fixture(scope="session")
def in_force(ascend_loaded: None) -> Callable[[Any], AbstractContextManager[None]]:
    """``with in_force(config)``: as inside a worker that serves ``config``."""
    return _in_force


@pytest.fixture(scope="session")
def start_worker(in_force: Callable[[Any], AbstractContextManager[None]]) -> Callable[..., None]:
    """``start_worker(config, options, prepare)``: what vLLM does with a worker class first.

    ``prepare`` is called with the options that vLLM-Ascend has read.
    """

    def begin(
        config: Any, options: object, prepare: Callable[[Any], None] = lambda ascend: None
    ) -> None:
        from vllm_ascend.ascend_config import get_ascend_config

        from afd_plugin.workers.npu import AFDNPUWorker

        config.additional_config["afd"] = options
        with in_force(config):
            prepare(get_ascend_config())
            AFDNPUWorker(
                vllm_config=config,
                local_rank=0,
                rank=0,
                distributed_init_method="tcp://127.0.0.1:1",
                is_driver_worker=True,
            )

    return begin


@pytest.fixture(scope="session")
def make_config(ascend_loaded: None, cache: Path) -> ConfigMaker:
    """Builds a real ``VllmConfig`` of a made model, as an engine start would.

    ``make_config(model, **engine_arguments)``; small and eager unless told otherwise.
    """
    from vllm import EngineArgs

    def make(model: str, **arguments: Any) -> Any:
        plain: dict[str, Any] = {
            "model": str(ensure_model(model, cache / "models")),
            "dtype": "float32",
            "block_size": 128,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "async_scheduling": False,
            "max_model_len": 512,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 24,
        }
        with _vllm_environment(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return EngineArgs(**{**plain, **arguments}).create_engine_config()

    # What a first configuration imports is this fixture's doing.
    with _in_force(make("qwen3-moe")):
        pass
    return make
