"""Who holds an adapter slot, and who must be passed over: the rules of `max_loras`, from the ledger alone."""

from __future__ import annotations

from collections.abc import Iterable

from pointsman.core import Adapter, SchedulerConfig

from .ledger import Entry, Place
from .partials import says_so
from .shadow import require


class HeldSlots:
    """The adapters that run, the one that came first in front."""

    def __init__(self) -> None:
        self.order: list[Adapter] = []

    def keep(self, running: Iterable[Entry]) -> None:
        """Only these run now; who has gone gives back its slot."""
        left = {entry.request.adapter for entry in running}
        self.order = [adapter for adapter in self.order if adapter in left]

    def take(self, adapter: Adapter | None) -> None:
        if adapter is not None and adapter not in self.order:
            self.order.append(adapter)


def check_passing(config: SchedulerConfig, held: list[Adapter], queue: list[Entry], admitted: list[Entry]) -> None:
    """Who is admitted is who comes first in the queue, without those that must be passed over, and nobody else is.

    `held` are the adapters that run when the queue is asked, the one that came first in front. Counts in the ledger
    who was overtaken.
    """
    held, claims = list(held), set[Adapter]()
    expected = list(admitted)
    passed: list[Entry] = []
    for entry in queue:
        if not expected:
            break
        adapter = entry.request.adapter
        name = entry.request.request_id
        if entry is not expected[0] and _has_slot(config, entry, held, len(claims)) and says_so(entry):
            patience = config.max_overtakes
            require(entry.num_overtaken < patience, f"{name} is overtaken, {entry.num_overtaken} of {patience} times")
            passed.append(entry)
        elif _has_slot(config, entry, held, len(claims)):
            require(entry is expected[0], f"{name} is next, {expected[0].request.request_id} was admitted")
            del expected[0]
            for other in passed:
                other.num_overtaken += 1
            if adapter is not None and adapter not in held:
                held.append(adapter)
        else:
            require(entry is not expected[0], f"{name} is admitted with {adapter}; {held} run and {claims} have claims")
            passed.append(entry)
            if adapter is not None and adapter not in held and entry.num_overtaken >= config.max_overtakes:
                claims.add(adapter)
    require(not expected, f"{expected} are admitted, and were not in the queue")


def _has_slot(config: SchedulerConfig, entry: Entry, held: list[Adapter], num_claims: int) -> bool:
    adapter = entry.request.adapter
    if adapter is None:
        return True
    if adapter in held:
        return entry.ran_before or adapter not in held[:num_claims]
    return len(held) < config.max_loras


def lacks_slot(config: SchedulerConfig, head: Entry, running: list[Entry]) -> bool:
    """Whether the head of the queue has no slot beside what runs. Nobody before it can have a claim."""
    held = {entry.request.adapter for entry in running if entry.place is Place.RUNNING} - {None}
    adapter = head.request.adapter
    return adapter is not None and adapter not in held and len(held) >= config.max_loras
