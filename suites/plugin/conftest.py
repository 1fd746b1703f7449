"""What several suites of the plugin use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

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
