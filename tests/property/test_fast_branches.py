"""Fast paths of a step have the same result as the general ones. Two schedulers get the same calls, one takes no fast
path, and their outputs, states and explanations are equal over random workloads, configurations and calls from outside.
Planted faults are found.

The fast paths: every row decodes one token (`Running._advance_steadily`), and every row has a token
(`Update.append`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.core import (
    ParkReason,
    PauseMode,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepResult,
)
from pointsman.core.presets import PRESETS, SYSTEMS
from pointsman.core.state.output import OutputFields
from tests.by_name import find
from tests.by_name import replace as replace_method
from tests.forms import short_or_long
from tests.property.twin import state_of

EOS, OTHER_STOP = 5, 6
CASES: dict[str, dict[str, Any]] = {
    "blank": {"enable_prefix_caching": False},
    "cached": {},
    "evictions": {"num_blocks": 72},
    "duplicates": {"num_blocks": 72, "share_within_step": False},
    "retention": {"num_blocks": 72, "eviction": "retention:share=0.5"},
    "few seats": {"max_num_seqs": 3, "order": "priority"},
    "long outputs": {"num_blocks": 400, "max_model_len": 1500},
    "prefill-first": {"batching": "prefill-first", "shortage": "look-ahead"},
    "little room": {"max_model_len": 200},
    "events": {"enable_kv_cache_events": True, "num_blocks": 72},
}
BIG = {"max_num_seqs", "max_num_batched_tokens", "max_num_active_seqs"}  # from presets; here nothing is that large
FULL_POOL = {"num_blocks": 60, "full_sequence_must_fit": False}
VARIANTS: dict[str, dict[str, Any]] = {
    **CASES,
    "cached within a step": {"max_num_batched_tokens": 24},
    **{f"as {name}": {k: v for k, v in knobs.items() if k not in BIG} for name, knobs in (PRESETS | SYSTEMS).items()},
    "few blocks": FULL_POOL,
    "fair": {"order": "fair:weights=t0/2"},
    "shortest-prefill": {"order": "shortest-prefill:ageing=2"},
    "static": {"batching": "static"},
    "no chunks": {"enable_chunked_prefill": False},
    "long prompts in parts": {"long_prefill_token_threshold": 3},
    "prefill interval": {"prefill_interval": 4},
    "one partial prefill": {"max_num_partial_prefills": 1, "max_num_batched_tokens": 11},
    "mean reserve": {**FULL_POOL, "decode_reserve": "mean"},
    "growth": {**FULL_POOL, "reserves": ("growth:scale=4",)},
    "bypass": {**FULL_POOL, "reserves": ("bypass:bound=3",)},
    "least cost": {**FULL_POOL, "victim": "least-cost"},
    "reuse": {**FULL_POOL, "eviction": "reuse:share=0.4"},
    "steps within a target": {"token_limits": ("target-itl:seconds=3,least=2",)},
    "prompts within a gap": {"token_limits": ("prefill-gap:seconds=3,least=2",)},
    "prompts within a gap, few blocks": {**FULL_POOL, "token_limits": ("prefill-gap:seconds=3,least=2",)},
    "drafts": {"num_draft_tokens": 2},
    "logged": {"log_request_events": True},
}
BASE = {"max_num_batched_tokens": 24}
SHORT_POOL = {"num_blocks": 40, "max_num_seqs": 30, "max_num_batched_tokens": 60, "enable_prefix_caching": False}
IN_FLIGHT: dict[str, dict[str, Any]] = {
    "two in flight": {"max_steps_in_flight": 2},
    "two in flight, few blocks": {"max_steps_in_flight": 2, "num_blocks": 60, "full_sequence_must_fit": False},
    "three in flight, few seats": {"max_steps_in_flight": 3, "max_num_seqs": 3},
    "few blocks and many seats": SHORT_POOL,
    "many rows": {"max_num_seqs": 70, "num_blocks": 900, "max_num_batched_tokens": 400},
}
MAX_STEPS = 5_000
Fault = Callable[[pytest.MonkeyPatch], None]


class Pair:
    """Two schedulers; the tokens of the requests are read from `general`."""

    def __init__(self, seed: int, **overrides: Any) -> None:
        values = {
            "num_blocks": 80,
            "block_size": 2,
            "max_model_len": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "num_reserved_blocks": 1,
        }
        self.config = SchedulerConfig(**{**values, **overrides})
        self.general, self.steady = Scheduler(self.config), Scheduler(self.config)
        self.rng = np.random.default_rng(seed)
        self.now = 0.0
        self.lengths: dict[str, int] = {}  # of outputs

    def add(self) -> None:
        rng, name = self.rng, f"r{len(self.lengths)}"
        prompt = [int(rng.integers(10, 13)) for _ in range(int(rng.integers(1, 12)))]
        most = int(rng.integers(1, min(self.config.max_model_len - 12, 600)))
        self.lengths[name] = most if rng.random() < 0.3 else int(rng.integers(1, most + 1))
        stops = (EOS,) if rng.random() < 0.8 else (EOS, OTHER_STOP)
        fields: dict[str, Any] = {"priority": int(rng.integers(3)), "eos_token_ids": stops}
        fields |= {"retention": float(rng.integers(1, 50)), "tenant": f"t{rng.integers(2)}"}
        for scheduler in (self.general, self.steady):
            scheduler.add(Request(name, prompt, arrival_time=self.now, max_tokens=most, **fields), self.now)

    def token(self, request: Request, number: int) -> int:
        """The request's `number`th output token: a stop token, or a token of its own."""
        ends = number >= self.lengths[request.request_id]
        return EOS if ends and request.max_tokens > number else 100 + int(request.request_id[1:])

    def disturb(self) -> None:
        """Make a random call on both schedulers."""
        rng = self.rng
        names = [*self.steady._parts.table.requests]
        name = names[int(rng.integers(len(names)))] if names else "none"
        limit = int(rng.integers(1, self.config.max_num_seqs + 1))
        mode = PauseMode.ALL if rng.random() < 0.5 else PauseMode.ADMISSIONS
        number, priority = int(rng.integers(8)), int(rng.integers(3))
        for scheduler in (self.general, self.steady):
            request = scheduler.get_request(name)
            if number == 0:
                scheduler.abort(name, self.now)
            elif number == 1:
                scheduler.set_max_num_active_seqs(limit, self.now)
            elif number == 2:
                scheduler.pause(self.now, mode)
            elif number == 3:
                scheduler.resume(self.now)
            elif number == 4:
                scheduler.reset_prefix_cache(self.now)
            elif request is not None and number == 5:
                scheduler.set_priority(name, priority, self.now)
            elif request is not None and request.status.is_parked:
                scheduler.ready(name, self.now)
            elif request is not None:
                scheduler.park(name, ParkReason.GRAMMAR, self.now)

    def settle(self) -> None:
        """Undo pauses, lowered limits and parking on both schedulers, so that all requests can run."""
        for scheduler in (self.general, self.steady):
            scheduler.resume(self.now)
            scheduler.set_max_num_active_seqs(None, self.now)
            for name in [*scheduler._parts.table.parked]:
                scheduler.ready(name, self.now)

    def compare(self) -> None:
        self.steady.check_invariants()
        one, other = state_of(self.general), state_of(self.steady)
        for name, value in one.items():
            assert value == other[name], name
        assert self.general.take_kv_events() == self.steady.take_kv_events()


class Beside(Pair):
    """Two schedulers with the same calls: `general` takes no fast path, `steady` takes fast paths."""

    def __init__(self, seed: int, **overrides: Any) -> None:
        super().__init__(seed, **overrides)
        running: Any = self.general._running
        running.steady_allowed = False
        self.in_flight: deque[tuple[SchedulerOutput, SchedulerOutput]] = deque()

    def step(self) -> None:
        """Schedule the next step of both, and update the oldest one in flight, or none."""
        if len(self.in_flight) < self.config.max_steps_in_flight:
            outputs = self.general.schedule(self.now), self.steady.schedule(self.now)
            self.general._steps.records[-1].members = None
            compare_outputs(*outputs)
            self.in_flight.append(outputs)
        if len(self.in_flight) == self.config.max_steps_in_flight or self.rng.random() < 0.5:
            self.end_oldest()
        self.now += 1

    def end_oldest(self) -> None:
        outputs = self.in_flight.popleft()
        tokens = [
            self.token(request, request.num_output_tokens + 1)
            for request, samples in zip(outputs[0].requests, outputs[0].samples, strict=True)
            if samples
        ]
        for scheduler, output in zip((self.general, self.steady), outputs, strict=True):
            scheduler.update(output, StepResult(tokens), self.now + 1)

    def compare(self) -> None:
        if not self.in_flight:
            super().compare()
        one, other = self.general, self.steady
        assert one.stats() == other.stats()
        for name in one._parts.table.requests:
            if one.get_request(name) is not None:
                assert one.explain(name) == other.explain(name)


def compare_outputs(one: SchedulerOutput, other: SchedulerOutput) -> None:
    """Check that every field of both outputs is equal and has the same type, and that the arrays of `other` are
    read-only."""
    for field in fields(OutputFields):
        mine, others = getattr(one, field.name), getattr(other, field.name)
        assert type(mine) is type(others), field.name
        if isinstance(mine, np.ndarray):
            assert mine.dtype == others.dtype and np.array_equal(mine, others), field.name
            assert not others.flags.writeable or (mine.flags.writeable and not len(others)), field.name
        elif isinstance(mine, tuple) and mine and isinstance(mine[0], Request):
            assert [each.request_id for each in mine] == [each.request_id for each in others], field.name
        else:
            assert mine == others, field.name


def drive(seed: int, variant: dict[str, Any], num_rounds: int = 25) -> Beside:
    """A random run of both schedulers."""
    pair = Beside(seed, **{**BASE, **variant})
    rng = pair.rng
    for _ in range(num_rounds):
        for _ in range(int(rng.integers(4)) * (12 if pair.config.max_num_seqs > 64 else 1)):
            pair.add()
        for _ in range(int(rng.integers(1, 12))):
            pair.step()
        if rng.random() < 0.3:
            pair.disturb()
        pair.compare()
    pair.settle()
    for _ in range(MAX_STEPS):
        if not (pair.steady.has_unfinished_requests() or pair.in_flight):
            break
        pair.step()
    assert not pair.steady.has_unfinished_requests()
    pair.compare()
    return pair


@settings(max_examples=short_or_long(25, 300))
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(VARIANTS | IN_FLIGHT)))
def test_fast_paths_make_the_same_decisions_as_the_general_paths(seed: int, name: str) -> None:
    drive(seed, (VARIANTS | IN_FLIGHT)[name])


def test_most_steps_use_the_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = dict.fromkeys(("Running._advance_steadily", "Admission._deferral_before_lookup"), 0)

    def count(name: str) -> None:
        original = find(name)

        def counted(part: Any, *args: Any) -> Any:
            found = original(part, *args)
            taken[name] += found is not None
            return found

        replace_method(monkeypatch, name, counted)

    for name in taken:
        count(name)
    for seed in range(10):
        drive(seed, SHORT_POOL)
    assert all(number > 100 for number in taken.values()), taken


# ------------------------------------------------------------------ planted faults


def rows_run_ahead_of_their_last_token(patch: pytest.MonkeyPatch) -> None:
    replace_method(patch, "Running._may_run_ahead", lambda running: True)


def a_stop_token_is_overlooked(patch: pytest.MonkeyPatch) -> None:
    up_to_stops, cut_at_stops = find("Update._runs_cut_at_stops"), find("_cut_at_stops")

    def only_limits(update: Any, live: Any, runs: Any, newest: Any, most: int) -> Any:
        if runs.counts is not live.ones:
            return up_to_stops(update, live, runs, newest, most)
        return cut_at_stops(live.requests, newest, runs, newest + 2 >= live.token_limit)

    replace_method(patch, "Update._runs_cut_at_stops", only_limits)


FAULTS: list[tuple[Fault, dict[str, Any]]] = [
    (rows_run_ahead_of_their_last_token, {"max_steps_in_flight": 2}),
    (a_stop_token_is_overlooked, {}),
]


@pytest.mark.parametrize(("plant", "variant"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_checks_of_fast_paths_detect_planted_faults(
    monkeypatch: pytest.MonkeyPatch, plant: Fault, variant: dict[str, Any]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(20):
            drive(seed, variant)
