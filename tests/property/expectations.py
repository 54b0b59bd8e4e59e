"""Checks the outputs of `schedule`, given the state before the call, and explanations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pointsman.core import (
    Adapter,
    Explanation,
    Holder,
    PauseMode,
    Reason,
    Request,
    SchedulerConfig,
    SchedulerOutput,
    StepResult,
)

from .ledger import Entry, Place
from .partials import LACKS_BLOCKS, LACKS_EMBEDDINGS, bypass_bound, passing
from .policies import is_in_sequence, parameter
from .shadow import ExecutedStep, drafts_of, require
from .slots import check_passing, lacks_no_embeddings

if TYPE_CHECKING:
    from .world import World


@dataclass(slots=True)
class Expectations:
    """The ledger just before a call of `schedule`, and the promises about its output."""

    config: SchedulerConfig
    entries: dict[Request, Entry]
    queue: list[Entry]  # in the order in which they must be admitted
    running: list[Entry]  # in admission order
    pending: set[Request]  # requests with samples in flight
    num_known: dict[Request, int]  # tokens, with those in flight
    verifying: set[Request]  # requests with drafts in flight
    proposed: dict[Request, list[int]]  # drafts that wait
    tables: dict[Request, int]  # how many blocks each has
    unreported: list[Request]
    unreported_losses: list[Request]
    num_losses: int
    resync: bool
    idle: bool  # nothing is in flight
    held: list[Adapter]  # running adapters, the earliest first
    batch_forms: bool  # static: only the budget stopped the last step's admissions
    pause: PauseMode | None
    num_held: int  # blocks held outside the batch
    passed: list[Entry] = field(default_factory=list)  # requests that may be skipped, once known

    @classmethod
    def of(cls, world: World) -> Expectations:
        """Take the state of `world`."""
        running = [entry for entry in world.live if entry.place is Place.RUNNING]
        return cls(
            config=world.config,
            entries=world.entries,
            queue=world.queue(),
            running=sorted(running, key=lambda entry: entry.last_admission),
            pending={entry.request for entry in world.live if world.host.num_pending(entry.request)},
            num_known={request: len(sequence.tokens) for request, sequence in world.host.sequences.items()},
            verifying={entry.request for entry in running if world.host.is_verifying(entry.request)},
            proposed=dict(world.proposed),
            tables={entry.request: len(world.host.table(entry.request)) for entry in running},
            unreported=list(world.unreported),
            unreported_losses=list(world.unreported_losses),
            num_losses=world.num_losses,
            resync=world.resync_due,
            idle=not world.host.in_flight,
            held=list(world.slots.order),
            batch_forms=world.batch_forms,
            pause=world.pause,
            num_held=_num_held(world),
        )

    def check(self, output: SchedulerOutput) -> None:
        """Raise `ShadowFault` if the output breaks a promise."""
        require(output.resync == self.resync, f"resync is {output.resync} in step {output.step_id}")
        self._check_pause(output)
        self._check_limits(output)
        self._check_ends(output)
        self._check_continued(output)
        self._check_phase(output)
        self._check_drafts(output)
        self._check_admitted(output)
        self._check_preempted(output)
        self._check_progress(output)

    def _check_pause(self, output: SchedulerOutput) -> None:
        """A paused step runs nothing, or admits no request."""
        if self.pause is PauseMode.ALL:
            lost = [request for request in output.preempted if request not in self.unreported_losses]
            require(not output.num_rows and not lost, f"paused, but step {output.step_id} runs {output.requests}")
        elif self.pause is PauseMode.ADMISSIONS:
            require(not output.admitted, f"admissions are paused, but {list(output.admitted)} are admitted")

    def _check_limits(self, output: SchedulerOutput) -> None:
        """Promise 3: no limit of a step is exceeded, nor the number of tokens of a request."""
        config, total = self.config, output.total_num_scheduled_tokens
        require(total <= config.max_num_batched_tokens, f"{total} tokens, budget {config.max_num_batched_tokens}")
        require(output.num_rows <= config.max_num_seqs, f"{output.num_rows} rows, limit {config.max_num_seqs}")
        for request in output.requests:
            known, limit = self.num_known[request], self.entries[request].reference.limit
            require(known < limit, f"{request.request_id} continues, and {known} tokens in flight end it at {limit}")
            waits = not request.runs_ahead and request in self.pending
            require(not waits, f"{request.request_id} runs ahead of its sample in flight")
        has_threshold = config.prefill_threshold or parameter(config, "limit", "prefill-threshold", "tokens")
        if has_threshold and output.num_rows:
            self._check_threshold(output)

    def _threshold(self) -> int:
        """Maximum number of tokens that a row advances in this step."""
        threshold, budget = self.config.prefill_threshold, self.config.max_num_batched_tokens
        if len(self.queue) + len(self.running) <= 1:
            return budget
        if self.config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, budget // max(1, len(self.queue) + len(self.running)))
        named = parameter(self.config, "limit", "prefill-threshold", "tokens")
        return int(min([threshold or budget, *named]))

    def _check_threshold(self, output: SchedulerOutput) -> None:
        """No row advances further than the threshold, and only encoder inputs cut the oldest row's chunk further."""
        config, threshold = self.config, self._threshold()
        budget = config.max_num_batched_tokens
        most = int(output.num_scheduled_tokens.max())
        require(most <= threshold, f"a row advances {most} tokens beyond the threshold {threshold}")
        first = output.requests[0]
        if output.num_continued and self.entries[first] is self.running[0] and not first.encoder_inputs:
            want = self.num_known[first] - self.running[0].num_computed
            told = int(output.num_scheduled_tokens[0] - output.num_draft_tokens[0])
            most = min(want, threshold, budget)
            is_right = 0 < told <= most if config.token_limits else told == most
            require(is_right, f"the oldest row wants {want}, gets {told}")

    def _check_ends(self, output: SchedulerOutput) -> None:
        """Promise 2: every end is in one output, once, and after a failed step once more."""
        expected = self.unreported
        require(len(set(output.finished)) == len(output.finished), f"an end is reported twice: {output.finished}")
        same = len(expected) == len(output.finished) and set(expected) == set(output.finished)
        require(same, f"step {output.step_id} reports the ends {list(output.finished)}, expected {expected}")

    def _check_continued(self, output: SchedulerOutput) -> None:
        """Continued rows are running ones, in admission order, and continue at their positions."""
        continued = [self.entries[request] for request in output.continued]
        order = [entry for entry in self.running if entry in continued]
        require(continued == order, f"continued rows are not the running ones in admission order: {output.continued}")
        for index, entry in enumerate(continued):
            start = int(output.num_computed_tokens[index])
            stood = entry.num_computed
            require(start == stood, f"{entry.request.request_id} continues at {start}, and was at {stood}")

    def is_decode_step(self, output: SchedulerOutput) -> bool:
        """Under "prefill-first": whether no prompt was computed, and no request was admitted."""
        if self.config.batching != "prefill-first" or output.admitted:
            return False
        return all(self._decodes(entry) for entry in self.running if entry.request in output.continued)

    def _check_phase(self, output: SchedulerOutput) -> None:
        """Under "prefill-first" a step is for rows that compute known tokens, or for rows that decode."""
        if self.config.batching != "prefill-first":
            return
        decodes = [self._decodes(entry) for entry in self.running if entry.request in output.continued]
        if any(decodes):
            require(self.is_decode_step(output), f"step {output.step_id} decodes, and computes prompts")
            complete = [one for one in self.running if one.request.max_tokens == 0 and one.request in self.pending]
            cut = [entry for entry in self.running if not self._decodes(entry) and entry not in complete]
            gave_way = any(entry.request in output.preempted for entry in cut)  # and those behind it wait
            require(gave_way or not cut, f"step {output.step_id} decodes, with the prompts of {cut} half computed")

    def _decodes(self, entry: Entry) -> bool:
        """Whether a running request has sampled since its admission, including samples in flight."""
        return self.num_known[entry.request] > entry.num_admitted

    def _losses(self, output: SchedulerOutput) -> dict[Entry, int]:
        """The requests that lose their rows in this step, each with the number of the loss."""
        lost = [self.entries[request] for request in output.preempted]
        return {entry: self.num_losses + 1 + lost.index(entry) for entry in self.running if entry in lost}

    def _check_drafts(self, output: SchedulerOutput) -> None:
        """Drafts are the first proposed ones for a row that decodes, within every limit; no request is preempted for
        them."""
        most = self.config.max_drafts(len(self.running))
        preempted = any(entry.request in output.preempted for entry in self.running)
        for index, request in enumerate(output.requests):
            name, drafts = request.request_id, drafts_of(output, index)
            require(request not in self.verifying, f"{name} continues while its drafts are in flight")
            if not drafts:
                continue
            if index >= output.num_continued:
                self._check_padding(output, index, drafts)
                continue
            waiting = self.proposed.get(request, [])
            require(drafts == waiting[: len(drafts)], f"{name} verifies {drafts}, {waiting} was proposed for it")
            require(len(drafts) <= most, f"{name} verifies {len(drafts)} drafts, the limit is {most}")
            end = self.num_known[request] + len(drafts)
            limit = self.entries[request].reference.limit
            require(end < limit, f"{name} verifies drafts up to token {end}, its limit is {limit}")
            if preempted and not output.resync:
                size = self.config.block_size
                num_groups = max(1, len(self.config.kv_groups))
                enough = max(self.tables[request], -(-self.num_known[request] // size) * num_groups)
                held = self.tables[request] + len(output.blocks(index))
                require(held <= enough, f"{name} has {held} blocks with drafts, in a step that preempted")

    def _check_padding(self, output: SchedulerOutput, index: int, drafts: list[int]) -> None:
        """A row is admitted with placeholders beside its last known token, if at all."""
        name, config = output.requests[index].request_id, self.config
        require(config.pad_first_decodes, f"{name} is admitted with drafts")
        require(drafts == [-1] * config.num_draft_tokens, f"{name} is padded with {drafts}")
        start, count = int(output.num_computed_tokens[index]), int(output.num_scheduled_tokens[index])
        require(start == self.num_known[output.requests[index]] - 1, f"{name} is padded, and does not decode")
        require(start + count < config.max_model_len, f"{name} is padded up to token {start + count}")
        require(start > 0 or output.num_continued > 0, f"{name} is padded in a step of prefills")
        require(output.requests[index].max_tokens != 0, f"{name} is padded, and samples nothing")

    def contenders(self, output: SchedulerOutput) -> list[Entry]:
        """Requests that may be admitted, in the order in which they are checked; if the configuration says so,
        including those that lost their row in this step."""
        losses = self._losses(output) if self.config.admit_after_preemption else {}
        order = str(self.config.order)
        if not is_in_sequence(order):
            admitted = [self.entries[request] for request in output.admitted]
            return sorted([*self.queue, *losses], key=lambda e: admitted.index(e) if e in admitted else len(admitted))
        return sorted([*self.queue, *losses], key=lambda entry: entry.queue_key(order, losses.get(entry, 0)))

    def _check_admitted(self, output: SchedulerOutput) -> None:
        admitted = [self.entries[request] for request in output.admitted]
        contenders = self.contenders(output)
        loading = {load.request for load in output.loads if load.is_async}
        early = [request for request in loading if self.entries[request] not in contenders]
        require(not early, f"{early} are to be loaded, but they do not wait")
        absent = self.pending | loading
        ready = [entry for entry in contenders if entry.request not in absent]
        for index, entry in enumerate(admitted):
            name = entry.request.request_id
            require(entry in ready, f"{name} is admitted, but it was {entry.place}, or its samples are in flight")
            start = int(output.num_computed_tokens[output.num_continued + index])
            row = output.num_continued + index
            scheduled = int(output.num_scheduled_tokens[row] - output.num_draft_tokens[row])
            cached = int(output.num_cached_tokens[index])
            require(start == cached, f"{name} starts at {start} with {cached} cached tokens")
            require(cached < entry.num_tokens, f"{name}: all of its {cached} tokens are cached, so there is no logit")
            require(cached % self.config.block_size == 0, f"{name}: {cached} cached tokens are not whole blocks")
            local = cached - int(output.num_external_tokens[index])
            if not (self.config.enable_prefix_caching and entry.request.reads_prefix_cache):
                require(local == 0, f"{name} does not read the prefix cache, but {cached} tokens are cached")
            ran_before = entry.ran_before or entry in self.running
            require(bool(output.is_resumed[index]) == ran_before, f"{name}: is_resumed is wrong")
            if not self.config.enable_chunked_prefill and not ran_before:
                end = start + scheduled
                require(end == entry.num_tokens, f"{name} starts with {end} of {entry.num_tokens} tokens, unchunked")
            is_cut = start + scheduled < entry.num_tokens and output.num_continued + index > 0
            if self.config.first_chunk_only and is_cut and not entry.request.encoder_inputs:
                require(
                    scheduled == self._threshold(),
                    f"{name} is cut to {scheduled} tokens, and is not the first of the step",
                )
        self._check_order(output, admitted, ready)
        if admitted and self.config.batching == "static":
            closed = self.running and not self.batch_forms
            require(not closed, f"the static batch still runs, but {list(output.admitted)} are admitted")

    def _check_order(self, output: SchedulerOutput, admitted: list[Entry], ready: list[Entry]) -> None:
        """Promise 5: the admitted requests are those that wait longest in the most urgent class, without gaps, except
        for requests that lack an adapter slot, embeddings, an answer from the connector or blocks for a load."""
        stays = [entry for entry in self.running if entry.request not in output.preempted]
        adapters = {entry.request.adapter for entry in stays}
        held = [adapter for adapter in self.held if adapter in adapters]
        surely = {entry for entry in ready if lacks_no_embeddings(self.config, entry, output, stays)}
        check_passing(self.config, held, ready, admitted, surely, self.passed)

    def _check_preempted(self, output: SchedulerOutput) -> None:
        """Check the requests that lost a row; a step that preempted admits no request, except in a priority
        preemption."""
        lost = list(output.preempted)
        require(len(set(lost)) == len(lost), f"a preemption is reported twice: {lost}")
        missing = [r for r in self.unreported_losses if r not in lost and self.entries[r].place is not Place.ENDED]
        require(not missing, f"{missing} lost their rows, and no output said so")
        victims = []
        for request in lost:
            entry = self.entries[request]
            if request not in self.unreported_losses:
                require(entry in self.running, f"{request.request_id} is preempted, but it was {entry.place}")
                again = self.config.admit_after_preemption and request in output.admitted
                runs = request in output.requests and not again
                require(not runs, f"{request.request_id} is preempted and runs in one step")
                victims.append(entry)
        if victims and output.admitted and not self.config.admit_after_preemption:
            names = [entry.request.request_id for entry in victims]
            displaces = self.config.order == "priority" and self.config.displace is not False
            require(displaces, f"{names} were preempted in a step that admitted {list(output.admitted)}")
            highest = min(entry.request.priority for entry in victims)
            equal = [request for request in output.admitted if request.priority >= highest]
            require(not equal, f"{equal} preempted {names}, and are not strictly more urgent than all of them")

    def _check_progress(self, output: SchedulerOutput) -> None:
        """Promise 4: with nothing in flight and something to run, a step runs something."""
        absent = {load.request for load in output.loads if load.is_async} | {entry.request for entry in self.passed}
        queue = [entry for entry in self.queue if entry.request not in absent] if self.pause is None else []
        running = self.running if self.pause is not PauseMode.ALL else []
        if self.idle and (queue or running):
            # In order, an asking row that is itself preempted keeps rows behind it from running. And prompts that were
            # held back for decodes stay so in a step that preempts the last of these.
            may_be_empty = self.config.shortage != "replan" or self.config.prefill_interval != 1
            gave_way = may_be_empty and bool(self._losses(output))
            did_run = output.total_num_scheduled_tokens > 0 or gave_way
            require(did_run, f"step {output.step_id} is empty, with {queue} waiting and {running} running")


def _num_held(world: World) -> int:
    """Blocks held without a row; the device begins to record its calls."""
    device = world.host.device
    if device is None:
        return 0
    device.open_step()
    return device.num_held


def why_refused(request: Request, config: SchedulerConfig) -> str | None:
    """Why a request can never run, by the documentation; None if it can."""
    prompt = request.num_prompt_tokens
    least = prompt + (request.max_tokens > 0)
    if least > min(config.max_model_len, request.max_total_tokens or config.max_model_len):
        return "no room for one token"
    if prompt > config.num_usable_tokens:
        return "larger than the pool"
    if not config.enable_chunked_prefill and prompt > config.max_num_batched_tokens:
        return "larger than the budget, and chunking is off"
    if request.adapter is not None and not config.max_loras:
        return "adapters are off"
    if request.encoder_inputs:
        sizes = {item.entry: item.entry.num_embeddings for item in request.encoder_inputs}
        most = sum(sizes.values()) if not config.enable_chunked_prefill else max(sizes.values())
        if most > min(config.encoder_budget, config.encoder_cache_size):
            return "larger than the encoder's budget or cache"
    return None


def _is_true_of(reason: Reason | None, world: World, output: SchedulerOutput) -> bool:
    """Whether an output may have left out a row that could have advanced for such a reason."""
    config = world.config
    if reason is Reason.PREFILL_FIRST:
        return config.batching == "prefill-first" and output.num_rows > 0
    if reason is Reason.PREFILL_INTERVAL:
        return config.prefill_interval != 1
    if reason is Reason.BUDGET:
        return output.total_num_scheduled_tokens == config.max_num_batched_tokens or bool(config.token_limits)
    if reason is Reason.SEQUENCE_LIMIT:
        return output.num_rows == config.max_num_seqs
    if reason is Reason.BLOCKS:
        return len(output.preempted) > 0
    return reason in (None, Reason.IN_FLIGHT) and config.max_steps_in_flight > 1


def check_explanations(world: World) -> None:
    """Every live request can be explained, and its position is its place in the order."""
    queue = world.queue()
    explanations = {entry: world.scheduler.explain(entry.request.request_id) for entry in world.live}
    for entry, told in explanations.items():
        name = entry.request.request_id
        world.reasons_told[told.reason] += 1
        require(told.status is entry.request.status, f"{name} is explained as {told.status}")
        position = queue.index(entry) if entry in queue else None
        require(told.position == position, f"{name} is explained at position {told.position}, it is at {position}")
        if entry.place is Place.RUNNING:
            right = Reason.PAUSED if world.pause is PauseMode.ALL else None
            lacks = world.pause is not PauseMode.ALL and entry in world.stands_before_an_input
            sound = told.reason is right or (lacks and told.reason in LACKS_EMBEDDINGS)
            lacks &= told.reason is not Reason.PREFILL_INTERVAL  # which is checked before the embeddings
            if entry.request in world.left_out and world.pause is not PauseMode.ALL and not lacks:
                sound = _is_true_of(told.reason, world, world.left_out[entry.request])
            require(sound, f"{name} runs, and is explained as waiting for {told.reason}")
        elif entry.load is not None:
            right = (Reason.KV_LOAD, entry.load.transfer_id)
            require((told.reason, told.transfer) == right, f"{name} is explained by {told}, it waits for {right}")
        elif entry.place is Place.PARKED or world.pause is not None:
            right = Reason.PARKED if entry.place is Place.PARKED else Reason.PAUSED
            require(told.reason is right, f"{name} waits for {told.reason}, expected {right}")
        elif position:
            reasons = {explanations[other].reason for other in queue[:position]}
            own = told.reason is Reason.ADAPTER_SLOTS and entry.request.adapter is not None
            own |= told.reason is Reason.PARTIAL_PREFILLS
            own |= told.reason in LACKS_EMBEDDINGS and len(entry.request.encoder_inputs) > 0
            own |= told.reason in (Reason.KV_CONNECTOR, Reason.KV_ROOM) and entry.request.reads_prefix_cache
            own |= told.reason in LACKS_BLOCKS and bypass_bound(world.config) > 0
            sound = told.reason is Reason.BEHIND or own or reasons <= passing(world.config)
            require(sound, f"{name} waits for {told.reason}, those before it for {reasons}")
        else:
            wrong = (Reason.PARKED, Reason.PAUSED)
            require(told.reason not in wrong, f"{name} is ready, and is explained as {told.reason}")
        for holder in told.holders:
            if holder.transfer is not None:
                _check_held_for_transfer(world, name, holder)
                continue
            is_live = world.scheduler.get_request(holder.request_id) is not None
            require(is_live, f"{name} is explained as waiting for {holder.request_id}, which is not live")
            if told.resource == "KV blocks":
                held = len(world.host.table(world.scheduler.get_request(holder.request_id)))
                stale = world.host.blocks_in_use() is None
                require(stale or held == holder.amount, f"{holder} holds {held} blocks")
        amounts = [holder.amount for holder in told.holders]
        require(amounts == sorted(amounts, reverse=True) or told.adapter_slots != {}, f"{told.holders} are not sorted")
        require(told.blocker == (told.holders[0].request_id if told.holders else None), "the blocker is no holder")
        require(name in told.sentence, f"{name} is explained as {told.sentence!r}")
        _check_since(world, entry, told)
        _check_missing(world, entry, told)


def _check_since(world: World, entry: Entry, told: Explanation) -> None:
    """A reason began at its stated time, and keeps this time while it lasts."""
    before, world.times_told[entry] = world.times_told.get(entry), (told.reason, told.since, len(entry.events))
    if told.reason is None or told.since is None:
        require(told.reason is None and told.since is None, f"{told.request_id}: {told.reason} since {told.since}")
        return
    moved = {Reason.BEHIND: ("QUEUED", "PREEMPTED"), Reason.PARKED: ("PARKED",)}.get(told.reason)
    times = [time for event, time, _ in entry.events if moved is None or event in moved]
    is_right = times[-1] == told.since if moved else times[0] <= told.since <= world.now
    require(is_right, f"{told.request_id}: {told.reason} since {told.since}, it moved at {times}")
    if before is not None and (before[0], before[2]) == (told.reason, len(entry.events)):  # it has not moved
        lasts = told.since == before[1] or told.reason is Reason.PAUSED  # a further pause has a new time
        require(lasts, f"{told.request_id}: {told.reason} since {told.since}, before {before[1]}")


def _check_missing(world: World, entry: Entry, told: Explanation) -> None:
    """Missing amounts are counted in units of the resource, within bounds."""
    config = world.config
    runs = entry.place is Place.RUNNING
    largest = max(config.num_usable_blocks, -(-config.max_model_len // config.block_size))
    least = int(told.resource is not None and not (runs and told.reason is Reason.BLOCKS))
    most = {
        None: 0,
        "sequence slots": max(1, world.num_admissions),  # running requests above a lowered limit
        "places": 1,
        "adapter slots": 1,
        "samples": config.max_steps_in_flight,
        "tokens of the step's budget": entry.request.num_tokens,
        "embeddings": max(config.encoder_budget, config.encoder_cache_size),
        "KV blocks": 1 if runs else 4 * largest,  # its own, the watermark, the reserve, the owed blocks
    }[told.resource]
    amount = f"{told.request_id} lacks {told.missing} {told.resource} for {told.reason}"
    require(least <= told.missing <= most, f"{amount}; it is {least} to {most}")


def _check_held_for_transfer(world: World, name: str, holder: Holder) -> None:
    """A request waits for blocks held without a row only if a waiting request or a transfer holds some."""
    device, number = world.host.device, holder.transfer
    require(device is not None, f"{name} is explained as waiting for {holder}")
    assert device is not None
    waits = {e.request: e.held_for for e in world.live if e.request in device.holders}
    held = [blocks for r, blocks in device.holders.items() if waits[r] == number and r.request_id != name]
    held += [t.blocks for t in device.transfers.values() if t.request is None and t.transfer_id == number]
    require([len(blocks) for blocks in held] == [holder.amount], f"{holder} is said to hold blocks, it is {held}")


def malformed_results(step: ExecutedStep) -> list[StepResult]:
    """Results that do not fit the step, each with one fault."""
    n = step.output.num_rows
    tokens = [token for run in step.sampled for token in run]
    counts = [len(run) for run in step.sampled]
    needed = counts if max(counts, default=0) > 1 else None
    results = [
        StepResult([*tokens, 0]),
        StepResult(tokens, [*counts, 0]),
        StepResult([*tokens, 0], counts),
        StepResult(tokens, errors={n: "no such row"}),
        StepResult(tokens, errors={-1: "no such row"}),
        StepResult(tokens, unsampled=[n]),
    ]
    if tokens:
        row = next(index for index, count in enumerate(counts) if count)
        most = 1 + int(step.output.num_draft_tokens[row])
        results += [
            StepResult(tokens[1:], needed),
            StepResult([-1, *tokens[1:]], needed),
            StepResult([2**31, *tokens[1:]], needed),
            StepResult(tokens, errors={row: "it has a token nevertheless"}),
            StepResult(tokens, unsampled=[row]),
            StepResult(tokens[counts[row] :], needed and [*counts[:row], 0, *counts[row + 1 :]], unsampled=[row, row]),
            StepResult(tokens, counts, errors={row: "it has a token nevertheless"}),
            StepResult([0] * most + tokens, [*counts[:row], counts[row] + most, *counts[row + 1 :]]),
            StepResult(tokens[counts[row] :], [*counts[:row], 0, *counts[row + 1 :]]),
            StepResult(tokens, [*counts[:row], -1, *counts[row + 1 :]]),
        ]
    if 0 in counts:
        row = counts.index(0)
        at = sum(counts[:row])
        results.append(StepResult(tokens, needed, unsampled=[row]))
        results.append(StepResult([*tokens[:at], 1, *tokens[at:]], [*counts[:row], 1, *counts[row + 1 :]]))
    return results
