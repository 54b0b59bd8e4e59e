"""Tests the checks: faults are planted in the core, one at a time, and each must be caught.

A fault that only spoils bookkeeping may be caught by `check_invariants` or by the ledger. A fault after which a
request reads wrong KV must be caught by the shadow host alone, with `check_invariants`, the ledger and the statistics
switched off: what catches the fault is then independent of the code that has it.

The short form plants all but a few that take long to be found (`SLOW`).
"""

from __future__ import annotations

import heapq
import traceback
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    Adapter,
    ConfigError,
    EncoderInput,
    FinishReason,
    InvariantError,
    PreemptionCause,
    Request,
    Scheduler,
)
from tests.by_name import find, replace
from tests.forms import short_or_long

from . import transfers as device
from .operations import drive
from .shadow import ShadowFault

Root = find("Root")
MAX_SEEDS = 250
RULES_PER_SEED = 120  # twice as many rules catch four times as many faults: many faults need many requests
AS_PLANTED = {"connector": False, "policies": False}
"""Options of faults that differ from the defaults."""
CACHING = {"enable_prefix_caching": True, "share_within_step": True}
SLOW_PREFILL = {**CACHING, "block_size": 4, "enable_chunked_prefill": True, "long_prefill_token_threshold": 1}
IMAGES = {"encoder_budget": 5, "encoder_cache_size": 5}
SMALL_IMAGE_BLOCKS = {**CACHING, **IMAGES, "block_size": 1, "num_blocks": 24, "max_model_len": 24, "max_loras": 0}
ADAPTERS = {**CACHING, "max_loras": 2}
PLAIN = {
    "encoder_budget": 0,
    "encoder_cache_size": 0,
    "num_draft_tokens": 0,
    "watermark": 0.0,
    "decode_reserve": 0,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "max_num_partial_prefills": None,
    "max_long_partial_prefills": None,
    "batching": "mixed",
    "max_num_seqs": 5,
    "max_num_batched_tokens": 20,
}
"""A configuration without shortages, except those that are added."""
CROWDED = {**PLAIN, "max_loras": 1, "max_overtakes": 0, "order": "fcfs"}
CROWDED |= {"block_size": 1, "num_blocks": 60, "max_model_len": 24, "max_num_batched_tokens": 30}
SHORT_OF_BLOCKS = {**PLAIN, "block_size": 1, "num_blocks": 10, "full_sequence_must_fit": False}
SLOW_IMAGES = {**IMAGES, "enable_chunked_prefill": True, "long_prefill_token_threshold": 2, "batching": "mixed"}
SLOW_IMAGES |= {"max_num_partial_prefills": None, "max_num_seqs": 5, "max_num_batched_tokens": 20, "num_blocks": 30}
ROOMY = {**SLOW_PREFILL, "num_blocks": 14, "max_model_len": 48, "max_num_seqs": 5, "max_num_batched_tokens": 8}
ROOMY |= {"batching": "mixed", "max_loras": 0, "full_sequence_must_fit": False}
TRANSFERS = {"connector": True, "enable_prefix_caching": True, "max_model_len": 8, "num_blocks": 14}
SWAPS = {**PLAIN, **TRANSFERS, "share_within_step": True, "preemption_mode": "swap", "block_size": 1}
SWAPS |= {"num_blocks": 16, "max_model_len": 14, "full_sequence_must_fit": False}
WIDE = {**CACHING, "max_num_seqs": 5, "max_num_batched_tokens": 19, "num_blocks": 14, "batching": "mixed"}
WIDE |= {"num_draft_tokens": 0}
SPECULATION = {"num_draft_tokens": 5, "draft_table": (), "max_num_seqs": 4, "max_model_len": 48}
STEADY_SPECULATION = {
    **{**SPECULATION, "num_draft_tokens": 2, "draft_table": ((1, 1),)},
    **{"block_size": 4, "max_steps_in_flight": 1, "batching": "mixed", "long_prefill_token_threshold": 0},
}
HALF_DONE = {**SLOW_PREFILL, "max_num_partial_prefills": 1, "max_num_seqs": 5, "max_num_batched_tokens": 15}
WITHOUT_CACHE = {"enable_prefix_caching": False, "share_within_step": True}
RETAINING = {**CACHING, "eviction": "retention:share=1", "block_size": 1, "num_blocks": 30, "max_model_len": 16}
RETAINING |= {"max_loras": 0, "batching": "mixed", "max_num_seqs": 5}
UNCACHED_CHUNKS = {**PLAIN, **WITHOUT_CACHE}
UNCACHED_CHUNKS |= {"block_size": 2, "num_blocks": 20, "long_prefill_token_threshold": 2}
GROUPS = {**PLAIN, **CACHING, "kv_groups": (("full", 0), ("window", 4)), "block_size": 2, "num_blocks": 30}
GROUPS |= {"max_model_len": 30, "eviction": "lru", "full_sequence_must_fit": False}
Patch = pytest.MonkeyPatch


def around(patch: Patch, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace the method `Class.method`, or a function, by `wrapper(original, self, *arguments)`."""
    original = find(name)
    replace(patch, name, lambda self, *args, **kwargs: wrapper(original, self, *args, **kwargs))


# ------------------------------------------------------------- bookkeeping: any check may notice


def pool_loses_a_block(patch: Patch) -> None:
    def release(original: Any, pool: Any, blocks: Any) -> None:
        original(pool, blocks)
        pool._num_blank = max(0, pool._num_blank - 1)

    around(patch, "BlockPool.release", release)


def pool_invents_a_block(patch: Patch) -> None:
    def release(original: Any, pool: Any, blocks: Any) -> None:
        original(pool, blocks)
        if 0 < pool._num_blank < len(pool._blank):
            pool._blank[pool._num_blank] = pool._blank[0]
            pool._num_blank += 1

    around(patch, "BlockPool.release", release)


def one_decrement_is_skipped(patch: Patch) -> None:
    def release(original: Any, pool: Any, blocks: Any) -> None:
        shared = [block for block in blocks.tolist() if pool.num_references[block] > 1]
        original(pool, blocks)
        if shared:
            pool.num_references[shared[0]] += 1

    around(patch, "BlockPool.release", release)


def recording_begins_with_a_used_pool(patch: Patch) -> None:
    """The free blocks are handed out in the order in which they came back, which a replay does not know."""

    def assemble(original: Any, scheduler: Scheduler, *args: Any) -> None:
        kv = getattr(scheduler, "_kv", None)
        original(scheduler, *args)
        if kv is not None:
            kv.reset()
            scheduler._kv.pool._blank = kv.pool._blank

    around(patch, "Scheduler._assemble", assemble)


def recording_begins_with_learned_output_lengths(patch: Patch) -> None:
    """The mean output of earlier requests continues to reserve blocks."""

    def assemble(original: Any, scheduler: Scheduler, *args: Any) -> None:
        admission = getattr(scheduler, "_admission", None)
        original(scheduler, *args)
        if admission is not None:
            scheduler._admission.gates.reserves.policies = admission.gates.reserves.policies

    around(patch, "Scheduler._assemble", assemble)


def row_is_not_left(patch: Patch) -> None:
    def leave(original: Any, batch: Any, requests: list[Any], last_step: int | None) -> None:
        members = batch.members
        original(batch, requests, last_step)
        if len(requests) > 1:
            batch.members = members

    around(patch, "Batch.release_rows", leave)


def row_is_reused_too_early(patch: Patch) -> None:
    around(patch, "Batch.release_rows", lambda original, batch, requests, last_step: original(batch, requests, None))


def token_limit_is_off_by_one(patch: Patch) -> None:
    def place(original: Any, batch: Any, *args: Any) -> int:
        row: int = original(batch, *args)
        batch.token_limit[row] += 1
        return row

    around(patch, "Batch.place", place)


def all_requests_run_ahead_at_once(patch: Patch) -> None:
    """Steady decoding does not check which requests must wait for their samples; the count is right."""

    def is_steady(original: Any, running: Any, in_flight: bool) -> bool:
        batch = running._batch
        count, batch.num_not_ahead = batch.num_not_ahead, 0
        steady = bool(original(running, in_flight))
        batch.num_not_ahead = count
        return steady

    around(patch, "Running._is_steady", is_steady)


def all_requests_run_ahead_in_mixed_steps(patch: Patch) -> None:
    replace(patch, "OneSampleInFlight.clip", lambda limit, batch, rows, want: None)


def budget_is_off_by_one(patch: Patch) -> None:
    def init(original: Any, running: Any, *args: Any) -> None:
        original(running, *args)
        running._budget = copy(running._budget)
        running._budget.tokens += 1

    around(patch, "Running.__init__", init)


def queue_forgets_a_removal(patch: Patch) -> None:
    def remove(original: Any, queue: Any, request: Any) -> None:
        entry = request._state.queue_entry
        original(queue, request)
        entry[-1] = request

    around(patch, "FirstComeFirstServed.remove", remove)


def end_of_a_request_is_not_reported(patch: Patch) -> None:
    def take_reports(original: Any, table: Any) -> Any:
        preempted, finished = original(table)
        return preempted, finished[:1]

    around(patch, "RequestTable.take_reports", take_reports)


def end_of_a_request_is_not_reported_again(patch: Patch) -> None:
    def repeat_reports(original: Any, table: Any, void: list[Any]) -> None:
        finished = table.finished
        original(table, void)
        table.finished = finished

    around(patch, "RequestTable.repeat_reports", repeat_reports)


def watch_misses_what_was_in_flight(patch: Patch) -> None:
    def deliver(original: Any, update: Any, request: Any, *args: Any) -> Any:
        watch, request._state.repetition_watch = request._state.repetition_watch, None
        kept = original(update, request, *args)
        request._state.repetition_watch = watch
        return kept

    around(patch, "Update._append_without_row", deliver)


def one_of_several_stop_tokens_is_forgotten(patch: Patch) -> None:
    def count(original: Any, stops: Any, tokens: Any, change: int) -> None:
        original(stops, tokens, change)
        if len(tokens) > 1:
            stops.counts[max(tokens)] = 0

    around(patch, "StopFilter._change_counts", count)
    replace(patch, "_check_stop_filter", lambda batch: None)


def stop_tokens_outlive_their_row(patch: Patch) -> None:
    replace(patch, "StopFilter.remove", lambda stops, tokens: None)


def short_patterns_count(patch: Patch) -> None:
    def init(original: Any, watch: Any, *args: Any) -> None:
        original(watch, *args)
        watch._first = 1

    around(patch, "RepetitionWatch.__init__", init)


def rewind_is_lost(patch: Patch) -> None:
    def rewind(original: Any, record: Any, batch: Any, *args: Any) -> None:
        output = record.output
        before = batch.num_computed_tokens[output.rows].copy()
        original(record, batch, *args)
        stays = batch.serial[output.rows] == output.serials
        batch.num_computed_tokens[output.rows[stays]] = before[stays]

    around(patch, "rewind", rewind)


def watermark_is_ignored(patch: Patch) -> None:
    replace(patch, "Watermark.blocks", lambda reserve, request, demand, view: 0)


def mean_counts_aborts(patch: Patch) -> None:
    replace(patch, "_OWN_ENDS", tuple(FinishReason))


def expected_output_is_ignored(patch: Patch) -> None:
    replace(patch, "DecodeReserve.blocks", lambda reserve, request, demand, view: 0)


def first_token_is_missed_if_it_is_the_last(patch: Patch) -> None:
    def on_finished(original: Any, log: Any, request: Any, now: float) -> None:
        log._without_token.pop(request, None)
        original(log, request, now)

    around(patch, "RequestLog.on_finished", on_finished)


def share_is_not_adapted(patch: Patch) -> None:
    replace(patch, "FairLongPrefillThreshold.open_step", lambda limit, num_requests: None)


def number_of_sequence_slots_cannot_be_changed(patch: Patch) -> None:
    def move(original: Any, scheduler: Scheduler, limit: int, now: float) -> None:
        seats = scheduler._admission.max_num_active_seqs
        original(scheduler, limit, now)
        scheduler._admission.max_num_active_seqs = seats

    around(patch, "Scheduler.set_max_num_active_seqs", move)


def common_prefix_is_not_recomputed(patch: Patch) -> None:
    def count(original: Any, common: Any, rows: Any) -> int:
        if common._members is not None and len(rows) == len(common._members):
            common._members = common._batch.members
        found: int = original(common, rows)
        return found

    around(patch, "CommonPrefix.count", count)


def one_prefill_too_many(patch: Patch) -> None:
    around(patch, "PartialPrefills._num_that_must_finish", lambda original, caps, *args: original(caps, *args) - 1)


def prompt_is_bypassed_without_bound(patch: Patch) -> None:
    def init(original: Any, caps: Any, *args: Any) -> None:
        original(caps, *args)
        caps._max_bypasses = 99

    around(patch, "PartialPrefills.__init__", init)


def cache_removals_are_not_reported(patch: Patch) -> None:
    def shrunk(original: Any, events: Any, run: Any, length: int) -> None:
        if length:
            original(events, run, length)

    around(patch, "KVEvents.on_run_shortened", shrunk)


def duplicate_cached_blocks_are_reported(patch: Patch) -> None:
    def add(original: Any, cache: Any, span: Any, *args: Any) -> None:
        original(cache, span, *args)
        if isinstance(cache.listener, find("KVEvents")):
            hashes = cache.listener._hashes[span.run.run_id]
            stored = find("BlockStored")(hashes[span.first : span.first + 1], None, [], Root())
            cache.listener._events.append(stored)

    around(patch, "PrefixCache._add_blocks_to_nodes", add)


def owed_blocks_are_forgotten(patch: Patch) -> None:
    replace(patch, "Running.num_owed_blocks", lambda running: 0)


def prompts_do_not_keep_decoding_out(patch: Patch) -> None:
    def advance_all(running: Any, preempt: Any) -> Any:
        return running._distribute_and_commit(*running.wants(with_drafts=True), preempt)

    replace(patch, "InOrder.advance_prefills", advance_all)


def victim_is_not_queued_at_the_front(patch: Patch) -> None:
    replace(patch, "FrontFirst.key", find("FirstComeFirstServed.key"))


def any_chunk_may_be_shortened(patch: Patch) -> None:
    around(patch, "TokenBudget._must_fit", lambda original, gate, request, budget: False)


def a_step_that_preempted_admits(patch: Patch) -> None:

    def walk(original: Any, running: Any, want: Any, preempt: Any) -> Any:
        granted, counts, blocks, _ = original(running, want, preempt)
        return granted, counts, blocks, False

    around(patch, "InOrder._distribute_row_by_row", walk)


def stall_time_restarts_at_every_check(patch: Patch) -> None:
    def stalled(original: Any, dog: Any, table: Any, *args: Any) -> Any:
        dog._seen = {}
        return original(dog, table, *args)

    around(patch, "Watchdog.stalled", stalled)


def reported_holder_is_not_the_largest(patch: Patch) -> None:
    replace(patch, "_sorted_by_amount", list)


def prefix_is_not_found(patch: Patch) -> None:
    around(patch, "PrefixCache.look_up", lambda original, cache, root, *_: original(cache, root, b"", 0))


def completion_is_forgotten_with_the_row(patch: Patch) -> None:
    """A request that lost its row in flight is not completed when its prompt was computed."""

    def completions(original: Any, update: Any, output: Any, result: Any) -> Any:
        return [(index, end) for index, end in original(update, output, result) if end.request.row is not None]

    around(patch, "Update._ends_by_completion", completions)


def completion_is_not_rewound(patch: Patch) -> None:
    def rewind(original: Any, record: Any, batch: Any, *args: Any) -> None:
        output = record.output
        original(record, batch, *args)
        rows = output.rows[output.completes]
        batch.num_pending[rows[batch.serial[rows] == output.serials[output.completes]]] += 1

    around(patch, "rewind", rewind)


def rows_without_samples_sample(patch: Patch) -> None:
    def without(emission: Any, advance: Any) -> Any:
        return advance.samples, np.zeros(0, dtype=np.int64)

    replace(patch, "Emission._without_completions", without)


def samples_of_a_complete_part_are_kept(patch: Patch) -> None:
    """Samples of steps in flight after the end of a part are taken as output of the next part."""
    replace(patch, "RequestTable.disown_steps_in_flight", lambda table, request: None)


def last_token_of_a_part_stays(patch: Patch) -> None:
    """The token that ended a part's output becomes part of the prompt, though it was never computed."""

    def take(original: Any, parts: Any, request: Request, now: float) -> None:
        output = request.output_token_ids
        request._state.append_output(output[-1:])
        original(parts, request, now)

    around(patch, "PromptParts._append_next_parts", take)


def placeholders_of_a_part_are_not_moved(patch: Patch) -> None:
    """Positions of a part's placeholders count from the start of the part, not of the whole prompt."""

    def replace_prompt(original: Any, state: Any, tokens: Any, most: int, inputs: tuple[EncoderInput, ...]) -> None:
        known, end = len(state.encoder_inputs), len(tokens) - state.num_tokens
        moved = [item._replace(start=max(item.start - end, 0)) for item in inputs[known:]]
        original(state, tokens, most, (*inputs[:known], *moved))

    around(patch, "RequestState.replace_prompt", replace_prompt)


def longer_prompt_is_keyed_without_its_images(patch: Patch) -> None:
    def replace_prompt(original: Any, state: Any, *args: Any) -> None:
        generation = state.content_generation
        original(state, *args)
        state.content_generation = generation

    around(patch, "RequestState.replace_prompt", replace_prompt)


def end_of_a_part_counts_as_a_preemption(patch: Patch) -> None:
    def lose_rows(original: Any, table: Any, requests: list[Request], cause: Any, now: float, **options: Any) -> None:
        original(table, requests, cause or find("PreemptionCause").PARKED, now, **options)

    around(patch, "RequestTable._take_rows_from", lose_rows)


def prompt_part_bypasses_another(patch: Patch) -> None:
    def extend(original: Any, parts: Any, request: Request, *args: Any, **kwargs: Any) -> None:
        original(parts, request, *args, **kwargs)
        request._state.parts.reverse()

    around(patch, "PromptParts.extend", extend)


def pause_does_not_stop_admissions(patch: Patch) -> None:
    def closed(original: Any, admission: Any, preempted: bool) -> Any:
        return _without_pause(admission, original, admission, preempted)

    around(patch, "Admission._reason_closed", closed)


def pause_allows_priority_preemption(patch: Patch) -> None:
    def displace(original: Any, scheduler: Any, step: Any) -> Any:
        return _without_pause(scheduler._admission, original, scheduler, step)

    around(patch, "Scheduler._preempt_for_urgent", displace)


def _without_pause(admission: Any, original: Any, *args: Any) -> Any:
    pause, admission.pause = admission.pause, None
    try:
        return original(*args)
    finally:
        admission.pause = pause


def reset_preempts_one_too_few(patch: Patch) -> None:
    def preempt_all(table: Any, now: float) -> None:
        for request in table._batch.members.requests[1:]:
            table.preempt(request, find("PreemptionCause").RESET, None, now)

    replace(patch, "RequestTable.preempt_all", preempt_all)


def priority_preemption_frees_too_few_blocks(patch: Patch) -> None:
    def choose(displacement: Any, head: Any) -> list[Any]:
        members = displacement._batch.members
        return [request for request in members.requests if request.priority > head.priority][:1]

    replace(patch, "PriorityPreemption.choose", choose)


def drafts_preempt_other_requests(patch: Patch) -> None:
    replace(patch, "Running._give_up_drafts", lambda running, rows, lacks, want: False)


def a_row_advances_while_its_drafts_are_in_flight(patch: Patch) -> None:
    def wants(original: Any, running: Any, **how: Any) -> Any:
        batch, rows = running._batch, running._batch.members.rows
        ahead = np.maximum(batch.num_computed_tokens[rows] - batch.num_tokens[rows], 0)
        batch.num_pending[rows] += ahead
        try:
            return original(running, **how)
        finally:
            batch.num_pending[rows] -= ahead

    around(patch, "Running.wants", wants)


def drafts_outlive_their_requests(patch: Patch) -> None:
    def is_among(drafts: Any, rows: Any) -> Any:
        return np.isin(drafts._rows, rows)

    replace(patch, "Drafts._is_among", is_among)


def drafts_ignore_the_table(patch: Patch) -> None:
    replace(patch, "Drafts.are_all_allowed_for", lambda drafts, rows: rows is drafts._rows)


def drafts_of_the_last_request_count_for_the_next(patch: Patch) -> None:
    replace(patch, "Acceptance.release_row", lambda acceptance, row: acceptance.counts_of(row))


def recent_tokens_are_moved_too_late(patch: Patch) -> None:
    def keep_recent(original: Any, batch: Any, row: int, num_tokens: int, newest: int) -> None:
        original(batch, row, num_tokens, newest)
        batch.recent_limit[row] += batch._num_recent

    around(patch, "Batch._keep_newest_token", keep_recent)


def the_last_row_is_not_in_the_slice(patch: Patch) -> None:
    def members(original: Any, members: Any, *args: Any) -> None:
        original(members, *args)
        if members.span is not None:
            members.span = slice(members.span.stop - 1)

    around(patch, "Members.__init__", members)


def rejected_drafts_count_as_computed(patch: Patch) -> None:
    def append_runs(original: Any, update: Any, live: Any, drafts: Any, *args: Any) -> Any:
        kept, ends = original(update, live, drafts, *args)
        if drafts is not None:
            update._batch.num_computed_tokens[live.rows] += kept.counts < 1 + drafts
        return kept, ends

    around(patch, "Update._append_runs", append_runs)


def stop_within_a_run_is_missed(patch: Patch) -> None:
    def cut(request: Any, num_tokens: int, run: list[int]) -> Any:
        return len(run), find("stop_condition")(request, num_tokens + len(run), run[-1])

    replace(patch, "_cut_at_stop", cut)


def waiting_reason_restarts_in_every_step(patch: Patch) -> None:
    def note(original: Any, admission: Any, request: Any, verdict: Any, now: float) -> None:
        request._state.deferral = None
        original(admission, request, verdict, now)

    around(patch, "Admission._record_deferral", note)


def time_of_a_skipped_row_restarts_in_every_step(patch: Patch) -> None:
    def note(original: Any, left_out: Any, *args: Any, continues: bool) -> None:
        original(left_out, *args, continues=False)

    around(patch, "LeftOut.record_rows", note)


def preempted_request_waits_since_its_arrival(patch: Patch) -> None:
    def queue_again(original: Any, table: Any, request: Any, now: float) -> None:
        before = request._state.queued_at
        original(table, request, now)
        request._state.queued_at = before

    around(patch, "RequestTable._queue_again", queue_again)


def missing_amount_is_too_large(patch: Patch) -> None:
    def note(original: Any, admission: Any, request: Any, verdict: Any, now: float) -> None:
        original(admission, request, verdict._replace(missing=verdict.missing + 1), now)

    around(patch, "Admission._record_deferral", note)


def children_are_retained_without_their_parents(patch: Patch) -> None:
    around(patch, "RetainingPool.retain", lambda original, pool, blocks, *args: original(pool, blocks[::-1][:1], *args))
    around(patch, "RetainingPool.order_marks", lambda original, pool, blocks: None)


def expired_blocks_stay_while_their_parents_are_released(patch: Patch) -> None:
    def expire(original: Any, pool: Any, now: float) -> None:
        pool._clock = max(pool._clock, now)

    around(patch, "RetainingPool.expire", expire)


def a_block_of_two_tenants_is_the_last_one(patch: Patch) -> None:
    def retain(original: Any, pool: Any, blocks: Any, until: float, tenant: str | None) -> None:
        original(pool, blocks, until, tenant)
        if tenant is not None:
            pool._owner[blocks] = pool._tenant_number(tenant)

    around(patch, "RetainingPool.retain", retain)


def a_tenant_retains_blocks_without_limit(patch: Patch) -> None:
    around(patch, "RetainingPool._enforce_limits", lambda original, pool: None)


# ------------------------------------------------------------- wrong KV: the shadow must notice


def salt_is_ignored(patch: Patch) -> None:
    replace(patch, "Root.of", classmethod(lambda cls, request: Root(None, request.adapter)))


def adapter_is_ignored(patch: Patch) -> None:
    replace(patch, "Root.of", classmethod(lambda cls, request: Root(request.cache_salt)))


def adapter_version_is_ignored(patch: Patch) -> None:
    def of(request: Any) -> Any:
        return Root(request.cache_salt, request.adapter and Adapter(request.adapter.name))

    replace(patch, "Root.of", of)


def adapter_is_confused_with_a_salt(patch: Patch) -> None:
    def of(request: Any) -> Any:
        return Root(request.cache_salt or (request.adapter and request.adapter.name))

    replace(patch, "Root.of", of)


def parent_is_ignored(patch: Patch) -> None:
    def successors(original: Any, cache: Any, node: Any, *args: Any) -> Any:
        return original(cache, node, *args) or original(cache, Root(None), *args)

    around(patch, "PrefixCache._successors", successors)


def eviction_is_not_reported(patch: Patch) -> None:
    around(patch, "PrefixCache.evict", lambda original, cache, blocks: None)


def evictions_are_forgotten(patch: Patch) -> None:
    around(patch, "PrefixCache._shorten_evicted_runs", lambda original, cache: cache._evicted.clear())


def a_lookup_finds_blocks_that_are_about_to_be_evicted(patch: Patch) -> None:
    def look_up(original: Any, cache: Any, *args: Any) -> Any:
        leaving, cache._evicted = cache._evicted, []
        found = original(cache, *args)
        cache._evicted = leaving
        return found

    around(patch, "PrefixCache.look_up", look_up)


def shared_block_has_one_reference(patch: Patch) -> None:
    def acquire(original: Any, pool: Any, blocks: list[int]) -> None:
        held = [block for block in blocks if pool.num_references[block] > 0]
        original(pool, blocks)
        pool.num_references[held] -= 1

    around(patch, "BlockPool.acquire", acquire)


def journal_is_not_undone(patch: Patch) -> None:
    around(patch, "KVCacheManager.undo", lambda original, kv, *args, **kwargs: None)


def rewind_is_short_by_one(patch: Patch) -> None:
    def rewind(original: Any, record: Any, batch: Any, *args: Any) -> None:
        output = record.output
        original(record, batch, *args)
        chunks = (batch.serial[output.rows] == output.serials) & (output.num_scheduled_tokens > 1)
        batch.num_computed_tokens[output.rows[chunks]] += 1

    around(patch, "rewind", rewind)


def epoch_is_ignored(patch: Patch) -> None:
    def clear(original: Any, cache: Any) -> None:
        epoch = cache.epoch
        original(cache)
        cache.epoch = epoch

    around(patch, "PrefixCache.clear", clear)


def reset_keeps_blocks_of_preempted_requests(patch: Patch) -> None:
    """Running requests are preempted after the cache was emptied, and publish their blocks into it."""

    def reset(original: Any, scheduler: Scheduler, now: float, *, preempt_running: bool = False) -> None:
        epoch = scheduler._kv.prefix.epoch if scheduler._kv.prefix is not None else 0
        original(scheduler, now)
        requests = list(scheduler._batch.members.requests) if preempt_running else []
        for request in requests:
            state = request._state
            if state.prefix_epoch == epoch and scheduler._kv.prefix is not None:
                state.prefix_epoch = scheduler._kv.prefix.epoch
                state.prefix_node, state.num_published_blocks = Root(request.cache_salt), 0
        scheduler._table._take_rows_from(requests, PreemptionCause.RESET, now)
        for request in reversed(requests):
            scheduler._table._queue_again(request, now)

    around(patch, "Scheduler.reset_prefix_cache", reset)


def reset_does_nothing(patch: Patch) -> None:
    around(patch, "KVCacheManager.reset", lambda original, kv: None)


def sharing_within_a_step_is_not_asked(patch: Patch) -> None:
    replace(patch, "KVCacheManager.publish_prompt", find("KVCacheManager._publish_prompt"))


def published_too_far(patch: Patch) -> None:
    def publish(original: Any, kv: Any, request: Any, row: int, end: int, token_bytes: bytes, *args: Any) -> bool:
        held = int(request._state.batch.num_slots[row]) // kv.block_size
        further = min(held, len(token_bytes) // (4 * kv.block_size))
        return original(kv, request, row, further, token_bytes, *args)

    around(patch, "KVCacheManager._publish_row", publish)


def adapter_slot_is_not_released(patch: Patch) -> None:
    replace(patch, "AdapterSlots.release", lambda slots, request: None)


def adapter_slot_counts_its_first_row_alone(patch: Patch) -> None:
    def commit(original: Any, slots: Any, request: Request, *args: Any) -> None:
        if request.adapter not in slots.held:
            original(slots, request, *args)

    def release(original: Any, slots: Any, request: Request) -> None:
        if request.adapter in slots.held:
            original(slots, request)

    around(patch, "AdapterSlots.commit", commit)
    around(patch, "AdapterSlots.release", release)


def claims_are_ignored(patch: Patch) -> None:
    replace(patch, "AdapterSlots._adapters_with_claimed_slot", lambda slots: [])


def bypasses_are_not_counted(patch: Patch) -> None:
    around(patch, "Admission._return_skipped", lambda original, admission, skipped, _: original(admission, skipped, 0))


def skipped_request_returns_behind_the_next(patch: Patch) -> None:
    def put_back(original: Any, queue: Any, requests: Any) -> None:
        original(queue, requests)
        if len(requests) > 1:
            requests[0]._state.queue_entry[2] += 1e9  # as if it had arrived later
            queue._move_to_heap(0)
            heapq.heapify(queue._heap)

    around(patch, "FirstComeFirstServed.put_back", put_back)


def cap_is_off_by_one(patch: Patch) -> None:
    def init(original: Any, slots: Any, config: Any) -> None:
        original(slots, config)
        slots.num_slots += 1

    around(patch, "AdapterSlots.__init__", init)


# ------------------------------------------------------------- encoder inputs


def waiting_for_embeddings_is_reported_for_ever(patch: Patch) -> None:
    def open_step(original: Any, encoder: Any, *args: Any) -> None:
        waiting = dict(encoder._waiting)
        original(encoder, *args)
        encoder._waiting.update(waiting)

    around(patch, "EncoderCache.begin_step", open_step)


def content_is_no_part_of_the_key(patch: Patch) -> None:
    replace(patch, "ContentMarks.rekey_starts_generation", lambda marks, request: False)


def contents_of_equal_length_have_one_mark(patch: Patch) -> None:
    around(patch, "ContentMarks._marks_of", lambda original, marks, content: original(marks, ("", *content[1:])))


def chunk_is_cut_one_token_too_late(patch: Patch) -> None:
    def reach(original: Any, plan: Any, request: Any, start: int, want: int) -> Any:
        tokens, blocked = original(plan, request, start, want)
        return min(tokens + 1, want), blocked

    around(patch, "_Plan.num_computable_tokens", reach)


def void_embeddings_are_kept(patch: Patch) -> None:
    around(patch, "EncoderCache.undo_steps", lambda original, cache, first_step, freed: original(cache, 1 << 60, freed))


def freed_embeddings_are_not_reported(patch: Patch) -> None:
    around(patch, "EncoderCache.end_step", lambda original, cache: (original(cache)[0], []))


def lost_row_keeps_its_embeddings(patch: Patch) -> None:
    replace(patch, "EncoderCache.release", lambda cache, request: None)


def encoder_budget_is_not_spent(patch: Patch) -> None:
    def hold(original: Any, cache: Any, *args: Any) -> None:
        budget = cache._budget
        original(cache, *args)
        cache._budget = budget

    around(patch, "EncoderCache._hold_entry", hold)


def encoder_cache_is_too_large(patch: Patch) -> None:
    def init(original: Any, cache: Any, *args: Any) -> None:
        original(cache, *args)
        cache.size += 1

    around(patch, "EncoderCache.__init__", init)


# ------------------------------------------------------------- KV transfers


def bound_of_holders_is_ignored(patch: Patch) -> None:
    def fit(transfers: Any, local: Any, external: int) -> Any:
        return find("External")(external * transfers._kv.block_size, True)

    replace(patch, "Transfers._fit_async_load", fit)


def holder_does_not_hand_over(patch: Patch) -> None:
    def admit(original: Any, loading: Any, request: Any, *args: Any) -> None:
        holding = request._state.holding
        original(loading, request, *args)
        if holding is not None:
            request._state.holding = holding

    around(patch, "Loading.admit", admit)


def transfer_ends_twice(patch: Patch) -> None:
    def end(original: Any, transfers: Any, holding: Any) -> None:
        original(transfers, holding)
        transfers._open[holding.transfer_id] = holding

    around(patch, "Transfers.finish_transfer", end)


def partial_load_counts_as_whole(patch: Patch) -> None:
    def shorten(original: Any, transfers: Any, holding: Any, num_blocks: int) -> None:
        original(transfers, holding, len(holding.blocks) if num_blocks else 0)

    around(patch, "Transfers.shorten_load", shorten)


def abandoned_blocks_are_free_at_once(patch: Patch) -> None:
    """The device may still write the blocks of an abandoned load."""

    def let_go(original: Any, transfers: Any, request: Any) -> None:
        holding = request._state.holding
        original(transfers, request)
        if holding.is_open:
            transfers._kv.release_held_blocks(holding.blocks)
            transfers.num_blocks -= len(holding.blocks)
            holding.blocks = holding.blocks[:0]

    around(patch, "Transfers.release_holding", let_go)


def load_is_published_when_it_starts(patch: Patch) -> None:
    def start(original: Any, loading: Any, request: Any, *args: Any) -> None:
        original(loading, request, *args)
        loading._kv.publish_loaded(request, request._state.holding.table)

    around(patch, "Loading.start", start)


def sent_blocks_are_not_held(patch: Patch) -> None:
    def hold(original: Any, transfers: Any, request: Any, blocks: Any, num_tokens: int) -> None:
        before = transfers.num_open
        original(transfers, request, blocks, num_tokens)
        if transfers.num_open > before:
            transfers._kv.pool.num_references[blocks] -= 1

    around(patch, "Transfers.hold_if_sending", hold)


def blocks_are_saved_for_no_request(patch: Patch) -> None:
    """Blocks that a preempted request needed are still saved after it has finished."""
    replace(patch, "Swap.stop_watching", lambda swap, request: None)


def void_load_stands(patch: Patch) -> None:
    replace(patch, "Loading.roll_back", lambda loading, record, now: None)


def keys_forget_the_salt(patch: Patch) -> None:
    replace(patch, "root_key", lambda root: b"root")


def keys_forget_the_parent(patch: Patch) -> None:
    def block_keys(request: Any, block_size: int) -> list[bytes]:
        tokens, size = request._state.known_bytes(), 4 * block_size
        return [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]

    replace(patch, "block_keys", block_keys, device.__name__)


Fault = tuple[Callable[[Patch], None], dict[str, Any]]  # how to plant it, and knobs under which it shows soon

# ------------------------------------------------------------- groups of KV


def window_blocks_are_lost(patch: Patch) -> None:
    def release_any(original: Any, pool: Any, blocks: Any, **options: Any) -> None:
        original(pool, blocks[1:] if len(blocks) == 3 else blocks, **options)

    around(patch, "BlockPool.release_any", release_any)


def block_is_released_one_token_too_early(patch: Patch) -> None:
    around(
        patch,
        "Windows._num_final_tokens",
        lambda original, windows, *args: original(windows, *args) + windows.block_size,
    )


def block_is_released_while_a_step_reads_it(patch: Patch) -> None:
    around(patch, "StepsInFlight.num_tokens", lambda original, steps, num_rows: original(steps, num_rows) * 0)


def a_hit_ignores_the_window(patch: Patch) -> None:
    around(patch, "AttendedBlocks.num_reusable", lambda original, attended, has, *args: has.shape[1])


def a_block_is_found_as_it_was(patch: Patch) -> None:
    """A lookup finds a cached block whose content has changed."""

    def has(original: Any, cache: Any, run: Any, first: int, count: int) -> Any:
        return run.blocks[:, first : first + count] != cache.no_block

    around(patch, "PrefixCache._has_blocks", has)


def a_group_is_found_for_another(patch: Patch) -> None:
    def look_up(original: Any, cache: Any, *args: Any) -> Any:
        found = original(cache, *args)
        return found._replace(blocks=found.blocks[::-1]) if len(found.spans) else found

    around(patch, "PrefixCache.look_up", look_up)


def undo_forgets_groups(patch: Patch) -> None:
    def places(original: Any, kv: Any, entry: Any) -> Any:
        return [each for each in original(kv, entry) if each[2] % kv.num_groups == 0]

    around(patch, "KVCacheManager._locate_published_blocks", places)


def blocks_that_other_requests_hold_are_moved(patch: Patch) -> None:
    def publish(original: Any, windows: Any, row: int) -> None:
        original(windows, row)
        windows._public[row], windows._moves_at[row] = 0, windows._due_at[row]

    around(patch, "Windows.mark_public", publish)


BOOKKEEPING: tuple[Fault, ...] = (
    (window_blocks_are_lost, GROUPS),
    (pool_loses_a_block, {}),
    (recording_begins_with_a_used_pool, WITHOUT_CACHE),
    (recording_begins_with_learned_output_lengths, {"decode_reserve": "mean", "num_blocks": 12}),
    (pool_invents_a_block, {}),
    (one_decrement_is_skipped, CACHING),
    (row_is_not_left, {}),
    (the_last_row_is_not_in_the_slice, {"num_draft_tokens": 0}),
    (row_is_reused_too_early, {"max_steps_in_flight": 3, "max_num_seqs": 5, "max_num_batched_tokens": 12}),
    (token_limit_is_off_by_one, {}),
    (budget_is_off_by_one, {}),
    (all_requests_run_ahead_at_once, {"max_steps_in_flight": 3}),
    (all_requests_run_ahead_in_mixed_steps, {"max_steps_in_flight": 3}),
    (queue_forgets_a_removal, {}),
    (waiting_reason_restarts_in_every_step, {}),
    (time_of_a_skipped_row_restarts_in_every_step, {"batching": "prefill-first", "shortage": "in-order"}),
    (preempted_request_waits_since_its_arrival, {}),
    (missing_amount_is_too_large, {}),
    (children_are_retained_without_their_parents, RETAINING),
    (expired_blocks_stay_while_their_parents_are_released, RETAINING),
    (a_block_of_two_tenants_is_the_last_one, {**RETAINING, "eviction": "retention:share=0.4"}),
    (a_tenant_retains_blocks_without_limit, {**RETAINING, "eviction": "retention:share=0.4"}),
    (end_of_a_request_is_not_reported, {}),
    (end_of_a_request_is_not_reported_again, {}),
    (watch_misses_what_was_in_flight, {"max_steps_in_flight": 3}),
    (short_patterns_count, {}),
    (one_of_several_stop_tokens_is_forgotten, {}),
    (stop_tokens_outlive_their_row, {}),
    (rewind_is_lost, {}),
    (watermark_is_ignored, {"watermark": 0.35}),
    (mean_counts_aborts, {"decode_reserve": "mean"}),
    (expected_output_is_ignored, {"decode_reserve": 9}),
    (first_token_is_missed_if_it_is_the_last, {"log_request_events": True}),
    (share_is_not_adapted, {"long_prefill_token_threshold": 1, "long_prefill_token_threshold_adaptive": True}),
    (number_of_sequence_slots_cannot_be_changed, {"max_num_seqs": 5, "max_num_batched_tokens": 12}),
    (common_prefix_is_not_recomputed, {**CACHING, "count_common_prefix": True}),
    (one_prefill_too_many, HALF_DONE),
    (prompt_is_bypassed_without_bound, {**HALF_DONE, "max_overtakes": 0}),
    (cache_removals_are_not_reported, {**CACHING, "enable_kv_cache_events": True}),
    (duplicate_cached_blocks_are_reported, {**CACHING, "enable_kv_cache_events": True}),
    (owed_blocks_are_forgotten, {"full_sequence_must_fit": True, "enable_chunked_prefill": True}),
    (prompts_do_not_keep_decoding_out, {"batching": "prefill-first"}),
    (victim_is_not_queued_at_the_front, {**SHORT_OF_BLOCKS, "order": "fcfs-front"}),
    (any_chunk_may_be_shortened, {"first_chunk_only": True, "enable_chunked_prefill": True}),
    (a_step_that_preempted_admits, {**SHORT_OF_BLOCKS, "shortage": "in-order", "admit_after_preemption": False}),
    (stall_time_restarts_at_every_check, {}),
    (reported_holder_is_not_the_largest, {}),
    (prefix_is_not_found, CACHING),
    (adapter_slot_is_not_released, ADAPTERS),
    (adapter_slot_counts_its_first_row_alone, ADAPTERS),
    (cap_is_off_by_one, {**ADAPTERS, "max_num_seqs": 5, "max_num_batched_tokens": 15, "batching": "mixed"}),
    (claims_are_ignored, CROWDED),
    (bypasses_are_not_counted, CROWDED),
    (skipped_request_returns_behind_the_next, CROWDED),
    (drafts_preempt_other_requests, SPECULATION),
    (a_row_advances_while_its_drafts_are_in_flight, {**SPECULATION, "max_steps_in_flight": 3}),
    (drafts_outlive_their_requests, SPECULATION),
    (recent_tokens_are_moved_too_late, {**SPECULATION, "num_draft_tokens": 1}),
    (drafts_ignore_the_table, STEADY_SPECULATION),
    (drafts_of_the_last_request_count_for_the_next, SPECULATION),
    (rejected_drafts_count_as_computed, SPECULATION),
    (stop_within_a_run_is_missed, SPECULATION),
    (encoder_cache_is_too_large, IMAGES),
    (encoder_budget_is_not_spent, {**IMAGES, "encoder_cache_size": 30}),
    (lost_row_keeps_its_embeddings, IMAGES),
    (waiting_for_embeddings_is_reported_for_ever, SLOW_IMAGES),
    (priority_preemption_frees_too_few_blocks, {"order": "priority", "displace": True, "batching": "mixed"}),
    (completion_is_forgotten_with_the_row, {"max_steps_in_flight": 3}),
    (completion_is_not_rewound, {**UNCACHED_CHUNKS, "max_steps_in_flight": 3}),
    (rows_without_samples_sample, {}),
    (samples_of_a_complete_part_are_kept, {"max_steps_in_flight": 3}),
    (last_token_of_a_part_stays, {}),
    (prompt_part_bypasses_another, {}),
    (placeholders_of_a_part_are_not_moved, SMALL_IMAGE_BLOCKS),
    (end_of_a_part_counts_as_a_preemption, {}),
    (pause_does_not_stop_admissions, {}),
    (pause_allows_priority_preemption, {**PLAIN, "order": "priority", "displace": True, "max_num_seqs": 2}),
    (reset_preempts_one_too_few, {}),
    (bound_of_holders_is_ignored, TRANSFERS),
    (holder_does_not_hand_over, TRANSFERS),
    (transfer_ends_twice, TRANSFERS),
    (void_load_stands, {**TRANSFERS, "max_steps_in_flight": 3}),
    (blocks_are_saved_for_no_request, SWAPS),
)
WRONG_CONTENT: tuple[Fault, ...] = (
    (block_is_released_one_token_too_early, GROUPS),
    (block_is_released_while_a_step_reads_it, {**GROUPS, "max_steps_in_flight": 3}),
    (a_hit_ignores_the_window, GROUPS),
    (a_block_is_found_as_it_was, GROUPS),
    (a_group_is_found_for_another, GROUPS),
    (undo_forgets_groups, GROUPS),
    (blocks_that_other_requests_hold_are_moved, {**GROUPS, "share_within_step": True}),
    (salt_is_ignored, CACHING),
    (adapter_is_ignored, ADAPTERS),
    (adapter_version_is_ignored, ADAPTERS),
    (adapter_is_confused_with_a_salt, ADAPTERS),
    (content_is_no_part_of_the_key, {**CACHING, **IMAGES}),
    (contents_of_equal_length_have_one_mark, SMALL_IMAGE_BLOCKS),
    (longer_prompt_is_keyed_without_its_images, SMALL_IMAGE_BLOCKS),
    (chunk_is_cut_one_token_too_late, {**IMAGES, "encoder_cache_size": 30}),
    (void_embeddings_are_kept, IMAGES),
    (freed_embeddings_are_not_reported, IMAGES),
    (parent_is_ignored, CACHING),
    (eviction_is_not_reported, CACHING),
    (evictions_are_forgotten, CACHING),
    (a_lookup_finds_blocks_that_are_about_to_be_evicted, CACHING),
    (shared_block_has_one_reference, ROOMY),
    (journal_is_not_undone, CACHING),
    (rewind_is_short_by_one, {"num_draft_tokens": 0, "draft_table": ()}),
    (epoch_is_ignored, ROOMY),
    (reset_does_nothing, CACHING),
    (reset_keeps_blocks_of_preempted_requests, CACHING),
    (sharing_within_a_step_is_not_asked, {**WIDE, "share_within_step": False}),
    (published_too_far, SLOW_PREFILL),
    (partial_load_counts_as_whole, {**PLAIN, **TRANSFERS, "block_size": 1, "kv_load_failure_policy": "recompute"}),
    (abandoned_blocks_are_free_at_once, TRANSFERS),
    (load_is_published_when_it_starts, TRANSFERS),
    (sent_blocks_are_not_held, TRANSFERS),
    (keys_forget_the_salt, TRANSFERS),
    (keys_forget_the_parent, TRANSFERS),
)


SLOW = {
    "completion_is_forgotten_with_the_row",
    "encoder_budget_is_not_spent",
    "blocks_that_other_requests_hold_are_moved",
    "one_decrement_is_skipped",
    "prompt_part_bypasses_another",
    "pause_allows_priority_preemption",
    "published_too_far",
    "recent_tokens_are_moved_too_late",
    "recording_begins_with_learned_output_lengths",
    "waiting_for_embeddings_is_reported_for_ever",
}
"""Faults that take 3 to 10 s to find. Only the long form plants them; the short form has similar ones."""


def planted(faults: tuple[Fault, ...]) -> list[Any]:
    """Faults as parameters of a test."""
    return [
        pytest.param(plant, overrides, id=plant.__name__, marks=[pytest.mark.long] if plant.__name__ in SLOW else [])
        for plant, overrides in faults
    ]


def first_catch(overrides: dict[str, Any], kind: type[AssertionError]) -> AssertionError:
    """The message of the first check that fails. Crashes, and asserts of the core, do not count as caught."""
    for seed in range(MAX_SEEDS):
        try:
            drive(seed, RULES_PER_SEED, shadow_only=kind is ShadowFault, **{**AS_PLANTED, **overrides})
        except kind as error:
            return error
        except ConfigError:
            raise
        except (AttributeError, TypeError) as error:
            if traceback.extract_tb(error.__traceback__)[-1].filename == __file__:
                raise  # The fault itself uses objects that no longer exist.
        except Exception:
            continue
    raise LookupError(f"no check noticed anything in {MAX_SEEDS} runs of {RULES_PER_SEED} rules")


def names(faults: tuple[Fault, ...]) -> list[str]:
    return [plant.__name__ for plant, _ in faults]


@pytest.mark.parametrize(
    "plant", [plant for plant, _ in (*BOOKKEEPING, *WRONG_CONTENT)], ids=lambda plant: plant.__name__
)
def test_each_fault_replaces_code_that_exists(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """The short form does not search for slow faults, but a renamed function must not disable them."""
    plant(monkeypatch)


@pytest.mark.parametrize(("plant", "overrides"), planted(BOOKKEEPING))
def test_checks_detect_planted_bookkeeping_faults(
    plant: Callable[[Patch], None], overrides: dict[str, Any], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    assert isinstance(first_catch(overrides, AssertionError), ShadowFault | InvariantError)


@pytest.mark.parametrize(("plant", "overrides"), planted(WRONG_CONTENT))
def test_comparing_kv_content_alone_detects_planted_kv_faults(
    plant: Callable[[Patch], None], overrides: dict[str, Any], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    error = str(first_catch(overrides, ShadowFault))
    signs = (
        "reads position",
        "names a block",
        "lacks blocks",
        "got a block outside",
        "in two groups",
        "embeddings",
        "and it is there",
        "is handed",
        "are held",
        "sent",
        "is saved",
        "its blocks hold",
        "offered",
    )
    assert any(sign in error for sign in signs), error


def test_every_planted_fault_has_a_unique_name() -> None:
    planted_names = names(BOOKKEEPING + WRONG_CONTENT)
    assert len(set(planted_names)) == len(planted_names)
    assert set(planted_names) > SLOW


def test_checks_report_nothing_without_a_planted_fault() -> None:
    """All seeds pass without a planted fault; otherwise a caught fault would prove nothing."""
    different = {repr(overrides): overrides for _, overrides in (*BOOKKEEPING, *WRONG_CONTENT)}
    for overrides in different.values():
        for seed in range(short_or_long(1, 2)):
            drive(seed, RULES_PER_SEED, **{"policies": False, **overrides})
