"""Worker of the benchmarks of schedulers: a process with schedulers of one kind that executes timing commands.

The driver starts one worker per side, each in the environment of its scheduler, and alternates between them. A worker
reads JSON commands from its standard input and replies to each with one JSON line. Other output of libraries goes to
standard error.

A side only defines how its scheduler is called (`Session`). The timing is the same for all and is here: process CPU
time around calls of the scheduler, with the stand-in for the model's results built outside.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from time import process_time
from typing import Any

import numpy as np
import numpy.typing as npt

EOS = 2
STOP_TOKENS = (0, 1)
FIRST_TOKEN = 3  # tokens are drawn from here up, so that none ends a request
VOCABULARY = 32_000
BLOCK_SIZE = 16
WARM_UP_STEPS = 2 * BLOCK_SIZE


@dataclass(frozen=True)
class Settings:
    """Settings that both schedulers share."""

    num_blocks: int  # with one reserved: vLLM reserves block 0
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_steps_in_flight: int = 1  # more: each step is scheduled before the step before it is updated
    num_draft_tokens: int = 0  # drafts of every request in every step
    num_loras: int = 0  # number of adapters; every request has one
    num_stop_tokens: int = 0  # number of `STOP_TOKENS` of each request
    max_tokens: int = 0  # of each request that runs; 0: up to the model's length
    layout: str = ""  # of the KV, for vLLM: see `LAYOUTS` in `_vllm_worker.py`; "": one group of full attention
    knobs: dict[str, Any] = field(default_factory=dict)  # more fields of `SchedulerConfig`, for Pointsman alone


Backlog = Generator[None, None, dict[str, Any]]
"""The generator that serves a backlog."""


class Session(ABC):
    """A scheduler and its requests.

    A side sets the four calls in its constructor to what a host would call, so that nothing else is timed.
    """

    add: Callable[[Any], object]
    """Hand a request to the scheduler."""
    schedule: Callable[[], Any]
    """Decide a step; returns the output."""
    update: Callable[[Any, Any], object]
    """Hand an output and its result to the scheduler."""
    abort: Callable[[str], object]
    """Abort the request with this id."""
    propose: Callable[[Any, Any, Any], object]
    """Drafts for the rows of an updated output; only for sides that are measured with drafts."""

    backlog: Backlog
    """The backlog in progress."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rng = np.random.default_rng(0)

    @abstractmethod
    def make_request(self, request_id: str, prompt: npt.NDArray[np.int32], max_tokens: int) -> Any:
        """The host's request object for a user's request; only `max_tokens` ends it."""

    @abstractmethod
    def result(self, output: Any) -> Any:
        """A model's result for `output`: one random token, not EOS, for each row that samples."""

    @abstractmethod
    def decode_result(self, like: Any) -> Any:
        """A fresh result for a step in which the requests of the output `like` decode again."""

    def verified_result(self, running: int) -> Any:
        """A result for a step in which drafts of every request are verified."""
        raise NotImplementedError("this scheduler is not measured with drafts")

    @abstractmethod
    def num_scheduled(self, output: Any) -> tuple[int, int]:
        """(requests, tokens) of an output."""

    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""

    @abstractmethod
    def num_preemptions(self, request: Any) -> int:
        """Number of preemptions of a request."""

    # ------------------------------------------------------------------ timed calls

    def open_decode(self, running: int, waiting: int | None) -> dict[str, Any]:
        """Bring `running` requests to steady decode, with `waiting` more behind a head that blocks the queue.

        Prompts are of 17 to 32 tokens, so that in every step one request in 16 needs a block. The head needs the
        whole pool, so it waits while any request runs; `waiting=None`: no head and no request behind it.
        """
        for i in range(running):
            prompt = self.tokens(BLOCK_SIZE + 1 + i % BLOCK_SIZE)
            self.add(self.make_request(f"r{i}", prompt, self.settings.max_tokens or self.settings.max_model_len))
        self._step_until_all_run(running)
        self.waiting_ids: list[str] = []
        self.num_added = 0
        if waiting is not None:
            usable_tokens = (self.settings.num_blocks - 1) * BLOCK_SIZE
            self.add(self.make_request("head", self.tokens(usable_tokens - BLOCK_SIZE), BLOCK_SIZE))
            self.short_prompt = self.tokens(BLOCK_SIZE)
            for _ in range(waiting):
                self._add_waiting()
        for _ in range(WARM_UP_STEPS):
            output = self.schedule()
            self.update(output, self.result(output))
        self.last_output = output
        gc.collect()
        gc.freeze()  # as an engine does once it is up: old objects are not traversed repeatedly
        return {"counts": self.counts()}

    def open_shortage(self, waiting: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> dict[str, Any]:
        """Fill the pool from a queue of `waiting` requests, whose lengths are drawn from these ranges, both ends in."""
        self.waiting, self.ranges = waiting, (prompts, outputs)
        self.requests: list[Any] = []
        self._fill_queue()
        self.time_shortage(outputs[1])
        gc.collect()
        gc.freeze()  # as in `open_decode`
        return {"counts": self.counts()}

    def time_shortage(self, steps: int) -> dict[str, Any]:
        """CPU microseconds per step of `schedule` and `update` while requests come from the queue, are preempted and
        finish; with the mean number of preemptions a step, and of running requests."""
        before = sum(self.num_preemptions(request) for request in self.requests)
        seconds = 0.0
        for _ in range(steps):
            start = process_time()
            output = self.schedule()
            seconds += process_time() - start
            result = self.result(output)
            start = process_time()
            self.update(output, result)
            seconds += process_time() - start
        preempted = sum(self.num_preemptions(request) for request in self.requests) - before
        self._fill_queue()
        return {"us": seconds / steps * 1e6, "preempted": preempted / steps, "running": self.counts()[0]}

    def time_decode(self, steps: int) -> dict[str, Any]:
        """CPU microseconds per step of `schedule` and `update`, over `steps` steps of steady decode."""
        before = self.counts()
        results = [self.decode_result(self.last_output) for _ in range(steps)]
        schedule, update = self.schedule, self.update
        ahead = deque(schedule() for _ in range(self.settings.max_steps_in_flight - 1))
        start = process_time()
        if ahead:
            for result in results:
                output = schedule()
                ahead.append(output)
                update(ahead.popleft(), result)
        else:
            for result in results:
                output = schedule()
                update(output, result)
        seconds = process_time() - start
        for late in ahead:
            update(late, self.decode_result(late))
        self.last_output = output
        if self.counts() != before or self.num_scheduled(output) != (before[0], before[0]):
            raise RuntimeError(f"not steady: {before} running and waiting became {self.counts()}")
        return {"us": seconds / steps * 1e6}

    def time_speculation(self, steps: int) -> dict[str, Any]:
        """CPU microseconds per step of `schedule`, `update` and `propose`, where every request has drafts verified.

        Each row accepts from 0 to all of its drafts in each step, with equal frequency.
        """
        before, drafts = self.counts(), self.settings.num_draft_tokens
        self.propose(self.last_output, *self.drafts(before[0]))
        # A host has just written its results and drafts, so they are in the processor's cache: a few are reused.
        results = [self.verified_result(before[0]) for _ in range(8)]
        proposals = [self.drafts(before[0]) for _ in range(8)]
        schedule, update, propose = self.schedule, self.update, self.propose
        start = process_time()
        for step in range(steps):
            output = schedule()
            update(output, results[step % 8])
            propose(output, *proposals[step % 8])
        seconds = process_time() - start
        self.last_output = output
        if self.counts() != before or self.num_scheduled(output) != (before[0], before[0] * (1 + drafts)):
            raise RuntimeError(f"not steady: {before} running and waiting became {self.counts()}")
        return {"us": seconds / steps * 1e6}

    def drafts(self, running: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """A proposal for a step: tokens, and how many for each row."""
        each = self.settings.num_draft_tokens
        return self.tokens(running * each), np.full(running, each)

    def time_abort(self, count: int) -> dict[str, Any]:
        """CPU microseconds of aborting a waiting request: the mean of `count` anywhere in the queue."""
        pick = random.Random(self.num_added)
        seconds = 0.0
        for _ in range(count):
            self._add_waiting()
            chosen = pick.randrange(len(self.waiting_ids))
            self.waiting_ids[chosen], self.waiting_ids[-1] = self.waiting_ids[-1], self.waiting_ids[chosen]
            request_id = self.waiting_ids.pop()
            start = process_time()
            self.abort(request_id)
            seconds += process_time() - start
        output = self.schedule()
        self.update(output, self.result(output))
        self.last_output = output
        return {"us": seconds / count * 1e6}

    def serve_backlog(self, lengths: list[tuple[int, int]]) -> Backlog:
        """Serve a backlog that exists from the start. Yields after each step, so that sides can alternate; returns the
        CPU seconds of all calls of the scheduler."""
        gc.collect()
        gc.freeze()  # as in `open_decode`
        prompts = [self.tokens(length) for length, _ in lengths]
        start = process_time()
        requests = [self.make_request(f"r{i}", prompts[i], limit) for i, (_, limit) in enumerate(lengths)]
        make_seconds = process_time() - start
        gc.collect()
        start = process_time()
        for request in requests:
            self.add(request)
        add_seconds = process_time() - start
        schedule_seconds = update_seconds = 0.0
        steps = tokens = 0
        while sum(self.counts()):
            start = process_time()
            output = self.schedule()
            schedule_seconds += process_time() - start
            result = self.result(output)
            start = process_time()
            self.update(output, result)
            update_seconds += process_time() - start
            steps += 1
            tokens += self.num_scheduled(output)[1]
            yield
        gc.unfreeze()
        return {
            "seconds": add_seconds + schedule_seconds + update_seconds,
            "make_seconds": make_seconds,
            "add_seconds": add_seconds,
            "schedule_seconds": schedule_seconds,
            "update_seconds": update_seconds,
            "steps": steps,
            "scheduled_tokens": tokens,
            "preemptions": sum(self.num_preemptions(request) for request in requests),
        }

    # ------------------------------------------------------------------ helpers

    def tokens(self, count: int) -> npt.NDArray[np.int32]:
        """[count] random tokens, none of them EOS: int32, as from vLLM's sampler."""
        return self.rng.integers(FIRST_TOKEN, VOCABULARY, size=count).astype(np.int32)

    def _fill_queue(self) -> None:
        """Restore the initial number of waiting requests: sides that are timed more often need more of them."""
        (least, most), (shortest, longest) = self.ranges
        for _ in range(self.waiting - self.counts()[1]):
            prompt = self.tokens(int(self.rng.integers(least, most + 1)))
            output = int(self.rng.integers(shortest, longest + 1))
            request = self.make_request(f"r{len(self.requests)}", prompt, output)
            self.requests.append(request)
            self.add(request)

    def _add_waiting(self) -> None:
        request_id = f"w{self.num_added}"
        self.num_added += 1
        self.waiting_ids.append(request_id)
        self.add(self.make_request(request_id, self.short_prompt, BLOCK_SIZE))

    def _step_until_all_run(self, running: int) -> None:
        while True:
            output = self.schedule()
            self.update(output, self.result(output))
            if self.num_scheduled(output) == (running, running) and self.counts() == (running, 0):
                return


def serve(session_type: type[Session]) -> None:
    """Execute commands until standard input ends, on the same processor as the other side.

    The sides alternate, so they do not disturb each other, and a slow moment of that processor affects both.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sessions: dict[str, Session] = {}
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line), session_type, sessions)) + "\n")
        answers.flush()


def _advance(backlog: Backlog, steps: int) -> dict[str, Any]:
    """Serve a backlog for some steps. Returns its cost when it is finished; nothing before."""
    try:
        for _ in range(steps):
            next(backlog)
    except StopIteration as end:
        return dict(end.value)
    return {}


def _answer(command: dict[str, Any], session_type: type[Session], sessions: dict[str, Session]) -> dict[str, Any]:
    what, name = command["command"], command.get("name", "")
    if what == "open":
        session = sessions[name] = session_type(Settings(**command["settings"]))
        return session.open_decode(command["running"], command["waiting"])
    if what == "open_shortage":
        session = sessions[name] = session_type(Settings(**command["settings"]))
        return session.open_shortage(command["waiting"], command["prompts"], command["outputs"])
    if what == "shortage":
        return sessions[name].time_shortage(command["steps"])
    if what == "decode":
        return sessions[name].time_decode(command["steps"])
    if what == "speculation":
        return sessions[name].time_speculation(command["steps"])
    if what == "abort":
        return sessions[name].time_abort(command["count"])
    if what == "open_backlog":
        session = sessions[name] = session_type(Settings(**command["settings"]))
        session.backlog = session.serve_backlog(command["lengths"])
        return {}
    if what == "advance_backlog":
        return _advance(sessions[name].backlog, command["steps"])
    if what == "close":
        del sessions[name]
        gc.unfreeze()
        gc.collect()
        return {}
    raise ValueError(f"no command is called {what!r}")
