"""Python runs this at start-up when its folder is on PYTHONPATH, as under `afd-testkit emulate`.

It installs the emulated NPU as soon as torch has been imported, in every Python process that
inherits the environment, and then runs the ``sitecustomize`` that it stands in front of.  Until
then nothing of afd-testkit is imported: pytest rewrites the assertions of plugins only if nobody
has imported them before, and most processes never import torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
ROOT = str(HERE.parents[2])
OURS = HERE.parts[-3:]
EMULATED = "AFD_NPU_EMULATED"
# Modules that a program may import before torch; the emulation makes them, and needs torch.
NEED_TORCH = frozenset({"torch_npu", "acl"})


class FindTorch(importlib.abc.MetaPathFinder):
    """Finds ``torch`` as the finders behind this one do, with a loader that installs."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """torch's own spec with the loader wrapped, and those of modules that need torch first;
        ``None`` for any other module."""
        if name in NEED_TORCH and "torch" not in sys.modules:
            importlib.import_module("torch")
            return importlib.util.find_spec(name)
        if name != "torch" or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = LoadTorch(spec.loader)
        return spec


class LoadTorch(importlib.abc.Loader):
    """torch first, then the emulation."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As torch's own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As torch's own loader does, which the module keeps."""
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _install()


def _install() -> None:
    """From the package that this file belongs to, whatever the working directory holds."""
    sys.path.insert(0, ROOT)
    try:
        from afd_testkit.npu.process import install_with_torch
    finally:
        sys.path.remove(ROOT)
    install_with_torch()


def _next_sitecustomize() -> None:
    # Another copy of this package may be on the path too; the two must not call each other.
    elsewhere = [place for place in sys.path if Path(place).absolute().parts[-3:] != OURS]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_next_sitecustomize()
if os.environ.get(EMULATED) == "1":
    sys.meta_path.insert(0, FindTorch())
