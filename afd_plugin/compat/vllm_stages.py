"""vLLM 0.32.0: the forward context of a stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from vllm.forward_context import ForwardContext, override_forward_context

from afd_plugin.compat.stages import StagePair
from afd_plugin.errors import UpstreamDrift
from afd_plugin.plan import Stage


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
