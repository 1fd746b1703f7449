"""What must be adjusted in vLLM and vLLM-Ascend themselves, each with its reason.

Pinned: vLLM 0.23.0, vLLM-Ascend 0.23.0.post1.  Each adjustment goes away when its reason does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from afd_testkit.npu.errors import NotEmulated
from afd_testkit.npu.finder import Adjust
from afd_testkit.npu.patches import PatchSet
from afd_testkit.npu.settings import EmulationSettings
from afd_testkit.npu.triton_kernels import HostKernel, compute_slot_mapping

KERNEL = "_compute_slot_mapping_kernel"


class _TorchWithoutBfloat16(ModuleType):
    """``torch`` for one module, in which bfloat16 is float32."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def adjustments(patches: PatchSet, settings: EmulationSettings) -> Mapping[str, Adjust]:
    """By module name, what is done to it after its import."""

    def slot_mapping(module: ModuleType) -> None:
        # The one triton kernel on the paths covered here; a host has no triton.
        if KERNEL not in vars(module):
            raise NotEmulated(f"{module.__name__} no longer has {KERNEL}.")
        patches.attribute(module, KERNEL, HostKernel(compute_slot_mapping))

    def build_info(module: Any) -> None:
        # Written when vLLM-Ascend was built, for the SoC that the build was told.
        patches.attribute(module, "__device_type__", settings.soc)

    def mla(module: ModuleType) -> None:
        # Its prefill casts to the one dtype that its kernel takes on a device.  Lifted only on
        # demand, to compare the logic around the kernel in fp32.
        if settings.mla_cast == "lift":
            patches.attribute(module, "torch", _TorchWithoutBfloat16())

    return {
        "vllm_ascend.attention.mla_v1": mla,
        "vllm.v1.worker.block_table": slot_mapping,
        "vllm_ascend.worker.block_table": slot_mapping,
        "vllm_ascend._build_info": build_info,
    }
