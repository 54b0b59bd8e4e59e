"""The runner with a real (tiny) model: log probabilities equal transformers', and features work under preemption."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from pointsman.core import Request, Scheduler, SchedulerConfig, SchedulerOutput
from pointsman.engine.errors import NOTHING_LEFT
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.model.forward import run_model
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.model.prepared import PreparedStep
from pointsman.engine.model.runner import NOT_FINITE, ModelRunner, StepExecution
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.sampling.logprobs import TokenLogprobs
from tests.engine.plain_requests import FEATURES, request_for
from tests.engine.text_tokenizers import byte_tokenizer
from tests.engine.tiny_models import FAMILIES, VOCAB_SIZE, build


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1), tokenizer=byte_tokenizer())


class Host:
    """Runs a scheduler and a model runner, and keeps the results of each request."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 200, budget: int = 64, steps: int = 1) -> None:
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=120,
            max_num_seqs=16,
            max_num_batched_tokens=budget,
            full_sequence_must_fit=False,
            max_steps_in_flight=steps,
        )
        self.scheduler = Scheduler(config)
        pool = KVPool(loaded.layers, num_blocks=num_blocks, block_size=4, dtype=torch.float32)
        self.runner = ModelRunner(loaded, pool, self.scheduler, seed=3)
        self.requests: dict[str, Request] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, dict[int, TokenLogprobs]] = {}

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.requests[name] = request_for(name, prompt, params)
        self.scheduler.add(self.requests[name], 0.0)

    def take(self, output: SchedulerOutput, execution: StepExecution) -> None:
        for index, entries in execution.logprobs.items():
            self.logprobs.setdefault(output.requests[index].request_id, []).extend(entries)
        for index, part in execution.prompt_logprobs.items():
            entries = self.prompt_logprobs.setdefault(output.requests[index].request_id, {})
            entries.update(enumerate(part.entries, part.start))
        self.scheduler.update(output, execution.result, 0.0)

    def run(self) -> dict[str, list[int]]:
        while self.scheduler.has_unfinished_requests():
            output = self.scheduler.schedule(0.0)
            self.take(output, self.runner.execute(output))
        return self.tokens()

    def tokens(self) -> dict[str, list[int]]:
        return {name: request.output_token_ids.tolist() for name, request in self.requests.items()}


def prompt_of(i: int) -> list[int]:
    return [3 + (7 * i + 3 * j) % 150 for j in range(4 + 5 * i % 23)]


def add_features(host: Host, which: list[int]) -> None:
    for i in which:
        host.add(
            f"r{i}", prompt_of(i), SamplingParams(**{"max_tokens": 25, "ignore_eos": True, "seed": i, **FEATURES[i]})
        )


@pytest.mark.e2e
def test_preemption_changes_no_tokens_of_any_sampling_feature(loaded: LoadedModel) -> None:
    alone: dict[str, list[int]] = {}
    for i in range(len(FEATURES)):
        host = Host(loaded)
        add_features(host, [i])
        alone.update(host.run())
    tight = Host(loaded, num_blocks=35, budget=24)
    add_features(tight, list(range(len(FEATURES))))
    assert tight.run() == alone
    assert tight.scheduler.stats().num_preemptions > 3
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)


@pytest.mark.e2e
@pytest.mark.parametrize("budget", [7, 64])
def test_logprobs_are_those_of_plain_transformers(loaded: LoadedModel, budget: int) -> None:
    """Log probabilities of prompts and outputs, with one chunk or many, with and without penalties and preemption."""
    plain_model = build(FAMILIES["qwen3"](), seed=1)
    host = Host(loaded, num_blocks=20, budget=max(budget, 16))
    for i in range(6):
        host.add(
            f"r{i}",
            prompt_of(i + 2),
            SamplingParams(
                max_tokens=12,
                ignore_eos=True,
                seed=i,
                logprobs=[0, 3, None][i % 3],
                prompt_logprobs=[2, None, 0, -1][i % 4],
                presence_penalty=i / 3,
            ),
        )
    tokens = host.run()
    assert set(host.logprobs) == {"r0", "r1", "r3", "r4"} and set(host.prompt_logprobs) == {"r0", "r2", "r3", "r4"}
    for name, request in host.requests.items():
        whole = request.all_token_ids.astype(np.int64)
        logits = run_model(plain_model, torch.from_numpy(whole), torch.arange(len(whole)), keep=None)
        reference = torch.log_softmax(logits.double(), dim=-1).numpy()
        params, start = request.metadata, request.num_prompt_tokens
        if params.logprobs is not None:
            check(host.logprobs[name], reference[start - 1 : -1], whole[start:], params.logprobs)
            assert [entry.token_ids[0] for entry in host.logprobs[name]] == tokens[name]
        if params.prompt_logprobs is not None:
            assert sorted(host.prompt_logprobs[name]) == list(range(1, start))
            entries = [host.prompt_logprobs[name][position] for position in range(1, start)]
            check(entries, reference[: start - 1], whole[1:start], params.prompt_logprobs)


def check(entries: list[TokenLogprobs], reference: np.ndarray, token_ids: np.ndarray, k: int) -> None:
    shown = VOCAB_SIZE if k == -1 else k
    for entry, row, token in zip(entries, reference, token_ids.tolist(), strict=True):
        assert entry.token_ids[0] == token and len(entry.token_ids) == shown + 1
        np.testing.assert_allclose(entry.logprobs, row[entry.token_ids], atol=2e-4)
        np.testing.assert_allclose(entry.logprobs[1:], np.sort(row)[::-1][:shown], atol=2e-4)
        assert abs(entry.rank - 1 - (row > row[token]).sum()) <= 1


def test_the_next_step_can_be_scheduled_before_this_one_runs(loaded: LoadedModel) -> None:
    """Each step runs after the scheduler has decided the next step, even if a stop token makes the next step
    unnecessary."""
    expected: dict[str, list[int]] = {}
    for i in (1, 4, 6, 11, 12):
        host = Host(loaded)
        add_features(host, [i])
        expected.update(host.run())

    host = Host(loaded, num_blocks=30, budget=16, steps=2)
    add_features(host, [1, 4, 6, 11, 12])
    output = host.scheduler.schedule(0.0)
    overlapped = 0
    while output.num_rows:
        prepared = host.runner.prepare(output)
        following = host.scheduler.schedule(0.0)
        overlapped += following.num_rows > 0
        host.take(output, host.runner.run(prepared))
        output = following
        while not output.num_rows and host.scheduler.has_unfinished_requests():
            host.take(output, host.runner.execute(output))
            output = host.scheduler.schedule(0.0)
    assert overlapped > 10 and host.scheduler.stats().num_preemptions > 0
    assert host.tokens() == expected


@pytest.mark.parametrize("steps", [2, 4])
def test_steps_can_be_prepared_before_their_input_is_sampled(loaded: LoadedModel, steps: int) -> None:
    """Requests with every sampling feature, while the maximum number of steps in flight is prepared before its input
    tokens are known."""
    which = range(len(FEATURES))
    expected: dict[str, list[int]] = {}
    for i in which:
        host = Host(loaded)
        add_features(host, [i])
        expected.update(host.run())

    host = Host(loaded, num_blocks=35, budget=24, steps=steps)
    add_features(host, list(which))
    ahead: deque[tuple[SchedulerOutput, PreparedStep]] = deque()
    num_unsampled = num_unfinished = 0
    while ahead or host.scheduler.has_unfinished_requests():
        while len(ahead) < steps and host.scheduler.has_unfinished_requests():
            output = host.scheduler.schedule(0.0)
            prepared = host.runner.prepare(output)
            ahead.append((output, prepared))
            assert prepared.links is not None
            num_unsampled += len(prepared.links.unsampled)
            edits = prepared.sampling_batch.edits
            num_unfinished += 0 if edits is None else len(edits.unfinished)
        output, prepared = ahead.popleft()
        host.take(output, host.runner.run(prepared))
    assert host.tokens() == expected
    assert num_unsampled > 100 and num_unfinished > 20 and host.scheduler.stats().num_preemptions > 0


def test_a_row_without_a_token_reports_the_cause(loaded: LoadedModel) -> None:
    embedding = loaded.model.get_input_embeddings().weight
    saved = embedding[77].clone()
    embedding.data[77] = float("nan")
    try:
        host = Host(loaded)
        nothing: dict[str, Any] = {"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 2, "max_tokens": 5}
        host.add("nothing", [5, 6], SamplingParams(**nothing))
        host.add("surrogate", [5, 8], SamplingParams(max_tokens=5, bad_words=["ok", "\ud800"], logprobs=1))
        host.add("nan", [5, 77], SamplingParams(max_tokens=5, logprobs=1))
        host.add("good", [5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0))
        tokens = host.run()
    finally:
        embedding.data[77] = saved
    assert host.requests["nothing"].finish_detail == NOTHING_LEFT
    assert "not valid Unicode" in host.requests["surrogate"].finish_detail
    assert host.requests["nan"].finish_detail == NOT_FINITE
    assert (tokens["nothing"], tokens["nan"], tokens["surrogate"], len(tokens["good"])) == ([], [], [], 5)
    assert set(host.logprobs) == {"good"}


def test_an_empty_step_needs_no_model(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(loaded)
    monkeypatch.setattr(loaded.model, "forward", None)
    output = host.scheduler.schedule(0.0)
    execution = host.runner.execute(output)
    assert (len(execution.result.token_ids), execution.logprobs, execution.prompt_logprobs) == (0, {}, {})
    host.take(output, execution)
