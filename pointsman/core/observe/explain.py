"""What people ask of a scheduler: why does this request wait, and how is the whole doing?"""

from __future__ import annotations

from collections import Counter

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.observe.causes import CAUSES, MAX_HOLDERS, sentence
from pointsman.core.observe.left_out import why_left_out
from pointsman.core.observe.stats import Counters, Explanation, SchedulerStats
from pointsman.core.state.batch import Batch
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import PauseMode
from pointsman.core.step.request_table import Lifecycle


def explain(
    request: Request, batch: Batch, kv: KVCacheManager, life: Lifecycle, config: SchedulerConfig
) -> Explanation:
    """Where a request stands, why it waits, for whom and since when."""
    deferral = _deferral(request, life)
    why = deferral or why_left_out(request, batch, life.last_output, config)
    reason = why.reason if why else None
    position = life.queue.position(request) if request in life.queue else None
    if position and reason is not Reason.PAUSED and not _was_asked(request, position, life):
        reason = Reason.BEHIND
    has_own = why is not None and reason is why.reason
    missing = why.missing if why is not None and has_own else 0
    holders = CAUSES[reason].holders(request, batch, life) if reason is not None else []
    return Explanation(
        request_id=request.request_id,
        status=request.status,
        phase=request.phase,
        reason=reason,
        sentence=sentence(request, reason, missing, holders, life),
        resource=CAUSES[reason].resource if reason is not None else None,
        holders=tuple(holders[:MAX_HOLDERS]),
        num_holders=len(holders),
        blocker=holders[0].request_id if holders else None,
        adapter_slots=dict(life.adapters.held) if reason is Reason.ADAPTER_SLOTS else {},
        missing=missing,
        since=_since(request, reason, deferral if has_own else None, life),
        position=position,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=_num_blocks(request, batch, kv),
        transfer=request.holding.transfer_id if request.holding is not None and request.holding.is_open else None,
        num_preemptions=request.num_preemptions,
        events=tuple(request.events),
    )


def _since(request: Request, reason: Reason | None, deferral: Deferral | None, life: Lifecycle) -> float | None:
    """When the reason began."""
    if reason is None:
        return None
    if reason is Reason.BEHIND:
        return request.queued_at
    return deferral.since if deferral is not None else life.left_out.since(request)


def _deferral(request: Request, life: Lifecycle) -> Deferral | None:
    """Why it waits as far as it is not for others; a pause goes before all else, for whom it holds up."""
    pause = life.pause
    if pause is not None:
        is_held = request in life.queue or (request.row is not None and pause.mode is PauseMode.ALL)
        if is_held:
            return Deferral(Reason.PAUSED, 0, max(pause.since, request.queued_at))
    if request.row is not None and life.encoder is not None:
        return life.encoder.deferral(request)
    deferral: Deferral | None = request.deferral
    return deferral


def _was_asked(request: Request, position: int, life: Lifecycle) -> bool:
    """Whether its reason is its own although others stand before it: those were passed over, or it was."""
    if request in life.passed:
        return True
    return request is life.wall and position == len(life.passed)


def _num_blocks(request: Request, batch: Batch, kv: KVCacheManager) -> int:
    if request.row is not None:
        return len(kv.table(batch, request.row))
    return 0 if request.holding is None else len(request.holding.blocks)


def snapshot(counters: Counters, batch: Batch, kv: KVCacheManager, life: Lifecycle) -> SchedulerStats:
    """Counters and gauges at this moment."""
    pool, encoder, transfers = kv.pool, life.encoder, life.transfers
    accepted = batch.acceptance.accepted_drafts
    per_pos = tuple(sum(accepted[place:]) for place in range(1, len(accepted)))
    parked: dict[str, int] = {}
    for request in life.parked.values():
        parked[request.status.value] = parked.get(request.status.value, 0) + 1
    return SchedulerStats(
        num_running=len(batch),
        num_waiting=len(life.queue),
        num_parked=parked,
        num_waiting_by_reason=_waiting_by_reason(life),
        num_blocks=pool.num_usable,
        num_free_blocks=pool.num_free,
        num_cached_free_blocks=pool.num_cached_free,
        kv_cache_usage=pool.usage,
        num_steps=counters.num_steps,
        num_scheduled_tokens=counters.num_scheduled_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        num_added=counters.num_added,
        num_refused=counters.num_refused,
        num_preemptions=counters.num_preemptions,
        num_displaced=counters.num_displaced,
        num_preempted_by_parking=counters.num_preempted_by_parking,
        num_preempted_by_reset=counters.num_preempted_by_reset,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        num_evictions=kv.num_evictions,
        num_failed_steps=counters.num_failed_steps,
        num_proposed_tokens=counters.num_proposed_tokens,
        num_draft_tokens=counters.num_draft_tokens,
        num_drafts=sum(accepted),
        num_accepted_tokens=sum(per_pos),
        num_accepted_tokens_per_pos=per_pos,
        num_encoder_computed=encoder.counts.computed if encoder else 0,
        num_encoder_reused=encoder.counts.reused if encoder else 0,
        encoder_cache_usage=encoder.num_held / encoder.size if encoder else 0.0,
        num_transfers=0 if transfers is None else transfers.num_open,
        num_transfer_blocks=0 if transfers is None else transfers.num_blocks,
        num_loads=counters.num_loads,
        num_failed_loads=counters.num_failed_loads,
        num_loaded_tokens=counters.num_loaded_tokens,
        num_saved_blocks=kv.num_saves,
        prefix_queries=counters.fresh_prefix.queries,
        prefix_hits=counters.fresh_prefix.hits,
        resumed_prefix_queries=counters.resumed_prefix.queries,
        resumed_prefix_hits=counters.resumed_prefix.hits,
        deferrals={reason.value: counters.deferrals[reason.position] for reason in Reason},
        finished={reason.value: count for reason, count in counters.finished.items()},
    )


def _waiting_by_reason(life: Lifecycle) -> dict[str, int]:
    queue = life.queue
    if not len(queue):
        return {}
    if life.pause is not None:
        return {Reason.PAUSED.value: len(queue)}
    head = queue.peek()
    asked = [head, *(request for request in life.passed if request is not head)]
    if head in life.passed and life.wall is not None:
        asked.append(life.wall)
    counts: Counter[str] = Counter()
    for request in asked:
        deferral: Deferral | None = request.deferral
        counts[deferral.reason.value if deferral else "not_tried"] += 1
    if len(queue) > len(asked):
        counts[Reason.BEHIND.value] = len(queue) - len(asked)
    return dict(counts)
