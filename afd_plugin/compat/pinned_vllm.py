"""What of vLLM 0.32.0 the split relies on.  By name: importing this imports no vLLM."""

from __future__ import annotations

from afd_plugin.compat.contracts import REGISTER_OP, Contract
from afd_plugin.compat.known import PINNED_VLLM

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter"
_MOE = "vllm.model_executor.layers.fused_moe"
_MOE_RUNNER = f"{_MOE}.runner.moe_runner:MoERunner"
_GROUP = "vllm.v1.worker.utils:AttentionGroup"

CONTRACT = Contract(
    stack=f"vLLM {PINNED_VLLM}",
    # Parameters of everything that is overridden, wrapped or called by keyword; of what stands
    # there now, so that what another plugin put in place of a method is judged too.
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
            "max_num_sampled_tokens",
            "use_spec_decode",
            "for_cudagraph_capture",
            "num_scheduled_tokens",
            "slot_mappings",
        ),
        f"{_RUNNER}._model_forward": (
            "self",
            "input_ids",
            "positions",
            "intermediate_tensors",
            "inputs_embeds",
            "model_kwargs",
        ),
        f"{_RUNNER}.initialize_metadata_builders": (
            "self",
            "kv_cache_config",
            "kernel_block_sizes",
        ),
        f"{_GROUP}.build_metadata": (
            "self",
            "common_attn_metadata",
            "ubatch_idx",
            "common_prefix_len",
            "kwargs",
        ),
        f"{_GROUP}.create_metadata_builders": (
            "self",
            "vllm_config",
            "device",
            "kernel_block_size",
            "num_metadata_builders",
        ),
        f"{_RUNNER}.profile_run": ("self", "randomize_inputs"),
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model": (
            "self",
            "load_dummy_weights",
        ),
        f"{_ROUTER}.set_capture_fn": ("self", "capture_fn"),
        f"{_MOE_RUNNER}._apply_quant_method": (
            "self",
            "hidden_states",
            "router_logits",
            "shared_experts_input",
            "input_ids",
            "shared_experts_overlapping",
        ),
        f"{_MOE_RUNNER}._maybe_apply_shared_experts": ("self", "shared_experts_input", "order"),
        f"{_MOE}.routed_experts:RoutedExperts.forward_modular": (
            "self",
            "x",
            "topk_weights",
            "topk_ids",
            "shared_experts",
            "shared_experts_input",
        ),
        f"{_MOE}.router.fused_moe_router:FusedMoERouter.select_experts": (
            "self",
            "hidden_states",
            "router_logits",
            "topk_indices_dtype",
            "input_ids",
        ),
        "vllm.utils.torch_utils:direct_register_custom_op": REGISTER_OP,
        f"{_WORKER}.init_device": ("self",),
        f"{_WORKER}.__init__": (
            "self",
            "vllm_config",
            "local_rank",
            "rank",
            "distributed_init_method",
            "is_driver_worker",
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
            "is_padding",
            "skip_compiled",
            "all_moe_layers",
            "moe_layer_index",
            "additional_kwargs",
        )
    },
    names=("vllm.v1.worker.cpu_worker:CPUModelRunner",),
    metadata=("vllm.v1.attention.backend:CommonAttentionMetadata",),
)
