"""An engine of your own around the scheduler. The model is a toy; the loop is that of a real engine.

    python examples/own_engine.py

In each step `schedule` decides what every request computes, the model computes it, and `update` appends the tokens.
"""

from __future__ import annotations

from time import monotonic

import numpy as np

from pointsman import Request, Scheduler, SchedulerConfig, SchedulerOutput, StepResult

config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
scheduler = Scheduler(config)
kv_cache = np.zeros((config.num_blocks, config.block_size), dtype=np.int64)  # of one token: the token itself


def run_model(output: SchedulerOutput) -> StepResult:
    """Compute a step, row after row. A real model writes a layer's KV of all rows before any row reads it."""
    inputs, sampled, start = scheduler.input_token_ids(output), [], 0
    for index, request in enumerate(output.requests):
        end = start + output.num_scheduled_tokens[index]
        first = output.num_computed_tokens[index]  # the tokens before this position are in the KV cache
        (table,) = scheduler.block_tables(request.request_id)
        positions = np.arange(first, first + end - start)
        kv_cache[table[positions // config.block_size], positions % config.block_size] = inputs[start:end]
        if output.samples[index]:  # the row has computed its newest token, so the model samples the next one
            context = kv_cache[table].ravel()[: first + end - start]
            sampled.append(int(context.sum()) % 100)
        start = end
    return StepResult(sampled)


def main() -> None:
    now = monotonic()
    for number in range(6):  # two wait for a sequence slot
        prompt = [*range(1, 9), number]  # the first 8 tokens are cached after the first request
        scheduler.add(Request(f"r{number}", prompt, max_tokens=5, eos_token_ids=(0,), arrival_time=now), now)
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule(monotonic())
        update = scheduler.update(output, run_model(output), monotonic())
        for request, token_ids in update.new_tokens():
            print(request.request_id, token_ids, end="  ")
        print()
        for request in update.finished:
            print(request.request_id, "finished:", request.output_token_ids.tolist(), request.finish_reason)
    print(scheduler.stats().prefix_hits, "prompt tokens were found in the prefix cache")


if __name__ == "__main__":
    main()
