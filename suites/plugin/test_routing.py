"""The routing operator: balanced while profiling or forced, otherwise not a bit changes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin import routing
from afd_plugin.errors import RoutingError, RoutingOpError
from afd_plugin.ops import OpDefinition, Registrar, register, take_down, with_torch
from afd_plugin.routing import (
    ROUTING_OP,
    RoutingCalls,
    RoutingRuntime,
    TokenHolders,
    balance_routing_ids_,
    balanced_expert_ids,
    bound_runtime,
    profile_run,
    register_routing_op,
    routing_calls,
    script_runtime,
    watch_routing,
)
from afd_testkit.library import OpLibrary, compiling

pytestmark = pytest.mark.cpu

Collide = Callable[[ModuleType, list[Callable[[], None]]], None]
DTYPES = (torch.int32, torch.int64)


def counts_of_experts(ids: np.ndarray, num_experts: int) -> list[int]:
    found = Counter(ids.flatten().tolist())
    assert set(found) <= set(range(num_experts))
    return [found[expert] for expert in range(num_experts)]


# --- the operator -------------------------------------------------------------------------------


@pytest.fixture
def op(op_library: OpLibrary) -> Iterator[None]:
    """Registered, with the context variable as its flag, eight experts lying on four ranks."""
    op_library.register(ROUTING_OP)
    with bound_runtime(script_runtime(TokenHolders(expert_ranks=4))):
        yield


@contextmanager
def counted() -> Iterator[list[RoutingCalls]]:
    """What the operator did inside, in the list afterwards."""
    before, told = routing_calls(), []  # type: ignore[var-annotated]
    yield told
    told.append(routing_calls().since(before))


def skewed(tokens: int, top_k: int, dtype: torch.dtype) -> torch.Tensor:
    """A gate that favours the first experts."""
    return torch.arange(top_k, dtype=dtype).repeat(tokens, 1)


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize("dtype", DTYPES)
def test_live_ids_stay_and_forced_or_profiled_ones_are_even(dtype: torch.dtype) -> None:
    """Case I1, through the operator."""
    ids = skewed(16, 2, dtype)
    balance_routing_ids_(ids, 8)
    assert torch.equal(ids, skewed(16, 2, dtype))
    balance_routing_ids_(ids, 8, force_balance=True)
    assert counts_of_experts(ids.numpy() // 2, 4) == [8] * 4  # two experts a rank
    assert ids.dtype is dtype
    profiled = skewed(16, 2, dtype)
    with profile_run():
        balance_routing_ids_(profiled, 8)
    assert torch.equal(profiled, ids)


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", range(9))
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_every_count_of_experts_a_token(dtype: torch.dtype, top_k: int, tokens: int) -> None:
    ids = torch.full((tokens, top_k), -7, dtype=dtype)
    balance_routing_ids_(ids, 8, force_balance=True)
    counts = counts_of_experts(ids.numpy(), 8)
    assert sum(counts) == tokens * top_k
    assert max(counts) - min(counts) <= 1
    assert all(len(set(row)) == top_k for row in ids.tolist())


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second column": lambda base: base[:, ::2],
    "every third row": lambda base: base[::3],
    "transposed": lambda base: base.T,
    "inside": lambda base: base[2:-1, 1:4],
}


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_strided_ids_are_written_and_nothing_beside_them(dtype: torch.dtype, view: str) -> None:
    base = torch.full((8, 8), -1, dtype=dtype)
    ids = VIEWS[view](base)
    contiguous = torch.full(ids.shape, -1, dtype=dtype)
    balance_routing_ids_(ids, 8, force_balance=True)
    balance_routing_ids_(contiguous, 8, force_balance=True)
    assert torch.equal(ids, contiguous)
    assert int((base == -1).sum()) == base.numel() - ids.numel()


OVERLAPPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one row for all": lambda base: base[:1, :2].expand(4, 2),
    "one id for a row": lambda base: base[:4, :1].expand(4, 2),
    "one id": lambda base: base[0, 0].expand(4, 2),
    "windows": lambda base: base.view(-1).as_strided((4, 2), (1, 1)),
    "wider windows": lambda base: base.view(-1).as_strided((5, 4), (3, 2)),
}


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("view", OVERLAPPING)
def test_ids_that_share_their_memory_are_refused(
    dtype: torch.dtype, view: str, force: bool
) -> None:
    """Written in place, one id would overwrite another; checked against each id's address."""
    base = torch.full((8, 8), -1, dtype=dtype)
    ids = OVERLAPPING[view](base)
    with (
        counted() as told,
        pytest.raises(RoutingError, match=r"share their memory.*contiguous\(\)"),
    ):
        balance_routing_ids_(ids, 8, force)
    assert told == [RoutingCalls()]
    assert bool((base == -1).all())


@pytest.mark.usefixtures("op")
@settings(deadline=None)
@given(
    rows=st.integers(0, 5),
    columns=st.integers(0, 5),
    down=st.integers(0, 9),
    right=st.integers(0, 9),
)
def test_any_strides_by_which_ids_lie_apart(rows: int, columns: int, down: int, right: int) -> None:
    """By brute force over the addresses of all ids."""
    ids = torch.zeros(128, dtype=torch.int64).as_strided((rows, columns), (down, right))
    places = [i * down + j * right for i in range(rows) for j in range(columns)]
    if len(set(places)) == len(places):
        balance_routing_ids_(ids, 8, force_balance=True)
        assert (
            ids.tolist()
            == balanced_expert_ids(rows, columns, 8, TokenHolders(expert_ranks=4)).tolist()
        )
    else:
        with pytest.raises(RoutingError, match="share their memory"):
            balance_routing_ids_(ids, 8, force_balance=True)


@pytest.mark.usefixtures("op")
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 9),
    top_k=st.integers(0, 8),
)
def test_live_not_a_bit_changes(seed: int, dtype: torch.dtype, tokens: int, top_k: int) -> None:
    """Whatever bits are there, also such as are no id: serving never looks at them."""
    width = {torch.int32: 4, torch.int64: 8}[dtype]
    bits = np.random.default_rng(seed).integers(0, 256, (tokens, top_k * width), dtype=np.uint8)
    ids = torch.empty(tokens, top_k, dtype=dtype)
    ids.numpy().reshape(-1).view(np.uint8)[:] = bits.reshape(-1)
    version = ids._version
    balance_routing_ids_(ids, 8)
    assert ids.numpy().tobytes() == bits.tobytes()
    assert ids._version == version  # nor is it written to with what it holds


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize(
    ("ids", "experts", "said"),
    [
        (torch.zeros(3, 5, dtype=torch.int32), 4, "gives each token 5 experts of 4"),
        (torch.zeros(3, 0, dtype=torch.int32), 0, "gives each token 0 experts of 0"),
        (torch.zeros(3, 2), 4, r"\[3, 2\] of torch.float32; .*torch.int32 or torch.int64"),
        (torch.zeros(3, 2, dtype=torch.int16), 4, "of torch.int16"),
        (torch.zeros(6, dtype=torch.int64), 4, r"topk_ids is \[6\]"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), 4, r"topk_ids is \[1, 2, 3\]"),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor) else str(value)[:12],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_routing_is_refused_real_and_traced(
    ids: torch.Tensor, experts: int, said: str, device: str, force: bool
) -> None:
    with counted() as told, pytest.raises(RoutingError, match=said):
        balance_routing_ids_(ids.to(device), experts, force)
    assert told == [RoutingCalls()]


def test_without_a_runtime_it_does_not_guess(op_library: OpLibrary, process: None) -> None:
    op_library.register(ROUTING_OP)
    ids = skewed(4, 2, torch.int32)
    for force in (False, True):
        with pytest.raises(RoutingOpError, match=r"before a runtime was bound.*script_runtime"):
            balance_routing_ids_(ids, 8, force)
    assert torch.equal(ids, skewed(4, 2, torch.int32))


def test_without_a_registration_it_says_what_to_do() -> None:
    with pytest.raises(RoutingOpError, match=r"not registered.*register_routing_op\(\)"):
        balance_routing_ids_(skewed(1, 1, torch.int32), 8)


# --- the flag -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("op")
def test_profile_runs_are_nested() -> None:
    flag = script_runtime().in_profile_run
    seen = [flag()]
    with profile_run():
        seen.append(flag())
        with profile_run(False):
            seen.append(flag())
            with profile_run():
                seen.append(flag())
            seen.append(flag())
        with pytest.raises(ZeroDivisionError), profile_run(False):
            1 / 0  # noqa: B018
        seen.append(flag())
    seen.append(flag())
    assert seen == [False, True, False, True, False, True, False]


@pytest.mark.usefixtures("op")
def test_the_flag_does_not_cross_to_other_threads_unless_it_is_carried() -> None:
    """As docs/routing.md says: a thread begins with a context of its own."""
    found: dict[str, bool] = {}

    def look(name: str) -> None:
        ids = skewed(16, 2, torch.int64)
        balance_routing_ids_(ids, 8)
        found[name] = not torch.equal(ids, skewed(16, 2, torch.int64))

    with profile_run():
        carried = copy_context()
        threads = [
            threading.Thread(target=look, args=("plain",)),
            threading.Thread(target=carried.run, args=(look, "carried")),
        ]
        for thread in threads:
            thread.start()
            thread.join()
        look("own")
    look("after")
    assert found == {"plain": False, "carried": True, "own": True, "after": False}


@pytest.mark.usefixtures("op")
def test_the_flag_is_read_at_each_call_and_errors_of_it_surface() -> None:
    state = {"profiling": True, "asked": 0}

    def flag() -> bool:
        state["asked"] += 1
        if state["profiling"] is None:
            raise RoutingOpError("nothing says so here")
        return bool(state["profiling"])

    natural = skewed(16, 2, torch.int32)
    with bound_runtime(RoutingRuntime("test", flag, TokenHolders)):
        for profiling in (True, False, True):
            state["profiling"] = profiling
            ids = natural.clone()
            balance_routing_ids_(ids, 8)
            assert torch.equal(ids, natural) is not profiling
        state["profiling"] = None  # type: ignore[assignment]
        ids = natural.clone()
        with pytest.raises(RoutingOpError, match="nothing says so here"):
            balance_routing_ids_(ids, 8)
        assert torch.equal(ids, natural)
    assert state["asked"] == 4


NO_FLAGS = [1, 0, None, "no", "", np.bool_(True), torch.tensor(True), torch.tensor([True, False])]


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize("flag", NO_FLAGS, ids=repr)
def test_a_flag_that_is_neither_true_nor_false_is_no_answer(flag: Any) -> None:
    """Told before anything is written or counted."""
    ids = skewed(4, 2, torch.int32)
    said = r"is being profiled is .* in the odd place; it must be True or False"
    with (
        bound_runtime(RoutingRuntime("odd place", lambda: flag, TokenHolders)),
        counted() as told,
        pytest.raises(RoutingOpError, match=said),
    ):
        balance_routing_ids_(ids, 8)
    assert torch.equal(ids, skewed(4, 2, torch.int32))
    assert told == [RoutingCalls()]


@pytest.mark.parametrize("flag", NO_FLAGS, ids=repr)
def test_nor_is_it_set(flag: Any) -> None:
    with pytest.raises(RoutingOpError, match="must be True or False"), profile_run(flag):
        raise AssertionError("entered")
    assert script_runtime().in_profile_run() is False


# --- counters and watchers ----------------------------------------------------------------------


@pytest.mark.usefixtures("op")
def test_calls_are_counted_by_what_they_did() -> None:
    ids = skewed(4, 2, torch.int32)
    with counted() as told:
        balance_routing_ids_(ids, 8)
        balance_routing_ids_(ids, 8, force_balance=True)
        with profile_run():
            balance_routing_ids_(ids, 8)
            balance_routing_ids_(torch.empty(0, 2, dtype=torch.int32), 8)
        balance_routing_ids_(torch.empty(3, 2, dtype=torch.int32, device="meta"), 8, True)
    assert told == [RoutingCalls(balanced=3, natural=1)]


@pytest.mark.usefixtures("op")
def test_calls_from_several_threads_are_all_counted(collide: Collide) -> None:
    """Two stages may run on threads of their own."""
    calls, threads = 3, 4

    def call(force: bool) -> None:
        ids = skewed(1, 2, torch.int32)
        for _ in range(calls):
            balance_routing_ids_(ids, 8, force)

    with counted() as told:
        collide(routing, [partial(call, number % 2 == 0) for number in range(threads)])
    assert told == [RoutingCalls(balanced=2 * calls, natural=2 * calls)]


@pytest.mark.usefixtures("op")
def test_a_watcher_may_stop_watching_while_it_is_told() -> None:
    told: list[str] = []
    with ExitStack() as first:

        def once(ids: torch.Tensor, balanced: bool) -> None:
            told.append("once")
            first.close()

        first.enter_context(watch_routing(once))
        with watch_routing(lambda ids, balanced: told.append("always")):
            for _ in range(2):
                balance_routing_ids_(skewed(1, 2, torch.int32), 8)
    assert told == ["once", "always", "always"]


def balance_and_fail(ids: torch.Tensor, told: list[bool]) -> None:
    with watch_routing(lambda seen, balanced: told.append(balanced)):
        balance_routing_ids_(ids, 8, force_balance=True)
        1 / 0  # noqa: B018


@pytest.mark.usefixtures("op")
def test_watchers_see_what_is_left_and_only_while_they_watch() -> None:
    first: list[tuple[list[list[int]], bool]] = []
    second: list[bool] = []
    ids = skewed(2, 2, torch.int64)
    with watch_routing(lambda seen, balanced: first.append((seen.tolist(), balanced))):
        balance_routing_ids_(ids, 8)
        with pytest.raises(ZeroDivisionError):
            balance_and_fail(ids, second)
        balance_routing_ids_(ids, 8)
    balance_routing_ids_(ids, 8, force_balance=True)
    assert [balanced for _, balanced in first] == [False, True, False]
    assert first[0][0] == [[0, 1], [0, 1]]
    assert first[1][0] == first[2][0] == ids.tolist()
    assert second == [True]


# --- registration in a process ------------------------------------------------------------------


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the process had not registered anything; what the test registers is taken down."""
    own = routing._Process()
    monkeypatch.setattr(routing, "_process", own)
    yield
    if own.library is not None:
        take_down(own.library)


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
    ids = skewed(16, 2, torch.int32)
    balance_routing_ids_(ids, 8)
    assert torch.equal(ids, skewed(16, 2, torch.int32))


@pytest.mark.usefixtures("process")
def test_one_stack_a_process() -> None:
    stack = RoutingRuntime("forward context", lambda: True, TokenHolders)
    register_routing_op(stack)
    with pytest.raises(RoutingOpError, match=r"the forward context .*the context variable"):
        register_routing_op(script_runtime())
    register_routing_op()  # whatever is in force
    ids = skewed(16, 2, torch.int32)
    balance_routing_ids_(ids, 8)
    assert counts_of_experts(ids.numpy(), 8) == [4] * 8


@pytest.mark.usefixtures("process")
def test_two_readers_of_one_name_are_two_places() -> None:
    """Else the second would be taken for the first, and its flag read or not by who came last."""
    first = RoutingRuntime("forward context", lambda: False, TokenHolders)
    register_routing_op(first)
    other = RoutingRuntime("forward context", lambda: True, TokenHolders)
    with pytest.raises(RoutingOpError, match=r"also read the forward context by another reader"):
        register_routing_op(other)
    register_routing_op(replace(first, ranks=lambda: TokenHolders(1, 2)))  # the same reader
    ids = skewed(16, 2, torch.int32)
    balance_routing_ids_(ids, 8)
    assert torch.equal(ids, skewed(16, 2, torch.int32))
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
            balance_routing_ids_(skewed(1, 1, torch.int32), 8)
    register_routing_op()
    balance_routing_ids_(skewed(1, 1, torch.int32), 8)


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
    ids = skewed(16, 2, torch.int32)
    balance_routing_ids_(ids, 8, force_balance=True)
    assert counts_of_experts(ids.numpy(), 8) == [4] * 8
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
