"""The live film: streams the decisions of a running scheduler to its watchers.

    live = LiveFilm(scheduler)
    records = live.take_records("a")  repeatedly, between two calls of the scheduler; the first call begins to watch
    live.remove_watcher("a")

While there are watchers, one `FilmRecorder` follows the scheduler. At most every `SECONDS_BETWEEN_PARTS` its output is
cut off as a part. Each part, together with the shared header, is a complete film, so a watcher can miss parts. A
watcher that begins later begins with the newest part. A slow watcher loses the oldest parts that it has not fetched,
and gets the number of frames in the lost parts. Without watchers the scheduler is not filmed.

The stream to a watcher is a sequence of records: a letter, a length (4 bytes, little-endian) and the data:

    H    the header of a film: a new film begins
    P    a part: its chunks
    S    JSON: `interval`, seconds between parts; `dropped`, number of frames that this watcher lost; `running`,
         `waiting` and `parked`, the current numbers of requests
"""

from __future__ import annotations

import io
import json
import struct
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from pointsman.core.observe.film import FilmRecorder
from pointsman.core.scheduler import Scheduler

SECONDS_BETWEEN_PARTS = 0.1
SHARE_OF_TIME = 0.01
"""Maximum share of the thread's time that is spent on making parts of the live film. A part begins with the state of
all unfinished requests: with more requests, a part takes longer to make, and the interval between parts is longer."""
SECONDS_BETWEEN_STATES = 1.0
MAX_WATCHERS = 16
MAX_WAITING = 8 << 20
"""Maximum total size of the parts that wait for a watcher, in bytes; the newest part always waits."""
MAX_PART = 8 << 20
"""Maximum size of the part being recorded while no watcher fetches it, in bytes."""
_RECORD = struct.Struct("<cI")


class TooManyWatchers(ValueError):
    """`MAX_WATCHERS` watchers exist already."""


@dataclass(slots=True)
class _Watcher:
    has_header: bool = False
    parts: deque[tuple[bytes, int]] = field(default_factory=deque)
    """Parts not yet sent to the watcher, each with its number of frames."""
    num_bytes: int = 0
    num_dropped: int = 0
    sent_at: float = float("-inf")
    """Time at which the last S record was sent to this watcher (JSON about the scheduler's current state)."""


class LiveFilm:
    """The live film of one scheduler. Use it only in the thread that calls the scheduler, between two calls.

    Args:
        scheduler: the scheduler; it is filmed while there are watchers.
        clock: returns the time, in seconds.
        cpu_clock: returns the CPU seconds of this thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._scheduler = scheduler
        self._clock, self._cpu_clock = clock, cpu_clock
        self._watchers: dict[Hashable, _Watcher] = {}
        self._recorder: FilmRecorder | None = None
        self._file = io.BytesIO()
        self._header = b""
        self._costs: deque[float] = deque(maxlen=3)  # for each of the newest parts: CPU seconds of cutting it off
        self._newest: tuple[bytes, int] | None = None
        self._due = 0.0

    @property
    def num_watchers(self) -> int:
        """Number of watchers; at 0 the scheduler is not filmed."""
        return len(self._watchers)

    @property
    def interval(self) -> float:
        """Seconds between two parts of the film that are sent to the watchers."""
        usual = sorted(self._costs)[len(self._costs) // 2] if self._costs else 0.0
        return max(SECONDS_BETWEEN_PARTS, usual / SHARE_OF_TIME)

    def take_records(self, watcher: Hashable) -> bytes:
        """The new records for a watcher.

        Args:
            watcher: name of the watcher; an unknown name begins a new watcher.

        Raises:
            TooManyWatchers: there are `MAX_WATCHERS` other watchers.
        """
        own = self._watchers.get(watcher)
        if own is None:
            own = self._add_watcher(watcher)
        recorder, now = self._recorder, self._clock()
        assert recorder is not None
        if now >= self._due and recorder.num_frames:
            self._queue_for_all(self._cut_part(recorder))
            self._due = now + self.interval
        records = []
        if not own.has_header:
            own.has_header = True
            records.append(_encode_record(b"H", self._header))
        if own.parts or now >= own.sent_at + SECONDS_BETWEEN_STATES:
            own.sent_at = now
            records.append(_encode_record(b"S", self._state_record(own)))
        records += [_encode_record(b"P", part) for part, _ in own.parts]
        own.parts.clear()
        own.num_bytes = 0
        return b"".join(records)

    def remove_watcher(self, watcher: Hashable) -> None:
        """Remove a watcher; does nothing for an unknown name."""
        if self._watchers.pop(watcher, None) is None or self._watchers or self._recorder is None:
            return
        self._scheduler.remove_listener(self._recorder)
        self._recorder, self._newest = None, None
        self._file = io.BytesIO()

    def _add_watcher(self, watcher: Hashable) -> _Watcher:
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyWatchers(
                f"{MAX_WATCHERS} pages, the maximum, already show this engine live; close one of them"
            )
        if self._recorder is None:
            recorder = FilmRecorder(self._file)
            self._scheduler.start_film(recorder)
            recorder.on_chunk = self._drop_large_part
            self._header, self._recorder, self._due = (
                self._take_part(),
                recorder,
                self._clock() + SECONDS_BETWEEN_PARTS,
            )
        own = self._watchers[watcher] = _Watcher()
        if self._newest is not None:
            self._queue_for(own, self._newest)
        return own

    def _cut_part(self, recorder: FilmRecorder) -> tuple[bytes, int]:
        began, num_frames = self._cpu_clock(), recorder.num_frames
        recorder.cut()
        self._costs.append(self._cpu_clock() - began)
        return self._take_part(), num_frames

    def _queue_for_all(self, part: tuple[bytes, int]) -> None:
        self._newest = part
        for own in self._watchers.values():
            self._queue_for(own, part)

    @staticmethod
    def _queue_for(own: _Watcher, part: tuple[bytes, int]) -> None:
        own.parts.append(part)
        own.num_bytes += len(part[0])
        while own.num_bytes > MAX_WAITING and len(own.parts) > 1:
            dropped, num_frames = own.parts.popleft()
            own.num_bytes -= len(dropped)
            own.num_dropped += num_frames

    def _drop_large_part(self) -> None:
        """Drop the part being recorded if it has grown too large because no watcher has fetched parts for a long
        time."""
        recorder = self._recorder
        if recorder is not None and self._file.tell() > MAX_PART:
            _, num_frames = self._cut_part(recorder)
            for own in self._watchers.values():
                own.num_dropped += num_frames

    def _take_part(self) -> bytes:
        found = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return found

    def _state_record(self, own: _Watcher) -> bytes:
        scheduler = self._scheduler
        state = {
            "interval": round(self.interval, 3),
            "dropped": own.num_dropped,
            "running": scheduler.num_running,
            "waiting": scheduler.num_queued,
            "parked": scheduler.num_parked,
        }
        return json.dumps(state, separators=(",", ":")).encode()


def _encode_record(kind: bytes, data: bytes) -> bytes:
    return _RECORD.pack(kind, len(data)) + data


def read_records(stream: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield each complete record of a stream, as (letter, data)."""
    at = 0
    while at + _RECORD.size <= len(stream):
        kind, length = _RECORD.unpack_from(stream, at)
        after = at + _RECORD.size + length
        if after > len(stream):
            return
        yield kind.decode("latin-1"), stream[at + _RECORD.size : after]
        at = after
