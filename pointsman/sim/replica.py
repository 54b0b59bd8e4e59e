"""One scheduler under a virtual clock: the same object as in every other host, with a step-time model as its device.

    replica.plan()                       the next event: one step, or as many at once as are sure; when it ends
    replica.add(number, request, now)    a request arrives: of a planned run only the steps remain that have begun
    replica.commit()                     the event has happened; which requests it finished

With host memory (`host_memory.py`) a step begins with its copies, which add to its time.

A step that decides anything is scheduled when it begins and updated when it ends. Between such steps every running
request decodes, and `Scheduler.advance` does all of them at once. Where nothing outside asks or acts when a request
finishes, `advance_past_finishes` does; and where it is sure what a step admits (`Scheduler.opening`), this step and the
decodes behind it are one run. The end of an output is known here alone: a request ends with an end-of-sequence token that
the scheduler cannot foresee.

With asynchronous scheduling (`max_steps_in_flight=2`) a step is scheduled when the one before it begins, as vLLM does:
what arrives meanwhile, or is known only at its end, counts one step later. Such steps are simulated one by one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core import (
    Copies,
    Listener,
    Opening,
    Request,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepResult,
)
from pointsman.sim.host_memory import HostMemory, HostTier, check_host_memory
from pointsman.sim.outcome import Event, Timeline, Timings
from pointsman.sim.request import EOS_TOKEN, VOCAB_SIZE, SimRequest, blank_prompt, filler_token, prompt_tokens
from pointsman.sim.step_time import StepLoad, StepTime

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

MAX_STEPS_AT_ONCE = 4096
"""Bounds the arrays of one run of decodes."""
LEAST_SECONDS = 1e-9
"""Of a step, where the number of steps until a time is estimated."""
_ROWS = 64
_NUMBER, _LAST, _FILLER, _TOKENS = range(4)
_ONE: Int64Array = np.array(1)
_NONE: list[int] = []


class _Run(NamedTuple):
    """Planned: steps that are sure, whatever finishes among them: an opening, if there is one, and plain decodes."""

    end: float
    times: FloatArray
    """[steps + 1] seconds: the start, and the end of each step."""
    opening: Opening | None
    rows: Int64Array
    """The running requests that get a token in each step."""
    columns: Int64Array
    """[4, requests] `Replica._columns` of these, and then of those that the opening admits."""
    num_left: Int64Array
    """[requests] tokens that each will still generate."""
    stretches: _Stretches | None
    """None: no request finishes before the last step."""

    def cut(self, time: float) -> _Run:
        """Only the steps that begin before `time`, and at least one."""
        if self.end <= time:
            return self
        num_steps = self.times[1:].searchsorted(time).item() + 1
        return self._replace(end=self.times.item(num_steps), times=self.times[: num_steps + 1])


class _Stretches(NamedTuple):
    """Steps by the requests that are left: stretch i goes up to step `ends[i]`, with `counts[i]` requests."""

    order: Int64Array
    """[requests] indices, the request that generates most first: the first `counts[i]` are those of stretch i."""
    ends: list[int]
    counts: list[int]

    @classmethod
    def of(cls, num_left: Int64Array, num_steps: int) -> _Stretches:
        """Those of a number of steps."""
        order = (-num_left).argsort(kind="stable")
        ends, counts = [], []
        falling = num_left[order].tolist()
        count = len(falling)
        while count and (end := falling[count - 1]) < num_steps:
            ends.append(end)
            counts.append(count)
            while count and falling[count - 1] == end:
                count -= 1
        return cls(order, [*ends, num_steps], [*counts, count])


class _Known(NamedTuple):
    """What the simulator knows of a request, and its scheduler does not."""

    number: int
    """In the timings."""
    num_tokens: int
    """Prompt and output, once it has ended."""
    filler: int
    """The token that it generates until then."""


class _Step(NamedTuple):
    """Planned: a step that is scheduled."""

    end: float
    output: SchedulerOutput


class Replica:
    """A scheduler, its device, and the virtual time that it has reached.

    Args:
        config: of the scheduler.
        step_time: how long a step takes.
        timings: where the times of requests are written.
        is_stepping: decide every step on its own; for comparisons.
        seed: of the prompts' tokens, where prefixes may be cached.
        vocab_size: number of token ids that prompts have.
        listeners: of the scheduler's events.
        host_memory: where evicted KV is kept; None: nowhere.

    Raises:
        SimulationError: the host memory does not fit the configuration.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: StepTime,
        timings: Timings,
        *,
        is_stepping: bool = False,
        seed: int = 0,
        vocab_size: int = VOCAB_SIZE,
        listeners: Iterable[Listener] = (),
        host_memory: HostMemory | None = None,
    ) -> None:
        check_host_memory(host_memory, config)
        self.host = None if host_memory is None else HostTier(host_memory, config)
        self.scheduler = Scheduler(config, connector=self.host, listeners=listeners)
        self.timeline = Timeline()
        self.now = 0.0
        """The end of its last event, in seconds."""
        self.config = config
        self._step_time = step_time
        self._timings = timings
        self._max_in_flight = config.max_steps_in_flight
        self._events = self.timeline.events
        self._ones = np.ones(_ROWS, dtype=np.int64)
        self._is_stepping = is_stepping
        self.passes_finishes = False
        """Whether a run of decodes may go on where requests finish: nothing outside asks or acts before it is over."""
        self._decode_seconds = LEAST_SECONDS  # of the last planned decode
        self._seed, self._vocab_size = seed, vocab_size
        self._has_content = config.enable_prefix_caching
        self._planned: _Run | _Step | None = None
        self._arrived: list[tuple[Request, float]] = []  # during planned decodes
        self.refused: list[tuple[int, str]] = []
        """Requests that can never run, by number, and why; the simulation takes them."""
        self._copies: dict[int, Copies] = {}  # of the steps in flight, by their ids
        self._in_flight: deque[tuple[SchedulerOutput, float]] = deque()  # with the end of each
        self._columns = np.zeros((4, _ROWS), dtype=np.int64)
        """By row of the scheduler's batch: the number of the request in `timings`, the number of tokens with which it
        ends, the token id of its output, and its known tokens."""
        self._known: dict[Request, _Known] = {}  # of each unfinished request

    @property
    def num_unfinished(self) -> int:
        """Requests that it has and has not finished."""
        return len(self._known)

    # ------------------------------------------------------------------ requests

    def add(self, number: int, request: SimRequest, now: float) -> None:
        """A request arrives at `now`, during the planned event if there is one."""
        length = request.num_prompt_tokens
        if self._has_content:
            prompt = prompt_tokens(request, request.index, self._vocab_size, self._seed)
        else:
            prompt = blank_prompt(length)
        room = max(1, self.config.max_model_len - length)
        max_tokens = room if request.max_tokens is None else request.max_tokens
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
        )
        num_tokens = length + max(1, request.num_output_tokens)
        self._known[made] = _Known(number, num_tokens, filler_token(request.index))
        planned = self._planned
        if planned is None:
            self.now = max(self.now, now)
        if isinstance(planned, _Run):
            self._planned = planned.cut(now)
            self._arrived.append((made, now))  # the scheduler gets it once it has done these steps
        else:
            self._submit(made, now)

    def _submit(self, request: Request, now: float) -> None:
        try:
            self.scheduler.add(request, now)
        except RequestRefused as error:
            self.refused.append((self._known.pop(request).number, str(error)))

    # ------------------------------------------------------------------ events

    def plan(self, until: float = math.inf) -> float | None:
        """When the next event ends; None: nothing is to be done until a request arrives.

        `until`: a time that a run of decodes which passes finishes need not go beyond.
        """
        planned = self._planned
        if planned is None:
            planned = self._planned = self._plan_next(until)
        return None if planned is None else planned.end

    def commit(self) -> list[int]:
        """The planned event has happened. Returns the numbers of the requests that it finished."""
        planned = self._planned
        assert planned is not None
        self._planned = None
        self.now = planned.end
        if isinstance(planned, _Step):
            return self._finish_step(planned.output)
        finished = self._finish_run(planned)
        if self._arrived:
            self._submit_arrived()
        return finished

    def _submit_arrived(self) -> None:
        for request, time in self._arrived:
            self._submit(request, time)
        self._arrived.clear()

    def _plan_next(self, until: float) -> _Run | _Step | None:
        scheduler = self.scheduler
        if self._max_in_flight > 1:
            return self._plan_ahead()
        if not scheduler.has_unfinished_requests():
            return None
        if not self._is_stepping:
            if self.passes_finishes and (opening := scheduler.opening()) is not None:
                return self._plan_opening(opening, until)
            rows = scheduler.running_rows
            if len(rows) and (not scheduler.num_queued or scheduler.horizon(1)):
                decodes = self._plan_decodes(rows, until)
                if decodes is not None:
                    return decodes
        output, seconds = self._schedule()
        return _Step(self.now + seconds, output)

    def _plan_decodes(self, rows: Int64Array, until: float) -> _Run | None:
        """As many plain decodes as are sure; None: none is."""
        scheduler = self.scheduler
        columns = self._columns[:, rows]
        num_left = columns[_LAST] - columns[_TOKENS]
        if not self.passes_finishes:
            num_steps = scheduler.horizon(min(num_left.item(num_left.argmin()), MAX_STEPS_AT_ONCE))
        else:
            num_steps = scheduler.horizon_past_finishes(self._num_steps_until(until - self.now), num_left)
        return self._run(None, 0.0, rows, columns, num_left, num_steps, until) if num_steps else None

    def _plan_opening(self, opening: Opening, until: float) -> _Run:
        """The opening, and as many plain decodes behind it as are sure."""
        seconds = self._step_time.of_step(StepLoad(*opening[:5]))
        new, rows = opening.sampling, self.scheduler.running_rows
        rows = rows[: opening.num_samples - len(new)]
        columns = self._columns[:, rows]
        if new:
            more = [(*self._known[request], request.num_tokens) for request in new]
            columns = np.concatenate([columns, np.array(more).T], axis=1)
        num_left = columns[_LAST] - columns[_TOKENS]
        num_steps, left = 1, until - self.now - seconds
        if opening.may_go_on and left > 0.0:
            limit = 1 + self._num_steps_until(left)
            num_steps = self.scheduler.horizon_past_finishes(limit, num_left, opening)
        return self._run(opening, seconds, rows, columns, num_left, num_steps, until)

    def _num_steps_until(self, seconds: float) -> int:
        """Decodes in that time, about."""
        return int(min(MAX_STEPS_AT_ONCE, 2 + max(seconds, 0.0) / self._decode_seconds))

    def _run(
        self,
        opening: Opening | None,
        seconds: float,
        rows: Int64Array,
        columns: Int64Array,
        num_left: Int64Array,
        num_steps: int,
        until: float,
    ) -> _Run:
        """A run with the times of its steps, of which the opening takes so many seconds; it may end sooner, where a
        request finishes beyond `until`."""
        stretches, known = None, columns[_TOKENS]
        times = np.empty(num_steps + 1)
        times[0] = start = self.now
        done = 0
        if opening is not None:
            times[1] = start = start + seconds
            done = 1
        if not len(num_left) or num_left.item(num_left.argmin()) >= num_steps:
            if done < num_steps:
                self._fill(times, done, num_steps, len(num_left), int(np.add.reduce(known)))
        else:
            stretches = _Stretches.of(num_left, num_steps)
            order, ends, counts = stretches
            context = known[order].cumsum()
            for end, count in zip(ends, counts, strict=True):
                if end > done:
                    self._fill(times, done, end, count, context.item(count - 1))
                    done = end
                if times.item(done) >= until:
                    times = times[: done + 1]
                    break
        num_steps = len(times) - 1
        end_time = times.item(num_steps)
        if num_steps > 1 or opening is None:
            self._decode_seconds = max(end_time - times.item(num_steps - 1), LEAST_SECONDS)
        return _Run(end_time, times, opening, rows, columns, num_left, stretches)

    def _fill(self, times: FloatArray, done: int, end: int, num_rows: int, context: int) -> None:
        """Set the ends of the steps after `done` up to `end`; the rows read `context` positions in the first step of the
        run."""
        part = times[done : end + 1]
        part[1:] = self._step_time.of_decodes(num_rows, context + num_rows * done, end - done)
        np.add.accumulate(part, out=part)

    def _plan_ahead(self) -> _Step | None:
        """The oldest step in flight ends next; the one after it is scheduled as soon as the oldest begins."""
        steps = self._in_flight
        while len(steps) < self._max_in_flight and self.scheduler.can_advance():
            output, seconds = self._schedule()
            begins = steps[-1][1] if steps else self.now
            steps.append((output, begins + seconds))
        if not steps:
            return None
        output, end = steps.popleft()
        return _Step(end, output)

    # ------------------------------------------------------------------ what a step does

    def _schedule(self) -> tuple[SchedulerOutput, float]:
        """The next step, and how long it takes, in seconds; 0 for one that runs nothing."""
        output = self.scheduler.schedule(self.now)
        copying = 0.0
        if self.host is not None and (copies := self.host.copy(output)) is not None:
            self._copies[output.step_id] = copies
            copying = copies.seconds
        num_rows, total = output.num_rows, output.total_num_scheduled_tokens
        if output.num_continued < num_rows:
            self._place_admitted(output)
        if not num_rows:
            return output, copying
        # Sums as products, which take a fraction of the time.
        if num_rows > len(self._ones):
            self._ones = np.ones(2 * num_rows, dtype=np.int64)
        context = int(output.num_computed_tokens.dot(self._ones[:num_rows])) + total
        samples = int(np.count_nonzero(output.samples))
        load = StepLoad(total, num_rows, context, output.num_attended_tokens, samples)
        return output, self._step_time.of_step(load) + copying

    def _finish_step(self, output: SchedulerOutput) -> list[int]:
        scheduler, now, rows = self.scheduler, self.now, output.rows
        known, samples = output.num_computed_tokens + output.num_scheduled_tokens, output.samples
        if np.count_nonzero(samples) < len(rows):
            rows, known = rows[samples], known[samples]
        known += _ONE
        self._columns[_TOKENS, rows] = known
        tokens = self._columns[_FILLER, rows]
        tokens[known >= self._columns[_LAST, rows]] = EOS_TOKEN
        result = StepResult(tokens)
        if self._copies:
            result.copies = self._copies.pop(output.step_id, None)
        update = scheduler.update(output, result, now)
        if self._max_in_flight > 1:  # requests may have finished since it was scheduled
            rows = output.rows[update.counts > 0]
        if len(rows):
            self._timings.token(self._columns[_NUMBER, rows], now)
        if output.num_rows:
            waiting, usage = scheduler.num_queued, scheduler.kv_cache_usage
            self._events.append(Event(now, 1, output.num_rows, output.total_num_scheduled_tokens, waiting, usage))
        return self._finished(update.finished) if update.finished else _NONE

    def _finish_run(self, run: _Run) -> list[int]:
        _, times, opening, rows, columns, num_left, stretches = run
        scheduler, num_steps, num_rows = self.scheduler, len(times) - 1, len(rows)
        numbers = columns[_NUMBER]
        tokens = last = columns[_FILLER].astype(np.int32)
        is_over = num_left <= num_steps
        if np.count_nonzero(is_over):
            last = tokens.copy()
            last[is_over] = EOS_TOKEN
        lengths = np.minimum(num_left, num_steps)
        self._columns[_TOKENS, rows] = (columns[_TOKENS] + lengths)[:num_rows]
        if opening is None and stretches is None:
            update = scheduler.advance(times, tokens, last)
            self._timings.tokens(numbers, times)
            waiting, usage = scheduler.num_queued, scheduler.kv_cache_usage
            self._events.append(Event(self.now, num_steps, num_rows, num_steps * num_rows, waiting, usage))
            return self._finished(update.finished) if update.finished else _NONE
        finishes = scheduler.advance_past_finishes(times, tokens, last, lengths, opening)
        usages = {each.num_steps: each.kv_cache_usage for each in finishes}
        opened = 0
        if opening is not None:
            self._note_admitted(opening, times.item(0))
            if num_steps == 1:
                self._submit_arrived()  # as during a step that is scheduled, they have joined the queue
            waiting, opened = scheduler.num_queued, 1
            self._events.append(Event(times.item(1), 1, opening.num_rows, opening.num_tokens, waiting, usages[1]))
        ends, counts = [num_steps], [len(numbers)]
        if stretches is not None:
            order, ends, counts = stretches
            numbers = numbers[order]
        begin = 0
        for each, count in zip(ends, counts, strict=True):
            end = min(each, num_steps)  # it may have been cut
            if count:
                self._timings.tokens(numbers[:count], times[begin : end + 1])
            size = end - max(begin, opened)
            if size:
                usage = usages[end] if end in usages else scheduler.kv_cache_usage
                self._events.append(Event(times.item(end), size, count, size * count, 0, usage))
            begin = end
            if end == num_steps:
                break
        return self._finished(request for each in finishes for request in each.requests)

    def _note_admitted(self, opening: Opening, now: float) -> None:
        """Note what is known of the requests that an opening has admitted."""
        for request, grant in zip(opening.admitted, opening.grants, strict=True):
            known = self._known[request]
            self._timings.admitted(known.number, now, grant.num_cached_tokens)
            if request.row is not None:  # it has not finished since
                self._place(request.row, known, request.num_tokens)

    def _place_admitted(self, output: SchedulerOutput) -> None:
        """As `_note_admitted`, of a step that is scheduled."""
        for index in range(output.num_continued, output.num_rows):
            request = output.requests[index]
            known = self._known[request]
            self._timings.admitted(known.number, self.now, int(output.num_cached_tokens[index - output.num_continued]))
            self._place(int(output.rows[index]), known, request.num_tokens)

    def _place(self, row: int, known: _Known, num_tokens: int) -> None:
        while row >= self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._columns[:, row] = (*known, num_tokens)

    def _finished(self, requests: Iterable[Request]) -> list[int]:
        numbers = []
        for request in requests:
            number = self._known.pop(request).number
            self._timings.finished(number, request)
            numbers.append(number)
        return numbers
