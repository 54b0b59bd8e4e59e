"""What does a request behind the head of the queue lack? Remembered from its last check, so that few are checked again.

What it needs does not become less while it waits, but for three causes. Partial prefills may be owed fewer blocks:
these are counted apart. A reserve may change, or nothing may run: then all is forgotten. And others may come to hold
more blocks of its prefix: `KVCacheManager.shared` says which requests they are, and a waiting one with the same tokens
up to the next block that it could share is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(slots=True)
class Need:
    """What a request lacked."""

    least: int
    """It is not admitted with fewer blocks at the level OPEN_UNOWED."""
    rungs: list[tuple[int, int, Reason]]
    """(level, blocks, reason): the reason is that of the first entry with as many blocks at its level."""
    serial: int
    """Of the request: another one once it ran, or its prompt became longer."""
    num_tokens: int
    num_waiting: int
    """Requests in the queue from it on, when it was checked."""
    watched: tuple[int, int] | None
    """The number of blocks up to the next one that it could share, and the hash of their tokens; None: it shares all
    that it can."""

    def deferral(self, levels: Levels, blocks_queue: bool) -> Deferral:
        """Why it waits."""
        reason = next(reason for level, blocks, reason in self.rungs if levels[level] >= blocks)
        return Deferral(reason, self.least - levels[OPEN_UNOWED], blocks_queue)


class Needs:
    """The needs of requests behind the head that lacked blocks.

    `needs_whole`: what a request needs is known only if all its tokens fit the budget.
    """

    def __init__(
        self, bypass: LetsPass, reserves: Reserves, kv: KVCacheManager, view: SchedulerView, needs_whole: bool
    ) -> None:
        self._bypass = bypass
        self._reserves = reserves
        self._kv = kv
        self._view = view
        self._needs_whole = needs_whole
        self._levels_of_rungs = [
            UNOWED if each is bypass else OPEN if each is reserves.counts_owed else OPEN_UNOWED
            for each in reserves.policies
        ]
        self.known: dict[Request, Need] = {}
        """What was found of some requests; see `get` for whether it is still true."""
        self.most_tokens = MAX_INT
        """Of longer requests nothing is known with the budget that is left."""
        self._watching: dict[int, dict[int, list[Request]]] = {}  # by what each has as `watched`
        self._num_kept = 0
        self._key: tuple[Any, ...] | None = None
        self._owed = 0
        self.levels: Levels = (0, 0, 0, 0)
        kv.shared = []

    def forget(self) -> None:
        """Nothing is known of any request."""
        self.forget_others(())

    def forget_others(self, requests: Sequence[Request]) -> None:
        """Nothing is known of any request but these."""
        known, self.known, self._watching = self.known, {}, {}
        for request in requests:
            if (need := known.get(request)) is not None:
                self._enter(request, need)
        self._num_kept = len(self.known)
        if not requests and self._kv.shared:
            self._kv.shared.clear()

    @property
    def is_crowded(self) -> bool:
        """Whether much is kept of requests that may be gone."""
        return self._num_kept > MAX_KEPT

    def open(self) -> None:
        """A step begins. Nothing may have been measured for long."""
        if self._kv.shared and len(self._kv.shared) > MAX_KEPT:
            self.forget()

    def measure(self, budget: int, num_running: int, num_owed_blocks: int) -> None:
        """Take the levels of this moment, and forget what may be another need now."""
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
        """Of all free blocks, those behind the head may take `num_open`; what is owed is as before."""
        self.levels = (free, num_open, free - self._owed, num_open - self._owed)

    def get(self, request: Request, num_waiting: int) -> Need | None:
        """What a request needs at least, from which on `num_waiting` are queued; None: it must be checked."""
        need, state = self.known.get(request), request._state
        if need is None or need.serial != state.serial:
            return None
        return None if need.num_waiting > num_waiting or need.num_tokens > self.most_tokens else need

    def deferral(self, request: Request, num_waiting: int, blocks_queue: bool) -> tuple[Deferral, int] | None:
        """Why a request lacks blocks, and how many it would take; None: it must be checked."""
        need = self.get(request, num_waiting)
        if need is None or need.least <= self.levels[OPEN_UNOWED]:
            return None
        return need.deferral(self.levels, blocks_queue), need.least + self._owed

    def keep(self, request: Request, shortage: Shortage) -> Need | None:
        """A check has just found that the request lacks blocks. None: the next one may find anything."""
        state, view = request._state, self._view
        if request.adapter is not None or state.encoder_inputs:  # there are other gates for it
            return None
        if state.num_tokens > self.most_tokens:
            return None
        kept, owed = shortage.required - shortage.own, self._owed
        less = (0, kept, owed, kept + owed)
        named = [
            (level, blocks - less[level], reason)
            for level, (blocks, reason) in zip(self._levels_of_rungs, shortage.rungs, strict=False)
        ]
        others = [(FREE, blocks, reason) for blocks, reason in shortage.rungs[len(named) :]]
        rungs, least = [*named, *others], shortage.own - owed
        need = Need(least, rungs, state.serial, state.num_tokens, view.num_waiting, self._to_watch(request))
        self._enter(request, need)
        self._num_kept += 1
        return need

    def _to_watch(self, request: Request) -> tuple[int, int] | None:
        kv = self._kv
        if kv.prefix is None or not request.use_prefix_cache:
            return None
        # With duplicates, a referenced block may come after one that is not.
        num_blocks = 1 if kv.has_duplicates else self._view.num_shared_blocks + 1
        if num_blocks * kv.block_size >= request._state.num_tokens:  # one token is left to compute
            return None
        return num_blocks, _hash_of(request, num_blocks * kv.block_size)

    def _enter(self, request: Request, need: Need) -> None:
        self.known[request] = need
        if need.watched is not None:
            num_blocks, key = need.watched
            self._watching.setdefault(num_blocks, {}).setdefault(key, []).append(request)

    def _forget_sharers(self, shared: list[tuple[Request, int]]) -> None:
        """Forget those that may share one block more since the first blocks of these requests are referenced."""
        size = self._kv.block_size
        for request, most in shared:
            for num_blocks, watching in self._watching.items():
                if num_blocks <= most:
                    for each in watching.pop(_hash_of(request, num_blocks * size), ()):
                        self.known.pop(each, None)


def _hash_of(request: Request, num_tokens: int) -> int:
    """Of its first tokens. Where two are equal by chance, one request is checked more often."""
    state = request._state
    known = state.known_bytes() if num_tokens > state.num_prompt_tokens else state.prompt_bytes
    return hash(known[: num_tokens * TOKEN_BYTES])
