"""Preempted requests that swap: the copied blocks, the decisions, and the times behind them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    ConfigError,
    Copies,
    FinishReason,
    Listener,
    Recorder,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepResult,
    replay,
)
from pointsman.core.kv.digests import block_keys
from pointsman.core.kv.slots import SlotDirectory, SlotLoad
from pointsman.core.policy import swap
from pointsman.core.replay import RecordingError, ReplayDifference
from pointsman.core.state.events import Preempted

BLOCK_SIZE = 4


class HostMemory:
    """Host memory of 1,000 blocks, and a device. A step takes 10 ms, and 1 ms per prompt token; a copy
    `block_seconds`."""

    saves_evicted = False

    def __init__(self, block_seconds: float = 1e-4, *, recorder: Recorder | None = None, **overrides: Any) -> None:
        values: dict[str, Any] = {
            "num_blocks": 20,
            "max_model_len": 76,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "preemption_mode": "swap",
        }
        self.block_seconds = block_seconds
        self.directory = SlotDirectory(1000)
        self.now = 0.0
        self.preempted: list[Preempted] = []
        self.scheduler = Scheduler(SchedulerConfig(**{**values, **overrides}), connector=self, recorder=recorder)
        self.scheduler.add_listener(_Preemptions(self.preempted))
        self.outputs: list[SchedulerOutput] = []

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        keys = block_keys(request, BLOCK_SIZE)[num_local_tokens // BLOCK_SIZE :]
        return self.directory.num_found(keys) * BLOCK_SIZE, False

    def request_ended(self, request: Request, block_ids: Any, num_tokens: int, transfer_id: int) -> bool:
        return False

    def reset(self) -> None:
        self.directory.clear()

    def add(self, name: str, length: int, max_tokens: int) -> Request:
        tokens = [1 + (sum(name.encode()) * 7 + place) % 997 for place in range(length)]
        request = Request(name, tokens, arrival_time=self.now, max_tokens=max_tokens)
        self.scheduler.add(request, self.now)
        return request

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule(self.now)
        self.outputs.append(output)
        loads = [SlotLoad(self._keys(load), load.block_ids.tolist()) for load in output.loads]
        plan = self.directory.assign_slots([(save.block_id, save.key) for save in output.saves], loads)
        seconds = plan.num_blocks * self.block_seconds
        self.now += 0.01 + 0.001 * max(0, output.total_num_scheduled_tokens - output.num_rows) + seconds
        copies = Copies(plan.num_blocks, seconds) if plan.num_blocks else None
        result = StepResult(np.full(int(output.samples.sum()), 5, dtype=np.int32), copies=copies)
        self.scheduler.update(output, result, self.now)
        self.scheduler.check_invariants()
        return output

    def run(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()

    def run_at_once(self) -> None:
        """As `run`, but with fast-forward for plain decodes."""
        while self.scheduler.has_unfinished_requests():
            self.step()
            if num_steps := self.scheduler.guaranteed_steps():
                times = [self.now]
                for _ in range(num_steps):
                    times.append(times[-1] + 0.01)
                self.scheduler.advance(times, [5] * len(self.scheduler.running_rows))
                self.scheduler.check_invariants()
                self.now = times[-1]

    def step_until_preempted(self, count: int = 1) -> Request:
        while len(self.preempted) < count:
            self.step()
        return self.preempted[count - 1].request

    @staticmethod
    def _keys(load: Any) -> Sequence[bytes]:
        first = load.first_token // BLOCK_SIZE
        return block_keys(load.request, BLOCK_SIZE)[first : first + len(load.block_ids)]


class _Preemptions(Listener):
    def __init__(self, seen: list[Preempted]) -> None:
        self._seen = seen

    def on_preempted(self, event: Preempted) -> None:
        self._seen.append(event)


def short_of_blocks(host: HostMemory, count: int = 2) -> None:
    """Add requests that together outgrow the pool."""
    for number in range(count):
        host.add(f"r{number}", 20, 50)


def test_blocks_are_copied_out_at_eviction_and_back_at_resumption() -> None:
    host = HostMemory()
    short_of_blocks(host)
    victim = host.step_until_preempted()
    assert host.scheduler.explain(victim.request_id).recovery is not None
    lost = host.preempted[0].num_lost_tokens
    num_saved = len(host.outputs[-1].saves)
    while victim.row is None:
        output = host.step()
        num_saved += len(output.saves)
        assert {save.key for save in output.saves} <= set(block_keys(victim, BLOCK_SIZE))
    (load,) = host.outputs[-1].loads
    assert load.request is victim
    assert len(load.block_ids) == num_saved > 3
    assert int(host.outputs[-1].num_cached_tokens[0]) == lost // BLOCK_SIZE * BLOCK_SIZE, "all its full blocks"
    assert host.scheduler.stats().num_recomputed_tokens < BLOCK_SIZE
    host.run()
    assert victim.num_output_tokens == 50


def test_a_victim_that_swaps_recomputes_less_than_a_block() -> None:
    """Some resume with the step that evicts their last cached block, or are preempted repeatedly."""
    host = HostMemory()
    for group in range(8):
        for number in range(4):
            host.add(f"{group}-{number}", 5 + 7 * number, 30 + 3 * group)
        host.run()
    stats = host.scheduler.stats()
    assert stats.num_preemptions > 30
    assert stats.num_recomputed_tokens < BLOCK_SIZE * stats.num_preemptions
    saved = [{save.key for save in output.saves} for output in host.outputs]
    resumed = [{key for load in output.loads for key in host._keys(load)} for output in host.outputs]
    assert any(keys & others for keys, others in zip(saved, resumed, strict=True)), "saved and loaded by one step"


def test_blocks_that_no_preempted_request_needs_are_not_copied() -> None:
    host = HostMemory()
    for number in range(6):  # one after the other, so that the pool evicts blocks of finished requests
        host.add(f"r{number}", 40, 4)
        host.run()
    stats = host.scheduler.stats()
    assert stats.num_evictions > 20
    assert (stats.num_preemptions, stats.num_saved_blocks) == (0, 0)
    short_of_blocks(host)
    victim = host.step_until_preempted()
    host.scheduler.abort(victim.request_id, host.now)
    before = host.scheduler.stats().num_saved_blocks
    host.run()
    assert host.scheduler.stats().num_saved_blocks == before, "it does not resume any more"


def test_a_connector_that_saves_all_evicted_blocks_still_saves_them() -> None:
    host = HostMemory(preemption_mode="recompute")
    host.saves_evicted = True
    host.scheduler = Scheduler(host.scheduler.config, connector=host)
    for number in range(6):
        host.add(f"r{number}", 40, 4)
        host.run()
    stats = host.scheduler.stats()
    assert stats.num_saved_blocks == stats.num_evictions > 20
    assert stats.preemption_decisions == {"swap": 0, "recompute": 0}


@pytest.mark.parametrize(("block_seconds", "decided"), [(1e-4, "swap"), (1.0, "recompute")])
def test_mode_cheaper_compares_the_times_of_recompute_and_copies(block_seconds: float, decided: str) -> None:
    """A block of 4 tokens takes 4 ms to recompute, so a swap is cheaper below 2 ms each way."""
    host = HostMemory(block_seconds, preemption_mode="cheaper")
    for group in range(12):
        for number in range(3):
            host.add(f"{group}-{number}", 8 + 8 * ((group + number) % 4), 40)
        host.run()
    decisions = host.scheduler.stats().preemption_decisions
    other = "recompute" if decided == "swap" else "swap"
    assert decisions[decided] > 10 and decisions[other] <= 1, "at most the first, before a copy is measured"
    told = [event.recovery for event in host.preempted]
    last = told[-1]
    assert last is not None and last.recompute_seconds is not None and last.swap_seconds is not None
    assert last.swaps is (last.swap_seconds <= last.recompute_seconds)
    blocks = last.num_cached_tokens // BLOCK_SIZE
    assert last.swap_seconds == pytest.approx(2 * blocks * block_seconds, rel=0.01)
    assert last.recompute_seconds == pytest.approx(0.001 * last.num_cached_tokens, rel=0.3)
    if decided == "recompute":
        assert host.scheduler.stats().num_saved_blocks < 12, "those that measured the copies"
        assert host.scheduler.stats().num_loaded_tokens == 0


def test_fast_forward_learns_the_same_copy_times_as_single_steps() -> None:
    """The copies of the step before are no part of their time."""
    decided = []
    for runs in (HostMemory.run, HostMemory.run_at_once):
        host = HostMemory(0.0023, preemption_mode="cheaper")
        for group in range(6):
            for number in range(3):
                host.add(f"{group}-{number}", 8 + 8 * ((group + number) % 4), 40)
            runs(host)
        assert min(host.scheduler.stats().preemption_decisions.values()) > 0, "close enough that the times decide"
        decided.append((host.now, [event.recovery for event in host.preempted]))
    assert decided[0] == decided[1]


def test_measured_copy_times_are_forgotten_after_many_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "TRIED_AGAIN", 8)
    host = HostMemory(1.0, preemption_mode="cheaper")

    def serve(count: int) -> int:
        before = host.scheduler.stats().preemption_decisions["swap"]
        for group in range(count):
            for number in range(3):
                host.add(f"{len(host.preempted)}-{group}-{number}", 20, 50)
            host.run()
        return host.scheduler.stats().preemption_decisions["swap"] - before

    assert serve(3) <= 1
    host.block_seconds = 1e-5
    assert serve(8) > 8


def test_an_explanation_says_whether_a_victim_swaps() -> None:
    host = HostMemory(preemption_mode="cheaper", log_request_events=True)
    short_of_blocks(host)
    victim = host.step_until_preempted()
    host.step()
    told = host.scheduler.explain(victim.request_id)
    lost, cached = host.preempted[0].num_lost_tokens, host.preempted[0].num_cached_tokens
    assert f"had computed {lost} tokens, {cached} of them in full blocks; evicted tokens are swapped" in told.sentence
    assert [event.detail for event in victim.events if event.type.name == "PREEMPTED"] == ["swap"]
    while victim.row is None:
        host.step()
    assert host.scheduler.explain(victim.request_id).recovery is None


def test_after_a_prefix_cache_reset_no_blocks_are_swapped() -> None:
    host = HostMemory()
    short_of_blocks(host)
    victim = host.step_until_preempted()
    host.scheduler.reset_prefix_cache(host.now)
    assert host.scheduler.explain(victim.request_id).recovery is None
    before = host.scheduler.stats().num_saved_blocks
    while victim.row is None:
        assert not host.step().saves
    assert host.scheduler.stats().num_saved_blocks == before
    assert host.outputs[-1].num_cached_tokens.tolist() == [0]


def test_a_failed_admission_leaves_a_swapped_request_unchanged() -> None:
    host = HostMemory()
    short_of_blocks(host)
    victim = host.step_until_preempted()
    while True:
        output = host.scheduler.schedule(host.now)
        if victim in output.admitted:
            break
        loads = [SlotLoad(host._keys(load), load.block_ids.tolist()) for load in output.loads]
        host.directory.assign_slots([(save.block_id, save.key) for save in output.saves], loads)
        host.scheduler.update(output, StepResult([5] * int(output.samples.sum())), host.now)
    host.scheduler.fail(output, host.now)
    told = host.scheduler.explain(victim.request_id).recovery
    assert told is not None and told.swaps
    host.run()
    assert victim.finish_reason is FinishReason.LENGTH
    assert host.scheduler.stats().num_recomputed_tokens < 3 * BLOCK_SIZE


def test_a_recording_has_the_copy_times_of_the_host() -> None:
    file = io.StringIO()
    host = HostMemory(0.0023, recorder=Recorder(file), preemption_mode="cheaper")
    for group in range(6):
        for number in range(3):
            host.add(f"{group}-{number}", 8 + 8 * ((group + number) % 4), 40)
        host.run()
    decisions = host.scheduler.stats().preemption_decisions
    assert min(decisions.values()) > 0, "close enough that the times decide"
    lines = file.getvalue().splitlines()
    assert replay(lines).num_preemptions == sum(decisions.values())
    without = [line if '"copies"' not in line else _without_copies(line) for line in lines]
    with pytest.raises((ReplayDifference, RecordingError)):
        replay(without)


def _without_copies(line: str) -> str:
    start = line.index('"copies"')
    return line[:start] + line[line.index("]", start) + 2 :]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"preemption_mode": "swop"}, 'choose "recompute", "swap" or "cheaper"'),
        ({"preemption_mode": "swap", "enable_prefix_caching": False}, "turn enable_prefix_caching on"),
    ],
)
def test_invalid_swap_settings_are_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SchedulerConfig(num_blocks=8, max_model_len=16, **overrides)


def test_swapping_needs_host_memory() -> None:
    config = SchedulerConfig(num_blocks=8, max_model_len=16, preemption_mode="cheaper")
    with pytest.raises(ConfigError, match="there is no host memory to swap to; pass a connector"):
        Scheduler(config)
