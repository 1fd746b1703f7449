"""Custom operators as values: declared once, registered whole or not at all.

A registration lives as long as its ``torch.library.Library`` does.  Production keeps one for the
life of the process; tests register the same definition into a library that they take down again.

What torch gives out for an operator (the overload, its packet, compiled code) points to the
registration without holding it: called after that has been taken down, it crashes the process,
and so does torch's own.  Ask :attr:`OpDefinition.overload` at each call, and do not keep it.
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
# torch's names for the devices whose kernels count as such; a fake is no kernel of a device.
DEVICE_KEYS = ("CPU", "CUDA", "XPU", "HPU", "MPS", "PrivateUse1")


@dataclass(frozen=True)
class OpDefinition:
    """An operator ``namespace::name`` with its kernel.

    ``kernel``: alike for every device; its annotations give the schema.  ``mutates``: names of the
    arguments that it writes.  ``fake``: same signature; checks and allocates, computes nothing.
    Raises :class:`RoutingOpError` for what torch would take for another name, or for none.
    """

    namespace: str
    name: str
    kernel: Kernel
    mutates: tuple[str, ...]
    fake: Kernel

    def __post_init__(self) -> None:
        if not (self.namespace.isidentifier() and self.name.isidentifier()):
            raise RoutingOpError(
                f"an operator cannot be called {self.qualified_name!r}; namespace and name must be "
                "identifiers, without an overload's name behind a dot. Give two such names."
            )

    @property
    def qualified_name(self) -> str:
        """``namespace::name``."""
        return f"{self.namespace}::{self.name}"

    @property
    def schema(self) -> str:
        """What to define, e.g. ``vllm::f(Tensor(a0!) x, float y=2.0) -> ()``.

        As torch infers it; a default is printed otherwise once it is registered (``y=2.``).
        """
        return f"{self.qualified_name}{infer_schema(self.kernel, mutates_args=self.mutates)}"

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The registered operator, to be called now: it must not outlive the registration.

        Raises :class:`RoutingOpError` where there is none.
        """
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

    def check_registered(self, dispatch_key: str | None = None) -> None:
        """Raises :class:`RoutingOpError` unless this very schema, a kernel and a fake are there.

        ``dispatch_key``: torch's name of the device that must have a kernel, for example ``CPU``
        or ``PrivateUse1``; if not given, some device must.  Which Python functions they are cannot
        be asked.
        """
        name = self.qualified_name
        found = str(self.overload._schema)
        declared = str(torch._C.parse_schema(self.schema))
        if found != declared:
            raise RoutingOpError(
                f"{name} is registered in this process as {found}, but this package declares "
                f"{declared}. Two versions of it are loaded; keep one."
            )
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            raise RoutingOpError(
                f"{name} is registered in this process without a fake kernel, and cannot be "
                "compiled. Register the fake of its definition too."
            )
        has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        devices = [key for key in DEVICE_KEYS if has(name, key)]
        if not (has(name, dispatch_key) if dispatch_key else devices):
            raise RoutingOpError(
                f"{name} is registered in this process with kernels for "
                f"{', '.join(devices) or 'no device'}, and cannot be called on "
                f"{dispatch_key or 'any'}. Register the kernel of its definition for it too."
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


def register(
    definition: OpDefinition, registrar: Registrar = with_torch, dispatch_key: str | None = None
) -> Library:
    """Register ``definition`` in a new library, which the caller keeps alive.

    Complete or raising: where any part fails, or the registrar leaves out the schema, the fake or
    the kernel (of ``dispatch_key``, see :meth:`OpDefinition.check_registered`), the whole is taken
    down again and the error surfaces as it was raised.
    """
    library = Library(definition.namespace, "FRAGMENT")
    try:
        registrar(definition, library)
        definition.check_registered(dispatch_key)
    except BaseException:
        take_down(library)
        raise
    return library
