"""Model inputs of a step → inputs of each stage, padded to the stage's own extent.

The token axis of each input is declared here, never guessed from sizes; and so is which inputs
are sharded where the runtime shards tokens over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from afd_plugin.errors import StageTensorError
from afd_plugin.exchange import ShardExchange
from afd_plugin.plan import SplitPlan


class TokenAxis(NamedTuple):
    """Where the tokens of an input are.

    ``axis``: of the tokens.  ``ranks``: how many dimensions the tensor may have.  ``place``: where
    tokens are sharded over ranks, whether the tensor is a ``local`` shard or still ``global``.
    """

    axis: int
    ranks: tuple[int, ...]
    place: Literal["global", "local"] = "global"


# Shapes: hidden_states, residual, inputs_embeds [T, H]; input_ids [T]; positions [T], or
# [N, T] for multi-axis rotary positions; llama_4_scaling [T, ...] (one factor a token,
# with broadcast axes after it).
TOKEN_AXIS: Mapping[str, TokenAxis] = {
    "hidden_states": TokenAxis(0, (2,), "local"),
    "residual": TokenAxis(0, (2,), "local"),
    "inputs_embeds": TokenAxis(0, (2,)),
    "input_ids": TokenAxis(0, (1,)),
    "positions": TokenAxis(-1, (1, 2)),
    "llama_4_scaling": TokenAxis(0, (1, 2, 3)),
}

StageInputs = dict[str, Any]


def token_axis(
    name: str, tensor: Any, declared: Mapping[str, TokenAxis] | None = None
) -> TokenAxis:
    """The declaration of input ``name``; checks that ``tensor``, unless ``None``, can have it."""
    where = (declared or {}).get(name) or TOKEN_AXIS.get(name)
    if where is None:
        raise StageTensorError(
            f"{name} is no known stage input; known: {', '.join(TOKEN_AXIS)}. "
            "Declare its token axis before it is split."
        )
    if tensor is None:
        return where
    is_tensor = isinstance(tensor, torch.Tensor)
    if (
        not is_tensor
        or tensor.ndim not in where.ranks
        or not -tensor.ndim <= where.axis < tensor.ndim
    ):
        shape = tuple(tensor.shape) if is_tensor else type(tensor).__name__
        raise StageTensorError(
            f"{name} is {shape}; it must be a tensor of {' or '.join(map(str, where.ranks))} "
            f"dimension(s) with its tokens on axis {where.axis}."
        )
    return where


def _cut(tensor: Any, axis: int, begin: int, end: int, rows: int) -> Any:
    """Tokens ``begin`` to ``end`` of ``tensor``, followed by zeros up to ``rows`` tokens."""
    piece = tensor.narrow(axis, begin, end - begin)
    if rows == end - begin:
        return piece
    shape = list(piece.shape)
    shape[axis] = rows
    padded = tensor.new_zeros(shape)
    padded.narrow(axis, 0, end - begin).copy_(piece)
    return padded


def _check_global(plan: SplitPlan, name: str, axis: int, tensor: Any) -> None:
    extents = {plan.batch.num_tokens, plan.batch.num_input_tokens}
    if tensor.shape[axis] not in extents:
        raise StageTensorError(
            f"{name} has shape {tuple(tensor.shape)}: axis {axis} must hold the step's "
            f"{' or '.join(map(str, sorted(extents)))} tokens. If its tokens are on another "
            "axis, transpose it; if it belongs to another step, pass that step's plan; if it is "
            "one rank's shard, declare it local and pass the exchange."
        )


def sharding(plan: SplitPlan, exchange: ShardExchange | None) -> ShardExchange | None:
    """The exchange if tokens are sharded in this step; :class:`StageTensorError` if of another."""
    if exchange is None:
        return None
    if exchange.split is not plan and exchange.split != plan:
        raise StageTensorError(
            f"the exchange cuts at {exchange.split.cut} of {exchange.split.batch.num_tokens} "
            f"tokens and the plan at {plan.cut} of {plan.batch.num_tokens}, or they differ in "
            "another way; make an exchange for each step's plan."
        )
    return exchange if exchange.layout.shards > 1 else None


def slice_stage_inputs(
    plan: SplitPlan,
    *,
    exchange: ShardExchange | None = None,
    declared: Mapping[str, TokenAxis] | None = None,
    **inputs: Any,
) -> tuple[StageInputs, StageInputs]:
    """Inputs of stage 0 and of stage 1, under the names they were given by.

    Names and shapes: see ``TOKEN_AXIS``; ``declared`` overrides and adds to it for this call, for
    local positions, say, or scaling with its tokens on axis 1.  ``None`` (an absent residual,
    say) stays ``None`` for both.

    A global input must have the step's real tokens or its padded extent
    (``plan.batch.num_input_tokens``) on its token axis.  A stage's tensors have its
    ``num_input_tokens`` tokens: real ones, then zeros.  Without padding they are views.

    ``exchange``: of this plan, and of the layout that this step really has.  Where that is sharded,
    local inputs are the rank's rows of the step (``exchange.plan.batch_shard``) and become its
    rows of each stage (``exchange.plan.stage_shards``); every rank of the group must call this
    with the same inputs present, in the same order.  Otherwise all inputs are global.

    Raises :class:`StageTensorError` naming the input that is unknown or does not fit, before
    anything is sent.
    """
    shards = sharding(plan, exchange)
    where = {name: token_axis(name, tensor, declared) for name, tensor in inputs.items()}
    for name, tensor in inputs.items():  # all of them first: some are sent
        if tensor is None:
            continue
        if shards is not None and where[name].place == "local":
            shards.check_batch_shard(name, tensor, where[name].axis)
        else:
            _check_global(plan, name, where[name].axis, tensor)
    stages: tuple[StageInputs, StageInputs] = ({}, {})
    for name, tensor in inputs.items():
        axis, _, place = where[name]
        if tensor is None:
            stages[0][name] = stages[1][name] = None
        elif shards is not None and place == "local":
            stages[0][name], stages[1][name] = shards.to_stages(tensor, axis, name)
        else:
            for stage, values in zip(plan.stages, stages, strict=True):
                span = stage.token_slice
                values[name] = _cut(tensor, axis, span.start, span.stop, stage.num_input_tokens)
    return stages
