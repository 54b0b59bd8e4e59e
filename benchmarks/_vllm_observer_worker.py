"""Both sides of `vllm_observer.py`: vLLM's own scheduler without and with our Observer, in lockstep."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections import deque
from statistics import median
from typing import Any

from _scheduler_worker import Backlog, Settings, serve
from _vllm_worker import VllmSession

from pointsman.integrations.vllm import Observer

GROUP = 5  # steps
WRITERS = ("pointsman-observer", "pointsman-side-file")
"""Names of the threads that a recording has."""


class ObservedSession(VllmSession):
    """vLLM's own scheduler with Observer over it."""

    scheduler_class = Observer

    def __init__(self, settings: Settings) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="pointsman-benchmark-")
        self.additional_config = {"pointsman": {"record": f"{self.folder.name}/recording.jsonl"}}
        self._others = set(threading.enumerate())
        super().__init__(settings)

    def writer_seconds(self) -> float:
        """CPU time of the threads that make and write the recording; the second one starts with the file."""
        threads = [one for one in threading.enumerate() if one.name in WRITERS and one not in self._others]
        assert threads
        return sum(time.clock_gettime(time.pthread_getcpuclockid(one.ident or 0)) for one in threads)


class Pair:
    """Both schedulers, which get the same calls one after the other."""

    def __init__(self, settings: Settings) -> None:
        self.own, self.observed = VllmSession(settings), ObservedSession(settings)
        self.sides = (self.own, self.observed)

    def open_decode(self, running: int, waiting: int | None) -> dict[str, Any]:
        for side in self.sides:
            found = side.open_decode(running, waiting)
        return found

    def time_decode(self, steps: int) -> dict[str, Any]:
        """CPU microseconds per step of `schedule` and `update` of each side, in steady decode."""
        ahead = self.own.settings.max_steps_in_flight - 1
        flights: list[deque[Any]] = [deque(side.schedule() for _ in range(ahead)) for side in self.sides]
        groups: list[list[float]] = [[], []]
        writer = self.observed.writer_seconds()
        for number in range(steps):
            if number % GROUP == 0:
                for group in groups:
                    group.append(0.0)
            for which in (0, 1) if number % 2 else (1, 0):
                side, flight = self.sides[which], flights[which]
                result = side.decode_result(side.last_output)
                start = time.thread_time()
                flight.append(side.schedule())
                side.update(flight.popleft(), result)
                groups[which][-1] += time.thread_time() - start
        for side, flight in zip(self.sides, flights, strict=True):
            for output in flight:
                side.update(output, side.decode_result(output))
        self._wait()
        writer_us = 1e6 * (self.observed.writer_seconds() - writer) / steps
        own_us = 1e6 * median(groups[0]) / GROUP
        ratio = median(observed / own for own, observed in zip(*groups, strict=True))
        return _figures(own_us, (ratio - 1) * own_us, writer_us)

    def serve_backlog(self, lengths: list[tuple[int, int]]) -> Backlog:
        """Serve a backlog that exists from the start, and yield after each step; returns CPU microseconds per step of
        all calls."""
        gc.collect()
        gc.freeze()
        prompts = [self.own.tokens(length) for length, _ in lengths]
        seconds = [0.0, 0.0]
        for number, (_, limit) in enumerate(lengths):
            for which, side in enumerate(self.sides):
                request = side.make_request(f"r{number}", prompts[number], limit)
                start = time.thread_time()
                side.add(request)
                seconds[which] += time.thread_time() - start
        steps = 0
        while sum(self.own.counts()):
            for which in (0, 1) if steps % 2 else (1, 0):
                side = self.sides[which]
                start = time.thread_time()
                output = side.schedule()
                seconds[which] += time.thread_time() - start
                result = side.result(output)
                start = time.thread_time()
                side.update(output, result)
                seconds[which] += time.thread_time() - start
            steps += 1
            yield
        self._wait()
        own, observed = (1e6 * each / steps for each in seconds)
        gc.unfreeze()
        return _figures(own, observed - own, 1e6 * self.observed.writer_seconds() / steps)

    def _wait(self) -> None:
        """Wait until the thread has written everything."""
        before = -1.0
        while (now := self.observed.writer_seconds()) > before:
            before = now
            time.sleep(0.05)


def _figures(own_us: float, calls_us: float, writer_us: float) -> dict[str, float]:
    return {
        "own_us": own_us,
        "extra_us": calls_us + writer_us,
        "writer_us": writer_us,
        "ratio": 1 + (calls_us + writer_us) / own_us,
    }


if __name__ == "__main__":
    serve(Pair)  # type: ignore[arg-type]
