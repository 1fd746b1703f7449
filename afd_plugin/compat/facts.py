"""Facts of a deployment that every supported vLLM keeps in the same places (0.23.0 and 0.32.0)."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig


def shared_facts(vllm_config: VllmConfig) -> dict[str, Any]:
    """Arguments of :class:`~afd_plugin.validation.Setup` that do not depend on the backend.

    Read directly, so that a renamed field breaks here.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    compilation = vllm_config.compilation_config
    return {
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "sequence_parallel_moe": parallel.use_sequence_parallel_moe,
        "speculative_method": None if speculative is None else str(speculative.method),
        "cudagraph_mode": compilation.cudagraph_mode.name,
        "compilation_mode": compilation.mode.name,
        "native_dbo": parallel.use_ubatching,
        "model_runner_v2": vllm_config.use_v2_model_runner,
        "multimodal_prefix_lm": model.is_mm_prefix_lm,
        "encoder_decoder": model.is_encoder_decoder,
        "recurrent_state": model.has_inner_state or model.is_hybrid,
        "runner_type": model.runner_type,
        "lora": vllm_config.lora_config is not None,
        "kv_connector": None if transfer is None else str(transfer.kv_connector),
        "expert_load_balancing": parallel.enable_eplb,
        "quantization": None if model.quantization is None else str(model.quantization),
        "kv_sharing_fast_prefill": vllm_config.cache_config.kv_sharing_fast_prefill,
    }
