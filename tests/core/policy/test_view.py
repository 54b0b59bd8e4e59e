"""The view of policies, compared with the scheduler's own state."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from pointsman.core import Demand, KVGroup, PauseMode, Request, Reserve
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.state.interfaces import View
from tests.core.helpers import Host
from tests.forms import seeds


class Reader:
    """A victim policy that keeps the columns that it reads."""

    name = "reader"

    def attach(self, view: View) -> None:
        self.view = view

    def choose(self, view: View, asking: int) -> int:
        return len(view.rows) - 1


def columns(view: View) -> dict[str, list[int]]:
    names = ("num_tokens", "num_computed_tokens", "num_blocks", "num_own_blocks", "num_kept_tokens")
    names += ("num_left_tokens", "num_preemptions", "priority")
    return {name: getattr(view, name).tolist() for name in names}


def reading(**config: Any) -> tuple[Host, View]:
    reader = Reader()
    host = Host(victim=reader, **config)
    return host, reader.view


def test_view_columns_count_the_blocks_of_a_shared_prefix() -> None:
    host, view = reading(num_blocks=32)
    shared = host.prompt(8)
    host.add("a", [*shared, *host.prompt(2)], max_tokens=5, priority=3)
    host.step()
    host.add("b", [*shared, *host.prompt(3)], max_tokens=9)
    host.step()
    assert [request.request_id for request in view.requests] == ["a", "b"]
    assert columns(view) == {
        "num_tokens": [12, 12],
        "num_computed_tokens": [11, 11],
        "num_blocks": [3, 3],
        "num_own_blocks": [1, 1],
        "num_kept_tokens": [8, 8],
        "num_left_tokens": [3, 8],
        "num_preemptions": [0, 0],
        "priority": [3, 0],
    }
    host.abort("a")
    assert (view.num_own_blocks.tolist(), view.num_kept_tokens.tolist()) == ([3], [0]), (
        "no other request holds them now"
    )
    assert (view.num_running, view.num_waiting, view.block_size, view.num_usable_blocks) == (1, 0, 4, 32)


WINDOW = KVGroup("window", 8)
GROUPS = [
    (KVGroup(), KVGroup()),
    (KVGroup(), WINDOW),
    (WINDOW, KVGroup(), WINDOW, KVGroup("window", 5)),
    (KVGroup("chunk", 8),),
]


def test_kept_tokens_need_window_blocks_that_other_requests_hold() -> None:
    host, view = reading(num_blocks=64, kv_groups=(KVGroup(), WINDOW))
    shared = host.prompt(12)
    host.add("a", [*shared, 1], max_tokens=30)
    host.step()
    host.add("b", [*shared, 2], max_tokens=30)
    host.step()
    assert view.num_kept_tokens.tolist() == [12, 12]
    for _ in range(8):
        host.step()
    assert view.num_kept_tokens.tolist() == [0, 0], "no request holds the part of the window that token 12 attends to"
    host.add("c", [*shared, 3], max_tokens=1)
    host.schedule()
    assert view.num_kept_tokens.tolist() == [12, 12, 0], "until c has passed it"


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(group.kind for group in groups))
def test_kept_tokens_of_a_victim_are_hits_after_all_evictions(groups: tuple[KVGroup, ...]) -> None:
    """When a request loses its blocks at any moment, only the blocks of its kept tokens are cache hits."""
    num_kept = 0
    for seed in seeds(20, 500):
        rng = random.Random(seed)
        host, view = reading(num_blocks=120, kv_groups=groups)
        prefix = host.prompt(24)
        for number in range(4):
            own = host.prompt(rng.randrange(1, 9))
            host.add(f"r{number}", [*prefix[: rng.choice([0, 8, 16, 24, 24])], *own], max_tokens=40)
            for _ in range(rng.randrange(8)):
                host.step()
        if not view.requests:
            continue
        index = rng.randrange(len(view.requests))
        request, kept = view.requests[index], view.num_kept_tokens.tolist()
        host.park(request.request_id)
        kv = host.scheduler._kv
        assert isinstance(kv, KVCacheManager) and kv.prefix is not None
        free = kv.pool.cached_free_blocks()
        if len(free):
            kv.prefix.evict(np.array(free, dtype=np.int64))
            kv.pool.uncache(free)
        most = (request.num_tokens - 1) // 4 * 4  # one token is left to compute
        assert kv.look_up(request).num_tokens == min(kept[index], most), seed
        num_kept += kept[index] > 0
    assert num_kept >= 3


def test_num_slots_for_adds_up_the_kv_groups() -> None:
    tokens = np.array([3.0, 7.5, 300.0])
    assert reading()[1].num_slots_for(tokens).tolist() == [3.0, 7.5, 300.0]
    _, view = reading(num_blocks=64, kv_groups=(KVGroup(), WINDOW, WINDOW, KVGroup("chunk", 4)))
    assert view.num_slots_for(tokens).tolist() == [12.0, 26.5, 320.0]


def test_without_a_prefix_cache_no_blocks_are_shared() -> None:
    host, view = reading(enable_prefix_caching=False)
    host.add("a", 7, max_tokens=5)
    host.step()
    assert columns(view)["num_own_blocks"] == columns(view)["num_blocks"] == [2]
    assert columns(view)["num_kept_tokens"] == [0]
    assert not view.has_prefix_cache


def test_view_columns_are_empty_when_no_request_runs() -> None:
    _, view = reading()
    assert all(column == [] for column in columns(view).values())


@pytest.mark.parametrize("cached", [True, False])
def test_a_preemption_frees_the_own_blocks_of_the_view(cached: bool) -> None:
    host, view = reading(enable_prefix_caching=cached, num_blocks=24)
    shared = host.prompt(8)
    for index in range(4):
        host.add(f"r{index}", [*shared, *host.prompt(1 + index)], max_tokens=8)
    for _ in range(4):
        host.step()
    own, free = view.num_own_blocks.tolist(), view.num_free_blocks
    host.park("r2")
    assert view.num_free_blocks - free == own[2]


def test_view_columns_are_copies() -> None:
    host, view = reading()
    host.add("a", 4)
    host.step()
    view.num_tokens[0] = 99
    assert view.num_tokens.tolist() == [5]
    with pytest.raises(ValueError, match="read-only"):
        view.rows[0] = 5


class Spy(Reader):
    """A victim policy, and a limit of the same scheduler, that note what the view says while they decide."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def choose(self, view: View, asking: int) -> int:
        self.seen.append({"now": view.now, "missing": view.num_missing_blocks, "budget": view.budget})
        return super().choose(view, asking)


def test_a_victim_policy_reads_the_time_and_the_missing_blocks() -> None:
    spy = Spy()
    host = Host(victim=spy, num_blocks=4, enable_prefix_caching=False)
    for name in "ab":
        host.add(name, 7, max_tokens=9)
    host.step()
    host.step()
    now = host.now
    host.step()
    assert [(each["now"] > now, each["missing"]) for each in spy.seen] == [(True, 2)]


def test_the_view_counts_the_budget_and_partial_prefills() -> None:
    host, view = reading(num_blocks=64, max_num_batched_tokens=16)
    host.add("long", 30, max_tokens=2)
    host.step()
    assert (view.num_prefilling, view.now) == (1, host.now - 1)
    host.step()
    assert view.num_prefilling == 0
    assert view.budget <= 16


def test_num_owed_blocks_counts_the_blocks_of_remaining_prompts() -> None:
    class Owed(Reserve):
        name = "owed"
        seen: ClassVar[list[int]] = []

        def blocks(self, request: Request, demand: Demand, view: View) -> int:
            self.seen.append(view.num_owed_blocks)
            return 0

    host = Host(reserves=(Owed(),), num_blocks=64, long_prefill_token_threshold=8, full_sequence_must_fit=False)
    host.add("long", 40, max_tokens=2)
    host.step()
    host.add("b", 2)
    host.step()
    assert Owed.seen == [0, 4], "16 tokens of the long prompt, in blocks of 4"


def test_cached_tokens_of_a_waiting_request_are_looked_up() -> None:
    host, view = reading(num_blocks=32)
    shared = host.prompt(8)
    host.add("a", [*shared, 1], max_tokens=1)
    host.step()
    host.scheduler.pause(host.now, PauseMode.ADMISSIONS)
    waiting = host.add("b", [*shared, 2, 3])
    assert view.num_cached_tokens(waiting) == 8
    assert view.num_waiting == 1


def test_own_blocks_equals_the_column_num_own_blocks() -> None:
    host, view = reading(num_blocks=32)
    shared = host.prompt(8)
    host.add("a", [*shared, 1], max_tokens=9)
    host.step()
    host.add("b", [*shared, 2, 3], max_tokens=9)
    host.step()
    assert [view.own_blocks(index) for index in range(2)] == view.num_own_blocks.tolist() == [1, 1]


def test_num_blocks_for_rounds_up_to_whole_blocks() -> None:
    _, view = reading(num_blocks=32)
    assert [view.num_blocks_for(count) for count in (1, 4, 5, 9)] == [1, 1, 2, 3]


def test_num_shared_blocks_counts_hits_that_other_requests_hold() -> None:
    class Shared(Reserve):
        name = "shared"
        seen: ClassVar[list[int]] = []

        def blocks(self, request: Request, demand: Demand, view: View) -> int:
            self.seen.append(view.num_shared_blocks)
            return 0

    host = Host(reserves=(Shared(),), num_blocks=64)
    shared = host.prompt(8)
    host.add("a", [*shared, 1], max_tokens=9)
    host.step()
    host.add("b", [*shared, 2], max_tokens=9)
    host.step()
    assert Shared.seen == [0, 2]


def test_every_property_of_the_view_is_in_the_documentation() -> None:
    names = [name for name in vars(View) if not name.startswith("_")]
    page = (Path(__file__).parents[3] / "docs" / "guides" / "write_a_policy.md").read_text()
    assert [name for name in names if not re.search(rf"`{name}\b", page)] == []
