"""The sum of the experts' results of each row, with their weights and biases."""

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
)

_DOCS = "torch_npu 2.10.0 operator documentation and shape functions"


def _check_finalize(
    name: str,
    rows: torch.Tensor,
    skips: dict[str, torch.Tensor | None],
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    dst: torch.Tensor,
    experts: torch.Tensor | None,
) -> None:
    """Refuse shapes, dtypes and indices that do not fit together."""
    limit_dtype(name, "expanded_src_to_dst_row", dst, (torch.int32,))
    require(
        name,
        rows.dim() == 2 and dst.dim() == 1,
        f"expanded_permuted_rows has shape {list(rows.shape)} and expanded_src_to_dst_row "
        f"{list(dst.shape)}; they must be [rows * K, hidden] and [rows * K]",
    )
    limit_layout(
        name,
        rows.shape[0] == dst.numel(),
        f"expanded_permuted_rows has {rows.shape[0]} rows for {dst.numel()} entries of "
        "expanded_src_to_dst_row; the kernel takes equally many",
    )
    require_indices(
        name, "expanded_src_to_dst_row", dst, rows.shape[0], "rows of expanded_permuted_rows"
    )
    shape: Sequence[int] = (dst.numel(), 1)
    if scales is not None:
        limit_dtype(name, "scales", scales, (rows.dtype,))
        require(
            name,
            scales.dim() == 2 and scales.shape[1] > 0 and scales.numel() == dst.numel(),
            f"scales has shape {list(scales.shape)} for {dst.numel()} entries of "
            "expanded_src_to_dst_row; it must be [rows, K] with as many elements",
        )
        shape = scales.shape
    for label, skip in skips.items():
        if skip is not None:
            limit_dtype(name, label, skip, (rows.dtype,))
            require_shape(name, label, skip, (shape[0], rows.shape[1]))
    if bias is None or experts is None:
        return
    limit_dtype(name, "bias", bias, (rows.dtype,))
    limit_dtype(name, "export_for_source_row", experts, (torch.int32,))
    require_shape(name, "bias", bias, (bias.shape[0] if bias.dim() else 0, rows.shape[1]))
    require_shape(name, "export_for_source_row", experts, shape)
    require_indices(name, "export_for_source_row", experts, bias.shape[0], "rows of bias")


@operator(
    "torch_npu.npu_moe_finalize_routing",
    "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2,"
    " Tensor? bias, Tensor? scales, Tensor expanded_src_to_dst_row,"
    " Tensor? export_for_source_row, int? drop_pad_mode=0) -> Tensor",
    source=_DOCS,
)
def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
) -> torch.Tensor:
    """``skip1 + skip2 + Σ_j scales[i, j] * (rows[dst[j * R + i]] + bias[expert[i, j]])``.

    ``expanded_permuted_rows``: ``[R * K, H]``; ``expanded_src_to_dst_row``: int32 ``[R * K]``,
    numbered column by column (``j * R + i``), unlike the other operators; ``scales``: ``[R, K]``,
    without it K is 1 and every scale 1; ``bias``: ``[E, H]`` with ``export_for_source_row``
    ``[R, K]`` int32, which has no meaning without it; ``skip1``, ``skip2``: ``[R, H]``.  Not
    emulated: ``drop_pad_mode``.
    """
    name = "npu_moe_finalize_routing"
    emulated_only(name, drop_pad_mode=(drop_pad_mode, (0, None)))
    limit_dtype(name, "expanded_permuted_rows", expanded_permuted_rows, FLOATS)
    limit_layout(
        name,
        skip1 is not None or skip2 is None,
        "skip2 is given without skip1; the kernel takes skip1 first",
    )
    require(
        name,
        bias is None or export_for_source_row is not None,
        "bias is given without export_for_source_row, which says whose bias each row gets",
    )
    _check_finalize(
        name,
        expanded_permuted_rows,
        {"skip1": skip1, "skip2": skip2},
        bias,
        scales,
        expanded_src_to_dst_row,
        export_for_source_row,
    )
    top_k = 1 if scales is None else scales.shape[1]
    index = expanded_src_to_dst_row.long().view(top_k, -1).t()
    values = expanded_permuted_rows[index].float()
    if bias is not None and export_for_source_row is not None:
        values = values + bias[export_for_source_row.long()].float()
    if scales is not None:
        values = values * scales.float().unsqueeze(-1)
    total = values.sum(dim=1)
    for skip in (skip1, skip2):
        if skip is not None:
            total = total + skip.float()
    return total.to(expanded_permuted_rows.dtype)
