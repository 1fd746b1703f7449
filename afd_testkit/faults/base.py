"""What a fault is: a known-bad variant that gates must catch, as code that injects it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


class FaultTarget(Protocol):
    """What of an engine a fault may touch."""

    def decoder_layers(self) -> Sequence[Any]:
        """Modules called with (positions, hidden_states, residual, ...) in layer order."""
        ...

    def moe_routers(self) -> Sequence[Any]:
        """Objects whose ``select_experts`` returns (weights, ids), in layer order."""
        ...


@dataclass(frozen=True)
class Fault:
    """``what`` is wrong, which ``gates`` must show it, and how it is injected.

    ``at_start``: it is in force from before an engine starts, since it lies in what is
    registered or compiled there; injected later it would change nothing.
    """

    name: str
    what: str
    gates: tuple[str, ...]
    inject: Callable[[FaultTarget], AbstractContextManager[None]]
    at_start: bool = False


class NoTarget:
    """For faults that touch nothing of an engine, in a process without one or before its start."""

    def decoder_layers(self) -> Sequence[Any]:
        """None."""
        return ()

    def moe_routers(self) -> Sequence[Any]:
        """None."""
        return ()


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Generator[None, None, None]:
    """``owner.name`` replaced by ``make(original)``; an instance attribute is removed again."""
    original = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
