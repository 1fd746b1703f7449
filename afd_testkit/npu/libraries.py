"""The operators as ``torch.ops``, and where other people's registrations go.

vLLM-Ascend registers its Python operators for the dispatch key ``PrivateUse1``, which is where
the device's tensors would arrive.  The emulated tensors arrive at ``CPU``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.library import Library
from torch.overrides import TorchFunctionMode

from afd_testkit.npu import operators, stubs
from afd_testkit.npu.operators import NAMESPACES, Operator
from afd_testkit.npu.patches import PatchSet
from afd_testkit.npu.redirect import inside

DEVICE_KEY = "PrivateUse1"
HOST_KEY = "CPU"
#: Has no schemas of its own here: vLLM-Ascend defines and implements the rest of it itself.
COMPILED = "_C_ascend"


def install(patches: PatchSet, mode: TorchFunctionMode) -> None:
    """Send device registrations to the host, and define every reference operator."""
    _redirect_registrations(patches, mode)
    libraries: dict[str, Library] = {}
    for operator in operators.load().values():
        namespace = NAMESPACES[operator.name.rpartition(".")[0]]
        if namespace not in libraries:
            libraries[namespace] = Library(namespace, "FRAGMENT")
            patches.later(libraries[namespace]._destroy)
        _define(libraries[namespace], operator)


def _define(library: Library, operator: Operator) -> None:
    library.define(operator.schema)
    # Every key: a reference is plain PyTorch and runs wherever its tensors are, meta included.
    library.impl(operator.schema.partition("(")[0], operator.function, "CompositeExplicitAutograd")


def _redirect_registrations(patches: PatchSet, mode: TorchFunctionMode) -> None:
    original = Library.impl

    @functools.wraps(original)
    def impl(
        self: Library, op_name: Any, fn: Any, dispatch_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        if dispatch_key == DEVICE_KEY:
            return original(self, op_name, inside(mode, fn), HOST_KEY, *args, **kwargs)
        return original(self, op_name, fn, dispatch_key, *args, **kwargs)

    patches.attribute(Library, "impl", impl)


def compiled_names() -> frozenset[str]:
    """Operators that vLLM-Ascend's compiled extension has."""
    return stubs.known_names(COMPILED)


def has_operator(namespace: str, name: str) -> bool:
    """Whether ``torch.ops`` knows ``namespace::name`` now."""
    return f"{namespace}::{name}" in torch._C._dispatch_get_all_op_names()
