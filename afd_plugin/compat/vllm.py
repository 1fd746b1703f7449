"""vLLM 0.32.0: reading its configuration, and checking that it is what was pinned."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.selector import AttentionSelectorConfig

from afd_plugin.compat.known import check_versions
from afd_plugin.compat.pinned_vllm import CONTRACT
from afd_plugin.validation import Setup


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
