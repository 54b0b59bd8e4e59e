"""The ledger: what the tests know about each request, from calls and outputs alone."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from pointsman.core import EncoderInput, Request, RequestStatus, SchedulerStats

from .faults import ShadowFault, require
from .shadow import Reference
from .transfers import Transfer


class Place(enum.Enum):
    """Where a request is; `check` compares it with the scheduler's own status."""

    QUEUED = "queued"
    PARKED = "parked"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Kept:
    """The blocks that a request left in the prefix cache when it lost its row."""

    num_tokens: int
    marks: tuple[int, int]  # evictions and withdrawals so far; later ones may have hit these blocks


class Part(NamedTuple):
    """A further part of a prompt."""

    tokens: list[int]
    max_tokens: int
    inputs: list[EncoderInput]  # counted from its own first token


@dataclass(slots=True, eq=False)
class Entry:
    """The ledger's entry of one request."""

    request: Request
    reference: Reference  # of its present part
    place: Place
    number: int  # order of adding
    num_output: int = 0
    num_computed: int = 0
    ran_before: bool = False  # lost its row once, so that its next admission is a resumption
    last_admission: int = 0
    previous_admission: int = 0
    admitted_step: int = -1
    num_preemptions: int = 0
    kept: Kept | None = None
    num_withdrawals: int = 0  # of prefixes, when it was admitted
    num_bypassed: int = 0  # requests behind it that were admitted since it last lost its row
    num_verified: int = 0  # drafts that have come back
    num_accepted: int = 0  # accepted ones among them
    more_input: bool = False  # further parts of its prompt may come
    parts: list[Part] = field(default_factory=list)  # not taken yet
    prompt: list[int] = field(default_factory=list)
    inputs: list[EncoderInput] = field(default_factory=list)  # of the prompt
    parked_for: str = ""
    awaits_input: bool = False  # its present part is complete, and there is no other
    stale_until: int = -1  # steps up to this one belong to a complete part: their samples are dropped
    load: Transfer | None = None  # what it waits for
    load_since: float = 0.0
    held_for: int | None = None  # the load whose blocks it holds, or held last
    num_lost: int = 0  # tokens that were computed when it last lost its row
    events: list[tuple[str, float, str]] = field(default_factory=list)  # events with times and details
    num_admitted: int = 0  # tokens that it had at its last admission
    loss: int = 0  # number of this loss of a row, over all requests

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output

    @property
    def waits_for_caller(self) -> bool:
        """Whether the request waits for its caller, in truth or by its parking reason."""
        return self.place is Place.PARKED and self.parked_for == "waiting_for_streaming_req"

    @property
    def waits_for_input_alone(self) -> bool:
        """Whether the request is parked only for the next part of its prompt."""
        return self.waits_for_caller and self.awaits_input

    def is_part_over(self) -> bool:
        """Whether the end of the request's current output ends a prompt part and not the request."""
        if not self.more_input and not self.parts:
            return False
        return self.reference.status is not RequestStatus.FINISHED_LENGTH or "max_tokens" in self.reference.details

    def runs_since(self, admission: int) -> bool:
        """Whether the request has run without interruption since an admission."""
        return self.place is Place.RUNNING and self.last_admission == admission

    def queue_key(self, order: str, loss: int = 0) -> tuple[float, ...]:
        """Sort key of the queue; `loss`: number of the loss, as if the request had just lost its row. Within a class
        resumed requests come before new ones; resumed ones by their last admission ("fcfs-front": the last to lose its
        row first; "priority-by-arrival": no difference), new ones by arrival.
        """
        urgency = self.request.priority if order.startswith("priority") else 0
        arrival = self.request.arrival_time
        if not (self.ran_before or loss) or order == "priority-by-arrival":
            return (urgency, 1, arrival, self.number)
        if order == "fcfs-front":
            return (urgency, 0, -(loss or self.loss), self.number)
        return (urgency, 0, self.last_admission, self.number)


def place_of(status: RequestStatus) -> Place:
    """The place of a status."""
    if status.is_finished:
        return Place.ENDED
    if status.is_parked:
        return Place.PARKED
    return Place.RUNNING if status is RequestStatus.RUNNING else Place.QUEUED


@dataclass(slots=True)
class Tally:
    """The expected statistics, counted from calls and outputs."""

    num_added: int = 0
    num_refused: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_preempted_by_parking: int = 0
    num_preempted_by_reset: int = 0
    num_preempted_unsampled: int = 0
    num_proposed_tokens: int = 0
    num_draft_tokens: int = 0
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    resumed_prefix_queries: int = 0
    resumed_prefix_hits: int = 0
    num_recomputed_tokens: int = 0
    num_loads: int = 0
    num_failed_loads: int = 0
    num_loaded_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)

    def admit(self, *, resumed: bool, queried: int, hit: int, recomputed: int) -> None:
        """Count an admission; negative numbers undo an admission of a failed step."""
        if resumed:
            self.resumed_prefix_queries += queried
            self.resumed_prefix_hits += hit
            self.num_recomputed_tokens += recomputed
        else:
            self.prefix_queries += queried
            self.prefix_hits += hit

    def check(self, stats: SchedulerStats, live: list[Entry], blocks_in_use: set[int] | None) -> None:
        """Compare counters with the tally, and gauges with the places of the live requests."""
        for name in self.__dataclass_fields__:
            if name != "finished" and getattr(stats, name) != getattr(self, name):
                told, counted = getattr(stats, name), getattr(self, name)
                raise ShadowFault(f"the statistics say {name} {told}, counted {counted}")
        finished = {reason: count for reason, count in stats.finished.items() if count}
        require(finished == dict(self.finished), f"the statistics say finished {finished}, counted {self.finished}")
        places = Counter(entry.place for entry in live)
        require(stats.num_running == places[Place.RUNNING], f"num_running {stats.num_running}, counted {places}")
        require(stats.num_waiting == places[Place.QUEUED], f"num_waiting {stats.num_waiting}, counted {places}")
        parked = Counter(entry.request.status.value for entry in live if entry.place is Place.PARKED)
        require(stats.num_parked == dict(parked), f"num_parked {stats.num_parked}, counted {dict(parked)}")
        by_reason = sum(stats.num_waiting_by_reason.values())
        require(by_reason == stats.num_waiting, f"{stats.num_waiting} wait, {by_reason} of them for some reason")
        others = stats.num_displaced + stats.num_preempted_by_parking + stats.num_preempted_by_reset
        others += stats.num_preempted_unsampled
        require(others <= stats.num_preemptions, f"{others} preemptions have a cause, of {stats.num_preemptions}")
        if blocks_in_use is not None:
            used = stats.num_blocks - stats.num_free_blocks
            require(used == len(blocks_in_use), f"{used} blocks are held, the outputs gave out {sorted(blocks_in_use)}")
        per_pos = stats.num_accepted_tokens_per_pos
        require(sum(per_pos) == stats.num_accepted_tokens, f"{per_pos} do not add up to the accepted drafts")
        require(
            list(per_pos) == sorted(per_pos, reverse=True), f"a later draft is accepted without an earlier: {per_pos}"
        )
        usage = 1 - stats.num_free_blocks / stats.num_blocks
        require(abs(stats.kv_cache_usage - usage) < 1e-9, f"kv_cache_usage {stats.kv_cache_usage}, expected {usage}")
        require(stats.num_cached_free_blocks <= stats.num_free_blocks, "more cached free blocks than free ones")
