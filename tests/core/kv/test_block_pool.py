"""Allocation of blocks: their order, and that no block is lost or allocated twice, through the scheduler."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from pointsman.core.kv.block_pool import BlockPool
from tests.core.helpers import Host, blocks_of, cached_of, names


def test_a_new_pool_allocates_low_ids_first() -> None:
    host = Host()
    host.add("a", 5)
    host.add("b", 9)
    output = host.step()
    assert (blocks_of(output, "a"), blocks_of(output, "b")) == ([0, 1], [2, 3, 4])


def test_reserved_blocks_are_neither_free_nor_allocated() -> None:
    host = Host(num_blocks=6, num_reserved_blocks=2)
    assert (host.stats().num_blocks, host.stats().num_free_blocks) == (4, 4)
    host.add("a", 16)
    assert sorted(blocks_of(host.schedule(), "a")) == [2, 3, 4, 5]
    assert host.stats().num_free_blocks == 0


def test_requests_without_a_common_prefix_hold_distinct_blocks() -> None:
    host = Host(num_blocks=10, max_model_len=40, max_num_seqs=4)
    for index in range(12):
        host.add(f"r{index}", 3 + index % 6, max_tokens=10, use_prefix_cache=index % 2 == 0)
    tables: dict[str, list[int]] = {}
    while host.scheduler.has_unfinished_requests():
        output = host.schedule()
        for request in output.preempted:
            tables.pop(request.request_id, None)
        for index, request in enumerate(output.requests):
            known = [] if index >= output.num_continued else tables[request.request_id]
            tables[request.request_id] = [*known, *output.blocks(index).tolist()]
        held = [block for table in tables.values() for block in table]
        assert len(held) == len(set(held)), "their prompts have nothing in common"
        assert len(held) == 10 - host.stats().num_free_blocks
        for request in host.update(output).finished:
            tables.pop(request.request_id, None)


def test_blank_blocks_are_allocated_before_cached_ones() -> None:
    host = Host(num_blocks=6)
    kept = host.prompt(9)
    host.add("a", kept, max_tokens=1)
    host.run_to_end()
    for index in range(5):
        host.add(f"filler {index}", 15, max_tokens=1, use_prefix_cache=False)
        host.run_to_end()
    assert host.stats().num_evictions == 0
    host.add("b", kept)
    assert cached_of(host.step()) == {"b": 8}


def test_a_shared_block_is_free_once_no_request_holds_it() -> None:
    host = Host()
    prompt = host.prompt(9)
    host.add("a", prompt)
    host.add("b", prompt)
    host.step()
    assert host.stats().num_free_blocks == 16 - 4, "two blocks together, and one each"
    host.abort("a")
    assert host.stats().num_free_blocks == 16 - 3
    host.abort("b")
    assert host.stats().num_free_blocks == 16


def test_after_a_reset_blocks_are_allocated_without_evictions() -> None:
    host = Host(num_blocks=4, max_model_len=17)
    host.add("a", 13, max_tokens=1)
    host.run_to_end()
    assert host.stats().num_cached_free_blocks == 3
    host.reset_prefix_cache()
    assert (host.stats().num_free_blocks, host.stats().num_cached_free_blocks) == (4, 0)
    host.add("b", 16, max_tokens=1)
    host.run_to_end()
    assert host.stats().num_evictions == 0


def test_the_content_of_an_evicted_block_is_not_found() -> None:
    host = Host(num_blocks=3, max_model_len=13)
    old, new = host.prompt(9), host.prompt(9)
    for request_id, prompt in [("a", old), ("b", new)]:
        host.add(request_id, prompt, max_tokens=1)
        host.run_to_end()
    assert host.stats().num_evictions == 2
    host.add("c", new, max_tokens=1)
    assert cached_of(host.step()) == {"c": 8}
    host.run_to_end()
    host.add("d", old, max_tokens=1)
    assert cached_of(host.step()) == {"d": 0}


def test_a_request_may_hold_all_blocks_of_the_pool() -> None:
    host = Host(num_blocks=4, max_model_len=17)
    host.add("a", 16)
    output = host.schedule()
    assert names(output.requests) == ["a"]
    assert host.stats().kv_cache_usage == 1.0
    host.update(output)
    assert host.stats().kv_cache_usage == 0.0, "it has finished: its limit is one token more than the slots"


@pytest.mark.parametrize("seed", range(4))
def test_cached_blocks_are_evicted_in_order_of_release(seed: int) -> None:
    random = Random(seed)
    pool = BlockPool(3000)
    cached: list[int] = []  # free and cached, the next one to be evicted first
    held = [pool.allocate(count)[0] for count in (1, 2, 1500, 40, 1457)]
    for table in held:
        pool.set_cached(table)
    for _ in range(400):
        action = random.choice(["release", "take", "take", "find", "remove"])
        if action == "release" and held:
            table = held.pop(random.randrange(len(held)))
            pool.release(table)
            cached += table[::-1].tolist()
        elif action == "take" and cached and pool.num_free == len(cached):
            count = random.randint(1, min(len(cached), random.choice([3, 3, 3, 1300])))
            blocks, evicted = pool.allocate(count)
            assert blocks.tolist() == evicted.tolist() == cached[:count]
            del cached[:count]
            pool.set_cached(blocks)
            held.append(blocks)
        elif action == "find" and cached:
            found = random.sample(cached, random.randint(1, max(1, len(cached) // 4)))
            cached = [block for block in cached if block not in set(found)]
            held.append(np.array(found))
            pool.acquire(held[-1])
        elif action == "remove" and cached and random.random() < 0.1:
            gone = random.sample(cached, 1)
            cached.remove(gone[0])
            pool.uncache(gone)
            blank, evicted = pool.allocate(1)
            assert (blank.tolist(), len(evicted)) == (gone, 0)
            pool.set_cached(blank)
            held.append(blank)
        assert pool.cached_free_blocks() == cached
        assert pool.num_free == len(cached)


def test_release_any_queues_blocks_in_eviction_order() -> None:
    """A block that two tables release in one call is listed once. Blocks released with `evict_first` come before all
    others."""
    pool = BlockPool(8)
    blocks, _ = pool.allocate(6)
    pool.acquire(blocks[:2])
    pool.set_cached(blocks[:4])
    pool.release_any(np.array([3, 0, 0, 5]))
    assert pool.cached_free_blocks() == [3, 0] and sorted(pool.blank_blocks()) == [5, 6, 7]
    pool.release_any(np.array([1, 2]))
    assert pool.cached_free_blocks() == [3, 0, 2], "one table still has block 1"
    pool.release_any(np.array([1, 4]), evict_first=True)
    assert pool.cached_free_blocks() == [1, 3, 0, 2] and pool.num_free == 8
    taken, evicted = pool.allocate(6)
    assert evicted.tolist() == [1, 3] and len(taken) == 6
