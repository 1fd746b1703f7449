"""What the operator contract compares: every kind of argument, to the bit, over reused buffers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from afd_plugin.ops import OpDefinition
from afd_testkit.bits import difference
from afd_testkit.library import OpCase, OpContractBroken, OpLibrary, assert_op_contract
from afd_testkit.op_case import tensors_of

pytestmark = pytest.mark.cpu

NAMESPACE = "afd_contract_test"
EAGER = ("aot_eager",)  # the compiler that generates no code


def defined(
    kernel: Callable[..., Any], fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> OpDefinition:
    return OpDefinition(NAMESPACE, kernel.__name__.strip("_"), kernel, mutates, fake)


def judge(library: OpLibrary, definition: OpDefinition, *cases: OpCase) -> str:
    """What is found, empty for nothing."""
    library.register(definition)
    try:
        assert_op_contract(definition, cases, EAGER)
    except OpContractBroken as broken:
        return str(broken)
    return ""


def like_first(x: torch.Tensor, *more: object) -> torch.Tensor:
    return torch.empty_like(x)


def nothing(*given: object) -> None:
    return None


# --- arguments of every kind


def text_(x: torch.Tensor, how: str) -> None:
    x.mul_(2 if how == "twice" else 3)


def cast(x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    return x.to(to, copy=True)


def cast_fake(x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=to)


def placed(x: torch.Tensor, where: torch.device) -> torch.Tensor:
    return (x * 2).to(where)


def optional_(x: torch.Tensor, y: torch.Tensor | None = None, by: int = 2) -> None:
    x.mul_(by if y is None else y)


def listed_(xs: list[torch.Tensor], on: bool) -> None:
    for x in xs:
        x.mul_(2 if on else 3)


@pytest.mark.parametrize(
    ("definition", "args"),
    [
        (defined(text_, lambda x, how: None, ("x",)), (torch.ones(3), "twice")),
        (defined(cast, cast_fake), (torch.ones(3), torch.float64)),
        (defined(placed, lambda x, where: torch.empty_like(x)), (torch.ones(3), "cpu")),
        (defined(optional_, lambda x, y=None, by=2: None, ("x",)), (torch.ones(3),)),
        (defined(optional_, lambda x, y=None, by=2: None, ("x",)), (torch.ones(3), None, 5)),
        (defined(listed_, lambda xs, on: None, ("xs",)), ([torch.ones(2), torch.ones(3)], True)),
    ],
    ids=["str", "dtype", "device", "defaults", "None and int", "list and bool"],
)
def test_arguments_that_a_schema_may_have(
    op_library: OpLibrary, definition: OpDefinition, args: tuple[Any, ...]
) -> None:
    if definition.name == "placed":
        args = (args[0], torch.device(args[1]))
    assert judge(op_library, definition, OpCase("any", args)) == ""


def test_arguments_by_name(op_library: OpLibrary) -> None:
    definition = defined(text_, lambda x, how: None, ("x",))
    assert judge(op_library, definition, OpCase("named", (torch.ones(3),), {"how": "m"})) == ""


def test_an_argument_that_cannot_be_compared_is_named(op_library: OpLibrary) -> None:
    definition = defined(text_, lambda x, how: None, ("x",))
    op_library.register(definition)
    for args, kwargs in (((torch.ones(1), object()), {}), ((torch.ones(1),), {"how": object()})):
        with pytest.raises(TypeError, match=r"case 'odd': argument 'how' .* a object, which"):
            assert_op_contract(definition, [OpCase("odd", args, kwargs)], EAGER)


# --- to the bit


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def nan(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([-0.0]), torch.tensor([0.0])),
        (nan(0x7FC00001), nan(0x7FC00000)),
        (-0.0, 0.0),
        (1, True),
        (1, 1.0),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.tensor(complex(0.0, -0.0)), torch.tensor(0j)),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.0, 3.0]).bfloat16()),
        ((torch.ones(1),), [torch.ones(1)]),
        ({"a": 1}, {"b": 1}),
        (torch.float32, torch.float64),
        (None, 0),
        ("a", "b"),
    ],
)
def test_what_differs(actual: object, expected: object) -> None:
    assert difference(actual, expected) != ""
    assert difference(expected, actual) != ""
    assert difference(actual, actual) == ""
    assert difference(expected, expected) == ""


def test_no_elements_no_difference() -> None:
    assert difference(torch.zeros(0, 3), torch.zeros(0, 3)) == ""
    assert difference(torch.tensor(5), torch.tensor(5)) == ""


def test_a_difference_says_where_and_which_bits() -> None:
    one, other = torch.zeros(2, 3), torch.zeros(2, 3)
    one[1, 2] = -0.0
    assert difference([1, one], [1, other]) == (
        "at [1]: 1 of 6 elements differ, first at [1, 2]: -0.0 (0x80000000) instead of "
        "0.0 (0x00000000)"
    )


def negate_(x: torch.Tensor) -> None:
    x.neg_()


def test_a_sign_of_zero_that_is_written_undeclared(op_library: OpLibrary) -> None:
    case = OpCase("zeros", (torch.zeros(4),), then=(torch.zeros(4),))
    told = judge(op_library, defined(negate_, lambda x: None), case)
    assert "check argument x, not declared as written" in told
    assert "-0.0 (0x80000000) instead of 0.0 (0x00000000)" in told
    assert "eager against compiled (aot_eager), tensors made inside" in told


def test_a_sign_of_zero_counts_as_written(op_library: OpLibrary) -> None:
    case = OpCase("zeros", (torch.zeros(4),))
    assert judge(op_library, defined(negate_, lambda x: None, ("x",)), case) == ""


def test_an_undeclared_write_beside_a_result(op_library: OpLibrary) -> None:
    """A result keeps the call alive in compiled code, so that only the argument tells."""

    def both(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out.add_(x)
        return out * 2

    definition = defined(both, like_first)
    op_library.register(definition)
    with pytest.raises(OpContractBroken, match="argument out, not declared as written"):
        assert_op_contract(
            definition, [OpCase("any", (torch.ones(2), torch.ones(2)))], EAGER, opchecks=()
        )


# --- two inputs in a row in the same storage


def test_a_result_that_lives_in_a_buffer_of_the_kernel(op_library: OpLibrary) -> None:
    kept = torch.zeros(4)

    def through(x: torch.Tensor) -> torch.Tensor:
        kept.copy_(x)
        return kept

    told = judge(op_library, defined(through, like_first), OpCase("any", (torch.ones(4),)))
    for way in ("eager", "eager against compiled (aot_eager)"):
        assert f"check {way}, result for the first input after the second call" in told
    assert "4 of 4 elements differ, first at [0]: 2.0" in told


def test_ids_that_are_remembered_by_their_storage(op_library: OpLibrary) -> None:
    """The second input gets the first one's ids: a buffer says nothing of what is in it."""
    seen: dict[tuple[int, int], torch.Tensor] = {}

    def top(scores: torch.Tensor) -> torch.Tensor:
        place = (scores.data_ptr(), scores.numel())
        return seen.setdefault(place, torch.topk(scores, 2).indices).clone()

    def fake(scores: torch.Tensor) -> torch.Tensor:
        return scores.new_empty((*scores.shape[:-1], 2), dtype=torch.int64)

    first = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    told = judge(op_library, defined(top, fake), OpCase("any", (first,), then=(first.flip(1),)))
    assert "check eager, second input in the same buffers (result, arguments)" in told
    assert "instead of 0 (0x0000000000000000)" in told  # the first of [0, 1]


@pytest.mark.parametrize(
    ("given", "then"),
    [
        (torch.tensor([1.0, -0.0]), [2.0, 1.0]),
        (torch.tensor([0, 3, 5]), [5, 2, 0]),
        (torch.tensor([-1, 4], dtype=torch.int32), [4, -1]),
        (torch.full((2,), 3), [2, 2]),
        (torch.zeros(2, dtype=torch.int64), [0, 0]),
        (torch.tensor([True, False]), [False, True]),
        (torch.tensor([7, 9], dtype=torch.uint8), [9, 7]),
        (torch.ones(2, dtype=torch.bfloat16), [2.0, 2.0]),
        (torch.zeros(0), []),
    ],
)
def test_the_second_input_where_none_is_given(given: torch.Tensor, then: list[object]) -> None:
    before = given.clone()
    (second,), _ = OpCase("any", (given,)).second()
    assert second.tolist() == then
    assert second.dtype is given.dtype
    assert torch.equal(given, before)


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    case = OpCase("columns", (base[:, ::2], base[:, 1::2]), {"rows": base[:1].expand(3, 4)})
    args, kwargs = case.second()
    assert torch.equal(args[0], base[:, ::2] + 1)
    assert torch.equal(args[1], base[:, 1::2] + 1)
    assert torch.equal(kwargs["rows"], (base[:1] + 1).expand(3, 4))
    assert len({t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))}) == 1


def test_a_second_input_that_the_operator_refuses(op_library: OpLibrary) -> None:
    def ordered(offsets: torch.Tensor) -> torch.Tensor:
        if bool((offsets.diff() < 0).any()):
            raise ValueError("offsets must not fall")
        return offsets.diff()

    def fake(offsets: torch.Tensor) -> torch.Tensor:
        return offsets.new_empty(offsets.shape[0] - 1)

    definition = defined(ordered, fake)
    offsets = torch.tensor([0, 3, 5])
    op_library.register(definition)
    with pytest.raises(
        ValueError, match=r"case 'sorted' .* offsets must not fall\. Give it `then`"
    ):
        assert_op_contract(definition, [OpCase("sorted", (offsets,))], EAGER)
    case = OpCase("sorted", (offsets,), then=(torch.tensor([0, 1, 2]),))
    assert judge(op_library, definition, case) == ""


def test_one_argument_in_the_place_of_all_of_them() -> None:
    """A tensor of one row would be taken apart into that row."""
    with pytest.raises(TypeError, match=r"case 'any': args is a Tensor; .* written \(argument,\)"):
        OpCase("any", torch.ones(1, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="case 'any': then is a Tensor; it must be a tuple"):
        OpCase("any", (torch.ones(1, 3),), then=torch.ones(1, 3))  # type: ignore[arg-type]


def test_cases_that_come_one_by_one_are_all_judged(op_library: OpLibrary) -> None:
    definition = defined(text_, nothing, ("x",))
    op_library.register(definition)
    ways = iter(("twice", "not at all", "thrice"))
    cases = (OpCase(how, (torch.zeros(2) if "not" in how else torch.ones(2), how)) for how in ways)
    assert_op_contract(definition, cases, EAGER)
    assert list(ways) == []
    with pytest.raises(ValueError, match=r"cases named \[\]"):
        assert_op_contract(definition, cases, EAGER)


@pytest.mark.parametrize("then", [(torch.ones(3),), (), (torch.ones(2, dtype=torch.float64),)])
def test_a_second_input_of_another_form(then: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(ValueError, match="case 'any': `then` has tensors"):
        OpCase("any", (torch.ones(2),), then=then).second()
