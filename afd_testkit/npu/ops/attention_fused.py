"""What both versions of the fused inference attention have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.ops.arguments import emulated_only, limit_dtype
from afd_testkit.npu.ops.attention_core import Visibility, attend
from afd_testkit.npu.ops.attention_limits import (
    Shapes,
    check_dtypes,
    check_lengths,
    check_shapes,
)
from afd_testkit.npu.ops.attention_requests import (
    PagedCache,
    as_lengths,
    from_tokens_first,
    per_request,
    spans,
    split_layout,
    to_tokens_first,
)

PACKED = ("TND", "NTD")
# The number of axes of a query, and the one that holds its heads.
AXES = {"BSH": (3, 2), "BSND": (4, 2), "BNSD": (4, 1), "TND": (3, 1), "NTD": (3, 0)}
Lengths: TypeAlias = Sequence[int] | torch.Tensor | None


def refuse_given(operator: str, **arguments: object) -> None:
    """:class:`NotEmulated` for the first argument that is neither None nor 0."""
    emulated_only(operator, **{name: (given, (None, 0)) for name, given in arguments.items()})


@dataclass(frozen=True)
class Fused:
    """One call, its arguments under the names of the first version.

    ``query``, ``key``, ``value``, ``query_rope`` and ``key_rope`` as given; the rope parts are
    appended to the head dimension of query and key before the scores are computed.
    """

    operator: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_rope: torch.Tensor | None
    key_rope: torch.Tensor | None
    visibility: Visibility
    query_lengths: Lengths
    key_lengths: Lengths
    block_table: torch.Tensor | None
    block_size: int
    heads: int
    kv_heads: int
    scale: float
    layout: str
    inner_precise: int
    want_lse: bool
    sink: torch.Tensor | None = None

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output in the layout asked for, and the logarithms of the denominators.

        These are float32 [T, N, 1] for packed layouts and [B, N, S, 1] for padded ones, or [1]
        holding zero where they are not asked for.  Tokens of no request get zeros and -inf.
        """
        given, returned = split_layout(self.operator, self.layout)
        packed = given in PACKED
        self._check_arguments(given)
        query = to_tokens_first(self.query, given, self.heads)
        rows = self._packed_rows(query) if packed else self._padded_rows(query)
        queries = [query[row].shape[0] for row in rows]
        check_shapes(self._shapes(query.shape[-1], max(queries, default=0)))
        if self.query_rope is not None:
            rope = to_tokens_first(self.query_rope, given, self.heads)
            query = torch.cat([query, rope], dim=-1)
        keys = self._keys(given, len(rows))
        if packed:
            check_lengths(
                self.operator,
                sparse_mode=self.visibility.mode,
                total=query.shape[0],
                queries=queries,
                keys=[key.shape[0] for key, _ in keys],
            )
        output = query.new_zeros((*query.shape[:-1], self._value_dim()))
        lse = torch.full(query.shape[:-1], float("-inf"), dtype=torch.float32)
        for request, (row, (key, value)) in enumerate(zip(rows, keys, strict=True)):
            out, denominators = attend(
                query[row].transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                scale=self.scale,
                hidden=self.visibility.hidden(request, queries[request], key.shape[0]),
                sink=self.sink,
            )
            output[row] = out.transpose(0, 1).to(output.dtype)
            lse[row] = denominators.transpose(0, 1).to(torch.float32)
        attended = from_tokens_first(output, returned)
        if not self.want_lse:
            return attended, torch.zeros(1)
        lse = lse.unsqueeze(-1)
        return attended, lse if packed else lse.transpose(1, 2).contiguous()

    def _check_arguments(self, given: str) -> None:
        """What contradicts itself, whatever is relaxed; and the dtypes."""
        operator = self.operator
        if (self.query_rope is None) != (self.key_rope is None):
            raise KernelLimit(
                f"{operator}: query_rope and key_rope are given together or not at all."
            )
        if self.heads <= 0 or self.kv_heads <= 0 or self.heads % self.kv_heads:
            raise KernelLimit(
                f"{operator}: {self.heads} query heads for {self.kv_heads} key heads; the first "
                "are a multiple of the second."
            )
        if not 0 <= self.inner_precise <= 3:
            raise KernelLimit(f"{operator}: inner_precise={self.inner_precise}; it is 0 to 3.")
        if self.sink is not None and self.want_lse:
            raise NotEmulated(
                f"{operator}: the logarithms of the denominators beside learnable_sink have no "
                "reference; ask for one of them."
            )
        tensors = self._tensors()
        for name, tensor in tensors.items():
            if name.startswith("query"):
                self._check_axes(name, tensor, given, self.heads)
            elif self.block_table is None:
                self._check_axes(name, tensor, given, self.kv_heads)
            if tensor.dtype != self.query.dtype:
                raise KernelLimit(
                    f"{operator}: {name} is {tensor.dtype} and query {self.query.dtype}; they "
                    "have one dtype."
                )
        check_dtypes(
            operator,
            tensors,
            bfloat16_only=given in PACKED and (self.query_rope is None or self.block_table is None),
        )
        if self.block_table is not None:
            limit_dtype(operator, "block_table", self.block_table, (torch.int32,))

    def _check_axes(self, name: str, tensor: torch.Tensor, given: str, heads: int) -> None:
        axes, heads_axis = AXES[given]
        if tensor.dim() == axes:
            size = tensor.shape[heads_axis]
            if size % heads == 0 if given == "BSH" else size == heads:
                return
        raise KernelLimit(
            f"{self.operator}: {name} {list(tensor.shape)} is not in layout {given} with {heads} "
            "heads."
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = {"query": self.query, "key": self.key, "value": self.value}
        if self.query_rope is not None and self.key_rope is not None:
            named |= {"query_rope": self.query_rope, "key_rope": self.key_rope}
        return named

    def _shapes(self, dim: int, longest: int) -> Shapes:
        paged = self.block_table is not None
        rope = self.query_rope
        given, _ = split_layout(self.operator, self.layout)
        return Shapes(
            operator=self.operator,
            layout=self.layout,
            dim=dim,
            value_dim=self._value_dim(),
            rope_dim=None if rope is None else to_tokens_first(rope, given, self.heads).shape[-1],
            heads=self.heads,
            kv_heads=self.kv_heads,
            longest=longest,
            sparse_mode=self.visibility.mode,
            masked=self.visibility.mask is not None,
            cache_axes=self.key.dim() if paged else None,
            block_size=self.block_size if paged else None,
            sink=self.sink is not None,
        )

    def _value_dim(self) -> int:
        value = self.value
        given, _ = split_layout(self.operator, self.layout)
        if self.block_table is not None:
            return PagedCache(self.operator, "value", value, self.kv_heads).dim
        return int(to_tokens_first(value, given, self.kv_heads).shape[-1])

    def _packed_rows(self, query: torch.Tensor) -> list[slice]:
        ends = as_lengths(self.query_lengths)
        if ends is None:
            raise KernelLimit(
                f"{self.operator}: layout {self.layout} takes the cumulative lengths of queries."
            )
        found = spans(self.operator, "lengths of queries", ends, query.shape[0])
        return [slice(start, end) for start, end in found]

    def _padded_rows(self, query: torch.Tensor) -> list[tuple[int, slice]]:
        requests, most = query.shape[:2]
        lengths = as_lengths(self.query_lengths) if most > 1 else None
        taken = per_request(self.operator, "lengths of queries", lengths, requests, most)
        return [(request, slice(0, length)) for request, length in enumerate(taken)]

    def _keys(self, given: str, requests: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Key (with its rope part) and value of each request: [Skv, Nkv, D] and [Skv, Nkv, Dv]."""
        lengths = as_lengths(self.key_lengths)
        if self.block_table is not None:
            return self._paged_keys(self.block_table, lengths, requests)
        key = to_tokens_first(self.key, given, self.kv_heads)
        value = to_tokens_first(self.value, given, self.kv_heads)
        if self.key_rope is not None:
            key = torch.cat([key, to_tokens_first(self.key_rope, given, self.kv_heads)], dim=-1)
        rows: Sequence[slice | tuple[int, slice]]
        if given in PACKED:
            if lengths is None or len(lengths) != requests:
                raise KernelLimit(
                    f"{self.operator}: layout {self.layout} takes the cumulative lengths of keys, "
                    f"one for each of {requests} requests, not {lengths}."
                )
            found = spans(self.operator, "lengths of keys", lengths, key.shape[0])
            rows = [slice(start, end) for start, end in found]
        else:
            if key.shape[0] != requests:
                raise KernelLimit(
                    f"{self.operator}: key has {key.shape[0]} requests and query {requests}."
                )
            taken = per_request(self.operator, "lengths of keys", lengths, requests, key.shape[1])
            rows = [(request, slice(0, length)) for request, length in enumerate(taken)]
        return [(key[row], value[row]) for row in rows]

    def _paged_keys(
        self, table: torch.Tensor, lengths: list[int] | None, requests: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        operator = self.operator
        if lengths is None:
            raise KernelLimit(f"{operator}: a block table takes the lengths of keys as well.")
        given = [("key", self.key), ("value", self.value)]
        if self.key_rope is not None:
            given.append(("key_rope", self.key_rope))
        caches = [PagedCache(operator, name, cache, self.kv_heads) for name, cache in given]
        if any(cache.block_size != self.block_size for cache in caches):
            raise KernelLimit(
                f"{operator}: block_size={self.block_size}; key, value and key_rope have blocks of "
                f"{[cache.block_size for cache in caches]} tokens."
            )
        if table.dim() != 2 or table.shape[0] < requests:
            raise KernelLimit(
                f"{operator}: block_table {list(table.shape)} for {requests} requests; it has one "
                "row for each."
            )
        if self.layout.startswith(PACKED) and len(lengths) < requests:
            raise KernelLimit(
                f"{operator}: {len(lengths)} lengths of keys for {requests} requests; with a block "
                "table there is one for each."
            )
        most = table.shape[1] * self.block_size
        taken = per_request(operator, "lengths of keys", lengths, requests, most)
        result = []
        for request, length in enumerate(taken):
            parts = [cache.read(table[request], length) for cache in caches]
            merged = torch.cat([parts[0], parts[2]], dim=-1) if len(parts) == 3 else parts[0]
            result.append((merged, parts[1]))
        return result
