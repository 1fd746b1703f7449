"""What of vLLM-Ascend 0.23.0.post1 and its vLLM the split relies on.

By name: importing this imports neither.
"""

from __future__ import annotations

from afd_plugin.compat.contracts import REGISTER_OP, Contract
from afd_plugin.compat.known import PINNED_VLLM_ASCEND, PINNED_VLLM_OF_ASCEND

_RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"
_WORKER = "vllm_ascend.worker.worker:NPUWorker"
_GROUP = "vllm.v1.worker.utils:AttentionGroup"
_CONTEXT = "vllm_ascend.ascend_forward_context"
_MOE = "vllm_ascend.ops.fused_moe"
_FUSED_MOE = f"{_MOE}.fused_moe:AscendFusedMoE"
_COMM = f"{_MOE}.moe_comm_method:MoECommMethod"
_ROTARY = "vllm_ascend.ops.rotary_embedding"
_BUILD = ("self", "common_prefix_len", "common_attn_metadata", "fast_build")

CONTRACT = Contract(
    stack=f"vLLM-Ascend {PINNED_VLLM_ASCEND} on vLLM {PINNED_VLLM_OF_ASCEND}",
    first=("vllm_ascend.ops",),
    signatures={
        f"{_RUNNER}.execute_model": ("self", "scheduler_output", "intermediate_tensors"),
        f"{_RUNNER}._build_attention_metadata": (
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
        f"{_RUNNER}._model_forward": (
            "self",
            "num_tokens_padded",
            "input_ids",
            "positions",
            "intermediate_tensors",
            "inputs_embeds",
            "model_kwargs",
        ),
        f"{_RUNNER}.load_model": ("self",),
        f"{_RUNNER}.initialize_attn_backend": ("self", "kv_cache_config"),
        f"{_RUNNER}._sync_metadata_across_dp": (
            "self",
            "num_tokens",
            "is_draft_model",
            "cudagraph_mode",
            "allow_dp_padding",
        ),
        f"{_WORKER}.__init__": (
            "self",
            "vllm_config",
            "local_rank",
            "rank",
            "distributed_init_method",
            "is_driver_worker",
            "kwargs",
        ),
        "vllm.utils.torch_utils:direct_register_custom_op": REGISTER_OP,
        f"{_WORKER}.init_device": ("self",),
        f"{_GROUP}.create_metadata_builders": (
            "self",
            "vllm_config",
            "device",
            "kernel_block_size",
            "num_metadata_builders",
        ),
        f"{_GROUP}.get_metadata_builder": ("self", "ubatch_id"),
        "vllm_ascend.attention.attention_v1:AscendAttentionMetadataBuilder.build": _BUILD,
        "vllm_ascend.attention.mla_v1:AscendMLAMetadataBuilder.build": _BUILD,
        f"{_CONTEXT}:set_ascend_forward_context": (
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
        f"{_ROTARY}:update_cos_sin": ("positions",),
        f"{_CONTEXT}:select_moe_comm_method": ("num_tokens", "vllm_config", "is_draft_model"),
        f"{_FUSED_MOE}.forward_impl": (
            "self",
            "hidden_states",
            "router_logits",
            "return_with_event",
        ),
        f"{_FUSED_MOE}.shared_forward_impl": ("self", "hidden_states", "router_logits"),
        f"{_FUSED_MOE}._forward_shared_experts": ("self", "hidden_states", "fused_moe_evts"),
        f"{_MOE}.fused_moe:select_experts": (
            "hidden_states",
            "router_logits",
            "top_k",
            "use_grouped_topk",
            "renormalize",
            "topk_group",
            "num_expert_group",
            "custom_routing_function",
            "scoring_func",
            "routed_scaling_factor",
            "e_score_correction_bias",
            "indices_type",
            "mix_placement",
            "num_logical_experts",
            "num_shared_experts",
            "num_experts",
            "input_ids",
            "tid2eid",
        ),
        f"{_COMM}.prepare": (
            "self",
            "hidden_states",
            "router_logits",
            "enable_shared_expert_dp",
            "replace_allreduce",
            "quant_type",
        ),
        f"{_COMM}.fused_experts": ("self", "fused_experts_input"),
        f"{_COMM}.finalize": (
            "self",
            "hidden_states",
            "reduce_results",
            "padded_hidden_states_shape",
        ),
    },
    fields={
        "vllm.forward_context:ForwardContext": (
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
    members={
        f"{_CONTEXT}:MoECommType": ("ALLGATHER", "MC2", "ALLTOALL", "FUSED_MC2"),
        "vllm_ascend.attention.attention_v1:AscendAttentionState": (
            "PrefillNoCache",
            "PrefillCacheHit",
            "DecodeOnly",
            "ChunkedPrefill",
            "SpecDecoding",
        ),
    },
    names=(
        *(
            f"{_ROTARY}:{name}"
            for name in ("_cos", "_sin", "_cos_slice", "_sin_slice", "_cos_mla", "_sin_mla")
        ),
        f"{_CONTEXT}:_reserved_mc2_mask",
        f"{_MOE}.moe_comm_method:get_moe_comm_method",
        f"{_MOE}.moe_runtime_args:build_fused_experts_input",
        "vllm_ascend.worker.worker:NPUModelRunner",
    ),
    metadata=(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        "vllm_ascend.attention.utils:AscendCommonAttentionMetadata",
    ),
)
