"""Which experts a token goes to: the router's own choice, or a balanced one while profiling.

While a model is profiled, no single rank may get too many tokens, so expert ids are spread
evenly; while it serves they must be the router's own.  The choice is made inside an operator
that the compiler does not look into: a flag read in plain Python would be baked into the
compiled graph with the value that it had when the graph was made.  Everything before it, the
gate's matrix product and top-k, stays in the compiled region.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch.library import Library

from afd_plugin.errors import RoutingError, RoutingOpError
from afd_plugin.ops import OpDefinition, Registrar, register, with_torch

ID_DTYPES = (torch.int32, torch.int64)
# Far above what any model has: whatever counts more is no number of experts.
MOST_EXPERTS = 2**16


@dataclass(frozen=True)
class TokenHolders:
    """Who holds tokens and who holds experts; sizes are rank counts.

    ``holder`` of ``holders``: this rank among those that hold tokens of their own; ranks that
    see the same tokens count as one.  ``expert_ranks``: ranks that the experts lie on, the first
    ones holding one more where they do not come out even (vLLM's linear placement).
    """

    holder: int = 0
    holders: int = 1
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        whole = all(type(size) is int for size in (self.holder, self.holders, self.expert_ranks))
        if not whole or not 0 <= self.holder < self.holders or self.expert_ranks < 1:
            raise RoutingError(
                f"rank {self.holder} of {self.holders} holding tokens and {self.expert_ranks} "
                "holding experts cannot be; allowed are whole numbers with 0 <= holder < holders "
                "and expert_ranks >= 1. Give rank and sizes of the process groups."
            )


@dataclass(frozen=True)
class RoutingRuntime:
    """Where the running stack keeps what the operator reads each time it executes.

    ``name`` says which place.  ``in_profile_run``: the flag there, ``True`` or ``False``; it
    raises where it cannot be read.  Two are of one place if both are equal.  ``ranks``: who holds
    tokens and experts.
    """

    name: str
    in_profile_run: Callable[[], bool]
    ranks: Callable[[], TokenHolders] = field(compare=False)


@lru_cache(maxsize=64)
def _expert_cycle(num_experts: int, expert_ranks: int) -> NDArray[np.int64]:
    """[num_experts] expert ids in the order in which they are dealt: one of each rank in turn."""
    base, more = divmod(num_experts, expert_ranks)
    sizes = [base + (rank < more) for rank in range(expert_ranks)]
    firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    turns = range(max(sizes))
    return np.array(
        [
            firsts[rank] + turn
            for turn in turns
            for rank in range(expert_ranks)
            if turn < sizes[rank]
        ],
        dtype=np.int64,
    )


def balanced_expert_ids(
    num_tokens: int, top_k: int, num_experts: int, holders: TokenHolders = TokenHolders()
) -> NDArray[np.int64]:
    """[num_tokens, top_k] ids in [0, num_experts), as even as whole assignments can be.

    Experts are dealt in a cycle, one of each expert rank in turn.  Holders with equally many
    tokens deal one after the other: each begins where the one before it ends, so that all of them
    together deal one run of the cycle.  The counts of any two experts, and of any two expert ranks
    of equal size, then differ by at most one: over one holder's tokens, and over those of all.
    Holders that deal whole cycles are even from any place on, and begin a fraction apart.
    A token's experts differ from each other.

    Raises :class:`RoutingError` for more experts a token than there are, negative sizes, or more
    than :data:`MOST_EXPERTS`.
    """
    if num_tokens < 0 or not 0 <= top_k <= num_experts or not 1 <= num_experts <= MOST_EXPERTS:
        raise RoutingError(
            f"{num_tokens} tokens cannot go to {top_k} of {num_experts} experts each; allowed are "
            f"0 or more tokens, 0 to num_experts experts a token, and 1 to {MOST_EXPERTS} experts. "
            "Give the model's own numbers."
        )
    cycle = _expert_cycle(num_experts, holders.expert_ranks)
    dealt = num_tokens * top_k
    if dealt % num_experts:
        start = holders.holder * dealt
    else:
        start = holders.holder * num_experts // holders.holders
    places = (start + np.arange(dealt)) % num_experts
    ids: NDArray[np.int64] = cycle[places].reshape(num_tokens, top_k)
    return ids


@dataclass(frozen=True)
class RoutingCalls:
    """Executions of the operator in this process: with ids ``balanced``, or left ``natural``."""

    balanced: int = 0
    natural: int = 0

    def since(self, earlier: RoutingCalls) -> RoutingCalls:
        """Those after ``earlier``."""
        return RoutingCalls(self.balanced - earlier.balanced, self.natural - earlier.natural)


# Called after the operator with the ids that it leaves, and whether they are balanced.
Watcher = Callable[[torch.Tensor, bool], None]


@dataclass
class _Process:
    """What the operator of this process knows."""

    runtime: RoutingRuntime | None = None
    library: Library | None = None
    calls: RoutingCalls = RoutingCalls()
    watchers: list[Watcher] = field(default_factory=list)
    counting: threading.Lock = field(default_factory=threading.Lock)

    def count(self, balanced: bool) -> None:
        """One execution more; stages may run on threads of their own."""
        with self.counting:
            now = self.calls
            self.calls = replace(
                now, balanced=now.balanced + balanced, natural=now.natural + (not balanced)
            )


_process = _Process()
# Set where no stack has a flag of its own, by whoever runs the profile pass.
_profiling: ContextVar[bool] = ContextVar("afd_profiling", default=False)


def _boolean(place: str, value: object) -> bool:
    """``value``, which must be ``True`` or ``False``: whatever else it is, nothing is guessed."""
    if not isinstance(value, bool):
        raise RoutingOpError(
            f"whether the model is being profiled is {value!r} ({type(value).__name__}) in the "
            f"{place}; it must be True or False. Set it to one of them."
        )
    return value


@contextmanager
def profile_run(enabled: bool = True) -> Generator[None, None, None]:
    """The context variable says inside that the model is being profiled (or is not).

    Raises :class:`RoutingOpError` for anything but ``True`` or ``False``.
    """
    token = _profiling.set(_boolean("profile_run", enabled))
    try:
        yield
    finally:
        _profiling.reset(token)


def script_runtime(ranks: TokenHolders = TokenHolders()) -> RoutingRuntime:
    """For scripts, tests and stacks without a flag: :func:`profile_run` is the flag."""
    return RoutingRuntime("context variable", _profiling.get, lambda: ranks)


def routing_calls() -> RoutingCalls:
    """How often the operator ran in this process until now."""
    return _process.calls


@contextmanager
def watch_routing(watcher: Watcher) -> Generator[None, None, None]:
    """``watcher`` sees the ids that each execution leaves; it must not change them."""
    _process.watchers.append(watcher)
    try:
        yield
    finally:
        _process.watchers.remove(watcher)


def _check_ids(topk_ids: torch.Tensor | None, num_experts: int) -> None:
    """Raises :class:`RoutingError`; also while tracing, with symbolic sizes."""
    if topk_ids is None:  # which torch takes for a tensor
        raise RoutingError("topk_ids is None; it must be a tensor. Give those of the router.")
    if topk_ids.dim() != 2 or topk_ids.dtype not in ID_DTYPES:
        raise RoutingError(
            f"topk_ids is {list(topk_ids.shape)} of {topk_ids.dtype}; it must be "
            "[tokens, experts a token] of torch.int32 or torch.int64. Reshape or convert it first."
        )
    if not 1 <= num_experts <= MOST_EXPERTS or topk_ids.shape[1] > num_experts:
        raise RoutingError(
            f"topk_ids gives each token {topk_ids.shape[1]} experts of {num_experts}; num_experts "
            "is the number of logical experts and must be at least as large, and no more than "
            f"{MOST_EXPERTS}. Give the router's own."
        )


def _check_places(topk_ids: torch.Tensor) -> None:
    """Raises :class:`RoutingError` where two ids are one place of memory."""
    (rows, columns), (down, right) = topk_ids.shape, topk_ids.stride()
    if rows == 0 or columns == 0:
        return
    # A step of i rows down and j columns left comes back to its place where i * down = j * right,
    # first for the i and j below; a stride of nothing comes back at once.
    common = gcd(down, right) or 1
    meets = right // common < rows and down // common < columns
    if (rows > 1 and down == 0) or (columns > 1 and right == 0) or (down and right and meets):
        raise RoutingError(
            f"topk_ids of shape {list(topk_ids.shape)} have strides {[down, right]}, so that "
            "several ids share their memory and cannot be written one by one. Call contiguous() "
            "on them first."
        )


def afd_balance_routing_ids_(topk_ids: torch.Tensor, num_experts: int, force_balance: bool) -> None:
    """Spread ``topk_ids`` evenly in place if forced or profiling; otherwise not a bit changes.

    ``topk_ids``: [tokens, experts a token] logical expert ids, int32 or int64, of any strides by
    which each has a place of its own.  ``num_experts``: logical experts.  The profile flag is read
    here, when the operator executes, and before anything is written.
    Raises :class:`RoutingError`, or :class:`RoutingOpError` where no runtime is bound.
    """
    _check_ids(topk_ids, num_experts)
    _check_places(topk_ids)
    runtime = _process.runtime
    if runtime is None:
        raise RoutingOpError(
            "the routing operator was called before a runtime was bound to it. Start the AFD "
            "worker, or call afd_plugin.routing.register_routing_op(script_runtime())."
        )
    balanced = force_balance or _boolean(runtime.name, runtime.in_profile_run())
    if balanced:
        tokens, top_k = topk_ids.shape
        ids = balanced_expert_ids(tokens, top_k, num_experts, runtime.ranks())
        topk_ids.copy_(torch.from_numpy(ids))
    _process.count(balanced)
    for watcher in tuple(_process.watchers):
        watcher(topk_ids, balanced)


def _fake(topk_ids: torch.Tensor, num_experts: int, force_balance: bool) -> None:
    _check_ids(topk_ids, num_experts)


ROUTING_OP = OpDefinition(
    namespace="vllm",  # vLLM's own operators live there; the name is the same without vLLM
    name="afd_balance_routing_ids_",
    kernel=afd_balance_routing_ids_,
    mutates=("topk_ids",),
    fake=_fake,
)


def register_routing_op(
    runtime: RoutingRuntime | None = None,
    registrar: Registrar = with_torch,
    dispatch_key: str | None = None,
) -> None:
    """Register the operator once in this process and bind ``runtime`` to it.

    ``runtime``: where the flag is; if not given, the one in force or :func:`script_runtime`.
    ``dispatch_key``: torch's name of the device that must have a kernel; if not given, some must.
    Called again it registers nothing.  The place of the flag must then be the one in force, since
    one process serves one stack; ranks are those of the latest call, as of an engine started after
    another.
    Raises :class:`RoutingOpError`, or whatever kept the registration from being complete.
    """
    runtime = runtime or _process.runtime or script_runtime()
    bound = _process.runtime
    if bound is not None and bound != runtime:
        other = runtime.name if runtime.name != bound.name else f"{runtime.name} by another reader"
        raise RoutingOpError(
            f"the routing operator reads its flag from the {bound.name} in this process; it cannot "
            f"also read the {other}. Use one stack a process."
        )
    if not ROUTING_OP.is_registered:
        _process.library = register(ROUTING_OP, registrar, dispatch_key)
    ROUTING_OP.check_registered(dispatch_key)
    _process.runtime = runtime


@contextmanager
def bound_runtime(runtime: RoutingRuntime | None) -> Generator[None, None, None]:
    """``runtime`` in force inside (``None``: none yet), and afterwards whatever was before it.

    For tests and replays.
    """
    before = _process.runtime
    _process.runtime = runtime
    try:
        yield
    finally:
        _process.runtime = before


def balance_routing_ids_(
    topk_ids: torch.Tensor, num_experts: int, force_balance: bool = False
) -> None:
    """Call the registered operator, also from what is being compiled.

    Raises :class:`RoutingOpError` where it is not registered; a compiler says so in its own way.
    """
    if torch.compiler.is_compiling():  # looking whether it is registered cannot be traced
        torch.ops.vllm.afd_balance_routing_ids_(topk_ids, num_experts, force_balance)
    else:
        ROUTING_OP.overload(topk_ids, num_experts, force_balance)
