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
    """``what`` is wrong, which ``gates`` must show it, and how it is injected."""

    name: str
    what: str
    gates: tuple[str, ...]
    inject: Callable[[FaultTarget], AbstractContextManager[None]]


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
