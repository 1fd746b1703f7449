"""Scopes: state is back on every way out, and the error that happened is the one that is seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from afd_plugin.context import (
    AttributeSlot,
    ScopeStack,
    current_stage,
    replaced,
    shadowed,
    stage_scope,
)
from afd_plugin.errors import AfdError, StateRestoreError

pytestmark = pytest.mark.cpu

ERRORS = [ValueError("boom"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), StopIteration(1)]
error_ids = [type(error).__name__ for error in ERRORS]


class Log:
    """Scopes that write down when they are entered and left."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def scope(
        self,
        name: str,
        *,
        enter: BaseException | None = None,
        leave: BaseException | None = None,
        swallow: bool = False,
    ) -> Iterator[str]:
        if enter is not None:
            raise enter
        self.lines.append(f"+{name}")
        try:
            yield name
        except BaseException:
            if not swallow:
                raise
        finally:
            self.lines.append(f"-{name}")
            if leave is not None:
                raise leave


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


# --- AttributeSlot and replaced -----------------------------------------------------------


def test_replaced_inside_and_restored_after() -> None:
    owner = SimpleNamespace(mode="whole")
    with replaced(AttributeSlot(owner, "mode"), "stage"):
        assert owner.mode == "stage"
    assert owner.mode == "whole"


@pytest.mark.parametrize("error", ERRORS, ids=error_ids)
def test_restored_after_an_error(error: BaseException) -> None:
    owner = SimpleNamespace(mode="whole")
    with pytest.raises(type(error)) as caught, replaced(AttributeSlot(owner, "mode"), "stage"):
        raise error
    assert caught.value is error
    assert owner.mode == "whole"


def test_restored_even_if_the_body_changed_it_again() -> None:
    owner = SimpleNamespace(mode="whole")
    with replaced(AttributeSlot(owner, "mode"), "stage"):
        owner.mode = "something else"
    assert owner.mode == "whole"


def test_nested() -> None:
    owner = SimpleNamespace(mode=0)
    slot = AttributeSlot(owner, "mode")
    with replaced(slot, 1):
        with replaced(slot, 2):
            assert owner.mode == 2
        assert owner.mode == 1
    assert owner.mode == 0


def test_an_attribute_that_is_not_there_is_not_made() -> None:
    owner = SimpleNamespace()
    with pytest.raises(AttributeError), replaced(AttributeSlot(owner, "mode"), 1):
        pytest.fail("the body must not run")
    assert vars(owner) == {}


def test_the_same_object_is_put_back() -> None:
    builders = [object()]
    owner = SimpleNamespace(builders=builders)
    with replaced(AttributeSlot(owner, "builders"), []):
        pass
    assert owner.builders is builders


# --- ScopeStack -----------------------------------------------------------------------------


def test_entered_in_order_and_left_in_reverse() -> None:
    log = Log()
    with ScopeStack() as scopes:
        assert [scopes.enter(log.scope(name)) for name in "abc"] == ["a", "b", "c"]
    assert log.lines == ["+a", "+b", "+c", "-c", "-b", "-a"]


def run(*states: AbstractContextManager[Any], error: BaseException | None = None) -> None:
    """Enter all states, raise ``error`` if there is one, and leave."""
    with ScopeStack() as scopes:
        for state in states:
            scopes.enter(state)
        if error is not None:
            raise error


@pytest.mark.parametrize("error", ERRORS, ids=error_ids)
def test_left_after_an_error_which_surfaces(error: BaseException) -> None:
    log = Log()
    with pytest.raises(type(error)) as caught:
        run(log.scope("a"), log.scope("b"), error=error)
    assert caught.value is error
    assert log.lines == ["+a", "+b", "-b", "-a"]
    assert notes(error) == []


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("failing", ["a", "b", "c"])
def test_a_scope_that_fails_on_enter(failing: str, error: BaseException) -> None:
    log = Log()
    with pytest.raises(type(error)) as caught:
        run(*(log.scope(name, enter=error if name == failing else None) for name in "abc"))
    assert caught.value is error
    entered = "abc"[: "abc".index(failing)]
    assert log.lines == [*(f"+{n}" for n in entered), *(f"-{n}" for n in reversed(entered))]


def test_no_scope_may_swallow_an_error() -> None:
    log = Log()
    with pytest.raises(KeyError, match="boom"):
        run(log.scope("a"), log.scope("b", swallow=True), error=KeyError("boom"))
    assert log.lines == ["+a", "+b", "-b", "-a"]


def test_a_failing_restore_becomes_a_note_of_the_original_error() -> None:
    log = Log()
    states = [
        log.scope("a", leave=OSError("stuck a")),
        log.scope("b"),
        log.scope("c", leave=OSError("stuck c")),
    ]
    with pytest.raises(KeyError, match="boom") as caught:
        run(*states, error=KeyError("boom"))
    assert log.lines == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert notes(caught.value) == [
        "and state could not be put back: OSError('stuck c')",
        "and state could not be put back: OSError('stuck a')",
    ]


def test_a_failing_restore_without_another_error() -> None:
    log = Log()
    stuck = OSError("stuck c")
    with pytest.raises(StateRestoreError, match=r"stuck c.*stuck b.*Restart") as caught:
        run(
            log.scope("a"),
            log.scope("b", leave=OSError("stuck b")),
            log.scope("c", leave=stuck),
        )
    assert log.lines == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert isinstance(caught.value, AfdError)
    assert caught.value.__cause__ is stuck


def test_a_failing_setter_is_seen_while_restoring() -> None:
    class Sticky:
        """Takes a new mode once."""

        _mode = "whole"

        @property
        def mode(self) -> str:
            return self._mode

        @mode.setter
        def mode(self, value: str) -> None:
            if self._mode != "whole":
                raise OSError("stuck")
            self._mode = value

    with pytest.raises(StateRestoreError, match="stuck"):
        run(replaced(AttributeSlot(Sticky(), "mode"), "stage"))
    with (
        pytest.raises(KeyError) as caught,
        stage_scope(1, [replaced(AttributeSlot(Sticky(), "mode"), 1)]),
    ):
        raise KeyError("boom")
    assert len(notes(caught.value)) == 1
    assert current_stage() is None


# --- stage_scope and current_stage ------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_current_stage(stage: int) -> None:
    assert current_stage() is None
    with stage_scope(stage):
        assert current_stage() == stage
    assert current_stage() is None


@pytest.mark.parametrize("error", ERRORS, ids=error_ids)
def test_current_stage_after_an_error(error: BaseException) -> None:
    log = Log()
    with pytest.raises(type(error)) as caught, stage_scope(1, [log.scope("a"), log.scope("b")]):
        raise error
    assert caught.value is error
    assert current_stage() is None
    assert log.lines == ["+a", "+b", "-b", "-a"]


def test_scopes_see_the_number_of_their_stage() -> None:
    seen: list[Any] = []

    @contextmanager
    def watching() -> Iterator[None]:
        seen.append(current_stage())
        yield
        seen.append(current_stage())

    with stage_scope(1, [watching()]):
        pass
    assert seen == [1, 1]


def test_nested_stages_come_back_to_the_outer_one() -> None:
    with stage_scope(0):
        with stage_scope(1):
            assert current_stage() == 1
        assert current_stage() == 0


def test_each_thread_has_its_own_stage() -> None:
    seen: dict[str, Any] = {}
    both_inside = threading.Barrier(2, timeout=10)

    def run(name: str, stage: int) -> None:
        seen[f"{name} before"] = current_stage()
        with stage_scope(stage):
            both_inside.wait()
            seen[f"{name} inside"] = current_stage()
            both_inside.wait()
        seen[f"{name} after"] = current_stage()

    with stage_scope(0):
        threads = [threading.Thread(target=run, args=(f"t{i}", i)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
        assert current_stage() == 0
    assert seen == {
        "t0 before": None,
        "t1 before": None,
        "t0 inside": 0,
        "t1 inside": 1,
        "t0 after": None,
        "t1 after": None,
    }


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_stage_scope_whose_state_fails_on_enter(failing: int) -> None:
    log = Log()
    error = RuntimeError("no context")
    state = [log.scope(str(i), enter=error if i == failing else None) for i in range(3)]
    with pytest.raises(RuntimeError, match="no context") as caught, stage_scope(0, state):
        pytest.fail("not reached")
    assert caught.value is error
    assert [line for line in log.lines if line[0] == "-"] == [
        f"-{i}" for i in reversed(range(failing))
    ]
    assert current_stage() is None


@pytest.mark.parametrize("error", [None, ValueError("inside"), KeyboardInterrupt()])
def test_a_shadowed_method_is_the_classs_own_again(error: BaseException | None) -> None:
    class Layer:
        def forward(self) -> str:
            return "native"

    layer = Layer()

    def use() -> None:
        with shadowed(layer, "forward", lambda: "other"):
            assert layer.forward() == "other"
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(type(error)):
            use()
    assert layer.forward() == "native"
    assert vars(layer) == {}
