"""Runs a scheduler for a lesson: the lesson adds requests, a simulated model samples, and the run is filmed.

    stage = Stage(num_blocks=20, max_num_seqs=4)
    stage.add("A", 40, max_tokens=8)
    stage.add("B", 40, max_tokens=8, step=3)      # arrives before step 3 is decided
    run = stage.run()

The scheduler is the real one. Only the model is simulated: a step takes the time of `STEP_TIME`, and each sampled token
is a function of all tokens before it, like a token that a real model samples at temperature 0.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core import ParkReason, Request, Scheduler, SchedulerConfig, SchedulerOutput, StepResult, StepUpdate
from pointsman.core.observe.film import FilmRecorder
from pointsman.core.observe.film_format import Op
from pointsman.sim.step_time import LinearStepTime, StepLoad
from pointsman.web.film import Event, Film, State

STEP_TIME = LinearStepTime(per_step=6e-3, per_token=8e-5)
_DEFAULTS: Mapping[str, Any] = {"num_blocks": 128, "max_model_len": 4096, "max_num_seqs": 8}

Drafter = Callable[[Request, int], list[int]]
"""Proposes the drafts for a request after its newest token, at most the given number."""


class Preemption(NamedTuple):
    """One preemption of a run."""

    step: int
    """The step in whose decision the request was preempted."""
    request_id: str
    lost: int
    """Number of computed tokens whose blocks were released."""
    cached: int
    """Number of computed tokens that were still cached when the request was preempted."""


class Wait(NamedTuple):
    """A reason for which a request waits, beginning at a step."""

    step: int
    request_id: str
    reason: str
    missing: int
    """The amount of the resource that the request lacks; 0 if the reason has no countable resource."""
    holder: str | None
    """Id of the request that holds the largest amount of the lacking resource."""


class Run:
    """The results of a stage: the film, and the data for the lesson's figures."""

    def __init__(
        self,
        film: bytes,
        config: SchedulerConfig,
        steps: Sequence[tuple[SchedulerOutput, StepUpdate]],
        times: Sequence[float],
        requests: Mapping[str, Request],
        notes: Mapping[str, Any],
    ) -> None:
        self.film = film
        self.config = config
        self.outputs = [output for output, _ in steps]
        """The output of each step, by step number."""
        self.requests = requests
        self.notes = notes
        """Values that the lesson has stored during the run, for its figures."""
        self._steps = steps
        self._times = times

    @cached_property
    def opened(self) -> Film:
        """The film, open for reading."""
        return Film(io.BytesIO(self.film))

    @cached_property
    def events(self) -> list[tuple[int, Event]]:
        """The film's events, each as (step that the event led to, event)."""
        found: list[tuple[int, Event]] = []
        steps = iter(self.opened.frames)
        step = next(steps, None)
        for event in self.opened.events(0, None):
            if step is None:
                break
            found.append((step.step_id, event))
            if event.op is Op.STEP:
                step = next(steps, None)
        return found

    @cached_property
    def names(self) -> list[str]:
        """The id of each request of the film; the index is the request's number."""
        return [request.request_id for request in self.opened.requests]

    def state(self, step: int) -> State:
        """The state after the decision of a step."""
        return self.opened.state_at(self.opened.frame_of_step(step))

    def known(self, step: int, request_id: str) -> int:
        """Number of known tokens of a request (prompt and output) at the decision of a step."""
        one = self.state(step).requests[self.names.index(request_id)]
        return one.num_prompt_tokens + one.num_generated_tokens

    def table(self, step: int, request_id: str) -> list[int]:
        """The blocks of a request after the decision of a step."""
        return self.state(step).requests[self.names.index(request_id)].table

    def _request_events(self, op: Op, request_id: str | None = None) -> Iterator[tuple[int, str, dict[str, Any]]]:
        for step, event in self.events:
            if event.op is op and event.request is not None and request_id in (None, self.names[event.request]):
                yield step, self.names[event.request], event.fields

    def starts(self, request_id: str) -> list[int]:
        """The steps in which a request was admitted: the first time, and after each preemption."""
        return [step for step, _, _ in self._request_events(Op.ADMITTED, request_id)]

    def cached(self, request_id: str) -> list[int]:
        """Number of tokens that each admission of a request found in the prefix cache."""
        return [fields["cached"] for _, _, fields in self._request_events(Op.ADMITTED, request_id)]

    def end(self, request_id: str) -> int:
        """The first step that is decided after a request has finished."""
        return next(step for step, _, _ in self._request_events(Op.FINISHED, request_id))

    def preemptions(self, request_id: str | None = None) -> list[Preemption]:
        """The preemptions of one request, or of all requests, in order."""
        found = self._request_events(Op.PREEMPTED, request_id)
        return [Preemption(step, name, fields["lost"], fields["cached"]) for step, name, fields in found]

    def waits(self, request_id: str | None = None) -> list[Wait]:
        """The reasons for which one request, or each request, waits, in order. A reason applies until the request gets
        another reason, or starts."""
        reasons = self.opened.header["names"]["reasons"]
        return [
            Wait(step, name, reasons[e["reason"]], e["missing"], self.names[e["holder"] - 1] if e["holder"] else None)
            for step, name, e in self._request_events(Op.DEFERRED, request_id)
        ]

    def tokens(self, step: int) -> dict[str, int]:
        """The number of tokens that each request computes in a step, by request id."""
        output = self.outputs[step]
        return {
            request.request_id: int(count)
            for request, count in zip(output.requests, output.num_scheduled_tokens, strict=True)
        }

    @property
    def num_steps(self) -> int:
        return len(self.outputs)

    @property
    def num_computed(self) -> int:
        """Number of tokens computed in all steps."""
        return sum(output.total_num_scheduled_tokens for output in self.outputs)

    @property
    def num_recomputed(self) -> int:
        """Number of tokens that were computed again because a preemption had lost them."""
        lost: dict[int | None, int] = {}
        total = 0
        for _, event in self.events:
            if event.op is Op.PREEMPTED:
                lost[event.request] = event.fields["lost"]
            elif event.op is Op.ADMITTED:
                total += max(0, lost.pop(event.request, 0) - event.fields["cached"])
        return total

    @property
    def slots_used(self) -> float:
        """Share of the sequence slots that hold a request, as a mean over all steps."""
        rows = sum(output.num_rows for output in self.outputs)
        return rows / (self.num_steps * self.config.max_num_seqs)

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the first step to the end of the last step."""
        return self._times[-1] - self._times[0]

    def token_times(self, request_id: str) -> list[float]:
        """The time at which each token of a request was returned, in seconds."""
        found: list[float] = []
        for (output, update), end in zip(self._steps, self._times[1:], strict=True):
            for request, count in zip(output.requests, update.counts.tolist(), strict=True):
                if request.request_id == request_id:
                    found += [end] * count
        return found

    def ttft(self, request_id: str) -> float:
        """Seconds from the arrival of a request to its first token."""
        return self.token_times(request_id)[0] - self.requests[request_id].arrival_time

    def longest_itl(self, request_id: str) -> float:
        """The longest time between two consecutive tokens of a request, in seconds."""
        return max(after - before for before, after in pairwise(self.token_times(request_id)))


class Stage:
    """A scheduler with a simulated host, whose run is filmed.

    Args:
        drafter: proposes drafts after each step; None: no drafts.
        ahead: whether each step is scheduled before the scheduler gets the result of the previous step.
        settings: fields of the `SchedulerConfig`.
    """

    def __init__(self, *, drafter: Drafter | None = None, ahead: bool = False, **settings: Any) -> None:
        self.config = SchedulerConfig(**{**_DEFAULTS, "max_steps_in_flight": 2 if ahead else 1, **settings})
        self.scheduler = Scheduler(self.config)
        self.notes: dict[str, Any] = {}
        self._ahead, self._drafter = ahead, drafter
        self._file = io.BytesIO()
        self._recorder = FilmRecorder(self._file)
        self.scheduler.start_film(self._recorder)
        self._events: dict[int, list[Callable[[], object]]] = {}
        self._requests: dict[str, Request] = {}
        self._open: list[SchedulerOutput] = []  # scheduled, not updated
        self._steps: list[tuple[SchedulerOutput, StepUpdate]] = []
        self._times = [0.0]
        self._next_token = 1_000
        self.now = 0.0

    # ------------------------------------------------------------------ the lesson's actions

    def prompt(self, length: int) -> list[int]:
        """`length` token ids that no other prompt has."""
        self._next_token += length
        return list(range(self._next_token - length, self._next_token))

    def at(self, step: int, action: Callable[[], object]) -> None:
        """Let `run` call `action` immediately before it decides a step."""
        self._events.setdefault(step, []).append(action)

    def add(
        self,
        request_id: str,
        prompt: int | Sequence[int],
        *,
        max_tokens: int,
        step: int = 0,
        park: ParkReason | None = None,
        **asked: Any,
    ) -> None:
        """Add a request before a step. A prompt given as a length gets tokens that no other prompt has."""
        tokens = self.prompt(prompt) if isinstance(prompt, int) else prompt

        def arrive() -> None:
            request = Request(request_id, tokens, arrival_time=self.now, max_tokens=max_tokens, **asked)
            self._requests[request_id] = request
            self.scheduler.add(request, self.now, park=park)

        self.at(step, arrive)

    # ------------------------------------------------------------------ running

    def run(self, num_steps: int | None = None) -> Run:
        """Run until all requests have finished, or for a number of steps, and close the film.

        The film has one more step, which runs nothing: it shows the requests that finished with the last step.
        """
        while self._events or self.scheduler.has_unfinished_requests():
            if num_steps is not None and len(self._steps) + len(self._open) >= num_steps:
                break
            self._step()
        while self._open:
            self._update()
        if num_steps is None:
            self.scheduler.update(self.scheduler.schedule(self.now), StepResult([]), self.now)
        self.scheduler.remove_listener(self._recorder)
        self._recorder.close()
        return Run(self._file.getvalue(), self.config, self._steps, self._times, self._requests, self.notes)

    def _step(self) -> None:
        for action in self._events.pop(len(self._steps) + len(self._open), ()):
            action()
        self._open.append(self.scheduler.schedule(self.now))
        if len(self._open) == self.config.max_steps_in_flight:
            self._update()

    def _update(self) -> None:
        output = self._open.pop(0)
        rows = zip(output.num_computed_tokens.tolist(), output.num_scheduled_tokens.tolist(), strict=True)
        self.now += STEP_TIME.of_step(StepLoad.of_rows(list(rows)))
        self._times.append(self.now)
        update = self.scheduler.update(output, _step_output(output), self.now)
        self._steps.append((output, update))
        if self._drafter is not None:
            drafts = [
                [] if request.is_finished else self._drafter(request, self.config.num_draft_tokens)
                for request in output.requests
            ]
            flat = [token for each in drafts for token in each]
            self.scheduler.propose(output, flat, [len(each) for each in drafts], self.now)


def next_token(tokens: npt.NDArray[np.integer]) -> int:
    """The token that the simulated model samples after `tokens`: a function of all of them."""
    return int(tokens.sum(dtype=np.int64) * 31 + len(tokens)) % 997


def _step_output(output: SchedulerOutput) -> StepResult:
    """The step's result: for each row that samples, the correct drafts and the next token."""
    sampled: list[list[int]] = []
    drafts, offset = output.draft_token_ids.tolist(), 0
    for request, samples, count in zip(
        output.requests, output.samples.tolist(), output.num_draft_tokens.tolist(), strict=True
    ):
        tokens, row = request.all_token_ids, []
        for draft in [*drafts[offset : offset + count], None] if samples else ():
            row.append(next_token(tokens))
            if row[-1] != draft:
                break
            tokens = np.append(tokens, row[-1])
        offset += count
        sampled.append(row)
    return StepResult([token for row in sampled for token in row], [len(row) for row in sampled])
