"""Observed recordings as if of a vLLM, made by the core under a test clock, so that the step times are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pointsman.core import Request, Scheduler, SchedulerConfig, StepResult
from pointsman.core.recording import FORMAT, FORMAT_VERSION, OBSERVED_STEPS
from pointsman.sim.step_time import LinearStepTime, StepLoad

STEP_TIME = LinearStepTime(per_step=8e-3, per_row=2e-5, per_token=6e-5, per_context_token=3e-8)
BLOCK_SIZE, END = 16, 2
WAY = 0.002
"""Seconds from a request's arrival at the server until the engine gets it."""


def observed_lines(
    num_requests: int = 40, *, num_blocks: int = 200, rate: float = 4.0, lacking: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """The lines of a recording: half of the prompts begin with the same four blocks."""
    config = SchedulerConfig.preset(
        "vllm", num_blocks=num_blocks, max_model_len=2048, block_size=BLOCK_SIZE, max_num_seqs=8
    )
    observed = {"scheduler": "vLLM 0.32.0", "model": "demo", "asynchronous": False, "hash_block_size": BLOCK_SIZE}
    header = {"format": FORMAT, "format_version": FORMAT_VERSION, "library_version": "0", "config": config.to_dict()}
    lines: list[dict[str, Any]] = [{**header, "observed": {**observed, "lacking": list(lacking)}}]
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(1 / rate, num_requests)).tolist()
    lengths = [(70 + int(rng.integers(300)), 3 + int(rng.integers(60))) for _ in arrivals]
    scheduler, now = Scheduler(config), 0.0
    waiting = list(range(num_requests))
    requests: dict[str, Request] = {}
    scheduled: dict[str, tuple[float, int]] = {}
    token_steps: dict[str, list[int]] = {}
    columns: dict[str, list[int]] = {name: [] for name in OBSERVED_STEPS}
    num_known, end_of_shared = 0, -1
    while waiting or requests:
        if not requests:
            now = max(now, arrivals[waiting[0]])
        while waiting and arrivals[waiting[0]] <= now:
            number = waiting.pop(0)
            prompt_len, _ = lengths[number]
            begin = list(range(64)) if number % 2 else []
            text = [1000 * number + 100 + at for at in range(prompt_len - len(begin))]
            made = Request(f"r{number}", begin + text, arrival_time=now, max_tokens=500, eos_token_ids=(END,))
            scheduler.add(made, now)
            requests[made.request_id], token_steps[made.request_id] = made, []
            shared = 4 if number > 1 and begin else 0
            num_new = prompt_len // BLOCK_SIZE - shared
            fields = {"request_id": made.request_id, "arrival_time": arrivals[number] - WAY, "max_tokens": 500}
            fields |= {"priority": 0, "num_prompt_tokens": prompt_len}
            fields["blocks"] = [end_of_shared if shared else None, num_known, num_new]
            if begin and not shared:
                end_of_shared = num_known + 3
            num_known += num_new
            lines.append({"call": "add", "now": now, "request": fields, "park": None})
        output = scheduler.schedule(now)
        for request, cached in zip(output.admitted, output.num_cached_tokens.tolist(), strict=True):
            scheduled.setdefault(request.request_id, (now, cached))
        rows = list(zip(output.num_computed_tokens.tolist(), output.num_scheduled_tokens.tolist(), strict=True))
        load = StepLoad.of_rows(rows, int(output.samples.sum()))
        step, began = len(columns["ended_us"]), now
        now = round(now + STEP_TIME.of_step(load), 6)
        sampling = [each for each, samples in zip(output.requests, output.samples, strict=True) if samples]
        tokens = []
        for each in sampling:
            token_steps[each.request_id].append(step)
            _, output_len = lengths[int(each.request_id[1:])]
            tokens.append(END if each.num_output_tokens + 1 >= output_len else 7)
        update = scheduler.update(output, StepResult(tokens), now)
        for each in update.finished:
            name = each.request_id
            del requests[name]
            result = {"id": name, "reason": "stop", "scheduled": scheduled[name][0]}
            result |= {"num_cached_tokens": scheduled[name][1], "num_output_tokens": each.num_output_tokens}
            result |= {"num_preemptions": each.num_preemptions, "steps": runs_of(token_steps[name])}
            lines.append({"call": "result", "now": now, **result})
        stats = scheduler.stats()
        values = (round(began * 1e6), round(now * 1e6), *load, stats.num_waiting, stats.num_free_blocks)
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    half = len(columns["ended_us"]) // 2
    for first, end in ((0, half), (half, None)):
        cut = {name: column[first:end] for name, column in columns.items()}
        lines.append({"call": "steps", "now": now, "step": first, **cut})
    return lines


def runs_of(steps: list[int]) -> list[list[int]]:
    """[[0, 2], [4, 4]] of 0, 1, 2, 4."""
    found: list[list[int]] = []
    for step in steps:
        if found and found[-1][1] == step - 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return found


def write_observed(path: Path, lines: list[dict[str, Any]] | None = None) -> Path:
    """A recording as a file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines or observed_lines()), encoding="utf-8")
    return path
