"""Lockstep: data parallel engines (ranks) that step together, as vLLM runs a mixture of experts.

The experts of a layer are divided among all ranks, so every step of a rank needs the other ranks. All ranks begin a
step at the same time, and the step ends when the slowest rank has finished. A rank without anything to compute takes
part with a dummy step of one token. Each rank has a scheduler of its own, which decides from its own requests alone.

    round      one step of every rank. The requests that arrive during a round wait for its end, on idle ranks too.
    decodes    while each rank decodes or is idle, many rounds are one event, as in `replica.py`.

All ranks are idle until a request arrives on one of them. vLLM's ranks go on with dummy steps for a moment after the
last request (`dp_sync_interval`), so that a request that arrives then waits for the end of a dummy step; that wait is
left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from pointsman.sim.endpoint import Router, Several
from pointsman.sim.fleet import Routing
from pointsman.sim.replica import MAX_STEPS_AT_ONCE, MIN_SECONDS, MORE_STEPS, Decodes, FloatArray, Replica, Scheduled
from pointsman.sim.request import SimRequest
from pointsman.sim.step_time import RankStepTime, StepLoad, StepTime

DUMMY = StepLoad(num_tokens=1, num_rows=1, num_context_tokens=1, num_attended=1, num_samples=0)
"""The load of a dummy step."""


class Lockstep(Several):
    """Ranks that step together.

    Args:
        ranks: the engines, with equal configurations.
        step_time: step times of one rank. For a `RankStepTime` a rank's step also depends on the tokens of the other
            ranks.
        routing: the rule that chooses a rank for each request.
    """

    def __init__(self, ranks: Sequence[Replica], step_time: StepTime, routing: Routing, *, is_stepping: bool) -> None:
        super().__init__(ranks)
        self.now = 0.0
        self._ranks = ranks
        self._router = Router(ranks, routing)
        self._beside = step_time.beside if isinstance(step_time, RankStepTime) else lambda num_tokens: step_time
        self._max_in_flight = self.config.max_steps_in_flight
        self._is_stepping = is_stepping or self._max_in_flight > 1
        self._steps: list[deque[Scheduled]] = [deque() for _ in ranks]  # of each rank, in flight
        self._end: float | None = None  # of the planned event
        self._times: FloatArray | None = None  # of the planned decodes: start, and end of each round
        self._decode_seconds = MIN_SECONDS  # seconds of the last planned decode
        for rank in ranks:
            rank.interrupt = self._cut_decodes

    @property
    def is_between_events(self) -> bool:
        return self._end is None

    def add(self, number: int, request: SimRequest, now: float) -> None:
        if self._end is None:
            self.now = max(self.now, now)
        self._router.add(number, request, now)

    def plan_event(self, until: float = math.inf) -> float | None:
        if self._end is None:
            self._end = self._plan_next_event(until)
        return self._end

    def commit_event(self) -> list[int]:
        assert self._end is not None
        self.now, self._end, self._times = self._end, None, None
        finished: list[int] = []
        for rank in self._ranks:
            if not rank.is_between_events:
                finished += rank.commit_event()
            rank.now = self.now
        for rank in self._ranks:
            self._router.observe(rank)
        return finished

    def _plan_next_event(self, until: float) -> float | None:
        ranks = self._ranks
        if not (any(rank.has_work for rank in ranks) or any(self._steps)):
            return None
        self.now = max(self.now, *(rank.now for rank in ranks))
        for rank in ranks:
            rank.now = self.now
        if not self._is_stepping and (end := self._plan_decodes(until)) is not None:
            return end
        return self._plan_round()

    # ------------------------------------------------------------------ one round

    def _plan_round(self) -> float | None:
        """Schedule the next step of each rank, and plan the end of the round. None: no rank can step, because all
        requests wait for transfers."""
        for rank, steps in zip(self._ranks, self._steps, strict=True):
            while len(steps) < self._max_in_flight and rank.has_next_step(is_ahead=bool(steps)):
                steps.append(rank.schedule(self.now))
        current = [steps.popleft() if steps else None for steps in self._steps]
        if not any(current):
            return None
        if all(step is None or step.is_empty for step in current):
            for rank, step in zip(self._ranks, current, strict=True):
                if step is not None:
                    rank.wait_for_transfers(step)
            return None
        end = self.now + self._seconds_of(current)
        for rank, step in zip(self._ranks, current, strict=True):
            if step is not None:
                rank.plan_step_at(self.now, end, step.output)
        return end

    def _seconds_of(self, steps: Sequence[Scheduled | None]) -> float:
        """Duration in seconds of a round with the step of each rank; None: the rank has none."""
        if all(step is None or step.load is None for step in steps):
            return max(0.0 if step is None else step.copying for step in steps)
        loads = [DUMMY if step is None or step.load is None else step.load for step in steps]
        total, longest = sum(load.num_tokens for load in loads), 0.0
        for rank, step, load in zip(self._ranks, steps, loads, strict=True):
            step_time = self._beside(total - load.num_tokens)
            if step is None or step.load is None:
                seconds = step_time.of_step(DUMMY) + (0.0 if step is None else step.copying)
            else:
                seconds = rank.seconds_of(step, step_time)
            longest = max(longest, seconds)
        return longest

    # ------------------------------------------------------------------ decodes

    def _plan_decodes(self, until: float) -> float | None:
        """Plan the longest run of rounds in which each rank decodes or is idle; None: there is none."""
        limit = int(min(MAX_STEPS_AT_ONCE, 2 + MORE_STEPS * max(until - self.now, 0.0) / self._decode_seconds))
        decodes: list[Decodes | None] = []
        for rank in self._ranks:
            found = None
            if rank.has_work:
                found = rank.guaranteed_decodes(limit)
                if found is None:
                    return None
                limit = found.num_steps
            decodes.append(found)
        times = np.empty(limit + 1)
        times[0] = self.now
        seconds = self._seconds_of_decodes(decodes, limit)
        seconds[0] += self.now
        np.add.accumulate(seconds, 0, None, times[1:])
        for rank, found in zip(self._ranks, decodes, strict=True):
            if found is not None:
                rank.plan_decodes_at(times, found)
        self._times = times
        end: float = times.item(limit)
        self._decode_seconds = max(end - times.item(limit - 1), MIN_SECONDS)
        return end

    def _seconds_of_decodes(self, decodes: Sequence[Decodes | None], num_steps: int) -> FloatArray:
        """Seconds of each round, [num_steps]."""
        total = sum(DUMMY.num_tokens if found is None else len(found.rows) for found in decodes)
        longest = np.zeros(num_steps)
        for rank, found in zip(self._ranks, decodes, strict=True):
            if found is None:
                seconds: FloatArray | float = self._beside(total - DUMMY.num_tokens).of_step(DUMMY)
            else:
                seconds = rank.seconds_of_decodes(found, num_steps, self._beside(total - len(found.rows)))
            np.maximum(longest, seconds, out=longest)
        return longest

    def _cut_decodes(self, now: float) -> None:
        """End the planned decodes with the round that has begun at `now`."""
        if self._times is None or self._end is None or self._end <= now:
            return
        for rank in self._ranks:
            rank.cut_decodes(now)
        self._times = self._times[: int(self._times[1:].searchsorted(now)) + 2]
        self._end = self._times.item(len(self._times) - 1)
