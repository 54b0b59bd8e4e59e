"""Turns and rooms: no tenant keeps another out, and none waits for ever."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.engine.turns import _MAX_KEPT, SHARE, Room, RoomError, Turn, Turns

TENANTS = ("a", "b", "c")


def drain(turns: Turns[int]) -> list[Turn[int]]:
    taken = []
    while (turn := turns.take()) is not None:
        taken.append(turn)
        turns.end(turn)
    return taken


# ---------------------------------------------------------------------------------------------------- turns


def test_a_tenant_comes_before_the_backlog_of_another() -> None:
    turns = Turns[int]()
    for item in range(100):
        turns.put("a", item)
    assert turns.take() is not None
    turns.put("b", 100)
    later = [turns.take(), turns.take()]
    assert "b" in [turn.tenant for turn in later if turn is not None]


def test_costs_count_and_not_items() -> None:
    turns = Turns[int]()
    for item in range(10):
        turns.put("a", item, cost=5)
        for _ in range(5):
            turns.put("b", item, cost=1)
    served = Counter[str]()
    for turn in drain(turns)[:30]:
        served[turn.tenant] += 5 if turn.tenant == "a" else 1
    assert abs(served["a"] - served["b"]) <= 5


def test_a_tenant_leaves_a_worker_to_others() -> None:
    turns = Turns[int](most_out=2)
    for item in range(5):
        turns.put("a", item)
    first, second = turns.take(), turns.take()
    assert first is not None and second is not None
    assert turns.take() is None
    turns.put("b", 5)
    other = turns.take()
    assert other is not None and other.tenant == "b"
    turns.end(first)
    third = turns.take()
    assert third is not None and third.tenant == "a"


def test_what_is_dropped_costs_its_tenant_nothing() -> None:
    turns = Turns[str]()
    turns.put("b", "first")
    busy = turns.take()
    assert busy is not None
    for _ in range(3):
        turns.put("a", "unwanted", cost=1000)
    turns.put("a", "wanted")
    for _ in range(5):
        turns.put("b", "later")
    turns.end(busy)
    order = []
    while (turn := turns.take()) is not None:
        if turn.item == "unwanted":
            turns.drop(turn)
        else:
            order.append(turn.item)
            turns.end(turn)
    assert order.index("wanted") <= 1


def test_idle_tenants_are_forgotten() -> None:
    turns = Turns[int]()
    for item in range(5000):
        turns.put(f"tenant {item}", item)
        drain(turns)
    assert not turns._tenants


def test_idle_tenants_are_forgotten_while_another_is_busy() -> None:
    turns = Turns[int]()
    for item in range(5000):
        turns.put("busy", item)
        turns.put(f"tenant {item}", item)
        turn = turns.take()
        assert turn is not None
        turns.end(turn)
        turn = turns.take()
        assert turn is not None
        turns.end(turn)
    assert len(turns._tenants) < 200


def test_what_goes_on_comes_before_the_tenants_other_items() -> None:
    turns = Turns[str]()
    for item in ("first", "second", "third"):
        turns.put("a", item, cost=10)
    for item in ("other", "another"):
        turns.put("b", item, cost=10)
    turn = turns.take()
    assert turn is not None and turn.item == "first"
    turns.end(turn)
    turns.put("a", "first, continued", cost=10, goes_on=True)
    order = [turn.item for turn in drain(turns)]
    assert [item for item in order if "other" not in item] == ["first, continued", "second", "third"]
    assert order[0] == "other"  # it is this tenant's turn all the same


def test_an_idle_tenant_saves_nothing_up() -> None:
    turns = Turns[int]()
    turns.put("b", 0)
    drain(turns)
    for item in range(20):
        turns.put("a", item)
    for _ in range(10):
        turn = turns.take()
        assert turn is not None
        turns.end(turn)
    for item in range(20):
        turns.put("b", item)
    order = [turn.tenant for turn in drain(turns)]
    assert order[:20].count("a") in (9, 10)


@given(
    st.lists(
        st.tuples(st.sampled_from(TENANTS), st.integers(1, 50)) | st.none(),
        max_size=200,
    )
)
def test_all_come_out_once_and_each_tenants_in_order(steps: list[tuple[str, int] | None]) -> None:
    turns, put, taken = Turns[int](), dict[str, list[int]](), dict[str, list[int]]()
    for number, step in enumerate(steps):
        if step is None:
            if (turn := turns.take()) is not None:
                taken.setdefault(turn.tenant, []).append(turn.item)
                turns.end(turn)
        else:
            tenant, cost = step
            turns.put(tenant, number, cost)
            put.setdefault(tenant, []).append(number)
    for turn in drain(turns):
        taken.setdefault(turn.tenant, []).append(turn.item)
    assert taken == put and not len(turns)


def test_what_is_removed_does_not_come_and_costs_nothing() -> None:
    turns = Turns[int]()
    waiting = [turns.put("a", item) for item in range(50)]
    for item in (0, *range(10, 49)):
        turns.remove(waiting[item])
    for item in range(100, 110):
        turns.put("b", item)
    turns.put("a", 50)
    taken = drain(turns)
    assert [turn.item for turn in taken if turn.tenant == "a"] == [*range(1, 10), 49, 50]
    assert [turn.tenant for turn in taken[:20]].count("b") in (9, 10)


def test_tenants_whose_items_are_removed_are_forgotten() -> None:
    turns = Turns[int]()
    for item in range(5000):
        turns.remove(turns.put(f"tenant {item}", item))
    assert not turns._tenants and not len(turns)


def test_removing_what_was_taken_changes_nothing() -> None:
    turns = Turns[int]()
    turns.put("a", 0)
    turns.put("a", 1)
    turn = turns.take()
    assert turn is not None
    turns.remove(turn)
    assert [turn.item for turn in drain(turns)] == [1]


def test_what_is_put_and_removed_again_and_again_leaves_nothing() -> None:
    turns = Turns[int]()
    for item in range(3):
        turns.put("b", item)
        turns.put("a", item)
    busy = turns.take()
    for item in range(5000):
        turns.remove(turns.put("a", item))
        turns.remove(turns.put("c", item))
    assert busy is not None and len(turns._offers) < 200 and len(turns) == 5


def test_made_up_tenants_are_forgotten_while_a_worker_is_held() -> None:
    turns = Turns[int]()
    turns.put("held", 0)
    assert turns.take() is not None
    for item in range(50_000):
        turns.put(f"tenant {item}", item)
        turn = turns.take()
        assert turn is not None
        turns.end(turn)
    assert len(turns._tenants) <= 2 * (_MAX_KEPT + 1) and len(turns._offers) < 200


def test_a_turn_among_many_tenants_costs_no_look_at_each() -> None:
    turns = Turns[int]()
    for item in range(20_000):
        turns.put(f"tenant {item}", item)
    began = time.process_time()
    assert [turn.item for turn in drain(turns)] == [*range(20_000)]
    assert time.process_time() - began < 5  # a look at each takes 40 s


# ----------------------------------------------------------------------------------------------------- rooms


def fill(room: Room, tenant: str, amount: int = 1) -> int:
    """Take as much as possible; how often that worked."""
    for number in range(10_000):
        try:
            room.take(tenant, amount)
        except RoomError:
            return number
    raise AssertionError("it is never full")


def test_one_tenant_alone_leaves_a_quarter_free() -> None:
    room = Room(1000)
    assert fill(room, "a") == 1000 * SHARE // (SHARE + 1)
    assert fill(room, "b") > 150 and fill(room, "c") > 40


def test_an_item_that_comes_in_parts_fits_as_one_that_comes_whole() -> None:
    room = Room(100)
    for own in range(0, 100, 10):
        room.take("a", 10, own)
    with pytest.raises(RoomError):
        room.take("b", 1)
    assert room.held == {"a": 100}


def test_one_tenant_may_hold_all_where_it_is_the_only_one() -> None:
    room = Room(1000, is_shared=False)
    assert fill(room, "") == 1000


def test_the_error_has_the_tenants_own_figures() -> None:
    room = Room(100)
    fill(room, "a")
    with pytest.raises(RoomError) as caught:
        room.take("a", 1)
    error = caught.value
    assert (error.held, error.total, error.size) == (75, 75, 100) and error.most < 76


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 40), st.booleans()), max_size=100))
def test_a_room_never_holds_more_than_its_size(steps: list[tuple[str, int, bool]]) -> None:
    room, held = Room(100), Counter[str]()
    for tenant, amount, gives in steps:
        if gives:
            if held[tenant]:
                room.give_back(tenant, held[tenant])
                held[tenant] = 0
            continue
        try:
            room.take(tenant, amount)
        except RoomError:
            continue
        held[tenant] += amount
        assert held.total() == room.total <= room.size
    assert room.held == {tenant: amount for tenant, amount in held.items() if amount}
