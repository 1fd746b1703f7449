"""vLLM 0.32.0: stage metadata through its own builders, and a forward context a stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from afd_plugin import context, metadata
from afd_plugin.context import AttributeSlot, ScopeStack
from afd_plugin.errors import UpstreamDrift
from afd_plugin.plan import SplitPlan, Stage


@dataclass(frozen=True)
class StagePair:
    """What a layer needs in each stage: the builder's own metadata, and its KV slots."""

    built: tuple[Any, Any]
    slot_mapping: tuple[torch.Tensor, torch.Tensor]


class StageBuilders:
    """Stands in for a group's metadata builder during one split step.

    Slices the step's common metadata and lets each stage's own builder build from its piece.
    Only ``build`` exists; whatever else upstream may want of a builder fails loudly.
    """

    # Upstream reuses metadata across KV-cache groups by patching block tables into it; the
    # pieces are built afresh for every group instead.
    supports_update_block_table = False

    def __init__(self, builders: Sequence[Any], plan: SplitPlan) -> None:
        self._builders = tuple(builders)
        self._plan = plan

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, **kwargs: Any
    ) -> StagePair:
        """Metadata of both stages.

        ``common_prefix_len`` (cascade attention) is a length of whole requests and must be 0.
        """
        if common_prefix_len:
            raise UpstreamDrift(
                f"common_prefix_len is {common_prefix_len}; a split step runs without cascade "
                "attention (0). Set --disable-cascade-attn."
            )
        first, second = metadata.slice_metadata(common_attn_metadata, self._plan)
        return StagePair(
            built=(
                self._builders[0].build(0, first, **kwargs),
                self._builders[1].build(0, second, **kwargs),
            ),
            slot_mapping=(first.slot_mapping, second.slot_mapping),
        )


@contextmanager
def stage_builders(
    attn_groups: Sequence[Sequence[AttentionGroup]], plan: SplitPlan
) -> Generator[None, None, None]:
    """Every attention group builds :class:`StagePair` objects inside; restored on every way out."""
    with ScopeStack() as scopes:
        for group in (group for groups in attn_groups for group in groups):
            wrapped = StageBuilders(group.metadata_builders, plan)
            slot = AttributeSlot(group, "metadata_builders")
            scopes.enter(context.replaced(slot, [wrapped]))
        yield


def _with_padding(slots: torch.Tensor, rows: int) -> torch.Tensor:
    """``slots`` followed by -1 (no slot) up to ``rows``, since keys have the padded extent."""
    if slots.shape[0] == rows:
        return slots
    padded = slots.new_full((rows,), -1)
    padded[: slots.shape[0]] = slots
    return padded


def stage_forward_context(
    parent: ForwardContext, pairs: Mapping[str, StagePair], stage: Stage, index: int
) -> AbstractContextManager[None]:
    """The forward context of one stage: a copy with the stage's own metadata and counters."""
    if set(pairs) != set(parent.slot_mapping):
        raise UpstreamDrift(
            f"layers with metadata {sorted(pairs)} and layers with a slot mapping "
            f"{sorted(parent.slot_mapping)} differ; vLLM 0.32.0 has both for the same layers."
        )
    rows = stage.num_input_tokens
    padding = torch.zeros(rows, dtype=torch.bool)
    padding[stage.num_tokens :] = True
    descriptor = parent.batch_descriptor
    scope: AbstractContextManager[None] = override_forward_context(
        dataclasses.replace(
            parent,
            attn_metadata={layer: pair.built[index] for layer, pair in pairs.items()},
            slot_mapping={
                layer: _with_padding(pair.slot_mapping[index], rows)
                for layer, pair in pairs.items()
            },
            batch_descriptor=None
            if descriptor is None
            else dataclasses.replace(descriptor, num_tokens=rows),
            is_padding=padding,
            moe_layer_index=0,
            additional_kwargs=dict(parent.additional_kwargs),
        )
    )
    return scope
