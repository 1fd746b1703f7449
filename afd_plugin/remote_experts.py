"""Experts on the other side of a connector, with the gate on either side.

    attention side:  route → payload ┐                     ┌ + shared experts
    connector:                       └ activation, payload ┤
    experts' side:   prepare → experts → finalize ─────────┘

Routing is an argument and a result all the way; nothing is kept between calls.  The engine's own
functions do the work, behind one small protocol a layer; shared experts always stay with the
activation that they are added to, on the attention side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from afd_plugin.agreement import AgreementGroup, exchange_texts
from afd_plugin.config import FIXED_AT_START, AFDConfig
from afd_plugin.connectors.base import Connector
from afd_plugin.connectors.loopback import LoopbackConnector
from afd_plugin.context import ScopeStack, shadowed
from afd_plugin.errors import PlacementDisagreement, RoutingError
from afd_plugin.payload import RoutingPayload


@dataclass(frozen=True)
class Prepared:
    """What ``experts`` computes with.

    ``activation``: [N, H] rows that this rank's experts may see.  ``routing``: theirs, row by row.
    ``rest``: what the engine needs to go on, and to undo the preparation.
    """

    activation: torch.Tensor
    routing: RoutingPayload
    rest: Any = None


class ExpertsBackend(Protocol):
    """One MoE layer of an engine; R rows, H hidden size, K experts a token."""

    @property
    def layer(self) -> str:
        """Its name, alike on both sides."""
        ...

    def route(
        self, activation: torch.Tensor, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([R, K] weights, [R, K] ids) by the engine's own router and the routing operator.

        ``logits``: what the gate gave already; ``None``: ask the gate.  Ids are int32, or int64
        where the router gives nothing else; weights of a floating type.  No row is fine.
        """
        ...

    def shared(self, activation: torch.Tensor) -> torch.Tensor | None:
        """[R, H] of the shared experts, once; ``None`` where the layer has none."""
        ...

    def scopes(self, activation: torch.Tensor) -> Sequence[AbstractContextManager[Any]]:
        """State that holds while the experts' side works on ``activation``, in order."""
        ...

    def prepare(self, activation: torch.Tensor, routing: RoutingPayload) -> Prepared:
        """Bring rows and their routing to the ranks that hold the experts."""
        ...

    def experts(self, prepared: Prepared) -> torch.Tensor:
        """[N, H] weighted sums over the experts of ``prepared.routing``, and of no other."""
        ...

    def finalize(self, output: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        """[R, H]: rows back on the ranks that sent them."""
        ...


class ExternalRoutingMoE:
    """The routed experts of a layer, told from outside which expert each row goes to."""

    def __init__(self, backend: ExpertsBackend) -> None:
        self._backend = backend

    def __call__(self, activation: torch.Tensor, routing: RoutingPayload) -> torch.Tensor:
        """[R, H] from [R, H] and the routing of its rows.

        What the backend set for the call is put back on every way out.
        Raises :class:`RoutingError` where routing and rows do not fit.
        """
        if routing.rows != activation.shape[0] or routing.layout != "batch":
            raise RoutingError(
                f"{self._backend.layer}: {activation.shape[0]} rows came with the routing of "
                f"{routing.rows} in layout {routing.layout!r}; each row needs its own, in 'batch'. "
                "Send the routing of these very rows, padding included, in the order of the batch."
            )
        with ScopeStack() as scopes:
            for scope in self._backend.scopes(activation):
                scopes.enter(scope)
            prepared = self.prepare(activation, routing)
            return self.finalize(self.experts(prepared), prepared)

    def prepare(self, activation: torch.Tensor, routing: RoutingPayload) -> Prepared:
        """Rows and routing as the experts need them."""
        return self._backend.prepare(activation, routing)

    def experts(self, prepared: Prepared) -> torch.Tensor:
        """What the experts make of them."""
        return self._backend.experts(prepared)

    def finalize(self, output: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        """Rows as they came."""
        return self._backend.finalize(output, prepared)


class ExpertsSide:
    """A layer's handler: it consumes the routing that came, or routes where none does."""

    def __init__(self, backend: ExpertsBackend, *, routes: bool) -> None:
        self._backend = backend
        self._routes = routes
        self.moe = ExternalRoutingMoE(backend)

    def __call__(self, activation: torch.Tensor, payload: RoutingPayload | None) -> torch.Tensor:
        """[R, H].  Raises :class:`RoutingError` where the other side is placed differently."""
        if (payload is None) != self._routes:
            came, wants = (
                ("none", "routing from the attention side")
                if payload is None
                else ("one", "to route by itself")
            )
            raise RoutingError(
                f"{self._backend.layer}: {came} came with the activation, and this side expects "
                f"{wants}. Set compute_gate_on_attention alike on both sides."
            )
        if payload is None:
            payload = route(self._backend, activation, None)
        return self.moe(activation, payload)


class AttentionSide:
    """A layer as the attention side calls it."""

    def __init__(self, backend: ExpertsBackend, connector: Connector, *, gate_here: bool) -> None:
        self.backend = backend
        self._connector = connector
        self._gate_here = gate_here

    def __call__(
        self, activation: torch.Tensor, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """([R, H] of the shared experts or ``None``, [R, H] of the routed ones).

        ``logits``: [R, E] where the engine has asked the gate already.
        """
        shared = self.backend.shared(activation)
        payload = route(self.backend, activation, logits) if self._gate_here else None
        return shared, self.reach(activation, payload)

    def reach(self, activation: torch.Tensor, payload: RoutingPayload | None) -> torch.Tensor:
        """[R, H] of the routed experts, wherever they are."""
        return self._connector.exchange(self.backend.layer, activation, payload)


def route(
    backend: ExpertsBackend, activation: torch.Tensor, logits: torch.Tensor | None
) -> RoutingPayload:
    """The routing of every row of ``activation``, as it travels.

    Raises :class:`RoutingError` where the router gave something that would become other routing.
    """
    weights, ids = backend.route(activation, logits)
    if not weights.is_floating_point():
        raise RoutingError(
            f"{backend.layer}: the router gave weights of {weights.dtype}; they must be of a "
            "floating type. Have the router give the experts' shares."
        )
    return RoutingPayload(
        ids=_as_int32(backend.layer, ids).contiguous(),
        weights=weights.to(torch.float32).contiguous(),
        num_tokens=int(activation.shape[0]),
    )


def _as_int32(layer: str, ids: torch.Tensor) -> torch.Tensor:
    """``ids`` as they travel; int64 ones are looked at first, which waits for a device."""
    if ids.dtype == torch.int32:
        return ids
    if ids.dtype != torch.int64:
        raise RoutingError(
            f"{layer}: the router gave expert ids of {ids.dtype}; allowed are torch.int32 and "
            "torch.int64. Have the router number the experts."
        )
    outside = (ids < 0) | (ids >= 2**31)
    if bool(outside.any()):
        raise RoutingError(
            f"{layer}: the router gave the expert id {int(ids[outside][0])}; allowed are 0 to "
            f"{2**31 - 1}. Have the router number the experts from 0."
        )
    return ids.to(torch.int32)


def make_connector(config: AFDConfig) -> Connector | None:
    """The connector that ``config`` names, ``None`` for ``"none"``."""
    makers: dict[str, Callable[[], Connector | None]] = {
        "none": lambda: None,
        "loopback": LoopbackConnector,
    }
    return makers[config.connector]()


def connect(
    backends: Iterable[ExpertsBackend], connector: Connector, config: AFDConfig
) -> list[AttentionSide]:
    """Serve every layer over ``connector``; the attention side of each, in order."""
    gate_here = config.compute_gate_on_attention
    sides = []
    for backend in backends:
        connector.serve(backend.layer, ExpertsSide(backend, routes=not gate_here))
        sides.append(AttentionSide(backend, connector, gate_here=gate_here))
    if not sides:
        raise RoutingError(
            f"connector is {config.connector!r}, but the model has no layer with routed experts. "
            'Set connector to "none".'
        )
    return sides


# Where a layer is entered: the engine's object, the name of its method, and what stands for it.
Seam = Callable[[AttentionSide], tuple[object, str, Callable[..., Any]]]


@contextmanager
def remote(sides: Iterable[AttentionSide], seam: Seam) -> Generator[None, None, None]:
    """The layers of ``sides`` reach their experts through them inside, and natively afterwards."""
    with ScopeStack() as scopes:
        for side in sides:
            scopes.enter(shadowed(*seam(side)))
        yield


def describe_placement(config: AFDConfig) -> str:
    """What both sides must have alike, in words."""
    return config.described(FIXED_AT_START)


def agree_on_placement(group: AgreementGroup, config: AFDConfig) -> None:
    """Return once every rank of ``group`` chooses experts where this one does.

    Raises :class:`PlacementDisagreement` on every rank, with the options of all, and
    :class:`~afd_plugin.errors.SilentRanks` when a rank does not answer.
    """
    words = describe_placement(config)
    digests = group.gather(hashlib.sha256(words.encode()).digest())
    if len(set(digests)) == 1:
        return
    told = exchange_texts(group, words)
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(told))
    raise PlacementDisagreement(
        "ranks are configured differently for where experts are chosen, so that none starts:\n"
        f'{lines}\nSet additional_config["afd"] alike on all of them.',
        told,
    )
