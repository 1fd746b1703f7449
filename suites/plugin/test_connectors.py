"""Connectors: what travels, what is counted, and that the two sides share no memory."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from afd_plugin.connectors import loopback
from afd_plugin.connectors.base import TransferCounts
from afd_plugin.connectors.loopback import LoopbackConnector
from afd_plugin.errors import RoutingError, RoutingPayloadError
from afd_plugin.payload import HEADER_BYTES, RoutingPayload

pytestmark = pytest.mark.cpu

Collide = Callable[[ModuleType, list[Callable[[], None]]], None]


def routing(rows: int) -> RoutingPayload:
    return RoutingPayload(
        ids=torch.arange(rows * 2, dtype=torch.int32).view(rows, 2) % 4,
        weights=torch.full((rows, 2), 0.5),
        num_tokens=rows,
    )


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_what_is_sent_arrives_and_the_answer_comes_back(rows: int) -> None:
    connector, seen = LoopbackConnector(), []

    def experts(activation: torch.Tensor, payload: RoutingPayload | None) -> torch.Tensor:
        seen.append((activation, payload))
        return activation * 2

    connector.serve("layer", experts)
    sent, payload = torch.randn(rows, 3), routing(rows)
    assert torch.equal(connector.exchange("layer", sent, payload), sent * 2)
    activation, arrived = seen[0]
    assert torch.equal(activation, sent)
    assert arrived is not None
    assert torch.equal(arrived.ids, payload.ids)
    assert torch.equal(arrived.weights, payload.weights)
    assert arrived.num_tokens == rows


def test_the_sides_share_no_memory() -> None:
    connector = LoopbackConnector()

    def experts(activation: torch.Tensor, payload: RoutingPayload | None) -> torch.Tensor:
        assert payload is not None
        for tensor in (activation, payload.ids, payload.weights):
            tensor.zero_()
        return activation

    connector.serve("layer", experts)
    sent, payload = torch.ones(3, 4), routing(3)
    connector.exchange("layer", sent, payload)
    assert torch.equal(sent, torch.ones(3, 4))
    assert torch.equal(payload.ids, routing(3).ids)
    assert torch.equal(payload.weights, routing(3).weights)


def test_nor_does_the_answer() -> None:
    """Neither with what was sent, nor with a buffer of the experts that they use again."""
    connector, buffer = LoopbackConnector(), torch.zeros(1, 3)
    connector.serve("static", lambda activation, payload: buffer.copy_(activation))
    first = connector.exchange("static", torch.ones(1, 3), None)
    second = connector.exchange("static", torch.full((1, 3), 2.0), None)
    second.fill_(7)
    assert first.tolist() == [[1.0] * 3]
    assert buffer.tolist() == [[2.0] * 3]


def test_without_routing_none_arrives() -> None:
    connector, seen = LoopbackConnector(), []

    def experts(activation: torch.Tensor, payload: RoutingPayload | None) -> torch.Tensor:
        seen.append(payload)
        return activation

    connector.serve("layer", experts)
    connector.exchange("layer", torch.ones(3, 4), None)
    assert seen == [None]


def test_everything_is_counted_where_it_travels() -> None:
    connector = LoopbackConnector()
    connector.serve("layer", lambda activation, payload: activation)
    assert connector.counts == TransferCounts()
    connector.exchange("layer", torch.ones(3, 4), routing(3))
    first = connector.counts
    # [3, 2] int32 and [3, 2] float32; [3, 4] float32
    assert first == TransferCounts(1, 1, 3, HEADER_BYTES + 3 * 2 * (4 + 4), 3 * 4 * 4)
    connector.exchange("layer", torch.ones(0, 4), routing(0))
    connector.exchange("layer", torch.ones(5, 4, dtype=torch.bfloat16), None)
    assert connector.counts.since(first) == TransferCounts(2, 1, 5, HEADER_BYTES, 5 * 4 * 2)


def test_a_call_that_fails_has_travelled() -> None:
    connector = LoopbackConnector()

    def experts(activation: torch.Tensor, payload: RoutingPayload | None) -> torch.Tensor:
        raise KeyError("the experts' side failed")

    connector.serve("layer", experts)
    with pytest.raises(KeyError, match="the experts' side failed"):
        connector.exchange("layer", torch.ones(3, 4), routing(3))
    assert connector.counts.calls == 1


def test_a_call_that_cannot_arrive_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, seen = LoopbackConnector(), []
    connector.serve("layer", lambda activation, payload: seen.append(payload))
    whole = RoutingPayload.pack
    monkeypatch.setattr(RoutingPayload, "pack", lambda self: whole(self)._replace(header=b""))
    with pytest.raises(RoutingPayloadError, match="the header has 0 bytes"):
        connector.exchange("layer", torch.ones(3, 4), routing(3))
    assert seen == []
    assert connector.counts == TransferCounts()


def test_calls_from_several_threads_are_all_counted(collide: Collide) -> None:
    connector, calls, threads = LoopbackConnector(), 3, 4
    connector.serve("layer", lambda activation, payload: activation)
    sent = torch.ones(2, 3)

    def call() -> None:
        for _ in range(calls):
            connector.exchange("layer", sent, None)

    collide(loopback, [call] * threads)
    total = calls * threads
    assert connector.counts == TransferCounts(total, 0, 2 * total, 0, 2 * 3 * 4 * total)


def test_layers_are_served_once_and_known() -> None:
    connector = LoopbackConnector()
    with pytest.raises(RoutingError, match="nobody serves layer 'a'; served are none"):
        connector.exchange("a", torch.ones(1, 1), None)
    connector.serve("a", lambda activation, payload: activation)
    with pytest.raises(RoutingError, match="layer 'a' is served already"):
        connector.serve("a", lambda activation, payload: activation)
    with pytest.raises(RoutingError, match="nobody serves layer 'b'; served are a"):
        connector.exchange("b", torch.ones(1, 1), None)
    assert connector.counts.calls == 0


@pytest.mark.parametrize(
    "answer",
    [
        torch.ones(2, 4),
        torch.ones(3, 4).double(),
        torch.ones(3, 5),
        torch.ones(3, 4, device="meta"),
        None,
        (torch.ones(3, 4),),
    ],
    ids=["rows", "dtype", "columns", "device", "none", "tuple"],
)
def test_an_answer_of_another_kind_is_refused(answer: Any) -> None:
    connector = LoopbackConnector()
    connector.serve("layer", lambda activation, payload: answer)
    with pytest.raises(RoutingError, match=r"experts of layer answered .*both must be alike"):
        connector.exchange("layer", torch.ones(3, 4), None)


@pytest.mark.parametrize("sent", [torch.tensor(1.0), torch.ones(3), torch.ones(1, 2, 3)], ids=str)
def test_an_activation_that_is_no_rows_is_refused(sent: torch.Tensor) -> None:
    connector = LoopbackConnector()
    connector.serve("layer", lambda activation, payload: activation)
    with pytest.raises(RoutingError, match=r"sent to layer is \[.*must be \[rows, hidden size\]"):
        connector.exchange("layer", sent, None)
    assert connector.counts.calls == 0


def test_a_handler_that_cannot_be_called_is_refused() -> None:
    connector = LoopbackConnector()
    with pytest.raises(RoutingError, match="handler of layer 'a' is None, which cannot be called"):
        connector.serve("a", None)  # type: ignore[arg-type]
    connector.serve("a", lambda activation, payload: activation)
