"""Counters and gauges of the scheduler.

`Statistics` counts the scheduler's events. `SchedulerStats` is a snapshot of these counters, and of the gauges at one
moment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pointsman.core.policy.guard import Guard, head_of, replaced_among
from pointsman.core.state.documented import Documented
from pointsman.core.state.events import (
    Admitted,
    Listener,
    LoadFinished,
    LoadStarted,
    Preempted,
    StepDecision,
    StepRun,
)
from pointsman.core.state.output import SchedulerOutput, StepUpdate
from pointsman.core.state.reason import Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason, PreemptionCause
from pointsman.core.step.assembly import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats(metaclass=Documented):
    """A snapshot of counters and gauges. Counters are totals since the scheduler was created."""

    num_running: int
    num_waiting: int
    """Number of queued requests, which wait for capacity."""
    num_parked: dict[str, int]
    """Number of requests that wait for something other than capacity, by status."""
    num_waiting_by_reason: dict[str, int]
    """Number of queued requests by reason. The head of the queue, and the requests checked in the newest step, have
    their own reasons, or "not_tried" if no step has checked them; all other requests are "behind"."""
    num_blocks: int
    """Number of blocks that requests can hold."""
    num_free_blocks: int
    num_cached_free_blocks: int
    """Number of free blocks with cached content."""
    num_retained_blocks: int
    """Number of cached free blocks that an eviction policy retains."""
    kv_cache_usage: float
    """Share of the blocks that requests hold, 0 to 1."""
    num_steps: int
    num_scheduled_tokens: int
    num_generated_tokens: int
    num_added: int
    num_refused: int
    num_preemptions: int
    num_displaced: int
    num_preempted_by_parking: int
    num_preempted_by_reset: int
    num_preempted_unsampled: int
    preemption_decisions: dict[str, int]
    """Number of preemptions by decision, "swap" or "recompute", with `preemption_mode` "swap" or "cheaper"."""
    num_recomputed_tokens: int
    num_evictions: int
    """Number of cached blocks whose content was evicted for new content."""
    num_failed_steps: int
    num_policy_failures: int
    """Number of steps that failed before they were decided, because of a policy of another package."""
    policy_failures: dict[str, dict[str, int]]
    """Number of steps that failed because of each policy of another package, by kind and name."""
    num_replaced_policies: dict[str, int]
    """Number of policies of other packages that failed and were replaced by the default, by kind."""
    num_proposed_tokens: int
    """Number of draft tokens that the host proposed, for rows that may have drafts."""
    num_draft_tokens: int
    """Number of draft tokens that were scheduled to be verified."""
    num_drafts: int
    """Number of verified sequences of draft tokens, one for each request and step with drafts."""
    num_accepted_tokens: int
    """Number of draft tokens that were accepted, so that they became tokens of their requests."""
    num_accepted_tokens_per_pos: tuple[int, ...]
    """Number of accepted draft tokens by their position in the sequence, first to last."""
    num_encoder_computed: int
    """Number of embeddings that were scheduled to be computed."""
    num_encoder_reused: int
    """Number of embeddings that requests reused from the encoder cache."""
    encoder_cache_usage: float
    """Share of the encoder cache that running requests hold, 0 to 1."""
    num_transfers: int
    """Number of asynchronous loads and sends that have not ended."""
    num_transfer_blocks: int
    """Number of blocks that requests or transfers hold outside the batch; a shared block counts for each holder."""
    num_loads: int
    """Number of loads that were requested from a connector."""
    num_failed_loads: int
    """Number of asynchronous loads that delivered less than requested, or took too long."""
    num_loaded_tokens: int
    """Number of tokens that were loaded from a connector."""
    num_saved_blocks: int
    """Number of evicted blocks whose content was offered to a connector."""
    prefix_queries: int
    """Number of tokens of new requests that were looked up in the prefix cache."""
    prefix_hits: int
    """Number of tokens of new requests that were found in the prefix cache."""
    resumed_prefix_queries: int
    """As `prefix_queries`, but for requests that resumed after a preemption."""
    resumed_prefix_hits: int
    deferrals: dict[str, int]
    """Number of steps in which the head of the queue was deferred, by reason."""
    finished: dict[str, int]
    """Number of finished requests, by reason."""


# Computed once: hosts take a snapshot in every step, and reading an enumeration's `value` is slow.
_REASONS = tuple(reason.value for reason in sorted(Reason, key=lambda reason: reason.position))
_ENDS = tuple(reason.value for reason in FinishReason)


class Statistics(Listener):
    """Counts events of the scheduler. Counts never decrease: steps that are repeated after a failure count again."""

    def __init__(self, max_drafts: int) -> None:
        self.num_steps = 0
        self.num_scheduled_tokens = 0
        self.num_generated_tokens = 0
        self.num_added = 0
        self.num_refused = 0
        self.preemptions = dict.fromkeys(PreemptionCause, 0)
        self.decisions = {"swap": 0, "recompute": 0}
        self.num_recomputed_tokens = 0
        self.num_failed_steps = 0
        self.num_policy_failures = 0
        self.policy_failures: Counter[tuple[str, str]] = Counter()
        """Number of steps that failed because of each policy, by kind and name."""
        self.num_proposed_tokens = 0
        self.num_draft_tokens = 0
        self._has_drafts = max_drafts > 0
        self.accepted_drafts = [0] * (1 + max_drafts)
        """Element n: how often n draft tokens of a row were accepted in one step; see `Acceptance`."""
        self.num_loads = 0
        self.num_failed_loads = 0
        self.num_loaded_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.resumed_prefix_queries = 0
        self.resumed_prefix_hits = 0
        self.deferrals = [0] * len(Reason)
        self.finished = dict.fromkeys(FinishReason, 0)

    def on_added(self, request: Request, now: float) -> None:
        self.num_added += 1

    def on_refused(self, request: Request, why: str, now: float) -> None:
        self.num_refused += 1

    def on_admitted(self, event: Admitted) -> None:
        request, resumed = event.request, event.resumed
        state = request._state
        if event.uses_prefix_cache:
            found = event.num_cached_tokens - event.num_external_tokens
            if resumed:
                self.resumed_prefix_queries += state.num_admitted_tokens
                self.resumed_prefix_hits += found
            else:
                self.prefix_queries += state.num_admitted_tokens
                self.prefix_hits += found
        if resumed:
            self.num_recomputed_tokens += max(0, state.lost_tokens - event.num_cached_tokens)

    def on_preempted(self, event: Preempted) -> None:
        self.preemptions[event.cause] += 1
        if event.recovery is not None:
            self.decisions["swap" if event.recovery.swaps else "recompute"] += 1

    def on_finished(self, request: Request, now: float) -> None:
        reason = request._state.finish_reason
        assert reason is not None
        self.finished[reason] += 1

    def on_step(self, step: StepDecision) -> None:
        output = step.output
        assert output is not None
        self.num_steps += 1
        self.num_scheduled_tokens += output.total_num_scheduled_tokens
        if self._has_drafts:
            self.num_draft_tokens += len(output.draft_token_ids)
        if step.blocked_by is not None:
            self.deferrals[step.blocked_by.position] += 1

    def on_update(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        self.num_generated_tokens += len(update.token_ids)

    def on_steps(self, run: StepRun) -> None:
        num_tokens = run.num_steps * len(run.requests)
        self.num_steps += run.num_steps
        self.num_scheduled_tokens += num_tokens
        self.num_generated_tokens += num_tokens
        if run.blocked_by is not None:
            self.deferrals[run.blocked_by.position] += run.num_steps

    def policies_failed(self, policies: list[tuple[str, str]]) -> None:
        """Count a step that failed because of `policies`, pairs of kind and name."""
        self.num_policy_failures += 1
        self.policy_failures.update(policies)

    def on_failed(self, num_steps: int, now: float) -> None:
        self.num_failed_steps += num_steps

    def on_proposed(self, num_drafts: int) -> None:
        self.num_proposed_tokens += num_drafts

    def on_load_started(self, event: LoadStarted) -> None:
        self.num_loads += 1
        if not event.is_async:
            self.num_loaded_tokens += event.num_tokens

    def on_load_finished(self, event: LoadFinished) -> None:
        self.num_loaded_tokens += event.num_tokens
        self.num_failed_loads += event.failed

    def snapshot(self, parts: Parts) -> SchedulerStats:
        """A snapshot of the counters and gauges at this moment."""
        batch, kv, table = parts.batch, parts.kv, parts.table
        pool, encoder, transfers = kv.pool, parts.encoder, parts.transfers
        accepted = batch.acceptance.accepted_drafts
        per_pos = tuple(sum(accepted[place:]) for place in range(1, len(accepted)))
        parked: dict[str, int] = {}
        for request in table.parked.values():
            parked[request.status.value] = parked.get(request.status.value, 0) + 1
        return SchedulerStats(
            num_running=len(batch),
            num_waiting=len(table.queue),
            num_parked=parked,
            num_waiting_by_reason=_waiting_by_reason(parts),
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_cached_free_blocks=pool.num_cached_free,
            num_retained_blocks=kv.retaining.num_retained if kv.retaining is not None else 0,
            kv_cache_usage=pool.usage,
            num_steps=self.num_steps,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_added=self.num_added,
            num_refused=self.num_refused,
            num_preemptions=sum(self.preemptions.values()),
            num_displaced=self.preemptions[PreemptionCause.DISPLACED],
            num_preempted_by_parking=self.preemptions[PreemptionCause.PARKED],
            num_preempted_by_reset=self.preemptions[PreemptionCause.RESET],
            num_preempted_unsampled=self.preemptions[PreemptionCause.UNSAMPLED],
            preemption_decisions=dict(self.decisions),
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_evictions=kv.num_evictions,
            num_failed_steps=self.num_failed_steps,
            num_policy_failures=self.num_policy_failures,
            policy_failures=_by_kind(self.policy_failures, parts),
            num_replaced_policies=dict(Counter(each.kind for each in replaced_among(parts.policies))),
            num_proposed_tokens=self.num_proposed_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_drafts=sum(accepted),
            num_accepted_tokens=sum(per_pos),
            num_accepted_tokens_per_pos=per_pos,
            num_encoder_computed=encoder.counts.computed if encoder else 0,
            num_encoder_reused=encoder.counts.reused if encoder else 0,
            encoder_cache_usage=encoder.num_held / encoder.size if encoder else 0.0,
            num_transfers=0 if transfers is None else transfers.num_open,
            num_transfer_blocks=0 if transfers is None else transfers.num_blocks,
            num_loads=self.num_loads,
            num_failed_loads=self.num_failed_loads,
            num_loaded_tokens=self.num_loaded_tokens,
            num_saved_blocks=kv.num_saves,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            resumed_prefix_queries=self.resumed_prefix_queries,
            resumed_prefix_hits=self.resumed_prefix_hits,
            deferrals=dict(zip(_REASONS, self.deferrals, strict=True)),
            finished=dict(zip(_ENDS, self.finished.values(), strict=True)),
        )


def _by_kind(counted: Counter[tuple[str, str]], parts: Parts) -> dict[str, dict[str, int]]:
    """The number of failed steps by kind and name of each policy that can fail, policies without a failure included."""
    found: dict[str, dict[str, int]] = {}
    guards = [(guard.kind, guard.spec) for guard in parts.policies if isinstance(guard, Guard)]
    for kind, policy in dict.fromkeys([*guards, *counted]):
        found.setdefault(kind, {})[policy] = counted[kind, policy]
    return found


def _waiting_by_reason(parts: Parts) -> dict[str, int]:
    table, queue = parts.table, parts.table.queue
    if not len(queue):
        return {}
    if parts.admission.pause is not None:
        return {Reason.PAUSED.value: len(queue)}
    head = head_of(queue)
    asked = [head, *(request for request in table.skipped if request is not head)]
    if head in table.skipped and table.blocker is not None:
        asked.append(table.blocker)
    counts: Counter[str] = Counter()
    for request in asked:
        deferral = request._state.deferral
        counts[deferral.reason.value if deferral else "not_tried"] += 1
    if len(queue) > len(asked):
        counts[Reason.BEHIND.value] = len(queue) - len(asked)
    return dict(counts)
