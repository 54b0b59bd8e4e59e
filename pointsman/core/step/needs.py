"""The memory of `search.py`: what each request behind the head lacked at its last check, so that few are checked again.

What it needs does not become less while it waits, but for three causes. Partial prefills may be owed fewer blocks:
these are counted apart. A reserve may change, or nothing may run: then all is forgotten. And others may come to hold
more blocks of its prefix: `KVCacheManager.shared` says which requests they are, and a waiting one with the same tokens
up to the next block that it could share is forgotten.
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
"""After as many checks requests that are no longer looked at are forgotten."""

FREE, OPEN, UNOWED, OPEN_UNOWED = range(4)
"""Levels: free blocks; those that requests behind the head may take; and each less what partial prefills are owed."""
Levels = tuple[int, int, int, int]


@dataclass(slots=True, eq=False)
class Shortfall:
    """What a request lacks, as a function of the levels. Many requests have the same one."""

    least: int
    """It takes as many blocks at the level OPEN_UNOWED to be admitted."""
    rungs: tuple[tuple[int, int, Reason], ...]
    """(level, blocks, reason): the reason is that of the first entry with as many blocks at its level."""
    levels: Levels | None = None
    """Of the newest scan."""
    reason: Reason | None = None
    """What `reason_at` says of these."""

    def move_to(self, levels: Levels) -> None:
        """A scan sees these levels."""
        self.levels, self.reason = levels, self.reason_at(levels)

    def reason_at(self, levels: Levels) -> Reason | None:
        """Why it waits at these levels; None: it is admitted."""
        if levels[OPEN_UNOWED] >= self.least:
            return None
        return next(reason for level, blocks, reason in self.rungs if levels[level] >= blocks)

    def deferral(self, reason: Reason, levels: Levels, blocks_queue: bool) -> Deferral:
        """As a check would defer it."""
        return Deferral(reason, self.least - levels[OPEN_UNOWED], blocks_queue)


class Need(NamedTuple):
    """What was found of a request."""

    shortfall: Shortfall
    serial: int
    """Of the request: another one once it ran, or its prompt became longer."""
    num_tokens: int
    num_waiting: int
    """Requests in the queue from it on, when it was checked."""
    watched: tuple[int, int] | None
    """The number of blocks up to the next one that it could share, and the hash of their tokens; None: it shares all
    that it can."""


class Needs:
    """What is known of requests behind the head, each of which lacked blocks when it was checked.

    Args:
        needs_whole: a request is known only while all its tokens fit the budget.
    """

    def __init__(
        self, bypass: LetsPass, reserves: Reserves, kv: KVCacheManager, view: SchedulerView, needs_whole: bool
    ) -> None:
        self._bypass = bypass
        self._reserves = reserves
        self._kv = kv
        self._view = view
        self._needs_whole = needs_whole
        # Of the entries of a shortage, in the order of `Reserves.check`.
        self._levels_of_rungs = [
            UNOWED if each is bypass else OPEN if each is reserves.counts_owed else OPEN_UNOWED
            for each in reserves.policies
        ]
        self._levels_of_rungs += [FREE, FREE]
        self.known: dict[Request, Need] = {}
        """What was found of some requests; `get` says whether it is still so."""
        self._watching: dict[int, dict[int, list[Request]]] = {}  # by what each has as `watched`
        self._shortfalls: dict[tuple[int, ...], Shortfall] = {}  # by their numbers
        self._by_asked: dict[tuple[int, tuple[int, ...]], Shortfall] = {}  # by owed blocks and `Shortage.asked`
        self._num_kept = 0
        self._key: tuple[Any, ...] | None = None
        self._owed = 0
        self.levels: Levels = (0, 0, 0, 0)
        self.most_tokens = MAX_INT
        """Longer requests must be checked."""
        kv.track_shared()

    # ------------------------------------------------------------------ a step

    def open(self) -> None:
        """A step begins. Many may have passed without `measure`."""
        if self._kv.shared and len(self._kv.shared) > MAX_KEPT:
            self.forget()

    def measure(self, budget: int, num_running: int, num_owed_blocks: int) -> None:
        """Take the levels of this moment, and forget what may be otherwise now."""
        kv, prefix = self._kv, self._kv.prefix
        tree = (prefix.epoch, prefix.num_replacements) if prefix is not None else None
        key = (self._reserves.num_changes, num_running > 0, tree)
        if key != self._key:
            self._key = key
            self.forget()
        elif kv.shared:
            self._forget_sharers(kv.shared)
            kv.shared.clear()
        self.most_tokens = budget if self._needs_whole else MAX_INT
        self._owed = num_owed_blocks if self._reserves.counts_owed is not None else 0
        free = kv.pool.num_free
        self.set_free(free, self._bypass.num_open(free))

    def set_free(self, free: int, num_open: int) -> None:
        """Of the free blocks, those behind the head may take `num_open`; what is owed is as before."""
        self.levels = (free, num_open, free - self._owed, num_open - self._owed)

    # ------------------------------------------------------------------ a request

    def get(self, request: Request, num_waiting: int) -> Need | None:
        """What is known of a request, from which on `num_waiting` are queued; None: it must be checked."""
        need = self.known.get(request)
        if need is None or need.serial != request._state.serial:
            return None
        return None if need.num_waiting > num_waiting or need.num_tokens > self.most_tokens else need

    def deferral(self, request: Request, num_waiting: int, blocks_queue: bool) -> tuple[Deferral, int] | None:
        """Why a request lacks blocks, and how many it would take; None: it must be checked."""
        need = self.get(request, num_waiting)
        if need is None:
            return None
        shortfall, levels = need.shortfall, self.levels
        reason = shortfall.reason_at(levels)
        if reason is None:
            return None
        return shortfall.deferral(reason, levels, blocks_queue), shortfall.least + self._owed

    def keep(self, request: Request, shortage: Shortage) -> Need | None:
        """A check has just found that the request lacks blocks. None: the next one may find anything."""
        state, owed = request._state, self._owed
        if request.adapter is not None or state.encoder_inputs:  # there are other gates for it
            return None
        if state.num_tokens > self.most_tokens:
            return None
        key = (owed, shortage.asked)
        shortfall = self._by_asked.get(key)
        if shortfall is None:
            shortfall = self._by_asked[key] = self._shortfall(shortage)
        watched = self._to_watch(request)
        need = Need(shortfall, state.serial, state.num_tokens, self._view.num_waiting, watched)
        self._enter(request, need)
        self._num_kept += 1
        return need

    def _shortfall(self, shortage: Shortage) -> Shortfall:
        """What lacking so much now means at other levels."""
        owed, levels, kept = self._owed, self._levels_of_rungs, shortage.required - shortage.own
        less = (0, kept, owed, kept + owed)
        least, rungs = shortage.own - owed, shortage.rungs
        blocks = [enough - less[level] for level, (enough, _) in zip(levels, rungs, strict=True)]
        key = (least, *blocks)
        shortfall = self._shortfalls.get(key)
        if shortfall is None:
            entries = zip(levels, blocks, [reason for _, reason in rungs], strict=True)
            shortfall = self._shortfalls[key] = Shortfall(least, tuple(entries))
        return shortfall

    def _enter(self, request: Request, need: Need) -> None:
        self.known[request] = need
        if need.watched is not None:
            num_blocks, key = need.watched
            self._watching.setdefault(num_blocks, {}).setdefault(key, []).append(request)

    def _to_watch(self, request: Request) -> tuple[int, int] | None:
        kv = self._kv
        if kv.prefix is None or not request.reads_prefix_cache:
            return None
        # With duplicates, a referenced block may come after one that is not.
        num_blocks = 1 if kv.has_duplicates else self._view.num_shared_blocks + 1
        if num_blocks * kv.block_size >= request._state.num_tokens:  # one token is left to compute
            return None
        return num_blocks, _hash_of(request, num_blocks * kv.block_size)

    # ------------------------------------------------------------------ forgetting

    def forget(self) -> None:
        """Nothing is known of any request."""
        self._forget_but(())
        if self._kv.shared:
            self._kv.shared.clear()

    def trim(self, requests: Sequence[Request]) -> None:
        """Only these are looked at now: forget others, once there may be many."""
        if self._num_kept > MAX_KEPT:
            self._forget_but(requests)

    def _forget_but(self, requests: Sequence[Request]) -> None:
        known = self.known
        self.known, self._watching, self._shortfalls, self._by_asked = {}, {}, {}, {}
        for request in requests:
            need = known.get(request)
            if need is not None:
                self._enter(request, need)
        self._num_kept = len(self.known)

    def _forget_sharers(self, shared: list[tuple[Request, int]]) -> None:
        """Forget requests that may share one block more, since the first blocks of these are referenced."""
        size = self._kv.block_size
        for request, most in shared:
            for num_blocks, watching in self._watching.items():
                if num_blocks <= most:
                    for each in watching.pop(_hash_of(request, num_blocks * size), ()):
                        self.known.pop(each, None)


def _hash_of(request: Request, num_tokens: int) -> int:
    """Of its first tokens. Where two are equal by chance, a request is checked once more."""
    state = request._state
    known = state.known_bytes() if num_tokens > state.num_prompt_tokens else state.prompt_bytes
    return hash(known[: num_tokens * TOKEN_BYTES])
