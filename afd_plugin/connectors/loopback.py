"""Both sides in one process; everything else is as between two.

The payload is packed, its bytes are carried over, and it is unpacked from what arrived, so that
the experts' side shares no memory with the attention side.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from afd_plugin.connectors.base import Handler, TransferCounts
from afd_plugin.errors import RoutingError
from afd_plugin.payload import Packed, RoutingPayload, unpack


class LoopbackConnector:
    """A :class:`~afd_plugin.connectors.base.Connector` within a process."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._counts = TransferCounts()

    @property
    def counts(self) -> TransferCounts:
        """What travelled until now."""
        return self._counts

    def serve(self, layer: str, handler: Handler) -> None:
        """``handler`` answers for ``layer``.  Raises :class:`RoutingError` for a second one."""
        if layer in self._handlers:
            raise RoutingError(f"layer {layer!r} is served already; each layer has one handler.")
        self._handlers[layer] = handler

    def exchange(
        self, layer: str, activation: torch.Tensor, payload: RoutingPayload | None
    ) -> torch.Tensor:
        """See :class:`~afd_plugin.connectors.base.Connector`."""
        if layer not in self._handlers:
            raise RoutingError(
                f"nobody serves layer {layer!r}; served are {', '.join(self._handlers) or 'none'}."
            )
        packed = None if payload is None else payload.pack()
        self._count(activation, packed)
        arrived = None if packed is None else unpack(packed.header, _carried(packed))
        output = self._handlers[layer](activation.clone(), arrived)
        if output.shape != activation.shape or output.dtype != activation.dtype:
            raise RoutingError(
                f"experts of {layer} answered {list(output.shape)} of {output.dtype} to "
                f"{list(activation.shape)} of {activation.dtype}; both must be alike."
            )
        return output

    def _count(self, activation: torch.Tensor, packed: Packed | None) -> None:
        now = self._counts
        self._counts = replace(
            now,
            calls=now.calls + 1,
            payloads=now.payloads + (packed is not None),
            tokens=now.tokens + int(activation.shape[0]),
            payload_bytes=now.payload_bytes + (0 if packed is None else packed.nbytes),
            activation_bytes=now.activation_bytes + activation.numel() * activation.itemsize,
        )


def _carried(packed: Packed) -> tuple[torch.Tensor, ...]:
    """The bytes in memory of the receiver's own."""
    return tuple(buffer.clone() for buffer in packed.buffers)
