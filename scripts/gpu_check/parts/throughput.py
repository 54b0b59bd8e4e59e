"""Part e: runs nano-vLLM's benchmark, and compares with transformers' static and continuous batching.

It has 256 requests at once, prompts and outputs of 100 to 1,024 tokens, temperature 0.6, on the shape of Qwen3-0.6B. A
contender that exceeds its time limit is measured by its tokens until then. That is its busiest part, so its rate is too
high. Each contender warms up with a few requests first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria

from gpu_check.models import (
    blocks_of,
    blocks_that_fit,
    free_memory,
    make_engine,
    make_loaded,
    make_model,
    small_shape,
)
from gpu_check.part import Setting
from gpu_check.roofline import synchronize
from gpu_check.steps import drain
from pointsman.engine import Engine, SamplingParams
from pointsman.sim.model import ModelShape

NUM_REQUESTS, TINY_NUM_REQUESTS = 256, 8
LENGTHS, TINY_LENGTHS = (100, 1024), (4, 24)
LARGEST_TOKEN = 10000
TEMPERATURE = 0.6
MAX_MODEL_LEN = 4096
STATIC_BATCH = 64
"""Number of requests of a static batch; its cache is copied when it grows, so more would take too long."""
GOAL = 1.3
"""Minimum of tokens a second, relative to transformers' continuous batching."""
PUBLISHED = {"nano-vLLM": 1434, "vLLM": 1362}
"""Tokens a second on nano-vLLM's page for this benchmark, on an RTX 4070 laptop."""


@dataclass(frozen=True, slots=True)
class Job:
    """The requests of the benchmark."""

    prompts: list[list[int]]
    outputs: list[int]


@dataclass(frozen=True, slots=True)
class Rate:
    """The results of a contender."""

    num_requests: int
    num_tokens: int
    seconds: float
    is_complete: bool

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def make_job(shape: ModelShape, count: int, lengths: tuple[int, int], seed: int = 0) -> Job:
    """The requests, in nano-vLLM's order of random draws."""
    drawn = random.Random(seed)
    largest = min(LARGEST_TOKEN, shape.vocab_size - 1)
    prompts = []
    for _ in range(count):
        length = drawn.randint(*lengths)
        prompts.append([drawn.randint(0, largest) for _ in range(length)])
    return Job(prompts, [drawn.randint(*lengths) for _ in range(count)])


def run(setting: Setting) -> None:
    """Run the part."""
    findings, tiny, shape = setting.findings, setting.tiny, small_shape(setting.tiny)
    count, lengths = (TINY_NUM_REQUESTS, TINY_LENGTHS) if tiny else (NUM_REQUESTS, LENGTHS)
    job, warm = make_job(shape, count, lengths), make_job(shape, 4, TINY_LENGTHS, seed=1)
    for name, rate in PUBLISHED.items():
        findings.figure(f"published for {name}, on an RTX 4070 laptop (8 GB), tokens/s", rate)
    ours = _engine(setting, shape, job, warm)
    _report(setting, "pointsman", ours)
    model: Any = make_model(shape, setting.device, attention="sdpa")
    model.generation_config = GenerationConfig()
    try:
        box = max(10.0, 0.65 * (setting.seconds_left - 10))
        continuous = _continuous(setting, model, job, warm, box)
        _report(setting, "transformers, continuous batching", continuous)
        ratio = ours.tokens_per_second / continuous.tokens_per_second
        findings.figure("tokens/s by transformers' continuous batching", round(ratio, 3))
        findings.goal("nano-vLLM's benchmark by transformers' continuous batching", ratio, at_least=GOAL)
    except Exception as error:  # an error of another project; this engine has been measured already
        findings.wrong(f"transformers' continuous batching: {type(error).__name__}: {error}")
    free_memory()
    some = Job(job.prompts[:STATIC_BATCH], job.outputs[:STATIC_BATCH])
    static = _static(setting, model, some, warm, max(5.0, setting.seconds_left - 10))
    _report(setting, "transformers, static batches", static)


def _report(setting: Setting, name: str, rate: Rate) -> None:
    setting.findings.row(
        "256 requests at once" if not setting.tiny else "requests at once",
        engine=name,
        requests=rate.num_requests,
        output_tokens=rate.num_tokens,
        seconds=rate.seconds,
        ended=rate.is_complete,
        tokens_per_s=rate.tokens_per_second,
    )


def _engine(setting: Setting, shape: ModelShape, job: Job, warm: Job) -> Rate:
    loaded = make_loaded(shape, setting.device)
    wanted = sum(map(blocks_of, (a + b + 64 for a, b in zip(map(len, job.prompts), job.outputs, strict=True))))
    engine = make_engine(
        loaded,
        blocks_that_fit(shape, setting.device, wanted),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=len(job.prompts),
        max_num_batched_tokens=512 if setting.tiny else 16384,
        full_sequence_must_fit=False,
    )

    _serve(engine, warm)
    synchronize(setting.device)
    begun = perf_counter()
    num_tokens = _serve(engine, job)
    synchronize(setting.device)
    rate = Rate(len(job.prompts), num_tokens, perf_counter() - begun, True)
    setting.findings.check(
        num_tokens == sum(job.outputs), f"pointsman made {num_tokens} tokens; {sum(job.outputs)} were asked for"
    )
    engine.close()
    del engine, loaded
    free_memory()
    return rate


def _serve(engine: Engine, job: Job) -> int:
    """Run all requests; returns the number of output tokens."""
    for number, (prompt, length) in enumerate(zip(job.prompts, job.outputs, strict=True)):
        params = SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=length)
        engine.add_request(str(number), prompt, params)
    return sum(len(output.token_ids) for output in drain(engine).values())


def _continuous(setting: Setting, model: Any, job: Job, warm: Job, box: float) -> Rate:
    """Measure continuous batching by its manager, because `generate_batch` has one length for all requests."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig  # its module varies by version

    sizes: dict[str, Any] = {}  # on a GPU it chooses sizes by the free memory
    if not setting.on_gpu:
        sizes = {"num_blocks": 64, "max_batch_tokens": 256, "max_requests_per_batch": len(job.prompts)}
    generation = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**sizes)
    ) as manager:
        _serve_continuous(manager, warm, "warm", setting.seconds_left)
        synchronize(setting.device)
        begun = perf_counter()
        num_tokens, num_finished = _serve_continuous(manager, job, "job", box)
        rate = Rate(len(job.prompts), num_tokens, perf_counter() - begun, num_finished == len(job.prompts))
        if not rate.is_complete:
            for number in range(len(job.prompts)):
                manager.cancel_request(f"job{number}")
    return rate


def _serve_continuous(manager: Any, job: Job, name: str, seconds: float) -> tuple[int, int]:
    """The number of output tokens and of finished requests within `seconds`.

    Raises:
        RuntimeError: a request failed, or the manager's thread has ended.
    """
    end = monotonic() + seconds
    num_finished = num_tokens = 0
    for number, (prompt, length) in enumerate(zip(job.prompts, job.outputs, strict=True)):
        manager.add_request(prompt, request_id=f"{name}{number}", max_new_tokens=length)
    while num_finished < len(job.prompts) and monotonic() < end:
        result = manager.get_result(timeout=0.2)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the generation thread ended before all requests had ended")
            continue
        if result.error is not None:
            raise RuntimeError(f"request {result.request_id} failed: {result.error}")
        if result.is_finished():
            num_finished += 1
            num_tokens += len(result.generated_tokens)
    if num_finished < len(job.prompts):
        active = list(manager.batch_processor.scheduler.active_requests.values())
        num_tokens += sum(len(state.generated_tokens) for state in active)
    return num_tokens, num_finished


class _Box(StoppingCriteria):
    """Ends a static batch at its time limit, and counts its steps."""

    def __init__(self, end: float) -> None:
        self._end = end
        self.num_steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.num_steps += 1
        is_over = monotonic() > self._end
        return torch.full((len(input_ids),), is_over, dtype=torch.bool, device=input_ids.device)


def _static(setting: Setting, model: Any, job: Job, warm: Job, box: float) -> Rate:
    """One batch, padded on the left to its longest prompt. It runs until its longest output is complete."""
    _generate(model, warm.prompts, warm.outputs, monotonic() + box)
    synchronize(setting.device)
    begun = perf_counter()
    num_steps = _generate(model, job.prompts, job.outputs, monotonic() + box)
    synchronize(setting.device)
    num_tokens = sum(min(length, num_steps) for length in job.outputs)  # tokens after a request's end do not count
    return Rate(len(job.prompts), num_tokens, perf_counter() - begun, num_steps == max(job.outputs))


def _generate(model: Any, prompts: Sequence[list[int]], outputs: Sequence[int], end: float) -> int:
    width = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    criteria = _Box(end)
    with torch.inference_mode():
        model.generate(
            input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(outputs),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            pad_token_id=0,
            stopping_criteria=[criteria],
        )
    return criteria.num_steps
