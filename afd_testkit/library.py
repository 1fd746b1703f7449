"""Operators for the length of a test, by the definition that production registers.

:func:`op_scope` (the fixture ``op_library``) registers and takes down again;
``op_contract`` says whether what is registered keeps its promises.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.library import Library

from afd_plugin.errors import RoutingOpError
from afd_plugin.ops import OpDefinition, Registrar, register, take_down, with_torch
from afd_testkit.op_contract import (
    OPCHECKS,
    OpCase,
    OpContractBroken,
    assert_op_contract,
    compiling,
)

__all__ = [
    "OPCHECKS",
    "OpCase",
    "OpContractBroken",
    "OpLibrary",
    "assert_op_contract",
    "compiling",
    "op_scope",
]


@dataclass
class _Shared:
    """An operator that scopes of this process hold; the last of them takes it down."""

    definition: OpDefinition
    library: Library
    holders: int = 0


_shared: dict[str, _Shared] = {}


class OpLibrary:
    """The operators of one scope; their registrations live as long as it does."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def register(
        self, definition: OpDefinition, registrar: Registrar = with_torch
    ) -> torch._ops.OpOverload:
        """The operator of ``definition``, there until the scope ends at least.

        One that the process has already, from an outer scope or for good, is used and left as it
        is; ``registrar`` is then not called.  Raises :class:`RoutingOpError` if that one differs,
        and whatever keeps the registration from being complete, as it was raised.
        """
        name = definition.qualified_name
        shared = _shared.get(name)
        if shared is None and not definition.is_registered:
            shared = _shared[name] = _Shared(definition, register(definition, registrar))
        definition.check_registered()
        if shared is None:  # for good, by someone who keeps it
            return definition.overload
        if shared.definition != definition:
            raise RoutingOpError(
                f"{name} is registered by another scope with {_kernels(shared.definition)}; it "
                f"cannot also have {_kernels(definition)}. Use one definition, or another name."
            )
        if name not in self._held:
            self._held.append(name)
            shared.holders += 1
        return definition.overload

    def close(self) -> None:
        """Let go of all; those that no other scope holds are taken down, the last one first."""
        while self._held:
            name = self._held.pop()
            shared = _shared[name]
            shared.holders -= 1
            if shared.holders == 0:
                del _shared[name]
                _forget_compiled()
                take_down(shared.library)


def _kernels(definition: OpDefinition) -> str:
    kernel, fake = definition.kernel, definition.fake
    return f"kernel {kernel.__module__}.{kernel.__qualname__} and fake {fake.__qualname__}"


def _forget_compiled() -> None:
    """Compiled code keeps the operator's handle, which must not be called once it is gone."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@contextmanager
def op_scope() -> Generator[OpLibrary, None, None]:
    """An :class:`OpLibrary` that is closed at the end; scopes may be nested and repeated.

    Code that was compiled meanwhile is forgotten with the operators, and compiled anew when called.
    """
    library = OpLibrary()
    try:
        yield library
    finally:
        library.close()
