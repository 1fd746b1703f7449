"""Start-up refusals that vLLM-Ascend adds, on real configurations, before anything is made."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from afd_plugin import errors
from afd_plugin.errors import UnsupportedSetup
from afd_plugin.routing import ROUTING_OP, bound_runtime
from afd_plugin.validation import RequestSplitWarning
from afd_testkit.library import OpLibrary

ConfigMaker = Callable[..., Any]
InForce = Callable[[Any], AbstractContextManager[None]]
Start = Callable[..., None]

pytestmark = [pytest.mark.ascend, pytest.mark.usefixtures("ascend_loaded")]

TOKEN = {"async_moe_ubatching": True, "async_moe_split": "token"}
REQUEST = {"async_moe_ubatching": True, "async_moe_split": "request"}
OFF = {"async_moe_ubatching": False}


class Created(Exception):
    """Something was about to be created."""


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch, op_library: OpLibrary) -> Iterator[list[str]]:
    """Names of all that a worker's start makes, as it makes them; none is really made.

    The routing operator, which a worker registers for good, is there for the test only.

    ``functools.wraps`` keeps the signatures, which the worker checks.
    """
    import torch.distributed as dist
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm_ascend.worker import worker
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    made: list[str] = []
    watched: list[tuple[Any, str]] = [
        (dist, "init_process_group"),
        (dist, "new_group"),
        (parallel_state, "init_distributed_environment"),
        (parallel_state, "initialize_model_parallel"),
        (worker, "init_ascend_model_parallel"),
        (KVConnectorFactory, "create_connector"),
        (NPUModelRunner, "__init__"),
        (worker.NPUWorker, "__init__"),
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
    op_library.register(ROUTING_OP)
    with bound_runtime(None):
        yield made


@pytest.fixture
def start(start_worker: Start, created: list[str]) -> Start:
    """Begins a worker that really makes nothing."""
    return start_worker


def assert_refused(
    begin: Callable[[], None], refusal: type[UnsupportedSetup], quoted: str, created: list[str]
) -> UnsupportedSetup:
    """That very class; the message has the value, what is allowed and the remedy."""
    with pytest.raises(refusal) as caught:
        begin()
    assert type(caught.value) is refusal
    message = str(caught.value)
    assert message.startswith(quoted)
    assert f"allowed: {refusal.allowed}. " in message
    assert message.endswith(refusal.remedy)
    assert created == []
    return caught.value


def assert_starts(begin: Callable[[], None], created: list[str]) -> None:
    """Validation lets the worker pass: vLLM-Ascend's own constructor is reached."""
    with pytest.raises(Created, match=r"NPUWorker\.__init__"):
        begin()
    assert created == ["NPUWorker.__init__"]
    created.clear()


@pytest.mark.parametrize("model", ["qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("options", [TOKEN, OFF], ids=["token", "off"])
def test_a_plain_configuration_starts(
    make_config: ConfigMaker, start: Start, created: list[str], model: str, options: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_starts(lambda: start(make_config(model), options), created)


# --- options that no gate covers --------------------------------------------------------------


def _set(path: str, value: Any) -> Callable[[Any], None]:
    """Sets one option as vLLM-Ascend read it, past its checks for hardware and other options."""

    def change(ascend: Any) -> None:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, ascend)
        if hasattr(owner, "config"):  # the options of expert load balancing
            owner.config[name] = value
        else:
            assert getattr(owner, name) != value
            setattr(owner, name, value)

    return change


# The name in the refusal: the option of vLLM-Ascend, and a value that turns it on.
UNCOVERED: dict[str, tuple[str, Any]] = {
    "xlite_graph_config": ("xlite_graph_config.enabled", True),
    "eplb_config.dynamic_eplb": ("eplb_config.dynamic_eplb", True),
    "eplb_config.expert_map_path": ("eplb_config.expert_map_path", "map.json"),
    "enable_prefill_mc2": ("enable_prefill_mc2", True),
    "weight_prefetch_config": ("weight_prefetch_config.enabled", True),
    "profiling_chunk_config": ("profiling_chunk_config.enabled", True),
    "layer_sharding": ("layer_sharding", ["o_proj"]),
    "enable_shared_expert_dp": ("enable_shared_expert_dp", True),
    "multistream_overlap_shared_expert": ("multistream_overlap_shared_expert", True),
    "multistream_overlap_gate": ("multistream_overlap_gate", True),
    "recompute_scheduler_enable": ("recompute_scheduler_enable", True),
    "enable_matmul_allreduce": ("enable_matmul_allreduce", True),
    "enable_fused_mc2": ("enable_fused_mc2", 1),
    "enable_flashcomm2_parallel_size": ("enable_flashcomm2_parallel_size", 2),
    "enable_kv_nz": ("enable_kv_nz", True),
    "enable_sparse_sfa_c8": ("enable_sparse_sfa_c8", True),
    "enable_sparse_li_c8": ("enable_sparse_li_c8", True),
    "enable_sp_by_pass": ("enable_sp_by_pass", True),
    "enable_mc2_hierarchy_comm": ("enable_mc2_hierarchy_comm", True),
    "enable_reduce_sample": ("enable_reduce_sample", True),
    "mix_placement": ("mix_placement", True),
    "hamming_sparse": ("enable_hamming_sparse", True),
    "SLO_limits_for_dynamic_batch": ("SLO_limits_for_dynamic_batch", 50),
}
FINEGRAINED = ("oproj", "lmhead", "embedding", "mlp", "olora")


@pytest.mark.parametrize("name", UNCOVERED)
def test_each_uncovered_option_is_refused_by_its_name(
    make_config: ConfigMaker, start: Start, created: list[str], name: str
) -> None:
    config, prepare = make_config("qwen3-moe"), _set(*UNCOVERED[name])
    quoted = f"the engine's set of options that no gate covers is ('{name}',)"
    error = assert_refused(
        lambda: start(config, TOKEN, prepare), errors.UncoveredOption, quoted, created
    )
    assert not hasattr(error, "__notes__")
    assert_starts(lambda: start(config, OFF, prepare), created)


@pytest.mark.parametrize("part", FINEGRAINED)
def test_each_finegrained_parallelism_is_refused(
    make_config: ConfigMaker, start: Start, created: list[str], part: str
) -> None:
    prepare = _set(f"finegrained_tp_config.{part}_tensor_parallel_size", 2)
    quoted = "the engine's set of options that no gate covers is ('finegrained_tp_config',)"
    assert_refused(
        lambda: start(make_config("qwen3-moe"), TOKEN, prepare),
        errors.UncoveredOption,
        quoted,
        created,
    )


def test_every_uncovered_option_is_tried_above() -> None:
    from afd_plugin.compat.ascend import _UNCOVERED

    assert {*UNCOVERED, "finegrained_tp_config"} == set(_UNCOVERED)


@pytest.mark.parametrize(
    ("additional", "names"),
    [
        ({"enable_mc2_hierarchy_comm": True}, ("enable_mc2_hierarchy_comm",)),
        (
            {"multistream_overlap_gate": True, "weight_prefetch_config": {"enabled": True}},
            ("weight_prefetch_config", "multistream_overlap_gate"),
        ),
        ({"enable_matmul_allreduce": True}, ("enable_matmul_allreduce",)),
    ],
    ids=str,
)
def test_as_a_user_turns_them_on(
    make_config: ConfigMaker,
    start: Start,
    created: list[str],
    additional: dict[str, Any],
    names: tuple[str, ...],
) -> None:
    """Through ``additional_config``, all of them named at once."""
    config = make_config("qwen3-moe", additional_config=additional)
    quoted = f"the engine's set of options that no gate covers is {names!r}"
    for options in (TOKEN, REQUEST):
        assert_refused(lambda o=options: start(config, o), errors.UncoveredOption, quoted, created)


def test_xlite_brings_graphs_with_it(
    make_config: ConfigMaker, start: Start, created: list[str]
) -> None:
    config = make_config("qwen3-moe", additional_config={"xlite_graph_config": {"enabled": True}})
    quoted = "compilation_config.cudagraph_mode is 'FULL_DECODE_ONLY'"
    error = assert_refused(lambda: start(config, TOKEN), errors.CapturedGraph, quoted, created)
    (note,) = error.__notes__
    assert "options that no gate covers is ('xlite_graph_config',)" in note


# --- graphs, microbatches, runners ------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_graph_modes(make_config: ConfigMaker, start: Start, created: list[str], mode: str) -> None:
    from vllm.config import CUDAGraphMode

    config = make_config("qwen3-moe")
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    quoted = f"compilation_config.cudagraph_mode is '{mode}'"
    assert_refused(lambda: start(config, TOKEN), errors.CapturedGraph, quoted, created)
    assert_starts(lambda: start(config, OFF), created)


def test_what_the_engine_does_unless_it_is_eager(
    make_config: ConfigMaker, start: Start, created: list[str]
) -> None:
    config = make_config("qwen3-moe", enforce_eager=False)
    error = assert_refused(
        lambda: start(config, TOKEN),
        errors.CapturedGraph,
        "compilation_config.cudagraph_mode is ",
        created,
    )
    assert any("compilation_config.mode is 'VLLM_COMPILE'" in note for note in error.__notes__)
    assert "--enforce-eager" in str(error)


@pytest.mark.parametrize(("name", "value"), [("enable_dbo", True), ("ubatch_size", 4)])
def test_native_microbatches(
    make_config: ConfigMaker,
    start: Start,
    created: list[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
) -> None:
    config = make_config("qwen3-moe")
    monkeypatch.setattr(config.parallel_config, name, value)
    quoted = "parallel_config.enable_dbo / ubatch_size is True"
    assert_refused(lambda: start(config, TOKEN), errors.NativeDualBatchOverlap, quoted, created)


# --- attention builders -----------------------------------------------------------------------


def test_builders_that_are_known(make_config: ConfigMaker, in_force: InForce) -> None:
    from afd_plugin.compat.ascend import read_setup

    for model, name in (
        ("qwen3-moe", "attention_v1.AscendAttentionMetadataBuilder"),
        ("deepseek-v3", "mla_v1.AscendMLAMetadataBuilder"),
    ):
        config = make_config(model)
        with in_force(config):
            assert read_setup(config).attention_backends == (f"vllm_ascend.attention.{name}",)


def test_sparse_attention(
    make_config: ConfigMaker, start: Start, created: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with an indexer, as DeepSeek-V3.2: SFA."""
    config = make_config("deepseek-v3")
    monkeypatch.setattr(config.model_config.hf_text_config, "index_topk", 8, raising=False)
    quoted = "attention backend is ('vllm_ascend.attention.sfa_v1.AscendSFAMetadataBuilder',)"
    assert_refused(
        lambda: start(config, TOKEN), errors.AttentionBackendUnsupported, quoted, created
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RequestSplitWarning)  # ``token`` would be refused here
        assert_starts(lambda: start(config, REQUEST), created)


def test_compressed_attention(
    make_config: ConfigMaker, start: Start, created: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with compressed context, as DeepSeek-V4: DSA."""
    config = make_config("deepseek-v3")
    monkeypatch.setattr(config.model_config.hf_config, "compress_ratios", [4], raising=False)
    quoted = "attention backend is ('vllm_ascend.attention.dsa_v1.AscendDSAMetadataBuilder',)"
    assert_refused(
        lambda: start(config, TOKEN), errors.AttentionBackendUnsupported, quoted, created
    )


@pytest.mark.parametrize(
    ("model", "builder"),
    [
        ("qwen3-moe", "attention_cp.AscendAttentionCPMetadataBuilder"),
        ("deepseek-v3", "mla_cp.AscendMlaCPMetadataBuilder"),
    ],
)
@pytest.mark.parametrize(
    ("size", "refusal"),
    [
        ("prefill_context_parallel_size", errors.PrefillContextParallel),
        ("decode_context_parallel_size", errors.DecodeContextParallel),
    ],
)
def test_context_parallel_builders_beside_what_chooses_them(
    make_config: ConfigMaker,
    start: Start,
    created: list[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    builder: str,
    size: str,
    refusal: type[UnsupportedSetup],
) -> None:
    config = make_config(model)
    monkeypatch.setattr(config.parallel_config, size, 2)
    error = assert_refused(lambda: start(config, TOKEN), refusal, f"{size} is 2", created)
    assert any(
        f"attention backend is ('vllm_ascend.attention.context_parallel.{builder}',)" in note
        for note in error.__notes__
    )


def test_builders_that_single_layers_choose(make_config: ConfigMaker, in_force: InForce) -> None:
    """The second look, once the model is loaded."""
    from vllm_ascend.attention.dsa_v1 import AscendDSABackend

    from afd_plugin.compat.ascend import builder_path
    from afd_plugin.config import AFDConfig
    from afd_plugin.validation import MLA_BUILDER, validate_backends

    with in_force(make_config("deepseek-v3")):
        name = builder_path(AscendDSABackend)
    assert name == "vllm_ascend.attention.dsa_v1.AscendDSAMetadataBuilder"
    with pytest.raises(errors.AttentionBackendUnsupported, match="AscendDSAMetadataBuilder"):
        validate_backends((name, MLA_BUILDER), AFDConfig.from_options(TOKEN))


def test_latent_attention_without_chunked_prefill(
    make_config: ConfigMaker, start: Start, created: list[str]
) -> None:
    config = make_config("deepseek-v3", enable_chunked_prefill=False)
    quoted = "an attention builder that ignores context without chunked prefill is True"
    assert_refused(lambda: start(config, TOKEN), errors.ContextNeedsChunkedPrefill, quoted, created)
    assert_starts(lambda: start(config, REQUEST), created)
    config = make_config("qwen3-moe", enable_chunked_prefill=False)
    assert_starts(lambda: start(config, TOKEN), created)


# --- parallelism ------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_tensor_parallelism_starts(
    make_config: ConfigMaker, start: Start, created: list[str], sharded: bool
) -> None:
    config = make_config(
        "qwen3-moe",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        additional_config={"enable_flashcomm1": sharded},
    )
    assert_starts(lambda: start(config, TOKEN), created)


def test_data_parallelism_over_whole_tokens_starts(
    make_config: ConfigMaker, start: Start, created: list[str]
) -> None:
    config = make_config("qwen3-moe", data_parallel_size=2, enable_expert_parallel=True)
    assert_starts(lambda: start(config, TOKEN), created)


def test_data_parallelism_over_sharded_tokens(
    make_config: ConfigMaker, start: Start, created: list[str]
) -> None:
    config = make_config(
        "qwen3-moe",
        data_parallel_size=2,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        additional_config={"enable_flashcomm1": True},
    )
    assert_refused(
        lambda: start(config, TOKEN), errors.DataParallel, "data_parallel_size is 2", created
    )
