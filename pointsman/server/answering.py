"""Answers the questions of `wire/questions.py`: one function for each, run in the engine's thread between two steps.

    @answers(Explain)
    def _explain(host: Host, request_id: str) -> RequestExplanation: ...

A function gets the fields of its question as arguments. mypy checks the arguments and the answer against the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from pointsman.core.errors import UnknownRequest
from pointsman.engine.engine import Engine
from pointsman.engine.pausing import PauseChoice
from pointsman.engine.pulse import Pulse, PulseReading
from pointsman.engine.stats import EngineStats, read_stats
from pointsman.server.outbox import RemoteMailbox
from pointsman.server.wire.questions import (
    Explain,
    ExplainAll,
    Film,
    IsPaused,
    LeaveFilm,
    Pause,
    Question,
    RequestExplanation,
    ResetPrefixCache,
    Resume,
    SetMaxNumActiveSeqs,
    SetPriority,
    Stats,
    TakePulse,
)
from pointsman.web.live import LiveFilm

AnswerT = TypeVar("AnswerT")
Fields = ParamSpec("Fields")


@dataclass(frozen=True, slots=True)
class Host:
    """The objects of the engine process from which questions are answered."""

    engine: Engine
    mailboxes: Mapping[int, RemoteMailbox]
    """Mailboxes of unfinished requests, keyed by the API process's key of each request, in the order in which the
    requests arrived."""
    live: LiveFilm
    pulse: Pulse


AnswerFunction: TypeAlias = Callable[Concatenate[Host, Fields], AnswerT | Future[AnswerT]]
"""A function that returns the answer, or a future if the engine must run further steps before it can answer."""

_FUNCTIONS: dict[Callable[..., Question[Any]], Callable[..., Any]] = {}


def answers(
    question: Callable[Fields, Question[AnswerT]],
) -> Callable[[AnswerFunction[Fields, AnswerT]], AnswerFunction[Fields, AnswerT]]:
    """Decorator: registers the function that answers questions of the class `question`."""

    def register(function: AnswerFunction[Fields, AnswerT]) -> AnswerFunction[Fields, AnswerT]:
        _FUNCTIONS[question] = function
        return function

    return register


def answer(host: Host, question: Question[AnswerT]) -> AnswerT | Future[AnswerT]:
    """The answer to a question, or a future that will have the answer.

    Raises:
        The exceptions that the question's class documents.
    """
    values = [getattr(question, one.name) for one in fields(question)]
    found: AnswerT | Future[AnswerT] = _FUNCTIONS[type(question)](host, *values)
    return found


# ------------------------------------------------------------------------------------------------- requests


@answers(Explain)
def _explain(host: Host, request_id: str) -> RequestExplanation:
    for mailbox in list(host.mailboxes.values()):  # a copy, as the writer's thread removes finished requests
        if mailbox.request.request_id == request_id:
            return explain(host.engine, mailbox)
    raise UnknownRequest(f"no request {request_id!r} is waiting, parked or running; it may have ended")


@answers(ExplainAll)
def _explain_all(host: Host) -> list[RequestExplanation]:
    return [
        explain(host.engine, mailbox)
        for mailbox in list(host.mailboxes.values())
        if host.engine.scheduler.get_request(mailbox.request.request_id) is not None
    ]


@answers(SetPriority)
def _set_priority(host: Host, request_ids: tuple[str, ...], priority: int) -> list[str]:
    scheduler, now = host.engine.scheduler, host.engine.clock()
    known = [one for one in request_ids if scheduler.get_request(one) is not None]
    for request_id in known:
        scheduler.set_priority(request_id, priority, now)
    return known


# ------------------------------------------------------------------------------------------------- operation


@answers(Pause)
def _pause(host: Host, mode: PauseChoice, clear_cache: bool) -> Future[None]:
    return host.engine.pause(mode, clear_cache=clear_cache)


@answers(Resume)
def _resume(host: Host) -> None:
    host.engine.resume()


@answers(IsPaused)
def _is_paused(host: Host) -> bool:
    return host.engine.is_paused


@answers(ResetPrefixCache)
def _reset_prefix_cache(host: Host, preempt_running: bool) -> None:
    host.engine.scheduler.reset_prefix_cache(host.engine.clock(), preempt_running=preempt_running)


@answers(SetMaxNumActiveSeqs)
def _set_max_num_active_seqs(host: Host, limit: int | None) -> int:
    host.engine.scheduler.set_max_num_active_seqs(limit, host.engine.clock())
    return host.engine.scheduler.config.num_sequence_slots


# ------------------------------------------------------------------------------------------------- observation


@answers(Stats)
def _stats(host: Host) -> EngineStats:
    return read_stats(host.engine, host.engine.clock())


@answers(Film)
def _film(host: Host, watcher: int) -> bytes:
    return host.live.take_records(watcher)


@answers(LeaveFilm)
def _leave_film(host: Host, watcher: int) -> None:
    host.live.remove_watcher(watcher)


@answers(TakePulse)
def _take_pulse(host: Host) -> PulseReading:
    return host.pulse.take_reading()


def explain(engine: Engine, mailbox: RemoteMailbox) -> RequestExplanation:
    """Returns the state of the request to which a mailbox belongs.

    Raises:
        UnknownRequest: the request has finished.
    """
    wanted, now = mailbox.request, engine.clock()
    explanation = engine.scheduler.explain(wanted.request_id)
    request = engine.scheduler.get_request(wanted.request_id)
    if request is None:
        raise UnknownRequest(f"request {wanted.request_id!r} has ended")
    return RequestExplanation(
        explanation=explanation,
        arrival_time=request.arrival_time,
        age=now - request.arrival_time,
        tenant=request.tenant,
        user=wanted.user,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_tokens - request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        priority=request.priority,
        ttft_target=request.ttft_target,
        retention=request.retention,
        deadline_in=None if wanted.deadline is None else wanted.deadline - now,
        waiting_for=None if explanation.since is None else now - explanation.since,
    )
