"""Model inputs of a step → inputs of each stage, padded to the stage's own extent.

The token axis of each input is declared here, never guessed from sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from afd_plugin.errors import StageTensorError
from afd_plugin.plan import SplitPlan

# Where the tokens are, and how many dimensions the tensor may have.
# Shapes: hidden_states, residual, inputs_embeds [T, H]; input_ids [T]; positions [T], or
# [N, T] for multi-axis rotary positions; llama_4_scaling [T, ...] (one factor a token,
# with broadcast axes after it).
TOKEN_AXIS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "hidden_states": (0, (2,)),
    "residual": (0, (2,)),
    "inputs_embeds": (0, (2,)),
    "input_ids": (0, (1,)),
    "positions": (-1, (1, 2)),
    "llama_4_scaling": (0, (1, 2, 3)),
}

StageInputs = dict[str, Any]


def _check_known(name: str) -> None:
    if name not in TOKEN_AXIS:
        raise StageTensorError(
            f"{name} is no known stage input; known: {', '.join(TOKEN_AXIS)}. "
            "Declare its token axis in TOKEN_AXIS before it is split."
        )


def token_axis(name: str, tensor: Any) -> int:
    """The declared token axis of input ``name``; checks that ``tensor`` can have it."""
    _check_known(name)
    axis, ranks = TOKEN_AXIS[name]
    is_tensor = isinstance(tensor, torch.Tensor)
    if not is_tensor or tensor.ndim not in ranks:
        shape = tuple(tensor.shape) if is_tensor else type(tensor).__name__
        raise StageTensorError(
            f"{name} is {shape}; it must be a tensor of {' or '.join(map(str, ranks))} "
            f"dimension(s) with its tokens on axis {axis}."
        )
    return axis


def _cut(tensor: Any, axis: int, begin: int, end: int, rows: int) -> Any:
    """Tokens ``begin`` to ``end`` of ``tensor``, followed by zeros up to ``rows`` tokens."""
    piece = tensor[begin:end] if axis == 0 else tensor[..., begin:end]
    if rows == end - begin:
        return piece
    shape = list(piece.shape)
    shape[axis] = rows
    padded = tensor.new_zeros(shape)
    if axis == 0:
        padded[: end - begin] = piece
    else:
        padded[..., : end - begin] = piece
    return padded


def slice_stage_inputs(plan: SplitPlan, **inputs: Any) -> tuple[StageInputs, StageInputs]:
    """Inputs of stage 0 and of stage 1, under the names they were given by.

    Names and shapes: see ``TOKEN_AXIS``.  The token axis must have the step's real tokens or
    its padded extent (``plan.batch.num_input_tokens``).  A stage's tensors have its
    ``num_input_tokens`` tokens: real ones, then zeros.  Without padding they are views.
    ``None`` (an absent residual, say) stays ``None`` for both.

    Raises :class:`StageTensorError` naming the input that is unknown or does not fit.
    """
    extents = {plan.batch.num_tokens, plan.batch.num_input_tokens}
    stages: tuple[StageInputs, StageInputs] = ({}, {})
    for name, tensor in inputs.items():
        if tensor is None:
            _check_known(name)
            stages[0][name] = stages[1][name] = None
            continue
        axis = token_axis(name, tensor)
        if tensor.shape[axis] not in extents:
            raise StageTensorError(
                f"{name} has shape {tuple(tensor.shape)}: axis {axis} must hold the step's "
                f"{' or '.join(map(str, sorted(extents)))} tokens. If its tokens are on another "
                "axis, transpose it; if it belongs to another step, pass that step's plan."
            )
        for stage, values in zip(plan.stages, stages, strict=True):
            span = stage.token_slice
            values[name] = _cut(tensor, axis, span.start, span.stop, stage.num_input_tokens)
    return stages
