"""Experts behind a connector on real vLLM: the seam, refusals, balance, and faults that show."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from afd_plugin import errors
from afd_plugin.connectors.loopback import LoopbackConnector
from afd_plugin.errors import RoutingError, UnsupportedSetup, UpstreamDrift
from afd_plugin.remote_experts import AttentionSide, remote
from afd_testkit.engines.base import EngineConfig, Prompt, RoutingSetting
from afd_testkit.faults import CONTROL
from afd_testkit.gates import external_routing
from afd_testkit.gates.proof import first_red, pairs
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.models.texts import paragraphs
from afd_testkit.pool import EnginePool
from afd_testkit.results import Outcome

ConfigMaker = Callable[..., Any]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_loaded")]

# It has shared experts; the other model is in test_faults_vllm.
SUBJECT = Subject("vllm-cpu", "deepseek-v3", "float32")
HERE = {"connector": "loopback", "compute_gate_on_attention": True}
THERE = {"connector": "loopback", "compute_gate_on_attention": False}


# --- the gate can fail ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(afd_engines: EnginePool) -> GateSession:
    return GateSession(
        start=lambda config: afd_engines.get(config, "vllm-cpu"), paragraphs=paragraphs()
    )


class TestFaults:
    """On the stock engine and ones behind a connector; random order moves a class as a whole."""

    @pytest.mark.parametrize(
        "fault", [fault for gate, fault in pairs() if gate == external_routing.NAME]
    )
    def test_gate_turns_red(self, session: GateSession, fault: str) -> None:
        red, seen = first_red(session, SUBJECT, external_routing.NAME, fault)
        assert red is not None, [(r.variant, r.outcome, r.message) for r in seen]
        if fault == "ids-of-wrong-dtype":
            # 404 tokens and 2 experts each: 8 bytes an id arrive where 4 are announced.
            assert (
                "the buffer of ids has 6464 bytes; [404, 2] of torch.int32 has 3232" in red.message
            )
        else:  # wrong numbers, not only wrong counts
            assert not all(comparison.ok for comparison in red.comparisons)

    def test_gate_stays_green_under_an_injection_of_nothing(self, session: GateSession) -> None:
        red, seen = first_red(session, SUBJECT, external_routing.NAME, CONTROL)
        assert red is None, (red.variant, red.message)
        assert [result.outcome for result in seen] == [Outcome.PASSED] * 6


@pytest.mark.parametrize("gate_here", [True, False], ids=["attention", "experts"])
def test_forced_balance_reaches_the_experts(afd_engines: EnginePool, gate_here: bool) -> None:
    config = EngineConfig(
        model="qwen3-moe",
        worker="afd",
        afd=(
            ("async_moe_ubatching", False),
            ("connector", "loopback"),
            ("compute_gate_on_attention", gate_here),
            ("force_balanced_routing", True),
        ),
    )
    engine = afd_engines.get(config, "vllm-cpu")
    prompt = Prompt("p", tuple(range(5, 45)))
    [step] = engine.run([prompt], routing=RoutingSetting(watch=True)).steps
    assert step.evidence is not None
    assert step.evidence["balanced_routing"] == len(step.expert_ids) > 0
    for ids in step.expert_ids:
        counts = np.bincount(ids.reshape(-1))
        assert ids.shape[0] == 40
        assert counts.max() - counts.min() <= 1


# --- refusals before anything exists --------------------------------------------------------


class Created(Exception):
    """Validation has let the worker pass."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, object], None]:
    """What vLLM does with a worker class first; :class:`Created` where the worker starts."""
    from afd_plugin.workers import cpu

    def reached(config: Any) -> None:
        raise Created

    # The first thing that a start changes in its process.
    monkeypatch.setattr(cpu, "register_for", reached)

    def start(config: Any, options: object) -> None:
        config.additional_config = {"afd": options}
        cpu.AFDCPUWorker(
            vllm_config=config,
            local_rank=0,
            rank=0,
            distributed_init_method="tcp://127.0.0.1:1",
            is_driver_worker=True,
        )

    return start


REFUSED: list[tuple[type[UnsupportedSetup], dict[str, Any], dict[str, Any], str]] = [
    (errors.ConnectorUbatching, {}, {"async_moe_ubatching": True}, "async_moe_ubatching is True"),
    (
        errors.ConnectorTensorParallel,
        {"tensor_parallel_size": 2},
        {},
        "tensor_parallel_size is 2",
    ),
    (
        errors.ConnectorCompiled,
        {"enforce_eager": False},
        {},
        "compilation_config.mode / cudagraph_mode is 'DYNAMO_TRACE_ONCE / NONE'",
    ),
    (
        errors.ConnectorSpeculativeDecoding,
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
            }
        },
        {},
        "speculative_config.method is 'ngram'",
    ),
    (
        errors.UncoveredWithConnector,
        {"data_parallel_size": 2},
        {},
        "the engine's set of settings that no gate covers is ('data_parallel_size',)",
    ),
    (
        errors.UncoveredWithConnector,
        {"enable_lora": True},
        {},
        "the engine's set of settings that no gate covers is ('lora_config',)",
    ),
]


@pytest.mark.parametrize("options", [HERE, THERE], ids=["attention", "experts"])
@pytest.mark.parametrize(
    ("refusal", "arguments", "more", "quoted"),
    REFUSED,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused_with_a_connector(
    make_config: ConfigMaker,
    started: Callable[[Any, object], None],
    refusal: type[UnsupportedSetup],
    arguments: dict[str, Any],
    more: dict[str, Any],
    quoted: str,
    options: dict[str, Any],
) -> None:
    with pytest.raises(refusal) as caught:
        started(make_config("qwen3-moe", **arguments), {**options, **more})
    assert type(caught.value) is refusal
    message = str(caught.value)
    assert message.startswith(quoted)
    assert f"allowed: {refusal.allowed}. " in message
    assert message.endswith(refusal.remedy)


def test_a_quantized_model_is_refused_with_a_connector(
    make_config: ConfigMaker,
    started: Callable[[Any, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config("qwen3-moe")
    monkeypatch.setattr(config.model_config, "quantization", "fp8")
    with pytest.raises(errors.QuantizedTransport, match=r"^model_config.quantization is 'fp8', "):
        started(config, HERE)
    with pytest.raises(Created):
        started(config, {})


@pytest.mark.parametrize("options", [HERE, THERE, {}], ids=["attention", "experts", "none"])
def test_a_plain_configuration_starts(
    make_config: ConfigMaker, started: Callable[[Any, object], None], options: dict[str, Any]
) -> None:
    with pytest.raises(Created):
        started(make_config("deepseek-v3"), options)


# --- the seam -------------------------------------------------------------------------------


class Runner:
    """What the seam touches of a MoERunner."""

    layer_name = "layers.0.experts"

    def __init__(self, *, gate: Any = "a gate", fused: bool = False) -> None:
        self.gate = gate
        self._fse_fuse_gate = fused

    def _apply_quant_method(self, **arguments: Any) -> str:
        return "native"


def side_of(runner: Runner) -> tuple[AttentionSide, list[Any]]:
    """An attention side that answers without experts, and what it was called with."""
    from afd_plugin.compat.vllm_experts import VllmExperts

    seen: list[Any] = []

    class Answering(AttentionSide):
        def __call__(self, activation: Any, logits: Any) -> Any:
            seen.append((activation, logits))
            return None, activation

    return Answering(VllmExperts(runner), LoopbackConnector(), gate_here=True), seen


def test_layers_are_native_again_afterwards() -> None:
    from afd_plugin.compat.vllm_experts import seam

    runners = [Runner(), Runner()]
    sides = [side_of(runner) for runner in runners]
    x, logits = torch.ones(2, 3), torch.zeros(2, 4)
    arguments = {"hidden_states": x, "router_logits": logits, "shared_experts_input": None}

    class Failed(Exception):
        pass

    def fail() -> None:
        with remote([side for side, _ in sides], seam):
            for runner in runners:
                assert runner._apply_quant_method(**arguments) == (None, x)
            raise Failed

    with pytest.raises(Failed):
        fail()
    for runner, (_, seen) in zip(runners, sides, strict=True):
        assert len(seen) == 1
        assert seen[0][0] is x
        assert seen[0][1] is logits
        assert runner._apply_quant_method(**arguments) == "native"
        assert "_apply_quant_method" not in vars(runner)


@pytest.mark.parametrize(
    "more",
    [
        {"shared_experts_overlapping": True, "shared_experts_input": None},
        {"shared_experts_input": torch.ones(2, 3)},
    ],
    ids=["stream", "input"],
)
def test_shared_experts_of_another_kind_are_refused(more: dict[str, Any]) -> None:
    from afd_plugin.compat.vllm_experts import seam

    runner = Runner()
    side, seen = side_of(runner)
    with (
        remote([side], seam),
        pytest.raises(RoutingError, match="a stream of their own, or on an input"),
    ):
        runner._apply_quant_method(
            hidden_states=torch.ones(2, 3), router_logits=torch.zeros(2, 4), **more
        )
    assert seen == []


@pytest.mark.parametrize("runner", [Runner(gate=None), Runner(fused=True)], ids=["none", "fused"])
def test_a_layer_without_a_gate_of_its_own_is_refused(runner: Runner) -> None:
    from afd_plugin.compat.vllm_experts import VllmExperts

    with pytest.raises(UpstreamDrift, match=r"layers\.0\.experts does not hold a gate of its own"):
        VllmExperts(runner)


@pytest.mark.parametrize("dtype", [None, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_any_number_of_rows_is_routed(rows: int, grouped: bool, dtype: torch.dtype | None) -> None:
    """vLLM's grouped top-k cannot be asked about no rows; whoever sees ids sees those too."""
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

    from afd_plugin.compat.vllm_experts import VllmExperts

    groups: dict[str, Any] = (
        {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2} if grouped else {}
    )
    seen: list[torch.Tensor] = []
    runner: Any = Runner()
    runner.router = create_fused_moe_router(top_k=2, global_num_experts=8, **groups)
    runner.router.set_capture_fn(lambda ids: seen.append(ids.clone()))
    method = SimpleNamespace(is_monolithic=False, topk_indices_dtype=dtype)
    runner.routed_experts = SimpleNamespace(quant_method=method)
    logits = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
    weights, ids = VllmExperts(runner).route(torch.zeros(rows, 4), logits)
    assert weights.shape == ids.shape == (rows, 2)
    assert weights.dtype == torch.float32
    assert ids.dtype == (dtype or torch.int32)
    assert [each.tolist() for each in seen] == [ids.tolist()]


def test_kernels_that_route_by_themselves_are_refused() -> None:
    from afd_plugin.compat.vllm_experts import VllmExperts

    runner: Any = Runner()
    runner.routed_experts = SimpleNamespace(quant_method=SimpleNamespace(is_monolithic=True))
    with pytest.raises(RoutingError, match="routes by itself and takes no routing"):
        VllmExperts(runner).route(torch.ones(2, 3), torch.zeros(2, 4))
