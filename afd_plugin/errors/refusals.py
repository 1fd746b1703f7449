"""What is refused at start-up: one class a reason, each with its remedy."""

from __future__ import annotations

from typing import Any

from afd_plugin.errors.base import AfdError


class UnsupportedSetup(AfdError):
    """A configuration that is not known to be right, refused before anything is created.

    Subclasses name the ``feature`` that refuses, the ``setting``, what is ``allowed`` and the
    ``remedy``.
    """

    feature = "a two-stage prefill split"
    setting = "configuration"
    allowed = "a supported one"
    remedy = "Change the configuration."

    def __init__(self, value: object) -> None:
        self.value = value
        super().__init__(
            f"{self.setting} is {value!r}, which {self.feature} does not support; "
            f"allowed: {self.allowed}. {self.remedy}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers send errors by pickle, which would take the message for the value."""
        return type(self), (self.value,), self.__dict__


_OFF = 'Or turn the split off: additional_config={"afd": {"async_moe_ubatching": false}}.'


class PrefillContextParallel(UnsupportedSetup):
    """PCP shards the tokens of a prefill over ranks; stages would be cut twice."""

    setting = "prefill_context_parallel_size"
    allowed = "1"
    remedy = f"Set --prefill-context-parallel-size 1. {_OFF}"


class DecodeContextParallel(UnsupportedSetup):
    """DCP shards the KV cache; the local lengths of a piece are not derived yet."""

    setting = "decode_context_parallel_size"
    allowed = "1"
    remedy = f"Set --decode-context-parallel-size 1. {_OFF}"


class SpeculativeDecoding(UnsupportedSetup):
    """Draft tokens need metadata of the unsplit step after the forward pass."""

    setting = "speculative_config.method"
    allowed = "None (no speculative decoding)"
    remedy = f"Remove --speculative-config. {_OFF}"


class CapturedGraph(UnsupportedSetup):
    """A captured graph replays one batch shape and would ignore the stages."""

    setting = "compilation_config.cudagraph_mode"
    allowed = "NONE"
    remedy = f'Set --enforce-eager or --compilation-config \'{{"cudagraph_mode": "NONE"}}\'. {_OFF}'


class CompiledModel(UnsupportedSetup):
    """Compiled forward passes are not covered by the gates yet."""

    setting = "compilation_config.mode"
    allowed = "NONE"
    remedy = f"Set --enforce-eager. {_OFF}"


class NativeDualBatchOverlap(UnsupportedSetup):
    """vLLM's own microbatching would split every stage again."""

    setting = "parallel_config.enable_dbo / ubatch_size"
    allowed = "off (False / 0)"
    remedy = f"Remove --enable-dbo and --ubatch-size. {_OFF}"


class ModelRunnerV2(UnsupportedSetup):
    """Model Runner V2 prepares its inputs elsewhere."""

    setting = "use_v2_model_runner"
    allowed = "False"
    remedy = f"Set VLLM_USE_V2_MODEL_RUNNER=0. {_OFF}"


class MultimodalPrefixLM(UnsupportedSetup):
    """Bidirectional ranges may not be cut: stage 0 would need keys of stage 1."""

    setting = "model_config.is_mm_prefix_lm"
    allowed = "False"
    remedy = f"Serve a causal model. {_OFF}"


class EncoderDecoder(UnsupportedSetup):
    """Cross-attention metadata is built for whole requests."""

    setting = "model_config.is_encoder_decoder"
    allowed = "False"
    remedy = f"Serve a decoder-only model. {_OFF}"


class AttentionBackendUnsupported(UnsupportedSetup):
    """The builder has no chunked-context support, or nobody has shown that it has."""

    setting = "attention backend"
    allowed = "CPU_ATTN, AMX_MLA"
    remedy = (
        "With CPU_MLA set VLLM_MLA_DISABLE=1, or run bfloat16 on a CPU with AMX tiles; "
        f"otherwise choose an allowed backend. {_OFF}"
    )


class TensorParallel(UnsupportedSetup):
    """Not covered by the gates on this engine yet."""

    setting = "tensor_parallel_size"
    allowed = "1"
    remedy = f"Set --tensor-parallel-size 1. {_OFF}"


class DataParallel(UnsupportedSetup):
    """Ranks must agree on the split before the first collective; that is not built yet."""

    setting = "data_parallel_size"
    allowed = "1"
    remedy = f"Set --data-parallel-size 1. {_OFF}"


class PipelineParallel(UnsupportedSetup):
    """Intermediate tensors would have to travel per stage."""

    setting = "pipeline_parallel_size"
    allowed = "1"
    remedy = f"Set --pipeline-parallel-size 1. {_OFF}"


class SequenceParallelMoE(UnsupportedSetup):
    """Token shards per rank depend on the step's size, not on a stage's."""

    setting = "parallel_config.use_sequence_parallel_moe"
    allowed = "False"
    remedy = f"Disable sequence-parallel MoE. {_OFF}"


class LoRAAdapters(UnsupportedSetup):
    """The token-to-adapter mapping is set for the whole step."""

    setting = "lora_config"
    allowed = "None"
    remedy = f"Remove --enable-lora. {_OFF}"


class KVConnector(UnsupportedSetup):
    """KV connectors save and load layers once a step."""

    setting = "kv_transfer_config"
    allowed = "None"
    remedy = f"Remove --kv-transfer-config. {_OFF}"


class ExpertLoadBalancing(UnsupportedSetup):
    """Expert load is counted for whole steps."""

    setting = "parallel_config.enable_eplb"
    allowed = "False"
    remedy = f"Remove --enable-eplb. {_OFF}"


class SharedKVFastPrefill(UnsupportedSetup):
    """Fast prefill indexes the logits of the whole step."""

    setting = "cache_config.kv_sharing_fast_prefill"
    allowed = "False"
    remedy = f"Remove --kv-sharing-fast-prefill. {_OFF}"


class PoolingRunner(UnsupportedSetup):
    """Pooling models take extra per-token arguments."""

    setting = "model_config.runner_type"
    allowed = "'generate'"
    remedy = f"Serve a generative model. {_OFF}"


class RecurrentState(UnsupportedSetup):
    """State-space and linear attention layers keep one state a request and step."""

    setting = "model_config.has_inner_state / is_hybrid"
    allowed = "False"
    remedy = f"Serve a model with attention layers only. {_OFF}"


class UncoveredOption(UnsupportedSetup):
    """Options of the engine that change how a step is computed, and that no gate covers."""

    setting = "the engine's set of options that no gate covers"
    allowed = "none of them on"
    remedy = f"Turn them off. {_OFF}"


class ContextNeedsChunkedPrefill(UnsupportedSetup):
    """The MLA builder reads a request's context only while chunked prefill is on.

    The second piece of a cut request would silently lose its first.
    """

    setting = "an attention builder that ignores context without chunked prefill"
    allowed = "chunked prefill on"
    remedy = f"Set --enable-chunked-prefill, or async_moe_split to 'request'. {_OFF}"


class UnknownProfileFlag(UnsupportedSetup):
    """Nothing says on this platform whether the model is being profiled.

    Experts would be balanced while serving, or not while profiling.
    """

    setting = "the platform"
    allowed = "'cpu' (vLLM 0.32.0) or 'npu' (vLLM-Ascend 0.23.0.post1)"
    remedy = "Use vLLM's own worker there."


_CONNECTOR = "a connector to the experts"
_WHOLE = 'Or leave the layers whole: additional_config={"afd": {"connector": "none"}}.'


class GateWithoutConnector(UnsupportedSetup):
    """Routing on the attention side has to travel to the experts."""

    feature = "connector 'none'"
    setting = "compute_gate_on_attention"
    allowed = "False, or a connector"
    remedy = 'Set additional_config={"afd": {"connector": "loopback"}} too, or leave the gate off.'


class QuantizedTransport(UnsupportedSetup):
    """Scales of quantized activations would have to travel beside the routing."""

    feature = _CONNECTOR
    setting = "model_config.quantization"
    allowed = "None"
    remedy = f"Serve the model unquantized. {_WHOLE}"


class ConnectorUbatching(UnsupportedSetup):
    """The connector is synchronous: a stage would wait for the experts instead of overlapping."""

    feature = "a synchronous connector"
    setting = "async_moe_ubatching"
    allowed = "False"
    remedy = f"Set async_moe_ubatching to false. {_WHOLE}"


class ConnectorTensorParallel(UnsupportedSetup):
    """Ranks of one group hold the same tokens; who sends which is not decided yet."""

    feature = _CONNECTOR
    setting = "tensor_parallel_size"
    allowed = "1"
    remedy = f"Set --tensor-parallel-size 1. {_WHOLE}"


class ConnectorSpeculativeDecoding(UnsupportedSetup):
    """The draft model's experts would be reached through the same layers' names."""

    feature = _CONNECTOR
    setting = "speculative_config.method"
    allowed = "None (no speculative decoding)"
    remedy = f"Remove --speculative-config. {_WHOLE}"


class ConnectorCompiled(UnsupportedSetup):
    """Compiled or captured, a layer's call of the connector would be traced away or frozen."""

    feature = _CONNECTOR
    setting = "compilation_config.mode / cudagraph_mode"
    allowed = "NONE / NONE"
    remedy = f"Set --enforce-eager. {_WHOLE}"


class FusedCommunication(UnsupportedSetup):
    """A fused operator dispatches, computes and combines at once, by weights of its own format."""

    feature = _CONNECTOR
    setting = "experts' communication"
    allowed = "ALLGATHER, ALLTOALL or MC2"
    remedy = f"Set additional_config={{'enable_fused_mc2': 0}}. {_WHOLE}"


class BalancedRoutingOffPath(UnsupportedSetup):
    """vLLM-Ascend's own layers do not call the routing operator; nothing would be balanced."""

    feature = "vLLM-Ascend without the gate on the attention side"
    setting = "force_balanced_routing"
    allowed = "False"
    remedy = (
        'Set additional_config={"afd": {"connector": "loopback", "compute_gate_on_attention": '
        "true}} too, or leave force_balanced_routing off."
    )


_BALANCED = "force_balanced_routing"
_UNBALANCED = "Or leave force_balanced_routing off."


class BalancedRoutingModelRunnerV2(UnsupportedSetup):
    """The other runner loads the model by itself; its layers do not call the routing operator."""

    feature = _BALANCED
    setting = "use_v2_model_runner"
    allowed = "False"
    remedy = f"Set VLLM_USE_V2_MODEL_RUNNER=0. {_UNBALANCED}"


class BalancedRoutingInKernel(UnsupportedSetup):
    """A monolithic kernel routes by itself: no ids come by that could be balanced."""

    feature = _BALANCED
    setting = "the experts' kernel"
    allowed = "a modular one, which takes routing"
    remedy = f"Serve the model in another quantization, or unquantized. {_UNBALANCED}"


class BalancedRoutingWithoutExperts(UnsupportedSetup):
    """The loaded model has no routed experts; nothing would be balanced."""

    feature = _BALANCED
    setting = "the model's number of layers with routed experts"
    allowed = "1 or more"
    remedy = f"Serve a model with routed experts. {_UNBALANCED}"


class UncoveredWithConnector(UnsupportedSetup):
    """Ways of spreading or changing the experts' work that no gate covers with a connector."""

    feature = _CONNECTOR
    setting = "the engine's set of settings that no gate covers"
    allowed = "none of them on"
    remedy = f"Turn them off. {_WHOLE}"
