"""Part g: checks tokens, invariants and KV with a small pool, cache hits, aborts and two steps in flight.

It runs the demo model in float32. Outputs must equal those of a large pool with one step in flight. The scheduler's
invariants must hold after every step. KV in the pool must equal that of a new engine that computes each sequence as one
prompt. On a GPU the host may wait only for the results of a step.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from gpu_check.models import STEPS_IN_FLIGHT
from gpu_check.part import Setting
from gpu_check.steps import drain
from pointsman.engine import Engine, RequestOutput, SamplingParams
from pointsman.engine.model.loader import load_model

BLOCK = 16
NUM_REQUESTS, NUM_TOKENS = 16, 64
PREFIX = 40
"""Tokens that all prompts share."""
TIGHT = 56
"""Number of blocks, for about seven requests of full length."""
AMPLE = 400
MAX_ERROR = 1e-3
"""Limit of KV errors, relative to the largest number of the layer; another order of float32 sums makes 1e-5."""


def run(setting: Setting) -> None:
    """Run the part."""
    loaded = load_model("demo", "float32", device=setting.device)
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, loaded.vocab_size, PREFIX).tolist()
    lengths = rng.integers(4, 60, NUM_REQUESTS).tolist()
    prompts = [prefix + rng.integers(3, loaded.vocab_size, length).tolist() for length in lengths]
    num_tokens = 24 if setting.tiny else NUM_TOKENS
    params = [
        SamplingParams(temperature=0.0 if number % 2 else 0.8, seed=number, max_tokens=num_tokens, ignore_eos=True)
        for number in range(NUM_REQUESTS)
    ]

    def engine(num_blocks: int, **knobs: Any) -> Engine:
        settings = {
            "block_size": BLOCK, "max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": 128, "max_model_len": 512,
            "max_steps_in_flight": STEPS_IN_FLIGHT, "full_sequence_must_fit": False,
        }  # fmt: skip
        return Engine(loaded, num_blocks=num_blocks, **{**settings, **knobs})

    reference = Run(setting, engine(AMPLE, max_steps_in_flight=1, enable_prefix_caching=False), "reference")
    want = reference.serve(prompts, params)
    _preempted(setting, engine, prompts, params, want)
    _cached(setting, engine, prompts, params, want)
    _aborted(setting, engine, prompts, params, want)
    _contents(setting, engine, prompts, params)
    _waits(setting, engine(AMPLE), prompts, params)


class Run:
    """An engine whose invariants are checked after every step."""

    def __init__(self, setting: Setting, engine: Engine, name: str) -> None:
        self.setting, self.engine, self.name = setting, engine, name
        self.num_steps = self.max_in_flight = 0

    def serve(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        """Add all requests at once; returns the last output of each."""
        self.add(prompts, params)
        done: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished_requests():
            done.update((output.request_id, output) for output in self.step() if output.finished)
        self.check_empty()
        return [done[str(number)] for number in range(len(prompts))]

    def add(self, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        """Add requests with their numbers as ids."""
        for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            self.engine.add_request(str(number), prompt, each)

    def step(self) -> list[RequestOutput]:
        """Run one step, and check the invariants."""
        outputs = self.engine.step()
        self.num_steps += 1
        self.max_in_flight = max(self.max_in_flight, self.engine.scheduler.num_steps_in_flight)
        try:
            self.engine.scheduler.check_invariants()
        except Exception as error:
            self.setting.findings.wrong(f"{self.name}, step {self.num_steps}: {error}")
            raise
        return outputs

    def check_empty(self) -> None:
        """Check that no block is in use after all requests have finished."""
        while not self.engine.scheduler.is_idle:
            self.step()  # an empty step reports the last finished requests
        stats = self.engine.scheduler.stats()
        self.setting.findings.check(
            stats.num_free_blocks == self.engine.kv_pool.num_blocks,
            f"{self.name}: {stats.num_free_blocks} of {self.engine.kv_pool.num_blocks} blocks are free at the end",
        )

    def compare(self, outputs: list[RequestOutput], want: list[RequestOutput], **more: object) -> None:
        """Compare outputs with those of the reference."""
        wanted = {output.request_id: output.token_ids for output in want}
        other = [output.request_id for output in outputs if output.token_ids != wanted[output.request_id]]
        self.setting.findings.check(not other, f"{self.name}: outputs {', '.join(other)} differ from the reference")
        self.setting.findings.row(
            "outputs equal to those of a large pool",
            run=self.name,
            requests=len(outputs),
            other=len(other),
            steps=self.num_steps,
            in_flight=self.max_in_flight,
            **more,
        )


def _preempted(setting: Setting, engine: Any, prompts: Any, params: Any, want: Any) -> None:
    run = Run(setting, engine(TIGHT), "pool too small")
    outputs = run.serve(prompts, params)
    num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
    run.compare(outputs, want, preemptions=num_preemptions)
    setting.findings.check(num_preemptions > 0, "pool too small: no request was preempted")
    setting.findings.check(run.max_in_flight > 0, "pool too small: no step was in flight behind another")


def _cached(setting: Setting, engine: Any, prompts: Any, params: Any, want: Any) -> None:
    run = Run(setting, engine(AMPLE), "cached prefixes")
    run.serve(prompts, params)
    outputs = run.serve(prompts, params)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    run.compare(outputs, want, cached_tokens=num_cached)
    setting.findings.check(
        num_cached >= NUM_REQUESTS * (PREFIX // BLOCK) * BLOCK, f"cached prefixes: only {num_cached} tokens were cached"
    )


def _aborted(setting: Setting, engine: Any, prompts: Any, params: Any, want: Any) -> None:
    run = Run(setting, engine(TIGHT), "aborts")
    run.add(prompts, params)
    done: dict[str, RequestOutput] = {}
    aborted = [str(number) for number in range(0, NUM_REQUESTS, 3)]
    to_abort = list(aborted)
    while run.engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in run.step() if output.finished)
        if run.num_steps > 5 and to_abort:  # one request after each step, in any state
            run.engine.abort(to_abort.pop())
            run.engine.scheduler.check_invariants()
    run.check_empty()
    run.compare([output for name, output in done.items() if name not in aborted], want, aborted=len(aborted))


def _waits(setting: Setting, engine: Engine, prompts: Any, params: Any) -> None:
    """Check that the host waits only for one event a step, if requests have no other features."""
    if not setting.on_gpu:
        setting.findings.skip("operators that make the host wait", "PyTorch counts them on a GPU")
        return
    run = Run(setting, engine, "waits")
    run.serve(prompts, params)  # the first steps load and compile
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.serve(prompts, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in caught if "synchroniz" in str(one.message)]
    setting.findings.figure("operators that make the host wait, in plain steps", len(waits))
    setting.findings.check(not waits, f"waits: {len(waits)} operators made the host wait, first: {waits[:1]}")


def _contents(setting: Setting, engine: Any, prompts: Any, params: Any) -> None:
    """Compare KV of running requests, after chunks, cache hits, decodes and preemptions, with a new engine's."""
    run = Run(setting, engine(TIGHT), "KV contents")
    run.add(prompts, params)
    fresh = engine(
        AMPLE, max_steps_in_flight=1, enable_prefix_caching=False, max_num_batched_tokens=512, enforce_eager=True
    )
    num_preempted = num_compared = 0
    worst = 0.0
    for _ in range(4):
        for _ in range(max(4, params[0].max_tokens // 4)):
            if run.engine.has_unfinished_requests():
                run.step()
        run.engine.finish_steps()
        for request in run.engine.scheduler.running:
            count = min(request.num_computed_tokens, request.num_tokens - 1)
            if count < 1:
                continue
            tokens = [*request.prompt_token_ids.tolist(), *list(request.output_token_ids)][:count]
            fresh.add_request("again", tokens, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
            fresh.step()
            num_compared += 1
            num_preempted += request.num_preemptions > 0
            worst = max(worst, _difference(run.engine, request.request_id, fresh, "again", count))
            fresh.abort("again")
            drain(fresh)
    setting.findings.figure("KV contents: sequences compared", num_compared)
    setting.findings.figure("KV contents: of them preempted before", num_preempted)
    setting.findings.figure("KV contents: largest relative error", worst)
    setting.findings.check(num_compared > 0, "KV contents: nothing was compared")
    setting.findings.check(
        worst <= MAX_ERROR, f"KV contents: an error of {worst:.3g}; at most {MAX_ERROR:g} is rounding"
    )


def _difference(engine: Engine, name: str, other: Engine, other_name: str, count: int) -> float:
    """The largest difference of the KV of two requests, relative to the largest number of its layer."""
    worst = 0.0
    mine, others = (_blocks(one, each, count) for one, each in ((engine, name), (other, other_name)))
    for caches, other_caches in (
        (engine.kv_pool.keys, other.kv_pool.keys),
        (engine.kv_pool.values, other.kv_pool.values),
    ):
        for cache, other_cache in zip(caches, other_caches, strict=True):
            got, want = _sequence(cache, mine, count), _sequence(other_cache, others, count)
            error = float((got - want).abs().max() / want.abs().max())
            worst = max(worst, error if error == error else float("inf"))  # NaN counts as infinite
    return worst


def _blocks(engine: Engine, name: str, count: int) -> torch.Tensor:
    table = engine.scheduler.block_tables(name)[0, : -(-count // BLOCK)]
    return torch.from_numpy(table.astype(np.int64)).to(engine.kv_pool.device)


def _sequence(cache: torch.Tensor, blocks: torch.Tensor, count: int) -> torch.Tensor:
    """KV [count, heads, dim] of the tokens of a request."""
    return cache[blocks].transpose(1, 2).flatten(0, 1)[:count].double()
