"""The arithmetic of attention for one request, and which keys each of its queries sees."""

from __future__ import annotations

import functools

import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import limit
from afd_testkit.npu.ops.arguments import limit_dtype

ALL_TOKENS = 2147483647
COMPRESSED_MASK = 2048
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    hidden: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one request, in float32 (float64 where an input is float64).

    ``query`` [N, Sq, D], ``key`` [Nkv, Skv, D], ``value`` [Nkv, Skv, Dv], N a multiple of Nkv:
    query head n reads key head n // (N / Nkv).  ``hidden`` bool, broadcastable to [N, Sq, Skv],
    true where a key is not seen.  ``sink`` [N] is the score of one more key per head, whose value
    is zero.

    Returns the output [N, Sq, Dv] and the logarithm of the softmax denominator [N, Sq].  A query
    that sees nothing gets zeros and -inf.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads, queries, dim = query.shape
    kv_heads, keys, value_dim = value.shape
    if queries == 0 or (keys == 0 and sink is None):
        return (
            torch.zeros(heads, queries, value_dim, dtype=dtype),
            torch.full((heads, queries), float("-inf"), dtype=dtype),
        )
    grouped = query.to(dtype).reshape(kv_heads, heads // kv_heads * queries, dim)
    scores = torch.bmm(grouped, key.to(dtype).transpose(1, 2)).view(heads, queries, keys) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.to(dtype).view(-1, 1, 1).expand(-1, queries, 1)], dim=-1)
    top = scores.amax(dim=-1, keepdim=True)
    # exp(-inf - 0) is 0, where exp(-inf + inf) is not a number: nothing seen gives zeros.
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    seen = weights[..., :keys].reshape(kv_heads, heads // kv_heads * queries, keys)
    output = torch.bmm(seen, value.to(dtype)).view(heads, queries, value_dim)
    lse = (top + total.log()).squeeze(-1)
    return output / total.masked_fill(total == 0, 1.0), lse


@functools.cache
def upper_triangle(dtype: torch.dtype) -> torch.Tensor:
    """The compressed mask that modes 2, 3 and 4 take: [2048, 2048], one above the diagonal."""
    return torch.ones(COMPRESSED_MASK, COMPRESSED_MASK, dtype=dtype).triu(1)


def band(
    queries: int, keys: int, *, before: int, after: int, right_aligned: bool
) -> torch.Tensor | None:
    """True [queries, keys] where a key is outside of a band; None where nothing is.

    A query at i sees the keys from i - ``before`` to i + ``after``.  With ``right_aligned`` the
    last query stands at the last key, else the first query at the first key.
    """
    shift = keys - queries if right_aligned else 0
    if queries == 0 or keys == 0:
        return None
    if after >= keys - 1 - shift and before >= queries - 1 + shift:
        return None
    distance = torch.arange(keys).unsqueeze(0) - torch.arange(queries).unsqueeze(1) - shift
    return (distance > after) | (distance < -before)


class Visibility:
    """Which keys each query sees, as sparse_mode, atten_mask, pre_tokens and next_tokens say.

    | sparse_mode | atten_mask | a query sees |
    |---|---|---|
    | 0 | None | every key |
    | 0, 1 | whole [.., Sq, Skv], nonzero hides | what the mask leaves |
    | 2 | compressed | keys up to its own index, from the top left |
    | 3 | compressed | keys up to its own index, from the bottom right |
    | 4 | compressed | ``pre_tokens`` back to ``next_tokens`` ahead, from the bottom right |
    """

    def __init__(
        self,
        operator: str,
        *,
        sparse_mode: int,
        mask: torch.Tensor | None,
        pre_tokens: int,
        next_tokens: int,
    ) -> None:
        if sparse_mode not in (0, 1, 2, 3, 4):
            raise NotEmulated(
                f"{operator}: sparse_mode={sparse_mode}; modes 0 to 4 have a reference."
            )
        self.operator = operator
        self.mode = sparse_mode
        self.mask = mask
        self.before = pre_tokens
        self.after = next_tokens
        self._check()

    def _check(self) -> None:
        operator, mask = self.operator, self.mask
        if mask is not None:
            limit_dtype(operator, "atten_mask", mask, MASK_DTYPES)
        if self.mode == 0 and mask is not None:
            for name, given in (("pre_tokens", self.before), ("next_tokens", self.after)):
                if given < ALL_TOKENS:
                    raise NotEmulated(
                        f"{operator}: {name}={given} beside a whole atten_mask in sparse_mode 0; "
                        "write the band into the mask and leave it at its default."
                    )
        if self.mode == 1 and mask is None:
            raise KernelLimit(f"{operator}: sparse_mode 1 takes a whole atten_mask, not None.")
        if self.mode >= 2:
            self._check_compressed()

    def _check_compressed(self) -> None:
        mask = self.mask
        size = COMPRESSED_MASK
        shape = None if mask is None else list(mask.shape)
        limit(
            self.operator,
            "layout",
            shape in ([size, size], [1, size, size], [1, 1, size, size]),
            f"sparse_mode {self.mode} takes an atten_mask of [{size}, {size}] with ones above the "
            f"diagonal, not {shape}",
        )
        if mask is not None and list(mask.shape[-2:]) == [size, size]:
            square = mask.reshape(size, size)
            if not torch.equal(square, upper_triangle(mask.dtype)):
                raise KernelLimit(
                    f"{self.operator}: the atten_mask of sparse_mode {self.mode} has other content "
                    "than ones above its diagonal; pass torch.ones(2048, 2048).triu(1)."
                )

    def hidden(self, request: int, queries: int, keys: int) -> torch.Tensor | None:
        """True where a key is not seen, broadcastable to [N, queries, keys]; None for nowhere."""
        if self.mode in (0, 1):
            return None if self.mask is None else self._whole(self.mask, request, queries, keys)
        before = self.before if self.mode == 4 else ALL_TOKENS
        after = self.after if self.mode == 4 else 0
        return band(queries, keys, before=before, after=after, right_aligned=self.mode != 2)

    def _whole(self, mask: torch.Tensor, request: int, queries: int, keys: int) -> torch.Tensor:
        if mask.dim() == 4:
            mask = mask[:, 0]
        if mask.dim() == 2:
            mask = mask.unsqueeze(0)
        if mask.shape[-2] < queries or mask.shape[-1] < keys:
            raise KernelLimit(
                f"{self.operator}: atten_mask {list(mask.shape)} is smaller than the "
                f"{queries} queries and {keys} keys of request {request}."
            )
        row = mask[request if mask.shape[0] > 1 else 0]
        return row[:queries, :keys] != 0
