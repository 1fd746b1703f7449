"""vLLM-Ascend 0.23.0.post1: metadata, rotary caches and forward context of a stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from vllm.forward_context import ForwardContext
from vllm_ascend import ascend_forward_context
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
from vllm_ascend.ops import rotary_embedding

from afd_plugin.compat.stages import StageBuilders, StagePair
from afd_plugin.context import AttributeSlot, ScopeStack, replaced
from afd_plugin.plan import SplitPlan, Stage

# Buffers that the rotary module keeps for the step that runs: of multi-head attention, filled
# before the forward pass, and of MLA decodes, filled when their metadata is built.
_FORWARD_CACHES = ("_cos", "_sin")
_SLICES = ("_cos_slice", "_sin_slice")
_MLA_CACHES = ("_cos_mla", "_sin_mla")

_PER_REQUEST = (
    "seq_lens",
    "seq_lens_cpu",
    "_seq_lens_cpu",
    "seq_lens_cpu_upper_bound",
    "num_computed_tokens_cpu",
    "_num_computed_tokens_cpu",
    "is_prefilling",
    "block_table_tensor",
)


class StageCaches:
    """Each stage's own copy of the rotary buffers, made once.

    Two stages exist at the same time, and a metadata object or a layer that keeps a view of a
    buffer must not see the other stage's angles in it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}

    @contextmanager
    def scope(self, stage: int, names: Sequence[str]) -> Generator[None, None, None]:
        """The rotary module's globals ``names`` are this stage's buffers inside."""
        with ScopeStack() as scopes:
            for name in names:
                slot = AttributeSlot(rotary_embedding, name)
                whole = slot.get()
                if whole is None:  # the model uses the other kind of cache
                    continue
                if (stage, name) not in self._buffers:
                    self._buffers[stage, name] = torch.empty_like(whole)
                scopes.enter(replaced(slot, self._buffers[stage, name]))
            yield


def with_padding_request(piece: AscendCommonAttentionMetadata) -> AscendCommonAttentionMetadata:
    """``piece`` with one more request, without context or slots, that holds the stage's padding.

    The fused attention kernel wants its offsets to end with the buffer (TND layout), for which
    vLLM-Ascend adds such a request to a padded step.  Real tokens, their lengths and the number
    of actual tokens stay as they are.
    """
    rows = piece.num_input_tokens
    if rows == piece.num_actual_tokens:
        return piece

    def longer(values: torch.Tensor | None, last: int) -> torch.Tensor | None:
        if values is None:
            return None
        return torch.cat([values, values.new_full((1, *values.shape[1:]), last)])

    changes: dict[str, Any] = {name: longer(getattr(piece, name), 0) for name in _PER_REQUEST}
    for name in ("query_start_loc", "query_start_loc_cpu"):
        changes[name] = longer(getattr(piece, name), rows)
    return dataclasses.replace(piece, num_reqs=piece.num_reqs + 1, **changes)


class AscendStageBuilders(StageBuilders):
    """Builds each stage with its own rotary buffers, and pads it as the engine pads a step."""

    def __init__(
        self, builders: Sequence[Any], plan: SplitPlan, caches: StageCaches, *, pad: bool
    ) -> None:
        super().__init__(builders, plan)
        self._caches = caches
        self._pad = pad

    def _build_stage(self, index: int, piece: Any, **kwargs: Any) -> Any:
        if self._pad:
            piece = with_padding_request(piece)
        with self._caches.scope(index, _MLA_CACHES):
            return super()._build_stage(index, piece, **kwargs)


@contextmanager
def _rotary(
    stage: int, positions: torch.Tensor, caches: StageCaches
) -> Generator[None, None, None]:
    """The stage's own angles where the forward pass reads them."""
    with ScopeStack() as scopes:
        for name in _SLICES:
            slot = AttributeSlot(rotary_embedding, name)
            scopes.enter(replaced(slot, slot.get()))
        scopes.enter(caches.scope(stage, _FORWARD_CACHES))
        rotary_embedding.update_cos_sin(positions)
        yield


@contextmanager
def _mc2_mask() -> Generator[None, None, None]:
    """A mask of the stage's own: the forward context marks its tokens in a module's buffer."""
    slot = AttributeSlot(ascend_forward_context, "_reserved_mc2_mask")
    mask = slot.get()
    with replaced(slot, None if mask is None else mask.clone()):
        yield


def stage_scopes(
    runner: Any,
    parent: ForwardContext,
    pairs: Mapping[str, StagePair],
    stage: Stage,
    index: int,
    *,
    inputs: Mapping[str, Any],
    caches: StageCaches,
    rows_across_dp: torch.Tensor | None,
) -> list[AbstractContextManager[Any]]:
    """What holds while a stage runs: rotary angles, MC2 mask, and a forward context of its own.

    The context is made by vLLM-Ascend's own function, which decides the communication of
    experts and the token layout anew from the stage's rows.  ``inputs``: the stage's model
    inputs.  ``rows_across_dp``: [DP] rows that every DP rank runs in this stage.
    """
    rows = stage.num_input_tokens
    descriptor = parent.batch_descriptor
    return [
        _rotary(index, inputs["positions"], caches),
        _mc2_mask(),
        ascend_forward_context.set_ascend_forward_context(
            {layer: pair.built[index] for layer, pair in pairs.items()},
            runner.vllm_config,
            num_tokens=rows,
            num_tokens_across_dp=rows_across_dp,
            aclgraph_runtime_mode=parent.cudagraph_runtime_mode,
            batch_descriptor=None
            if descriptor is None
            else dataclasses.replace(descriptor, num_tokens=rows),
            num_actual_tokens=stage.num_tokens,
            model_instance=runner.model,
            skip_compiled=parent.skip_compiled,
            has_sinks=runner._has_sinks,
            input_ids=inputs["input_ids"],
        ),
    ]
