"""Transfers: blocks that are held without a running row, for loads and sends of a connector.

    loading    the request is parked until the host reports that the load has finished
    loaded     the request is back in the queue, and will continue after these blocks
    abandoned  no request waits for the load any more, but the device may still write the blocks
    sending    the request has finished, but the device is still reading the blocks

The blocks of one transfer are a holding, which has one reference to each of them. All holdings together have at most as
many blocks as the pool minus one request of maximum length. So a running request, or the next request to run, can
always get its blocks. Two partly loaded requests never wait for each other, and a transfer that never finishes costs
only its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import ConfigError, UnknownTransfer
from pointsman.core.kv.cache import Match
from pointsman.core.kv.connector import KVConnector, has_groups
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.state.output import Load
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Holding:
    """Blocks that are held for a request, or until a transfer finishes."""

    transfer_id: int
    request_id: str
    """Id of the request whose KV the blocks hold. The request may have finished."""
    blocks: Int64Array
    """Blocks found in the prefix cache, then blocks to fill; each part place by place over all tables."""
    num_local_blocks: int
    request: Request | None
    """The request that will continue after the blocks; None: the blocks are held until the transfer finishes."""
    load: Load | None
    """The load that fills the blocks; None: the transfer is a send."""
    table: Int64Array
    """[groups, blocks] the beginning of the request's block tables, for a load. At a place without a block, the entry
    is the number of blocks in the pool."""
    num_local_places: int = 0
    """Number of places of each table before the blocks to fill."""
    since: float = 0.0
    """Time at which the load began, on the caller's clock."""
    is_open: bool = True
    """Whether the host has not yet reported the transfer as finished."""

    def mark_finished(self) -> None:
        """Record that the host has reported the transfer as finished."""
        self.is_open = False

    def keep_places(self, num_places: int) -> Int64Array:
        """Keep the blocks at the first `num_places` places of each table. Returns the other blocks."""
        self.table = self.table[:, :num_places]
        is_kept = np.isin(self.blocks, self.table)
        others = self.blocks[~is_kept]
        self.blocks, self.num_local_places = self.blocks[is_kept], min(self.num_local_places, num_places)
        return others

    def give_back_local(self) -> Int64Array:
        """Keep only the blocks to fill. Returns the blocks that were found in the prefix cache."""
        local, self.blocks = self.blocks[: self.num_local_blocks], self.blocks[self.num_local_blocks :]
        self.num_local_blocks = 0
        return local

    def detach_request(self) -> None:
        """Detach the request from the holding: it runs, or no longer waits for the load."""
        if self.request is not None:
            self.request._state.set_holding(None)
        self.request = None

    @property
    def num_external_blocks(self) -> int:
        """Number of places of each table with blocks to fill."""
        return int(self.table.shape[1]) - self.num_local_places


class External(NamedTuple):
    """The tokens that a connector loads for a request when the request is admitted, and whether it loads them
    asynchronously."""

    num_tokens: int
    """Number of tokens to load, in whole blocks."""
    is_async: bool


NOTHING = External(0, False)


class Transfers:
    """The holdings of one scheduler, and its connector."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, connector: KVConnector) -> None:
        self.connector = connector
        self._kv = kv
        self._swaps = config.preemption_mode != "recompute"
        self._timeout = config.kv_load_timeout
        full_length = min(config.max_blocks(config.max_model_len), config.num_usable_blocks)
        self.max_blocks = config.num_usable_blocks - full_length
        """Maximum number of blocks of all holdings."""
        self._open: dict[int, Holding] = {}
        self._loaded: dict[int, Holding] = {}
        self._next_id = 0
        self.num_blocks = 0
        """Number of blocks of all holdings; a block in several holdings is counted several times."""
        self._num_stuck = 0  # of `num_blocks`: blocks that no request waits for, whose release has no known time
        self._is_claimed = False
        self._preemptor: Request | None = None
        self._now = 0.0
        self.is_worth_loading: Callable[[int, int, int], bool] | None = None
        """Function of (first token, number of tokens, number of blocks): whether a synchronous load of these tokens
        takes less time than computing them. None: all tokens that can be loaded are loaded."""

    def set_load_criterion(self, is_worth_loading: Callable[[int, int, int], bool]) -> None:
        """Set `is_worth_loading`, the function that decides whether tokens are loaded synchronously or computed."""
        self.is_worth_loading = is_worth_loading

    @property
    def num_open(self) -> int:
        """Number of transfers that the host has not reported as finished."""
        return len(self._open)

    def holdings(self) -> list[Holding]:
        """All holdings, in unspecified order."""
        return [*self._open.values(), *self._loaded.values()]

    def requests_with_holdings(self) -> list[Request]:
        """Requests that wait for a load, or wait in the queue with a loaded prefix."""
        return [holding.request for holding in self.holdings() if holding.request is not None]

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # ------------------------------------------------------------------ loads

    def begin_admissions(self, preemptor: Request | None, now: float) -> None:
        """Begin the admissions of a step. `preemptor`: a request for which other requests were preempted, so it must
        not wait for a transfer."""
        self._is_claimed = False
        self._preemptor = preemptor
        self._now = now

    def find_load(self, request: Request, match: Match) -> External | Deferral:
        """Ask the connector for a load after the cached tokens of a request. Returns the load, or the reason why the
        request waits."""
        if not (request._state.may_load and request.reads_prefix_cache) or request._state.holding is not None:
            return NOTHING
        size, num_local = self._kv.block_size, match.num_tokens
        max_tokens = (request._state.num_tokens - 1) // size * size - num_local
        if max_tokens <= 0:
            return NOTHING
        is_saving = self._swaps and bool(self._kv.saves)
        has = None if self._kv.has_tables else self._kv.is_in_pool(match, (num_local + max_tokens) // size)
        saved = self._num_saved_tokens(request, num_local, has) if is_saving else 0
        if has is None:
            count, is_async = self.connector.num_external_tokens(request, num_local + saved)
        else:
            assert has_groups(self.connector)
            count, is_async = self.connector.num_tokens_in_groups(request, num_local + saved, has)
        if count is None:
            return self._wait_for_answer(request)
        if saved:  # tokens after the saved blocks are loaded by this step too, or not at all
            count, is_async = saved + (0 if is_async else count), False
        if has is not None and count % size:  # windows have blocks only for the token after exactly `count`
            return NOTHING
        count = min(count, max_tokens) // size * size
        if count <= 0:
            return NOTHING
        if not is_async:
            is_worth_loading = self.is_worth_loading
            if is_worth_loading is not None and not is_worth_loading(
                num_local, count, self._num_blocks_to_load(match, count)
            ):
                return NOTHING
            return External(count, False)
        if request is self._preemptor:
            return NOTHING
        return self._fit_async_load(num_local // size, count // size)

    def _num_blocks_to_load(self, match: Match, num_tokens: int) -> int:
        """Number of blocks that a load fills if it loads `num_tokens` tokens after the cached tokens of `match`."""
        num_blocks = self._kv.num_blocks_to_hold((match.num_tokens + num_tokens) // self._kv.block_size)
        return num_blocks - len(self._kv.with_external(match, num_tokens).blocks)

    def _num_saved_tokens(self, request: Request, num_local_tokens: int, has: BoolArray | None) -> int:
        """Number of tokens, directly after the first `num_local_tokens`, in blocks that this step evicts and saves, so
        that the step can load them again. With several groups, `has` marks the blocks in the pool; this method marks
        the saved blocks in it, too."""
        saved, size = {save.key for save in self._kv.saves or ()}, self._kv.block_size
        start, end = num_local_tokens // size, (request.num_tokens - 1) // size
        if has is None:
            names = self._kv.block_names(request, 0, end)[start:]
            return size * next((index for index, name in enumerate(names) if name not in saved), len(names))
        for group, of_group in enumerate(has):
            of_group |= [name in saved for name in self._kv.block_names(request, group, end)]
        return size * max(0, self._kv.num_reusable(has) - start)

    def _wait_for_answer(self, request: Request) -> External | Deferral:
        deferral = request._state.deferral
        is_asked = deferral is not None and deferral.reason is Reason.KV_CONNECTOR
        asked_since = request._state.deferred_since if is_asked else self._now
        if self._timeout is not None and self._now - asked_since >= self._timeout:
            request._state.end_loads()
            return NOTHING
        if request is self._preemptor:
            return NOTHING
        return Deferral(Reason.KV_CONNECTOR, 0, blocks_queue=False)

    def _fit_async_load(self, num_local: int, num_external: int) -> External | Deferral:
        """The asynchronous load of at most `num_external` blocks, after `num_local` cached blocks, that fits in
        `max_blocks` beside other holdings.

        A load that does not fit now waits for other holdings to end, and no later request starts a load in this step. A
        load that might never fit is cut to the remaining blocks.
        """
        total = self._kv.num_blocks_to_hold(num_local + num_external)
        left = self.max_blocks - self.num_blocks
        can_wait = total <= self.max_blocks - self._num_stuck
        if can_wait and (self._is_claimed or total > left):
            self._is_claimed = True
            return Deferral(Reason.KV_ROOM, max(1, total - left), blocks_queue=False)
        if total > left:  # windows have blocks only for the token after the last one
            num_external = 0 if self._kv.gives_back else max(0, left // self._kv.num_groups - num_local)
        return External(num_external * self._kv.block_size, True) if num_external else NOTHING

    def start_load(self, request: Request, load: Load, table: Int64Array, now: float) -> Holding:
        """Make a holding of the blocks of a load. The blocks are referenced already, and are in `table` [groups,
        blocks]."""
        blocks = np.concatenate([load.local_blocks, load.block_ids])
        first = load.first_token // self._kv.block_size
        holding = Holding(
            load.transfer_id, request.request_id, blocks, len(load.local_blocks), request, load, table, first, now
        )
        self._open[holding.transfer_id] = holding
        self.num_blocks += len(blocks)
        request._state.set_holding(holding)
        return holding

    def find_unfinished(self, transfer_id: int) -> Holding:
        """The unfinished transfer with this id.

        Raises:
            UnknownTransfer: there is no such transfer, or it was already reported as finished.
        """
        if transfer_id not in self._open:
            raise UnknownTransfer(
                f"no transfer {transfer_id!r} is under way; call transfer_done exactly once for each asynchronous load "
                "and each send"
            )
        return self._open[transfer_id]

    def finish_transfer(self, holding: Holding) -> None:
        """Record that the device has finished a transfer. If no request waits for the transfer, the caller next calls
        `release_finished`."""
        del self._open[holding.transfer_id]
        holding.mark_finished()
        if holding.request is not None:
            self._loaded[holding.transfer_id] = holding

    def shorten_load(self, holding: Holding, num_kept_places: int) -> None:
        """Keep the blocks at the first `num_kept_places` places of each table of a load, and release the other
        blocks."""
        others = holding.keep_places(num_kept_places)
        self._kv.release_held_blocks(others)
        self.num_blocks -= len(others)

    def release_finished(self, holding: Holding) -> None:
        """Release the blocks of a finished transfer that no request waits for."""
        assert holding.request is None and not holding.is_open
        self._kv.release_held_blocks(holding.blocks)
        self.num_blocks -= len(holding.blocks)
        self._num_stuck -= len(holding.blocks)

    def move_holding_to_row(self, request: Request) -> None:
        """End the holding of a request that has got a row: the row now holds the blocks."""
        holding = request._state.holding
        assert holding is not None and not holding.is_open
        del self._loaded[holding.transfer_id]
        self.num_blocks -= len(holding.blocks)
        holding.detach_request()

    def release_holding(self, request: Request) -> None:
        """End the holding of a request that no longer waits: release its blocks, except blocks that the device may
        still write."""
        holding = request._state.holding
        assert holding is not None
        holding.detach_request()
        if not holding.is_open:
            del self._loaded[holding.transfer_id]
            self.shorten_load(holding, 0)
            return
        local = holding.give_back_local()
        self._kv.release_held_blocks(local)
        self.num_blocks -= len(local)
        self._num_stuck += len(holding.blocks)

    def overdue_requests(self, since: float) -> list[Request]:
        """Requests that wait for a load that began at `since` or before, the oldest load first."""
        found: list[Request] = []
        for holding in self._open.values():
            if holding.request is not None:
                if holding.since > since:
                    break
                found.append(holding.request)
        return found

    # ------------------------------------------------------------------ sends

    def hold_if_sending(self, request: Request, blocks: Int64Array, num_tokens: int) -> None:
        """Ask the connector whether the blocks of a finishing request are being sent, and if so hold them. With several
        groups, `blocks` is [groups, blocks], -1 at places without a block.

        The request's row still holds the blocks; a further reference keeps them when the row is released.
        """
        table, blocks = blocks, blocks.T[blocks.T >= 0]  # with several groups, place by place
        if not len(blocks) or self.num_blocks + len(blocks) > self.max_blocks:
            return
        transfer_id = self.next_id()
        table.setflags(write=False)  # the connector may keep the array
        if self.connector.request_ended(request, table, num_tokens, transfer_id):
            self._kv.pool.acquire(blocks)
            self._open[transfer_id] = Holding(transfer_id, request.request_id, blocks, 0, None, None, table)
            self.num_blocks += len(blocks)
            self._num_stuck += len(blocks)


def make_transfers(config: SchedulerConfig, kv: KVCacheManager, connector: KVConnector | None) -> Transfers | None:
    """The `Transfers` of a connector; None without a connector.

    Raises:
        ConfigError: a knob needs a connector, and there is none; or `kv_groups` needs a method that the connector
            lacks.
    """
    if connector is not None:
        if config.has_kv_groups and not has_groups(connector):
            raise ConfigError(
                f"kv_groups has {len(config.kv_groups)} groups, but the connector supports only one group of full "
                "attention, because it lacks the method num_tokens_in_groups(); add the method, or remove kv_groups or "
                "the connector"
            )
        saves = connector.saves_evicted or config.preemption_mode != "recompute"
        kv.connect(saves=saves, saves_all=connector.saves_evicted)
        return Transfers(config, kv, connector)
    if config.preemption_mode != "recompute":
        raise ConfigError(
            f'preemption_mode is "{config.preemption_mode}" and there is no host memory to swap to; pass a '
            'connector (with the engine: set kv_offload_bytes), or set it to "recompute"'
        )
    for name, default in (("kv_load_failure_policy", "recompute"), ("kv_load_timeout", None)):
        if getattr(config, name) != default:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r} and the scheduler has no connector, so it would have no effect; "
                "leave it at its default, or pass a connector"
            )
    return None
