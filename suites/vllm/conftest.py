"""vLLM in the tests' own process, for tests of its classes; engines run in other processes."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from afd_testkit.models import ensure_model
from afd_testkit.settings import Settings

# What vLLM reads while it is imported or configured: quiet, offline, no threads bound.
VLLM_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

ConfigMaker = Callable[..., Any]


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
def vllm_loaded() -> None:
    """vLLM and the plugin's modules for it are imported, once a run.

    Only here, since a test must not be the one that changes the process by importing them.
    """
    with _vllm_environment(), warnings.catch_warnings():
        # Packages that vLLM imports use torch.jit while they are imported.
        warnings.filterwarnings(
            "ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning
        )
        for module in ("afd_plugin.workers.cpu", "vllm.engine.arg_utils"):
            importlib.import_module(module)


@pytest.fixture(scope="session")
def make_config(vllm_loaded: None, afd_settings: Settings) -> ConfigMaker:
    """Builds a real ``VllmConfig`` of a made model, as an engine start would.

    ``make_config(model, **engine_arguments)``; small and eager unless told otherwise.
    """
    from vllm import EngineArgs

    def make(model: str, **arguments: Any) -> Any:
        plain: dict[str, Any] = {
            "model": str(ensure_model(model, Path(afd_settings.cache) / "models")),
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "async_scheduling": False,
            "max_model_len": 256,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 24,
        }
        with _vllm_environment():
            return EngineArgs(**{**plain, **arguments}).create_engine_config()

    make("qwen3-moe")  # what a first configuration imports is this fixture's doing
    return make
