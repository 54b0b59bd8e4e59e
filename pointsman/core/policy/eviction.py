"""Eviction policies: choose the cached blocks that are evicted last.

Blocks that no request holds keep their content until they are needed for new content. By default the least recently
used block is evicted first. When a request finishes, the eviction policy chooses which blocks of the request are
retained. Retained blocks are evicted only where no other block is free. When the retention of a block expires, the
block counts as used at that moment. `kv/retained.py` keeps the retained blocks, and enforces the bounds that hold for
every policy. Retained blocks are free blocks: they affect admission only through cache hits.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.state.interfaces import View
from pointsman.core.state.request import Request

Int64Array = npt.NDArray[np.int64]


class EvictionPolicy(Policy):
    """Base class of the built-in eviction policies, which are called when a request starts, and when it finishes."""

    kind = "eviction"
    share = 0.0
    per_tenant = False

    def started(self, request: Request, labels: Int64Array) -> None:
        """See `Eviction.started`. This base class learns nothing from an admission."""

    def retained(self, request: Request, num_blocks: int, now: float) -> tuple[int, float, int]:
        return 0, now, 0


class LRU(EvictionPolicy):
    """The least recently used block first; the end of a prompt before its beginning."""

    name = "lru"


class Retention(EvictionPolicy):
    """As "lru", but the blocks of a request are retained for its `retention` in seconds after its end.

    Use it where the caller knows that a prefix will be used again soon, such as the prefix of an agent between two tool
    calls.

    Bound: at most B blocks are retained, where B is the `share` of the usable blocks. S of the retained blocks, at most
    B // 2, are shared: several tenants asked for their retention, and they count for no tenant. A request that would
    exceed B // 2 shared blocks retains only its blocks before the first excess block. Each of n tenants with unshared
    retained blocks has at most max(1, (B - S) // n) unshared retained blocks, so each tenant can retain at least B / 2n
    blocks, whatever other tenants do. Excess blocks of a tenant lose their retention and count as used at that moment,
    the block with the earliest expiry first. If n is above B - S, the retained block with the earliest expiry of all
    tenants loses its retention.
    """

    name = "retention"
    reads = frozenset({"retention"})
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("share", 0.5, 0.001, 1, doc="maximum share of the blocks to retain"),
        Parameter("default", 0.0, 0, 1e9, doc="seconds for requests without a retention"),
    )
    per_tenant = True

    def __init__(self, share: float = 0.5, default: float = 0.0) -> None:
        self.share = share
        self._default = default

    def retained(self, request: Request, num_blocks: int, now: float) -> tuple[int, float, int]:
        seconds = self._default if request.retention is None else request.retention
        return num_blocks, now + seconds, 0


class Reuse(EvictionPolicy):
    """Retains blocks that were reused, and all blocks of requests whose class is often reused.

    A segmented LRU (Karedla, Love, Wherry, "Caching strategies to improve disk system performance", Computer 27, 1994):
    a block with a cache hit is retained, without an expiry. If more than `share` of the pool is retained, the least
    recently used of the retained blocks lose their retention, and count as used at that moment.

    A new prompt has no history, so the policy learns which classes of requests are worth keeping, as LHD learns it for
    applications (Beckmann, Chen, Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018). The
    classes are output lengths, by powers of two: tool calls and questions about a document differ in output length from
    the last request of a conversation. All blocks of a finished request are retained if blocks of its class were reused
    at least `threshold` times as often as the blocks of all requests. The history covers about 8 times as many blocks
    as the pool has. Without any cache hit nothing is learned, and the policy equals "lru".

    Try it on your own trace first: it gains a seventh of the hits on a trace of conversations with long shared
    prefixes, on which its parameters were chosen, and nothing on two sets of sessions of a coding agent.

    Bound: at most `share` of the usable blocks are retained, whatever was learned.
    """

    name = "reuse"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("share", 0.9, 0, 1, tried=(0.5, 0.9), doc="maximum share of the blocks to retain"),
        Parameter("threshold", 0.3, 0, 100, doc="share of the mean reuse from which a class is retained"),
    )

    def __init__(self, share: float = 0.9, threshold: float = 0.3) -> None:
        self.share = share
        self._threshold = threshold
        self._block_size = 1
        self._window = 0
        self._num_released = np.zeros(_NUM_CLASSES)
        self._num_reused = np.zeros(_NUM_CLASSES)

    def attach(self, view: View) -> None:
        self._block_size = view.block_size
        self._window = 8 * view.num_usable_blocks
        self._num_released[:] = 0
        self._num_reused[:] = 0

    def started(self, request: Request, labels: Int64Array) -> None:
        if not request.num_preemptions:  # a resumed request may hit its own blocks
            self._num_reused += np.bincount(labels, minlength=_NUM_CLASSES)

    def retained(self, request: Request, num_blocks: int, now: float) -> tuple[int, float, int]:
        released, reused = self._num_released, self._num_reused
        label = min(request.num_output_tokens.bit_length() + 1, _NUM_CLASSES - 1)
        total, hits = float(released.sum()), float(reused[1:].sum())
        is_worth = hits > 0 and reused[label] * total >= self._threshold * released[label] * hits
        released[label] += num_blocks
        if total > self._window:
            released /= 2
            reused /= 2
        found = 0 if request.num_preemptions else request.num_cached_tokens // self._block_size
        return num_blocks if is_worth else min(found, num_blocks), math.inf, label


_NUM_CLASSES = 20  # label 0: none, 1: no output, 2: one token, 3: 2 and 3, ... 19: 2**17 or more
EVICTIONS: dict[str, type[LRU] | type[Retention] | type[Reuse]] = {
    eviction.name: eviction for eviction in (LRU, Retention, Reuse)
}
