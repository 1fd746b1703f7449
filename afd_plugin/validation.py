"""Start-up refusals: what is not known to be right does not start.

The facts of a deployment are read once into a :class:`Setup` (``compat`` does that), then
judged here, before any process group, connector or worker state exists.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from afd_plugin import errors as e
from afd_plugin.config import AFDConfig
from afd_plugin.errors import UnsupportedSetup
from afd_plugin.topology import Topology, unsupported_sizes

MLA_BUILDER = "vllm_ascend.attention.mla_v1.AscendMLAMetadataBuilder"
# Backends, by name or by their metadata builder, that handle a request that begins with context,
# as the second piece of a cut request does: read in vLLM 0.32.0's cpu_attn.py and amx_mla.py and
# in vLLM-Ascend 0.23.0.post1's attention_v1.py and mla_v1.py, and shown by the gates.
# cpu_mla.py drops the context without a word.
CHUNKED_CONTEXT_BACKENDS = (
    "CPU_ATTN",
    "AMX_MLA",
    "vllm_ascend.attention.attention_v1.AscendAttentionMetadataBuilder",
    MLA_BUILDER,
)


class RequestSplitWarning(UserWarning):
    """The ``request`` policy runs where the better balanced ``token`` policy could."""


@dataclass(frozen=True)
class Setup:
    """What a deployment is, in neutral terms; sizes are rank counts.

    ``proved_parallel``: kinds of parallelism, of ``tensor`` and ``data``, that this engine's
    gates cover.  ``chunked_prefill``: whether the scheduler may give a request's prompt in chunks.
    ``sharded_tokens``: tokens are sharded over the TP ranks (FlashComm1).
    ``uncovered_options``: options of the engine that are on and that no gate covers.
    ``quantization``: the model's own scheme.  ``fused_communication``: experts' communication and
    computation are one operator.  ``routes_through_op``: the engine's own layers call the
    routing operator, in this package's runner.
    """

    prefill_context_parallel_size: int
    decode_context_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    sequence_parallel_moe: bool
    speculative_method: str | None
    cudagraph_mode: str
    compilation_mode: str
    native_dbo: bool
    model_runner_v2: bool
    multimodal_prefix_lm: bool
    encoder_decoder: bool
    recurrent_state: bool
    runner_type: str
    lora: bool
    kv_connector: str | None
    expert_load_balancing: bool
    kv_sharing_fast_prefill: bool
    attention_backends: tuple[str, ...]
    proved_parallel: tuple[str, ...] = ()
    sharded_tokens: bool = False
    chunked_prefill: bool = True
    uncovered_options: tuple[str, ...] = ()
    quantization: str | None = None
    fused_communication: bool = False
    routes_through_op: bool = True

    @property
    def topology(self) -> Topology:
        """What decides whether a step may be split."""
        return Topology(
            self.prefill_context_parallel_size,
            self.decode_context_parallel_size,
            self.tensor_parallel_size,
            tokens_sharded=self.sharded_tokens,
            whole_tokens_proved="tensor" in self.proved_parallel,
        )


@dataclass(frozen=True)
class _Check:
    """One refusal: which value is judged, and when it is fine."""

    refusal: type[UnsupportedSetup]
    value: Callable[[Setup, AFDConfig], object]
    fine: Callable[[object], bool]


def _one(value: object) -> bool:
    return value == 1


def _off(value: object) -> bool:
    return value is False or value is None


def _chunked_context(value: object) -> bool:
    return (
        isinstance(value, tuple) and {*value} != set() and {*value} <= {*CHUNKED_CONTEXT_BACKENDS}
    )


def _size(name: str) -> Callable[[Setup, AFDConfig], object]:
    """A size of the topology where it is not supported, else 1."""
    return lambda setup, config: unsupported_sizes(setup.topology).get(name, 1)


def _unproved(kind: str, size: int, setup: Setup) -> int:
    """``size``, or 1 where this engine's gates cover that kind of parallelism."""
    return 1 if kind in setup.proved_parallel else size


def _drops_context(setup: Setup) -> bool:
    """Whether the builder ignores context while chunked prefill is off.

    Read in ``build_chunked_metadata`` of vLLM-Ascend 0.23.0.post1's mla_v1.py.
    """
    return MLA_BUILDER in setup.attention_backends and not setup.chunked_prefill


def _uncovered(setup: Setup) -> tuple[str, ...]:
    """Settings that change who computes which experts, and that no gate covers beside a connector.

    Tensor parallelism, speculation and compilation have refusals of their own.
    """
    on = {
        "prefill_context_parallel_size": setup.prefill_context_parallel_size != 1,
        "decode_context_parallel_size": setup.decode_context_parallel_size != 1,
        "pipeline_parallel_size": setup.pipeline_parallel_size != 1,
        "data_parallel_size": _unproved("data", setup.data_parallel_size, setup) != 1,
        "use_sequence_parallel_moe": setup.sequence_parallel_moe,
        "enable_flashcomm1": setup.sharded_tokens,
        "enable_dbo": setup.native_dbo,
        "use_v2_model_runner": setup.model_runner_v2,
        "lora_config": setup.lora,
        "enable_eplb": setup.expert_load_balancing,
    }
    return (*(name for name, is_on in on.items() if is_on), *setup.uncovered_options)


# In the order in which they are judged.
_EVERY_SPLIT = (
    _Check(e.PrefillContextParallel, _size("prefill_context_parallel_size"), _one),
    _Check(e.DecodeContextParallel, _size("decode_context_parallel_size"), _one),
    _Check(e.SpeculativeDecoding, lambda s, c: s.speculative_method, _off),
    _Check(e.CapturedGraph, lambda s, c: s.cudagraph_mode, lambda v: v == "NONE"),
    _Check(e.CompiledModel, lambda s, c: s.compilation_mode, lambda v: v == "NONE"),
    _Check(e.NativeDualBatchOverlap, lambda s, c: s.native_dbo, _off),
    _Check(e.ModelRunnerV2, lambda s, c: s.model_runner_v2, _off),
    _Check(e.MultimodalPrefixLM, lambda s, c: s.multimodal_prefix_lm, _off),
    _Check(e.EncoderDecoder, lambda s, c: s.encoder_decoder, _off),
    _Check(e.RecurrentState, lambda s, c: s.recurrent_state, _off),
    _Check(e.PoolingRunner, lambda s, c: s.runner_type, lambda v: v == "generate"),
    _Check(e.TensorParallel, _size("tensor_parallel_size"), _one),
    _Check(e.DataParallel, lambda s, c: _unproved("data", s.data_parallel_size, s), _one),
    _Check(e.PipelineParallel, lambda s, c: s.pipeline_parallel_size, _one),
    _Check(e.SequenceParallelMoE, lambda s, c: s.sequence_parallel_moe, _off),
    _Check(e.LoRAAdapters, lambda s, c: s.lora, _off),
    _Check(e.KVConnector, lambda s, c: s.kv_connector, _off),
    _Check(e.ExpertLoadBalancing, lambda s, c: s.expert_load_balancing, _off),
    _Check(e.SharedKVFastPrefill, lambda s, c: s.kv_sharing_fast_prefill, _off),
    _Check(e.UncoveredOption, lambda s, c: s.uncovered_options, lambda v: v == ()),
)
# Whether or not steps are split.
_ALWAYS = (
    _Check(
        e.GateWithoutConnector,
        lambda s, c: c.compute_gate_on_attention and c.connector == "none",
        _off,
    ),
    _Check(
        e.BalancedRoutingOffPath,
        lambda s, c: (
            c.force_balanced_routing
            and not s.routes_through_op
            and not (c.compute_gate_on_attention and c.connector != "none")
        ),
        _off,
    ),
    _Check(
        e.BalancedRoutingModelRunnerV2,
        lambda s, c: c.force_balanced_routing and s.model_runner_v2,
        _off,
    ),
)
# Only where experts are reached through a connector.
_CONNECTOR = (
    _Check(e.ConnectorUbatching, lambda s, c: c.async_moe_ubatching, _off),
    _Check(e.QuantizedTransport, lambda s, c: s.quantization, _off),
    _Check(e.ConnectorTensorParallel, lambda s, c: s.tensor_parallel_size, _one),
    _Check(e.ConnectorSpeculativeDecoding, lambda s, c: s.speculative_method, _off),
    _Check(
        e.ConnectorCompiled,
        lambda s, c: f"{s.compilation_mode} / {s.cudagraph_mode}",
        lambda v: v == "NONE / NONE",
    ),
    _Check(
        e.FusedCommunication,
        lambda s, c: "FUSED_MC2" if s.fused_communication else None,
        _off,
    ),
    _Check(e.UncoveredWithConnector, lambda s, c: _uncovered(s), lambda v: v == ()),
)
# Only a cut inside a request makes a piece that starts with context.
_TOKEN_SPLIT = (
    _Check(e.AttentionBackendUnsupported, lambda s, c: s.attention_backends, _chunked_context),
    _Check(e.ContextNeedsChunkedPrefill, lambda s, c: _drops_context(s), _off),
)


def _refusals(
    checks: tuple[_Check, ...], setup: Setup, config: AFDConfig
) -> list[UnsupportedSetup]:
    found = []
    for check in checks:
        value = check.value(setup, config)
        if not check.fine(value):
            found.append(check.refusal(value))
    return found


def validate(setup: Setup, config: AFDConfig) -> None:
    """Refuse a split that is not known to be right in ``setup``.

    Raises the first refusal, a subclass of :class:`UnsupportedSetup`; further ones are noted
    on it.  With the split off and no connector there is next to nothing to refuse.  Warns with
    :class:`RequestSplitWarning` where ``token`` would be supported too.
    """
    by_token = config.async_moe_split == "token"
    checks: tuple[_Check, ...] = _ALWAYS
    if config.connector != "none":
        checks += _CONNECTOR
    if config.async_moe_ubatching:
        checks += _EVERY_SPLIT + (_TOKEN_SPLIT if by_token else ())
    found = _refusals(checks, setup, config)
    if found:
        for other in found[1:]:
            found[0].add_note(f"also: {other}")
        raise found[0]
    if not config.async_moe_ubatching:
        return
    if not by_token and not _refusals(_TOKEN_SPLIT, setup, config):
        warnings.warn(
            "async_moe_split is 'request', which leaves stages as uneven as the requests are; "
            "this deployment also supports 'token'. Set "
            'additional_config={"afd": {"async_moe_split": "token"}} for balanced stages.',
            RequestSplitWarning,
            stacklevel=2,
        )


def validate_backends(names: tuple[str, ...], config: AFDConfig) -> None:
    """Judge the backends that the loaded model's layers really chose.

    A second look after model load, since single layers may choose their own.
    Raises :class:`~afd_plugin.errors.AttentionBackendUnsupported`.
    """
    token_split = config.async_moe_ubatching and config.async_moe_split == "token"
    if token_split and not _chunked_context(names):
        raise e.AttentionBackendUnsupported(names)
