"""`SlotDirectory`: finds evicted blocks in slots of host memory, and assigns slots to blocks.

A slot holds the content of one block, and is found by the key of this content (`digests.py`). The directory plans the
copies of a step. The host copies the bytes before the step computes: first blocks to slots, then blocks to blocks, then
slots to blocks. It executes the plans in the order of their steps.

    plan = directory.assign_slots(saves, loads)  assign slots to blocks to save, the least recently used slots first
    directory.withdraw_saves(plan.saves)         record that the copies of a plan are not executed
    directory.discard_contents(keys)             free slots whose content no request will need again
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class SlotLoad(NamedTuple):
    """Blocks of the pool that are filled from host memory."""

    keys: Sequence[bytes]
    """Keys of the blocks' contents; each content is in the directory or is saved by the same step."""
    block_ids: Sequence[int]


class SlotSave(NamedTuple):
    """The copy of a block into a slot."""

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
    """(source block, destination block) of content that the same step saves and loads, copied within the pool. All
    source blocks are read before a destination is written."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that are copied between the pool and host memory."""
        return len(self.saves) + len(self.loaded_slots)


class SlotDirectory:
    """A directory of the slots 0 to `num_slots` - 1 by the keys of their contents."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # slot by key, the least recently used first
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        """Number of contents in slots, including contents that steps in flight save."""
        return len(self._slots)

    def has_content(self, key: bytes) -> bool:
        """Whether the content with this key has a slot. Does not change the order in which slots are reused."""
        return key in self._slots

    def num_found(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys of `keys` whose contents all have a slot. Does not change the order in which slots are
        reused."""
        return next((index for index, key in enumerate(keys) if key not in self._slots), len(keys))

    def assign_slots(self, saves: Sequence[tuple[int, bytes]], loads: Sequence[SlotLoad]) -> SlotPlan:
        """Plan the copies of a step: assign slots to the blocks to save, (block, key) each, and find the slots of the
        contents to load.

        Content that has a slot is not copied again. If loads need all slots, the blocks to save are not saved.
        """
        loaded_slots: list[int] = []
        loaded_blocks: list[int] = []
        moves: list[tuple[int, int]] = []
        block_of = {key: block for block, key in saves} if loads else {}
        for load in loads:
            for key in reversed(load.keys):  # so that a prefix is evicted after its suffix
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
            elif (slot := self._reuse_slot(needed)) is not None:
                taken.append(SlotSave(key, block, slot))
                self._slots[key] = slot
        # If there are fewer slots than blocks to save, later contents took the slots of earlier contents.
        kept = [one for one in taken if self._slots.get(one.key) == one.slot]
        return SlotPlan(kept, loaded_slots, loaded_blocks, moves)

    def _reuse_slot(self, needed: set[int]) -> int | None:
        if self._free:
            return self._free.pop()
        key, slot = next(iter(self._slots.items()))
        if slot in needed:  # the least recently used slot is needed, so this step uses every slot
            return None
        del self._slots[key]
        return slot

    def discard_contents(self, keys: Iterable[bytes]) -> None:
        """Free the slots of the contents with these keys, if they have slots."""
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def withdraw_saves(self, saves: Iterable[SlotSave]) -> None:
        """Remove from the directory the contents of planned copies that are not executed: their slots do not have these
        contents."""
        for one in saves:
            if self._slots.get(one.key) == one.slot:
                del self._slots[one.key]
        self._free = sorted(set(range(self.num_slots)).difference(self._slots.values()), reverse=True)

    def clear(self) -> None:
        """Free all slots. Planned copies may still run, because slots are written in the order of the plans."""
        self._slots.clear()
        self._free = list(range(self.num_slots - 1, -1, -1))

    def check(self) -> None:
        """Check that every slot is either free or has one key. Raises AssertionError otherwise."""
        slots = [*self._free, *self._slots.values()]
        assert sorted(slots) == list(range(self.num_slots)), f"{self.num_slots} slots of host memory, found {slots}"
