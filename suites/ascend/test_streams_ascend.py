"""Order between streams, checked while the real vLLM-Ascend runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afd_testkit.engines.ascend import AscendEngine
from afd_testkit.engines.base import EngineConfig, Prompt, SplitSetting
from afd_testkit.models import ensure_model
from afd_testkit.npu.limits import VARIABLE
from afd_testkit.npu.process import emulated_environment
from afd_testkit.npu.settings import EmulationSettings
from afd_testkit.settings import Settings

pytestmark = pytest.mark.ascend


def generate(mode: str, cache: Path) -> dict[str, Any]:
    """What ``streams_inside`` found in ``mode``."""
    environment = {
        **emulated_environment(EmulationSettings(streams="check"), os.environ),
        VARIABLE: "dtype,alignment",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    script = Path(__file__).with_name("streams_inside.py")
    ran = subprocess.run(
        [sys.executable, str(script), mode, str(ensure_model("qwen3-moe", cache / "models"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    assert lines, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def test_the_engines_own_waits_are_enough(afd_settings: Settings) -> None:
    assert generate("kept", afd_settings.cache) == {"npu": 8, "hazard": ""}


def test_a_missing_wait_is_reported_with_both_call_sites(afd_settings: Settings) -> None:
    hazard = generate("dropped", afd_settings.cache)["hazard"]
    # The copy of sampled tokens to the host runs on a stream of its own.
    assert hazard.count("gpu_model_runner.py") + hazard.count("model_runner_v1.py") >= 2, hazard
    assert "wait" in hazard


def test_a_split_prefill_has_no_unordered_access(afd_settings: Settings) -> None:
    config = EngineConfig("qwen3-moe", worker="afd", block_size=128)
    engine = AscendEngine(config, afd_settings.cache, streams="check")
    try:
        prompts = [Prompt(f"p{count}", tuple(range(5, 5 + count))) for count in (3, 90, 17)]
        result = engine.run(prompts, split=SplitSetting("token"))
        assert [len(step.forward_rows) for step in result.steps] == [2]
        assert engine.info["emulated_npu"]["streams"] == "checked"
    finally:
        engine.close()
