"""Outcomes of single requests, seen from vLLM's engine core: a script for the environment with vLLM.

python vllm_cases.py   prints one JSON line: for each case the error, or null
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm
from vllm import PoolingParams, SamplingParams
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed import kv_events
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.engine import EngineCoreEventType, FinishReason
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.request import Request, RequestStatus

from pointsman.core.policy.order import FirstComeFirstServed
from pointsman.integrations.vllm import Scheduler
from pointsman.integrations.vllm.support import UnsupportedVLLM, check_supported, is_before
from tests.integrations.vllm_configs import vllm_config
from tests.integrations.vllm_fields import BLOCK_SIZE, make_scheduler

HASH = get_hash_fn_by_name("sha256")


class Grammars:
    """vLLM's structured output manager; every grammar accepts a fixed number of tokens."""

    def __init__(self, most: int) -> None:
        self.left = most

    def grammar_bitmask(self, requests: Any, names: list[str], drafts: Any) -> Any:
        return np.zeros((len(names), 1), dtype=np.int32)

    def accept_tokens(self, request: Any, token_ids: list[int]) -> bool:
        self.left -= len(token_ids)
        return self.left >= 0


def one(**changes: Any) -> Scheduler:
    return make_scheduler(v2=False, asynchronous=False, pipeline=1, policy="fcfs", **changes)


def request(name: str, prompt: list[int], *, max_tokens: int = 4, structured: bool = False, **fields: Any) -> Request:
    grammar = StructuredOutputsParams(regex="a") if structured else None
    params = SamplingParams(max_tokens=max_tokens, structured_outputs=grammar)
    hasher = get_request_block_hasher(BLOCK_SIZE, HASH)
    made = Request(name, list(prompt), params, None, block_hasher=hasher, **fields)
    if structured:
        made.structured_output_request.grammar = SimpleNamespace()
    return made


def step(scheduler: Scheduler, token: int = 9, **result: Any) -> tuple[Any, dict[int, Any]]:
    """A step in which every row that samples returns the same token, after its drafts."""
    output = scheduler.schedule(False)
    scheduler.get_grammar_bitmask(output)
    names = list(output.num_scheduled_tokens)
    samples = scheduler._steps[-1].output.samples.tolist()
    drafts = output.scheduled_spec_decode_tokens
    sampled = [[*drafts.get(name, []), token] if may else [] for name, may in zip(names, samples, strict=True)]
    places = {name: at for at, name in enumerate(names)}
    runner = ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled, **result)
    return output, scheduler.update_from_output(output, runner)


def told(outputs: dict[int, Any], name: str) -> Any:
    return next(each for client in outputs.values() for each in client.outputs if each.request_id == name)


def a_client_gets_the_end_of_an_idle_session() -> None:
    scheduler = one()
    scheduler.add_request(request("s", [1, 2, 3], max_tokens=1, resumable=True, client_index=1))
    _, outputs = step(scheduler)
    assert told(outputs, "s").finish_reason is FinishReason.LENGTH and not outputs[1].finished_requests
    step(scheduler)
    assert not scheduler.has_requests()
    scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    assert scheduler.has_requests(), "vLLM steps only then"
    _, outputs = step(scheduler)
    assert outputs[1].finished_requests == {"s"} and not scheduler.has_requests()


def ends_are_reported_during_a_pause() -> None:
    scheduler = one()
    scheduler.add_request(request("a", [1, 2, 3]))
    step(scheduler)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.add_request(request("too long", [1] * 70))
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    output, outputs = step(scheduler)
    assert output.finished_req_ids == {"a"} and told(outputs, "too long").finish_reason is FinishReason.ERROR
    assert not scheduler.has_requests()


def a_client_error_is_reported_since_0_33() -> None:
    """vLLM's server answers with status 400 and the message of the output."""
    scheduler = one()
    grammar = request("g", [1, 2, 3], structured=True)
    grammar.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    grammar.structured_output_request.grammar = ValueError("no such grammar")
    scheduler.add_request(grammar)
    scheduler.add_request(request("too long", [1] * 70))
    _, outputs = step(scheduler)
    for name, why in (
        ("g", "Invalid structured outputs: no such grammar"),
        ("too long", "'too long' refused: "),
    ):
        output = told(outputs, name)
        assert output.finish_reason is FinishReason.ERROR
        if is_before(vllm.__version__, "0.33"):
            assert not hasattr(output, "error")
        else:
            assert output.error.code == "validation_error" and why in output.error.message


def a_grammar_refuses_the_token_that_ends_its_request() -> None:
    for most, reason in ((1, FinishReason.LENGTH), (0, FinishReason.ERROR)):
        scheduler = one()
        scheduler._grammars = Grammars(most)
        scheduler.add_request(request("g", [1, 2, 3], max_tokens=1, structured=True))
        _, outputs = step(scheduler)
        assert told(outputs, "g").finish_reason is reason
        step(scheduler)
        assert not scheduler.has_requests() and scheduler.get_kv_cache_usage() == 0


def large_numbers_are_accepted_as_in_vllm() -> None:
    scheduler = make_scheduler(v2=False, asynchronous=False, pipeline=1, policy="priority")
    now_in_ns = 1_795_350_000_000_000_000
    for at in range(8):  # sequence slots for 6
        scheduler.add_request(request(f"r{at}", [at, 2, 3], priority=now_in_ns - at, max_tokens=10**12))
    output, _ = step(scheduler)
    assert list(output.num_scheduled_tokens) == ["r7", "r6", "r5", "r4", "r3", "r2"]


def a_retention_beyond_the_operators_bound_ends_its_request() -> None:
    for knobs, longest in (({}, 600), ({"max_retention": 5}, 5)):
        scheduler = one(knobs=knobs)
        for name, seconds in (("longest", longest), ("longer", longest + 1)):
            asks = request(name, [1, 2, 3])
            asks.sampling_params.extra_args = {"pointsman_retention": seconds}
            scheduler.add_request(asks)
        output, outputs = step(scheduler)
        assert list(output.num_scheduled_tokens) == ["longest"]
        assert told(outputs, "longer").finish_reason is FinishReason.ERROR


def an_adapter_of_another_path_is_another_one() -> None:
    scheduler = one(lora_config=SimpleNamespace(max_loras=2))
    prompt = list(range(20))
    for at, path in enumerate(("/old", "/old", "/new")):
        adapter = LoRARequest("adapter", 1, path)
        scheduler.add_request(request(f"r{at}", prompt, max_tokens=1, lora_request=adapter))
        output, _ = step(scheduler)
        assert output.scheduled_new_reqs[0].num_computed_tokens == (16 if at == 1 else 0)
        assert output.scheduled_new_reqs[0].lora_request is adapter


def kv_events_are_vllms() -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    scheduler = one(kv_events_config=config, lora_config=SimpleNamespace(max_loras=2))
    batches: list[Any] = []
    scheduler._kv_events._publisher.publish = batches.append
    fields: list[dict[str, Any]] = [{}, {"cache_salt": "salt"}, {"lora_request": LoRARequest("l", 7, "/l")}]
    fields.append({**fields[1], **fields[2]})
    for at, each in enumerate(fields):
        made = request(f"r{at}", list(range(20)), max_tokens=6, **each)
        scheduler.add_request(made)
        while scheduler.has_requests():
            step(scheduler)
        made.append_output_token_ids([9] * 5)
        stored = [event for batch in batches for event in batch.events if isinstance(event, kv_events.BlockStored)]
        names = [maybe_convert_block_hash(name) for name in made.block_hashes]
        assert [name for event in stored for name in event.block_hashes] == names[:6]
        assert stored[0].parent_block_hash is None and stored[-1].parent_block_hash == names[4]
        assert {event.group_idx for event in stored} == {0}
        assert {event.lora_id for event in stored} == {7 if "lora_request" in each else None}
        batches.clear()
    scheduler.add_request(request("large", list(range(100, 155)), max_tokens=2))
    step(scheduler)
    step(scheduler)
    gone = [event for batch in batches for event in batch.events if isinstance(event, kv_events.BlockRemoved)]
    assert gone and {event.group_idx for event in gone} == {0}


def drafts_are_counted_up_to_what_the_model_accepted() -> None:
    speculation = SimpleNamespace(method="ngram", num_speculative_tokens_per_batch_size=None)
    scheduler = one(
        speculative_config=speculation,
        num_speculative_tokens=3,
        observability_config__per_request_spec_decode_metrics="detailed",
    )
    scheduler.add_request(request("d", [1, 2, 3], max_tokens=3))
    step(scheduler)
    scheduler.update_draft_token_ids(DraftTokenIds(["d"], [[5, 6, 7]]))
    output, outputs = step(scheduler)
    assert output.scheduled_spec_decode_tokens == {"d": [5]}, "no draft behind the limit"
    last = told(outputs, "d")
    assert last.new_token_ids == [5, 9] and last.finish_reason is FinishReason.LENGTH
    assert (last.spec_decode_metrics.per_step_drafted, last.spec_decode_metrics.per_step_accepted) == ([1], [1])
    stopping = request("e", [1, 2, 3], max_tokens=9)
    stopping.sampling_params.stop_token_ids = [6]
    scheduler.add_request(stopping)
    step(scheduler)
    scheduler.update_draft_token_ids(DraftTokenIds(["e"], [[5, 6, 7]]))
    _, outputs = step(scheduler)
    assert told(outputs, "e").new_token_ids == [5, 6]
    stats = next(client.scheduler_stats for client in outputs.values() if client.scheduler_stats)
    assert stats.spec_decoding_stats.num_accepted_tokens == 3, "as vLLM counts, behind the stop too"
    assert told(outputs, "e").spec_decode_metrics.per_step_accepted == [3]


def sampling_masks_reach_the_client() -> None:
    scheduler = one()
    for name in ("a", "b"):
        scheduler.add_request(request(name, [1, 2, 3]))
    for _ in range(2):
        masks = SamplingMaskLists(np.array([4, 9, 9, 11]), np.array([0, 2, 4]))
        _, outputs = step(scheduler, sampling_masks=masks)
        assert [told(outputs, name).new_sampling_mask.to_nested_list() for name in "ab"] == [[[4, 9]], [[9, 11]]]


def a_prompt_that_is_pooled_may_fill_the_model() -> None:
    scheduler = one()
    prompt = list(range(60))
    scheduler.add_request(Request("p", prompt, None, PoolingParams(task="embed")))
    computed = 0
    while scheduler.has_requests():
        output = scheduler.schedule(False)
        computed += output.total_num_scheduled_tokens
        names = list(output.num_scheduled_tokens)
        pooled = [torch.ones(2) if computed == len(prompt) else None for _ in names]
        places = {name: at for at, name in enumerate(names)}
        outputs = scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=names, req_id_to_index=places, pooler_output=pooled)
        )
        if computed == len(prompt) and names:
            last = told(outputs, "p")
            assert last.finish_reason is FinishReason.STOP and last.pooling_output is pooled[0]
    assert computed == len(prompt) and scheduler.get_kv_cache_usage() == 0


def requests_that_skip_the_prefix_cache_still_add_blocks_to_it() -> None:
    scheduler = one()
    for name in ("p", "q"):
        made = request(name, list(range(12)))
        made.skip_reading_prefix_cache = name == "p"
        scheduler.add_request(made)
        _, outputs = step(scheduler)
        stats = told(outputs, name).prefill_stats
        assert (stats.num_cached_tokens, stats.num_cache_creation_tokens) == ((0, 12) if name == "p" else (8, 4))


def models_whose_kv_vllm_manages_in_its_own_ways_are_refused() -> None:
    register_all_kvcache_specs(vllm_config())
    shape: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    states: dict[str, Any] = {"block_size": 4, "shapes": ((2, 4),), "dtypes": (torch.float32,)}
    window = SlidingWindowMLASpec(**shape, sliding_window=8, bounded_replay=True)
    for spec in (
        FullAttentionSpec(**shape),
        MLAAttentionSpec(**shape),
        RSWASpec(**shape, rswa_window=8),
        MambaSpec(**states),
        MambaSpec(**states, mamba_cache_mode="align"),
        CrossAttentionSpec(**shape),
    ):
        check_supported(vllm_config(), kv_cache_config_of(spec))
    check_supported(vllm_config(cache_config__enable_prefix_caching=False), kv_cache_config_of(window))
    for spec, says in (
        (SinkFullAttentionSpec(**shape, sink_len=4), "SinkFullAttentionManager"),
        (window, "the last 8 tokens of a cached prefix, which is not supported: give --no-enable-prefix-caching"),
        (MambaSpec(**states, mamba_cache_mode="all"), "mamba_cache_mode is 'all'"),
    ):
        try:
            check_supported(vllm_config(), kv_cache_config_of(spec))
        except UnsupportedVLLM as error:
            assert says in str(error) and "leave --scheduler-cls out" in str(error), error
        else:
            raise AssertionError(f"{type(spec).__name__} is accepted")


def step_with(scheduler: Scheduler, runs: dict[str, Any], *missing: str) -> tuple[Any, dict[int, Any]]:
    """A step in which every row that samples returns 9; rows in `runs` return that, `missing` ones nothing."""
    output = scheduler.schedule(False)
    rows = zip(output.num_scheduled_tokens, scheduler._steps[-1].output.samples.tolist(), strict=True)
    sampled = {name: runs.get(name, [9] if may else []) for name, may in rows if name not in missing}
    places = {name: at for at, name in enumerate(sampled)}
    runner = ModelRunnerOutput(req_ids=list(sampled), req_id_to_index=places, sampled_token_ids=list(sampled.values()))
    return output, scheduler.update_from_output(output, runner)


def filled() -> Scheduler:
    """Two requests that decode, around one that computes its prompt in several steps."""
    scheduler = one(scheduler_config__long_prefill_token_threshold=10)
    for name, length in (("a", 3), ("long", 55), ("b", 3)):
        scheduler.add_request(request(name, list(range(length)), max_tokens=4))
    step(scheduler)
    return scheduler


def check_the_others(scheduler: Scheduler, outputs: dict[int, Any], *others: str) -> None:
    """These requests got their token, the scheduler is consistent, and the requests end normally."""
    scheduler.core.check_invariants()
    found: dict[str, list[int]] = {name: list(told(outputs, name).new_token_ids) for name in others}
    for _ in range(30):
        _, outputs = step(scheduler)
        scheduler.core.check_invariants()
        for each in (each for client in outputs.values() for each in client.outputs):
            if each.request_id in found:
                found[each.request_id] += each.new_token_ids
    assert all(tokens == [9] * 3 for tokens in found.values()), found
    assert not scheduler.has_requests() and scheduler.get_kv_cache_usage() == 0


def a_contradiction_ends_its_request_and_no_other() -> None:
    bad: list[Any] = [[2**31], [-1], [2**40], [9, 9], ["x"], [None], [2**70]]
    for run in bad:
        scheduler = filled()
        _, outputs = step_with(scheduler, {"b": run})
        last = told(outputs, "b")
        assert (last.finish_reason, last.new_token_ids) == (FinishReason.ERROR, []), run
        assert outputs[0].finished_requests == {"b"}
        assert [each.request_id for each in outputs[0].outputs] == ["a", "b"]
        output, _ = step(scheduler)
        assert "b" in output.finished_req_ids, "its workers are told"
        scheduler = filled()
        check_the_others(scheduler, step_with(scheduler, {"b": run})[1], "a")


def a_token_of_a_row_that_samples_nothing_ends_its_request() -> None:
    for others in ({}, {"a": []}):  # in the second case the numbers of rows and tokens are equal
        scheduler = one()
        for name, length in (("a", 3), ("long", 55)):
            scheduler.add_request(request(name, list(range(length)), max_tokens=3))
        _, outputs = step_with(scheduler, {"long": [7], **others})
        assert told(outputs, "long").finish_reason is FinishReason.ERROR
        assert [each.request_id for each in outputs[0].outputs if each.new_token_ids] == ([] if others else ["a"])
        scheduler.core.check_invariants()
        tokens = [9] * (not others)
        while scheduler.has_requests():
            _, outputs = step(scheduler)
            tokens += [
                token for each in outputs.get(0, SimpleNamespace(outputs=[])).outputs for token in each.new_token_ids
            ]
        assert tokens == [9] * 3


def no_token_for_a_row_that_samples_is_accepted() -> None:
    for runs in ({"b": []}, {"a": [], "b": []}):
        scheduler = filled()
        _, outputs = step_with(scheduler, runs)
        assert not {each.request_id for client in outputs.values() for each in client.outputs} & set(runs)
        output, outputs = step(scheduler)
        assert output.preempted_req_ids == output.scheduled_cached_reqs.resumed_req_ids == set(runs)
        assert all(told(outputs, name).new_token_ids == [9] for name in runs)
        scheduler = filled()
        check_the_others(scheduler, step_with(scheduler, runs)[1], *{"a"} - set(runs))


def no_token_for_ever_is_an_error() -> None:
    scheduler = filled()
    for attempt in range(4):
        _, outputs = step_with(scheduler, {"b": []})
        scheduler.core.check_invariants()
        ends = [each.finish_reason for each in outputs[0].outputs if each.request_id == "b"]
        assert ends == ([FinishReason.ERROR] if attempt == 3 else [])


def no_token_of_a_request_that_was_aborted_or_preempted_is_accepted() -> None:
    for asynchronous in (False, True):
        for lacks in (False, True):
            scheduler = make_scheduler(v2=False, asynchronous=asynchronous, pipeline=1, policy="fcfs")
            for name in ("a", "b", "c"):
                scheduler.add_request(request(name, [ord(name), 2, 3], max_tokens=4))
            output = scheduler.schedule(False)
            scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
            scheduler.reset_prefix_cache(reset_running_requests=True)
            names = ["a"] if lacks else ["c", "b", "a"]
            places = {name: at for at, name in enumerate(names)}
            sampled = [[9] if name == "a" else [] for name in names]
            outputs = scheduler.update_from_output(output, ModelRunnerOutput(names, places, sampled))
            assert told(outputs, "a").new_token_ids == [9]
            scheduler.core.check_invariants()
            found = {"a": 1, "c": 0}
            while scheduler.has_requests():
                _, outputs = step(scheduler)
                for each in outputs[0].outputs:
                    found[each.request_id] += len(each.new_token_ids)
            assert found == {"a": 4, "c": 4}


def a_request_that_runs_and_is_not_in_the_result_ends() -> None:
    for name in ("b", "long"):
        scheduler = filled()
        _, outputs = step_with(scheduler, {}, name)
        assert told(outputs, name).finish_reason is FinishReason.ERROR
        check_the_others(scheduler, outputs, "a", *{"b"} - {name})
    scheduler = filled()
    output = scheduler.schedule(False)
    outputs = scheduler.update_from_output(output, ModelRunnerOutput(req_ids=[], req_id_to_index={}))
    assert {each.finish_reason for each in outputs[0].outputs} == {FinishReason.ERROR} and not scheduler.requests
    step(scheduler)
    assert not scheduler.has_requests()


def drafts_of_a_row_without_a_token_or_with_too_many() -> None:
    for run, reason in (([], None), ([5, 6, 7, 8], FinishReason.ERROR)):
        scheduler = one(
            speculative_config=SimpleNamespace(method="ngram", num_speculative_tokens_per_batch_size=None),
            num_speculative_tokens=3,
        )
        for name in ("d", "e"):
            scheduler.add_request(request(name, [ord(name), 2, 3], max_tokens=9))
        step(scheduler)
        scheduler.update_draft_token_ids(DraftTokenIds(["d", "e"], [[5, 6], [5, 6]]))
        _, outputs = step_with(scheduler, {"d": run, "e": [5, 9]})
        assert told(outputs, "e").new_token_ids == [5, 9]
        stats = outputs[0].scheduler_stats.spec_decoding_stats
        assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 1), "those of the other request"
        assert [each.finish_reason for each in outputs[0].outputs if each.request_id == "d"] == (
            [reason] if reason else []
        )
        scheduler.update_draft_token_ids(DraftTokenIds(["d", "e"], [[5, 6], [5, 6]]))
        _, outputs = step(scheduler)
        assert len(told(outputs, "e").new_token_ids) == 3
        if not reason:
            assert told(outputs, "d").new_token_ids == [9], "drafts of a request that was preempted are stale"
        scheduler.core.check_invariants()


def a_prompt_without_its_pooled_output_ends() -> None:
    for pooled in (None, [None, torch.ones(2)]):
        scheduler = one()
        for name in ("p", "q"):
            scheduler.add_request(Request(name, [ord(name), 2, 3], None, PoolingParams(task="embed")))
        output = scheduler.schedule(False)
        result = ModelRunnerOutput(["p", "q"], {"p": 0, "q": 1}, pooler_output=pooled)
        outputs = scheduler.update_from_output(output, result)
        assert told(outputs, "p").finish_reason is FinishReason.ERROR
        assert told(outputs, "q").finish_reason is (FinishReason.STOP if pooled else FinishReason.ERROR)
        scheduler.core.check_invariants()
        step(scheduler)
        assert not scheduler.has_requests() and scheduler.get_kv_cache_usage() == 0


def a_grammar_that_breaks_ends_its_request_and_no_other() -> None:
    class Broken(Grammars):
        def accept_tokens(self, request: Any, token_ids: list[int]) -> bool:
            raise RuntimeError("the grammar broke")

    scheduler = one()
    scheduler._grammars = Broken(0)
    scheduler.add_request(request("a", [1, 2, 3]))
    scheduler.add_request(request("g", [4, 5, 6], structured=True))
    _, outputs = step(scheduler)
    assert told(outputs, "g").finish_reason is FinishReason.ERROR
    assert told(outputs, "a").finish_reason is None and told(outputs, "a").new_token_ids == [9]


class Fails(FirstComeFirstServed):
    """An order policy that raises after a number of calls."""

    name = "fails"

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def peek(self) -> Any:
        if self.left:
            self.left -= 1
            raise ZeroDivisionError("nobody is next")
        return super().peek()


def a_policy_that_fails_costs_its_step() -> None:
    for asynchronous in (False, True):
        order = Fails()
        knobs = {"order": order}
        scheduler = make_scheduler(v2=False, asynchronous=asynchronous, pipeline=1, policy="fcfs", knobs=knobs)
        scheduler.add_request(request("a", [1, 2, 3], max_tokens=6))
        step(scheduler)
        scheduler.add_request(request("b", [1, 2, 3], max_tokens=6))
        order.left = 2
        for _ in range(2):
            output = scheduler.schedule(False)
            assert output == SchedulerOutput.make_empty() and scheduler.get_grammar_bitmask(output) is None
            outputs = scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
            assert not any(client.outputs for client in outputs.values())
            scheduler.core.check_invariants()
        output, outputs = step(scheduler)
        assert output.num_scheduled_tokens == {"a": 1, "b": 3}
        assert asynchronous == (output.scheduled_cached_reqs.all_token_ids == {"a": [1, 2, 3, 9]})
        assert told(outputs, "a").new_token_ids == told(outputs, "b").new_token_ids == [9]


def a_policy_may_fail_while_a_step_is_in_flight() -> None:
    order = Fails()
    scheduler = make_scheduler(v2=False, asynchronous=True, pipeline=1, policy="fcfs", knobs={"order": order})
    scheduler.add_request(request("a", [1, 2, 3], max_tokens=6))
    first = scheduler.schedule(False)
    scheduler.add_request(request("b", [1, 2, 3], max_tokens=6))
    order.left = 1
    without_rows = scheduler.schedule(False)
    assert without_rows.total_num_scheduled_tokens == 0 < first.total_num_scheduled_tokens
    runner = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[9]])
    assert told(scheduler.update_from_output(first, runner), "a").new_token_ids == [9]
    scheduler.update_from_output(without_rows, EMPTY_MODEL_RUNNER_OUTPUT)
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 3}


def a_policy_that_fails_too_often_is_replaced() -> None:
    order = Fails()
    scheduler = one(knobs={"order": order})
    scheduler.add_request(request("a", [1, 2, 3]))
    scheduler.add_request(request("b", [1, 2, 3]))
    order.left = 1000
    for _ in range(3):
        output = scheduler.schedule(False)
        assert not output.num_scheduled_tokens
        scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 3, "b": 3}
    assert scheduler.core.stats().num_replaced_policies == {"order": 1}
    scheduler.core.check_invariants()


def preemptions_are_reported_for_the_causes_that_vllm_has() -> None:
    """Priority preemption is not: vLLM's metrics count the events, and vLLM preempts for memory and by resets alone."""
    scheduler = make_scheduler(v2=False, asynchronous=False, pipeline=1, policy="priority")
    for at in range(6):  # every sequence slot
        scheduler.add_request(request(f"r{at}", [at, 2, 3], priority=5, max_tokens=8))
    step(scheduler)
    scheduler.add_request(request("urgent", [7, 2, 3], priority=0, max_tokens=1))
    output, _ = step(scheduler)
    assert output.preempted_req_ids == {"r5"}
    output, outputs = step(scheduler)
    types = [event.type for event in told(outputs, "r5").events]
    assert EngineCoreEventType.PREEMPTED not in types and EngineCoreEventType.SCHEDULED in types
    assert scheduler.core.stats().num_displaced == 1

    scheduler.reset_prefix_cache(reset_running_requests=True)
    output, outputs = step(scheduler)
    assert output.preempted_req_ids == {f"r{at}" for at in range(6)}
    for name in output.preempted_req_ids:
        assert EngineCoreEventType.PREEMPTED in [event.type for event in told(outputs, name).events]


def raises(kind: type[Exception], words: str, call: Any, *arguments: Any) -> None:
    """Check that the call raises this error, with these words."""
    try:
        call(*arguments)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{call} does not raise")


def scheduler_attributes_are_correct_and_read_only() -> None:
    scheduler = one()
    a, g, s = (
        request("a", [1, 2, 3]),
        request("g", [4, 5], structured=True),
        request("s", [6], max_tokens=1, resumable=True),
    )
    g.structured_output_request.grammar = None
    for each in (a, g, s):
        scheduler.add_request(each)
    assert isinstance(a, Request) and type(a).__name__ == "Request"
    assert list(scheduler.waiting) == [a, s, g] and scheduler.deferred_waiting == scheduler.skipped_waiting == {g}
    assert scheduler.waiting.peek_request() is a and scheduler.running == []
    assert g.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR and dict(scheduler.requests) == {
        "a": a,
        "g": g,
        "s": s,
    }
    output = scheduler.schedule(False)
    assert scheduler.running == [a, s] and scheduler.waiting == [g]
    assert (a.status, a.num_computed_tokens, a.num_output_tokens) == (RequestStatus.RUNNING, 3, 0)
    manager = scheduler.kv_cache_manager
    assert manager.get_block_ids("a") == output.scheduled_new_reqs[0].block_ids and manager.get_block_ids("g") == ([],)
    assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 3
    assert manager.usage == manager.block_pool.get_usage() > 0
    runner = ModelRunnerOutput(req_ids=["a", "s"], req_id_to_index={"a": 0, "s": 1}, sampled_token_ids=[[9], [8]])
    scheduler.update_from_output(output, runner)
    assert (list(a.output_token_ids), list(a.all_token_ids), a.num_tokens) == ([9], [1, 2, 3, 9], 4)
    assert len(a.block_hashes) == 1, "with the first full block"
    assert s.status is RequestStatus.WAITING_FOR_STREAMING_REQ and s in scheduler.waiting and s.num_computed_tokens == 0
    scheduler.add_request(request("s", [7, 7], max_tokens=1, resumable=True))
    assert s.status is RequestStatus.WAITING and list(s.all_token_ids) == [6, 7, 7] and s.num_output_tokens == 0
    g.structured_output_request.grammar = SimpleNamespace()
    scheduler._grammars = Grammars(9)
    step(scheduler)
    assert g.status is RequestStatus.RUNNING and list(g.output_token_ids) == [9]
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (a.status, a.num_computed_tokens, a.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.finished_req_ids == {"a", "s"}, "s is between two parts"
    again = request("a", [5])
    scheduler.add_request(again)
    assert a.is_finished() and list(a.output_token_ids) == [9, 9] and a.num_preemptions == 1, (
        "not those of its namesake"
    )
    for name, value in (
        ("status", RequestStatus.WAITING),
        ("num_computed_tokens", 7),
        ("num_preemptions", 7),
        ("num_output_placeholders", 7),
        ("spec_token_ids", [7]),
        ("is_prefill_chunk", True),
    ):
        raises(AttributeError, f"{name} of request 'a' is decided by", setattr, again, name, value)
    for call, *arguments in (
        (scheduler.running.append, a),
        (scheduler.running.clear,),
        (scheduler.waiting.pop_request,),
        (scheduler.waiting.remove_requests, [a]),
        (scheduler.waiting.__setitem__, 0, a),
        (scheduler.requests.pop, "a"),
        (scheduler.requests.__setitem__, "b", a),
        (scheduler.requests.clear,),
    ):
        raises(TypeError, "read-only here: call add_request", call, *arguments)
    for name in ("running", "waiting", "deferred_waiting"):
        raises(AttributeError, "has no setter", setattr, scheduler, name, [])
    assert scheduler.structured_output_manager is scheduler._grammars and scheduler.max_num_running_reqs == 6
    for name in ("max_num_running_reqs", "finished_req_ids", "vllm_config", "structured_output_manager"):
        raises(AttributeError, f"{name} of Pointsman's scheduler is read-only", setattr, scheduler, name, 1)


def kv_cache_config_of(spec: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], needs_kv_cache_zeroing=False)


CASES = [
    a_client_gets_the_end_of_an_idle_session,
    ends_are_reported_during_a_pause,
    a_client_error_is_reported_since_0_33,
    a_grammar_refuses_the_token_that_ends_its_request,
    large_numbers_are_accepted_as_in_vllm,
    a_retention_beyond_the_operators_bound_ends_its_request,
    an_adapter_of_another_path_is_another_one,
    kv_events_are_vllms,
    drafts_are_counted_up_to_what_the_model_accepted,
    sampling_masks_reach_the_client,
    a_prompt_that_is_pooled_may_fill_the_model,
    requests_that_skip_the_prefix_cache_still_add_blocks_to_it,
    models_whose_kv_vllm_manages_in_its_own_ways_are_refused,
    a_contradiction_ends_its_request_and_no_other,
    a_token_of_a_row_that_samples_nothing_ends_its_request,
    no_token_for_a_row_that_samples_is_accepted,
    no_token_for_ever_is_an_error,
    no_token_of_a_request_that_was_aborted_or_preempted_is_accepted,
    a_request_that_runs_and_is_not_in_the_result_ends,
    drafts_of_a_row_without_a_token_or_with_too_many,
    a_prompt_without_its_pooled_output_ends,
    a_grammar_that_breaks_ends_its_request_and_no_other,
    a_policy_that_fails_costs_its_step,
    a_policy_may_fail_while_a_step_is_in_flight,
    a_policy_that_fails_too_often_is_replaced,
    preemptions_are_reported_for_the_causes_that_vllm_has,
    scheduler_attributes_are_correct_and_read_only,
]


def print_failures(cases: Sequence[Callable[[], None]]) -> None:
    """Run each case, and print one JSON line: by its name the failure, or null."""
    found = {}
    for case in cases:
        try:
            case()
        except Exception:
            found[case.__name__] = traceback.format_exc(limit=-3)
        else:
            found[case.__name__] = None
    print(json.dumps(found))


def main() -> None:
    init_none_hash(HASH)
    print_failures(CASES)


if __name__ == "__main__":
    main()
