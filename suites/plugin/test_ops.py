"""Operators as values: the schema comes from the kernel, registration is whole or not at all."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.library import Library

from afd_plugin.errors import RoutingOpError
from afd_plugin.ops import OpDefinition, Registrar, register, take_down, with_torch

pytestmark = pytest.mark.cpu


def add_(out: torch.Tensor, x: torch.Tensor, times: int) -> None:
    out.add_(x * times)


def fake_add_(out: torch.Tensor, x: torch.Tensor, times: int) -> None:
    if out.shape != x.shape:
        raise ValueError(f"{list(out.shape)} is not {list(x.shape)}")


ADD = OpDefinition("afd_ops_test", "add_", add_, ("out",), fake_add_)
NAME = "afd_ops_test::add_"


def is_gone(definition: OpDefinition) -> bool:
    """As torch sees it: no schema, no packet, no name in its list."""
    namespace = getattr(torch.ops, definition.namespace)
    return (
        not hasattr(namespace, definition.name)
        and definition.qualified_name not in torch.library._defs
        and not torch._C._jit_get_schemas_for_operator(definition.qualified_name)
    )


@pytest.fixture
def added() -> Iterator[Library]:
    library = register(ADD)
    yield library
    take_down(library)


def test_the_schema_says_what_is_written() -> None:
    assert ADD.qualified_name == NAME
    assert ADD.schema == f"{NAME}(Tensor(a0!) out, Tensor x, SymInt times) -> ()"
    assert replace(ADD, mutates=()).schema == f"{NAME}(Tensor out, Tensor x, SymInt times) -> ()"


@pytest.mark.parametrize(
    ("namespace", "name"),
    [("", "f"), ("ns", ""), ("ns", "f.out"), ("ns::more", "f"), ("ns", "a b")],
)
def test_names_that_torch_would_take_for_others(namespace: str, name: str) -> None:
    with pytest.raises(RoutingOpError, match=f"cannot be called '{namespace}::{name}'"):
        replace(ADD, namespace=namespace, name=name)


@pytest.mark.usefixtures("added")
def test_registered_it_runs_on_real_and_on_meta_tensors() -> None:
    out, x = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    assert ADD.overload(out, x, 2) is None
    assert out.tolist() == [3.0, 5.0, 7.0]
    assert str(ADD.overload._schema) == ADD.schema
    ADD.check_registered()
    on_meta = torch.empty(2, device="meta")
    ADD.overload(on_meta, on_meta, 1)
    with pytest.raises(ValueError, match=r"\[2\] is not \[3\]"):  # the definition's own fake
        ADD.overload(on_meta, torch.empty(3, device="meta"), 1)


def test_before_and_after_there_is_none_and_the_error_says_what_to_do() -> None:
    for _ in range(2):
        assert not ADD.is_registered
        with pytest.raises(RoutingOpError, match=f"{NAME} is not registered.*Register it first"):
            _ = ADD.overload
        with pytest.raises(RoutingOpError, match="is not registered"):
            ADD.check_registered()
        library = register(ADD)
        assert ADD.is_registered
        assert torch.ops.afd_ops_test.add_.default is ADD.overload  # torch now caches the packet
        take_down(library)
        assert is_gone(ADD)


def test_it_lives_as_long_as_its_library() -> None:
    """Case J3: a registration kept in a local variable of a function that has returned."""

    def registers() -> None:
        library = register(ADD)
        assert ADD.is_registered
        del library

    registers()
    gc.collect()
    assert is_gone(ADD)


def test_a_second_registration_is_refused_and_the_first_stays(added: Library) -> None:
    with pytest.raises(RuntimeError, match="add_"):
        register(ADD)
    out = torch.zeros(1)
    ADD.overload(out, torch.ones(1), 5)
    assert out.item() == 5
    ADD.check_registered()


def test_a_differing_schema_is_named(added: Library) -> None:
    other = replace(ADD, mutates=())
    with pytest.raises(RoutingOpError) as caught:
        other.check_registered()
    assert f"as {ADD.schema}, but this package declares {other.schema}." in str(caught.value)


def scale_(
    x: torch.Tensor,
    by: float = 2.0,
    eps: float = 1e-5,
    bias: float | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - it is never called for
    mode: str = "sum",
) -> None:
    x.mul_(by)


def twice_(x: torch.Tensor, by: float = 2.0) -> None:
    x.mul_(by)


def thrice_(x: torch.Tensor, by: float = 3.0) -> None:
    x.mul_(by)


def fake_scale_(x: torch.Tensor, *options: object) -> None:
    pass


def test_defaults_may_be_printed_otherwise_than_they_are_declared() -> None:
    """2.0 as ``2.``, 1e-05 with 17 digits, a device without its quotes."""
    definition = OpDefinition("afd_ops_test", "scale_", scale_, ("x",), fake_scale_)
    library = register(definition)
    definition.check_registered("CPU")
    assert str(definition.overload._schema) != definition.schema
    x = torch.ones(2)
    definition.overload(x)
    assert x.tolist() == [2.0, 2.0]
    take_down(library)


def test_another_default_is_another_version() -> None:
    definition = OpDefinition("afd_ops_test", "scale_", twice_, ("x",), fake_scale_)
    library = register(definition)
    with pytest.raises(RoutingOpError, match=r"by=2\.\).*declares .*by=3\.\)"):
        replace(definition, kernel=thrice_).check_registered()
    take_down(library)


# --- complete or raising ----------------------------------------------------------------------


class Broken(Exception):
    """What a registrar of these tests raises."""


def fails_at_once(definition: OpDefinition, library: Library) -> None:
    raise Broken("at once")


def fails_after_the_schema(definition: OpDefinition, library: Library) -> None:
    library.define(definition.schema.removeprefix(f"{definition.namespace}::"))
    raise Broken("half-way")


def fails_when_all_is_done(definition: OpDefinition, library: Library) -> None:
    with_torch(definition, library)
    getattr(torch.ops, definition.namespace).add_  # noqa: B018 - torch caches the packet
    raise Broken("at the end")


def is_interrupted(definition: OpDefinition, library: Library) -> None:
    with_torch(definition, library)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("registrar", "error"),
    [
        (fails_at_once, Broken),
        (fails_after_the_schema, Broken),
        (fails_when_all_is_done, Broken),
        (is_interrupted, KeyboardInterrupt),
    ],
)
def test_a_failure_surfaces_as_itself_and_nothing_is_left(
    registrar: Registrar, error: type[BaseException]
) -> None:
    with pytest.raises(error) as caught:
        register(ADD, registrar)
    assert type(caught.value) is error
    assert is_gone(ADD)  # while the error, and with it the library, is still looked at
    again = register(ADD)
    del caught
    gc.collect()  # the end of the failed library takes nothing from the new one
    assert NAME in torch.library._defs
    out = torch.zeros(1)
    ADD.overload(out, torch.ones(1), 1)
    assert out.item() == 1
    take_down(again)


def does_nothing(definition: OpDefinition, library: Library) -> None:
    pass


def forgets_the_fake(definition: OpDefinition, library: Library) -> None:
    library.define(definition.schema.removeprefix(f"{definition.namespace}::"))
    library.impl(definition.name, definition.kernel, "CPU")


def forgets_the_kernel(definition: OpDefinition, library: Library) -> None:
    library.define(definition.schema.removeprefix(f"{definition.namespace}::"))
    torch.library.register_fake(definition.qualified_name, definition.fake, lib=library)


def declares_no_mutation(definition: OpDefinition, library: Library) -> None:
    with_torch(replace(definition, mutates=()), library)


@pytest.mark.parametrize(
    ("registrar", "said"),
    [
        (does_nothing, "is not registered in this process"),
        (forgets_the_fake, "without a fake kernel, and cannot be compiled"),
        (forgets_the_kernel, "with kernels for no device, and cannot be called on any"),
        (declares_no_mutation, r"as afd_ops_test::add_\(Tensor out, .*but this package declares"),
    ],
)
def test_a_registrar_that_leaves_something_out(registrar: Registrar, said: str) -> None:
    with pytest.raises(RoutingOpError, match=said):
        register(ADD, registrar)
    assert is_gone(ADD)


def only_for_the_cpu(definition: OpDefinition, library: Library) -> None:
    forgets_the_kernel(definition, library)
    library.impl(definition.name, definition.kernel, "CPU")


def test_the_device_that_is_asked_for_must_have_the_kernel() -> None:
    said = "with kernels for CPU, and cannot be called on PrivateUse1. Register the kernel of"
    with pytest.raises(RoutingOpError, match=said):
        register(ADD, only_for_the_cpu, "PrivateUse1")
    assert is_gone(ADD)
    library = register(ADD, only_for_the_cpu, "CPU")
    ADD.check_registered()
    with pytest.raises(RoutingOpError, match=said):
        ADD.check_registered("PrivateUse1")
    take_down(library)
    library = register(ADD, with_torch, "PrivateUse1")  # alike for every device
    ADD.check_registered("CPU")
    take_down(library)


def test_a_namespace_that_torch_keeps_to_itself() -> None:
    with pytest.raises(ValueError, match="prim is a reserved namespace"):
        register(replace(ADD, namespace="prim"))


def test_signatures_of_the_dead_are_forgotten() -> None:
    """torch.fx would bind the arguments of an operator of the same name to the old parameters."""
    from torch.fx.operator_schemas import get_signature_for_torch_op

    def one(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    first = register(ADD)
    assert [list(s.parameters) for s in get_signature_for_torch_op(ADD.overload)] == [
        ["out", "x", "times"]
    ]
    take_down(first)
    other = replace(ADD, kernel=one, fake=one, mutates=())
    second = register(other)
    assert [list(s.parameters) for s in get_signature_for_torch_op(other.overload)] == [["x"]]
    take_down(second)
