"""Questions to an engine: classes with the arguments, the type of the answer, and the engines to ask.

    explanation = await fleet.ask(Explain("cmpl-1"))    # a RequestExplanation

Question objects are pickled to the engine process. The base class decides which engines of a fleet get a question:

    Question           all living engines; `merge` combines their answers into one
    OneEngineQuestion  the engine that the caller names
    RequestQuestion    the engine that has the request

A new question needs its class here, a function that answers it (`server/answering.py`) and its route. The client, the
fleet and the engine process forward all questions in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from pointsman.engine.pulse import PulseReading
from pointsman.engine.stats import EngineStats

if TYPE_CHECKING:
    from pointsman.core import Explanation
    from pointsman.engine.pausing import PauseChoice

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class Question(Generic[AnswerT]):
    """A question or command to an engine, which answers it between two steps. A fleet asks all living engines."""

    def merge(self, answers: Mapping[int, AnswerT]) -> AnswerT:
        """Combine the engines' answers into the answer of a fleet: by default the answer of the engine with the lowest
        number.

        Args:
            answers: the answers of the engines, by their numbers in ascending order; at least one.
        """
        return next(iter(answers.values()))


@dataclass(frozen=True, slots=True)
class OneEngineQuestion(Question[AnswerT]):
    """A question to one engine, which the caller chooses."""


@dataclass(frozen=True, slots=True)
class RequestQuestion(Question[AnswerT]):
    """A question to the engine that has a request."""

    request_id: str


# ------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """The scheduler's explanation of a request, and further facts for an operator."""

    explanation: Explanation
    arrival_time: float
    age: float
    """Seconds since the request's arrival."""
    tenant: str
    user: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    priority: int
    ttft_target: float | None
    retention: float | None
    deadline_in: float | None
    """Seconds until the request's deadline; None: no deadline."""
    waiting_for: float | None
    """Seconds since the current reason to wait began; None: the request does not wait, or was not considered yet."""
    engine: int = 0
    """Number of the engine that has the request."""


@dataclass(frozen=True, slots=True)
class Explain(RequestQuestion[RequestExplanation]):
    """The state of a request, the reason and the duration of its wait, and the requests that it waits for.

    Raises:
        UnknownRequest: there is no such request, or it has finished.
    """

    def merge(self, answers: Mapping[int, RequestExplanation]) -> RequestExplanation:
        """The answer of the one engine that has the request, with the number of this engine."""
        ((engine, answer),) = answers.items()
        return replace(answer, engine=engine)


@dataclass(frozen=True, slots=True)
class ExplainAll(Question[list[RequestExplanation]]):
    """`Explain` of every unfinished request, in the order in which they reached the API process."""

    def merge(self, answers: Mapping[int, list[RequestExplanation]]) -> list[RequestExplanation]:
        """All requests, with the numbers of their engines; sorted by arrival if there are several engines."""
        found = [replace(one, engine=engine) for engine, some in answers.items() for one in some]
        return found if len(answers) == 1 else sorted(found, key=lambda one: one.arrival_time)


@dataclass(frozen=True, slots=True)
class SetPriority(Question[list[str]]):
    """Change the priority of requests. A queued request changes its place in the queue immediately. The answer lists
    the known ids; the other ids are of requests that have finished or never existed.

    Raises:
        ValueError: the priority is not an integer of 64 bits.
    """

    request_ids: tuple[str, ...]
    priority: int

    def merge(self, answers: Mapping[int, list[str]]) -> list[str]:
        """The ids that at least one engine knows, in the order of `request_ids`."""
        known = {request_id for some in answers.values() for request_id in some}
        return [request_id for request_id in self.request_ids if request_id in known]


# ------------------------------------------------------------------------------------------------- operation


@dataclass(frozen=True, slots=True)
class Pause(Question[None]):
    """Start no request until `Resume`. The engine answers when no step runs. See `Engine.pause`.

    Raises:
        ResumedError: the engine was resumed meanwhile.
    """

    mode: PauseChoice
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class Resume(Question[None]):
    """Continue after a pause; no effect without a pause."""


@dataclass(frozen=True, slots=True)
class IsPaused(Question[bool]):
    """Whether the engine was paused, and not resumed since."""

    def merge(self, answers: Mapping[int, bool]) -> bool:
        """Whether any engine is paused."""
        return any(answers.values())


@dataclass(frozen=True, slots=True)
class ResetPrefixCache(Question[None]):
    """Drop all cached prefixes."""

    preempt_running: bool
    """Whether running requests are preempted and recompute their KV; False: they keep their KV, no longer cached."""


@dataclass(frozen=True, slots=True)
class SetMaxNumActiveSeqs(Question[int]):
    """Change the maximum number of requests that run concurrently. The answer is the new limit.

    Raises:
        ConfigError: the limit is out of range.
    """

    limit: int | None
    """Maximum number of requests that run concurrently; None: `max_num_seqs`."""


# ------------------------------------------------------------------------------------------------- observation


@dataclass(frozen=True, slots=True)
class Stats(OneEngineQuestion[EngineStats]):
    """Counters and gauges of engine and scheduler, all read between the same two steps."""


@dataclass(frozen=True, slots=True)
class Film(OneEngineQuestion[bytes]):
    """The new records for a watcher of the scheduler's live film, see `web/live.py`. A watcher's first question begins
    its film, and `LeaveFilm` ends it.

    Raises:
        TooManyWatchers: the maximum number of watchers is reached.
    """

    watcher: int


@dataclass(frozen=True, slots=True)
class LeaveFilm(OneEngineQuestion[None]):
    """End the film of a watcher."""

    watcher: int


@dataclass(frozen=True, slots=True)
class TakePulse(OneEngineQuestion[PulseReading]):
    """The times of the engine's steps, for the heartbeat."""
