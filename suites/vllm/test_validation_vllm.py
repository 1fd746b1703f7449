"""Start-up refusals of the real worker, on real configurations, before anything is made."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

from afd_plugin import errors
from afd_plugin.errors import OptionTypeError, OptionValueError, UnknownOption, UnsupportedSetup
from afd_plugin.routing import ROUTING_OP, bound_runtime
from afd_plugin.validation import RequestSplitWarning, Setup
from afd_testkit.library import OpLibrary

ConfigMaker = Callable[..., Any]

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_loaded")]

TOKEN = {"async_moe_ubatching": True, "async_moe_split": "token"}
REQUEST = {"async_moe_ubatching": True, "async_moe_split": "request"}
OFF = {"async_moe_ubatching": False}


class Created(Exception):
    """Something was about to be created."""


@pytest.fixture(autouse=True)
def routing_operator(vllm_loaded: None, op_library: OpLibrary) -> Iterator[None]:
    """What a worker registers for good is there for the test only."""
    op_library.register(ROUTING_OP)
    with bound_runtime(None):
        yield


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all that a worker's start makes, as it makes them; none is really made.

    ``functools.wraps`` keeps the signatures, which registration checks.
    """
    import torch.distributed as dist
    from vllm import distributed
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.worker import cpu_worker, gpu_worker
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    made: list[str] = []
    watched: list[tuple[Any, str]] = [
        (dist, "init_process_group"),
        (dist, "new_group"),
        (distributed, "init_distributed_environment"),
        (parallel_state, "init_distributed_environment"),
        (parallel_state, "initialize_model_parallel"),
        (gpu_worker, "init_worker_distributed_environment"),
        (cpu_worker, "init_worker_distributed_environment"),
        (KVConnectorFactory, "create_connector"),
        (GPUModelRunner, "__init__"),
        (CPUModelRunner, "__init__"),
        (cpu_worker.CPUWorker, "__init__"),
        (gpu_worker.Worker, "__init__"),
        (torch.ops._C, "init_cpu_memory_env"),
    ]

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def spy(*args: Any, **kwargs: Any) -> None:
            made.append(f"{owner.__name__.rpartition('.')[2]}.{name}")
            raise Created(made[-1])

        monkeypatch.setattr(owner, name, spy)

    for owner, name in watched:
        watch(owner, name)
    return made


def start(config: Any, options: object) -> None:
    """What vLLM does with a worker class first."""
    from afd_plugin.workers.cpu import AFDCPUWorker

    config.additional_config = {"afd": options}
    AFDCPUWorker(
        vllm_config=config,
        local_rank=0,
        rank=0,
        distributed_init_method="tcp://127.0.0.1:1",
        is_driver_worker=True,
    )


def assert_starts(config: Any, options: object) -> None:
    """Validation lets the worker pass: vLLM's own constructor is reached."""
    with pytest.raises(Created, match=r"CPUWorker\.__init__"):
        start(config, options)


# --- every refusal --------------------------------------------------------------------------

# Refusal by settings that vLLM itself accepts on CPU: engine arguments, what the message quotes.
ARGUMENTS: dict[type[UnsupportedSetup], tuple[dict[str, Any], str]] = {
    errors.TensorParallel: ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
    errors.PipelineParallel: ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
    errors.DataParallel: ({"data_parallel_size": 2}, "data_parallel_size is 2"),
    errors.CompiledModel: (
        {"enforce_eager": False},
        "compilation_config.mode is 'DYNAMO_TRACE_ONCE'",
    ),
    errors.SpeculativeDecoding: (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
            }
        },
        "speculative_config.method is 'ngram'",
    ),
    errors.LoRAAdapters: ({"enable_lora": True}, "lora_config is True"),
    errors.KVConnector: (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "kv_transfer_config is 'ExampleConnector'",
    ),
    errors.SharedKVFastPrefill: (
        {"kv_sharing_fast_prefill": True},
        "cache_config.kv_sharing_fast_prefill is True",
    ),
    errors.PoolingRunner: ({"runner": "pooling"}, "model_config.runner_type is 'pooling'"),
}


def _set(path: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    """Sets one attribute of a configuration, past the checks of vLLM that depend on hardware."""
    *owners, name = path.split(".")

    def change(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        owner = functools.reduce(getattr, owners, config)
        assert getattr(owner, name) != value
        monkeypatch.setattr(owner, name, value)

    return change


def _full_graphs(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode

    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE


def _v2_runner(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def _model_kind(name: str) -> Callable[[Any, pytest.MonkeyPatch], None]:
    """What vLLM's registry says of the architecture."""

    def change(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model = config.model_config
        kinds = {**vars(model._model_info), name: True}
        monkeypatch.setattr(model, "_model_info", type(model._model_info)(**kinds))

    return change


# Refusal by settings that vLLM does not build on CPU: (how, what the message quotes).
CHANGES: dict[str, tuple[type[UnsupportedSetup], Any, str]] = {
    "PCP": (
        errors.PrefillContextParallel,
        _set("parallel_config.prefill_context_parallel_size", 2),
        "prefill_context_parallel_size is 2",
    ),
    "DCP": (
        errors.DecodeContextParallel,
        _set("parallel_config.decode_context_parallel_size", 4),
        "decode_context_parallel_size is 4",
    ),
    "graphs": (
        errors.CapturedGraph,
        _full_graphs,
        "compilation_config.cudagraph_mode is 'FULL_AND_PIECEWISE'",
    ),
    "DBO": (
        errors.NativeDualBatchOverlap,
        _set("parallel_config.enable_dbo", True),
        "parallel_config.enable_dbo / ubatch_size is True",
    ),
    "ubatches": (
        errors.NativeDualBatchOverlap,
        _set("parallel_config.ubatch_size", 4),
        "parallel_config.enable_dbo / ubatch_size is True",
    ),
    "EPLB": (
        errors.ExpertLoadBalancing,
        _set("parallel_config.enable_eplb", True),
        "parallel_config.enable_eplb is True",
    ),
    "V2": (errors.ModelRunnerV2, _v2_runner, "use_v2_model_runner is True"),
    "prefix LM": (
        errors.MultimodalPrefixLM,
        _set("model_config.model_arch_config.is_mm_prefix_lm", True),
        "model_config.is_mm_prefix_lm is True",
    ),
    "encoder-decoder": (
        errors.EncoderDecoder,
        _set("model_config.is_encoder_decoder", True),
        "model_config.is_encoder_decoder is True",
    ),
    "state": (
        errors.RecurrentState,
        _model_kind("has_inner_state"),
        "model_config.has_inner_state / is_hybrid is True",
    ),
    "hybrid": (
        errors.RecurrentState,
        _model_kind("is_hybrid"),
        "model_config.has_inner_state / is_hybrid is True",
    ),
}


def assert_refused(
    config: Any, options: object, refusal: type[UnsupportedSetup], quoted: str, created: list[str]
) -> None:
    """That very class; the message has the value, what is allowed and the remedy."""
    with pytest.raises(refusal) as caught:
        start(config, options)
    assert type(caught.value) is refusal
    message = str(caught.value)
    assert message.startswith(quoted)
    assert f"allowed: {refusal.allowed}. " in message
    assert message.endswith(refusal.remedy)
    assert created == []


@pytest.mark.parametrize("options", [TOKEN, REQUEST], ids=["token", "request"])
@pytest.mark.parametrize("refusal", ARGUMENTS, ids=lambda refusal: refusal.__name__)
def test_setting_is_refused(
    make_config: ConfigMaker,
    created: list[str],
    refusal: type[UnsupportedSetup],
    options: dict[str, Any],
) -> None:
    arguments, quoted = ARGUMENTS[refusal]
    config = make_config("qwen3-moe", **arguments)
    assert_refused(config, options, refusal, quoted, created)
    assert_starts(config, OFF)


@pytest.mark.parametrize("options", [TOKEN, REQUEST], ids=["token", "request"])
@pytest.mark.parametrize("case", CHANGES)
def test_setting_of_other_hardware_is_refused(
    make_config: ConfigMaker,
    created: list[str],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    options: dict[str, Any],
) -> None:
    refusal, change, quoted = CHANGES[case]
    config = make_config("qwen3-moe")
    change(config, monkeypatch)
    assert_refused(config, options, refusal, quoted, created)
    assert_starts(config, OFF)


def test_sequence_parallel_experts_are_refused_beside_what_they_need(
    make_config: ConfigMaker, created: list[str]
) -> None:
    """They need tensor and data parallelism, which are named first; all three are named."""
    config = make_config(
        "qwen3-moe", tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True
    )
    with pytest.raises(errors.TensorParallel) as caught:
        start(config, TOKEN)
    notes = "\n".join(caught.value.__notes__)
    assert "also: data_parallel_size is 2" in notes
    assert "also: parallel_config.use_sequence_parallel_moe is True" in notes
    assert created == []


def test_every_refusal_has_a_case() -> None:
    covered = {*ARGUMENTS, *(refusal for refusal, *_ in CHANGES.values())}
    elsewhere = {
        errors.SequenceParallelMoE,
        errors.AttentionBackendUnsupported,
        errors.GateWithoutConnector,
        errors.UnknownProfileFlag,
        # in test_external_routing
        errors.QuantizedTransport,
        errors.ConnectorUbatching,
        errors.ConnectorTensorParallel,
        errors.ConnectorSpeculativeDecoding,
        errors.ConnectorCompiled,
        errors.UncoveredWithConnector,
        # in test_routing_op_vllm
        errors.BalancedRoutingInKernel,
        errors.BalancedRoutingWithoutExperts,
        # below
        errors.BalancedRoutingModelRunnerV2,
    }
    ascend = {  # suites/ascend
        errors.UncoveredOption,
        errors.ContextNeedsChunkedPrefill,
        errors.FusedCommunication,
        errors.BalancedRoutingOffPath,
    }
    assert covered | elsewhere | ascend == set(UnsupportedSetup.__subclasses__())


@pytest.mark.parametrize("options", [{**OFF}, {**TOKEN}], ids=["off", "token"])
def test_forced_balance_that_model_runner_v2_would_not_read(
    make_config: ConfigMaker,
    created: list[str],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    config = make_config("qwen3-moe")
    assert_starts(config, {**OFF, "force_balanced_routing": True})
    created.clear()
    _v2_runner(config, monkeypatch)
    options["force_balanced_routing"] = True
    quoted = "use_v2_model_runner is True, which force_balanced_routing does not support"
    refusal = errors.BalancedRoutingModelRunnerV2
    assert_refused(config, options, refusal, quoted, created)


@pytest.mark.parametrize("options", [{**OFF}, {**TOKEN}], ids=["off", "token"])
def test_gate_on_the_attention_side(
    make_config: ConfigMaker, created: list[str], options: dict[str, Any]
) -> None:
    options["compute_gate_on_attention"] = True
    quoted = "compute_gate_on_attention is True"
    assert_refused(make_config("qwen3-moe"), options, errors.GateWithoutConnector, quoted, created)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"async_moe_splitt": "token"}, UnknownOption, "async_moe_splitt; known keys: async_moe_u"),
        ({"async_moe_ubatching": "yes"}, OptionTypeError, r"'yes' \(str\).*true or false"),
        ({"async_moe_ubatching": 1}, OptionTypeError, r"1 \(int\)"),
        ({**TOKEN, "async_moe_num_ubatches": 3}, errors.TooManyUbatches, "3; allowed: 2"),
        ({**TOKEN, "async_moe_split": "tokens"}, OptionValueError, "'tokens'; allowed: 'request'"),
        ({**TOKEN, "async_moe_token_alignment": 0}, OptionValueError, "0; allowed: 1 to 65536"),
        ({**TOKEN, "async_moe_min_tokens": 1}, OptionValueError, "1; allowed: 2 to"),
        (["token"], OptionTypeError, r"\['token'\] \(list\)"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict | list) else "",
)
def test_wrong_options_surface_from_the_worker(
    make_config: ConfigMaker,
    created: list[str],
    options: object,
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        start(make_config("qwen3-moe"), options)
    assert created == []


# --- what is allowed ------------------------------------------------------------------------


def test_a_plain_configuration_is_read_as_it_is(make_config: ConfigMaker) -> None:
    from afd_plugin.compat.vllm import read_setup

    setup = read_setup(make_config("qwen3-moe"))
    assert setup == Setup(
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
    # Flags are real ones: a truthy object would read as a refusal, a falsy one as permission.
    for field in fields(Setup):
        if field.type == "bool":
            assert type(getattr(setup, field.name)) is bool, field.name


def test_a_plain_configuration_starts(make_config: ConfigMaker, created: list[str]) -> None:
    assert_starts(make_config("qwen3-moe"), TOKEN)
    assert created == ["CPUWorker.__init__"]


@pytest.mark.parametrize("additional", [{}, {"afd": None}, {"other": 1}], ids=str)
def test_without_options_the_worker_is_a_plain_one(
    make_config: ConfigMaker, created: list[str], additional: dict[str, Any]
) -> None:
    from afd_plugin.workers.cpu import AFDCPUWorker

    config = make_config("qwen3-moe", additional_config=additional)
    with pytest.raises(Created, match=r"CPUWorker\.__init__"):
        AFDCPUWorker(config, 0, 0, "tcp://127.0.0.1:1")


def test_request_warns_where_token_is_supported(
    make_config: ConfigMaker, created: list[str]
) -> None:
    with (
        pytest.warns(RequestSplitWarning, match='"async_moe_split": "token"'),
        pytest.raises(Created),
    ):
        start(make_config("qwen3-moe"), REQUEST)


# --- attention without chunked context --------------------------------------------------------


@pytest.fixture
def latent_config(make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSeek-V3 on its latent-attention kernels, on a CPU without AMX."""
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return make_config("deepseek-v3")


def test_the_platform_chooses_cpu_mla(latent_config: Any) -> None:
    from afd_plugin.compat.vllm import read_setup

    assert read_setup(latent_config).attention_backends == ("CPU_MLA",)
    assert latent_config.cache_config.block_size == 16
    assert not latent_config.scheduler_config.enable_chunked_prefill


def test_cpu_mla_refuses_token(latent_config: Any, created: list[str]) -> None:
    quoted = "attention backend is ('CPU_MLA',)"
    assert_refused(latent_config, TOKEN, errors.AttentionBackendUnsupported, quoted, created)


def test_cpu_mla_allows_request_without_a_warning(latent_config: Any, created: list[str]) -> None:
    """No warning: ``token`` would be refused here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RequestSplitWarning)
        assert_starts(latent_config, REQUEST)


def test_remedies_of_the_refusal_work(
    make_config: ConfigMaker, created: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert_starts(make_config("deepseek-v3"), TOKEN)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert_starts(make_config("deepseek-v3", dtype="bfloat16"), TOKEN)


def test_cpu_mla_asked_for_by_name_on_a_cpu_with_amx(
    make_config: ConfigMaker, created: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import AttentionConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    chosen = AttentionConfig(backend=AttentionBackendEnum.CPU_MLA)
    config = make_config("deepseek-v3", dtype="bfloat16", attention_config=chosen)
    quoted = "attention backend is ('CPU_MLA',)"
    assert_refused(config, TOKEN, errors.AttentionBackendUnsupported, quoted, created)


# --- what the platform itself turns off -------------------------------------------------------


def test_native_microbatching_is_off_on_cpu(make_config: ConfigMaker, created: list[str]) -> None:
    """vLLM turns --enable-dbo off here, so there is nothing to refuse."""
    config = make_config("qwen3-moe", enable_dbo=True)
    assert not config.parallel_config.enable_dbo
    assert_starts(config, TOKEN)


# --- a runner that cannot split ---------------------------------------------------------------


class OtherRunner:
    """Stands for a runner that is none of the plugin's."""


@pytest.mark.parametrize(("options", "refused"), [(OFF, False), (TOKEN, True)], ids=["off", "on"])
def test_a_runner_that_cannot_split(
    make_config: ConfigMaker,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    refused: bool,
) -> None:
    """Unsplit it serves, as Model Runner V2 does; split it must not run in silence."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from afd_plugin.workers.cpu import AFDCPUWorker

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def init_device(self: Any) -> None:
        self.model_runner = OtherRunner()

    config = make_config("qwen3-moe", additional_config={"afd": options})
    monkeypatch.setattr(CPUWorker, "__init__", functools.wraps(CPUWorker.__init__)(init))
    monkeypatch.setattr(CPUWorker, "init_device", init_device)
    worker = AFDCPUWorker(config, 0, 0, "tcp://127.0.0.1:1")
    if refused:
        with pytest.raises(errors.UpstreamDrift, match="built a OtherRunner"):
            worker.init_device()
        return
    worker.init_device()
    worker.afd_configure(OFF)
    assert worker.afd_take_evidence() == []
