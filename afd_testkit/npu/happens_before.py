"""Which of a program's accesses to memory are ordered: vector clocks, and nothing of torch.

*Actors* do things in order: a stream, a host thread.  Each has a clock, which counts for every
actor how many of its accesses certainly come before whatever this actor does next.  Orders that
the program asks for (events, waits, synchronization) are joins of clocks.  Two accesses to the
same bytes, at least one of them a write, must be ordered; all others are conflicts.

The judgement is exact for the orders it is told: an access is in conflict if, and only if, some
earlier conflicting access is not before it by a chain of orders.  What it forgets to bound its
memory, it forgets because it can no longer be in conflict (see :attr:`HappensBefore.witnesses`),
except beyond ``MAX_ACCESSES`` a block of memory, where the oldest go and a conflict with them
would be missed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

Actor = Hashable
Clock = Mapping[Actor, int]

# Beyond the first, accesses that cannot be in conflict any more are looked for; beyond the second
# the oldest are dropped.
PRUNE_ACCESSES = 32
MAX_ACCESSES = 1024


@dataclass(frozen=True, slots=True)
class Region:
    """``count`` rows of ``length`` bytes, ``stride`` bytes apart, the first at ``start``."""

    start: int
    length: int
    stride: int = 0
    count: int = 1

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.start + self.stride * (self.count - 1) + self.length

    def overlaps(self, other: Region) -> bool:
        """Whether a byte is in both; True also where only their hulls are known to overlap.

        Exact for two blocks, and for two sets of rows with the same stride.
        """
        if self.start >= other.stop or other.start >= self.stop:
            return False
        if self.count == other.count == 1:
            return True
        if self.count > 1 and other.count > 1 and self.stride == other.stride:
            return self._rows_meet(other)
        rows, block = (self, other) if other.count == 1 else (other, self)
        return block.count > 1 or rows._meets_block(block)

    def _rows_meet(self, other: Region) -> bool:
        # Row i of one and row j of the other meet where their distance is less than a row; the
        # hulls overlap, so that only the distance modulo the stride matters but for the ends.
        shift = other.start - self.start
        for row in (shift // self.stride, shift // self.stride + 1):
            distance = shift - row * self.stride
            # Rows self[row + j] and other[j] are `distance` apart, for every j that both have.
            first, last = max(0, -row), min(other.count, self.count - row)
            if first < last and -other.length < distance < self.length:
                return True
        return False

    def _meets_block(self, block: Region) -> bool:
        # The first row that ends after the block's start.
        before = block.start - self.start - self.length
        row = 0 if before < 0 else before // self.stride + 1
        return row < self.count and self.start + row * self.stride < block.stop

    def covers(self, other: Region) -> bool:
        """Whether every byte of ``other`` is certainly here."""
        if self.count == 1:
            return self.start <= other.start and other.stop <= self.stop
        return self == other


@dataclass(frozen=True, slots=True)
class Access:
    """One actor's access number ``tick``, to ``region``; ``note`` is the caller's."""

    actor: Actor
    tick: int
    region: Region
    writes: bool
    note: object = None


class HappensBefore:
    """Clocks of all actors, and the accesses to each block of memory.

    ``witnesses``: actors of which every further access, of whatever actor, comes after one's
    present, as kernels come after the host that launches them.  What all witnesses know can be
    forgotten.
    """

    def __init__(self, witnesses: Iterable[Actor] = ()) -> None:
        self.witnesses = set(witnesses)
        self._clocks: dict[Actor, dict[Actor, int]] = {}
        self._accesses: dict[Hashable, list[Access]] = {}

    @property
    def actors(self) -> list[Actor]:
        """Everyone who has a clock."""
        return list(self._clocks)

    def clock(self, actor: Actor) -> Clock:
        """What ``actor`` knows now; a copy, which stands for this point (an event)."""
        return dict(self._clock(actor))

    def join(self, actor: Actor, clock: Clock) -> None:
        """``actor`` continues after the point that ``clock`` stands for."""
        own = self._clock(actor)
        for other, tick in clock.items():
            if own.get(other, 0) < tick:
                own[other] = tick

    def follow(self, actor: Actor, other: Actor) -> None:
        """``actor`` continues after all that ``other`` did up to now."""
        if actor != other:
            self.join(actor, self._clock(other))

    def tick(self, actor: Actor) -> int:
        """Number of ``actor``'s next operation, whose accesses belong together."""
        own = self._clock(actor)
        own[actor] = own.get(actor, 0) + 1
        return own[actor]

    def access(
        self,
        block: Hashable,
        region: Region,
        actor: Actor,
        *,
        writes: bool,
        tick: int | None = None,
        note: object = None,
    ) -> tuple[Access, list[Access]]:
        """Note the access; return it, and the earlier ones that it conflicts with.

        ``tick``: the operation that it belongs to; a new one by default.
        """
        number = self.tick(actor) if tick is None else tick
        access = Access(actor, number, region, writes, note)
        conflicts: list[Access] = []
        kept: list[Access] = []
        for earlier in self._accesses.get(block, ()):
            ordered = self._knows(actor, earlier)
            if not ordered and (writes or earlier.writes) and region.overlaps(earlier.region):
                conflicts.append(earlier)
            if not (ordered and self._replaces(access, earlier)):
                kept.append(earlier)
        kept.append(access)
        self._accesses[block] = kept if len(kept) <= PRUNE_ACCESSES else self._pruned(kept)
        return access, conflicts

    def forget(self, block: Hashable) -> None:
        """Drop all accesses to ``block``: it is other memory from now on."""
        self._accesses.pop(block, None)

    def _clock(self, actor: Actor) -> dict[Actor, int]:
        if actor not in self._clocks:
            self._clocks[actor] = {}
        return self._clocks[actor]

    def _knows(self, actor: Actor, access: Access) -> bool:
        return self._clocks[actor].get(access.actor, 0) >= access.tick

    @staticmethod
    def _replaces(access: Access, earlier: Access) -> bool:
        # Ordered before and covered: whoever is not after the earlier one is not after this one,
        # and a write conflicts with all that a read conflicts with.
        return (access.writes or not earlier.writes) and access.region.covers(earlier.region)

    def _pruned(self, accesses: list[Access]) -> list[Access]:
        if not self.witnesses:
            return accesses[-MAX_ACCESSES:]
        for witness in self.witnesses:
            self._clock(witness)
        alive = [
            access
            for access in accesses
            if not all(self._knows(witness, access) for witness in self.witnesses)
        ]
        return alive[-MAX_ACCESSES:]
