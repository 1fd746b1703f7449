"""Pinned contracts: every kind of difference is found, told in words, and raised by the check."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from afd_plugin import register_metadata_rules
from afd_plugin import rules as r
from afd_plugin.compat.contracts import Contract, Difference
from afd_plugin.compat.pinned_ascend import CONTRACT as ASCEND
from afd_plugin.compat.pinned_vllm import CONTRACT as VLLM
from afd_plugin.errors import MissingFieldRule, StaleFieldRule, UpstreamDrift
from afd_plugin.metadata import unregister_metadata_rules

pytestmark = pytest.mark.cpu

MODULE = "an_upstream_package"


class Runner:
    def forward(self, tokens: Any, *, scale: Any = None, **more: Any) -> None: ...


def gather(rows: Any, group: Any) -> None: ...


@dataclasses.dataclass
class Context:
    metadata: Any = None
    layer: int = 0


class State(enum.Enum):
    FRESH = 0
    HIT = 1


@dataclasses.dataclass
class Metadata:
    num_reqs: int = 0


class Upstream(ModuleType):
    """The module that the contract below speaks of; its globals may be replaced."""

    Runner: Any = Runner
    gather: Any = staticmethod(gather)
    Context: Any = Context
    State: Any = State
    Metadata: Any = Metadata
    _buffer: Any = None


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    module = Upstream(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    register_metadata_rules(Metadata, {"num_reqs": r.num_reqs})
    yield module
    unregister_metadata_rules(Metadata)


CONTRACT = Contract(
    stack="upstream 1.2",
    first=(MODULE,),
    signatures={
        f"{MODULE}:Runner.forward": ("self", "tokens", "scale", "more"),
        f"{MODULE}:gather": ("rows", "group"),
    },
    fields={f"{MODULE}:Context": ("metadata", "layer")},
    members={f"{MODULE}:State": ("FRESH", "HIT")},
    names=(f"{MODULE}:_buffer", f"{MODULE}:Runner"),
    metadata=(f"{MODULE}:Metadata",),
)


def test_what_is_as_pinned_has_no_difference(upstream: Upstream) -> None:
    assert CONTRACT.differences() == []
    CONTRACT.check()
    assert CONTRACT.counts() == {
        "signatures": 2,
        "dataclasses": 1,
        "enumerations": 1,
        "names": 2,
        "metadata classes": 1,
    }


def changed(base: type, **fields: Any) -> type:
    """A dataclass named as ``base`` with these fields only."""
    return dataclasses.make_dataclass(base.__name__, [(n, Any, v) for n, v in fields.items()])


def without_forward() -> type:
    class Runner:
        pass

    return Runner


def forward_takes(forward: Callable[..., Any]) -> type:
    return type("Runner", (), {"forward": forward})


# What stands there instead; where, what is found, and what is said to be pinned.
CHANGES: dict[str, tuple[str, Any, str, str, str]] = {
    "parameter added": (
        "Runner",
        forward_takes(lambda self, tokens, mask, *, scale, **more: None),
        "Runner.forward",
        "takes (self, tokens, mask, scale, more)",
        "(self, tokens, scale, more)",
    ),
    "parameters in another order": (
        "gather",
        lambda group, rows: None,
        f"{MODULE}.gather",
        "takes (group, rows)",
        "(rows, group)",
    ),
    "method gone": ("Runner", without_forward(), "Runner.forward", "is gone", "that it exists"),
    "field added": (
        "Context",
        changed(Context, metadata=None, layer=0, graph=None),
        "Context",
        "has new field(s) graph",
        "2 fields (metadata, layer)",
    ),
    "field renamed": (
        "Context",
        changed(Context, metadata=None, layer_index=0),
        "Context",
        "has new field(s) layer_index and lacks field(s) layer",
        "2 fields (metadata, layer)",
    ),
    "fields in another order": (
        "Context",
        changed(Context, layer=0, metadata=None),
        "Context",
        "has its fields in the order (layer, metadata)",
        "2 fields (metadata, layer)",
    ),
    "member added": (
        "State",
        enum.Enum("State", {"FRESH": 0, "HIT": 1, "CHUNK": 2}),
        "State",
        "has new member(s) CHUNK",
        "2 members (FRESH, HIT)",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_each_change_is_one_difference(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, replacement, where, found, pinned = CHANGES[case]
    monkeypatch.setattr(upstream, name, replacement, raising=False)
    (difference,) = CONTRACT.differences()
    assert (difference.where, difference.found, difference.pinned) == (where, found, pinned)
    with pytest.raises(UpstreamDrift) as caught:
        CONTRACT.check()
    assert str(caught.value) == f"{where} {found}, pinned is {pinned}. {difference.remedy}"
    assert not hasattr(caught.value, "__notes__")


def test_a_missing_global(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Upstream, "_buffer")
    (difference,) = CONTRACT.differences()
    assert (difference.where, difference.found) == (f"{MODULE}._buffer", "is gone")
    assert "differs from upstream 1.2" in difference.remedy


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"num_reqs": 0, "kv_hint": None}, MissingFieldRule), ({}, StaleFieldRule)],
    ids=["added", "gone"],
)
def test_metadata_whose_rules_do_not_fit(
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    error: type[Exception],
) -> None:
    shape = dataclasses.make_dataclass("Metadata", [(n, Any, v) for n, v in fields.items()])
    if not fields:
        shape = dataclasses.dataclass(type("Metadata", (), {}))
    monkeypatch.setattr(upstream, "Metadata", shape, raising=False)
    monkeypatch.setattr(
        "afd_plugin.metadata.builtin_rules",
        lambda cls: {"num_reqs": r.num_reqs} if cls is shape else None,
    )
    (difference,) = CONTRACT.differences()
    assert difference.where == "field rules of Metadata"
    assert difference.found == "do not fit"
    assert ("kv_hint" if fields else "num_reqs") in difference.remedy
    with pytest.raises(error):  # the narrower error, not that something drifted
        CONTRACT.check()


def test_a_module_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of it is told, not only the first."""
    monkeypatch.setitem(sys.modules, MODULE, None)  # type: ignore[arg-type]
    found = CONTRACT.differences()
    assert len(found) == 8  # the module, 2 signatures, 1 class, 1 enumeration, 2 names, 1 metadata
    assert all("cannot be imported (" in difference.found for difference in found)
    assert found[0].where == MODULE


def test_all_differences_are_raised_at_once_the_one_with_an_error_first(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Upstream, "_buffer")
    monkeypatch.setattr(upstream, "Runner", without_forward(), raising=False)
    unregister_metadata_rules(Metadata)
    with pytest.raises(Exception, match=r"no field rules are known for .*Metadata") as caught:
        CONTRACT.check()
    assert [note.split(" is gone")[0] for note in caught.value.__notes__] == [
        "also: Runner.forward",
        f"also: {MODULE}._buffer",
    ]


def test_a_difference_reads_as_a_sentence() -> None:
    text = str(Difference("Runner.forward", "(self)", "takes (self, x)", "Reinstall it."))
    assert text == "Runner.forward takes (self, x), pinned is (self). Reinstall it."


@pytest.mark.parametrize("contract", [VLLM, ASCEND], ids=lambda contract: contract.stack)
def test_pinned_paths_are_well_formed(contract: Contract) -> None:
    """``module:Qualified.name``; a path without the colon would compare a module."""
    paths = [
        *contract.signatures,
        *contract.fields,
        *contract.members,
        *contract.names,
        *contract.metadata,
    ]
    assert len(paths) == sum(contract.counts().values())
    for path in paths:
        module, _, rest = path.partition(":")
        assert module.split(".")[0] in ("vllm", "vllm_ascend"), path
        assert all(part.isidentifier() for part in (*module.split("."), *rest.split("."))), path
