"""A real NPU, leased and used: what goes to the device comes back the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from afd_testkit.leases import Lease

pytestmark = pytest.mark.npu(1)

#: In a process of its own: the runtime reads which devices it may see only once.
ROUND_TRIP = """
import json
import torch
import torch_npu  # noqa: F401

generator = torch.Generator().manual_seed(7)
values = torch.randint(-(2**15), 2**15, (257, 33), generator=generator, dtype=torch.int32)
there = {}
for dtype in (torch.int32, torch.float32, torch.float16, torch.bfloat16):
    # Every bit counts; as integers, since a NaN differs from itself.
    sent = values if dtype is torch.int32 else (values.float() / 7).to(dtype)
    width = torch.int16 if sent.element_size() == 2 else torch.int32
    back = sent.to("npu:0").cpu()
    there[str(dtype)] = bool(torch.equal(back.view(width), sent.view(width)))
added = (values.to("npu:0") + values.to("npu:0")).cpu()
print(json.dumps({
    "devices": torch.npu.device_count(),
    "name": torch.npu.get_device_name(0),
    "kind": values.to("npu:0").device.type,
    "round trip": there,
    "added": bool(torch.equal(added, values * 2)),
}))
"""


def test_a_tensor_comes_back_from_a_leased_device(npu_lease: Lease) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP],
        env={**os.environ, **npu_lease.environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, f"{npu_lease}:\n{ran.stdout}\n{ran.stderr}"
    # The last line: CANN may print lines of its own.
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["devices"] == len(npu_lease.devices) == 1
    assert told["kind"] == "npu"
    assert told["name"].startswith("Ascend")
    assert told["round trip"] == dict.fromkeys(
        ("torch.int32", "torch.float32", "torch.float16", "torch.bfloat16"), True
    )
    assert told["added"] is True
