"""vLLM-Ascend 0.23.0.post1: reading its configuration, and checking that it is what was pinned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.worker.utils import AttentionGroup
from vllm_ascend import ascend_forward_context
from vllm_ascend.ascend_config import AscendConfig, init_ascend_config
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
from vllm_ascend.ops import rotary_embedding
from vllm_ascend.worker import worker as worker_module
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
from vllm_ascend.worker.worker import NPUWorker

from afd_plugin.compat.contracts import Contract
from afd_plugin.compat.known import PINNED_VLLM_ASCEND, PINNED_VLLM_OF_ASCEND, check_versions
from afd_plugin.validation import Setup

_SIGNATURES: Mapping[tuple[Any, str], tuple[str, ...]] = {
    (NPUModelRunner, "execute_model"): ("self", "scheduler_output", "intermediate_tensors"),
    (NPUModelRunner, "_build_attention_metadata"): (
        "self",
        "num_tokens",
        "num_reqs",
        "max_query_len",
        "num_tokens_padded",
        "num_reqs_padded",
        "ubatch_slices",
        "logits_indices",
        "use_spec_decode",
        "for_cudagraph_capture",
        "num_scheduled_tokens",
        "num_scheduled_tokens_np",
        "cascade_attn_prefix_lens",
    ),
    (NPUModelRunner, "_model_forward"): (
        "self",
        "num_tokens_padded",
        "input_ids",
        "positions",
        "intermediate_tensors",
        "inputs_embeds",
        "model_kwargs",
    ),
    (NPUModelRunner, "initialize_attn_backend"): ("self", "kv_cache_config"),
    (NPUModelRunner, "_sync_metadata_across_dp"): (
        "self",
        "num_tokens",
        "is_draft_model",
        "cudagraph_mode",
        "allow_dp_padding",
    ),
    (NPUWorker, "__init__"): (
        "self",
        "vllm_config",
        "local_rank",
        "rank",
        "distributed_init_method",
        "is_driver_worker",
        "kwargs",
    ),
    (NPUWorker, "init_device"): ("self",),
    (AttentionGroup, "create_metadata_builders"): (
        "self",
        "vllm_config",
        "device",
        "kernel_block_size",
        "num_metadata_builders",
    ),
    (AttentionGroup, "get_metadata_builder"): ("self", "ubatch_id"),
    (ascend_forward_context, "set_ascend_forward_context"): (
        "attn_metadata",
        "vllm_config",
        "num_tokens",
        "num_tokens_across_dp",
        "in_profile_run",
        "num_actual_tokens",
        "aclgraph_runtime_mode",
        "batch_descriptor",
        "model_instance",
        "is_draft_model",
        "skip_compiled",
        "max_tokens_across_pcp",
        "draft_attn_metadatas",
        "has_sinks",
        "input_ids",
        "eplb_heat_collection_status",
    ),
    (rotary_embedding, "update_cos_sin"): ("positions",),
}

CONTRACT = Contract(
    stack=f"vLLM-Ascend {PINNED_VLLM_ASCEND} on vLLM {PINNED_VLLM_OF_ASCEND}",
    signatures=_SIGNATURES,
    fields={
        ForwardContext: (
            "no_compile_layers",
            "attn_metadata",
            "slot_mapping",
            "dp_metadata",
            "cudagraph_runtime_mode",
            "batch_descriptor",
            "ubatch_slices",
            "skip_compiled",
            "all_moe_layers",
            "moe_layer_index",
            "additional_kwargs",
        )
    },
    names={
        rotary_embedding: ("_cos", "_sin", "_cos_slice", "_sin_slice", "_cos_mla", "_sin_mla"),
        ascend_forward_context: ("_reserved_mc2_mask",),
        worker_module: ("NPUModelRunner",),
    },
    metadata=(CommonAttentionMetadata, AscendCommonAttentionMetadata),
)


def check_drift() -> None:
    """Compare the installed vLLM-Ascend and vLLM with what this package was written against.

    Raises as :meth:`Contract.check` does.
    """
    check_versions()
    CONTRACT.check()


# What changes how a step is computed and no gate covers; each with what it is when off.
_UNCOVERED: Mapping[str, Callable[[AscendConfig], object]] = {
    "xlite_graph_config": lambda c: c.xlite_graph_config.enabled,
    "finegrained_tp_config": lambda c: (
        c.finegrained_tp_config.oproj_tensor_parallel_size
        or c.finegrained_tp_config.lmhead_tensor_parallel_size
        or c.finegrained_tp_config.embedding_tensor_parallel_size
        or c.finegrained_tp_config.mlp_tensor_parallel_size
        or c.finegrained_tp_config.olora_tensor_parallel_size
    ),
    "eplb_config.dynamic_eplb": lambda c: c.eplb_config.dynamic_eplb,
    "weight_prefetch_config": lambda c: c.weight_prefetch_config.enabled,
    "profiling_chunk_config": lambda c: c.profiling_chunk_config.enabled,
    "layer_sharding": lambda c: c.layer_sharding,
    "enable_shared_expert_dp": lambda c: c.enable_shared_expert_dp,
    "multistream_overlap_shared_expert": lambda c: c.multistream_overlap_shared_expert,
    "multistream_overlap_gate": lambda c: c.multistream_overlap_gate,
    "recompute_scheduler_enable": lambda c: c.recompute_scheduler_enable,
    "enable_matmul_allreduce": lambda c: c.enable_matmul_allreduce,
    "enable_fused_mc2": lambda c: c.enable_fused_mc2,
    "enable_flashcomm2_parallel_size": lambda c: c.enable_flashcomm2_parallel_size,
    "enable_kv_nz": lambda c: c.enable_kv_nz,
    "enable_sparse_sfa_c8": lambda c: c.enable_sparse_sfa_c8,
    "enable_sparse_li_c8": lambda c: c.enable_sparse_li_c8,
    "enable_sp_by_pass": lambda c: c.enable_sp_by_pass,
    "enable_mc2_hierarchy_comm": lambda c: c.enable_mc2_hierarchy_comm,
    "enable_reduce_sample": lambda c: c.enable_reduce_sample,
    "mix_placement": lambda c: c.mix_placement,
    "hamming_sparse": lambda c: c.enable_hamming_sparse,
    "SLO_limits_for_dynamic_batch": lambda c: c.SLO_limits_for_dynamic_batch != -1,
}


def builder_path(backend: Any) -> str:
    """Qualified name of the metadata builder that ``backend`` chooses here.

    Names of vLLM-Ascend's backends tell them apart no further than ``CUSTOM``.
    """
    builder = backend.get_builder_cls()
    return f"{builder.__module__}.{builder.__qualname__}"


def _attention_builder(vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    path = current_platform.get_attn_backend_cls(
        vllm_config.attention_config.backend,
        AttentionSelectorConfig(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            block_size=vllm_config.cache_config.block_size,
            use_mla=model.use_mla,
            use_sparse=hasattr(model.hf_text_config, "index_topk"),
        ),
    )
    return builder_path(resolve_obj_by_qualname(path))


def read_setup(vllm_config: VllmConfig) -> Setup:
    """The facts that validation judges; read directly, so that a renamed field breaks here."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    compilation, ascend = vllm_config.compilation_config, init_ascend_config(vllm_config)
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
        attention_backends=(_attention_builder(vllm_config),),
        proved_parallel=("tensor",),
        sharded_tokens=bool(ascend.enable_flashcomm1),
        chunked_prefill=bool(vllm_config.scheduler_config.enable_chunked_prefill),
        uncovered_options=tuple(name for name, on in _UNCOVERED.items() if on(ascend)),
    )
