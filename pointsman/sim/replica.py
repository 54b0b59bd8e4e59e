"""Replica: runs one scheduler under a virtual clock. The scheduler is the same as in every other host; a step-time
model replaces the device.

    replica.plan_event(until)            plan the next event (one step, or all guaranteed decodes); returns its end
    replica.add(number, request, now)    a request arrives: planned decodes that have not begun are dropped
    replica.commit_event()               the event has happened; returns the requests that it finished

With host memory (`host_memory.py`) a step begins with its block copies, which add to its time.

A step that decides anything is scheduled when it begins and updated when it ends. Between such steps every running
request decodes, and one call of `Scheduler.advance` runs all these steps, up to the first request that ends. Only the
simulator knows the end of an output: a request ends with an end-of-sequence token that the scheduler cannot foresee.

With speculation (`speculation.py`) every step is scheduled by itself, unless `draft_table` allows no drafts.

With asynchronous scheduling (`max_steps_in_flight=2`) a step is scheduled when the step before it begins, as in vLLM.
Arrivals during a step, and facts known only at its end, count one step later. Such steps are simulated one by one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pointsman.core import (
    Copies,
    KVConnector,
    Listener,
    Request,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerStats,
    StepResult,
)
from pointsman.core.state.output import IntArray
from pointsman.core.state.sealed import new_tuple
from pointsman.core.step.validation import longer_than_model
from pointsman.sim.features import PLAIN, Features
from pointsman.sim.host_memory import HostMemory, HostTier, check_host_memory
from pointsman.sim.outcome import Event, Timeline
from pointsman.sim.request import EOS_TOKEN, VOCAB_SIZE, SimRequest, blank_prompt, filler_token, prompt_tokens
from pointsman.sim.step_time import StepLoad, StepTime

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

MAX_STEPS_AT_ONCE = 4096
"""Maximum number of steps in one run of decodes; limits the size of the run's arrays."""
MORE_STEPS = 1.2
"""A run of decodes computes this many times the expected number of step times. With too few of them a second run would
be necessary, which costs more."""
MIN_SECONDS = 1e-9
"""Minimum seconds of a step in an estimate of the number of steps until a time."""
MAX_BUILT = 2**24
"""Maximum length of a prompt that is built although it is too long for the model, so that the scheduler refuses it."""
_ROWS = 64
_ONE: Int64Array = np.array(1)
_NONE: list[int] = []


class _Decodes(NamedTuple):
    """A planned run of guaranteed plain decodes."""

    end: float
    times: FloatArray
    """Start of the run and end of each step, in seconds, [steps + 1]."""
    rows: Int64Array
    """Batch rows of the running requests."""
    num_left: Int64Array
    """For each row, the number of tokens that its request has yet to generate."""

    def cut_before(self, time: float) -> _Decodes:
        """The run with only the steps that begin before `time`, at least one."""
        if self.end <= time:
            return self
        num_steps = int(self.times[1:].searchsorted(time)) + 1
        return self._replace(end=self.times.item(num_steps), times=self.times[: num_steps + 1])


class _Known(NamedTuple):
    """Data of a request that the simulator knows and the scheduler does not."""

    number: int
    """Row of the request in the timings."""
    num_tokens: int
    """Number of tokens, prompt and output, at the end of the request."""
    filler: int
    """The token that the request generates until its end."""
    limit: int
    """Number of tokens, prompt and output, that `max_tokens` allows."""
    key: int
    """Key of the request's drafts, see `Speculation.request_key`."""
    has_adapter: bool


class _Step(NamedTuple):
    """A planned step, already scheduled."""

    begin: float
    end: float
    output: SchedulerOutput


class Scheduled(NamedTuple):
    """A scheduled step whose duration is not known yet."""

    output: SchedulerOutput
    load: StepLoad | None
    """None: no row computes anything."""
    copying: float
    """Seconds of the block copies at the begin of the step."""
    has_adapter: bool = False
    """Whether a row has an adapter that costs time."""
    is_drafting: bool = False
    """Whether the drafter proposes drafts at the end of the step."""

    @property
    def is_empty(self) -> bool:
        """Whether the step does nothing: another step would decide the same, until something else happens."""
        return self.load is None and not self.output.loads and not self.copying


class Decodes(NamedTuple):
    """Guaranteed plain decodes whose times are not known yet."""

    num_steps: int
    rows: Int64Array
    """Batch rows of the running requests."""
    num_left: Int64Array
    """For each row, the number of tokens that its request has yet to generate."""
    num_context_tokens: int
    """Number of positions that the rows read in the first step."""


class TokenTimes(Protocol):
    """What a replica records of its requests, each given by its number; see `Timings`."""

    has_tokens: bool
    """Whether the tokens are those of clients."""

    def record_engine(self, number: int, engine: int) -> None: ...

    def record_admission(self, number: int, now: float, num_cached_tokens: int) -> None: ...

    def record_token(self, numbers: Int64Array, now: float) -> None: ...

    def record_tokens(self, numbers: Int64Array, times: FloatArray) -> None: ...

    def record_finish(self, number: int, request: Request) -> None: ...


class TransferConnector(KVConnector, Protocol):
    """A connector that loads KV from other replicas while other requests run, or sends KV to them."""

    engine: Replica | None
    """The replica that has the connector."""

    def begin_loads(self, output: SchedulerOutput, begin: float) -> None:
        """Begin the loads of a step that begins at `begin` (seconds)."""

    def note_admission(self, request: Request, now: float) -> None:
        """A request got a row."""


class Replica:
    """A scheduler, its device, and the virtual time that it has reached.

    Args:
        config: configuration of the scheduler.
        step_time: how long a step takes.
        timings: receives the times of requests.
        index: number of the replica among all schedulers of the simulation.
        is_stepping: schedule every step separately, for comparisons.
        seed: seed of the prompts' tokens; used if prefix caching is enabled.
        vocab_size: number of token ids in prompts.
        listeners: listeners to the scheduler's events.
        host_memory: host memory that keeps evicted KV; None: evicted KV is lost.
        features: drafts, and the cost of adapters.
        transfers: connector to other replicas, instead of host memory; None: KV stays on this replica.

    Raises:
        SimulationError: the host memory or the features do not fit the configuration.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: StepTime,
        timings: TokenTimes,
        *,
        index: int = 0,
        is_stepping: bool = False,
        seed: int = 0,
        vocab_size: int = VOCAB_SIZE,
        listeners: Iterable[Listener] = (),
        host_memory: HostMemory | None = None,
        features: Features = PLAIN,
        transfers: TransferConnector | None = None,
    ) -> None:
        check_host_memory(host_memory, config)
        features.check(config)
        self.host = None if host_memory is None else HostTier(host_memory, config)
        self._transfers = transfers
        connector = self.host if transfers is None else transfers
        self.scheduler = Scheduler(config, connector=connector, listeners=listeners)
        self.index = index
        self.engines = (self,)
        self.timeline = Timeline()
        self.now = 0.0
        """End of the replica's last event, in seconds."""
        self.config = config
        self._step_time = step_time
        self._timings = timings
        self._max_in_flight = config.max_steps_in_flight
        self._events = self.timeline.events
        self._ones = np.ones(_ROWS, dtype=np.int64)
        self._is_stepping = is_stepping
        self._speculation, self._adapter_share = features.speculation, features.adapter_share
        self._decode_seconds = MIN_SECONDS  # seconds of the last planned decode
        self._seed, self._vocab_size = seed, vocab_size
        self._has_content = config.enable_prefix_caching
        self._planned: _Decodes | _Step | None = None
        # Requests that arrived, and ids of transfers that ended, during planned decodes, with their times.
        self._arrived: list[tuple[Request | int, float]] = []
        self._is_stuck = False  # nothing runs until a request arrives or a transfer ends
        self.refused: list[tuple[int, str]] = []
        """(number, reason) of each request that can never run; the simulation collects them."""
        self._copies: dict[int, Copies] = {}  # copies of the steps in flight, by step id
        self._in_flight: deque[_Step] = deque()
        self.interrupt: Callable[[float], None] = self.cut_decodes
        """Function that ends the planned decodes before a time (seconds), so that a request or a transfer counts from
        the next step on. A replica that steps together with others has the function of all."""
        # Arrays with one entry for each row of the scheduler's batch.
        self._last_token = np.zeros(_ROWS, dtype=np.int64)  # number of tokens at the request's end
        self._filler = np.zeros(_ROWS, dtype=np.int32)  # token id of the request's output
        self._number = np.zeros(_ROWS, dtype=np.int64)  # number of the request in `timings`
        self._limit = np.zeros(_ROWS, dtype=np.int64)  # number of tokens that `max_tokens` allows
        self._key = np.zeros(_ROWS, dtype=np.uint64)  # key of the request's drafts
        self._has_adapter = np.zeros(_ROWS, dtype=np.bool_)
        self._known: dict[Request, _Known] = {}  # of each unfinished request; the scheduler does not know it

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests on the replica."""
        return len(self._known)

    def stats(self) -> SchedulerStats:
        """Statistics of the scheduler, without generated tokens that no client gets."""
        stats = self.scheduler.stats()
        return stats if self._timings.has_tokens else replace(stats, num_generated_tokens=0)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the scheduler's queue."""
        return self.scheduler.num_queued

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return self.scheduler.num_running

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that requests hold, 0 to 1."""
        return self.scheduler.kv_cache_usage

    @property
    def has_work(self) -> bool:
        """Whether there is a step to schedule, or to complete."""
        return not self._is_stuck and self.scheduler.has_unfinished_requests()

    def has_next_step(self, *, is_ahead: bool) -> bool:
        """Whether another step may be scheduled now. `is_ahead`: other steps are in flight."""
        return self.has_work and (self.scheduler.can_advance() if is_ahead else self.scheduler.has_runnable_requests())

    @property
    def is_between_events(self) -> bool:
        """Whether no event is planned, so that the scheduler has every request that has arrived."""
        return self._planned is None

    # ------------------------------------------------------------------ requests

    def add(self, number: int, request: SimRequest, now: float) -> None:
        """Add a request that arrives at `now`, during the planned event if there is one."""
        self._timings.record_engine(number, self.index)
        length = request.num_prompt_tokens
        if length > max(self.config.max_model_len, MAX_BUILT):
            why = longer_than_model(self.config, length, 1)
            self.refused.append((number, f"request {request.request_id!r} refused: {why}"))
            return
        if self._has_content:
            prompt = prompt_tokens(request, request.index, self._vocab_size, self._seed)
        else:
            prompt = blank_prompt(length)
        max_new_tokens = max(1, self.config.max_model_len - length)
        max_tokens = max_new_tokens if request.max_tokens is None else request.max_tokens
        made = Request(
            request.request_id,
            prompt,
            arrival_time=now,
            max_tokens=max_tokens,
            priority=request.priority,
            eos_token_ids=(EOS_TOKEN,),
            tenant=request.tenant,
            ttft_target=request.ttft_target,
            retention=request.retention,
            adapter=None if request.adapter is None else (f"adapter {request.adapter}", 0),
        )
        num_tokens = length + max(1, request.num_output_tokens)
        key = 0 if self._speculation is None else self._speculation.request_key(request.index)
        has_adapter = request.adapter is not None
        of_request = (number, num_tokens, filler_token(request.index), length + max_tokens, key, has_adapter)
        self._known[made] = new_tuple(_Known, of_request)
        self._deliver(made, now)

    def end_transfer(self, transfer_id: int, now: float) -> None:
        """A transfer of the connector has ended at `now`, during the planned event if there is one."""
        self._deliver(transfer_id, now)

    def _deliver(self, news: Request | int, now: float) -> None:
        """Give the scheduler a request, or the end of a transfer; after the planned decodes if there are any."""
        self.interrupt(now)
        planned = self._planned
        if planned is None:
            self.now = max(self.now, now)
        if isinstance(planned, _Decodes):
            self._arrived.append((news, now))
        else:
            self._submit(news, now)

    def cut_decodes(self, now: float) -> None:
        """End the planned decodes, if there are any, with the step that has begun at `now`, but after the first."""
        planned = self._planned
        if isinstance(planned, _Decodes):
            self._planned = planned.cut_before(now)

    def _submit(self, news: Request | int, now: float) -> None:
        self._is_stuck = False
        if isinstance(news, int):
            self.scheduler.transfer_done(news, now)
            return
        try:
            self.scheduler.add(news, now)
        except RequestRefused as error:
            self.refused.append((self._known.pop(news).number, str(error)))

    # ------------------------------------------------------------------ events

    def plan_event(self, until: float = math.inf) -> float | None:
        """Plan the next event. Returns its end in seconds; None: there is no event until a request arrives.

        `until`: a run of decodes may end at this time.
        """
        planned = self._planned
        if planned is None:
            planned = self._planned = self._plan_next_event(until)
        return None if planned is None else planned.end

    def commit_event(self) -> list[int]:
        """Complete the planned event. Returns the numbers of the requests that finished in it."""
        planned = self._planned
        assert planned is not None
        self._planned = None
        self.now = planned.end
        if isinstance(planned, _Step):
            return self._finish_step(planned)
        finished = self._finish_decodes(planned)
        if self._arrived:
            for news, time in self._arrived:
                self._submit(news, time)
            self._arrived.clear()
        return finished

    def _plan_next_event(self, until: float) -> _Decodes | _Step | None:
        scheduler = self.scheduler
        if self._max_in_flight > 1:
            return self._schedule_ahead()
        if not scheduler.has_unfinished_requests() or self._is_stuck:
            return None
        if not self._is_stepping:
            decodes = self._plan_decodes(until)
            if decodes is not None:
                return decodes
        step = self.schedule(self.now)
        if self._transfers is not None and step.is_empty:
            self.wait_for_transfers(step)
            return None
        return _Step(self.now, self.now + self.seconds_of(step, self._step_time), step.output)

    def wait_for_transfers(self, step: Scheduled) -> None:
        """Complete an empty step: every request waits for a transfer, so no step is scheduled before one ends."""
        self._finish_step(_Step(self.now, self.now, step.output))
        self._is_stuck = True

    def _plan_decodes(self, until: float) -> _Decodes | None:
        """The longest run of guaranteed plain decodes; None: there is none."""
        decodes = self.guaranteed_decodes(self._num_steps_until(until - self.now))
        if decodes is None:
            return None
        num_steps = decodes.num_steps
        times = np.empty(num_steps + 1)
        times[0] = self.now
        seconds = self.seconds_of_decodes(decodes, num_steps, self._step_time)
        seconds[0] += self.now
        np.add.accumulate(seconds, 0, None, times[1:])
        end = times.item(num_steps)
        self._decode_seconds = max(end - times.item(num_steps - 1), MIN_SECONDS)
        return _Decodes(end, times, decodes.rows, decodes.num_left)

    def guaranteed_decodes(self, num_steps: int) -> Decodes | None:
        """At most `num_steps` guaranteed plain decodes, up to the first request that ends; None: there are none."""
        scheduler = self.scheduler
        rows = scheduler.running_rows
        if not len(rows) or self._drafts_next():
            return None
        # Most often a request has arrived that the next step admits; then no other check is needed.
        if scheduler.num_queued and not scheduler.guaranteed_steps(1):
            return None
        known = scheduler.running_num_tokens
        num_left = self._last_token[rows] - known
        until_end = num_left.item(num_left.argmin())
        if self._speculation is not None:  # drafts may be allowed again after a request's end, and a run proposes none
            until_end = min(until_end, int((self._limit[rows] - known).min())) - 1
        num_steps = scheduler.guaranteed_steps(min(num_steps, until_end))
        if not num_steps:
            return None
        return Decodes(num_steps, rows, num_left, int(np.add.reduce(known)))

    def plan_decodes_at(self, times: FloatArray, decodes: Decodes) -> None:
        """Plan guaranteed decodes as the next event. `times`: start of the run and end of each step, [steps + 1]."""
        self._planned = _Decodes(times.item(len(times) - 1), times, decodes.rows, decodes.num_left)

    def plan_step_at(self, begin: float, end: float, output: SchedulerOutput) -> None:
        """Plan a scheduled step as the next event."""
        self._planned = _Step(begin, end, output)

    def _num_steps_until(self, seconds: float) -> int:
        """Approximate number of decode steps within `seconds`. It is too high rather than too low, because steps after
        a finished request are shorter."""
        return int(min(MAX_STEPS_AT_ONCE, 2 + MORE_STEPS * max(seconds, 0.0) / self._decode_seconds))

    def seconds_of_decodes(self, decodes: Decodes, num_steps: int, step_time: StepTime) -> FloatArray:
        """Seconds of each of the first `num_steps` guaranteed decodes, [num_steps], which the caller may modify."""
        seconds = step_time.of_decodes(len(decodes.rows), decodes.num_context_tokens, num_steps)
        if self._adapter_share and self._has_adapter[decodes.rows].any():
            seconds *= 1 + self._adapter_share
        return seconds

    def _schedule_ahead(self) -> _Step | None:
        """Schedule steps up to the maximum in flight, and plan the end of the oldest one as the next event."""
        steps = self._in_flight
        while len(steps) < self._max_in_flight and self.scheduler.can_advance() and not self._is_stuck:
            begin = steps[-1].end if steps else self.now
            step = self.schedule(begin)
            steps.append(_Step(begin, begin + self.seconds_of(step, self._step_time), step.output))
            self._is_stuck = self._transfers is not None and step.is_empty
        if not steps:
            return None
        return steps.popleft()

    # ------------------------------------------------------------------ one step

    def schedule(self, begin: float) -> Scheduled:
        """Schedule the next step, which begins at `begin` (seconds)."""
        output = self.scheduler.schedule_again(self.now)
        copying = 0.0
        if self.host is not None and (copies := self.host.copy_blocks(output)) is not None:
            self._copies[output.step_id] = copies
            copying = copies.seconds
        num_rows, total = output.num_rows, output.total_num_scheduled_tokens
        if output.num_continued < num_rows:
            self._store_admitted(output)
        if self._transfers is not None and output.loads:
            self._transfers.begin_loads(output, begin)
        if not num_rows:
            return Scheduled(output, None, copying)
        # Sums as dot products, which take a fraction of the time.
        if num_rows > len(self._ones):
            self._ones = np.ones(2 * num_rows, dtype=np.int64)
        context = int(output.num_computed_tokens.dot(self._ones[:num_rows])) + total
        samples = int(np.count_nonzero(output.samples))
        if len(output.draft_token_ids):
            samples += len(output.draft_token_ids)
        load = StepLoad(total, num_rows, context, output.num_attended_tokens, samples)
        has_adapter = bool(self._adapter_share) and bool(self._has_adapter[output.rows].any())
        return Scheduled(output, load, copying, has_adapter, samples > 0 and self._drafts_next())

    def seconds_of(self, step: Scheduled, step_time: StepTime) -> float:
        """Duration of a scheduled step in seconds, 0 for a step without rows and copies."""
        if step.load is None:
            return step.copying
        seconds = step_time.of_step(step.load)
        if step.has_adapter:
            seconds *= 1 + self._adapter_share
        if step.is_drafting:
            assert self._speculation is not None
            seconds += self._speculation.drafter_time(seconds)
        return seconds + step.copying

    def _finish_step(self, step: _Step) -> list[int]:
        scheduler, output, now = self.scheduler, step.output, self.now
        rows = output.rows
        known, samples = output.num_computed_tokens + output.num_scheduled_tokens, output.samples
        if np.count_nonzero(samples) < len(rows):
            rows, known = rows[samples], known[samples]
        if len(output.draft_token_ids):
            result = self._sample_after_drafts(output)
        else:
            known += _ONE
            tokens = self._filler[rows]
            tokens[known >= self._last_token[rows]] = EOS_TOKEN
            result = StepResult(tokens)
        if self._copies:
            result.copies = self._copies.pop(output.step_id, None)
        update = scheduler.update(output, result, now)
        if self._drafts_next():
            self._propose_drafts(output, update.counts)
        if self._max_in_flight > 1:  # requests may have finished since this step was scheduled
            rows = output.rows[update.counts > 0]
        if len(rows):
            self._timings.record_token(self._number[rows], now)
        if output.num_rows:
            self._is_stuck = False
            waiting, usage = scheduler.num_queued, scheduler.kv_cache_usage
            total = output.total_num_scheduled_tokens
            self._events.append(Event(step.begin, now, 1, output.num_rows, total, waiting, usage))
        return self._record_finished(update.finished) if update.finished else _NONE

    def _drafts_next(self) -> bool:
        """Whether the drafter proposes drafts after a step with the requests that run now."""
        return self._speculation is not None and self.scheduler.max_drafts > 0

    def _sample_after_drafts(self, output: SchedulerOutput) -> StepResult:
        """The tokens of a step that verifies drafts: in each row that samples, the accepted drafts and one more, up to
        the end of the request."""
        assert self._speculation is not None
        rows, num_drafts = output.rows, output.num_draft_tokens
        known = output.num_computed_tokens + output.num_scheduled_tokens - num_drafts
        real = num_drafts.copy()
        real[output.num_continued :] = 0  # placeholders of admitted requests, which no host accepts
        counts = self._speculation.num_accepted(self._key[rows], known, real) + _ONE
        counts[~output.samples] = 0
        tokens, left = self._filler[rows].repeat(counts), self._last_token[rows] - known
        is_over = (left <= counts) & output.samples
        tokens[(counts.cumsum() - counts + left - _ONE)[is_over]] = EOS_TOKEN
        return StepResult(tokens, counts)

    def _propose_drafts(self, output: SchedulerOutput, num_new: IntArray) -> None:
        """Propose the drafts of all rows of an updated step, to which the update added `num_new` [rows] tokens. The
        scheduler drops the drafts of rows that do not decode."""
        assert self._speculation is not None
        rows = output.rows
        known = output.num_computed_tokens + output.num_scheduled_tokens - output.num_draft_tokens + num_new
        counts = self._speculation.num_proposed(self._key[rows], known, self.config.num_draft_tokens)
        if counts.any():
            self.scheduler.propose(output, self._filler[rows].repeat(counts), counts, self.now)

    def _finish_decodes(self, planned: _Decodes) -> list[int]:
        scheduler, (_, times, rows, num_left) = self.scheduler, planned
        num_steps, num_rows = len(times) - 1, len(rows)
        tokens = last = self._filler[rows]
        is_over = num_left == num_steps
        if np.count_nonzero(is_over):
            last = tokens.copy()
            last[is_over] = EOS_TOKEN
        update = scheduler.advance(times, tokens, last)
        self._timings.record_tokens(self._number[rows], times)
        waiting, usage = scheduler.num_queued, scheduler.kv_cache_usage
        total = num_steps * num_rows
        self._events.append(Event(times.item(0), self.now, num_steps, num_rows, total, waiting, usage))
        return self._record_finished(update.finished) if update.finished else _NONE

    def _store_admitted(self, output: SchedulerOutput) -> None:
        """Store, by row, the lengths and tokens that the simulator knows of the newly admitted requests."""
        for index in range(output.num_continued, output.num_rows):
            request = output.requests[index]
            known = self._known[request]
            self._store_row(int(output.rows[index]), known)
            if self._transfers is not None:
                self._transfers.note_admission(request, self.now)
            cached = int(output.num_cached_tokens[index - output.num_continued])
            self._timings.record_admission(known.number, self.now, cached)

    def _store_row(self, row: int, known: _Known) -> None:
        while row >= len(self._number):
            for name in ("_last_token", "_filler", "_number", "_limit", "_key", "_has_adapter"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._number[row], self._last_token[row], self._filler[row] = known[:3]
        self._limit[row], self._key[row], self._has_adapter[row] = known[3:]

    def _record_finished(self, requests: Iterable[Request]) -> list[int]:
        numbers = []
        for request in requests:
            number = self._known.pop(request).number
            self._timings.record_finish(number, request)
            numbers.append(number)
        return numbers
