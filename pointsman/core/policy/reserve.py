"""How many blocks must stay free when a request is admitted?

A reserve names blocks that must be free beyond the first chunk's own. They add up: a request is admitted if its first
chunk and every reserve fit into the free blocks together. Running requests are never held to a reserve, so the gap
between "stop admitting" and "nothing left" is headroom for their growth. `Reserves` is the gate that adds them up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pointsman.core.config import SchedulerConfig
from pointsman.core.policy.gate import Gate, View
from pointsman.core.state.events import Listener
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason

MEAN_OVER = 128
"""The number of latest finished requests that `decode_reserve="mean"` averages: enough to be steady, few enough to
follow a change of traffic within minutes."""
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


class Demand(NamedTuple):
    """What an admission takes from the free blocks; a cached block that another request holds costs nothing."""

    first: int
    """Blocks for the tokens of this step, including cached free blocks that it would reuse."""
    full: int
    """Blocks for all its known tokens."""
    owed: int
    """Blocks that running requests still need for tokens they already have (partial prefills)."""


class Reserve(Protocol):
    """One reason to keep blocks free."""

    reason: Reason

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        """Blocks that must be free beyond `demand.first`."""


class Shortage(NamedTuple):
    """A request lacks blocks."""

    required: int
    """Free blocks that admitting it takes, with every reserve."""
    rungs: Sequence[tuple[int, Reason]]
    """(free blocks, reason): the reason is that of the first entry for which the free blocks suffice."""

    def deferral(self, num_free: int) -> Deferral:
        """Why the request waits while `num_free` blocks, fewer than required, are free."""
        for enough, reason in self.rungs:
            if enough <= num_free:
                return Deferral(reason, self.required - num_free, True)
        raise AssertionError("the last one needs nothing")


class Reserves(Gate):
    """Whether the blocks of a request's first chunk and every reserve are free.

    The reason for a deferral is the first reserve whose removal alone would let the request in; if there is none, the
    blocks of its first chunk, or else the last reserve.
    """

    def __init__(self, reserves: list[Reserve], block_size: int) -> None:
        self._reserves = reserves
        self._block_size = block_size
        means = [reserve for reserve in reserves if isinstance(reserve, MeanDecodeReserve)]
        self.mean = means[0] if means else None
        """The reserve that adapts to what it observes."""
        self.shortage: Shortage | None = None
        """What the last checked request lacks; None: nothing."""

    @property
    def listeners(self) -> list[Listener]:
        """The reserves that adapt to what they observe."""
        return [] if self.mean is None else [self.mean]

    @property
    def num_changes(self) -> int:
        """Changes whenever a reserve may ask for other blocks than before."""
        return 0 if self.mean is None else self.mean.num_changes

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        size, shared = self._block_size, view.num_shared_blocks
        first = -(-(start + want) // size) - shared
        full = -(-request._state.num_tokens // size) - shared
        demand = Demand(first, full, view.num_owed_blocks)
        num_free, something_runs = view.num_free_blocks, view.num_running > 0
        required = self.required_blocks(request, demand, something_runs)
        if required <= num_free:
            self.shortage = None
            return want
        rungs = [(required - each.blocks(request, demand, something_runs), each.reason) for each in self._reserves]
        if self._reserves:
            rungs.append((first, self._reserves[-1].reason))
        self.shortage = Shortage(required, [*rungs, (0, Reason.BLOCKS)])
        return self.shortage.deferral(num_free)

    def required_blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        """Free blocks that admitting the request takes, with every reserve."""
        required = demand.first
        for reserve in self._reserves:
            required += reserve.blocks(request, demand, something_runs)
        return required


class Watermark:
    """A share of the pool, only while something runs (vLLM's `watermark`)."""

    reason = Reason.WATERMARK

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        return self._num_blocks if something_runs else 0


class FullSequence:
    """The remaining known sequence, and that of every partial prefill."""

    reason = Reason.FULL_SEQUENCE

    def __init__(self, counts_owed: bool = True) -> None:
        self._counts_owed = counts_owed

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        owed = demand.owed if self._counts_owed else 0
        return max(0, demand.full + owed - demand.first)


class DecodeReserve:
    """Blocks for its expected output, only while something runs: with nothing running, some request must start."""

    reason = Reason.DECODE_RESERVE

    def __init__(self, num_tokens: int, block_size: int) -> None:
        self.num_tokens = num_tokens
        self._block_size = block_size

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        if not something_runs:
            return 0
        state = request._state
        expected = min(self.num_tokens, state.max_tokens, state.token_limit - state.num_tokens)
        return -(-expected // self._block_size)


class MeanDecodeReserve(DecodeReserve, Listener):
    """The expected output is the mean of the latest outputs, rounded up: 0 until one request has finished by itself.

    Requests that the host finished (an abort, a deadline) say nothing about the length of outputs.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(0, block_size)
        self._lengths: deque[int] = deque(maxlen=MEAN_OVER)
        self._total = 0
        self.num_changes = 0

    def on_finished(self, request: Request, now: float) -> None:
        state = request._state
        if state.finish_reason not in _OWN_ENDS or state.max_tokens == 0:
            return
        if len(self._lengths) == MEAN_OVER:
            self._total -= self._lengths[0]
        self._lengths.append(state.num_output_tokens)
        self._total += state.num_output_tokens
        before, self.num_tokens = self.num_tokens, -(-self._total // len(self._lengths))
        self.num_changes += self.num_tokens != before


def make_reserves(config: SchedulerConfig) -> Reserves:
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
    return Reserves(reserves, config.block_size)
