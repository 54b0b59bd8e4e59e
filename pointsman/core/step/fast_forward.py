"""Fast-forward: does several plain decode steps in one call.

    k = scheduler.guaranteed_steps(limit)   in each of the next k steps every running request decodes one token
    scheduler.advance(times, token_ids)     does len(times) - 1 of these steps in one call

In most steps of a simulation the running requests only decode: no request arrives or finishes, and the free blocks
suffice. Such steps need not be decided one by one. `guaranteed_steps` proves their number from token limits, free
blocks, and the reason why the head of the queue is blocked. The number is 0, and the host schedules a single step, if a
proof would need a decision: a lookup, a dry run, drafts, an encoder, a transfer under way, an eviction that a connector
needs, blocks behind a window that rows give back because requests wait. `advance` leaves the same state as single calls
of `schedule` and `update`: columns, block ids, the order of the free blocks, the prefix tree, counters.

The end of a sequence is not predicted. The host knows the sampled tokens: it advances up to the step in which a token
stops a request, and passes the tokens of that step as `last_token_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import PolicyError, StepOrderError, StepResultError
from pointsman.core.kv.cache import KVCache
from pointsman.core.kv.transfers import Transfers
from pointsman.core.policy.gate import Gate
from pointsman.core.state.batch import Batch, Members
from pointsman.core.state.events import Events, StepRun
from pointsman.core.state.numbers import INT32, INT64, MAX_INT
from pointsman.core.state.output import StepUpdate
from pointsman.core.state.reason import Deferral
from pointsman.core.state.request import Request
from pointsman.core.state.sealed import sealed_as
from pointsman.core.state.status import PauseMode
from pointsman.core.step.admission import Admission, Standstill
from pointsman.core.step.drafts import Drafts
from pointsman.core.step.emit import Emission
from pointsman.core.step.in_flight import StepsInFlight
from pointsman.core.step.priority_preemption import PriorityPreemption
from pointsman.core.step.request_table import RequestTable
from pointsman.core.step.running import Running
from pointsman.core.step.update import Update

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class FastForward:
    """Proves that the next steps are plain decodes, and does several of them in one call."""

    def __init__(
        self,
        config: SchedulerConfig,
        batch: Batch,
        kv: KVCache,
        table: RequestTable,
        steps: StepsInFlight,
        running: Running,
        drafts: Drafts,
        transfers: Transfers | None,
        admission: Admission,
        priority_preemption: PriorityPreemption | None,
        emission: Emission,
        update: Update,
        events: Events,
        *,
        checks_guaranteed_steps: bool,
    ) -> None:
        """`checks_guaranteed_steps`: whether `advance` compares the policies' `guaranteed_steps` with the policies'
        decisions afterwards."""
        self._block_size = config.block_size
        self._grows_first = config.batching != "prefill-first"  # rows grow before requests are admitted
        self._batch, self._kv, self._table, self._steps = batch, kv, table, steps
        self._running, self._drafts, self._admission = running, drafts, admission
        self._priority_preemption, self._emission = priority_preemption, emission
        self._update, self._events = update, events
        self._seen: tuple[int, Standstill | None] = (0, None)  # the last result of `guaranteed_steps`
        self._checks_guaranteed_steps = checks_guaranteed_steps
        self._is_allowed = running.steady_allowed
        self._transfers = transfers
        gates = admission.gates
        self._load_followers = gates.load_followers
        self._order_guaranteed_steps = (
            table.queue.guaranteed_steps if hasattr(table.queue, "guaranteed_steps") else _no_guaranteed_steps
        )
        self._gate_guaranteed_steps = [
            gate.guaranteed_steps for gate in gates.all if type(gate).guaranteed_steps is not Gate.guaranteed_steps
        ]

    # ------------------------------------------------------------------ the number of guaranteed steps

    def guaranteed_steps(self, limit: int) -> int:
        """Number of the next steps, at most `limit`, that are guaranteed to be plain decodes."""
        self._seen = (0, None)
        self._seen = self._look_ahead(limit)
        return self._seen[0]

    def _look_ahead(self, limit: int) -> tuple[int, Standstill | None]:
        """The number of guaranteed steps, and the reason why the queue is blocked in them; None: the queue is empty, or
        the number is 0."""
        limit, free, blocked = self._upper_bound(limit)
        if limit > 0 and self._batch.may_reach_limit(limit):
            limit = self._batch.min_tokens_left
        return self._max_steps_within_blocks(limit, free), blocked

    def _look_ahead_or_last(self, num_steps: int) -> tuple[int, Standstill | None]:
        """The result of `_look_ahead`, or the last result if a policy fails now: the policy's failure belongs to the
        next scheduled step."""
        try:
            return self._look_ahead(num_steps)
        except PolicyError:
            return self._seen

    def _upper_bound(self, limit: int) -> tuple[int, int, Standstill | None]:
        """The number of guaranteed steps before token limits and blocks lower it; the number of free blocks that these
        steps may take; and the reason why the queue is blocked in these steps."""
        batch, queue, admission = self._batch, self._table.queue, self._admission
        num_rows = len(batch.members.requests)
        if (
            limit <= 0
            or not num_rows
            or not self._is_allowed
            or not self._kv.grows_for_steps
            or self._steps.records
            or self._kv.saves
            or (self._kv.gives_back and self._gives_back_between_steps())
            or (self._transfers is not None and (self._transfers.num_open or self._table.has_reports))
            or batch.num_prefilling
            or self._drafts.waiting
            or batch.num_watched
            or batch.num_no_sample
            or num_rows > self._running.steady_rows
            or self._emission.is_resync_due
            or self._events.needs_every_step
            or (admission.pause is not None and admission.pause.mode is PauseMode.ALL)
        ):
            return 0, 0, None
        for guaranteed_steps in self._gate_guaranteed_steps:
            limit = min(limit, guaranteed_steps(limit))
        for open_step in self._load_followers:
            open_step(len(queue) + num_rows)
        blocked = None
        free = self._kv.pool.num_free
        if len(queue):
            limit = min(limit, self._order_guaranteed_steps(limit))
            if self._priority_preemption is not None and not self._priority_preemption.is_idle(queue.peek()):
                return 0, 0, None
            blocked = admission.standstill(num_rows)
            if blocked is None:
                return 0, 0, None
            free -= blocked.min_free
            if not blocked.outlasts_evictions:
                free = min(free, self._kv.pool.num_blank)
        if self._kv.reports_evictions:  # only outputs report evictions
            free = min(free, self._kv.pool.num_blank)
        return max(limit, 0), free, blocked

    def _gives_back_between_steps(self) -> bool:
        """With windows: whether rows may give back blocks in a step in which they lack none, because requests wait; or
        blocks that they give back are evicted or retained in a way that depends on the step."""
        return len(self._table.queue) > 0 or self._kv.reports_evictions or self._kv.retaining is not None

    def _max_steps_within_blocks(self, limit: int, free: int) -> int:
        """Number of steps, at most `limit`, that take at most `free` blocks."""
        batch, rows = self._batch, self._batch.members.rows
        free //= self._kv.num_groups  # each table of a row takes equally many blocks
        if len(rows) * (limit // self._block_size + 1) <= free:
            return limit
        size = self._block_size
        free_slots = batch.num_slots[rows] - batch.num_computed_tokens[rows]
        if free == 0:
            return min(limit, free_slots.item(free_slots.argmin()))

        def needed(num_steps: int) -> int:
            return int(((np.maximum(num_steps - free_slots, 0) + (size - 1)) // size).sum())

        if needed(limit) <= free:
            return limit
        low, high = 0, limit  # `low` steps fit the free blocks, `high` steps do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if needed(middle) <= free else (low, middle)
        return low

    # ------------------------------------------------------------------ several steps in one call

    def advance(
        self, first_step_id: int, times: Sequence[float] | FloatArray, token_ids: Any, last_token_ids: Any
    ) -> tuple[StepUpdate, StepRun]:
        """Do `len(times) - 1` steps; see `Scheduler.advance`."""
        num_steps = len(times) - 1
        if num_steps < 1:
            raise StepOrderError(f"times has {len(times)} value(s); give the start time and the end time of each step")
        certain, blocked = self._look_ahead_or_last(num_steps)
        if certain < num_steps:
            raise StepOrderError(
                f"times has {num_steps} step(s), but only {certain} are guaranteed plain decodes; call "
                "guaranteed_steps() first, and schedule() for each further step"
            )
        kv, table, members = self._kv, self._table, self._batch.members
        head = table.queue.peek() if self._checks_guaranteed_steps and blocked is not None else None
        tokens, last = _checked_tokens(members, num_steps, token_ids, last_token_ids)
        self._check_no_early_stop(members, num_steps, tokens)
        last_step_id = first_step_id + num_steps - 1
        kv.open_step(last_step_id, None, last_step_id)
        advance, block_steps = self._running.advance_steps(num_steps)
        self._admission.record_standstill(
            blocked, float(times[-2]), self._free_at_last_admission(block_steps, num_steps)
        )
        wrong = None
        if head is not None and blocked is not None:
            wrong = self._wrong_guaranteed_steps(head, blocked, num_steps)
        preempted, finished = table.take_reports()
        self._emission.keep(last_step_id, advance, num_steps)
        returned = kv.take_returned()
        self._drafts.set_updated_step(last_step_id)
        fields, ends = self._update.append_steps(tokens, last, num_steps)
        if ends:
            self._update.finish(fields, ends, float(times[-1]))
        sealed = sealed_as(StepUpdate, fields)
        run = StepRun(
            first_step_id,
            num_steps,
            times,
            members.requests,
            members.rows,
            members.serials,
            advance.num_computed_tokens,
            advance.block_ids,
            advance.block_rows,
            block_steps,
            tuple(preempted),
            tuple(finished),
            None if blocked is None else blocked.reason,
            returned,
            sealed,
        )
        if wrong is not None:
            raise wrong
        return sealed, run

    def _wrong_guaranteed_steps(self, head: Request, blocked: Standstill, num_steps: int) -> PolicyError | None:
        """The error if a policy's `guaranteed_steps` was wrong, because the same request no longer blocks the queue.
        None: the request still blocks it."""
        table, admission = self._table, self._admission
        queue = table.queue
        found = queue.peek()
        if found is not head:
            return PolicyError(
                f"order {queue.name!r}: guaranteed_steps promised the same head for {num_steps} steps, and it is "
                f"{found.request_id!r} instead of {head.request_id!r}"
            )
        if blocked.shortage is None or blocked.reason is not (head._state.deferral or blocked).reason:
            return None
        num_running = len(self._batch.members)
        budget = admission.budget.tokens - num_running
        shortage = admission.gates.reserves.shortage
        admission.forget()
        verdict = admission.check(head, budget, num_running, self._running.num_owed_blocks())
        admission.gates.reserves.restore(shortage)
        if not isinstance(verdict, Deferral):
            names = ", ".join(repr(policy.name) for policy in admission.gates.reserves.policies)
            return PolicyError(
                f"reserves {names}: guaranteed_steps promised that request {head.request_id!r} waits for {num_steps} "
                "steps, and it may start now"
            )
        return None

    def _free_at_last_admission(self, block_steps: Int64Array, num_steps: int) -> int:
        """Number of free blocks when the last step checked the queue: before its rows took blocks under
        "prefill-first", otherwise after."""
        free = self._kv.pool.num_free
        return free if self._grows_first else free + int(np.count_nonzero(block_steps == num_steps - 1))

    def _check_no_early_stop(self, members: Members, num_steps: int, tokens: Int32Array) -> None:
        """Check that no token before the last step stops its request.

        Raises:
            StepResultError: a token before the last step stops its request.
        """
        if num_steps == 1:
            return
        batch = self._batch
        middle = tokens if tokens.ndim == 1 else tokens[: num_steps - 1]
        stops = middle == members.eos_token_id
        if batch.stop_filter.num_rows:
            stops |= batch.stop_filter.may_stop(middle)
        if not np.count_nonzero(stops):
            return
        for *step, index in np.argwhere(stops).tolist():
            request = members.requests[index]
            token = int(middle[*step, index])
            number = step[0] + 1 if step else num_steps - 1  # number of the last step that has this token
            num_output = int(batch.num_tokens[members.rows[index]]) + number - request.num_prompt_tokens
            if token in request.stop_set and num_output >= request.min_tokens:
                raise StepResultError(
                    f"token {token} stops request {request.request_id!r} before the last of {num_steps} steps; advance "
                    "up to the step that stops it, with its token in last_token_ids"
                )


def _no_guaranteed_steps(num_steps: int) -> int:
    """The method `guaranteed_steps` for an order policy that lacks it: 0, as the head of the queue may change at any
    step."""
    return 0


def _checked_tokens(
    members: Members, num_steps: int, token_ids: Any, last_token_ids: Any
) -> tuple[Int32Array, Int32Array]:
    """The tokens of the steps, [rows] (the same in each step) or [steps, rows], and the tokens of the last step [rows].

    Raises:
        StepResultError: an array has another shape, or its values are not token ids.
    """
    num_rows = len(members)
    tokens = token_array("token_ids", token_ids)
    if tokens.shape != (num_rows,) and tokens.shape != (num_steps, num_rows):
        raise StepResultError(
            f"token_ids has shape {tokens.shape}; give [{num_rows}] (rows) or [{num_steps}, {num_rows}] (steps, rows)"
        )
    if last_token_ids is None:
        return tokens, tokens if tokens.ndim == 1 else tokens[-1]
    last = token_array("last_token_ids", last_token_ids)
    if last.shape != (num_rows,):
        raise StepResultError(f"last_token_ids has shape {last.shape}; give [{num_rows}] (rows)")
    return tokens, last


def token_array(name: str, values: Any) -> Int32Array:
    """The token ids of a caller as an int32 array. `name`: the argument, for the error.

    Raises:
        StepResultError: the values are not token ids.
    """
    given: npt.NDArray[Any] = values if isinstance(values, np.ndarray) else np.asarray(values)
    if given.dtype is not INT32:
        if given.size and not np.issubdtype(given.dtype, np.integer):
            raise StepResultError(f"{name} has type {given.dtype}; it must be integers")
        wide = given.astype(INT64)
        if wide.size and wide.max() > MAX_INT:
            raise StepResultError(f"{name} has token id {wide.max()}; ids must be between 0 and {MAX_INT}")
        given = np.maximum(wide, -1).astype(INT32)
    if given.size and (least := given.item(given.argmin())) < 0:
        raise StepResultError(f"{name} has token id {least}; ids must be between 0 and {MAX_INT}")
    return given
