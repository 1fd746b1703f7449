"""Operators that compute and communicate: products summed over ranks; MoE dispatch and combine.

The latter are in ``communication_v1`` and ``communication_v2``.
"""

from __future__ import annotations

import torch

from afd_testkit.npu.groups import group_named
from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops import communication_v1, communication_v2
from afd_testkit.npu.ops.arguments import HALVES, emulated_only, limit_dtype, limit_layout, require
from afd_testkit.npu.ops.exchange import group_of, summed

__all__ = [
    "communication_v1",
    "communication_v2",
    "npu_mm_all_reduce_base",
    "npu_mm_reduce_scatter_base",
]

_DOCS = "torch_npu 2.10.0 operator documentation and shape functions"


def _check_factors(
    name: str, x1: torch.Tensor, x2: torch.Tensor, bias: torch.Tensor | None
) -> None:
    limit_dtype(name, "the left factor", x1, HALVES)
    limit_dtype(name, "x2", x2, (x1.dtype,))
    require(
        name,
        x2.dim() == 2 and x1.shape[-1] == x2.shape[0],
        f"the factors have shapes {list(x1.shape)} and {list(x2.shape)}; they must be [..., k] "
        "and [k, n]",
    )
    if bias is not None:
        limit_dtype(name, "bias", bias, (x1.dtype,))
        require(
            name,
            list(bias.shape) == [x2.shape[1]],
            f"bias has shape {list(bias.shape)}; it must be [{x2.shape[1]}]",
        )


@operator(
    "torch_npu.npu_mm_all_reduce_base",
    "npu_mm_all_reduce_base(Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum',"
    " Tensor? bias=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None,"
    " Tensor? x3=None, Tensor? dequant_scale=None, Tensor? pertoken_scale=None,"
    " Tensor? comm_quant_scale_1=None, Tensor? comm_quant_scale_2=None,"
    " int antiquant_group_size=0, int comm_turn=0, int[]? group_sizes=None, int? y_dtype=None,"
    " int? x1_dtype=None, int? x2_dtype=None, int? dequant_scale_dtype=None,"
    " int? pertoken_scale_dtype=None, int comm_quant_mode=0) -> Tensor",
    source=_DOCS,
)
def npu_mm_all_reduce_base(
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    x3: torch.Tensor | None = None,
    dequant_scale: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    comm_quant_scale_1: torch.Tensor | None = None,
    comm_quant_scale_2: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
    group_sizes: list[int] | None = None,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    dequant_scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    comm_quant_mode: int = 0,
) -> torch.Tensor:
    """``x1 @ x2 + bias`` of every rank of the group ``hcom``, added up, on every rank.

    ``x1``: ``[m, k]`` or ``[b, s, k]``; ``x2``: ``[k, n]``; ``bias``: ``[n]``; all of one dtype,
    fp16 or bf16.  Products and their sum are fp32, rounded once.  Not emulated: everything
    quantized, and ``x3``.
    """
    name = "npu_mm_all_reduce_base"
    emulated_only(
        name,
        reduce_op=(reduce_op, ("sum",)),
        antiquant_scale=(antiquant_scale, (None,)),
        antiquant_offset=(antiquant_offset, (None,)),
        x3=(x3, (None,)),
        dequant_scale=(dequant_scale, (None,)),
        pertoken_scale=(pertoken_scale, (None,)),
        comm_quant_scale_1=(comm_quant_scale_1, (None,)),
        comm_quant_scale_2=(comm_quant_scale_2, (None,)),
        antiquant_group_size=(antiquant_group_size, (0,)),
        comm_turn=(comm_turn, (0,)),
        group_sizes=(group_sizes, (None,)),
        y_dtype=(y_dtype, (None,)),
        x1_dtype=(x1_dtype, (None,)),
        x2_dtype=(x2_dtype, (None,)),
        dequant_scale_dtype=(dequant_scale_dtype, (None,)),
        pertoken_scale_dtype=(pertoken_scale_dtype, (None,)),
        comm_quant_mode=(comm_quant_mode, (0,)),
    )
    _check_factors(name, x1, x2, bias)
    limit_layout(name, x1.dim() in (2, 3), f"x1 has {x1.dim()} axes; the kernel takes 2 or 3")
    limit_layout(
        name,
        x1.numel() > 0 and x2.numel() > 0,
        f"x1 has shape {list(x1.shape)} and x2 {list(x2.shape)}; the kernel takes no empty tensor",
    )
    product = x1.float() @ x2.float()
    if bias is not None:
        product = product + bias.float()
    return summed(product, group_named(hcom)).to(x1.dtype)


@operator(
    "torch_npu.npu_mm_reduce_scatter_base",
    "npu_mm_reduce_scatter_base(Tensor input, Tensor x2, str hcom, int world_size, *,"
    " str reduce_op='sum', Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None,"
    " int comm_turn=0, ScalarType? output_dtype=None, str? comm_mode=None) -> Tensor",
    source=_DOCS,
)
def npu_mm_reduce_scatter_base(
    input: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> torch.Tensor:
    """``input @ x2`` of every rank of the group ``hcom``, added up; block r of the rows on rank r.

    ``input``: ``[m, k]``, m a multiple of ``world_size``; ``x2``: ``[k, n]``; fp16 or bf16.
    Returns ``[m / world_size, n]``, rounded once from fp32.  ``comm_mode`` (``ai_cpu`` or ``aiv``)
    is the way and not the result, but ``ai_cpu`` limits k to 256 … 65534.  Not emulated: ``bias``
    (the kernel takes none but zeros), quantization, ``output_dtype``.
    """
    name = "npu_mm_reduce_scatter_base"
    emulated_only(
        name,
        reduce_op=(reduce_op, ("sum",)),
        bias=(bias, (None,)),
        x1_scale=(x1_scale, (None,)),
        x2_scale=(x2_scale, (None,)),
        comm_turn=(comm_turn, (0,)),
        output_dtype=(output_dtype, (None,)),
        comm_mode=(comm_mode, (None, "ai_cpu", "aiv")),
    )
    _check_factors(name, input, x2, None)
    limit_layout(name, input.dim() == 2, f"input has {input.dim()} axes; the kernel takes 2")
    limit_layout(
        name, world_size in (2, 4, 8, 16), f"{world_size} ranks; the kernel takes 2, 4, 8 or 16"
    )
    depth = input.shape[-1]
    limit_layout(
        name,
        comm_mode == "aiv" or 256 <= depth < 65535,
        f"k is {depth}; without comm_mode 'aiv' the kernel takes 256 to 65534",
    )
    rows = input.shape[0]
    require(
        name,
        rows % world_size == 0,
        f"{rows} rows do not divide among {world_size} ranks; pad",
    )
    limit_layout(
        name,
        input.is_contiguous(),
        "input is transposed; the kernel takes it contiguous, call contiguous() first",
    )
    group = group_of(name, hcom, world_size, None)
    total = summed(input.float() @ x2.float(), group)
    return total.chunk(world_size)[group.rank()].to(input.dtype)
