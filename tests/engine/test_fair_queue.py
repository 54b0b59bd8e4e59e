"""Fair queue and shared capacity: no tenant blocks another, and none waits forever."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.engine.fair_queue import _MAX_KEPT, SHARE, CapacityError, FairQueue, QueuedItem, SharedCapacity

TENANTS = ("a", "b", "c")


def drain(queue: FairQueue[int]) -> list[QueuedItem[int]]:
    taken = []
    while (entry := queue.take()) is not None:
        taken.append(entry)
        queue.end(entry)
    return taken


# ---------------------------------------------------------------------------------------------------- queue


def test_a_tenant_comes_before_the_backlog_of_another() -> None:
    queue = FairQueue[int]()
    for item in range(100):
        queue.put("a", item)
    assert queue.take() is not None
    queue.put("b", 100)
    later = [queue.take(), queue.take()]
    assert "b" in [entry.tenant for entry in later if entry is not None]


def test_fairness_counts_costs_not_items() -> None:
    queue = FairQueue[int]()
    for item in range(10):
        queue.put("a", item, cost=5)
        for _ in range(5):
            queue.put("b", item, cost=1)
    served = Counter[str]()
    for entry in drain(queue)[:30]:
        served[entry.tenant] += 5 if entry.tenant == "a" else 1
    assert abs(served["a"] - served["b"]) <= 5


def test_a_tenant_never_occupies_all_workers() -> None:
    queue = FairQueue[int](max_out=2)
    for item in range(5):
        queue.put("a", item)
    first, second = queue.take(), queue.take()
    assert first is not None and second is not None
    assert queue.take() is None
    queue.put("b", 5)
    other = queue.take()
    assert other is not None and other.tenant == "b"
    queue.end(first)
    third = queue.take()
    assert third is not None and third.tenant == "a"


def test_dropped_items_cost_their_tenant_nothing() -> None:
    queue = FairQueue[str]()
    queue.put("b", "first")
    busy = queue.take()
    assert busy is not None
    for _ in range(3):
        queue.put("a", "unwanted", cost=1000)
    queue.put("a", "wanted")
    for _ in range(5):
        queue.put("b", "later")
    queue.end(busy)
    order = []
    while (entry := queue.take()) is not None:
        if entry.item == "unwanted":
            queue.drop(entry)
        else:
            order.append(entry.item)
            queue.end(entry)
    assert order.index("wanted") <= 1


def test_idle_tenants_are_forgotten() -> None:
    queue = FairQueue[int]()
    for item in range(5000):
        queue.put(f"tenant {item}", item)
        drain(queue)
    assert not queue._tenants


def test_idle_tenants_are_forgotten_while_another_is_busy() -> None:
    queue = FairQueue[int]()
    for item in range(5000):
        queue.put("busy", item)
        queue.put(f"tenant {item}", item)
        entry = queue.take()
        assert entry is not None
        queue.end(entry)
        entry = queue.take()
        assert entry is not None
        queue.end(entry)
    assert len(queue._tenants) < 200


def test_continued_items_come_before_the_tenants_other_items() -> None:
    queue = FairQueue[str]()
    for item in ("first", "second", "third"):
        queue.put("a", item, cost=10)
    for item in ("other", "another"):
        queue.put("b", item, cost=10)
    entry = queue.take()
    assert entry is not None and entry.item == "first"
    queue.end(entry)
    queue.put("a", "first, continued", cost=10, continues=True)
    order = [entry.item for entry in drain(queue)]
    assert [item for item in order if "other" not in item] == ["first, continued", "second", "third"]
    assert order[0] == "other"  # it is still the other tenant's turn


def test_an_idle_tenant_saves_no_credit() -> None:
    queue = FairQueue[int]()
    queue.put("b", 0)
    drain(queue)
    for item in range(20):
        queue.put("a", item)
    for _ in range(10):
        entry = queue.take()
        assert entry is not None
        queue.end(entry)
    for item in range(20):
        queue.put("b", item)
    order = [entry.tenant for entry in drain(queue)]
    assert order[:20].count("a") in (9, 10)


@given(
    st.lists(
        st.tuples(st.sampled_from(TENANTS), st.integers(1, 50)) | st.none(),
        max_size=200,
    )
)
def test_all_items_are_taken_once_and_in_order_per_tenant(steps: list[tuple[str, int] | None]) -> None:
    queue, put, taken = FairQueue[int](), dict[str, list[int]](), dict[str, list[int]]()
    for number, step in enumerate(steps):
        if step is None:
            if (entry := queue.take()) is not None:
                taken.setdefault(entry.tenant, []).append(entry.item)
                queue.end(entry)
        else:
            tenant, cost = step
            queue.put(tenant, number, cost)
            put.setdefault(tenant, []).append(number)
    for entry in drain(queue):
        taken.setdefault(entry.tenant, []).append(entry.item)
    assert taken == put and not len(queue)


def test_removed_items_are_not_taken_and_cost_nothing() -> None:
    queue = FairQueue[int]()
    waiting = [queue.put("a", item) for item in range(50)]
    for item in (0, *range(10, 49)):
        queue.remove(waiting[item])
    for item in range(100, 110):
        queue.put("b", item)
    queue.put("a", 50)
    taken = drain(queue)
    assert [entry.item for entry in taken if entry.tenant == "a"] == [*range(1, 10), 49, 50]
    assert [entry.tenant for entry in taken[:20]].count("b") in (9, 10)


def test_tenants_whose_items_are_removed_are_forgotten() -> None:
    queue = FairQueue[int]()
    for item in range(5000):
        queue.remove(queue.put(f"tenant {item}", item))
    assert not queue._tenants and not len(queue)


def test_removing_a_taken_item_changes_nothing() -> None:
    queue = FairQueue[int]()
    queue.put("a", 0)
    queue.put("a", 1)
    entry = queue.take()
    assert entry is not None
    queue.remove(entry)
    assert [entry.item for entry in drain(queue)] == [1]


def test_repeated_put_and_remove_leaves_no_entries() -> None:
    queue = FairQueue[int]()
    for item in range(3):
        queue.put("b", item)
        queue.put("a", item)
    busy = queue.take()
    for item in range(5000):
        queue.remove(queue.put("a", item))
        queue.remove(queue.put("c", item))
    assert busy is not None and len(queue._offers) < 200 and len(queue) == 5


def test_made_up_tenants_are_forgotten_while_a_worker_is_busy() -> None:
    queue = FairQueue[int]()
    queue.put("held", 0)
    assert queue.take() is not None
    for item in range(50_000):
        queue.put(f"tenant {item}", item)
        entry = queue.take()
        assert entry is not None
        queue.end(entry)
    assert len(queue._tenants) <= 2 * (_MAX_KEPT + 1) and len(queue._offers) < 200


def test_taking_an_item_does_not_visit_every_tenant() -> None:
    queue = FairQueue[int]()
    for item in range(20_000):
        queue.put(f"tenant {item}", item)
    began = time.process_time()
    assert [entry.item for entry in drain(queue)] == [*range(20_000)]
    assert time.process_time() - began < 5  # looking at each tenant would take 40 s


# -------------------------------------------------------------------------------------------------- capacity


def fill(capacity: SharedCapacity, tenant: str, amount: int = 1) -> int:
    """Take an amount for a tenant again and again, until it is refused; return the number of successful calls."""
    for number in range(10_000):
        try:
            capacity.take(tenant, amount)
        except CapacityError:
            return number
    raise AssertionError("it is never full")


def test_a_tenant_alone_holds_three_quarters_of_the_capacity() -> None:
    capacity = SharedCapacity(1000)
    assert fill(capacity, "a") == 1000 * SHARE // (SHARE + 1)
    assert fill(capacity, "b") > 150 and fill(capacity, "c") > 40


def test_an_item_in_parts_may_hold_as_much_as_a_whole_item() -> None:
    capacity = SharedCapacity(100)
    for own in range(0, 100, 10):
        capacity.take("a", 10, own)
    with pytest.raises(CapacityError):
        capacity.take("b", 1)
    assert capacity.held == {"a": 100}


def test_a_tenant_holds_the_whole_capacity_if_it_is_not_shared() -> None:
    capacity = SharedCapacity(1000, is_shared=False)
    assert fill(capacity, "") == 1000


def test_the_capacity_error_has_the_tenants_own_amounts() -> None:
    capacity = SharedCapacity(100)
    fill(capacity, "a")
    with pytest.raises(CapacityError) as caught:
        capacity.take("a", 1)
    error = caught.value
    assert (error.held, error.total, error.size) == (75, 75, 100) and error.max_held < 76


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 40), st.booleans()), max_size=100))
def test_shared_capacity_never_holds_more_than_its_size(steps: list[tuple[str, int, bool]]) -> None:
    capacity, held = SharedCapacity(100), Counter[str]()
    for tenant, amount, gives in steps:
        if gives:
            if held[tenant]:
                capacity.give_back(tenant, held[tenant])
                held[tenant] = 0
            continue
        try:
            capacity.take(tenant, amount)
        except CapacityError:
            continue
        held[tenant] += amount
        assert held.total() == capacity.total <= capacity.size
    assert capacity.held == {tenant: amount for tenant, amount in held.items() if amount}
