"""Imported once by the fork server, so that every Ascend engine starts with vLLM in memory.

Never imported by the process that runs the tests.  The NPU is emulated here as most engines
ask for it, an A2 in float32; others start afresh.
"""

from __future__ import annotations

import os

from afd_testkit.engines._quiet_import import import_quietly
from afd_testkit.engines._vllm_child import FIXED_ENVIRONMENT
from afd_testkit.engines.ascend import emulation_variables
from afd_testkit.engines.base import EngineConfig
from afd_testkit.npu.process import install_with_torch

os.environ.update(FIXED_ENVIRONMENT)
os.environ.update(emulation_variables(EngineConfig("any")))
install_with_torch()
# What the start of an engine imports for the architectures of the built-in models.
import_quietly(
    (
        "vllm.v1.engine.llm_engine",
        "vllm.v1.executor.multiproc_executor",
        "vllm.model_executor.models.deepseek_v2",
        "vllm.model_executor.models.qwen3_moe",
        "vllm.model_executor.model_loader.default_loader",
        "vllm.renderers.hf",
        "transformers.models.deepseek_v3.configuration_deepseek_v3",
        "transformers.models.qwen3_moe.configuration_qwen3_moe",
    )
)
