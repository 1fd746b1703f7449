"""The routing operator on the emulated NPU: eager and compiled, by the device suite's program.

What ``suites/npu/routing_on_device.py`` does on a device it must do here too; so it is known to
run before it meets one.  In a process of its own, for which dynamo is turned on: emulated
processes have it off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from afd_plugin.routing import (
    ROUTING_OP,
    TokenHolders,
    balance_routing_ids_,
    bound_runtime,
    profile_run,
    script_runtime,
)
from afd_testkit.library import OpLibrary
from afd_testkit.npu.fixtures import NpuDevice
from afd_testkit.npu.process import emulated_environment
from afd_testkit.npu.settings import EmulationSettings

pytestmark = pytest.mark.cpu

PROGRAM = Path(__file__).parents[1] / "npu" / "routing_on_device.py"


def run(*parts: str) -> subprocess.CompletedProcess[str]:
    base = {**os.environ, "TORCHDYNAMO_DISABLE": "0"}
    return subprocess.run(
        [sys.executable, PROGRAM, *parts],
        env=emulated_environment(EmulationSettings(), base),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_device_program_eager_and_compiled() -> None:
    ran = run("eager", "compiled")
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    assert told.pop("device").startswith("Ascend")
    assert told.pop("eager") == {
        f"torch.{dtype} {branch}": True
        for dtype in ("int32", "int64")
        for branch in ("live", "forced", "strided")
    }
    assert told.pop("compiled") == {
        "profiled": True,
        "live": True,
        "profiled again": True,
        "graphs": 1,
        "top-k inside": True,
    }
    assert told == {}


def test_a_graph_is_refused_not_pretended() -> None:
    ran = run("captured")
    assert ran.returncode == 1
    assert "NotEmulated: torch.npu.NPUGraph" in ran.stderr


@pytest.mark.parametrize("time", [1, 2])
def test_beside_the_fixture(npu_device: NpuDevice, op_library: OpLibrary, time: int) -> None:
    """Case I1 on the device of this process, registered anew for each test."""
    op_library.register(ROUTING_OP)
    skewed = torch.tensor([[0, 1]], dtype=torch.int32, device=npu_device.device).repeat(16, 1)
    ids = skewed.clone()
    with bound_runtime(script_runtime(TokenHolders(expert_ranks=4))):
        balance_routing_ids_(ids, 8)
        assert torch.equal(ids, skewed)
        with profile_run():
            balance_routing_ids_(ids, 8)
    assert Counter(ids.flatten().tolist()) == dict.fromkeys(range(8), 4)
    assert Counter((ids // 2).flatten().tolist()) == dict.fromkeys(range(4), 8)  # two a rank
