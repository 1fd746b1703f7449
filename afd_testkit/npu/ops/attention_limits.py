"""What the device's fused inference attention does not take.

Stated by torch_npu's documentation of npu_fused_infer_attention_score and its second version,
except where vLLM-Ascend's own calls show the documentation to be behind its kernels: packed
layouts take a block table, any head dimension below 512 that is a multiple of 16, and requests
with as many queries as keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from afd_testkit.npu.limits import limit
from afd_testkit.npu.ops.arguments import HALVES, limit_dtype

LATENT_DIM, ROPE_DIM = 512, 64
LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
LATENT_QUERIES = 16
LATENT_LAYOUTS = (
    "BSH",
    "BSND",
    "BNSD",
    "BSH_NBSD",
    "BSND_NBSD",
    "BNSD_NBSD",
    "TND",
    "TND_NTD",
)


@dataclass(frozen=True)
class Shapes:
    """The facts of one call that its limits speak of.

    ``dim`` and ``value_dim`` are the head dimensions without the rope part; ``rope_dim`` is None
    without one.  ``longest`` is the largest number of queries of a request.  ``cache_axes`` and
    ``block_size`` are None without a block table.
    """

    operator: str
    layout: str
    dim: int
    value_dim: int
    rope_dim: int | None
    heads: int
    kv_heads: int
    longest: int
    sparse_mode: int
    masked: bool
    cache_axes: int | None
    block_size: int | None
    sink: bool

    @property
    def packed(self) -> bool:
        """Whether requests follow each other on one token axis."""
        return self.layout.startswith(("TND", "NTD"))

    @property
    def latent(self) -> bool:
        """Whether keys are the latent KV of MLA: beside a rope part, in pages or 512 wide."""
        return self.rope_dim is not None and (self.block_size is not None or self.dim == LATENT_DIM)


def check_dtypes(operator: str, tensors: dict[str, torch.Tensor], *, bfloat16_only: bool) -> None:
    """float16 or bfloat16; in packed layouts with a head dimension below 512 bfloat16."""
    for name, tensor in tensors.items():
        limit_dtype(operator, name, tensor, (torch.bfloat16,) if bfloat16_only else HALVES)


def check_shapes(shapes: Shapes) -> None:
    """Every limit that does not depend on the contents of a tensor."""
    _check_heads(shapes)
    _check_mask(shapes)
    if shapes.rope_dim is not None:
        _check_rope(shapes, shapes.rope_dim)
    else:
        _check_plain_dims(shapes)
    if shapes.block_size is not None:
        _check_blocks(shapes, shapes.block_size)
    if shapes.sink:
        limit(
            shapes.operator,
            "layout",
            shapes.layout in ("TND", "NTD_TND"),
            f"learnable_sink goes with layouts TND and NTD_TND, not {shapes.layout}",
        )
        limit(
            shapes.operator,
            "alignment",
            shapes.value_dim <= 128,
            f"learnable_sink takes value heads of up to 128, not {shapes.value_dim}",
        )


def check_lengths(
    operator: str, *, sparse_mode: int, total: int, queries: list[int], keys: list[int]
) -> None:
    """What packed layouts ask of the lengths of their requests."""
    limit(
        operator,
        "layout",
        sum(queries) == total,
        f"the lengths of queries end at {sum(queries)} and query has {total} tokens; the last "
        "cumulative length is the number of tokens, so cut the query",
    )
    if sparse_mode != 3:
        return
    for request, (length, seen) in enumerate(zip(queries, keys, strict=True)):
        limit(
            operator,
            "layout",
            length <= seen,
            f"request {request} has {length} queries and {seen} keys; sparse_mode 3 takes at least "
            "as many keys as queries",
        )


def _check_heads(shapes: Shapes) -> None:
    ratio = shapes.heads // shapes.kv_heads
    limit(
        shapes.operator,
        "alignment",
        ratio <= 64 or shapes.rope_dim is not None,
        f"{shapes.heads} query heads for {shapes.kv_heads} key heads; at most 64 share one",
    )
    limit(
        shapes.operator,
        "alignment",
        shapes.heads <= 256,
        f"{shapes.heads} query heads; at most 256 are taken",
    )


def _check_mask(shapes: Shapes) -> None:
    if not shapes.packed:
        return
    limit(
        shapes.operator,
        "layout",
        (shapes.sparse_mode == 0 and not shapes.masked)
        or (shapes.sparse_mode in (3, 4) and shapes.masked),
        f"sparse_mode {shapes.sparse_mode} {'with' if shapes.masked else 'without'} atten_mask; "
        "packed layouts take 0 without, or 3 or 4 with one",
    )


def _check_plain_dims(shapes: Shapes) -> None:
    most = 496 if shapes.packed else 512
    for name, dim in (("query and key", shapes.dim), ("value", shapes.value_dim)):
        limit(
            shapes.operator,
            "alignment",
            dim % 16 == 0 and 0 < dim <= most,
            f"heads of {name} have {dim} elements; without rope parts they have a multiple of 16 "
            f"up to {most} in layout {shapes.layout}",
        )


def _check_rope(shapes: Shapes, rope_dim: int) -> None:
    limit(
        shapes.operator,
        "alignment",
        rope_dim == ROPE_DIM,
        f"query_rope and key_rope have {rope_dim} elements; they have {ROPE_DIM}",
    )
    if shapes.latent:
        _check_latent(shapes)
        return
    limit(
        shapes.operator,
        "alignment",
        shapes.dim == 128,
        f"heads have {shapes.dim} elements beside rope parts; without a block table they have 128",
    )
    limit(
        shapes.operator,
        "layout",
        shapes.layout in ("TND", "NTD_TND"),
        f"heads with rope parts and no block table in layout {shapes.layout}; they take TND or "
        "NTD_TND",
    )


def _check_latent(shapes: Shapes) -> None:
    """Attention over the latent KV of MLA: head dimension 512 beside a rope part of 64."""
    operator = shapes.operator
    limit(
        operator,
        "alignment",
        shapes.dim == LATENT_DIM,
        f"heads have {shapes.dim} elements beside rope parts; over a paged cache they have "
        f"{LATENT_DIM}",
    )
    limit(
        operator,
        "alignment",
        shapes.heads in LATENT_HEADS and shapes.kv_heads == 1,
        f"{shapes.heads} query and {shapes.kv_heads} latent key heads; query heads are a "
        "power of 2 up to 128, key heads 1, so pad the query",
    )
    limit(
        operator,
        "alignment",
        shapes.longest <= LATENT_QUERIES,
        f"{shapes.longest} queries in one request over a latent cache; at most {LATENT_QUERIES}",
    )
    limit(
        operator,
        "layout",
        shapes.block_size is not None and shapes.layout in LATENT_LAYOUTS,
        f"latent heads in layout {shapes.layout}; they take a block table "
        f"and one of {', '.join(LATENT_LAYOUTS)}",
    )
    limit(
        operator,
        "layout",
        (shapes.sparse_mode == 3 and shapes.masked)
        if shapes.longest > 1
        else not (shapes.sparse_mode == 0 and shapes.masked),
        f"sparse_mode {shapes.sparse_mode} {'with' if shapes.masked else 'without'} atten_mask for "
        f"{shapes.longest} queries over a latent cache; one query takes 0 without, more take 3 "
        "with one",
    )
    limit(
        operator,
        "layout",
        shapes.cache_axes != 5 or not shapes.layout.startswith("BNSD"),
        f"a cache in fractal format with layout {shapes.layout}; give queries as BSND or TND",
    )


def _check_blocks(shapes: Shapes, block_size: int) -> None:
    if shapes.latent:
        allowed = (128,) if shapes.cache_axes == 5 else (16, 128)
        holds, rule = block_size in allowed, " or ".join(map(str, allowed))
    elif shapes.longest > 1:
        holds = block_size % 128 == 0 and 128 <= block_size <= 512
        rule = "a multiple of 128 up to 512 for more than one query"
    else:
        holds = block_size % 16 == 0 and 16 <= block_size <= 512
        rule = "a multiple of 16 up to 512"
    limit(
        shapes.operator,
        "alignment",
        holds,
        f"block_size={block_size}; it is {rule}",
    )
    limit(
        shapes.operator,
        "layout",
        shapes.cache_axes == 3
        or shapes.rope_dim is not None
        or not shapes.layout.startswith(("BSH", "BSND")),
        f"a cache of {shapes.cache_axes} axes with layout {shapes.layout}; it is "
        "[blocks, block_size, H] for BSH and BSND",
    )
