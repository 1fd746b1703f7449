"""vLLM-Ascend 0.23.0.post1: reading its configuration, and checking that it is what was pinned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm_ascend.ascend_config import AscendConfig, init_ascend_config

from afd_plugin.compat.facts import shared_facts
from afd_plugin.compat.known import check_versions
from afd_plugin.compat.pinned_ascend import CONTRACT
from afd_plugin.validation import Setup


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
    "eplb_config.expert_map_path": lambda c: c.eplb_config.expert_map_path,
    "enable_prefill_mc2": lambda c: c.enable_prefill_mc2,
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


_COMPRESSED = "vllm_ascend.attention.dsa_v1.AscendDSABackend"


def builder_path(backend: Any) -> str:
    """Qualified name of the metadata builder that ``backend`` chooses here.

    Names of vLLM-Ascend's backends tell them apart no further than ``CUSTOM``.
    """
    builder = backend.get_builder_cls()
    return f"{builder.__module__}.{builder.__qualname__}"


def _attention_builder(vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    if hasattr(model.hf_config, "compress_ratios"):  # its layers do not ask the platform
        return builder_path(resolve_obj_by_qualname(_COMPRESSED))
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
    ascend = init_ascend_config(vllm_config)
    return Setup(
        **shared_facts(vllm_config),
        attention_backends=(_attention_builder(vllm_config),),
        # With sharded tokens every DP rank is padded to the longest, and stages are not yet.
        proved_parallel=("tensor",) if ascend.enable_flashcomm1 else ("tensor", "data"),
        sharded_tokens=bool(ascend.enable_flashcomm1),
        chunked_prefill=bool(vllm_config.scheduler_config.enable_chunked_prefill),
        fused_communication=bool(ascend.enable_fused_mc2),
        routes_through_op=False,
        uncovered_options=tuple(name for name, on in _UNCOVERED.items() if on(ascend)),
    )
