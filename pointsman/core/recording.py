"""Recordings: every call into a scheduler and every decision it made, as JSON Lines, and their replay.

A recording is the inputs, so that it can be run again: a header (format, library version, configuration), then one
line per call in order, each with its `now`. `schedule` and `update` lines also carry what was decided; a replay makes
the same calls on a new scheduler and compares every decision, so the first difference names the step and the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import ConfigError, PointsmanError
from pointsman.core.kv.connector import AnswerLog, RecordedConnector
from pointsman.core.policy.order import ORDERS
from pointsman.core.policy.victim import VICTIMS
from pointsman.core.state.output import Integers, SchedulerOutput, StepResult, StepUpdate
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason, ParkReason, PauseMode

if TYPE_CHECKING:
    from pointsman.core.scheduler import Scheduler
    from pointsman.core.state.inputs import Part

FORMAT = "pointsman-recording"
FORMAT_VERSION = 1

_REQUEST_FIELDS = (
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
    "runs_ahead",
    "more_input",
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


class RecordingError(PointsmanError, ValueError):
    """A line that is no part of a recording. The message names the line."""


class ReplayDifference(PointsmanError):
    """The first decision of a replay that is not the recorded one."""

    def __init__(self, line: int, step_id: int | None, field: str, recorded: object, replayed: object) -> None:
        where = f"step {step_id}" if step_id is not None else "a call outside steps"
        super().__init__(f"line {line}, {where}: {field} was {recorded!r} and is now {replayed!r}")
        self.line = line
        self.step_id = step_id
        self.field = field
        self.recorded = recorded
        self.replayed = replayed


class Start(NamedTuple):
    """Where a scheduler's numbers begin: those of one that has been at work before it is recorded go on."""

    step_id: int = 0
    serial: int = 1


NEW = Start()
"""Of a new scheduler."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay without a difference went through."""

    num_calls: int
    num_steps: int
    num_requests: int
    num_preemptions: int


class Lines(Protocol):
    """Where a recording goes: a text file, or whatever takes lines as one."""

    def write(self, line: str, /) -> object: ...


class Recorder:
    """Writes a recording as the calls happen, a line with each `write`. One recorder serves one scheduler."""

    def __init__(self, file: Lines) -> None:
        self._file = file
        self._answers: AnswerLog | None = None

    def start(self, config: SchedulerConfig, start: Start, answers: AnswerLog | None = None) -> None:
        """The header; called once, by the scheduler. `answers`: those of its connector."""
        from pointsman import __version__

        header = {"format": FORMAT, "format_version": FORMAT_VERSION, "library_version": __version__}
        self._answers = answers
        connector = None if answers is None else {"saves_evicted": answers.saves_evicted}
        self._write({**header, "config": config.to_dict(), "start": start._asdict(), "connector": connector})

    def added(self, request: Request, now: float, park: ParkReason | None) -> None:
        fields: dict[str, Any] = {name: getattr(request, name) for name in _REQUEST_FIELDS}
        fields["prompt_token_ids"] = request.prompt_token_ids.tolist()
        self._write({"call": "add", "now": now, "request": fields, "park": park.value if park else None})

    def finished(
        self,
        request_id: str,
        reason: FinishReason,
        now: float,
        keep_tokens: int | None,
        detail: str,
        stop_reason: int | str | None,
    ) -> None:
        options = {"keep_tokens": keep_tokens, "detail": detail, "stop_reason": stop_reason}
        self._write({"call": "finish", "now": now, "id": request_id, "reason": reason.value, **options})

    def extended(self, request_id: str, part: Part, more: bool, now: float) -> None:
        options = {"max_tokens": part.max_tokens, "encoder_inputs": part.encoder_inputs}
        tokens = part.token_ids.tolist()
        self._write({"call": "extend", "now": now, "id": request_id, "token_ids": tokens, "more": more, **options})

    def parked(self, request_id: str, reason: ParkReason, now: float) -> None:
        self._write({"call": "park", "now": now, "id": request_id, "reason": reason.value})

    def readied(self, request_id: str, now: float) -> None:
        self._write({"call": "ready", "now": now, "id": request_id})

    def set_priority(self, request_id: str, priority: int, now: float) -> None:
        self._write({"call": "set_priority", "now": now, "id": request_id, "priority": priority})

    def set_max_num_active_seqs(self, limit: int | None, now: float) -> None:
        self._write({"call": "set_max_num_active_seqs", "now": now, "limit": limit})

    def paused(self, mode: PauseMode, now: float) -> None:
        self._write({"call": "pause", "now": now, "mode": mode.value})

    def resumed(self, now: float) -> None:
        self._write({"call": "resume", "now": now})

    def reset_encoder_cache(self, now: float) -> None:
        self._write({"call": "reset_encoder_cache", "now": now})

    def reset_prefix_cache(self, preempt_running: bool, now: float) -> None:
        self._write({"call": "reset_prefix_cache", "now": now, "preempt_running": preempt_running})

    def transfer_done(
        self, transfer_id: int, num_loaded_tokens: int | None, failed_blocks: list[int], now: float
    ) -> None:
        options = {"num_loaded_tokens": num_loaded_tokens, "failed_blocks": failed_blocks}
        self._write({"call": "transfer_done", "now": now, "transfer": transfer_id, **options})

    def scheduled(self, output: SchedulerOutput, now: float) -> None:
        self._write({"call": "schedule", "now": now, "step": output.step_id, "decision": _decision(output)})

    def updated(self, output: SchedulerOutput, result: StepResult, update: StepUpdate, now: float) -> None:
        line: dict[str, Any] = {"call": "update", "now": now, "step": output.step_id}
        line["token_ids"] = np.asarray(result.token_ids).tolist()
        line["counts"] = None if result.counts is None else np.asarray(result.counts).tolist()
        line["errors"] = {str(index): message for index, message in result.errors.items()}
        line["step_time"] = result.step_time
        line["decision"] = _update_decision(update)
        self._write(line)

    def proposed(self, output: SchedulerOutput, token_ids: Integers, counts: Integers, kept: int, now: float) -> None:
        line: dict[str, Any] = {"call": "propose", "now": now, "step": output.step_id, "decision": {"kept": kept}}
        self._write({**line, "token_ids": np.asarray(token_ids).tolist(), "counts": np.asarray(counts).tolist()})

    def failed(self, output: SchedulerOutput, now: float) -> None:
        self._write({"call": "fail", "now": now, "step": output.step_id})

    def _write(self, line: dict[str, Any]) -> None:
        """One line: a call, with what the connector answered in it."""
        if self._answers is not None and (answers := self._answers.take()):
            line["answers"] = answers
        self._file.write(json.dumps(line, separators=(",", ":"), default=_plain) + "\n")


def replay(file: Iterable[str]) -> ReplayReport:
    """Make the recorded calls on a new scheduler and compare every decision.

    Raises:
        ReplayDifference: at the first decision that differs.
        RecordingError: the file is no recording, is cut, or names a policy that is not built in.
    """
    return _Replay().run(file)


class _Replay:
    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None
        self._connector: RecordedConnector | None = None
        self._outputs: dict[int, SchedulerOutput] = {}
        self._updated: SchedulerOutput | None = None
        self._num_calls = self._num_steps = self._num_requests = 0
        self._calls: dict[str, Callable[[Scheduler, dict[str, Any], int], None]] = {
            "add": self._add,
            "finish": self._finish,
            "extend": self._extend,
            "park": lambda s, call, _: s.park(call["id"], ParkReason(call["reason"]), call["now"]),
            "ready": lambda s, call, _: s.ready(call["id"], call["now"]),
            "set_priority": lambda s, call, _: s.set_priority(call["id"], call["priority"], call["now"]),
            "set_max_num_active_seqs": lambda s, call, _: s.set_max_num_active_seqs(call["limit"], call["now"]),
            "pause": lambda s, call, _: s.pause(call["now"], PauseMode(call["mode"])),
            "resume": lambda s, call, _: s.resume(call["now"]),
            "reset_encoder_cache": lambda s, call, _: s.reset_encoder_cache(call["now"]),
            "reset_prefix_cache": lambda s, call, _: s.reset_prefix_cache(
                call["now"], preempt_running=call["preempt_running"]
            ),
            "transfer_done": self._transfer_done,
            "schedule": self._schedule,
            "update": self._update,
            "propose": self._propose,
            "fail": self._fail,
        }

    def run(self, file: Iterable[str]) -> ReplayReport:
        for number, text in enumerate(file, start=1):
            try:
                self._line(json.loads(text), number)
            except (ReplayDifference, RecordingError):
                raise
            except json.JSONDecodeError as error:
                raise RecordingError(
                    f"line {number} is not JSON ({error.msg}); the recording is cut or broken"
                ) from None
            except (KeyError, TypeError, ValueError, AttributeError, PointsmanError) as error:
                raise RecordingError(f"line {number} cannot be replayed: {error}") from error
        if self._scheduler is None:
            raise RecordingError("the file is empty; a recording starts with a header line")
        preemptions = self._scheduler.stats().num_preemptions
        return ReplayReport(self._num_calls, self._num_steps, self._num_requests, preemptions)

    def _line(self, call: dict[str, Any], number: int) -> None:
        if self._scheduler is None:
            self._scheduler = self._open(call)
            return
        name = call.get("call")
        if name not in self._calls:
            raise RecordingError(f"line {number} calls {name!r}, which no scheduler has")
        if self._connector is not None:
            self._connector.expect(call.get("answers", []))
        self._calls[name](self._scheduler, call, number)
        self._num_calls += 1

    def _open(self, header: dict[str, Any]) -> Scheduler:
        from pointsman.core.scheduler import Scheduler

        if header.get("format") != FORMAT:
            raise RecordingError(
                f"line 1 is no header of a recording (format {header.get('format')!r}, not {FORMAT!r})"
            )
        if header.get("format_version") != FORMAT_VERSION:
            raise RecordingError(
                f"the recording has format version {header.get('format_version')}; this library reads {FORMAT_VERSION}"
            )
        config = header["config"]
        for knob, known in (("order", ORDERS), ("victim", VICTIMS)):
            if config[knob] is not None and config[knob] not in known:
                raise RecordingError(
                    f"{knob} {config[knob]!r} is not built in, so this recording cannot be replayed here"
                )
        if header.get("connector") is not None:
            self._connector = RecordedConnector(header["connector"]["saves_evicted"])
        try:
            return Scheduler(SchedulerConfig(**config), connector=self._connector, start=Start(**header["start"]))
        except (TypeError, ConfigError) as error:
            raise RecordingError(f"the header's configuration cannot be used: {error}") from error

    def _output(self, call: dict[str, Any]) -> SchedulerOutput:
        step: int = call["step"]
        if step not in self._outputs:
            raise ValueError(f"step {step} was not scheduled, or is over")
        return self._outputs[step]

    def _add(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        park = ParkReason(call["park"]) if call["park"] else None
        scheduler.add(Request(**call["request"]), call["now"], park=park)
        self._num_requests += 1

    def _extend(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        options = {name: call[name] for name in ("more", "max_tokens", "encoder_inputs")}
        scheduler.extend(call["id"], call["token_ids"], call["now"], **options)

    def _finish(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        options = {name: call[name] for name in ("keep_tokens", "detail", "stop_reason")}
        scheduler.finish(call["id"], FinishReason(call["reason"]), call["now"], **options)

    def _transfer_done(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        options = {name: call[name] for name in ("num_loaded_tokens", "failed_blocks")}
        scheduler.transfer_done(call["transfer"], call["now"], **options)

    def _schedule(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        output = scheduler.schedule(call["now"])
        if output.step_id != call["step"]:
            raise ReplayDifference(number, call["step"], "step_id", call["step"], output.step_id)
        _compare(number, call["step"], call["decision"], _decision(output))
        self._outputs[output.step_id] = output
        self._num_steps += 1

    def _update(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        errors = {int(index): message for index, message in call["errors"].items()}
        result = StepResult(call["token_ids"], call["counts"], errors, call["step_time"])
        self._updated = output = self._output(call)
        update = scheduler.update(output, result, call["now"])
        del self._outputs[call["step"]]
        _compare(number, call["step"], call["decision"], _update_decision(update))

    def _propose(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        output, kept = self._updated, 0
        if output is not None and output.step_id == call["step"]:  # otherwise it came too late
            kept = scheduler.propose(output, call["token_ids"], call["counts"], call["now"])
        _compare(number, call["step"], call["decision"], {"kept": kept})

    def _fail(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        scheduler.fail(self._output(call), call["now"])
        self._outputs = {step: output for step, output in self._outputs.items() if step < call["step"]}


def _plain(value: object) -> object:
    """What JSON knows for a NumPy scalar, or for parameters."""
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} cannot be recorded")


def _decision(output: SchedulerOutput) -> dict[str, Any]:
    """All that an output decides, as JSON-ready values."""
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
        [load.transfer_id, load.request_id, load.block_ids.tolist(), load.first_token, load.is_async]
        for load in output.loads
    ]
    decision["saves"] = [[save.block_id, save.key.hex()] for save in output.saves]
    decision.update((name, getattr(output, name).tolist()) for name in _OUTPUT_ARRAYS)
    return decision


def _update_decision(update: StepUpdate) -> dict[str, Any]:
    return {
        "kept_token_ids": update.token_ids.tolist(),
        "kept_counts": update.counts.tolist(),
        "completed_parts": [request.request_id for request in update.completed_parts],
        "finished": [
            [r.request_id, r.finish_reason.value if r.finish_reason else None, r.finish_detail, r.stop_reason]
            for r in update.finished
        ],
    }


def _compare(line: int, step: int, recorded: dict[str, Any], replayed: dict[str, Any]) -> None:
    for name in [*replayed, *(name for name in recorded if name not in replayed)]:
        if recorded.get(name) != replayed.get(name):
            raise ReplayDifference(line, step, name, recorded.get(name), replayed.get(name))
