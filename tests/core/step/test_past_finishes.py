"""`advance_past_finishes` leaves the state of single steps, whatever finishes among them: two schedulers with the same
calls, one stepping and one advancing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    FinishReason,
    Listener,
    ParkReason,
    PauseMode,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepOrderError,
    StepResult,
    StepResultError,
)
from pointsman.core.kv.events import BlockRemoved, KVEvent
from pointsman.core.state import batch
from tests.core.helpers import Host
from tests.forms import seeds, short_or_long
from tests.property.twin import state_of

EOS, OTHER_STOP = 5, 6
NUM_ROUNDS = short_or_long(25, 40)
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


class Pair:
    """Two schedulers; `stepping` is where the tokens of the requests are looked up."""

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
        self.stepping, self.advancing = Scheduler(self.config), Scheduler(self.config)
        self.rng = np.random.default_rng(seed)
        self.now = 0.0
        self.lengths: dict[str, int] = {}  # of outputs
        self.opens = False
        """Whether runs begin with what `opening` finds."""
        self.sort = 0
        """Of tokens: another one in other runs."""
        self.num_passed = 0
        """Finishes before the last step of their run."""
        self.num_opened = 0
        """Runs whose first step admitted requests, or computed part of a prompt."""
        self.num_opened_runs = 0
        """Of these, runs of more than one step."""

    def add(self) -> None:
        rng, name = self.rng, f"r{len(self.lengths)}"
        prompt = [int(rng.integers(10, 13)) for _ in range(int(rng.integers(1, 12)))]
        most = int(rng.integers(1, min(self.config.max_model_len - 12, 600)))
        self.lengths[name] = most if rng.random() < 0.3 else int(rng.integers(1, most + 1))
        stops = (EOS,) if rng.random() < 0.8 else (EOS, OTHER_STOP)
        fields: dict[str, Any] = {"priority": int(rng.integers(3)), "eos_token_ids": stops}
        fields |= {"retention": float(rng.integers(1, 50)), "tenant": f"t{rng.integers(2)}"}
        for scheduler in (self.stepping, self.advancing):
            scheduler.add(Request(name, prompt, arrival_time=self.now, max_tokens=most, **fields), self.now)

    def token(self, request: Request, number: int) -> int:
        """Its `number`th output token: what stops it, or a token of its own."""
        ends = number >= self.lengths[request.request_id]
        return EOS if ends and request.max_tokens > number else 100 + 1000 * self.sort + int(request.request_id[1:])

    def step(self) -> None:
        """A step of both."""
        self.step_alone(self.stepping)
        self.step_alone(self.advancing)
        self.now += 1

    def step_alone(self, scheduler: Scheduler) -> SchedulerOutput:
        """A step of one of them."""
        output = scheduler.schedule(self.now)
        sampled = [request for request, samples in zip(output.requests, output.samples, strict=True) if samples]
        tokens = [self.token(request, request.num_output_tokens + 1) for request in sampled]
        scheduler.update(output, StepResult(tokens), self.now + 1)
        return output

    def run(self) -> None:
        """Steps at once, past finishes, or up to the first one, where that is sure; one by one in the other one."""
        scheduler, rng = self.advancing, self.rng
        self.sort = int(rng.integers(2))
        opening = scheduler.opening() if self.opens else None
        running = scheduler.running
        requests = running if opening is None else [*running, *opening.admitted][: opening.num_samples]
        if not requests and opening is None:
            self.step()
            return
        limit = int(rng.integers(1, 40 if rng.random() < 0.6 else 700))
        times = self.now + np.arange(limit + 1.0)
        # One that ends by its token limit does so sooner than it is told to.
        lengths = [
            self.lengths[each.request_id] - each.num_output_tokens + self.ends_by_limit(each) for each in requests
        ]
        tokens = [self.token(each, 0) for each in requests]
        last = [EOS] * len(requests)
        if opening is None and rng.random() < 0.3 and (sure := scheduler.horizon(min(limit, *lengths))):
            ends = [EOS if length == sure else token for length, token in zip(lengths, tokens, strict=True)]
            scheduler.advance(times[: sure + 1], tokens, ends)
            finishes = None
        else:
            sure, finishes = scheduler.advance_past_finishes(times, tokens, last, lengths, opening)
        if not sure:
            assert opening is None
            self.step()
            return
        self.num_opened += opening is not None
        self.num_opened_runs += opening is not None and sure > 1
        usages = {} if finishes is None else {each.num_steps: each.kv_cache_usage for each in finishes}
        for step in range(1, sure + 1):
            output = self.step_alone(self.stepping)
            if step > 1 or opening is None:
                assert output.num_rows == output.total_num_scheduled_tokens
            else:
                usages.setdefault(1, opening.kv_cache_usage)
                assert as_load(output) == opening[:5]
                assert [each.request_id for each in output.admitted] == [each.request_id for each in opening.admitted]
                assert output.num_cached_tokens.tolist() == [grant.num_cached_tokens for grant in opening.grants]
            assert usages.get(step, self.stepping.kv_cache_usage) == self.stepping.kv_cache_usage
            self.now += 1
        if finishes is not None:
            self.num_passed += sum(len(each.requests) for each in finishes if each.num_steps < sure)
            names = [request.request_id for each in finishes for request in each.requests]
            assert sorted(names) == sorted(request.request_id for request in requests if request.is_finished)

    def ends_by_limit(self, request: Request) -> bool:
        """Whether its output is as long as its limit allows."""
        return self.lengths[request.request_id] == request.max_tokens

    def disturb(self) -> None:
        """A call from outside, of both."""
        rng = self.rng
        names = [*self.advancing._parts.table.requests]
        name = names[int(rng.integers(len(names)))] if names else "none"
        limit = int(rng.integers(1, self.config.max_num_seqs + 1))
        mode = PauseMode.ALL if rng.random() < 0.5 else PauseMode.ADMISSIONS
        number, priority = int(rng.integers(8)), int(rng.integers(3))
        for scheduler in (self.stepping, self.advancing):
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
        """Nothing holds a request up."""
        for scheduler in (self.stepping, self.advancing):
            scheduler.resume(self.now)
            scheduler.set_max_num_active_seqs(None, self.now)
            for name in [*scheduler._parts.table.parked]:
                scheduler.ready(name, self.now)

    def compare(self) -> None:
        self.advancing.check_invariants()
        one, other = state_of(self.stepping), state_of(self.advancing)
        for name, value in one.items():
            assert value == other[name], name
        assert _single(self.stepping.take_kv_events()) == _single(self.advancing.take_kv_events())


def _single(events: list[KVEvent]) -> list[KVEvent]:
    """Blocks that are removed together as blocks that are removed one after the other."""
    found: list[KVEvent] = []
    for event in events:
        removed = isinstance(event, BlockRemoved)
        found += [BlockRemoved((key,)) for key in event.block_hashes] if removed else [event]
    return found


@pytest.mark.parametrize("case", CASES)
def test_as_single_steps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "little room":  # for recent tokens: rows are flushed between runs, and runs end before
        monkeypatch.setattr(batch, "RECENT", 24)
    passed = 0
    for seed in seeds(2, 10):
        pair = Pair(seed, **CASES[case])
        for _ in range(NUM_ROUNDS):
            for _ in range(int(pair.rng.integers(4))):
                pair.add()
            pair.step()
            for _ in range(int(pair.rng.integers(1, 6))):
                pair.run()
            pair.compare()
        while pair.advancing.has_unfinished_requests():
            pair.run()
        pair.compare()
        passed += pair.num_passed
    assert passed


def as_load(output: SchedulerOutput) -> tuple[int, ...]:
    """The load of a step, as an `Opening` begins with it."""
    computed, tokens = output.num_computed_tokens, output.num_scheduled_tokens
    return (
        output.total_num_scheduled_tokens,
        output.num_rows,
        int((computed + tokens).sum()),
        output.num_attended_tokens,
        int(output.samples.sum()),
    )


OPENED: dict[str, dict[str, Any]] = {
    **{name: CASES[name] for name in ("blank", "cached", "evictions", "duplicates", "long outputs", "little room")},
    "events": CASES["events"],
    "small budget": {"max_num_batched_tokens": 11},
    "small budget, cached within a step": {"max_num_batched_tokens": 15, "num_blocks": 72, "block_size": 1},
    "few seats": {"max_num_seqs": 3},
    "watermark": {"watermark": 0.2, "num_blocks": 50},
    "decode reserve": {"decode_reserve": 20, "num_blocks": 60},
    "as vLLM": {"shortage": "in-order", "num_blocks": 60},
    "counted prefixes": {"count_common_prefix": True},
}


@pytest.mark.parametrize("case", OPENED)
def test_openings_as_single_steps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "little room":
        monkeypatch.setattr(batch, "RECENT", 24)
    opened = opened_runs = 0
    for seed in seeds(3, 5):
        pair = Pair(100 + seed, **OPENED[case])
        for _ in range(NUM_ROUNDS):
            for _ in range(int(pair.rng.integers(4))):
                pair.add()
            pair.opens = pair.rng.random() < 0.9
            for _ in range(int(pair.rng.integers(1, 4))):
                pair.run()
            pair.compare()
        pair.opens = True
        while pair.advancing.has_unfinished_requests():
            pair.run()
            pair.compare()
        opened, opened_runs = opened + pair.num_opened, opened_runs + pair.num_opened_runs
    assert opened > 15
    assert opened_runs > 5


def decoding(**overrides: Any) -> Host:
    """A host with three requests that decode; "short" reaches its limit of tokens after 4 more."""
    host = Host(**{"num_blocks": 64, **overrides})
    for name, most in (("a", 30), ("short", 5), ("b", 30)):
        host.add(name, 4, max_tokens=most, eos_token_ids=(EOS,))
    host.step()
    return host


def test_a_token_limit_or_a_stop_token_ends_a_request_within_a_run() -> None:
    host = decoding()
    scheduler = host.scheduler
    assert scheduler.horizon() == 4
    num_steps, finishes = scheduler.advance_past_finishes(np.arange(11.0), [1, 2, 3], [EOS] * 3, [12, 9, 7])
    assert num_steps == 4, "one ends sooner than the host says"
    assert [(each.num_steps, [request.request_id for request in each.requests]) for each in finishes] == [
        (4, ["short"])
    ]
    assert finishes[0].requests[0].finish_reason is FinishReason.LENGTH
    assert finishes[0].requests[0].output_token_ids[1:].tolist() == [2, 2, 2, 2]
    num_steps, finishes = scheduler.advance_past_finishes(np.arange(4.0, 11.0), [1, 3], [EOS] * 2, [8, 3])
    assert num_steps == 6
    assert [(each.num_steps, [request.request_id for request in each.requests]) for each in finishes] == [(3, ["b"])]
    assert finishes[0].requests[0].output_token_ids[1:].tolist() == [3, 3, 3, 3, 3, 3, EOS]
    assert finishes[0].kv_cache_usage == 3 / 64, "of a after 11 computed tokens"
    assert [request.request_id for request in scheduler.running] == ["a"]
    assert scheduler.running[0].num_output_tokens == 11
    assert scheduler.stats().num_steps == 11
    assert scheduler.stats().num_generated_tokens == 3 + 10 + 4 + 7
    assert not scheduler.has_unreported_ends
    scheduler.check_invariants()


def test_no_further_than_the_last_request() -> None:
    host = decoding()
    assert host.scheduler.advance_past_finishes(np.arange(11.0), [1, 2, 3], [EOS] * 3, [3, 1, 2])[0] == 3
    assert not host.scheduler.num_running
    assert host.scheduler.has_unreported_ends


def test_nothing_is_sure_where_something_follows_it() -> None:
    class Follows(Listener):
        def on_finished(self, request: Request, now: float) -> None: ...

    class FollowsAdmissions(Listener):
        def on_admitted(self, event: Any) -> None: ...

    host = decoding()
    scheduler = host.scheduler
    arguments = (np.arange(13.0), [1, 2, 3], [EOS] * 3, [12, 4, 7])
    scheduler.add_listener(listener := Follows())
    assert scheduler.advance_past_finishes(*arguments) == (0, [])
    scheduler.remove_listener(listener)
    host.add("waits")
    assert scheduler.advance_past_finishes(*arguments) == (0, [])
    assert scheduler.opening() is not None
    for watcher in (listener, FollowsAdmissions()):
        scheduler.add_listener(watcher)
        assert scheduler.opening() is None
        scheduler.remove_listener(watcher)
    logged = decoding(log_request_events=True)
    assert logged.scheduler.advance_past_finishes(*arguments) == (0, [])
    logged.add("waits")
    assert logged.scheduler.opening() is None


def test_not_to_the_end_of_a_part_of_a_prompt() -> None:
    """A request that expects more input does not finish there."""
    host = Host(num_blocks=64)
    host.add("a", 4, max_tokens=30)
    host.add("part", 4, max_tokens=5, more_input=True)
    host.step()
    last = [EOS, EOS]
    assert host.scheduler.advance_past_finishes(np.arange(13.0), [1, 2], last, [12, 4])[0] == 3
    assert host.scheduler.advance_past_finishes(np.arange(13.0), [1, 2], last, [9, 9]) == (0, [])


def test_an_opening_is_void_once_something_has_happened() -> None:
    host = decoding()
    scheduler = host.scheduler
    host.add("waits")
    before, opening = state_of(scheduler), scheduler.opening()
    assert opening is not None
    assert state_of(scheduler) == before, "looking changes nothing"
    arguments = ([0.0, 1.0], [1, 2, 3, 4], [EOS] * 4, [9, 4, 9, 9])
    changes = (lambda: host.add("late"), lambda: scheduler.abort("late", 0.0), lambda: scheduler.pause(0.0))
    for change in changes:
        change()
        before = state_of(scheduler)
        with pytest.raises(StepOrderError, match="call it again"):
            scheduler.advance_past_finishes(*arguments, opening)
        assert state_of(scheduler) == before
    scheduler.resume(0.0)
    found = scheduler.opening()
    assert found is not None
    assert scheduler.advance_past_finishes(*arguments, found)[0] == 1
    assert [request.request_id for request in scheduler.running] == ["a", "short", "b", "waits"]


@pytest.mark.parametrize(
    ("tokens", "last", "lengths", "error", "message"),
    [
        ([1, 2, 3], [EOS, 2, 3], [10, 4, 7], StepResultError, "token 3 does not stop request 'b' after 7 step"),
        ([1, 2, 3], [EOS, 2, EOS], [10, 4], StepResultError, r"lengths has shape \(2,\)"),
        ([1, 2, 3], [EOS, 2], [10, 4, 7], StepResultError, r"last_token_ids has shape \(2,\)"),
        ([1, 2, 3], [EOS, 2, EOS], [10, 0, 7], StepResultError, "at least 1 step"),
        ([EOS, 2, 3], [EOS, 2, EOS], [10, 4, 7], StepResultError, "stops request 'a'"),
        ([1, -2, 3], [EOS, 2, EOS], [10, 4, 7], StepResultError, "token_ids has token id -"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    tokens: list[int], last: list[int], lengths: list[int], error: type[Exception], message: str
) -> None:
    for opens in (False, True):
        host = decoding()
        opening = None
        if opens:
            host.add("d", 4, max_tokens=30, eos_token_ids=(EOS,))
            opening = host.scheduler.opening()
            tokens, last, lengths = [*tokens, 4], [*last, EOS], [*lengths, 8]
            message = message.replace("(2", "(3")
        before = state_of(host.scheduler)
        with pytest.raises(error, match=message):
            host.scheduler.advance_past_finishes(np.arange(11.0), tokens, last, lengths, opening)
        with pytest.raises(StepOrderError, match=r"times has 1 value"):
            host.scheduler.advance_past_finishes([0.0], tokens, last, lengths, opening)
        assert state_of(host.scheduler) == before


@pytest.mark.parametrize(
    ("token", "last", "message"), [(EOS, EOS, "stops request 'new'"), (4, 4, "token 4 does not stop request 'new'")]
)
def test_tokens_of_an_admitted_request_are_checked(token: int, last: int, message: str) -> None:
    host = Host(num_blocks=64)
    host.add("new", 4, max_tokens=30, eos_token_ids=(EOS,))
    opening, before = host.scheduler.opening(), state_of(host.scheduler)
    with pytest.raises(StepResultError, match=message):
        host.scheduler.advance_past_finishes(np.arange(11.0), [token], [last], [8], opening)
    assert state_of(host.scheduler) == before
