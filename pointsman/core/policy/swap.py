"""Is the KV of a preempted request copied to host memory and back, or computed again? `preemption_mode`.

A preempted request's blocks stay cached in the pool, where others take them one by one, from its end, until it resumes.
So nothing is copied when it is preempted: a block of a request that swaps is copied out when it is evicted, and copied
back with the step that resumes the request. That moves no more than a swap of all its blocks would, and nothing of
what is still cached.

    preempted        decide for the victim, and want its blocks: the pool reports their evictions (`kv/manager.py`)
    is_worth_loading when it resumes: load what is in host memory, or compute it
    ended            it runs again, or has finished: nothing of it is wanted

Under "cheaper" both decisions compare two times. To compute n tokens again takes what `StepTimes` has learned from the
steps so far, in which the last tokens of a long request take longer than the first. To copy takes the seconds of a
block in the fastest of the recent copies, twice for a victim, once for what is in host memory already: what was copied
out is paid. As a token that is computed costs more the later it is, and one that is loaded the same, it is all or
nothing for a load too.

While one of the two times is not known, victims swap, which measures it; if that shows that computing is cheaper, no
further block of them is copied. The copies are forgotten after `TRIED_AGAIN` victims in a row that compute, so that a
slow spell is not believed for ever; the next victims then measure by a few blocks.

vLLM V0 had the first two modes (`--preemption-mode`), one for all victims. It copied all blocks of a victim at once.
"""

from __future__ import annotations

from collections import deque

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.policy.policy import Policy, StepLoad
from pointsman.core.policy.step_times import StepTimes
from pointsman.core.state.output import Copies
from pointsman.core.state.reason import Recovery
from pointsman.core.state.request import Request

NUM_COPIES, MIN_COPIES = 16, 3
"""Recent steps with copies, of which the fastest says what a block takes, as noise only adds to it; and with how many
that begins to be known."""
TRIED_AGAIN = 64
"""Victims in a row that compute, after which the copies are forgotten."""


class Swap(Policy):
    """Decides, and knows which preempted requests swap."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.compares = config.preemption_mode == "cheaper"
        """Whether times are compared; otherwise every victim swaps."""
        self._kv = kv
        self._times = StepTimes(0.0)  # every prediction counts, not those near a target
        self._copies: deque[Copies] = deque(maxlen=NUM_COPIES)
        self._seconds = 0.0  # of a block; 0: not known
        self._copied_seconds = 0.0  # of the step that is being updated
        self._num_computing = 0  # victims in a row
        self._open: dict[Request, tuple[bytes, ...]] = {}  # preempted requests that swap, with the keys they want

    # ------------------------------------------------------------------ one request

    def preempted(self, request: Request, num_cached_tokens: int) -> Recovery:
        """Decide for a request that has just released its blocks; `num_cached_tokens` of its tokens are cached."""
        if not num_cached_tokens:
            return Recovery(False, 0, None, None)
        recompute = swap = None
        swaps = True
        if self.compares:
            self._times.refit()
            recompute = self._times.prefill_seconds(num_cached_tokens, 0) or None
            swap = 2 * self._seconds * self._num_blocks(num_cached_tokens) or None
            swaps = recompute is None or swap is None or swap <= recompute
            self._count(swaps)
        if swaps:
            self._want(request, num_cached_tokens)
        return Recovery(swaps, num_cached_tokens, recompute, swap)

    def waits_again(self, request: Request) -> None:
        """Its admission is void: it waits as before."""
        recovery = request._state.recovery
        if recovery is not None and recovery.swaps:
            self._want(request, recovery.num_cached_tokens)

    def ended(self, request: Request) -> None:
        """A request runs again, or has finished."""
        keys, wanted = self._open.pop(request, ()), self._kv.wanted
        if wanted is None:
            return
        for key in keys:
            if key in wanted:
                wanted[key] -= 1
                if not wanted[key]:
                    del wanted[key]

    def num_evicted(self, request: Request) -> int:
        """Blocks of a request that swaps which the pool has evicted since it was preempted; 0 if it swaps no more."""
        wanted = self._kv.wanted
        return 0 if wanted is None else sum(key not in wanted for key in self._open.get(request, ()))

    def forget(self) -> None:
        """The prefix cache was reset: there is nothing left to swap."""
        for request in list(self._open):
            request._state.recovery = None
            self.ended(request)

    def is_worth_loading(self, start: int, count: int, num_blocks: int) -> bool:
        """Whether `count` tokens from `start` on, of which `num_blocks` blocks are in host memory, are loaded rather
        than computed."""
        if not self._seconds:
            return True
        recompute = self._times.prefill_seconds(count, start)
        return recompute == 0 or self._seconds * num_blocks <= recompute

    def _num_blocks(self, num_tokens: int) -> int:
        """Blocks that a request needs to continue after so many tokens."""
        return self._kv.num_blocks_to_hold(num_tokens // self._kv.block_size)

    def _want(self, request: Request, num_tokens: int) -> None:
        self._open[request] = keys = self._kv.names_to_resume(request, num_tokens // self._kv.block_size)
        if self._kv.wanted is not None:
            self._kv.wanted.update(keys)

    def _count(self, swaps: bool) -> None:
        self._num_computing = 0 if swaps else self._num_computing + 1
        if self._num_computing == TRIED_AGAIN:
            self._num_computing, self._seconds = 0, 0.0
            self._copies.clear()

    # ------------------------------------------------------------------ what is measured

    def observe(self, copies: Copies | None) -> None:
        """What the step copied that is being updated; called before `on_step_time`."""
        self._copied_seconds = 0.0
        if copies is None or not self.compares or copies.num_blocks <= 0 or copies.seconds <= 0:
            return
        self._copied_seconds = copies.seconds
        self._copies.append(copies)
        if len(self._copies) < MIN_COPIES:
            return
        self._seconds = min(one.seconds / one.num_blocks for one in self._copies)
        for request in list(self._open):
            self._reconsider(request)

    def _reconsider(self, request: Request) -> None:
        """With what is known now, no further block of it may be worth a copy."""
        recovery = request._state.recovery
        assert recovery is not None
        count = recovery.num_cached_tokens
        recompute = self._times.prefill_seconds(count, 0)
        if 0 < recompute < 2 * self._seconds * self._num_blocks(count):
            self.ended(request)

    def on_step_time(self, load: StepLoad, seconds: float) -> None:
        """Steps are learned without their copies."""
        copied, self._copied_seconds = self._copied_seconds, 0.0  # steps that are done at once copy nothing
        self._times.observe(load, seconds - copied)


def make_swap(config: SchedulerConfig, kv: KVCacheManager) -> Swap | None:
    """None: preempted requests compute again what was evicted."""
    return None if config.preemption_mode == "recompute" else Swap(config, kv)
