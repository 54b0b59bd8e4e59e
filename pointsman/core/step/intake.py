"""Part 4 of the step: waiting requests are admitted, one after the other, until one is a wall to those behind it.

Whether one may is for `admission.py`; here is who is asked, what becomes of the answer, and what the next one finds.
A request that lacks something that others do not need (a slot for its adapter, say) is passed over: it is set aside,
those behind it are asked, and at the end it returns to its place. Most requests wait for seats, tokens or blocks,
which all need, and are walls.
"""

from __future__ import annotations

from collections.abc import Callable

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.observe.stats import Counters
from pointsman.core.state.batch import Batch
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Blocked, Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus
from pointsman.core.step.admission import Admission, Grant
from pointsman.core.step.in_flight import AdmittedRequest, StepRecord
from pointsman.core.step.loading import Loading
from pointsman.core.step.request_table import Lifecycle
from pointsman.core.step.running import Advance, Running

MAX_PASSED = 64
"""Most requests that are passed over in a step, which bounds what that costs. The next one is a wall."""


class Intake:
    """Takes requests from the queue into the running batch."""

    def __init__(
        self,
        config: SchedulerConfig,
        batch: Batch,
        kv: KVCacheManager,
        running: Running,
        admission: Admission,
        life: Lifecycle,
        counters: Counters,
        publish: Callable[[Request], None],
        loading: Loading | None = None,
    ) -> None:
        self._budget = config.max_num_batched_tokens
        self._static = config.batching == "static"
        self._closes_after_preemption = not config.admit_after_preemption
        self._max_rows = config.max_num_seqs if config.batching == "prefill-first" else MAX_INT
        self._batch = batch
        self._kv = kv
        self._running = running
        self._admission = admission
        self._life = life
        self._counters = counters
        self._publish = publish
        self._loading = loading
        self._batch_forms = True  # static: only the token budget kept the last step from admitting more

    def admit(self, record: StepRecord, advance: Advance, displacer: Request | None, now: float) -> None:
        """Admit into `record` what fits beside `advance`; each admission is final and published at once.

        After a displacement only the `displacer` is admitted.
        """
        life, queue, batch = self._life, self._life.queue, self._batch
        closed = self._closed(advance)
        self._batch_forms = False
        life.passed, life.wall = [], None
        if not len(queue):
            return
        self._admission.open()
        budget = self._budget - advance.total
        num_running = len(batch.members.requests)
        owed = self._running.blocks_owed()
        passed: list[tuple[Request, int]] = []  # with how many were admitted before it was asked
        if self._loading is not None:
            self._loading.open(displacer, now)
        while len(queue):
            head = queue.peek()
            if closed is None and displacer is not None and head is not displacer:
                closed = Reason.DISPLACEMENT
            if closed is None and len(advance.requests) + len(record.admitted) >= self._max_rows:
                closed = Reason.SEQUENCE_LIMIT
            verdict = _closed_for(closed) if closed else self._admission.attempt(head, budget, num_running, owed)
            if isinstance(verdict, Blocked):
                self._defer(head, verdict, now)
                if verdict.passes and len(passed) < MAX_PASSED:
                    life.passed.append(head)
                    passed.append((queue.pop(), len(record.admitted)))
                    continue
                life.wall = head
                self._batch_forms = verdict.reason is Reason.BUDGET
                break
            if verdict.is_async:
                assert self._loading is not None
                self._loading.start(head, verdict, record, now)
                continue
            entry = self._start(head, verdict, record)
            record.admitted.append(entry)
            budget -= verdict.charge
            num_running += 1
            owed += max(0, self._kv.blocks_for(head.num_tokens) - len(entry.blocks))
        if passed:
            self._take_back(passed, len(record.admitted))
        if record.admitted:
            batch.join([entry.row for entry in record.admitted], [entry.request for entry in record.admitted])

    def _take_back(self, passed: list[tuple[Request, int]], num_admitted: int) -> None:
        """Those who were passed over return to their places; whoever was admitted since has overtaken them."""
        self._life.queue.put_back([request for request, _ in passed])
        for request, num_before in passed:
            request.num_overtaken += num_admitted - num_before

    def _closed(self, advance: Advance) -> Reason | None:
        """Why this step admits nobody, whoever asks."""
        if self._life.pause is not None:
            return Reason.PAUSED
        if advance.preempted and self._closes_after_preemption:
            return Reason.PREEMPTION
        if self._static and len(self._batch) and not self._batch_forms:
            return Reason.STATIC_BATCH
        return None

    def _defer(self, request: Request, verdict: Blocked, now: float) -> None:
        if not self._life.passed:  # only the head of the queue is counted: one reason a step
            self._counters.deferrals[verdict.reason.position] += 1
        if verdict.reason is Reason.PAUSED:
            return  # its own reason stands for when the pause is over
        deferral = request.deferral
        if deferral is not None and deferral.reason is verdict.reason:
            deferral.missing = verdict.missing
        else:
            request.deferral = Deferral(verdict.reason, verdict.missing, now)

    def _start(self, request: Request, grant: Grant, record: StepRecord) -> AdmittedRequest:
        """Admit one request: blocks, a row, its first chunk."""
        kv, batch = self._kv, self._batch
        status, serial = request.status, request.serial
        blocks = kv.admit(request, grant.match, grant.num_new_blocks)
        self._admission.take(request, grant)
        if grant.num_external_tokens or request.holding is not None:
            assert self._loading is not None
            self._loading.admit(request, grant, record, blocks)
        self._count_admission(request, grant)
        computed = grant.num_cached_tokens + grant.num_tokens
        row = self._life.place(request, computed, len(blocks) * kv.block_size)
        batch.block_table[row, : len(blocks)] = blocks
        request.num_cached_tokens = grant.num_cached_tokens
        if computed == request.num_tokens:
            batch.num_pending[row] = 1
        else:
            batch.set_prefilling(row)
        self._publish(request)
        return AdmittedRequest(request, row, request.serial, status, serial, grant, blocks)

    def _count_admission(self, request: Request, grant: Grant) -> None:
        counters = self._counters
        resumed = request.status is RequestStatus.PREEMPTED
        if self._kv.prefix is not None and request.use_prefix_cache:
            prefix = counters.resumed_prefix if resumed else counters.fresh_prefix
            prefix.queries += request.num_tokens
            prefix.hits += grant.num_cached_tokens - grant.num_external_tokens
        if resumed:
            counters.num_recomputed_tokens += max(0, request.lost_tokens - grant.num_cached_tokens)


def _closed_for(reason: Reason) -> Blocked:
    """The step admits nobody, whoever asks; of what it lacks only a seat can be counted."""
    return Blocked(reason, 1 if reason is Reason.SEQUENCE_LIMIT else 0)
