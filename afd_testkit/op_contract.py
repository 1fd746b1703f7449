"""Whether an operator does what its registration says: to eager code, tracers and compilers.

An operator whose schema leaves out a mutation is right in eager code and wrong in compiled code,
which drops a call whose effect it does not know of.  So each declared case is run in every way
that serving uses, and compared with the eager run, bit for bit.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from afd_plugin.ops import OpDefinition

BACKENDS = ("aot_eager", "inductor")

#: All that torch.library.opcheck has.
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)

#: What inductor leaves in the process, by how its names begin: its folder and a pointer that its
#: kernels read when they are loaded; the code that it generated.
_VARIABLES = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_")
_MODULES = ("torch._inductor.runtime.compile_tasks.",)


class OpContractBroken(AssertionError):
    """An operator does not do in all ways what its registration says."""


@dataclass(frozen=True)
class OpCase:
    """One call: ``args`` and ``kwargs`` of the operator, under a ``name`` for messages.

    Every run gets deep copies, with the same strides and shared storage; these stay as they are.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def copied(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments that a run may write to."""
        return copy.deepcopy((self.args, dict(self.kwargs)))


@dataclass(frozen=True)
class _Finding:
    case: str
    check: str
    actual: str
    expected: str

    def __str__(self) -> str:
        return (
            f"case {self.case!r}, check {self.check}:\n"
            f"    actual:   {_indented(self.actual)}\n"
            f"    expected: {_indented(self.expected)}"
        )


def assert_op_contract(
    op: OpDefinition | torch._ops.OpOverload,
    cases: Sequence[OpCase],
    backends: Sequence[str] = BACKENDS,
    opchecks: Sequence[str] = OPCHECKS,
) -> None:
    """Raise :class:`OpContractBroken` unless ``op`` keeps its contract in each of ``cases``.

    Checked are ``opchecks`` of torch.library.opcheck; the Meta kernel's outputs (shape, dtype,
    strides) against real ones; and eager against compiled by each of ``backends`` as one graph
    with dynamic shapes, on arguments of the graph and on tensors made inside it, results and
    written arguments alike.  Of each argument that the schema says is written, some case must
    change a bit.

    Compiled code of this process is forgotten.  Raises ``ValueError`` for no cases or for two of
    one name.
    """
    names = [case.name for case in cases]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"cases named {names}; give one or more, each with a name of its own")
    overload = op.overload if isinstance(op, OpDefinition) else op
    findings = _unwritten(overload, cases)
    with compiling():
        for case in cases:
            findings += _opcheck(overload, case, opchecks)
            findings += _meta_against_real(overload, case)
        for backend in backends:
            findings += _compiled_against_eager(overload, cases, backend)
    if findings:
        text = "\n  ".join(_indented(str(finding), "  ") for finding in findings)
        raise OpContractBroken(
            f"{overload._schema} does not keep its contract, {len(findings)} finding(s):\n  {text}"
        )


def _unwritten(op: torch._ops.OpOverload, cases: Sequence[OpCase]) -> list[_Finding]:
    """Arguments that are declared as written, and that no case changes."""
    declared = {
        place: argument.name
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    for case in cases:
        args, kwargs = case.copied()
        op(*args, **kwargs)
        for place, name in list(declared.items()):
            before = case.args[place] if place < len(case.args) else case.kwargs.get(name)
            after = args[place] if place < len(args) else kwargs.get(name)
            if _difference(after, before):
                del declared[place]
    return [
        _Finding("(all)", f"written argument {name}", "no case changes it", "a case that does")
        for name in declared.values()
    ]


def _opcheck(op: torch._ops.OpOverload, case: OpCase, checks: Sequence[str]) -> list[_Finding]:
    args, kwargs = case.copied()
    results = torch.library.opcheck(
        op, args, kwargs, test_utils=tuple(checks), raise_exception=False
    )
    return [
        _Finding(case.name, f"opcheck {check}", f"{type(told).__name__}: {told}", "SUCCESS")
        for check, told in results.items()
        if told != "SUCCESS"
    ]


def _meta_against_real(op: torch._ops.OpOverload, case: OpCase) -> list[_Finding]:
    args, kwargs = case.copied()
    expected = _described((op(*args, **kwargs), args, kwargs))
    args, kwargs = tree_map_only(torch.Tensor, _on_meta, case.copied())
    try:
        actual = _described((op(*args, **kwargs), args, kwargs))
    except Exception as error:  # whatever the fake raises is what is reported
        actual = f"{type(error).__name__}: {error}"
    if actual == expected:
        return []
    return [_Finding(case.name, "Meta against real (results, arguments)", actual, expected)]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )


def _described(tree: Any) -> str:
    def describe(tensor: torch.Tensor) -> str:
        return f"{tensor.dtype}{list(tensor.shape)} strides {tensor.stride()}"

    return str(tree_map_only(torch.Tensor, describe, tree))


class _Counted:
    """A compiler that counts what it is asked to compile."""

    def __init__(self, backend: str) -> None:
        from torch._dynamo.backends.registry import lookup_backend

        self._compile: Callable[..., Any] = lookup_backend(backend)
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self._compile(graph, inputs)


def _compiled_against_eager(
    op: torch._ops.OpOverload, cases: Sequence[OpCase], backend: str
) -> list[_Finding]:
    """All cases through one compiled function, so that a graph made for one serves others."""

    def on_arguments_and_on_made_tensors(*args: Any, **kwargs: Any) -> Any:
        made = tree_map_only(torch.Tensor, torch.clone, args)
        made_named = tree_map_only(torch.Tensor, torch.clone, kwargs)
        return op(*args, **kwargs), op(*made, **made_named), made, made_named

    compiler = _Counted(backend)
    compiled = torch.compile(
        on_arguments_and_on_made_tensors, backend=compiler, fullgraph=True, dynamic=True
    )
    check = f"eager against compiled ({backend})"
    findings = []
    for case in cases:
        (args, kwargs), (given, named) = case.copied(), case.copied()
        eager = (*on_arguments_and_on_made_tensors(*given, **named), given, named)
        try:
            actual = (*compiled(*args, **kwargs), args, kwargs)
        except Exception as error:  # whatever the compiler raises is what is reported
            told = f"{type(error).__name__}: {error}"
            findings.append(_Finding(case.name, check, told, "it compiles and runs"))
            continue
        for what, a, b in zip(_PARTS, actual, eager, strict=True):
            if difference := _difference(a, b):
                findings.append(
                    _Finding(case.name, f"{check}, {what}", f"{a}\n{difference}", str(b))
                )
    if not findings and compiler.graphs == 0:
        findings.append(
            _Finding("(all)", check, "nothing was compiled", "TORCHDYNAMO_DISABLE is not set")
        )
    return findings


_PARTS = (
    "result on arguments of the graph",
    "result on tensors made inside",
    "tensors made inside, afterwards",
    "named tensors made inside, afterwards",
    "arguments afterwards",
    "named arguments afterwards",
)


def _difference(actual: Any, expected: Any) -> str:
    """Where two trees of results differ, empty if they are equal to the bit (NaN equals NaN)."""
    try:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def _indented(text: str, by: str = "    ") -> str:
    return text.strip().replace("\n", f"\n{by}  ")


@contextmanager
def compiling() -> Generator[None, None, None]:
    """Compile inside, anew and in this process, and leave neither code, settings nor patches.

    Graphs kept on disk are not used: a cached one says nothing of the operator as it is now.
    Dynamo patches ``torch.nn.Module`` when it first compiles; that too is undone.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    with warnings.catch_warnings():
        # torch's own, while it is imported for the first time.
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is", DeprecationWarning)
        import torch._inductor.compile_fx
        import torch._inductor.config as inductor
    with ExitStack() as stack:
        stack.enter_context(_attributes_kept(torch.nn.Module))
        stack.enter_context(_new_names_dropped(os.environ, _VARIABLES))
        stack.enter_context(_new_names_dropped(sys.modules, _MODULES))
        stack.enter_context(dynamo.patch(recompile_limit=256, accumulated_recompile_limit=1024))
        stack.enter_context(inductor.patch(fx_graph_cache=False, compile_threads=1))
        stack.enter_context(functorch.patch(enable_autograd_cache=False))
        stack.callback(torch._dynamo.reset)
        torch._dynamo.reset()
        yield


@contextmanager
def _attributes_kept(of: type) -> Generator[None, None, None]:
    before = dict(vars(of))
    try:
        yield
    finally:
        for name, value in dict(vars(of)).items():
            if name not in before:
                delattr(of, name)
            elif value is not before[name]:
                setattr(of, name, before[name])


@contextmanager
def _new_names_dropped(
    table: MutableMapping[str, Any], prefixes: tuple[str, ...]
) -> Iterator[None]:
    """What inductor adds to ``table`` while it generates and loads code."""
    before = set(table)
    try:
        yield
    finally:
        for name in set(table) - before:
            if name.startswith(prefixes):
                del table[name]
