"""Attention metadata of the reference engine: what a paged-KV backend is told about one step.

Names and meanings are those of the same fields of vLLM 0.32.0's
``CommonAttentionMetadata``, so that the splitter's rules for that class apply to this
one unchanged and the oracle needs no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class ReferenceAttentionMetadata:
    """One step (or one stage of it).  R = requests, T = real tokens, in batch order.

    ``query_start_loc`` [R + 1] int32: first row of each request, then T;
    ``query_start_loc_cpu``: the host's copy.
    ``seq_lens`` [R] int32: tokens of each request whose KV exists once the step has
    written its own: computed before + scheduled now.
    ``max_query_len``, ``max_seq_len``: bounds over the requests; nothing beyond is processed.
    ``block_table_tensor`` [R, width] int32: KV block of positions ``b * block_size ...``.
    ``slot_mapping`` [T] int64: KV slot that each token is written to, negative = not written.
    ``positions`` [T] int64, absolute.
    ``is_prefilling`` [R] bool: the request still had prompt tokens to compute before the step.
    ``seq_lens_cpu_upper_bound`` [R] int32, host: bound on ``seq_lens``.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    _num_computed_tokens_cache: torch.Tensor | None = None

    def compute_num_computed_tokens(self) -> torch.Tensor:
        """[R] int32: tokens computed before this step, ``seq_len - query_len``; kept once made.

        The value is kept as vLLM keeps it, and the attention reads it through this
        method, so that a piece that inherits its parent's copy gives visibly wrong numbers.
        """
        if self._num_computed_tokens_cache is None:
            self._num_computed_tokens_cache = self.seq_lens - self.query_start_loc.diff()
        return self._num_computed_tokens_cache
