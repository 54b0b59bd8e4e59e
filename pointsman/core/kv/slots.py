"""`SlotDirectory`: which content is in which slot of host memory, for hosts that keep evicted blocks there.

A slot holds the content of one block, found by its key (`digests.py`). The directory plans the copies of a step. The
host moves the bytes before the step computes, in the order of the steps: blocks to slots, then blocks to blocks, then
slots to blocks.

    plan = directory.assign(saves, loads)     takes slots, the least recently used first
    directory.withdraw(plan.saves)            the copies of a plan will not be made
    directory.discard(keys)                   no request will need this content again
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class SlotLoad(NamedTuple):
    """Blocks of the pool that are filled from host memory."""

    keys: Sequence[bytes]
    """Their contents, each in the directory or saved by the same step."""
    block_ids: Sequence[int]


class SlotSave(NamedTuple):
    """A block whose content goes into a slot."""

    key: bytes
    block_id: int
    slot: int


class SlotPlan(NamedTuple):
    """The copies of one step."""

    saves: list[SlotSave]
    loaded_slots: list[int]
    loaded_blocks: list[int]
    """Parallel to `loaded_slots`: the block that each slot is copied to."""
    moves: list[tuple[int, int]]
    """(from block, to block): content that the step saves and loads, copied within the pool; all blocks are read before
    any is written."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are copied between the pool and host memory."""
        return len(self.saves) + len(self.loaded_slots)


class SlotDirectory:
    """Slots 0 to `num_slots` - 1, and their contents."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by key, the least recently used first
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        """Number of contents, including those that steps in flight save."""
        return len(self._slots)

    def has(self, key: bytes) -> bool:
        """Whether a content has a slot. Changes nothing."""
        return key in self._slots

    def num_found(self, keys: Sequence[bytes]) -> int:
        """Number of consecutive contents, from the first one on, that have a slot. Changes nothing."""
        return next((index for index, key in enumerate(keys) if key not in self._slots), len(keys))

    def assign(self, saves: Sequence[tuple[int, bytes]], loads: Sequence[SlotLoad]) -> SlotPlan:
        """Take slots for the blocks to save, given with their keys, and find the slots of the contents to load.

        Content that has a slot is not copied again. If loads need all slots, the blocks to save are lost.
        """
        loaded_slots: list[int] = []
        loaded_blocks: list[int] = []
        moves: list[tuple[int, int]] = []
        block_of = {key: block for block, key in saves} if loads else {}
        for load in loads:
            for key in reversed(load.keys):  # a prefix outlives its suffix
                if key in self._slots:
                    self._slots.move_to_end(key)
            for key, block in zip(load.keys, load.block_ids, strict=True):
                slot = self._slots.get(key)
                if slot is None:
                    moves.append((block_of[key], block))
                    continue
                loaded_slots.append(slot)
                loaded_blocks.append(block)
        needed = set(loaded_slots)
        taken: list[SlotSave] = []
        for block, key in saves:
            if key in self._slots:
                self._slots.move_to_end(key)
            elif (slot := self._take_slot(needed)) is not None:
                taken.append(SlotSave(key, block, slot))
                self._slots[key] = slot
        # If more was saved than fits, later contents took slots of earlier ones.
        kept = [one for one in taken if self._slots.get(one.key) == one.slot]
        return SlotPlan(kept, loaded_slots, loaded_blocks, moves)

    def _take_slot(self, needed: set[int]) -> int | None:
        if self._free:
            return self._free.pop()
        key, slot = next(iter(self._slots.items()))
        if slot in needed:  # then this step uses every slot
            return None
        del self._slots[key]
        return slot

    def discard(self, keys: Iterable[bytes]) -> None:
        """Free the slots of these contents, if they have any."""
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def withdraw(self, saves: Iterable[SlotSave]) -> None:
        """These copies will not be made: their slots do not have the content."""
        for one in saves:
            if self._slots.get(one.key) == one.slot:
                del self._slots[one.key]
        self._free = sorted(set(range(self.num_slots)).difference(self._slots.values()), reverse=True)

    def clear(self) -> None:
        """Free all slots. Copies that are planned may still run: slots are written in the order of the plans."""
        self._slots.clear()
        self._free = list(range(self.num_slots - 1, -1, -1))

    def check(self) -> None:
        """Raises AssertionError unless every slot is either free or has one key."""
        slots = [*self._free, *self._slots.values()]
        assert sorted(slots) == list(range(self.num_slots)), f"{self.num_slots} slots of host memory, found {slots}"
