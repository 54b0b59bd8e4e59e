"""A scene of the sandbox: requests with their arrival times, settings, and the number of steps to play.

    played = play(scene)    plays the scene on a new scheduler; `played` has the film, figures and the final state

A scene never changes, and the scheduler is deterministic: the same scene always gives the same bytes of a film. Time is
virtual: a step takes `Scene.step_seconds`, which depends only on the step's number of tokens, so times can be checked
by hand.
"""

from __future__ import annotations

import io
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pointsman.core import (
    PolicyError,
    Request,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepResult,
)
from pointsman.core.observe.film import FilmRecorder

Int32Array = npt.NDArray[np.int32]

MAX_STEPS = 20_000
"""Maximum number of steps of a scene: each change of a scene plays all of its steps again."""
EOS_TOKEN = 1
TEXT_OF_A_REQUEST = 1_000_000
"""The token at position p of the n-th request's own text (prompt and output) has the id n times this number, plus p.
The first request has n = 1."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    """Output length, known only to the scene: the request ends with an end-of-sequence token that no policy can
    predict."""
    at: float = 0.0
    """Arrival time, in seconds."""
    starts_like: str | None = None
    """Id of the request whose first tokens this request shares."""
    num_shared_tokens: int = 0
    """Number of shared tokens; they may extend into the output of the request `starts_like`, as in a conversation."""
    priority: int = 0
    tenant: str = ""
    max_tokens: int | None = None
    """Token limit in the client's request; None: only the model's limit applies."""


@dataclass(frozen=True, slots=True)
class Abortion:
    """Aborts a request; does nothing if it has finished."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Urgency:
    """Changes the priority of a request; does nothing if it has finished."""

    request_id: str
    priority: int
    at: float


Input: TypeAlias = Arrival | Abortion | Urgency


@dataclass(frozen=True, slots=True)
class Scene:
    """The input of `play`: settings, requests and the number of steps."""

    config: SchedulerConfig
    inputs: tuple[Input, ...] = ()
    """Arrivals, aborts and priority changes, in the order in which they were given; each is applied at its time."""
    num_steps: int = 0
    to_the_end: bool = False
    """Whether to play until all requests are finished, or `MAX_STEPS` are done, instead of `num_steps`."""
    not_before: float = 0.0
    """Earliest time at which the scene ends, in seconds. When no request is unfinished, the scene still advances to the
    arrivals until this time, even if these requests are then refused."""
    seconds_per_step: float = 0.01
    seconds_per_token: float = 0.0001

    @property
    def arrivals(self) -> list[Arrival]:
        """The requests, in the order in which they were given."""
        return [each for each in self.inputs if isinstance(each, Arrival)]

    def step_seconds(self, num_tokens: int) -> float:
        """The time of a step that computes `num_tokens` tokens, in seconds."""
        return self.seconds_per_step + self.seconds_per_token * num_tokens

    def max_tokens(self, arrival: Arrival) -> int:
        """The token limit with which the request of an arrival is added to the scheduler."""
        room = max(1, self.config.max_model_len - arrival.num_prompt_tokens)
        return room if arrival.max_tokens is None else arrival.max_tokens

    def texts(self) -> dict[str, int]:
        """For each request, the token id at position 0 of its own text."""
        return {each.request_id: number * TEXT_OF_A_REQUEST for number, each in enumerate(self.arrivals, 1)}

    def segments(self, request_id: str, length: int) -> list[tuple[int, int]]:
        """The first `length` tokens of a request, as runs of consecutive token ids; each run is (first id, last id +
        1)."""
        arrivals, texts = {each.request_id: each for each in self.arrivals}, self.texts()
        found: list[tuple[int, int]] = []
        name: str | None = request_id
        while name is not None and length > 0:  # from its own text back to the text that it `starts_like`
            shared = min(arrivals[name].num_shared_tokens, length)
            if shared < length:
                found.insert(0, (texts[name] + shared, texts[name] + length))
            name, length = arrivals[name].starts_like, shared
        return found

    def prompt(self, arrival: Arrival) -> Int32Array:
        """[prompt tokens] the token ids of an arrival's prompt."""
        runs = self.segments(arrival.request_id, arrival.num_prompt_tokens)
        return np.concatenate([np.arange(first, end, dtype=np.int32) for first, end in runs])


class Done(NamedTuple):
    """A call that was made to the scheduler, or a wait for an arrival."""

    what: str
    """Kind of the call: "add", "refuse" (an add that was refused), "abort", "priority", "step", or "wait" for an
    arrival."""
    now: float
    """Time of the call, in seconds; for a step, its end."""
    given: Input | None = None


@dataclass(slots=True)
class Cast:
    """A request of a scene, with its state and times while the scene is played."""

    arrival: Arrival
    request: Request | None = None
    """The request in the scheduler; None: it has not arrived."""
    refusal: str | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float | None:
        """Seconds from the request's arrival to its first token."""
        return self.token_times[0] - self.arrival.at if self.token_times else None

    @property
    def longest_gap(self) -> float | None:
        """Maximum seconds between two consecutive tokens."""
        times = self.token_times
        return max((later - sooner for sooner, later in pairwise(times)), default=None)


@dataclass(slots=True, kw_only=True)
class Played:
    """A scene that was played."""

    scene: Scene
    scheduler: Scheduler
    film: bytes
    cast: dict[str, Cast]
    """The requests by id, in the order of the scene."""
    log: list[Done]
    now: float
    num_steps: int
    newest: SchedulerOutput | None
    """The output of the newest step."""
    problem: str | None
    """Message of the error of a policy, if a policy failed and so ended the scene."""

    @property
    def is_over(self) -> bool:
        """Whether all requests have arrived and finished."""
        return not self.scheduler.has_unfinished_requests() and all(
            each.request is not None for each in self.cast.values()
        )

    def tables(self) -> dict[str, list[int]]:
        """The block ids of each running request, by request id."""
        scheduler = self.scheduler
        return {
            request.request_id: scheduler.block_table[row, : scheduler.explain(request.request_id).num_blocks].tolist()
            for request, row in zip(scheduler.running, scheduler.running_rows.tolist(), strict=True)
        }

    def figures(self) -> dict[str, float | None]:
        """Results that a change of settings may affect, by name. Times are in seconds."""
        stats = self.scheduler.stats()
        first = [each.ttft for each in self.cast.values() if each.ttft is not None]
        gaps = [each.longest_gap for each in self.cast.values() if each.longest_gap is not None]
        return {
            "steps": self.num_steps,
            "seconds": self.now,
            "finished": sum(stats.finished.values()),
            "tokens_per_second": stats.num_generated_tokens / self.now if self.now else None,
            "ttft_mean": sum(first) / len(first) if first else None,
            "ttft_p99": float(np.percentile(first, 99)) if first else None,
            "ttft_max": max(first, default=None),
            "longest_gap": max(gaps, default=None),
            "preemptions": stats.num_preemptions + stats.num_displaced,
            "recomputed_tokens": stats.num_recomputed_tokens,
            "cached_tokens": stats.prefix_hits + stats.resumed_prefix_hits,
        }


def play(scene: Scene) -> Played:
    """Play a scene on a new scheduler.

    Raises:
        ConfigError: the settings contradict each other, or name an unknown policy.
    """
    return _Player(scene).play()


class _Player:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._scheduler = Scheduler(scene.config)
        self._cast = {each.request_id: Cast(each) for each in scene.arrivals}
        self._texts = scene.texts()
        self._pending = deque(sorted(scene.inputs, key=lambda each: each.at))
        self._log: list[Done] = []
        self._now = 0.0
        self._newest: SchedulerOutput | None = None

    def play(self) -> Played:
        """Play until the scene's steps are done."""
        file = io.BytesIO()
        recorder = FilmRecorder(file)
        self._scheduler.start_film(recorder)
        problem, num_steps = None, 0
        most = MAX_STEPS if self._scene.to_the_end else min(self._scene.num_steps, MAX_STEPS)
        try:
            self._apply_due_inputs()
            while num_steps < most and self._wait_for_requests():
                self._play_step()
                num_steps += 1
                self._apply_due_inputs()
            while not self._scheduler.has_unfinished_requests() and self._next_arrival() <= self._scene.not_before:
                self._wait_for_next_arrival()
        except PolicyError as error:
            problem = str(error)
        self._scheduler.remove_listener(recorder)
        recorder.close()
        return Played(
            scene=self._scene,
            scheduler=self._scheduler,
            film=file.getvalue(),
            cast=self._cast,
            log=self._log,
            now=self._now,
            num_steps=num_steps,
            newest=self._newest,
            problem=problem,
        )

    def _wait_for_requests(self) -> bool:
        """Advance the time until the scheduler has an unfinished request; False: no further request arrives."""
        while not self._scheduler.has_unfinished_requests():
            if self._next_arrival() == math.inf:
                return False
            self._wait_for_next_arrival()
        return True

    def _next_arrival(self) -> float:
        """The time of the next arrival; infinity: there is none."""
        return next((each.at for each in self._pending if isinstance(each, Arrival)), math.inf)

    def _wait_for_next_arrival(self) -> None:
        self._now = self._next_arrival()
        self._log.append(Done("wait", self._now))
        self._apply_due_inputs()

    def _apply_due_inputs(self) -> None:
        """Apply all inputs whose time has been reached."""
        while self._pending and self._pending[0].at <= self._now:
            given = self._pending.popleft()
            if isinstance(given, Arrival):
                self._add_request(given)
            elif self._scheduler.get_request(given.request_id) is not None:
                self._apply_input(given)

    def _add_request(self, arrival: Arrival) -> None:
        cast = self._cast[arrival.request_id]
        cast.request = request = Request(
            arrival.request_id,
            self._scene.prompt(arrival),
            arrival_time=arrival.at,
            max_tokens=self._scene.max_tokens(arrival),
            eos_token_ids=(EOS_TOKEN,),
            priority=arrival.priority,
            tenant=arrival.tenant,
        )
        try:
            self._scheduler.add(request, self._now)
        except RequestRefused as error:
            cast.refusal = str(error)
        self._log.append(Done("add" if cast.refusal is None else "refuse", self._now, arrival))

    def _apply_input(self, given: Abortion | Urgency) -> None:
        if isinstance(given, Abortion):
            self._scheduler.abort(given.request_id, self._now)
        else:
            self._scheduler.set_priority(given.request_id, given.priority, self._now)
        self._log.append(Done("abort" if isinstance(given, Abortion) else "priority", self._now, given))

    def _play_step(self) -> None:
        output = self._scheduler.schedule(self._now)
        tokens = []
        self._now += self._scene.step_seconds(output.total_num_scheduled_tokens)
        for request, samples in zip(output.requests, output.samples.tolist(), strict=True):
            if samples:
                cast = self._cast[request.request_id]
                cast.token_times.append(self._now)
                is_last = request.num_output_tokens + 1 >= cast.arrival.num_output_tokens
                tokens.append(EOS_TOKEN if is_last else self._texts[request.request_id] + request.num_tokens)
        self._scheduler.update(output, StepResult(tokens), self._now)
        self._newest = output
        self._log.append(Done("step", self._now))
