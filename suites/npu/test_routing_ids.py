"""The routing operator on a real NPU: eager, compiled, and in a captured graph that is replayed.

The first two also run on the emulated NPU, in ``suites/npu_emulation/test_routing_op.py``; a
graph needs the device's own runtime, which nothing emulates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afd_testkit.leases import Lease

pytestmark = pytest.mark.npu(1)

PROGRAM = Path(__file__).with_name("routing_on_device.py")


def run(lease: Lease, part: str) -> dict[str, Any]:
    """What the part found, in a process of its own: devices are chosen once a process."""
    ran = subprocess.run(
        [sys.executable, PROGRAM, part],
        env={**os.environ, **lease.environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, f"{lease}:\n{ran.stdout}\n{ran.stderr}"
    told = json.loads(ran.stdout.splitlines()[-1])  # the last line: CANN may print its own
    assert told["device"].startswith("Ascend")
    found: dict[str, Any] = told[part]
    return found


def test_eager(npu_lease: Lease) -> None:
    """Live ids come back to the bit, forced ones are even, neighbours in memory stay."""
    assert run(npu_lease, "eager") == {
        f"torch.{dtype} {branch}": True
        for dtype in ("int32", "int64")
        for branch in ("live", "forced", "strided")
    }


def test_compiled_while_profiling(npu_lease: Lease) -> None:
    """One graph with the top-k inside; the flag is followed after it was made; the contract."""
    assert run(npu_lease, "compiled") == {
        "profiled": True,
        "live": True,
        "profiled again": True,
        "graphs": 1,
        "top-k inside": True,
    }


def test_captured_with_the_flag_cleared_and_replayed_with_two_inputs(npu_lease: Lease) -> None:
    """One static buffer; each replay's ids are those of its own input."""
    assert run(npu_lease, "captured") == {
        "operator ran while capturing": 1,
        "first": True,
        "second": True,
    }
