"""Tells a film in words: the decisions of a step, and the life of a request with the reasons and times of its waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pointsman.core.observe.explain import CAUSES, lacking
from pointsman.core.observe.film_format import Op
from pointsman.web import words
from pointsman.web.film import Event, Film, State
from pointsman.web.words import BEHIND

Before = TypeVar("Before", str, None)
RESOURCES = {reason.value: cause.resource for reason, cause in CAUSES.items()}
"""The resource that is missing, by the name of the reason for waiting."""
TEXTS = {reason.value: cause.text for reason, cause in CAUSES.items()}


class Teller:
    """Puts the events of a film into sentences."""

    def __init__(self, film: Film) -> None:
        self._film = film
        self._names = film.header["names"]

    def name(self, number: int) -> str:
        """The id of a request."""
        return self._film.requests[number].request_id

    def sentence(self, event: Event) -> str | None:
        """The sentence of an event; None: the event is a step, or another kind of event without a sentence."""
        template = words.SENTENCES.get(event.op)
        return None if template is None else words.fill(template, self._sentence_values(event))

    def _sentence_values(self, event: Event) -> dict[str, Any]:
        """The values for the sentence of an event."""
        fields, names = event.fields, self._names
        if event.request is None:
            return {**fields, "num_active": fields.get("limit", 0) - 1}
        request = self._film.requests[event.request]
        values: dict[str, Any] = {**fields, "request": request.request_id}
        match event.op:
            case Op.ADDED:
                values |= {"tenant": request.tenant, "num_prompt_tokens": request.num_prompt_tokens}
            case Op.PARKED:
                values["why"] = spaced(names["statuses"][fields["status"]])
            case Op.DEFERRED:
                reason, missing = names["reasons"][fields["reason"]], fields["missing"]
                resource = RESOURCES.get(reason)
                values["why"] = meaning_of(reason)
                values["lacks"] = lacking(missing, resource) if missing and resource else ""
                values["holder"] = self.name(fields["holder"] - 1) if fields["holder"] else ""
            case Op.PREEMPTED:
                lost, cached = fields["lost"], fields["cached"]
                share = words.SHARES["none" if not cached else "all"] if cached in (0, lost) else f"{cached:,}"
                values["why"] = self._preemption_cause(event)
                values["share"] = share if lost else ""
                values["recovery"] = words.RECOVERIES[fields["recovery"]]
            case Op.FINISHED:
                values["why"] = names["finish_reasons"][fields["reason"]]
        return values

    def _preemption_cause(self, event: Event) -> str:
        """Text about a preemption: the request that needed the resources, and why this victim was chosen."""
        fields = event.fields
        assert event.request is not None
        cause: str = self._names["causes"][fields["cause"]]
        if not fields["by"]:
            return words.PREEMPTIONS.get(cause, cause)
        by, missing, chooser = fields["by"] - 1, fields["missing"], fields["chooser"]
        values = {
            "request": self.name(event.request),
            "by": self.name(by),
            "missing": missing,
            "several": missing > 1,
            "rule": words.RULES.get(chooser) or words.fill(words.OTHER_RULE, {"chooser": chooser}),
        }
        need = words.NEEDS["own" if by == event.request else "other"] if missing else words.MORE_URGENT
        return words.fill(need, values)

    def why(self, state: State, number: int) -> str:
        """Why a request that does not run is waiting."""
        one = state.requests[number]
        if number == state.blocker or number in state.skipped:
            holder = "" if one.holder is None else self.name(one.holder)
            return words.fill(words.WAITS["asked"], {"why": spaced(one.reason or one.status), "holder": holder})
        if number in state.parked:
            return spaced(one.status)
        if state.blocker is None:
            return words.WAITS["first"]
        return words.fill(words.WAITS["behind"], {"blocker": self.name(state.blocker)})

    def decided(self, frame: int) -> list[str]:
        """The sentences about the events that led to a frame's step, in order."""
        told = (self.sentence(event) for event in self._film.events(frame, frame + 1))
        return [sentence for sentence in told if sentence]


@dataclass(slots=True)
class Preemption:
    """The preemption of a request, and its cost."""

    event: Event
    frame: int
    """Index of the frame that follows the preemption; if no frame follows, the film's number of frames."""
    resumed_after: float | None = None
    """Seconds until the request resumed; None: it has not resumed."""
    num_recomputed_tokens: int | None = None
    """Number of tokens to recompute: their KV was released by the preemption, and was not in the cache when the request
    resumed."""

    def cost(self) -> str:
        """The cost of the preemption, in words."""
        if self.resumed_after is None or self.num_recomputed_tokens is None:
            return words.COSTS["open"]
        values = {"seconds": f"{self.resumed_after:.3f}", "num_again": self.num_recomputed_tokens}
        return words.fill(words.COSTS["resumed"], values)


def preemptions_of(film: Film) -> list[Preemption]:
    """All preemptions of a film, in order."""
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
    """One request, from its first event in a film to its last."""

    number: int
    moments: list[tuple[float, str]] = field(default_factory=list)
    """Events of the request, each as (time in seconds, sentence)."""
    waited: dict[str, float] = field(default_factory=dict)
    """Seconds that the request spent in the queue or parked, by reason, longest first."""
    ran: float = 0.0
    """Seconds for which the request ran."""

    @property
    def total_waited(self) -> float:
        """Total seconds in the queue or parked."""
        return sum(self.waited.values())


def life_of(film: Film, number: int) -> Life:
    """The events of a request, and its waits with their reasons. While a request waits behind other requests, its
    reason is the resource that the head of the queue lacks."""
    teller, life = Teller(film), lives_of(film)[number]
    num_lost = 0
    for event in film.events(0, None):
        if event.request == number:
            sentence = teller.sentence(event)
            if event.op is Op.PREEMPTED:
                num_lost = event.fields["lost"]
            elif event.op is Op.ADMITTED and num_lost and sentence:
                sentence += words.fill(words.AGAIN, {"num_again": max(0, num_lost - event.fields["cached"])})
            if sentence:
                life.moments.append((event.time, sentence))
    return life


def lives_of(film: Film) -> list[Life]:
    """One `Life` for each request of a film, in order of request number. Each has the time for which the request ran,
    and the time for which it waited by reason, but no `moments`."""
    found = _Lives(film)
    for event in film.events(0, None):
        found.add(event)
    return found.end()


class _Lives:
    """Computes the lives of all requests in one pass over a film. One set of sums, for all requests together, has the
    time that the queue was blocked, by the resource that its head lacked. A request that waits behind other requests
    gets the difference between these sums at the end and at the beginning of its wait."""

    def __init__(self, film: Film) -> None:
        self._film = film
        self._reasons = film.header["names"]["reasons"]
        self._lives = [Life(number) for number in range(len(film.requests))]
        self._behind: dict[str, float] = {}
        self._blocked = BEHIND
        self._doing: dict[int, tuple[str, float, dict[str, float]]] = {}
        """For each unfinished request: "running" or why it waits; the time at which that began; and a copy of `_behind`
        at that time."""
        begin = film.beginning()
        self._now = begin.time
        for number, one in begin.requests.items():
            if number in begin.running:
                self._begin(number, "running")
            else:
                self._begin(number, one.reason or (one.status if number in begin.parked else BEHIND))

    def add(self, event: Event) -> None:
        self._advance_to(event.time)
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
        """End the pass, and return the lives of all requests."""
        self._advance_to(max(self._now, self._film.end))
        for number in list(self._doing):
            self._end(number)
        for life in self._lives:
            life.waited = dict(sorted(life.waited.items(), key=lambda item: -item[1]))
        return self._lives

    def _advance_to(self, now: float) -> None:
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
            _add_seconds(life.waited, reason, self._now - since)
        else:
            for name, seconds in self._behind.items():
                _add_seconds(life.waited, name, seconds - behind.get(name, 0.0))


def _add_seconds(waited: dict[str, float], reason: str, seconds: float) -> None:
    if seconds:
        waited[reason] = waited.get(reason, 0.0) + seconds


def reason_after(film: Film, event: Event, before: Before) -> str | Before:
    """The state of a request after one of its events: "running", why it waits, or "" if it has finished; `before` if
    the event changes nothing."""
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
    """A reason for waiting (a key of `Life.waited`), in words."""
    first, _, blocked = reason.partition(", ")
    if first == BEHIND:
        return words.fill(words.NOT_ITS_TURN, {"first": meaning_of(blocked) if blocked else ""})
    return TEXTS.get(reason, spaced(reason))


def spaced(name: str) -> str:
    """The name of a reason or a status, as text."""
    return name.replace("_", " ")
