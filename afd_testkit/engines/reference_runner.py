"""Runs scheduled steps of the reference model: whole, or in two stages through ``afd_plugin``.

Both ways share the runner's ``attention`` slot, the reference's forward context: it holds the
attention of the whole step, except while a stage runs.

R = rows of the step, T = their tokens, H = hidden size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch

from afd_plugin import context, decision, metadata, pipeline
from afd_plugin.batch import ScheduledBatch
from afd_plugin.compat.known import RULES_0_32_0
from afd_plugin.config import AFDConfig
from afd_plugin.errors import ConfigError
from afd_plugin.plan import SplitPlan
from afd_plugin.stage_inputs import StageInputs
from afd_testkit.engines.base import EngineError, SplitSetting
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
    """Results in batch order.

    ``hidden``: [T, H] float64.  ``last_rows``: [R] row of each request's last token, where
    the next token is sampled.  ``evidence``: the splitter's own record of the step.
    """

    hidden: torch.Tensor
    last_rows: list[int]
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
    attention_metadata = ReferenceAttentionMetadata(
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
    return StepInputs(token_ids, positions, attention_metadata)


def _positions(row: StepRow) -> torch.Tensor:
    return torch.arange(row.num_computed, row.num_computed + row.num_scheduled)


class StockRunner:
    """Every step in one piece."""

    def __init__(self, model: ReferenceModel, cache: PagedKVCache, table_width: int) -> None:
        self.model = model
        self.cache = cache
        self.table_width = table_width
        self.attention: PagedAttention | None = None  # before the first step
        self.forwards: list[int] = []  # rows of each forward pass of the step

    def execute(self, step: Step) -> StepOutput:
        """Compute the step and fill its KV slots; its fresh blocks are scrubbed first."""
        self.cache.scrub(step.new_blocks)
        inputs = build_inputs(step, block_size=self.cache.block_size, table_width=self.table_width)
        self.attention = PagedAttention(inputs.metadata, self.cache)
        self.forwards.clear()
        hidden, evidence = self.compute(step, inputs)
        return StepOutput(hidden, self._last_rows(len(step.rows)), evidence)

    def compute(self, step: Step, inputs: StepInputs) -> tuple[torch.Tensor, dict[str, Any] | None]:
        """[T, H] final hidden states, and evidence where the runner keeps it."""
        return self.forward(inputs.positions, self.model.embed(inputs.token_ids), None), None

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Layers and final norm over embedded rows [n, H], under the attention in force."""
        normed: torch.Tensor = self.model(positions, hidden_states, residual, self.attention)
        self.forwards.append(positions.shape[-1])
        return normed

    def _last_rows(self, num_rows: int) -> list[int]:
        """Read from the metadata in force, as engines do, so that a stage's that was left
        behind shows.  Rows it does not know keep 0, as rows of an index buffer would."""
        rows = [0] * num_rows
        if self.attention is not None:
            ends = self.attention.metadata.query_start_loc[1:] - 1
            known = min(num_rows, ends.numel())
            rows[:known] = ends[:known].tolist()
        return rows


class AFDRunner(StockRunner):
    """Decides, slices, runs and merges as a production runner does.

    The plugin's functions are called through their modules, so that a fault put
    there takes effect.
    """

    def __init__(
        self, model: ReferenceModel, cache: PagedKVCache, table_width: int, split: SplitSetting
    ) -> None:
        super().__init__(model, cache, table_width)
        self.config = _afd_config(split)
        metadata.register_metadata_rules(
            ReferenceAttentionMetadata,
            {field.name: RULES_0_32_0[field.name] for field in fields(ReferenceAttentionMetadata)},
        )

    def compute(self, step: Step, inputs: StepInputs) -> tuple[torch.Tensor, dict[str, Any] | None]:
        """Two stages where the plugin says so; the evidence is its own."""
        parent = inputs.metadata
        # A builder asks for the counts before the split: no piece may inherit the answer.
        parent.compute_num_computed_tokens()
        decided = decision.decide_step(
            ScheduledBatch(
                [row.num_scheduled for row in step.rows],
                [row.num_computed for row in step.rows],
                is_prefilling=[row.is_prefilling for row in step.rows],
            ),
            self.config,
            kv_groups=[
                decision.KVGroup(
                    block_size=self.cache.block_size,
                    block_table=parent.block_table_tensor,
                    slot_mapping=parent.slot_mapping,
                )
            ],
        )
        if isinstance(decided.plan, SplitPlan):
            hidden = self._stages(decided.plan, inputs)
        else:
            hidden, _ = super().compute(step, inputs)
        evidence = decided.evidence(forwards=self.forwards, completed=True)
        return hidden, evidence.as_dict()

    def _stages(self, plan: SplitPlan, inputs: StepInputs) -> torch.Tensor:
        pieces = metadata.slice_metadata(inputs.metadata, plan)

        def scopes(stage: int, inputs: Any) -> list[AbstractContextManager[Any]]:
            slot = context.AttributeSlot(self, "attention")
            return [context.replaced(slot, PagedAttention(pieces[stage], self.cache))]

        def forward(stage: int, values: StageInputs) -> torch.Tensor:
            return self.forward(values["positions"], values["hidden_states"], values["residual"])

        merged: torch.Tensor = pipeline.run_stages(
            plan,
            inputs={
                "hidden_states": self.model.embed(inputs.token_ids),
                "residual": None,
                "positions": inputs.positions,
            },
            forward=forward,
            scopes=scopes,
        )
        return merged


def _afd_config(split: SplitSetting) -> AFDConfig:
    """The plugin's options for a run; raises :class:`EngineError` where it refuses them."""
    options: dict[str, Any] = {
        "async_moe_ubatching": split.policy != "off",
        "async_moe_token_alignment": split.alignment,
        "async_moe_min_tokens": split.min_tokens,
    }
    if split.policy != "off":
        options["async_moe_split"] = split.policy
    try:
        return AFDConfig.from_options(options)
    except ConfigError as error:
        raise EngineError(f"reference engine: {split} is refused: {error}") from error
