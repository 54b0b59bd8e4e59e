"""Steps an engine until its requests have finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pointsman.engine import Engine, RequestOutput, SamplingParams


@dataclass
class Seen:
    """Statistics of a run's steps."""

    mixed: int = 0
    """Number of steps with both decodes and chunks of prompts."""
    chunks: int = 0
    """Number of rows that computed a part of a prompt without its end."""
    max_rows: int = 0
    """Maximum number of rows of a step."""
    max_in_flight: int = 0
    """Maximum number of steps in flight after the reported step."""

    def note(self, engine: Engine) -> None:
        output = engine.last_output
        assert output is not None
        counts = output.num_scheduled_tokens
        self.mixed += bool((counts > 1).any() and (counts == 1).any())
        self.chunks += int((np.asarray(output.samples) == 0).sum())
        self.max_rows = max(self.max_rows, output.num_rows)
        self.max_in_flight = max(self.max_in_flight, engine.scheduler.num_steps_in_flight)


def drain(engine: Engine, seen: Seen | None = None) -> dict[str, RequestOutput]:
    """Step until all requests have finished; return request id -> last output of the request."""
    done = {}
    while engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.scheduler.check_invariants()
        if seen is not None:
            seen.note(engine)
    return done


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | list[SamplingParams],
    seen: Seen | None = None,
) -> list[RequestOutput]:
    """Run a request for every prompt at the same time; return their last outputs in the order of the prompts."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params[index] if isinstance(params, list) else params)
    done = drain(engine, seen)
    return [done[str(index)] for index in range(len(prompts))]


def free_blocks(engine: Engine) -> int:
    return engine.scheduler.stats().num_free_blocks
