"""What a connector is: one call a layer and step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from afd_plugin.payload import RoutingPayload

# The experts' side of one layer: [R, H] activation and routing (none: route yourself) → [R, H].
Handler = Callable[[torch.Tensor, RoutingPayload | None], torch.Tensor]


@dataclass(frozen=True)
class TransferCounts:
    """What really travelled since the connector was made, attention side to experts' side.

    A call that arrives counts whatever the experts then make of it: when they fail and are called
    again, it travels twice.  One that cannot arrive does not count.
    ``calls``: one a layer and step.  ``payloads``: those that had routing with them.
    ``tokens``: rows of all activations.  ``payload_bytes``: of the routing, headers included.
    ``activation_bytes``: of the activations.
    """

    calls: int = 0
    payloads: int = 0
    tokens: int = 0
    payload_bytes: int = 0
    activation_bytes: int = 0

    def since(self, earlier: TransferCounts) -> TransferCounts:
        """Those after ``earlier``."""
        return TransferCounts(
            self.calls - earlier.calls,
            self.payloads - earlier.payloads,
            self.tokens - earlier.tokens,
            self.payload_bytes - earlier.payload_bytes,
            self.activation_bytes - earlier.activation_bytes,
        )


class Connector(Protocol):
    """Attention's side calls ``exchange``; the experts' side gives a handler a layer."""

    @property
    def counts(self) -> TransferCounts:
        """What travelled until now."""
        ...

    def serve(self, layer: str, handler: Handler) -> None:
        """``handler`` answers for ``layer``."""
        ...

    def exchange(
        self, layer: str, activation: torch.Tensor, payload: RoutingPayload | None
    ) -> torch.Tensor:
        """Send [R, H] and its routing to ``layer``'s experts; their [R, H], of the same dtype.

        Raises :class:`~afd_plugin.errors.RoutingError`, or what the experts' side raised.
        """
        ...
