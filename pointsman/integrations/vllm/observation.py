"""Records the actions of vLLM's own scheduler as an observed recording (`core/recording.py`). Importable without vLLM.

    Observation        keeps notes while vLLM runs: one tuple for each step, a few values for each request
    RecordingThread    converts notes to lines and writes the lines, in a thread of its own
    BlockNumbers       replaces block hashes by numbers

The engine's thread only appends to lists, and passes the lists to the recording thread at intervals. A step of steady
decode costs two reads of the clock and one sum. Only steps that begin, end, skip or preempt a request are read row by
row.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pointsman.core.recording import FORMAT, FORMAT_VERSION, NUM_ADAPTERS, OBSERVED_STEPS
from pointsman.integrations.vllm.recordings import RecordingFile
from pointsman.version import __version__

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request as VLLMRequest

logger = logging.getLogger("vllm.pointsman")  # vLLM's log configuration applies to it

STEPS_A_LINE = 512
SECONDS_A_LINE = 1.0
"""Maximum time between two lines of steps in the recording. If the process is killed, the notes since the last line and
the notes in the recording thread's queue are lost."""
MAX_QUEUED = 256
"""Maximum number of lists of notes, one for each line of steps, that wait for the recording thread; if more would wait,
the recording ends."""
MIN_BLOCKS_KNOWN = 1 << 16
SECONDS_TO_CLOSE = 2.0


# ---------------------------------------------------------------------- prompts


class BlockNumbers:
    """Numbers blocks by their hashes, in the order in which they are first seen. A number reveals nothing about the
    hash.

    Args:
        num_known: minimum number of most recently seen blocks that are remembered; memory is bounded by twice this
            number.
    """

    def __init__(self, num_known: int) -> None:
        self._num_known = num_known
        self._next = 0
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def number_blocks(self, hashes: Sequence[bytes]) -> tuple[int | None, int, int]:
        """Number the blocks of a prompt, given hashes that each cover all earlier tokens.

        Each call marks all blocks of the prompt as recently seen. So the last blocks of a prompt are forgotten first,
        and the number of known leading blocks is found by bisection.

        Returns:
            The number of the last known block, the number of the first new block, and the count of new blocks.
        """
        young, old, count = self._young, self._old, len(hashes)
        num_young = _num_leading_known(young, hashes, 0)
        num_known = _num_leading_known(old, hashes, num_young) if old else num_young
        for name in hashes[num_young:num_known]:
            young[name] = old[name]
        parent = young[hashes[num_known - 1]] if num_known else None
        first, num_new = self._next, count - num_known
        if num_new:
            self._next = first + num_new
            young.update(zip(hashes[num_known:], range(first, self._next), strict=True))
        if len(young) >= self._num_known:
            self._young, self._old = {}, young
        return parent, first, num_new


def _num_leading_known(known: dict[bytes, int], hashes: Sequence[bytes], low: int) -> int:
    """The number of leading hashes that are in `known`; the first `low` hashes are known to be in it."""
    high = len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low


# ---------------------------------------------------------------------- the file


class RecordingThread:
    """Writes notes to a file, in a thread of its own, so that the engine's thread never waits for the disk.

    Args:
        file: file to write to.
        header: fields of the first line.
        numbers: numbers the blocks of prompts; None: the prompts have no hashes.
        start_ns: value of `time.monotonic_ns` at which the recording's clock is 0.
    """

    def __init__(
        self, file: RecordingFile, header: dict[str, Any], numbers: BlockNumbers | None, start_ns: int
    ) -> None:
        self._file = file
        self._numbers = numbers
        self._start = start_ns
        self._queue: SimpleQueue[tuple[list[Any], list[Any]] | None] = SimpleQueue()
        self._num_steps = 0
        self._thread = threading.Thread(target=self._run, args=(header,), name="pointsman-observer", daemon=True)
        self._thread.start()

    @property
    def ended_by(self) -> str:
        """Why writing has ended; "": it continues."""
        if not self._file.ended_by and self._queue.qsize() > MAX_QUEUED:
            self._file.end_early("the thread that writes is slower than the steps")
        return self._file.ended_by

    def put(self, events: list[Any], steps: list[Any]) -> None:
        """Queue notes to write: about requests that were added or finished (`events`), and about steps. The caller must
        not use the lists afterwards."""
        self._queue.put((events, steps))

    def end(self) -> None:
        """Let the thread write its queue and then end. Returns without waiting."""
        self._queue.put(None)

    def wait(self) -> None:
        """Wait until the thread has ended, for at most `SECONDS_TO_CLOSE`: a disk may hang."""
        self._thread.join(SECONDS_TO_CLOSE)

    def _run(self, header: dict[str, Any]) -> None:
        try:
            self._file.write(_to_line(header))
            while (notes := self._queue.get()) is not None and not self._file.ended_by:
                events, steps = notes
                lines = [self._request_line(*event) for event in events]
                if steps:
                    lines.append(self._steps(steps))
                self._file.write("".join(lines))
        except Exception as error:  # an error ends only this recording
            self._file.end_early(f"{type(error).__name__}: {error}")
        finally:
            self._file.close()

    def _to_seconds(self, now_ns: int) -> float:
        return round((now_ns - self._start) / 1e9, 6)

    def _request_line(
        self, now_ns: int, call: str, fields: dict[str, Any], hashes: Sequence[bytes], num_blocks: int
    ) -> str:
        if call == "add":
            fields["request"]["blocks"] = (
                None if self._numbers is None else self._numbers.number_blocks(hashes[:num_blocks])
            )
        elif fields["scheduled"] is not None:
            fields["scheduled"] = self._to_seconds(fields["scheduled"])
        return _to_line({"call": call, "now": self._to_seconds(now_ns), **fields})

    def _steps(self, steps: list[Any]) -> str:
        start, first = self._start, self._num_steps
        self._num_steps += len(steps)
        began, ended, *loads = zip(*steps, strict=True)
        columns = [[(at - start) // 1000 for at in times] for times in (began, ended)] + loads
        line = {"call": "steps", "now": self._to_seconds(ended[-1]), "step": first}
        names = (*OBSERVED_STEPS, NUM_ADAPTERS) if len(columns) > len(OBSERVED_STEPS) else OBSERVED_STEPS
        return _to_line({**line, **dict(zip(names, columns, strict=True))})


def _to_line(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":")) + "\n"


# ---------------------------------------------------------------------- what is noted


class _Request:
    """An unfinished request of vLLM's, with the values that were observed."""

    __slots__ = ("adapter", "drafts", "is_decoding", "num_cached", "number", "of_vllm", "scheduled", "steps")

    def __init__(self, of_vllm: VLLMRequest, number: int) -> None:
        self.of_vllm = of_vllm
        self.number = number
        self.adapter: int | None = None
        self.drafts: list[list[int]] = []
        """[verified drafts, accepted drafts, number of steps] of each run of equal decode steps, in order."""
        self.scheduled: int | None = None
        self.num_cached = 0
        self.steps: list[list[int]] = []
        """[first step, last step] of each run of consecutive steps in which the request samples; while the request
        decodes, the last step of the newest run is not set."""
        self.is_decoding = False

    def add_drafts(self, num_verified: int, num_accepted: int) -> None:
        """Record the drafts of a decode step."""
        last = self.drafts[-1] if self.drafts else None
        if last is not None and last[0] == num_verified and last[1] == num_accepted:
            last[2] += 1
        else:
            self.drafts.append([num_verified, num_accepted, 1])

    def end_decode_run(self, last_step: int) -> None:
        """End the newest run of decode steps: the request does not sample after step `last_step`."""
        self.is_decoding = False
        self.steps[-1][1] = last_step


class Observation:
    """Records the actions of one of vLLM's schedulers; the scheduler's methods call the methods of this class.

    Args:
        scheduler: vLLM's scheduler.
        file: file of the recording.
        header: fields of the recording's first line, besides the fields of the format.
        block_size: number of tokens that a block hash covers; None: prompts have no hashes.
        num_known: minimum number of blocks to remember, as in `BlockNumbers`.
        has_drafts, has_adapters: whether drafts and adapters are recorded.
        reason_of: returns the finish reason of a finished request of vLLM's.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        file: RecordingFile,
        header: dict[str, Any],
        *,
        block_size: int | None,
        num_known: int,
        has_drafts: bool = False,
        has_adapters: bool = False,
        reason_of: Callable[[VLLMRequest], str],
    ) -> None:
        self.ended_by = ""
        """Why the recording ended; "": it continues."""
        self._scheduler = scheduler
        self._reason_of = reason_of
        self._block_size = block_size
        self._num_free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks
        self._has_drafts, self._has_adapters = has_drafts, has_adapters
        self._adapters: dict[tuple[int, str], int] = {}  # number of each adapter, in the order of first use
        self._begun: tuple[str, ...] = ()  # requests whose first decode after an admission is in the newest step
        self._may_keep_finished = scheduler.connector is not None  # with a connector, vLLM may keep a finished request
        self._requests: dict[str, _Request] = {}
        self._unsettled: dict[str, _Request] = {}  # the subset of `_requests` that does not sample in every step
        self._num_added = 0
        self._num_steps = 0  # scheduled steps
        self._num_updated = 0
        self._in_flight: deque[tuple[SchedulerOutput, int, tuple[int, ...] | None, tuple[str, ...]]] = deque()
        self._end_before: int | None = None  # end of the previous step; None: the engine has been idle since then
        self._events: list[Any] = []
        self._steps: list[Any] = []
        start = self._last_put = time.monotonic_ns()
        self._wall_start = time.time()
        first = {"format": FORMAT, "format_version": FORMAT_VERSION, "library_version": __version__, **header}
        numbers = None if block_size is None else BlockNumbers(max(num_known, MIN_BLOCKS_KNOWN))
        self._thread = RecordingThread(file, first, numbers, start)
        atexit.register(self.close)

    def abandon(self) -> None:
        """End the recording. Notes that were not yet passed to the recording thread are dropped."""
        atexit.unregister(self.close)
        self._thread.end()

    def close(self) -> None:
        """Pass all notes to the recording thread, and wait until it has ended."""
        self._put_notes()
        self.abandon()
        self._thread.wait()

    def _put_notes(self) -> None:
        self.ended_by = self._thread.ended_by
        if self._events or self._steps:
            self._thread.put(self._events, self._steps)
            self._events, self._steps = [], []

    # ------------------------------------------------------------------ requests

    def record_added(self, request: VLLMRequest, now: int) -> None:
        """Record that vLLM queued a request."""
        if request.resumable:  # a further part of a session, not a new request
            return
        seen = self._requests[request.request_id] = _Request(request, self._num_added)
        self._num_added += 1
        fields = {
            "request_id": f"r{seen.number}",
            "arrival_time": round(request.arrival_time - self._wall_start, 6),
            "max_tokens": request.max_tokens,
            "priority": request.priority,
            "num_prompt_tokens": request.num_prompt_tokens,
        }
        if self._has_adapters:
            seen.adapter = fields["adapter"] = self._adapter_number(request)
        hashes, size = request.block_hashes, self._block_size
        num_blocks = 0 if size is None else min(len(hashes), request.num_prompt_tokens // size)
        self._events.append((now, "add", {"request": fields, "park": None}, hashes, num_blocks))

    def _adapter_number(self, request: VLLMRequest) -> int | None:
        of_vllm = request.lora_request
        if of_vllm is None:
            return None
        return self._adapters.setdefault((of_vllm.lora_int_id, of_vllm.lora_name), len(self._adapters))

    def record_finished(self, request_id: str, now: int) -> None:
        """Record that a request finished; an unknown id is ignored."""
        seen = self._requests.pop(request_id, None)
        if seen is None:
            return
        self._unsettled.pop(request_id, None)
        last = self._num_updated - 1
        if seen.is_decoding:
            seen.end_decode_run(last)
        request = seen.of_vllm
        fields = {
            "id": f"r{seen.number}",
            "reason": self._reason_of(request),
            "scheduled": seen.scheduled,
            "num_cached_tokens": seen.num_cached,
            "num_output_tokens": request.num_output_tokens,
            "num_preemptions": request.num_preemptions,
            "steps": [[begin, min(end, last)] for begin, end in seen.steps if begin <= last],
        }
        if self._has_drafts:
            fields["drafts"] = seen.drafts
        self._events.append((now, "result", fields, (), 0))

    # ------------------------------------------------------------------ steps

    def record_scheduled(self, output: SchedulerOutput, now: int) -> None:
        """Record that vLLM decided a step that begins at `now`."""
        self._begun = ()
        total = output.total_num_scheduled_tokens
        num_rows = len(output.num_scheduled_tokens)
        computed = output.scheduled_cached_reqs.num_computed_tokens
        if (
            num_rows == total == len(computed) == len(self._scheduler.running)
            and total
            and not self._unsettled
            and not output.preempted_req_ids
        ):
            context = sum(computed) + total
            load: tuple[int, ...] | None = (total, num_rows, context, context, num_rows)
        else:
            load = self._step_load(output, total, num_rows, computed, now)
        if self._has_adapters and load is not None:
            requests = self._requests
            adapters = {seen.adapter for name in output.num_scheduled_tokens if (seen := requests.get(name))}
            load = (*load, len(adapters - {None}))
        self._in_flight.append((output, now, load, self._begun))
        if total:
            self._num_steps += 1

    def _step_load(
        self, output: SchedulerOutput, total: int, num_rows: int, computed: list[int], now: int
    ) -> tuple[int, ...] | None:
        """The load of a step that is not plain decode: numbers of tokens, rows, context tokens, attended tokens and
        samples; None: the step computes nothing. Also updates the set of requests that sample, and the requests whose
        first decode is in this step."""
        step, rows, requests = self._num_steps, output.num_scheduled_tokens, self._requests
        for name in output.preempted_req_ids or ():
            self._end_decode_run(name, step)
        context = sum(computed) + total
        for new in output.scheduled_new_reqs:
            context += new.num_computed_tokens
            seen = requests.get(new.req_id)
            if seen is not None:
                self._unsettled[new.req_id] = seen
                if seen.scheduled is None:
                    seen.scheduled, seen.num_cached = now, new.num_computed_tokens
        if num_rows < len(self._scheduler.running):
            for request in self._scheduler.running:
                if request.request_id not in rows:
                    self._end_decode_run(request.request_id, step)
        num_samples = num_rows + sum(map(len, output.scheduled_spec_decode_tokens.values()))
        begun = []
        for name, seen in list(self._unsettled.items()):
            if name not in rows:
                continue
            if seen.of_vllm.is_prefill_chunk:
                num_samples -= 1
            else:
                del self._unsettled[name]
                seen.is_decoding = True
                seen.steps.append([step, step])
                begun.append(name)
        self._begun = tuple(begun)
        if not total:
            return None
        attended = context
        if total > num_rows:
            of_vllm = self._scheduler.requests
            for name, count in rows.items():
                if count > 1:
                    before = of_vllm[name].num_computed_tokens - count
                    attended += before * count + count * (count + 1) // 2 - before - count
        return total, num_rows, context, attended, num_samples

    def _end_decode_run(self, name: str, step: int) -> None:
        """Record that the request `name` does not run in the step `step`."""
        seen = self._requests.get(name)
        if seen is not None:
            self._unsettled[name] = seen
            if seen.is_decoding:
                seen.end_decode_run(step - 1)

    def record_result(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Record the drafts of each request that decoded in the oldest step in flight. To be called before vLLM
        processes the result, as vLLM cuts it to the ends of requests."""
        if not self._has_drafts or not result.sampled_token_ids:
            return
        begun = self._in_flight[0][3]
        drafts, sampled, places = output.scheduled_spec_decode_tokens, result.sampled_token_ids, result.req_id_to_index
        for name in output.num_scheduled_tokens:
            seen = self._requests.get(name)
            if seen is not None and name not in begun and (tokens := sampled[places[name]]):
                seen.add_drafts(len(drafts.get(name, ())), len(tokens) - 1)

    def record_updated(
        self, output: SchedulerOutput, outputs: dict[int, EngineCoreOutputs], now: int, num_before: int
    ) -> None:
        """Record that vLLM processed the result of a step at the time `now`; `num_before`: vLLM's number of requests
        before that."""
        of_step, scheduled, load, _ = self._in_flight.popleft()
        if of_step is not output:
            raise ValueError("steps were updated in another order than they were scheduled")
        requests = self._scheduler.requests
        num_known = len(requests)
        if load is not None:
            self._num_updated += 1
            before = self._end_before
            began = scheduled if before is None else before
            waiting = num_known - len(self._scheduler.running)
            of_step_end = (waiting, self._num_free_blocks())
            self._steps.append((began, now, *load[:5], *of_step_end, *load[5:]))
        self._end_before = now if num_known and load is not None else None
        if num_known != num_before or self._may_keep_finished:
            for client in outputs.values():
                for each in client.outputs:
                    if each.finish_reason is not None:
                        self.record_finished(each.request_id, now)
        if not num_known or len(self._steps) >= STEPS_A_LINE or now - self._last_put > SECONDS_A_LINE * 1e9:
            self._last_put = now
            self._put_notes()

    def record_idle(self) -> None:
        """Record that the engine pauses: the next step does not begin at the end of the previous step."""
        self._end_before = None
