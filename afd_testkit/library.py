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

from afd_plugin import routing
from afd_plugin.errors import RoutingOpError
from afd_plugin.ops import OpDefinition, Registrar, register, take_down, with_torch
from afd_testkit.op_case import OpCase
from afd_testkit.op_compiling import compiling
from afd_testkit.op_contract import OPCHECKS, OpContractBroken, assert_op_contract

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
        self._closed = False

    def register(
        self, definition: OpDefinition, registrar: Registrar = with_torch
    ) -> torch._ops.OpOverload:
        """The operator of ``definition``, there until the scope ends at least.

        One that the process has already, from an outer scope or for good, is used and left as it
        is; ``registrar`` is then not called.  Raises :class:`RoutingOpError` if that one differs,
        if the scope has ended, or if ``registrar`` defines the operator in another library than
        the one that it is given; and whatever keeps the registration from being complete, as it was
        raised.
        """
        name = definition.qualified_name
        if self._closed:
            raise RoutingOpError(
                f"{name} cannot be registered in a scope that has ended, since nobody would take "
                "it down again. Register inside the scope, or open another one."
            )
        shared = _shared.get(name)
        if shared is None and not definition.is_registered:
            shared = _shared[name] = _Shared(definition, _registered(definition, registrar))
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
        """Let go of all; those that no other scope holds are taken down, the last one first.

        Raises :class:`RoutingOpError` for one of which a part stays, in a library of its
        registrar's own.
        """
        self._closed = True
        left = []
        while self._held:
            name = self._held.pop()
            shared = _shared[name]
            shared.holders -= 1
            if shared.holders == 0:
                del _shared[name]
                _forget_compiled()
                take_down(shared.library)
                left += [name] if shared.definition.is_registered else []
        if left:
            raise RoutingOpError(
                f"{', '.join(left)}: a part is still registered though the scope has ended, in a "
                "library of the registrar's own. Use the library that the registrar is given for "
                "all parts."
            )


def _registered(definition: OpDefinition, registrar: Registrar) -> Library:
    """The library that holds the operator, which must be the one that the registrar was given."""
    library = register(definition, registrar)
    if definition.qualified_name not in library._op_defs:
        take_down(library)
        raise RoutingOpError(
            f"the registrar of {definition.qualified_name} defined it in a library of its own, "
            "which the end of the scope cannot take down. Define it in the library that the "
            "registrar is given; this definition stays until its own library goes."
        )
    return library


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
    A runtime that was bound to the routing operator meanwhile goes with the operator.
    """
    library = OpLibrary()
    runtime = routing._process.runtime
    try:
        yield library
    finally:
        try:
            library.close()
        finally:
            if not routing.ROUTING_OP.is_registered:
                routing._process.runtime = runtime
