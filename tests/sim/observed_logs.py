"""Observed recordings as if of a vLLM, made by the core under a test clock, so that the step times are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pointsman.core import Request, Scheduler, SchedulerConfig, StepResult
from pointsman.core.recording import FORMAT, FORMAT_VERSION, NUM_ADAPTERS, OBSERVED_STEPS
from pointsman.sim.speculation import Speculation
from pointsman.sim.step_time import LinearStepTime, StepLoad

STEP_TIME = LinearStepTime(per_step=8e-3, per_row=2e-5, per_token=6e-5, per_context_token=3e-8)
BLOCK_SIZE, END = 16, 2
WAY = 0.002
"""Seconds from a request's arrival at the server until the engine gets it."""


def observed_lines(
    num_requests: int = 40,
    *,
    num_blocks: int = 200,
    rate: float = 4.0,
    lacking: tuple[str, ...] = (),
    drafts: Speculation | None = None,
    num_adapters: int = 0,
    adapter_share: float = 0.0,
) -> list[dict[str, Any]]:
    """The lines of a recording: half of the prompts begin with the same four blocks.

    Args:
        drafts: of the engine; None: it has none.
        num_adapters: the requests have these adapters in turn, and every fourth request has none; 0: none has one.
        adapter_share: additional time of a step with an adapter, as a share.
    """
    config = SchedulerConfig.preset(
        "vllm",
        num_blocks=num_blocks,
        max_model_len=2048,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        num_draft_tokens=0 if drafts is None else len(drafts.acceptance),
        max_loras=num_adapters,
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
    verified: dict[str, list[list[int]]] = {}
    of_steps = (*OBSERVED_STEPS, NUM_ADAPTERS) if num_adapters else OBSERVED_STEPS
    columns: dict[str, list[int]] = {name: [] for name in of_steps}
    num_known, end_of_shared = 0, -1
    while waiting or requests:
        if not requests:
            now = max(now, arrivals[waiting[0]])
        while waiting and arrivals[waiting[0]] <= now:
            number = waiting.pop(0)
            prompt_len, _ = lengths[number]
            begin = list(range(64)) if number % 2 else []
            text = [1000 * number + 100 + at for at in range(prompt_len - len(begin))]
            adapter = number % num_adapters if num_adapters and number % 4 else None
            made = Request(
                f"r{number}",
                begin + text,
                arrival_time=now,
                max_tokens=500,
                eos_token_ids=(END,),
                adapter=None if adapter is None else (f"adapter {adapter}", 0),
            )
            scheduler.add(made, now)
            requests[made.request_id], token_steps[made.request_id], verified[made.request_id] = made, [], []
            shared = 4 if number > 1 and begin else 0
            num_new = prompt_len // BLOCK_SIZE - shared
            fields = {"request_id": made.request_id, "arrival_time": arrivals[number] - WAY, "max_tokens": 500}
            fields |= {"priority": 0, "num_prompt_tokens": prompt_len}
            fields["blocks"] = [end_of_shared if shared else None, num_known, num_new]
            if begin and not shared:
                end_of_shared = num_known + 3
            num_known += num_new
            if num_adapters:
                fields["adapter"] = adapter
            lines.append({"call": "add", "now": now, "request": fields, "park": None})
        output = scheduler.schedule(now)
        for request, cached in zip(output.admitted, output.num_cached_tokens.tolist(), strict=True):
            scheduled.setdefault(request.request_id, (now, cached))
        rows = list(zip(output.num_computed_tokens.tolist(), output.num_scheduled_tokens.tolist(), strict=True))
        load = StepLoad.of_rows(rows, int(output.samples.sum()) + len(output.draft_token_ids))
        step, began = len(columns["ended_us"]), now
        adapters = {each.adapter for each in output.requests} - {None}
        now = round(now + STEP_TIME.of_step(load) * (1 + adapter_share * bool(adapters)), 6)
        tokens: list[int] = []
        counts = [0] * output.num_rows
        known = (output.num_computed_tokens + output.num_scheduled_tokens - output.num_draft_tokens).tolist()
        for place, each in enumerate(output.requests):
            if not output.samples[place]:
                continue
            name, num_drafts = each.request_id, int(output.num_draft_tokens[place])
            number = int(name[1:])
            passed = 0
            if drafts is not None and place < output.num_continued:
                passed = _drawn(drafts.num_accepted, drafts, number, known[place], num_drafts)
                if token_steps[name] and token_steps[name][-1] == step - 1:
                    verified[name].append([num_drafts, passed, 1])
            token_steps[name].append(step)
            left = lengths[number][1] - each.num_output_tokens
            counts[place] = 1 + passed
            tokens += ([7] * (left - 1) + [END] * (2 + passed))[: 1 + passed]
        update = scheduler.update(output, StepResult(tokens, counts), now)
        if drafts is not None:
            numbers = [int(each.request_id[1:]) for each in output.requests]
            proposed = [
                _drawn(drafts.num_proposed, drafts, number, tokens_before + new, config.num_draft_tokens)
                for number, tokens_before, new in zip(numbers, known, update.counts.tolist(), strict=True)
            ]
            scheduler.propose(output, [7] * sum(proposed), proposed, now)
        for each in update.finished:
            name = each.request_id
            del requests[name]
            result = {"id": name, "reason": "stop", "scheduled": scheduled[name][0]}
            result |= {"num_cached_tokens": scheduled[name][1], "num_output_tokens": each.num_output_tokens}
            result |= {"num_preemptions": each.num_preemptions, "steps": runs_of(token_steps[name])}
            if drafts is not None:
                result["drafts"] = verified[name]
            lines.append({"call": "result", "now": now, **result})
        stats = scheduler.stats()
        values = [round(began * 1e6), round(now * 1e6), *load, stats.num_waiting, stats.num_free_blocks]
        for column, value in zip(columns.values(), [*values, len(adapters)] if num_adapters else values, strict=True):
            column.append(value)
    half = len(columns["ended_us"]) // 2
    for first, end in ((0, half), (half, None)):
        cut = {name: column[first:end] for name, column in columns.items()}
        lines.append({"call": "steps", "now": now, "step": first, **cut})
    return lines


def _drawn(draw: Any, drafts: Speculation, number: int, num_known: int, most: int) -> int:
    """A number of drafts of one request."""
    limit = most if draw == drafts.num_proposed else np.array([most])
    return int(draw(np.array([drafts.request_key(number)], dtype=np.uint64), np.array([num_known]), limit)[0])


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
