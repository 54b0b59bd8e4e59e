"""Encoder budget and encoder cache: limit the encoder inputs that a step computes, and the embeddings that stay cached.

A row computes a placeholder token only if the embeddings that this token reads are cached, or are computed in the same
step. A step computes at most `encoder_budget` embeddings. A chunk is cut before the first input whose embeddings are
unavailable. So an encoder input is computed when a row reaches the first token that reads one of its embeddings, and
not before.

An entry of the cache has the embeddings of one input. A row holds an entry from the step in which it reaches the input
until the step after it has passed the input. The entry is also released when the request loses its row, or when a step
fails. Between steps a row therefore holds at most one entry, that of a partly computed input, and can finish this input
without any other entry. So rows cannot deadlock. Entries that no row holds stay cached by their keys, and are evicted
in the order in which they were last held; without `keep_embeddings` they are freed immediately.

The host executes the outputs of steps in order. So an entry that one step reads may be freed by the output of the next
step, even while the first step is in flight. After a failed step every entry that a void step computed is removed, and
entries that void outputs freed are reported as freed once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.policy.budget import StepBudget
from pointsman.core.policy.gate import Limit
from pointsman.core.state.batch import ENCODER_INPUTS, PREFILLING, Batch
from pointsman.core.state.inputs import EncoderEntry, EncoderInput
from pointsman.core.state.interfaces import View
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class EncoderCounts:
    """Numbers of embeddings that were computed, reused and evicted."""

    computed: int = 0
    reused: int = 0
    evicted: int = 0


class EncoderCache(Limit):
    """The cached embeddings, and the limit on the encoder inputs that rows compute in a step."""

    is_shared = True

    def __init__(self, config: SchedulerConfig, token_budget: StepBudget) -> None:
        self._token_budget = token_budget
        self.size = config.encoder_cache_size
        self._full_budget = config.encoder_budget
        self._chunked = config.enable_chunked_prefill
        self._max_bypasses = 0 if config.encoder_blocks_queue else config.max_overtakes
        splits = config.split_encoder_inputs
        self.splits = "begun" if config.token_limits and not splits else splits
        self.longest_chunk = min(
            config.max_num_batched_tokens, config.prefill_threshold or config.max_num_batched_tokens
        )
        """Maximum number of tokens that a request computes in a step without other requests."""
        self._keeps = config.keep_embeddings
        self._budget = self._full_budget  # embeddings that this step may still compute
        self._step_id = -1
        self._origin: dict[EncoderEntry, tuple[int, Request]] = {}  # step and request that computed each entry
        self._num_holds: dict[EncoderEntry, int] = {}  # number of rows that hold each entry
        self._idle: dict[EncoderEntry, None] = {}  # entries that no row holds, least recently held first
        self._holds: dict[Request, list[EncoderInput]] = {}
        self._computed: list[tuple[Request, int]] = []
        self._freed: dict[EncoderEntry, None] = {}  # freed entries that no output has reported yet
        self._now = 0.0
        self._waiting: dict[Request, tuple[Deferral, float]] = {}  # deferrals of rows without a token, with start times
        self._waited: dict[Request, tuple[Deferral, float]] = {}  # `_waiting` of the previous step
        self.num_used = 0
        """Number of cached embeddings."""
        self.num_held = 0
        """Number of cached embeddings that rows hold."""
        self.revision = 0
        """A counter that changes whenever the budget, the cached entries or the held entries change."""
        self.counts = EncoderCounts()

    # ------------------------------------------------------------------ the step

    def begin_step(self, step_id: int, now: float) -> None:
        """Begin a step: reset the encoder budget, and release the entries of inputs that rows have passed."""
        self._step_id, self._now = step_id, now
        self._waited, self._waiting = self._waiting, {}
        if self._budget < self._full_budget:
            self._budget = self._full_budget
            self.revision += 1
        for request in sorted(self._holds, key=_admission_serial):  # in admission order
            computed = request._state.num_computed_tokens
            self._release_inputs(
                request, [item for item in self._holds[request] if item.start < computed < item.start + item.length]
            )

    def end_step(self) -> tuple[tuple[tuple[Request, int], ...], tuple[EncoderEntry, ...]]:
        """End a step. Returns the encoder inputs that the step computes, as (request, index of the input), and the
        entries to free before the step."""
        while self.num_used > self.size:
            entry = next(iter(self._idle))
            self._remove_idle_entry(entry)
            self.counts.evicted += entry.num_embeddings
        computed, freed = tuple(self._computed), tuple(self._freed)
        self._computed, self._freed = [], {}
        return computed, freed

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        """Cut `want` of each row to the token budget, in order, and before the first unavailable encoder input of the
        row. The token budget is applied first, since tokens that it cuts off need no embeddings."""
        both = PREFILLING | ENCODER_INPUTS
        reaching = ((batch.flags[rows] & both) == both).nonzero()[0]
        if not len(reaching):
            return
        plan, requests = _Plan(self), batch.members.requests
        left = self._token_budget.tokens - (np.add.accumulate(want) - want)[reaching]
        starts, wanted = batch.num_computed_tokens[rows[reaching]], want[reaching]
        granted: list[int] = []
        num_cut = 0
        for index, start, most, available in zip(
            reaching.tolist(), starts.tolist(), wanted.tolist(), left.tolist(), strict=True
        ):
            tokens, blocked = 0, None
            if available + num_cut > 0:
                tokens, blocked = plan.num_computable_tokens(requests[index], start, min(most, available + num_cut))
            granted.append(tokens)
            num_cut += most - tokens
            if blocked is not None and tokens == 0:
                self._record_wait(requests[index], blocked)
        want[reaching] = granted

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        if not request._state.encoder_inputs:
            return want
        tokens, blocked = _Plan(self).num_computable_tokens(request, start, want)
        whole = not self._chunked and request.status is not RequestStatus.PREEMPTED
        if blocked is not None and (whole or tokens == 0):
            return blocked._replace(blocks_queue=request._state.num_bypassed >= self._max_bypasses)
        return tokens

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        """Hold the entries that `num_tokens` tokens of the request from position `start` on read."""
        inputs = request._state.encoder_inputs
        if not inputs:
            return
        held, end = self._holds.get(request, ()), start + num_tokens
        for index, item in enumerate(inputs):
            _, first, length, _, _ = item
            if first >= end:
                break
            if first + length > start and item.reads(start, end) and item not in held:
                self._hold_entry(request, index, item)

    def guaranteed_steps(self, num_steps: int) -> int:
        """0, as every step resets the encoder budget, and releases embeddings that rows have passed."""
        return 0

    def can_start_beside(self, request: Request, batch: Batch, rows: Int64Array, want: Int64Array) -> bool:
        """Whether a request can compute at least one token in a step in which each of `rows` ([n] int64) computes its
        number of tokens in `want` ([n] int64)."""
        plan = _Plan(self)
        requests = {int(row): member for row, member in zip(batch.members.rows, batch.members.requests, strict=True)}
        for row, tokens in zip(rows.tolist(), want.tolist(), strict=True):
            plan.num_computable_tokens(requests[row], int(batch.num_computed_tokens[row]), tokens)
        sizes = [entry.num_embeddings for entry in {item.entry for item in request.encoder_inputs}]
        whole = not self._chunked and request.status is not RequestStatus.PREEMPTED
        return (sum(sizes) if whole else max(sizes, default=0)) <= min(plan.budget, plan.available)

    # ------------------------------------------------------------------ releasing

    def release(self, request: Request) -> None:
        """Release the entries of a request that loses its row."""
        self._waiting.pop(request, None)
        if request in self._holds:
            self._release_inputs(request, [])

    def undo_steps(self, first_step: int, freed: list[EncoderEntry]) -> None:
        """Undo the step `first_step` and all later steps, which are void. `freed` has the entries that the outputs of
        these steps freed."""
        self._waiting.clear()
        for request in list(self._holds):
            self._release_inputs(request, [])
        for entry in [entry for entry, (step, _) in self._origin.items() if step >= first_step]:
            self._remove_idle_entry(entry)
        self._freed = dict.fromkeys([*freed, *self._freed])

    def retract(self, request: Request, first_step: int) -> None:
        """Remove the entries that were computed for one request in the step `first_step` or later, since only the row
        of this request failed."""
        doubtful = {entry for entry, (step, origin) in self._origin.items() if origin is request and step >= first_step}
        self._remove(doubtful)

    def reset(self) -> None:
        """Remove every entry from the cache."""
        self._remove(set(self._origin))

    def _remove(self, entries: set[EncoderEntry]) -> None:
        for request in list(self._holds):
            self._release_inputs(request, [item for item in self._holds[request] if item.entry not in entries])
        for entry in [entry for entry in self._origin if entry in entries]:
            self._remove_idle_entry(entry)

    # ------------------------------------------------------------------ parts

    def is_held(self, entry: EncoderEntry) -> bool:
        """Whether a row holds the entry, so that it stays cached."""
        return entry in self._num_holds

    @property
    def budget(self) -> int:
        """Number of embeddings that this step may still compute."""
        return self._budget

    def deferral(self, request: Request) -> tuple[Deferral, float] | None:
        """The deferral of a running request whose next encoder input is unavailable, and the time since which it
        waits."""
        return self._waiting.get(request)

    def holders(self) -> list[Request]:
        """The running requests that hold entries."""
        return list(self._holds)

    def holds(self, request: Request) -> list[EncoderInput]:
        """The encoder inputs of a request whose cache entries its row holds."""
        return list(self._holds.get(request, ()))

    def entries(self) -> list[EncoderEntry]:
        """All cached entries."""
        return list(self._origin)

    def _record_wait(self, request: Request, blocked: Deferral) -> None:
        before = self._waited.get(request)
        since = before[1] if before is not None and before[0].reason is blocked.reason else self._now
        self._waiting[request] = (blocked, since)

    def _hold_entry(self, request: Request, index: int, item: EncoderInput) -> None:
        entry = item.entry
        size = entry.num_embeddings
        self.revision += 1
        if entry not in self._origin:
            self._origin[entry] = (self._step_id, request)
            self._computed.append((request, index))
            self._budget -= size
            self.num_used += size
            self.counts.computed += size
        else:
            self.counts.reused += size
        num_holds = self._num_holds.get(entry, 0)
        if not num_holds:
            self._idle.pop(entry, None)
            self.num_held += size
        self._num_holds[entry] = num_holds + 1
        self._holds.setdefault(request, []).append(item)

    def _release_inputs(self, request: Request, kept: list[EncoderInput]) -> None:
        held = self._holds.pop(request)
        self.revision += 1
        if kept:
            self._holds[request] = kept
        for item in held:
            if item in kept:
                continue
            entry = item.entry
            left = self._num_holds.pop(entry) - 1
            if left:
                self._num_holds[entry] = left
            else:
                self.num_held -= entry.num_embeddings
                self._idle[entry] = None
                if not self._keeps:
                    self._remove_idle_entry(entry)

    def _remove_idle_entry(self, entry: EncoderEntry) -> None:
        """Remove an entry that no row holds."""
        del self._idle[entry], self._origin[entry]
        self.revision += 1
        self._freed[entry] = None
        self.num_used -= entry.num_embeddings


def _admission_serial(request: Request) -> int:
    return request._state.serial


class _Plan:
    """Counts, row after row, the encoder budget and the cache space that a step would use."""

    def __init__(self, cache: EncoderCache) -> None:
        self._splits, self._longest_chunk = cache.splits, cache.longest_chunk
        self._held, self._cached = cache._num_holds, cache._origin
        self._taken: set[tuple[str, int]] = set()  # entries as plain tuples: equal to `EncoderEntry`, and faster
        self.budget = cache.budget
        self.available = cache.size - cache.num_held

    def num_computable_tokens(self, request: Request, start: int, want: int) -> tuple[int, Deferral | None]:
        """Returns how many of `want` tokens from position `start` on the request can compute, and the deferral of the
        remaining tokens. The deferral is None if no token remains, or if the chunk ends before an input that may not be
        split."""
        end = start + want
        for item in request._state.encoder_inputs:
            key, first, length, size, mask = item
            if first >= end:
                break
            if first + length <= start:
                continue
            if self._splits is not True and start <= first and end < first + length:
                if start < first:
                    return first - start, None
                if not self._splits and length <= self._longest_chunk:
                    return 0, Deferral(Reason.BUDGET, first + length - end)
            if not size or (mask is not None and not item.reads(start, end)):
                continue
            entry = (key, size)
            if entry in self._held or entry in self._taken:
                continue
            cost = 0 if entry in self._cached else size
            if cost > self.budget:
                return max(first - start, 0), Deferral(Reason.ENCODER_BUDGET, cost - self.budget)
            if size > self.available:
                return max(first - start, 0), Deferral(Reason.ENCODER_CACHE, size - self.available)
            self._taken.add(entry)
            self.budget -= cost
            self.available -= size
        return want, None
