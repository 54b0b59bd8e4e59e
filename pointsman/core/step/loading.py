"""Asynchronous loads of KV: parks a request with its blocks, and returns it to the queue after the load.

start      the head of the queue gets its blocks and is parked; the output asks the host to load them
done       blocks loaded without a gap are kept, the others released; the request returns to its place
expire     a load exceeds its timeout: the request continues without it, or finishes. The blocks stay held
roll_back  the step that started a load is void: the request returns to its place without the blocks
forget     the prefix cache was reset: every request releases its loaded blocks
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.kv.transfers import Holding, Transfers
from pointsman.core.state.events import Events, LoadFinished, LoadStarted, send
from pointsman.core.state.output import NO_INTS, Load
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason, ParkReason
from pointsman.core.step.in_flight import Grant, StepRecord
from pointsman.core.step.request_table import End, RequestTable

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


class Loading:
    """Parks requests while their KV is loaded, and returns the requests to the queue."""

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, table: RequestTable, transfers: Transfers, events: Events
    ) -> None:
        self._timeout = config.kv_load_timeout
        self._recomputes = config.kv_load_failure_policy == "recompute"
        self._kv = kv
        self._table = table
        self._transfers = transfers
        self._events = events

    def open_step(self, preemptor: Request | None, now: float) -> None:
        """Begin the checks of the queue in a step: pass the step's preemptor and time to the transfers."""
        self._transfers.begin_admissions(preemptor, now)

    def admit(self, request: Request, grant: Grant, record: StepRecord, blocks: Int64Array) -> None:
        """Admit a request with external tokens: their KV is already loaded, or this step loads it."""
        if request._state.holding is not None:
            self._transfers.move_holding_to_row(request)
        else:
            record.add_load(self._load(request, grant, blocks, record.now))

    def _load(self, request: Request, grant: Grant, blocks: Int64Array, now: float) -> Load:
        """Create the `Load` with which the output asks the host to load the external tokens of a grant. `blocks`: the
        first blocks of the request, which its admission allocated or found."""
        kv, match = self._kv, grant.match
        table, is_local = self._external_table(grant, blocks)
        is_new = ~is_local & (table != kv.pool.num_blocks)
        places, groups = is_new.T.nonzero()
        local, filled = table.T[is_local.T], table[groups, places]
        for array in (local, filled, groups, places):
            array.setflags(write=False)
        if self._events.load_started:
            event = LoadStarted(request, grant.num_external_tokens, grant.is_async, now)
            send(self._events.load_started, event)
        return Load(
            transfer_id=self._transfers.next_id(),
            request=request,
            local_blocks=local,
            block_ids=filled,
            first_token=match.num_tokens,
            num_tokens=grant.num_external_tokens,
            is_async=grant.is_async,
            block_groups=NO_INTS if kv.has_tables else groups,
            block_places=NO_INTS if kv.has_tables else places,
        )

    def _external_table(self, grant: Grant, blocks: Int64Array) -> tuple[Int64Array, BoolArray]:
        """The block tables [groups, blocks] up to the last external token, and a mask [groups, blocks] of cache hits in
        the pool."""
        count = (grant.match.num_tokens + grant.num_external_tokens) // self._kv.block_size
        table, is_local = self._kv.admitted_tables(blocks, len(grant.match.blocks))
        return table[:, :count], is_local[:, :count]

    def start(self, request: Request, grant: Grant, record: StepRecord) -> None:
        """Park the head of the queue, allocate its blocks, and request the load of its KV."""
        blocks = self._kv.admit(request, grant.match, grant.num_cached_tokens, record.now)
        load = self._load(request, grant, blocks, record.now)
        self._table.park(request, ParkReason.REMOTE_KVS, record.now)
        self._transfers.start_load(request, load, self._external_table(grant, blocks)[0].copy(), record.now)
        request._state.set_deferral(Deferral(Reason.KV_LOAD, 0), record.now)
        record.add_load(load)

    def end_transfer(
        self, transfer_id: int, num_tokens: int | None, failed_blocks: list[int], now: float
    ) -> Request | None:
        """End a transfer. Returns the request that finishes with an error because its load is incomplete, if any.

        Raises:
            UnknownTransfer: no transfer with this id is under way.
            ValueError: the transfer has fewer than `num_tokens` tokens, or does not load one of `failed_blocks`.
        """
        holding = self._transfers.find_unfinished(transfer_id)
        num_places = self._num_usable(holding, num_tokens, failed_blocks)
        self._transfers.finish_transfer(holding)
        request, load = holding.request, holding.load
        if request is None or load is None:
            self._transfers.release_finished(holding)
            return None
        request._state.end_loads()
        size = self._kv.block_size
        wanted, num_loaded = load.num_tokens // size, max(0, num_places - load.first_token // size)
        self._report_finished(request, num_loaded * size, now, failed=num_loaded < wanted)
        if num_loaded < wanted and not self._recomputes:
            return self._finish_with_error(request, f"{num_loaded} of {wanted} KV blocks could be loaded", now)
        self._transfers.shorten_load(holding, num_places)
        self._kv.publish_loaded(request, holding.table)
        if not len(holding.blocks):
            self._transfers.release_holding(request)
        self._table.ready(request, now)
        return None

    def _num_usable(self, holding: Holding, num_tokens: int | None, failed_blocks: list[int]) -> int:
        """Number of leading blocks of each table that a request can use after its load has ended."""
        load, size = holding.load, self._kv.block_size
        if load is None:
            return 0
        blocks: list[int] = load.block_ids.tolist()
        strange = [block for block in failed_blocks if block not in blocks]
        if strange:
            raise ValueError(
                f"failed_blocks has the blocks {strange}, which transfer {holding.transfer_id} does not load; give "
                f"only blocks that it loads: {blocks}"
            )
        if num_tokens is not None and not 0 <= num_tokens <= load.num_tokens:
            raise ValueError(
                f"num_loaded_tokens is {num_tokens}, but transfer {holding.transfer_id} loads {load.num_tokens} "
                f"tokens; give 0 to {load.num_tokens}"
            )
        if holding.request is None:
            return 0
        has = (holding.table != self._kv.pool.num_blocks) & ~np.isin(holding.table, failed_blocks)
        if num_tokens is not None:
            end = (load.first_token + num_tokens) // size
            has[:, end:] &= ~np.isin(holding.table[:, end:], load.block_ids)
        return self._kv.num_reusable(has)

    def end_overdue_loads(self, now: float) -> None:
        """End loads that have exceeded the timeout."""
        if self._timeout is None or not self._transfers.num_open:
            return
        for request in self._transfers.overdue_requests(now - self._timeout):
            self._report_finished(request, 0, now, failed=True)
            request._state.end_loads()
            if self._recomputes:
                self._release_blocks(request, now)
            else:
                self._finish_with_error(request, f"loading its KV took longer than {self._timeout} s", now)

    def roll_back(self, record: StepRecord, now: float) -> None:
        """Release the blocks that a void step loads or has loaded: these blocks may follow blocks that the step
        computes."""
        for load in reversed(record.loads):
            holding = load.request._state.holding
            if holding is not None and holding.load is load:
                self._release_blocks(load.request, now)

    def forget(self, now: float) -> None:
        """After a reset of the prefix cache: waiting requests drop loaded KV, and the connector offers no older KV."""
        for request in self._transfers.requests_with_holdings():
            self._release_blocks(request, now)
        self._transfers.connector.reset()

    def _release_blocks(self, request: Request, now: float) -> None:
        """Release the request's blocks, and end its wait for a load."""
        self._transfers.release_holding(request)
        if request.status.is_parked:
            self._table.ready(request, now)

    def _report_finished(self, request: Request, num_tokens: int, now: float, *, failed: bool) -> None:
        if self._events.load_finished:
            send(self._events.load_finished, LoadFinished(request, num_tokens, failed, now))

    def _finish_with_error(self, request: Request, detail: str, now: float) -> Request:
        self._table.finish([End(request, FinishReason.ERROR, detail)], now)
        return request


def make_loading(
    config: SchedulerConfig, kv: KVCacheManager, table: RequestTable, transfers: Transfers | None, events: Events
) -> Loading | None:
    """The `Loading` of a scheduler; None: there is no connector."""
    return None if transfers is None else Loading(config, kv, table, transfers, events)
