"""Closed stand-ins for the modules of the Ascend stack.

A module answers for what is emulated.  A function that the real module has and that is not
emulated exists too, so that code which only looks for it goes on, and raises when it is called.
Anything else is :class:`~afd_testkit.npu.errors.UnknownName` at once: nothing agrees to
whatever it is asked.
"""

from __future__ import annotations

import importlib.machinery
import importlib.resources
from collections.abc import Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from afd_testkit.npu import operators
from afd_testkit.npu.errors import UnknownName


@cache
def known_lines(module: str) -> tuple[str, ...]:
    """What is listed of the real ``module``, of the pinned version: names or schemas."""
    text = importlib.resources.files(__package__).joinpath("known", f"{module}.txt").read_text()
    return tuple(line for line in text.splitlines() if line and not line.startswith("#"))


def known_names(module: str) -> frozenset[str]:
    """Names of functions that the real ``module`` has."""
    return frozenset(line.partition("(")[0] for line in known_lines(module))


class ClosedModule(ModuleType):
    """A module of exactly ``contents``, and refusals for the ``known`` names beside them."""

    def __init__(
        self, name: str, contents: Mapping[str, Any], known: Iterable[str] = (), doc: str = ""
    ) -> None:
        super().__init__(name, doc or f"Emulated stand-in for {name}.")
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__file__ = None
        self.__dict__.update(contents)
        self.__dict__["_afd_known"] = frozenset(known)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_afd_known"]:
            # Kept, so that the name is one object: classes are compared by identity.
            return self.__dict__.setdefault(name, operators.refused(f"{self.__name__}.{name}"))
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise UnknownName(
            f"{self.__name__}.{name} is not part of the emulated NPU, and not a function of the "
            "version that it emulates. `afd-testkit emulate --list` shows what there is."
        )

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__dict__["_afd_known"]} - {"_afd_known"})
