"""A second scheduler that gets the same calls as the first, and does in one `advance` the first one's single steps.

It reads the recording of the first one as it is written. It holds back pairs of `schedule` and `update` in which every
running request decodes, up to `guaranteed_steps`, and then does them at once. After every call that both have made,
their states are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from pointsman.core import Scheduler
from pointsman.core.replay import _Replay

from .faults import require
from .kv_mirror import KVMirror
from .workload import SeededChooser

Call = dict[str, Any]
ANY_NUMBER = 10_000


class Twin:
    """A second scheduler that reads the lines of a recording. `first`: the scheduler that is recorded."""

    def __init__(self, seed: int = 0, watch: Callable[[Scheduler], None] | None = None) -> None:
        self.first: Scheduler | None = None
        self.num_advanced = 0
        """Number of steps that were done by `advance`."""
        self.num_stepped = 0
        """Number of other steps that ran a request."""
        self.num_blocked = 0
        """Number of steps that were done by `advance` with a blocked queue."""
        self._choose = SeededChooser(seed)
        self._replay = _Replay(watch)
        self._mirror: KVMirror | None = None
        self._number = 0
        self._certain = 0
        self._scheduled: Call | None = None  # whose update has not come yet
        self._held: list[tuple[Call, Call]] = []

    @property
    def second(self) -> Scheduler:
        """The scheduler that advances."""
        scheduler = self._replay._scheduler
        assert scheduler is not None
        return scheduler

    def write(self, line: str) -> None:
        """Take a line of the first scheduler's recording."""
        call = json.loads(line)
        if self._number:
            self._take(call)
        else:
            self._single(call)

    def _take(self, call: Call) -> None:
        name = call["call"]
        if self._scheduled is not None:
            scheduled, self._scheduled = self._scheduled, None
            if name == "update" and call["counts"] is None and not call["errors"] and not call.get("unsampled"):
                self._held.append((scheduled, call))
                decision = call["decision"]
                ends = decision["finished"] or decision["completed_parts"]
                if ends or len(self._held) == self._certain or self._choose.chance(3):
                    self.release()
                    self._compare()
                return
            self.release()
            self._single(scheduled)
        elif name == "schedule":
            if not self._held:
                self._certain = self.second.guaranteed_steps(self._choose.choice((1, 7, ANY_NUMBER)))
            if self._certain:
                self._scheduled = call
                return
        else:
            self.release(keep_last=name == "propose")
        self._single(call)
        self._compare()

    def release(self, *, keep_last: bool = False) -> None:
        """Do the held-back steps in one `advance`. `keep_last`: whether to do the last step separately, because its
        output is needed, such as for drafts."""
        held, self._held = self._held, []
        single = held[-1:] if keep_last or self.second.config.num_draft_tokens else []
        run = held[: len(held) - len(single)]
        if run:
            times = [run[0][0]["now"], *[update["now"] for _, update in run]]
            tokens = np.array([update["token_ids"] for _, update in run])
            last = None
            if self._choose.chance(50) and (tokens[:-1] == tokens[0]).all():
                tokens, last = tokens[0], tokens[-1].tolist()
            queued = self.second.num_queued > 0
            if self._replay._connector is not None:
                self._replay._connector.set_answers(run[-1][1].get("answers", []))
            done = self.second.advance(times, tokens, last)
            decision = run[-1][1]["decision"]
            require([r.request_id for r in done.finished] == [end[0] for end in decision["finished"]], "other ends")
            require(done.token_ids.tolist() == decision["kept_token_ids"], "other tokens were kept")
            self.num_advanced += len(run)
            self.num_blocked += len(run) * queued
        for scheduled, update in single:
            self._single(scheduled)
            self._single(update)

    def _single(self, call: Call) -> None:
        self._number += 1
        self._replay._replay_line(call, self._number)
        self.num_stepped += call.get("call") == "schedule" and bool(call["decision"]["requests"])

    def _compare(self) -> None:
        if self.first is None or self._held or self._scheduled:
            return
        self.second.check_invariants()
        if self._mirror is None:
            self._mirror = KVMirror(self.second)
        self._mirror.check()
        one, other = state_of(self.first), state_of(self.second)
        for name, value in one.items():
            require(value == other[name], f"{name}: {value} by steps, {other[name]} at once")


def state_of(scheduler: Scheduler) -> dict[str, Any]:
    """The state on which later decisions and results depend."""
    parts = scheduler._parts
    batch, pool, table, kv = parts.batch, parts.kv.pool, parts.table, parts.kv
    members = batch.members
    rows = members.rows
    columns = ("num_tokens", "num_computed_tokens", "num_pending", "num_slots", "token_limit", "serial", "flags")
    live = [request for request in table.requests.values() if not request.is_finished]
    state = {name: getattr(batch, name)[rows].tolist() for name in columns}
    return (
        state
        | {
            **asdict(replace(scheduler.stats(), num_refused=0)),  # a refused call is not recorded
            "tokens": {request.request_id: request.output_token_ids.tolist() for request in table.requests.values()},
            "tables": [kv.table(batch, row).tolist() for row in rows.tolist()],
            "rows": rows.tolist(),
            "free rows": batch._free_rows,
            "references": pool.num_references.tolist(),
            "blank": pool._blank[: pool._num_blank].tolist(),
            "cached": pool.cached_free_blocks(),
            "is cached": pool.is_cached.tolist(),
            "found": {request.request_id: _found(scheduler, request) for request in live if request.row is None},
            "running": [request.request_id for request in members.requests],
            "explanations": {request.request_id: scheduler.explain(request.request_id) for request in live},
            "deferrals": {request.request_id: _deferral(request) for request in live},
            "events": {request.request_id: list(request.events) for request in live},
            "blocker": None if table.blocker is None else table.blocker.request_id,
            "skipped": [request.request_id for request in table.skipped],
            "step id": scheduler._next_step_id,
            "batch forms": parts.admission._static and parts.admission._batch_forms,
            "last updated": parts.drafts.last_updated_step,
            "unreported": [request.request_id for request in table.finished],
            "preempted": [request.request_id for request in table.preempted],
        }
    )


def _found(scheduler: Scheduler, request: Any) -> list[int]:
    match = scheduler._parts.kv.look_up(request)
    found: list[int] = match.blocks.tolist()
    return found


def _deferral(request: Any) -> tuple[Any, float]:
    return request._state.deferral, request._state.deferred_since
