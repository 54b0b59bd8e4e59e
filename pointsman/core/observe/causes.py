"""What a reason to wait means: which resource is short, who holds it, and how to say it to a person.

`CAUSES` has an entry for every `Reason`. Nothing here is computed unless somebody asks for an explanation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pointsman.core.state.batch import Batch
from pointsman.core.state.reason import Holder, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus
from pointsman.core.step.request_table import Lifecycle

MAX_HOLDERS = 8
"""Most holders that an explanation names."""


class Cause(NamedTuple):
    """The meaning of a reason."""

    resource: str | None
    """What is short, as the unit of `missing` and `Holder.amount`; None: nothing that could be counted."""
    text: str
    """What is the matter, as the end of a sentence that begins "it waits: ..."."""
    holders: Callable[[Request, Batch, Lifecycle], list[Holder]]
    """Who holds the resource, the most first."""


PARKED_FOR: dict[RequestStatus, str] = {
    RequestStatus.WAITING_FOR_GRAMMAR: "its grammar is being compiled",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "its KV is on its way from elsewhere",
    RequestStatus.WAITING_FOR_STREAMING_REQ: "its caller has more input to send",
}
"""What a parked request waits for."""


def _nobody(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    return []


def _of_blocks(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    """The other running requests, by the KV blocks in their tables, and the transfers; what several share counts for
    each."""
    members = batch.members
    blocks = batch.num_slots[members.rows] // batch.block_size
    pairs = zip(members.requests, blocks.tolist(), strict=True)
    running = [Holder(other.request_id, n) for other, n in pairs if other is not request]
    return _most([*running, *_of_transfers(request, batch, life)])


def _of_transfers(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    """What is held without a row; the request that it was for may have ended."""
    holdings = life.transfers.holdings() if life.transfers is not None else []
    others = [holding for holding in holdings if holding.request is not request]
    return _most(Holder(holding.request_id, len(holding.blocks), transfer=holding.transfer_id) for holding in others)


def _of_seats(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    """The running requests, a seat each, the one that has run longest first; for one of them, those of the step."""
    output = life.last_output
    if request.row is None or output is None:
        return [Holder(other.request_id, 1) for other in batch.members.requests]
    return [Holder(other.request_id, 1) for other in output.requests if not other.is_finished]


def _of_budget(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    """The requests of the last step, by the tokens that they compute in it."""
    output = life.last_output
    if output is None:
        return []
    tokens = zip(output.requests, output.num_scheduled_tokens.tolist(), strict=True)
    return _most(Holder(other.request_id, n) for other, n in tokens if not other.is_finished)


def _of_adapters(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    """For every adapter that holds a slot, longest first: a request that runs with it, and how many do."""
    first: dict[object, str] = {}
    for other in batch.members.requests:
        first.setdefault(other.adapter, other.request_id)
    return [Holder(first[adapter], n, adapter.name) for adapter, n in life.adapters.held.items()]


def _of_prefills(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    """The running requests whose prompts are half done, the one that was admitted first in front."""
    return [Holder(other.request_id, 1) for other in batch.members.requests if other.phase == "prefill"]


def _of_embeddings(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    """The requests that hold entries of the encoder cache, by their embeddings; what several share counts for each."""
    encoder = life.encoder
    if encoder is None:
        return []
    held = {other: encoder.holds(other) for other in encoder.holders() if other is not request}
    return _most(Holder(r.request_id, sum(item.entry.num_embeddings for item in items)) for r, items in held.items())


def _of_encoder_budget(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    """The requests for whose inputs the last step computed embeddings, by how many."""
    output, counts = life.last_output, Counter[str]()
    for other, index in output.encoder_inputs if output is not None else ():
        if not other.is_finished:
            counts[other.request_id] += other.encoder_inputs[index].entry.num_embeddings
    return _most(Holder(name, count) for name, count in counts.items())


def _displacer(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    output = life.last_output
    admitted = output.admitted if output is not None else ()
    return [Holder(other.request_id, 0) for other in admitted if not other.is_finished]


def _before_it(request: Request, batch: Batch, life: Lifecycle) -> list[Holder]:
    """The request that is a wall to those behind it; none if it was not found yet: then the head of the queue."""
    wall = life.wall
    stands = wall is not None and wall is not request and wall in life.queue
    before = wall if wall is not None and stands else life.queue.peek()
    return [Holder(before.request_id, 0)]


def _most(holders: Iterable[Holder]) -> list[Holder]:
    return sorted(holders, key=lambda holder: -holder.amount)


_BLOCKS = "KV blocks"

CAUSES: dict[Reason, Cause] = {
    Reason.WATERMARK: Cause(_BLOCKS, "the KV blocks left are headroom for what runs (watermark)", _of_blocks),
    Reason.FULL_SEQUENCE: Cause(
        _BLOCKS, "its whole sequence does not fit beside what half-computed prompts are owed", _of_blocks
    ),
    Reason.DECODE_RESERVE: Cause(_BLOCKS, "the output that is expected of it would not fit", _of_blocks),
    Reason.BLOCKS: Cause(_BLOCKS, "the KV cache is full", _of_blocks),
    Reason.SEQUENCE_LIMIT: Cause("seats", "all seats are taken", _of_seats),
    Reason.BUDGET: Cause("tokens of the step's budget", "the step is full", _of_budget),
    Reason.PREEMPTION: Cause(
        None, "running requests ran out of KV blocks, and a step in which one gave way admits nobody", _of_blocks
    ),
    Reason.DISPLACEMENT: Cause(None, "a more urgent request got the room that was made in this step", _displacer),
    Reason.STATIC_BATCH: Cause(None, "the static batch still runs", _of_seats),
    Reason.ADAPTER_SLOTS: Cause(
        "adapter slots", "other adapters hold them, or who waited longer has claimed the next", _of_adapters
    ),
    Reason.PREFILL_FIRST: Cause(None, "prompts go before decoding, and the step is theirs", _of_budget),
    Reason.PARTIAL_PREFILLS: Cause("places", "as many prompts as allowed are half done", _of_prefills),
    Reason.ENCODER_BUDGET: Cause("embeddings", "the step's budget for its encoder inputs is spent", _of_encoder_budget),
    Reason.ENCODER_CACHE: Cause("embeddings", "others hold the encoder cache", _of_embeddings),
    Reason.PAUSED: Cause(None, "the scheduler is paused", _nobody),
    Reason.IN_FLIGHT: Cause(
        "samples", "steps in flight sample for it, and what they sample has to come back first", _nobody
    ),
    Reason.KV_CONNECTOR: Cause(None, "the connector has yet to say what KV it could load", _nobody),
    Reason.KV_ROOM: Cause(_BLOCKS, "the blocks that transfers may own are taken, and it has its turn", _of_transfers),
    Reason.KV_LOAD: Cause(None, "its KV is being loaded", _nobody),
    Reason.BEHIND: Cause(None, "it is not its turn", _before_it),
    Reason.PARKED: Cause(None, "it is parked", _nobody),
}


def sentence(request: Request, reason: Reason | None, missing: int, holders: list[Holder], life: Lifecycle) -> str:
    """What to tell a person who asks why a request does not advance."""
    name = request.request_id
    if reason is None:
        where = {"finished": "has ended", "waiting": "has not been tried in a step yet"}
        return f"{name} {where.get(request.phase, 'runs')}."
    cause = CAUSES[reason]
    text = PARKED_FOR.get(request.status, cause.text) if reason is Reason.PARKED else cause.text
    if reason is Reason.KV_LOAD and request._state.holding is not None:
        text += f" (transfer {request._state.holding.transfer_id})"
    if reason is Reason.BEHIND:
        before = life.requests[holders[0].request_id]
        why = before._state.deferral.reason if before._state.deferral is not None else None
        return f"{name} waits behind {before.request_id}" + (f", which waits: {CAUSES[why].text}." if why else ".")
    lacks = f" for {missing} more {cause.resource}" if missing and cause.resource else ""
    told = f"{name} waits{lacks}: {text}"
    if not holders:
        return f"{told}."
    named = ", ".join(_shown(holder) for holder in holders[:3])
    more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
    return f"{told}. Held by {named}{more}."


def _shown(holder: Holder) -> str:
    if holder.what:
        return f"adapter {holder.what} ({holder.request_id}, {holder.amount} running)"
    shown = f"{holder.request_id} ({holder.amount})" if holder.amount else holder.request_id
    return shown if holder.transfer is None else f"transfer {holder.transfer} of {shown}"
