"""A film in words: what was decided in a step, and the life of one request, with what it waited for and how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from pointsman.core.observe.film_format import Op
from pointsman.web.film import Event, Film, State

CAUSES = {
    "memory": "no block was free for a running request",
    "displaced": "a more urgent request takes its place",
    "parked": "the host parked it",
    "reset": "the prefix cache was reset, and what runs is computed again",
    "unsampled": "no token came for it from a step that samples",
}
Before = TypeVar("Before", str, None)
BEHIND = "behind others"
"""Waiting before it was asked for: the queue was blocked before it, or no step came."""


class Teller:
    """Puts the events of a film into sentences."""

    def __init__(self, film: Film) -> None:
        self._film = film
        self._names = film.header["names"]

    def name(self, number: int) -> str:
        """The id of a request."""
        return self._film.requests[number].request_id

    def sentence(self, event: Event) -> str | None:
        """What happened to a request, or to the scheduler as a whole; None: a step, or nothing worth a sentence."""
        fields, names = event.fields, self._names
        if event.request is None:
            if event.op is Op.FAILED:
                return f"{counted(fields['steps'], 'step')} failed and will be decided again"
            if event.op is Op.PAUSED:
                return ("resumed", "paused: nobody is admitted", "paused")[fields["mode"]]
            if event.op is Op.LIMITED:
                return (
                    f"at most {fields['limit'] - 1} requests run" if fields["limit"] else "no limit of active requests"
                )
            return None
        who, request = self.name(event.request), self._film.requests[event.request]
        match event.op:
            case Op.ADDED:
                tenant = f" of tenant {request.tenant}" if request.tenant else ""
                return f"{who} is added{tenant}: {counted(request.num_prompt_tokens, 'prompt token')}"
            case Op.REFUSED:
                return f"{who} is refused: {fields['why']}"
            case Op.PARKED:
                return f"{who} is parked: {names['statuses'][fields['status']].replace('_', ' ')}"
            case Op.DEFERRED:
                missing = f", {fields['missing']} missing" if fields["missing"] else ""
                holder = f"; {self.name(fields['holder'] - 1)} holds most" if fields["holder"] else ""
                return f"{who} waits: {names['reasons'][fields['reason']].replace('_', ' ')}{missing}{holder}"
            case Op.ADMITTED:
                verb = "resumes" if fields["resumed"] else "starts"
                cached = f", {counted(fields['cached'], 'token')} of it cached" if fields["cached"] else ""
                return f"{who} {verb}{cached}"
            case Op.PREEMPTED:
                cause = CAUSES[names["causes"][fields["cause"]]]
                return (
                    f"{who} is preempted: {cause}; it loses {counted(fields['lost'], 'token')}, {fields['cached']} of "
                    f"them still cached{('', ', to be computed again', ', to be swapped')[fields['recovery']]}"
                )
            case Op.ROLLED_BACK:
                return f"{who} waits again, since its step failed"
            case Op.FINISHED:
                why = names["finish_reasons"][fields["reason"]]
                detail = f" ({fields['detail']})" if fields["detail"] else ""
                return f"{who} finishes: {why}{detail}, {counted(fields['generated'], 'token')} generated"
            case Op.PRIORITY:
                return f"{who} gets priority {fields['priority']}"
            case Op.EXTENDED:
                return f"{who} has {counted(fields['prompt'], 'prompt token')} now"
            case Op.LOAD_STARTED:
                return f"{who} loads {counted(fields['tokens'], 'token')}"
            case Op.LOAD_FINISHED:
                verb = "lacks some of what it loads" if fields["failed"] else "has loaded"
                return f"{who} {verb}: {counted(fields['tokens'], 'token')}"
        return None

    def why(self, state: State, number: int) -> str:
        """Why a request that does not run waits."""
        one = state.requests[number]
        if number == state.blocker or number in state.skipped:
            holder = "" if one.holder is None else f", most of it held by {self.name(one.holder)}"
            return f"{(one.reason or one.status).replace('_', ' ')}{holder}"
        if number in state.parked:
            return one.status.replace("_", " ")
        return "not asked yet" if state.blocker is None else f"behind {self.name(state.blocker)}"

    def decided(self, frame: int) -> list[str]:
        """What led to a frame's step, in order."""
        told = (self.sentence(event) for event in self._film.events(frame, frame + 1))
        return [sentence for sentence in told if sentence]


@dataclass(slots=True)
class Life:
    """One request from the first to the last that a film says of it."""

    number: int
    moments: list[tuple[float, str]] = field(default_factory=list)
    """(seconds, what happened)."""
    waited: dict[str, float] = field(default_factory=dict)
    """Seconds in the queue or parked, by reason."""
    ran: float = 0.0
    """Seconds as a running request."""


def life_of(film: Film, number: int) -> Life:
    """Everything about a request; how long it waited, and why: behind others, what these lacked."""
    teller, life = Teller(film), Life(number)
    reasons = film.header["names"]["reasons"]
    reason, blocked = "", ""  # reason "": it is not there; "running"; or why it waits
    begin = film.beginning()
    since = begin.time
    if number in begin.running:
        reason = "running"
    elif number in begin.requests:
        reason = begin.requests[number].reason or (begin.requests[number].status if number in begin.parked else BEHIND)
    for event in film.events(0, None):
        _count_time(life, reason, blocked, event.time - since)
        since = event.time
        if event.op is Op.STEP or event.op is Op.STEPS:
            blocked = reasons[event.fields["blocked"] - 1] if event.fields["blocked"] else ""
        elif event.request == number:
            sentence = teller.sentence(event)
            if sentence:
                life.moments.append((event.time, sentence))
            reason = reason_after(film, event, reason)
    _count_time(life, reason, blocked, max(0.0, film.end - since))
    return life


def reason_after(film: Film, event: Event, before: Before) -> str | Before:
    """What a request does after an event of its own: "running", why it waits, "" if it is over; `before`: as before."""
    names, fields = film.header["names"], event.fields
    match event.op:
        case Op.QUEUED | Op.PREEMPTED | Op.ROLLED_BACK:
            return BEHIND
        case Op.PARKED:
            return str(names["statuses"][fields["status"]])
        case Op.DEFERRED:
            return str(names["reasons"][fields["reason"]])
        case Op.ADMITTED:
            return "running"
        case Op.FINISHED | Op.REFUSED:
            return ""
    return before


def _count_time(life: Life, reason: str, blocked: str, seconds: float) -> None:
    if reason == BEHIND and blocked:
        reason = f"{BEHIND}, {blocked}"
    if reason == "running":
        life.ran += seconds
    elif reason and seconds:
        life.waited[reason] = life.waited.get(reason, 0.0) + seconds


def counted(count: int, what: str) -> str:
    """A number of things, in words."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
