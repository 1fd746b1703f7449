"""Operators in scopes, and the contract that finds out what a registration gets wrong."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.library import Library

from afd_plugin.errors import RoutingOpError
from afd_plugin.ops import OpDefinition, register, take_down, with_torch
from afd_plugin.routing import (
    ROUTING_OP,
    RoutingRuntime,
    TokenHolders,
    balance_routing_ids_,
    bound_runtime,
    register_routing_op,
    script_runtime,
)
from afd_testkit.library import (
    OpCase,
    OpContractBroken,
    OpLibrary,
    assert_op_contract,
    compiling,
    op_scope,
)

pytestmark = pytest.mark.cpu


def add_(out: torch.Tensor, x: torch.Tensor) -> None:
    out.add_(x)


def fake_add_(out: torch.Tensor, x: torch.Tensor) -> None:
    return None


#: Case J2 with its mutation declared, and without.
ADD = OpDefinition("afd_library_test", "add_", add_, ("out",), fake_add_)
UNDECLARED = replace(ADD, mutates=())
NAME = "afd_library_test::add_"


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fake_doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


DOUBLED = OpDefinition("afd_library_test", "doubled", doubled, (), fake_doubled)


def four_times() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(3), torch.full((3,), 4.0)


def runs(op: torch._ops.OpOverload) -> bool:
    out, x = four_times()
    op(out, x)
    return out.tolist() == [4.0] * 3


def is_gone(definition: OpDefinition) -> bool:
    """As torch sees it: no schema, no packet, no name in its list."""
    return (
        not hasattr(getattr(torch.ops, definition.namespace), definition.name)
        and definition.qualified_name not in torch.library._defs
        and not torch._C._jit_get_schemas_for_operator(definition.qualified_name)
    )


# --- the scope ----------------------------------------------------------------------------------


@pytest.mark.parametrize("time", [1, 2])
def test_the_fixture_registers_for_one_test(op_library: OpLibrary, time: int) -> None:
    assert is_gone(ADD)
    op = op_library.register(ADD)
    gc.collect()  # kept alive by the scope, though the test keeps nothing
    assert torch.ops.afd_library_test.add_.default is op
    assert runs(op)
    on_meta = torch.empty(2, device="meta")
    assert op(on_meta, on_meta) is None


def register_and_fail() -> None:
    with op_scope() as scope:
        scope.register(ADD)
        1 / 0  # noqa: B018


def test_by_hand_repeated_and_after_an_error() -> None:
    for _ in range(3):
        with op_scope() as scope:
            assert runs(scope.register(ADD))
            assert runs(scope.register(ADD))  # twice in one scope
        assert is_gone(ADD)
    with pytest.raises(ZeroDivisionError):
        register_and_fail()
    assert is_gone(ADD)
    scope.close()  # once more does nothing


def test_an_inner_scope_uses_the_outer_ones_operator_and_leaves_it(op_library: OpLibrary) -> None:
    outer = op_library.register(ADD)
    with op_scope() as inner:
        assert inner.register(ADD) is outer
        inner.register(DOUBLED)
        with op_scope() as innermost:
            assert innermost.register(ADD) is outer
    assert runs(outer)
    assert is_gone(DOUBLED)


def test_scopes_that_overlap(op_library: OpLibrary) -> None:
    """The first to register closes first: whoever still uses the operator keeps it."""
    first = OpLibrary()
    op = first.register(ADD)
    assert op_library.register(ADD) is op
    first.close()
    gc.collect()
    assert runs(op)


def test_one_that_production_registered_is_used_and_stays() -> None:
    production = register(ADD)

    def registrar(definition: OpDefinition, library: Library) -> None:
        raise AssertionError("called for an operator that is there")

    with op_scope() as scope:
        assert runs(scope.register(ADD, registrar))
        with pytest.raises(RoutingOpError, match="Two versions of it are loaded"):
            scope.register(UNDECLARED)
    assert runs(ADD.overload)
    take_down(production)


def test_another_definition_of_the_name_is_an_error(op_library: OpLibrary) -> None:
    op = op_library.register(ADD)

    def subtract_(out: torch.Tensor, x: torch.Tensor) -> None:
        out.sub_(x)

    with op_scope() as inner:
        with pytest.raises(RoutingOpError) as caught:
            inner.register(UNDECLARED)
        assert f"as {ADD.schema}, but this package declares {UNDECLARED.schema}" in str(
            caught.value
        )
        with pytest.raises(RoutingOpError, match=rf"{NAME} is .* kernel .*add_ and .*subtract_"):
            inner.register(replace(ADD, kernel=subtract_))
    assert runs(op)


def test_a_scope_that_has_ended_registers_nothing() -> None:
    with op_scope() as scope:
        scope.register(ADD)
    with pytest.raises(RoutingOpError, match=f"{NAME} cannot be registered in a scope that has"):
        scope.register(ADD)
    assert is_gone(ADD)
    never = OpLibrary()
    never.close()
    with pytest.raises(RoutingOpError, match="Register inside the scope"):
        never.register(DOUBLED)


def test_a_registrar_with_a_library_of_its_own_is_refused(op_library: OpLibrary) -> None:
    own: list[Library] = []

    def registrar(definition: OpDefinition, library: Library) -> None:
        own.append(Library(definition.namespace, "FRAGMENT"))
        with_torch(definition, own[0])

    with pytest.raises(RoutingOpError, match=f"registrar of {NAME} defined it in a library of its"):
        op_library.register(ADD, registrar)
    take_down(own[0])
    assert is_gone(ADD)
    assert runs(op_library.register(ADD))  # nothing of it is remembered


def test_a_part_in_another_library_is_told_when_the_scope_ends() -> None:
    own: list[Library] = []

    def registrar(definition: OpDefinition, library: Library) -> None:
        with_torch(definition, library)
        own.append(Library(definition.namespace, "IMPL"))
        own[0].impl(definition.name, definition.kernel, "CPU")

    scope = OpLibrary()
    assert runs(scope.register(ADD, registrar))
    with pytest.raises(RoutingOpError, match=f"{NAME}: a part is still registered"):
        scope.close()
    own[0]._destroy()
    assert is_gone(ADD)


def test_a_runtime_goes_with_the_operator_that_it_was_bound_to() -> None:
    with op_scope() as scope:
        scope.register(ROUTING_OP)
        register_routing_op()
        balance_routing_ids_(torch.zeros(2, 2, dtype=torch.int64), 4)
        with op_scope() as inner:  # takes nothing down, and so takes nothing back
            inner.register(ROUTING_OP)
            register_routing_op()
        balance_routing_ids_(torch.zeros(2, 2, dtype=torch.int64), 4)
    with op_scope() as scope:
        op = scope.register(ROUTING_OP)
        with pytest.raises(RoutingOpError, match="before a runtime was bound"):
            op(torch.zeros(2, 2, dtype=torch.int64), 4, False)


def test_a_runtime_that_was_bound_before_stays() -> None:
    outer = RoutingRuntime("outer", lambda: True, TokenHolders)
    with bound_runtime(outer), op_scope() as scope:
        with op_scope() as inner:
            inner.register(ROUTING_OP)
            register_routing_op()
        op = scope.register(ROUTING_OP)
        ids = torch.zeros(2, 2, dtype=torch.int64)
        op(ids, 4, False)  # profiling, as the outer one says
        assert sorted(ids.flatten().tolist()) == [0, 1, 2, 3]


class Broken(Exception):
    """What a registrar of these tests raises."""


def test_a_failing_registrar_is_reported_as_itself(op_library: OpLibrary) -> None:
    def registrar(definition: OpDefinition, library: Library) -> None:
        library.define(definition.schema.removeprefix(f"{definition.namespace}::"))
        raise Broken("half-way")

    for _ in range(2):
        with pytest.raises(Broken, match=r"\Ahalf-way\Z"):
            op_library.register(ADD, registrar)
        assert is_gone(ADD)
    assert runs(op_library.register(ADD))


def test_a_failing_constructor_is_reported_as_itself(op_library: OpLibrary) -> None:
    with pytest.raises(ValueError, match=r"\Aprim is a reserved namespace"):
        op_library.register(replace(ADD, namespace="prim"))


def test_another_registrar(op_library: OpLibrary) -> None:
    made: list[str] = []

    def registrar(definition: OpDefinition, library: Library) -> None:
        made.append(definition.name)
        with_torch(definition, library)

    assert runs(op_library.register(ADD, registrar))
    assert made == ["add_"]


def test_code_compiled_inside_does_not_call_the_dead() -> None:
    def call(out: torch.Tensor, x: torch.Tensor) -> None:
        torch.ops.afd_library_test.add_(out, x)

    with compiling():
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        with op_scope() as scope:
            scope.register(ADD)
            out, x = four_times()
            compiled(out, x)
            assert out.tolist() == [4.0] * 3
        with pytest.raises(Exception, match="add_"):
            compiled(*four_times())


@pytest.mark.parametrize("time", [1, 2])
def test_compiling_leaves_nothing_behind(time: int) -> None:
    """The leak guard looks on; what it cannot see is counted here."""
    init, recompile_limit = torch.nn.Module.__init__, torch._dynamo.config.recompile_limit
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    for expected in (1, 2):  # what one scope has compiled, the next compiles anew
        with compiling():
            compiled = torch.compile(doubled, backend=backend)
            assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
            assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
        assert len(graphs) == expected
    assert torch.nn.Module.__init__ is init
    assert torch._dynamo.config.recompile_limit == recompile_limit


def test_the_plugin_loads_without_torch() -> None:
    code = (
        "import sys; import afd_testkit.plugin as plugin; "
        "print('torch' in sys.modules, 'afd_plugin' in sys.modules, 'op_library' in vars(plugin))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("False False True\n", "")


# --- the leak guard -----------------------------------------------------------------------------

HEAD = """
import pytest
import torch
from afd_plugin.ops import OpDefinition, register
from afd_testkit.library import op_scope

pytestmark = pytest.mark.cpu


def add_(out: torch.Tensor, x: torch.Tensor) -> None:
    out.add_(x)


def fake(out: torch.Tensor, x: torch.Tensor) -> None:
    return None


ADD = OpDefinition("afd_inner_test", "add_", add_, ("out",), fake)


def four():
    out = torch.zeros(1)
    torch.ops.afd_inner_test.add_(out, torch.full((1,), 4.0))
    return out.item()
"""


def test_the_leak_guard_accepts_scopes_and_sees_what_is_left(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        HEAD
        + """
kept = []

def test_fixture(op_library):
    op_library.register(ADD)
    assert four() == 4

def test_error_that_is_kept(op_library):
    def registrar(definition, library):
        library.define("add_(Tensor x) -> ()")
        raise OSError("kept")
    with pytest.raises(OSError) as caught:
        op_library.register(ADD, registrar)
    kept.append(caught)  # and with it the library
    op_library.register(ADD)

@pytest.fixture(scope="module")
def wide():
    with op_scope() as scope:
        scope.register(ADD)
        yield

def test_wider_scope(wide, op_library):
    op_library.register(ADD)
    assert four() == 4

def test_wider_scope_again(wide):
    assert four() == 4

def test_leak():
    kept.append(register(OpDefinition("afd_inner_test", "left_", add_, ("out",), fake)))
"""
    )
    ran = pytester.runpytest_subprocess("-q", "-p", "no:randomly")
    ran.assert_outcomes(passed=5, errors=1)
    ran.stdout.fnmatch_lines(
        ["*test_leak left the process changed:*", "*torch.ops: 'afd_inner_test::left_' was added*"]
    )


def test_files_pass_alone_in_any_order_and_beside_each_other(pytester: pytest.Pytester) -> None:
    """Case J3: neither does one file rest on another's registration, nor stand in its way."""
    body = (
        HEAD
        + """
@pytest.mark.parametrize("time", [1, 2])
def test_registers_for_itself(op_library, time):
    assert not ADD.is_registered
    op_library.register(ADD)
    assert four() == 4
"""
    )
    names = ("test_one.py", "test_two.py", "test_three.py")
    pytester.makepyfile(**{name.removesuffix(".py"): body for name in names})
    for options, passed in (
        (("-p", "no:randomly", "test_two.py"), 2),
        (("-p", "no:randomly", *names), 6),
        (("-n", "2"), 6),
    ):
        ran = pytester.runpytest_subprocess("-q", *options)
        ran.assert_outcomes(passed=passed)


# --- the contract -------------------------------------------------------------------------------


@pytest.fixture
def eager_only() -> tuple[str, ...]:
    """The compiler that generates no code, for tests of the contract itself."""
    return ("aot_eager",)


def test_a_mutation_that_is_not_declared(
    op_library: OpLibrary, eager_only: tuple[str, ...]
) -> None:
    """Case J2: eager 4.0, compiled 0.0, and opcheck refuses it."""
    op_library.register(UNDECLARED)
    with pytest.raises(OpContractBroken) as caught:
        assert_op_contract(UNDECLARED, [OpCase("adds four", four_times())], eager_only)
    text = str(caught.value)
    assert text.startswith(f"{UNDECLARED.schema} does not keep its contract")
    assert "case 'adds four', check opcheck test_schema:" in text
    assert re.search(r"Argument out is not defined as mutable but was mutated", text)
    found = re.search(
        r"case 'adds four', check eager against compiled \(aot_eager\), arguments afterwards:\n"
        r"\s+actual: +\(tensor\(\[0\., 0\., 0\.\]\).*\n(?:.*\n)*?"
        r"\s+expected: \(tensor\(\[4\., 4\., 4\.\]\)",
        text,
    )
    assert found, text


def test_the_same_mutation_declared(op_library: OpLibrary) -> None:
    op_library.register(ADD)
    assert_op_contract(ADD, [OpCase("adds four", four_times())])
    assert_op_contract(
        ADD.overload,
        [OpCase("named", four_times()[:1], {"x": four_times()[1]})],
        backends=("aot_eager",),
    )


def contract_says(definition: OpDefinition, cases: list[OpCase]) -> str:
    with pytest.raises(OpContractBroken) as caught:
        assert_op_contract(definition, cases, ("aot_eager",))
    return str(caught.value)


def test_a_case_in_which_nothing_is_written_proves_nothing(op_library: OpLibrary) -> None:
    op_library.register(ADD)
    empty = (torch.zeros(0), torch.zeros(0))
    text = contract_says(ADD, [OpCase("no rows", empty), OpCase("zeros", (torch.zeros(2),) * 2)])
    assert "1 finding(s)" in text
    assert "check written argument out:\n" in text
    assert "no case changes it" in text


def test_a_fake_with_another_shape(op_library: OpLibrary) -> None:
    def fake(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[0] + 1)

    definition = replace(DOUBLED, fake=fake)
    op_library.register(definition)
    text = contract_says(definition, [OpCase("three", (torch.ones(3),))])
    assert "case 'three', check Meta against real (results, arguments):" in text
    assert "actual:   ('torch.float32[4] strides (1,)'" in text
    assert "expected: ('torch.float32[3] strides (1,)'" in text


def test_a_fake_with_other_strides(op_library: OpLibrary) -> None:
    """Rows and columns swapped in the kernel, not in the fake."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).T.contiguous().T

    definition = replace(DOUBLED, kernel=kernel)
    op_library.register(definition)
    text = contract_says(definition, [OpCase("odd", (torch.ones(3, 5),))])
    assert "float32[3, 5] strides (5, 1)'" in text
    assert "float32[3, 5] strides (1, 3)'" in text


def test_a_fake_that_raises(op_library: OpLibrary) -> None:
    def fake(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no fake for this")

    definition = replace(DOUBLED, fake=fake)
    op_library.register(definition)
    text = contract_says(definition, [OpCase("any", (torch.ones(3),))])
    assert "actual:   NotImplementedError: no fake for this" in text
    assert "check eager against compiled (aot_eager):" in text
    assert "expected: it compiles and runs" in text


def test_a_result_that_is_an_argument(op_library: OpLibrary) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x

    definition = replace(DOUBLED, kernel=kernel)
    op_library.register(definition)
    text = contract_says(definition, [OpCase("same", (torch.ones(3),))])
    assert "check opcheck test_schema:" in text


def test_only_the_case_that_breaks_it_is_named(op_library: OpLibrary) -> None:
    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, dtype=torch.float32)

    definition = replace(DOUBLED, fake=fake)
    op_library.register(definition)
    cases = [OpCase(str(dtype), (torch.ones(3, dtype=dtype),)) for dtype in DTYPES]
    text = contract_says(definition, cases)
    assert "case 'torch.float64', check Meta against real" in text
    assert "case 'torch.float32'" not in text


DTYPES = (torch.float32, torch.float64)


def test_where_nothing_compiles_the_contract_is_not_kept(pytester: pytest.Pytester) -> None:
    """The variable is read once a process."""
    pytester.makepyfile(
        HEAD
        + """
from afd_testkit.library import OpCase, OpContractBroken, assert_op_contract

def test_contract(op_library):
    op_library.register(ADD)
    with pytest.raises(OpContractBroken, match="nothing was compiled") as caught:
        assert_op_contract(ADD, [OpCase("any", (torch.zeros(2), torch.ones(2)))], ("aot_eager",))
    assert "expected: TORCHDYNAMO_DISABLE is not set" in str(caught.value)
"""
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        pytester.runpytest_subprocess("-q").assert_outcomes(passed=1)


@pytest.mark.parametrize("names", [[], ["one", "one"]])
def test_cases_that_cannot_be_told_apart(op_library: OpLibrary, names: list[str]) -> None:
    op_library.register(DOUBLED)
    with pytest.raises(ValueError, match=re.escape(f"cases named {names}; give one or more")):
        assert_op_contract(DOUBLED, [OpCase(name, (torch.ones(1),)) for name in names])


def test_an_operator_that_is_not_registered() -> None:
    with pytest.raises(RoutingOpError, match=f"{NAME} is not registered"):
        assert_op_contract(ADD, [OpCase("any", four_times())])


def test_every_run_gets_arguments_of_its_own(op_library: OpLibrary) -> None:
    """Copies keep strides and what shares storage; the case itself stays as it is."""
    op_library.register(ADD)
    base = torch.arange(12.0).reshape(3, 4)
    case = OpCase("columns", (base[:, ::2], base[:, 1::2]))
    (out, x), _ = case.copied()
    assert out.stride() == (4, 2)
    assert out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert out.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert_op_contract(ADD, [OpCase("columns", (base[:, ::2].T, torch.ones(2, 3)))], ("aot_eager",))
    assert torch.equal(base, torch.arange(12.0).reshape(3, 4))


# --- the production operator --------------------------------------------------------------------


@pytest.fixture
def routing_op(op_library: OpLibrary) -> Iterator[torch._ops.OpOverload]:
    with bound_runtime(script_runtime()):
        yield op_library.register(ROUTING_OP)


def ids(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, 2), 3, dtype=dtype)


def test_the_routing_operator_keeps_its_contract(routing_op: torch._ops.OpOverload) -> None:
    cases = [
        OpCase("forced, no rows", (ids(0, torch.int32), 8, True)),
        OpCase("forced, one row", (ids(1, torch.int32), 8, True)),
        OpCase("forced, odd rows", (ids(7, torch.int32), 8, True)),
        OpCase("forced, more odd rows, experts", (ids(13, torch.int32), 24, True)),
        OpCase("live", (ids(7, torch.int32), 8, False)),
        OpCase("forced, int64", (ids(7, torch.int64), 8, True)),
        OpCase(
            "forced, every second column",
            (torch.full((7, 4), 3, dtype=torch.int64)[:, ::2], 8, True),
        ),
    ]
    assert_op_contract(routing_op, cases)


def test_the_routing_operator_without_its_mutation_does_not(op_library: OpLibrary) -> None:
    undeclared = replace(ROUTING_OP, mutates=())
    op_library.register(undeclared)
    with bound_runtime(script_runtime()):
        text = contract_says(undeclared, [OpCase("forced", (ids(7, torch.int32), 8, True))])
    assert "Argument topk_ids is not defined as mutable but was mutated" in text
    assert "eager against compiled (aot_eager), arguments afterwards" in text
    assert "eager against compiled (aot_eager), tensors made inside, afterwards" in text
