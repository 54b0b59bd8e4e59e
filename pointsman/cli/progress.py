"""The state of a run: each request's state and text, rates, and the summary at the end."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pointsman.core import Request, RequestStatus

if TYPE_CHECKING:
    from pointsman.engine import Engine, RequestOutput

RATE_WINDOW = 2.0  # seconds over which tokens per second are averaged


@dataclass(slots=True)
class Entry:
    """A request of the run, for the display."""

    request_id: str
    request: Request | None = None
    """The engine's request; None: it was refused."""
    prompt: str = ""
    """Text of the prompt; empty if the prompt was given as token ids."""
    output: RequestOutput | None = None
    """The request's newest output; None before the first token."""
    error: str = ""
    """The reason if the request was refused; otherwise empty."""

    @property
    def text(self) -> str:
        """The text generated so far; decoded when this property is read."""
        return self.output.text if self.output is not None else ""

    @property
    def num_output_tokens(self) -> int:
        return self.output.num_output_tokens if self.output is not None else 0

    @property
    def end(self) -> str:
        """The request's finish reason: stop, length, abort, refused or error; empty while unfinished."""
        if self.request is None:
            return "refused"
        if self.output is not None and self.output.finish_reason is not None:
            return self.output.finish_reason  # includes stop strings
        return self.request.finish_reason.value if self.request.finish_reason is not None else ""

    @property
    def detail(self) -> str:
        """Details of the finish reason."""
        if self.request is None:
            return self.error
        if self.output is not None and self.output.finished:
            return self.output.finish_detail
        return self.request.finish_detail

    @property
    def first_token_time(self) -> float | None:
        """Seconds from the request's arrival to its first token."""
        if self.output is None or self.output.metrics.first_token_time is None:
            return None
        return self.output.metrics.first_token_time - self.output.metrics.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from the request's arrival to its end."""
        if self.output is None or self.output.metrics.finished_time is None:
            return None
        return self.output.metrics.finished_time - self.output.metrics.arrival_time

    def state(self) -> str:
        """The request's state in one word."""
        if self.request is None or self.request.is_finished:
            return self.end
        if self.request.status is RequestStatus.PREEMPTED:
            return "preempted"
        return self.request.phase

    def record(self) -> dict[str, Any]:
        """The request as the JSON line of `--json`."""
        line: dict[str, Any] = {"type": "request", "request_id": self.request_id, "finish_reason": self.end}
        if self.request is None:
            return line | {"error": self.error}
        return line | {
            "finish_detail": self.detail,
            "stop_reason": self.output.stop_reason if self.output is not None else self.request.stop_reason,
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.output.token_ids if self.output is not None else [],
            "num_prompt_tokens": self.request.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_cached_tokens": self.request.num_cached_tokens,
            "num_preemptions": self.request.num_preemptions,
            "time_to_first_token": _rounded_seconds(self.first_token_time),
            "latency": _rounded_seconds(self.latency),
        }


@dataclass(frozen=True, slots=True)
class Status:
    """Counts and rates of a run at one time."""

    seconds: float
    expected: int
    """Number of requests of the workload that have not arrived."""
    waiting: int
    running: int
    ended: int
    kv_usage: float
    """Share of the pool's blocks that requests hold."""
    used_blocks: int
    num_blocks: int
    tokens_per_second: float
    """Generated tokens a second, over the most recent seconds."""
    preemptions: int
    hit_rate: float
    """Share of the looked-up prompt tokens that the prefix cache contained."""


class Progress:
    """Follows a run of `engine` from `start`, in seconds on the engine's clock."""

    def __init__(self, engine: Engine, start: float, num_jobs: int) -> None:
        self.engine = engine
        self.start = start
        self.num_jobs = num_jobs
        self.entries: dict[str, Entry] = {}
        self.ends: Counter[str] = Counter()
        self.num_generated = 0
        self.num_prompt_tokens = 0
        self.peak_blocks = 0
        self._rates: deque[tuple[float, int]] = deque([(start, 0)])

    def added(self, request: Request, prompt: str) -> None:
        """Record that a job became a request."""
        self.entries[request.request_id] = Entry(request.request_id, request, prompt=prompt)
        self.num_prompt_tokens += request.num_prompt_tokens

    def refused(self, request_id: str, error: str) -> Entry:
        """Record that a prompt was refused."""
        self.ends["refused"] += 1
        return Entry(request_id, error=error)

    def stepped(self, outputs: list[RequestOutput], now: float) -> list[Entry]:
        """Record the outputs of a step. Returns the requests that finished in the step."""
        ended = [entry for output in outputs if (entry := self._update_entry(output)) and output.finished]
        stats = self.engine.scheduler.stats()
        self.peak_blocks = max(self.peak_blocks, stats.num_blocks - stats.num_free_blocks)
        self._rates.append((now, self.num_generated))
        while now - self._rates[0][0] > RATE_WINDOW and len(self._rates) > 2:
            self._rates.popleft()
        return ended

    def aborted(self, output: RequestOutput) -> Entry:
        """Record that the run ended before this request; its output so far is kept."""
        return self._update_entry(output)

    def unfinished(self) -> list[Entry]:
        """The unfinished requests, in the order in which they were added."""
        return [entry for entry in self.entries.values() if not entry.end]

    def status(self, now: float) -> Status:
        """The counts and rates of the run at `now`."""
        stats = self.engine.scheduler.stats()
        used = stats.num_blocks - stats.num_free_blocks
        (since, before), ended = self._rates[0], sum(self.ends.values())
        return Status(
            seconds=now - self.start,
            expected=max(self.num_jobs - ended - stats.num_running - stats.num_waiting, 0),
            waiting=stats.num_waiting,
            running=stats.num_running,
            ended=ended,
            kv_usage=stats.kv_cache_usage,
            used_blocks=used,
            num_blocks=stats.num_blocks,
            tokens_per_second=(self.num_generated - before) / (now - since) if now > since else 0.0,
            preemptions=stats.num_preemptions,
            hit_rate=stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
        )

    def summary(self, now: float, *, interrupted: bool) -> dict[str, Any]:
        """The run as one JSON object. Times are in seconds."""
        stats = self.engine.scheduler.stats()
        seconds = now - self.start
        entries = self.entries.values()
        return {
            "type": "summary",
            "interrupted": interrupted,
            "requests": self.num_jobs,
            "finished": {reason: self.ends[reason] for reason in ("stop", "length", "abort", "refused", "error")},
            "seconds": _rounded_seconds(seconds),
            "steps": stats.num_steps,
            "prompt_tokens": self.num_prompt_tokens,
            "generated_tokens": self.num_generated,
            "tokens_per_second": _rounded_seconds(self.num_generated / seconds if seconds > 0 else 0.0),
            "requests_per_second": _rounded_seconds(
                (self.ends["stop"] + self.ends["length"]) / seconds if seconds > 0 else 0.0
            ),
            "time_to_first_token": _percentiles([entry.first_token_time for entry in entries]),
            "latency": _percentiles([entry.latency for entry in entries if entry.end in ("stop", "length")]),
            "num_blocks": stats.num_blocks,
            "peak_kv_usage": _rounded_seconds(self.peak_blocks / stats.num_blocks),
            "preemptions": stats.num_preemptions,
            "recomputed_tokens": stats.num_recomputed_tokens,
            "prefix_queries": stats.prefix_queries,
            "prefix_hits": stats.prefix_hits,
            "evictions": stats.num_evictions,
            "deferrals": {reason: count for reason, count in stats.deferrals.items() if count},
        }

    def _update_entry(self, output: RequestOutput) -> Entry:
        entry = self.entries[output.request_id]
        self.num_generated += output.num_output_tokens - entry.num_output_tokens
        entry.output = output
        if output.finished:
            self.ends[entry.end] += 1
        return entry


def _percentiles(values: list[float | None]) -> dict[str, float | None]:
    """The median and the 99th percentile of the values that are not None."""
    known = [value for value in values if value is not None]
    if not known:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(known, [50, 99])
    return {"p50": _rounded_seconds(float(p50)), "p99": _rounded_seconds(float(p99))}


def _rounded_seconds(value: float | None) -> float | None:
    """`value` in seconds, rounded to microseconds."""
    return None if value is None else round(value, 6)
