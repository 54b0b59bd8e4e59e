"""Outcome of a simulation: when each request got its tokens, and what each replica did over time.

`Timings` has a row for each request, in the order of arrival. `Timeline` has an entry for each event of a replica: one
step, or a run of plain decodes. During the simulation, an event only records which requests got tokens, and when. All
other figures are computed once, at the end, for all events together (`Timings.close`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core import FinishReason, Request

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

REASONS = tuple(FinishReason)
UNFINISHED = -1
_CODES = {reason: code for code, reason in enumerate(REASONS)}
_NO_TIMES: FloatArray = np.zeros(0)
_NO_NUMBERS: Int64Array = np.zeros(0, dtype=np.int64)


class Timings:
    """The times of all requests, in seconds of the virtual clock; NaN: the event has not happened.

    arrival        when the request arrived
    scheduled      when the step that admitted it first was scheduled
    first_token    when its first token was sampled (set by `close`, as are last_token and max_gap)
    last_token     when its newest token was sampled
    max_gap        the longest time between two of its tokens
    num_prompt_tokens, num_output_tokens   its lengths; of the output, the generated tokens
    num_cached_tokens                      prompt tokens that its first admission found in the prefix cache
    num_preemptions
    replica        the engine that generates its output, by its number in the simulation
    reason         index into `REASONS`; UNFINISHED: it has not finished
    """

    has_tokens = True
    _FLOATS = ("arrival", "scheduled", "first_token", "last_token")

    def __init__(self, capacity: int = 1024) -> None:
        capacity = max(capacity, 1)
        self.count = 0
        self.arrival = np.full(capacity, np.nan)
        self.scheduled = np.full(capacity, np.nan)
        self.first_token = np.full(capacity, np.nan)
        self.last_token = np.full(capacity, np.nan)
        self.max_gap = np.zeros(capacity)
        self.num_prompt_tokens = np.zeros(capacity, dtype=np.int64)
        self.num_output_tokens = np.zeros(capacity, dtype=np.int64)
        self.num_cached_tokens = np.zeros(capacity, dtype=np.int64)
        self.num_preemptions = np.zeros(capacity, dtype=np.int64)
        self.replica = np.zeros(capacity, dtype=np.int64)
        self.reason = np.full(capacity, UNFINISHED, dtype=np.int64)
        self._events: list[tuple[Int64Array, float | FloatArray]] = []  # events of one request are in order
        self._gaps: tuple[FloatArray, Int64Array] = (_NO_TIMES, _NO_NUMBERS)

    # ------------------------------------------------------------------ during the simulation

    def add_request(self, arrival: float, num_prompt_tokens: int) -> int:
        """Add a row for a request that arrives. Returns the request's number."""
        number = self.count
        if number == len(self.arrival):
            self._grow()
        self.arrival[number] = arrival
        self.num_prompt_tokens[number] = num_prompt_tokens
        self.count = number + 1
        return number

    def record_engine(self, number: int, engine: int) -> None:
        """Record the engine that the request was routed to."""
        self.replica[number] = engine

    def record_admission(self, number: int, now: float, num_cached_tokens: int) -> None:
        """Record that the request was admitted; only its first admission counts."""
        if self.scheduled[number] != self.scheduled[number]:  # NaN: not admitted before
            self.scheduled[number] = now
            self.num_cached_tokens[number] = num_cached_tokens

    def record_token(self, numbers: Int64Array, now: float) -> None:
        """Record that each of these requests got a token at `now`."""
        self._events.append((numbers, now))

    def record_tokens(self, numbers: Int64Array, times: FloatArray) -> None:
        """Record that each of these requests got a token at the end of every step of a run, `times[1:]`."""
        self._events.append((numbers, times))

    def record_finish(self, number: int, request: Request) -> None:
        """Record that the request finished."""
        reason = request.finish_reason
        assert reason is not None
        self.reason[number] = _CODES[reason]
        self.num_output_tokens[number] = request.num_output_tokens
        self.num_preemptions[number] = request.num_preemptions

    def record_refusal(self, number: int) -> None:
        """Record that the request can never run."""
        self.reason[number] = _CODES[FinishReason.REFUSED]

    # ------------------------------------------------------------------ at the end

    def close(self) -> None:
        """Compute first_token, last_token and max_gap from the events, after the last event, and drop unused rows."""
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, column[: self.count])
        self._read_events()

    def gaps(self) -> tuple[FloatArray, Int64Array]:
        """All gaps between two tokens of a request, and how often each occurred (inter-token latency per gap)."""
        return self._gaps

    def _read_events(self) -> None:
        """Read all events. The events of a request are in order of time, so a stable sort by request keeps each
        request's times in order."""
        events, self._events = self._events, []
        if not events:
            return
        sizes = np.array([len(numbers) for numbers, _ in events])
        is_step = np.array([isinstance(times, float) for _, times in events])
        within = _Within([times for _, times in events if not isinstance(times, float)])  # between the tokens of a run
        first, longest = np.empty(len(events)), np.zeros(len(events))
        first[is_step] = [times for _, times in events if isinstance(times, float)]
        last = first.copy()
        first[~is_step], last[~is_step], longest[~is_step] = within.first, within.last, within.longest_gaps()
        numbers = np.concatenate([numbers for numbers, _ in events])
        order = _stable_order(numbers, self.count)
        numbers, event = numbers[order], np.arange(len(events), dtype=np.int32).repeat(sizes)[order]
        begins = np.append(True, numbers[1:] != numbers[:-1])
        starts = begins.nonzero()[0]
        owners, last_of = numbers[starts], event[np.append(starts[1:], len(numbers)) - 1]
        self.first_token[owners] = first[event[starts]]
        self.last_token[owners] = last[last_of]
        between = first[event]
        between[1:] -= last[event[:-1]]
        between[starts] = 0.0
        num_single = len(numbers) - len(starts)
        gaps, counts = np.empty(num_single + len(within.gaps)), np.ones(num_single + len(within.gaps), dtype=np.int64)
        np.compress(~begins, between, out=gaps[:num_single])
        gaps[num_single:], counts[num_single:] = within.gaps, sizes[~is_step].repeat(within.sizes)
        self._gaps = gaps, counts
        self.max_gap[owners] = np.maximum.reduceat(np.maximum(between, longest[event], out=between), starts)

    def _grow(self) -> None:
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                fresh = np.full_like(column, np.nan if name in self._FLOATS else UNFINISHED if name == "reason" else 0)
                setattr(self, name, np.concatenate([column, fresh]))


def _stable_order(numbers: Int64Array, count: int) -> Int64Array:
    """Indices that sort numbers below `count`; equal numbers keep their order. NumPy sorts 16-bit numbers by radix, in
    a fraction of the time."""
    order = numbers.astype(np.uint16).argsort(kind="stable")
    if count > 1 << 16:
        order = order[(numbers >> 16)[order].argsort(kind="stable")]
    return order


class _Within:
    """Computes the gaps between a request's tokens within runs of decodes, for all runs in one array operation, as most
    runs are short.

    Args:
        runs: for each run, its start and the end of each of its steps.
    """

    def __init__(self, runs: list[FloatArray]) -> None:
        lengths = np.array(list(map(len, runs)), dtype=np.int64)
        starts = lengths.cumsum() - lengths
        times = np.concatenate([_NO_TIMES, *runs])
        self.first: FloatArray = times[starts + 1]
        """End of the first step of each run, [runs]."""
        self.last: FloatArray = times[starts + lengths - 1]
        self.sizes = lengths - 2
        """Number of gaps in each run: its number of steps minus one, [runs]."""
        is_gap = np.ones(max(len(times) - 1, 0), dtype=np.bool_)
        is_gap[starts] = False  # from the start to the end of the first step
        is_gap[starts[1:] - 1] = False  # from one run to the next
        self.gaps: FloatArray = np.diff(times)[is_gap]
        """The gaps of all runs, in order."""

    def longest_gaps(self) -> FloatArray:
        """The longest gap of each run, [runs]; 0 for a run without gaps."""
        found = np.zeros(len(self.sizes))
        filled = self.sizes.nonzero()[0]
        if len(filled):
            starts = (self.sizes.cumsum() - self.sizes)[filled]
            found[filled] = np.maximum.reduceat(self.gaps, starts)
        return found


class Event(NamedTuple):
    """One step of a replica, or a run of plain decodes."""

    begin: float
    end: float
    num_steps: int
    num_rows: int
    """Number of requests in each step."""
    num_tokens: int
    """Number of tokens computed in all steps of the event."""
    num_waiting: int
    """Number of requests in the queue after the event."""
    kv_cache_usage: float
    """Share of the blocks that requests hold after the event, 0 to 1."""


class Timeline:
    """The events of one replica, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def num_steps(self) -> int:
        """Number of steps that computed a token."""
        return sum(event.num_steps for event in self.events)
