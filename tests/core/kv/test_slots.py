"""The directory of host memory: which contents it drops. `tests/engine/kv/test_kv_offload.py` tests the copies."""

from __future__ import annotations

from pointsman.core.kv.slots import SlotDirectory, SlotLoad


def key_of(value: int) -> bytes:
    return value.to_bytes(4, "big")


def directory_with_contents(num_slots: int, count: int) -> SlotDirectory:
    directory = SlotDirectory(num_slots)
    directory.assign_slots([(value, key_of(value)) for value in range(count)], [])
    return directory


def test_slots_of_discarded_contents_are_assigned_first() -> None:
    directory = directory_with_contents(4, 4)
    directory.discard_contents([key_of(2), key_of(9)])
    directory.check()
    plan = directory.assign_slots([(7, key_of(7))], [])
    assert [save.slot for save in plan.saves] == [2]
    assert [directory.num_found([key_of(value)]) for value in (0, 1, 2, 3, 7)] == [1, 1, 0, 1, 1]


def test_contents_of_withdrawn_copies_are_not_found() -> None:
    directory = directory_with_contents(4, 2)
    plan = directory.assign_slots([(5, key_of(5)), (0, key_of(0))], [SlotLoad([key_of(1)], [8])])
    assert (plan.num_blocks, plan.loaded_slots, plan.loaded_blocks) == (2, [1], [8]), "0 is here already"
    directory.withdraw_saves(plan.saves)
    directory.check()
    assert [directory.num_found([key_of(value)]) for value in (0, 1, 5)] == [1, 1, 0]
    assert len(directory) == 2


def test_a_step_may_load_blocks_that_it_saves() -> None:
    """The blocks are copied within the pool, because host memory may have no slot for them."""
    directory = directory_with_contents(2, 2)
    load = SlotLoad([key_of(7), key_of(0), key_of(1)], [10, 11, 12])
    plan = directory.assign_slots([(3, key_of(7))], [load])
    assert (plan.saves, plan.moves) == ([], [(3, 10)])
    assert list(zip(plan.loaded_slots, plan.loaded_blocks, strict=True)) == [(0, 11), (1, 12)]
