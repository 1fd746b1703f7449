"""Sorting rows by expert, and bringing the experts' results back to the rows they came from.

A pair (row, j) is one row with the j-th of its K experts; pairs are numbered ``row * K + j``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import (
    FLOATS,
    emulated_only,
    limit_dtype,
    limit_layout,
    require,
    require_indices,
    require_shape,
    undefined,
)

_DOCS = "torch_npu 2.10.0 operator documentation and shape functions"
_GATHER, _SCATTER = 0, 1
_CUMSUM, _COUNT, _KEY_VALUE = 0, 1, 2
_INTEGERS = (torch.int32, torch.int64)


def _expert_tokens(counts: torch.Tensor, first: int, kind: int, expert_num: int) -> torch.Tensor:
    """Rows of each active expert (int64), as counts, cumulated, or as (expert, count) pairs."""
    if kind == _COUNT:
        return counts
    if kind == _CUMSUM:
        return counts.cumsum(0)
    pairs = torch.zeros((expert_num, 2), dtype=torch.int64)
    used = counts.nonzero().flatten()
    pairs[: used.numel(), 0] = used + first
    pairs[: used.numel(), 1] = counts[used]
    return pairs


def _init_routing(
    name: str,
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    scale: torch.Tensor | None,
    active_num: int,
    expert_num: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    active_expert_range: Sequence[int],
    row_idx_type: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    limit_dtype(name, "x", x, (*FLOATS, torch.int8))
    limit_dtype(name, "expert_idx", expert_idx, (torch.int32,))
    require(
        name,
        x.dim() == expert_idx.dim() == 2 and x.shape[0] == expert_idx.shape[0],
        f"x has shape {list(x.shape)} and expert_idx {list(expert_idx.shape)}; they must be "
        "[rows, hidden] and [rows, K]",
    )
    first, end = active_expert_range or (0, expert_num)
    require(
        name,
        0 <= first < end <= expert_num,
        f"active_expert_range is [{first}, {end}]; it must increase within 0 and expert_num, "
        f"{expert_num}",
    )
    # Inactive experts are experts too: their rows are left to other ranks, not lost.
    require_indices(name, "expert_idx", expert_idx, expert_num, "experts")
    top_k, pairs = expert_idx.shape[1], expert_idx.numel()
    flat = expert_idx.flatten().long()
    active = (flat >= first) & (flat < end)
    order = torch.sort(torch.where(active, flat, expert_num), stable=True).indices
    order = order[: int(active.sum())]
    written = order if active_num <= 0 else order[:active_num]
    rows = pairs if active_num <= 0 else min(pairs, active_num)

    expanded = undefined((rows, x.shape[1]), x.dtype)
    expanded[: written.numel()] = x[written // top_k]
    expanded_scale = undefined((rows,), torch.float32)
    if scale is not None:
        limit_dtype(name, "scale", scale, (torch.float32,))
        require_shape(name, "scale", scale, x.shape[:1])
        expanded_scale[: written.numel()] = scale[written // top_k]

    if row_idx_type == _GATHER:
        row_idx = torch.full((pairs,), -1, dtype=torch.int32)
        row_idx[order] = torch.arange(order.numel(), dtype=torch.int32)
    else:
        row_idx = undefined((pairs,), torch.int32)
        row_idx[: order.numel()] = order.to(torch.int32)

    counts = torch.bincount(flat[active] - first, minlength=end - first)
    tokens = _expert_tokens(counts, first, expert_tokens_num_type, expert_num)
    if not expert_tokens_num_flag:
        tokens = undefined(tokens.shape, torch.int64)
    return expanded, row_idx, tokens, expanded_scale


@operator(
    "_C_ascend.npu_moe_init_routing_custom",
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None,"
    " Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1,"
    " int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False,"
    " int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    source="vllm-ascend 0.23.0 csrc/moe/moe_init_routing_custom",
)
def npu_moe_init_routing_custom(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy each row once for each of its active experts, sorted by expert, then by pair.

    ``x``: ``[R, H]``; ``expert_idx``: ``[R, K]`` int32; active experts are those in
    ``active_expert_range`` ``[first, end)``, by default all ``expert_num``.  Returns

    - the copies ``[R * K, H]`` (``active_num`` > 0: at most so many); rows after the active pairs
      are undefined;
    - int32 ``[R * K]``: ``row_idx_type`` 0, for each pair the copy that it went to, -1 if its
      expert is not active; 1, for each copy the pair it came from, undefined after the last;
    - int64 rows for each active expert: ``expert_tokens_num_type`` 0 cumulated, 1 counts (both
      ``[end - first]``), 2 pairs (expert, count) of the experts that have rows, ended by zeros,
      ``[expert_num, 2]``; undefined unless ``expert_tokens_num_flag``;
    - fp32 ``[R * K]``: ``scale`` ``[R]`` copied along, undefined without it.

    ``expert_capacity`` has a meaning only for ``drop_pad_mode`` 1.  Not emulated: that mode,
    ``quant_mode`` other than -1, ``offset``.
    """
    name = "_C_ascend.npu_moe_init_routing_custom"
    emulated_only(
        name,
        offset=(offset, (None,)),
        drop_pad_mode=(drop_pad_mode, (0,)),
        quant_mode=(quant_mode, (-1,)),
        expert_tokens_num_type=(expert_tokens_num_type, (_CUMSUM, _COUNT, _KEY_VALUE)),
        row_idx_type=(row_idx_type, (_GATHER, _SCATTER)),
    )
    return _init_routing(
        name,
        x,
        expert_idx,
        scale,
        active_num,
        expert_num,
        expert_tokens_num_type,
        expert_tokens_num_flag,
        active_expert_range,
        row_idx_type,
    )


@operator(
    "torch_npu.npu_moe_init_routing_v2",
    "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None,"
    " Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1,"
    " int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False,"
    " int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    source=_DOCS,
)
def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`npu_moe_init_routing_custom`, within narrower limits.

    ``active_num`` must be ``R * K`` and the numbers of rows must be asked for, as counts or as
    pairs.  Not emulated besides: ``x_dtype``.
    """
    name = "npu_moe_init_routing_v2"
    emulated_only(
        name,
        offset=(offset, (None,)),
        drop_pad_mode=(drop_pad_mode, (0,)),
        quant_mode=(quant_mode, (-1,)),
        x_dtype=(x_dtype, (None,)),
        expert_tokens_num_type=(expert_tokens_num_type, (_CUMSUM, _COUNT, _KEY_VALUE)),
        row_idx_type=(row_idx_type, (_GATHER, _SCATTER)),
    )
    limit_layout(
        name,
        active_num == expert_idx.numel(),
        f"active_num is {active_num}; the kernel takes rows * K, {expert_idx.numel()}",
    )
    limit_layout(
        name,
        expert_tokens_num_type != _CUMSUM and expert_tokens_num_flag,
        f"expert_tokens_num_type is {expert_tokens_num_type} and expert_tokens_num_flag "
        f"{expert_tokens_num_flag}; the kernel takes 1 or 2, and True",
    )
    return _init_routing(
        name,
        x,
        expert_idx,
        scale,
        active_num,
        expert_num,
        expert_tokens_num_type,
        expert_tokens_num_flag,
        active_expert_range,
        row_idx_type,
    )


@operator(
    "torch_npu.npu_moe_token_permute",
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None,"
    " bool padded_mode=False) -> (Tensor, Tensor)",
    source=_DOCS,
)
def npu_moe_token_permute(
    tokens: torch.Tensor,
    indices: torch.Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy each row once for each of its experts, sorted by expert, then by pair.

    ``tokens``: ``[R, H]``; ``indices``: ``[R, K]`` or ``[R]``, int32 or int64.  Returns the copies
    and int32 ``[R * K]``: for each pair the copy that it went to.  ``num_out_tokens`` > 0 keeps
    that many copies, < 0 drops that many, 0 or None keeps all.  Not emulated: ``padded_mode``.
    """
    name = "npu_moe_token_permute"
    emulated_only(name, padded_mode=(padded_mode, (False,)))
    limit_dtype(name, "tokens", tokens, FLOATS)
    limit_dtype(name, "indices", indices, _INTEGERS)
    require(
        name,
        tokens.dim() == 2 and indices.dim() in (1, 2) and indices.shape[0] == tokens.shape[0],
        f"tokens has shape {list(tokens.shape)} and indices {list(indices.shape)}; they must be "
        "[rows, hidden] and [rows, K] or [rows]",
    )
    require(
        name,
        bool((indices >= 0).all()),
        f"indices holds {indices.flatten().tolist()[:16]}; an expert has a number from 0 on",
    )
    top_k = indices.shape[1] if indices.dim() == 2 else 1
    limit_layout(name, top_k <= 512, f"indices has {top_k} columns; the kernel takes 512")
    order = torch.sort(indices.flatten(), stable=True).indices
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel())
    kept = num_out_tokens or 0
    copies = order[:kept] if kept else order
    return tokens[copies // top_k], position.to(torch.int32)


@operator(
    "torch_npu.npu_moe_token_unpermute",
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices,"
    " Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
    source=_DOCS,
)
def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Gather each row's copies, weigh them by ``probs``, and add them.

    ``permuted_tokens``: ``[copies, H]``; ``sorted_indices``: ``[R * K]``, for each pair its copy;
    ``probs``: ``[R, K]``, without it K is 1.  Returns ``[R, H]`` in the dtype of
    ``permuted_tokens``, added in fp32.  ``restore_shape`` has a meaning only in ``padded_mode``,
    which is not emulated.
    """
    name = "npu_moe_token_unpermute"
    emulated_only(name, padded_mode=(padded_mode, (False,)))
    limit_dtype(name, "permuted_tokens", permuted_tokens, FLOATS)
    limit_dtype(name, "sorted_indices", sorted_indices, _INTEGERS)
    require(
        name,
        permuted_tokens.dim() == 2 and sorted_indices.dim() == 1,
        f"permuted_tokens has shape {list(permuted_tokens.shape)} and sorted_indices "
        f"{list(sorted_indices.shape)}; they must be [copies, hidden] and [rows * K]",
    )
    index = sorted_indices.long()
    copies = permuted_tokens.shape[0]
    require_indices(name, "sorted_indices", index, copies, "rows of permuted_tokens")
    gathered = permuted_tokens[index].float()
    if probs is None:
        return gathered.to(permuted_tokens.dtype)
    limit_dtype(name, "probs", probs, FLOATS)
    require(
        name,
        probs.dim() == 2 and probs.numel() == index.numel(),
        f"probs has shape {list(probs.shape)} for {index.numel()} sorted_indices; it must be "
        "[rows, K] with as many elements",
    )
    weighted = gathered.view(*probs.shape, permuted_tokens.shape[1]) * probs.float().unsqueeze(-1)
    return weighted.sum(dim=1).to(permuted_tokens.dtype)
