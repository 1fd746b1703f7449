"""Choosing experts: scores from router logits, then the k best.

Of equal scores the lower expert comes first; so does the lower group.
"""

from __future__ import annotations

import torch

from afd_testkit.npu.limits import limit
from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import (
    FLOATS,
    emulated_only,
    limit_dtype,
    limit_layout,
    require,
    undefined,
)

_DOCS = "torch_npu 2.10.0 operator documentation and shape functions"
_SOFTMAX, _SIGMOID = 0, 1
_GROUP_MAX, _GROUP_TOP2 = 0, 1
MAX_EXPERTS = 2048


def _best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the ``k`` largest along the last axis, descending, lower index first."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


def _only_best_groups(
    scores: torch.Tensor, k_group: int, group_count: int, group_select_mode: int
) -> torch.Tensor:
    """``scores`` ``[T, E]`` with -inf for every expert outside of the ``k_group`` best groups."""
    grouped = scores.unflatten(-1, (group_count, -1))
    if group_select_mode == _GROUP_TOP2:
        of_group = grouped.sort(dim=-1, descending=True).values[..., :2].sum(dim=-1)
    else:
        of_group = grouped.amax(dim=-1)
    keep = torch.zeros_like(of_group, dtype=torch.bool)
    keep.scatter_(-1, _best(of_group, k_group), True)
    return grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).flatten(-2)


def _check_gating(
    name: str,
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
) -> None:
    limit_dtype(name, "x", x, FLOATS)
    limit_layout(name, x.dim() == 2, f"x has {x.dim()} axes; the kernel takes 2")
    experts = x.shape[-1]
    if bias is not None:
        limit_dtype(name, "bias", bias, (x.dtype,))
        require(
            name,
            list(bias.shape) == [experts],
            f"bias has shape {list(bias.shape)}; it must be [{experts}], one for each expert",
        )
    limit_layout(
        name, experts <= MAX_EXPERTS, f"x has {experts} experts; the kernel takes {MAX_EXPERTS}"
    )
    require(
        name,
        group_count >= 1 and experts % group_count == 0,
        f"{experts} experts do not divide into {group_count} groups",
    )
    in_group = experts // group_count
    require(
        name,
        1 <= k_group <= group_count and 1 <= k <= k_group * in_group,
        f"k={k} experts of k_group={k_group} groups cannot be chosen from {group_count} groups of "
        f"{in_group}",
    )
    limit_layout(
        name,
        group_select_mode == _GROUP_MAX or in_group >= 2,
        f"group_select_mode {group_select_mode} adds a group's two best, groups have {in_group}",
    )
    # Without a choice among groups the kernel takes another path, which needs no padding.
    if group_count not in (1, experts) and k_group != group_count:
        padded = group_count * (-(-in_group // 32) * 32)
        limit(
            name,
            "alignment",
            padded <= MAX_EXPERTS,
            f"{group_count} groups of {in_group} experts, padded to 32 each, are {padded}; the "
            f"kernel takes {MAX_EXPERTS}",
        )


def _gating(
    name: str,
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    emulated_only(
        name,
        group_select_mode=(group_select_mode, (_GROUP_MAX, _GROUP_TOP2)),
        renorm=(renorm, (0, 1)),
        norm_type=(norm_type, (_SOFTMAX, _SIGMOID)),
    )
    _check_gating(name, x, k, bias, k_group, group_count, group_select_mode)
    logits = x.float()
    scores = logits.softmax(dim=-1) if norm_type == _SOFTMAX else logits.sigmoid()
    chosen_by = scores if bias is None else scores + bias.float()
    if group_count > 1:
        chosen_by = _only_best_groups(chosen_by, k_group, group_count, group_select_mode)
    experts = _best(chosen_by, k)
    weights = scores.gather(-1, experts)
    if norm_type == _SIGMOID or renorm == 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    out = scores if out_flag else undefined(x.shape, torch.float32)
    return weights, experts.to(torch.int32), out


@operator(
    "_C_ascend.moe_gating_top_k",
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode,"
    " int renorm, int norm_type, bool out_flag, float routed_scaling_factor, float eps,"
    " Tensor? bias_opt=None) -> (Tensor y, Tensor expert_idx, Tensor out)",
    source="vllm-ascend 0.23.0 csrc/moe/moe_gating_top_k",
)
def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k best experts of each row and their weights.

    ``x``: router logits ``[T, E]``, fp16, bf16 or fp32.  Scores are the softmax (``norm_type`` 0)
    or the sigmoid (1).  Experts are chosen by score plus ``bias_opt`` ``[E]``, out of the
    ``k_group`` best of ``group_count`` equal groups, where a group counts by its best expert
    (``group_select_mode`` 0) or by the sum of its two best (1).  Weights are the scores without
    the bias, divided by their sum plus ``eps`` (always for the sigmoid, for the softmax if
    ``renorm`` is 1), times ``routed_scaling_factor``.  Returns weights ``[T, k]`` in the dtype of
    ``x``, experts ``[T, k]`` int32, best first, and the scores ``[T, E]`` fp32, which are
    undefined unless ``out_flag``.
    """
    return _gating(
        "_C_ascend.moe_gating_top_k",
        x,
        k,
        bias=bias_opt,
        k_group=k_group,
        group_count=group_count,
        group_select_mode=group_select_mode,
        renorm=renorm,
        norm_type=norm_type,
        out_flag=out_flag,
        routed_scaling_factor=routed_scaling_factor,
        eps=eps,
    )


@operator(
    "torch_npu.npu_moe_gating_top_k",
    "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, int k_group=1,"
    " int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0,"
    " bool out_flag=False, float routed_scaling_factor=1.0, float eps=1e-20)"
    " -> (Tensor, Tensor, Tensor)",
    source=_DOCS,
)
def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`moe_gating_top_k`; ``renorm`` must be 0, a group has at least 3 experts."""
    name = "npu_moe_gating_top_k"
    limit_layout(name, renorm == 0, f"renorm is {renorm}; this kernel takes 0")
    in_group = x.shape[-1] // max(group_count, 1)
    limit_layout(name, in_group > 2, f"a group has {in_group} experts; the kernel needs 3 or more")
    return _gating(
        name,
        x,
        k,
        bias=bias,
        k_group=k_group,
        group_count=group_count,
        group_select_mode=group_select_mode,
        renorm=renorm,
        norm_type=norm_type,
        out_flag=out_flag,
        routed_scaling_factor=routed_scaling_factor,
        eps=eps,
    )


@operator(
    "torch_npu.npu_moe_gating_top_k_softmax",
    "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1)"
    " -> (Tensor, Tensor, Tensor)",
    source=_DOCS,
)
def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest of the softmax of each row.

    ``x``: ``[..., E]`` with two or three axes.  Returns the probabilities ``[..., k]`` in the
    dtype of ``x``, the experts ``[..., k]`` int32, and int32 row numbers ``[..., k]``: entry j of
    row i has ``j * rows + i``.  Not emulated: ``finished``.
    """
    name = "npu_moe_gating_top_k_softmax"
    emulated_only(name, finished=(finished, (None,)))
    limit_dtype(name, "x", x, FLOATS)
    limit_layout(name, x.dim() in (2, 3), f"x has {x.dim()} axes; the kernel takes 2 or 3")
    experts = x.shape[-1]
    require(name, 1 <= k <= experts, f"k is {k}; it must be 1 to {experts}, the experts")
    limit_layout(name, k <= 1024, f"k is {k}; the kernel takes 1024")
    scores = x.float().softmax(dim=-1)
    best = _best(scores, k)
    rows = scores.shape[:-1].numel()
    numbers = torch.arange(rows).unsqueeze(1) + rows * torch.arange(k).unsqueeze(0)
    return (
        scores.gather(-1, best).to(x.dtype),
        best.to(torch.int32),
        numbers.view(best.shape).to(torch.int32),
    )
