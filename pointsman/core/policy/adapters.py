"""Adapter slots: at most `max_loras` different adapters (LoRA) run at the same time, and no adapter starves.

A running request holds a slot for its adapter, and shares the slot with the other running requests of this adapter. The
request holds the slot from its admission until it loses its row, in prefill and decode. So a step never has more
adapters than slots. A waiting request whose adapter has no slot is skipped: requests behind it may be admitted.

Without a bound a skipped request would starve, since running adapters may always get new requests. So after
`max_overtakes` admissions of requests behind it, a skipped request claims a slot. Behind a request with a claim, no
request of the queue starts with the adapter that has held its slot longest; preempted requests of this adapter may
resume and finish. In this way each claim retires one adapter. A request with a claim therefore waits at most for the
started requests of one adapter, and for earlier claims, unless the order puts other requests before it.

Claims are not stored between steps: every step checks the queue in order, so a claim is made before the requests behind
it are checked.
"""

from __future__ import annotations

from collections.abc import Sequence

from pointsman.core.config import SchedulerConfig
from pointsman.core.policy.gate import Gate
from pointsman.core.state.inputs import Adapter
from pointsman.core.state.interfaces import View
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus


class AdapterSlots(Gate):
    """Gate: defers a request whose adapter has no slot. Keeps the adapters that hold slots."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_slots = config.max_loras
        self._max_bypasses = config.max_overtakes
        self._num_rows: dict[Adapter, int] = {}
        self._claims: set[Adapter] = set()

    @property
    def held(self) -> dict[Adapter, int]:
        """The adapters that hold a slot, each with its number of running requests. The adapter that has held its slot
        longest is first."""
        return self._num_rows

    def open_queue(self) -> None:
        if self._claims:
            self._claims = set()

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        """Admit a request whose adapter has a slot, or can get one. Requests before it in the queue were checked
        earlier in this step, so `_claims` has their claims."""
        adapter = request.adapter
        if adapter is None:
            return want
        if adapter in self._num_rows:
            if (
                not self._claims
                or request.status is RequestStatus.PREEMPTED
                or adapter not in self._adapters_with_claimed_slot()
            ):
                return want
        elif len(self._num_rows) < self.num_slots:
            return want
        elif request.num_bypassed >= self._max_bypasses:
            self._claims.add(adapter)
        return Deferral(Reason.ADAPTER_SLOTS, 1, blocks_queue=False)

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        adapter = request.adapter
        if adapter is not None:
            self._num_rows[adapter] = self._num_rows.get(adapter, 0) + 1

    def release(self, request: Request) -> None:
        adapter = request.adapter
        if adapter is None:
            return
        remaining = self._num_rows[adapter] - 1
        if remaining:
            self._num_rows[adapter] = remaining
        else:
            del self._num_rows[adapter]

    def _adapters_with_claimed_slot(self) -> list[Adapter]:
        """The adapters whose slots are claimed by waiting requests."""
        return list(self._num_rows)[: len(self._claims)]

    def requests_to_preempt(
        self, request: Request, running: Sequence[Request], preemptible: Sequence[int]
    ) -> list[int] | None:
        """The `running` requests that must be preempted to free a slot for the adapter of `request`, by index.
        `preemptible` has the indexes of the requests that may be preempted. Returns the smallest set: empty if no slot
        must be freed; None if no slot can be freed."""
        adapter = request.adapter
        if adapter is None or adapter in self._num_rows or len(self._num_rows) < self.num_slots:
            return []
        users: dict[Adapter, list[int]] = {}
        for index in preemptible:
            other = running[index].adapter
            if other is not None:
                users.setdefault(other, []).append(index)
        whole = [indexes for other, indexes in users.items() if len(indexes) == self._num_rows[other]]
        return min(whole, key=len, default=None)
