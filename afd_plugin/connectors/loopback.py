"""Both sides in one process; everything else is as between two.

The payload is packed, its bytes are carried over, and it is unpacked from what arrived; the answer
is carried back likewise, so that the sides share no memory.  Layers may be called from several
threads.
"""

from __future__ import annotations

import threading
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
        self._counting = threading.Lock()

    @property
    def counts(self) -> TransferCounts:
        """What travelled until now."""
        return self._counts

    def serve(self, layer: str, handler: Handler) -> None:
        """``handler`` answers for ``layer``.  Raises :class:`RoutingError` for a second one."""
        if layer in self._handlers:
            raise RoutingError(
                f"layer {layer!r} is served already; each layer has one handler. Serve another "
                "model over a connector of its own."
            )
        if not callable(handler):
            raise RoutingError(
                f"the handler of layer {layer!r} is {handler!r}, which cannot be called. Give a "
                "function of an activation and its routing."
            )
        self._handlers[layer] = handler

    def exchange(
        self, layer: str, activation: torch.Tensor, payload: RoutingPayload | None
    ) -> torch.Tensor:
        """See :class:`~afd_plugin.connectors.base.Connector`."""
        if layer not in self._handlers:
            raise RoutingError(
                f"nobody serves layer {layer!r}; served are {', '.join(self._handlers) or 'none'}. "
                "Connect the layers of this model first."
            )
        if activation.dim() != 2:
            raise RoutingError(
                f"the activation sent to {layer} is {list(activation.shape)}; it must be [rows, "
                "hidden size]. Reshape it first."
            )
        packed = None if payload is None else payload.pack()
        arrived = None if packed is None else unpack(packed.header, _carried(packed))
        self._count(activation, packed)
        output: object = self._handlers[layer](activation.clone(), arrived)
        if not isinstance(output, torch.Tensor) or _kind(output) != _kind(activation):
            told = _kind(output) if isinstance(output, torch.Tensor) else type(output).__name__
            raise RoutingError(
                f"experts of {layer} answered {told} to {_kind(activation)}; both must be alike. "
                "Return one row for each that came, of the same dtype and device."
            )
        return output.clone()

    def _count(self, activation: torch.Tensor, packed: Packed | None) -> None:
        with self._counting:
            now = self._counts
            self._counts = replace(
                now,
                calls=now.calls + 1,
                payloads=now.payloads + (packed is not None),
                tokens=now.tokens + int(activation.shape[0]),
                payload_bytes=now.payload_bytes + (0 if packed is None else packed.nbytes),
                activation_bytes=now.activation_bytes + activation.numel() * activation.itemsize,
            )


def _kind(tensor: torch.Tensor) -> str:
    """What an answer has in common with what it answers."""
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"


def _carried(packed: Packed) -> tuple[torch.Tensor, ...]:
    """The bytes in memory of the receiver's own."""
    return tuple(buffer.clone() for buffer in packed.buffers)
