"""Attention metadata of a step → attention metadata of each stage.

Every field of the metadata class has a rule (``rules``); a field without one is an error that
names it, so that an upgrade cannot drop one silently.  The parent is never written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from afd_plugin.compat.known import builtin_rules
from afd_plugin.errors import (
    MetadataMismatch,
    MissingFieldRule,
    StaleFieldRule,
    UnknownMetadataClass,
)
from afd_plugin.plan import SplitPlan
from afd_plugin.rules import Pieces, Rule, on_cpu

M = TypeVar("M")

_registered: dict[type, Mapping[str, Rule]] = {}
_resolved: dict[type, tuple[tuple[str, Rule], ...]] = {}


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
    _resolved[cls] = tuple((field.name, rules[field.name]) for field in fields)
    return _resolved[cls]


def _check_parent(parent: Any, plan: SplitPlan) -> None:
    """The parent's offsets and bounds must be those of the plan's batch.

    Rows after the batch's requests are padding and must be empty.
    """
    batch = plan.batch
    offsets = _on_cpu("query_start_loc_cpu", parent.query_start_loc_cpu)
    extra = offsets[batch.num_reqs + 1 :]
    if not _equal(offsets[: batch.num_reqs + 1], batch.query_start_loc) or (
        extra.size and (extra != batch.num_tokens).any()
    ):
        raise MetadataMismatch(
            f"query_start_loc {_short(offsets)} does not match the batch of the plan, "
            f"{_short(batch.query_start_loc)}. Plan and metadata must describe the same step."
        )
    if parent.num_actual_tokens < batch.num_tokens or parent.num_reqs < batch.num_reqs:
        raise MetadataMismatch(
            f"the metadata speaks of {parent.num_reqs} requests and {parent.num_actual_tokens} "
            f"tokens, the plan of {batch.num_reqs} and {batch.num_tokens}."
        )
    if parent.seq_lens_cpu_upper_bound is None:
        return
    bounds = _on_cpu("seq_lens_cpu_upper_bound", parent.seq_lens_cpu_upper_bound)
    bounds = bounds[: batch.num_reqs]
    if _equal(bounds, batch.seq_lens):
        return
    # Bounds are exact for prefilling rows and may be higher for decodes.
    if (
        bounds.shape != batch.seq_lens.shape
        or ((bounds < batch.seq_lens) | (batch.is_prefilling & (bounds != batch.seq_lens))).any()
    ):
        raise MetadataMismatch(
            f"seq_lens_cpu_upper_bound {_short(bounds)} does not match computed + scheduled "
            f"tokens of the batch, {_short(batch.seq_lens)}."
        )


def _on_cpu(name: str, value: Any) -> NDArray[Any]:
    view = on_cpu(value)
    if view is None:
        raise MetadataMismatch(f"field {name} is on {value.device}; it must be on the CPU.")
    return view


def _equal(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.shape == right.shape and bool(np.logical_and.reduce(left == right))


def _short(values: Any) -> str:
    listed = np.asarray(values).tolist()
    return str(listed) if len(listed) <= 12 else f"{str(listed[:12])[:-1]}, … {len(listed)} in all]"


def slice_metadata(parent: M, plan: SplitPlan) -> tuple[M, M]:
    """One metadata object a stage, of the parent's own class.

    ``parent``: a dataclass with rules, such as vLLM's ``CommonAttentionMetadata``, describing
    exactly ``plan.batch`` (padding rows after its requests and tokens are dropped).
    Offsets and lengths are new tensors; per-request and per-token fields are views.

    Raises subclasses of :class:`~afd_plugin.errors.MetadataError`.
    """
    cls = type(parent)
    rules = resolve_rules(cls)
    _check_parent(parent, plan)
    pieces = Pieces(plan)
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    for name, rule in rules:
        first[name], second[name] = rule(name, getattr(parent, name), parent, pieces)
    return cls(**first), cls(**second)
