"""Whole processes under the emulation: their environment, and how they start.

Importing this module imports no torch: it runs at the start of every Python process that
inherits the environment, most of which never import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from afd_testkit.npu.finder import install_adjustments
from afd_testkit.npu.patches import PatchSet
from afd_testkit.npu.settings import EMULATED, EmulationSettings

__all__ = ["EMULATED", "emulated_environment", "install_with_torch"]

HERE = Path(__file__).parent
STARTUP = HERE / "startup"
#: Holds the ``npu-smi`` stand-in.
COMMANDS = HERE / "bin"
#: Variable with the interpreter that the stand-in runs on; ``python3`` on PATH may be any.
PYTHON = "AFD_NPU_PYTHON"


def emulated_environment(
    settings: EmulationSettings, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """``base`` with what a process and its children need to run under the emulation.

    dynamo is off: compiling for a device that is not there shows nothing.  torch must not load
    a real torch-npu on its own, which fails on a host without CANN.
    """
    paths = [str(STARTUP), str(HERE.parent.parent), *_parts(base.get("PYTHONPATH", ""))]
    return {
        **base,
        **settings.as_environment(),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PATH": os.pathsep.join([str(COMMANDS), *_parts(base.get("PATH", os.defpath))]),
        PYTHON: sys.executable,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHDYNAMO_DISABLE": base.get("TORCHDYNAMO_DISABLE", "1"),
    }


def _parts(path: str) -> list[str]:
    return [part for part in path.split(os.pathsep) if part]


def install_with_torch() -> None:
    """Install for the rest of this process, now or as soon as torch has been imported."""

    def install_now(_: ModuleType) -> None:
        _set_unfinished_aside()
        from afd_testkit.npu.install import install, installed

        if installed() is None:
            install()

    install_adjustments(PatchSet(), {"torch": install_now})


def _set_unfinished_aside() -> None:
    """Have the modules of the emulation that are just being imported imported anew.

    One of them may be what imports torch first: what it defines below that line is not there yet,
    and the installation needs it.  Python hands whoever imports such a module the one that is in
    ``sys.modules`` in the end, which is the complete one.
    """
    for name, module in list(sys.modules.items()):
        # Python's own mark of a module that is being executed.
        if name.startswith(f"{__package__}.") and vars(module.__spec__).get("_initializing"):
            del sys.modules[name]
