"""The closed modules: which there are, and what each contains."""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from afd_testkit.npu import device, operators, streams
from afd_testkit.npu.collectives import ProcessGroupHCCL
from afd_testkit.npu.device import EmulatedDevices
from afd_testkit.npu.stubs import ClosedModule, known_names, with_overloads

#: Version of torch_npu whose names and schemas are emulated.
TORCH_NPU_VERSION = "2.10.0"


class Format:
    """Storage formats by ACL's numbers (``aclFormat``); the emulation keeps plain strides."""

    UNDEFINED = -1
    NCHW = 0
    NHWC = 1
    ND = 2
    NC1HWC0 = 3
    FRACTAL_Z = 4
    FRACTAL_NZ = 29


class InterpolationMode(enum.Enum):
    """torchvision's enumeration, which transformers maps to Pillow's when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _reference_functions(prefix: str) -> dict[str, Any]:
    """References reached as ``prefix.NAME``."""
    table = operators.load()
    functions = {
        name.rpartition(".")[2]: operator.function
        for name, operator in table.items()
        if name.rpartition(".")[0] == prefix
    }
    return {name: with_overloads(prefix, name, function) for name, function in functions.items()}


def npu_module(devices: EmulatedDevices) -> ClosedModule:
    """``torch.npu`` (the same object as ``torch_npu.npu``)."""
    public = {
        name: vars(EmulatedDevices)[name].__get__(devices)
        for name in vars(EmulatedDevices)
        if not name.startswith("_")
    }
    memory_calls = {
        "empty_cache": device.nothing,
        "memory_allocated": device.zero_bytes,
        "max_memory_allocated": device.zero_bytes,
        "memory_reserved": device.zero_bytes,
        "max_memory_reserved": device.zero_bytes,
        "memory_stats": devices.memory_stats,
        "reset_peak_memory_stats": device.nothing,
    }
    memory = ClosedModule(
        "torch.npu.memory",
        {**memory_calls, "use_mem_pool": device.no_pool},
        known_names("torch_npu.npu.memory"),
    )
    return ClosedModule(
        "torch.npu",
        {
            **public,
            **{name: vars(streams)[name] for name in streams.__all__},
            "memory": memory,
            "config": SimpleNamespace(allow_internal_format=False),
            **memory_calls,
            "set_compile_mode": device.nothing,
            "graph_pool_handle": device.graph_pool_handle,
            "manual_seed": torch.manual_seed,
            "manual_seed_all": torch.manual_seed,
            "get_rng_state": torch.get_rng_state,
            "set_rng_state": torch.set_rng_state,
            "is_current_stream_capturing": lambda: False,
            "is_bf16_supported": lambda: True,
        },
        known=known_names("torch_npu.npu"),
    )


def _add_torchvision(add: Any) -> None:
    """What transformers' image processors import when vLLM-Ascend patches vision models.

    torchvision has no build that loads beside a CPU build of torch 2.13, and no text model
    calls it.
    """
    add("torchvision", {})
    add("torchvision.transforms", {"InterpolationMode": InterpolationMode})
    add("torchvision.io", {})
    add("torchvision.transforms.v2", {})
    add("torchvision.transforms.v2.functional", {})


def build(devices: EmulatedDevices) -> Mapping[str, ModuleType]:
    """Every closed module by its full name; parents hold their children."""
    npu = npu_module(devices)
    modules: dict[str, ModuleType] = {"torch.npu": npu, "torch_npu.npu": npu}
    modules["torch.npu.memory"] = npu.memory

    def add(name: str, contents: Mapping[str, Any], known: Any = ()) -> None:
        modules[name] = ClosedModule(name, contents, known)

    add(
        "torch_npu",
        {
            **_reference_functions("torch_npu"),
            "__version__": TORCH_NPU_VERSION,
            "npu": npu,
            "Format": Format,
        },
        known_names("torch_npu"),
    )
    add("torch_npu.atb", _reference_functions("torch_npu.atb"), known_names("torch_npu.atb"))
    add(
        "torch_npu._C",
        {"_NPUTaskGroupHandle": type("_NPUTaskGroupHandle", (), {})},
        known_names("torch_npu._C"),
    )
    add("torch_npu._C._distributed_c10d", {"ProcessGroupHCCL": ProcessGroupHCCL})
    add("torch_npu.profiler", {}, known_names("torch_npu.profiler"))
    add("torch_npu.profiler.dynamic_profile", {}, ("init", "step", "start"))
    add("torch_npu._inductor", {})
    add("torch_npu.op_plugin", {})
    add("torch_npu.op_plugin.atb", {})
    add("torch_npu.op_plugin.atb._atb_ops", {"_register_atb_extensions": device.nothing})
    add("torch_npu.multiprocessing", {})
    add("torch_npu.multiprocessing.reductions", {}, ("rebuild_npu_tensor",))
    add("acl", {})
    add("acl.rt", {}, ("memcpy",))
    add("vllm_ascend.vllm_ascend_C", {}, ("init_module", "python_create_and_map"))
    if importlib.util.find_spec("torchvision") is None:
        _add_torchvision(add)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent in modules:
            modules[parent].__dict__.setdefault(child, module)
    return modules
