"""The entry point completes or raises, as often as it is called."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from afd_plugin import registration
from afd_plugin.errors import UpstreamDrift

pytestmark = pytest.mark.cpu

COMPAT = "afd_plugin.compat.vllm"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_done", False)


def compat(monkeypatch: pytest.MonkeyPatch, *outcomes: BaseException | None) -> list[int]:
    """A drift check that ends in each of ``outcomes`` in turn; the list grows with each call."""
    calls: list[int] = []
    module = ModuleType(COMPAT)

    def check_drift() -> None:
        calls.append(len(calls))
        outcome = outcomes[len(calls) - 1]
        if outcome is not None:
            raise outcome

    module.check_drift = check_drift  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, COMPAT, module)
    return calls


def test_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compat(monkeypatch, None)
    registration.register()
    registration.register()
    assert calls == [0]


@pytest.mark.parametrize("error", [UpstreamDrift("moved"), ValueError("odd"), KeyboardInterrupt()])
def test_a_failure_is_raised_every_time(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    calls = compat(monkeypatch, error, error, None)
    for _ in range(2):
        with pytest.raises(type(error)):
            registration.register()
    registration.register()
    registration.register()
    assert calls == [0, 1, 2]


def test_without_vllm_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, COMPAT, None)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(ImportError, match="vllm"):
            registration.register()


def test_the_entry_point_names_it() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="afd")
    assert entry.load() is registration.register
