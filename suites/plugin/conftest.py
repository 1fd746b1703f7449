"""What several suites of the plugin use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from afd_plugin.routing import (
    ROUTING_OP,
    RoutingCalls,
    TokenHolders,
    bound_runtime,
    routing_calls,
    script_runtime,
)
from afd_testkit.library import OpLibrary

Collide = Callable[[ModuleType, Sequence[Callable[[], None]]], None]


@pytest.fixture
def collide(monkeypatch: pytest.MonkeyPatch) -> Collide:
    """Runs calls at once, each on its own thread, until all are done.

    Between reading a count and writing it the module's ``replace`` takes its time, so that
    threads which do not wait for each other lose counts for sure.
    """

    def slowly(value: Any, **changes: Any) -> Any:
        time.sleep(0.005)
        return replace(value, **changes)

    def run(module: ModuleType, calls: Sequence[Callable[[], None]]) -> None:
        monkeypatch.setattr(module, "replace", slowly)
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


@pytest.fixture
def routing_op(op_library: OpLibrary) -> Iterator[None]:
    """Registered, with the context variable as its flag, eight experts lying on four ranks."""
    op_library.register(ROUTING_OP)
    with bound_runtime(script_runtime(TokenHolders(expert_ranks=4))):
        yield


@pytest.fixture
def counted() -> Callable[[], AbstractContextManager[list[RoutingCalls]]]:
    """``with counted() as told``: what the operator did inside, in the list afterwards."""

    @contextmanager
    def count() -> Iterator[list[RoutingCalls]]:
        before = routing_calls()
        told: list[RoutingCalls] = []
        yield told
        told.append(routing_calls().since(before))

    return count
