"""Rotary position embedding.

Two ways to pair the elements of a head: ``half`` pairs element i with i + D/2, ``interleave``
pairs 2i with 2i + 1.  All compute in float32 and round once.
"""

from __future__ import annotations

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
    require_broadcast,
    require_indices,
    require_shape,
)

_DOCS = "torch_npu 2.10.0 operator documentation and shape functions"
_ATB = "torch_npu 2.10.0 libop_plugin_atb schemas; vllm-ascend 0.23.0 ops/rotary_embedding.py"


def _rotated_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotated_interleaved(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


_ROTATED = {"half": _rotated_half, "interleave": _rotated_interleaved}


def _check_in_place(
    name: str,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Refuse shapes, dtypes and positions that do not fit together."""
    limit_dtype(name, "query", query, FLOATS)
    for label, tensor in (("key", key), ("cos_sin_cache", cos_sin_cache)):
        limit_dtype(name, label, tensor, (query.dtype,))
    limit_dtype(name, "positions", positions, (torch.int32, torch.int64))
    require(
        name,
        cos_sin_cache.dim() == 2 and cos_sin_cache.shape[1] == head_size,
        f"cos_sin_cache has shape {list(cos_sin_cache.shape)}: {cos_sin_cache.shape[-1]} columns, "
        f"head_size is {head_size}; the kernel rotates whole heads, so pass the rotary part of "
        "each head alone",
    )
    require(name, head_size > 0 and head_size % 2 == 0, f"head_size is {head_size}; it is even")
    for label, tensor in (("query", query), ("key", key)):
        require(
            name,
            tensor.dim() == 2
            and tensor.shape[0] == positions.numel()
            and tensor.shape[1] % head_size == 0,
            f"{label} has shape {list(tensor.shape)} for {positions.numel()} positions; it must be "
            f"[positions, heads * {head_size}]",
        )
        limit_layout(
            name,
            tensor.is_contiguous(),
            f"{label} has strides {list(tensor.stride())}; the kernel takes it contiguous, call "
            "contiguous() first",
        )
    require_indices(name, "positions", positions, cos_sin_cache.shape[0], "rows of cos_sin_cache")


@operator(
    "torch_npu._npu_rotary_embedding",
    "_npu_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size,"
    " Tensor cos_sin_cache, bool is_neox_style) -> ()",
    source=_ATB,
)
def npu_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """Rotate every head of ``query`` and ``key`` in place.

    ``positions``: ``[T]``, integers; ``query``, ``key``: ``[T, heads * head_size]``, contiguous;
    ``cos_sin_cache``: ``[positions, head_size]``, the cosines of the D/2 frequencies, then their
    sines.  ``is_neox_style`` pairs i with i + D/2, otherwise 2i with 2i + 1.  Only whole heads
    are rotated: the cache must be as wide as a head.  All floating tensors have one dtype.
    """
    name = "_npu_rotary_embedding"
    _check_in_place(name, positions, query, key, head_size, cos_sin_cache)
    cos, sin = cos_sin_cache[positions.flatten()].float().chunk(2, dim=-1)
    for tensor in (query, key):
        heads = tensor.view(cos.shape[0], tensor.shape[1] // head_size, head_size)
        x = heads.float()
        if is_neox_style:
            table = (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
            rotated = _rotated_half(x)
        else:
            table = (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1))
            rotated = _rotated_interleaved(x)
        heads.copy_(x * table[0].unsqueeze(1) + rotated * table[1].unsqueeze(1))


@operator(
    "torch_npu.npu_interleave_rope",
    "npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    source="op-plugin operator documentation; vllm-ascend 0.23.0 attention/mla_v1.py",
)
def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (2i, 2i + 1) and return them as halves: first all 2i, then all 2i + 1.

    ``x``: ``[B, N, S, 64]``, fp16 or bf16; ``cos``, ``sin``: ``[B, 1, 1 or S, 64]``, where the
    frequencies are given twice, as for ``half``.  The result has the shape and dtype of ``x``.
    """
    name = "npu_interleave_rope"
    limit_dtype(name, "x", x, HALVES)
    for label, table in (("cos", cos), ("sin", sin)):
        limit_dtype(name, label, table, (x.dtype,))
        limit_layout(
            name,
            x.dim() == table.dim() == 4 and table.shape[1] == 1 and table.shape[0] == x.shape[0],
            f"x has shape {list(x.shape)} and {label} {list(table.shape)}; the kernel takes four "
            f"axes, the first of {label} as of x and the second of extent 1",
        )
        require_broadcast(name, label, table, "x", x)
    limit(
        name,
        "alignment",
        x.shape[-1] == 64,
        f"x has heads of {x.shape[-1]} elements; the kernel takes 64",
    )
    halves = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1).float()
    return (halves * cos.float() + _rotated_half(halves) * sin.float()).to(x.dtype)


@operator(
    "torch_npu.npu_rotary_mul",
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half',"
    " Tensor? rotate=None) -> Tensor",
    source=_DOCS,
)
def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """``r1 * input + r2 * rotated(input)``.

    ``input``: ``[B, N, S, D]``, ``[B, S, N, D]`` or ``[S, B, N, D]``; ``r1``, ``r2``: cosines and
    sines that broadcast to it.  With ``rotate`` ``[D, D]``, rotated is ``input @ rotate``.
    """
    name = "npu_rotary_mul"
    limit_dtype(name, "input", input, FLOATS)
    emulated_only(name, rotary_mode=(rotary_mode, tuple(_ROTATED)))
    require(name, input.dim() > 0, "input has no axis to rotate")
    limit_layout(name, input.dim() == 4, f"input has {input.dim()} axes; the kernel takes 4")
    width = input.shape[-1]
    require(name, width % 2 == 0, f"input has heads of {width} elements; it needs an even number")
    limit_layout(name, width < 896, f"input has heads of {width} elements; the kernel takes 894")
    for label, table in (("r1", r1), ("r2", r2)):
        limit_dtype(name, label, table, FLOATS)
        require_broadcast(name, label, table, "input", input)
    if rotate is not None:
        limit_dtype(name, "rotate", rotate, FLOATS)
        require_shape(name, "rotate", rotate, (width, width))
    x = input.float()
    rotated = _ROTATED[rotary_mode](x) if rotate is None else x @ rotate.float()
    return (r1.float() * x + r2.float() * rotated).to(input.dtype)


@operator(
    "torch_npu.npu_apply_rotary_pos_emb",
    "npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin,"
    " str layout='BSH', str rotary_mode='half') -> (Tensor, Tensor)",
    source=_DOCS,
)
def npu_apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSH",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query`` and ``key`` rotated by the same tables, as new tensors.

    ``query``: ``[B, S, N, D]``, ``key``: ``[B, S, Nk, D]``; ``cos``, ``sin``: ``[B, S, 1, D]``.
    ``layout`` is ``BSND`` or its other name ``BSH``.
    """
    name = "npu_apply_rotary_pos_emb"
    emulated_only(
        name, layout=(layout, ("BSH", "BSND")), rotary_mode=(rotary_mode, tuple(_ROTATED))
    )
    require(
        name,
        query.dim() == key.dim() == 4,
        f"query has {query.dim()} axes and key {key.dim()}; both need four, [B, S, N, D]",
    )
    limit_dtype(name, "query", query, FLOATS)
    for label, tensor in (("key", key), ("cos", cos), ("sin", sin)):
        limit_dtype(name, label, tensor, (query.dtype,))
    batch, tokens, _, width = query.shape
    require_shape(name, "key", key, (batch, tokens, key.shape[2], width))
    require(name, width % 2 == 0, f"heads have {width} elements; they need an even number")
    for label, table in (("cos", cos), ("sin", sin)):
        require_shape(name, label, table, (batch, tokens, 1, width))
    rotated = [
        (cos.float() * x.float() + sin.float() * _ROTATED[rotary_mode](x.float())).to(x.dtype)
        for x in (query, key)
    ]
    return rotated[0], rotated[1]
