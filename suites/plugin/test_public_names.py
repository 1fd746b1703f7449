"""What ``afd_plugin`` offers, and what importing it must not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import afd_plugin

pytestmark = pytest.mark.cpu

PUBLIC = [
    "AFDConfig",
    "AfdError",
    "KVGroup",
    "KVHazard",
    "ScheduledBatch",
    "SplitPlan",
    "Stage",
    "StepDecision",
    "StepEvidence",
    "Unsplit",
    "decide_step",
    "find_kv_hazard",
    "merge_stage_outputs",
    "plan_split",
    "register_metadata_rules",
    "run_stages",
    "safe_plan",
    "slice_metadata",
    "slice_stage_inputs",
    "split_at",
]


def test_public_names_are_frozen_and_sorted() -> None:
    assert afd_plugin.__all__ == PUBLIC
    assert sorted(afd_plugin.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_described(name: str) -> None:
    assert getattr(afd_plugin, name).__doc__


def test_importing_does_not_look_for_vllm() -> None:
    # In a process of its own, where any attempt to import vLLM or the test kit is an error.
    code = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "vllm_ascend", "torch_npu", "afd_testkit"):
            raise AssertionError(f"import of {name}")

sys.meta_path.insert(0, Forbidden())
import afd_plugin, afd_plugin.context, afd_plugin.registration, afd_plugin.validation
plan = afd_plugin.plan_split(afd_plugin.ScheduledBatch([3, 200, 17], [0, 64, 0]), policy="token")
print(plan.cut)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "110\n"
