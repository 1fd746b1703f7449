"""Imported once by the fork server, so that every engine's process starts with vLLM in memory.

Never imported by the process that runs the tests.
"""

from __future__ import annotations

import os

from afd_testkit.engines._quiet_import import import_quietly
from afd_testkit.engines._vllm_child import FIXED_ENVIRONMENT

os.environ.update(FIXED_ENVIRONMENT)
# The engine, and what its start imports next for the architectures of the built-in models.
import_quietly(
    (
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.engine.llm_engine",
        "vllm.model_executor.models.deepseek_v2",
        "vllm.model_executor.models.qwen3_moe",
        "vllm.model_executor.model_loader.default_loader",
        "vllm.renderers.hf",
        "transformers.models.deepseek_v3.configuration_deepseek_v3",
        "transformers.models.qwen3_moe.configuration_qwen3_moe",
    )
)
