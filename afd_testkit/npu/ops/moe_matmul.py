"""The product of groups of rows with each group's own weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from afd_testkit.npu.errors import NotEmulated, describe_value
from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import (
    FLOATS,
    emulated_only,
    limit_dtype,
    limit_layout,
    require,
    require_shape,
    undefined,
)

_DOCS = "torch_npu 2.10.0 operator documentation and shape functions"
_NAME = "npu_grouped_matmul"
_EACH_ITS_OWN, _ROWS = -1, 0
_CUMSUM, _COUNT = 0, 1
# Numbers of torch.ScalarType, which is what a dtype becomes in an ``int?`` argument.
_DTYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}

GroupList: TypeAlias = torch.Tensor | Sequence[int]


def _output_dtype(given: int | torch.dtype | None, like: torch.dtype) -> torch.dtype:
    if given is None:
        return like
    dtype = given if isinstance(given, torch.dtype) else _DTYPES.get(given)
    if dtype not in FLOATS:
        raise NotEmulated(
            f"{_NAME}: output_dtype={given!r} has no reference on the emulated NPU; it takes None, "
            "torch.float16, torch.bfloat16 or torch.float32."
        )
    return dtype


def _sizes(group_list: GroupList, group_list_type: int) -> list[int]:
    """Rows of each group."""
    if isinstance(group_list, torch.Tensor):
        limit_dtype(_NAME, "group_list", group_list, (torch.int64,))
        values = [int(value) for value in group_list.tolist()]
    else:
        values = [int(value) for value in group_list]
    if group_list_type == _CUMSUM:
        values = [end - begin for begin, end in zip([0, *values[:-1]], values, strict=True)]
    content = "numbers that do not decrease" if group_list_type == _CUMSUM else "no negatives"
    require(
        _NAME,
        all(size >= 0 for size in values),
        f"group_list gives groups of {values} rows; with group_list_type {group_list_type} it "
        f"must hold {content}",
    )
    return values


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    require(
        _NAME,
        x.dim() >= 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[0],
        f"a group has x {list(x.shape)} and weight {list(weight.shape)}; they must be [..., K] and "
        "[K, N]",
    )
    if bias is not None:
        require_shape(_NAME, "the bias of a group", bias, weight.shape[1:])
    y = x.float() @ weight.float()
    return (y if bias is None else y + bias.float()).to(dtype)


def _per_group(
    label: str, tensors: Sequence[torch.Tensor], groups: int, axes: int
) -> list[torch.Tensor]:
    """``groups`` tensors of ``axes`` axes, from a list or from one tensor that stacks them."""
    stacked = len(tensors) == 1 and tensors[0].dim() == axes + 1
    each = list(tensors[0].unbind(0)) if stacked else list(tensors)
    require(
        _NAME,
        len(each) == groups and all(tensor.dim() == axes for tensor in each),
        f"{describe_value(list(tensors))} gives {label} for {len(each)} groups, there are "
        f"{groups}; it must be one tensor of {axes} axes a group, or one that stacks them",
    )
    return each


def _biases(bias: Sequence[torch.Tensor] | None, groups: int) -> Sequence[torch.Tensor | None]:
    """One bias ``[N]`` a group; none at all where none is given."""
    return _per_group("bias", bias, groups, 1) if bias else [None] * groups


@operator(
    "torch_npu.npu_grouped_matmul",
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None,"
    " Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None,"
    " Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor? group_list=None,"
    " Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None,"
    " Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None,"
    " int? group_list_type=0, int? act_type=0, int[]? tuning_config=None,"
    " int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None,"
    " int? per_token_scale_dtype=None) -> Tensor[]",
    source=_DOCS,
)
def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    scale: Sequence[torch.Tensor] | None = None,
    offset: Sequence[torch.Tensor] | None = None,
    antiquant_scale: Sequence[torch.Tensor] | None = None,
    antiquant_offset: Sequence[torch.Tensor] | None = None,
    per_token_scale: Sequence[torch.Tensor] | None = None,
    group_list: GroupList | None = None,
    activation_input: Sequence[torch.Tensor] | None = None,
    activation_quant_scale: Sequence[torch.Tensor] | None = None,
    activation_quant_offset: Sequence[torch.Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | torch.dtype | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[torch.Tensor]:
    """``y_g = x_g @ weight_g + bias_g`` for each group g.

    ``group_type`` 0 divides the rows: ``x`` is one ``[M, K]``, or one tensor a group; ``weight``
    one ``[G, K, N]`` or G times ``[K, N]``; ``group_list`` int64 ``[G]``, cumulated
    (``group_list_type`` 0) or counts (1).  The result is one ``[M, N]``: ``split_item`` must be 2
    or 3.  Rows after the last group are undefined: expert parallelism leaves some.

    ``group_type`` -1 pairs whole tensors: as many of ``x`` ``[..., K]`` as of ``weight``, no
    ``group_list``, ``split_item`` 0 or 1, one result each.

    ``bias``: one ``[N]`` a group or one ``[G, N]``; fp16 for fp16, else fp32.  ``output_dtype``:
    default that of ``x``.  ``tuning_config`` is about speed alone.  Not emulated: everything
    quantized, activations, ``group_type`` 2.
    """
    emulated_only(
        _NAME,
        scale=(scale, (None,)),
        offset=(offset, (None,)),
        antiquant_scale=(antiquant_scale, (None,)),
        antiquant_offset=(antiquant_offset, (None,)),
        per_token_scale=(per_token_scale, (None,)),
        activation_input=(activation_input, (None,)),
        activation_quant_scale=(activation_quant_scale, (None,)),
        activation_quant_offset=(activation_quant_offset, (None,)),
        split_item=(split_item, (0, 1, 2, 3)),
        group_type=(group_type, (_EACH_ITS_OWN, _ROWS)),
        group_list_type=(group_list_type, (_CUMSUM, _COUNT)),
        act_type=(act_type, (0, None)),
        x_dtype=(x_dtype, (None,)),
        weight_dtype=(weight_dtype, (None,)),
        scale_dtype=(scale_dtype, (None,)),
        per_token_scale_dtype=(per_token_scale_dtype, (None,)),
    )
    require(_NAME, len(x) > 0 and len(weight) > 0, "x or weight lists no tensor")
    dtype = x[0].dtype
    for label, tensors in (("x", x), ("weight", weight)):
        limit_layout(_NAME, len(tensors) <= 128, f"{label} lists {len(tensors)} tensors, limit 128")
        for tensor in tensors:
            limit_dtype(_NAME, label, tensor, FLOATS)
            limit_dtype(_NAME, label, tensor, (dtype,))
    for tensor in bias or ():
        wanted = torch.float16 if dtype == torch.float16 else torch.float32
        limit_dtype(_NAME, "bias", tensor, (wanted,))
    result = _output_dtype(output_dtype, dtype)
    if group_type == _EACH_ITS_OWN:
        return _pairwise(x, weight, bias, group_list, split_item, result)
    return _by_rows(x, weight, bias, group_list, int(group_list_type or 0), split_item, result)


def _pairwise(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor] | None,
    group_list: GroupList | None,
    split_item: int | None,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    require(
        _NAME,
        group_list is None and split_item in (0, 1) and len(x) == len(weight),
        f"group_type -1 pairs {len(x)} tensors of x with {len(weight)} of weight; it takes equally "
        f"many, no group_list, and split_item 0 or 1 (given {split_item})",
    )
    biases = _biases(bias, len(x))
    return [_product(*each, dtype) for each in zip(x, weight, biases, strict=True)]


def _by_rows(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor] | None,
    group_list: GroupList | None,
    group_list_type: int,
    split_item: int | None,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    require(_NAME, split_item in (2, 3), f"group_type 0 takes split_item 2 or 3, not {split_item}")
    require(_NAME, group_list is not None or len(x) > 1, "group_type 0 needs a group_list")
    require(
        _NAME,
        all(each.dim() == 2 and each.shape[1] == x[0].shape[-1] for each in x),
        f"x is {describe_value(list(x))}; with group_type 0 it is [M, K] or one [M, K] a group",
    )
    rows = x[0] if len(x) == 1 else torch.cat(list(x))
    own = [each.shape[0] for each in x]
    sizes = own if group_list is None else _sizes(group_list, group_list_type)
    require(
        _NAME,
        len(x) == 1 or own == sizes,
        f"x lists tensors of {own} rows and group_list gives groups of {sizes}; each tensor is one "
        "group, so that both must agree",
    )
    weights = _per_group("weight", weight, len(sizes), 2)
    limit_layout(_NAME, len(sizes) <= 1024, f"group_list has {len(sizes)} groups, limit 1024")
    require(
        _NAME,
        sum(sizes) <= rows.shape[0],
        f"group_list gives groups of {sizes} rows for {rows.shape[0]} rows of x; there must be no "
        "fewer",
    )
    width = weights[0].shape[1] if weights else 0
    require(
        _NAME,
        all(matrix.shape == (rows.shape[1], width) for matrix in weights),
        f"weight is {describe_value(list(weight))} for rows of {rows.shape[1]}; every group's must "
        f"be [{rows.shape[1]}, N] with one N",
    )
    y = undefined((rows.shape[0], width), dtype)
    biases = _biases(bias, len(sizes))
    begin = 0
    for size, matrix, extra in zip(sizes, weights, biases, strict=True):
        if size:
            y[begin : begin + size] = _product(rows[begin : begin + size], matrix, extra, dtype)
        begin += size
    return [y]
