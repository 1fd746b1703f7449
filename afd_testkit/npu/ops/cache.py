"""Reference operators: cache.

A slot is block * block_size + offset.  A negative slot is written nowhere: vLLM pads slot
mappings with -1.
"""

from __future__ import annotations

import torch

from afd_testkit.npu.errors import KernelLimit
from afd_testkit.npu.limits import limit
from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import HALVES, emulated_only, limit_dtype, undefined

RESHAPE = "torch_npu._npu_reshape_and_cache"
NORM_ROPE = "torch_npu.npu_kv_rmsnorm_rope_cache"
LOAD = "torch_npu.atb.npu_paged_cache_load"

CACHE_DTYPES = (*HALVES, torch.int8)


def slots_to_write(name: str, slots: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens are written, and their slots; every slot is below ``total``."""
    flat = slots.reshape(-1).long()
    kept = torch.nonzero(flat >= 0).flatten()
    taken = flat[kept]
    if taken.numel() and int(taken.max()) >= total:
        raise KernelLimit(f"{name}: slot {int(taken.max())}; the cache has slots 0 to {total - 1}.")
    return kept, taken


def write_tokens(cache: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write ``tokens`` [n, ...] into ``cache`` [blocks, block_size, ...] in place."""
    size = cache.shape[1]
    cache[slots // size, slots % size] = tokens.to(cache.dtype)


@operator(
    RESHAPE,
    "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor slot_indices) -> ()",
    source="schema in libop_plugin_atb; vllm_ascend device_op.py",
)
def _npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Write keys and values of tokens into their slots, in place.

    ``key`` [T, N, D], ``value`` [T, N, Dv]; ``key_cache`` [blocks, block_size, N, D],
    ``value_cache`` alike with Dv; ``slot_indices`` int32 [T].
    """
    for name, tensor, cache in (("key", key, key_cache), ("value", value, value_cache)):
        limit_dtype(RESHAPE, name, tensor, CACHE_DTYPES)
        if tensor.dtype != cache.dtype:
            raise KernelLimit(f"{RESHAPE}: {name} is {tensor.dtype} and its cache {cache.dtype}.")
        if tensor.dim() != 3 or cache.dim() != 4 or tensor.shape[1:] != cache.shape[2:]:
            raise KernelLimit(
                f"{RESHAPE}: {name} {list(tensor.shape)} into {name}_cache {list(cache.shape)}; "
                "they are [T, N, D] and [blocks, block_size, N, D]."
            )
        if tensor.shape[0] != slot_indices.numel():
            raise KernelLimit(
                f"{RESHAPE}: {tensor.shape[0]} tokens of {name} for {slot_indices.numel()} slots."
            )
    limit_dtype(RESHAPE, "slot_indices", slot_indices, (torch.int32,))
    if key_cache.shape[:2] != value_cache.shape[:2]:
        raise KernelLimit(
            f"{RESHAPE}: key_cache {list(key_cache.shape)} and value_cache "
            f"{list(value_cache.shape)}; a slot is a place in both, so that their blocks and block "
            "sizes are equal."
        )
    kept, slots = slots_to_write(RESHAPE, slot_indices, key_cache.shape[0] * key_cache.shape[1])
    write_tokens(key_cache, slots, key[kept])
    write_tokens(value_cache, slots, value[kept])


@operator(
    NORM_ROPE,
    "npu_kv_rmsnorm_rope_cache(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, "
    "Tensor k_cache, Tensor ckv_cache, *, Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, "
    "Tensor? k_rope_offset=None, Tensor? c_kv_offset=None, Tensor? v=None, float epsilon=1e-5, "
    "str cache_mode='Norm', bool is_output_kv=False) -> (Tensor, Tensor, Tensor, Tensor)",
    source="CANN's KvRmsNormRopeCache documentation; torch_npu's meta registration; vllm_ascend "
    "mla_v1.py",
)
def npu_kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The latent KV of MLA: RMS norm of the first part, rotary embedding of the rest, cached.

    ``kv`` [B, 1, S, Dv + Dk]; ``gamma`` [Dv]; ``cos`` and ``sin`` [B, 1, S, Dk], each frequency
    at d and d + Dk / 2; ``index`` int64 [B * S] slots.  In mode PA ``k_cache`` is
    [blocks, block_size, 1, Dk] and ``ckv_cache`` alike with Dv, written in place; in mode PA_NZ
    their memory holds each block as [Dk / 16, block_size, 16].

    The rotary part comes interleaved (pairs 2i, 2i + 1) and leaves in halves (i, i + Dk / 2).
    Returns k_cache, ckv_cache, and, if ``is_output_kv``, the rotated part [B, 1, S, Dk] and the
    normalised part [B, 1, S, Dv]; otherwise these two are
    left undefined.
    """
    emulated_only(
        NORM_ROPE,
        k_rope_scale=(k_rope_scale, (None,)),
        c_kv_scale=(c_kv_scale, (None,)),
        k_rope_offset=(k_rope_offset, (None,)),
        c_kv_offset=(c_kv_offset, (None,)),
        v=(v, (None,)),
        cache_mode=(cache_mode, ("PA", "PA_NZ")),
    )
    norm_dim, rope_dim = gamma.shape[-1], cos.shape[-1]
    if kv.dim() != 4 or kv.shape[1] != 1 or kv.shape[3] != norm_dim + rope_dim:
        raise KernelLimit(
            f"{NORM_ROPE}: kv {list(kv.shape)} with gamma [{norm_dim}] and cos of {rope_dim}; kv "
            f"is [B, 1, S, {norm_dim + rope_dim}]."
        )
    _check_norm_rope(kv, gamma, cos, sin, index, k_cache, ckv_cache)
    normed = _rms_norm(kv[..., :norm_dim], gamma, epsilon)
    rotated = _rotate_interleaved(kv[..., norm_dim:], cos, sin)
    for cache, tokens in ((k_cache, rotated), (ckv_cache, normed)):
        blocks = _blocks(cache, cache_mode)
        kept, slots = slots_to_write(NORM_ROPE, index, blocks.shape[0] * blocks.shape[1])
        flat = tokens.reshape(-1, tokens.shape[-1])
        size = blocks.shape[1]
        blocks[slots // size, slots % size] = flat[kept].to(cache.dtype).view(-1, *blocks.shape[2:])
    if not is_output_kv:
        return (
            k_cache,
            ckv_cache,
            undefined(rotated.shape, kv.dtype),
            undefined(normed.shape, kv.dtype),
        )
    return k_cache, ckv_cache, rotated, normed


def _check_norm_rope(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
) -> None:
    rope_dim, norm_dim = cos.shape[-1], gamma.shape[-1]
    for name, tensor in (("kv", kv), ("gamma", gamma), ("cos", cos), ("sin", sin)):
        limit_dtype(NORM_ROPE, name, tensor, HALVES)
    limit_dtype(NORM_ROPE, "index", index, (torch.int64,))
    shape = [kv.shape[0], 1, kv.shape[2], rope_dim]
    if list(cos.shape) != shape or list(sin.shape) != shape or rope_dim % 2 or gamma.dim() != 1:
        raise KernelLimit(
            f"{NORM_ROPE}: cos {list(cos.shape)}, sin {list(sin.shape)} and gamma "
            f"{list(gamma.shape)}; for kv {list(kv.shape)} they are {shape} twice, with an even "
            f"Dk, and [{norm_dim}]."
        )
    if index.numel() != kv.shape[0] * kv.shape[2]:
        raise KernelLimit(
            f"{NORM_ROPE}: index has {index.numel()} slots for {kv.shape[0] * kv.shape[2]} tokens."
        )
    for name, cache, dim in (("k_cache", k_cache, rope_dim), ("ckv_cache", ckv_cache, norm_dim)):
        if cache.dim() != 4 or list(cache.shape[2:]) != [1, dim] or cache.dtype != kv.dtype:
            raise KernelLimit(
                f"{NORM_ROPE}: {name} is {cache.dtype}{list(cache.shape)}; it is "
                f"{kv.dtype}[blocks, block_size, 1, {dim}]."
            )
        width = cache.shape[1] * cache.element_size()
        limit(
            NORM_ROPE,
            "alignment",
            width % 32 == 0,
            f"{name} has blocks of {cache.shape[1]} tokens; times the {cache.element_size()} bytes "
            "of an element that is a multiple of 32",
        )


def _rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    exact = x.float()
    scaled = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + epsilon)
    return (scaled * gamma.float()).to(x.dtype)


def _rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float()[..., 0::2], x.float()[..., 1::2]
    straight = torch.cat([first, second], dim=-1)
    crossed = torch.cat([-second, first], dim=-1)
    return (straight * cos.float() + crossed * sin.float()).to(x.dtype)


def _blocks(cache: torch.Tensor, cache_mode: str) -> torch.Tensor:
    """A view [blocks, block_size, ...] on ``cache`` whose rest is one token, in memory order."""
    blocks, size, heads, dim = cache.shape
    if cache_mode == "PA":
        return cache
    if dim % 16:
        raise KernelLimit(
            f"{NORM_ROPE}: heads of {dim} elements in mode PA_NZ; they have a multiple of 16."
        )
    return cache.view(blocks, heads * dim // 16, size, 16).transpose(1, 2)


@operator(
    LOAD,
    "npu_paged_cache_load(Tensor key_cache, Tensor value_cache, Tensor block_table, "
    "Tensor context_lens, *, Tensor? seq_starts=None, bool cumsum=False, Tensor(a!)? key=None, "
    "Tensor(b!)? value=None) -> (Tensor, Tensor)",
    source="torch_npu's atb documentation, which joins both overloads; vllm_ascend device_op.py",
)
def npu_paged_cache_load(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool = False,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy tokens of requests out of a paged cache, one request after the other.

    ``key_cache`` [blocks, block_size, N, D], ``value_cache`` alike with Dv; ``block_table`` int32
    [B, n]; ``context_lens`` int32 [B], tokens of each request, or with ``cumsum`` [B + 1] their
    running sum from 0; ``seq_starts`` int32 [B], the first token of each request that is read.
    Returns [T, N, D] and [T, N, Dv]; written into ``key`` and ``value`` where these are given.
    """
    _check_load(key_cache, value_cache, block_table, context_lens, seq_starts)
    if cumsum and (context_lens.numel() == 0 or int(context_lens[0]) != 0):
        raise KernelLimit(
            f"{LOAD}: with cumsum, context_lens is a running sum that starts at 0, not "
            f"{context_lens.tolist()}."
        )
    lengths = context_lens.diff().tolist() if cumsum else context_lens.tolist()
    starts = [0] * len(lengths) if seq_starts is None else seq_starts.tolist()
    taken = _slots_of(key_cache, block_table, starts, lengths)
    size = key_cache.shape[1]
    results = []
    for name, cache, out in (("key", key_cache, key), ("value", value_cache, value)):
        tokens = cache[taken // size, taken % size]
        if out is None:
            results.append(tokens)
            continue
        if out.shape != tokens.shape or out.dtype != tokens.dtype:
            raise KernelLimit(
                f"{LOAD}: {name} is {out.dtype}{list(out.shape)}; these lengths need "
                f"{tokens.dtype}{list(tokens.shape)}."
            )
        results.append(out.copy_(tokens))
    return results[0], results[1]


def _check_load(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    seq_starts: torch.Tensor | None,
) -> None:
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4 or cache.shape[:2] != key_cache.shape[:2]:
            raise KernelLimit(
                f"{LOAD}: {name} {list(cache.shape)}; both caches are [blocks, block_size, N, D] "
                "with the same blocks."
            )
        limit_dtype(LOAD, name, cache, CACHE_DTYPES)
        width = cache.shape[2] * cache.shape[3] * cache.element_size()
        limit(
            LOAD,
            "alignment",
            width % 32 == 0,
            f"a token of {name} takes {width} bytes; it takes a multiple of 32",
        )
    indices = {"block_table": block_table, "context_lens": context_lens}
    if seq_starts is not None:
        indices["seq_starts"] = seq_starts
    for name, tensor in indices.items():
        limit_dtype(LOAD, name, tensor, (torch.int32,))


def _slots_of(
    cache: torch.Tensor, block_table: torch.Tensor, starts: list[int], lengths: list[int]
) -> torch.Tensor:
    """The slots of tokens [start, start + length) of every request, one after the other."""
    blocks, size = cache.shape[:2]
    if block_table.dim() != 2 or not len(starts) == len(lengths) <= block_table.shape[0]:
        raise KernelLimit(
            f"{LOAD}: {len(lengths)} lengths, {len(starts)} starts, block_table "
            f"{list(block_table.shape)}; there is one of each for a request."
        )
    slots = [torch.empty(0, dtype=torch.long)]
    for request, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        limit(
            LOAD,
            "alignment",
            start % size == 0,
            f"seq_starts[{request}]={start}; a read starts at a block, a multiple of {size}",
        )
        if length < 0 or start < 0 or start + length > block_table.shape[1] * size:
            raise KernelLimit(
                f"{LOAD}: request {request} reads {length} tokens from {start}; its row of the "
                f"block table covers {block_table.shape[1] * size}."
            )
        positions = torch.arange(start, start + length)
        used = block_table[request][positions // size].long()
        if length and not 0 <= int(used.min()) <= int(used.max()) < blocks:
            raise KernelLimit(
                f"{LOAD}: request {request} reads blocks {int(used.min())} to {int(used.max())}; "
                f"the cache has blocks 0 to {blocks - 1}."
            )
        slots.append(used * size + positions % size)
    return torch.cat(slots)
