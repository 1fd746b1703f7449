"""Experts behind a connector on vLLM-Ascend: refusals, the forward context, the seam, the rows.

That results are those of the layer itself, and that faults show, is the gate's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from afd_plugin import errors
from afd_plugin.connectors.loopback import LoopbackConnector
from afd_plugin.errors import FusedCommunication, RoutingError, UnsupportedSetup
from afd_plugin.payload import RoutingPayload
from afd_plugin.remote_experts import AttentionSide, remote

ConfigMaker = Callable[..., Any]
Start = Callable[..., None]

pytestmark = [pytest.mark.ascend, pytest.mark.usefixtures("ascend_loaded")]

HERE = {"connector": "loopback", "compute_gate_on_attention": True}
THERE = {"connector": "loopback", "compute_gate_on_attention": False}


# --- refusals before anything exists --------------------------------------------------------


class Created(Exception):
    """Validation has let the worker pass."""


@pytest.fixture
def start(start_worker: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Begins a worker; :class:`Created` where validation lets it pass."""
    from afd_plugin.workers import npu

    def reached(config: Any) -> None:
        raise Created

    # The first thing that a start changes in its process.
    monkeypatch.setattr(npu, "register_for", reached)
    return start_worker


def assert_refused(begin: Callable[[], None], refusal: type[UnsupportedSetup], said: str) -> None:
    with pytest.raises(refusal) as caught:
        begin()
    assert type(caught.value) is refusal
    message = str(caught.value)
    assert message.startswith(said)
    assert f"allowed: {refusal.allowed}. " in message
    assert message.endswith(refusal.remedy)


@pytest.mark.parametrize("options", [HERE, THERE, {}], ids=["attention", "experts", "none"])
@pytest.mark.parametrize("model", ["qwen3-moe", "deepseek-v3"])
def test_a_plain_configuration_starts(
    make_config: ConfigMaker, start: Start, model: str, options: dict[str, Any]
) -> None:
    with pytest.raises(Created):
        start(make_config(model), options)


@pytest.mark.parametrize("options", [HERE, THERE], ids=["attention", "experts"])
def test_fused_communication_is_refused(
    make_config: ConfigMaker, start: Start, options: dict[str, Any]
) -> None:
    def fuse(ascend: Any) -> None:
        ascend.enable_fused_mc2 = 1

    config = make_config("qwen3-moe")
    said = "experts' communication is 'FUSED_MC2', which a connector to the experts does not"
    assert_refused(lambda: start(config, options, fuse), FusedCommunication, said)
    with pytest.raises(Created):
        start(config, {}, fuse)


@pytest.mark.parametrize("options", [{}, THERE], ids=["none", "experts"])
def test_forced_balance_is_refused_where_no_gate_covers_it(
    make_config: ConfigMaker, start: Start, options: dict[str, Any]
) -> None:
    config = make_config("qwen3-moe")
    forced = {**options, "force_balanced_routing": True}
    said = "force_balanced_routing is True, which vLLM-Ascend without the gate on the attention"
    assert_refused(lambda: start(config, forced), errors.BalancedRoutingOffPath, said)
    with pytest.raises(Created):
        start(config, {**HERE, "force_balanced_routing": True})


@pytest.mark.parametrize("options", [HERE, THERE], ids=["attention", "experts"])
def test_tensor_parallel_ranks_are_refused(
    make_config: ConfigMaker, start: Start, options: dict[str, Any]
) -> None:
    config = make_config("qwen3-moe", tensor_parallel_size=2)
    said = "tensor_parallel_size is 2"
    assert_refused(lambda: start(config, options), errors.ConnectorTensorParallel, said)


@pytest.mark.parametrize("options", [HERE, THERE], ids=["attention", "experts"])
def test_data_parallel_ranks_are_covered(
    make_config: ConfigMaker, start: Start, options: dict[str, Any]
) -> None:
    config = make_config("qwen3-moe", data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(Created):
        start(config, options)


# --- the forward context --------------------------------------------------------------------


@pytest.fixture
def parent() -> Iterator[Any]:
    """A forward context in force, as attention has it."""
    from vllm.forward_context import override_forward_context

    held = SimpleNamespace(
        attn_metadata="attention's",
        moe_comm_type="attention's type",
        moe_comm_method="attention's method",
        max_tokens_across_dp=70,
    )
    with override_forward_context(held):
        yield held


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that the native selector was asked for; it answers all-to-all."""
    from vllm_ascend import ascend_forward_context
    from vllm_ascend.ops.fused_moe import moe_comm_method

    kind = ascend_forward_context.MoECommType.ALLTOALL
    seen: list[int] = []

    def select(num_tokens: int, vllm_config: Any, is_draft_model: bool = False) -> Any:
        seen.append(num_tokens)
        return kind

    monkeypatch.setattr(ascend_forward_context, "select_moe_comm_method", select)
    monkeypatch.setitem(moe_comm_method._MoECommMethods, kind, "experts' method")
    return seen


def backend(data_parallel: int = 1) -> Any:
    from afd_plugin.compat.ascend_experts import AscendExperts

    moe = SimpleNamespace(
        layer_name="layer", vllm_config=None, moe_config=SimpleNamespace(dp_size=data_parallel)
    )
    return AscendExperts(moe, force_balance=False)


class Failed(Exception):
    """What is raised inside a call."""


@pytest.mark.parametrize("fails", [False, True])
def test_the_method_is_switched_for_the_call_only(
    parent: Any, asked: list[int], fails: bool
) -> None:
    before = dict(vars(parent))
    during: dict[str, Any] = {}

    def call() -> None:
        with ExitStack() as stack:
            for scope in backend().scopes(torch.ones(5, 4)):
                stack.enter_context(scope)
            during.update(vars(parent))
            if fails:
                raise Failed

    if fails:
        with pytest.raises(Failed):
            call()
    else:
        call()
    assert during["moe_comm_type"].name == "ALLTOALL"
    assert during["moe_comm_method"] == "experts' method"
    assert during["attn_metadata"] is None
    assert vars(parent) == before


@pytest.mark.parametrize(("data_parallel", "tokens"), [(1, 5), (2, 70)])
def test_the_native_selector_is_asked_for_the_tokens_at_hand(
    parent: Any, asked: list[int], data_parallel: int, tokens: int
) -> None:
    """Of all data-parallel ranks the longest counts: they must choose alike."""
    backend(data_parallel).scopes(torch.ones(5, 4))
    assert asked == [tokens]


def test_a_fused_method_is_refused_and_changes_nothing(
    parent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_ascend import ascend_forward_context

    fused = ascend_forward_context.MoECommType.FUSED_MC2
    monkeypatch.setattr(ascend_forward_context, "select_moe_comm_method", lambda *args: fused)
    before = dict(vars(parent))
    with pytest.raises(FusedCommunication, match=r"is 'FUSED_MC2'.*ALLGATHER, ALLTOALL or MC2"):
        backend().scopes(torch.ones(5, 4))
    assert vars(parent) == before


# --- rows and their routing -----------------------------------------------------------------


def test_routing_follows_its_rows_through_the_native_preparation(parent: Any) -> None:
    """Rows that the preparation reorders, cuts and pads: each keeps its own experts."""

    class Method:
        def prepare(self, hidden_states: Any, router_logits: Any, **options: Any) -> Any:
            order = torch.tensor([3, 0, 2])
            pad = torch.nn.functional.pad
            return SimpleNamespace(
                hidden_states=pad(hidden_states[order], (0, 0, 0, 2)),
                router_logits=pad(router_logits[order], (0, 0, 0, 2)),
            )

    from afd_plugin.compat.ascend_experts import AscendExperts

    class OfEight(AscendExperts):
        """It need not ask a layer for its number of experts."""

        num_experts = 8  # type: ignore[assignment]

    parent.moe_comm_method = Method()
    parent.flash_comm_v1_enabled = False
    one = OfEight(SimpleNamespace(enable_shared_expert_dp=False), force_balance=False)
    ids = torch.tensor([[7, 0], [1, 2], [3, 6], [5, 4]], dtype=torch.int32)
    weights = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.3, 0.7], [0.4, 0.6]])
    rows = torch.arange(4.0)[:, None].expand(4, 3)
    done = one.prepare(rows, RoutingPayload(ids, weights, num_tokens=4))
    assert done.activation[:, 0].tolist() == [3, 0, 2, 0, 0]
    # The experts of what was added differ, as operators that exchange tokens want.
    assert done.routing.ids.tolist() == [[5, 4], [7, 0], [3, 6], [0, 1], [0, 1]]
    assert torch.equal(done.routing.weights[:3], weights[[3, 0, 2]])
    assert not done.routing.weights[3:].any()


# --- the seam -------------------------------------------------------------------------------


class Layer:
    """What the seam touches of an AscendFusedMoE."""

    layer_name = "layers.0.experts"

    def __init__(self, shared: object) -> None:
        self._shared_experts = shared

    def forward_impl(self, hidden_states: Any, router_logits: Any) -> str:
        return "native"

    def shared_forward_impl(self, hidden_states: Any, router_logits: Any) -> str:
        return "native, shared"


@pytest.mark.parametrize("shared", [None, "shared experts"])
def test_layers_are_native_again_afterwards(shared: object) -> None:
    from afd_plugin.compat.ascend_experts import AscendExperts, seam

    class Answering(AttentionSide):
        def __call__(self, activation: Any, logits: Any) -> Any:
            return f"shared of {activation}", f"routed of {activation}, {logits}"

    layer = Layer(shared)
    side = Answering(AscendExperts(layer, force_balance=False), LoopbackConnector(), gate_here=True)

    def fail() -> None:
        with remote([side], seam):
            if shared is None:
                assert layer.forward_impl("x", "logits") == "routed of x, logits"
                assert layer.shared_forward_impl("x", "logits") == "native, shared"
            else:
                both = ("shared of x", "routed of x, logits")
                assert layer.shared_forward_impl("x", "logits") == both
                assert layer.forward_impl("x", "logits") == "native"
            raise Failed

    with pytest.raises(Failed):
        fail()
    assert layer.forward_impl("x", "logits") == "native"
    assert layer.shared_forward_impl("x", "logits") == "native, shared"
    assert set(vars(layer)) == {"_shared_experts"}


def test_a_layer_of_another_engine_is_refused() -> None:
    from afd_plugin.compat.ascend_experts import seam

    side: Any = AttentionSide(
        SimpleNamespace(layer="layer"),  # type: ignore[arg-type]
        LoopbackConnector(),
        gate_here=True,
    )
    with (
        pytest.raises(RoutingError, match="SimpleNamespace is no layer of vLLM-Ascend's"),
        remote([side], seam),
    ):
        pass
