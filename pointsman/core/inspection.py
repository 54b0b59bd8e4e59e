"""What people ask of a scheduler: why does this request wait, and how is the whole doing?"""

from __future__ import annotations

from pointsman.core.batch import Batch
from pointsman.core.kv_cache import KVCacheManager
from pointsman.core.lifecycle import Lifecycle
from pointsman.core.pause import PauseMode
from pointsman.core.reason import Deferral, Reason
from pointsman.core.request import Request
from pointsman.core.stats import Counters, Explanation, SchedulerStats


def explain(request: Request, batch: Batch, kv: KVCacheManager, life: Lifecycle) -> Explanation:
    """Where a request stands, why it waits, for whom and since when."""
    deferral = _deferral(request, life)
    reason = deferral.reason if deferral else None
    position = life.queue.position(request) if request in life.queue else None
    if position and reason is not Reason.PAUSED:
        reason = Reason.BEHIND
    return Explanation(
        request_id=request.request_id,
        status=request.status,
        phase=request.phase,
        reason=reason,
        blocker=_blocker(reason, batch, life),
        missing=deferral.missing if deferral and reason is deferral.reason else 0,
        since=deferral.since if deferral and reason is deferral.reason else None,
        position=position,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=0 if request.row is None else len(kv.table(batch, request.row)),
        num_preemptions=request.num_preemptions,
        events=tuple(request.events),
    )


def _deferral(request: Request, life: Lifecycle) -> Deferral | None:
    """Why it waits as far as it is not for others; a pause goes before all else, for whom it holds up."""
    pause = life.pause
    if pause is not None:
        is_held = request in life.queue or (request.row is not None and pause.mode is PauseMode.ALL)
        if is_held:
            return Deferral(Reason.PAUSED, 0, pause.since)
    deferral: Deferral | None = request.deferral
    return deferral


def _blocker(reason: Reason | None, batch: Batch, life: Lifecycle) -> str | None:
    if reason is Reason.BEHIND:
        return life.queue.peek().request_id
    rungs = (
        Reason.WATERMARK,
        Reason.FULL_SEQUENCE,
        Reason.DECODE_RESERVE,
        Reason.BLOCKS,
        Reason.SEQUENCE_LIMIT,
        Reason.STATIC_BATCH,
    )
    members = batch.members
    if reason in rungs and len(members):
        return members.requests[int(batch.num_slots[members.rows].argmax())].request_id
    return None


def snapshot(counters: Counters, batch: Batch, kv: KVCacheManager, life: Lifecycle) -> SchedulerStats:
    """Counters and gauges at this moment."""
    pool = kv.pool
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
        kv_cache_usage=1.0 - pool.num_free / pool.num_usable,
        num_steps=counters.num_steps,
        num_scheduled_tokens=counters.num_scheduled_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        num_added=counters.num_added,
        num_refused=counters.num_refused,
        num_preemptions=counters.num_preemptions,
        num_displaced=counters.num_displaced,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        num_evictions=kv.num_evictions,
        num_failed_steps=counters.num_failed_steps,
        prefix_queries=counters.fresh_prefix.queries,
        prefix_hits=counters.fresh_prefix.hits,
        resumed_prefix_queries=counters.resumed_prefix.queries,
        resumed_prefix_hits=counters.resumed_prefix.hits,
        deferrals={reason.value: counters.deferrals[reason.position] for reason in Reason},
        finished={reason.value: count for reason, count in counters.finished.items()},
    )


def _waiting_by_reason(life: Lifecycle) -> dict[str, int]:
    waiting = len(life.queue)
    if not waiting:
        return {}
    if life.pause is not None:
        return {Reason.PAUSED.value: waiting}
    deferral: Deferral | None = life.queue.peek().deferral
    counts = {deferral.reason.value if deferral else "not_tried": 1}
    if waiting > 1:
        counts[Reason.BEHIND.value] = waiting - 1
    return counts
