"""Scopes that set mutable state for a stage and always put it back.

A forward pass reads state that is not among its arguments: the forward context, metadata
builders, communication modes.  A stage that leaves its own behind makes the next stage, or
the next step, silently wrong.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from afd_plugin.errors import StateRestoreError

# The stage whose forward pass is running here, None outside of one.
_stage: ContextVar[int | None] = ContextVar("afd_stage", default=None)


def current_stage() -> int | None:
    """0 or 1 while that stage's forward pass runs in this thread, else ``None``."""
    return _stage.get()


class StateSlot(Protocol):
    """One piece of mutable state that can be read and replaced."""

    def get(self) -> Any:
        """The value now."""
        ...

    def set(self, value: Any) -> None:
        """Replace the value."""
        ...


class AttributeSlot:
    """An attribute that ``owner`` already has, such as a list of builders or a mode flag."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner = owner
        self.name = name

    def get(self) -> Any:
        return getattr(self.owner, self.name)

    def set(self, value: Any) -> None:
        setattr(self.owner, self.name, value)


@contextmanager
def stage_scope(
    stage: int, state: Sequence[AbstractContextManager[Any]] = ()
) -> Generator[None, None, None]:
    """Everything that holds while ``stage`` runs: its number and each of ``state``, in order.

    Put back in reverse order on every way out; the error of the stage itself surfaces.
    """
    with ScopeStack() as scopes:
        scopes.enter(_running(stage))
        for scope in state:
            scopes.enter(scope)
        yield


@contextmanager
def _running(stage: int) -> Generator[None, None, None]:
    token = _stage.set(stage)
    try:
        yield
    finally:
        _stage.reset(token)


@contextmanager
def replaced(slot: StateSlot, value: Any) -> Generator[None, None, None]:
    """``slot`` holds ``value`` inside, and what it held before afterwards."""
    before = slot.get()
    slot.set(value)
    try:
        yield
    finally:
        slot.set(before)


@contextmanager
def shadowed(owner: object, name: str, value: Any) -> Generator[None, None, None]:
    """``owner`` has a ``name`` of its own inside, before its class's; nothing is left of it."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


class ScopeStack:
    """Nested scopes that are all left, even when leaving one of them fails.

    Unlike ``contextlib.ExitStack``, an error from the body always surfaces as itself: failures
    to restore are attached to it as notes.  Without one they raise :class:`StateRestoreError`.
    No scope may swallow an exception.
    """

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[Any]] = []

    def enter(self, scope: AbstractContextManager[Any]) -> Any:
        """Enter ``scope``; it is left with the stack."""
        value = scope.__enter__()
        self._open.append(scope)
        return value

    def __enter__(self) -> ScopeStack:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failures: list[BaseException] = []
        while self._open:
            scope = self._open.pop()
            try:
                scope.__exit__(kind, error, trace)
            except BaseException as raised:
                if raised is not error:
                    failures.append(raised)
        if not failures:
            return
        if error is not None:
            for failure in failures:
                error.add_note(f"and state could not be put back: {failure!r}")
            return
        raise StateRestoreError(
            "state could not be put back after a stage: "
            + "; ".join(repr(failure) for failure in failures)
            + ". Restart the worker: its state is not known."
        ) from failures[0]
