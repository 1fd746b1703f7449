"""vLLM's own microbatch splitter, for the benchmark to compare with."""

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices, split_attn_metadata

__all__ = ["CommonAttentionMetadata", "maybe_create_ubatch_slices", "split_attn_metadata"]
