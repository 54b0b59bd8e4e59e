"""Swap or recompute: decides how preempted requests get their evicted KV back (`preemption_mode`).

The blocks of a preempted request stay cached in the pool. Until the request resumes, other requests may take its blocks
one by one, from its last block on. So nothing is copied at preemption. If the request swaps, each of its blocks is
copied out when it is evicted, and copied back with the step that resumes the request. So no block is copied that is
still cached.

    preempted        decides for the victim; if it swaps, the pool reports evictions of its blocks (`kv/manager.py`)
    is_worth_loading decides, when a request resumes, whether its tokens in host memory are loaded or recomputed
    ended            the request runs again, or has finished: the pool no longer reports evictions of its blocks

Under "cheaper" both decisions compare the time of a recompute with the time of a copy. `StepTimes` predicts the time of
a recompute; the last tokens of a long request take longer than the first. The time of a copy is the time of a block in
the fastest of the recent copies, multiplied by the number of blocks. This time counts twice for a victim (its blocks
are copied out and back), and once for blocks in host memory. As later tokens cost more to recompute and the same to
load, all blocks are loaded or none.

While one of the two times is unknown, victims swap, which measures it. If the measurement shows that recompute is
cheaper, no further block of these victims is copied. After `TRIED_AGAIN` victims in a row that recompute, the measured
times of copies are forgotten, since the link may have become faster. The next victims then measure again with a few
blocks.

vLLM V0 had the modes "recompute" and "swap" (`--preemption-mode`), one mode for all victims. It copied all blocks of a
victim when it was preempted.
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
"""The time to copy a block is the minimum over the last `NUM_COPIES` steps with copies, as noise only adds time. It is
unknown before `MIN_COPIES` such steps."""
TRIED_AGAIN = 64
"""Number of victims in a row that recompute after which the measured times of copies are forgotten."""


class Swap(Policy):
    """Decides whether preempted requests swap, and keeps the requests that do."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.compares = config.preemption_mode == "cheaper"
        """Whether times are compared ("cheaper"); otherwise every victim swaps."""
        self._kv = kv
        self._times = StepTimes(0.0)  # target 0: all predictions count, not only those near a target
        self._copies: deque[Copies] = deque(maxlen=NUM_COPIES)
        self._seconds = 0.0  # time to copy a block; 0: unknown
        self._copied_seconds = 0.0  # time of the copies in the step that is being updated
        self._num_computing = 0  # victims in a row that recompute
        self._open: dict[Request, tuple[bytes, ...]] = {}  # preempted requests that swap, with the keys of their blocks

    # ------------------------------------------------------------------ one request

    def decide_recovery(self, request: Request, num_cached_tokens: int) -> Recovery:
        """Decide whether a preempted request swaps, and return the decision. The request has just released its blocks;
        `num_cached_tokens` of its tokens are still cached."""
        if not num_cached_tokens:
            return Recovery(False, 0, None, None)
        recompute = swap = None
        swaps = True
        if self.compares:
            self._times.refit()
            recompute = self._times.prefill_seconds(num_cached_tokens, 0) or None
            swap = 2 * self._seconds * self._num_blocks(num_cached_tokens) or None
            swaps = recompute is None or swap is None or swap <= recompute
            self._count_decision(swaps)
        if swaps:
            self._watch_evictions(request, num_cached_tokens)
        return Recovery(swaps, num_cached_tokens, recompute, swap)

    def watch_evictions_again(self, request: Request) -> None:
        """Undo `ended` for a request whose admission is void, so that it waits as before."""
        recovery = request._state.recovery
        if recovery is not None and recovery.swaps:
            self._watch_evictions(request, recovery.num_cached_tokens)

    def stop_watching(self, request: Request) -> None:
        """Stop the reports of evictions of the request's blocks, since it runs again, or has finished."""
        keys, wanted = self._open.pop(request, ()), self._kv.wanted
        if wanted is None:
            return
        for key in keys:
            if key in wanted:
                wanted[key] -= 1
                if not wanted[key]:
                    del wanted[key]

    def num_evicted(self, request: Request) -> int:
        """Number of the request's blocks that were evicted since it was preempted; 0 if it does not swap."""
        wanted = self._kv.wanted
        return 0 if wanted is None else sum(key not in wanted for key in self._open.get(request, ()))

    def forget(self) -> None:
        """Forget all requests that swap, since the prefix cache was reset."""
        for request in list(self._open):
            request._state.recovery = None
            self.stop_watching(request)

    def is_worth_loading(self, start: int, count: int, num_blocks: int) -> bool:
        """Whether loading `count` tokens from position `start` on (`num_blocks` blocks in host memory) is cheaper than
        recomputing them."""
        if not self._seconds:
            return True
        recompute = self._times.prefill_seconds(count, start)
        return recompute == 0 or self._seconds * num_blocks <= recompute

    def _num_blocks(self, num_tokens: int) -> int:
        """Number of blocks that a request needs to continue after its first `num_tokens` tokens."""
        return self._kv.num_blocks_to_hold(num_tokens // self._kv.block_size)

    def _watch_evictions(self, request: Request, num_tokens: int) -> None:
        self._open[request] = keys = self._kv.block_names_to_resume(request, num_tokens // self._kv.block_size)
        if self._kv.wanted is not None:
            self._kv.wanted.update(keys)

    def _count_decision(self, swaps: bool) -> None:
        self._num_computing = 0 if swaps else self._num_computing + 1
        if self._num_computing == TRIED_AGAIN:
            self._num_computing, self._seconds = 0, 0.0
            self._copies.clear()

    # ------------------------------------------------------------------ measurement

    def observe(self, copies: Copies | None) -> None:
        """Learn from the copies of the step that is being updated; called before `on_step_time`."""
        self._copied_seconds = 0.0
        if copies is None or not self.compares or copies.num_blocks <= 0 or copies.seconds <= 0:
            return
        self._copied_seconds = copies.seconds
        self._copies.append(copies)
        if len(self._copies) < MIN_COPIES:
            return
        self._seconds = min(one.seconds / one.num_blocks for one in self._copies)
        for request in list(self._open):
            self._stop_if_recompute_is_cheaper(request)

    def _stop_if_recompute_is_cheaper(self, request: Request) -> None:
        """Stop copying the blocks of a preempted request if recompute is cheaper by now."""
        recovery = request._state.recovery
        assert recovery is not None
        count = recovery.num_cached_tokens
        recompute = self._times.prefill_seconds(count, 0)
        if 0 < recompute < 2 * self._seconds * self._num_blocks(count):
            self.stop_watching(request)

    def on_step_time(self, load: StepLoad, seconds: float) -> None:
        """Learn from the time of the step, less the time of its copies."""
        copied, self._copied_seconds = self._copied_seconds, 0.0  # steps of a fast-forward copy nothing
        self._times.observe(load, seconds - copied)


def make_swap(config: SchedulerConfig, kv: KVCacheManager) -> Swap | None:
    """The `Swap` of the configuration; None in mode "recompute", in which preempted requests recompute evicted
    tokens."""
    return None if config.preemption_mode == "recompute" else Swap(config, kv)
