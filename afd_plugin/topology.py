"""Which topologies a split is known to be right for: one answer for all who ask.

Start-up validation asks before anything exists, and planning asks again for each step with what
the runtime really does, so that the two cannot come apart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """What decides whether a step may be split; sizes are rank counts.

    ``tokens_sharded``: each TP rank holds a shard of the tokens (FlashComm1, or a connector that
    shards them, as CAM async does) and not all of them.  ``whole_tokens_proved``: gates cover
    TP ranks that each hold all tokens, which then need no alignment.
    """

    prefill_context_parallel_size: int
    decode_context_parallel_size: int
    tensor_parallel_size: int
    tokens_sharded: bool
    whole_tokens_proved: bool

    @property
    def token_alignment(self) -> int:
        """Tokens that a cut must be a multiple of: shards of a stage must be even."""
        return self.tensor_parallel_size if self.tokens_sharded else 1


ONE_RANK = Topology(1, 1, 1, tokens_sharded=False, whole_tokens_proved=False)


def unsupported_sizes(topology: Topology) -> dict[str, int]:
    """Sizes by name that no step may be split with: empty where a split is supported."""
    found = {
        name: size
        for name, size in (
            # PCP and DCP shard the tokens of one request over ranks already.
            ("prefill_context_parallel_size", topology.prefill_context_parallel_size),
            ("decode_context_parallel_size", topology.decode_context_parallel_size),
        )
        if size != 1
    }
    covered = topology.tokens_sharded or topology.whole_tokens_proved
    if topology.tensor_parallel_size != 1 and not covered:
        found["tensor_parallel_size"] = topology.tensor_parallel_size
    return found
