"""Host memory behind the KV pool: evicted blocks are copied there, and copied back instead of recomputed.

The pool evicts the content of a block when it needs the block and it is the least recently used: a cached prefix, or
what a preempted request had computed. The scheduler names such blocks in `SchedulerOutput.saves`, and asks,
when a request comes, how many of its blocks are here.

The directory (which content is in which slot) is kept by the thread that owns the scheduler; bytes are moved by
the thread that executes the steps, in their order. So one step's copies are planned while another one executes:

    copies = tier.plan(saves, loads)     owner: slots are taken, the least recently used first
    copies.run()                         with the step, before it computes: blocks -> slots, then slots -> blocks

On a GPU the slots are pinned memory, and the copies are queued on the stream of the model's kernels, which keeps the
order and overlaps with nothing. (That path is written by the book and has not run on a GPU so far.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pointsman.core import ConfigError
from pointsman.engine.kv.pool import KVPool, bytes_per_block


class SlotLoad(NamedTuple):
    """Blocks of the pool that are filled from host memory."""

    keys: Sequence[bytes]
    """What to fill them with; all of it is here."""
    block_ids: Sequence[int]


class SlotSave(NamedTuple):
    """A block whose content goes into a slot."""

    key: bytes
    block_id: int
    slot: int


@dataclass(slots=True, eq=False)
class HostCopies:
    """What one step copies between the pool and host memory."""

    pool: KVPool
    host: KVPool
    saves: list[SlotSave] = field(default_factory=list)
    loaded_slots: list[int] = field(default_factory=list)
    loaded_blocks: list[int] = field(default_factory=list)
    is_done: bool = False
    """Whether the slots have their content."""

    def run(self) -> None:
        """Copy. Steps do so in their order, before they compute."""
        _copy_blocks(self.pool, [one.block_id for one in self.saves], self.host, [one.slot for one in self.saves])
        _copy_blocks(self.host, self.loaded_slots, self.pool, self.loaded_blocks)
        self.is_done = True


class HostTier:
    """Blocks in host memory, found by their content keys (`pointsman/core/kv/content.py`).

    Args:
        pool: that they belong to.
        num_bytes: the maximum that they take. A slot takes as much as a block.

    Raises:
        ConfigError: less than one block fits.
        ValueError: there is not enough memory.
    """

    def __init__(self, pool: KVPool, num_bytes: int) -> None:
        block_bytes = bytes_per_block(pool.layers, pool.block_size, pool.dtype)
        if num_bytes < block_bytes:
            raise ConfigError(
                f"kv_offload_bytes is {num_bytes}, less than one block of {block_bytes} bytes; give more, or None "
                "for no offload"
            )
        self.num_blocks = num_bytes // block_bytes
        self._pool = pool
        self._host = KVPool(
            pool.layers, num_blocks=self.num_blocks, block_size=pool.block_size, dtype=pool.dtype, device="cpu"
        )
        if pool.device.type == "cuda":
            self._host.pin_memory()
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by key, the least recently used first
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._plans: list[HostCopies] = []  # that have not run

    def __len__(self) -> int:
        """Blocks that are here, or will be when the steps in flight are over."""
        return len(self._slots)

    def num_found(self, keys: Sequence[bytes]) -> int:
        """How many of these are here in a row, from the first one on. Changes nothing."""
        return next((index for index, key in enumerate(keys) if key not in self._slots), len(keys))

    def plan(self, saves: Sequence[tuple[int, bytes]], loads: Sequence[SlotLoad]) -> HostCopies:
        """Take slots for the content of blocks, given with their keys, and find those of what is to be loaded.

        Content that is here already is not copied again. If loads need all slots, what would be saved is lost.
        """
        copies = HostCopies(self._pool, self._host)
        self._plans = [*(one for one in self._plans if not one.is_done), copies]
        for load in loads:
            for key in reversed(load.keys):  # a prefix outlives what comes behind it
                self._slots.move_to_end(key)
            copies.loaded_slots += [self._slots[key] for key in load.keys]
            copies.loaded_blocks += load.block_ids
        needed = set(copies.loaded_slots)
        for block, key in saves:
            if key in self._slots:
                self._slots.move_to_end(key)
            elif (slot := self._take_slot(needed)) is not None:
                copies.saves.append(SlotSave(key, block, slot))
                self._slots[key] = slot
        # If more was saved than fits, slots went to later ones.
        copies.saves = [one for one in copies.saves if self._slots.get(one.key) == one.slot]
        return copies

    def _take_slot(self, needed: set[int]) -> int | None:
        if self._free:
            return self._free.pop()
        key, slot = next(iter(self._slots.items()))
        if slot in needed:  # it is as recently used as anything
            return None
        del self._slots[key]
        return slot

    def drop_plans(self) -> None:
        """The steps in flight are void: what they were to save, and have not, is forgotten."""
        for copies in self._plans:
            for one in () if copies.is_done else copies.saves:
                if self._slots.get(one.key) == one.slot:
                    del self._slots[one.key]
        self._plans = []
        self._free = sorted(set(range(self.num_blocks)).difference(self._slots.values()), reverse=True)

    def clear(self) -> None:
        """Forget everything. Copies that are planned may still run: slots are written in the order of the plans."""
        self._slots.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def check(self) -> None:
        """Raises AssertionError unless every slot is either free or has one key."""
        slots = [*self._free, *self._slots.values()]
        assert sorted(slots) == list(range(self.num_blocks)), f"{self.num_blocks} slots of host memory, found {slots}"


def _copy_blocks(source: KVPool, from_blocks: list[int], target: KVPool, to_blocks: list[int]) -> None:
    if not from_blocks:
        return
    for a, b in zip((*source.keys, *source.values), (*target.keys, *target.values), strict=True):
        _copy_rows(a, from_blocks, b, to_blocks)


def _copy_rows(source: Tensor, from_rows: list[int], target: Tensor, to_rows: list[int]) -> None:
    if source.device == target.device:
        target.index_copy_(0, torch.tensor(to_rows), source.index_select(0, torch.tensor(from_rows)))
        return
    for here, there in zip(from_rows, to_rows, strict=True):
        target[there].copy_(source[here], non_blocking=True)
