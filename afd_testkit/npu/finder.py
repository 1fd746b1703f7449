"""Import hooks: closed modules are found, and other modules adjusted once they are loaded."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from afd_testkit.npu.errors import EmulationConflict
from afd_testkit.npu.patches import PatchSet

Adjust = Callable[[ModuleType], None]


class ClosedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds exactly the given modules, which exist already."""

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for a closed module, ``None`` for any other."""
        if name not in self._modules:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module of that name."""
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It is complete already."""


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as that module has been executed."""

    def __init__(self, adjustments: Mapping[str, Adjust]) -> None:
        self._adjustments = adjustments
        self._looking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The ordinary spec with its loader wrapped, ``None`` for modules of no interest."""
        if name not in self._adjustments or name in self._looking:
            return None
        self._looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Adjusting(spec.loader, self._adjustments[name])
        return spec


class _Adjusting(importlib.abc.Loader):
    def __init__(self, loader: Any, adjust: Adjust) -> None:
        self._loader = loader
        self._adjust = adjust

    def __getattr__(self, name: str) -> Any:
        return vars(type(self))[name] if name in vars(type(self)) else getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._adjust(module)


def install_closed(patches: PatchSet, modules: Mapping[str, ModuleType]) -> None:
    """Make ``modules`` importable; :class:`EmulationConflict` where one is loaded already."""
    if loaded := sorted(name for name in modules if name in sys.modules):
        raise EmulationConflict(
            f"{', '.join(loaded)} is loaded in this process already; the emulated NPU must be "
            "installed first. Run the command under `afd-testkit emulate -- COMMAND`."
        )
    finder = ClosedModules(modules)
    sys.meta_path.insert(0, finder)
    patches.later(lambda: sys.meta_path.remove(finder))

    def forget() -> None:
        for name in modules:
            sys.modules.pop(name, None)

    patches.later(forget)


def install_adjustments(patches: PatchSet, adjustments: Mapping[str, Adjust]) -> None:
    """Adjust each module now if it is loaded, else once it is."""
    for name, adjust in adjustments.items():
        if name in sys.modules:
            adjust(sys.modules[name])
    finder = AfterImport(adjustments)
    sys.meta_path.insert(0, finder)
    patches.later(lambda: sys.meta_path.remove(finder))
