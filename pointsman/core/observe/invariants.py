"""Checks the numbered invariants that hold between any two calls of a scheduler.

    1  blocks are conserved: each block is blank, cached free or referenced; each reference is an entry of a block
       table, or is of a block held for a transfer; every cached block can be reached in the prefix tree, and is
       evicted before its parent
    2  a request is in exactly one place: queued, parked, running, or finished
    3  a step never exceeds the token budget, the sequence limit, the adapter slots, the encoder budget
    9  the key of a cached block is exactly its content

The module also checks that the columns of the batch are consistent.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import InvariantError
from pointsman.core.kv.cache import KVCache
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.kv.prefix_tree import TOKEN_BYTES, PrefixCache, Root
from pointsman.core.kv.retained import SHARED, RetainingPool
from pointsman.core.kv.transfers import Holding, Transfers
from pointsman.core.state.batch import ENCODER_INPUTS, NO_SAMPLE, NOT_AHEAD, PREFILLING, WATCHED, Batch, StopFilter
from pointsman.core.state.status import RequestStatus
from pointsman.core.step.assembly import Parts
from pointsman.core.step.drafts import Drafts
from pointsman.core.step.in_flight import StepsInFlight
from pointsman.core.step.request_table import RequestTable


def check(config: SchedulerConfig, parts: Parts, max_seen_active_seqs: int) -> None:
    """Check all invariants that hold between two calls; `max_seen_active_seqs` is the highest limit on running requests
    so far.

    Raises:
        InvariantError: an invariant ("promise") is broken; the message has its number.
    """
    batch, transfers = parts.batch, parts.transfers
    holdings = [] if transfers is None else transfers.holdings()
    if isinstance(parts.kv, KVCacheManager):
        _check_blocks(batch, parts.kv, holdings)
    broken = parts.kv.broken(batch)
    _require(broken is None, 1, "{}", broken)
    _check_places(batch, parts.table)
    _require(len(batch) <= max_seen_active_seqs, 3, "{} requests run, more than {}", len(batch), max_seen_active_seqs)
    if transfers is not None:
        _check_transfers(transfers, parts.table)
    _check_steps(config, parts.steps)
    _check_adapters(config, parts)
    _check_encoder(config, parts)
    _check_columns(config, batch, parts.kv, _check_in_flight(batch, parts.steps))
    _check_stop_filter(batch)
    _check_drafts(config, batch, parts.drafts)
    _check_contents(batch, parts.kv)


def _require(condition: bool, promise: int, what: str, *values: object) -> None:
    """Raise an InvariantError for the invariant number `promise` unless `condition` holds. The message `what` has a
    `{}` for each of `values`; it is formatted only on failure, since formatting takes longer than the check."""
    if not condition:
        raise InvariantError(f"promise {promise} is broken: {what.format(*values)}")


def _check_blocks(batch: Batch, kv: KVCacheManager, holdings: list[Holding]) -> None:
    pool = kv.pool
    blank, cached_free = pool.blank_blocks(), pool.cached_free_blocks()
    referenced = pool.num_references.nonzero()[0].tolist()
    everything = sorted([*range(pool.num_reserved_blocks), *blank, *cached_free, *referenced])
    _require(everything == list(range(pool.num_blocks)), 1, "blank, cached free and referenced blocks are not the pool")
    entries, group_of = np.zeros(pool.num_blocks, dtype=np.int64), np.full(pool.num_blocks, -1)
    for row in batch.members.rows.tolist():
        blocks, _, groups = kv.blocks_with_places(row)
        np.add.at(entries, blocks, 1)
        is_in_another = (group_of[blocks] != -1) & (group_of[blocks] != groups)
        _require(not is_in_another.any(), 1, "blocks {} are in the tables of two groups", blocks[is_in_another])
        group_of[blocks] = groups
    for holding in holdings:
        np.add.at(entries, holding.blocks, 1)
    _require(
        np.array_equal(entries, pool.num_references), 1, "reference counts differ from block-table entries and holdings"
    )
    cached = set(pool.is_cached.nonzero()[0].tolist())
    in_tree = kv.prefix.blocks() if kv.prefix is not None else []
    known = {block for block in cached if kv.prefix is not None and kv.prefix.is_cached(block)}
    _require(sorted(in_tree) == sorted(known), 1, "the cached blocks differ from the blocks in the prefix tree")
    if kv.prefix is not None:  # blocks of groups other than the anchor may stay cached after their node is removed
        lost = {
            block for block in cached - known if kv.num_groups == 1 or kv.prefix.group_of(block) == kv.prefix.anchor
        }
        _require(not lost, 1, "the prefix tree and the pool disagree on which blocks are cached: {}", lost)
    _require(cached.issuperset(cached_free) and cached.isdisjoint(blank), 1, "free blocks are in the wrong list")
    if kv.prefix is not None:
        _check_evictions(kv.prefix, known, cached_free)
    if kv.retaining is not None:
        _check_retained(kv.retaining)


def _check_evictions(prefix: PrefixCache, cached: set[int], cached_free: list[int]) -> None:
    """Check that no node of the prefix tree is removed before its children. A node is removed when its last anchor
    block is evicted."""
    anchor = prefix.anchor
    if anchor is None:
        return
    turn = {block: index for index, block in enumerate(cached_free)}
    placed = {block: prefix.node_of(block) for block in cached}
    places = {block: place for block, (place, group) in placed.items() if group == anchor}
    gone: dict[tuple[int, int], float] = {}  # by run and index: number of evictions until the node is removed
    for block, (run, index) in places.items():
        key = run.run_id, index
        gone[key] = max(gone.get(key, -1), turn.get(block, np.inf))
    for block, (run, index) in places.items():
        parent = (run.run_id, index - 1)
        if not index:
            if isinstance(run.parent, Root):
                continue
            parent = run.parent.run.run_id, run.parent.at
        _require(gone[parent] >= gone[run.run_id, index], 1, "block {} is evicted after its parent", block)


def _check_retained(pool: RetainingPool) -> None:
    retained = [block for block, _ in pool.retained_blocks()]
    owners = Counter(pool._owner[retained].tolist())
    _require(owners == pool._num_of and len(retained) == pool.num_retained, 1, "retained blocks are miscounted")
    marked = ((pool._until > -np.inf) & (pool.num_references == 0)).nonzero()[0].tolist()
    _require(sorted(retained) == marked, 1, "the marks of free blocks differ from the retained blocks")
    _require(len(retained) <= pool.capacity, 1, "{} blocks are retained, more than {}", len(retained), pool.capacity)
    shared = int(np.count_nonzero((pool._owner == SHARED) & (pool._until > -np.inf)))
    _require(shared == pool._num_shared, 1, "{} blocks are marked as shared, counted {}", shared, pool._num_shared)
    _require(owners[SHARED] <= pool.max_shared, 1, "{} shared blocks are retained", owners[SHARED])
    most = pool.max_retained_of()
    for owner, count in owners.items():
        _require(owner == SHARED or count <= most, 1, "a tenant has {} retained blocks, more than {}", count, most)


def _check_places(batch: Batch, table: RequestTable) -> None:
    queued = [request.request_id for request in table.queue]
    running = [request.request_id for request in batch.members.requests]
    finished = [request.request_id for request in table.requests.values() if request.is_finished]
    everywhere = sorted([*queued, *running, *table.parked, *finished])
    _require(everywhere == sorted(table.requests), 2, "a request is in no place, or in several")
    _require(len(queued) == len(table.queue), 2, "the length of the queue differs from its number of requests")
    for request in table.queue:
        idle = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        _require(idle and request.row is None, 2, "{} is queued, with a wrong status or with a row", request)
    for request in table.parked.values():
        _require(
            request.status.is_parked and request.row is None,
            2,
            "{} is parked, with a wrong status or with a row",
            request,
        )
    for request in table.requests.values():
        waits = request.awaits_input and not request.is_finished
        _require(
            not waits or (request.status.is_parked and not request._state.parts),
            2,
            "{} waits for a prompt part and is not parked",
            request,
        )
    reported = set(table.finished)
    for request in table.requests.values():
        _require(not request.is_finished or request in reported, 2, "{} finished and would never be reported", request)
    for row, request in zip(batch.members.rows.tolist(), batch.members.requests, strict=True):
        is_running = request.status is RequestStatus.RUNNING and request.row == row
        _require(
            is_running and batch.serial[row] == request.serial != 0,
            2,
            "row {1} does not match its request {0}",
            request,
            row,
        )
    rows = batch.members.rows.tolist()
    idle_rows = [*batch._free_rows, *(row for _, row in batch.fenced_rows)]
    _require(sorted([*rows, *idle_rows]) == list(range(len(batch.serial))), 2, "a row was lost, or is used twice")
    _require(not batch.serial[idle_rows].any(), 2, "a free row belongs to an admission")


def _check_transfers(transfers: Transfers, table: RequestTable) -> None:
    holdings = transfers.holdings()
    held = sum(len(holding.blocks) for holding in holdings)
    _require(held == transfers.num_blocks, 1, "{} blocks are held, counted {}", held, transfers.num_blocks)
    _require(
        held <= transfers.max_blocks,
        1,
        "{} blocks are held outside the batch, more than {}",
        held,
        transfers.max_blocks,
    )
    holders = transfers.requests_with_holdings()
    _require(len(set(holders)) == len(holders), 1, "a request holds blocks twice")
    for holding in holdings:
        request = holding.request
        if request is None:
            _require(holding.is_open, 1, "transfer {} has ended, and its blocks are still held", holding.transfer_id)
            continue
        _require(request._state.holding is holding, 1, "{} has no reference to the blocks it holds", request)
        waits = request.request_id in table.parked if holding.is_open else request in table.queue
        _require(waits, 2, "{} holds blocks for transfer {} and is in the wrong place", request, holding.transfer_id)
    for request in table.requests.values():
        _require(
            request._state.holding is None or request in holders, 1, "{} holds blocks that no transfer lists", request
        )


def _check_steps(config: SchedulerConfig, steps: StepsInFlight) -> None:
    _require(len(steps.records) <= config.max_steps_in_flight, 3, "too many steps are in flight")
    for record in steps.records:
        output = record.output
        assert output is not None
        total = int(output.num_scheduled_tokens.sum())
        _require(total == output.total_num_scheduled_tokens, 3, "step {} miscounts its tokens", record.step_id)
        _require(total <= config.max_num_batched_tokens, 3, "step {} exceeds the token budget", record.step_id)
        _require(output.num_rows <= config.max_num_seqs, 3, "step {} exceeds the sequence limit", record.step_id)


def _check_adapters(config: SchedulerConfig, parts: Parts) -> None:
    batch, held = parts.batch, parts.gates.adapters.held
    running = Counter(request.adapter for request in batch.members.requests if request.adapter is not None)
    _require(running == held, 3, "{} run, {} hold adapter slots", dict(running), held)
    for record in parts.steps.records:
        assert record.output is not None
        used = {adapter for adapter in record.output.adapters if adapter is not None}
        _require(len(used) <= config.max_loras, 3, "step {} uses {} adapters", record.step_id, len(used))


def _check_encoder(config: SchedulerConfig, parts: Parts) -> None:
    batch, encoder = parts.batch, parts.encoder
    if encoder is None:
        return
    present = encoder.entries()
    held = {item.entry for request in encoder.holders() for item in encoder.holds(request)}
    running = set(batch.members.requests)
    _require(running.issuperset(encoder.holders()), 2, "a request that does not run holds embeddings")
    _require(held == {entry for entry in present if encoder.is_held(entry)}, 2, "held embeddings are miscounted")
    used = sum(entry.num_embeddings for entry in present)
    _require(used == encoder.num_used <= config.encoder_cache_size, 3, "{} embeddings are in the encoder cache", used)
    _require(sum(entry.num_embeddings for entry in held) == encoder.num_held, 3, "held embeddings are miscounted")
    for record in parts.steps.records:
        assert record.output is not None
        entries = [request.encoder_inputs[index].entry for request, index in record.output.encoder_inputs]
        total = sum(entry.num_embeddings for entry in entries)
        _require(total <= config.encoder_budget, 3, "step {} exceeds the encoder budget", record.step_id)
        _require(len(set(entries)) == len(entries), 3, "step {} computes embeddings twice", record.step_id)


def _check_columns(config: SchedulerConfig, batch: Batch, kv: KVCache, verifying: dict[int, int]) -> None:
    """Check the columns of the batch against its requests. `verifying` has the number of drafts in flight for
    each serial number of an admission."""
    prefilling = watched = not_ahead = no_sample = 0
    for row, request in zip(batch.members.rows.tolist(), batch.members.requests, strict=True):
        tokens, computed = int(batch.num_tokens[row]), int(batch.num_computed_tokens[row])
        pending, slots = int(batch.num_pending[row]), int(batch.num_slots[row])
        flags = int(batch.flags[row])
        _require(
            request.num_prompt_tokens <= tokens <= request.token_limit,
            2,
            "{} has {} tokens, too few or too many",
            request,
            tokens,
        )
        _require(len(request.output_token_ids) == request.num_output_tokens, 2, "{} lost output tokens", request)
        drafts = verifying.get(request.serial, 0)
        most = tokens + drafts if drafts else tokens + pending
        _require(0 <= computed <= most, 2, "{} has computed {} of {} + {}", request, computed, tokens, most - tokens)
        _require(computed <= slots, 1, "{} outgrew its blocks", request)
        if isinstance(kv, KVCacheManager):
            broken = kv.broken_table_invariant(row, slots, min(computed, tokens))
            _require(broken is None, 1, "{} {}", request, broken)
        _require(batch.token_limit[row] == request.token_limit, 2, "the token limit in the row of {} is wrong", request)
        _require(
            batch.min_tokens_left <= request.token_limit - tokens,
            2,
            "{} has fewer tokens left than the known minimum",
            request,
        )
        _require(batch.priority[row] == request.priority, 2, "the priority in the row of {} is wrong", request)
        _require(
            bool(flags & PREFILLING) == (tokens + pending == request.num_admitted_tokens),
            2,
            "the flag PREFILLING of {} is wrong",
            request,
        )
        _require(
            bool(flags & ENCODER_INPUTS) == bool(request.encoder_inputs),
            2,
            "the flag ENCODER_INPUTS of {} is wrong",
            request,
        )
        watch = request._state.repetition_watch
        _require(bool(flags & WATCHED) == (watch is not None), 2, "the flag WATCHED of {} is wrong", request)
        seen = request.num_output_tokens if watch is None else watch.num_seen
        _require(seen == request.num_output_tokens, 2, "{} was watched for {} tokens of its output", request, seen)
        prefilling += bool(flags & PREFILLING)
        watched += bool(flags & WATCHED)
        not_ahead += bool(flags & NOT_AHEAD)
        _require(bool(flags & NOT_AHEAD) != request.runs_ahead, 2, "the flag NOT_AHEAD of {} is wrong", request)
        _require(request.runs_ahead or pending <= 1, 2, "{} has {} samples in flight", request, pending)
        no_sample += bool(flags & NO_SAMPLE)
        _require(bool(flags & NO_SAMPLE) == (request.max_tokens == 0), 2, "the flag NO_SAMPLE of {} is wrong", request)
    _require(prefilling == batch.num_prefilling, 2, "prefilling rows are miscounted")
    most = config.max_num_partial_prefills or prefilling
    _require(prefilling <= most, 3, "{} prefills are partial, more than {}", prefilling, most)
    _require(no_sample == batch.num_no_sample, 2, "rows that sample nothing are miscounted")
    _require(watched == batch.num_watched, 2, "rows that repetitions may finish are miscounted")
    _require(not_ahead == batch.num_not_ahead, 2, "rows that do not run ahead are miscounted")


def _check_stop_filter(batch: Batch) -> None:
    expected = StopFilter()
    for request in batch.members.requests:
        expected.add(request.stop_set)
    same = batch.stop_filter.num_rows == expected.num_rows and np.array_equal(batch.stop_filter.counts, expected.counts)
    _require(same, 2, "the stop filter differs from the stop tokens of the rows with several")
    with_one = sum(len(request.stop_set) == 1 for request in batch.members.requests)
    _require(with_one == batch.num_with_one_stop, 2, "rows with one stop token are miscounted")


def _check_in_flight(batch: Batch, steps: StepsInFlight) -> dict[int, int]:
    """Check the numbers of pending samples against the steps in flight. Returns the number of drafts in flight for
    each serial number of an admission."""
    pending: dict[int, int] = {}  # by serial
    verifying: dict[int, int] = {}
    for record in steps.records:
        output = record.output
        assert output is not None
        serials, drafts = output.serials.tolist(), output.num_draft_tokens.tolist()
        _require(sum(drafts) == len(output.draft_token_ids), 3, "drafts are miscounted")
        for serial, count, num_drafts in zip(serials, output.num_pending().tolist(), drafts, strict=True):
            _require(serial not in verifying, 2, "row {} continues while its drafts are in flight", serial)
            pending[serial] = pending.get(serial, 0) + count
            if num_drafts:
                verifying[serial] = num_drafts
    for row, request in zip(batch.members.rows.tolist(), batch.members.requests, strict=True):
        count = int(batch.num_pending[row])
        _require(count == pending.get(request.serial, 0), 2, "{} has {} pending samples", request, count)
    return verifying


def _check_drafts(config: SchedulerConfig, batch: Batch, drafts: Drafts) -> None:
    """Check that draft tokens wait to be scheduled only for rows that may verify draft tokens."""
    if not drafts.waiting:
        return
    wanted, rows = drafts.num_allowed(batch.members.rows), batch.members.rows
    for row, request, waiting in zip(rows.tolist(), batch.members.requests, wanted.tolist(), strict=True):
        if waiting:
            max_waiting = int(batch.token_limit[row] - batch.num_tokens[row]) - 1
            _require(
                0 < waiting <= min(max_waiting, config.num_draft_tokens),
                2,
                "{} has {} waiting drafts",
                request,
                waiting,
            )
            decodes = batch.num_pending[row] == 0 and batch.num_computed_tokens[row] == batch.num_tokens[row] - 1
            _require(bool(decodes), 2, "{} has drafts and does not decode", request)


def _check_contents(batch: Batch, kv: KVCache) -> None:
    prefix = kv.prefix
    if prefix is None or not isinstance(kv, KVCacheManager):
        return
    for row, request in zip(batch.members.rows.tolist(), batch.members.requests, strict=True):
        if request._state.prefix_epoch != prefix.epoch:
            continue
        root, known = Root.of(request), request._state.known_bytes()
        for block, index, group in zip(*(column.tolist() for column in kv.blocks_with_places(row)), strict=True):
            if not prefix.is_cached(block):
                continue
            held = (root, known[: (index + 1) * kv.block_size * TOKEN_BYTES], group)
            _require(
                (*prefix.content_of(block), prefix.group_of(block)) == held,
                9,
                "the key of block {} of {} differs from its tokens, or its group",
                block,
                request,
            )
