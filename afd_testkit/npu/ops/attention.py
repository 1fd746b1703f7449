"""Reference operators: attention.

The two versions of the fused inference attention and the merge of partial results are here; the
operators imported below are declared in their modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from afd_testkit.npu.errors import KernelLimit
from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import FLOATS, emulated_only, limit_dtype
from afd_testkit.npu.ops.attention_core import Visibility
from afd_testkit.npu.ops.attention_fused import Fused, Lengths, refuse_given
from afd_testkit.npu.ops.attention_packed import npu_fusion_attention
from afd_testkit.npu.ops.attention_paged import _npu_paged_attention

__all__ = [
    "_npu_paged_attention",
    "npu_attention_update",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_fusion_attention",
]

FUSED = "torch_npu.npu_fused_infer_attention_score"
FUSED_V2 = "torch_npu.npu_fused_infer_attention_score_v2"
UPDATE = "torch_npu.npu_attention_update"

_FUSED_SCHEMA = (
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? "
    "pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? "
    "actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? "
    "dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? "
    "antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, "
    "Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? "
    "value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, "
    "Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? "
    "value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, "
    "Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, float "
    "scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
    "int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, int "
    "antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0, bool "
    "softmax_lse_flag=False) -> (Tensor, Tensor)"
)
_FUSED_V2_SCHEMA = (
    "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, Tensor? "
    "query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, "
    "Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None, Tensor? "
    "dequant_offset_key=None, Tensor? dequant_scale_value=None, Tensor? "
    "dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, Tensor? "
    "quant_scale_out=None, Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? "
    "learnable_sink=None, int num_query_heads=1, int num_key_value_heads=0, float "
    "softmax_scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, str "
    "input_layout='BSH', int sparse_mode=0, int block_size=0, int query_quant_mode=0, int "
    "key_quant_mode=0, int value_quant_mode=0, int inner_precise=0, bool "
    "return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, int? value_dtype=None, "
    "int? query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None, "
    "int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, int? "
    "dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, int? "
    "dequant_scale_key_rope_dtype=None, int? out_dtype=None) -> (Tensor, Tensor)"
)


@operator(
    FUSED,
    _FUSED_SCHEMA,
    source="torch_npu's operator documentation and meta registration; vllm_ascend attention_v1.py "
    "and mla_v1.py",
)
def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Lengths = None,
    actual_seq_lengths_kv: Lengths = None,
    dequant_scale1: torch.Tensor | None = None,
    quant_scale1: torch.Tensor | None = None,
    dequant_scale2: torch.Tensor | None = None,
    quant_scale2: torch.Tensor | None = None,
    quant_offset2: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    key_antiquant_scale: torch.Tensor | None = None,
    key_antiquant_offset: torch.Tensor | None = None,
    value_antiquant_scale: torch.Tensor | None = None,
    value_antiquant_offset: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_padding_size: torch.Tensor | None = None,
    kv_padding_size: torch.Tensor | None = None,
    key_shared_prefix: torch.Tensor | None = None,
    value_shared_prefix: torch.Tensor | None = None,
    actual_shared_prefix_len: Lengths = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    key_rope_antiquant_scale: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over keys, for prefill and decode.

    ``query``, ``key``, ``value`` float16 or bfloat16 in ``input_layout``: BSH, BSND, BNSD, TND, or
    IN_OUT where the output has another layout than the input.  ``num_key_value_heads`` of 0 means
    ``num_heads``.  ``query_rope`` and ``key_rope`` are further dimensions of query and key.

    Lengths: in packed layouts (TND, NTD) ``actual_seq_lengths`` are cumulative and their number is
    the number of requests; so are ``actual_seq_lengths_kv`` without a block table.  With one, they
    are the lengths of the requests, and key and value are [blocks, block_size, H],
    [blocks, N, block_size, D] or NZ [blocks, N, D / 16, block_size, 16].  In padded layouts both
    are lengths of requests.

    Masks: see :class:`~afd_testkit.npu.ops.attention_core.Visibility`.  ``inner_precise`` selects
    among implementations on a device; the reference computes in float32 whatever it says.

    Returns the output and, with ``softmax_lse_flag``, float32 logarithms of the denominators
    ([T, N, 1] or [B, N, S, 1]), else [0.].  A query that sees no key gets zeros and -inf.
    """
    refuse_given(
        FUSED,
        pse_shift=pse_shift,
        dequant_scale1=dequant_scale1,
        quant_scale1=quant_scale1,
        dequant_scale2=dequant_scale2,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        key_antiquant_scale=key_antiquant_scale,
        key_antiquant_offset=key_antiquant_offset,
        value_antiquant_scale=value_antiquant_scale,
        value_antiquant_offset=value_antiquant_offset,
        query_padding_size=query_padding_size,
        kv_padding_size=kv_padding_size,
        key_shared_prefix=key_shared_prefix,
        value_shared_prefix=value_shared_prefix,
        actual_shared_prefix_len=actual_shared_prefix_len,
        key_rope_antiquant_scale=key_rope_antiquant_scale,
        antiquant_mode=antiquant_mode,
        key_antiquant_mode=key_antiquant_mode,
        value_antiquant_mode=value_antiquant_mode,
    )
    return Fused(
        operator=FUSED,
        query=query,
        key=key,
        value=value,
        query_rope=query_rope,
        key_rope=key_rope,
        visibility=Visibility(
            FUSED,
            sparse_mode=sparse_mode,
            mask=atten_mask,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
        ),
        query_lengths=actual_seq_lengths,
        key_lengths=actual_seq_lengths_kv,
        block_table=block_table,
        block_size=block_size,
        heads=num_heads,
        kv_heads=num_key_value_heads or num_heads,
        scale=scale,
        layout=input_layout,
        inner_precise=inner_precise,
        want_lse=softmax_lse_flag,
    ).run()


@operator(
    FUSED_V2,
    _FUSED_V2_SCHEMA,
    source="torch_npu's operator documentation and meta registration; vllm_ascend attention_v1.py "
    "and mla_v1.py",
)
def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    block_table: torch.Tensor | None = None,
    dequant_scale_query: torch.Tensor | None = None,
    dequant_scale_key: torch.Tensor | None = None,
    dequant_offset_key: torch.Tensor | None = None,
    dequant_scale_value: torch.Tensor | None = None,
    dequant_offset_value: torch.Tensor | None = None,
    dequant_scale_key_rope: torch.Tensor | None = None,
    quant_scale_out: torch.Tensor | None = None,
    quant_offset_out: torch.Tensor | None = None,
    quant_scale_p: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
    query_rope_dtype: int | None = None,
    key_rope_dtype: int | None = None,
    key_shared_prefix_dtype: int | None = None,
    value_shared_prefix_dtype: int | None = None,
    dequant_scale_query_dtype: int | None = None,
    dequant_scale_key_dtype: int | None = None,
    dequant_scale_value_dtype: int | None = None,
    dequant_scale_key_rope_dtype: int | None = None,
    out_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second version of :func:`npu_fused_infer_attention_score`.

    Other names (``actual_seq_qlen``, ``actual_seq_kvlen``, ``num_query_heads``,
    ``softmax_scale``, ``return_softmax_lse``), the same semantics, and ``learnable_sink`` [N]:
    the score of one more key per head, whose value is zero.
    """
    refuse_given(
        FUSED_V2,
        pse_shift=pse_shift,
        dequant_scale_query=dequant_scale_query,
        dequant_scale_key=dequant_scale_key,
        dequant_offset_key=dequant_offset_key,
        dequant_scale_value=dequant_scale_value,
        dequant_offset_value=dequant_offset_value,
        dequant_scale_key_rope=dequant_scale_key_rope,
        quant_scale_out=quant_scale_out,
        quant_offset_out=quant_offset_out,
        quant_scale_p=quant_scale_p,
        query_quant_mode=query_quant_mode,
        key_quant_mode=key_quant_mode,
        value_quant_mode=value_quant_mode,
        query_dtype=query_dtype,
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        query_rope_dtype=query_rope_dtype,
        key_rope_dtype=key_rope_dtype,
        key_shared_prefix_dtype=key_shared_prefix_dtype,
        value_shared_prefix_dtype=value_shared_prefix_dtype,
        dequant_scale_query_dtype=dequant_scale_query_dtype,
        dequant_scale_key_dtype=dequant_scale_key_dtype,
        dequant_scale_value_dtype=dequant_scale_value_dtype,
        dequant_scale_key_rope_dtype=dequant_scale_key_rope_dtype,
        out_dtype=out_dtype,
    )
    return Fused(
        operator=FUSED_V2,
        query=query,
        key=key,
        value=value,
        query_rope=query_rope,
        key_rope=key_rope,
        visibility=Visibility(
            FUSED_V2,
            sparse_mode=sparse_mode,
            mask=atten_mask,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
        ),
        query_lengths=actual_seq_qlen,
        key_lengths=actual_seq_kvlen,
        block_table=block_table,
        block_size=block_size,
        heads=num_query_heads,
        kv_heads=num_key_value_heads or num_query_heads,
        scale=softmax_scale,
        layout=input_layout,
        inner_precise=inner_precise,
        want_lse=return_softmax_lse,
        sink=learnable_sink,
    ).run()


@operator(
    UPDATE,
    "npu_attention_update(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)",
    source="torch_npu's operator documentation; vllm_ascend mla_v1.py",
)
def npu_attention_update(
    lse: Sequence[torch.Tensor],
    local_out: Sequence[torch.Tensor],
    update_type: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from attention over parts of them.

    ``lse``: for each part float32 [M], the logarithm of its softmax denominator; ``local_out``:
    for each part [M, D] in float32, float16 or bfloat16, M rows of tokens times heads.
    Returns the sum of the outputs weighted by exp(lse_i - lse), [M, D] in their dtype, and lse,
    the logarithm of the sum of the denominators: float32 [M] with ``update_type`` 1, else [0].
    A part whose lse is infinite does not count; a row without any is zero.
    """
    emulated_only(UPDATE, update_type=(update_type, (0, 1)))
    if not lse or len(lse) != len(local_out):
        raise KernelLimit(
            f"{UPDATE}: {len(lse)} lse and {len(local_out)} local_out; each part has one of both."
        )
    for part, (weight, out) in enumerate(zip(lse, local_out, strict=True)):
        if weight.dim() != 1 or out.dim() != 2 or weight.shape[0] != out.shape[0]:
            raise KernelLimit(
                f"{UPDATE}: part {part} has lse {list(weight.shape)} and local_out "
                f"{list(out.shape)}; they are [M] and [M, D]."
            )
        limit_dtype(UPDATE, f"lse[{part}]", weight, (torch.float32,))
        limit_dtype(UPDATE, f"local_out[{part}]", out, FLOATS)
    logs = torch.stack([part.double() for part in lse])
    logs = logs.masked_fill(logs.isinf(), float("-inf"))
    total = torch.logsumexp(logs, dim=0)
    weights = torch.exp(logs - total.masked_fill(total.isinf(), 0.0)).unsqueeze(-1)
    outputs = torch.stack([part.double() for part in local_out])
    counted = outputs.masked_fill(weights == 0, 0.0)
    merged = (weights * counted).sum(dim=0).to(local_out[0].dtype)
    return merged, total.float() if update_type else torch.empty(0)
