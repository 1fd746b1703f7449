"""One routing operator and one runtime a process: registered once, bound to, and undone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from afd_plugin import routing
from afd_plugin.errors import RoutingOpError
from afd_plugin.ops import OpDefinition, Registrar, register, take_down, with_torch
from afd_plugin.routing import (
    ROUTING_OP,
    RoutingRuntime,
    TokenHolders,
    balance_routing_ids_,
    bound_runtime,
    profile_run,
    register_routing_op,
    script_runtime,
)
from afd_testkit.library import OpLibrary, compiling

pytestmark = pytest.mark.cpu

# Of a gate that favours the first two of eight experts, and balanced: each gets four.
NATURAL = [[0, 1]] * 16
EVEN = [4] * 8


def skewed() -> torch.Tensor:
    return torch.tensor(NATURAL, dtype=torch.int32)


def counts_of_experts(ids: torch.Tensor) -> list[int]:
    return torch.bincount(ids.flatten(), minlength=8).tolist()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the process had not registered anything; what the test registers is taken down."""
    own = routing._Process()
    monkeypatch.setattr(routing, "_process", own)
    yield
    if own.library is not None:
        take_down(own.library)


def test_without_a_runtime_it_does_not_guess(op_library: OpLibrary, process: None) -> None:
    op_library.register(ROUTING_OP)
    ids = skewed()
    for force in (False, True):
        with pytest.raises(RoutingOpError, match=r"before a runtime was bound.*script_runtime"):
            balance_routing_ids_(ids, 8, force)
    assert ids.tolist() == NATURAL


def test_without_a_registration_it_says_what_to_do() -> None:
    with pytest.raises(RoutingOpError, match=r"not registered.*register_routing_op\(\)"):
        balance_routing_ids_(skewed(), 8)


@pytest.mark.usefixtures("process")
def test_registered_once_and_again_it_does_nothing() -> None:
    made: list[str] = []

    def registrar(definition: OpDefinition, library: torch.library.Library) -> None:
        made.append(definition.qualified_name)
        with_torch(definition, library)

    register_routing_op(registrar=registrar)
    first = ROUTING_OP.overload
    for _ in range(2):
        register_routing_op(registrar=registrar)
    register_routing_op(script_runtime(), registrar)
    assert made == ["vllm::afd_balance_routing_ids_"]
    assert ROUTING_OP.overload is first
    assert str(first._schema) == (
        "vllm::afd_balance_routing_ids_(Tensor(a0!) topk_ids, SymInt num_experts, "
        "bool force_balance) -> ()"
    )
    ids = skewed()
    balance_routing_ids_(ids, 8)
    assert ids.tolist() == NATURAL


@pytest.mark.usefixtures("process")
def test_one_stack_a_process() -> None:
    stack = RoutingRuntime("forward context", lambda: True, TokenHolders)
    register_routing_op(stack)
    with pytest.raises(RoutingOpError, match=r"the forward context .*the context variable"):
        register_routing_op(script_runtime())
    register_routing_op()  # whatever is in force
    ids = skewed()
    balance_routing_ids_(ids, 8)
    assert counts_of_experts(ids) == EVEN


@pytest.mark.usefixtures("process")
def test_two_readers_of_one_name_are_two_places() -> None:
    """Else the second would be taken for the first, and its flag read or not by who came last."""
    first = RoutingRuntime("forward context", lambda: False, TokenHolders)
    register_routing_op(first)
    other = RoutingRuntime("forward context", lambda: True, TokenHolders)
    with pytest.raises(RoutingOpError, match=r"also read the forward context by another reader"):
        register_routing_op(other)
    register_routing_op(replace(first, ranks=lambda: TokenHolders(1, 2)))  # the same reader
    ids = skewed()
    balance_routing_ids_(ids, 8)
    assert ids.tolist() == NATURAL
    assert script_runtime() == script_runtime(TokenHolders(1, 2))


@pytest.mark.usefixtures("process")
def test_the_device_that_is_asked_for_must_have_the_kernel() -> None:
    def only_for_the_cpu(definition: OpDefinition, library: torch.library.Library) -> None:
        library.define(definition.schema.removeprefix("vllm::"))
        torch.library.register_fake(definition.qualified_name, definition.fake, lib=library)
        library.impl(definition.name, definition.kernel, "CPU")

    said = "with kernels for CPU, and cannot be called on PrivateUse1"
    with pytest.raises(RoutingOpError, match=said):
        register_routing_op(script_runtime(), only_for_the_cpu, "PrivateUse1")
    assert not ROUTING_OP.is_registered
    assert routing._process.runtime is None
    register_routing_op(script_runtime(), only_for_the_cpu, "CPU")
    with pytest.raises(RoutingOpError, match=said):  # of one that is there already
        register_routing_op(dispatch_key="PrivateUse1")


@pytest.mark.usefixtures("process")
def test_an_engine_after_another_brings_its_own_ranks() -> None:
    """One token with one expert, on the second rank of two that hold tokens: the next expert."""
    for holders, expected in ((TokenHolders(0, 2), 0), (TokenHolders(1, 2), 1)):
        register_routing_op(script_runtime(holders))
        ids = torch.full((1, 1), 7, dtype=torch.int32)
        balance_routing_ids_(ids, 8, force_balance=True)
        assert ids.item() == expected


@pytest.mark.usefixtures("process")
def test_a_failed_registration_can_be_done_again() -> None:
    def registrar(definition: OpDefinition, library: torch.library.Library) -> None:
        library.define(definition.schema.removeprefix("vllm::"))
        raise OSError("no such place")

    for _ in range(2):
        with pytest.raises(OSError, match="no such place"):
            register_routing_op(registrar=registrar)
        assert not ROUTING_OP.is_registered
        with pytest.raises(RoutingOpError, match="not registered"):
            balance_routing_ids_(skewed(), 8)
    register_routing_op()
    balance_routing_ids_(skewed(), 8)


@pytest.mark.usefixtures("process")
def test_another_version_of_the_operator_is_not_bound_to() -> None:
    foreign = register(replace(ROUTING_OP, mutates=()))
    with pytest.raises(RoutingOpError, match="Two versions of it are loaded"):
        register_routing_op()
    assert routing._process.runtime is None
    take_down(foreign)
    register_routing_op()


@pytest.mark.usefixtures("process")
def test_one_that_is_registered_elsewhere_is_used() -> None:
    foreign = register(ROUTING_OP)

    def registrar(definition: OpDefinition, library: torch.library.Library) -> None:
        raise AssertionError("called for an operator that is there")

    checked: Registrar = registrar
    register_routing_op(registrar=checked)
    ids = skewed()
    balance_routing_ids_(ids, 8, force_balance=True)
    assert counts_of_experts(ids) == EVEN
    take_down(foreign)


def test_a_bound_runtime_is_undone_after_an_error(process: None) -> None:
    outer = script_runtime()
    with bound_runtime(outer):
        with pytest.raises(ZeroDivisionError), bound_runtime(script_runtime()):
            1 / 0  # noqa: B018
        assert routing._process.runtime is outer
    assert routing._process.runtime is None


def test_called_from_what_is_compiled(process: None, op_library: OpLibrary) -> None:
    """The function itself, not only the operator: its own check is no code to be traced."""

    def route(logits: torch.Tensor) -> torch.Tensor:
        ids = logits.topk(2).indices
        balance_routing_ids_(ids, 8)
        return ids

    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))
    with compiling():
        op_library.register(ROUTING_OP)
        compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
        with bound_runtime(script_runtime()):
            with profile_run():
                assert compiled(logits).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
            assert torch.equal(compiled(logits), logits.topk(2).indices)
