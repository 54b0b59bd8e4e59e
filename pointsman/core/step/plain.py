"""A plain step: every running row decodes one token, nobody is admitted or preempted. Most steps are such.

The parts of a step ask many things that a plain one has no use for. Here all of it is one function, with the same
result, to the last field of the output (`tests/property/test_plain_steps.py`): it is taken where it is sure, from what
was kept of the steps before, that the step is plain, and otherwise does nothing.
"""

from __future__ import annotations

from typing import Any

from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.state.batch import Batch
from pointsman.core.state.tokens import NO_TOKENS
from pointsman.core.step.admission import Admission
from pointsman.core.step.emit import Emission, output_of
from pointsman.core.step.in_flight import StepRecord, StepsInFlight
from pointsman.core.step.request_table import RequestTable
from pointsman.core.step.running import Running


class PlainSteps:
    """Does plain steps at once.

    Args:
        kv: blocks in one table for each row, none of which is reported when it is evicted.
    """

    def __init__(
        self,
        batch: Batch,
        kv: KVCacheManager,
        table: RequestTable,
        steps: StepsInFlight,
        running: Running,
        admission: Admission,
        emission: Emission,
    ) -> None:
        self._batch = batch
        self._kv = kv
        self._pool = kv.pool
        self._table = table
        self._steps = steps
        self._running = running
        self._admission = admission
        self._emission = emission
        self._most_rows = running.steady_rows

    def decide(self, step: StepRecord) -> bool:
        """Do all parts of the step, if it is plain. False: it may not be, and nothing has changed."""
        batch, kv, table, emission = self._batch, self._kv, self._table, self._emission
        members = batch.members
        rows = members.rows
        count, in_flight, waits = len(rows), len(self._steps.records) > 0, len(table.queue) > 0
        if (
            not 0 < count <= self._most_rows
            or batch.num_prefilling
            or batch.num_no_sample
            or emission.is_resync_due
            or kv.returned is not None
            or (in_flight and not self._running.may_run_ahead)
        ):
            return False
        # What the rows lack.
        computed = batch.num_computed_tokens[rows]
        lacking = (computed >= batch.num_slots[rows]).nonzero()[0]
        num_lacking = len(lacking)
        num_free = self._pool.num_free - num_lacking
        if num_free < 0:
            return False
        if not waits:
            table.skipped, table.blocker = [], None
        elif not self._admission.stays_blocked(step, count, num_free, num_lacking):
            return False
        block_ids: Any = NO_TOKENS
        if num_lacking:
            block_ids = kv.grow_by_one(batch, rows[lacking], 1)
            block_ids.setflags(False)
            lacking.setflags(False)  # type: ignore[call-arg]
        # What they compute.
        batch.compute_one(computed, is_first=not in_flight)
        computed.setflags(False)  # type: ignore[call-arg]
        preempted, finished = table.take_reports()
        step.members = members
        step.output = output = output_of(
            members,
            step.step_id,
            count,
            count,
            computed,
            members.ones,
            members.trues,
            block_ids,
            lacking,
            tuple(preempted) if preempted else (),
            tuple(finished) if finished else (),
        )
        emission.last_output = output if waits else None
        return True
