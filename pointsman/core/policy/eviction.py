"""Which cached prefix is evicted first? Blocks that no request holds keep their content until they are needed.

Without a policy, the least recently used one. A policy says, when a request finishes, which of its blocks are retained:
those are evicted only where nothing else is free, and count as used when their time is over. How the pool keeps them,
and the bounds that hold for every policy, is in `kv/retained.py`. Retained blocks are free blocks: what may be
admitted depends on them only through what the prefix cache finds.
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
    """What the built-in ones have in common: they are asked where requests start and finish."""

    kind = "eviction"
    share = 0.0
    per_tenant = False

    def started(self, request: Request, labels: Int64Array) -> None:
        """They learn nothing from it, or override it."""

    def retained(self, request: Request, num_blocks: int, now: float) -> tuple[int, float, int]:
        return 0, now, 0


class LRU(EvictionPolicy):
    """The least recently used one; of a prompt, its end before its beginning."""

    name = "lru"


class Retention(EvictionPolicy):
    """As "lru", but the blocks of a request count as used for as many seconds more as its `retention` says.

    For requests of which the caller knows that their prefix comes again soon, such as those of an agent between two
    tool calls.

    Bound: at most `share` of the usable blocks are retained, B of them. Blocks that several tenants asked for count for
    none of them; at most B // 2 are such, S of them, and a request that would make it more is taken to ask only for the
    blocks before. Each of n tenants with other retained blocks has at most max(1, (B - S) // n) of these: at least
    B / 2n are left to it, whatever others ask for or share. What a tenant has beyond counts as used now, its earliest
    time first; where n is above B - S, what expires first of all.
    """

    name = "retention"
    reads = frozenset({"retention"})
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("share", 0.5, 0.001, 1, doc="of the blocks are retained at most"),
        Parameter("default", 0.0, 0, 1e9, doc="seconds of a request that does not say"),
    )
    per_tenant = True

    def __init__(self, share: float = 0.5, default: float = 0.0) -> None:
        self.share = share
        self._default = default

    def retained(self, request: Request, num_blocks: int, now: float) -> tuple[int, float, int]:
        seconds = self._default if request.retention is None else request.retention
        return num_blocks, now + seconds, 0


class Reuse(EvictionPolicy):
    """Blocks of requests whose like were reused are retained, and blocks that were reused themselves.

    A segmented LRU (Karedla, Love, Wherry, "Caching strategies to improve disk system performance", Computer 27, 1994):
    a block that was found in the cache is retained, without a time; of the retained ones beyond `share` of the pool the
    least recently used count as used now.

    A prompt that is new says nothing by itself, so the policy observes which requests were worth keeping, as LHD does
    by application (Beckmann, Chen, Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018). Its
    classes are lengths of outputs, by powers of two: calls of tools and questions about a document have others than the
    last request of a conversation. A finished request is retained as a whole where the blocks of its class were reused
    at least `threshold` times as often as those of all requests, in about the last 8 pools of blocks. Where nothing is
    found at all, nothing is observed, and it is "lru".

    Bound: at most `share` of the usable blocks are retained, whatever the observations say.
    """

    name = "reuse"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("share", 0.9, 0, 1, tried=(0.5, 0.9), doc="of the blocks are retained at most"),
        Parameter("threshold", 0.3, 0, 100, doc="of the mean reuse, from which on a class is retained"),
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
        if not request.num_preemptions:  # of one that resumes they may be its own
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
