"""A simulation without `pointsman.sim`'s replicas: schedulers that are called step by step, for comparisons."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

import numpy as np

from pointsman.core import KVConnector, KVGroup, Request, Scheduler, SchedulerConfig, SchedulerOutput, StepResult
from pointsman.sim.request import EOS_TOKEN, VOCAB_SIZE, SimRequest, filler_token, prompt_tokens
from pointsman.sim.step_time import StepLoad, StepTime

Arrivals = list[tuple[float, SimRequest]]


@dataclass
class Times:
    """The times of one request."""

    scheduled: float | None = None
    tokens: list[float] = field(default_factory=list)
    num_preemptions: int = 0


class Engine:
    """A scheduler, and the steps that it has scheduled."""

    def __init__(self, config: SchedulerConfig, times: dict[str, Times], connector: KVConnector | None = None) -> None:
        self.scheduler = Scheduler(config, connector=connector)
        self.config = config
        self.steps: deque[SchedulerOutput] = deque()
        self._times = times
        self._lengths: dict[str, tuple[int, int]] = {}  # id -> tokens at the end, filler token

    def add(self, request: SimRequest, now: float, *, max_tokens: int | None = None) -> None:
        """Add a request; `max_tokens` None: the request's own limit."""
        prompt = prompt_tokens(request, request.index, VOCAB_SIZE)
        most = self.config.max_model_len - len(prompt) if request.max_tokens is None else request.max_tokens
        made = Request(
            request.request_id,
            prompt,
            arrival_time=now,
            max_tokens=max_tokens or most,
            priority=request.priority,
            eos_token_ids=(EOS_TOKEN,),
            tenant=request.tenant,
        )
        self._lengths[request.request_id] = len(prompt) + request.num_output_tokens, filler_token(request.index)
        self.scheduler.add(made, now)

    def schedule(self, now: float) -> SchedulerOutput:
        """Schedule a step, which `finish` completes in order."""
        output = self.scheduler.schedule(now)
        for request in output.admitted:
            times = self._times[request.request_id]
            times.scheduled = now if times.scheduled is None else times.scheduled
        self.steps.append(output)
        return output

    def finish(self, now: float) -> tuple[Request, ...]:
        """Complete the oldest step. Returns the requests that finished in it."""
        output = self.steps.popleft()
        tokens, names = [], []
        for index, request in enumerate(output.requests):
            if output.samples[index]:
                known = int(output.num_computed_tokens[index] + output.num_scheduled_tokens[index]) + 1
                last, filler = self._lengths[request.request_id]
                tokens.append(EOS_TOKEN if known >= last else filler)
                names.append((index, request.request_id))
        update = self.scheduler.update(output, StepResult(tokens), now)
        for index, name in names:
            if update.counts[index]:
                self._times[name].tokens.append(now)
        for request in update.finished:
            self._times[request.request_id].num_preemptions = request.num_preemptions
        return tuple(update.finished)


def load_of(output: SchedulerOutput) -> StepLoad:
    """The load of a step, row by row."""
    rows = list(zip(output.num_computed_tokens.tolist(), output.num_scheduled_tokens.tolist(), strict=True))
    return StepLoad.of_rows(rows, int(np.count_nonzero(output.samples)))


def run_in_lockstep(
    arrivals: Arrivals, rank_of: list[int], config: SchedulerConfig, step_time: StepTime, num_ranks: int
) -> dict[str, Times]:
    """Run the requests on ranks that step together. `rank_of`: the rank of each request."""
    times = {request.request_id: Times() for _, request in arrivals}
    ranks = [Engine(config, times) for _ in range(num_ranks)]
    waiting = deque(zip(arrivals, rank_of, strict=True))
    now = 0.0

    def add_next() -> None:
        (time, request), rank = waiting.popleft()
        ranks[rank].add(request, time)

    while True:
        if not any(rank.scheduler.has_unfinished_requests() or rank.steps for rank in ranks):
            if not waiting:
                return times
            now = max(now, waiting[0][0][0])
            add_next()  # a step begins at once, without later requests of the same time
        for rank in ranks:
            while len(rank.steps) < config.max_steps_in_flight and rank.scheduler.can_advance():
                rank.schedule(now)
        dummy = StepLoad.of_rows([(0, 1)], 0)
        loads = [load_of(rank.steps[0]) if rank.steps and rank.steps[0].num_rows else dummy for rank in ranks]
        total = sum(load.num_tokens for load in loads)
        beside = getattr(step_time, "beside", lambda number: step_time)
        end = now + max(beside(total - load.num_tokens).of_step(load) for load in loads)
        while waiting and waiting[0][0][0] <= end:
            add_next()
        for rank in ranks:
            if rank.steps:
                rank.finish(end)
        now = end


class Holding:
    """A connector of a prefill engine: it holds the blocks of every prompt."""

    saves_evicted = False

    def __init__(self, held: dict[str, tuple[int, np.ndarray, int]], index: int) -> None:
        self.held, self.index = held, index  # id -> engine, [groups, blocks] whether it has the block, send

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def num_tokens_in_groups(self, request: Request, num_local: int, has: np.ndarray) -> tuple[int | None, bool]:
        return 0, False

    def request_ended(self, request: Request, block_ids: np.ndarray, num_tokens: int, transfer_id: int) -> bool:
        self.held[request.request_id] = self.index, np.atleast_2d(block_ids) >= 0, transfer_id
        return True

    def reset(self) -> None: ...


class Loading:
    """A connector of a decode engine: it can load what a prefill engine holds, and all that the next token needs."""

    saves_evicted = False

    def __init__(self, held: dict[str, tuple[int, np.ndarray, int]], config: SchedulerConfig) -> None:
        self.held, self.config = held, config

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        return (len(request.prompt_token_ids) - num_local_tokens if request.request_id in self.held else 0), True

    def num_tokens_in_groups(self, request: Request, num_local: int, has: np.ndarray) -> tuple[int | None, bool]:
        if request.request_id not in self.held:
            return 0, False
        there, size = self.held[request.request_id][1], self.config.block_size
        for count in range(min(has.shape[1], len(request.prompt_token_ids) // size), num_local // size, -1):
            firsts = [0 if group.is_full else max(0, count * size - group.size + 1) // size for group in self._groups]
            if all((has | there[:, : has.shape[1]])[group, first:count].all() for group, first in enumerate(firsts)):
                return count * size - num_local, True
        return 0, True

    @property
    def _groups(self) -> tuple[KVGroup, ...]:
        return self.config.kv_groups

    def request_ended(self, *_: object) -> bool:
        return False

    def reset(self) -> None: ...


def run_disaggregated(
    arrivals: Arrivals,
    config: SchedulerConfig,
    step_time: StepTime,
    numbers: tuple[int, int],
    block_seconds: float,
    latency: float,
) -> dict[str, Times]:
    """Run the requests on prefill and decode engines, each in turn. `numbers`: of prefill and decode engines."""
    times, dropped = ({request.request_id: Times() for _, request in arrivals} for _ in range(2))
    held: dict[str, tuple[int, np.ndarray, int]] = {}
    prefill = [Engine(config, dropped, Holding(held, index)) for index in range(numbers[0])]
    decode = [Engine(config, times, Loading(held, config)) for _ in range(numbers[1])]
    engines, ends = [*prefill, *decode], [inf] * sum(numbers)
    stuck = [False] * len(engines)
    free_at = [0.0] * len(engines)
    transfers: list[tuple[float, int, int, int, int, int]] = []  # end, number, sender, send, receiver or -1, load
    waiting, requests = deque(arrivals), {request.request_id: request for _, request in arrivals}
    num_sent = [0, 0]

    def send(role: int, request: SimRequest, now: float) -> None:
        at = num_sent[role] % numbers[role] + (numbers[0] if role else 0)
        num_sent[role] += 1
        if role:
            times[request.request_id].scheduled = dropped[request.request_id].scheduled
        engines[at].add(request, now, max_tokens=None if role else 1)
        stuck[at] = False

    def begin_step(at: int, now: float) -> None:
        engine = engines[at]
        if stuck[at] or not engine.scheduler.has_runnable_requests():
            return
        output = engine.schedule(now)
        if at >= numbers[0]:
            for request in output.admitted:
                if request.request_id in held:
                    sender, _, number = held.pop(request.request_id)
                    heappush(transfers, (now, len(transfers_begun), sender, number, -1, 0))
                    transfers_begun.append(request.request_id)
            for load in output.loads:
                sender, _, number = held.pop(load.request_id)
                begin = max(now, free_at[sender], free_at[at])
                free_at[sender] = free_at[at] = begin + len(load.block_ids) * block_seconds
                end = free_at[at] + latency
                heappush(transfers, (end, len(transfers_begun), sender, number, at, load.transfer_id))
                transfers_begun.append(load.request_id)
        if output.num_rows or output.loads:
            ends[at] = now + (step_time.of_step(load_of(output)) if output.num_rows else 0.0)
        else:
            engine.finish(now)
            stuck[at] = True

    transfers_begun: list[str] = []
    while waiting or transfers or min(ends) < inf:
        arrival = waiting[0][0] if waiting else inf
        transferred = transfers[0][0] if transfers else inf
        now = min(arrival, transferred, min(ends))
        if arrival <= now:
            send(0, waiting.popleft()[1], now)
        elif transferred <= now:
            _, _, sender, number, receiver, load = heappop(transfers)
            if receiver >= 0:
                engines[receiver].scheduler.transfer_done(load, now)
                stuck[receiver] = False
            engines[sender].scheduler.transfer_done(number, now)
            stuck[sender] = False
        else:
            at = ends.index(now)
            ends[at] = inf
            stuck[at] = False
            for request in engines[at].finish(now):
                if at < numbers[0]:
                    send(1, requests[request.request_id], now)
        for at, end in enumerate(ends):
            if end == inf:
                begin_step(at, now)
    return times
