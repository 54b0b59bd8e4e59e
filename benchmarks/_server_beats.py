"""Times of events in another process: iterations of the API's event loop, tokens of a stream.

The process writes the times into a file that both map, so that neither waits for the other. The longest gap of any
interval can be computed afterwards.

    python _server_beats.py serve FILE ...       runs `pointsman serve ...`, whose event loop writes a time every 5 ms
    python _server_beats.py read FILE PORT       sends the request on stdin, writes a time when tokens come

A late beat shows that the event loop was held: by a callback, by another thread that kept Python's lock, or because the
machine ran other work, which the processor time of the process reveals. The product is not changed: the launcher only
wraps the function that makes the loop. Readers of streams start often, so this module imports only the standard
library.
"""

from __future__ import annotations

import mmap
import socket
import sys
from itertools import pairwise
from pathlib import Path
from time import monotonic, process_time
from typing import Any, NamedTuple

SECONDS_BETWEEN_BEATS = 0.005
CAPACITY = 1 << 17
"""Number of kept times: for an event loop, the last 11 minutes."""


class Gap(NamedTuple):
    """The time between two beats."""

    seconds: float
    cpu_seconds: float
    """Processor time that all threads of the process used between the two beats."""


class Beats:
    """The latest times of one process, in a file: their number so far, then the time and the processor time of each.

    Args:
        path: the file; made, with no times, if it is not there.
    """

    def __init__(self, path: Path) -> None:
        size = 8 * (2 * CAPACITY + 1)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), size)).cast("d")

    @property
    def count(self) -> int:
        """The number of all beats so far."""
        return int(self._cells[0])

    def add(self) -> None:
        """Write the current time; the count is written after it, so a reader sees no unwritten cell."""
        count = self.count
        cell = 1 + 2 * (count % CAPACITY)
        self._cells[cell], self._cells[cell + 1] = monotonic(), process_time()
        self._cells[0] = count + 1

    def longest_gap(self, begin: float, end: float) -> Gap:
        """The longest time between two consecutive beats, or from the last one to now, among those that overlap an
        interval.

        Args:
            begin: of the interval, `time.monotonic()`.
            end: of the interval, not in the future.
        """
        now, num_kept = monotonic(), min(self.count, CAPACITY)
        cells = self._cells[1 : 1 + 2 * num_kept].tolist()
        beats = sorted(zip(cells[::2], cells[1::2], strict=True))
        cpu = beats[-1][1] if beats else 0.0
        gaps = [
            Gap(later - earlier, cpu_later - cpu_earlier)
            for (earlier, cpu_earlier), (later, cpu_later) in pairwise([*beats, (now, cpu)])
            if later > begin and earlier < end
        ]
        return max(gaps, default=Gap(0.0, 0.0))


def write_beats(loop: Any, beats: Beats) -> None:
    """Write a time every 5 ms in which the loop is free."""

    def beat() -> None:
        beats.add()
        loop.call_later(SECONDS_BETWEEN_BEATS, beat)

    loop.call_soon(beat)


def serve(path: Path, arguments: list[str]) -> None:
    """Run `pointsman serve` in this process. The first loop that is made is the API's."""
    import uvloop

    from pointsman.cli import main

    make_loop = uvloop.new_event_loop

    def make_beating_loop() -> Any:
        uvloop.new_event_loop = make_loop
        loop = make_loop()
        write_beats(loop, Beats(path))
        return loop

    uvloop.new_event_loop = make_beating_loop
    main(["serve", *arguments])


def read(path: Path, port: int, request: bytes) -> None:
    """Send a request, and write a time when tokens of its stream come, until it ends."""
    beats = Beats(path)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(request)
        while data := sock.recv(65536):
            if b"data:" in data:
                beats.add()


if __name__ == "__main__":
    action, file, *rest = sys.argv[1:]
    if action == "serve":
        serve(Path(file), rest)
    else:
        read(Path(file), int(rest[0]), sys.stdin.buffer.read())
