"""Closed stand-ins for the modules of the Ascend stack.

A module answers for what is emulated.  A function that the real module has and that is not
emulated exists too, so that code which only looks for it goes on, and raises when it is called.
Anything else is :class:`~afd_testkit.npu.errors.UnknownName` at once: nothing agrees to
whatever it is asked.
"""

from __future__ import annotations

import importlib.machinery
import importlib.resources
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
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
    """Names of functions that the real ``module`` has, without overloads."""
    names = (line.partition("(")[0] for line in known_lines(module))
    return frozenset(name for name in names if "." not in name)


def with_overloads(module: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as ``module.name``, with the overloads that the real one has as attributes.

    ``default`` is the function itself; any other is known and refused.
    """
    listed = (line.partition("(")[0].split(".") for line in known_lines(module))
    overloads = [parts[1] for parts in listed if len(parts) == 2 and parts[0] == name]
    if not overloads:
        return function

    @wraps(function)
    def packet(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    for overload in overloads:
        setattr(packet, overload, operators.refused(f"{module}.{name}.{overload}"))
    packet.default = function  # type: ignore[attr-defined]
    return packet


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
        self.__dict__["_afd_contents"] = frozenset(contents)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_afd_known"]:
            # Kept, so that the name is one object: classes are compared by identity.
            refused = operators.refused(f"{self.__name__}.{name}")
            return self.__dict__.setdefault(name, refused)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise UnknownName(
            f"{self.__name__}.{name} is not part of the emulated NPU, and not among the functions "
            "that it knows of the version that it emulates; a submodule of the real one may bear "
            "that name. `afd-testkit emulate --list` shows what there is."
        )

    def refused_names(self) -> list[str]:
        """The known names that nothing here answers for."""
        contents = self.__dict__["_afd_contents"]
        return sorted(self.__dict__["_afd_known"] - contents)

    def __dir__(self) -> list[str]:
        own = {"_afd_known", "_afd_contents"}
        return sorted({*self.__dict__, *self.__dict__["_afd_known"]} - own)
