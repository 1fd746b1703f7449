"""Every reference takes the arguments of its schema: names, order, kinds and defaults."""

from __future__ import annotations

import inspect

import pytest
import torch

from afd_testkit.npu.operators import FAMILIES, NAMESPACES, load

pytestmark = pytest.mark.cpu

OPERATORS = sorted(load())


def test_every_family_has_operators() -> None:
    homes = {operator.function.__module__ for operator in load().values()}
    found = {home.rpartition(".")[2].partition("_")[0] for home in homes}
    assert found == set(FAMILIES)


@pytest.mark.parametrize("name", OPERATORS)
def test_signature_is_that_of_the_schema(name: str) -> None:
    operator = load()[name]
    schema = torch._C.parse_schema(operator.schema)
    parameters = list(inspect.signature(operator.function).parameters.values())
    assert [parameter.name for parameter in parameters] == [
        argument.name for argument in schema.arguments
    ]
    for parameter, argument in zip(parameters, schema.arguments, strict=True):
        expected = (
            inspect.Parameter.KEYWORD_ONLY
            if argument.kwarg_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        assert parameter.kind is expected, parameter.name
        if argument.has_default_value():
            # Python's own way to write an empty list as a default is an empty tuple.
            default = [] if parameter.default == () else parameter.default
            assert default == argument.default_value, parameter.name
            assert type(default) is type(argument.default_value), parameter.name
        else:
            assert parameter.default is inspect.Parameter.empty, parameter.name


@pytest.mark.parametrize("name", OPERATORS)
def test_schema_names_the_operator(name: str) -> None:
    space, _, last = name.rpartition(".")
    assert space in NAMESPACES
    assert torch._C.parse_schema(load()[name].schema).name == last


@pytest.mark.parametrize("name", OPERATORS)
def test_reference_is_documented(name: str) -> None:
    operator = load()[name]
    assert operator.source
    assert operator.function.__doc__
