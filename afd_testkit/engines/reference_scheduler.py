"""A mini scheduler in the manner of vLLM V1: chunked prefill, prefix caching, batch rows.

Three habits of the original matter to a splitter and are kept to the letter:

* a full block enters the prefix cache when it is *allocated*, before any step has computed it, so
  a request scheduled later in the same step can hit it;
* at most ``num_tokens - 1`` tokens may come from the cache, rounded down to blocks;
* a request keeps its batch row until it finishes; a new one takes the lowest row that a
  finished one left, and what remains open is filled from the end.  So the order of
  rows is not the order of scheduling, and a reader can stand before its writer.

One simplification: a request is admitted only when the pool holds it to its last token, so
nothing is ever preempted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NULL_BLOCK = 0
"""Never allocated; fills the unused end of block-table rows, as in vLLM."""


@dataclass(eq=False)
class Request:
    """One request on its way.  ``token_ids`` grows by each generated token."""

    name: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    cache_salt: str | None = None
    num_computed: int = 0
    cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def num_blocks_needed(self, block_size: int) -> int:
        """Blocks at its end; the last generated token is never fed back, so has no KV."""
        return -(-(self.num_prompt_tokens + self.max_tokens - 1) // block_size)


@dataclass(frozen=True)
class StepRow:
    """One row of a step: tokens ``[num_computed, num_computed + num_scheduled)`` of a request.

    ``samples``: the row ends at the request's last known token, so the next one is sampled.
    """

    request: Request
    num_computed: int
    num_scheduled: int
    samples: bool

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.request.num_prompt_tokens

    @property
    def ends_prefill(self) -> bool:
        end = self.num_computed + self.num_scheduled
        return self.is_prefilling and end >= self.request.num_prompt_tokens

    @property
    def token_ids(self) -> list[int]:
        return self.request.token_ids[self.num_computed : self.num_computed + self.num_scheduled]


@dataclass(frozen=True)
class Step:
    """Rows in batch order, and the blocks that were freshly allocated for them."""

    rows: tuple[StepRow, ...]
    new_blocks: tuple[int, ...]


class BlockPool:
    """Reference-counted blocks ``1 .. num_blocks - 1``; free ones are reused oldest first.

    A free block keeps its cache entry until it is handed out again.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._entry_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lookup(self, entry: bytes) -> int | None:
        """The block cached under this hash."""
        return self._block_of.get(entry)

    def register(self, block: int, entry: bytes) -> None:
        """Cache the block under the hash; the first block of equal content stays the cached one."""
        if entry not in self._block_of and block not in self._entry_of:
            self._block_of[entry] = block
            self._entry_of[block] = entry

    def take(self) -> int:
        """Hand out the block that has been free the longest; its cache entry is gone."""
        block, _ = self._free.popitem(last=False)
        entry = self._entry_of.pop(block, None)
        if entry is not None:
            del self._block_of[entry]
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner for a cached block."""
        self._free.pop(block, None)
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each, last block first, so that prefixes outlive their tails."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def forget(self) -> None:
        """Drop every cache entry."""
        self._entry_of.clear()
        self._block_of.clear()


def hash_blocks(token_ids: Sequence[int], block_size: int, salt: str | None) -> list[bytes]:
    """One digest a full block, of (parent digest, the block's tokens, salt)."""
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        content = (parent, tuple(token_ids[start : start + block_size]), salt)
        parent = hashlib.sha256(repr(content).encode()).digest()
        hashes.append(parent)
    return hashes


class BatchRows:
    """Which request stands in which row, from step to step."""

    def __init__(self) -> None:
        self._rows: list[Request] = []

    def arrange(self, scheduled: Sequence[Request]) -> list[Request]:
        """Rows of the next step, which holds exactly the ``scheduled`` requests."""
        present = set(scheduled)
        rows: list[Request | None] = [r if r in present else None for r in self._rows]
        for request in scheduled:
            if request in rows:
                continue
            if None in rows:
                rows[rows.index(None)] = request
            else:
                rows.append(request)
        while None in rows:
            last = rows.pop()
            if last is not None:
                rows[rows.index(None)] = last
        self._rows = [r for r in rows if r is not None]
        return list(self._rows)


class Scheduler:
    """Decides what each step computes: running requests first, then waiting ones in order.

    ``token_budget``: most tokens of a step.  Requests handed to :meth:`add` must fit the pool.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        token_budget: int,
        max_num_seqs: int,
        prefix_caching: bool,
    ) -> None:
        self.block_size = block_size
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.prefix_caching = prefix_caching
        self._pool = BlockPool(num_blocks)
        self._usable_blocks = num_blocks - 1
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._rows = BatchRows()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block."""
        self._pool.forget()

    def schedule(self) -> Step:
        """The next step; blocks of its tokens are allocated and, where full, cached."""
        budget = self.token_budget
        counts: dict[Request, int] = {}
        new_blocks: list[int] = []

        # The budget cannot run out here: each of these took a token of the last step's budget,
        # and only the last of them can still have more than one to compute.
        for request in self._running:
            counts[request] = min(len(request.token_ids) - request.num_computed, budget)
            budget -= counts[request]
            new_blocks += self._allocate(request, counts[request])

        while self._waiting and budget > 0 and len(self._running) < self.max_num_seqs:
            request = self._waiting[0]
            if not self._fits(request):
                break
            self._waiting.popleft()
            self._adopt_cached_prefix(request)
            counts[request] = min(len(request.token_ids) - request.num_computed, budget)
            budget -= counts[request]
            new_blocks += self._allocate(request, counts[request])
            self._running.append(request)

        rows = tuple(
            self._row(request, counts[request]) for request in self._rows.arrange(list(counts))
        )
        return Step(rows, tuple(new_blocks))

    def update(self, step: Step, sampled: Mapping[str, int]) -> None:
        """Count the step's tokens as computed, append ``sampled`` (request name to token id, one
        for each row that samples) and retire what is finished."""
        for row in step.rows:
            request = row.request
            request.num_computed += row.num_scheduled
            if row.samples:
                request.token_ids.append(sampled[request.name])
            if request.num_outputs == request.max_tokens:
                self._running.remove(request)
                self._pool.release(request.blocks)

    @staticmethod
    def _row(request: Request, count: int) -> StepRow:
        samples = request.num_computed + count == len(request.token_ids)
        return StepRow(request, request.num_computed, count, samples)

    def _fits(self, request: Request) -> bool:
        reserved = sum(r.num_blocks_needed(self.block_size) for r in self._running)
        return reserved + request.num_blocks_needed(self.block_size) <= self._usable_blocks

    def _adopt_cached_prefix(self, request: Request) -> None:
        if not self.prefix_caching:
            return
        most = (len(request.token_ids) - 1) // self.block_size
        for entry in self._hashes(request)[:most]:
            block = self._pool.lookup(entry)
            if block is None:
                break
            self._pool.share(block)
            request.blocks.append(block)
        request.num_computed = request.cached_tokens = len(request.blocks) * self.block_size

    def _allocate(self, request: Request, count: int) -> list[int]:
        """Extend the block row to hold ``count`` more tokens; the blocks that this added."""
        end = request.num_computed + count
        added = [self._pool.take() for _ in range(-(-end // self.block_size) - len(request.blocks))]
        request.blocks += added
        if self.prefix_caching:
            full = end // self.block_size
            for block, entry in zip(
                request.blocks[:full], self._hashes(request)[:full], strict=True
            ):
                self._pool.register(block, entry)
        return added

    def _hashes(self, request: Request) -> list[bytes]:
        if len(request.block_hashes) != len(request.token_ids) // self.block_size:
            request.block_hashes = hash_blocks(
                request.token_ids, self.block_size, request.cache_salt
            )
        return request.block_hashes
