"""Converts a film to curves over time (requests by state, reasons of waits, computed tokens), and to the intervals in
which each request stays in one state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core.observe.film_format import Op
from pointsman.web.film import Event, Film
from pointsman.web.story import reason_after

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

PREFILL, DECODE, WAITING, PARKED = "prefill", "decode", "waiting", "parked"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Curves of a film: each field has one value for each frame, after the frame's decision."""

    time: FloatArray
    """Time at which the frame's first step began, in seconds since the film began."""
    num_steps: Int64Array
    num_running: Int64Array
    num_waiting: Int64Array
    num_parked: Int64Array
    num_prefill_tokens: Int64Array
    """Number of tokens that the frame computes in rows that compute a prompt, or that recompute after a preemption."""
    num_decode_tokens: Int64Array
    """Number of tokens, including drafts, that the frame computes in all other rows."""
    num_free_blocks: Int64Array
    num_preemptions: Int64Array
    """Number of preemptions since the previous frame."""
    blocked: list[str]
    """Why the queue was blocked; "": it was not blocked."""


@dataclass(slots=True)
class Span:
    """An interval in which a request stays in one state."""

    number: int
    kind: str
    begin: float
    end: float


@dataclass(slots=True)
class _Pass:
    """State of one pass over the events of a film."""

    film: Film
    running: list[int] = field(default_factory=list)
    places: dict[int, str] = field(default_factory=dict)
    """The state of each unfinished request, by number."""
    computing: set[int] = field(default_factory=set)
    """Numbers of running requests that still compute their prompt, or recompute after a preemption."""
    sampled: list[int] = field(default_factory=list)
    """Numbers of requests that completed their prefill in the newest step."""
    since: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in Timeline.__dataclass_fields__})
    counts: Counter[str] = field(default_factory=Counter)
    """Number of unfinished requests, by state."""
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        begin = self.film.beginning()
        for number in begin.running:
            one = begin.requests[number]
            is_computing = one.num_computed_tokens < one.num_prompt_tokens + one.num_generated_tokens - 1
            self.running.append(number)
            self._set_state(number, PREFILL if is_computing else DECODE, begin.time)
            if is_computing:
                self.computing.add(number)
        for number in begin.waiting:
            self._set_state(number, WAITING, begin.time)
        for number in begin.parked:
            self._set_state(number, PARKED, begin.time)

    def read_events(self) -> None:
        for event in self.film.events(0, None):
            if event.request is not None:
                self._apply_move(event, event.request)
            elif event.op is Op.STEP or event.op is Op.STEPS:
                for number in self.sampled:
                    if self.places.get(number) == PREFILL:
                        self._set_state(number, DECODE, event.time)
                self.sampled = []
                if event.op is Op.STEP:
                    self._apply_step(event)
                else:
                    self._add_frame(event, event.fields["count"], 0, len(self.running))
        for number in list(self.places):
            self._set_state(number, None, self.film.end)

    def _set_state(self, number: int, kind: str | None, now: float) -> None:
        """Set the state of a request from now on; None: it has finished."""
        before = self.places.pop(number, None)
        if before is not None:
            self.counts[before] -= 1
            if now > self.since[number]:
                self.spans.append(Span(number, before, self.since[number], now))
        if kind is not None:
            self.counts[kind] += 1
            self.places[number], self.since[number] = kind, now

    def _apply_move(self, event: Event, number: int) -> None:
        after = reason_after(self.film, event, None)
        if after is None:
            return
        self.num_preemptions += event.op is Op.PREEMPTED
        if number in self.running and event.op is not Op.ADMITTED:
            self.running.remove(number)
            self.computing.discard(number)
        if event.op is Op.ADMITTED:
            self.running.append(number)
            self.computing.add(number)
            self._set_state(number, PREFILL, event.time)
        elif event.op is Op.PARKED:
            self._set_state(number, PARKED, event.time)
        elif after:
            if self.places.get(number) != WAITING:
                self._set_state(number, WAITING, event.time)
        else:
            self._set_state(number, None, event.time)

    def _apply_step(self, event: Event) -> None:
        prefill, place, odd = 0, 0, {}
        for ahead, tokens, flags in event.fields["rows"]:
            place += ahead
            odd[self.running[place]] = tokens, flags
        total = len(self.running) - len(odd) + sum(tokens for tokens, _ in odd.values())
        for number in list(self.computing):
            tokens, flags = odd.get(number, (1, 1))
            prefill += tokens
            if flags & 1:  # the row samples, so the next step decodes
                self.computing.discard(number)
                self.sampled.append(number)
        self._add_frame(event, 1, prefill, total - prefill)

    def _add_frame(self, event: Event, num_steps: int, prefill: int, decode: int) -> None:
        blocked = event.fields["blocked"]
        values = (
            event.time, num_steps, len(self.running), self.counts[WAITING], self.counts[PARKED], prefill, decode,
            event.fields["free"], self.num_preemptions,
            self.film.header["names"]["reasons"][blocked - 1] if blocked else "",
        )  # fmt: skip
        for name, value in zip(self.columns, values, strict=True):
            self.columns[name].append(value)
        self.num_preemptions = 0


def timeline_of(film: Film) -> tuple[Timeline, list[Span]]:
    """The curves of a film, and the spans of its requests, in order of the end of the span."""
    found = _Pass(film)
    found.read_events()
    columns: dict[str, Any] = {
        name: np.array(values, dtype=np.int64) for name, values in found.columns.items() if name not in _NOT_COUNTS
    }
    blocked = found.columns["blocked"]
    return Timeline(time=np.array(found.columns["time"], dtype=np.float64), blocked=blocked, **columns), found.spans


_NOT_COUNTS = ("time", "blocked")
