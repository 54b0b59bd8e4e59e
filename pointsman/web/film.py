"""Reads a film (`core/observe/film.py`): its steps, and the state at any step.

    film = Film.read(path)
    film.frames                 one for each step decided by itself, and one for several steps decided in one call
    state = film.state_at(17)   requests, queue and blocks after the decision of frame 17
    film.events(0, 18)          the events of frames 0 to 17, in order

The state at a frame is computed from the nearest key frame (a whole state in the film) before it, by applying the
events since then. No scheduling decision is made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.observe.film_format import (
    MAX_MEMORY,
    BlockOp,
    FilmError,
    IntArray,
    Op,
    read_chunks,
    read_header,
    unpack,
)

Int32Array = npt.NDArray[np.int32]
Columns = dict[str, IntArray]

BYTES_A_REQUEST, BYTES_A_FRAME, BYTES_A_STRING = 256, 256, 64
"""Estimated memory of one request, one frame and one string, in bytes."""


class Frame(NamedTuple):
    """A step, or several steps that were done in one call."""

    chunk: int
    event: int
    """Index of the frame's event among the events of the frame's chunk."""
    place: int
    """Index of the frame among the frames of its chunk."""
    step_id: int
    num_steps: int
    time: float
    """Time at which the frame's first step began, in seconds since the film began."""


class Event(NamedTuple):
    """One event of a film."""

    op: Op
    time: float
    """Time of the event, in seconds since the film began."""
    request: int | None
    fields: dict[str, Any]
    """Values of the event, by column name; the prefix that names the kind of event is removed from the column names."""


@dataclass(slots=True)
class FilmRequest:
    """A request as it was added."""

    request_id: str
    tenant: str | None
    arrival: float
    """Arrival time, in seconds since the film began; negative if the request arrived earlier."""
    num_prompt_tokens: int
    max_tokens: int
    priority: int


@dataclass(slots=True)
class RequestState:
    """The state of a request at a frame."""

    number: int
    status: str
    """Status: "waiting", "running", "preempted", a parked status, or "finished_*"."""
    num_prompt_tokens: int
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    """Number of tokens with KV, including the tokens of the frame."""
    num_cached_tokens: int = 0
    """Number of tokens that the request's last admission found in the prefix cache."""
    num_preemptions: int = 0
    reason: str | None = None
    """Why the request did not start when the scheduler last checked it. Up to date only if this request is the state's
    `blocker` or one of its `skipped`."""
    missing: int = 0
    """The amount of the resource that the request lacked when `reason` was set."""
    holder: int | None = None
    """Number of the request that holds the missing resource. If several requests hold it: the request with the largest
    amount."""
    admission: int = 0
    table: list[int] = field(default_factory=list)
    """Block ids of the request, if the film has blocks."""


@dataclass(slots=True)
class BatchRow:
    """The work of a request in a step."""

    number: int
    num_tokens: int
    samples: bool
    num_drafts: int
    admission: int


@dataclass(slots=True)
class State:
    """The state after the decision of a frame; if the frame has several steps, after the end of the last step."""

    requests: dict[int, RequestState]
    """The unfinished requests, by request number."""
    running: list[int]
    """Numbers of the running requests, in order of admission."""
    waiting: list[int]
    """Numbers of the waiting requests, in the order in which they were queued, or queued again."""
    parked: list[int]
    time: float
    batch: list[BatchRow] = field(default_factory=list)
    """The rows of the frame's step; if the frame has several steps, the rows of the last step."""
    blocker: int | None = None
    """Number of the request that blocked the queue in the step. Requests behind it were not checked, except the
    `skipped`."""
    skipped: list[int] = field(default_factory=list)
    """Numbers of the requests that were checked in the step, did not start, and were skipped."""
    in_flight: list[list[BatchRow]] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    """By block id: number of references to the block from holders other than block tables."""
    is_cached: npt.NDArray[np.bool_] | None = None
    """[blocks] whether the block is free and the prefix cache can find its content; None: the film has no blocks."""

    def num_references(self) -> Int32Array:
        """[blocks] number of references to each block, from block tables and from other holders."""
        assert self.is_cached is not None, "the film has no blocks"
        count = np.zeros(len(self.is_cached), dtype=np.int32)
        for number in self.running:
            count[self.requests[number].table] += 1
        for block, references in self.held.items():
            count[block] += references
        return count


@dataclass(slots=True)
class _Chunk:
    events: Columns
    strings: list[str]
    blocks: Columns | None = None


@contextmanager
def _film_errors() -> Iterator[None]:
    """Turn an error about a missing request, block or index into a `FilmError`."""
    try:
        yield
    except FilmError:
        raise
    except (IndexError, KeyError, ValueError, OverflowError) as error:
        raise FilmError(f"the film contradicts itself ({type(error).__name__}: {error}); the film is broken") from error


_NAMED = {
    "op": "ops",
    "key_status": "statuses",
    "key_reason": "reasons",
    "parked_status": "statuses",
    "deferred_reason": "reasons",
    "preempted_cause": "causes",
    "finished_reason": "finish_reasons",
    "step_blocked": "reasons",
}
_PLUS_ONE = ("key_reason", "step_blocked")
_COUNTS = (
    "key_flight",
    "step_exceptions",
    "exception_row",
    "exception_tokens",
    "exception_flags",
    "update_exceptions",
    "update_row",
    "steps_count",
    "steps_ends",
    "step_skipped",
    "step_evicted",
    "failed_steps",
    "failed_rows",
)


class Film:
    """A film in memory.

    Args:
        file: binary file, which is read to its end.
        with_blocks: whether to keep the block operations, which are most of the data.

    Raises:
        FilmError: the file is not a film, is broken, or has another version.
    """

    def __init__(self, file: BinaryIO, *, with_blocks: bool = True) -> None:
        with _film_errors():
            self._read(file, with_blocks)

    def _read(self, file: BinaryIO, with_blocks: bool) -> None:
        self.header = read_header(file)
        self.requests: list[FilmRequest] = []
        self.is_complete = False
        """Whether the film was closed; if not, it can be shown up to its last whole chunk."""
        self._chunks: list[_Chunk] = []
        self._num_bytes = 0  # memory that the film uses, in bytes
        columns: Columns | None = None
        for kind, data in read_chunks(file):
            if kind == "Z":
                self.is_complete = True
            elif kind == "R":
                columns, _ = unpack("R", data)
                self._count_memory(BYTES_A_REQUEST * max(map(len, columns.values())))
            elif kind == "E":
                if columns is None:
                    raise FilmError("events precede the requests to which they belong; the film is broken")
                chunk = _Chunk(*unpack("E", data))
                self._count_columns(chunk.events)
                self._count_memory(BYTES_A_STRING * len(chunk.strings) + sum(map(len, chunk.strings)))
                self._count_memory(BYTES_A_FRAME * len(chunk.events["step_id"]))
                self._chunks.append(chunk)
                self._add_requests(columns, self._chunks[-1].strings)
                columns = None
            elif with_blocks and self._chunks:
                self._chunks[-1].blocks, _ = unpack("B", data)
                self._count_columns(self._chunks[-1].blocks)
        if not self._chunks:
            raise FilmError("the film has no events; it was cut off at once")
        if not self.is_complete and self._chunks[0].blocks is not None and self._chunks[-1].blocks is None:
            self._chunks.pop()  # the film ends between the events and the block operations of a chunk
        self.has_blocks = all(chunk.blocks is not None for chunk in self._chunks)
        self._check_indices()
        self.frames: list[Frame] = [
            frame for index in range(len(self._chunks)) for frame in self._frames_of_chunk(index)
        ]

    def _count_columns(self, columns: Columns) -> None:
        self._count_memory(sum(values.nbytes for values in columns.values()))

    def _count_memory(self, num_bytes: int) -> None:
        """Add `num_bytes` to the memory that the film uses.

        Raises:
            FilmError: the memory exceeds the maximum for a film.
        """
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_MEMORY:
            raise FilmError(
                f"the film takes more than {MAX_MEMORY:,} bytes of memory, the maximum; leave out the "
                "blocks (pointsman film --no-blocks), or record a shorter run"
            )

    @classmethod
    def read(cls, path: str | Path, *, with_blocks: bool = True) -> Film:
        """Read a film from a file."""
        with open(path, "rb") as file:
            return cls(file, with_blocks=with_blocks)

    @property
    def num_steps(self) -> int:
        """Number of steps of all frames."""
        return sum(frame.num_steps for frame in self.frames)

    def _add_requests(self, columns: Columns, strings: list[str]) -> None:
        rows = zip(*(columns[name].tolist() for name in columns), strict=True)
        for name, tenant, arrival, prompt_tokens, max_tokens, priority in rows:
            whose = strings[tenant - 1] if tenant else None
            self.requests.append(FilmRequest(strings[name], whose, arrival / 1e6, prompt_tokens, max_tokens, priority))

    def _check_indices(self) -> None:
        """Check the numbers of requests, strings and blocks that are used as indices."""
        for chunk in self._chunks:
            for name in ("request", "key_running", "key_waiting", "key_parked", "skipped_request"):
                numbers = chunk.events[name]
                if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self.requests):
                    raise FilmError(f"column {name!r} names a request that is not in the film; the film is broken")
            for name, what in _NAMED.items():
                numbers, plus = chunk.events[name], name in _PLUS_ONE
                if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self.header["names"][what]) + plus:
                    raise FilmError(
                        f"column {name!r} has a number that the header's {what} do not name; the film is broken"
                    )
            for name in ("deferred_holder", "preempted_by", "step_blocker", "key_flight_request"):
                numbers = chunk.events[name]
                if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= len(self.requests):
                    raise FilmError(f"column {name!r} names a request that is not in the film; the film is broken")
            for name, numbers in chunk.events.items():
                if name in _COUNTS and len(numbers) and numbers.min() < 0:
                    raise FilmError(f"column {name!r} has a negative number; the film is broken")
            if len(modes := chunk.events["pause_mode"]) and not 0 <= modes.min() <= modes.max() <= 2:
                raise FilmError("a pause has an unknown mode; the film is broken")
            if len(how := chunk.events["preempted_recovery"]) and not 0 <= how.min() <= how.max() <= 2:
                raise FilmError("a preemption has an unknown kind of recovery; the film is broken")

    def _frames_of_chunk(self, index: int) -> Iterator[Frame]:
        events = self._chunks[index].events
        ops = events["op"]
        counts = iter(events["steps_count"].tolist())
        for place, (event, step_id) in enumerate(
            zip(((ops == Op.STEP) | (ops == Op.STEPS)).nonzero()[0].tolist(), events["step_id"].tolist(), strict=True)
        ):
            num_steps = 1 if ops[event] == Op.STEP else next(counts)
            yield Frame(index, event, place, step_id, num_steps, float(events["time"][event]) / 1e6)

    def frame_of_step(self, step_id: int) -> int:
        """Index of the frame that contains a step.

        Raises:
            KeyError: no frame contains it.
        """
        if not self.frames:
            raise KeyError("the film has no step")
        low, high = 0, len(self.frames)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.frames[middle].step_id <= step_id else (low, middle)
        found = self.frames[low]
        if not found.step_id <= step_id < found.step_id + found.num_steps:
            raise KeyError(f"the film has no step {step_id}")
        return low

    # ------------------------------------------------------------------ events

    @property
    def end(self) -> float:
        """Seconds from the start of the film to its last event. If the last event is several steps done in one call: to
        the end of these steps."""
        events = self._chunks[-1].events
        if not len(events["time"]):
            return float(events["key_time"][0]) / 1e6
        end = float(events["time"][-1])
        if events["op"][-1] == Op.STEPS:
            end += float(events["steps_micros"][-int(events["steps_count"][-1]) :].sum())
        return end / 1e6

    def events(self, first: int, after: int | None) -> Iterator[Event]:
        """Yield the events that led to frames `first` to `after - 1`, and the step events of these frames. `after`
        None: up to the end of the film.

        The events that led to a frame's step precede it. So the events of the first frame are all events before its
        step.
        """
        with _film_errors():
            begin = self._position_after(first - 1) if first else (0, 0)
            end = (len(self._chunks), 0) if after is None else self._position_after(after - 1)
            for index in range(begin[0], min(end[0] + 1, len(self._chunks))):
                chunk = self._chunks[index]
                stop = end[1] if index == end[0] else len(chunk.events["op"])
                for place, event in enumerate(_Cursor(chunk).run(stop)):
                    if index > begin[0] or place >= begin[1]:
                        yield event

    def _position_after(self, frame: int) -> tuple[int, int]:
        """Index of a frame's chunk, and index of the event after the frame's step in that chunk."""
        return self.frames[frame].chunk, self.frames[frame].event + 1

    # ------------------------------------------------------------------ states

    def beginning(self) -> State:
        """The state at the start of the film."""
        with _film_errors():
            return _Player(self, self._chunks[0]).state

    def state_at(self, frame: int, step_id: int | None = None) -> State:
        """The state after the decision of a frame.

        Args:
            step_id: one of the steps of a frame with several steps: return the state after the decision of that step.
                None: return the state after the end of all steps of the frame.

        Raises:
            FilmError: the film contradicts itself.
        """
        found = self.frames[frame]
        chunk = self._chunks[found.chunk]
        with _film_errors():
            player = _Player(self, chunk)
            for index, event in enumerate(_Cursor(chunk).run(len(chunk.events["op"]))):
                if index == found.event and step_id is not None and event.op is Op.STEPS:
                    player.begin_steps(event, step_id - found.step_id + 1)
                    break
                player.apply(event)
                if index >= found.event and not player.num_ends:
                    break
            return player.state


class _Cursor:
    """Iterates over the events of a chunk."""

    def __init__(self, chunk: _Chunk) -> None:
        self._columns = {name: values.tolist() for name, values in chunk.events.items() if not name.startswith("key_")}
        self._strings = chunk.strings
        self._at = dict.fromkeys(self._columns, 0)

    def _next_value(self, name: str) -> int:
        at = self._at[name]
        self._at[name] = at + 1
        number: int = self._columns[name][at]
        return number

    def _next_values(self, name: str, count: int) -> list[int]:
        at = self._at[name]
        self._at[name] = at + count
        found: list[int] = self._columns[name][at : at + count]
        if len(found) != count:
            raise IndexError(name)
        return found

    def run(self, end: int) -> Iterator[Event]:
        """Yield the first `end` events of the chunk."""
        try:
            for index in range(end):
                op = Op(self._columns["op"][index])
                request = None if op in _OF_NO_REQUEST else self._next_value("request")
                fields = self._read_fields(op)
                yield Event(op, self._columns["time"][index] / 1e6, request, fields)
        except IndexError:
            raise FilmError("a column has too few numbers for the events of its chunk; the film is broken") from None

    def _read_fields(self, op: Op) -> dict[str, Any]:
        fields: dict[str, Any] = {name: self._next_value(f"{prefix}{name}") for prefix, name in _FIELDS.get(op, ())}
        if op is Op.STEP or op is Op.STEPS:
            count = fields["skipped"]
            fields["skipped"] = self._next_values("skipped_request", count - 1) if count else None
        if op is Op.REFUSED:
            fields["why"] = self._strings[fields["why"]]
        elif op is Op.FINISHED:
            fields["detail"] = self._strings[fields["detail"] - 1] if fields["detail"] else ""
        elif op is Op.PREEMPTED:
            fields["chooser"] = self._strings[fields["chooser"] - 1] if fields["chooser"] else ""
        elif op is Op.STEP:
            count = fields.pop("exceptions")
            names = ("exception_row", "exception_tokens", "exception_flags")
            fields["rows"] = list(zip(*(self._next_values(name, count) for name in names), strict=True))
        elif op is Op.UPDATE:
            count = fields.pop("exceptions")
            rows, counts = self._next_values("update_row", count), self._next_values("update_count", count)
            fields["rows"] = list(zip(rows, counts, strict=True))
        elif op is Op.FAILED:
            fields["computed"] = self._next_values("failed_computed", fields.pop("rows"))
        elif op is Op.STEPS:
            fields["micros"] = self._next_values("steps_micros", fields["count"])
        return fields


_OF_NO_REQUEST = frozenset({Op.STEP, Op.UPDATE, Op.STEPS, Op.FAILED, Op.PAUSED, Op.LIMITED})
_OF_STEPS = tuple(("step_", name) for name in ("id", "blocked", "free", "evicted", "blocker", "skipped"))
_FIELDS: dict[Op, tuple[tuple[str, str], ...]] = {
    Op.REFUSED: (("refused_", "why"),),
    Op.PARKED: (("parked_", "status"),),
    Op.DEFERRED: (("deferred_", "reason"), ("deferred_", "missing"), ("deferred_", "holder")),
    Op.ADMITTED: (("admitted_", "resumed"), ("admitted_", "cached"), ("admitted_", "external")),
    Op.PREEMPTED: (
        ("preempted_", "cause"),
        ("preempted_", "lost"),
        ("preempted_", "cached"),
        ("preempted_", "recovery"),
        ("preempted_", "by"),
        ("preempted_", "missing"),
        ("preempted_", "chooser"),
    ),
    Op.FINISHED: (("finished_", "reason"), ("finished_", "generated"), ("finished_", "detail")),
    Op.STEP: (*_OF_STEPS, ("step_", "exceptions")),
    Op.UPDATE: (("update_", "exceptions"),),
    Op.STEPS: (*_OF_STEPS, ("steps_", "count"), ("steps_", "ends")),
    Op.FAILED: (("failed_", "steps"), ("failed_", "rows")),
    Op.LOAD_STARTED: (("load_", "tokens"),),
    Op.LOAD_FINISHED: (("load_", "tokens"), ("load_", "failed")),
    Op.PRIORITY: (("", "priority"),),
    Op.EXTENDED: (("extended_", "prompt"), ("extended_", "generated")),
    Op.PAUSED: (("pause_", "mode"),),
    Op.LIMITED: (("", "limit"),),
}


class _Player:
    """Applies the events of a chunk, one by one, to the state of the chunk's key frame."""

    def __init__(self, film: Film, chunk: _Chunk) -> None:
        self._film = film
        self._names = film.header["names"]
        self._blocks = None if chunk.blocks is None else _BlockPlayer(film, chunk.blocks)
        self._num_frames = 0
        self.num_ends = 0
        """Number of events still to apply that belong to the end of a frame with several steps."""
        self.state = self._read_key_frame(chunk.events)
        if self._blocks is not None:
            self._blocks.open(self.state)

    def _read_key_frame(self, columns: Columns) -> State:
        lists = {name: values.tolist() for name, values in columns.items() if name.startswith("key_")}
        running, waiting, parked = lists["key_running"], lists["key_waiting"], lists["key_parked"]
        numbers = [*running, *waiting, *parked]
        requests = {}
        for index, number in enumerate(numbers):
            state = requests[number] = RequestState(number, "waiting", lists["key_prompt"][index])
            state.num_generated_tokens = lists["key_generated"][index]
            state.num_preemptions = lists["key_preemptions"][index]
            state.num_cached_tokens = lists["key_cached"][index]
            state.admission = lists["key_admissions"][index]
        for number, computed in zip(running, lists["key_computed"], strict=True):
            requests[number].status, requests[number].num_computed_tokens = "running", computed
        for number, status in zip([*waiting, *parked], lists["key_status"], strict=True):
            requests[number].status = self._names["statuses"][status]
        for number, reason in zip(waiting, lists["key_reason"], strict=True):
            requests[number].reason = self._names["reasons"][reason - 1] if reason else None
        found = State(requests, running, waiting, parked, lists["key_time"][0] / 1e6)
        at = 0
        for count in lists["key_flight"]:
            rows = []
            for index in range(at, at + count):
                flags = lists["key_flight_flags"][index]
                number, tokens = lists["key_flight_request"][index] - 1, lists["key_flight_tokens"][index]
                admission = requests[number].admission if flags & 2 else -1
                rows.append(BatchRow(number, tokens, bool(flags & 1), flags >> 2, admission))
            at += count
            found.in_flight.append(rows)
        return found

    def apply(self, event: Event) -> None:
        """Apply the next event."""
        state = self.state
        state.time = event.time
        if event.request is None:
            _ON_STEPS[event.op](self, event.fields)
            return
        self._apply_to_request(event, event.request)
        if self.num_ends:
            self.num_ends -= 1
            if not self.num_ends and self._blocks is not None:
                self._blocks.frame(state, self._num_frames - 1)

    def _apply_to_request(self, event: Event, number: int) -> None:
        state = self.state
        fields, names = event.fields, self._names
        one = state.requests.get(number)
        if one is None:
            if event.op is Op.REFUSED:
                return
            one = state.requests[number] = RequestState(
                number, "waiting", self._film.requests[number].num_prompt_tokens
            )
        op = event.op
        if op is Op.QUEUED:
            self._move_request(one, state.waiting, "preempted" if one.admission else "waiting")
        elif op is Op.PARKED:
            self._move_request(one, state.parked, names["statuses"][fields["status"]])
        elif op is Op.DEFERRED:
            one.reason, one.missing = names["reasons"][fields["reason"]], fields["missing"]
            one.holder = fields["holder"] - 1 if fields["holder"] else None
        elif op is Op.ADMITTED:
            self._move_request(one, state.running, "running")
            one.num_computed_tokens = one.num_cached_tokens = fields["cached"]
            one.admission += 1
        elif op is Op.PREEMPTED:
            one.num_preemptions += 1
            self._move_request(one, state.waiting, "preempted")
        elif op is Op.ROLLED_BACK:
            one.admission -= 1
            self._move_request(one, state.waiting, "preempted" if one.admission else "waiting")
        elif op is Op.FINISHED:
            self._move_request(one, None, "finished_" + names["finish_reasons"][fields["reason"]])
            del state.requests[number]
        elif op is Op.EXTENDED:
            one.num_prompt_tokens, one.num_generated_tokens = fields["prompt"], fields["generated"]

    def _move_request(self, one: RequestState, place: list[int] | None, status: str) -> None:
        state = self.state
        for other in (state.running, state.waiting, state.parked):
            if one.number in other:
                other.remove(one.number)
        if one.status == "running":
            one.num_computed_tokens = one.num_cached_tokens = 0
            if self._blocks is not None:
                self._blocks.release_blocks(one)
        one.status, one.reason, one.missing, one.holder = status, None, 0, None
        if place is not None:
            place.append(one.number)

    def _apply_step(self, fields: dict[str, Any]) -> None:
        state = self.state
        rows = [BatchRow(number, 1, True, 0, state.requests[number].admission) for number in state.running]
        place = 0
        for ahead, tokens, flags in fields["rows"]:
            place += ahead
            rows[place].num_tokens, rows[place].samples, rows[place].num_drafts = tokens, bool(flags & 1), flags >> 1
        self._apply_queue(fields)
        state.batch = [row for row in rows if row.num_tokens]
        for row in state.batch:
            state.requests[row.number].num_computed_tokens += row.num_tokens
        state.in_flight.append(state.batch)
        if self._blocks is not None:
            self._blocks.frame(state, self._num_frames)
        self._num_frames += 1

    def _apply_queue(self, fields: dict[str, Any]) -> None:
        self.state.blocker = fields["blocker"] - 1 if fields["blocker"] else None
        if fields["skipped"] is not None:
            self.state.skipped = fields["skipped"]

    def _apply_update(self, fields: dict[str, Any]) -> None:
        state = self.state
        rows = state.in_flight.pop(0)
        counts = [int(row.samples) for row in rows]
        for index, count in fields["rows"]:
            counts[index] = count
        for row, count in zip(rows, counts, strict=True):
            one = state.requests.get(row.number)
            if one is None:
                continue
            one.num_generated_tokens += count
            if row.num_drafts and one.status == "running" and one.admission == row.admission:
                one.num_computed_tokens -= row.num_drafts + 1 - count

    def _apply_steps(self, fields: dict[str, Any], num_steps: int | None = None) -> None:
        state, count = self.state, fields["count"]
        for number in state.running:
            one = state.requests[number]
            one.num_computed_tokens += count
            one.num_generated_tokens += count
        self._apply_queue(fields)
        state.batch = [BatchRow(number, 1, True, 0, 0) for number in state.running]
        state.time += sum(fields["micros"]) / 1e6
        if self._blocks is not None:
            up_to_tables = fields["ends"] > 0 or num_steps is not None
            self._blocks.frame(state, self._num_frames, up_to_tables=up_to_tables, num_steps=num_steps)
        self._num_frames += 1
        self.num_ends = fields["ends"]

    def begin_steps(self, event: Event, count: int) -> None:
        """Apply the first `count` steps of a frame with several steps. The last of these steps is only scheduled: its
        sampled tokens are not applied yet."""
        micros = event.fields["micros"]
        state = self.state
        state.time = event.time
        self._apply_steps({**event.fields, "count": count, "micros": micros[: count - 1], "ends": 0}, num_steps=count)
        for number in state.running:
            state.requests[number].num_generated_tokens -= 1

    def _apply_failed_step(self, fields: dict[str, Any]) -> None:
        state = self.state
        del state.in_flight[len(state.in_flight) - fields["steps"] :]
        for number, computed in zip(state.running, fields["computed"], strict=True):
            state.requests[number].num_computed_tokens = computed


def _ignore_event(player: _Player, fields: dict[str, Any]) -> None:
    """Do nothing: an event about a pause or a limit changes the state of no request."""


_ON_STEPS = {
    Op.STEP: _Player._apply_step,
    Op.UPDATE: _Player._apply_update,
    Op.STEPS: _Player._apply_steps,
    Op.FAILED: _Player._apply_failed_step,
    Op.PAUSED: _ignore_event,
    Op.LIMITED: _ignore_event,
}


class _BlockPlayer:
    """Applies a chunk's block operations, frame by frame."""

    def __init__(self, film: Film, columns: Columns) -> None:
        self._lists = {name: values.tolist() for name, values in columns.items()}
        self._num_blocks: int = film.header["config"]["num_blocks"]
        if min(map(min, filter(None, (self._lists[name] for name in ("block", "key_block", "count")))), default=0) < 0:
            raise FilmError("a block has a negative number; the film is broken")
        self._caches: bool = film.header["config"]["enable_prefix_caching"]
        self._references = np.zeros(self._num_blocks, dtype=np.int32)
        self._at = self._block = self._value = 0

    def open(self, state: State) -> None:
        """Apply the block tables, holders and cached blocks of the key frame."""
        lists = self._lists
        at = 0
        for number, count in zip(state.running, lists["key_count"], strict=True):
            state.requests[number].table = lists["key_block"][at : at + count]
            self._references[state.requests[number].table] += 1
            at += count
        state.held = dict(zip(lists["key_held"], lists["key_held_count"], strict=True))
        for block, count in state.held.items():
            self._references[block] += count
        packed = np.array(lists["key_cached"], dtype=np.uint8)
        state.is_cached = np.unpackbits(packed, count=self._num_blocks, bitorder="little").astype(np.bool_)
        self._state = state

    def release_blocks(self, one: RequestState) -> None:
        """Release the blocks of a request that no longer runs. A block without further references becomes free; if
        prefix caching is enabled, it stays in the prefix cache."""
        table = np.array(one.table, dtype=np.int64)
        one.table = []
        self._references[table] -= 1
        assert self._state.is_cached is not None
        self._state.is_cached[table[self._references[table] == 0]] = self._caches

    def frame(self, state: State, place: int, *, up_to_tables: bool = False, num_steps: int | None = None) -> None:
        """Apply the block operations of a frame.

        Args:
            up_to_tables: whether to apply only the operations up to the last one that adds a block to a block table.
            num_steps: number of steps to apply, if the frame has several steps; None: all.
        """
        lists, is_cached = self._lists, state.is_cached
        assert is_cached is not None
        end = self._at
        while end < len(lists["frame"]) and lists["frame"][end] <= place:
            end += 1
        if up_to_tables:
            while end > self._at and lists["op"][end - 1] != BlockOp.STEPPED:
                end -= 1
        while self._at < end:
            op, number, count = (lists[name][self._at] for name in ("op", "request", "count"))
            blocks = lists["block"][self._block : self._block + count]
            if len(blocks) != count:
                raise IndexError("block")
            self._at, self._block = self._at + 1, self._block + count
            if op == BlockOp.BLANK or op == BlockOp.CACHED:
                is_cached[blocks] = op == BlockOp.CACHED
            elif op == BlockOp.HELD:
                for block, references in zip(blocks, lists["value"][self._value :], strict=False):
                    self._references[block] += references - state.held.pop(block, 0)
                    if references:
                        state.held[block] = references
                self._value += count
            else:
                one = state.requests[number]
                if op == BlockOp.TABLE:
                    self._references[one.table] -= 1
                    one.table = []
                if op == BlockOp.STEPPED:
                    steps = lists["value"][self._value : self._value + count]
                    self._value += count
                    if num_steps is not None:
                        blocks = [block for block, step in zip(blocks, steps, strict=True) if step < num_steps]
                one.table += blocks
                self._references[blocks] += 1
                is_cached[blocks] = False
