"""The columns of the running requests, one row per request, which every step reads and writes.

Layout, with R rows (grown by doubling); the block table of each row is in the KV cache:

    num_tokens           int64 [R]     known tokens: prompt and output so far
    num_computed_tokens  int64 [R]     tokens whose KV exists, or will exist when the steps in flight have run
    num_pending          int64 [R]     samples scheduled and not yet returned
    num_slots            int64 [R]     tokens that the row's blocks can hold (number of blocks x block size)
    token_limit          int64 [R]     number of tokens at which the request finishes
    eos_token_id         int32 [R]     the request's only stop token; NO_TOKEN: none, or several (`StopFilter`)
    priority             int64 [R]     smaller is more urgent
    num_preemptions      int64 [R]     how often the request was preempted
    serial               int64 [R]     number of the admission that the row belongs to; 0: none
    flags                uint8 [R]     rare properties, see PREFILLING and the next constants
    recent_tokens        int32 [R, S]  the newest tokens; S is `RECENT`, or more with drafts
    recent_offset        int64 [R]     the token at position p has index recent_offset + p in flat recent_tokens
    recent_limit         int64 [R]     from this number of tokens on, the tokens of a further step might not fit

A row keeps its number while its request runs. `members` lists the running rows in admission order, with constant
columns gathered once. When requests join or leave, `members` is replaced and its arrays are not changed, so an output
may keep them. Output tokens move to the request's own array when the row's recent tokens are full, and when the row is
released. So memory grows with the number of generated tokens, not with `max_tokens`.

A released row is reused only when every step that names it has been updated (`fenced_rows`). Unused rows hold garbage,
except `serial`, which is 0. Bulk writes may touch them (see `Members.span`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core.state.acceptance import Acceptance
from pointsman.core.state.numbers import BOOL, MAX_INT, ONE, TWO, ZERO, set_writeable
from pointsman.core.state.request import Request, RequestState
from pointsman.core.state.runs import Runs

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

PREFILLING = 1  # no sample has been scheduled since the request's admission: known tokens are still to compute
WATCHED = 2  # a repetition may finish the request: each of its tokens is tested
NOT_AHEAD = 4  # no step of the request is scheduled while a sample of it is in flight
NO_SAMPLE = 16  # the request samples nothing, and finishes when its prompt is computed
ENCODER_INPUTS = 32  # the request's prompt has placeholders

NO_TOKEN = -1
STOP_FILTER_SIZE = 1 << 16  # vocabularies are two to four times as large: a stop token shares its index with few others
_STOP_MASK = np.array(STOP_FILTER_SIZE - 1)  # int64, so that masked ids of any type are indices
# A row is flushed once in this number of tokens. In a step all rows write at about the same offset: if rows were a
# power of two apart, these addresses would share a few sets of the processor's cache.
RECENT, RECENT_WITH_DRAFTS = 528, 4112
INITIAL_ROWS = 64
# A slice of the columns is faster than a list of rows if at least SPANNED_FROM rows run, and the slice has at most
# SPAN_PER_ROW rows for each of them.
SPANNED_FROM, SPAN_PER_ROW = 64, 4
_COLUMNS = (
    "num_tokens",
    "num_computed_tokens",
    "num_pending",
    "num_slots",
    "token_limit",
    "eos_token_id",
    "priority",
    "num_preemptions",
    "serial",
    "flags",
    "recent_tokens",
    "recent_offset",
    "recent_limit",
)

_GATHERED = frozenset({"token_limit", "eos_token_id", "_stop_tokens", "ends", "ones", "trues", "zeros"})


class Members:
    """The running rows at one moment, in admission order. Immutable: shared with the outputs.

    The constant columns are gathered when a step first reads them. They do not change while a request has its row.
    """

    __slots__ = (
        "_batch",
        "_indices",
        "_num_flushes",
        "_stop_tokens",
        "ends",
        "eos_token_id",
        "ones",
        "requests",
        "rows",
        "serials",
        "span",
        "token_limit",
        "trues",
        "zeros",
    )

    def __init__(self, batch: Batch, rows: Int64Array, requests: tuple[Request, ...]) -> None:
        count = len(requests)
        self.rows = rows
        self.requests = requests
        self.serials = batch.serial[rows]
        set_writeable(rows, False)
        set_writeable(self.serials, False)
        self._batch = batch
        self._num_flushes = -1
        self._indices = rows  # see `append_offsets`; valid while `_num_flushes` is the batch's number of flushes
        self.span: slice | None = None
        """A slice of the columns that contains these rows and free rows; used if these are all running rows. None: too
        few rows run, absolutely or for the length of the slice."""
        if count >= SPANNED_FROM:
            end = 1 + rows.item(rows.argmax())
            if end <= SPAN_PER_ROW * count:
                self.span = slice(end)

    def __getattr__(self, name: str) -> Any:
        if name not in _GATHERED:
            raise AttributeError(f"Members has no attribute {name!r}")
        batch, rows, count = self._batch, self.rows, len(self.requests)
        self.token_limit = batch.token_limit[rows]
        self.eos_token_id = batch.eos_token_id[rows]
        self._stop_tokens: Int32Array | None = None
        self.ones = batch.ones[:count]
        self.ends = batch.count_up[1 : 1 + count]
        """[members] 1, 2, 3, ...: the field `ends` of `Runs` with one token for each row."""
        self.trues = batch.trues[:count]
        self.zeros = batch.zeros[:count]
        return getattr(self, name)

    def __len__(self) -> int:
        return len(self.requests)

    def append_offsets(self, batch: Batch) -> Int64Array:
        """[members] for each row, the number to add to a position p to get the index in flat `recent_tokens` of the
        token at position p + 1."""
        if self._num_flushes != batch.num_flushes:
            self._num_flushes, self._indices = batch.num_flushes, batch.recent_offset[self.rows] + ONE
        return self._indices

    def without_requests(self, batch: Batch, requests: list[Request]) -> Members:
        """The members without `requests`, whose rows have just been released. Some of `requests` may not be members."""
        if len(requests) == 1:  # the usual case, in a third of the time
            index = self.serials.searchsorted(requests[0]._state.serial).item()  # serials ascend
            if index < len(self.requests) and self.requests[index] is requests[0]:
                rows = np.concatenate([self.rows[:index], self.rows[index + 1 :]])
                return Members(batch, rows, self.requests[:index] + self.requests[index + 1 :])
        stays = batch.serial[self.rows].astype(BOOL)
        return Members(batch, self.rows[stays], tuple(compress(self.requests, stays.tolist())))

    def may_stop(self, runs: Runs) -> BoolArray | None:
        """For each token of `runs` (one run per row), whether it may be the stop token of its row, if the row has
        exactly one; None: no token may be."""
        if self._stop_tokens is None:  # not `unique`, whose first call imports a part of NumPy in 7 ms
            self._stop_tokens = np.array(sorted({*self.eos_token_id.tolist()} - {NO_TOKEN}), dtype=np.int32)
        if not len(self._stop_tokens):
            return None
        only_one = len(self._stop_tokens) == 1
        stops: BoolArray = runs.token_ids == (self._stop_tokens if only_one else self.eos_token_id.repeat(runs.counts))
        return stops


class StopFilter:
    """Finds the sampled tokens that may be a stop token of their row, with one lookup for all rows.

    A row with one stop token is compared with it (`Batch.eos_token_id`). Many models have two or three stop tokens, and
    a request may add hundreds. The filter counts the stop tokens of rows with several, over all these rows together, by
    the low bits of their ids. A token whose count is 0 stops no row; the few other tokens are compared one by one with
    the stop tokens of their row.

        counts  int32 [65536]   stop tokens, of rows with several of them, whose low bits are the index
    """

    def __init__(self) -> None:
        self.num_rows = 0
        """Number of rows with several stop tokens; 0: the filter need not be called."""
        self.counts: npt.NDArray[np.int32] = np.zeros(STOP_FILTER_SIZE, dtype=np.int32)

    def add(self, stop_tokens: Collection[int]) -> None:
        """Count the stop tokens of a row that has several."""
        if len(stop_tokens) > 1:
            self._change_counts(stop_tokens, 1)

    def remove(self, stop_tokens: Collection[int]) -> None:
        """Remove the stop tokens of a released row."""
        if len(stop_tokens) > 1:
            self._change_counts(stop_tokens, -1)

    def may_stop(self, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """[len(token_ids)] whether each token may be a counted stop token. False: the token is none."""
        may: npt.NDArray[np.bool_] = self.counts[token_ids & _STOP_MASK] != 0
        return may

    def _change_counts(self, stop_tokens: Collection[int], change: int) -> None:
        self.num_rows += change
        indices = np.fromiter(stop_tokens, dtype=np.int64, count=len(stop_tokens)) & _STOP_MASK
        np.add.at(self.counts, indices, change)


class Batch:
    """The columns of the running requests; their KV is in blocks of `block_size` tokens.

    `accepted_drafts` has one element more than the maximum number of drafts of a row: see `Acceptance`.
    """

    def __init__(self, block_size: int, accepted_drafts: list[int]) -> None:
        self.block_size = block_size
        self.max_drafts = max_drafts = len(accepted_drafts) - 1
        self._num_recent = max(RECENT_WITH_DRAFTS, 4 * max_drafts) if max_drafts else RECENT
        rows = INITIAL_ROWS
        self.num_tokens: Int64Array = np.zeros(rows, dtype=np.int64)
        self.num_computed_tokens: Int64Array = np.zeros(rows, dtype=np.int64)
        self.num_pending: Int64Array = np.zeros(rows, dtype=np.int64)
        self.num_slots: Int64Array = np.zeros(rows, dtype=np.int64)
        self.token_limit: Int64Array = np.zeros(rows, dtype=np.int64)
        self.eos_token_id: Int32Array = np.zeros(rows, dtype=np.int32)
        self.priority: Int64Array = np.zeros(rows, dtype=np.int64)
        self.num_preemptions: Int64Array = np.zeros(rows, dtype=np.int64)
        self.serial: Int64Array = np.zeros(rows, dtype=np.int64)
        self.flags: npt.NDArray[np.uint8] = np.zeros(rows, dtype=np.uint8)
        self.recent_tokens: Int32Array = np.zeros((rows, self._num_recent), dtype=np.int32)
        self.recent_offset: Int64Array = np.zeros(rows, dtype=np.int64)
        self.recent_limit: Int64Array = np.zeros(rows, dtype=np.int64)
        self.acceptance = Acceptance(accepted_drafts)
        self._make_views()
        self._free_rows = list(range(rows - 1, -1, -1))
        self.fenced_rows: list[tuple[int, int]] = []  # (last step that names the row, row)
        self.num_prefilling = 0
        self.num_watched = 0
        self.num_with_one_stop = 0
        """Number of rows with exactly one stop token."""
        self.stop_filter = StopFilter()
        self.num_not_ahead = 0
        self.num_no_sample = 0
        self.num_flushes = 0
        """Number of flushes so far. It changes whenever `recent_offset` changes."""
        self.min_tokens_left = 0  # lower bound: every row can append so many tokens before its token limit
        self._min_appends = 0  # lower bound: every row can append so many tokens before it must be flushed
        self.members = Members(self, np.zeros(0, dtype=np.int64), ())

    def __len__(self) -> int:
        """Number of running requests."""
        return len(self.members.requests)

    # ------------------------------------------------------------------ rows

    def place(self, request: Request, num_computed_tokens: int, num_slots: int) -> int:
        """Assign a row to a request and fill the columns of the row. The request runs once `add_members` has been
        called with the row."""
        if not self._free_rows:
            self._grow_columns()
        row = self._free_rows.pop()
        state = request._state
        num_tokens = state.num_admitted_tokens
        stops = request.stop_set
        watched = state.repetition_watch is not None
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = num_computed_tokens
        self.num_pending[row] = 0
        self.num_slots[row] = num_slots
        self.token_limit[row] = state.token_limit
        has_one_stop = len(stops) == 1
        self.eos_token_id[row] = next(iter(stops)) if has_one_stop else NO_TOKEN
        self.priority[row] = state.priority
        self.num_preemptions[row] = state.num_preemptions
        self.serial[row] = state.serial
        no_sample = state.max_tokens == 0
        self.flags[row] = (
            (WATCHED if watched else 0)
            | (0 if request.runs_ahead else NOT_AHEAD)
            | (NO_SAMPLE if no_sample else 0)
            | (ENCODER_INPUTS if state.encoder_inputs else 0)
        )
        self.num_watched += watched
        self.num_with_one_stop += has_one_stop
        self.stop_filter.add(stops)
        self.num_not_ahead += not request.runs_ahead
        self.num_no_sample += no_sample
        self._keep_newest_token(row, num_tokens, state.last_token_id)
        num_appends = self._num_recent - 1 - self.max_drafts  # after `_keep_newest_token`
        if num_appends < self._min_appends:
            self._min_appends = num_appends
        left = state.token_limit - num_tokens
        if left < self.min_tokens_left:
            self.min_tokens_left = left
        state.set_row(self, row)
        return row

    def add_members(self, rows: list[int], requests: list[Request]) -> None:
        """Append placed rows and their requests to the running ones in `members`, in admission order."""
        members = self.members
        all_rows = np.concatenate([members.rows, rows])
        self.members = Members(self, all_rows, members.requests + tuple(requests))

    def release_rows(self, requests: list[Request], last_step: int | None) -> None:
        """Release the rows of running requests, and copy the values of the rows' columns to the states of the requests.

        `last_step`: the newest step in flight, which may name the rows; None: no step is in flight.
        """
        for request in requests:
            state = request._state
            row = state.row
            assert row is not None
            self.flush_recent_tokens(row, state)
            if self.flags.item(row):
                self.clear_flags(row, PREFILLING | WATCHED | NOT_AHEAD | NO_SAMPLE | ENCODER_INPUTS)
            self.num_with_one_stop -= len(request.stop_set) == 1
            self.stop_filter.remove(request.stop_set)
            if self.max_drafts:
                state.add_drafts(*self.acceptance.release_row(row))
            self.serial[row] = 0
            state.leave_row(self.num_computed_tokens.item(row), self.num_pending.item(row))
            if last_step is None:
                self._free_rows.append(row)
            else:
                self.fenced_rows.append((last_step, row))
        self.members = self.members.without_requests(self, requests)

    def free_fenced_rows(self, step_id: int) -> None:
        """Make the released rows reusable that waited for the update of step `step_id` or of an earlier step: these
        steps are updated."""
        fenced = self.fenced_rows
        if fenced:
            self._free_rows.extend([row for step, row in fenced if step <= step_id])
            self.fenced_rows = [entry for entry in fenced if entry[0] > step_id]

    def lower_fences(self, newest_step: int | None) -> None:
        """Let no released row wait for steps after `newest_step`, because these steps were rolled back. None: all steps
        in flight were rolled back."""
        if newest_step is None:
            self._free_rows.extend(row for _, row in self.fenced_rows)
            self.fenced_rows = []
        else:
            self.fenced_rows = [(min(step, newest_step), row) for step, row in self.fenced_rows]

    def _grow_columns(self) -> None:
        old = len(self.num_tokens)
        for name in _COLUMNS:
            column = getattr(self, name)
            grown = np.zeros((2 * old, *column.shape[1:]), dtype=column.dtype)
            grown[:old] = column
            setattr(self, name, grown)
        self._make_views()
        self._free_rows.extend(range(2 * old - 1, old - 1, -1))

    def _make_views(self) -> None:
        """Make the flat views of the matrices, which are faster to write at indices, and the constant arrays that
        outputs share."""
        self._flat_recent = self.recent_tokens.reshape(-1)
        rows = len(self.num_tokens)
        self.ones: Int64Array = np.ones(rows, dtype=np.int64)
        self.zeros: Int64Array = np.zeros(rows, dtype=np.int64)
        self.trues: BoolArray = np.ones(rows, dtype=np.bool_)
        self.count_up: Int64Array = np.arange(1 + rows * (1 + self.max_drafts))
        for constant in (self.ones, self.zeros, self.trues, self.count_up):
            set_writeable(constant, False)

    # ------------------------------------------------------------------ flags

    def set_prefilling(self, row: int) -> None:
        if not self.flags[row] & PREFILLING:
            self.flags[row] |= PREFILLING
            self.num_prefilling += 1

    def clear_flags(self, row: int, mask: int) -> None:
        held = int(self.flags[row]) & mask
        if not held:
            return
        self.num_prefilling -= bool(held & PREFILLING)
        self.num_watched -= bool(held & WATCHED)
        self.num_not_ahead -= bool(held & NOT_AHEAD)
        self.num_no_sample -= bool(held & NO_SAMPLE)
        self.flags[row] &= ~np.uint8(mask)

    # ------------------------------------------------------------------ tokens

    def schedule(
        self, rows: Int64Array, computed: Int64Array, counts: Int64Array, samples: BoolArray, is_first: bool
    ) -> None:
        """Schedule `counts` further tokens of distinct running `rows`, which have `computed` computed tokens; rows
        marked in `samples` sample. `is_first`: no other sample of these rows is in flight."""
        members = self.members
        span = members.span if rows is members.rows else None
        if span is None or counts is not members.ones:
            self.num_computed_tokens[rows] = computed + counts
        else:
            column = self.num_computed_tokens[span]
            column += ONE
        if samples is not members.trues:
            self.num_pending[rows] += samples
            return
        where: Int64Array | slice = rows if span is None else span
        if is_first:
            self.num_pending[where] = ONE
        else:
            self.num_pending[where] += ONE

    @property
    def num_appends(self) -> int:
        """Number of tokens (at least 1) that every running row can append before its recent tokens must be flushed."""
        return self._min_appends

    def append(self, live: Members, runs: Runs, newest: Int64Array, longest: int, is_last: bool) -> None:
        """Append the tokens of run i to row i of `live` (some or all of the running rows), behind the row's token at
        position `newest[i]`.

        The longest run has at most `longest` tokens: the maximum of one step, or `num_appends`. `is_last`: no further
        sample of these rows is in flight.
        """
        rows, (counts, ends, token_ids) = live.rows, runs
        span = live.span if live is self.members else None
        indices = live.append_offsets(self) + newest
        is_single = len(token_ids) == len(rows)
        if not is_single and len(token_ids) == longest * len(rows):  # all runs have the same length
            indices = (indices[:, None] + np.arange(longest)).ravel()
        elif not is_single:
            indices += counts
            indices -= ends
            indices = indices.repeat(counts)
            indices += self.count_up[: len(indices)]
        self._flat_recent[indices] = token_ids
        if span is not None and is_single:
            column = self.num_tokens[span]
            column += ONE
        else:
            self.num_tokens[rows] = newest + TWO if is_single else newest + counts + ONE
        where: Int64Array | slice = rows if span is None else span
        if is_last:
            self.num_pending[where] = ZERO
        else:
            self.num_pending[where] -= ONE
        self.min_tokens_left -= longest
        self._min_appends -= longest
        if self._min_appends <= 0:
            self._flush_if_full(live.requests, rows, self.num_tokens[rows])

    def may_reach_limit(self, num_tokens: int) -> bool:
        """Whether a running row would reach its token limit with `num_tokens` further tokens."""
        return self.reaches_limit(num_tokens) is not None

    def reaches_limit(self, num_tokens: int) -> BoolArray | None:
        """[members] whether each running row would reach its token limit with `num_tokens` further tokens; None: no row
        would. The rows are read only if `min_tokens_left` shows that a row may reach its limit."""
        if self.min_tokens_left > num_tokens:
            return None
        left = self.members.token_limit - self.num_tokens[self.members.rows]
        self.min_tokens_left = left.item(left.argmin()) if len(left) else MAX_INT
        return left <= num_tokens if self.min_tokens_left <= num_tokens else None

    def _flush_if_full(self, requests: Sequence[Request], rows: Int64Array, num_tokens: Int64Array) -> None:
        """Flush rows whose recent tokens are full. Tokens were appended to `rows`, which now have `num_tokens` known
        tokens."""
        self._flush_full(requests, rows, num_tokens)
        running = self.members.rows
        num_appends = self.recent_limit[running] - self.num_tokens[running]
        self._min_appends = int(num_appends.min(initial=self._num_recent))

    def _flush_full(self, requests: Sequence[Request], rows: Int64Array, num_tokens: Int64Array) -> None:
        # Rows that are nearly full are flushed too: then flushes are rare, for many rows at once.
        full = (num_tokens >= self.recent_limit[rows] - self._num_recent // 4).nonzero()[0]
        if not len(full):
            return
        self._flush_rows([requests[index] for index in full.tolist()], rows[full], num_tokens[full])

    def _flush_rows(self, requests: Sequence[Request], rows: Int64Array, num_tokens: Int64Array) -> None:
        tokens, offsets = self._flat_recent, self.recent_offset[rows]
        for request, offset, end in zip(requests, offsets.tolist(), num_tokens.tolist(), strict=True):
            request._state.append_recent(tokens, offset, end)
        self._keep_newest_token(rows, num_tokens, tokens[offsets + num_tokens - 1])

    def _keep_newest_token(
        self, rows: Int64Array | int, num_tokens: Int64Array | int, newest: Int32Array | int
    ) -> None:
        """Keep only the newest recent token of each of these rows, which have `num_tokens` known tokens."""
        starts = rows * self._num_recent
        self._flat_recent[starts] = newest
        self.recent_offset[rows] = starts - (num_tokens - 1)
        self.num_flushes += 1
        self.recent_limit[rows] = num_tokens - 1 + self._num_recent - self.max_drafts

    def tokens_since(self, row: int, start: int) -> Int32Array:
        """A view of the tokens from position `start` to the end of a row's sequence, valid until the next append. None
        of these tokens is flushed yet."""
        offset = self.recent_offset.item(row)
        return self._flat_recent[offset + start : offset + self.num_tokens.item(row)]

    def draft_counts_of(self, row: int) -> tuple[int, int]:
        """Number of drafts of a row that were verified since the row was assigned, and number of drafts accepted."""
        return self.acceptance.counts_of(row)

    def last_tokens(self, rows: npt.NDArray[np.integer]) -> Int32Array:
        """The newest known token of each row."""
        tokens: Int32Array = self._flat_recent[self.recent_offset[rows] + self.num_tokens[rows] - 1]
        return tokens

    def flush_recent_tokens(self, row: int, state: RequestState) -> None:
        """Move the recent tokens of a row to the request's own array."""
        end = self.num_tokens.item(row)
        if state.num_prompt_tokens + state.num_own_output_tokens < end:
            state.append_recent(self._flat_recent, self.recent_offset.item(row), end)
