"""Known-bad variants of the routing operator: what the gate ``routing`` must catch.

Two of them lie in what is registered or compiled, and must be there before that happens; the
others are in force for the time of one run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from afd_plugin import routing
from afd_plugin.ops import OpDefinition
from afd_testkit.faults.base import Fault, FaultTarget, patched


@dataclass
class _Flag:
    """A flag as plain Python code keeps it: an attribute, read wherever it is needed."""

    on: bool = False


@contextmanager
def _branch_in_python(target: FaultTarget) -> Generator[None, None, None]:
    """Models call a Python function in the operator's place; tracing sees its branch taken."""
    flag = _Flag()

    def branch(topk_ids: torch.Tensor, num_experts: int, force_balance: bool) -> None:
        if force_balance or flag.on:
            even = torch.arange(topk_ids.numel(), device=topk_ids.device) % num_experts
            topk_ids.copy_(even.reshape(topk_ids.shape))

    def instead(overload: Any) -> Any:
        def looked_up(definition: OpDefinition) -> Any:
            # Whoever checks the registration still finds the schema of what is registered.
            branch._schema = overload.fget(definition)._schema  # type: ignore[attr-defined]
            return branch

        return property(looked_up)

    def telling(profile_run: Any) -> Any:
        @contextmanager
        def told(enabled: bool = True) -> Generator[None, None, None]:
            before, flag.on = flag.on, enabled
            try:
                with profile_run(enabled):
                    yield
            finally:
                flag.on = before

        return told

    with patched(OpDefinition, "overload", instead), patched(routing, "profile_run", telling):
        yield


def _not_declared(target: FaultTarget) -> AbstractContextManager[None]:
    return patched(routing, "ROUTING_OP", lambda definition: replace(definition, mutates=()))


@contextmanager
def _still_profiling(target: FaultTarget) -> Generator[None, None, None]:
    with routing.profile_run():
        yield


def _of_replicas(target: FaultTarget) -> AbstractContextManager[None]:
    """The cycle goes over the slots of replicated experts, more than there are logical ones."""

    def make(balanced_expert_ids: Any) -> Any:
        def faulty(num_tokens: int, top_k: int, num_experts: int, *holders: Any) -> Any:
            return balanced_expert_ids(num_tokens, top_k, num_experts + 2, *holders)

        return faulty

    return patched(routing, "balanced_expert_ids", make)


def _fault(
    name: str,
    what: str,
    inject: Callable[[FaultTarget], AbstractContextManager[None]],
    *,
    at_start: bool = False,
) -> Fault:
    return Fault(name, what, ("routing",), inject, at_start)


FAULTS: Sequence[Fault] = (
    _fault(
        "profile-branch-in-python",
        "the profile flag is read by Python code that the compiler traces",
        _branch_in_python,
        at_start=True,
    ),
    _fault(
        "mutation-not-declared",
        "the operator is registered as one that changes nothing",
        _not_declared,
        at_start=True,
    ),
    _fault(
        "balanced-while-serving",
        "the profile flag is still set when serving begins",
        _still_profiling,
    ),
    _fault(
        "ids-out-of-range",
        "balanced ids count replicas of experts as experts",
        _of_replicas,
    ),
)
