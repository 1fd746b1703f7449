"""Imported once by the fork server, so that every engine's process starts with vLLM in memory.

Never imported by the process that runs the tests.  Only imports: a thread or a parallel
kernel started here would not survive the fork.
"""

from __future__ import annotations

import importlib
import os
import sys

from afd_testkit.engines._vllm_child import FIXED_ENVIRONMENT

# The engine, and what its start imports next for the architectures of the built-in models.
_MODULES = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.llm_engine",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.renderers.hf",
    "transformers.models.deepseek_v3.configuration_deepseek_v3",
    "transformers.models.qwen3_moe.configuration_qwen3_moe",
)


def preload() -> None:
    """Import :data:`_MODULES` without a word: what vLLM prints belongs in no test's output.

    An import that fails here fails again in the engine's process, where it is reported.
    """
    saved = [os.dup(fd) for fd in (1, 2)]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(null, fd)
        for module in _MODULES:
            importlib.import_module(module)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, old in zip((1, 2), saved, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(null)


os.environ.update(FIXED_ENVIRONMENT)
preload()
