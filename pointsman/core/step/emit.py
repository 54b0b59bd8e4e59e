"""Part 5 of the step: builds the output of the running and the admitted rows.

This module also tracks which running requests are left out of steps, and since when (`LeftOut`); counts the leading
blocks that all rows share (`CommonPrefix`); and returns the tokens that a step computes, for hosts that do not store
tokens (`input_token_ids`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import StepOrderError
from pointsman.core.kv.block_pool import NO_BLOCKS
from pointsman.core.kv.cache import KVCache
from pointsman.core.policy.encoder_budget import EncoderCache
from pointsman.core.state.batch import NO_SAMPLE, Batch, Members
from pointsman.core.state.numbers import BOOL, INT32, INT64, set_writeable
from pointsman.core.state.output import NO_INTS, IntArray, OutputFields, SchedulerOutput
from pointsman.core.state.request import Request
from pointsman.core.state.runs import join_runs
from pointsman.core.state.sealed import sealed_as
from pointsman.core.state.status import RequestStatus
from pointsman.core.state.tokens import NO_TOKENS
from pointsman.core.step.in_flight import AdmittedRequest, StepRecord
from pointsman.core.step.request_table import RequestTable
from pointsman.core.step.running import Advance

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NO_BOOLS = np.zeros(0, dtype=np.bool_)
set_writeable(_NO_BOOLS, False)
_PREEMPTED = RequestStatus.PREEMPTED

UNSAMPLED = -1
"""Placeholder in the input of a step for a token that an earlier step in flight has yet to sample."""


class Emission:
    """Builds outputs, and tracks the requests whose full block table the host needs again."""

    def __init__(
        self,
        config: SchedulerConfig,
        batch: Batch,
        kv: KVCache,
        table: RequestTable,
        encoder: EncoderCache | None,
    ) -> None:
        self._batch = batch
        self._kv = kv
        self._table = table
        self._encoder = encoder
        self._has_tables = kv.has_tables
        self._pads = config.pad_first_decodes
        self.left_out = LeftOut(batch)
        """Running requests that get no tokens in the newest steps, and since when."""
        self.last_output: SchedulerOutput | None = None
        """Newest output, for explanations; None: no request waited in that step. The output may name requests that have
        finished since."""
        self._common_prefix = CommonPrefix(batch, kv) if config.count_common_prefix else None
        self._resync = False
        self._serials_to_resync: set[int] = set()  # serials of requests whose full block table the host lacks

    @property
    def is_resync_due(self) -> bool:
        """Whether the next output contains the full block table of each of its rows."""
        return self._resync

    def resync(self) -> None:
        """Send the full block table of every running request again, because earlier outputs are void."""
        self._resync = True
        self._serials_to_resync.update(self._batch.members.serials.tolist())

    def forget_output(self) -> None:
        """Drop `last_output`, because the next step will run other rows."""
        self.last_output = None

    def keep(self, step_id: int, advance: Advance, num_steps: int) -> None:
        """Set `last_output` after `num_steps` steps that were done in one call. These steps have no outputs, and
        explanations of waiting requests need the output of the last step. `advance`: work of the rows in these
        steps."""
        self.last_output = None
        if len(self._table.queue):
            requests, rows, serials, computed, _, samples, num_drafts, drafts = advance[:8]
            members = self._batch.members
            of_rows: Any = (
                requests, rows, serials, computed + (num_steps - 1), members.ones, samples, num_drafts, drafts
            )  # fmt: skip
            nothing: Any = (NO_INTS, NO_INTS, NO_INTS, _NO_BOOLS, NO_TOKENS, NO_INTS, (), (), (), ())
            count = len(requests)
            whole = OutputFields(step_id, count, count, False, *of_rows, *nothing)
            self.last_output = sealed_as(SchedulerOutput, whole)

    def emit(self, record: StepRecord) -> SchedulerOutput:
        """Build the output of a step whose rows and admissions are decided."""
        batch, table, kv, advance, resync = self._batch, self._table, self._kv, record.advance, self._resync
        assert advance is not None
        members, num_continued = batch.members, len(advance.requests)
        cached = external = groups = places = completes = NO_INTS
        resumed = _NO_BOOLS
        if record.admitted:
            advance, cached, external, resumed = self._with_admitted(advance, record.admitted)
        requests, rows, serials, computed, counts, samples, num_drafts, drafts, ids, of_rows, total, _, _ = advance
        if not self._has_tables:
            ids, of_rows, groups, places = self._blocks_of_groups(advance, resync)
        elif resync:
            self._note_sent_tables(advance)
            ids, of_rows = kv.tables(batch, rows)
        if batch.num_no_sample:
            samples, completes = self._without_completions(advance)
        preempted, finished = table.take_reports()
        encoder_inputs, freed_entries = self._encoder.end_step() if self._encoder is not None else ((), ())
        has_blocks = len(ids) > 0
        if ids.dtype is not INT32:
            ids = ids.astype(INT32, copy=False) if has_blocks else NO_TOKENS
        # By position, in the order of the fields: keywords take three times as long.
        fields = OutputFields(
            record.step_id,
            total,
            num_continued,
            resync,
            requests,
            rows,
            serials,
            computed,
            counts,
            samples,
            num_drafts,
            drafts,
            completes,
            cached,
            external,
            resumed,
            ids,
            of_rows,
            encoder_inputs,
            freed_entries,
            tuple(preempted) if preempted else (),
            tuple(finished) if finished else (),
            self._common_prefix.count(rows) if self._common_prefix is not None else 0,
            record.loads,
            kv.take_pending_saves() if kv.saves else (),
            groups,
            places,
        )
        # Arrays of this output alone; arrays that steps share are made read-only where they are created. Passing by
        # position takes a third of the time of the keyword, which the types demand.
        computed.setflags(False)  # type: ignore[call-arg]
        if has_blocks:
            ids.setflags(False)  # type: ignore[call-arg]
            of_rows.setflags(False)  # type: ignore[call-arg]
        if counts is not members.ones:
            for made in (counts, num_drafts, drafts):
                set_writeable(made, False)
        if samples is not members.trues:
            for flagged in (samples, completes, rows, serials, cached, external, resumed):
                set_writeable(flagged, False)
        output = sealed_as(SchedulerOutput, fields)
        is_whole = requests is members.requests or len(requests) == len(members.requests)
        if not is_whole:
            self.left_out.record_rows(record.step_id, rows, record.now, continues=self.last_output is not None)
        self.last_output = output if not is_whole or len(table.queue) else None
        return output

    def _without_completions(self, advance: Advance) -> tuple[npt.NDArray[np.bool_], Int64Array]:
        """Returns `advance.samples` with False for requests that sample nothing, and the row indices of such requests
        that complete their prompt in this step."""
        is_done = advance.samples & ((self._batch.flags[advance.rows] & NO_SAMPLE) != 0)
        return advance.samples & ~is_done, is_done.nonzero()[0]

    def _with_admitted(
        self, advance: Advance, admitted: list[AdmittedRequest]
    ) -> tuple[Advance, Int64Array, Int64Array, npt.NDArray[np.bool_]]:
        """The rows that advance, followed by the admitted rows, which are the last members of the batch.

        Returns the work of all rows; and, for each admitted row, the number of cached tokens, the number of cached
        tokens that a connector loads, and whether the request is resumed.
        """
        batch, members = self._batch, self._batch.members
        start, count = len(advance.requests), len(admitted)
        end = start + count
        requests, rows, serials = members.requests, members.rows, members.serials
        if end < len(requests):  # some running rows do not advance
            requests = (*advance.requests, *requests[-count:])
            rows = np.concatenate([advance.rows, rows[-count:]])
            serials = np.concatenate([advance.serials, serials[-count:]])
        grants = [entry.grant for entry in admitted]
        padding = [grant.num_drafts for grant in grants] if self._pads else []
        tokens = [grant.num_tokens + grant.num_drafts for grant in grants]
        cached = np.array([grant.num_cached_tokens for grant in grants])
        external = batch.zeros[:count]
        if self._kv.has_connector:
            external = np.array([grant.num_external_tokens for grant in grants])
        blocks = [entry.blocks for entry in admitted]
        sampling = [entry.samples for entry in admitted]
        samples = batch.trues[:end]
        if not all(sampling) or np.count_nonzero(advance.samples) < start:
            samples = np.concatenate([advance.samples, sampling])
        drafts, draft_ids = batch.zeros[:end], advance.draft_token_ids
        if len(draft_ids) or any(padding):
            padding = padding or [0] * count
            drafts = np.concatenate([advance.num_draft_tokens, padding])
            draft_ids = np.concatenate([draft_ids, np.full(sum(padding), UNSAMPLED, dtype=np.int32)])
        indices = batch.count_up[start:end].repeat(list(map(len, blocks)))
        whole = Advance(
            requests,
            rows,
            serials,
            _concatenated(advance.num_computed_tokens, cached),
            _concatenated(advance.num_scheduled_tokens, tokens),
            samples,
            drafts,
            draft_ids,
            np.concatenate([advance.block_ids, *blocks]),
            np.concatenate([advance.block_rows, indices]),
            advance.total + sum(tokens),
        )
        return whole, cached, external, np.array([entry.previous_status is _PREEMPTED for entry in admitted], BOOL)

    def _note_sent_tables(self, advance: Advance) -> None:
        """Record that the output of `advance` contains the full tables of its rows; other rows get full tables in later
        outputs."""
        self._serials_to_resync &= set(self._batch.members.serials.tolist())
        self._serials_to_resync -= set(advance.serials.tolist())
        self._resync = bool(self._serials_to_resync)

    def _blocks_of_groups(self, advance: Advance, whole: bool) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The blocks that an output reports when each row has one block table per group of KV. Returns four arrays
        [blocks]: block ids, row indices, group indices and positions in the block tables. `whole`: whether to report
        the full tables instead of only new blocks."""
        if whole:
            self._note_sent_tables(advance)
        new = self._kv.new_blocks(self._batch, advance.rows, advance.block_rows, whole=whole)
        if new is None:
            return NO_BLOCKS, NO_BLOCKS, NO_INTS, NO_INTS
        new.groups.setflags(False)  # type: ignore[call-arg]
        new.places.setflags(False)  # type: ignore[call-arg]
        return new.ids, new.rows, new.groups, new.places


def _concatenated(array: Int64Array, more: Int64Array | list[int]) -> Int64Array:
    """Concatenate two sequences; faster than `concatenate`, which first converts a list to an array."""
    start = len(array)
    joined = np.empty(start + len(more), INT64)
    joined[:start] = array
    joined[start:] = more
    return joined


class LeftOut:
    """Stores, for each running row that the newest step left out, since when every step has left it out."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._since = np.zeros(0)  # [rows] time of the first step that left out the row
        self._serials = np.zeros(0, dtype=np.int64)  # [rows] serial of the left-out request; 0: not left out
        self._step_id = 0

    def record_rows(self, step_id: int, rows: IntArray, now: float, *, continues: bool) -> None:
        """Record that a step runs only `rows` and leaves out the other running rows. `continues`: whether rows left out
        of the step before may still be left out; False: no row counts as left out before."""
        members, num_rows = self._batch.members, len(self._batch.serial)
        if not continues or step_id != self._step_id + 1:
            self._serials[:] = 0
        more = np.zeros(num_rows - len(self._serials), dtype=np.int64)
        if len(more):
            self._since, self._serials = np.concatenate([self._since, more]), np.concatenate([self._serials, more])
        self._step_id = step_id
        self._serials[rows] = 0
        is_in = np.zeros(num_rows, dtype=np.bool_)
        is_in[rows] = True
        out = ~is_in[members.rows]
        left, serials = members.rows[out], members.serials[out]
        self._since[left[self._serials[left] != serials]] = now
        self._serials[left] = serials

    def since(self, request: Request) -> float | None:
        """Time of the first step from which on every step has left out the request; None: the newest step did not leave
        it out."""
        row = request.row
        if row is None or row >= len(self._since) or self._serials[row] != request.serial:
            return None
        return float(self._since[row])


class CommonPrefix:
    """Counts the leading blocks that the tables of some rows share, for attention kernels that read a common prefix
    once (cascade). The tables are those of the first group of full attention; without such a group the count is 0.

    Tables of running rows only grow at their ends, by blocks that no other row has. So the common prefix of all running
    rows changes only with the members of the batch, and is computed once for each set of members: in steady decode it
    costs nothing. For a step with only some of the running rows the count is recomputed.
    """

    def __init__(self, batch: Batch, kv: KVCache) -> None:
        self._batch, self._kv = batch, kv
        self._members: Members | None = None
        self._count = 0

    def count(self, rows: npt.NDArray[np.integer]) -> int:
        """Number of leading blocks that the block tables of `rows` (some or all running rows) share. It is 0 if there
        is no row, and the length of the table if there is one row."""
        members = self._batch.members
        if len(rows) != len(members) or len(rows) == 1:
            return self._kv.num_common_blocks(rows)
        if self._members is not members:
            self._members, self._count = members, self._kv.num_common_blocks(rows)
        return self._count


def input_token_ids(batch: Batch, output: SchedulerOutput, allow_unsampled: bool) -> Int32Array:
    """The tokens that a step computes, row after row; see `Scheduler.input_token_ids`."""
    if output.num_rows == 0:
        return np.zeros(0, dtype=np.int32)
    if not len(output.draft_token_ids):
        return _known_token_ids(batch, output, output.num_scheduled_tokens, allow_unsampled)
    num_known = output.num_scheduled_tokens - output.num_draft_tokens
    known = _known_token_ids(batch, output, num_known, allow_unsampled)
    return join_runs(num_known, known, output.num_draft_tokens, output.draft_token_ids)


def _known_token_ids(batch: Batch, output: SchedulerOutput, counts: IntArray, allow_unsampled: bool) -> Int32Array:
    """The first `counts` [rows] tokens that each row computes, without drafts, row after row."""
    last = batch.last_tokens(output.rows)
    unsampled = output.num_computed_tokens + counts > batch.num_tokens[output.rows]
    if np.count_nonzero(unsampled):
        if not allow_unsampled:
            raise StepOrderError(
                f"step {output.step_id} computes tokens that an earlier step in flight has yet to sample; update the "
                "earlier step first, or pass allow_unsampled=True"
            )
        last[unsampled] = UNSAMPLED
    chunks = ((counts > 1) | (output.num_computed_tokens + 1 < batch.num_tokens[output.rows])).nonzero()[0]
    if len(chunks) == 0:
        return last
    parts = np.split(last, chunks)
    pieces = [parts[0]]
    for index, part in zip(chunks.tolist(), parts[1:], strict=True):
        start = int(output.num_computed_tokens[index])
        pieces += [output.requests[index].tokens(start, start + int(counts[index])), part[1:]]
    return np.concatenate(pieces)
