"""What of an upstream package is relied on, and how the installed one differs from it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from afd_plugin.errors import MetadataError, UpstreamDrift
from afd_plugin.metadata import resolve_rules


@dataclass(frozen=True)
class Difference:
    """One thing that is not as pinned; ``found`` is ``None`` where it is gone."""

    where: str
    pinned: str
    found: str | None
    remedy: str

    def __str__(self) -> str:
        now = "is gone" if self.found is None else self.found
        return f"{self.where} {now}, pinned is {self.pinned}. {self.remedy}"


@dataclass(frozen=True)
class Contract:
    """Everything that is overridden, wrapped, replaced or read of one upstream stack.

    ``stack``: its name and version.  ``signatures``: parameter names, in order, of what is
    overridden, patched or called by keyword; methods by (owner, name), functions by (module,
    name).  ``fields``: of dataclasses that are copied with changes.  ``names``: globals of
    modules that are read or replaced.  ``metadata``: classes whose every field needs a rule.
    """

    stack: str
    signatures: Mapping[tuple[Any, str], tuple[str, ...]] = field(default_factory=dict)
    fields: Mapping[type, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[ModuleType, tuple[str, ...]] = field(default_factory=dict)
    metadata: tuple[type, ...] = ()

    def differences(self) -> list[Difference]:
        """All differences between the pinned contract and what is installed and loaded."""
        return [
            *self._signature_differences(),
            *self._field_differences(),
            *self._name_differences(),
            *self._rule_differences(),
        ]

    def check(self) -> None:
        """Raise for the first difference, with the others as notes.

        Raises :class:`UpstreamDrift`, or the metadata error that a class's rules raise.
        """
        for cls in self.metadata:
            resolve_rules(cls)
        found = self.differences()
        if found:
            error = UpstreamDrift(str(found[0]))
            for other in found[1:]:
                error.add_note(f"also: {other}")
            raise error

    def _signature_differences(self) -> list[Difference]:
        found = []
        for (owner, name), pinned in self.signatures.items():
            where = f"{_name(owner)}.{name}"
            if not hasattr(owner, name):
                remedy = f"{self.stack} differs from the release of that number. Reinstall it."
                found.append(Difference(where, str(pinned), None, remedy))
                continue
            now = tuple(inspect.signature(getattr(owner, name)).parameters)
            if now != pinned:
                remedy = (
                    f"This installation, or a plugin that replaced it, differs from {self.stack}. "
                    "Reinstall it, or run without that plugin."
                )
                found.append(Difference(where, str(pinned), f"takes {now}", remedy))
        return found

    def _field_differences(self) -> list[Difference]:
        remedy = "Decide what each new field means for a stage."
        return [
            Difference(f"{_name(cls)}", str(pinned), f"has fields {now}", remedy)
            for cls, pinned in self.fields.items()
            if (now := tuple(each.name for each in dataclasses.fields(cls))) != pinned
        ]

    def _name_differences(self) -> list[Difference]:
        remedy = "Look for what replaced it."
        return [
            Difference(f"{module.__name__}.{name}", "a global of that module", None, remedy)
            for module, names in self.names.items()
            for name in names
            if name not in vars(module)
        ]

    def _rule_differences(self) -> list[Difference]:
        found = []
        for cls in self.metadata:
            try:
                resolve_rules(cls)
            except MetadataError as error:
                where = f"field rules of {_name(cls)}"
                found.append(
                    Difference(where, "one rule for every field", "do not fit", str(error))
                )
        return found


def _name(owner: Any) -> str:
    return str(owner.__name__ if isinstance(owner, ModuleType) else owner.__qualname__)
