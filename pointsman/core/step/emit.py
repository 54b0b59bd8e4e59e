"""The output of a step: the running part and the admitted rows in one, as arrays of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.state.batch import NO_SAMPLE, Batch
from pointsman.core.state.numbers import INT32, set_writeable
from pointsman.core.state.output import OutputFields, SchedulerOutput
from pointsman.core.state.status import RequestStatus
from pointsman.core.state.tokens import NO_TOKENS
from pointsman.core.step.common_prefix import CommonPrefix
from pointsman.core.step.in_flight import AdmittedRequest, StepRecord
from pointsman.core.step.request_table import Lifecycle
from pointsman.core.step.running import Advance

Int64Array = npt.NDArray[np.int64]

_NO_INTS: Int64Array = np.zeros(0, dtype=np.int64)
_NO_BOOLS = np.zeros(0, dtype=np.bool_)
_NO_INTS.flags.writeable = False
_NO_BOOLS.flags.writeable = False


class Emission:
    """Makes outputs, and remembers which requests must be told their whole block table again."""

    def __init__(self, batch: Batch, kv: KVCacheManager, life: Lifecycle, *, counts_common_prefix: bool) -> None:
        self._batch = batch
        self._kv = kv
        self._life = life
        self._common_prefix = CommonPrefix(batch) if counts_common_prefix else None
        self._resync = False
        self._unsynced: set[int] = set()  # admissions that the host has yet to be told again

    def resync(self) -> None:
        """Outputs were void: every request that runs must be told its whole block table again."""
        self._resync = True
        self._unsynced.update(self._batch.members.serials.tolist())

    def emit(self, record: StepRecord, advance: Advance) -> SchedulerOutput:
        """The output of a step that is decided; it is noted in the step's record."""
        num_continued = len(advance.requests)
        cached, external, resumed = _NO_INTS, _NO_INTS, _NO_BOOLS
        if record.admitted:
            cached, external = self._add_admitted(advance, record.admitted)
            resumed = np.array([entry.previous_status is RequestStatus.PREEMPTED for entry in record.admitted])
        resync = self._resync
        if resync:
            advance.block_ids, advance.block_rows = self._full_tables(advance)
        block_ids = advance.block_ids
        samples, completes = advance.samples, _NO_INTS
        if self._batch.num_no_sample:
            samples, completes = self._without_completions(advance)
        preempted, finished = self._life.take_reports()
        encoder = self._life.encoder
        encoder_inputs, freed_entries = encoder.close() if encoder is not None else ((), ())
        if block_ids.dtype is not INT32:
            block_ids = block_ids.astype(INT32, copy=False) if len(block_ids) else NO_TOKENS
        # By position, in the order of the fields: with keywords it takes three times as long.
        members = self._batch.members
        fields: Any = OutputFields(
            record.step_id,
            advance.total,
            num_continued,
            resync,
            advance.requests,
            advance.rows,
            advance.serials,
            advance.num_computed_tokens,
            advance.num_scheduled_tokens,
            samples,
            advance.num_draft_tokens,
            advance.draft_token_ids,
            completes,
            cached,
            external,
            resumed,
            block_ids,
            advance.block_rows,
            encoder_inputs,
            freed_entries,
            tuple(preempted) if preempted else (),
            tuple(finished) if finished else (),
            self._common_prefix.count(advance.rows) if self._common_prefix is not None else 0,
            tuple(record.loads) if record.loads else (),
            self._kv.take_saves(),
        )
        set_writeable(advance.num_computed_tokens, False)
        if len(block_ids):
            set_writeable(block_ids, False)
            set_writeable(advance.block_rows, False)
        if advance.num_scheduled_tokens is not members.ones:
            set_writeable(advance.num_scheduled_tokens, False)
            set_writeable(advance.num_draft_tokens, False)
            set_writeable(advance.draft_token_ids, False)
        if samples is not members.trues:
            _make_read_only(fields)
        fields.__class__ = SchedulerOutput  # complete: see `sealed.py`
        output: SchedulerOutput = fields
        record.output = output
        count = len(members.requests)
        is_whole = len(advance.requests) == count
        life = self._life
        if not is_whole:
            life.left_out.note(record.step_id, advance.rows, life.now, goes_on=life.last_output is not None)
        life.last_output = output if len(life.queue) or not is_whole else None
        if is_whole and (samples is members.trues or np.count_nonzero(samples) == count):
            record.members = members
        return output

    def _without_completions(self, advance: Advance) -> tuple[npt.NDArray[np.bool_], Int64Array]:
        """`samples` of the rows that do sample, and the indices of those that are complete instead."""
        is_done = advance.samples & ((self._batch.flags[advance.rows] & NO_SAMPLE) != 0)
        return advance.samples & ~is_done, is_done.nonzero()[0]

    def _add_admitted(self, advance: Advance, admitted: list[AdmittedRequest]) -> tuple[Int64Array, Int64Array]:
        """Let the admitted rows, the last members of the batch, follow those that advance.

        Returns their cached tokens, and how many of these a connector loads.
        """
        batch, members = self._batch, self._batch.members
        start, count = len(advance.requests), len(admitted)
        requests, rows, serials = members.requests, members.rows, members.serials
        if start + count < len(requests):  # some that ran before do not advance
            requests = (*advance.requests, *requests[-count:])
            rows = np.concatenate([advance.rows, rows[-count:]])
            serials = np.concatenate([advance.serials, serials[-count:]])
        tokens = [entry.grant.num_tokens for entry in admitted]
        cached = np.array([entry.grant.num_cached_tokens for entry in admitted])
        external = batch.zeros[:count]
        if self._life.transfers is not None:
            external = np.array([entry.grant.num_external_tokens for entry in admitted])
        blocks = [entry.blocks for entry in admitted]
        samples = batch.num_pending[rows[start:]].astype(np.bool_)
        indices = batch.count_up[start : start + count]
        advance.requests, advance.rows, advance.serials = requests, rows, serials
        advance.num_computed_tokens = np.concatenate([advance.num_computed_tokens, cached])
        advance.num_scheduled_tokens = np.concatenate([advance.num_scheduled_tokens, tokens])
        advance.samples = np.concatenate([advance.samples, samples])
        drafts = batch.zeros[: start + count]
        if len(advance.draft_token_ids):
            drafts = np.concatenate([advance.num_draft_tokens, batch.zeros[:count]])
        advance.num_draft_tokens = drafts
        advance.block_ids = np.concatenate([advance.block_ids, *blocks])
        advance.block_rows = np.concatenate([advance.block_rows, indices.repeat(list(map(len, blocks)))])
        advance.total += sum(tokens)
        return cached, external

    def _full_tables(self, advance: Advance) -> tuple[Int64Array, Int64Array]:
        """Whole tables for the rows of this output; whoever is not among them is told later."""
        self._unsynced &= set(self._batch.members.serials.tolist())
        self._unsynced -= set(advance.serials.tolist())
        self._resync = bool(self._unsynced)
        return self._kv.tables(self._batch, advance.rows)


def _make_read_only(fields: OutputFields) -> None:
    """Flag what else is made for an output whose rows do not all sample."""
    for array in (
        fields.rows,
        fields.serials,
        fields.samples,
        fields.completes,
        fields.num_cached_tokens,
        fields.num_external_tokens,
        fields.is_resumed,
    ):
        set_writeable(array, False)
