"""Rewind: rolls back steps that could not be executed."""

from __future__ import annotations

from pointsman.core.kv.cache import KVCache
from pointsman.core.policy.encoder_budget import EncoderCache
from pointsman.core.state.batch import Batch
from pointsman.core.step.in_flight import StepRecord, StepsInFlight
from pointsman.core.step.loading import Loading
from pointsman.core.step.request_table import RequestTable


def roll_back(
    void: list[StepRecord],
    steps: StepsInFlight,
    batch: Batch,
    kv: KVCache,
    table: RequestTable,
    encoder: EncoderCache | None,
    loading: Loading | None,
    now: float,
) -> None:
    """Roll back void steps, newest first, after their removal from the steps in flight."""
    for record in void:
        rewind(record, batch, kv, table, now)
        if loading is not None:
            loading.roll_back(record, now)
    table.repeat_reports(void)
    if encoder is not None:
        outputs = [record.output for record in reversed(void) if record.output is not None]
        encoder.undo_steps(void[-1].step_id, [entry for output in outputs for entry in output.freed_encoder_entries])
    newest = steps.records[-1] if steps.records else None
    kv.log_to(newest.journal if newest is not None else None)
    batch.lower_fences(newest.step_id if newest is not None else None)


def rewind(record: StepRecord, batch: Batch, kv: KVCache, table: RequestTable, now: float) -> None:
    """Roll back one void step, after all later steps."""
    kv.undo(record.journal)
    for admission in reversed(record.admitted):
        table.roll_back(admission, now)
    done = (
        record.output if record.output is not None else record.advance
    )  # there is no output if a policy raised before it was built
    if done is None:
        return
    live = batch.serial[done.rows] == done.serials
    rows = done.rows[live]
    batch.num_computed_tokens[rows] -= done.num_scheduled_tokens[live]
    pending = done.num_pending()
    batch.num_pending[rows] -= pending[live]
    for index in live.nonzero()[0].tolist():
        request = done.requests[index]
        if request.num_tokens + request.num_pending == request.num_admitted_tokens and request.row is not None:
            batch.set_prefilling(request.row)  # the row's first sample since its admission is void
    for index in (~live & (pending > 0)).nonzero()[0].tolist():
        request = done.requests[index]
        if (
            request.serial == done.serials[index]
        ):  # preempted or parked since: the samples of the void step will never arrive
            request._state.subtract_pending(int(pending[index]))
