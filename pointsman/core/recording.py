"""Recordings: writes every call into a scheduler and every decision as JSON Lines, for `replay.py`.

A recording holds the inputs of a run: a header (format, library version, configuration), then one line for each call in
order, with the `now` of the call. `schedule` and `update` lines also hold the decisions. The recorder listens to the
scheduler's calls (`state/events.py`).

A recording of another scheduler is called observed: the header has `observed`, and the lines have no prompts and no
decisions about rows.

    add       a request by its number: lengths, and its prompt's full blocks as [parent, first, count], or null where
              blocks have no hashes; block ids first to first + count - 1 are new here, and follow block `parent`; with
              adapters, the number of its adapter, in the order of first use
    steps     columns of consecutive steps (`OBSERVED_STEPS`); with adapters, also `num_adapters`: the number of
              different adapters in each step
    result    the end of a request, and the steps in which the request got a token: `steps` is a list of [first, last];
              with speculation, `drafts` is a list of [verified drafts, accepted drafts, number of steps], in order, of
              its decode steps; the first step after an admission is left out, as it can have no drafts
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, is_dataclass
from itertools import islice
from typing import Any, AnyStr, Generic, NamedTuple

import numpy as np

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import PointsmanError
from pointsman.core.kv.connector import AnswerLog
from pointsman.core.observe.film_format import MAGIC
from pointsman.core.observe.side_file import SideFile, Writable
from pointsman.core.state.events import Call, Listener, StepRun
from pointsman.core.state.inputs import Part
from pointsman.core.state.output import Integers, SchedulerOutput, StepResult, StepUpdate
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason, ParkReason
from pointsman.core.step.assembly import Start
from pointsman.version import __version__

FORMAT = "pointsman-recording"
FORMAT_VERSION = 1
MAX_BLOCKS = 2**25
"""Maximum number of KV blocks in the configuration of a file that is replayed or simulated. A pool of this size takes
about 0.5 GB of memory, and four seconds to create.
"""

OBSERVED_STEPS = (
    "began_us",
    "ended_us",
    "num_tokens",
    "num_rows",
    "num_context_tokens",
    "num_attended",
    "num_samples",
    "num_waiting",
    "num_free_blocks",
)
"""Columns of a `steps` line: the times in microseconds on the clock of `now`; the step's work (`sim/step_time.py`);
after the step, the number of unfinished requests that do not run, and the number of free blocks. The samples of a step
include one for each draft that it verifies. A step begins when the
step before it ends, or, if the engine was idle, when the step was scheduled; a step ends when the scheduler gets the
step's tokens."""

NUM_ADAPTERS = "num_adapters"
"""Column of a `steps` line that only a server with adapters has: the number of different adapters in each step."""

REQUEST_FIELDS = (
    "request_id",
    "arrival_time",
    "max_tokens",
    "max_total_tokens",
    "min_tokens",
    "priority",
    "eos_token_ids",
    "ignore_eos",
    "stop_token_ids",
    "repetition_detection",
    "cache_salt",
    "adapter",
    "encoder_inputs",
    "use_prefix_cache",
    "skip_reading_prefix_cache",
    "runs_ahead",
    "more_input",
    "tenant",
    "ttft_target",
    "retention",
)
_OUTPUT_ARRAYS = (
    "rows",
    "serials",
    "num_computed_tokens",
    "num_scheduled_tokens",
    "samples",
    "num_draft_tokens",
    "draft_token_ids",
    "completes",
    "num_cached_tokens",
    "num_external_tokens",
    "is_resumed",
    "block_ids",
    "block_offsets",
)


def kind_of_other_file(head: bytes) -> str:
    """What a file is that is certainly no recording, by its first bytes; empty: it may be a recording.

    Args:
        head: the first bytes of the file, at least 16 unless the file is shorter.
    """
    if head.startswith(MAGIC):
        return "a film"
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:15].lower()
    if begin.startswith((b"<!doctype", b"<html")):
        return "a page"
    return "" if begin.startswith(b"{") or not begin else "neither a film nor a recording"


class RecordingError(PointsmanError, ValueError):
    """A recording that cannot be read or replayed. The message names the line."""


def check_num_blocks(value: object) -> None:
    """Refuse the pool size of a broken file if such a pool would fill the memory.

    Raises:
        ValueError: the pool has more than `MAX_BLOCKS` blocks.
    """
    if isinstance(value, int) and value > MAX_BLOCKS:
        raise ValueError(
            f"num_blocks is {value}, more than {MAX_BLOCKS}, the maximum of a replay or simulation; lower num_blocks"
        )


class WholeLines(Generic[AnyStr]):
    """The lines of a recording, without a last line that is incomplete because the process was killed or the disk was
    full. The header is always kept."""

    def __init__(self, lines: Iterable[AnyStr]) -> None:
        self._lines: Iterable[AnyStr] = lines
        self.is_cut = False
        """Whether an incomplete last line was left out; valid at the end of the iteration."""

    def __iter__(self) -> Iterator[AnyStr]:
        lines = iter(self._lines)
        yield from islice(lines, 1)
        last: AnyStr | None = None
        for line in lines:
            if last is not None:
                yield last
            last = line
        if last is not None:
            self.is_cut = _is_cut(last)
            if not self.is_cut:
                yield last


def _is_cut(line: str | bytes) -> bool:
    if line[-1:] in ("\n", b"\n"):
        return False
    try:
        json.loads(line)
    except RecursionError:
        return False
    except ValueError:
        return True
    return False


class RecordingState(NamedTuple):
    """The state of a recording that is being written."""

    ended_by: str
    """Reason why the recording ended early; empty: it did not end early."""
    num_waiting_bytes: int
    """Number of bytes that are not yet written to the file."""


class Recorder(Listener):
    """Writes a recording while the scheduler is called, one line with each `write`. One recorder serves one scheduler.

    If the file cannot be written, only the recording ends: see `observe/side_file.py`.

    Args:
        file: a `BackgroundFile`, or a text file; a text file is written in the scheduler's thread.
    """

    def __init__(self, file: Writable) -> None:
        self._file = file if isinstance(file, SideFile) else SideFile(file)
        self._answers: AnswerLog | None = None

    def start(
        self, config: SchedulerConfig, start: Start, policies: dict[str, int], answers: AnswerLog | None = None
    ) -> None:
        """Write the header; the scheduler calls this method once. `policies`: version of each policy, keyed by name;
        `answers`: log of the connector's answers."""
        header = {"format": FORMAT, "format_version": FORMAT_VERSION, "library_version": __version__}
        self._answers = answers
        connector = None if answers is None else {"saves_evicted": answers.saves_evicted}
        header |= {"config": config.to_dict(), "policies": policies}
        numbers = start._asdict()
        replaced = [list(each) for each in numbers.pop("replaced")]
        if replaced:  # earlier versions can only read recordings without this field
            numbers["replaced"] = replaced
        self._write({**header, "start": numbers, "connector": connector})

    @property
    def state(self) -> RecordingState:
        """The current state of the recording."""
        return RecordingState(self._file.ended_by, self._file.num_waiting_bytes)

    def on_call(self, event: Call) -> None:
        """See `Listener`."""
        if self._file.has_ended():
            if self._answers is not None:
                self._answers.take_answers()
            return
        line = {"call": event.name, "now": event.now}
        self._write(line | _FIELDS[event.name](**event.arguments))

    def _write(self, line: dict[str, Any]) -> None:
        """Write one line: the header or a call, with the connector's answers since the line before."""
        if self._answers is not None and (answers := self._answers.take_answers()):
            line["answers"] = answers
        self._file.write(json.dumps(line, separators=(",", ":"), default=_json_value) + "\n")


# ------------------------------------------------------------------ the fields of a line, by call


def _arguments_of_add(request: Request, park: ParkReason | None) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(request, name) for name in REQUEST_FIELDS}
    fields["prompt_token_ids"] = request.prompt_token_ids.tolist()
    if request.num_output_tokens:
        fields["output_token_ids"] = request.output_token_ids.tolist()
    return {"request": fields, "park": park.value if park else None}


def _arguments_of_finish(request_id: str, reason: FinishReason, **options: Any) -> dict[str, Any]:
    return {"id": request_id, "reason": reason.value, **options}


def _arguments_of_extend(request_id: str, part: Part, more: bool) -> dict[str, Any]:
    options = {"max_tokens": part.max_tokens, "encoder_inputs": part.encoder_inputs}
    return {"id": request_id, "token_ids": part.token_ids.tolist(), "more": more, **options}


def _arguments_of_transfer_done(
    transfer_id: int, num_loaded_tokens: int | None, failed_blocks: list[int]
) -> dict[str, Any]:
    return {"transfer": transfer_id, "num_loaded_tokens": num_loaded_tokens, "failed_blocks": failed_blocks}


def _arguments_of_schedule(output: SchedulerOutput) -> dict[str, Any]:
    return {"step": output.step_id, "decision": output_decision(output)}


def _arguments_of_update(output: SchedulerOutput, result: StepResult, update: StepUpdate) -> dict[str, Any]:
    line: dict[str, Any] = {"step": output.step_id, "token_ids": np.asarray(result.token_ids).tolist()}
    line["counts"] = None if result.counts is None else np.asarray(result.counts).tolist()
    line["errors"] = {str(index): message for index, message in result.errors.items()}
    if result.unsampled:
        line["unsampled"] = sorted(int(index) for index in result.unsampled)
    if result.copies is not None:
        line["copies"] = list(result.copies)
    return {**line, "step_time": result.step_time, "decision": update_decision(update)}


def _arguments_of_propose(output: SchedulerOutput, token_ids: Integers, counts: Integers, kept: int) -> dict[str, Any]:
    line: dict[str, Any] = {"step": output.step_id, "decision": {"kept": kept}}
    return {**line, "token_ids": np.asarray(token_ids).tolist(), "counts": np.asarray(counts).tolist()}


def _arguments_of_advance(
    first_step_id: int, times: Any, token_ids: Any, last_token_ids: Any, run: StepRun
) -> dict[str, Any]:
    line: dict[str, Any] = {"step": first_step_id, "times": np.asarray(times, dtype=np.float64).tolist()}
    line["token_ids"] = np.asarray(token_ids).tolist()
    line["last_token_ids"] = None if last_token_ids is None else np.asarray(last_token_ids).tolist()
    return {**line, "decision": run_decision(run)}


_FIELDS: dict[str, Callable[..., dict[str, Any]]] = {
    "schedule_failed": lambda error: {"error": error},
    "add": _arguments_of_add,
    "finish": _arguments_of_finish,
    "extend": _arguments_of_extend,
    "park": lambda request_id, reason: {"id": request_id, "reason": reason.value},
    "ready": lambda request_id: {"id": request_id},
    "set_priority": lambda request_id, priority: {"id": request_id, "priority": priority},
    "set_max_num_active_seqs": lambda limit: {"limit": limit},
    "hold_prefills": lambda is_held: {"is_held": is_held},
    "pause": lambda mode: {"mode": mode.value},
    "resume": dict,
    "reset_encoder_cache": dict,
    "reset_prefix_cache": lambda preempt_running: {"preempt_running": preempt_running},
    "transfer_done": _arguments_of_transfer_done,
    "schedule": _arguments_of_schedule,
    "update": _arguments_of_update,
    "propose": _arguments_of_propose,
    "fail": lambda output: {"step": output.step_id},
    "advance": _arguments_of_advance,
}


def _json_value(value: object) -> object:
    """Convert a NumPy scalar or a dataclass, which `json` cannot write, to a JSON value."""
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} cannot be recorded; pass a JSON value, a NumPy scalar or a dataclass")


def output_decision(output: SchedulerOutput) -> dict[str, Any]:
    """All decisions of an output, as JSON-ready values."""
    decision: dict[str, Any] = {
        "num_continued": output.num_continued,
        "resync": output.resync,
        "num_common_prefix_blocks": output.num_common_prefix_blocks,
        "requests": [request.request_id for request in output.requests],
        "encoder_inputs": [[request.request_id, index] for request, index in output.encoder_inputs],
        "freed_encoder_entries": [list(entry) for entry in output.freed_encoder_entries],
        "preempted": [request.request_id for request in output.preempted],
        "finished": [[r.request_id, r.finish_reason.value if r.finish_reason else None] for r in output.finished],
    }
    decision["loads"] = [
        [
            *(load.transfer_id, load.request_id, load.block_ids.tolist(), load.first_token, load.is_async),
            *([load.block_groups.tolist(), load.block_places.tolist()] if len(load.block_places) else ()),
        ]
        for load in output.loads
    ]
    decision["saves"] = [[save.block_id, save.key.hex()] for save in output.saves]
    decision.update((name, getattr(output, name).tolist()) for name in _OUTPUT_ARRAYS)
    if len(output.block_groups):
        decision |= {name: getattr(output, name).tolist() for name in ("block_groups", "block_places")}
    return decision


def run_decision(run: StepRun) -> dict[str, Any]:
    """All decisions of the steps that one call of `advance` does, as JSON-ready values."""
    arrays = ("rows", "serials", "num_computed_tokens", "block_ids", "block_rows", "block_steps")
    return {
        "num_steps": run.num_steps,
        "requests": [request.request_id for request in run.requests],
        **{name: getattr(run, name).tolist() for name in arrays},
        "preempted": [request.request_id for request in run.preempted],
        "reported": [[r.request_id, r.finish_reason.value if r.finish_reason else None] for r in run.finished],
        "blocked_by": None if run.blocked_by is None else run.blocked_by.value,
        **update_decision(run.update),
    }


def update_decision(update: StepUpdate) -> dict[str, Any]:
    return {
        "kept_token_ids": update.token_ids.tolist(),
        "kept_counts": update.counts.tolist(),
        "completed_parts": [request.request_id for request in update.completed_parts],
        "finished": [
            [r.request_id, r.finish_reason.value if r.finish_reason else None, r.finish_detail, r.stop_reason]
            for r in update.finished
        ],
    }
