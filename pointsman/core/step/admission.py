"""Part 4 of the step: moves waiting requests into the batch, in order, until one blocks the queue.

`Admission.admit` iterates over the queue. A step is closed to admissions during a pause, after a preemption and while a
static batch runs; after priority preemption only the preemptor is admitted. Otherwise `check` decides about one request
after the other, by the following conditions in this order:

    without a lookup    a free sequence slot, a token of budget, no sample of the request in flight, a slot for its
                        adapter, and the verdict of an earlier step if it is kept
    after the lookup    the connector's answer, budget for placeholder drafts, and the gates (`policy/gate.py`): token
                        budget, limits, partial prefills, and the blocks with every reserve

The first condition that fails is the reason that is reported.

A request that lacks a resource that other requests do not need (such as a slot for its adapter) is skipped: it is set
aside, the requests behind it are checked, and at the end of the step the skipped request returns to its place. Most
requests wait for sequence slots, tokens or blocks. All requests need these resources, so a request that waits for one
of them blocks the queue.

The verdict on a blocked head is kept, so that checking the head costs O(1) a step until a change could admit it: a
change in the blocks that a lookup could find, in the blocks that running requests still need, in whether any request
runs, or in the free blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.cache import KVCache, Match
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.kv.transfers import NOTHING, External, Transfers
from pointsman.core.policy.adapters import AdapterSlots
from pointsman.core.policy.budget import StepBudget, TokenBudget
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.gate import Gate, Limit
from pointsman.core.policy.partial_prefills import PartialPrefills
from pointsman.core.policy.prefill_interval import PrefillInterval
from pointsman.core.policy.reserve import Reserves, Shortage
from pointsman.core.policy.view import SchedulerView
from pointsman.core.state.batch import Batch
from pointsman.core.state.events import Deferred, Events, send
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import Pause, PauseMode
from pointsman.core.step.in_flight import AdmittedRequest, Grant, StepRecord
from pointsman.core.step.loading import Loading
from pointsman.core.step.needs import Need, Needs
from pointsman.core.step.request_table import RequestTable
from pointsman.core.step.running import Advance, Running
from pointsman.core.step.search import MAX_SKIPPED, KeptVerdict, Search

Int64Array = npt.NDArray[np.int64]


class Standstill(NamedTuple):
    """Reason why the queue stays blocked while every running request decodes and nothing else happens."""

    reason: Reason
    deferral: Deferral | None
    """Deferral of the head of the queue; None: `shortage` determines the deferral."""
    shortage: Shortage | None = None
    min_free: int = 0
    """Minimum number of free blocks with which the reason stays the same."""
    outlasts_evictions: bool = True
    """Whether the queue stays blocked even if cached blocks are evicted."""


class Gates:
    """All gates of a scheduler (checks that an admission must pass, see `policy/gate.py`), in the order in which an
    admission calls them."""

    def __init__(
        self,
        adapters: AdapterSlots,
        budget: TokenBudget,
        limits: list[Limit],
        partial_prefills: PartialPrefills | None,
        interval: PrefillInterval | None,
        reserves: Reserves,
    ) -> None:
        self.adapters = adapters
        self.budget = budget
        self.limits = limits
        self.partial_prefills = partial_prefills
        self.interval = interval
        self.reserves = reserves
        partial = [] if partial_prefills is None else [partial_prefills]
        self.after_lookup: list[Gate] = [budget, *limits, *partial, reserves]
        self.all: list[Gate] = [adapters, *self.after_lookup]
        # Only gates that override the method are called, and adapters only if there are any.
        used = self.all if adapters.num_slots else self.after_lookup
        self.commits = [gate.commit for gate in used if type(gate).commit is not Gate.commit]
        self.releases = [gate.release for gate in used if type(gate).release is not Gate.release]
        self.closers = [gate.close_queue for gate in used if type(gate).close_queue is not Gate.close_queue]
        self.openers = [gate.open_queue for gate in used if type(gate).open_queue is not Gate.open_queue]
        self.load_followers = [gate.open_step for gate in self.all if type(gate).open_step is not Gate.open_step]


class Admission:
    """Moves requests from the queue into the running batch."""

    def __init__(
        self,
        config: SchedulerConfig,
        budget: StepBudget,
        view: SchedulerView,
        batch: Batch,
        kv: KVCache,
        running: Running,
        table: RequestTable,
        gates: Gates,
        events: Events,
        transfers: Transfers | None,
        loading: Loading | None,
    ) -> None:
        self.budget = budget
        self._static = config.batching == "static"
        self._closes_after_preemption = not config.admit_after_preemption
        self._max_rows = config.max_num_seqs if config.batching == "prefill-first" else MAX_INT
        self._rows_share_budget = config.batching != "prefill-first"  # rows and admitted requests share the budget
        self._charges_whole = config.admission_charge == "whole"
        # If the full sequence must fit, the required blocks do not depend on the size of the first chunk.
        self._depends_on_chunk = not config.full_sequence_must_fit
        # Then the required blocks do not depend on unreferenced cached blocks either: a hit on one takes a free block.
        self._depends_on_found = (
            self._depends_on_chunk
            or not config.enable_chunked_prefill
            or config.first_chunk_only
            or transfers is not None
        )
        self._padding = config.num_draft_tokens if config.pad_first_decodes else 0
        if 0 < config.prefill_threshold <= self._padding:
            self._padding = 0
        self._max_padded = config.max_model_len - 1 - self._padding
        self._limits_of_padding = [limit for limit in gates.limits if limit.limits_drafts]
        self._may_pad: bool | None = False  # in the current step; None: only requests with cached tokens
        self._batch = batch
        self._kv = kv
        self._running = running
        self._table = table
        self.gates = gates
        self._openers, self._commits, self._gates = gates.openers, gates.commits, gates.after_lookup
        self._closers, self._interval = gates.closers, gates.interval
        self._events = events
        self._transfers = transfers
        self._loading = loading
        self._view = view
        self.max_num_active_seqs = config.num_sequence_slots
        """Maximum number of running requests."""
        self.pause: Pause | None = None
        """Pause that `Scheduler.pause` began; None: not paused."""
        self._kept: KeptVerdict | None = None
        self._lacking: Shortage | None = None  # missing blocks of the request that was checked last
        self._search = self._make_search(config)
        self._newly_deferred: list[tuple[Request, Deferral]] = []
        self._batch_forms = True  # static batching: only the token budget ended the last step's admissions

    def set_max_num_active_seqs(self, limit: int) -> None:
        """Set the maximum number of running requests from the next step on."""
        self.max_num_active_seqs = limit

    def set_pause(self, pause: Pause | None) -> None:
        """Begin a pause, in which no request is admitted; None: end the pause."""
        self.pause = pause

    # ------------------------------------------------------------------ the queue

    def admit(self, step: StepRecord) -> None:
        """Admit the requests that fit into `step` beside the advancing rows. Each admission is final, and its prompt
        blocks are published immediately.

        After priority preemption only `step.preemptor` is admitted.
        """
        table, search = self._table, self._search
        queue = table.queue
        if not len(queue):
            self._batch_forms = False
            self._close_queue(0, step.advance)
            if table.blocker is not None or table.skipped:
                table.note_blocked([], None)
            if search is not None:
                search.forget()
            return
        batch, advance, admitted = self._batch, step.advance, step.admitted
        assert advance is not None
        skipped: list[tuple[Request, int]] = []  # each with the number of requests admitted before its check
        blocker: Request | None = None
        repeats = False  # whether the result of the previous step's search is still valid
        closed = self._reason_closed(advance.preempted)
        self._batch_forms = False
        for open_queue in self._openers:
            open_queue()
        budget, num_running = self.budget.tokens - advance.total, len(batch.members.requests)
        num_owed_blocks = self._running.num_owed_blocks() if batch.num_prefilling else 0
        if self._padding:
            self._may_pad = not advance.unpublished and (bool(advance.requests) or None)
        if search is not None:
            search.open()
        if self._loading is not None:
            self._loading.open_step(step.preemptor, step.now)
        try:
            while len(queue):
                head = queue.peek()
                if closed is None and step.preemptor is not None and head is not step.preemptor:
                    closed = Reason.DISPLACEMENT
                if closed is None and len(advance.requests) + len(admitted) >= self._max_rows:
                    closed = Reason.SEQUENCE_LIMIT
                own: int | None = None
                if closed is not None:
                    verdict: Grant | Deferral = _closed_for(closed)
                elif skipped and search is not None:
                    verdict, own = self._check_behind(search, head, budget, num_running, num_owed_blocks)
                else:
                    verdict = self.check(head, budget, num_running, num_owed_blocks)
                if isinstance(verdict, Deferral):
                    if not skipped:  # count one reason per step, that of the head of the queue
                        step.set_blocked_reason(verdict.reason)
                    self._record_deferral(head, verdict, step.now)
                    if verdict.blocks_queue or len(skipped) >= MAX_SKIPPED:
                        blocker = head
                        self._batch_forms = verdict.reason is Reason.BUDGET
                        break
                    if search is not None and skipped:
                        search.record_skipped(head, own, len(admitted))
                    elif search is not None:
                        repeats = self._bypasses_nothing(search, [], step, budget, num_running, num_owed_blocks)
                        if repeats:
                            break
                        search.begin(head, self._kept if self._lacking else None, len(admitted))
                    skipped.append((queue.pop(), len(admitted)))
                elif verdict.is_async:
                    assert self._loading is not None
                    self._loading.start(head, verdict, step)
                else:
                    queue.pop()
                    entry = self._start_request(head, verdict, step)
                    admitted.append(entry)
                    budget -= verdict.charge
                    num_running += 1
                    if search is not None and skipped and search.is_bypass_limit_reached(len(admitted)):
                        break
                    if not entry.samples:
                        num_owed_blocks += self._running.num_owed_blocks_of_row(entry.row)
                    if search is not None and skipped and len(queue):
                        popped = [request for request, _ in skipped]
                        if self._bypasses_nothing(search, popped, step, budget, num_running, num_owed_blocks):
                            repeats = True
                            break
        finally:  # an order, or a gate, may raise
            self._may_pad = False
            table.note_blocked([request for request, _ in skipped], blocker)
            if skipped:
                self._return_skipped(skipped, len(admitted))
            if search is not None:
                search.open()  # priority preemption checks before the next step's admissions
        self._close_queue(len(queue) - len(skipped), advance)
        if search is not None and repeats:
            search.repeat()
        if search is not None and skipped:
            ended_otherwise = blocker is not None and len(skipped) < MAX_SKIPPED
            self._kept = search.close(found=bool(admitted) or ended_otherwise) or self._kept
        if admitted:
            batch.add_members([entry.row for entry in admitted], [entry.request for entry in admitted])
        if self._newly_deferred:
            self._report_deferrals(step.now)

    def _reason_closed(self, preempted: bool) -> Reason | None:
        """Reason why the current step is closed to admissions; None: the step is open. `preempted`: whether the step
        preempted a request for memory."""
        if self.pause is not None:
            return Reason.PAUSED
        if preempted and self._closes_after_preemption:
            return Reason.PREEMPTION
        if self._static and len(self._batch) and not self._batch_forms:
            return Reason.STATIC_BATCH
        return None

    def _close_queue(self, num_left: int, advance: Advance | None) -> None:
        """Tell the gates how many requests are left in the queue after a step's admissions, without skipped ones."""
        if not self._closers or (advance is not None and advance.preempted):
            return
        if self.pause is None or self.pause.mode is not PauseMode.ALL:
            for close_queue in self._closers:
                close_queue(num_left)

    def _return_skipped(self, skipped: list[tuple[Request, int]], num_admitted: int) -> None:
        """Return skipped requests to their places. The requests that were admitted after a skipped request was checked
        have bypassed it."""
        self._table.queue.put_back([request for request, _ in skipped])
        for request, num_before in skipped:
            request._state.add_bypasses(num_admitted - num_before)

    def _record_deferral(self, request: Request, verdict: Deferral, now: float) -> None:
        """Record why a request waits, and since when: since `now` if the reason has changed."""
        if verdict.reason is Reason.PAUSED:
            return  # the request keeps its earlier reason during a pause
        if request._state.set_deferral(verdict, now) and self._events.deferred:
            self._newly_deferred.append((request, verdict))

    def _report_deferrals(self, now: float) -> None:
        """Report deferrals after the step's admissions, as a deferred request may wait for a request that was admitted
        in the same step."""
        for request, (reason, missing, _) in self._newly_deferred:
            holder = self._events.find_holder(request, reason)
            send(self._events.deferred, Deferred(request, reason, missing, holder, now))
        self._newly_deferred.clear()

    def _start_request(self, request: Request, grant: Grant, step: StepRecord) -> AdmittedRequest:
        """Admit one request: allocate its blocks, a row and the tokens of its first chunk."""
        kv, batch, state = self._kv, self._batch, request._state
        status, serial = state.status, state.serial
        blocks = kv.admit(request, grant.match, grant.end, step.now)
        for commit in self._commits:
            commit(request, grant.num_cached_tokens, grant.num_tokens)
        if grant.num_external_tokens or state.holding is not None:
            assert self._loading is not None
            self._loading.admit(request, grant, step, blocks)
        row = self._table.admit(request, grant, kv.num_slots(request, blocks), step.now)
        kv.place(batch, row, blocks)
        samples = grant.num_cached_tokens + grant.num_tokens == state.num_admitted_tokens
        if samples:
            batch.num_pending[row] = 1
        else:
            batch.set_prefilling(row)
        kv.publish_prompt(batch, request)
        return AdmittedRequest(request, row, state.serial, status, serial, grant, blocks, samples)

    # ------------------------------------------------------------------ one request

    def check(self, request: Request, budget: int, num_running: int, num_owed_blocks: int) -> Grant | Deferral:
        """Decide whether a request can be admitted beside `num_running` running requests, with `budget` remaining
        tokens in the step. Returns the request's grant, or the reason why it must wait. `num_owed_blocks`: number of
        blocks that running requests still need for known tokens."""
        deferral = self._deferral_before_lookup(request, budget, num_running, num_owed_blocks)
        if deferral is not None:
            return deferral
        self._view.open_check(budget, num_running, num_owed_blocks)
        return self._look_up_and_check(request)

    def _deferral_before_lookup(
        self, request: Request, budget: int, num_running: int, num_owed_blocks: int
    ) -> Deferral | None:
        """Reason why the request must wait, if it is known without a lookup: a resource that all requests need is
        missing, or a kept verdict is valid. None: a lookup is needed."""
        state, kept = request._state, self._kept
        self._lacking = None
        if num_running >= self.max_num_active_seqs:
            return Deferral(Reason.SEQUENCE_LIMIT, num_running - self.max_num_active_seqs + 1)
        if budget <= 0:
            return Deferral(Reason.BUDGET, 1)
        if state.num_pending:
            return Deferral(Reason.IN_FLIGHT, state.num_pending)
        if request.adapter is not None:
            without_slot = self.gates.adapters.check(request, 0, 1, self._view)
            if isinstance(without_slot, Deferral):
                return without_slot
        if kept is None or kept.request is not request:
            return None
        if kept.num_publications is not None:
            is_valid = kept.num_publications == self._kv.num_publications and kept.key == (self._table.num_departures,)
            is_held = is_valid and self._interval is not None and self._interval.holds
            return Deferral(Reason.PREFILL_INTERVAL, 0) if is_held else None
        if kept.key != self._verdict_key(budget, num_running, num_owed_blocks):
            return None
        if budget < kept.required_budget:
            return Deferral(Reason.BUDGET, kept.required_budget - budget)
        shortage, free = kept.shortage, self._kv.pool.num_free
        if shortage is None or free >= shortage.required:
            return None
        self._lacking = shortage
        return self.gates.reserves.deferral(request, shortage, free)

    def last_deferral(self, request: Request) -> Deferral | None:
        """Reason why a request waited in the newest step, and the missing amount; None: the request has not been
        checked."""
        found = None if self._search is None else self._search.deferral(request)
        return request._state.deferral if found is None else found

    def forget(self) -> None:
        """Drop kept verdicts: the next step checks the head of the queue again."""
        self._kept = None
        self._newly_deferred.clear()
        if self._search is not None:
            self._search.forget()

    # ------------------------------------------------------------------ behind a head that lacks blocks

    def _make_search(self, config: SchedulerConfig) -> Search | None:
        """Create the search for requests behind a head that lacks blocks; None: no reserve allows bypasses. The search
        remembers the needs of requests only if no gate must be called at every check, and no gate defers a request for
        anything but blocks."""
        gates, kv, queue = self.gates, self._kv, self._table.queue
        reserves = gates.reserves
        if reserves.bypass is None:
            return None
        needs = None
        has_others = self._transfers is not None or gates.partial_prefills is not None or not reserves.are_steady
        first = queue.first if isinstance(queue, FirstComeFirstServed) and queue.keeps_keys else None
        if (
            first is not None
            and isinstance(kv, KVCacheManager)
            and kv.has_tables
            and not has_others
            and all(self._is_predictable(limit) for limit in gates.limits)
        ):
            must_fit = not config.enable_chunked_prefill or config.first_chunk_only or gates.budget.asks_whole
            needs = Needs(reserves.bypass, reserves, kv, self._view, self._depends_on_chunk or must_fit)
        return Search(reserves.bypass, kv.pool, self._table, needs, first)

    def _is_predictable(self, limit: Limit) -> bool:
        """Whether the limit never changes the number of blocks that a request needs."""
        return limit.only_cuts and (not self._depends_on_chunk or type(limit).check is Gate.check)

    def _bypasses_nothing(
        self,
        search: Search,
        popped: list[Request],
        step: StepRecord,
        budget: int,
        num_running: int,
        num_owed_blocks: int,
    ) -> bool:
        """Whether it is proved that no request behind the head is admitted, so that the search is done. `popped`: the
        requests, the head first, that were skipped before an admission; empty: the head itself was just deferred."""
        needs, view = search.needs, self._view
        kept = search.head if popped else self._kept if self._lacking is not None else None
        if not popped and kept is not None and search.is_done(kept):
            return True
        if needs is None:
            return False
        needs.measure(budget, num_running, num_owed_blocks)
        is_full = num_running >= self.max_num_active_seqs or budget <= 0 or num_running >= self._max_rows
        if kept is None or is_full or step.preemptor is not None:
            return False
        view.open_check(budget, num_running, num_owed_blocks)

        def check(request: Request, place: int) -> Need | None:
            if request._state.num_pending or request.adapter is not None:
                return None
            view.set_num_before(place)
            try:
                verdict = self._look_up_and_check(request)
                if not isinstance(verdict, Deferral) or self._lacking is None:
                    return None
                need = needs.keep(request, self._lacking)
            finally:
                view.set_num_before(0)
            if need is not None:
                self._record_deferral(request, verdict, step.now)
            return need

        def defer(request: Request, verdict: Deferral) -> None:
            self._record_deferral(request, verdict, step.now)

        is_done = search.scan(kept, popped, check, defer)
        self._kept, self._lacking = kept, kept.shortage
        return is_done

    def _check_behind(
        self, search: Search, request: Request, budget: int, num_running: int, num_owed_blocks: int
    ) -> tuple[Grant | Deferral, int | None]:
        """As `check`, for a request behind the head. The second result is the number of blocks that the request would
        take; None: it does not lack blocks. A request whose need is remembered is not looked up in the prefix cache."""
        needs = search.needs
        if needs is not None and num_running < self.max_num_active_seqs and budget > 0:
            is_blocking = request._state.num_bypassed >= search.bound
            lacks = needs.deferral(request, len(self._table.queue), is_blocking)
            if lacks is not None:
                return lacks
        verdict = self.check(request, budget, num_running, num_owed_blocks)
        lacking = self._lacking if isinstance(verdict, Deferral) else None
        if lacking is None:
            return verdict, None
        if needs is not None:
            needs.keep(request, lacking)
        return verdict, lacking.own

    # ------------------------------------------------------------------ while nothing changes

    def standstill(self, num_running: int) -> Standstill | None:
        """The current reason why the head of the queue is blocked, if it is still valid in a step in which each running
        request only decodes one token. None: the head may be admitted then, or only a lookup could prove that it stays
        blocked."""
        head = self._table.queue.peek()
        state, closed = head._state, self._reason_closed(False)
        if closed is Reason.PAUSED:
            return Standstill(closed, state.deferral)
        if state.deferral is None:
            return None
        if closed is not None:
            found: Standstill | None = Standstill(closed, _closed_for(closed))
        else:
            found = self._standstill_of(head, num_running)
        return found if found is not None and found.reason is state.deferral.reason else None

    def _standstill_of(self, head: Request, num_running: int) -> Standstill | None:
        budget = self.budget.tokens - (num_running if self._rows_share_budget else 0)
        is_common = num_running >= self.max_num_active_seqs or budget <= 0
        if not is_common and (head._state.num_pending or head.adapter is not None):
            return None
        deferral = self._deferral_before_lookup(head, budget, num_running, 0)
        if deferral is None:
            return None
        shortage = self._lacking
        outlasts_evictions = not self._depends_on_chunk and not self._kv.has_duplicates
        if shortage is None:
            return Standstill(deferral.reason, deferral, outlasts_evictions=is_common or outlasts_evictions)
        free = self._kv.pool.num_free
        min_free, reason = next(rung for rung in shortage.rungs if rung[0] <= free)
        return Standstill(reason, None, shortage, min_free, outlasts_evictions)

    def record_standstill(self, blocked: Standstill | None, now: float, num_free: int) -> None:
        """Account for several steps in which the same request blocked the queue, for the reason `blocked`; None: the
        queue was empty. The last of these steps was scheduled at `now`, with `num_free` free blocks."""
        self._view.pass_time(now)
        self._batch_forms = blocked is not None and blocked.reason is Reason.BUDGET
        head = None if blocked is None else self._table.queue.peek()
        self._table.note_blocked([], head)
        if blocked is None or head is None:
            self._close_queue(0, None)
            return
        for open_queue in self._openers:
            open_queue()
        self._close_queue(len(self._table.queue), None)
        shortage, deferral = blocked.shortage, blocked.deferral
        if shortage is not None:
            deferral = shortage.deferral(num_free)
        head._state.set_deferral(deferral, head._state.deferred_since)

    def _verdict_key(self, budget: int, num_running: int, num_owed_blocks: int) -> tuple[Any, ...]:
        """The state, besides the free blocks, on which the verdict on a blocked head depends."""
        kv = self._kv
        found = kv.num_publications if self._depends_on_found else kv.num_held_publications
        changes = self.gates.reserves.num_changes
        departures = self._table.num_departures
        if not self._depends_on_chunk:
            return departures, found, num_running > 0, num_owed_blocks, changes
        revisions = [limit.revision for limit in self.gates.limits] if self.gates.limits else ()
        return departures, found, num_running > 0, num_owed_blocks, changes, budget, kv.num_evictions, *revisions

    def _look_up_and_check(self, request: Request) -> Grant | Deferral:
        """Look up the cached and external tokens of the request, and check every gate."""
        kv, view, state = self._kv, self._view, request._state
        self._kept = self._lacking = None
        match = kv.look_up(request)
        cached = match.num_tokens
        external = NOTHING if self._transfers is None else self._transfers.find_load(request, match)
        if isinstance(external, Deferral):
            return external
        if external.num_tokens:
            match = kv.with_external(match, external.num_tokens)
        start = cached + external.num_tokens
        has_shared = len(match.blocks) > 0 and not self.gates.budget.asks_whole
        view.set_match(match, kv.pool.num_in_use(match.blocks) if has_shared else 0)
        if external.is_async:
            return self._check_load(request, start, match, external)
        known = state.num_tokens
        want = known - start
        padding = self._padding_of(request, start, want) if self._padding else 0
        if padding >= view.budget:
            if padding < self.budget.tokens:  # a step with fewer running tokens can hold the padding
                return Deferral(Reason.BUDGET, padding + 1 - view.budget)
            padding = 0
        for gate in self._gates:
            answer = gate.check(request, start, want, view)
            if isinstance(answer, Deferral):
                self._store_verdict(request, gate)
                return answer
            want = answer
        charge = min(known, view.budget) if self._charges_whole else want
        loaded = external.num_tokens
        if state.holding is not None:
            loaded = state.holding.num_external_blocks * kv.block_size
        if padding and not self.gates.reserves.has_enough_blocks(request, start + want + padding, view):
            padding = 0
        return Grant(match, want, start, charge + padding, loaded, padding)

    def _padding_of(self, request: Request, start: int, want: int) -> int:
        """Number of placeholder drafts that a request verifies in its first step: `_padding` or 0. It is 0 if a limit
        on drafts cuts the placeholders. It is also 0 if the request samples nothing, because its KV would seem to
        include the placeholders."""
        may_pad = start > 0 if self._may_pad is None else self._may_pad
        if want != 1 or not may_pad or start >= self._max_padded or request._state.max_tokens == 0:
            return 0
        padded = want + self._padding
        is_allowed = all(limit.check(request, start, padded, self._view) == padded for limit in self._limits_of_padding)
        return self._padding if is_allowed else 0

    def _check_load(self, request: Request, start: int, match: Match, external: External) -> Grant | Deferral:
        """Decide whether an asynchronous load may begin: whether the loaded blocks fit, with every reserve. A load
        takes no sequence slot and no token."""
        reserves = self.gates.reserves
        answer = reserves.check(request, start, 0, self._view)
        if isinstance(answer, Deferral):
            self._store_verdict(request, reserves)
            return answer
        return Grant(match, 0, start, 0, external.num_tokens, is_async=True)

    def _store_verdict(self, request: Request, gate: Gate) -> None:
        """Keep the verdict of a gate whose answer is valid until `_verdict_key` changes."""
        view, gates = self._view, self.gates
        if gate is gates.interval:  # valid until more of the request may be cached
            self._kept = KeptVerdict(request, (self._table.num_departures,), None, 0, self._kv.num_publications)
            return
        if gate is not gates.reserves and gate is not gates.budget:
            return
        key = self._verdict_key(view.budget, view.num_running, view.num_owed_blocks)
        if gate is gates.reserves:
            self._lacking = gates.reserves.shortage
            self._kept = KeptVerdict(request, key, self._lacking, 0)
        else:
            self._kept = KeptVerdict(request, key, None, gates.budget.required)

    def is_held_back(self, request: Request) -> bool:
        """Whether `prefill_interval` defers the request in the step that was opened last."""
        interval = self._interval
        return interval is not None and interval.holds_back(request, self._kv.look_up(request).num_tokens)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._table.queue)

    def lacks_step_time(self, request: Request, rows: Int64Array) -> bool:
        """Whether a policy that sets the token budget would defer the request even if only `rows` ran. If so,
        preempting the other running requests would not help."""
        policies = self.budget.policies
        if not policies:
            return False
        num_tokens = int(self._batch.num_tokens[rows].sum())
        return any(policy.lacks_step_time(request, len(rows), num_tokens) for policy in policies)

    def would_be_partial(self, request: Request, budget: int) -> bool:
        """Whether the prefill of a request would be cut if nothing of it is cached: by a limit, or by the `budget`
        remaining tokens of the step."""
        want = request._state.num_tokens
        for limit in self.gates.limits:
            allowed = limit.check(request, 0, want, self._view)
            want = 0 if isinstance(allowed, Deferral) else allowed
        return min(want, budget) < request._state.num_tokens


def _closed_for(reason: Reason) -> Deferral:
    """The deferral of each request in a step that is closed for `reason`. Its missing amount is 1 if the reason is a
    missing sequence slot, otherwise 0."""
    return Deferral(reason, 1 if reason is Reason.SEQUENCE_LIMIT else 0)
