"""The vector clocks against reachability in an explicit graph, and regions against byte sets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_testkit.npu import happens_before
from afd_testkit.npu.happens_before import (
    MAX_ACCESSES,
    PRUNE_ACCESSES,
    Clock,
    HappensBefore,
    Region,
)

pytestmark = pytest.mark.cpu

HOSTS = ("host 0", "host 1")
STREAMS = (0, 1, 2)
BLOCKS = ("a", "a", "b")
WHOLE = Region(0, 64)


def bytes_of(region: Region) -> set[int]:
    """Every byte of the region, from its definition."""
    rows = (region.start + row * region.stride for row in range(region.count))
    return {byte for start in rows for byte in range(start, start + region.length)}


@st.composite
def regions(draw: st.DrawFn, stride: int | None = None) -> Region:
    """Small regions whose rows do not overlap one another."""
    length = draw(st.integers(1, 6))
    return Region(
        start=draw(st.integers(0, 20)),
        length=length,
        stride=length + draw(st.integers(0, 5)) if stride is None else stride,
        count=draw(st.sampled_from([1, 1, 2, 3, 5])),
    )


@given(regions(), regions())
def test_regions_overlap_where_they_share_a_byte(first: Region, second: Region) -> None:
    shared = bool(bytes_of(first) & bytes_of(second))
    exact = first.count == 1 or second.count == 1 or first.stride == second.stride
    assert first.overlaps(second) == second.overlaps(first)
    assert first.overlaps(second) == shared or (not exact and first.overlaps(second))


@given(regions(), regions())
def test_a_region_covers_only_what_it_contains(first: Region, second: Region) -> None:
    if first.covers(second):
        assert bytes_of(second) <= bytes_of(first)
    if first.count == 1 and bytes_of(second) <= bytes_of(first):
        assert first.covers(second)
    assert first.covers(first)


@given(regions())
def test_a_region_stops_after_its_last_byte(region: Region) -> None:
    assert region.stop == max(bytes_of(region)) + 1


@dataclass(frozen=True)
class Step:
    """One thing that a program does: ``kind`` and its operands."""

    kind: str
    actor: int | str = ""
    other: int | str = ""
    block: str = ""
    region: Region = WHOLE
    writes: bool = False


def _accesses(kind: str, actors: st.SearchStrategy[int | str]) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        kind=st.just(kind),
        actor=actors,
        other=st.sampled_from(HOSTS),
        block=st.sampled_from(BLOCKS),
        # One stride: overlaps are exact then.
        region=st.one_of(st.just(WHOLE), regions(stride=8)),
        writes=st.booleans(),
    )


def programs() -> st.SearchStrategy[list[Step]]:
    """Kernels, host accesses, events (four of them), waits and synchronization."""
    stream, host, event = st.sampled_from(STREAMS), st.sampled_from(HOSTS), st.integers(0, 3)
    steps = st.one_of(
        _accesses("kernel", stream),
        _accesses("kernel", stream),
        _accesses("host access", host),
        st.builds(Step, kind=st.just("record"), actor=stream, other=event),
        st.builds(Step, kind=st.just("wait"), actor=stream, other=event),
        st.builds(Step, kind=st.just("synchronize event"), actor=host, other=event),
        st.builds(Step, kind=st.just("synchronize stream"), actor=host, other=stream),
    )
    return st.lists(steps, min_size=3, max_size=40)


@dataclass
class Oracle:
    """The program's steps as a graph; ordered means reachable, found by walking it."""

    edges: list[set[int]] = field(default_factory=list)
    last: dict[int | str, int] = field(default_factory=dict)
    events: dict[int | str, int | None] = field(default_factory=dict)
    accesses: list[tuple[int, Step]] = field(default_factory=list)

    def node(self, actor: int | str, *before: int | None) -> int:
        """A step of ``actor`` after its last one and after ``before``."""
        self.edges.append(set())
        number = len(self.edges) - 1
        for earlier in (self.last.get(actor), *before):
            if earlier is not None:
                self.edges[earlier].add(number)
        self.last[actor] = number
        return number

    def reaches(self, start: int, goal: int) -> bool:
        seen, queue = {start}, deque([start])
        while queue:
            for following in self.edges[queue.popleft()] - seen:
                if following == goal:
                    return True
                seen.add(following)
                queue.append(following)
        return False

    def access(self, step: Step, number: int) -> set[int]:
        """Positions of the earlier accesses that conflict with this one."""
        conflicts = {
            position
            for position, (node, earlier) in enumerate(self.accesses)
            if earlier.block == step.block
            and (earlier.writes or step.writes)
            and bytes_of(earlier.region) & bytes_of(step.region)
            and not self.reaches(node, number)
        }
        self.accesses.append((number, step))
        return conflicts

    def run(self, step: Step) -> set[int]:
        if step.kind == "kernel":
            # The launch is a step of the host's, before the kernel.
            launch = self.node(step.other)
            return self.access(step, self.node(step.actor, launch))
        if step.kind == "host access":
            return self.access(step, self.node(step.actor))
        if step.kind == "record":
            self.events[step.other] = self.last.get(step.actor)
        elif step.kind in ("wait", "synchronize event"):
            self.node(step.actor, self.events.get(step.other))
        else:
            self.node(step.actor, self.last.get(step.other))
        return set()


@dataclass
class Judged:
    """The same program on the code under test; accesses are numbered as the oracle does."""

    order: HappensBefore
    events: dict[int | str, Clock] = field(default_factory=dict)
    number: int = 0

    def run(self, step: Step) -> set[int]:
        if step.kind == "kernel":
            self.order.follow(step.actor, step.other)
        if step.kind in ("kernel", "host access"):
            _, conflicts = self.order.access(
                step.block, step.region, step.actor, writes=step.writes, note=self.number
            )
            self.number += 1
            return {int(str(earlier.note)) for earlier in conflicts}
        if step.kind == "record":
            self.events[step.other] = self.order.clock(step.actor)
        elif step.kind in ("wait", "synchronize event"):
            if step.other in self.events:
                self.order.join(step.actor, self.events[step.other])
        else:
            self.order.follow(step.actor, step.other)
        return set()


@pytest.mark.parametrize("prune", [1, PRUNE_ACCESSES])
@settings(max_examples=400)
@given(program=programs())
def test_an_access_conflicts_exactly_where_the_graph_has_no_path(
    prune: int, program: list[Step]
) -> None:
    oracle, judged = Oracle(), Judged(HappensBefore(HOSTS))
    with patch.object(happens_before, "PRUNE_ACCESSES", prune):
        for step in program:
            expected, found = oracle.run(step), judged.run(step)
            # Some of several conflicts may be left out, never all, and none is made up.
            assert found <= expected
            assert bool(found) == bool(expected), step


def test_ordered_accesses_are_forgotten() -> None:
    order = HappensBefore(["host"])
    for number in range(10 * MAX_ACCESSES):
        order.follow(0, "host")
        _, conflicts = order.access("a", Region(3 * number, 2), 0, writes=True)
        assert conflicts == []
        order.follow("host", 0)
    assert len(order._accesses["a"]) <= PRUNE_ACCESSES + 1


def test_unordered_accesses_are_bounded() -> None:
    order = HappensBefore(["host"])
    for number in range(2 * MAX_ACCESSES):
        order.access("a", Region(3 * number, 2), 0, writes=True)
    assert len(order._accesses["a"]) <= MAX_ACCESSES
    last = Region(3 * (2 * MAX_ACCESSES - 1), 2)
    assert len(order.access("a", last, 1, writes=False)[1]) == 1


def test_a_forgotten_block_is_other_memory() -> None:
    order = HappensBefore()
    order.access("a", Region(0, 4), 0, writes=True)
    order.forget("a")
    assert order.access("a", Region(0, 4), 1, writes=True)[1] == []


def test_accesses_of_one_operation_do_not_conflict() -> None:
    order = HappensBefore()
    tick = order.tick(0)
    order.access("a", Region(0, 4), 0, writes=False, tick=tick)
    assert order.access("a", Region(0, 4), 0, writes=True, tick=tick)[1] == []


def test_a_clock_is_a_copy() -> None:
    order = HappensBefore()
    early = order.clock(0)
    order.access("a", Region(0, 4), 0, writes=True)
    order.join(1, early)
    assert len(order.access("a", Region(0, 4), 1, writes=False)[1]) == 1


def test_a_read_does_not_stand_for_an_earlier_write() -> None:
    order = HappensBefore()
    order.access("a", WHOLE, 0, writes=True)
    order.follow(1, 0)
    assert order.access("a", WHOLE, 1, writes=False)[1] == []
    assert len(order.access("a", WHOLE, 2, writes=False)[1]) == 1


def test_joining_an_old_clock_takes_nothing_back() -> None:
    order = HappensBefore()
    old = order.clock(0)
    order.access("a", WHOLE, 0, writes=True)
    older = order.clock(0)
    order.access("a", WHOLE, 0, writes=True)
    order.follow(1, 0)
    order.join(1, older)
    order.join(1, old)
    assert order.access("a", WHOLE, 1, writes=False)[1] == []


def test_what_one_of_two_hosts_knows_is_not_forgotten() -> None:
    order = HappensBefore(HOSTS)
    with patch.object(happens_before, "PRUNE_ACCESSES", 0):
        order.access("a", WHOLE, 0, writes=True)
        order.follow("host 0", 0)
        order.access("a", WHOLE, 0, writes=False)
        order.follow(1, "host 1")
        assert len(order.access("a", WHOLE, 1, writes=False)[1]) == 1
