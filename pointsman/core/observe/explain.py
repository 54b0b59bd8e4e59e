"""Explains why a request waits: the resource that it lacks, the requests that hold it, and since when.

A step defers a request, mostly in `step/admission.py`, and stores the `Reason`. `CAUSES` defines the meaning of each
`Reason`: the missing resource, the requests that hold it, and a text. Explanations are computed only on request of the
caller.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pointsman.core.config import SchedulerConfig
from pointsman.core.policy.guard import Replaced, head_of, replaced_among
from pointsman.core.state.documented import Documented
from pointsman.core.state.inputs import Adapter
from pointsman.core.state.output import SchedulerOutput
from pointsman.core.state.reason import Deferral, Holder, Reason, Recovery
from pointsman.core.state.request import Request
from pointsman.core.state.status import PauseMode, RequestEvent, RequestStatus
from pointsman.core.step.assembly import Parts

MAX_HOLDERS = 8
"""Maximum number of holders of the missing resource in an explanation."""
LACKING = "{missing:,} more {resource}"
"""Format of the text for the missing amount of a resource."""
_ENDING = re.compile(r"s\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(metaclass=Documented):
    """The state of a request, and why it does not advance."""

    request_id: str
    status: RequestStatus
    phase: str
    reason: Reason | None
    """The reason why the request waits; None if it has finished, if no step was scheduled since it was added, or if it
    runs and is in the newest step."""
    sentence: str
    """The explanation as text."""
    policy_words: str
    """The end of `sentence`, which comes from policies: the order's reason, and replaced policies. It may name
    tenants."""
    replaced_policies: tuple[Replaced, ...]
    """Policies of the scheduler that failed and were replaced by the default of their kind."""
    resource: str | None
    """The resource that the request lacks, such as "KV blocks" or "sequence slots": the unit of `missing` and of the
    holders' amounts. None: the reason has no countable resource."""
    holders: tuple[Holder, ...]
    """The holders of the resource, largest share first, at most 8. For sequence slots: running requests. For blocks:
    running requests and transfers. For the budget: the requests of the last step. For adapter slots: one request for
    each adapter. If the request only waits behind another request: this other request."""
    num_holders: int
    """The number of all holders of the resource, which may exceed the length of `holders`."""
    blocker: str | None
    """The request ID of the first of `holders`; None: there is none."""
    adapter_slots: dict[Adapter, int]
    """If adapter slots are missing: the adapters that hold the slots, longest first, each with its number of running
    requests."""
    missing: int
    """The amount of `resource` that the request lacked when a step last checked it; 0 without a countable resource. The
    last check was in the newest step, unless the request became the head of the queue after that step."""
    since: float | None
    """The time at which `reason` began, on the caller's clock. If the request waits behind others: the time at which it
    entered the queue. If it runs: the time of the first step that left it out. None without a reason."""
    position: int | None
    """The number of requests before this request in the queue; None: it is not in the queue."""
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    """The number of blocks that the request holds, in its row or for a load."""
    transfer: int | None
    """The transfer ID of the load for which the request waits; None: it waits for no load."""
    num_preemptions: int
    recovery: Recovery | None
    """The decision of `preemption_mode` while the request is preempted; otherwise None."""
    events: tuple[RequestEvent, ...]
    """The events of the request with their times; empty unless `log_request_events` is on."""


def explain(request: Request, parts: Parts, config: SchedulerConfig) -> Explanation:
    """Explain the state of a request: why it waits, which requests hold the missing resource, and since when."""
    table = parts.table
    own = _own_deferral(request, parts)
    why = own[0] if own is not None else why_left_out(request, parts, config)
    reason = why.reason if why else None
    position = table.queue.position(request) if request in table.queue else None
    if position and reason is not Reason.PAUSED and not _was_checked(request, position, parts):
        reason = Reason.BEHIND
    has_own = why is not None and reason is why.reason
    missing = why.missing if why is not None and has_own else 0
    holders = CAUSES[reason].holders(request, parts) if reason is not None else []
    holding = request._state.holding
    replaced = replaced_among(parts.policies)
    words = _order_reason(request, parts) if reason is Reason.BEHIND else ""
    words += "".join(f" {in_words(each)}" for each in replaced)
    return Explanation(
        request_id=request.request_id,
        status=request.status,
        phase=request.phase,
        reason=reason,
        sentence=_wait_sentence(request, reason, missing, holders, parts)
        + _recovery_sentence(request, parts)
        + _retention_sentence(request, parts)
        + words,
        policy_words=words,
        replaced_policies=replaced,
        resource=CAUSES[reason].resource if reason is not None else None,
        holders=tuple(holders[:MAX_HOLDERS]),
        num_holders=len(holders),
        blocker=holders[0].request_id if holders else None,
        adapter_slots=dict(parts.gates.adapters.held) if reason is Reason.ADAPTER_SLOTS else {},
        missing=missing,
        since=_start_of_reason(request, reason, own if has_own else None, parts),
        position=position,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=_num_held_blocks(request, parts),
        transfer=holding.transfer_id if holding is not None and holding.is_open else None,
        num_preemptions=request.num_preemptions,
        recovery=_recovery_of(request),
        events=request.events,
    )


def _start_of_reason(
    request: Request, reason: Reason | None, own: tuple[Deferral, float] | None, parts: Parts
) -> float | None:
    """The time at which the reason of the request began; `own` is the request's own deferral with its start."""
    if reason is None:
        return None
    if reason is Reason.BEHIND:
        return request.queued_at
    return own[1] if own is not None else parts.emission.left_out.since(request)


def _own_deferral(request: Request, parts: Parts) -> tuple[Deferral, float] | None:
    """The request's own deferral, with the time at which it began; None: it has none, but may wait behind other
    requests. A pause that affects the request precedes other deferrals."""
    pause, state = parts.admission.pause, request._state
    if pause is not None:
        is_held = request in parts.table.queue or (state.row is not None and pause.mode is PauseMode.ALL)
        if is_held:
            return Deferral(Reason.PAUSED, 0), max(pause.since, state.queued_at)
    if state.row is not None and parts.encoder is not None:
        return parts.encoder.deferral(request)
    own = parts.admission.last_deferral(request)
    return None if own is None else (own, state.deferred_since)


def _was_checked(request: Request, position: int, parts: Parts) -> bool:
    """Whether the request was checked although other requests are before it: it was skipped, or all requests before it
    were skipped."""
    table = parts.table
    return request in table.skipped or (request is table.blocker and position == len(table.skipped))


def _num_held_blocks(request: Request, parts: Parts) -> int:
    state = request._state
    if state.row is not None:
        return len(parts.kv.table(parts.batch, state.row))
    return 0 if state.holding is None else len(state.holding.blocks)


def find_holder(request: Request, reason: Reason, parts: Parts) -> str | None:
    """The ID of the request that holds the largest share of the missing resource, or of the request behind which
    `request` waits. None: there is none."""
    holders = CAUSES[reason].holders(request, parts)
    return holders[0].request_id if holders else None


def why_left_out(request: Request, parts: Parts, config: SchedulerConfig) -> Deferral | None:
    """Why a running request is not in the newest output, and the minimum amount that it lacks.

    None: the request is in the output, or has no row, or waited for samples that have returned since.
    """
    batch, output = parts.batch, parts.emission.last_output
    if request.row is None or output is None or request in output.requests:
        return None
    pending = int(batch.num_pending[request.row])
    if pending:
        return Deferral(Reason.IN_FLIGHT, pending)
    interval = parts.gates.interval
    if interval is not None and interval.held_last and request.phase == "prefill":
        return Deferral(Reason.PREFILL_INTERVAL, 0)
    decodes_alone = config.batching == "prefill-first" and request.phase != "prefill" and output.num_rows > 0
    if decodes_alone and _is_for_prompts(output):
        return Deferral(Reason.PREFILL_FIRST, 0)
    if output.total_num_scheduled_tokens >= config.max_num_batched_tokens:
        return Deferral(Reason.BUDGET, 1)
    if output.num_rows >= config.max_num_seqs:
        return Deferral(Reason.SEQUENCE_LIMIT, 1)
    if output.preempted:
        return Deferral(Reason.BLOCKS, int(batch.num_computed_tokens[request.row] >= batch.num_slots[request.row]))
    return Deferral(Reason.PREFILL_FIRST, 0) if decodes_alone else None  # prompts, each with one remaining token


def _is_for_prompts(output: SchedulerOutput) -> bool:
    """Whether a "prefill-first" step is for prompts and not for decode, judged by the rows of its output."""
    is_long = np.any(output.num_scheduled_tokens - output.num_draft_tokens > 1)
    return bool(output.admitted) or bool(is_long) or not bool(output.samples.all())


class Cause(NamedTuple):
    """The meaning of a `Reason`."""

    resource: str | None
    """The missing resource, which is the unit of `missing` and `Holder.amount`; None: nothing that can be counted."""
    text: str
    """The cause, as the end of a sentence that begins "it waits: ..."."""
    holders: Callable[[Request, Parts], list[Holder]]
    """The requests that hold the resource, largest share first."""
    remedy: str = ""
    """What usually helps if many requests wait for this reason; "": nothing does, or it depends on another request."""


PARKED_FOR: dict[RequestStatus, str] = {
    RequestStatus.WAITING_FOR_GRAMMAR: "its grammar is being compiled",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "its KV is being loaded",
    RequestStatus.WAITING_FOR_STREAMING_REQ: "its caller has more input to send",
}
"""The cause for which a parked request waits, by its status."""


def _no_holders(request: Request, parts: Parts) -> list[Holder]:
    return []


def _holders_of_blocks(request: Request, parts: Parts) -> list[Holder]:
    """The other running requests, and the transfers, with their numbers of KV blocks; a shared block counts for each
    holder."""
    batch, members = parts.batch, parts.batch.members
    blocks = parts.kv.num_blocks_of(batch, members.rows)
    pairs = zip(members.requests, blocks.tolist(), strict=True)
    running = [Holder(other.request_id, n) for other, n in pairs if other is not request]
    return _sorted_by_amount([*running, *_holders_of_transfers(request, parts)])


def _holders_of_transfers(request: Request, parts: Parts) -> list[Holder]:
    """The transfers that hold blocks outside the batch, with their numbers of blocks; the request of a transfer may
    have finished."""
    holdings = parts.transfers.holdings() if parts.transfers is not None else []
    others = [holding for holding in holdings if holding.request is not request]
    return _sorted_by_amount(
        Holder(holding.request_id, len(holding.blocks), transfer=holding.transfer_id) for holding in others
    )


def _holders_of_sequence_slots(request: Request, parts: Parts) -> list[Holder]:
    """The running requests, one sequence slot each, longest running first. If `request` itself runs: the requests of
    the last step."""
    output = parts.emission.last_output
    if request.row is None or output is None:
        return [Holder(other.request_id, 1) for other in parts.batch.members.requests]
    return [Holder(other.request_id, 1) for other in output.requests if not other.is_finished]


def _holders_of_budget(request: Request, parts: Parts) -> list[Holder]:
    """The requests of the last step, with the number of tokens that each computes in this step."""
    output = parts.emission.last_output
    if output is None:
        return []
    tokens = zip(output.requests, output.num_scheduled_tokens.tolist(), strict=True)
    return _sorted_by_amount(Holder(other.request_id, n) for other, n in tokens if not other.is_finished)


def _holders_of_adapters(request: Request, parts: Parts) -> list[Holder]:
    """For each adapter that holds a slot, longest first: one running request of the adapter, with the number of all of
    them."""
    first: dict[object, str] = {}
    for other in parts.batch.members.requests:
        first.setdefault(other.adapter, other.request_id)
    return [Holder(first[adapter], n, adapter.name) for adapter, n in parts.gates.adapters.held.items()]


def _holders_of_prefills(request: Request, parts: Parts) -> list[Holder]:
    """The running requests with a partial prefill, in admission order."""
    return [Holder(other.request_id, 1) for other in parts.batch.members.requests if other.phase == "prefill"]


def _holders_of_embeddings(request: Request, parts: Parts) -> list[Holder]:
    """The requests that hold entries of the encoder cache, with their numbers of embeddings; a shared entry counts for
    each holder."""
    encoder = parts.encoder
    if encoder is None:
        return []
    held = {other: encoder.holds(other) for other in encoder.holders() if other is not request}
    return _sorted_by_amount(
        Holder(r.request_id, sum(item.entry.num_embeddings for item in items)) for r, items in held.items()
    )


def _holders_of_encoder_budget(request: Request, parts: Parts) -> list[Holder]:
    """The requests for which the last step computed embeddings, with the number of embeddings."""
    output, counts = parts.emission.last_output, Counter[str]()
    for other, index in output.encoder_inputs if output is not None else ():
        if not other.is_finished:
            counts[other.request_id] += other.encoder_inputs[index].entry.num_embeddings
    return _sorted_by_amount(Holder(name, count) for name, count in counts.items())


def _preemptor(request: Request, parts: Parts) -> list[Holder]:
    output = parts.emission.last_output
    admitted = output.admitted if output is not None else ()
    return [Holder(other.request_id, 0) for other in admitted if not other.is_finished]


def _blocker(request: Request, parts: Parts) -> list[Holder]:
    """The request that blocks the queue, or else the head of the queue."""
    blocker, queue = parts.table.blocker, parts.table.queue
    stands = blocker is not None and blocker is not request and blocker in queue
    before = blocker if blocker is not None and stands else head_of(queue)
    return [Holder(before.request_id, 0)]


def _sorted_by_amount(holders: Iterable[Holder]) -> list[Holder]:
    return sorted(holders, key=lambda holder: -holder.amount)


_BLOCKS = "KV blocks"

CAUSES: dict[Reason, Cause] = {
    Reason.WATERMARK: Cause(
        _BLOCKS,
        "the free KV blocks are headroom for running requests (watermark)",
        _holders_of_blocks,
        "a smaller watermark, at the price of more preemptions",
    ),
    Reason.FULL_SEQUENCE: Cause(
        _BLOCKS,
        "its whole sequence does not fit beside the blocks that partial prefills still need",
        _holders_of_blocks,
        "a larger pool of KV blocks, or full_sequence_must_fit off",
    ),
    Reason.DECODE_RESERVE: Cause(
        _BLOCKS,
        "its expected output does not fit",
        _holders_of_blocks,
        "a smaller decode_reserve, at the price of more preemptions",
    ),
    Reason.RESERVE: Cause(
        _BLOCKS,
        "the free KV blocks are kept for running requests by a reserve",
        _holders_of_blocks,
        "a smaller reserve, at the price of more preemptions",
    ),
    Reason.BYPASS: Cause(
        _BLOCKS,
        "the released KV blocks are kept for a request before it",
        _holders_of_blocks,
        "a smaller parameter kept of the reserve bypass",
    ),
    Reason.STEP_TIME: Cause(
        None,
        "it would make the step longer than its target time",
        _holders_of_sequence_slots,
        "a longer target of the token limit target-itl, or more replicas",
    ),
    Reason.BLOCKS: Cause(
        _BLOCKS,
        "too few KV blocks are free",
        _holders_of_blocks,
        "a larger pool of KV blocks, or fewer or shorter requests",
    ),
    Reason.SEQUENCE_LIMIT: Cause(
        "sequence slots", "all sequence slots are taken", _holders_of_sequence_slots, "a larger max_num_seqs"
    ),
    Reason.BUDGET: Cause(
        "tokens of the step's budget",
        "the step is full",
        _holders_of_budget,
        "a larger max_num_batched_tokens, or a change of the token limit that the explanation names",
    ),
    Reason.PREEMPTION: Cause(
        None,
        "running requests ran out of KV blocks; a step that preempts admits no request",
        _holders_of_blocks,
        "if frequent, a smaller max_num_seqs, or a reserve",
    ),
    Reason.DISPLACEMENT: Cause(
        None, "requests were preempted for a more urgent one, which is admitted alone", _preemptor
    ),
    Reason.STATIC_BATCH: Cause(None, "the static batch still runs", _holders_of_sequence_slots, "batching mixed"),
    Reason.ADAPTER_SLOTS: Cause(
        "adapter slots",
        "other adapters hold them, or a request before it has claimed the next one",
        _holders_of_adapters,
        "a larger max_loras",
    ),
    Reason.PREFILL_FIRST: Cause(
        None, "the step is for prompts, which come before decode", _holders_of_budget, "batching mixed"
    ),
    Reason.PREFILL_INTERVAL: Cause(
        None, "prompts are held back between the steps that compute prompts", _no_holders, "a smaller prefill_interval"
    ),
    Reason.PARTIAL_PREFILLS: Cause(
        "places",
        "the maximum number of prefills is partial",
        _holders_of_prefills,
        "a larger max_num_partial_prefills or max_long_partial_prefills",
    ),
    Reason.ENCODER_BUDGET: Cause(
        "embeddings",
        "the encoder budget of the step is spent",
        _holders_of_encoder_budget,
        "a larger encoder_budget (in vLLM: max_num_batched_tokens)",
    ),
    Reason.ENCODER_CACHE: Cause(
        "embeddings",
        "other requests hold the encoder cache",
        _holders_of_embeddings,
        "a larger encoder_cache_size (in vLLM: max_num_batched_tokens)",
    ),
    Reason.PAUSED: Cause(None, "the scheduler is paused", _no_holders, "resume the scheduler"),
    Reason.IN_FLIGHT: Cause("samples", "its samples in flight must return first", _no_holders),
    Reason.KV_CONNECTOR: Cause(
        None, "the connector does not know yet which KV it can load", _no_holders, "a faster connector"
    ),
    Reason.KV_ROOM: Cause(
        _BLOCKS,
        "transfers hold the maximum number of blocks, and it is next",
        _holders_of_transfers,
        "a larger pool of KV blocks, or a faster connector",
    ),
    Reason.KV_LOAD: Cause(None, "its KV is being loaded", _no_holders, "a faster connector"),
    Reason.BEHIND: Cause(None, "it is not the head of the queue", _blocker),
    Reason.PARKED: Cause(None, "it is parked", _no_holders),
    Reason.STATE: Cause(None, "the state behind its cached prefix is computed in this step", _no_holders),
}


def lacking(missing: int, resource: str) -> str:
    """The text for a missing amount, like "3 more KV blocks" or "1 more KV block"."""
    return LACKING.format(missing=missing, resource=resource if missing != 1 else one_of(resource))


def one_of(resource: str) -> str:
    """The singular of a resource: "KV block" for "KV blocks"."""
    return _ENDING.sub("", resource, count=1)


def _wait_sentence(request: Request, reason: Reason | None, missing: int, holders: list[Holder], parts: Parts) -> str:
    """The text why a request does not advance."""
    name = request.request_id
    if reason is None:
        where = {"finished": "has finished", "waiting": "has not been tried in a step yet"}
        return f"{name} {where.get(request.phase, 'runs')}."
    cause = CAUSES[reason]
    text = (
        PARKED_FOR.get(request.status, cause.text) if reason is Reason.PARKED else _cause_text(request, reason, parts)
    )
    if reason is Reason.KV_LOAD and request._state.holding is not None:
        text += f" (transfer {request._state.holding.transfer_id})"
    if reason is Reason.BEHIND:
        before = parts.table.requests[holders[0].request_id]
        why = before._state.deferral.reason if before._state.deferral is not None else None
        return f"{name} waits behind {before.request_id}" + (
            f", which waits: {_cause_text(before, why, parts)}." if why else "."
        )
    lacks = f" for {lacking(missing, cause.resource)}" if missing and cause.resource else ""
    waits = f"{name} waits{lacks}: {text}"
    if not holders:
        return f"{waits}."
    named = ", ".join(_holder_in_words(holder) for holder in holders[:3])
    more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
    return f"{waits}. Held by {named}{more}."


def _cause_text(request: Request, reason: Reason, parts: Parts) -> str:
    """The text of the cause. If token limits make a step smaller than the budget, the text names these limits, since a
    larger `max_num_batched_tokens` would not help."""
    budget, output = parts.budget, parts.emission.last_output
    is_limited = reason is Reason.BUDGET and budget.tokens < budget.full
    if is_limited and output is not None and not parts.gates.budget.may_have_to_fit(request):
        limits = " and ".join(policy.name for policy in budget.policies)
        computed = output.total_num_scheduled_tokens
        return f"the step computes {computed:,} of {budget.full:,} tokens, as {limits} limits it"
    return CAUSES[reason].text


def _retention_sentence(request: Request, parts: Parts) -> str:
    """A sentence about the retention of the request's blocks, if the request asks for retention and the retained blocks
    are divided among tenants; otherwise ""."""
    pool, eviction = parts.kv.retaining, parts.kv.eviction
    if pool is None or eviction is None or not eviction.per_tenant or not request.retention or request.is_finished:
        return ""
    retained = pool.num_retained_of(request.tenant)
    return (
        f" Its prefix is retained for {request.retention:g} s after its end; its tenant retains {retained} of at most "
        f"{pool.max_retained_of(request.tenant)} KV blocks."
    )


def _recovery_of(request: Request) -> Recovery | None:
    return request._state.recovery if request.status is RequestStatus.PREEMPTED else None


def _recovery_sentence(request: Request, parts: Parts) -> str:
    """A sentence about the evicted KV of a preempted request; "" if `preemption_mode` made no decision."""
    recovery = _recovery_of(request)
    if recovery is None or parts.swap is None:
        return ""
    size, lost = parts.kv.block_size, request._state.lost_tokens
    kept = f" {request.request_id} had computed {lost} tokens, {recovery.num_cached_tokens} of them in full blocks;"
    copy, compute = recovery.swap_seconds, recovery.recompute_seconds
    times = ""
    if copy is not None and compute is not None:
        times = f" (copying all takes {1e3 * copy:.3g} ms, recomputing {1e3 * compute:.3g} ms)"
    if not recovery.swaps:
        return f"{kept} evicted tokens are recomputed{times}."
    num_swapped = size * parts.swap.num_evicted(request)
    return f"{kept} evicted tokens are swapped{times}, {num_swapped} so far."


def _order_reason(request: Request, parts: Parts) -> str:
    """A sentence why the request is not the head of the queue; "" if the order gives no reason."""
    queue = parts.table.queue
    if request not in queue or not hasattr(queue, "reason"):
        return ""
    words: str = queue.reason(request)
    return f" {queue.name}: {words}." if words else ""


def in_words(replaced: Replaced) -> str:
    """A sentence about a policy that failed and was replaced."""
    by = replaced.by or f"no {replaced.kind}"
    return f"{by} decides in the place of {replaced.kind} {replaced.policy!r}, which failed: {replaced.error}."


def _holder_in_words(holder: Holder) -> str:
    if holder.what:
        return f"adapter {holder.what} ({holder.request_id}, {holder.amount} running)"
    shown = f"{holder.request_id} ({holder.amount})" if holder.amount else holder.request_id
    return shown if holder.transfer is None else f"transfer {holder.transfer} of {shown}"
