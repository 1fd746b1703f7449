"""Attention metadata of a step → attention metadata of each stage.

Every field of the metadata class has a rule (``rules``); a field without one is an error that
names it, so that an upgrade cannot drop one silently.  The parent is never written.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from afd_plugin.compat.known import builtin_rules
from afd_plugin.errors import (
    MetadataMismatch,
    MissingFieldRule,
    StaleFieldRule,
    UnknownMetadataClass,
)
from afd_plugin.pieces import Pieces, match_lengths, match_offsets
from afd_plugin.plan import SplitPlan
from afd_plugin.rules import Rule, none_stays_none

M = TypeVar("M")


class _Fields(NamedTuple):
    """A metadata class, ready to be sliced.

    ``rules``: (field, rule) in the order of the fields.  ``steps``: the same, each with
    whether the rule is to be asked about ``None``.  ``positional``: whether the class is
    built from its fields in this order, which is the quicker way.
    """

    rules: tuple[tuple[str, Rule], ...]
    steps: tuple[tuple[str, Rule, bool], ...]
    positional: bool


_registered: dict[type, Mapping[str, Rule]] = {}
_resolved: dict[type, _Fields] = {}


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def register_metadata_rules(cls: type, rules: Mapping[str, Rule]) -> None:
    """Give the fields that ``cls`` itself adds (or changes) their rules.

    A subclass inherits the rules of its bases, so only its own fields are needed.  The whole
    class is resolved at once: raises :class:`MissingFieldRule` or :class:`StaleFieldRule`.
    Registering again replaces the earlier rules.
    """
    previous = _registered.get(cls)
    _registered[cls] = dict(rules)
    _resolved.clear()
    try:
        resolve_rules(cls)
    except Exception:
        if previous is None:
            del _registered[cls]
        else:
            _registered[cls] = previous
        raise


def unregister_metadata_rules(cls: type) -> None:
    """Forget what :func:`register_metadata_rules` was told of ``cls``."""
    _registered.pop(cls, None)
    _resolved.clear()


def resolve_rules(cls: type) -> tuple[tuple[str, Rule], ...]:
    """(field, rule) for every field of ``cls``, bases' rules included; cached.

    Raises :class:`UnknownMetadataClass` when neither ``cls`` nor a base has rules or it is no
    dataclass, :class:`MissingFieldRule` for fields without one, :class:`StaleFieldRule` for
    rules without a field.
    """
    return _fields(cls).rules


def _fields(cls: type) -> _Fields:
    """See :func:`resolve_rules`."""
    if cls in _resolved:
        return _resolved[cls]
    rules: dict[str, Rule] = {}
    known = False
    for base in reversed(cls.__mro__):
        table = _registered.get(base)
        if table is None:
            table = builtin_rules(base)
        if table is not None:
            known = True
            rules.update(table)
    if not known or not dataclasses.is_dataclass(cls):
        raise UnknownMetadataClass(
            f"no field rules are known for {_name(cls)}; known are the pinned upstream classes "
            "and dataclasses given to register_metadata_rules(cls, rules)."
        )
    fields = dataclasses.fields(cls)
    missing = [field.name for field in fields if field.name not in rules or not field.init]
    if missing:
        raise MissingFieldRule(
            f"{_name(cls)} has field(s) without a rule: {', '.join(missing)}. Every field must "
            "have one, so that none is dropped or copied wrongly; add it with "
            "register_metadata_rules or to the table of the pinned version."
        )
    stale = sorted(set(rules) - {field.name for field in fields})
    if stale:
        raise StaleFieldRule(
            f"{_name(cls)} lacks field(s) that have a rule: {', '.join(stale)}. The class changed; "
            "review its table of rules."
        )
    ordered = tuple((field.name, rules[field.name]) for field in fields)
    _resolved[cls] = _Fields(
        rules=ordered,
        steps=tuple((name, rule, not none_stays_none(rule)) for name, rule in ordered),
        positional=_takes_in_order(cls, [name for name, _ in ordered]),
    )
    return _resolved[cls]


def _takes_in_order(cls: type, names: list[str]) -> bool:
    """Whether ``cls(*values)`` sets exactly the fields ``names``, in their order."""
    parameters = inspect.signature(cls).parameters.values()
    by_place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in parameters] == names and all(p.kind is by_place for p in parameters)


def _check_parent(parent: Any, pieces: Pieces) -> None:
    """The parent's offsets and bounds must be those of the plan's batch.

    Rows after the batch's requests are padding and must be empty.
    """
    batch = pieces.plan.batch
    offsets = _on_cpu("query_start_loc_cpu", parent.query_start_loc_cpu, pieces)
    match_offsets(offsets, pieces)
    if parent.num_actual_tokens < batch.num_tokens or parent.num_reqs < batch.num_reqs:
        raise MetadataMismatch(
            f"the metadata speaks of {parent.num_reqs} requests and {parent.num_actual_tokens} "
            f"tokens, the plan of {batch.num_reqs} and {batch.num_tokens}."
        )
    if parent.seq_lens_cpu_upper_bound is not None:
        name = "seq_lens_cpu_upper_bound"
        match_lengths(name, _on_cpu(name, parent.seq_lens_cpu_upper_bound, pieces), pieces)


def _on_cpu(name: str, value: Any, pieces: Pieces) -> NDArray[Any]:
    view = pieces.view(value)
    if view is None:
        raise MetadataMismatch(f"field {name} is on {value.device}; it must be on the CPU.")
    return view


def slice_metadata(parent: M, plan: SplitPlan) -> tuple[M, M]:
    """One metadata object a stage, of the parent's own class.

    ``parent``: a dataclass with rules, such as vLLM's ``CommonAttentionMetadata``, describing
    exactly ``plan.batch`` (padding rows after its requests and tokens are dropped).
    Offsets and lengths are new tensors; per-request and per-token fields are views.

    Raises subclasses of :class:`~afd_plugin.errors.MetadataError`.
    """
    cls = type(parent)
    fields = _fields(cls)
    pieces = Pieces(plan)
    _check_parent(parent, pieces)
    first: list[Any] = []
    second: list[Any] = []
    for name, rule, takes_none in fields.steps:
        value = getattr(parent, name)
        if value is None and not takes_none:
            first.append(None)
            second.append(None)
            continue
        one, two = rule(name, value, parent, pieces)
        first.append(one)
        second.append(two)
    if fields.positional:
        return cls(*first), cls(*second)
    names = [name for name, _ in fields.rules]
    return cls(**dict(zip(names, first, strict=True))), cls(**dict(zip(names, second, strict=True)))
