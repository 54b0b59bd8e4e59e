"""Counters and gauges: what the scheduler has done, and what it holds now."""

from __future__ import annotations

from dataclasses import dataclass, field

from pointsman.core.state.inputs import Adapter
from pointsman.core.state.reason import Holder, Reason
from pointsman.core.state.status import FinishReason, RequestEvent, RequestStatus


@dataclass(slots=True)
class PrefixCounts:
    """Look-ups of admitted requests, in tokens."""

    queries: int = 0
    """Known tokens of the requests."""
    hits: int = 0
    """Of these, tokens found in the prefix cache."""


@dataclass(slots=True)
class Counters:
    """What only grows. Incremented in place by the scheduler; everybody else gets a copy."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
    num_added: int = 0
    num_refused: int = 0
    num_preemptions: int = 0
    """Running requests that lost their blocks: for memory, displaced, parked, or by a reset."""
    num_displaced: int = 0
    """Of these, those that gave way to a more urgent waiting request."""
    num_preempted_by_parking: int = 0
    num_preempted_by_reset: int = 0
    """Of a reset of the prefix cache that computes what runs anew. The other preemptions were for memory."""
    num_recomputed_tokens: int = 0
    """Tokens that were computed, lost to a preemption, and scheduled to be computed again."""
    num_failed_steps: int = 0
    num_proposed_tokens: int = 0
    """Drafts that the host proposed, less those that were dropped at once."""
    num_draft_tokens: int = 0
    """Drafts that were scheduled."""
    accepted_drafts: list[int] = field(default_factory=lambda: [0])
    """How often 0, 1, 2, ... of the drafts of a row and step became tokens; see `Acceptance` for when."""
    num_loads: int = 0
    num_failed_loads: int = 0
    num_loaded_tokens: int = 0
    fresh_prefix: PrefixCounts = field(default_factory=PrefixCounts)
    resumed_prefix: PrefixCounts = field(default_factory=PrefixCounts)
    deferrals: list[int] = field(default_factory=lambda: [0] * len(Reason))
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot. Counters are totals since the scheduler was made."""

    num_running: int
    num_waiting: int
    """Queued requests: they wait for capacity."""
    num_parked: dict[str, int]
    """Requests that wait for something other than capacity, by what that is."""
    num_waiting_by_reason: dict[str, int]
    """Queued requests by why they wait: the reasons of those asked in the newest step and of the head, "behind" them,
    or "not_tried" in any step yet."""
    num_blocks: int
    """Blocks that requests can hold."""
    num_free_blocks: int
    num_cached_free_blocks: int
    """Of the free ones, those whose content can still be found."""
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
    num_recomputed_tokens: int
    num_evictions: int
    """Cached blocks whose content was given up for new content."""
    num_failed_steps: int
    num_proposed_tokens: int
    """Drafts that the host proposed for rows that could have them."""
    num_draft_tokens: int
    """Drafts that were scheduled to be verified."""
    num_drafts: int
    """Times that drafts of a request came back from a step, verified together."""
    num_accepted_tokens: int
    """Drafts that became tokens of their requests."""
    num_accepted_tokens_per_pos: tuple[int, ...]
    """Of them, how many were the first draft of their step, how many the second, and so on to the last."""
    num_encoder_computed: int
    """Embeddings that steps were told to compute."""
    num_encoder_reused: int
    """Embeddings that requests found in the encoder cache."""
    encoder_cache_usage: float
    """Share of the encoder cache that running requests hold, 0 to 1."""
    num_transfers: int
    """Asynchronous loads and sends under way."""
    num_transfer_blocks: int
    """Blocks that requests or transfers hold outside the batch; one that several hold counts for each."""
    num_loads: int
    """Loads that a connector was asked for."""
    num_failed_loads: int
    """Asynchronous ones that brought less than asked for, or took too long."""
    num_loaded_tokens: int
    """Tokens that came from a connector."""
    num_saved_blocks: int
    """Evicted blocks whose content a connector was offered."""
    prefix_queries: int
    """Tokens of fresh requests that were looked up in the prefix cache."""
    prefix_hits: int
    """Tokens of fresh requests that were found there."""
    resumed_prefix_queries: int
    """As `prefix_queries`, of requests that came back after a preemption."""
    resumed_prefix_hits: int
    deferrals: dict[str, int]
    """Steps in which the head of the queue had to wait, by reason."""
    finished: dict[str, int]
    """Ended requests, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where a request stands, and why it does not advance."""

    request_id: str
    status: RequestStatus
    phase: str
    reason: Reason | None
    """Why it waits; None if it has ended, if no step has been scheduled since it was added, or if it runs and was not
    left out of the newest step."""
    sentence: str
    """All of it in words."""
    resource: str | None
    """What it lacks, such as "KV blocks" or "seats": the unit of `missing`, and of what the holders hold. None: nothing
    that is counted."""
    holders: tuple[Holder, ...]
    """Who holds that, the most first, at most 8 of them: running requests for blocks and seats, transfers for blocks,
    the requests of the last step for the budget, one for each adapter; of a request that is not the head, the one that
    it waits behind."""
    num_holders: int
    """How many hold some of it."""
    blocker: str | None
    """The first of the holders."""
    adapter_slots: dict[Adapter, int]
    """The adapters that hold the slots, longest first, each with its running requests, if that is the reason."""
    missing: int
    """How much of `resource` it lacks; 0 where nothing is counted."""
    since: float | None
    """When this reason began, on the caller's clock: behind others, when it entered the queue; for one that runs, the
    first of the steps that have left it out. None where there is no reason."""
    position: int | None
    """How many stand before it in the queue."""
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    """Blocks that it holds, on its row or for its load."""
    transfer: int | None
    """The load that it waits for."""
    num_preemptions: int
    events: tuple[RequestEvent, ...]
    """What happened to it and when; empty unless `log_request_events` is on."""
