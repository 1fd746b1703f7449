"""Custom operators as values: declared once, registered whole or not at all.

A registration lives as long as its ``torch.library.Library`` does.  Production keeps one for the
life of the process; tests register the same definition into a library that they take down again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE
from torch.library import Library, infer_schema

from afd_plugin.errors import RoutingOpError

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class OpDefinition:
    """An operator ``namespace::name`` with its kernel for every device.

    ``kernel``: its annotations give the schema.  ``mutates``: names of the arguments that it
    writes.  ``fake``: same signature; checks and allocates, computes nothing.
    """

    namespace: str
    name: str
    kernel: Kernel
    mutates: tuple[str, ...]
    fake: Kernel

    @property
    def qualified_name(self) -> str:
        """``namespace::name``."""
        return f"{self.namespace}::{self.name}"

    @property
    def schema(self) -> str:
        """The schema as torch prints it, e.g. ``vllm::f(Tensor(a0!) x, int n) -> ()``."""
        return f"{self.qualified_name}{infer_schema(self.kernel, mutates_args=self.mutates)}"

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The registered operator.  Raises :class:`RoutingOpError` where there is none."""
        if not self.is_registered:
            raise RoutingOpError(
                f"the operator {self.qualified_name} is not registered in this process. Register "
                "it first; for the routing operator the AFD worker does so when it starts, and "
                "elsewhere one call of afd_plugin.routing.register_routing_op()."
            )
        packet: torch._ops.OpOverloadPacket = getattr(getattr(torch.ops, self.namespace), self.name)
        return packet.default

    @property
    def is_registered(self) -> bool:
        """Whether some library of this process defines an operator of this name."""
        return bool(torch._C._dispatch_has_kernel(self.qualified_name)) or any(
            schema.name == self.qualified_name
            for schema in torch._C._jit_get_schemas_for_operator(self.qualified_name)
        )

    def check_registered(self) -> None:
        """Raises :class:`RoutingOpError` unless this very schema and a fake kernel are there."""
        found = str(self.overload._schema)
        if found != self.schema:
            raise RoutingOpError(
                f"{self.qualified_name} is registered in this process as {found}, but this package "
                f"declares {self.schema}. Two versions of it are loaded; keep one."
            )
        if not torch._C._dispatch_has_kernel_for_dispatch_key(self.qualified_name, "Meta"):
            raise RoutingOpError(
                f"{self.qualified_name} is registered in this process without a fake kernel, and "
                "cannot be compiled. Register the fake of its definition too."
            )


class Registrar(Protocol):
    """Defines an operator in ``library``; vLLM's own way of doing so, or torch's."""

    def __call__(self, definition: OpDefinition, library: Library) -> None: ...


def with_torch(definition: OpDefinition, library: Library) -> None:
    """Register with torch.library, for every device."""
    library.define(definition.schema.removeprefix(f"{definition.namespace}::"))
    library.impl(definition.name, definition.kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(definition.qualified_name, definition.fake, lib=library)


def take_down(library: Library) -> None:
    """Remove every operator that ``library`` defines, and all that torch remembers of them.

    torch's own ``_destroy`` leaves the names in its list and the signatures in its cache until
    the object is collected, and then drops those of whoever has defined them again meanwhile.
    An error that is looked at keeps the object alive.
    """
    names = frozenset(library._op_defs)
    library._destroy()
    for name in names:
        base, _, overload = name.partition(".")
        _SCHEMA_TO_SIGNATURE_CACHE.pop((base, overload), None)
    torch.library._defs.difference_update(names)
    library._op_defs.clear()
    library._op_impls.clear()


def register(definition: OpDefinition, registrar: Registrar = with_torch) -> Library:
    """Register ``definition`` in a new library, which the caller keeps alive.

    Complete or raising: where any part fails, or the registrar leaves out the schema or the fake,
    the whole is taken down again and the error surfaces as it was raised.
    """
    library = Library(definition.namespace, "FRAGMENT")
    try:
        registrar(definition, library)
        definition.check_registered()
    except BaseException:
        take_down(library)
        raise
    return library
