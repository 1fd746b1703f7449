"""From the layouts and lengths of the fused attention operators to one request at a time.

Letters: B requests, S tokens of a request, T tokens of all requests, N heads, D head dimension,
H = N * D.  A layout ``IN_OUT`` takes IN and returns OUT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated

LAYOUTS = (
    "BSH",
    "BSND",
    "BNSD",
    "BNSD_BSND",
    "BNSD_NBSD",
    "BSND_NBSD",
    "BSH_NBSD",
    "TND",
    "TND_NTD",
    "NTD_TND",
)


def split_layout(operator: str, layout: str) -> tuple[str, str]:
    """The input's and the output's layout; :class:`NotEmulated` for an unknown one."""
    if layout not in LAYOUTS:
        raise NotEmulated(
            f"{operator}: input_layout={layout!r}; layouts with a reference: {', '.join(LAYOUTS)}."
        )
    given, _, returned = layout.partition("_")
    return given, returned or given


def to_tokens_first(tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """``tensor`` as [T, N, D] (packed layouts) or [B, S, N, D] (padded ones); a view."""
    if layout == "BSH":
        return tensor.unflatten(-1, (heads, -1))
    if layout in ("BNSD", "NTD"):
        return tensor.transpose(-3, -2)
    return tensor


def from_tokens_first(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """[T, N, D] or [B, S, N, D] in ``layout``, contiguous."""
    if layout == "BSH":
        return tensor.flatten(-2).contiguous()
    if layout in ("BNSD", "NTD"):
        return tensor.transpose(-3, -2).contiguous()
    if layout == "NBSD":
        return tensor.permute(2, 0, 1, 3).contiguous()
    return tensor.contiguous()


def as_lengths(given: Sequence[int] | torch.Tensor | None) -> list[int] | None:
    """Lengths as a list; a tensor of integers is taken as torch's own int[] arguments take it."""
    if given is None:
        return None
    values = given.tolist() if isinstance(given, torch.Tensor) else given
    return [int(value) for value in values]


def spans(operator: str, name: str, ends: Sequence[int], total: int) -> list[tuple[int, int]]:
    """[start, end) of every request from cumulative lengths; they never fall nor pass ``total``."""
    starts = [0, *ends[:-1]]
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not start <= end <= total:
            raise KernelLimit(
                f"{operator}: {name} is cumulative and within the {total} tokens given; entry "
                f"{index} of {list(ends)} is {end} after {start}."
            )
    return list(zip(starts, ends, strict=True))


def per_request(
    operator: str, name: str, lengths: Sequence[int] | None, requests: int, most: int
) -> list[int]:
    """One length a request from none (all of ``most``), one for all, or at least one for each."""
    if lengths is None:
        return [most] * requests
    if len(lengths) == 1:
        lengths = [lengths[0]] * requests
    if len(lengths) < requests:
        raise KernelLimit(
            f"{operator}: {name} has {len(lengths)} lengths for {requests} requests; pass one for "
            "all or one for each."
        )
    taken = list(lengths[:requests])
    for index, length in enumerate(taken):
        if not 0 <= length <= most:
            raise KernelLimit(
                f"{operator}: {name}[{index}]={length} is outside of the {most} tokens given."
            )
    return taken


@dataclass(frozen=True)
class PagedCache:
    """Keys or values in blocks, in any of the layouts that the kernels take.

    ``cache`` is [blocks, block_size, H], [blocks, N, block_size, D], or in fractal format (NZ)
    [blocks, N, D / 16, block_size, 16].
    """

    operator: str
    name: str
    cache: torch.Tensor
    heads: int

    def __post_init__(self) -> None:
        if self.cache.dim() not in (3, 4, 5):
            raise KernelLimit(
                f"{self.operator}: {self.name} {list(self.cache.shape)} is no paged cache; it has "
                "3, 4 or 5 axes."
            )
        shape = list(self.cache.shape)
        fits = shape[2] % self.heads == 0 if len(shape) == 3 else shape[1] == self.heads
        if not fits:
            raise KernelLimit(
                f"{self.operator}: {self.name} {shape} does not have the {self.heads} heads named."
            )

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return int(self.cache.shape[{3: 1, 4: 2, 5: 3}[self.cache.dim()]])

    @property
    def dim(self) -> int:
        """D, the elements of a token and head."""
        shape = self.cache.shape
        return int({3: shape[2] // self.heads, 4: shape[-1], 5: shape[2] * shape[-1]}[len(shape)])

    def read(self, table: torch.Tensor, length: int) -> torch.Tensor:
        """The first ``length`` tokens of the request whose blocks ``table`` [n] lists.

        Returns [length, N, D].  Entries of the table beyond those tokens are not looked at.
        """
        blocks = -(-length // self.block_size)
        if blocks > table.shape[0]:
            raise KernelLimit(
                f"{self.operator}: {length} tokens need {blocks} blocks of {self.block_size}; the "
                f"request's row of the block table has {table.shape[0]}."
            )
        used = table[:blocks].long()
        if length and not 0 <= int(used.min()) <= int(used.max()) < self.cache.shape[0]:
            raise KernelLimit(
                f"{self.operator}: block table entries {used.tolist()} for {length} tokens; "
                f"{self.name} has blocks 0 to {self.cache.shape[0] - 1}."
            )
        return self._tokens_first(self.cache[used])[:length]

    def _tokens_first(self, blocks: torch.Tensor) -> torch.Tensor:
        """Some blocks as [tokens, N, D]."""
        if blocks.dim() == 3:
            tokens = blocks.unflatten(-1, (self.heads, -1))
        elif blocks.dim() == 4:
            tokens = blocks.transpose(1, 2)
        else:
            tokens = blocks.permute(0, 3, 1, 2, 4).flatten(-2)
        return tokens.flatten(0, 1)
