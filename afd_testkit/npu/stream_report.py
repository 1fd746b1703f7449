"""Where accesses were made, and the text of a hazard."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from afd_testkit.npu.happens_before import Access

Site = tuple[tuple[CodeType, int], ...]

DEPTH = 4
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_FOREIGN = (_OWN, _TORCH, "<")
_is_user: dict[CodeType, bool] = {}


def call_site() -> Site:
    """The innermost frames of the caller that belong neither to torch nor to the emulation."""
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < DEPTH:
        code = frame.f_code
        user = _is_user.get(code)
        if user is None:
            user = _is_user[code] = not code.co_filename.startswith(_FOREIGN)
        if user:
            found.append((code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Note:
    """What is said of an access: operator, actor, where, and the tensor as it was given."""

    operator: str
    actor: str
    site: Site
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Hazard:
    """Two accesses that nothing orders, to memory of ``nbytes`` bytes."""

    earlier: Access
    later: Access
    nbytes: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same two places in the program that do the same."""
        return tuple(
            (_note(access).operator, _note(access).site[:1], access.writes)
            for access in (self.earlier, self.later)
        )

    @property
    def message(self) -> str:
        """Both accesses with their sites, and what would order them."""
        return "\n".join(
            [
                f"{_verb(self.later)} after {_verb(self.earlier)} without an order between them, "
                f"in memory of {self.nbytes} bytes.",
                _described("first", self.earlier),
                _described("then", self.later),
                _remedy(_note(self.earlier).actor, _note(self.later).actor),
            ]
        )


def _note(access: Access) -> Note:
    if not isinstance(access.note, Note):
        raise TypeError(f"an access of the stream check carries a Note, not {access.note!r}")
    return access.note


def _verb(access: Access) -> str:
    return "write" if access.writes else "read"


def _described(when: str, access: Access) -> str:
    note, region = _note(access), access.region
    dtype = str(note.dtype).removeprefix("torch.")
    rows = f" ({region.count} rows of {region.length})" if region.count > 1 else ""
    head = (
        f"  {when}: {note.operator} {_verb(access)}s {dtype}{list(note.shape)}, bytes "
        f"{region.start} to {region.stop}{rows}, on {note.actor}"
    )
    lines = [f"    {code.co_filename}:{line} in {code.co_qualname}" for code, line in note.site]
    return "\n".join([head, *lines])


def _remedy(first: str, second: str) -> str:
    if not first.startswith("stream"):
        return (
            f"  {second} does not come after {first}: let the thread of the first access hand "
            "over before the second starts."
        )
    if second.startswith("stream"):
        return (
            f"  To order them, record an event on {first} after the first access and let "
            f"{second} wait_event it before the second (or wait_stream)."
        )
    return (
        f"  To order them, record an event on {first} after the first access and synchronize "
        "the event, the stream or the device before the second."
    )
