"""JSON of which nobody can read two things: an object never names a member twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any


def read_json(text: str, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The value of ``text``; ``parse_constant`` as ``json.loads`` has it.

    Raises ``ValueError`` for what is no JSON, names a member of an object twice, or is nested or
    long beyond what Python reads.
    """
    try:
        return json.loads(text, parse_constant=parse_constant, object_pairs_hook=_refuse_repetition)
    except RecursionError as error:
        raise ValueError("it is nested too deeply to be read") from error


def _refuse_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dictionary; whoever reads it must not find one of two values."""
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise ValueError(
            f"an object names {twice!r} more than once; of two values either may be meant"
        )
    return members
