"""Outputs of both stages → outputs of the step: the exact inverse of ``stage_inputs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from afd_plugin.errors import StageTensorError
from afd_plugin.exchange import ShardExchange
from afd_plugin.plan import SplitPlan
from afd_plugin.stage_inputs import TokenAxis, sharding, token_axis

# Of outputs without a name: a model returns hidden states, and those are sharded.
_UNNAMED = TokenAxis(0, (), "local")


def _join(plan: SplitPlan, name: str, axis: int, pieces: Sequence[Any]) -> torch.Tensor:
    parts = []
    for index, (stage, piece) in enumerate(zip(plan.stages, pieces, strict=True)):
        if not isinstance(piece, torch.Tensor) or piece.ndim == 0:
            raise StageTensorError(f"{name} of stage {index} is {piece!r}; it must be a tensor.")
        if piece.shape[axis] != stage.num_input_tokens:
            raise StageTensorError(
                f"{name} of stage {index} has shape {tuple(piece.shape)}; axis {axis} must hold "
                f"the stage's {stage.num_input_tokens} input tokens."
            )
        parts.append(piece.narrow(axis, 0, stage.num_tokens))
    first, second = parts
    if first.dtype != second.dtype or first.device != second.device:
        raise StageTensorError(
            f"{name} is {first.dtype} on {first.device} in stage 0 and {second.dtype} on "
            f"{second.device} in stage 1; both stages must agree."
        )
    rest = [list(part.shape) for part in parts]
    for shape in rest:
        del shape[axis]
    if rest[0] != rest[1]:
        raise StageTensorError(
            f"{name} has shape {tuple(first.shape)} in stage 0 and {tuple(second.shape)} in "
            f"stage 1; all axes but axis {axis} must agree."
        )
    padding = plan.batch.num_input_tokens - plan.batch.num_tokens
    if padding:
        shape = list(first.shape)
        shape[axis] = padding
        parts.append(first.new_zeros(shape))
    return torch.cat(parts, dim=axis)


def merge_stage_outputs(
    plan: SplitPlan,
    outputs: Sequence[Any],
    *,
    exchange: ShardExchange | None = None,
    declared: Mapping[str, TokenAxis] | None = None,
) -> Any:
    """The step's output in logical token order.

    ``outputs``: what stage 0 and stage 1 returned, both a tensor, both a tuple or list of
    tensors, or both a mapping of names to tensors; ``None`` entries must agree.  Tokens are on
    axis 0, in mappings where ``declared`` or else ``stage_inputs.TOKEN_AXIS`` says.  Each tensor
    has its stage's ``num_input_tokens`` tokens; padding is dropped, and the result is zero-padded
    to ``plan.batch.num_input_tokens``.

    ``exchange``: as for ``slice_stage_inputs``.  Where tokens are sharded, outputs without a name
    and those declared local are this rank's rows of each stage, and the result is its rows of
    the step; without ``exchange``, all outputs hold the tokens of all ranks.

    Raises :class:`StageTensorError` naming the output and stage that do not fit.
    """
    shards = sharding(plan, exchange)

    def merged(name: str, where: TokenAxis | None, pair: tuple[Any, Any]) -> Any:
        absent = [piece is None for piece in pair]
        if all(absent):
            return None
        if any(absent):
            raise StageTensorError(
                f"{name} is None in stage {absent.index(True)} only; both stages must agree."
            )
        axis, _, place = where or token_axis(name, pair[0], declared)
        if shards is not None and place == "local":
            return shards.to_batch(pair[0], pair[1], axis, name)
        return _join(plan, name, axis, pair)

    if len(outputs) != 2:
        raise StageTensorError(f"{len(outputs)} stage outputs; a plan has exactly 2 stages.")
    first, second = outputs
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            raise StageTensorError(
                f"stage 0 returned {list(first)} and stage 1 {list(second)}; they must agree."
            )
        return {name: merged(name, None, (first[name], second[name])) for name in first}
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        if type(first) is not type(second) or len(first) != len(second):
            raise StageTensorError(
                f"stage 0 returned {len(first)} outputs and stage 1 {len(second)} "
                f"({type(first).__name__}, {type(second).__name__}); they must agree."
            )
        pairs = enumerate(zip(first, second, strict=True))
        all_merged = [merged(f"output {i}", _UNNAMED, pair) for i, pair in pairs]
        # A named tuple takes its fields one by one.
        return type(first)(*all_merged) if hasattr(first, "_fields") else type(first)(all_merged)
    return merged("output", _UNNAMED, (first, second))
