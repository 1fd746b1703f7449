"""vLLM 0.32.0: reading its configuration, and checking that it is what was pinned."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.selector import AttentionSelectorConfig

from afd_plugin.compat.facts import shared_facts
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
    """The facts that validation judges."""
    return Setup(**shared_facts(vllm_config), attention_backends=(_attention_backend(vllm_config),))
