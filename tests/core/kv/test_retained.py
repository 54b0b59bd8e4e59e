"""Retained blocks: they are evicted last, for a time, and a tenant may have a limited number of them."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from pointsman.core.kv.retained import RetainingPool
from tests.core.helpers import Host, cached_of


def host_with_retention(share: float = 1.0, **overrides: Any) -> Host:
    return Host(eviction=f"retention:share={share}", **overrides)


def run_request(host: Host, name: str, prompt: Any, **fields: Any) -> int:
    """Run a request that generates one token; returns its number of cached tokens."""
    request = host.add(name, prompt, max_tokens=1, **fields)
    host.run_to_end()
    return request.num_cached_tokens


def retaining_pool(host: Host) -> RetainingPool:
    pool = host.scheduler._kv.retaining
    assert pool is not None
    return pool


def explain_retaining_request(host: Host) -> str:
    host.add("explained", 5, tenant="explained", retention=1.0)
    return str(host.explain("explained").sentence)


def run_other_prompts(host: Host, num_blocks: int, name: str = "flood") -> None:
    """Run requests with different prompts, one at a time, that take `num_blocks` blocks together."""
    for index in range(num_blocks // 4):
        run_request(host, f"{name} {index}", 15)


def num_cached_tokens_of(host: Host, prompt: list[int]) -> int:
    host.add("again", prompt, max_tokens=1)
    return cached_of(host.step())["again"]


def test_a_retained_prefix_outlives_blocks_used_later() -> None:
    for retention, expected in ((None, 0), (1000.0, 8)):
        host = host_with_retention()
        prompt = host.prompt(9)
        run_request(host, "a", prompt, retention=retention)
        assert host.stats().num_retained_blocks == (2 if retention else 0)
        run_other_prompts(host, 40)
        assert num_cached_tokens_of(host, prompt) == expected


def test_an_expired_prefix_is_evicted_as_if_last_used_at_its_expiry() -> None:
    host = host_with_retention(num_blocks=8)
    first, second = host.prompt(9), host.prompt(9)
    run_request(host, "first", first, retention=10.0)
    run_request(host, "second", second)
    host.now += 100.0
    run_request(
        host, "other", 9
    )  # takes blank blocks; the first one has expired, so it counts as used after the second
    assert host.stats().num_retained_blocks == 0
    run_request(host, "more", 15)
    host.add("a", first, max_tokens=1)
    host.add("b", second, max_tokens=1)
    assert cached_of(host.step()) == {"a": 8, "b": 0}


def test_retained_blocks_are_free_and_allocated_last() -> None:
    host = host_with_retention(num_blocks=8)
    prompt = host.prompt(25)
    run_request(host, "a", prompt, retention=1000.0)
    stats = host.stats()
    assert (stats.num_free_blocks, stats.num_cached_free_blocks, stats.num_retained_blocks) == (8, 6, 6)
    host.add("b", 30, max_tokens=2)  # needs all blocks
    assert [len(output.requests) for output in host.run_to_end()][:2] == [1, 1]
    assert num_cached_tokens_of(host, prompt) == 0


def test_the_end_of_a_retained_prefix_is_evicted_before_its_beginning() -> None:
    host = host_with_retention(num_blocks=8)
    prompt = host.prompt(25)
    run_request(host, "a", prompt, retention=1000.0)
    run_request(host, "b", 15)  # two blank blocks, and two of the six
    assert num_cached_tokens_of(host, prompt) == 16


def test_retained_blocks_with_the_earliest_expiry_are_evicted_first() -> None:
    host = host_with_retention(num_blocks=6)
    long, short = host.prompt(9), host.prompt(9)
    run_request(host, "long", long, retention=1000.0)
    run_request(host, "short", short, retention=500.0)
    run_request(host, "b", 13)
    host.add("a", long, max_tokens=1)
    host.add("c", short, max_tokens=1)
    assert cached_of(host.step()) == {"a": 8, "c": 0}


def test_a_block_reused_without_retention_keeps_its_expiry() -> None:
    host = host_with_retention()
    prompt = host.prompt(9)
    run_request(host, "a", prompt, retention=1000.0)
    assert run_request(host, "b", prompt) == 8
    run_other_prompts(host, 40)
    assert num_cached_tokens_of(host, prompt) == 8


def test_a_block_is_retained_until_the_later_of_two_times() -> None:
    host = host_with_retention()
    prompt = host.prompt(9)
    run_request(host, "a", prompt, retention=1000.0)
    run_request(host, "b", prompt, retention=1.0)
    run_other_prompts(host, 40)
    assert num_cached_tokens_of(host, prompt) == 8


def test_a_parked_then_aborted_request_retains_no_blocks() -> None:
    host = host_with_retention(num_blocks=8)
    host.add("a", 9, retention=1000.0)
    host.step()
    host.park("a")  # loses its row
    assert host.stats().num_cached_free_blocks == 2 and host.stats().num_retained_blocks == 0
    host.abort("a")
    assert host.stats().num_retained_blocks == 0, "it holds nothing any more"


def test_at_most_the_share_of_the_pool_is_retained() -> None:
    host = host_with_retention(share=0.25)
    for index in range(6):
        run_request(host, f"r{index}", 9, retention=1000.0)
        assert host.stats().num_retained_blocks == min(2 * (index + 1), 4)


def test_a_tenant_with_many_blocks_leaves_other_tenants_their_share() -> None:
    host = host_with_retention(share=0.5)  # 8 of 16
    mine = host.prompt(17)
    for index in range(4):
        run_request(host, f"greedy {index}", 13, tenant="greedy", retention=1e9)
    assert host.stats().num_retained_blocks == 8
    run_request(host, "mine", mine, tenant="modest", retention=50.0)
    assert host.stats().num_retained_blocks == 8, "four of each"
    for index in range(6):
        run_request(host, f"more {index}", 13, tenant="greedy", retention=1e9)
    assert num_cached_tokens_of(host, mine) == 16


def num_retained_by_tenant(pool: RetainingPool, tenants: Iterable[str]) -> dict[str, int]:
    """The number of retained blocks of each tenant that has retained blocks."""
    counts = {tenant: pool.num_retained_of(tenant) for tenant in tenants}
    return {tenant: count for tenant, count in counts.items() if count}


def test_a_block_that_two_tenants_retain_counts_for_neither_tenant() -> None:
    host = host_with_retention(share=0.5)
    shared = host.prompt(16)
    for tenant in ("a", "b"):
        run_request(host, f"of {tenant}", shared + host.prompt(9), tenant=tenant, retention=1000.0)
    pool = retaining_pool(host)
    assert num_retained_by_tenant(pool, "ab") == {"a": 2, "b": 2} and pool.num_retained == 8


def test_more_tenants_than_blocks_evict_the_earliest_expiring_block_first() -> None:
    host = host_with_retention(share=0.25)  # 4 of 16
    prompts = [host.prompt(5) for _ in range(6)]
    for index, prompt in enumerate(prompts):
        run_request(host, f"r{index}", prompt, tenant=f"t{index}", retention=1000.0 - 100 * (index % 3))
    pool = retaining_pool(host)
    assert pool.num_retained == 4 and pool.max_retained_of() == 1
    assert num_retained_by_tenant(pool, [f"t{index}" for index in range(6)]) == {"t0": 1, "t1": 1, "t3": 1, "t4": 1}
    assert "of at most 1 KV blocks" in explain_retaining_request(host)


def test_tenants_that_share_a_prompt_leave_other_tenants_their_share() -> None:
    host = host_with_retention(share=0.5)  # 8 of 16
    mine, theirs = host.prompt(17), host.prompt(33)
    run_request(host, "mine", mine, tenant="modest", retention=50.0)
    for index in range(4):
        run_request(host, f"theirs {index}", theirs, tenant=f"greedy {index % 2}", retention=1e9)
    pool = retaining_pool(host)
    assert sum(num_retained_by_tenant(pool, ["modest", "greedy 0", "greedy 1"]).values()) == 4, (
        "four of the eight are shared"
    )
    assert pool.num_retained_of("modest") == 2, "(8 - 4) / 2"
    run_other_prompts(host, 40)
    assert num_cached_tokens_of(host, mine) == 8


def test_shared_blocks_stay_retained_when_no_more_can_be_shared() -> None:
    host = host_with_retention(share=0.5, num_blocks=32)  # 16 of 32 blocks; 8 of them may be shared
    system, full = host.prompt(8), host.prompt(33)
    for tenant in ("a", "b"):
        run_request(host, f"system of {tenant}", system + host.prompt(1), tenant=tenant, retention=1e6)
    for tenant in ("c", "d"):
        run_request(host, f"full of {tenant}", full, tenant=tenant, retention=1e9)
    prompt = system + host.prompt(5)
    run_request(host, "mine", prompt, tenant="modest", retention=1e6)
    assert retaining_pool(host).num_retained == 2 + 6 + 2 + 1, "all of them: 6 are shared, and 2 belong to c alone"
    assert retaining_pool(host).num_retained_of("modest") == 1
    run_other_prompts(host, 60)
    assert num_cached_tokens_of(host, prompt) == 12


def test_a_reset_removes_retained_blocks() -> None:
    host = host_with_retention()
    prompt = host.prompt(9)
    run_request(host, "a", prompt, retention=1000.0)
    host.add("b", prompt, max_tokens=20)
    host.step()
    host.reset_prefix_cache()
    assert host.stats().num_retained_blocks == 0
    host.run_to_end()
    assert host.stats().num_retained_blocks == 0, "its blocks were not cached when it finished"


def test_a_parent_block_that_was_computed_twice_outlives_its_child() -> None:
    """The second table has the same child block as the first table, and another block for the parent's content."""
    pool = RetainingPool(4, 0, 1.0)
    parent, child = pool.allocate(2)[0]
    other = pool.allocate(1)[0][0]
    for block in (parent, child, other):
        pool.set_cached(np.array([block]))
    pool.acquire(np.array([child]))
    pool.retain(np.array([parent, child]), 50.0, "a")
    pool.release(np.array([parent, child]))  # the child is still held
    pool.release(np.array([other, child]))
    order = pool.cached_free_blocks()
    assert order.index(child) < order.index(other), "retained with its child, though no request asked for it"
    assert dict(pool.retained_blocks())[int(other)] == 50.0


@pytest.mark.parametrize(("seed", "num_tenants"), [(0, 3), (1, 3), (2, 8), (3, 60)])
def test_random_block_tables_of_many_tenants_obey_retention_limits(seed: int, num_tenants: int) -> None:
    """Random tables share their first blocks; the limits, counts and order hold after every call."""
    random, pool = Random(seed), RetainingPool(64, 0, 0.6)
    now, held = 0.0, list[Any]()
    parents: dict[int, int] = {}
    for _ in range(400):
        now += random.random()
        if held and random.random() < 0.5:
            table = held.pop(random.randrange(len(held)))
            pool.expire(now)
            if random.random() < 0.7:
                count = random.randint(1, len(table))
                pool.retain(
                    table[:count], now + random.choice((0.5, 3.0, 30.0, np.inf)), f"t{random.randrange(num_tenants)}"
                )
            pool.release(table)
        elif pool.num_free >= 8:
            free = pool.cached_free_blocks()
            found: list[int] = []
            if free and random.random() < 0.6:
                block: int | None = random.choice(free)
                while block is not None:
                    found.insert(0, block)
                    block = parents.get(block)
            if found:
                pool.acquire(np.array(found))
            new, evicted = pool.allocate(random.randint(1, 4))
            for block in evicted.tolist():
                parents.pop(block, None)
            pool.set_cached(new)
            table = np.array([*found, *new.tolist()])
            parents.update(zip(new.tolist(), table[len(found) - 1 : -1].tolist(), strict=False) if found else ())
            if not found:
                parents.update(zip(new.tolist()[1:], new.tolist(), strict=False))
            held.append(table)
        turn = {block: index for index, block in enumerate(pool.cached_free_blocks())}
        assert all(turn[block] < turn.get(parent, np.inf) for block, parent in parents.items() if block in turn)
        assert pool.num_retained == len(pool.retained_blocks()) <= pool.capacity
        counts = num_retained_by_tenant(pool, [f"t{index}" for index in range(num_tenants)])
        num_shared = pool.num_retained - sum(counts.values())
        assert num_shared <= pool.capacity // 2
        most = max(1, (pool.capacity - num_shared) // max(1, len(counts)))
        assert most == pool.max_retained_of() and all(count <= most for count in counts.values())
        assert pool.num_free == len(turn) + pool.num_blank == int((pool.num_references == 0).sum())
    assert pool.num_retained


def test_the_queue_of_retained_blocks_stays_smaller_than_the_pool() -> None:
    pool = RetainingPool(64, 0, 1.0)
    blocks, _ = pool.allocate(32)
    pool.set_cached(blocks)
    for step in range(500):
        pool.expire(float(step))
        pool.retain(blocks, 1e6 + step, f"tenant {step}")
        pool.release(blocks)
        pool.acquire(blocks)
    assert len(pool._queue) < 64 and len(pool._owners) < 64


def test_retaining_pool_drops_tenants_without_unshared_blocks() -> None:
    pool = RetainingPool(64, 0, 1.0)
    blocks, _ = pool.allocate(4)
    pool.set_cached(blocks)
    for step in range(500):
        pool.acquire(blocks)  # beside a request that keeps them
        pool.retain(blocks, 1e6 + step, f"tenant {step}")
        pool.release(blocks)
    assert len(pool._owners) <= 2 * 64


def test_release_time_does_not_grow_with_the_number_of_tenants() -> None:
    shortest = []
    for num_tenants in (10, 8000):
        pool, seconds = RetainingPool(16384, 0, 1.0), list[float]()
        for index in range(num_tenants + 100):
            table = pool.allocate(1)[0]
            pool.set_cached(table)
            pool.retain(table, 1e6 + index, f"tenant {min(index, num_tenants)}")
            begin = perf_counter()
            pool.release(table)
            seconds.append(perf_counter() - begin)
        shortest.append(min(seconds[-100:]))
    assert shortest[1] < 3 * shortest[0]
