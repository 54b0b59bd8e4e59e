"""The number of blocks that all rows of a step begin with."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.state.batch import Batch
from pointsman.core.state.request import Request
from pointsman.core.step.emit import CommonPrefix
from tests.core.helpers import Host, names, small_config


def counting_host(**config: Any) -> Host:
    return Host(**{"num_blocks": 40, "max_num_batched_tokens": 64, "count_common_prefix": True, **config})


def test_the_common_prefix_of_rows_with_one_prompt_is_its_blocks() -> None:
    host = counting_host()
    shared = host.prompt(12)
    host.add("a", [*shared, 1, 2])
    host.add("b", [*shared[:8], 3, 4, 5])
    assert host.step().num_common_prefix_blocks == 2
    host.add("c", [*shared, 6])
    assert host.step().num_common_prefix_blocks == 2
    host.abort("b")
    assert host.step().num_common_prefix_blocks == 3
    host.add("other", 4)
    assert host.step().num_common_prefix_blocks == 0


def test_the_common_prefix_of_one_row_is_its_whole_table() -> None:
    host = counting_host()
    host.add("a", 8, max_tokens=9)
    assert [host.step().num_common_prefix_blocks for _ in range(6)] == [2, 3, 3, 3, 3, 4]


def test_a_step_without_rows_has_no_common_prefix() -> None:
    assert counting_host().step().num_common_prefix_blocks == 0


def test_the_common_prefix_counts_only_rows_of_the_step() -> None:
    host = counting_host(max_num_batched_tokens=4)
    host.add("a", 6, max_tokens=9)
    host.add("b", 2, max_tokens=9)
    outputs = [host.step() for _ in range(3)]
    assert [names(output.requests) for output in outputs] == [["a"], ["a", "b"], ["a", "b"]]
    assert [output.num_common_prefix_blocks for output in outputs] == [1, 0, 0]


def test_the_common_prefix_is_0_unless_enabled() -> None:
    host = Host()
    host.add("a", 8)
    assert host.step().num_common_prefix_blocks == 0


def num_common(tables: list[list[int]]) -> int:
    return len(list(takewhile(lambda blocks: len(set(blocks)) == 1, zip(*tables, strict=False))))


@pytest.mark.parametrize("seed", range(30))
def test_the_common_prefix_equals_that_of_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    batch = Batch(block_size=2, accepted_drafts=[0])
    kv = KVCacheManager(small_config(block_size=2, max_model_len=180, num_blocks=2000))
    requests = [Request(str(n), [1, 2, 3], arrival_time=0.0, max_tokens=5) for n in range(6)]
    common = random.integers(0, 1000, size=int(random.integers(0, 80)))
    rows, tables = [], []
    for number, request in enumerate(requests):
        request._state.serial = number + 1
        table = [*common.tolist(), *random.integers(0, 3, size=int(random.integers(0, 8))).tolist()]
        rows.append(batch.place(request, 0, 2 * len(table)))
        kv.place(batch, rows[-1], np.array(table, dtype=np.int64))
        tables.append(table)
    batch.add_members(rows, requests)
    counter = CommonPrefix(batch, kv)
    for size in range(7):
        picked = random.permutation(6)[:size]
        expected = num_common([tables[index] for index in picked])
        assert counter.count(np.array(rows, dtype=np.int64)[picked]) == expected
