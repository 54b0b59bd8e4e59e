"""KV in groups, with windows and chunks: the blocks that a request holds, gives back and finds again."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    ConfigError,
    KVGroup,
    Recorder,
    ReplayDifference,
    Request,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepResult,
    replay,
)
from pointsman.core.kv.events import BlockRemoved, BlockStored
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.kv.prefix_tree import Root
from pointsman.core.kv.windows import Windows
from tests.core.helpers import Host, small_config
from tests.forms import seeds, short_of

FULL, WINDOW = KVGroup(), KVGroup("window", 8)
TWO = (FULL, WINDOW)
PAIRS = seeds(1, 10)


def tables_by_group(output: SchedulerOutput, index: int) -> dict[int, dict[int, int]]:
    """The blocks of a row in an output: by group, the block at each place."""
    found: dict[int, dict[int, int]] = {}
    mine = output.block_rows == index
    columns = (output.block_groups[mine], output.block_places[mine], output.block_ids[mine])
    for group, place, block in zip(*(column.tolist() for column in columns), strict=True):
        found.setdefault(group, {})[place] = block
    return found


# ------------------------------------------------------------------ the configuration


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"kv_groups": [("half", 4)]}, "a group in kv_groups is of kind 'half'; choose one of full, window, chunk"),
        ({"kv_groups": [("full", 4)]}, 'a "full" group in kv_groups has size 4; such a group has no size'),
        ({"kv_groups": [("window", 0)]}, 'the size of a "window" group in kv_groups is 0; it must be between 1'),
        ({"kv_groups": "full"}, "kv_groups is 'full'; give pairs of a kind and a size"),
        ({"kv_groups": 3}, "kv_groups is 3; give pairs of a kind and a size"),
    ],
)
def test_invalid_kv_groups_are_refused_with_a_remedy(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        small_config(**knobs)


def test_kv_groups_with_a_kv_cache_of_the_host_are_refused() -> None:
    config = small_config(kv_groups=TWO)
    with pytest.raises(ConfigError, match="kv_groups has 2 groups, but the kv_cache passed"):
        Scheduler(config, kv_cache=KVCacheManager(small_config()))


def test_one_group_of_full_attention_acts_like_no_kv_groups() -> None:
    host = Host(kv_groups=(FULL,))
    host.add("a", 5)
    output = host.schedule()
    assert len(output.block_ids) == 2 and len(output.block_groups) == 0
    assert host.scheduler.block_table[output.rows[0], :2].tolist() == output.block_ids.tolist()


# ------------------------------------------------------------------ held blocks


def test_blocks_behind_the_window_return_to_the_pool() -> None:
    """A row holds a block behind its window for at most one step."""
    host = Host(kv_groups=(WINDOW,), num_blocks=5, enable_prefix_caching=False)
    host.add("a", 6, max_tokens=50)
    step = host.schedule()
    for length in range(7, 56):
        computed = length - 1
        reads_from = max(0, computed - 2 - WINDOW.size + 1)  # as the step before this one did
        held = -(-computed // 4) - reads_from // 4
        assert host.scheduler.stats().num_free_blocks >= 5 - held
        host.update(step)
        step = host.schedule()


def test_a_long_prompt_runs_in_a_pool_that_holds_its_window() -> None:
    """Admission counts the maximum number of blocks that the prompt holds at a time."""
    host = Host(kv_groups=(WINDOW,), num_blocks=8, max_model_len=400)
    assert host.config.num_usable_tokens == 400
    request = host.add("a", 300, max_tokens=20)
    host.run_to_end()
    assert request.num_output_tokens == 20 and host.scheduler.stats().num_preemptions == 0


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    host = Host(kv_groups=TWO, num_blocks=16)
    assert host.config.num_usable_tokens == 36  # nine blocks of full attention, and at most seven of the window
    with pytest.raises(RequestRefused, match="the prompt has 37 tokens, and the pool of 16 KV blocks holds 36 of them"):
        host.add("a", 37)
    request = host.add("b", 36, max_tokens=10)
    host.run_to_end()
    assert request.finish_detail == "kv_capacity"


def test_an_output_lists_the_group_and_place_of_each_block() -> None:
    host = Host(kv_groups=TWO)
    host.add("a", 7)
    output = host.schedule()
    found = tables_by_group(output, 0)
    assert {group: sorted(places) for group, places in found.items()} == {0: [0, 1], 1: [0, 1]}
    assert len({block for places in found.values() for block in places.values()}) == 4
    host.update(output)
    second = host.schedule()  # the eighth token has its slot
    assert len(second.block_ids) == 0
    host.update(second)
    third = tables_by_group(host.schedule(), 0)
    assert {group: list(places) for group, places in third.items()} == {0: [2], 1: [2]}


# ------------------------------------------------------------------ cache hits


def test_a_cache_hit_acquires_only_blocks_that_the_next_token_attends_to() -> None:
    host = Host(kv_groups=TWO, num_blocks=40)
    prompt = host.prompt(17)
    host.add("a", prompt, max_tokens=1)
    host.run_to_end()
    host.add("b", [*prompt, 1])
    output = host.schedule()
    assert output.num_cached_tokens.tolist() == [16]
    found = tables_by_group(output, 0)
    assert sorted(found[0]) == [0, 1, 2, 3, 4]
    assert sorted(found[1]) == [2, 3, 4]  # token 16 attends to 9 to 16


def test_a_cache_hit_ends_where_every_group_has_all_blocks_of_its_window() -> None:
    """A block in the middle of the window's blocks is evicted first here: a shorter prefix is still found."""
    host = Host(kv_groups=TWO, num_blocks=40)
    prompt = host.prompt(25)
    host.add("a", prompt, max_tokens=1)
    host.run_to_end()
    kv = host.scheduler._kv
    assert isinstance(kv, KVCacheManager) and kv.prefix is not None
    found = kv.prefix.look_up(Root(), np.array(prompt, dtype=np.int32).tobytes(), 6)
    assert found.has is not None and found.has.all()
    block = found.blocks[1, 4:5]
    kv.prefix.evict(block)
    kv.pool.uncache(block.tolist())
    host.add("b", [*prompt, 1])
    assert host.schedule().num_cached_tokens.tolist() == [16]
    assert kv.prefix.is_cached(found.blocks[0, 4]), "full attention still has the block there"


def test_a_cache_hit_at_a_chunk_border_needs_no_block_of_the_chunk_group() -> None:
    """The token after the border begins a chunk, so it attends to no earlier block of a group with chunks."""
    host = Host(kv_groups=(FULL, KVGroup("chunk", 8)), num_blocks=40)
    prompt = host.prompt(17)
    host.add("a", prompt, max_tokens=1)
    host.run_to_end()
    host.add("b", prompt)
    output = host.schedule()
    assert output.num_cached_tokens.tolist() == [16]
    assert sorted(tables_by_group(output, 0)[1]) == [4]


def test_a_preempted_request_finds_its_generated_blocks() -> None:
    host = Host(kv_groups=(FULL, KVGroup("window", 6)), num_blocks=60, max_num_seqs=1)
    for length in range(5, 30):
        request = host.add(f"r{length}", 3, max_tokens=30)
        while request.num_tokens < length:
            host.step()
        is_reset = length % 7 == 0
        if is_reset:
            host.scheduler.reset_prefix_cache(host.now)
        computed = request.num_computed_tokens
        host.park(request.request_id)
        host.ready(request.request_id)
        output = host.schedule()
        assert output.num_cached_tokens.tolist() == [0 if is_reset else computed // 4 * 4], length
        host.update(output)
        host.abort(request.request_id)
        host.scheduler.reset_prefix_cache(host.now)


def test_prefill_releases_blocks_that_fell_behind_the_window() -> None:
    """The blocks return in the step after the chunk, even if that step computes other tokens."""
    host = Host(kv_groups=(FULL, WINDOW), num_blocks=40, max_num_batched_tokens=30)
    host.add("a", 30, max_tokens=9)
    output = host.step()
    assert len(tables_by_group(output, 0)[1]) == 8
    free = host.stats().num_free_blocks
    host.step()
    assert host.stats().num_free_blocks == free + 5  # blocks 0 to 4; token 28, the last of a full block, reads 21 to 28


def test_window_blocks_before_the_end_of_a_prompt_are_evicted_last() -> None:
    """The window before the prompt's last full block survives other requests; earlier windows do not."""
    host = Host(kv_groups=TWO, num_blocks=30, max_model_len=100, max_num_batched_tokens=40)
    prompt = host.prompt(33)
    host.add("a", prompt, max_tokens=2)
    host.run_to_end()
    assert host.stats().num_cached_free_blocks == 16
    host.add("b", 34, max_tokens=1)  # nine blocks of each kind, for which four are evicted
    host.run_to_end()
    assert host.stats().num_evictions == 4
    host.add("c", [*prompt, 7], max_tokens=1)
    assert host.schedule().num_cached_tokens.tolist() == [32]


def test_blocks_behind_windows_are_released_before_any_preemption() -> None:
    """If all groups have windows, the pool holds all requests for as long as they generate."""
    host = Host(kv_groups=(WINDOW, WINDOW), num_blocks=4 * 8 + 2, max_num_seqs=4, enable_prefix_caching=False)
    requests = [host.add(f"r{number}", 5 + number, max_tokens=45) for number in range(4)]
    host.run_to_end()
    assert host.stats().num_preemptions == 0
    assert all(request.num_output_tokens == 45 for request in requests)


# ------------------------------------------------------------------ steady decode


def _decisions(scheduler: Scheduler, output: SchedulerOutput) -> tuple[Any, ...]:
    """The decisions of a step, without the block ids."""
    places = zip(output.block_rows.tolist(), output.block_groups.tolist(), output.block_places.tolist(), strict=True)
    names = [request.request_id for request in output.requests]
    return (
        names,
        output.num_scheduled_tokens.tolist(),
        output.num_cached_tokens.tolist(),
        sorted(places),
        [request.request_id for request in output.preempted],
        scheduler.stats().num_free_blocks,
    )


def _run_random_workload(seed: int, config: SchedulerConfig) -> Iterator[tuple[Any, ...]]:
    """Requests with shared prefixes arrive and finish; some steps fail."""
    chance = random.Random(seed)
    scheduler = Scheduler(config)
    flight: list[SchedulerOutput] = []
    added = 0
    while added < 24 or scheduler.has_unfinished_requests():
        if added < 24 and chance.random() < 0.3:
            prompt = [1, 2, 3, 4] * chance.randint(0, 5) + [chance.randint(0, 5) for _ in range(chance.randint(1, 9))]
            lengths = {"max_tokens": chance.randint(1, 40), "arrival_time": float(added)}
            scheduler.add(Request(f"r{added}", prompt, **lengths), 0.0)
            added += 1
        if len(flight) == config.max_steps_in_flight:
            output = flight.pop(0)
            tokens = [chance.randint(0, 5) for _ in range(int(output.samples.sum()))]
            scheduler.update(output, StepResult(tokens), 0.0)
        flight.append(scheduler.schedule(0.0))
        yield _decisions(scheduler, flight[-1])
        scheduler.check_invariants()
        if chance.random() < 0.03:
            scheduler.fail(flight[0], 0.0)
            flight.clear()


@pytest.mark.parametrize("steps_in_flight", short_of([1, 2, 3], {1, 2}))
@pytest.mark.parametrize("groups", [TWO, (FULL, *[KVGroup("window", 5)] * 3), (WINDOW,), (KVGroup("chunk", 8), FULL)])
def test_moving_window_blocks_within_a_table_changes_no_decision(
    groups: tuple[KVGroup, ...], steps_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler decides the same whether rows move the block behind their window to its end or take the general
    path."""
    config = small_config(kv_groups=groups, num_blocks=30 + 20 * len(groups), max_steps_in_flight=steps_in_flight)
    counts = {True: 0, False: 0}
    steady = Windows.grow_steadily

    def counted(self: Windows, batch: Any, rows: Any, num_tokens: Any) -> bool:
        done = steady(self, batch, rows, num_tokens)
        counts[done] += 1
        return done

    for seed in PAIRS:
        monkeypatch.setattr(Windows, "grow_steadily", counted)
        first = list(_run_random_workload(seed, config))
        monkeypatch.setattr(Windows, "grow_steadily", lambda *_: False)
        assert list(_run_random_workload(seed, config)) == first
    assert counts[True] >= 15 or steps_in_flight > 1


# ------------------------------------------------------------------ recordings


def test_a_recording_with_kv_groups_replays() -> None:
    file = io.StringIO()
    host = Host(recorder=Recorder(file), kv_groups=TWO, num_blocks=20)
    prompt = host.prompt(9)
    for number in range(6):
        host.add(f"r{number}", [*prompt, number], max_tokens=12)
    host.run_to_end()
    assert host.scheduler.stats().num_preemptions > 0
    report = replay(io.StringIO(file.getvalue()))
    assert report.num_steps == host.scheduler.stats().num_steps
    changed = file.getvalue().replace('"block_places":[0', '"block_places":[1', 1)
    assert changed != file.getvalue()
    with pytest.raises(ReplayDifference, match="block_places"):
        replay(io.StringIO(changed))


# ------------------------------------------------------------------ eviction policies, events, common prefixes

GEMMA = (*[KVGroup("window", 8)] * 5, FULL)
GPT_OSS = (KVGroup("window", 8), FULL)
LAYOUTS = pytest.mark.parametrize("groups", [GEMMA, GPT_OSS, (WINDOW,)], ids=["gemma3", "gpt-oss", "windows alone"])


def _num_found_after_other_prompts(groups: tuple[KVGroup, ...], eviction: str, retention: float | None) -> int:
    host = Host(kv_groups=groups, num_blocks=24 * len(groups), max_model_len=64, eviction=eviction)
    prompt = host.prompt(33)
    host.add("a", prompt, max_tokens=1, retention=retention)
    host.run_to_end()
    for number in range(12):
        host.add(f"flood {number}", 33, max_tokens=1)
        host.run_to_end()
    host.add("again", [*prompt, 1], max_tokens=1)
    return host.schedule().num_cached_tokens.item(0)


@LAYOUTS
def test_a_retained_prefix_outlives_other_prefixes_in_every_group(groups: tuple[KVGroup, ...]) -> None:
    assert _num_found_after_other_prompts(groups, "lru", None) == 0
    assert _num_found_after_other_prompts(groups, "retention:share=0.9", 1000.0) == 32
    assert _num_found_after_other_prompts(groups, "retention:share=0.9", None) == 0


@LAYOUTS
def test_retention_keeps_the_blocks_that_a_lookup_of_the_prefix_needs(groups: tuple[KVGroup, ...]) -> None:
    """With full attention these are all blocks of the prefix; with a window, the blocks at its end."""
    host = Host(kv_groups=groups, num_blocks=24 * len(groups), max_model_len=64, eviction="retention:share=1")
    host.add("a", 33, max_tokens=1, retention=1000.0)
    host.run_to_end()
    # Token 32 attends to 25 to 32: of eight full blocks to the last two.
    assert host.stats().num_retained_blocks == sum(8 if group.is_full else 2 for group in groups)
    host.scheduler.check_invariants()


def test_kv_events_name_the_group_of_their_blocks() -> None:
    host = Host(kv_groups=TWO, num_blocks=40, max_num_batched_tokens=64, enable_kv_cache_events=True)
    prompt = host.prompt(25)
    host.add("a", prompt, max_tokens=1)
    host.run_to_end()
    full, window = host.scheduler.take_kv_events()
    assert isinstance(full, BlockStored) and isinstance(window, BlockStored)
    assert (full.group, window.group) == (0, 1) and full.block_hashes == window.block_hashes
    assert full.token_ids == window.token_ids == tuple(prompt[:24])
    kv = host.scheduler._kv
    assert isinstance(kv, KVCacheManager) and kv.prefix is not None
    found = kv.prefix.look_up(Root(), np.array(prompt, dtype=np.int32).tobytes(), 6)
    kv.prefix.evict(found.blocks[1, 3:4])
    kv.pool.uncache(found.blocks[1, 3:4].tolist())
    assert host.scheduler.take_kv_events() == [BlockRemoved(full.block_hashes[3:4], 1)]
    host.add("b", [*prompt[:16], *host.prompt(2)], max_tokens=1)
    host.run_to_end()
    (again,) = host.scheduler.take_kv_events()
    assert again == BlockStored(full.block_hashes[3:4], full.block_hashes[2], tuple(prompt[12:16]), Root(), (), 1)


def test_kv_events_have_group_0_by_default() -> None:
    assert BlockStored((), None, (), Root()).group == BlockRemoved(()).group == 0


def test_the_common_prefix_is_counted_in_the_full_attention_group() -> None:
    for groups, expected in ((GPT_OSS, 6), ((WINDOW,), 0), ((FULL, FULL), 6)):
        host = Host(kv_groups=groups, num_blocks=120, max_num_batched_tokens=64, count_common_prefix=True)
        prompt = host.prompt(24)
        host.add("a", [*prompt, 1], max_tokens=20)
        host.add("b", [*prompt, 2], max_tokens=20)
        assert host.schedule().num_common_prefix_blocks == expected


@pytest.mark.parametrize("groups", [(FULL, FULL), TWO, (KVGroup("window", 9),), (KVGroup("chunk", 8), FULL)], ids=str)
def test_fast_path_serves_groups_of_layers(groups: tuple[KVGroup, ...]) -> None:
    """The blocks and tables are the same as in single steps."""
    tables_of = []
    for at_once in (False, True):
        host = Host(kv_groups=groups, num_blocks=200)
        rows = [host.add(f"r{number}", 5 + number, max_tokens=60) for number in range(4)]
        host.update(host.schedule())
        host.update(host.schedule())
        if at_once:
            assert host.scheduler.guaranteed_steps(20) == 20
            host.scheduler.advance(range(100, 121), np.ones(4, dtype=np.int32))
        for _ in range(0 if at_once else 20):
            output = host.schedule()
            host.scheduler.update(output, StepResult(np.ones(4, dtype=np.int32)), host.now)
        host.scheduler.check_invariants()
        tables_of.append([host.scheduler.block_tables(request.request_id).tolist() for request in rows])
    assert tables_of[0] == tables_of[1] and len(tables_of[0][0][0]) > 6


def test_fast_path_is_not_used_with_windows_while_a_request_waits() -> None:
    """Rows then give back blocks in every step."""
    host = Host(kv_groups=TWO, num_blocks=200, max_num_seqs=1)
    host.add("a", 5, max_tokens=60)
    host.update(host.schedule())
    assert host.scheduler.guaranteed_steps(20) == 20
    host.add("b", 5)
    host.update(host.schedule())
    assert host.scheduler.guaranteed_steps(20) == 0
