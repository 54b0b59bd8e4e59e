"""The metrics that are read from one `EngineStats` at every scrape, each with the function that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pointsman.core.policy.registry import KINDS
from pointsman.core.state.reason import Reason
from pointsman.core.state.status import ParkReason, PreemptionCause
from pointsman.server.metrics.table import FINISH_REASONS, Definition, Reading

if TYPE_CHECKING:
    from pointsman.engine.stats import EngineStats


def _num_parked(stats: EngineStats) -> int:
    return sum(stats.scheduler.num_parked.values())


def _parked(stats: EngineStats) -> Reading:
    return {park.value: stats.scheduler.num_parked.get(park.status.value, 0) for park in ParkReason}


def _waiting(stats: EngineStats) -> Reading:
    reasons = [reason.value for reason in Reason if reason is not Reason.PARKED]
    return {**dict.fromkeys((*reasons, "not_tried"), 0), **stats.scheduler.num_waiting_by_reason}


def _preemptions(stats: EngineStats) -> dict[str, int]:
    """The number of preemptions for each value of `PreemptionCause`; the sum of these numbers is `num_preemptions`."""
    scheduler = stats.scheduler
    others = {
        PreemptionCause.DISPLACED.value: scheduler.num_displaced,
        PreemptionCause.PARKED.value: scheduler.num_preempted_by_parking,
        PreemptionCause.RESET.value: scheduler.num_preempted_by_reset,
        PreemptionCause.UNSAMPLED.value: scheduler.num_preempted_unsampled,
    }
    return {PreemptionCause.MEMORY.value: scheduler.num_preemptions - sum(others.values()), **others}


def _blocks(stats: EngineStats) -> Reading:
    scheduler = stats.scheduler
    return {
        "held": scheduler.num_blocks - scheduler.num_free_blocks,
        "retained": scheduler.num_retained_blocks,
        "cached": scheduler.num_cached_free_blocks - scheduler.num_retained_blocks,
        "blank": scheduler.num_free_blocks - scheduler.num_cached_free_blocks,
    }


KV_TRANSFERS = ("offloaded", "restored", "stored", "loaded")


def _kv_transfer_blocks(stats: EngineStats) -> Reading:
    counters = stats.counters
    done = {name: getattr(counters, f"num_{name}_blocks") for name in KV_TRANSFERS}
    return {**done, "not_stored": counters.num_unstored_blocks, "not_loaded": counters.num_unloaded_blocks}


SCRAPED: tuple[tuple[Definition, Callable[[EngineStats], Reading]], ...] = (
    (
        Definition("vllm:num_requests_running", "gauge", "requests", "Requests that have a sequence slot."),
        lambda stats: stats.scheduler.num_running,
    ),
    (
        Definition("vllm:num_requests_waiting", "gauge", "requests", "Requests that wait, for any reason."),
        lambda stats: stats.scheduler.num_waiting + _num_parked(stats),
    ),
    (
        Definition(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            "requests",
            "vllm:num_requests_waiting in two parts: capacity (in the queue) and deferred (parked).",
            "reason",
        ),
        lambda stats: {"capacity": stats.scheduler.num_waiting, "deferred": _num_parked(stats)},
    ),
    (
        Definition(
            "pointsman:requests_waiting",
            "gauge",
            "requests",
            "Queued requests by reason. Those that the last step checked have their own reason; the others are behind, "
            "or, for a new head, not_tried.",
            "reason",
        ),
        _waiting,
    ),
    (
        Definition("pointsman:parked", "gauge", "requests", "Parked requests by what they wait for.", "reason"),
        _parked,
    ),
    (
        Definition(
            "pointsman:stalled_requests",
            "gauge",
            "requests",
            "Requests without progress for --watchdog-seconds or longer, at the last check.",
        ),
        lambda stats: stats.num_stalled,
    ),
    (
        Definition(
            "pointsman:grammar_process_restarts_total",
            "counter",
            "restarts",
            "Restarts of the process that compiles grammars.",
        ),
        lambda stats: stats.num_grammar_restarts,
    ),
    (
        Definition(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "ratio, 0 to 1",
            "Share of the KV blocks that requests hold.",
        ),
        lambda stats: stats.scheduler.kv_cache_usage,
    ),
    (
        Definition(
            "pointsman:kv_blocks",
            "gauge",
            "blocks",
            "KV blocks by state: held (by requests), cached (free, with content), retained (cached, evicted last) or "
            "blank (free, without content).",
            "state",
        ),
        _blocks,
    ),
    (
        Definition(
            "vllm:prompt_tokens_total",
            "counter",
            "tokens",
            "Prompt tokens, cached ones included, of requests that reached their first token.",
        ),
        lambda stats: stats.counters.num_prompt_tokens,
    ),
    (
        Definition(
            "vllm:prompt_tokens_by_source_total",
            "counter",
            "tokens",
            "vllm:prompt_tokens_total by source: local_compute, local_cache_hit, or external_kv_transfer (host memory "
            "or the KV store).",
            "source",
        ),
        lambda stats: {
            "local_compute": stats.counters.num_prompt_tokens - stats.counters.num_cached_tokens,
            "local_cache_hit": stats.counters.num_cached_tokens - stats.counters.num_external_tokens,
            "external_kv_transfer": stats.counters.num_external_tokens,
        },
    ),
    (
        Definition(
            "vllm:prompt_tokens_cached_total",
            "counter",
            "tokens",
            "Prompt tokens that were cached, and so not computed.",
        ),
        lambda stats: stats.counters.num_cached_tokens,
    ),
    (
        Definition("vllm:generation_tokens_total", "counter", "tokens", "Tokens generated."),
        lambda stats: stats.counters.num_generated_tokens,
    ),
    (
        Definition(
            "vllm:request_success_total",
            "counter",
            "requests",
            "Ended requests by reason; each of n samples counts as one.",
            "finished_reason",
        ),
        lambda stats: {reason: stats.scheduler.finished[reason] for reason in FINISH_REASONS},
    ),
    (
        Definition(
            "vllm:num_preemptions_total",
            "counter",
            "preemptions",
            "Preemptions for memory, and by a reset of the prefix cache.",
        ),
        lambda stats: sum(_preemptions(stats)[cause.value] for cause in PreemptionCause if cause.exists_in_vllm),
    ),
    (
        Definition(
            "pointsman:preemptions_total",
            "counter",
            "preemptions",
            "All preemptions by cause: memory, displaced (by a more urgent request), parked, reset (of the prefix "
            "cache), or unsampled (no token in a step).",
            "cause",
        ),
        _preemptions,
    ),
    (
        Definition(
            "pointsman:displaced_total",
            "counter",
            "preemptions",
            "Preemptions for a more urgent waiting request (cause displaced).",
        ),
        lambda stats: stats.scheduler.num_displaced,
    ),
    (
        Definition(
            "pointsman:preemption_decisions_total",
            "counter",
            "preemptions",
            "With --preemption-mode swap or cheaper: preemptions by the decision for evicted blocks, swap or "
            "recompute.",
            "decision",
        ),
        lambda stats: stats.scheduler.preemption_decisions,
    ),
    (
        Definition(
            "pointsman:recomputed_tokens_total",
            "counter",
            "tokens",
            "Tokens that were computed again after a preemption.",
        ),
        lambda stats: stats.scheduler.num_recomputed_tokens,
    ),
    (
        Definition(
            "vllm:prefix_cache_queries_total",
            "counter",
            "tokens",
            "Tokens of newly admitted requests, looked up in the prefix cache.",
        ),
        lambda stats: stats.scheduler.prefix_queries,
    ),
    (
        Definition(
            "vllm:prefix_cache_hits_total",
            "counter",
            "tokens",
            "Tokens of vllm:prefix_cache_queries_total that were found.",
        ),
        lambda stats: stats.scheduler.prefix_hits,
    ),
    (
        Definition(
            "pointsman:resumed_prefix_cache_queries_total",
            "counter",
            "tokens",
            "As vllm:prefix_cache_queries_total, for requests that resume after a preemption.",
        ),
        lambda stats: stats.scheduler.resumed_prefix_queries,
    ),
    (
        Definition(
            "pointsman:resumed_prefix_cache_hits_total",
            "counter",
            "tokens",
            "Tokens of pointsman:resumed_prefix_cache_queries_total that were found.",
        ),
        lambda stats: stats.scheduler.resumed_prefix_hits,
    ),
    (
        Definition(
            "pointsman:evictions_total",
            "counter",
            "blocks",
            "Cached blocks whose content was replaced by new content.",
        ),
        lambda stats: stats.scheduler.num_evictions,
    ),
    (
        Definition(
            "vllm:external_prefix_cache_queries_total",
            "counter",
            "tokens",
            "Tokens of newly admitted requests that were not in the prefix cache.",
        ),
        lambda stats: stats.counters.num_external_queries,
    ),
    (
        Definition(
            "vllm:external_prefix_cache_hits_total",
            "counter",
            "tokens",
            "Tokens of vllm:external_prefix_cache_queries_total that came from host memory or the KV store.",
        ),
        lambda stats: stats.counters.num_external_hits,
    ),
    (
        Definition(
            "pointsman:kv_transfer_blocks_total",
            "counter",
            "blocks",
            "KV blocks that were offloaded to host memory, restored from it, stored in the KV store, loaded from it, "
            "or failed to transfer (not_stored, not_loaded).",
            "transfer",
        ),
        _kv_transfer_blocks,
    ),
    (
        Definition(
            "pointsman:kv_transfer_bytes_total",
            "counter",
            "bytes",
            "pointsman:kv_transfer_blocks_total in bytes, without failed transfers.",
            "transfer",
        ),
        lambda stats: {name: getattr(stats.counters, f"num_{name}_bytes") for name in KV_TRANSFERS},
    ),
    (
        Definition("pointsman:kv_transfers", "gauge", "transfers", "Loads and stores of the KV store in progress."),
        lambda stats: stats.scheduler.num_transfers,
    ),
    (
        Definition(
            "pointsman:kv_transfer_held_blocks",
            "gauge",
            "blocks",
            "KV blocks held for transfers, or for loaded requests that do not run yet.",
        ),
        lambda stats: stats.scheduler.num_transfer_blocks,
    ),
    (
        Definition(
            "vllm:spec_decode_num_drafts_total", "counter", "drafts", "How often drafts of a request were verified."
        ),
        lambda stats: stats.scheduler.num_drafts,
    ),
    (
        Definition("vllm:spec_decode_num_draft_tokens_total", "counter", "tokens", "Draft tokens that were verified."),
        lambda stats: stats.scheduler.num_draft_tokens,
    ),
    (
        Definition(
            "vllm:spec_decode_num_accepted_tokens_total",
            "counter",
            "tokens",
            "Draft tokens that became tokens of their requests.",
        ),
        lambda stats: stats.scheduler.num_accepted_tokens,
    ),
    (
        Definition(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "tokens",
            "vllm:spec_decode_num_accepted_tokens_total by position among the drafts of a step, from 0.",
            "position",
        ),
        lambda stats: {str(place): count for place, count in enumerate(stats.scheduler.num_accepted_tokens_per_pos)},
    ),
    (
        Definition(
            "pointsman:deferrals_total",
            "counter",
            "steps",
            "Steps that did not admit the head of the queue, by reason.",
            "reason",
        ),
        lambda stats: stats.scheduler.deferrals,
    ),
    (
        Definition("pointsman:steps_total", "counter", "steps", "Steps of the engine, empty ones included."),
        lambda stats: stats.counters.num_steps,
    ),
    (
        Definition("pointsman:failed_steps_total", "counter", "steps", "Steps that failed and were undone."),
        lambda stats: stats.scheduler.num_failed_steps,
    ),
    (
        Definition("pointsman:scheduler_seconds_total", "counter", "seconds", "Time of the scheduler's decisions."),
        lambda stats: stats.counters.scheduler_time,
    ),
    (
        Definition(
            "pointsman:execute_seconds_total",
            "counter",
            "seconds",
            "Time in which the model ran, or the engine waited for it.",
        ),
        lambda stats: stats.counters.execute_time,
    ),
    (
        Definition(
            "pointsman:policy_failures_total",
            "counter",
            "steps",
            "Steps that were scheduled again because another package's policy failed.",
            "kind",
            "policy",
        ),
        lambda stats: {
            (kind, policy): number
            for kind, policies in stats.scheduler.policy_failures.items()
            for policy, number in policies.items()
        },
    ),
    (
        Definition(
            "pointsman:replaced_policies",
            "gauge",
            "policies",
            "Policies of other packages that failed, and were replaced by the default of their kind.",
            "kind",
        ),
        lambda stats: {**dict.fromkeys(KINDS, 0), **stats.scheduler.num_replaced_policies},
    ),
    (
        Definition(
            "pointsman:recording_stopped",
            "gauge",
            "1 or 0",
            "Whether the recording (--record) ended early; the log says why.",
        ),
        lambda stats: int(stats.recording is not None and bool(stats.recording.ended_by)),
    ),
    (
        Definition(
            "pointsman:recording_waiting_bytes",
            "gauge",
            "bytes",
            "Bytes of the recording that wait for the disk. At 64 MiB the recording ends.",
        ),
        lambda stats: 0 if stats.recording is None else stats.recording.num_waiting_bytes,
    ),
)
