"""A film in words: what was decided in a step, and the life of one request, with what it waited for and how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from pointsman.core.observe.explain import CAUSES as REASONS
from pointsman.core.observe.explain import lacking
from pointsman.core.observe.film_format import Op
from pointsman.web.film import Event, Film, State

CAUSES = {
    "parked": "the host parked it",
    "reset": "the prefix cache was reset, and what runs is computed again",
    "unsampled": "no token came for it from a step that samples",
}
Before = TypeVar("Before", str, None)
CHOICES = {
    "latest": "was admitted last of those that run",
    "lowest-priority": "is the least urgent of those that run",
    "least-cost": "costs least to compute again, of those that free enough",
}
"""Why the victim is this one, by the policy that chose it."""
RECOVERIES = ("", ", and what is evicted of it is computed again", ", and what is evicted of it is swapped")
RESOURCES = {reason.value: cause.resource for reason, cause in REASONS.items()}
"""What is short, by the name of the reason."""
TEXTS = {reason.value: cause.text for reason, cause in REASONS.items()}
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
                reason, missing = names["reasons"][fields["reason"]], fields["missing"]
                resource = RESOURCES.get(reason)
                lacks = f" for {lacking(missing, resource)}" if missing and resource else ""
                holder = f"; {self.name(fields['holder'] - 1)} holds most" if fields["holder"] else ""
                return f"{who} waits{lacks}: {meaning_of(reason)}{holder}"
            case Op.ADMITTED:
                verb = "resumes" if fields["resumed"] else "starts"
                cached = f", {counted(fields['cached'], 'token')} of it cached" if fields["cached"] else ""
                return f"{who} {verb}{cached}"
            case Op.PREEMPTED:
                lost, cached = fields["lost"], fields["cached"]
                share = "none" if not cached else "all" if cached == lost else f"{cached:,}"
                kept = f", {share} of it still cached then" if lost else ""
                return (
                    f"{who} is preempted: {self._cause(event)}; it gives up the KV of {counted(lost, 'token')}{kept}"
                    f"{RECOVERIES[fields['recovery']]}"
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

    def _cause(self, event: Event) -> str:
        """Whose need a preemption was, and why it is this request."""
        fields = event.fields
        assert event.request is not None
        cause: str = self._names["causes"][fields["cause"]]
        if not fields["by"]:
            return CAUSES.get(cause, cause)
        by, missing = fields["by"] - 1, fields["missing"]
        if not missing:
            return f"{self.name(by)} is more urgent and takes its place"
        asking = "it" if by == event.request else self.name(by)
        need = f"{asking} needs a block{' itself' if asking == 'it' else ''}, and none is free"
        if missing > 1:
            need = f"{missing:,} blocks are missing, the first of them for {'itself' if asking == 'it' else asking}"
        chooser = fields["chooser"]
        rule = CHOICES.get(chooser, f"is the choice of the policy {chooser}")
        return f"{need}; {self.name(event.request)} {rule}"

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
class Preemption:
    """A request that lost its row, and what that cost."""

    event: Event
    frame: int
    """Which it led to; that behind the last one, if no step follows."""
    resumed_after: float | None = None
    """Seconds; None: it has not."""
    num_recomputed_tokens: int | None = None
    """Of the tokens whose KV it gave up, those that were not found in the cache when it resumed."""

    def cost(self) -> str:
        """In words."""
        if self.resumed_after is None or self.num_recomputed_tokens is None:
            return "it did not resume"
        recomputed = counted(self.num_recomputed_tokens, "token")
        return f"it resumed after {self.resumed_after:.3f} s, with {recomputed} to compute again"


def preemptions_of(film: Film) -> list[Preemption]:
    """All of a film, in order."""
    found: list[Preemption] = []
    open_ones: dict[int, Preemption] = {}
    frame = 0
    for event in film.events(0, None):
        if event.op is Op.STEP or event.op is Op.STEPS:
            frame += 1
        elif event.request is None:
            continue
        elif event.op is Op.PREEMPTED:
            open_ones[event.request] = Preemption(event, frame)
            found.append(open_ones[event.request])
        elif event.op is Op.ADMITTED:
            before = open_ones.get(event.request)
            if before is not None:
                before.resumed_after = event.time - before.event.time
                before.num_recomputed_tokens = max(0, before.event.fields["lost"] - event.fields["cached"])
    return found


@dataclass(slots=True)
class Life:
    """One request from the first to the last that a film says of it."""

    number: int
    moments: list[tuple[float, str]] = field(default_factory=list)
    """(seconds, what happened)."""
    waited: dict[str, float] = field(default_factory=dict)
    """Seconds in the queue or parked, by reason, the longest first."""
    ran: float = 0.0
    """Seconds as a running request."""

    @property
    def total_waited(self) -> float:
        """Seconds."""
        return sum(self.waited.values())


def life_of(film: Film, number: int) -> Life:
    """Everything about a request; how long it waited, and why: behind others, what these lacked."""
    teller, life = Teller(film), lives_of(film)[number]
    num_lost = 0
    for event in film.events(0, None):
        if event.request == number:
            sentence = teller.sentence(event)
            if event.op is Op.PREEMPTED:
                num_lost = event.fields["lost"]
            elif event.op is Op.ADMITTED and num_lost and sentence:
                sentence += f", {counted(max(0, num_lost - event.fields['cached']), 'token')} to compute again"
            if sentence:
                life.moments.append((event.time, sentence))
    return life


def lives_of(film: Film) -> list[Life]:
    """How long each request of a film ran and waited, and why, by number; without the moments."""
    found = _Lives(film)
    for event in film.events(0, None):
        found.add(event)
    return found.end()


class _Lives:
    """One pass over a film. What requests wait behind others is counted for all of them together, by what the first of
    the queue lacks, and each takes the difference between the beginning of its wait and the end."""

    def __init__(self, film: Film) -> None:
        self._film = film
        self._reasons = film.header["names"]["reasons"]
        self._lives = [Life(number) for number in range(len(film.requests))]
        self._behind: dict[str, float] = {}
        self._blocked = BEHIND
        self._doing: dict[int, tuple[str, float, dict[str, float]]] = {}
        """What each unfinished request does: "running", or why it waits; since when; and what `_behind` was then."""
        begin = film.beginning()
        self._now = begin.time
        for number, one in begin.requests.items():
            if number in begin.running:
                self._begin(number, "running")
            else:
                self._begin(number, one.reason or (one.status if number in begin.parked else BEHIND))

    def add(self, event: Event) -> None:
        self._pass(event.time)
        if event.op is Op.STEP or event.op is Op.STEPS:
            blocked = event.fields["blocked"]
            self._blocked = f"{BEHIND}, {self._reasons[blocked - 1]}" if blocked else BEHIND
        elif event.request is not None:
            after = reason_after(self._film, event, None)
            if after is not None:
                self._end(event.request)
                if after:
                    self._begin(event.request, after)

    def end(self) -> list[Life]:
        """At the end of the film."""
        self._pass(max(self._now, self._film.end))
        for number in list(self._doing):
            self._end(number)
        for life in self._lives:
            life.waited = dict(sorted(life.waited.items(), key=lambda item: -item[1]))
        return self._lives

    def _pass(self, now: float) -> None:
        if now != self._now:
            self._behind[self._blocked] = self._behind.get(self._blocked, 0.0) + now - self._now
            self._now = now

    def _begin(self, number: int, reason: str) -> None:
        self._doing[number] = reason, self._now, dict(self._behind) if reason == BEHIND else {}

    def _end(self, number: int) -> None:
        reason, since, behind = self._doing.pop(number, ("", self._now, {}))
        life = self._lives[number]
        if reason == "running":
            life.ran += self._now - since
        elif reason != BEHIND:
            _add(life.waited, reason, self._now - since)
        else:
            for name, seconds in self._behind.items():
                _add(life.waited, name, seconds - behind.get(name, 0.0))


def _add(waited: dict[str, float], reason: str, seconds: float) -> None:
    if seconds:
        waited[reason] = waited.get(reason, 0.0) + seconds


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


def meaning_of(reason: str) -> str:
    """A reason for waiting, as the keys of `Life.waited` have it, in words."""
    first, _, blocked = reason.partition(", ")
    if first == BEHIND:
        of_first = f"; of the first in the queue: {meaning_of(blocked)}" if blocked else ""
        return f"it was not its turn{of_first}"
    return TEXTS.get(reason, reason.replace("_", " "))


def counted(count: int, what: str) -> str:
    """A number of things, in words."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
