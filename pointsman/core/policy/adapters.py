"""Adapters (LoRA): at most `max_loras` different ones run at once, and everybody gets a turn.

A running request holds a slot for its adapter, alone or together with others of the same adapter, from its admission
until it leaves its row, whether it computes its prompt or decodes. So the adapters of a step are never more than the
slots. A waiting request whose adapter has no slot is passed over: those behind it may be admitted.

That alone would let it wait for ever, since the adapters that run may always find new requests. So after
`max_overtakes` admissions of requests that stood behind it, it claims a slot: behind it in the order, nobody starts
with the adapter that has held its slot longest, while what already ran with it may come back and finish. Each claim
retires one adapter. A request with a claim therefore waits no longer than the requests of one adapter that have
started, and those with claims before it, unless the order puts somebody before it.

Nothing about a claim is stored: every step asks the queue in order, so whoever stands behind a claim is asked after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pointsman.core.config import SchedulerConfig
from pointsman.core.state.inputs import Adapter
from pointsman.core.state.reason import Blocked, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus


class AdapterSlots:
    """Which adapters run, and who may join them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._num_slots = config.max_loras
        self._patience = config.max_overtakes
        self._num_rows: dict[Adapter, int] = {}
        self._claims: set[Adapter] = set()

    @property
    def held(self) -> dict[Adapter, int]:
        """The adapters that hold a slot, longest first, each with the number of its running requests."""
        return self._num_rows

    def take(self, adapter: Adapter) -> None:
        """A request with this adapter runs from now on."""
        self._num_rows[adapter] = self._num_rows.get(adapter, 0) + 1

    def give_back(self, adapter: Adapter) -> None:
        """A request with this adapter does not run any longer."""
        left = self._num_rows[adapter] - 1
        if left:
            self._num_rows[adapter] = left
        else:
            del self._num_rows[adapter]

    # ------------------------------------------------------------------ admission

    def open(self) -> None:
        """A step begins to ask the queue."""
        if self._claims:
            self._claims = set()

    def ask(self, request: Request) -> Blocked | None:
        """Why a request may not start beside what runs, or None. Those before it in the queue were asked before."""
        adapter = request.adapter
        if adapter is None:
            return None
        if adapter in self._num_rows:
            if not self._claims or request.status is RequestStatus.PREEMPTED or adapter not in self._retiring():
                return None
        elif len(self._num_rows) < self._num_slots:
            return None
        elif request.num_overtaken >= self._patience:
            self._claims.add(adapter)
        return Blocked(Reason.ADAPTER_SLOTS, 1, passes=True)

    def _retiring(self) -> list[Adapter]:
        """The adapters whose slots are claimed."""
        return list(self._num_rows)[: len(self._claims)]

    def to_vacate(self, request: Request, running: Sequence[Request], may_leave: Sequence[int]) -> list[int] | None:
        """Which of the `running` requests must leave so that there is a slot for the adapter of `request`.

        `may_leave` are the indexes of those that may. Returns the fewest: none if there is a slot already; None if no
        slot can be had.
        """
        adapter = request.adapter
        if adapter is None or adapter in self._num_rows or len(self._num_rows) < self._num_slots:
            return []
        users: dict[Adapter, list[int]] = {}
        for index in may_leave:
            other = running[index].adapter
            if other is not None:
                users.setdefault(other, []).append(index)
        whole = [indexes for other, indexes in users.items() if len(indexes) == self._num_rows[other]]
        return min(whole, key=len, default=None)
