"""vLLM 0.32.0: reading its configuration, and checking that it is what was pinned."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from afd_plugin.compat.contracts import Contract
from afd_plugin.compat.known import PINNED_VLLM, check_versions
from afd_plugin.validation import Setup

# Parameters of everything that is overridden, wrapped or called by keyword; by name, so that
# what another plugin put in place of a method is judged too.
_SIGNATURES: Mapping[tuple[type, str], tuple[str, ...]] = {
    (GPUModelRunner, "execute_model"): ("self", "scheduler_output", "intermediate_tensors"),
    (GPUModelRunner, "_build_attention_metadata"): (
        "self",
        "num_tokens",
        "num_reqs",
        "max_query_len",
        "num_tokens_padded",
        "num_reqs_padded",
        "ubatch_slices",
        "logits_indices",
        "max_num_sampled_tokens",
        "use_spec_decode",
        "for_cudagraph_capture",
        "num_scheduled_tokens",
        "slot_mappings",
    ),
    (GPUModelRunner, "_model_forward"): (
        "self",
        "input_ids",
        "positions",
        "intermediate_tensors",
        "inputs_embeds",
        "model_kwargs",
    ),
    (GPUModelRunner, "initialize_metadata_builders"): (
        "self",
        "kv_cache_config",
        "kernel_block_sizes",
    ),
    (AttentionGroup, "build_metadata"): (
        "self",
        "common_attn_metadata",
        "ubatch_idx",
        "common_prefix_len",
        "kwargs",
    ),
    (AttentionGroup, "create_metadata_builders"): (
        "self",
        "vllm_config",
        "device",
        "kernel_block_size",
        "num_metadata_builders",
    ),
    (CPUWorker, "init_device"): ("self",),
    (CPUWorker, "__init__"): (
        "self",
        "vllm_config",
        "local_rank",
        "rank",
        "distributed_init_method",
        "is_driver_worker",
    ),
}

_FORWARD_CONTEXT_FIELDS = (
    "no_compile_layers",
    "attn_metadata",
    "slot_mapping",
    "dp_metadata",
    "cudagraph_runtime_mode",
    "batch_descriptor",
    "ubatch_slices",
    "is_padding",
    "skip_compiled",
    "all_moe_layers",
    "moe_layer_index",
    "additional_kwargs",
)


CONTRACT = Contract(
    stack=f"vLLM {PINNED_VLLM}",
    signatures=_SIGNATURES,
    fields={ForwardContext: _FORWARD_CONTEXT_FIELDS},
    metadata=(CommonAttentionMetadata,),
)


def check_drift() -> None:
    """Compare the installed vLLM with what this package was written against.

    Raises :class:`UpstreamDrift` naming the version, signature or field that differs, and
    ``MissingFieldRule`` / ``StaleFieldRule`` for attention metadata.
    """
    check_versions()
    CONTRACT.check()


def _attention_backend(vllm_config: VllmConfig) -> str:
    """Name of the backend that the platform will choose for the model's main attention."""
    model = vllm_config.model_config
    path = current_platform.get_attn_backend_cls(
        vllm_config.attention_config.backend,
        AttentionSelectorConfig(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            block_size=vllm_config.cache_config.block_size,
            use_mla=model.use_mla,
        ),
    )
    return str(resolve_obj_by_qualname(path).get_name())


def read_setup(vllm_config: VllmConfig) -> Setup:
    """The facts that validation judges; read directly, so that a renamed field breaks here."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    compilation = vllm_config.compilation_config
    return Setup(
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        sequence_parallel_moe=parallel.use_sequence_parallel_moe,
        speculative_method=None if speculative is None else str(speculative.method),
        cudagraph_mode=compilation.cudagraph_mode.name,
        compilation_mode=compilation.mode.name,
        native_dbo=parallel.use_ubatching,
        model_runner_v2=vllm_config.use_v2_model_runner,
        multimodal_prefix_lm=model.is_mm_prefix_lm,
        encoder_decoder=model.is_encoder_decoder,
        recurrent_state=model.has_inner_state or model.is_hybrid,
        runner_type=model.runner_type,
        lora=vllm_config.lora_config is not None,
        kv_connector=None if transfer is None else str(transfer.kv_connector),
        expert_load_balancing=parallel.enable_eplb,
        kv_sharing_fast_prefill=vllm_config.cache_config.kv_sharing_fast_prefill,
        attention_backends=(_attention_backend(vllm_config),),
    )
