"""The operators as ``torch.ops``, and where other people's registrations go.

vLLM-Ascend registers its Python operators for the dispatch key ``PrivateUse1``, which is where
the device's tensors would arrive.  The emulated tensors arrive at ``CPU``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.library import Library

from afd_testkit.npu import operators, stubs
from afd_testkit.npu.operators import NAMESPACES
from afd_testkit.npu.patches import PatchSet
from afd_testkit.npu.redirect import Scope, inside

DEVICE_KEY = "PrivateUse1"
HOST_KEY = "CPU"
#: vLLM-Ascend registers meta kernels for operators of its compiled extension, so all exist.
COMPILED = "_C_ascend"


def install(patches: PatchSet, scope: Scope) -> None:
    """Send device registrations to the host, and define every operator that has a schema.

    ``scope``: what holds inside the bodies of operators that others register.
    """
    _redirect_registrations(patches, scope)
    libraries = {prefix: Library(namespace, "FRAGMENT") for prefix, namespace in NAMESPACES.items()}
    for library in libraries.values():
        patches.later(library._destroy)
    table = operators.load()
    for operator in table.values():
        prefix = operator.name.rpartition(".")[0]
        _define(libraries[prefix], operator.schema, operator.function)
    for prefix, listed in (("torch_npu", "torch_npu.schemas"), (COMPILED, COMPILED)):
        for schema in stubs.known_lines(listed):
            name = f"{prefix}.{schema.partition('(')[0]}"
            # A reference stands alone: torch would try its overloads where its arguments fail.
            if name not in table and name.rpartition(".")[0] not in table:
                _define(libraries[prefix], schema, operators.refused(name))


def _define(library: Library, schema: str, function: Callable[..., Any]) -> None:
    library.define(schema)
    # Every key: a reference is plain PyTorch and runs wherever its tensors are, meta included.
    library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def _redirect_registrations(patches: PatchSet, scope: Scope) -> None:
    original = Library.impl

    def is_custom(function: Any) -> bool:
        # The one wrapper in which torch calls the bodies of every torch.library.custom_op.
        return str(function.__module__) == "torch._library.custom_ops"

    @functools.wraps(original)
    def impl(
        self: Library, op_name: Any, fn: Any, dispatch_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        # torch registers some operators of its own for every device, the host among them.
        if dispatch_key == DEVICE_KEY and not str(fn.__module__).startswith("torch."):
            return original(self, op_name, inside(scope, fn), HOST_KEY, *args, **kwargs)
        if callable(fn) and is_custom(fn):
            fn = inside(scope, fn)
        return original(self, op_name, fn, dispatch_key, *args, **kwargs)

    patches.attribute(Library, "impl", impl)
