"""Reference operator: attention of packed requests that the fused inference operator leaves out.

vLLM-Ascend takes it for encoders and for heads of 512 elements.
"""

from __future__ import annotations

import torch

from afd_testkit.npu.errors import KernelLimit
from afd_testkit.npu.limits import limit
from afd_testkit.npu.operators import operator
from afd_testkit.npu.ops.arguments import FLOATS, emulated_only, limit_dtype, undefined
from afd_testkit.npu.ops.attention_core import ALL_TOKENS, Visibility, attend
from afd_testkit.npu.ops.attention_fused import Lengths, refuse_given
from afd_testkit.npu.ops.attention_requests import as_lengths, spans

FUSION = "torch_npu.npu_fusion_attention"


@operator(
    FUSION,
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, "
    "str input_layout, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
    "float scale=1., float keep_prob=1., int pre_tockens=2147483647, "
    "int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, "
    "bool gen_mask_parallel=True, bool sync=False, str softmax_layout='', Tensor? sink=None, "
    "Tensor? dropout_mask=None, int seed=0, int offset=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    source="torch_npu's operator documentation and meta registration; vllm_ascend attention_v1.py "
    "and device/utils.py",
)
def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = ALL_TOKENS,
    next_tockens: int = ALL_TOKENS,
    inner_precise: int = 0,
    prefix: Lengths = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Attention of packed requests, without dropout.

    ``query`` [T, N, D], ``key`` [Tkv, Nkv, D], ``value`` [Tkv, Nkv, Dv] in float16, bfloat16 or
    float32; ``input_layout`` TND; ``actual_seq_qlen`` and ``actual_seq_kvlen`` cumulative, zeros
    at their end for requests that are left out.  Masks as in
    :class:`~afd_testkit.npu.ops.attention_core.Visibility`; without ``atten_mask`` every key is
    seen whatever ``sparse_mode`` says.  ``gen_mask_parallel`` and ``sync`` say how a device makes
    its dropout mask and change no value.

    Returns the output [T, N, Dv] (zeros for tokens of no request), the maxima and sums of the
    softmax [T, N, 8], which only a backward pass reads and which are left undefined here, an
    empty tensor, and three zeros.
    """
    refuse_given(
        FUSION,
        pse=pse,
        padding_mask=padding_mask,
        prefix=prefix,
        sink=sink,
        dropout_mask=dropout_mask,
        inner_precise=inner_precise,
        seed=seed,
        offset=offset,
    )
    emulated_only(
        FUSION,
        input_layout=(input_layout, ("TND",)),
        keep_prob=(keep_prob, (1.0,)),
        softmax_layout=(softmax_layout, ("", "TND")),
    )
    _check(query, key, value, head_num)
    visibility = Visibility(
        FUSION,
        sparse_mode=0 if atten_mask is None else sparse_mode,
        mask=atten_mask,
        pre_tokens=pre_tockens,
        next_tokens=next_tockens,
    )
    queries = _spans("actual_seq_qlen", actual_seq_qlen, query.shape[0])
    keys = _spans("actual_seq_kvlen", actual_seq_kvlen, key.shape[0])
    if len(queries) != len(keys):
        raise KernelLimit(
            f"{FUSION}: {len(queries)} requests in actual_seq_qlen and {len(keys)} in "
            "actual_seq_kvlen; both have one entry for each."
        )
    output = query.new_zeros((*query.shape[:2], value.shape[-1]))
    for request, (row, seen) in enumerate(zip(queries, keys, strict=True)):
        attended, _ = attend(
            query[row].transpose(0, 1),
            key[seen].transpose(0, 1),
            value[seen].transpose(0, 1),
            scale=scale,
            hidden=visibility.hidden(request, row.stop - row.start, seen.stop - seen.start),
        )
        output[row] = attended.transpose(0, 1).to(output.dtype)
    softmax = (query.shape[0], head_num, 8)
    maxima, sums = undefined(softmax, torch.float32), undefined(softmax, torch.float32)
    return output, maxima, sums, query.new_empty(0), 0, 0, 0


def _spans(name: str, given: Lengths, total: int) -> list[slice]:
    ends = as_lengths(given)
    if ends is None:
        raise KernelLimit(f"{FUSION}: layout TND takes {name}, cumulative lengths.")
    while len(ends) > 1 and ends[-1] == 0:
        ends.pop()
    return [slice(start, end) for start, end in spans(FUSION, name, ends, total)]


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if tensor.dim() != 3 or tensor.dtype != query.dtype:
            raise KernelLimit(
                f"{FUSION}: {name} is {tensor.dtype}{list(tensor.shape)} and query {query.dtype}; "
                "all are [T, N, D] of one dtype."
            )
        limit_dtype(FUSION, name, tensor, FLOATS)
    if query.shape[1] != heads or heads % key.shape[1] or key.shape[1] != value.shape[1]:
        raise KernelLimit(
            f"{FUSION}: {heads} heads, query {list(query.shape)}, key {list(key.shape)}, value "
            f"{list(value.shape)}; query heads are a multiple of the key heads."
        )
    limit(
        FUSION,
        "alignment",
        query.shape[2] <= 768 and value.shape[2] <= query.shape[2] and heads <= 256,
        f"{heads} heads of {query.shape[2]} and values of {value.shape[2]}; at most 256 heads of "
        "768 are taken, and values no wider than keys",
    )
