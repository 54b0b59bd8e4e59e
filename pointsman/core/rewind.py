"""Taking back a step that could not be executed."""

from __future__ import annotations

from pointsman.core.batch import VERIFYING, Batch
from pointsman.core.in_flight import StepRecord
from pointsman.core.kv_cache import KVCacheManager
from pointsman.core.lifecycle import Lifecycle


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
        if output.num_draft_tokens[index]:
            batch.clear_flags(int(output.rows[index]), VERIFYING)
    for index in (~live & (pending > 0)).nonzero()[0].tolist():
        request = output.requests[index]
        if request.serial == output.serials[index]:  # preempted or parked since: its samples will never come
            request.settle_pending(int(pending[index]))
