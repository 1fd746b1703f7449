"""Whether an operator does what its registration says: to eager code, tracers and compilers.

An operator whose schema leaves out a mutation is right in eager code and wrong in compiled code,
which drops a call whose effect it does not know of.  So each declared case is run in every way
that serving uses, and compared with the eager run, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from afd_plugin.ops import OpDefinition
from afd_testkit.bits import difference
from afd_testkit.op_case import Arguments, OpCase, check_arguments, load
from afd_testkit.op_compiling import compiling

BACKENDS = ("aot_eager", "inductor")

#: All that torch.library.opcheck has.
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


class OpContractBroken(AssertionError):
    """An operator does not do in all ways what its registration says."""


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
    cases: Iterable[OpCase],
    backends: Sequence[str] = BACKENDS,
    opchecks: Sequence[str] = OPCHECKS,
) -> None:
    """Raise :class:`OpContractBroken` unless ``op`` keeps its contract in each of ``cases``.

    Checked are ``opchecks`` of torch.library.opcheck; the Meta kernel's outputs (shape, dtype,
    strides) against real ones; and eager against compiled by each of ``backends`` as one graph
    with dynamic shapes, on arguments of the graph and on tensors made inside it, results and
    written arguments alike; in eager and in compiled code, two inputs in a row in the same
    storage (see :class:`OpCase`).  Of each argument that the schema says is written, some case
    must change a bit, and of the others none may.  Equal is what is equal to the bit.

    Compiled code of this process is forgotten.  Raises ``ValueError`` for no cases, for two of one
    name, or for one whose second input the operator does not take; ``TypeError`` for an argument
    that cannot be compared.
    """
    cases = tuple(cases)
    names = [case.name for case in cases]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"cases named {names}; give one or more, each with a name of its own")
    overload = op.overload if isinstance(op, OpDefinition) else op

    def eager(*args: Any, **kwargs: Any) -> tuple[Any]:
        return (overload(*args, **kwargs),)

    for case in cases:
        check_arguments(overload, case)
    findings = _writes(overload, cases)
    for case in cases:
        findings += _reused_buffers(eager, eager, case, "eager")
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


def _writes(op: torch._ops.OpOverload, cases: Sequence[OpCase]) -> list[_Finding]:
    """Arguments that are declared as written and that no case changes, and the other way round."""
    declared = {
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    names = [argument.name for argument in op._schema.arguments]
    seen: set[str] = set()
    findings = []
    for case in cases:
        args, kwargs = case.copied()
        op(*args, **kwargs)
        given = dict(zip(names, case.args, strict=False)) | dict(case.kwargs)
        for name, after in (dict(zip(names, args, strict=False)) | kwargs).items():
            if told := difference(after, given[name]):
                seen.add(name)
                if name not in declared:
                    check = f"argument {name}, not declared as written"
                    findings.append(_Finding(case.name, check, told, "not a bit changes"))
    return findings + [
        _Finding("(all)", f"written argument {name}", "no case changes it", "a case that does")
        for name in names
        if name in declared - seen
    ]


def _reused_buffers(
    plain: Callable[..., Any], call: Callable[..., Any], case: OpCase, check: str
) -> list[_Finding]:
    """Two inputs in a row in the same storage, as a captured graph is replayed over its buffers.

    What the second call gives is what ``plain`` gives for its input in storage of its own; and
    what the operator gave first, which stands in the first two places, stays.  Tensors made inside
    may not: inductor lets a clone that ends up like an argument share the argument's storage.
    """
    buffers, second, fresh = case.copied(), case.second(), case.second()
    try:
        expected = (_call(plain, fresh), fresh)
    except Exception as error:
        raise ValueError(
            f"case {case.name!r} cannot be called a second time with other values in its buffers: "
            f"{type(error).__name__}: {error}. Give it `then`, arguments that the operator takes"
        ) from error
    first = _call(call, buffers)[:2]
    kept = tree_map_only(torch.Tensor, _on_its_own, first)
    load(buffers, second)
    actual = (_call(call, buffers), buffers)
    findings = []
    if told := difference(actual, expected):
        what = f"{check}, second input in the same buffers (result, arguments)"
        findings.append(_Finding(case.name, what, f"{actual}\n{told}", str(expected)))
    if told := difference(first, kept):
        what = f"{check}, result for the first input after the second call"
        findings.append(_Finding(case.name, what, f"{first}\n{told}", str(kept)))
    return findings


def _call(function: Callable[..., Any], arguments: Arguments) -> Any:
    args, kwargs = arguments
    return function(*args, **kwargs)


def _on_its_own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


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
            if told := difference(a, b):
                findings.append(_Finding(case.name, f"{check}, {what}", f"{a}\n{told}", str(b)))
        findings += _reused_buffers(on_arguments_and_on_made_tensors, compiled, case, check)
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


def _indented(text: str, by: str = "    ") -> str:
    return text.strip().replace("\n", f"\n{by}  ")
