"""How much must stay free when a request is admitted?

A reserve names blocks that must be free beyond the first chunk's own. They add up: a request is admitted if its first
chunk and every reserve fit into the free blocks together. Running requests are never held to a reserve, so the
gap between "stop admitting" and "nothing left" is headroom for their growth.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol, runtime_checkable

from pointsman.core.config import SchedulerConfig
from pointsman.core.state.reason import Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason

MEAN_OVER = 128
"""So many of the last ends make the mean of `decode_reserve="mean"`: enough to be steady, few enough to follow a change
of traffic within minutes."""
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


class Demand(NamedTuple):
    """What admitting a request takes from the free blocks; a cached block that somebody else holds costs nothing."""

    first: int
    """Blocks for the tokens of this step, cached free blocks that it would reuse included."""
    full: int
    """Blocks for all its known tokens."""
    owed: int
    """Blocks that running requests still need for tokens they already have (partly computed prompts)."""


class Reserve(Protocol):
    """One reason to keep blocks free."""

    reason: Reason

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        """Blocks that must be free beyond `demand.first`."""


@runtime_checkable
class Learns(Protocol):
    """A reserve that follows what it sees."""

    def on_finished(self, request: Request) -> bool:
        """A request has ended; whether `blocks` may answer otherwise from now on."""


class Watermark:
    """A share of the pool, only while something runs (vLLM's `watermark`)."""

    reason = Reason.WATERMARK

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        return self._num_blocks if something_runs else 0


class FullSequence:
    """The rest of the known sequence, and of every prompt that is partly computed."""

    reason = Reason.FULL_SEQUENCE

    def __init__(self, counts_owed: bool = True) -> None:
        self._counts_owed = counts_owed

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        owed = demand.owed if self._counts_owed else 0
        return max(0, demand.full + owed - demand.first)


class DecodeReserve:
    """Room for the output that is to be expected of it, only while something runs: an empty machine must start
    somebody."""

    reason = Reason.DECODE_RESERVE

    def __init__(self, num_tokens: int, block_size: int) -> None:
        self.num_tokens = num_tokens
        self._block_size = block_size

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        if not something_runs:
            return 0
        expected = min(self.num_tokens, request.max_tokens, request.token_limit - request.num_tokens)
        return -(-expected // self._block_size)


class MeanDecodeReserve(DecodeReserve):
    """The expected output is the mean of the last ends, rounded up: 0 until one request has ended by itself.

    What the host ended for a reason of its own (an abort, a deadline) says nothing about the length of outputs.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(0, block_size)
        self._lengths: deque[int] = deque(maxlen=MEAN_OVER)
        self._total = 0

    def on_finished(self, request: Request) -> bool:
        if request.finish_reason not in _OWN_ENDS or request.max_tokens == 0:
            return False
        if len(self._lengths) == MEAN_OVER:
            self._total -= self._lengths[0]
        self._lengths.append(request.num_output_tokens)
        self._total += request.num_output_tokens
        before, self.num_tokens = self.num_tokens, -(-self._total // len(self._lengths))
        return self.num_tokens != before


def make_reserves(config: SchedulerConfig) -> list[Reserve]:
    """The reserves that the configuration asks for, cheapest remedy first."""
    reserves: list[Reserve] = []
    if config.watermark > 0.0:
        reserves.append(Watermark(max(1, int(config.watermark * config.num_usable_blocks))))
    if config.full_sequence_must_fit:
        reserves.append(FullSequence(config.count_owed_blocks))
    if config.decode_reserve == "mean":
        reserves.append(MeanDecodeReserve(config.block_size))
    elif config.decode_reserve:
        reserves.append(DecodeReserve(config.decode_reserve, config.block_size))
    return reserves
