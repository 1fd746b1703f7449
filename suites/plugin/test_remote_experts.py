"""Experts behind a connector, against a mixture of experts written with numpy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afd_plugin.agreement import AgreementGroup
from afd_plugin.config import AFDConfig
from afd_plugin.connectors.loopback import LoopbackConnector
from afd_plugin.context import AttributeSlot, replaced
from afd_plugin.errors import AgreementError, PlacementDisagreement, RoutingError
from afd_plugin.payload import RoutingPayload, by_experts, expert_order, restore
from afd_plugin.remote_experts import (
    AttentionSide,
    ExpertsSide,
    ExternalRoutingMoE,
    Prepared,
    agree_on_placement,
    connect,
    describe_placement,
    make_connector,
    route,
)
from afd_testkit.ranks import Rank, run_ranks

pytestmark = pytest.mark.cpu

HIDDEN, EXPERTS, TOP_K, RANKS = 6, 8, 3, 2
AGREEMENT = 1e-6  # float32 against float64 sums of at most 3 x 6 terms below 1


class Weights:
    """Of one layer, float64."""

    def __init__(self, seed: int = 0, *, shared: bool = True) -> None:
        random = np.random.default_rng(seed)
        self.gate = random.standard_normal((HIDDEN, EXPERTS)) * 0.5
        self.experts = random.standard_normal((EXPERTS, HIDDEN, HIDDEN)) * 0.2
        self.shared = random.standard_normal((HIDDEN, HIDDEN)) * 0.2 if shared else None


def reference(weights: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([R, H] of the shared experts, [R, H] of the routed ones), by the definition.

    Softmax over all experts, the best few kept and scaled to a sum of one.
    """
    routed = np.zeros_like(x)
    for row, activation in enumerate(x):
        logits = activation @ weights.gate
        scores = np.exp(logits - logits.max())
        best = np.argsort(-scores)[:TOP_K]
        for expert in best:
            share = scores[expert] / scores[best].sum()
            routed[row] += share * np.tanh(activation @ weights.experts[expert])
    shared = np.zeros_like(x) if weights.shared is None else x @ weights.shared
    return shared, routed


class ToyExperts:
    """A backend in torch whose experts lie on two ranks, reached by sorting assignments."""

    def __init__(self, weights: Weights, layer: str = "layer") -> None:
        self.layer = layer
        self.given = weights
        self.gate = torch.from_numpy(weights.gate).float()
        self.weights = torch.from_numpy(weights.experts).float()
        self.context = SimpleNamespace(method="attention's own")
        self.during: list[str] = []  # the method in force in prepare, experts, finalize
        self.fails_in = ""
        self.gate_asked = 0

    def route(
        self, activation: torch.Tensor, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if logits is None:
            self.gate_asked += 1
            logits = activation @ self.gate
        best = torch.topk(logits.softmax(-1), TOP_K, dim=-1)
        return best.values / best.values.sum(-1, keepdim=True), best.indices

    def shared(self, activation: torch.Tensor) -> torch.Tensor | None:
        if self.given.shared is None:
            return None
        return activation @ torch.from_numpy(self.given.shared).float()

    def scopes(self, activation: torch.Tensor) -> Sequence[AbstractContextManager[Any]]:
        return [replaced(AttributeSlot(self.context, "method"), f"for {activation.shape[0]}")]

    def prepare(self, activation: torch.Tensor, routing: RoutingPayload) -> Prepared:
        self._at("prepare")
        holders = [expert * RANKS // EXPERTS for expert in range(EXPERTS)]
        order = expert_order(routing, holders, RANKS)
        return Prepared(activation[order.tokens], by_experts(routing, order), order)

    def experts(self, prepared: Prepared) -> torch.Tensor:
        self._at("experts")
        chosen = self.weights[prepared.routing.ids.reshape(-1).long()]
        made = torch.tanh(torch.bmm(prepared.activation[:, None], chosen)[:, 0])
        return made * prepared.routing.weights

    def finalize(self, output: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        self._at("finalize")
        return restore(prepared.rest, output).sum(1)

    def _at(self, step: str) -> None:
        self.during.append(self.context.method)
        if step == self.fails_in:
            raise KeyError(f"failed in {step}")


def sides(backend: ToyExperts, *, gate_here: bool) -> tuple[AttentionSide, LoopbackConnector]:
    connector = LoopbackConnector()
    config = AFDConfig(connector="loopback", compute_gate_on_attention=gate_here)
    [side] = connect([backend], connector, config)
    return side, connector


def agrees(got: torch.Tensor | None, expected: np.ndarray) -> None:
    assert got is not None
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=AGREEMENT)


# --- equal outputs wherever the gate is -----------------------------------------------------


@given(rows=st.integers(0, 12), seed=st.integers(0, 2**16), gate_here=st.booleans())
def test_outputs_are_those_of_the_definition(rows: int, seed: int, gate_here: bool) -> None:
    weights = Weights(seed)
    x = np.random.default_rng(seed + 1).standard_normal((rows, HIDDEN)) * 0.5
    side, connector = sides(ToyExperts(weights), gate_here=gate_here)
    activation = torch.from_numpy(x).float()
    shared, routed = side(activation, activation @ torch.from_numpy(weights.gate).float())
    expected_shared, expected = reference(weights, x)
    agrees(shared, expected_shared)
    agrees(routed, expected)
    assert connector.counts.calls == 1
    assert connector.counts.payloads == gate_here
    assert connector.counts.tokens == rows


def test_without_shared_experts_there_is_nothing_to_add() -> None:
    side, _ = sides(ToyExperts(Weights(shared=False)), gate_here=True)
    shared, routed = side(torch.ones(2, HIDDEN), None)
    assert shared is None
    assert routed.shape == (2, HIDDEN)


@pytest.mark.parametrize("gate_here", [True, False], ids=["attention", "experts"])
def test_logits_that_came_are_used_on_the_attention_side_only(gate_here: bool) -> None:
    backend = ToyExperts(Weights())
    side, _ = sides(backend, gate_here=gate_here)
    activation = torch.ones(2, HIDDEN)
    side(activation, activation @ backend.gate)
    assert backend.gate_asked == (0 if gate_here else 1)


def test_the_experts_side_consumes_exactly_the_routing_that_came() -> None:
    weights = Weights(3)
    backend = ToyExperts(weights)
    moe = ExternalRoutingMoE(backend)
    x = np.random.default_rng(4).standard_normal((4, HIDDEN)) * 0.5
    ids = np.array([[7, 0, 3], [1, 2, 4], [5, 6, 7], [0, 0, 0]], dtype=np.int32)
    shares = np.random.default_rng(5).random((4, TOP_K)).astype(np.float32)
    shares[3] = 0  # as padding has it
    routing = RoutingPayload(torch.from_numpy(ids), torch.from_numpy(shares), num_tokens=3)
    expected = np.zeros_like(x)
    for row, choice in itertools.product(range(4), range(TOP_K)):
        expert = weights.experts[ids[row, choice]]
        expected[row] += shares[row, choice] * np.tanh(x[row] @ expert)
    agrees(moe(torch.from_numpy(x).float(), routing), expected)
    assert backend.gate_asked == 0
    assert not expected[3].any()


def test_wider_routing_is_narrowed_to_what_travels() -> None:
    class Wide(ToyExperts):
        def route(
            self, activation: torch.Tensor, logits: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = super().route(activation, logits)
            assert ids.dtype == torch.int64
            return weights.double().t().contiguous().t(), ids.t().contiguous().t()

    weights = Weights(2)
    x = np.random.default_rng(2).standard_normal((5, HIDDEN)) * 0.5
    side, _ = sides(Wide(weights), gate_here=True)
    agrees(side(torch.from_numpy(x).float(), None)[1], reference(weights, x)[1])


class Giving(ToyExperts):
    """Whose router gives these ids, and weights of one."""

    def __init__(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        super().__init__(Weights())
        self.ids = ids
        self.shares = torch.ones(ids.shape) if weights is None else weights

    def route(
        self, activation: torch.Tensor, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.shares, self.ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_of_either_width_travel_as_int32(dtype: torch.dtype) -> None:
    largest = 2**31 - 1
    given = torch.tensor([[0, largest], [3, 1]], dtype=dtype)
    got = route(Giving(given, torch.ones(2, 2).bfloat16()), torch.ones(2, HIDDEN), None)
    assert got.ids.dtype == torch.int32
    assert got.ids.tolist() == [[0, largest], [3, 1]]
    assert got.weights.dtype == torch.float32
    assert got.weights.tolist() == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("expert", [2**31, 2**32 + 1, 2**63 - 1, -1, -(2**40)])
def test_wider_ids_are_not_wrapped(expert: int) -> None:
    backend = Giving(torch.tensor([[0, 1], [2, expert]]))
    with pytest.raises(RoutingError, match=rf"layer: .* expert id {expert}; allowed are 0 to 21"):
        route(backend, torch.ones(2, HIDDEN), None)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.uint8], ids=str
)
def test_ids_that_are_no_ids_are_not_rounded(dtype: torch.dtype) -> None:
    with pytest.raises(RoutingError, match=f"layer: .* expert ids of {dtype}; allowed are torch.i"):
        route(Giving(torch.ones(2, 2, dtype=dtype)), torch.ones(2, HIDDEN), None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
def test_weights_that_are_no_shares(dtype: torch.dtype) -> None:
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(
        RoutingError, match=f"layer: .* weights of {dtype}; they must be of a float"
    ):
        route(Giving(ids, torch.ones(2, 2, dtype=dtype)), torch.ones(2, HIDDEN), None)


# --- refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("routes", [True, False])
def test_sides_that_are_placed_differently_are_told(routes: bool) -> None:
    side = ExpertsSide(ToyExperts(Weights()), routes=routes)
    payload = RoutingPayload(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3), 2)
    with pytest.raises(RoutingError, match="Set compute_gate_on_attention alike on both sides"):
        side(torch.ones(2, HIDDEN), payload if routes else None)


def test_rows_and_routing_must_fit() -> None:
    moe = ExternalRoutingMoE(ToyExperts(Weights()))
    payload = RoutingPayload(torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, 1), 3)
    with pytest.raises(RoutingError, match="2 rows came with the routing of 3"):
        moe(torch.ones(2, HIDDEN), payload)
    sorted_rows = RoutingPayload(payload.ids, payload.weights, 3, layout="experts")
    with pytest.raises(RoutingError, match="in layout 'experts'"):
        moe(torch.ones(3, HIDDEN), sorted_rows)


def test_a_model_without_routed_experts_has_nothing_to_connect() -> None:
    with pytest.raises(RoutingError, match="no layer with routed experts"):
        connect([], LoopbackConnector(), AFDConfig(connector="loopback"))


def test_connectors_by_name() -> None:
    assert make_connector(AFDConfig()) is None
    assert isinstance(make_connector(AFDConfig(connector="loopback")), LoopbackConnector)


# --- state ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["", "prepare", "experts", "finalize"])
def test_state_is_put_back_on_every_way_out(step: str) -> None:
    weights = Weights(6)
    backend = ToyExperts(weights)
    side, _ = sides(backend, gate_here=True)
    x = np.random.default_rng(7).standard_normal((4, HIDDEN)) * 0.5
    activation = torch.from_numpy(x).float()
    backend.fails_in = step
    if step:
        with pytest.raises(KeyError, match=f"failed in {step}"):
            side(activation, None)
    else:
        side(activation, None)
    assert backend.context.method == "attention's own"
    steps = ["prepare", "experts", "finalize"]
    ran = steps[: steps.index(step) + 1] if step else steps
    assert backend.during == ["for 4"] * len(ran)
    # And the next call is right.
    backend.fails_in = ""
    agrees(side(activation, None)[1], reference(weights, x)[1])


def test_layers_do_not_see_each_other() -> None:
    backends = [ToyExperts(Weights(seed), f"layer {seed}") for seed in range(3)]
    connector = LoopbackConnector()
    config = AFDConfig(connector="loopback", compute_gate_on_attention=True)
    x = np.random.default_rng(8).standard_normal((4, HIDDEN)) * 0.5
    layers = connect(backends, connector, config)
    for seed, side in reversed(list(enumerate(layers))):
        agrees(side(torch.from_numpy(x).float(), None)[1], reference(Weights(seed), x)[1])


# --- both sides alike -----------------------------------------------------------------------


def _agree(rank: Rank, options: list[dict[str, Any]]) -> str:
    import torch.distributed as dist

    store = dist.FileStore(str(rank.folder / "store"), rank.world_size)
    group = AgreementGroup(store, rank.rank, rank.world_size, timeout=20)
    try:
        agree_on_placement(group, AFDConfig(**options[rank.rank]))
    except PlacementDisagreement as error:
        return f"{error}\n{error.placements}"
    finally:
        group.close()
    return "agreed"


HERE = {"connector": "loopback", "compute_gate_on_attention": True}


def test_sides_that_are_configured_alike_start() -> None:
    # Options that are no matter of placement may differ.
    told = run_ranks(2, _agree, [HERE, {**HERE, "async_moe_min_tokens": 9}], timeout=90)
    assert told == ["agreed", "agreed"]


@pytest.mark.parametrize(
    "other",
    [
        {**HERE, "compute_gate_on_attention": False},
        {**HERE, "force_balanced_routing": True},
        {},
    ],
    ids=["gate", "balance", "connector"],
)
def test_a_mismatch_is_refused_on_both(other: dict[str, Any]) -> None:
    told = run_ranks(2, _agree, [HERE, other], timeout=90)
    for text in told:
        assert "ranks are configured differently for where experts are chosen" in text
        assert f"rank 0: {describe_placement(AFDConfig(**HERE))}" in text
        assert f"rank 1: {describe_placement(AFDConfig(**other))}" in text
    assert told[0] == told[1]


def _only_one_asks(rank: Rank) -> str:
    import torch.distributed as dist

    store = dist.FileStore(str(rank.folder / "store"), rank.world_size)
    group = AgreementGroup(store, rank.rank, rank.world_size, timeout=2)
    if rank.rank == 0:
        group.close()
        return "left"
    try:
        agree_on_placement(group, AFDConfig())
    except AgreementError as error:
        return type(error).__name__
    finally:
        group.close()
    return "agreed"


def test_a_side_that_leaves_does_not_hold_the_other() -> None:
    assert run_ranks(2, _only_one_asks, timeout=60) == ["left", "SilentRanks"]


def test_what_is_told_of_a_placement() -> None:
    assert describe_placement(AFDConfig(**HERE)) == (
        "compute_gate_on_attention True, connector 'loopback', force_balanced_routing False"
    )
