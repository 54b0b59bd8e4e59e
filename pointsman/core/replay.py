"""Replay: makes the calls of a recording on a new scheduler, and compares every decision.

The first difference names the line, the step and the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import ConfigError, PointsmanError, PolicyError
from pointsman.core.kv.connector import RecordedConnector
from pointsman.core.policy.guard import Replaced
from pointsman.core.recording import (
    FORMAT,
    FORMAT_VERSION,
    RecordingError,
    WholeLines,
    check_num_blocks,
    output_decision,
    run_decision,
    update_decision,
)
from pointsman.core.scheduler import Scheduler
from pointsman.core.state.events import Listener, StepRun
from pointsman.core.state.output import Copies, SchedulerOutput, StepResult
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason, ParkReason, PauseMode
from pointsman.core.step.assembly import Start
from pointsman.files import MAX_MESSAGE, represented, shown


class ReplayDifference(PointsmanError):
    """The first decision of a replay that differs from the recorded one."""

    def __init__(self, line: int, step_id: int | None, field: str, recorded: object, replayed: object) -> None:
        where = f"step {represented(step_id)}" if step_id is not None else "a call outside steps"
        super().__init__(
            f"line {line}, {where}: {field} was {represented(recorded, MAX_MESSAGE)} and is now "
            f"{represented(replayed, MAX_MESSAGE)}"
        )
        self.line = line
        self.step_id = step_id
        self.field = field
        self.recorded = recorded
        self.replayed = replayed


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Counts of what a replay repeated without finding a difference."""

    num_calls: int
    num_steps: int
    num_requests: int
    num_preemptions: int
    is_cut: bool
    """Whether the recording ended with an incomplete line, which was left out."""


def replay(file: Iterable[str], watch: Callable[[Scheduler], None] | None = None) -> ReplayReport:
    """Make the recorded calls on a new scheduler and compare every decision.

    Args:
        watch: function that gets the scheduler before the first call, and may add listeners.

    Raises:
        ReplayDifference: at the first decision that differs.
        RecordingError: the file is not a recording, is broken, or names a policy that is not built in.
    """
    return _Replay(watch).run(file)


class _Replay:
    def __init__(self, watch: Callable[[Scheduler], None] | None = None) -> None:
        self._watch = watch
        self._scheduler: Scheduler | None = None
        self._connector: RecordedConnector | None = None
        self._outputs: dict[int, SchedulerOutput] = {}
        self._updated: SchedulerOutput | None = None
        self._num_calls = self._num_steps = self._num_requests = 0
        self._calls: dict[str, Callable[[Scheduler, dict[str, Any], int], None]] = {
            "add": self._replay_add,
            "finish": self._replay_finish,
            "extend": self._replay_extend,
            "park": lambda s, call, _: s.park(call["id"], ParkReason(call["reason"]), call["now"]),
            "ready": lambda s, call, _: s.ready(call["id"], call["now"]),
            "set_priority": lambda s, call, _: s.set_priority(call["id"], call["priority"], call["now"]),
            "set_max_num_active_seqs": lambda s, call, _: s.set_max_num_active_seqs(call["limit"], call["now"]),
            "hold_prefills": lambda s, call, _: s.hold_prefills(call["is_held"], call["now"]),
            "pause": lambda s, call, _: s.pause(call["now"], PauseMode(call["mode"])),
            "resume": lambda s, call, _: s.resume(call["now"]),
            "reset_encoder_cache": lambda s, call, _: s.reset_encoder_cache(call["now"]),
            "reset_prefix_cache": lambda s, call, _: s.reset_prefix_cache(
                call["now"], preempt_running=call["preempt_running"]
            ),
            "transfer_done": self._replay_transfer_done,
            "schedule": self._replay_schedule,
            "schedule_failed": self._replay_schedule_failed,
            "update": self._replay_update,
            "propose": self._replay_propose,
            "fail": self._replay_fail,
            "advance": self._replay_advance,
        }

    def run(self, file: Iterable[str]) -> ReplayReport:
        lines = WholeLines(file)
        for number, text in enumerate(lines, start=1):
            try:
                self._replay_line(json.loads(text), number)
            except (ReplayDifference, RecordingError, OSError):
                raise
            except json.JSONDecodeError as error:
                raise RecordingError(
                    f"line {number} is not JSON ({error.msg}); the recording is cut off or broken"
                ) from None
            except Exception as error:  # values that no recorder writes can fail anywhere in the scheduler
                what = str(error) if isinstance(error, PointsmanError) else f"{type(error).__name__}: {error}"
                raise RecordingError(f"line {number} cannot be replayed: {shown(what, MAX_MESSAGE)}") from error
        if self._scheduler is None:
            raise RecordingError("the file is empty; a recording starts with a header line")
        preemptions = self._scheduler.stats().num_preemptions
        return ReplayReport(self._num_calls, self._num_steps, self._num_requests, preemptions, lines.is_cut)

    def _replay_line(self, call: dict[str, Any], number: int) -> None:
        if self._scheduler is None:
            self._scheduler = self._make_scheduler(call)
            if self._watch is not None:
                self._watch(self._scheduler)
            return
        name = call.get("call")
        if name not in self._calls:
            raise RecordingError(
                f"line {number} has the unknown call {represented(name)}; the recording is broken, or newer than this "
                "library"
            )
        if self._connector is not None:
            self._connector.set_answers(call.get("answers", []))
        self._calls[name](self._scheduler, call, number)
        self._num_calls += 1

    def _make_scheduler(self, header: dict[str, Any]) -> Scheduler:
        if header.get("format") != FORMAT:
            raise RecordingError(
                f"line 1 is not the header of a recording: its format is {represented(header.get('format'))}, not "
                f"{FORMAT!r}"
            )
        version = header.get("format_version")
        if version != FORMAT_VERSION:
            raise RecordingError(
                f"line 1: the recording has format version {represented(version)}, but this library reads version "
                f"{FORMAT_VERSION}; replay it with the library that recorded it"
            )
        if "observed" in header:
            other = shown(str(header["observed"]["scheduler"]))
            raise RecordingError(
                f"the recording was observed: {other} made the decisions, and there are no prompts, so no decision can "
                "be replayed; simulate the recording with `pointsman vllm compare`"
            )
        config = header["config"]
        check_num_blocks(config["num_blocks"])
        if header.get("connector") is not None:
            self._connector = RecordedConnector(header["connector"]["saves_evicted"])
        try:
            numbers = header["start"]
            replaced = tuple(Replaced(*each) for each in numbers.get("replaced", ()))
            start = Start(**{**numbers, "replaced": replaced})
            scheduler = Scheduler(SchedulerConfig(**config), connector=self._connector, start=start)
        except (TypeError, ConfigError) as error:
            raise RecordingError(
                f"line 1: the configuration cannot be used: {shown(str(error), MAX_MESSAGE)}"
            ) from error
        for failed in scheduler.replaced_policies:
            if failed not in replaced:
                raise RecordingError(
                    f"the {failed.kind} policy {failed.policy!r} of the recording cannot be used here: {failed.error}; "
                    "correct the policy"
                )
        for name, version in header.get("policies", {}).items():
            here = scheduler.policies.get(name)
            if here != version:
                raise RecordingError(
                    f"policy {name!r} had version {version} in the recording and has version {here} here, so the "
                    f"recording cannot be replayed; install version {version} of the policy"
                )
        return scheduler

    def _output_of(self, call: dict[str, Any]) -> SchedulerOutput:
        step: int = call["step"]
        if step not in self._outputs:
            raise ValueError(f"step {step} is not in flight: it was not scheduled, or was updated or failed before")
        return self._outputs[step]

    def _replay_add(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        park = ParkReason(call["park"]) if call["park"] else None
        scheduler.add(Request(**call["request"]), call["now"], park=park)
        self._num_requests += 1

    def _replay_extend(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        options = {name: call[name] for name in ("more", "max_tokens", "encoder_inputs")}
        scheduler.extend(call["id"], call["token_ids"], call["now"], **options)

    def _replay_finish(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        options = {name: call[name] for name in ("keep_tokens", "detail", "stop_reason")}
        scheduler.finish(call["id"], FinishReason(call["reason"]), call["now"], **options)

    def _replay_transfer_done(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        options = {name: call[name] for name in ("num_loaded_tokens", "failed_blocks")}
        scheduler.transfer_done(call["transfer"], call["now"], **options)

    def _replay_schedule(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        output = scheduler.schedule(call["now"])
        if output.step_id != call["step"]:
            raise ReplayDifference(number, call["step"], "step_id", call["step"], output.step_id)
        _compare_decisions(number, call["step"], call["decision"], output_decision(output))
        self._outputs[output.step_id] = output
        self._num_steps += 1

    def _replay_schedule_failed(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        """Replay a call in which a policy failed: the policy must fail again."""
        try:
            step: int | None = scheduler.schedule(call["now"]).step_id
            failed = ""
        except PolicyError as error:
            step, failed = None, str(error)
        if failed != call["error"]:
            raise ReplayDifference(number, step, "error", call["error"], failed)

    def _replay_update(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        errors = {int(index): message for index, message in call["errors"].items()}
        copies = Copies(*call["copies"]) if "copies" in call else None
        unsampled = call.get("unsampled", ())
        result = StepResult(call["token_ids"], call["counts"], errors, call["step_time"], unsampled, copies)
        self._updated = output = self._output_of(call)
        update = scheduler.update(output, result, call["now"])
        del self._outputs[call["step"]]
        _compare_decisions(number, call["step"], call["decision"], update_decision(update))

    def _replay_propose(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        output, kept = self._updated, 0
        if output is not None and output.step_id == call["step"]:  # otherwise the proposal was stale
            kept = scheduler.propose(output, call["token_ids"], call["counts"], call["now"])
        _compare_decisions(number, call["step"], call["decision"], {"kept": kept})

    def _replay_fail(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        scheduler.fail(self._output_of(call), call["now"])
        self._outputs = {step: output for step, output in self._outputs.items() if step < call["step"]}

    def _replay_advance(self, scheduler: Scheduler, call: dict[str, Any], number: int) -> None:
        runs = _Runs()
        scheduler.add_listener(runs)
        scheduler.advance(call["times"], call["token_ids"], call["last_token_ids"])
        scheduler.remove_listener(runs)
        run = runs.newest
        assert run is not None
        if run.first_step_id != call["step"]:
            raise ReplayDifference(number, call["step"], "step_id", call["step"], run.first_step_id)
        _compare_decisions(number, call["step"], call["decision"], run_decision(run))
        self._num_steps += run.num_steps


class _Runs(Listener):
    newest: StepRun | None = None

    def on_steps(self, run: StepRun) -> None:
        self.newest = run


def _compare_decisions(line: int, step: int, recorded: dict[str, Any], replayed: dict[str, Any]) -> None:
    for name in [*replayed, *(name for name in recorded if name not in replayed)]:
        if recorded.get(name) != replayed.get(name):
            raise ReplayDifference(line, step, name, recorded.get(name), replayed.get(name))
