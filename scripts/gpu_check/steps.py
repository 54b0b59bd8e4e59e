"""Measures times of an engine's steps: in its loop, and of the graphs alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from gpu_check.roofline import synchronize
from pointsman.engine import Engine, RequestOutput, SamplingParams

MAX_OUTPUT = 512
"""Output tokens of a timed request. The first requests decode while the prompts of the last ones are computed."""


class GraphTimes:
    """Measures the device time of every replay of a CUDA graph, by events before and after it."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.num_taken = 0
        """Number of replays that `take` has returned."""

    @contextmanager
    def watching(self) -> Iterator[GraphTimes]:
        """Time replays until the end of the block. On a CPU there are none."""
        replay = torch.cuda.CUDAGraph.replay

        def timed(graph: torch.cuda.CUDAGraph) -> None:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            replay(graph)
            last.record()
            self._events.append((first, last))

        torch.cuda.CUDAGraph.replay = timed  # type: ignore[method-assign]
        try:
            yield self
        finally:
            torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]

    def take(self) -> float | None:
        """Seconds of the replays since the last call, which the device has finished; None: there were no replays."""
        events, self._events = self._events, []
        self.num_taken += len(events)
        return sum(first.elapsed_time(last) for first, last in events) / 1e3 if events else None


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Times of a step in which each of n requests decodes one token."""

    seconds: float
    """Time in the engine's loop."""
    graph_seconds: float | None
    """Time of its graphs alone; None: it ran without graphs."""
    num_context_tokens: float
    """Positions attended to, over all requests; mean of the steps."""


def drain(engine: Engine) -> dict[str, RequestOutput]:
    """Run all steps; returns the last output of each request."""
    done = {}
    while engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
    while not engine.scheduler.is_idle:
        engine.step()  # an empty step reports the last finished requests
    return done


def time_decodes(
    engine: Engine, prompts: Sequence[list[int]], num_steps: int, device: str, graphs: GraphTimes, num_warmups: int = 6
) -> DecodeTime:
    """Time decode steps of one request for each prompt, greedy, and abort them."""
    names = [str(number) for number in range(len(prompts))]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_OUTPUT, ignore_eos=True)
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, params)
    num_tokens = dict.fromkeys(names, 0)
    while min(num_tokens.values()) < num_warmups:
        for output in engine.step():
            num_tokens[output.request_id] = len(output.token_ids)
            if output.finished:
                raise RuntimeError(
                    f"request {output.request_id} ended before other requests began; give the engine more blocks"
                )
    synchronize(device)
    graphs.take()
    context = int(engine.scheduler.running_num_tokens.sum())
    begun = perf_counter()
    for _ in range(num_steps):
        engine.step()
    synchronize(device)
    seconds = perf_counter() - begun
    in_graphs = graphs.take()
    for name in names:
        engine.abort(name)
    drain(engine)
    return DecodeTime(
        seconds=seconds / num_steps,
        graph_seconds=None if in_graphs is None else in_graphs / num_steps,
        num_context_tokens=context + len(prompts) * (num_steps - 1) / 2,
    )


def time_prompt(engine: Engine, prompt: list[int], device: str) -> float:
    """Seconds from adding a request to its only token."""
    synchronize(device)
    begun = perf_counter()
    engine.add_request("prompt", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    synchronize(device)
    seconds = perf_counter() - begun
    drain(engine)
    return seconds
