"""Known-bad variants of experts behind a connector, and the interruptions that must not matter.

An interruption makes the first call of the experts' side fail in one of its steps, once that step
is done, and lets the attention side call again.  By itself it must change nothing; with what the
call had set left in place it is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch

from afd_plugin import context, payload, remote_experts
from afd_plugin.remote_experts import AttentionSide, ExternalRoutingMoE
from afd_testkit.faults.base import Fault, FaultTarget, patched

GATE = "external-routing"
STEPS = ("prepare", "experts", "finalize")


class _Interrupted(Exception):
    """What a step of the experts' side fails with."""


def interruption(step: str) -> str:
    """Name of the interruption in ``step``, which must stay green."""
    return f"interrupted-in-{step}"


def _interrupt(
    step: str, *, keep_state: bool
) -> Callable[[FaultTarget], AbstractContextManager[None]]:
    def failing(original: Any) -> Any:
        def fail(self: Any, *args: Any) -> Any:
            original(self, *args)
            raise _Interrupted(step)

        return fail

    def make(reach: Any) -> Any:
        pending = [True]

        def twice(self: Any, activation: Any, routing: Any) -> Any:
            if pending:
                pending.clear()
                with ExitStack() as stack:
                    stack.enter_context(patched(ExternalRoutingMoE, step, failing))
                    if keep_state:
                        stack.enter_context(patched(context, "replaced", _kept))
                    # The caller goes on, as a server does with its next request.
                    stack.enter_context(suppress(_Interrupted))
                    reach(self, activation, routing)
            return reach(self, activation, routing)

        return twice

    return lambda target: patched(AttentionSide, "reach", make)


def _kept(replaced: Any) -> Any:
    """``context.replaced`` without putting anything back."""

    @contextmanager
    def faulty(slot: context.StateSlot, value: Any) -> Generator[None, None, None]:
        slot.set(value)
        yield

    return faulty


def _wide_ids(target: FaultTarget) -> AbstractContextManager[None]:
    def make(pack: Any) -> Any:
        def faulty(self: payload.RoutingPayload) -> payload.Packed:
            packed: payload.Packed = pack(self)
            ids = self.ids.to(torch.int64).view(-1).view(torch.uint8)
            return packed._replace(buffers=(ids, *packed.buffers[1:]))

        return faulty

    return patched(payload.RoutingPayload, "pack", make)


def _other_weights(target: FaultTarget) -> AbstractContextManager[None]:
    def make(route: Any) -> Any:
        def faulty(*args: Any) -> payload.RoutingPayload:
            routing: payload.RoutingPayload = route(*args)
            return payload.RoutingPayload(
                ids=routing.ids,
                weights=routing.weights.roll(1, dims=0),
                num_tokens=routing.num_tokens,
            )

        return faulty

    return patched(remote_experts, "route", make)


def _shared_twice(target: FaultTarget) -> AbstractContextManager[None]:
    def make(reach: Any) -> Any:
        def faulty(self: AttentionSide, activation: torch.Tensor, routing: Any) -> torch.Tensor:
            routed: torch.Tensor = reach(self, activation, routing)
            shared = self.backend.shared(activation)
            return routed + (activation if shared is None else shared)

        return faulty

    return patched(AttentionSide, "reach", make)


FAULTS: Sequence[Fault] = (
    *(
        Fault(
            interruption(step),
            f"nothing: the experts' side fails in {step}, and is called again",
            (),
            _interrupt(step, keep_state=False),
        )
        for step in STEPS
    ),
    *(
        Fault(
            f"state-left-in-{step}",
            f"what the experts' side set stays set when it fails in {step}",
            (GATE,),
            _interrupt(step, keep_state=True),
        )
        for step in STEPS
    ),
    Fault("ids-of-wrong-dtype", "expert ids are sent as int64", (GATE,), _wide_ids),
    Fault(
        "weights-of-another-token",
        "each token's experts are weighted as those of the token before it",
        (GATE,),
        _other_weights,
    ),
    Fault(
        "shared-experts-twice",
        "both sides add the shared experts; where a layer has none, the activation itself",
        (GATE,),
        _shared_twice,
    ),
)
