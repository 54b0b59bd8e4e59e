"""Checks which requests are skipped for lack of an adapter slot or embeddings, from the ledger and the outputs
alone."""

from __future__ import annotations

from collections.abc import Iterable

from pointsman.core import Adapter, EncoderEntry, SchedulerConfig, SchedulerOutput

from .embeddings import inputs_between
from .faults import require
from .ledger import Entry, Place
from .partials import bypass_bound, lacks_blocks, says_so


class HeldSlots:
    """The running adapters, the earliest first."""

    def __init__(self) -> None:
        self.order: list[Adapter] = []

    def keep(self, running: Iterable[Entry]) -> None:
        """Release all slots except those of these adapters."""
        left = {entry.request.adapter for entry in running}
        self.order = [adapter for adapter in self.order if adapter in left]

    def take(self, adapter: Adapter | None) -> None:
        if adapter is not None and adapter not in self.order:
            self.order.append(adapter)


def check_passing(
    config: SchedulerConfig,
    held: list[Adapter],
    queue: list[Entry],
    admitted: list[Entry],
    surely: set[Entry],
    unloaded: list[Entry],
) -> None:
    """The admitted requests are the first of the queue, without those that must be skipped, and no others. `held`: the
    running adapters when the queue is checked, the earliest first; `surely`: requests that did not lack embeddings;
    `unloaded`: requests that wait for their connector, or for blocks. Counts bypasses in the ledger.
    """
    held, claims = list(held), set[Adapter]()
    expected = list(admitted)
    passed: list[Entry] = []
    for entry in queue:
        if not expected:
            break
        if entry in unloaded:
            passed.append(entry)
            continue
        adapter = entry.request.adapter
        name = entry.request.request_id
        has_slot = _has_slot(config, entry, held, len(claims))
        if has_slot and entry is expected[0]:
            del expected[0]
            for other in passed:
                other.num_bypassed += 1
            if adapter is not None and adapter not in held:
                held.append(adapter)
            continue
        passed.append(entry)
        if has_slot:
            bound = bypass_bound(config)
            passes_blocks = bound > 0 and lacks_blocks(entry)
            sound = entry not in surely or says_so(entry) or passes_blocks
            require(sound, f"{name} is next, {expected[0].request.request_id} was admitted")
            patient = entry.num_bypassed < (bound if passes_blocks else config.max_overtakes)
            require(patient, f"{name} was bypassed {entry.num_bypassed} times, and is again")
        else:
            require(entry is not expected[0], f"{name} is admitted with {adapter}; {held} run and {claims} have claims")
            if adapter is not None and adapter not in held and entry.num_bypassed >= config.max_overtakes:
                claims.add(adapter)
    require(not expected, f"{expected} are admitted, and were not in the queue")


def lacks_no_embeddings(config: SchedulerConfig, entry: Entry, output: SchedulerOutput, running: list[Entry]) -> bool:
    """Whether all embeddings that a request may need next were available when the step was decided."""
    sizes = {item.entry: item.entry.num_embeddings for item in entry.request.encoder_inputs}
    if not sizes:
        return True
    spans = {
        request: (int(start), int(start) + int(count))
        for request, start, count in zip(
            output.requests, output.num_computed_tokens, output.num_scheduled_tokens, strict=True
        )
    }
    held = set[EncoderEntry]()
    for request, span in spans.items():
        held.update(item.entry for item in inputs_between(request, *span))
    for other in running:
        if other.request not in spans:  # its position may be in the middle of one
            at = other.num_computed
            held.update(item.entry for item in other.request.encoder_inputs if item.start < at < item.end)
    computed = {request.encoder_inputs[index].entry for request, index in output.encoder_inputs}
    budget = config.encoder_budget - sum(one.num_embeddings for one in computed)
    room = config.encoder_cache_size - sum(one.num_embeddings for one in held)
    whole = not config.enable_chunked_prefill and not entry.ran_before
    return (sum(sizes.values()) if whole else max(sizes.values())) <= min(budget, room)


def _has_slot(config: SchedulerConfig, entry: Entry, held: list[Adapter], num_claims: int) -> bool:
    adapter = entry.request.adapter
    if adapter is None:
        return True
    if adapter in held:
        return entry.ran_before or adapter not in held[:num_claims]
    return len(held) < config.max_loras


def lacks_slot(config: SchedulerConfig, head: Entry, running: list[Entry]) -> bool:
    """Whether the head of the queue has no slot beside the running adapters. No request before it can have a claim."""
    held = {entry.request.adapter for entry in running if entry.place is Place.RUNNING} - {None}
    adapter = head.request.adapter
    return adapter is not None and adapter not in held and len(held) >= config.max_loras
