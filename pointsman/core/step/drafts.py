"""Speculation: keeps the drafts of a host (guessed tokens) until a step verifies them beside the next token.

    propose    a host's drafts wait for the next step of the rows that decode
    schedule   a row computes its newest token and its drafts; drafts that are not scheduled are dropped
    update     the model accepts the drafts up to the first draft that it would not have sampled, and adds one token
               that it samples: a run of 1 to 1 + drafts tokens from one step (Leviathan et al. 2023, "Fast Inference
               from Transformers via Speculative Decoding"; Chen et al. 2023, "Accelerating Large Language Model
               Decoding with Speculative Sampling")

While drafts are in flight, the number of accepted drafts is unknown, so the row is not scheduled again before the
step's result. `num_computed_tokens` is then lowered by the number of rejected drafts. The KV slots of rejected drafts
stay with the row, and the row's next tokens overwrite them.

Drafts have the lowest precedence. The number of drafts of a row is cut to the token limit, the configuration's
`draft_table`, the limits and the budget. No request is preempted for drafts, and a request that loses its row loses its
drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import ProposalError, StepOrderError
from pointsman.core.state.batch import PREFILLING, Batch
from pointsman.core.state.events import Events
from pointsman.core.state.numbers import ONE, flat_integers, flat_tokens, set_writeable
from pointsman.core.state.output import IntArray, Integers, SchedulerOutput
from pointsman.core.state.runs import Runs
from pointsman.core.state.tokens import NO_TOKENS

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NO_ROWS: Int64Array = np.zeros(0, dtype=np.int64)
set_writeable(NO_ROWS, False)


class Equal:
    """The number of drafts (`counts`) and of tokens (`granted`) of each row, for a proposal with equally many drafts
    for every row (the common case). Consecutive steps share the arrays, so a comparison by `is` finds that counts are
    equal."""

    def __init__(self, num_rows: int, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.counts: Int64Array = np.full(num_rows, num_drafts)
        self.granted: Int64Array = np.full(num_rows, num_drafts + 1)
        set_writeable(self.counts, False)
        set_writeable(self.granted, False)


class Drafts:
    """The proposed drafts that wait for the next step of each running request, row after row.

    While the same requests run, all drafts are scheduled unchanged. A row whose serial has changed belongs to another
    admission: its drafts are obsolete.
    """

    def __init__(self, config: SchedulerConfig, batch: Batch, events: Events, last_updated_step: int = -1) -> None:
        self._config = config
        self._batch = batch
        self._events = events
        self.last_updated_step = last_updated_step
        self.waiting = 0
        """Number of waiting drafts; may include drafts of released rows. 0: the arrays below are obsolete."""
        self.counts: Int64Array = NO_ROWS
        """[drafted rows] number of drafts of each row that has drafts."""
        self._equal = Equal(0, 0)
        """Counts of the newest proposal with equally many drafts for every row."""
        self._rows: IntArray = NO_ROWS
        self._serials: IntArray = NO_ROWS
        self._token_ids: Int32Array = NO_TOKENS

    def set_updated_step(self, step_id: int) -> None:
        """Set the newest step that was updated, after which drafts for an earlier step are stale."""
        self.last_updated_step = step_id

    def forget(self) -> None:
        """Drop all waiting drafts."""
        self.waiting = 0

    def of_row(self, row: int) -> list[int]:
        """The waiting drafts of the request that currently has this row."""
        if not self.waiting:
            return []
        for index in np.flatnonzero((self._rows == row) & (self._serials == self._batch.serial[row])).tolist():
            return Runs.of(self.counts, self._token_ids).tokens_of(index)
        return []

    # ------------------------------------------------------------------ proposing

    def propose(self, output: SchedulerOutput, token_ids: Integers, counts: Integers, in_flight: bool) -> int:
        """Store drafts for the rows of an updated output; see `Scheduler.propose`.

        `in_flight`: whether another step is in flight.
        """
        if output.step_id > self.last_updated_step:
            raise StepOrderError(
                f"drafts cannot be proposed for step {output.step_id} before its update; call propose() after update()"
            )
        if output.step_id < self.last_updated_step:
            return 0
        batch, members = self._batch, self._batch.members
        proposed, tokens = self._checked(output, token_ids, counts)
        rows, serials = output.rows, output.serials
        if in_flight or rows is not members.rows or batch.num_prefilling:
            decodes = (batch.serial[rows] == serials) & (batch.num_pending[rows] == 0)
            decodes &= (batch.flags[rows] & PREFILLING) == 0
            tokens = tokens[decodes.repeat(proposed)]
            rows, serials, proposed = rows[decodes], serials[decodes], proposed[decodes]
        if batch.may_reach_limit(self._config.num_draft_tokens):
            left = batch.token_limit[rows] - batch.num_tokens[rows]
            runs = Runs.of(proposed, tokens).truncate(np.minimum(proposed, left - 1))
            proposed, tokens = runs.counts, runs.token_ids
        keep = self._store_beside_others if self.waiting and rows is not self._rows else self._store_only
        keep(rows, serials, proposed, tokens)
        for method in self._events.proposed:
            method(len(tokens))
        return len(tokens)

    def _store_beside_others(
        self, rows: IntArray, serials: IntArray, counts: Int64Array, token_ids: Int32Array
    ) -> None:
        """Store new drafts for `rows`, and keep the waiting drafts of other rows."""
        others = ~self._is_among(rows)
        left = Runs.of(self.counts, self._token_ids).select(others)
        self._store_only(
            np.concatenate([self._rows[others], rows]),
            np.concatenate([self._serials[others], serials]),
            np.concatenate([left.counts, counts]),
            np.concatenate([left.token_ids, token_ids]),
        )

    def _store_only(self, rows: IntArray, serials: IntArray, counts: Int64Array, token_ids: Int32Array) -> None:
        """Replace all waiting drafts by these drafts of `rows`."""
        self._rows, self._serials, self.counts, self._token_ids = rows, serials, counts, token_ids
        self.waiting = len(token_ids)

    # ------------------------------------------------------------------ scheduling

    def are_all_allowed_for(self, rows: Int64Array) -> bool:
        """Whether the waiting drafts are for exactly these rows, and `draft_table` allows all of the drafts."""
        if rows is not self._rows:
            return False
        return not self._config.draft_table or bool(self.counts.max() <= self._config.max_drafts(len(rows)))

    def num_verified_tokens(self) -> Int64Array:
        """[drafted rows] number of tokens of each row in a step that verifies all waiting drafts."""
        equal = self._equal
        return equal.granted if self.counts is equal.counts else self.counts + ONE

    def pop_all(self) -> Int32Array:
        """Return all waiting drafts, row after row; these drafts no longer wait."""
        self.forget()
        return self._token_ids

    def num_allowed(self, rows: Int64Array) -> Int64Array:
        """[rows] number of drafts that a step may verify for each row: the waiting drafts, limited by `draft_table`."""
        drafts = self._by_row_number(self.counts)[rows]
        if self._config.draft_table:
            np.minimum(drafts, self._config.max_drafts(len(rows)), out=drafts)
        return drafts

    def pop_drafts(self, rows: Int64Array, drafts: Int64Array) -> Int32Array:
        """Return the first `drafts` [rows] waiting drafts of each row, row after row; further waiting drafts of these
        rows are dropped."""
        total = int(drafts.sum())
        waiting = Runs.of(self.counts, self._token_ids)
        starts = self._by_row_number(waiting.starts)[rows]
        places = (starts - (drafts.cumsum() - drafts)).repeat(drafts) + np.arange(total)
        token_ids: Int32Array = self._token_ids[places]
        stays = ~self._is_among(rows)
        left = waiting.select(stays)
        self._store_only(self._rows[stays], self._serials[stays], left.counts, left.token_ids)
        return token_ids

    def _by_row_number(self, values: Int64Array) -> Int64Array:
        """[all rows] the entries of `values` [drafted rows], indexed by row number; 0 for rows without waiting
        drafts."""
        column = np.zeros_like(self._batch.serial)
        column[self._rows] = values  # a released row is not reused yet: the next step drops its drafts
        return column

    def _is_among(self, rows: IntArray) -> BoolArray:
        """[drafted rows] mask: whether the row is among `rows`, or was released by the request for which drafts
        wait."""
        is_named = np.zeros(len(self._batch.serial), dtype=np.bool_)
        is_named[rows] = True
        found: BoolArray = is_named[self._rows] | (self._batch.serial[self._rows] != self._serials)
        return found

    def _checked(self, output: SchedulerOutput, token_ids: Integers, counts: Integers) -> tuple[Int64Array, Int32Array]:
        most = self._config.num_draft_tokens
        given = flat_integers("counts", counts, ProposalError)
        if given.shape != output.rows.shape:
            raise ProposalError(
                f"counts has shape {given.shape}; give one number for each of the {output.num_rows} row(s) of step "
                f"{output.step_id}"
            )
        num_rows = len(given)
        fewest, highest = (given.item(given.argmin()), given.item(given.argmax())) if num_rows else (0, 0)
        if fewest < 0 or highest > most:
            bad = fewest if fewest < 0 else highest
            raise ProposalError(
                f"counts has {bad} drafts for a row, but num_draft_tokens is {most}; propose 0 to {most} for each row"
            )
        if fewest == highest:
            if self._equal.num_drafts != fewest or len(self._equal.counts) != num_rows:
                self._equal = Equal(num_rows, fewest)
            proposed, total = self._equal.counts, fewest * num_rows
        else:
            proposed = given.copy()
            total = int(proposed.dot(self._batch.ones[:num_rows]))  # twice as fast as `sum`
        return proposed, flat_tokens(token_ids, total, "counts asks for {} token(s)", "is proposed", ProposalError)
