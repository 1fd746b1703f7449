"""The leak guard: every test must leave the process as it found it.

A test, its function-scoped fixtures and their teardown are looked at as one.  What a wider
fixture changes while it is set up belongs to that fixture until its teardown; leaving it behind
then is the fixture's leak (a session fixture's ends with the process).  Importing a test file
counts as a test of its own.  ``process_state`` and ``torch_state`` say
what is watched, and what is no leak.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from afd_testkit.need_rule import fail_collection
from afd_testkit.process_state import (
    ABSENT,
    Change,
    Channel,
    Environment,
    ForwardContext,
    Imports,
    ModuleTable,
    RoutingState,
)
from afd_testkit.torch_state import TORCH_CHANNELS

#: Everything that is watched.  The module table is first: the others ask what was imported.
CHANNELS: tuple[Channel, ...] = (
    ModuleTable(),
    Environment(),
    *TORCH_CHANNELS,
    ForwardContext(),
    RoutingState(),
)

#: One dictionary a channel; ``None`` where the channel's owner is not loaded.
Snapshot = list[dict[str, Any] | None]


_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 100


class _Owned:
    """A change that belongs to a fixture, until the fixture is finished."""

    def __init__(self, owner: object, label: str, change: Change) -> None:
        self.owner = owner
        self.label = label
        self.change = change
        self.finished = False


class LeakGuard:
    """Hooks that compare the process before and after, name what leaked, and put it back."""

    def __init__(
        self,
        prepare: Callable[[pytest.Item], None] = lambda _item: None,
        channels: Sequence[Channel] = CHANNELS,
    ) -> None:
        """``prepare`` is called with each test before the first look."""
        self._prepare = prepare
        self._channels = channels
        self._baseline: Snapshot = []
        self._owned: list[_Owned] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Outermost, before any fixture."""
        self._prepare(item)
        self._baseline = self._read()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Outermost, after every finalizer; a leak is an error at teardown."""
        try:
            result = yield
        except BaseException as error:
            if text := self._judge(item.nodeid):
                error.add_note(text)
            raise
        if text := self._judge(item.nodeid):
            pytest.fail(text, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        """What a fixture wider than a test changes is accepted as its own."""
        if fixturedef.scope == "function":
            return (yield)
        before = self._read()
        try:
            return (yield)
        finally:
            self._adopt(before, fixturedef, f"{fixturedef.scope} fixture {fixturedef.argname!r}")

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """From here on the fixture's changes should be gone."""
        for owned in self._owned:
            if owned.owner is fixturedef and fixturedef.scope != "session":
                owned.finished = True

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Importing a test file must not change the process either."""
        if not isinstance(collector, pytest.Module):
            return (yield)
        before = self._read()
        report = yield
        leaks = self._leaks(before, collected=str(collector.path))
        return fail_collection(report, [self._tell(collector.nodeid, leaks)] if leaks else [])

    @contextmanager
    def adopting(self, label: str) -> Iterator[None]:
        """Changes made inside are accepted: for what outlives a test by design, an engine."""
        before = self._read()
        try:
            yield
        finally:
            self._adopt(before, None, label)

    def _read(self) -> Snapshot:
        return [channel.read() for channel in self._channels]

    def _adopt(self, before: Snapshot, owner: object, label: str) -> None:
        """Move what has changed since ``before`` into the baseline, and remember the owner."""
        for place, channel in enumerate(self._channels[: len(self._baseline)]):
            old, new, base = before[place], channel.read(), self._baseline[place]
            if old is None or new is None or base is None:
                self._baseline[place] = new
                continue
            for change in _changes(channel.name, old, new):
                self._owned.append(_Owned(owner, label, change))
                if change.new is ABSENT:
                    base.pop(change.key, None)
                else:
                    base[change.key] = change.new

    def _judge(self, nodeid: str) -> str:
        """The text of all leaks since the baseline, empty if there are none."""
        leaks = self._leaks(self._baseline)
        text = self._tell(nodeid, leaks) if leaks else ""
        for owned in [owned for owned in self._owned if owned.finished]:
            self._owned.remove(owned)
            channel = next(c for c in self._channels if c.name == owned.change.channel)
            now = (channel.read() or {}).get(owned.change.key, ABSENT)
            tolerated = channel.tolerates(owned.change, Imports())
            if now is not ABSENT and _same(now, owned.change.new) and not tolerated:
                channel.restore(owned.change)
                text += self._tell(owned.label, [(channel, owned.change)])
        return text

    def _leaks(
        self, before: Snapshot, collected: str | None = None
    ) -> list[tuple[Channel, Change]]:
        """What has changed since ``before`` and is no one's; put back where possible."""
        leaks = []
        imports = Imports()
        for channel, old in zip(self._channels, before, strict=True):
            # Read one by one: the module table, the first, is in order again for the others.
            new = channel.read()
            if old is None or new is None:
                continue
            if isinstance(channel, ModuleTable) and len(old) != len(new):
                imports = Imports.between(old, new, collected)
            for change in _changes(channel.name, old, new):
                if not (self._undone(change) or channel.tolerates(change, imports)):
                    channel.restore(change)
                    leaks.append((channel, change))
        return leaks

    def _undone(self, change: Change) -> bool:
        """Whether ``change`` is a fixture putting back what it had changed."""
        undone = [
            owned
            for owned in self._owned
            if (owned.change.channel, owned.change.key) == (change.channel, change.key)
            and _same(owned.change.old, change.new)
        ]
        for owned in undone:
            self._owned.remove(owned)
        return bool(undone)

    def _tell(self, who: str, leaks: Sequence[tuple[Channel, Change]]) -> str:
        lines = [f"{who} left the process changed:"]
        for channel, change in leaks:
            lines.append(f"  {channel.name}: {_describe(change)}")
        lines += dict.fromkeys(f"  {channel.name}: {channel.remedy}." for channel, _ in leaks)
        return "\n".join(lines) + "\n"


def _describe(change: Change) -> str:
    if change.channel == "os.environ":  # values may be secrets
        old, new = "its old value", "a new value"
    else:
        old, new = _show(change.old), _show(change.new)
    if change.old is ABSENT:
        return f"{change.key!r} was added ({new})"
    if change.new is ABSENT:
        return f"{change.key!r} was removed (it was {old})"
    return f"{change.key!r} was changed from {old} to {new}"


def _show(value: object) -> str:
    if isinstance(value, ModuleType):  # its repr may warn, or import
        return f"a module, {value.__name__!r}"
    return _SHORT.repr(value)


def _changes(channel: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The entries in which two states of a channel differ."""
    # The common case, nothing changed, must cost microseconds: no Python code for each entry.
    if (
        len(old) == len(new)
        and all(map(operator.is_, old.values(), new.values()))
        and list(old) == list(new)
    ):
        return []
    pairs = ((key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in {**old, **new})
    return [Change(channel, key, a, b) for key, a, b in pairs if not _same(a, b)]


def _same(a: object, b: object) -> bool:
    """Identity, and equality for plain values only: other objects compare as they like."""
    return a is b or (type(a) is type(b) and isinstance(a, str | int) and a == b)
