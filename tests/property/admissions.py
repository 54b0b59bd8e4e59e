"""Checks the admissions of a step: no useless preemption, reserves kept, known prefixes found."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pointsman.core import KVGroup, Reason, SchedulerConfig, SchedulerOutput, SchedulerStats

from .group_shadow import GroupShadowHost
from .ledger import Entry, Place
from .partials import LACKS_BLOCKS, blocks_queue, bypass_bound, may_lack_place, must_wait, passing
from .policies import has_unknown_reserve, is_in_sequence, parameter, sets_budget
from .shadow import HostSequence, require
from .slots import lacks_slot

if TYPE_CHECKING:
    from .world import World


def check_admissions(
    world: World, output: SchedulerOutput, before: SchedulerStats, victims: list[Entry], tried_first: bool
) -> None:
    """Check a step that the ledger has taken over; `before` and the tables of `victims` are from before the call.

    `tried_first`: admissions were tried before the running rows advanced.
    """
    after = world.scheduler.stats()
    _check_priority_preemption(world, output, victims, after.num_displaced - before.num_displaced, tried_first)
    _check_deferrals(world, output, before, after, tried_first)
    if world.host.blocks_in_use() is not None:
        if world.config.shortage != "look-ahead":
            _check_need_of_victims(world, output, victims, after.num_free_blocks)
        if not victims and not len(output.admitted) and not output.loads:
            _check_missed_priority_preemption(world, output, after.num_free_blocks)
    if len(output.admitted):
        num_running = sum(entry.place is Place.RUNNING for entry in world.live)
        require(
            num_running <= world.num_sequence_slots,
            f"{num_running} run after an admission, limit {world.num_sequence_slots}",
        )
        _check_reserves(world, output, after.num_free_blocks)
        if not world.config.has_kv_groups or after.num_evictions == 0:
            _check_hits(world, output)
        _check_own_hits(world, output, after.num_evictions)


def _check_priority_preemption(
    world: World, output: SchedulerOutput, victims: list[Entry], num_displaced: int, tried_first: bool
) -> None:
    """No preemption is useless: the preemptor is admitted in the same step, and alone."""
    require(not num_displaced or world.pause is None, f"{num_displaced} displaced while admissions are paused")
    require(num_displaced <= len(victims), f"{num_displaced} displaced, but {len(victims)} lost their rows")
    if num_displaced:
        require(world.config.order == "priority" and world.config.displace is not False, "displaced without urgency")
        admitted = [*output.admitted, *(load.request for load in output.loads if load.is_async)]
        require(len(admitted) == 1, f"step {output.step_id} displaced {num_displaced} and admitted {admitted}")
    begun = len(output.admitted) + (0 if tried_first else len(output.loads))
    if victims and begun and not world.config.admit_after_preemption:
        require(num_displaced == len(victims), f"{num_displaced} count as displaced, {len(victims)} were")


def _check_missed_priority_preemption(world: World, output: SchedulerOutput, num_free: int) -> None:
    """The head of the queue does not wait if, under the worst assumption, it fits without the less urgent rows."""
    config, queue = world.config, world.queue()
    displaces = config.order == "priority" and config.displace is not False and config.batching == "mixed"
    displaces &= world.pause is None
    if not displaces or not queue or world.host.num_pending(queue[0].request):
        return
    head = queue[0]
    running = [entry for entry in world.live if entry.place is Place.RUNNING]
    stays = [entry for entry in running if entry.request.priority <= head.request.priority]
    held = {block for entry in stays for block in world.host.table(entry.request)}
    held |= world.host.device.blocks() if world.host.device is not None else set()
    in_use = world.host.blocks_in_use()
    num_freed = len(in_use - held) if in_use is not None else 0
    tokens = dict(zip(output.requests, output.num_scheduled_tokens.tolist(), strict=True))
    budget = config.max_num_batched_tokens - sum(tokens.get(entry.request, 0) for entry in stays)
    unclipped = output.total_num_scheduled_tokens < config.max_num_batched_tokens
    has_budget = unclipped and budget >= _min_budget(config, head)
    has_blocks = num_free + num_freed >= _enough_blocks(world, head, stays)
    # A head that lacks only tokens of budget waits: priority preemption is for sequence slots and blocks.
    if lacks_slot(config, head, stays) or may_lack_place(config) or config.encoder_budget:
        return
    interval = world.scheduler._parts.gates.interval
    if interval is not None and interval.held_last:
        return  # no request is preempted for a prompt that is held back
    if stays and sets_budget(config):
        return  # which may leave it no tokens beside those rows, or let no request start beside them
    has_seat = len(stays) < min(len(running), world.num_sequence_slots) and len(running) <= world.num_sequence_slots
    lacks_budget_alone = world.scheduler.explain(head.request.request_id).reason in (
        Reason.BUDGET,
        Reason.STEP_TIME,
        Reason.KV_CONNECTOR,
        Reason.KV_ROOM,
    )
    missed = has_seat and has_budget and has_blocks and not lacks_budget_alone
    require(not missed, f"{head.request} waits, and fits without the less urgent of {running}")


def _check_deferrals(
    world: World, output: SchedulerOutput, before: SchedulerStats, after: SchedulerStats, tried_first: bool
) -> None:
    """Each step counts one reason for the head of the queue, if a request waits; the reason is explained, and true."""
    counted = {reason: n - before.deferrals[reason] for reason, n in after.deferrals.items()}
    told = [Reason(reason) for reason, n in counted.items() if n]
    queue = world.queue()
    if tried_first and output.preempted:
        return  # a request that lost its row after the admissions may be the head now
    require(sum(counted.values()) == bool(queue), f"counted the deferrals {counted} with {len(queue)} waiting")
    if not queue:
        return
    if bypass_bound(world.config) and not is_in_sequence(str(world.config.order)):
        return  # the head was skipped, and admissions behind it may have made another request the head
    head = queue[0]
    explained = world.scheduler.explain(head.request.request_id).reason
    require(told == [explained], f"the head of the queue is explained by {explained}, but {told} was counted")
    config = world.config
    running = [entry for entry in world.live if entry.place is Place.RUNNING]
    if explained is Reason.ADAPTER_SLOTS and not tried_first:
        require(lacks_slot(config, head, running), f"{head.request} waits for a slot, and {running} leave one")
    if explained is Reason.PARTIAL_PREFILLS and not tried_first:
        require(must_wait(world, head), f"{head.request} waits, and the caps on partial prefills leave a place")
    passed = {
        entry.request
        for entry in queue
        if _reason(world, entry) in passing(world.config) and not blocks_queue(world, entry)
    }
    blocker = next((entry for entry in queue if entry.request not in passed), None)
    if blocker is not None:
        _check_blocker(world, output, blocker, running, after.num_free_blocks, tried_first)


def _reason(world: World, entry: Entry) -> Reason | None:
    return world.scheduler.explain(entry.request.request_id).reason


def _check_blocker(
    world: World, output: SchedulerOutput, blocker: Entry, running: list[Entry], free: int, tried_first: bool
) -> None:
    """The first request that was not skipped waits for its stated reason."""
    config, explained = world.config, _reason(world, blocker)
    if explained is Reason.SEQUENCE_LIMIT:
        limit = world.num_sequence_slots
        full = len(running) >= limit or (config.batching == "prefill-first" and output.num_rows >= config.max_num_seqs)
        require(full, f"sequence limit with {len(running)} of {limit} running, {output.num_rows} of them in the step")
    elif explained is Reason.BUDGET:
        budget = config.max_num_batched_tokens if tried_first else _budget_left(world, output)
        least = _min_budget(config, blocker)
        short = budget < least or config.token_limits  # that may set a budget of their own
        require(short, f"{blocker.request} waits for budget, and {budget} is left of {least} that it may need")
    elif explained is Reason.STEP_TIME:
        require(config.token_limits and running, f"{blocker.request} waits for step time, and nothing else takes some")
    elif explained is Reason.PREFILL_INTERVAL:
        held = config.prefill_interval != 1 and bool(running)
        require(held, f"{blocker.request} is held back, and no interval or no running request is there")
    elif explained is Reason.PARTIAL_PREFILLS:
        require(must_wait(world, blocker) or tried_first, f"{blocker.request} waits, and the caps leave a place")
    elif explained is Reason.IN_FLIGHT:
        require(world.host.num_pending(blocker.request) > 0, f"{blocker.request} has no sample in flight")
    elif explained in LACKS_BLOCKS:
        if blocker is not world.queue()[0] and bypass_bound(config):
            return  # some free blocks are kept for a request before it
        enough = _enough_blocks(world, blocker, running)
        short = tried_first or free < enough
        require(short, f"{blocker.request} waits for blocks: {free} are free, {enough} are always enough")
    else:
        others = (Reason.PREEMPTION, Reason.DISPLACEMENT, Reason.STATIC_BATCH, Reason.PAUSED)
        require(
            explained in others or blocks_queue(world, blocker),
            f"{blocker.request} waits for {explained}, and it is the first that could be admitted",
        )


def _budget_left(world: World, output: SchedulerOutput) -> int:
    """Remaining tokens of budget for the next admission after those of a step."""
    left = world.config.max_num_batched_tokens
    for index, tokens in enumerate(output.num_scheduled_tokens.tolist()):
        charges_whole = world.config.admission_charge == "whole" and index >= output.num_continued
        left -= min(left, world.entries[output.requests[index]].num_tokens) if charges_whole else tokens
    return left


def _min_budget(config: SchedulerConfig, head: Entry) -> int:
    """Tokens of budget that always suffice for `head`, under the worst assumption: nothing cached."""
    whole = not config.enable_chunked_prefill and not head.ran_before
    first = 1 + config.num_draft_tokens if config.pad_first_decodes else 1
    return max(head.num_tokens, first) if whole or config.first_chunk_only else first


def _watermark(config: SchedulerConfig) -> int:
    """Blocks that watermarks keep: each is rounded down, and at least one."""
    shares = [share for share in (config.watermark, *parameter(config, "reserve", "watermark", "share")) if share]
    return sum(max(1, int(share * config.num_usable_blocks)) for share in shares)


def _enough_blocks(world: World, head: Entry, running: list[Entry]) -> int:
    """Free blocks that admit `head` under the worst assumption: nothing cached, every reserve in full."""
    config, size = world.config, world.config.block_size
    if has_unknown_reserve(config):
        return config.num_usable_blocks + 1
    if config.has_kv_groups:  # the blocks of the running rows are not reported
        enough = sum(config.max_blocks(entry.num_tokens) for entry in [head, *running])
        reserved = _watermark(config) + _growth(config) + _expected_output(world, head)
        return enough + (reserved if running else 0)
    enough = -(-head.num_tokens // size)
    for entry in running:
        enough += max(0, -(-entry.num_tokens // size) - len(world.host.table(entry.request)))
    return enough + (_watermark(config) + _growth(config) + _expected_output(world, head) if running else 0)


def _growth(config: SchedulerConfig) -> int:
    """Maximum number of blocks that the reserve "growth" keeps."""
    return len(parameter(config, "reserve", "growth", "scale")) * (config.num_usable_blocks // 8)


def _expected_output(world: World, entry: Entry) -> int:
    """Blocks that decode reserves keep for the output of a request when it is admitted."""
    config, lengths = world.config, world.output_lengths[-128:]
    mean = math.ceil(sum(lengths) / len(lengths)) if lengths else 0
    means = sum(str(spec).startswith("mean-decode") for spec in config.reserves) + (config.decode_reserve == "mean")
    each = [*parameter(config, "reserve", "decode", "tokens"), *[mean] * means]
    if config.decode_reserve != "mean":
        each.append(config.decode_reserve)
    left = entry.reference.limit - entry.num_tokens if entry.request.max_tokens else 0
    groups = config.kv_groups or (KVGroup(),)
    tokens = [int(min(expected, left)) for expected in each]
    return sum(group.max_blocks(count, 1, config.block_size) for count in tokens for group in groups)


def _check_need_of_victims(world: World, output: SchedulerOutput, victims: list[Entry], num_free: int) -> None:
    """A single victim could not have stayed: its blocks were used, or there were none for its own next tokens."""
    if len(victims) != 1 or len(output.admitted) or output.loads:
        return
    (entry,) = victims
    tables = world.host.in_flight[-1].tables
    mine = tables[entry.request]
    elsewhere = {block for request, table in tables.items() if request is not entry.request for block in table}
    num_freed = len(set(mine) - elsewhere)
    num_wanted = -(-entry.num_tokens // world.config.block_size) + 1 - len(mine)
    require(num_free - num_freed < max(1, num_wanted), f"{entry.request} was preempted in vain: {num_free} are free")


def _check_reserves(world: World, output: SchedulerOutput, num_free: int) -> None:
    """After the last admission each reserve is free: the watermark, the last request's output, the blocks that prompts
    need."""
    config = world.config
    reserved = 0
    running = [entry for entry in world.live if entry.place is Place.RUNNING]
    last = world.entries[output.admitted[-1]]
    if len(running) > 1 and not output.loads:  # neither applies to a request that is alone
        reserved += _watermark(config) + _expected_output(world, last)
    if config.full_sequence_must_fit:
        reserved += sum(_num_owed(world, entry) for entry in (running if config.count_owed_blocks else [last]))
    require(num_free >= reserved, f"{list(output.admitted)} admitted with {num_free} blocks free, {reserved} reserved")


def _num_owed(world: World, entry: Entry) -> int:
    """Blocks that a request still needs for the tokens it has, if they are computed in part only."""
    if entry.num_computed >= entry.num_tokens - 1:
        return 0
    if isinstance(world.host, GroupShadowHost):  # the blocks of groups with windows are not reported
        full = [index for index, group in enumerate(world.config.kv_groups) if group.is_full]
        table = world.host.placed(entry.request)
        return sum(
            max(0, -(-entry.num_tokens // world.config.block_size) - sum(group == index for group, _, _ in table))
            for index in full
        )
    return max(0, -(-entry.num_tokens // world.config.block_size) - len(world.host.table(entry.request)))


def _check_hits(world: World, output: SchedulerOutput) -> None:
    """Prompt blocks that a continuing row has computed before must be found by a request with the same prefix."""
    if not world.config.enable_prefix_caching:
        return
    size = world.config.block_size
    holders = [
        (world.host.sequences[request], min(int(output.num_computed_tokens[index]), request.num_prompt_tokens))
        for index, request in enumerate(output.continued)
        # After a row's error, prefixes of rows that ran beside it may be withdrawn.
        if world.entries[request].admitted_step > world.last_row_error_step
    ]
    resumed = world.host.device.resumed if world.host.device is not None else set()
    for index, request in enumerate(output.admitted):
        if request in resumed or not request.reads_prefix_cache:  # looked up when its load began, or not at all
            continue
        sequence = world.host.sequences[request]
        most = (world.entries[request].num_tokens - 1) // size
        at_least = max((min(most, _num_common_blocks(sequence, *holder, size)) for holder in holders), default=0)
        cached = int(output.num_cached_tokens[index])
        name = request.request_id
        require(cached >= at_least * size, f"{name} finds {cached} tokens, a row holds {at_least} blocks of its prefix")


def _check_own_hits(world: World, output: SchedulerOutput, num_evictions: int) -> None:
    """A resumed request finds all its own full blocks, unless some were evicted or withdrawn meanwhile."""
    size = world.config.block_size
    for index, request in enumerate(output.admitted):
        entry = world.entries[request]
        if entry.kept is None or entry.kept.marks != (num_evictions, world.num_withdrawals):
            continue
        at_least = min(entry.kept.num_tokens, entry.num_tokens - 1) // size * size
        ends_within = any(group.size % size for group in world.config.kv_groups)
        if world.config.has_kv_groups and (ends_within or entry.kept.num_tokens - at_least >= size - 1):
            continue  # a block that a window needs up to the last full block may have returned to the pool
        cached = int(output.num_cached_tokens[index])
        require(cached >= at_least, f"{request.request_id} finds {cached} tokens, it left {at_least} and none is gone")


def _num_common_blocks(sequence: HostSequence, holder: HostSequence, num_published: int, size: int) -> int:
    """Full blocks among the holder's first `num_published` tokens with exactly the content that `sequence` needs."""
    if holder.epoch != sequence.epoch:
        return 0
    common = 0
    for ours, theirs in zip(sequence.contents, holder.contents[:num_published], strict=False):
        if ours != theirs:
            break
        common += 1
    return common // size
