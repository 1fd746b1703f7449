"""Metadata of both stages through the engine's own builders."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from afd_plugin import context, metadata
from afd_plugin.context import AttributeSlot, ScopeStack
from afd_plugin.errors import UpstreamDrift
from afd_plugin.plan import SplitPlan


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
        pieces = metadata.slice_metadata(common_attn_metadata, self._plan)
        built = [self._build_stage(index, piece, **kwargs) for index, piece in enumerate(pieces)]
        return StagePair(
            built=(built[0], built[1]),
            slot_mapping=(pieces[0].slot_mapping, pieces[1].slot_mapping),
        )

    def _build_stage(self, index: int, piece: CommonAttentionMetadata, **kwargs: Any) -> Any:
        """One stage's metadata by its own builder."""
        return self._builders[index].build(0, piece, **kwargs)


@contextmanager
def stage_builders(
    attn_groups: Sequence[Sequence[AttentionGroup]],
    wrap: Callable[[Sequence[Any]], StageBuilders],
) -> Generator[None, None, None]:
    """Every attention group builds :class:`StagePair` objects inside; restored on every way out.

    ``wrap``: what stands in for a group's two builders.
    """
    with ScopeStack() as scopes:
        for group in (group for groups in attn_groups for group in groups):
            wrapped = wrap(group.metadata_builders)
            slot = AttributeSlot(group, "metadata_builders")
            scopes.enter(context.replaced(slot, [wrapped]))
        yield
