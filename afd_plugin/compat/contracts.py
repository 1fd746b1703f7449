"""What of an upstream stack is relied on, and how the installed one differs from it.

A contract holds names only (``package.module:Class.attribute``), so that reading one imports
nothing, and what is gone is a difference like any other.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from afd_plugin.errors import AfdError, MetadataError, UpstreamDrift
from afd_plugin.metadata import resolve_rules

# Parameters of vLLM's direct_register_custom_op, alike in both pinned stacks.
REGISTER_OP = (
    "op_name",
    "op_func",
    "mutates_args",
    "fake_impl",
    "target_lib",
    "dispatch_key",
    "tags",
)


@dataclass(frozen=True)
class Difference:
    """One thing that is not as pinned.

    ``where``: what differs.  ``pinned``, ``found``: what was expected and what is there, as
    ends of a sentence.  ``cause``: the error that says it better.
    """

    where: str
    pinned: str
    found: str
    remedy: str
    cause: AfdError | None = None

    def __str__(self) -> str:
        return f"{self.where} {self.found}, pinned is {self.pinned}. {self.remedy}"


_Compare = Callable[[Any], Difference | None]


class _Gone(Exception):
    """A path that leads nowhere; the text says where it ends."""


@dataclass(frozen=True)
class Contract:
    """Everything that is overridden, wrapped, replaced or read of one upstream stack.

    ``stack``: its name and version.  ``signatures``: parameter names, in order, of what is
    overridden, patched or called by keyword.  ``fields``: of dataclasses that are copied with
    changes.  ``members``: of enumerations that decide something.  ``names``: classes and
    globals of modules that are read, replaced or told apart by their path.  ``metadata``:
    classes whose every field needs a rule.  ``first``: modules to import before all others,
    which import each other in a circle.
    """

    stack: str
    first: tuple[str, ...] = ()
    signatures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    metadata: tuple[str, ...] = ()

    def differences(self) -> list[Difference]:
        """All differences between the pinned contract and what is installed, which is imported."""
        found = []
        for path, compare in self._comparisons():
            try:
                difference = compare(_resolve(path))
            except _Gone as error:
                difference = Difference(_short(path), "that it exists", str(error), self._reinstall)
            if difference is not None:
                found.append(difference)
        return found

    def counts(self) -> dict[str, int]:
        """How many things of each kind are compared, by a name in the plural."""
        return {
            "signatures": len(self.signatures),
            "dataclasses": len(self.fields),
            "enumerations": len(self.members),
            "names": len(self.names),
            "metadata classes": len(self.metadata),
        }

    def check(self) -> None:
        """Raise for one difference, with the others as notes.

        Raises the metadata error that a class's rules raise, else :class:`UpstreamDrift`.
        """
        found = self.differences()
        if not found:
            return
        first = next((each for each in found if each.cause is not None), found[0])
        error = first.cause or UpstreamDrift(str(first))
        for other in found:
            if other is not first:
                error.add_note(f"also: {other}")
        raise error

    @property
    def _reinstall(self) -> str:
        return (
            f"This installation, or a plugin that replaced it, differs from {self.stack}. "
            "Reinstall it, or run without that plugin."
        )

    def _comparisons(self) -> Iterator[tuple[str, _Compare]]:
        """Every path, and what to ask of the thing that it leads to."""
        for path in self.first:
            yield path, lambda found: None
        for path, pinned in self.signatures.items():
            yield path, partial(self._signature, path, pinned)
        for path, pinned in self.fields.items():
            yield path, partial(_fields, path, pinned)
        for path, pinned in self.members.items():
            yield path, partial(_members, path, pinned)
        for path in self.names:
            yield path, lambda found: None
        for path in self.metadata:
            yield path, partial(_rules, path)

    def _signature(self, path: str, pinned: tuple[str, ...], found: Any) -> Difference | None:
        now = tuple(inspect.signature(found).parameters)
        if now == pinned:
            return None
        return Difference(_short(path), _call(pinned), f"takes {_call(now)}", self._reinstall)


def _resolve(path: str) -> Any:
    """What ``package.module:Class.attribute`` names."""
    module, _, rest = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise _Gone(f"cannot be imported ({error})") from error
    for name in rest.split(".") if rest else ():
        if not hasattr(found, name):
            raise _Gone("is gone")
        found = getattr(found, name)
    return found


def _short(path: str) -> str:
    """A path as one writes it: with the module only where that is the owner."""
    _, _, rest = path.partition(":")
    return rest if rest[:1].isupper() else path.replace(":", ".")


def _call(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})"


def _fields(path: str, pinned: tuple[str, ...], cls: Any) -> Difference | None:
    names = tuple(each.name for each in dataclasses.fields(cls))
    return _listed(path, "field", pinned, names)


def _members(path: str, pinned: tuple[str, ...], cls: type[enum.Enum]) -> Difference | None:
    return _listed(path, "member", pinned, tuple(cls.__members__))


def _listed(
    path: str, noun: str, pinned: tuple[str, ...], now: tuple[str, ...]
) -> Difference | None:
    """A difference of ``now`` from ``pinned``, told by what is new and what is missing."""
    if now == pinned:
        return None
    told = []
    for names, what in (
        ([name for name in now if name not in pinned], f"has new {noun}(s)"),
        ([name for name in pinned if name not in now], f"lacks {noun}(s)"),
    ):
        if names:
            told.append(f"{what} {', '.join(names)}")
    return Difference(
        _short(path),
        f"{len(pinned)} {noun}s {_call(pinned)}",
        " and ".join(told) or f"has its {noun}s in the order {_call(now)}",
        f"Decide what each new {noun} means for a stage.",
    )


def _rules(path: str, cls: Any) -> Difference | None:
    try:
        resolve_rules(cls)
    except (MetadataError, UpstreamDrift) as error:
        where, pinned = f"field rules of {_short(path)}", "one for every field"
        return Difference(where, pinned, "do not fit", str(error), error)
    return None
