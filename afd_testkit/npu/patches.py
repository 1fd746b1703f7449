"""Changes to other people's objects that are all undone, the last one first."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

_ABSENT = object()


class PatchSet:
    """Every change is remembered; :meth:`restore` undoes all of them once."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attribute(self, target: Any, name: str, value: object) -> None:
        """Set ``target.name``; a name that ``target`` only inherits is removed again later."""
        before = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        if before is _ABSENT:
            self._undo.append(lambda: delattr(target, name))
        else:
            self._undo.append(lambda: setattr(target, name, before))

    def entry(self, mapping: MutableMapping[str, Any], key: str, value: object) -> None:
        """Set ``mapping[key]``."""
        before = mapping.get(key, _ABSENT)
        mapping[key] = value

        def undo() -> None:
            if before is _ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = before

        self._undo.append(undo)

    def later(self, undo: Callable[[], None]) -> None:
        """Have ``undo`` run when everything that was changed after now has been undone."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Undo everything; an error in one does not keep the others from being undone."""
        errors: list[Exception] = []
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("not everything could be restored", errors)
