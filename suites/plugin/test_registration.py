"""The entry point completes or raises, as often as it is called."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from afd_plugin import registration
from afd_plugin.compat import known
from afd_plugin.errors import UpstreamDrift

pytestmark = pytest.mark.cpu

COMPAT = "afd_plugin.compat.vllm"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_done", False)
    monkeypatch.setattr(known, "vllm_version", lambda: known.PINNED_VLLM)


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
    def missing() -> str:
        raise UpstreamDrift("no vLLM is installed")

    monkeypatch.setattr(known, "vllm_version", missing)
    for _ in range(2):
        with pytest.raises(UpstreamDrift, match="no vLLM is installed"):
            registration.register()


def test_another_release_is_named_before_its_modules_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known, "vllm_version", lambda: "0.33.1")
    monkeypatch.setitem(sys.modules, COMPAT, None)  # type: ignore[arg-type]
    with pytest.raises(UpstreamDrift, match=r"vLLM 0\.33\.1 .* against 0\.32\.0"):
        registration.register()


def test_a_broken_installation_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, COMPAT, None)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(ImportError, match="vllm"):
            registration.register()


def test_the_entry_point_names_it() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="afd")
    assert entry.load() is registration.register
