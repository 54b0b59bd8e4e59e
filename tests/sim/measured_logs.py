"""Makes logs of measured requests. The simulator makes them, so that the true step times are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pointsman.sim.features import Features
from pointsman.sim.fit import simulate_log
from pointsman.sim.profile import EngineSettings
from pointsman.sim.speculation import Speculation
from pointsman.sim.step_time import LinearStepTime, StepLoad, StepTime
from pointsman.traces import MeasuredRequest, TraceRequest

SMALL = LinearStepTime(per_step=8e-3, per_row=1e-4, per_token=4e-5, per_context_token=6e-8)
SETTINGS = EngineSettings(max_num_seqs=24, max_num_batched_tokens=512)


class NoisyStepTime:
    """Step times with a random factor near 1: the noise of a real device."""

    def __init__(self, step_time: StepTime, noise: float, seed: int) -> None:
        self._step_time, self._noise = step_time, noise
        self._rng = np.random.default_rng(seed)

    def of_step(self, load: StepLoad) -> float:
        return self._step_time.of_step(load) * float(np.exp(self._noise * self._rng.standard_normal()))

    def of_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int) -> npt.NDArray[np.float64]:
        factors = np.exp(self._noise * self._rng.standard_normal(num_steps))
        return self._step_time.of_decodes(num_rows, num_context_tokens, num_steps) * factors


@lru_cache
def measured_log(
    num_requests: int = 60,
    rate: float = 8.0,
    step_time: StepTime = SMALL,
    settings: EngineSettings = SETTINGS,
    *,
    noise: float = 0.02,
    prompt: float = 300,
    output: float = 40,
    single: float = 0.1,
    seed: int = 1,
    speculation: Speculation | None = None,
) -> tuple[MeasuredRequest, ...]:
    """The log that an engine with these step times would have measured.

    Args:
        rate: requests per second; infinite: all at once.
        noise: standard deviation of the logarithm of a step's seconds.
        prompt: median of prompt tokens; `output` likewise.
        single: share of requests with one output token.
        speculation: drafts of the engine, if `settings` has drafts.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, num_requests))
    arrivals -= arrivals[0]
    prompts = np.maximum(1, rng.lognormal(np.log(prompt), 0.8, num_requests).astype(int))
    outputs = np.maximum(1, rng.lognormal(np.log(output), 0.7, num_requests).astype(int))
    outputs[rng.random(num_requests) < single] = 1
    sent = [
        MeasuredRequest(TraceRequest(arrival, prompt_len, output_len), f"r{index}", arrival, 0.0, 0.0)
        for index, (arrival, prompt_len, output_len) in enumerate(
            zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        )
    ]
    config = settings.config(int((prompts + outputs).max()), num_requests)
    features = Features(speculation=speculation)
    timings = simulate_log(sent, config, NoisyStepTime(step_time, noise, seed), features=features)
    return tuple(
        replace(each, first_token=first, last_token=last)
        for each, first, last in zip(sent, timings.first_token.tolist(), timings.last_token.tolist(), strict=True)
    )


def write_log(path: Path, measured: Sequence[MeasuredRequest], start: float = 1000.0) -> Path:
    """The log as JSON lines."""
    lines = [
        json.dumps(
            {
                "request_id": each.request_id,
                "input_toks": each.request.num_prompt_tokens,
                "output_toks": each.request.num_output_tokens,
                "arrival_time": each.queued,
                "queued_ts": start + each.queued,
                "first_token_ts": start + each.first_token,
                "last_token_ts": start + each.last_token,
            }
        )
        for each in measured
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
