"""Asynchronous loads of KV: a request is parked, holds blocks, and returns to the queue.

start      the head of the queue gets its blocks and is parked; the output requests the load from the host
done       blocks loaded without a gap are kept, the others released; the request returns to its place
expire     a load that takes too long: the request continues without it, or finishes. Its blocks stay held
roll_back  the step that started it is void: the request returns to its place without the blocks
forget     the prefix cache was reset: every request releases its loaded blocks
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.kv.transfers import Holding, Transfers
from pointsman.core.state.events import Events, LoadFinished, LoadStarted, send
from pointsman.core.state.output import Load
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason, ParkReason
from pointsman.core.step.in_flight import Grant, StepRecord
from pointsman.core.step.request_table import End, RequestTable

Int64Array = npt.NDArray[np.int64]


class Loading:
    """Moves requests into loads and out of them."""

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, table: RequestTable, transfers: Transfers, events: Events
    ) -> None:
        self._timeout = config.kv_load_timeout
        self._recomputes = config.kv_load_failure_policy == "recompute"
        self._kv = kv
        self._table = table
        self._transfers = transfers
        self._events = events

    def open(self, displacer: Request | None, now: float) -> None:
        """A step begins to check the queue."""
        self._transfers.open(displacer, now)

    def admit(self, request: Request, grant: Grant, record: StepRecord, blocks: Int64Array) -> None:
        """A request is admitted with external tokens, which are loaded already or by this step."""
        if request._state.holding is not None:
            self._transfers.hand_over(request)
        else:
            record.loaded(self._load(request, grant, blocks, record.now))

    def _load(self, request: Request, grant: Grant, blocks: Int64Array, now: float) -> Load:
        """The output's load for the external tokens of a grant, whose block table starts with `blocks`."""
        first = len(grant.match.blocks)
        count = grant.num_external_tokens // self._kv.block_size
        reported = blocks[: first + count].copy()
        reported.setflags(write=False)
        if self._events.load_started:
            event = LoadStarted(request, grant.num_external_tokens, grant.is_async, now)
            send(self._events.load_started, event)
        return Load(
            transfer_id=self._transfers.next_id(),
            request=request,
            local_blocks=reported[:first],
            block_ids=reported[first:],
            first_token=first * self._kv.block_size,
            num_tokens=grant.num_external_tokens,
            is_async=grant.is_async,
        )

    def start(self, request: Request, grant: Grant, record: StepRecord) -> None:
        """Move the head of the queue to its parked state, with blocks."""
        blocks = self._kv.admit(request, grant.match, grant.num_cached_tokens, record.now)
        load = self._load(request, grant, blocks, record.now)
        self._table.park(request, ParkReason.REMOTE_KVS, record.now)
        self._transfers.start(request, load, blocks, record.now)
        request._state.defer(Deferral(Reason.KV_LOAD, 0), record.now)
        record.loaded(load)

    def done(self, transfer_id: int, num_tokens: int | None, failed_blocks: list[int], now: float) -> Request | None:
        """A transfer has finished. Returns the request that it finished with an error, if any.

        Raises:
            UnknownTransfer: there is no such transfer.
            ValueError: it does not have that number of tokens, or those blocks.
        """
        holding = self._transfers.require(transfer_id)
        num_loaded = _blocks_loaded(holding, num_tokens, failed_blocks, self._kv.block_size)
        self._transfers.end(holding)
        request, load = holding.request, holding.load
        if request is None or load is None:
            self._transfers.close(holding)
            return None
        request._state.load_ended()
        missing = len(load.block_ids) - num_loaded
        self._report_finished(request, num_loaded * self._kv.block_size, now, failed=missing > 0)
        if missing and not self._recomputes:
            return self._give_up(request, f"{num_loaded} of {len(load.block_ids)} KV blocks could be loaded", now)
        self._transfers.shorten(holding, holding.num_local_blocks + num_loaded)
        self._kv.publish_loaded(request, holding.blocks)
        if not len(holding.blocks):
            self._transfers.let_go(request)
        self._table.ready(request, now)
        return None

    def expire(self, now: float) -> None:
        """End loads that have exceeded the timeout."""
        if self._timeout is None or not self._transfers.num_open:
            return
        for request in self._transfers.overdue(now - self._timeout):
            self._report_finished(request, 0, now, failed=True)
            request._state.load_ended()
            if self._recomputes:
                self._let_go(request, now)
            else:
                self._give_up(request, f"loading its KV took longer than {self._timeout} s", now)

    def roll_back(self, record: StepRecord, now: float) -> None:
        """Release what a void step loads, or has loaded meanwhile: it may follow blocks that the step computes."""
        for load in reversed(record.loads):
            holding = load.request._state.holding
            if holding is not None and holding.load is load:
                self._let_go(load.request, now)

    def forget(self, now: float) -> None:
        """After a reset no waiting request uses older KV, and the connector offers none."""
        for request in self._transfers.holders():
            self._let_go(request, now)
        self._transfers.connector.reset()

    def _let_go(self, request: Request, now: float) -> None:
        """It no longer waits, and holds no blocks."""
        self._transfers.let_go(request)
        if request.status.is_parked:
            self._table.ready(request, now)

    def _report_finished(self, request: Request, num_tokens: int, now: float, *, failed: bool) -> None:
        if self._events.load_finished:
            send(self._events.load_finished, LoadFinished(request, num_tokens, failed, now))

    def _give_up(self, request: Request, detail: str, now: float) -> Request:
        self._table.finish([End(request, FinishReason.ERROR, detail)], now)
        return request


def make_loading(
    config: SchedulerConfig, kv: KVCacheManager, table: RequestTable, transfers: Transfers | None, events: Events
) -> Loading | None:
    """The loads of a scheduler; None without a connector."""
    return None if transfers is None else Loading(config, kv, table, transfers, events)


def _blocks_loaded(holding: Holding, num_tokens: int | None, failed_blocks: list[int], block_size: int) -> int:
    """How many consecutive blocks of a load are valid, from its first one on."""
    if holding.load is None:
        return 0
    blocks: list[int] = holding.load.block_ids.tolist()
    strange = [block for block in failed_blocks if block not in blocks]
    if strange:
        raise ValueError(f"failed_blocks names {strange}, and transfer {holding.transfer_id} loads {blocks}")
    count = len(blocks)
    if num_tokens is not None:
        if not 0 <= num_tokens <= holding.load.num_tokens:
            raise ValueError(
                f"num_loaded_tokens is {num_tokens}; transfer {holding.transfer_id} loads {holding.load.num_tokens}"
            )
        count = num_tokens // block_size
    failed = [index for index, block in enumerate(blocks) if block in failed_blocks]
    return min([count, *failed])
