"""The table of reference operators: name, schema, source, and the Python function.

A family module in ``ops/`` declares each of its operators with :func:`operator`.  Names are
written as callers reach them:

- ``torch_npu.NAME``: also reachable as ``torch.ops.npu.NAME``;
- ``torch_npu.atb.NAME``: also reachable as ``torch.ops.atb.NAME``;
- ``_C_ascend.NAME``: vLLM-Ascend's own compiled operators, ``torch.ops._C_ascend.NAME``.

A reference takes the arguments of its schema, under the same names and with the same defaults,
and is plain PyTorch on CPU tensors: slow is fine, surprising is not.  It says in its docstring
shapes, dtypes, layouts and where its semantics were read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from afd_testkit.npu.errors import NotEmulated, describe_call

FAMILIES = ("attention", "sparse", "cache", "norm", "rotary", "linear", "moe", "communication")
NAMESPACES = {"torch_npu": "npu", "torch_npu.atb": "atb", "_C_ascend": "_C_ascend"}

Reference = TypeVar("Reference", bound=Callable[..., Any])


@dataclass(frozen=True)
class Operator:
    """One operator that has a reference.

    ``schema``: its signature in torch's schema language, without a namespace.
    ``source``: where the semantics were read, for a reader who doubts them.
    """

    name: str
    schema: str
    source: str
    function: Callable[..., Any]

    @property
    def family(self) -> str:
        """The module in ``ops/`` that owns it."""
        return self.function.__module__.rpartition(".")[2]


_TABLE: dict[str, Operator] = {}


def operator(name: str, schema: str, *, source: str) -> Callable[[Reference], Reference]:
    """Declare the decorated function as the reference of ``name``."""

    def declare(function: Reference) -> Reference:
        if name in _TABLE and _TABLE[name].function.__qualname__ != function.__qualname__:
            raise ValueError(f"operator {name} has two references; keep one.")
        # A module that is executed twice declares its operators once.
        _TABLE.setdefault(name, Operator(name, schema, source, function))
        return function

    return declare


def load() -> Mapping[str, Operator]:
    """Every operator that has a reference, by name."""
    for family in FAMILIES:
        importlib.import_module(f"afd_testkit.npu.ops.{family}")
    return _TABLE


def refused(name: str) -> Callable[..., Any]:
    """What stands for the known ``name`` and raises when it is called.

    A function, or for a capitalized name a class, which annotations may name.
    """
    short = name.rpartition(".")[2]

    def refuse(*args: object, **kwargs: object) -> Any:
        raise NotEmulated(
            f"{describe_call(name, args, kwargs)}: {name} has no reference on the emulated NPU. "
            "To add it, write a function with its schema in afd_testkit/npu/ops/ and declare it "
            f'with @operator("{name}", ...); `afd-testkit emulate --list` shows what there is.'
        )

    if short[:1].isupper():
        return type(short, (), {"__new__": lambda cls, *args, **kwargs: refuse(*args, **kwargs)})
    refuse.__name__ = refuse.__qualname__ = short
    return refuse
