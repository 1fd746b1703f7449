"""Closed modules: what they answer, refuse, and do not know."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from unittest import mock

import pytest
import torch

from afd_testkit.npu import operators, tree
from afd_testkit.npu.device import EmulatedDevices
from afd_testkit.npu.errors import NotEmulated, UnknownName
from afd_testkit.npu.settings import EmulationSettings
from afd_testkit.npu.stubs import ClosedModule, known_lines, known_names, with_overloads

pytestmark = pytest.mark.cpu

LISTS = ("torch_npu", "torch_npu.atb", "torch_npu.npu", "torch_npu.npu.memory", "_C_ascend")


def build() -> Mapping[str, ModuleType]:
    """A tree of its own, installed nowhere."""
    return tree.build(EmulatedDevices(EmulationSettings()))


@pytest.fixture
def module() -> ClosedModule:
    return ClosedModule("stack", {"answer": 42}, ("npu_thing", "Options"))


def test_contents_are_answered(module: ClosedModule) -> None:
    assert module.answer == 42


def test_an_unknown_name_raises_at_once_and_says_where(module: ClosedModule) -> None:
    with pytest.raises(UnknownName, match=r"stack\.npu_thin is not part of the emulated NPU"):
        _ = module.npu_thin
    assert not hasattr(module, "npu_thin")


def test_a_missing_dunder_is_an_ordinary_attribute_error(module: ClosedModule) -> None:
    with pytest.raises(AttributeError, match="__wrapped__") as caught:
        _ = module.__wrapped__
    assert not isinstance(caught.value, NotEmulated)
    assert inspect.unwrap(module) is module  # type: ignore[arg-type]


def test_a_known_name_exists_and_refuses_its_call(module: ClosedModule) -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    transposed = torch.zeros(4, 5, dtype=torch.int32).t()
    with pytest.raises(NotEmulated) as caught:
        module.npu_thing(tensor, [transposed, 7], mode="fast")
    text = str(caught.value)
    assert "stack.npu_thing(bfloat16[2, 3], [int32[5, 4] strides [1, 5], 7], mode='fast')" in text
    assert '@operator("stack.npu_thing", ...)' in text
    assert "afd-testkit emulate --list" in text
    assert not isinstance(caught.value, AttributeError)


def test_a_known_name_is_one_object(module: ClosedModule) -> None:
    assert module.npu_thing is module.npu_thing
    assert module.npu_thing.__name__ == "npu_thing"


def test_a_capitalized_name_is_a_class_that_refuses_its_making(module: ClosedModule) -> None:
    assert isinstance(module.Options, type)
    with pytest.raises(NotEmulated, match=r"stack\.Options\(3\)"):
        module.Options(3)


def test_names_are_listed_and_what_is_refused_among_them(module: ClosedModule) -> None:
    assert {"answer", "npu_thing", "Options"} <= set(dir(module))
    assert module.refused_names() == ["Options", "npu_thing"]
    _ = module.npu_thing  # using a name does not make it an emulated one
    assert module.refused_names() == ["Options", "npu_thing"]


def test_a_name_can_be_patched_and_comes_back(module: ClosedModule) -> None:
    before = module.npu_thing
    with mock.patch.object(module, "npu_thing", return_value=5):
        assert module.npu_thing() == 5
    assert module.npu_thing is before


def test_an_unknown_name_cannot_be_patched(module: ClosedModule) -> None:
    with pytest.raises(AttributeError), mock.patch.object(module, "nothing_of_it"):
        pass


@pytest.mark.parametrize("name", LISTS)
def test_lists_have_every_name_once_in_order(name: str) -> None:
    lines = known_lines(name)
    assert list(lines) == sorted(set(lines))
    assert known_names(name)
    assert all(part.isidentifier() for part in known_names(name))


def test_every_reference_is_a_name_of_the_real_stack() -> None:
    for name in operators.load():
        module, _, short = name.rpartition(".")
        assert short in known_names(module), name


def test_children_hang_on_their_parents() -> None:
    modules = build()
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent in modules:
            assert vars(modules[parent])[child] is module, name
    assert modules["torch.npu"] is modules["torch_npu.npu"]


def test_references_are_reached_as_their_table_names_them() -> None:
    modules = build()
    x = torch.arange(8.0).view(2, 4)
    # silu(a) * b for the halves a and b of each row, from the definition
    halves = [(row[:2], row[2:]) for row in x.tolist()]
    expected = [
        [p / (1 + 2.718281828459045**-p) * q for p, q in zip(a, b, strict=True)] for a, b in halves
    ]
    assert torch.allclose(modules["torch_npu"].npu_swiglu(x), torch.tensor(expected))


def test_no_module_is_a_mock_that_agrees_to_anything() -> None:
    for name, module in build().items():
        assert isinstance(module, ClosedModule), name
        with pytest.raises(UnknownName):
            _ = module.surely_there_is_no_such_name


def test_overloads_of_the_real_operator_exist_and_only_the_default_computes() -> None:
    attention = build()["torch_npu"].npu_fused_infer_attention_score
    reference = operators.load()["torch_npu.npu_fused_infer_attention_score"].function
    assert attention.default is reference
    with pytest.raises(
        NotEmulated, match=r"torch_npu\.npu_fused_infer_attention_score\.out\(float32\[1\]\)"
    ):
        attention.out(torch.zeros(1))
    assert not hasattr(attention, "aclnn")
    # What the table holds is not written to: it outlives the installation.
    assert not hasattr(reference, "out")


def test_a_function_without_overloads_stays_itself() -> None:
    function = operators.load()["torch_npu.npu_swiglu"].function
    assert with_overloads("torch_npu", "npu_swiglu", function) is function
