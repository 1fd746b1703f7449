"""When the routing operator balances, and how its calls are counted and watched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from afd_plugin import routing
from afd_plugin.errors import RoutingOpError
from afd_plugin.routing import (
    RoutingCalls,
    RoutingRuntime,
    TokenHolders,
    balance_routing_ids_,
    bound_runtime,
    profile_run,
    script_runtime,
    watch_routing,
)

pytestmark = pytest.mark.cpu

Collide = Callable[[ModuleType, list[Callable[[], None]]], None]
Counted = Callable[[], AbstractContextManager[list[RoutingCalls]]]


def skewed(tokens: int) -> torch.Tensor:
    """A gate that favours the first two experts."""
    return torch.tensor([[0, 1]] * tokens, dtype=torch.int32)


# --- the flag -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("routing_op")
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


@pytest.mark.usefixtures("routing_op")
def test_the_flag_does_not_cross_to_other_threads_unless_it_is_carried() -> None:
    """As docs/routing.md says: a thread begins with a context of its own."""
    found: dict[str, bool] = {}

    def look(name: str) -> None:
        ids = skewed(16)
        balance_routing_ids_(ids, 8)
        found[name] = not torch.equal(ids, skewed(16))

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


@pytest.mark.usefixtures("routing_op")
def test_the_flag_is_read_at_each_call_and_errors_of_it_surface() -> None:
    state = {"profiling": True, "asked": 0}

    def flag() -> bool:
        state["asked"] += 1
        if state["profiling"] is None:
            raise RoutingOpError("nothing says so here")
        return bool(state["profiling"])

    natural = skewed(16)
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


@pytest.mark.usefixtures("routing_op")
@pytest.mark.parametrize("flag", NO_FLAGS, ids=repr)
def test_a_flag_that_is_neither_true_nor_false_is_no_answer(flag: Any, counted: Counted) -> None:
    """Told before anything is written or counted."""
    ids = skewed(4)
    said = r"is being profiled is .* in the odd place; it must be True or False"
    with (
        bound_runtime(RoutingRuntime("odd place", lambda: flag, TokenHolders)),
        counted() as told,
        pytest.raises(RoutingOpError, match=said),
    ):
        balance_routing_ids_(ids, 8)
    assert torch.equal(ids, skewed(4))
    assert told == [RoutingCalls()]


@pytest.mark.parametrize("flag", NO_FLAGS, ids=repr)
def test_nor_is_it_set(flag: Any) -> None:
    with pytest.raises(RoutingOpError, match="must be True or False"), profile_run(flag):
        raise AssertionError("entered")
    assert script_runtime().in_profile_run() is False


# --- counters and watchers ----------------------------------------------------------------------


@pytest.mark.usefixtures("routing_op")
def test_calls_are_counted_by_what_they_did(counted: Counted) -> None:
    ids = skewed(4)
    with counted() as told:
        balance_routing_ids_(ids, 8)
        balance_routing_ids_(ids, 8, force_balance=True)
        with profile_run():
            balance_routing_ids_(ids, 8)
            balance_routing_ids_(torch.empty(0, 2, dtype=torch.int32), 8)
        balance_routing_ids_(torch.empty(3, 2, dtype=torch.int32, device="meta"), 8, True)
    assert told == [RoutingCalls(balanced=3, natural=1)]


@pytest.mark.usefixtures("routing_op")
def test_calls_from_several_threads_are_all_counted(collide: Collide, counted: Counted) -> None:
    """Two stages may run on threads of their own."""
    calls, threads = 3, 4

    def call(force: bool) -> None:
        ids = skewed(1)
        for _ in range(calls):
            balance_routing_ids_(ids, 8, force)

    with counted() as told:
        collide(routing, [partial(call, number % 2 == 0) for number in range(threads)])
    assert told == [RoutingCalls(balanced=2 * calls, natural=2 * calls)]


@pytest.mark.usefixtures("routing_op")
def test_a_watcher_may_stop_watching_while_it_is_told() -> None:
    told: list[str] = []
    with ExitStack() as first:

        def once(ids: torch.Tensor, balanced: bool) -> None:
            told.append("once")
            first.close()

        first.enter_context(watch_routing(once))
        with watch_routing(lambda ids, balanced: told.append("always")):
            for _ in range(2):
                balance_routing_ids_(skewed(1), 8)
    assert told == ["once", "always", "always"]


def balance_and_fail(ids: torch.Tensor, told: list[bool]) -> None:
    with watch_routing(lambda seen, balanced: told.append(balanced)):
        balance_routing_ids_(ids, 8, force_balance=True)
        1 / 0  # noqa: B018


@pytest.mark.usefixtures("routing_op")
def test_watchers_see_what_is_left_and_only_while_they_watch() -> None:
    first: list[tuple[list[list[int]], bool]] = []
    second: list[bool] = []
    ids = skewed(2)
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
