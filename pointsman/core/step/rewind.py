"""Taking back steps that could not be executed."""

from __future__ import annotations

from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.state.batch import Batch
from pointsman.core.state.output import SchedulerOutput
from pointsman.core.step.in_flight import StepRecord
from pointsman.core.step.loading import Loading
from pointsman.core.step.request_table import Lifecycle


def take_back(
    output: SchedulerOutput, batch: Batch, kv: KVCacheManager, life: Lifecycle, loading: Loading | None
) -> int:
    """Take back a step in flight and all later ones, newest first. Returns how many they are."""
    in_flight = life.in_flight
    void: list[StepRecord] = []
    while not void or void[-1].output is not output:
        void.append(in_flight.pop())
    for record in void:
        rewind(record, batch, kv, life)
        if loading is not None:
            loading.roll_back(record)
    life.repeat_reports(void)
    if life.encoder is not None:
        outputs = [record.output for record in reversed(void) if record.output is not None]
        life.encoder.void(output.step_id, [entry for o in outputs for entry in o.freed_encoder_entries])
    newest = in_flight[-1] if in_flight else None
    kv.journal = newest.journal if newest is not None else None
    batch.lower_fences(newest.step_id if newest is not None else None)
    return len(void)


def rewind(record: StepRecord, batch: Batch, kv: KVCacheManager, life: Lifecycle) -> None:
    """Take back one void step; later ones have been taken back already."""
    kv.undo(record.journal)
    output = record.output
    assert output is not None
    for admission in reversed(record.admitted):
        life.roll_back(admission)
    live = batch.serial[output.rows] == output.serials
    rows = output.rows[live]
    batch.num_computed_tokens[rows] -= output.num_scheduled_tokens[live]
    pending = output.num_pending()
    batch.num_pending[rows] -= pending[live]
    for index in live.nonzero()[0].tolist():
        request = output.requests[index]
        if request.num_tokens + request.num_pending == request.num_admitted_tokens and request.row is not None:
            batch.set_prefilling(request.row)  # its first sample since the admission is void
    for index in (~live & (pending > 0)).nonzero()[0].tolist():
        request = output.requests[index]
        if request.serial == output.serials[index]:  # preempted or parked since: its samples will never come
            request._state.settle_pending(int(pending[index]))
