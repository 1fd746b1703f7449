"""Matrix products, tensor formats, sampling filters and the vocabulary mask.

Products are accumulated in float32 and rounded once.  The emulated device has one tensor format:
a cast to FRACTAL_NZ keeps the values and the shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from afd_testkit.npu.limits import limit
from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import (
    FLOATS,
    HALVES,
    emulated_only,
    limit_dtype,
    limit_layout,
    require,
    require_shape,
)

_DOCS = "torch_npu 2.10.0 operator documentation and shape functions"
_ATB = "torch_npu 2.10.0 libop_plugin_atb schemas; vllm-ascend 0.23.0 worker/worker.py"
_BINDING = "vllm-ascend 0.23.0 csrc/torch_binding.cpp"

# acl_format numbers: NCHW, ND, FRACTAL_NZ.
FORMATS = (0, 2, 29)


@operator(
    "torch_npu.npu_format_cast",
    "npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None,"
    " int? input_dtype=None) -> Tensor",
    source=_DOCS,
)
def npu_format_cast(
    input: torch.Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """A tensor of the same values, shape and strides that shares no storage with ``input``."""
    emulated_only(
        "npu_format_cast",
        acl_format=(int(acl_format), FORMATS),
        customize_dtype=(customize_dtype, (None,)),
        input_dtype=(input_dtype, (None,)),
    )
    return input.detach().clone()


@operator(
    "torch_npu._npu_matmul_add_fp32",
    "_npu_matmul_add_fp32(Tensor x, Tensor weight, Tensor(a!) C) -> ()",
    source=_ATB,
)
def npu_matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, C: torch.Tensor) -> None:  # noqa: N803
    """``C += xᵀ @ weight`` in place, accumulated in fp32.

    ``x``: ``[T, K]``, ``weight``: ``[T, N]``, both fp16 or bf16; ``C``: ``[K, N]``, fp32.  It is
    the gradient product of a linear layer; vLLM-Ascend calls it once, to warm up.
    """
    name = "_npu_matmul_add_fp32"
    limit_dtype(name, "x", x, HALVES)
    limit_dtype(name, "weight", weight, (x.dtype,))
    limit_dtype(name, "C", C, (torch.float32,))
    require(
        name,
        x.dim() == weight.dim() == 2 and x.shape[0] == weight.shape[0],
        f"x has shape {list(x.shape)} and weight {list(weight.shape)}; they must be [T, K] and "
        "[T, N]",
    )
    require_shape(name, "C", C, (x.shape[1], weight.shape[1]))
    C.add_(x.float().t() @ weight.float())


@operator(
    "torch_npu.npu_transpose_batchmatmul",
    "npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None,"
    " Tensor? scale=None, int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None,"
    " int? batch_split_factor=1) -> Tensor",
    source=f"{_DOCS}; op-plugin operator documentation",
)
def npu_transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """Batched product with the axes of both factors and of the result permuted.

    ``perm_x1`` brings ``input`` to ``[B, M, K]`` (default as given), ``perm_x2`` brings ``weight``
    to ``[B, K, N]`` (default as given), and the result is ``[M, B, N]``: ``perm_y`` has one value,
    (1, 0, 2).  K and N are multiples of 128, and K * B is below 65536 where ``perm_x1`` permutes.
    Not emulated: ``bias`` (the kernel has none either), ``scale`` (quantized), and
    ``batch_split_factor`` other than 1.
    """
    name = "npu_transpose_batchmatmul"
    orders = [tuple(order or default) for order, default in _permutations(perm_x1, perm_x2, perm_y)]
    emulated_only(
        name,
        bias=(bias, (None,)),
        scale=(scale, (None,)),
        perm_x1=(orders[0], ((0, 1, 2), (1, 0, 2))),
        perm_x2=(orders[1], ((0, 1, 2), (0, 2, 1))),
        perm_y=(orders[2], ((1, 0, 2),)),
        batch_split_factor=(batch_split_factor, (1, None)),
    )
    limit_dtype(name, "input", input, FLOATS)
    limit_dtype(name, "weight", weight, (input.dtype,))
    require(
        name,
        input.dim() == weight.dim() == 3,
        f"input has {input.dim()} axes and weight {weight.dim()}; both need 3",
    )
    left, right = input.permute(orders[0]).float(), weight.permute(orders[1]).float()
    batch, depth, columns = right.shape
    require(
        name,
        (left.shape[0], left.shape[2]) == (batch, depth),
        f"permuted, input has shape {list(left.shape)} and weight {list(right.shape)}; they must "
        "be [B, M, K] and [B, K, N]",
    )
    limit(
        name,
        "alignment",
        depth % 128 == 0 and columns % 128 == 0,
        f"K is {depth} and N {columns}; the kernel takes multiples of 128",
    )
    widest = depth * batch if orders[0] == (1, 0, 2) else depth
    limit_layout(
        name,
        max(widest, columns) < 65536,
        f"K is {depth}, B {batch} and N {columns}; a row of input or weight must stay below 65536",
    )
    return torch.bmm(left, right).transpose(0, 1).contiguous().to(input.dtype)


def _permutations(
    perm_x1: Sequence[int] | None, perm_x2: Sequence[int] | None, perm_y: Sequence[int] | None
) -> list[tuple[Sequence[int] | None, Sequence[int]]]:
    return [(perm_x1, (0, 1, 2)), (perm_x2, (0, 1, 2)), (perm_y, (1, 0, 2))]


@operator(
    "_C_ascend.batch_matmul_transpose",
    "batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor tensor_c,"
    " str? format_mode=None, str? quant_mode=None) -> ()",
    source="vllm-ascend 0.23.0 csrc/batch_matmul_transpose",
)
def batch_matmul_transpose(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    tensor_c: torch.Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """``tensor_c[:, b] = tensor_a[:, b] @ tensor_b[b]`` for each b, in place.

    ``tensor_a``: ``[M, B, K]`` with M ≤ 1024, ``tensor_b``: ``[B, K, N]``, ``tensor_c``:
    ``[M, B, N]`` (or the same memory as ``[M, B * N]``), all of one dtype, fp16 or bf16.  The
    schema declares no argument as written; ``tensor_c`` is.
    """
    name = "_C_ascend.batch_matmul_transpose"
    emulated_only(
        name,
        format_mode=(format_mode, (None, "ND")),
        quant_mode=(quant_mode, (None, "per_channel_symm")),
    )
    limit_dtype(name, "tensor_a", tensor_a, HALVES)
    for label, tensor in (("tensor_b", tensor_b), ("tensor_c", tensor_c)):
        limit_dtype(name, label, tensor, (tensor_a.dtype,))
    require(
        name,
        tensor_a.dim() == tensor_b.dim() == 3 and tensor_a.shape[1:] == tensor_b.shape[:2],
        f"tensor_a has shape {list(tensor_a.shape)} and tensor_b {list(tensor_b.shape)}; they must "
        "be [M, B, K] and [B, K, N]",
    )
    rows, (batch, _, columns) = tensor_a.shape[0], tensor_b.shape
    if tensor_c.dim() != 2:
        require_shape(name, "tensor_c", tensor_c, (rows, batch, columns))
    else:
        require_shape(name, "tensor_c", tensor_c, (rows, batch * columns))
    limit_layout(
        name, 1 <= rows <= 1024, f"tensor_a has {rows} rows; the kernel takes 1 to 1024 of them"
    )
    product = torch.bmm(tensor_a.transpose(0, 1).float(), tensor_b.float()).transpose(0, 1)
    tensor_c.copy_(product.reshape(tensor_c.shape))


@operator(
    "torch_npu.npu_top_k_top_p",
    "npu_top_k_top_p(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor",
    source=_DOCS,
)
def npu_top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """``logits`` with everything outside of top-k, then of top-p, set to -inf.

    ``logits``: ``[B, V]``; ``k``: int32 ``[B]``, at least 1, keeps every logit that is not below
    the k-th largest (ties stay); ``p``: ``[B]`` of the dtype of ``logits``, drops from the
    smallest on while the cumulated probability is at most 1 - p, but never the largest.
    """
    name = "npu_top_k_top_p"
    limit_dtype(name, "logits", logits, FLOATS)
    require(name, not (p is None and k is None), "neither p nor k is given; give one of them")
    require(
        name,
        logits.dim() == 2,
        f"logits has shape {list(logits.shape)}; it must be [rows, vocabulary]",
    )
    ordered, order = torch.sort(logits.float(), dim=-1, stable=True)
    if k is not None:
        limit_dtype(name, "k", k, (torch.int32,))
        require_shape(name, "k", k, logits.shape[:1])
        ordered = _keep_top_k(name, ordered, k)
    if p is not None:
        limit_dtype(name, "p", p, (logits.dtype,))
        require_shape(name, "p", p, logits.shape[:1])
        cumulated = ordered.softmax(dim=-1).cumsum(dim=-1)
        drop = cumulated <= 1 - p.float().unsqueeze(1)
        drop[:, -1] = False
        ordered = ordered.masked_fill(drop, float("-inf"))
    return torch.empty_like(ordered).scatter_(-1, order, ordered).to(logits.dtype)


def _keep_top_k(name: str, ordered: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    width = ordered.shape[1]
    most = min(width, 1024)
    limit_layout(
        name,
        bool(((k >= 1) & (k <= most)).all()),
        f"k is {k.tolist()[:8]}; the kernel takes 1 to {most} for {width} logits",
    )
    kept = k.long().clamp(1, width)
    cutoff = ordered.gather(1, (width - kept).unsqueeze(1))
    return ordered.masked_fill(ordered < cutoff, float("-inf"))


@operator(
    "torch_npu.npu_prefetch",
    "npu_prefetch(Tensor input, Tensor? dependency, int max_size, int offset=0) -> ()",
    source=_DOCS,
)
def npu_prefetch(
    input: torch.Tensor, dependency: torch.Tensor | None, max_size: int, offset: int = 0
) -> None:
    """Nothing: a prefetch moves ``input`` into a cache, which no result can show.

    ``max_size`` bytes (at least 1) from byte ``offset`` (at least 0) of ``input``; ``dependency``
    orders it in a graph.
    """
    name = "npu_prefetch"
    size = input.numel() * input.element_size()
    limit_layout(name, max_size > 0, f"max_size is {max_size}; it must be at least 1")
    limit_layout(
        name, 0 <= offset <= size, f"offset is {offset}; it must lie in input's {size} bytes"
    )


@operator(
    "_C_ascend.get_masked_input_and_mask",
    "get_masked_input_and_mask(Tensor input, int org_vocab_start_index, int org_vocab_end_index,"
    " int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index)"
    " -> (Tensor masked_input, Tensor mask)",
    source=_BINDING,
)
def get_masked_input_and_mask(
    input: torch.Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids as rows of this rank's shard of the vocabulary, and which of them it lacks.

    ``input``: integers of any shape.  A token in ``[org start, org end)`` becomes ``token - org
    start``; one in ``[added start, added end)`` follows after the original rows and their padding;
    any other becomes 0 and is True in the bool mask.
    """
    edges = (
        0,
        org_vocab_start_index,
        org_vocab_end_index,
        added_vocab_start_index,
        added_vocab_end_index,
    )
    require(
        "_C_ascend.get_masked_input_and_mask",
        list(edges) == sorted(edges) and num_org_vocab_padding >= 0,
        f"the vocabulary edges {list(edges[1:])} must not decrease or be negative, nor the "
        f"padding of {num_org_vocab_padding}",
    )
    limit_dtype("_C_ascend.get_masked_input_and_mask", "input", input, (torch.int32, torch.int64))
    original = (input >= org_vocab_start_index) & (input < org_vocab_end_index)
    added = (input >= added_vocab_start_index) & (input < added_vocab_end_index)
    rows = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    masked = torch.zeros_like(input)
    masked = torch.where(original, input - org_vocab_start_index, masked)
    masked = torch.where(added, input - added_vocab_start_index + rows, masked)
    return masked, ~(original | added)
