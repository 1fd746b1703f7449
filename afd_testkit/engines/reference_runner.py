"""Runs one scheduled step of the reference model, whole.

R = rows of the step, T = their tokens, H = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from afd_testkit.engines.reference_attention import PagedAttention, PagedKVCache
from afd_testkit.engines.reference_metadata import ReferenceAttentionMetadata
from afd_testkit.engines.reference_model import ReferenceModel
from afd_testkit.engines.reference_scheduler import NULL_BLOCK, Step, StepRow


@dataclass(frozen=True)
class StepInputs:
    """What the model is given for one step: ``token_ids`` and ``positions`` [T] int64."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: ReferenceAttentionMetadata


@dataclass(frozen=True)
class StepOutput:
    """``hidden`` [T, H] float64 in batch order, and the splitter's record of the step."""

    hidden: torch.Tensor
    evidence: dict[str, Any] | None = None


def build_inputs(step: Step, *, block_size: int, table_width: int) -> StepInputs:
    """Tensors of one step; block-table rows are padded to ``table_width`` with the null block."""
    rows = step.rows
    positions = torch.cat([_positions(row) for row in rows])
    block_table = torch.full((len(rows), table_width), NULL_BLOCK, dtype=torch.int32)
    for index, row in enumerate(rows):
        block_table[index, : len(row.request.blocks)] = torch.tensor(row.request.blocks)

    row_of_token = torch.repeat_interleave(torch.tensor([row.num_scheduled for row in rows]))
    block = block_table[row_of_token, positions // block_size].long()
    starts = torch.tensor([0, *accumulate(row.num_scheduled for row in rows)], dtype=torch.int32)
    seq_lens = torch.tensor([r.num_computed + r.num_scheduled for r in rows], dtype=torch.int32)
    metadata = ReferenceAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=seq_lens,
        num_reqs=len(rows),
        num_actual_tokens=positions.numel(),
        max_query_len=max(row.num_scheduled for row in rows),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=block_table,
        slot_mapping=block * block_size + positions % block_size,
        positions=positions,
        is_prefilling=torch.tensor([row.is_prefilling for row in rows]),
        seq_lens_cpu_upper_bound=seq_lens.clone(),
    )
    token_ids = torch.tensor([token for row in rows for token in row.token_ids])
    return StepInputs(token_ids, positions, metadata)


def _positions(row: StepRow) -> torch.Tensor:
    return torch.arange(row.num_computed, row.num_computed + row.num_scheduled)


class StockRunner:
    """Every step in one piece."""

    def __init__(self, model: ReferenceModel, cache: PagedKVCache, table_width: int) -> None:
        self.model = model
        self.cache = cache
        self.table_width = table_width

    def inputs(self, step: Step) -> StepInputs:
        """Tensors of the step; its fresh blocks are scrubbed first."""
        self.cache.scrub(step.new_blocks)
        return build_inputs(step, block_size=self.cache.block_size, table_width=self.table_width)

    def execute(self, step: Step) -> StepOutput:
        """Compute the step and fill its KV slots."""
        return StepOutput(self.run_whole(self.inputs(step)))

    def run_whole(self, inputs: StepInputs) -> torch.Tensor:
        """[T, H] final hidden states of the unsplit step."""
        hidden: torch.Tensor = self.model(
            inputs.positions,
            self.model.embed(inputs.token_ids),
            None,
            PagedAttention(inputs.metadata, self.cache),
        )
        return hidden
