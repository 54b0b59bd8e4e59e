"""Records films: all decisions of a scheduler in columns, compact enough to keep hours of steps, and to show any step.

A recording has the calls of a scheduler, so that the calls can be replayed. A film has the decisions of a scheduler, so
that the decisions can be shown. A `FilmRecorder` listens to a live scheduler, to the replay of a recording, or to a
simulation. Films have no prompts. The format is in `film_format.py`, the reader in `pointsman/web/film.py`.

Each event has an entry in the columns. For a step in which every running request gets one token, the entry has little
more than the time. For any other step, the entry also has the requests that do not get exactly one token. The steps of
a fast-forward are one event.

Blocks have chunks of their own, as most queries of a film need no blocks. A chunk has the blocks that were added to
block tables. The reader assumes that a released block is cached (with a prefix cache), so only released blocks that are
not cached are written. The recorder compares counts to detect that the reader's state would differ from the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import InvalidTransition
from pointsman.core.kv.block_pool import BlockPool
from pointsman.core.kv.cache import Pool
from pointsman.core.observe.film_format import (
    CAUSES,
    FINISH_REASONS,
    FORMAT_VERSION,
    NAMES,
    REASONS,
    STATUSES,
    BlockOp,
    Columns,
    Op,
    write_chunk,
    write_header,
)
from pointsman.core.observe.side_file import SideFile, Writable
from pointsman.core.state.events import (
    Admitted,
    Call,
    Deferred,
    Listener,
    LoadFinished,
    LoadStarted,
    Preempted,
    StepDecision,
    StepRun,
)
from pointsman.core.state.output import SchedulerOutput, StepUpdate
from pointsman.core.state.request import Request
from pointsman.core.state.status import PauseMode
from pointsman.core.step.assembly import Parts
from pointsman.version import __version__

Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer]

EVENTS_IN_A_CHUNK = 4096
"""Maximum number of events in a chunk. To show an event, a reader applies all events from the beginning of its chunk up
to it."""
NUMBERS_IN_A_COLUMN = 1 << 19
"""Maximum count of numbers in a column. If a column has so many numbers, the chunk ends before `EVENTS_IN_A_CHUNK`
events."""
_REASON = {reason: index for index, reason in enumerate(REASONS)}
_STATUS = {status: index for index, status in enumerate(STATUSES)}
_CAUSE = {cause: index for index, cause in enumerate(CAUSES)}
_FINISH = {reason: index for index, reason in enumerate(FINISH_REASONS)}


class FilmRecorder(Listener):
    """Writes a film. One recorder serves one scheduler: see `Scheduler.start_film`.

    If the file cannot be written, only the film ends: see `side_file.py`.

    Args:
        file: a `BackgroundFile`, or a binary file for writing; the recorder only appends to the file.
        with_blocks: whether the film has the block tables and the state of the pool.
    """

    def __init__(self, file: Writable, *, with_blocks: bool = True) -> None:
        self._file = file if isinstance(file, SideFile) else SideFile(file)
        self.wants_blocks = self._with_blocks = with_blocks
        self._numbers: dict[Request, int] = {}  # the number of each unfinished request
        self._num_requests = 0
        self._running: dict[Request, None] = {}  # in admission order
        self._waiting: dict[Request, None] = {}  # in queueing order
        self._parked: dict[Request, None] = {}
        self._admissions: dict[Request, int] = {}  # number of admissions of each admitted request
        self._deferred: dict[Request, int] = {}  # reason of each waiting request that was checked
        self._flight: deque[SchedulerOutput] = deque()
        self._ends: list[tuple[Request, float]] = []  # finished requests, maybe of an update that is not written yet
        self._mirror: _Mirror | None = None
        self._is_open: bool | None = None  # None: not started
        self._requests, self._strings = Columns("R"), dict[str, int]()
        self._start: float | None = None
        self._now = 0
        self._num_frames = 0  # number of STEP and STEPS events in this chunk
        self._skipped: list[int] | None = None  # requests skipped in the newest step of this chunk
        self._num_evictions = 0  # total number of evictions up to the newest step
        self.num_bytes = {"events": 0, "blocks": 0}
        """Number of bytes written so far, by kind of chunk."""
        self.num_frames = 0
        """Number of events STEP and STEPS since the last `cut`, including those not written yet."""
        self.on_chunk: Callable[[], None] | None = None
        """Function that is called when a full chunk has been written; it may call `cut`."""

    # ------------------------------------------------------------------ the file

    def start(
        self, config: SchedulerConfig, policies: dict[str, int], now: float, find_parts: Callable[[], Parts]
    ) -> None:
        """Write the header, and a first key frame with the present requests. The scheduler calls this method once;
        `now` is the time of the scheduler's newest call.

        Raises:
            InvalidTransition: the recorder was already started.
        """
        if self._is_open is not None:
            raise InvalidTransition("this FilmRecorder was already started, and writes one film only; create another")
        self._is_open = True
        self._parts = find_parts
        self._with_blocks = self._with_blocks and find_parts().kv.has_tables
        header = {"format_version": FORMAT_VERSION, "library_version": __version__, "with_blocks": self._with_blocks}
        header |= {"config": config.to_dict(), "policies": policies, "names": NAMES}
        self.num_bytes["events"] += write_header(self._file, header)
        parts = find_parts()
        if parts.table.requests:
            self._start = now  # times before it are negative
        self._num_evictions = parts.kv.num_evictions
        if self._with_blocks:
            self._mirror = _Mirror(parts)
        for request in [*parts.batch.members.requests, *parts.table.queue, *parts.table.parked.values()]:
            self._number_of(request)
        self._running = dict.fromkeys(parts.batch.members.requests)
        waiting = sorted(parts.table.queue, key=_sequence_number)
        self._waiting, self._parked = dict.fromkeys(waiting), dict.fromkeys(parts.table.parked.values())
        for request in self._numbers:
            if request._state.serial:
                self._admissions[request] = 1 + (request in self._running and request.num_preemptions > 0)
        for request in waiting:
            if request._state.deferral is not None:
                self._deferred[request] = _REASON[request._state.deferral.reason]
        self._flight.extend(record.output for record in parts.steps.records if record.output is not None)
        self._open_chunk()

    def close(self) -> None:
        """Write the remaining events and the end of the film. The file stays open. The scheduler must not report
        further events to the recorder.

        Raises:
            InvalidTransition: it was not started, or is closed.
        """
        if not self._is_open:
            what = "has not been started" if self._is_open is None else "is closed"
            raise InvalidTransition(f"the film {what}")
        self._is_open = False
        self._flush_ends()
        self._write_chunk()
        self.num_bytes["events"] += write_chunk(self._file, "Z", b"")

    def cut(self) -> None:
        """Write all events so far, and start a new film, in which unfinished requests have new numbers. The new film
        consists of the header and all bytes written from now on. The host may call this method between two calls of the
        scheduler.

        Raises:
            InvalidTransition: it was not started, or is closed.
        """
        if not self._is_open:
            raise InvalidTransition("this FilmRecorder is not recording; pass it to Scheduler.start_film() first")
        self._flush_ends()
        self._write_chunk()
        unfinished = list(self._numbers)
        self._numbers, self._num_requests = {}, 0
        for request in unfinished:
            self._number_of(request)
        self._open_chunk()
        self.num_frames = 0

    def _open_chunk(self) -> None:
        parts = self._parts()
        self._events = Columns("E")
        self._ops, self._times = self._events.data["op"], self._events.data["time"]
        self._request_column = self._events.data["request"]
        self._write_key(parts)
        if self._mirror is not None:
            self._mirror.open_chunk(parts, self._running)
        self._num_frames, self._skipped = 0, None

    def _write_chunk(self) -> None:
        events = write_chunk(self._file, "R", self._requests.pack())
        events += write_chunk(self._file, "E", self._events.pack(self._strings))
        self.num_bytes["events"] += events
        if self._mirror is not None:
            self.num_bytes["blocks"] += write_chunk(self._file, "B", self._mirror.columns.pack())
        self._requests, self._strings = Columns("R"), {}

    def _next_chunk(self) -> None:
        """If the current chunk is full, write it and begin the next one. Called only when all events of a step have
        been added."""
        data = self._events.data
        longest = max(len(data[name]) for name in ("exception_row", "update_row", "steps_micros", "skipped_request"))
        if self._mirror is not None:
            longest = max(longest, len(self._mirror.columns.data["block"]))
        if len(self._ops) >= EVENTS_IN_A_CHUNK or longest >= NUMBERS_IN_A_COLUMN:
            self._write_chunk()
            self._open_chunk()
            if self.on_chunk is not None:
                self.on_chunk()

    def _write_key(self, parts: Parts) -> None:
        data, batch = self._events.data, parts.batch
        data["key_time"].append(self._now)
        number = self._numbers.__getitem__
        data["key_running"] += map(number, self._running)
        data["key_waiting"] += map(number, self._waiting)
        data["key_parked"] += map(number, self._parked)
        data["key_status"] += [_STATUS[request.status] for request in (*self._waiting, *self._parked)]
        data["key_reason"] += [self._deferred.get(request, -1) + 1 for request in self._waiting]
        data["key_computed"] += batch.num_computed_tokens[batch.members.rows].tolist()
        for request in [*self._running, *self._waiting, *self._parked]:
            data["key_cached"].append(request._state.num_cached_tokens if request in self._running else 0)
            data["key_generated"].append(request.num_output_tokens)
            data["key_prompt"].append(request.num_prompt_tokens)
            data["key_preemptions"].append(request._state.num_preemptions)
            data["key_admissions"].append(self._admissions.get(request, 0))
        for output in self._flight:
            data["key_flight"].append(output.num_rows)
            for index, request in enumerate(output.requests):
                is_valid = request.row is not None and request.serial == int(output.serials[index])
                flags = int(output.samples[index]) | is_valid << 1 | int(output.num_draft_tokens[index]) << 2
                data["key_flight_request"].append(self._numbers.get(request, -1) + 1)
                data["key_flight_tokens"].append(int(output.num_scheduled_tokens[index]))
                data["key_flight_flags"].append(flags)

    def _string_index(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _set_now(self, now: float) -> int:
        if self._start is None:
            self._start = now
        self._now = round((now - self._start) * 1e6)
        return self._now

    def _add_event(self, op: Op, now: float, request: Request | None = None) -> dict[str, list[int]]:
        """Add kind, time and request of an event. Returns the columns, to which the caller adds the arguments of the
        event."""
        if self._ends and op is not Op.PARKED and op is not Op.QUEUED:  # PARKED and QUEUED may be of the same update
            self._flush_ends()
        self._ops.append(op)
        self._times.append(self._set_now(now))
        if request is not None:
            self._request_column.append(self._numbers[request])
        return self._events.data

    def _number_of(self, request: Request) -> int:
        number = self._numbers[request] = self._num_requests
        self._num_requests += 1
        data = self._requests.data
        data["id"].append(self._string_index(request.request_id))
        data["tenant"].append(0 if request.tenant is None else self._string_index(request.tenant) + 1)
        data["arrival"].append(self._micros_of(request.arrival_time))
        data["prompt_tokens"].append(request.num_prompt_tokens)
        data["max_tokens"].append(request.max_tokens)
        data["priority"].append(request.priority)
        return number

    def _micros_of(self, time: float) -> int:
        return 0 if self._start is None else round((time - self._start) * 1e6)

    # ------------------------------------------------------------------ events of a request

    def on_added(self, request: Request, now: float) -> None:
        """Write that a request was added."""
        self._set_now(now)
        self._number_of(request)
        self._add_event(Op.ADDED, now, request)

    def on_refused(self, request: Request, why: str, now: float) -> None:
        """Write that a request was refused, with the reason `why`."""
        self._set_now(now)
        self._number_of(request)
        self._add_event(Op.REFUSED, now, request)["refused_why"].append(self._string_index(why))
        del self._numbers[request]

    def on_queued(self, request: Request, now: float) -> None:
        """Write that a request entered the queue."""
        self._add_event(Op.QUEUED, now, request)
        self._parked.pop(request, None)
        self._waiting[request] = None

    def on_parked(self, request: Request, now: float) -> None:
        """Write that a request was parked."""
        self._add_event(Op.PARKED, now, request)["parked_status"].append(_STATUS[request.status])
        self._remove_request(request)
        self._parked[request] = None

    def on_deferred(self, event: Deferred) -> None:
        """Write that a request was deferred, with the reason and the largest holder of the missing resource."""
        data = self._add_event(Op.DEFERRED, event.now, event.request)
        reason = self._deferred[event.request] = _REASON[event.reason]
        data["deferred_reason"].append(reason)
        data["deferred_missing"].append(event.missing)
        holder = None if event.holder is None else self._parts().table.requests.get(event.holder)
        data["deferred_holder"].append(0 if holder is None else self._numbers.get(holder, -1) + 1)

    def on_admitted(self, event: Admitted) -> None:
        """Write that a request was admitted."""
        data = self._add_event(Op.ADMITTED, event.now, event.request)
        data["admitted_resumed"].append(event.resumed)
        data["admitted_cached"].append(event.num_cached_tokens)
        data["admitted_external"].append(event.num_external_tokens)
        self._remove_request(event.request)
        self._running[event.request] = None
        self._admissions[event.request] = self._admissions.get(event.request, 0) + 1

    def on_preempted(self, event: Preempted) -> None:
        """Write that a request was preempted."""
        data = self._add_event(Op.PREEMPTED, event.now, event.request)
        data["preempted_cause"].append(_CAUSE[event.cause])
        data["preempted_lost"].append(event.num_lost_tokens)
        data["preempted_cached"].append(event.num_cached_tokens)
        data["preempted_recovery"].append(0 if event.recovery is None else 1 + event.recovery.swaps)
        need = event.need
        data["preempted_by"].append(0 if need is None else self._numbers[need.request] + 1)
        data["preempted_missing"].append(0 if need is None else need.num_missing_blocks)
        data["preempted_chooser"].append(
            self._string_index(need.chosen_by) + 1 if need is not None and need.chosen_by else 0
        )
        self._remove_request(event.request)
        self._waiting[event.request] = None

    def on_rolled_back(self, request: Request, now: float) -> None:
        """Write that the admission of a request was undone."""
        self._add_event(Op.ROLLED_BACK, now, request)
        self._remove_request(request)
        self._admissions[request] -= 1
        self._waiting[request] = None

    def on_finished(self, request: Request, now: float) -> None:
        """Keep the request's end. It is written after the update (or, if several steps are done in one call, after
        those steps) in which the request finished."""
        self._ends.append((request, now))

    def _flush_ends(self) -> None:
        ends, self._ends = self._ends, []
        for request, now in ends:
            data = self._add_event(Op.FINISHED, now, request)
            assert request.finish_reason is not None
            data["finished_reason"].append(_FINISH[request.finish_reason])
            data["finished_generated"].append(request.num_output_tokens)
            data["finished_detail"].append(
                self._string_index(request.finish_detail) + 1 if request.finish_detail else 0
            )
            self._remove_request(request)
            self._admissions.pop(request, None)
            del self._numbers[request]

    def on_load_started(self, event: LoadStarted) -> None:
        """Write that a load from a connector began."""
        self._add_event(Op.LOAD_STARTED, event.now, event.request)["load_tokens"].append(event.num_tokens)

    def on_load_finished(self, event: LoadFinished) -> None:
        """Write that a load from a connector ended, if its request has not finished."""
        if event.request in self._numbers:
            data = self._add_event(Op.LOAD_FINISHED, event.now, event.request)
            data["load_tokens"].append(event.num_tokens)
            data["load_failed"].append(event.failed)

    def _remove_request(self, request: Request) -> None:
        for place in (self._running, self._waiting, self._parked, self._deferred):
            place.pop(request, None)

    def on_call(self, event: Call) -> None:
        """Write a call of the host, if no other event reports the call."""
        name, arguments = event.name, event.arguments
        self._flush_ends()
        if name == "set_priority" or name == "extend":
            request = self._parts().table.requests.get(arguments["request_id"])
            if request is None or request not in self._numbers:
                return
            if name == "set_priority":
                self._add_event(Op.PRIORITY, event.now, request)["priority"].append(request.priority)
            else:
                self._write_extended(request, event.now)
        elif name in ("pause", "resume"):
            mode = 0 if name == "resume" else 2 if arguments["mode"] is PauseMode.ALL else 1
            self._add_event(Op.PAUSED, event.now)["pause_mode"].append(mode)
        elif name == "set_max_num_active_seqs":
            self._add_event(Op.LIMITED, event.now)["limit"].append((arguments["limit"] or -1) + 1)

    def _write_extended(self, request: Request, now: float) -> None:
        data = self._add_event(Op.EXTENDED, now, request)
        data["extended_prompt"].append(request.num_prompt_tokens)
        data["extended_generated"].append(request.num_output_tokens)

    # ------------------------------------------------------------------ steps

    def on_step(self, step: StepDecision) -> None:
        """Write the decision of a step."""
        output = step.output
        assert output is not None
        parts = self._parts()
        data = self._add_event(Op.STEP, step.now)
        data["step_id"].append(step.step_id)
        data["step_blocked"].append(0 if step.blocked_by is None else _REASON[step.blocked_by] + 1)
        self._write_queue(data, parts)
        num_rows = len(self._running)
        is_plain = output.num_rows == num_rows == output.total_num_scheduled_tokens and output.samples.all()
        data["step_exceptions"].append(0 if is_plain else self._write_rows(output))
        self._flight.append(output)
        if self._mirror is not None:
            self._mirror.write_step(self._num_frames, parts, step, self._numbers)
        self._num_frames += 1
        self.num_frames += 1

    def _write_queue(self, data: dict[str, list[int]], parts: Parts) -> None:
        """Write the numbers of free and evicted blocks, and the checked requests that were not admitted."""
        data["step_free"].append(parts.kv.pool.num_free)
        data["step_evicted"].append(parts.kv.num_evictions - self._num_evictions)
        self._num_evictions = parts.kv.num_evictions
        blocker = parts.table.blocker
        data["step_blocker"].append(0 if blocker is None else self._numbers[blocker] + 1)
        skipped = [self._numbers[request] for request in parts.table.skipped]
        if skipped == self._skipped:
            data["step_skipped"].append(0)
        else:
            data["step_skipped"].append(len(skipped) + 1)
            data["skipped_request"] += skipped
            self._skipped = skipped

    def _write_rows(self, output: SchedulerOutput) -> int:
        """Write the exceptions of a step: all running requests except those that compute exactly one token and sample.
        An exception with 0 tokens is not in the step. Returns the number of exceptions."""
        tokens, flags = output.num_scheduled_tokens, output.samples | output.num_draft_tokens << 1
        if output.num_rows < len(self._running):  # rows and running requests are both in admission order
            is_in = np.fromiter(map(set(output.requests).__contains__, self._running), np.bool_, len(self._running))
            all_tokens, all_flags = np.zeros((2, len(is_in)), dtype=np.int64)
            all_tokens[is_in], all_flags[is_in] = tokens, flags
            tokens, flags = all_tokens, all_flags
        places = ((tokens != 1) | (flags != 1)).nonzero()[0]
        data = self._events.data
        data["exception_row"] += np.diff(places, prepend=0).tolist()
        data["exception_tokens"] += tokens[places].tolist()
        data["exception_flags"] += flags[places].tolist()
        return len(places)

    def on_update(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        """Write that the result of the oldest step in flight was applied."""
        ends, self._ends = self._ends, []
        data = self._add_event(Op.UPDATE, now)
        self._flight.popleft()
        odd = (update.counts != output.samples).nonzero()[0]
        data["update_exceptions"].append(len(odd))
        if len(odd):
            data["update_row"] += odd.tolist()
            data["update_count"] += update.counts[odd].tolist()
        for request in update.completed_parts:  # the output of the request may have become a part of its prompt
            if request in self._numbers:
                self._write_extended(request, now)
        self._ends = ends
        self._flush_ends()
        self._next_chunk()

    def on_steps(self, run: StepRun) -> None:
        """Write the steps of a fast-forward as one event. In each step, every running request decoded one token."""
        ends, self._ends = self._ends, []
        data = self._add_event(Op.STEPS, float(run.times[0]))
        parts = self._parts()
        num_evicted = parts.kv.num_evictions - self._num_evictions
        data["step_id"].append(run.first_step_id)
        data["step_blocked"].append(0 if run.blocked_by is None else _REASON[run.blocked_by] + 1)
        self._write_queue(data, parts)
        data["steps_count"].append(run.num_steps)
        start = self._start
        assert start is not None
        micros = np.rint((np.asarray(run.times, dtype=np.float64) - start) * 1e6).astype(np.int64)
        data["steps_micros"] += np.diff(micros).tolist()
        if self._mirror is not None:
            self._mirror.write_steps(self._num_frames, parts, run, self._numbers, num_evicted)
        self._num_frames += 1
        self.num_frames += 1
        completed = [request for request in run.update.completed_parts if request in self._numbers]
        num_ends = len(ends) + len(completed) + self._move_before_parts(run.requests)
        for request in completed:
            self._write_extended(request, float(run.times[-1]))
        data["steps_ends"].append(num_ends)
        self._ends = ends
        self._flush_ends()
        self._next_chunk()

    def _move_before_parts(self, requests: Sequence[Request]) -> int:
        """Move the newest event, STEPS of `requests`, before the events of prompt parts that these requests completed
        in the steps. Returns the number of events of prompt parts."""
        count = 0
        if len(self._ops) < 2 or self._ops[-2] not in (Op.PARKED, Op.QUEUED):
            return count
        numbers = {self._numbers[request] for request in requests}
        while (
            count < len(self._request_column)
            and self._ops[-2 - count] < Op.STEP
            and self._request_column[-1 - count] in numbers
        ):
            count += 1
        if count:
            for column in (self._ops, self._times):
                column.insert(len(column) - 1 - count, column.pop())
        return count

    def on_failed(self, num_steps: int, now: float) -> None:
        """Write that the newest `num_steps` steps in flight are void; running requests have their earlier state
        again."""
        for _ in range(num_steps):
            self._flight.pop()
        batch = self._parts().batch
        data = self._add_event(Op.FAILED, now)
        data["failed_steps"].append(num_steps)
        data["failed_rows"].append(len(batch.members))
        data["failed_computed"] += batch.num_computed_tokens[batch.members.rows].tolist()
        self._next_chunk()


def _sequence_number(request: Request) -> int:
    return request.sequence_number


class _Mirror:
    """The state of the block pool as a reader of the film reconstructs it, and the columns that correct this
    reconstruction."""

    def __init__(self, parts: Parts) -> None:
        self._caches = parts.kv.prefix is not None
        self._parts = parts
        self.num_references: Int64Array = np.zeros(parts.kv.pool.num_blocks, dtype=np.int64)
        self.is_cached = np.zeros(parts.kv.pool.num_blocks, dtype=np.bool_)  # whether a block is free and cached
        self._copy_pool_state(parts)

    def _copy_pool_state(self, parts: Parts) -> None:
        pool = parts.kv.pool
        self._parts = parts
        self.num_references[:] = pool.num_references
        self.is_cached[:] = _is_cached(pool) & (pool.num_references == 0)
        self._num_free, self._num_cached = pool.num_free, pool.num_cached_free
        self._held = _held(parts)

    def open_chunk(self, parts: Parts, running: dict[Request, None]) -> None:
        """Begin a chunk with a key frame: the present state of all blocks."""
        self.columns = Columns("B")
        data = self.columns.data
        self._copy_pool_state(parts)
        self._num_known = len(parts.kv.returned or ())
        for request in running:
            row = request.row
            assert row is not None
            table = parts.kv.table(parts.batch, row)
            data["key_count"].append(len(table))
            data["key_block"] += table.tolist()
        held = self._held.nonzero()[0]
        data["key_held"] += held.tolist()
        data["key_held_count"] += self._held[held].tolist()
        data["key_cached"] += np.packbits(self.is_cached, bitorder="little").tolist()

    def _add_change(
        self, frame: int, op: BlockOp, request: int, blocks: IntArray, values: list[int] | None = None
    ) -> None:
        data = self.columns.data
        data["frame"].append(frame)
        data["op"].append(op)
        data["request"].append(request)
        data["count"].append(len(blocks))
        data["block"] += blocks.tolist()
        if values is not None:
            data["value"] += values

    def write_step(self, frame: int, parts: Parts, step: StepDecision, numbers: dict[Request, int]) -> None:
        """Write which blocks a step appended to block tables, and which blocks became free, blank or cached since the
        last step. `frame` is the index of the step's event among the STEP and STEPS events of the chunk; `numbers` has
        the number of each request in the film."""
        output = step.output
        assert output is not None
        if parts.transfers is None:
            self._release_tables(frame, parts, step.returned_blocks)
        if len(output.block_ids):
            if not output.resync and parts.transfers is None:
                self._allocate_blocks(output.block_ids.astype(np.int64))
            starts = np.flatnonzero(np.diff(output.block_rows, prepend=-1))
            rows = output.block_rows[starts]
            is_whole = (rows >= output.num_continued) | output.resync
            data, requests = self.columns.data, output.requests
            data["frame"] += [frame] * len(starts)
            data["op"] += np.where(is_whole, int(BlockOp.TABLE), int(BlockOp.APPENDED)).tolist()
            data["request"] += [numbers[requests[index]] for index in rows.tolist()]
            data["count"] += np.diff(starts, append=len(output.block_ids)).tolist()
            data["block"] += output.block_ids.tolist()
        self._write_differences(frame, parts, output.block_ids, trusts_counts=not output.resync)

    def write_steps(
        self, frame: int, parts: Parts, run: StepRun, numbers: dict[Request, int], num_evicted: int
    ) -> None:
        """Like `step`, for the steps of a fast-forward: also writes the step that appended each block. `num_evicted` of
        the appended blocks were cached before."""
        if parts.transfers is None:
            self._release_tables(frame, parts, run.returned_blocks)
            were_blank = run.block_ids[: len(run.block_ids) - num_evicted]  # blank blocks are allocated first
            were_blank = were_blank[self.is_cached[were_blank]]
            if len(were_blank):
                self._set_blank(frame, were_blank)
        if len(run.block_ids):
            if parts.transfers is None:
                self._allocate_blocks(run.block_ids.astype(np.int64))
            for index in np.unique(run.block_rows).tolist():
                mine = (run.block_rows == index).nonzero()[0]
                number = numbers[run.requests[index]]
                self._add_change(frame, BlockOp.STEPPED, number, run.block_ids[mine], run.block_steps[mine].tolist())
        if parts.transfers is None and parts.kv.returned:  # blocks of requests that finished in the last step
            self._release_tables(frame, parts, parts.kv.returned)
            self._num_known = len(parts.kv.returned)
        self._write_differences(frame, parts, run.block_ids)

    def _allocate_blocks(self, blocks: Int64Array) -> None:
        free = self.num_references[blocks] == 0
        self._num_free -= int(np.count_nonzero(free))
        self._num_cached -= int(np.count_nonzero(free & self.is_cached[blocks]))
        self.is_cached[blocks] = False
        self.num_references[blocks] += 1

    def _release_tables(self, frame: int, parts: Parts, tables: Sequence[Int64Array]) -> None:
        pool = parts.kv.pool
        tables, self._num_known = tables[self._num_known :], 0
        for table in tables:
            left = self.num_references[table] - 1
            self.num_references[table] = left
            freed = table[left == 0]
            self._num_free += len(freed)
            if self._caches and len(freed):
                # Blocks that were allocated again since then are written with a block table.
                self.is_cached[freed] = True
                self._num_cached += len(freed)
                blank = freed[(pool.num_references[freed] == 0) & ~_is_cached(pool)[freed]]
                if len(blank):
                    self._set_blank(frame, blank)

    def _set_blank(self, frame: int, blocks: Int64Array) -> None:
        self.is_cached[blocks] = False
        self._num_cached -= len(blocks)
        self._add_change(frame, BlockOp.BLANK, 0, blocks)

    def _write_differences(self, frame: int, parts: Parts, appended: IntArray, *, trusts_counts: bool = True) -> None:
        """Write the differences between the reader's state and the pool; `appended` has the blocks that were just
        appended to block tables. Without transfers equal counts mean equal sets of blocks, since the columns lack only
        one kind of change: that cached blocks became blank."""
        pool = parts.kv.pool
        if (
            trusts_counts
            and parts.transfers is None
            and parts is self._parts
            and pool.num_free == self._num_free
            and pool.num_cached_free == self._num_cached
        ):
            return
        held = _held(parts)
        changed = (held != self._held).nonzero()[0]
        if len(changed):
            self._add_change(frame, BlockOp.HELD, 0, changed, held[changed].tolist())
        is_free = pool.num_references == 0
        is_cached = _is_cached(pool)
        news = (self.num_references != 0) | (self.is_cached != is_cached)
        news[appended] = True  # they may have been released since
        news &= is_free
        for op, blocks in ((BlockOp.BLANK, news & ~is_cached), (BlockOp.CACHED, news & is_cached)):
            if blocks.any():
                self._add_change(frame, op, 0, blocks.nonzero()[0])
        self._copy_pool_state(parts)


def _is_cached(pool: Pool) -> npt.NDArray[np.bool_]:
    """For each block whether the prefix cache can find its content, [blocks] bool."""
    assert isinstance(pool, BlockPool)  # a film has blocks only if the KV cache keeps block tables in columns
    return pool.is_cached


def _held(parts: Parts) -> Int64Array:
    """Number of references to each block that are not from block tables of running requests, [blocks] int64."""
    held: Int64Array = parts.kv.pool.num_references.copy()
    if parts.transfers is None:
        held[:] = 0
        return held
    for row in parts.batch.members.rows.tolist():
        held[parts.kv.table(parts.batch, row)] -= 1
    return held
