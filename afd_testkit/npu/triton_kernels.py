"""The triton kernels that vLLM launches on the paths covered here, as functions on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from afd_testkit.npu.errors import NotEmulated


class HostKernel:
    """Launched as a triton kernel is, ``kernel[grid](...)``; the grid does not matter here."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: torch.Tensor,
    **constants: int,
) -> None:
    """The KV slot of each scheduled token, written into ``slot_mapping``.

    A token at position ``p`` of request ``r`` has slot
    ``block_table[r, p // block_size] * block_size + p % block_size``; the entries behind the
    tokens get ``PAD_ID``.  Shapes: ``query_start_loc`` int32 [requests + 1], ``positions`` int64
    [num_tokens], ``block_table`` int32 [requests, blocks], ``slot_mapping`` int64
    [max_num_tokens].  Without context parallelism only.
    """
    if constants["TOTAL_CP_WORLD_SIZE"] != 1:
        raise NotEmulated(
            f"slot mapping over {constants['TOTAL_CP_WORLD_SIZE']} context-parallel ranks is not "
            "emulated; run with PCP 1 and DCP 1."
        )
    real = int(query_start_loc[-1])
    lengths = (query_start_loc[1:] - query_start_loc[:-1]).long()
    rows = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths, output_size=real)
    place = positions[:real].long()
    blocks = block_table[rows, place // block_size].long()
    slot_mapping[:real] = blocks * block_size + place % block_size
    slot_mapping[num_tokens:max_num_tokens] = constants["PAD_ID"]
