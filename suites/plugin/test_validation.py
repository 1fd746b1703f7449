"""Refusals at start-up: each by its own fact, in words that help, and only when it matters."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest

from afd_plugin import AFDConfig, AfdError, errors
from afd_plugin.errors import UnsupportedSetup
from afd_plugin.validation import RequestSplitWarning, Setup, validate, validate_backends

pytestmark = pytest.mark.cpu

GOOD = Setup(
    prefill_context_parallel_size=1,
    decode_context_parallel_size=1,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    data_parallel_size=1,
    sequence_parallel_moe=False,
    speculative_method=None,
    cudagraph_mode="NONE",
    compilation_mode="NONE",
    native_dbo=False,
    model_runner_v2=False,
    multimodal_prefix_lm=False,
    encoder_decoder=False,
    recurrent_state=False,
    runner_type="generate",
    lora=False,
    kv_connector=None,
    expert_load_balancing=False,
    kv_sharing_fast_prefill=False,
    attention_backends=("CPU_ATTN",),
)
TOKEN = AFDConfig(async_moe_ubatching=True, async_moe_split="token")
REQUEST = AFDConfig(async_moe_ubatching=True)

# refusal, the one fact of a setup that causes it, its value
FACTS: list[tuple[type[UnsupportedSetup], str, Any]] = [
    (errors.PrefillContextParallel, "prefill_context_parallel_size", 2),
    (errors.DecodeContextParallel, "decode_context_parallel_size", 4),
    (errors.TensorParallel, "tensor_parallel_size", 8),
    (errors.PipelineParallel, "pipeline_parallel_size", 2),
    (errors.DataParallel, "data_parallel_size", 2),
    (errors.SequenceParallelMoE, "sequence_parallel_moe", True),
    (errors.SpeculativeDecoding, "speculative_method", "eagle"),
    (errors.CapturedGraph, "cudagraph_mode", "FULL"),
    (errors.CapturedGraph, "cudagraph_mode", "PIECEWISE"),
    (errors.CapturedGraph, "cudagraph_mode", "FULL_DECODE_ONLY"),
    (errors.CompiledModel, "compilation_mode", "VLLM_COMPILE"),
    (errors.CompiledModel, "compilation_mode", "STOCK_TORCH_COMPILE"),
    (errors.NativeDualBatchOverlap, "native_dbo", True),
    (errors.ModelRunnerV2, "model_runner_v2", True),
    (errors.MultimodalPrefixLM, "multimodal_prefix_lm", True),
    (errors.EncoderDecoder, "encoder_decoder", True),
    (errors.RecurrentState, "recurrent_state", True),
    (errors.PoolingRunner, "runner_type", "pooling"),
    (errors.LoRAAdapters, "lora", True),
    (errors.KVConnector, "kv_connector", "NixlConnector"),
    (errors.ExpertLoadBalancing, "expert_load_balancing", True),
    (errors.SharedKVFastPrefill, "kv_sharing_fast_prefill", True),
    (errors.UncoveredOption, "uncovered_options", ("layer_sharding",)),
    (errors.UncoveredOption, "uncovered_options", ("xlite_graph_config", "enable_kv_nz")),
]
# Refusals of where experts are chosen and how they are reached.
CONNECTOR = {
    errors.GateWithoutConnector,
    errors.QuantizedTransport,
    errors.ConnectorUbatching,
    errors.ConnectorTensorParallel,
    errors.ConnectorSpeculativeDecoding,
    errors.ConnectorCompiled,
    errors.FusedCommunication,
    errors.BalancedRoutingOffPath,
    errors.BalancedRoutingModelRunnerV2,
    errors.UncoveredWithConnector,
}
# Refusals of what only the loaded model tells; suites/vllm/test_routing_op_vllm.py
LOADED = {errors.BalancedRoutingInKernel, errors.BalancedRoutingWithoutExperts}
ASCEND = "vllm_ascend.attention.attention_v1.AscendAttentionMetadataBuilder"
ASCEND_MLA = "vllm_ascend.attention.mla_v1.AscendMLAMetadataBuilder"
BACKENDS: list[tuple[str, ...]] = [
    ("CPU_MLA",),
    ("CPU_ATTN", "CPU_MLA"),
    ("FLASH_ATTN",),
    ("",),
    # vLLM-Ascend's own, of sparse attention and of context parallelism
    ("vllm_ascend.attention.sfa_v1.AscendSFAMetadataBuilder",),
    ("vllm_ascend.attention.dsa_v1.AscendDSAMetadataBuilder",),
    ("vllm_ascend.attention.context_parallel.mla_cp.AscendMlaCPMetadataBuilder",),
    (ASCEND_MLA, "vllm_ascend.attention.sfa_v1.AscendSFAMetadataBuilder"),
    ("ASCEND_MLA",),
]
FACT_IDS = [f"{field}={value}" for _, field, value in FACTS]


def refusal(setup: Setup, config: AFDConfig) -> UnsupportedSetup:
    with pytest.raises(UnsupportedSetup) as caught:
        validate(setup, config)
    return caught.value


def quiet(setup: Setup, config: AFDConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(setup, config)


def with_(**facts: Any) -> Setup:
    return dataclasses.replace(GOOD, **facts)


def helpful(error: UnsupportedSetup, value: Any) -> None:
    text = str(error)
    assert isinstance(error, AfdError)
    assert error.value == value
    for part in (error.setting, repr(value), f"allowed: {error.allowed}", error.remedy):
        assert part in text


@pytest.mark.parametrize("config", [TOKEN, REQUEST], ids=["token", "request"])
@pytest.mark.parametrize(("kind", "field", "value"), FACTS, ids=FACT_IDS)
def test_refused_by_its_own_fact(
    kind: type[UnsupportedSetup], field: str, value: Any, config: AFDConfig
) -> None:
    error = refusal(with_(**{field: value}), config)
    assert type(error) is kind
    helpful(error, value)
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("backends", BACKENDS, ids=str)
def test_backends_without_chunked_context_are_refused_for_token(backends: Any) -> None:
    error = refusal(with_(attention_backends=backends), TOKEN)
    assert type(error) is errors.AttentionBackendUnsupported
    helpful(error, backends)
    with pytest.raises(errors.AttentionBackendUnsupported) as caught:
        validate_backends(backends, TOKEN)
    helpful(caught.value, backends)


@pytest.mark.parametrize("backends", BACKENDS, ids=str)
def test_request_may_use_them_and_is_not_told_to_change(backends: Any) -> None:
    quiet(with_(attention_backends=backends), REQUEST)
    validate_backends(backends, REQUEST)
    validate_backends(backends, AFDConfig(async_moe_split="token"))  # the split is off


@pytest.mark.parametrize(
    "backends",
    [("CPU_ATTN",), ("AMX_MLA",), ("AMX_MLA", "CPU_ATTN"), (ASCEND,), (ASCEND_MLA,)],
    ids=str,
)
def test_supported_backends(backends: Any) -> None:
    quiet(with_(attention_backends=backends), TOKEN)
    validate_backends(backends, TOKEN)
    with pytest.warns(RequestSplitWarning, match=r"also supports 'token'") as caught:
        validate(with_(attention_backends=backends), REQUEST)
    assert len(caught) == 1
    assert '"async_moe_split": "token"' in str(caught[0].message)


@pytest.mark.parametrize("on", [True, False], ids=["split", "whole"])
def test_a_gate_on_the_attention_side_without_a_connector(on: bool) -> None:
    error = refusal(GOOD, AFDConfig(async_moe_ubatching=on, compute_gate_on_attention=True))
    assert type(error) is errors.GateWithoutConnector
    helpful(error, True)


@pytest.mark.parametrize("gate_here", [True, False], ids=["attention", "experts"])
@pytest.mark.parametrize(
    ("kind", "fact", "value"),
    [
        (errors.QuantizedTransport, {"quantization": "fp8"}, "fp8"),
        (errors.ConnectorTensorParallel, {"tensor_parallel_size": 2}, 2),
        (errors.ConnectorSpeculativeDecoding, {"speculative_method": "eagle"}, "eagle"),
        (errors.ConnectorCompiled, {"compilation_mode": "VLLM_COMPILE"}, "VLLM_COMPILE / NONE"),
        (errors.ConnectorCompiled, {"cudagraph_mode": "FULL"}, "NONE / FULL"),
        (errors.FusedCommunication, {"fused_communication": True}, "FUSED_MC2"),
        (
            errors.UncoveredWithConnector,
            {"prefill_context_parallel_size": 2},
            ("prefill_context_parallel_size",),
        ),
        (
            errors.UncoveredWithConnector,
            {"decode_context_parallel_size": 2},
            ("decode_context_parallel_size",),
        ),
        (
            errors.UncoveredWithConnector,
            {"pipeline_parallel_size": 2},
            ("pipeline_parallel_size",),
        ),
        (errors.UncoveredWithConnector, {"data_parallel_size": 2}, ("data_parallel_size",)),
        (
            errors.UncoveredWithConnector,
            {"sequence_parallel_moe": True},
            ("use_sequence_parallel_moe",),
        ),
        (errors.UncoveredWithConnector, {"sharded_tokens": True}, ("enable_flashcomm1",)),
        (errors.UncoveredWithConnector, {"native_dbo": True}, ("enable_dbo",)),
        (errors.UncoveredWithConnector, {"model_runner_v2": True}, ("use_v2_model_runner",)),
        (errors.UncoveredWithConnector, {"lora": True}, ("lora_config",)),
        (errors.UncoveredWithConnector, {"expert_load_balancing": True}, ("enable_eplb",)),
        (errors.UncoveredWithConnector, {"uncovered_options": ("x", "y")}, ("x", "y")),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_refused_with_a_connector_only(
    kind: type[UnsupportedSetup], fact: dict[str, Any], value: Any, gate_here: bool
) -> None:
    config = AFDConfig(connector="loopback", compute_gate_on_attention=gate_here)
    quiet(GOOD, config)
    error = refusal(with_(**fact), config)
    assert type(error) is kind
    helpful(error, value)
    assert not hasattr(error, "__notes__")
    quiet(with_(**fact), AFDConfig())


def test_data_parallel_experts_over_a_connector_where_gates_cover_them() -> None:
    quiet(with_(data_parallel_size=2, proved_parallel=("data",)), AFDConfig(connector="loopback"))


def test_ubatching_with_the_synchronous_connector() -> None:
    error = refusal(GOOD, AFDConfig(async_moe_ubatching=True, connector="loopback"))
    assert type(error) is errors.ConnectorUbatching
    helpful(error, True)


def test_forced_balance_needs_layers_that_call_the_operator() -> None:
    ascend = with_(routes_through_op=False)
    forced = AFDConfig(force_balanced_routing=True)
    quiet(GOOD, forced)
    quiet(ascend, AFDConfig())
    over = dataclasses.replace(forced, connector="loopback")
    for config in (forced, over):
        error = refusal(ascend, config)
        assert type(error) is errors.BalancedRoutingOffPath
        helpful(error, True)
    quiet(ascend, dataclasses.replace(over, compute_gate_on_attention=True))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_forced_balance_needs_this_packages_runner(split: bool) -> None:
    """Model Runner V2 is another class, which vLLM makes: nothing would read the option there."""
    forced = AFDConfig(force_balanced_routing=True, async_moe_ubatching=split)
    error = refusal(with_(model_runner_v2=True), forced)
    assert type(error) is errors.BalancedRoutingModelRunnerV2
    helpful(error, True)
    assert ", which force_balanced_routing does not support" in str(error)
    quiet(with_(model_runner_v2=True), AFDConfig())
    over = AFDConfig(
        force_balanced_routing=True, connector="loopback", compute_gate_on_attention=True
    )
    both = refusal(with_(model_runner_v2=True, routes_through_op=False), over)
    assert type(both) is errors.BalancedRoutingModelRunnerV2
    assert "use_v2_model_runner" in "\n".join(both.__notes__)  # the connector refuses it as well


def test_a_refusal_names_the_feature_that_refuses() -> None:
    assert ", which a two-stage prefill split does not" in str(errors.TensorParallel(2))
    assert ", which a connector to the experts does not" in str(errors.ConnectorTensorParallel(2))


def test_no_known_backend_is_refused_too() -> None:
    error = refusal(with_(attention_backends=()), TOKEN)
    assert type(error) is errors.AttentionBackendUnsupported


@pytest.mark.parametrize("backends", [(ASCEND_MLA,), (ASCEND, ASCEND_MLA)], ids=["alone", "beside"])
def test_latent_attention_needs_chunked_prefill_to_see_context(backends: Any) -> None:
    setup = with_(attention_backends=backends, chunked_prefill=False)
    error = refusal(setup, TOKEN)
    assert type(error) is errors.ContextNeedsChunkedPrefill
    helpful(error, True)
    quiet(setup, REQUEST)  # no piece starts with context, and ``token`` is not recommended
    quiet(with_(attention_backends=backends), TOKEN)


@pytest.mark.parametrize("backend", ["CPU_ATTN", "AMX_MLA", ASCEND])
def test_other_attention_sees_context_without_chunked_prefill(backend: str) -> None:
    quiet(with_(attention_backends=(backend,), chunked_prefill=False), TOKEN)


@pytest.mark.parametrize(
    ("kind", "field", "refusal_of_it"),
    [
        ("tensor", "tensor_parallel_size", errors.TensorParallel),
        ("data", "data_parallel_size", errors.DataParallel),
    ],
)
def test_parallelism_that_an_engines_gates_cover(
    kind: str, field: str, refusal_of_it: type[UnsupportedSetup]
) -> None:
    for size in (2, 4, 16):
        quiet(with_(**{field: size}, proved_parallel=(kind,)), TOKEN)
    both = with_(tensor_parallel_size=2, data_parallel_size=2)
    other = {"tensor": errors.DataParallel, "data": errors.TensorParallel}[kind]
    error = refusal(dataclasses.replace(both, proved_parallel=(kind,)), TOKEN)
    assert type(error) is other  # proving one says nothing of the other
    assert not hasattr(error, "__notes__")
    quiet(dataclasses.replace(both, proved_parallel=("tensor", "data")), TOKEN)
    assert type(refusal(with_(**{field: 2}), TOKEN)) is refusal_of_it


def test_tokens_that_are_sharded_over_the_ranks() -> None:
    quiet(with_(tensor_parallel_size=4, sharded_tokens=True), TOKEN)
    refused = refusal(with_(tensor_parallel_size=4, sharded_tokens=False), TOKEN)
    assert type(refused) is errors.TensorParallel


def test_every_refusal_is_reached_above() -> None:
    reached = {kind for kind, _, _ in FACTS} | {
        errors.AttentionBackendUnsupported,
        errors.ContextNeedsChunkedPrefill,
        errors.UnknownProfileFlag,  # by the routing operator's runtime
        *CONNECTOR,
        *LOADED,
    }
    assert reached == set(UnsupportedSetup.__subclasses__())


def test_every_fact_of_a_setup_is_judged() -> None:
    judged = {field for _, field, _ in FACTS}
    judged |= {"attention_backends", "chunked_prefill", "proved_parallel", "sharded_tokens"}
    judged |= {"quantization", "fused_communication", "routes_through_op"}  # with a connector
    assert judged == {field.name for field in dataclasses.fields(Setup)}


@pytest.mark.parametrize(
    "field",
    [name for _, name, value in FACTS if type(value) is int],
)
@pytest.mark.parametrize("size", [0, -1, None])
def test_a_size_that_is_not_one(field: str, size: Any) -> None:
    refusal(with_(**{field: size}), TOKEN)


@pytest.mark.parametrize("split", ["token", "request"])
def test_nothing_is_refused_or_warned_of_while_off(split: Any) -> None:
    worst = with_(**{field: value for _, field, value in FACTS}, attention_backends=("CPU_MLA",))
    quiet(worst, AFDConfig(async_moe_split=split))


def test_all_reasons_are_told_at_once() -> None:
    bad = with_(tensor_parallel_size=2, lora=True, attention_backends=("CPU_MLA",))
    error = refusal(bad, TOKEN)
    assert type(error) is errors.TensorParallel
    assert error.__notes__ == [
        f"also: {errors.LoRAAdapters(True)}",
        f"also: {errors.AttentionBackendUnsupported(('CPU_MLA',))}",
    ]
    by_request = refusal(bad, REQUEST)
    assert by_request.__notes__ == [f"also: {errors.LoRAAdapters(True)}"]


def test_everything_wrong_at_once() -> None:
    kinds = list(dict.fromkeys(kind for kind, _, _ in FACTS))
    error = refusal(
        with_(**{field: value for _, field, value in FACTS}, attention_backends=("CPU_MLA",)),
        TOKEN,
    )
    assert type(error) in kinds
    told = "\n".join([str(error), *error.__notes__])
    for kind in (*kinds, errors.AttentionBackendUnsupported):
        assert kind.setting in told
    assert len(error.__notes__) == len(kinds)


def test_a_refused_setup_is_not_also_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refusal(with_(lora=True), REQUEST)


@pytest.mark.parametrize("kind", UnsupportedSetup.__subclasses__(), ids=lambda kind: kind.__name__)
def test_words_of_a_refusal(kind: type[UnsupportedSetup]) -> None:
    for name in ("setting", "allowed", "remedy"):
        assert getattr(kind, name) != getattr(UnsupportedSetup, name)
        assert name in vars(kind)
    assert kind.__doc__ != UnsupportedSetup.__doc__
    helpful(kind("some value"), "some value")
