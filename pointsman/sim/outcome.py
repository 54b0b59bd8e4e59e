"""What happened in a simulation: when each request got its tokens, and what each replica did over time.

`Timings` has a row for each request, in the order of arrival; `Timeline` an entry for each event of a replica, which is
one step, or a run of equal ones.
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


class Timings:
    """The times of all requests, in seconds of the virtual clock; NaN: it has not happened.

        arrival        when the request arrived
        scheduled      when it was admitted first
        first_token    when its first token was sampled
        last_token     when its newest token was sampled
        max_gap        the longest time between two of its tokens
        num_prompt_tokens, num_output_tokens   its lengths; of the output, what was generated
        num_cached_tokens                      prompt tokens that its first admission found in the prefix cache
        num_preemptions
        reason         index into `REASONS`; UNFINISHED: it has not finished
    """

    _FLOATS = ("arrival", "scheduled", "first_token", "last_token")

    def __init__(self, capacity: int = 1024) -> None:
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
        self.reason = np.full(capacity, UNFINISHED, dtype=np.int64)
        self._gaps: list[FloatArray] = []
        self._runs: list[tuple[FloatArray, int]] = []

    def add(self, arrival: float, num_prompt_tokens: int) -> int:
        """A request arrives; returns its number."""
        number = self.count
        if number == len(self.arrival):
            self._grow()
        self.arrival[number] = arrival
        self.num_prompt_tokens[number] = num_prompt_tokens
        self.count = number + 1
        return number

    def scheduled_at(self, number: int, now: float, num_cached_tokens: int) -> None:
        """The request was admitted; only its first admission counts."""
        if self.scheduled[number] != self.scheduled[number]:  # NaN
            self.scheduled[number] = now
            self.num_cached_tokens[number] = num_cached_tokens

    def token(self, numbers: Int64Array, now: float) -> None:
        """Each of these requests got a token at `now`."""
        gaps = now - self.last_token[numbers]
        is_first = gaps != gaps  # NaN: there was none before
        if is_first.item(is_first.argmax()):
            self.first_token[numbers[is_first]] = now
            self.last_token[numbers[is_first]] = now
            numbers, gaps = numbers[~is_first], gaps[~is_first]
        self._note(numbers, gaps, now)

    def tokens(self, numbers: Int64Array, times: FloatArray) -> None:
        """Each of these requests, which had tokens before, got one at the end of each of some steps, `times[1:]`."""
        self._note(numbers, times[1] - self.last_token[numbers], times[-1])
        if len(times) > 2:
            self._runs.append((times, len(numbers)))
            later = times[2:] - times[1:-1]
            longest = later.item(later.argmax())
            self.max_gap[numbers] = np.maximum(self.max_gap[numbers], longest)

    def _note(self, numbers: Int64Array, gaps: FloatArray, last: float) -> None:
        self.last_token[numbers] = last
        self._gaps.append(gaps)
        self.max_gap[numbers] = np.maximum(self.max_gap[numbers], gaps)

    def finished(self, number: int, request: Request) -> None:
        """The request finished."""
        reason = request.finish_reason
        assert reason is not None
        self.reason[number] = _CODES[reason]
        self.num_output_tokens[number] = request.num_output_tokens
        self.num_preemptions[number] = request.num_preemptions

    def refused(self, number: int) -> None:
        """The request can never run."""
        self.reason[number] = _CODES[FinishReason.REFUSED]

    def close(self) -> None:
        """No more requests come: drop the unused rows."""
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, column[: self.count])

    def gaps(self) -> tuple[FloatArray, Int64Array]:
        """All times between two tokens of a request, and how often each was there (inter-token latency per gap)."""
        values, counts = [*self._gaps], [np.ones(len(gaps), dtype=np.int64) for gaps in self._gaps]
        for times, num_rows in self._runs:
            values.append(times[2:] - times[1:-1])
            counts.append(np.full(len(times) - 2, num_rows))
        if not values:
            return np.zeros(0), np.zeros(0, dtype=np.int64)
        return np.concatenate(values), np.concatenate(counts)

    def _grow(self) -> None:
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                fresh = np.full_like(column, np.nan if name in self._FLOATS else UNFINISHED if name == "reason" else 0)
                setattr(self, name, np.concatenate([column, fresh]))


class Event(NamedTuple):
    """One step of a replica, or a run of plain decodes."""

    end: float
    num_steps: int
    num_rows: int
    """Requests in each step."""
    num_tokens: int
    """Computed in all of the steps."""
    num_waiting: int
    """Requests in the queue afterwards."""
    kv_cache_usage: float


class Timeline:
    """The events of one replica, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(
        self, end: float, num_steps: int, num_rows: int, num_tokens: int, num_waiting: int, kv_cache_usage: float
    ) -> None:
        self.events.append(Event(end, num_steps, num_rows, num_tokens, num_waiting, kv_cache_usage))

    @property
    def num_steps(self) -> int:
        """Steps that ran something."""
        return sum(event.num_steps for event in self.events)
