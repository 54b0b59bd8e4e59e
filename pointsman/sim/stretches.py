"""Stretches: splits a workload into two parts, one to choose settings on, the other to judge the choice on.

A trace is split into an even number of stretches with the same number of requests. Every second stretch is for
training, all others are held out, so that both parts have quiet and busy times. A stretch starts with an empty service.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pointsman.sim.distributions import WorkloadError
from pointsman.sim.request import SimRequest
from pointsman.sim.trial import Drawn, Part
from pointsman.sim.workload import Arrival

MIN_REQUESTS = 10
"""Minimum number of requests of a stretch."""
_WANTED = 500
"""Minimum number of requests of a stretch if a part has several stretches. A part has at most `_MAX_STRETCHES`
stretches."""
_MAX_STRETCHES = 3
NUM_BLOCKS = 20
"""Maximum number of blocks of consecutive requests of a stretch, from which intervals are computed."""
_BLOCK = 10
"""Minimum number of requests of a block."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive requests as a workload; arrivals do not depend on the service."""

    arrivals: tuple[Arrival, ...]
    seconds: float
    """Mean seconds in which as many requests arrive as the stretch has."""

    @property
    def num_requests(self) -> int:
        return len(self.arrivals)

    @property
    def load(self) -> float:
        """Tokens of prompts and outputs that arrive in a second."""
        tokens = sum(request.num_prompt_tokens + request.num_generated_tokens for _, request in self.arrivals)
        return tokens / self.seconds

    def first_arrivals(self) -> Iterator[Arrival]:
        return iter(self.arrivals)

    def on_finished(self, request: SimRequest, now: float) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Stretches:
    """The source of a search whose part number i is stretch i. All requests count."""

    stretches: tuple[Stretch, ...]

    def draw(self, part: Part, load: float) -> Drawn:
        stretch = self.stretches[part.number]
        num_blocks = max(1, min(NUM_BLOCKS, stretch.num_requests // _BLOCK))
        return Drawn(stretch, num_blocks=num_blocks, seconds=stretch.seconds)


@dataclass(frozen=True, slots=True)
class Parts:
    """The training part and the held-out part of a workload."""

    train: tuple[Stretch, ...]
    """Stretches of the training part; the one with the median load is first."""
    held_out: tuple[Stretch, ...]

    @property
    def num_requests(self) -> int:
        """Number of requests of each part."""
        return sum(stretch.num_requests for stretch in self.train)


def split(arrivals: Sequence[Arrival], num_requests: int) -> Parts:
    """Split a workload into stretches.

    Args:
        arrivals: all arrivals of the workload, in order of time.
        num_requests: maximum number of requests of each part; only the first requests of each stretch are used.

    Raises:
        WorkloadError: there are too few requests, or too many of them arrive at one time.
    """
    if len(arrivals) < 2 * MIN_REQUESTS:
        raise WorkloadError(
            f"there are {len(arrivals)} requests; at least {2 * MIN_REQUESTS} are needed, half to choose settings "
            "on, half to judge the choice on: take a longer trace"
        )
    if num_requests < MIN_REQUESTS:
        raise WorkloadError(f"num_requests of each part is {num_requests}; it must be at least {MIN_REQUESTS}")
    available = len(arrivals) // 2
    count = min(_MAX_STRETCHES, max(1, min(available, num_requests) // _WANTED))
    size = min(available // count, num_requests // count)
    starts = [index * len(arrivals) // (2 * count) for index in range(2 * count)]
    cut = [_make_stretch(arrivals[start : start + size]) for start in starts]
    train = sorted(cut[::2], key=lambda stretch: stretch.load)
    train.insert(0, train.pop(count // 2))
    return Parts(tuple(train), tuple(cut[1::2]))


def _make_stretch(arrivals: Sequence[Arrival]) -> Stretch:
    span = arrivals[-1][0] - arrivals[0][0]
    if span <= 0:
        raise WorkloadError(
            f"{len(arrivals)} consecutive requests arrive at one time, so they have no arrival rate; use a trace with "
            "arrival times, or generate arrivals"
        )
    return Stretch(tuple(arrivals), span * len(arrivals) / (len(arrivals) - 1))
