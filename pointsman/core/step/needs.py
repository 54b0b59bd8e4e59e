"""Needs: remembers how many blocks each request behind the head lacked at its last check, so that `search.py` checks
few requests again.

The need of a waiting request shrinks for three causes only. Partial prefills may need fewer blocks: the blocks that
they need are counted separately. A reserve may change, or the last running request may finish: then all needs are
forgotten. Other requests may begin to hold more blocks of the waiting request's prefix: `KVCacheManager.shared` lists
those requests, and the needs of waiting requests with the same tokens up to the next block that they could share are
forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.kv.prefix_tree import TOKEN_BYTES
from pointsman.core.policy.reserve import LetsPass, Reserves, Shortage
from pointsman.core.policy.view import SchedulerView
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request

MAX_KEPT = 256
"""Number of remembered checks above which the needs of requests outside the current search are forgotten."""

FREE, OPEN, UNOWED, OPEN_UNOWED = range(4)
"""Levels, as indices into `Levels`. FREE: number of free blocks. OPEN: number of free blocks that requests behind the
head may take. UNOWED and OPEN_UNOWED: FREE and OPEN minus the blocks that partial prefills still need."""
Levels = tuple[int, int, int, int]


@dataclass(slots=True, eq=False)
class Shortfall:
    """The blocks that a request lacks, as a function of the number of blocks at each level (FREE, OPEN, ...). Many
    requests share one shortfall."""

    min_blocks: int
    """Minimum number of blocks at level OPEN_UNOWED for admission."""
    rungs: tuple[tuple[int, int, Reason], ...]
    """Entries (level, blocks, reason): the reason to wait is that of the first entry whose level has at least `blocks`
    blocks."""
    levels: Levels | None = None
    """Number of blocks at each level (FREE, OPEN, ...) at the newest scan of the queue."""
    reason: Reason | None = None
    """Result of `reason_at` for `levels`."""

    def move_to(self, levels: Levels) -> None:
        """Set `levels` to the numbers of blocks at a new scan of the queue, and `reason` accordingly."""
        self.levels, self.reason = levels, self.reason_at(levels)

    def reason_at(self, levels: Levels) -> Reason | None:
        """Reason why a request with this shortfall waits, given the number of blocks at each level; None: the request
        is admitted."""
        if levels[OPEN_UNOWED] >= self.min_blocks:
            return None
        return next(reason for level, blocks, reason in self.rungs if levels[level] >= blocks)

    def deferral(self, reason: Reason, levels: Levels, blocks_queue: bool) -> Deferral:
        """The deferral that a check would return, given the number of blocks at each level."""
        return Deferral(reason, self.min_blocks - levels[OPEN_UNOWED], blocks_queue)


class Need(NamedTuple):
    """The remembered result of a check that found a request short of blocks."""

    shortfall: Shortfall
    serial: int
    """The request's serial at the time of the check. If the request's serial has changed since, the need is out of
    date: the request has run, or its prompt was extended."""
    num_tokens: int
    num_waiting: int
    """Number of waiting requests at the time of the check, with which the need may rise; 0: it does not."""
    watched: tuple[int, int] | None
    """Number of leading blocks up to the next block that the request could share, and the hash of the tokens of these
    blocks; None: the request cannot share more blocks."""


class Needs:
    """The needs of requests behind the head that lacked blocks when they were checked.

    Args:
        needs_whole: whether a need is valid only while all tokens of the request fit the budget.
    """

    def __init__(
        self, bypass: LetsPass, reserves: Reserves, kv: KVCacheManager, view: SchedulerView, needs_whole: bool
    ) -> None:
        self._bypass = bypass
        self._reserves = reserves
        self._kv = kv
        self._view = view
        self._needs_whole = needs_whole
        # The levels to which the entries of a `Shortage` refer, in the order of the checks in `Reserves.check`.
        self._levels_of_rungs = [
            UNOWED if each is bypass else OPEN if each is reserves.counts_owed else OPEN_UNOWED
            for each in reserves.policies
        ]
        self._levels_of_rungs += [FREE, FREE]
        self.known: dict[Request, Need] = {}
        """The remembered needs, keyed by request; `get` checks whether a need is still valid."""
        self._watching: dict[int, dict[int, list[Request]]] = {}  # keyed by the two entries of `watched`
        self._shortfalls: dict[tuple[int, ...], Shortfall] = {}  # keyed by minimum and rungs
        self._by_asked: dict[
            tuple[int, tuple[int, ...]], Shortfall
        ] = {}  # keyed by `_num_owed_blocks` and `Shortage.asked`
        self._num_kept = 0
        self._key: tuple[Any, ...] | None = None
        self._num_owed_blocks = 0
        self.levels: Levels = (0, 0, 0, 0)
        """Current number of blocks at each level."""
        self.max_num_tokens = MAX_INT
        """Maximum length of a request whose need is valid; longer requests must be checked."""
        kv.track_shared()

    # ------------------------------------------------------------------ a step

    def open(self) -> None:
        """Begin a step. Many steps may have passed since the last `measure`."""
        if self._kv.shared and len(self._kv.shared) > MAX_KEPT:
            self.forget()

    def measure(self, budget: int, num_running: int, num_owed_blocks: int) -> None:
        """Set `levels` to the current numbers of free blocks, open blocks, and both minus the blocks that partial
        prefills still need. Forget needs that may have changed."""
        kv, prefix = self._kv, self._kv.prefix
        tree = (prefix.epoch, prefix.num_replacements) if prefix is not None else None
        key = (self._reserves.num_changes, num_running > 0, tree)
        if key != self._key:
            self._key = key
            self.forget()
        elif kv.shared:
            self._forget_sharers(kv.shared)
            kv.shared.clear()
        self.max_num_tokens = budget if self._needs_whole else MAX_INT
        self._num_owed_blocks = num_owed_blocks if self._reserves.counts_owed is not None else 0
        free = kv.pool.num_free
        self.set_free_blocks(free, self._bypass.num_open(free))

    def set_free_blocks(self, free: int, num_open: int) -> None:
        """Set `levels` for `free` free blocks, of which requests behind the head may take `num_open`. The number of
        blocks that partial prefills still need stays the same."""
        self.levels = (free, num_open, free - self._num_owed_blocks, num_open - self._num_owed_blocks)

    # ------------------------------------------------------------------ a request

    def get(self, request: Request, num_waiting: int) -> Need | None:
        """The remembered need of a request, if it is still valid; None: the request must be checked. `num_waiting`:
        number of waiting requests."""
        need = self.known.get(request)
        if need is None or need.serial != request._state.serial:
            return None
        return None if need.num_waiting > num_waiting or need.num_tokens > self.max_num_tokens else need

    def deferral(self, request: Request, num_waiting: int, blocks_queue: bool) -> tuple[Deferral, int] | None:
        """The deferral of a request that lacks blocks, and the number of blocks that it would take; None: the request
        must be checked."""
        need = self.get(request, num_waiting)
        if need is None:
            return None
        shortfall, levels = need.shortfall, self.levels
        reason = shortfall.reason_at(levels)
        if reason is None:
            return None
        return shortfall.deferral(reason, levels, blocks_queue), shortfall.min_blocks + self._num_owed_blocks

    def keep(self, request: Request, shortage: Shortage) -> Need | None:
        """Remember that a check found the request short of blocks; returns the need. None: the need cannot be
        predicted, and is not remembered."""
        state, owed = request._state, self._num_owed_blocks
        if request.adapter is not None or state.encoder_inputs:  # other gates apply to such a request
            return None
        if state.num_tokens > self.max_num_tokens:
            return None
        key = (owed, shortage.asked)
        shortfall = self._by_asked.get(key)
        if shortfall is None:
            shortfall = self._by_asked[key] = self._shortfall(shortage)
        watched = self._blocks_to_watch(request)
        num_waiting = self._view.num_waiting if self._reserves.counts_waiting else 0
        need = Need(shortfall, state.serial, state.num_tokens, num_waiting, watched)
        self._store_need(request, need)
        self._num_kept += 1
        return need

    def _shortfall(self, shortage: Shortage) -> Shortfall:
        """Convert a shortage, which was found with the current `levels`, to a function of the levels."""
        owed, levels, kept = self._num_owed_blocks, self._levels_of_rungs, shortage.required - shortage.own
        less = (0, kept, owed, kept + owed)
        least, rungs = shortage.own - owed, shortage.rungs
        blocks = [enough - less[level] for level, (enough, _) in zip(levels, rungs, strict=True)]
        key = (least, *blocks)
        shortfall = self._shortfalls.get(key)
        if shortfall is None:
            entries = zip(levels, blocks, [reason for _, reason in rungs], strict=True)
            shortfall = self._shortfalls[key] = Shortfall(least, tuple(entries))
        return shortfall

    def _store_need(self, request: Request, need: Need) -> None:
        self.known[request] = need
        if need.watched is not None:
            num_blocks, key = need.watched
            self._watching.setdefault(num_blocks, {}).setdefault(key, []).append(request)

    def _blocks_to_watch(self, request: Request) -> tuple[int, int] | None:
        kv = self._kv
        if kv.prefix is None or not request.reads_prefix_cache:
            return None
        # If blocks have duplicates, a referenced block may follow an unreferenced block.
        num_blocks = 1 if kv.has_duplicates else self._view.num_shared_blocks + 1
        if num_blocks * kv.block_size >= request._state.num_tokens:  # one token must be computed
            return None
        return num_blocks, _hash_of(request, num_blocks * kv.block_size)

    # ------------------------------------------------------------------ forgetting

    def forget(self) -> None:
        """Forget all needs."""
        self._forget_except(())
        if self._kv.shared:
            self._kv.shared.clear()

    def trim(self, requests: Sequence[Request]) -> None:
        """Forget the needs of all requests except these, if many needs may be remembered."""
        if self._num_kept > MAX_KEPT:
            self._forget_except(requests)

    def _forget_except(self, requests: Sequence[Request]) -> None:
        known = self.known
        self.known, self._watching, self._shortfalls, self._by_asked = {}, {}, {}, {}
        for request in requests:
            need = known.get(request)
            if need is not None:
                self._store_need(request, need)
        self._num_kept = len(self.known)

    def _forget_sharers(self, shared: list[tuple[Request, int]]) -> None:
        """Forget the needs of requests that may share one more block, as running requests now hold the first blocks of
        `shared`."""
        size = self._kv.block_size
        for request, most in shared:
            for num_blocks, watching in self._watching.items():
                if num_blocks <= most:
                    for each in watching.pop(_hash_of(request, num_blocks * size), ()):
                        self.known.pop(each, None)


def _hash_of(request: Request, num_tokens: int) -> int:
    """The hash of a request's first `num_tokens` tokens. A collision only causes one more check."""
    state = request._state
    known = state.known_bytes() if num_tokens > state.num_prompt_tokens else state.prompt_bytes
    return hash(known[: num_tokens * TOKEN_BYTES])
