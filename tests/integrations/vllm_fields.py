"""Checks that every `SchedulerOutput` fulfils the assumptions of vLLM's model runners: a script for an environment with
vLLM.

    python vllm_fields.py   prints one JSON line: counts of events in all steps

The runners here compute nothing. Each keeps the same state of a request as vLLM's, in the same way, and samples a token
that depends on all tokens before it. So a request that the two sides see differently gets different tokens.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from pointsman.integrations.vllm import Scheduler
from tests.integrations.vllm_configs import vllm_config

BLOCK_SIZE = 4
NUM_BLOCKS = 24
NULL_BLOCK = 0
BUDGET = 40


def next_token(tokens: list[int]) -> int:
    state = 7
    for token in tokens:
        state = (state * 31 + token) % 1_000_003
    return state % 500 + 1


@dataclass
class State:
    """A runner's state of a request."""

    prompt_len: int
    tokens: list[int]
    blocks: list[int]


@dataclass
class Runner:
    """Processes outputs like vLLM's runners; `v2` is the second one."""

    v2: bool
    runs_ahead: bool
    sends_tokens: bool
    loss: float = 0.0
    """Probability of returning no token for a row that samples."""
    lost: set[str] = field(default_factory=set)
    """Requests whose newest tokens the scheduler does not know."""
    states: dict[str, State] = field(default_factory=dict)
    scheduled_before: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def execute(self, output: Any) -> ModelRunnerOutput:
        for name in output.finished_req_ids:
            self.states.pop(name, None)
            self.lost.discard(name)
        if self.v2:
            for name in output.preempted_req_ids - output.finished_req_ids:
                self.seen["preempted"] += 1
                del self.states[name]
                self.lost.discard(name)
        self._new(output)
        self._cached(output)
        names = list(output.num_scheduled_tokens)
        cached = output.scheduled_cached_reqs
        told = [new.req_id for new in output.scheduled_new_reqs] + cached.req_ids
        assert sorted(told) == sorted(names) and len(set(told)) == len(told)
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens <= BUDGET
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        written: set[int] = set()
        sampled = []
        rng = random.Random(f"{output.total_num_scheduled_tokens} {self.seen['steps']}")
        rng.shuffle(names)  # a runner has an order of its own
        for name in names:
            state, start, count = self.states[name], starts[name], output.num_scheduled_tokens[name]
            assert count > 0
            end = start + count
            assert NULL_BLOCK not in state.blocks and len(state.blocks) * BLOCK_SIZE >= end
            writes = set(state.blocks[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
            assert not writes & written
            written |= writes
            assert end <= len(state.tokens)
            samples = end == len(state.tokens)
            sampled.append([next_token(state.tokens)] if samples else [])
            state.tokens += sampled[-1]
            if samples and self.loss and rng.random() < self.loss:
                self.lost.add(name)
                self.seen["lost"] += 1
                sampled[-1] = []
        self.scheduled_before = set(names)
        index = {name: at for at, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)

    def _new(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.states, "a request that is new is known already"
            (blocks,) = new.block_ids
            tokens = new.prompt_token_ids
            if self.v2:
                assert new.prefill_token_ids is not None
                tokens = new.prefill_token_ids
                self.seen["resumed"] += len(tokens) > len(new.prompt_token_ids)
            self.states[new.req_id] = State(len(new.prompt_token_ids), list(tokens), blocks)

    def _cached(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        lists = (cached.num_computed_tokens, cached.new_block_ids, cached.num_output_tokens)
        assert all(len(each) == len(cached.req_ids) for each in lists)
        assert cached.resumed_req_ids <= set(cached.req_ids)
        assert not (self.v2 and cached.resumed_req_ids)
        for at, name in enumerate(cached.req_ids):
            state, new_blocks = self.states[name], cached.new_block_ids[at]
            if name in self.lost and name in cached.resumed_req_ids:  # cut as the first runner cuts them
                self.lost.remove(name)
                self.scheduled_before.discard(name)
                del state.tokens[state.prompt_len + cached.num_output_tokens[at] :]
            assert cached.num_output_tokens[at] == len(state.tokens) - state.prompt_len
            if name in cached.resumed_req_ids:
                self.seen["resumed"] += 1
                assert name not in self.scheduled_before
                state.blocks = new_blocks[0]  # the list itself, as vLLM's
            elif new_blocks is not None:
                assert new_blocks[0]
                state.blocks.extend(new_blocks[0])
            if self.runs_ahead and not self.v2 and name not in self.scheduled_before:
                self.seen["skipped"] += 1
                assert cached.all_token_ids[name] == state.tokens
            if self.sends_tokens:
                start = cached.num_computed_tokens[at]
                count = output.num_scheduled_tokens[name]
                assert cached.new_token_ids[at] == state.tokens[start : start + count]


def make_scheduler(
    *, v2: bool, asynchronous: bool, pipeline: int, policy: str, knobs: dict[str, Any] | None = None, **changes: Any
) -> Scheduler:
    ahead = 2 if asynchronous else pipeline
    config = vllm_config(
        scheduler_config__async_scheduling=asynchronous,
        scheduler_config__max_num_batched_tokens=BUDGET,
        scheduler_config__max_num_seqs=6,
        scheduler_config__policy=policy,
        model_config__max_model_len=60,
        parallel_config__pipeline_parallel_size=pipeline,
        additional_config={"pointsman": {"socket": "", "eviction": "retention", **(knobs or {})}},
        use_v2_model_runner=v2,
        max_concurrent_batches=ahead,
        **changes,
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_spec=spec)
    kv_cache_config = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[group], needs_kv_cache_zeroing=False)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=None,
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        include_finished_set=True,
        log_stats=True,
    )


def make_request(rng: random.Random, name: str) -> Request:
    prompt = [rng.randrange(1, 4)] * rng.choice([2, 8, 16]) + [
        rng.randrange(1, 500) for _ in range(rng.randrange(1, 20))
    ]
    said = rng.choice(
        [
            None,
            {"pointsman_tenent": "a"},
            {"pointsman_tenant": "a"},
            {"pointsman_tenant": "b", "pointsman_ttft_target": 0.5, "pointsman_retention": 7},
        ]
    )
    params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 25), extra_args=said)
    return Request(name, prompt, params, None, priority=rng.randrange(3), client_index=rng.randrange(2))


def run(seed: int, loss: float = 0.0, **kind: Any) -> Counter[str]:
    """Random requests, some aborted, some with the id of a request that was just aborted."""
    rng = random.Random(seed)
    scheduler = make_scheduler(**kind)
    depth = scheduler.core.config.max_steps_in_flight
    runner = Runner(kind["v2"], depth > 1, kind["pipeline"] > 1 and not kind["asynchronous"], loss)
    answers: dict[str, list[int]] = {}
    wanted: dict[str, Request] = {}
    open_steps: deque[tuple[Any, Any]] = deque()
    to_add, number = 40, 0
    told_finished: Counter[str] = Counter()
    while to_add or scheduler.has_requests() or open_steps:
        while to_add and rng.random() < 0.5:
            name = f"r{number}"
            if wanted and rng.random() < 0.15:  # aborted before the next step
                name = rng.choice(list(wanted))
                if scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
                    runner.seen["aborted"] += 1
            wanted[name] = request = make_request(rng, name)
            answers[name] = []
            scheduler.add_request(request)
            said = request.sampling_params.extra_args or {}
            for core in scheduler.core._table.queue:  # a request's own fields reach the policies
                if core.metadata is request:
                    runner.seen["tenants"] += bool(core.tenant)
                    assert core.tenant == said.get("pointsman_tenant", "")
                    assert core.ttft_target == said.get("pointsman_ttft_target")
                    assert core.retention == said.get("pointsman_retention")
            to_add, number = to_add - 1, number + 1
        if len(open_steps) < depth and scheduler.has_requests():
            output = scheduler.schedule(False)
            open_steps.append((output, runner.execute(output)))
            runner.seen["steps"] += 1
        if open_steps and (len(open_steps) == depth or rng.random() < 0.3 or not scheduler.has_requests()):
            output, result = open_steps.popleft()
            for client, found in scheduler.update_from_output(output, result).items():
                told_finished.update(found.finished_requests or ())
                for each in found.outputs:
                    assert wanted[each.request_id].client_index == client
                    answers[each.request_id] += each.new_token_ids
    for name, request in wanted.items():
        tokens = list(request.prompt_token_ids)
        for token in answers[name]:
            assert token == next_token(tokens), (seed, kind, name)
            tokens.append(token)
        assert len(answers[name]) == request.max_tokens, (seed, kind, name)
    assert told_finished.total() == 40 and not runner.states and scheduler.get_kv_cache_usage() == 0
    scheduler.core.check_invariants()
    return runner.seen


class Warnings(logging.Handler):
    """Counts the warnings of fields without effect."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        self.seen["warned"] += "'pointsman_tenent'" in record.getMessage()


def main() -> None:
    seen: Counter[str] = Counter()
    logging.getLogger("vllm.pointsman").addHandler(Warnings(seen))
    for v2 in (False, True):
        for asynchronous, pipeline in ((False, 1), (True, 1), (False, 2)):  # other combinations are refused
            for policy in ("fcfs", "priority"):
                for seed in range(5):
                    kind = {"v2": v2, "asynchronous": asynchronous, "pipeline": pipeline, "policy": policy}
                    seen += run(seed, loss=0.1 * (seed % 2), **kind)
    print(json.dumps({"version": vllm.__version__, **seen}))


if __name__ == "__main__":
    main()
