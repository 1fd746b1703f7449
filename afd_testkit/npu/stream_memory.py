"""Blocks of memory by address, and what is known of each while it is alive."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from afd_testkit.npu.happens_before import HappensBefore

# New blocks between two looks for dead ones.
SWEEP = 4096


class Place(Enum):
    """Where memory is: on the device, on the host, or on the host and pinned."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"


@dataclass(slots=True)
class Block:
    """One allocation.  ``number`` is never used again, unlike its address."""

    number: int
    nbytes: int
    place: Place = Place.DEVICE
    owners: dict[int, StorageWeakRef] = field(default_factory=dict)

    @property
    def freed(self) -> bool:
        """Whether no storage has this memory any more."""
        return all(owner.expired() for owner in self.owners.values())


class Memory:
    """Finds the block of a tensor; memory that was freed and is used again is another block.

    A weak reference keeps a storage's address (``_cdata``) from being used again, so that a
    storage is recognized by it.  Storages over the same memory (``from_numpy`` of one array,
    twice) are one block when they start at the same byte.
    """

    def __init__(self, order: HappensBefore) -> None:
        self._order = order
        self._blocks: dict[int, Block] = {}
        self._numbers = itertools.count()
        self._new = 0

    def block(self, tensor: torch.Tensor) -> Block:
        """The block that holds ``tensor``, which has memory."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        block = self._blocks.get(address)
        if block is not None and storage._cdata in block.owners:
            return block
        if block is None or block.freed:
            block = self._add(address, storage.nbytes())
        block.owners[storage._cdata] = StorageWeakRef(storage)
        return block

    def forget(self, tensor: torch.Tensor) -> None:
        """``tensor`` leaves its memory."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._blocks:
            self._order.forget(self._blocks.pop(address).number)

    def _add(self, address: int, nbytes: int) -> Block:
        if address in self._blocks:
            self._order.forget(self._blocks[address].number)
        self._new += 1
        if self._new >= SWEEP:
            self._sweep()
        block = self._blocks[address] = Block(next(self._numbers), nbytes)
        return block

    def _sweep(self) -> None:
        self._new = 0
        for address in [key for key, block in self._blocks.items() if block.freed]:
            self._order.forget(self._blocks.pop(address).number)
