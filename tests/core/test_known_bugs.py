"""Known bugs of schedulers, one test each. The docstrings describe the bug, and name the system if it was reported in
public. `tests/property` tests the general promises at random.
"""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.core import (
    ConfigError,
    EncoderInput,
    FinishReason,
    PauseMode,
    Reason,
    RequestRefused,
    RequestStatus,
    StepResult,
    UnknownTransfer,
)
from tests.core.helpers import (
    Host,
    blocks_of,
    cached_of,
    connected,
    names,
    reference_output,
    small_config,
    tokens_of,
)

NO_CACHE = {"enable_prefix_caching": False}

# ------------------------------------------------------------ requests that can never fit, or only just


def test_a_prompt_larger_than_the_pool_does_not_wait_for_ever() -> None:
    """It was accepted, never fitted, and blocked the queue for ever: vLLM, nano-vLLM, miniVLLM."""
    host = Host(num_blocks=4, max_model_len=64)
    with pytest.raises(RequestRefused, match="needs 5 KV blocks of 4, and the pool has 4"):
        host.add("large", 17)
    host.add("small", 4, max_tokens=1)
    assert tokens_of(host.step()) == {"small": 4}


def test_a_request_that_outgrows_the_pool_while_it_decodes_ends() -> None:
    """It preempted all others, then itself, and reached the same limit again: nano-vLLM stopped at an assertion."""
    host = Host(num_blocks=4, max_model_len=64)
    alone = host.add("alone", 12, max_tokens=50)
    other = host.add("other", 4, max_tokens=3)
    host.run_to_end()
    assert (alone.finish_reason, alone.finish_detail) == (FinishReason.LENGTH, "kv_capacity")
    assert alone.num_tokens == 4 * 4 + 1, "the last token is sampled and needs no slot"
    assert other.num_output_tokens == 3


def test_a_prompt_that_fits_only_in_part_is_not_admitted_repeatedly() -> None:
    """It was admitted because its first chunk fitted, and preempted at the second or third chunk, again and again while
    others decoded: vLLM before it asked for the full sequence."""
    host = Host(num_blocks=8, max_num_batched_tokens=8, max_model_len=32, **NO_CACHE)
    host.add("decodes", 8, max_tokens=8)
    host.step()
    long = host.add("long", 24, max_tokens=2)
    while host.scheduler.get_request("decodes"):
        assert tokens_of(host.step()) == {"decodes": 1}
    host.run_to_end()
    assert long.num_preemptions == 0


def test_two_long_prompts_are_not_admitted_for_the_same_free_blocks() -> None:
    """Each passed the check that its whole sequence fits, counting blocks that the other still needed, and they
    preempted each other: vLLM's check sees only allocated blocks."""
    host = Host(num_blocks=8, long_prefill_token_threshold=4, max_model_len=32, **NO_CACHE)
    requests = [host.add("a", 22, max_tokens=2), host.add("b", 22, max_tokens=2)]
    assert tokens_of(host.step()) == {"a": 4}, "7 blocks are free, b needs 6, and a still needs 5"
    assert host.explain("b").reason is Reason.FULL_SEQUENCE
    host.run_to_end()
    assert [request.num_preemptions for request in requests] == [0, 0]


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 1, "max_num_batched_tokens": 3},
        {"long_prefill_token_threshold": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 5, "long_prefill_token_threshold": 3},
    ],
    ids=str,
)
def test_rounding_never_makes_a_chunk_empty(knobs: dict[str, Any]) -> None:
    """A chunk was rounded down, to whole blocks (for hybrid models) or by other limits, to 0 tokens in every step:
    vLLM."""
    host = Host(**knobs)
    prompt = host.prompt(8)
    for request_id in ("a", "b", "c"):
        host.add(request_id, [*prompt, *host.prompt(3)], max_tokens=2)
    for _ in range(60):
        if not host.scheduler.has_unfinished_requests():
            break
        assert host.step().total_num_scheduled_tokens > 0
    assert not host.scheduler.has_unfinished_requests()


@pytest.mark.parametrize("length", [4, 8, 16])
def test_a_fully_cached_prompt_still_computes_a_token(length: int) -> None:
    """No token was left to compute, so there was no logit to sample from: an assertion in vLLM's connectors, an empty
    tensor in nano-vLLM."""
    host = Host()
    prompt = host.prompt(length)
    host.add("first", prompt, max_tokens=1)
    host.run_to_end()
    again = host.add("again", prompt, max_tokens=2)
    output = host.step()
    assert cached_of(output) == {"again": length - 4}
    assert tokens_of(output) == {"again": 4} and output.samples.tolist() == [True]
    host.run_to_end()
    assert again.output_token_ids.tolist() == reference_output(prompt, 2)


def test_a_limit_of_0_does_not_mean_no_limit() -> None:
    """0 was taken as "not given" (it is false in Python), or accepted and then caused an endless loop."""
    host = Host()
    with pytest.raises(RequestRefused, match="is 0; it must be between 1"):
        host.add("none", 4, max_tokens=4, max_total_tokens=0)
    silent = host.add("silent", 4, max_tokens=0)
    host.run_to_end()
    assert silent.output_token_ids.tolist() == []
    for knob in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_steps_in_flight"):
        with pytest.raises(ConfigError, match=f"{knob} is 0"):
            small_config(**{knob: 0})
    request = host.add("a", 4)
    host.step()
    host.step()
    host.finish("a", FinishReason.STOP, keep_tokens=0)
    assert request.output_token_ids.tolist() == []


def test_an_empty_step_can_be_updated_or_failed() -> None:
    """An empty batch went to the model, or the step was never updated and stopped all later ones: vLLM, nano-vLLM."""
    host = Host(max_steps_in_flight=2)
    first, second = host.schedule(), host.schedule()
    assert (first.num_rows, second.total_num_scheduled_tokens) == (0, 0)
    assert host.scheduler.input_token_ids(second).tolist() == []
    host.add("a", 4, max_tokens=1)
    host.update(first)
    host.fail(second)
    assert tokens_of(host.step()) == {"a": 4}


# ------------------------------------------------------------ victims


@pytest.mark.parametrize("shortage", ["replan", "in-order"])
def test_a_victim_already_scheduled_in_the_step_is_removed_from_it(shortage: str) -> None:
    """The victim came before the asking row and already had its share of the step. It stayed in the output without
    blocks (a crash), or its tokens stayed charged to the budget: vLLM under "priority"."""
    host = Host(order="priority", displace=False, shortage=shortage, num_blocks=4, max_model_len=16, **NO_CACHE)
    low = host.add("low", 3, max_tokens=5, priority=9)
    host.step()
    host.add("asks", 8, max_tokens=4, priority=0)
    assert tokens_of(host.step()) == {"low": 1, "asks": 8}
    output = host.step()  # low has taken the last block when the other asks for one
    assert names(output.preempted) == ["low"]
    assert tokens_of(output) == {"asks": 1}
    assert output.total_num_scheduled_tokens == 1 and len(output.block_ids) == 1
    host.run_to_end()
    assert low.output_token_ids.tolist() == reference_output(low.prompt_token_ids, 5)


@pytest.mark.parametrize("shortage", ["replan", "in-order"])
def test_the_token_budget_of_a_victim_goes_to_other_requests(shortage: str) -> None:
    """The same victim, with a short budget: its token stayed charged, and the next request's chunk was one token
    shorter."""
    host = Host(
        order="priority",
        displace=False,
        shortage=shortage,
        num_blocks=6,
        max_num_batched_tokens=8,
        max_num_seqs=3,
        max_model_len=24,
        full_sequence_must_fit=False,
        **NO_CACHE,
    )
    host.add("low", 14, priority=9)
    host.step()
    host.step()
    host.add("asks", 4, priority=0)
    host.add("long", 20, priority=1)
    host.step()
    output = host.step()
    assert names(output.preempted) == ["low"]
    assert tokens_of(output) == {"asks": 1, "long": 7}


@pytest.mark.parametrize("shortage", ["replan", "in-order"])
def test_preempting_an_earlier_row_skips_no_later_row(shortage: str) -> None:
    """Removing the victim from the list moved later rows forward by one, but not the loop's index: the next row was
    silently left out of the step. vLLM under "priority"."""
    host = Host(order="priority", displace=False, shortage=shortage, num_blocks=5, max_model_len=20, **NO_CACHE)
    host.add("low", 2, max_tokens=12, priority=9)
    host.step()
    host.add("asks", 8, max_tokens=8, priority=0)
    host.add("next", 5, max_tokens=8, priority=1)
    assert tokens_of(host.step()) == {"low": 1, "asks": 8, "next": 5}
    output = host.step()
    assert names(output.preempted) == ["low"]
    assert tokens_of(output) == {"asks": 1, "next": 1}


def test_a_preemption_with_output_in_flight_keeps_each_token_once() -> None:
    """The sample arrived after the row was released: it was appended to a request that recomputed its prompt, or was
    dropped and sampled again. vLLM with asynchronous scheduling."""
    host = Host(num_blocks=4, max_model_len=16, max_steps_in_flight=3, **NO_CACHE)
    prompts = {"a": host.prompt(7), "b": host.prompt(7)}
    requests = {name: host.add(name, prompt, max_tokens=6) for name, prompt in prompts.items()}
    b = requests["b"]
    first, second = host.schedule(), host.schedule()
    host.update(first)
    third = host.schedule()
    assert names(third.preempted) == ["b"] and "b" in names(second.requests)
    assert (b.num_pending, b.num_output_tokens) == (1, 1)
    host.abort("a")
    fourth = host.schedule()
    assert names(fourth.requests) == [], "b fits again, and its token is still in flight"
    assert host.update(second).counts.tolist() == [0, 1]
    assert (b.num_pending, b.num_output_tokens) == (0, 2)
    host.update(third)
    host.update(fourth)
    host.run_to_end()
    assert b.output_token_ids.tolist() == reference_output(prompts["b"], 6)


def test_a_finish_with_output_in_flight_drops_the_sample() -> None:
    """The step's result was looked up by a finished request (a KeyError), or appended to it: vLLM."""
    host = Host(max_steps_in_flight=2)
    a, b = host.add("a", 4), host.add("b", 4)
    first = host.schedule()
    second = host.schedule()
    host.update(first)
    kept = a.output_token_ids.tolist()
    host.finish("a", FinishReason.STOP, stop_reason="###")
    update = host.update(second)
    assert update.counts.tolist() == [0, 1] and update.finished == ()
    assert a.output_token_ids.tolist() == kept and b.num_output_tokens == 2


def test_a_row_is_not_reused_while_a_step_in_flight_names_it() -> None:
    """The row of a finished request went to the next one, and the old request's sample in flight was taken for the new
    one's."""
    host = Host(max_steps_in_flight=2, max_num_seqs=1)
    host.add("old", 4)
    in_flight = host.schedule()
    host.abort("old")
    new = host.add("new", 4, max_tokens=2)
    after = host.schedule()
    assert tokens_of(after) == {"new": 4}
    assert after.rows.tolist() != in_flight.rows.tolist()
    host.scheduler.update(in_flight, StepResult([7]), host.now)
    assert new.num_output_tokens == 0
    host.update(after)
    host.run_to_end()
    assert new.output_token_ids.tolist() == reference_output(new.prompt_token_ids, 2)


def test_a_step_admits_only_what_it_can_allocate() -> None:
    """Several requests were checked against the same free blocks, or against cache hits that were evicted before the
    allocation, and the last ones got no blocks: an assertion in TensorRT-LLM and in vLLM's connectors."""
    host = Host(num_blocks=4, max_model_len=16, max_num_batched_tokens=64)
    for request_id in "abc":
        host.add(request_id, 8, max_tokens=1)
    output = host.step()
    assert tokens_of(output) == {"a": 8, "b": 8}
    tables = [block for request_id in "ab" for block in blocks_of(output, request_id)]
    assert len(set(tables)) == 4
    assert tokens_of(host.step()) == {"c": 8}


def test_a_deferred_head_is_checked_again_when_it_could_start() -> None:
    """The verdict was remembered by the head's length and the free blocks alone. Another request computed its prefix
    meanwhile, so that it needed fewer blocks, and it was not checked again."""
    host = Host(num_blocks=8, max_model_len=32, long_prefill_token_threshold=2)
    prompt = host.prompt(17)
    host.add("computes", prompt)
    host.add("head", prompt)
    host.step()
    assert host.explain("head").missing == 2, "it needs 5 blocks, the other still needs 4, and 7 are free"
    host.step()
    assert host.explain("head").missing == 1, "the first block of its prompt is cached now"
    while "head" not in names(host.step().admitted):
        assert host.explain("head").missing > 0
    assert host.explain("computes").phase == "prefill"


@pytest.mark.parametrize("num_outputs", [1, 9])
def test_a_resumed_request_recomputes_its_prompt_before_it_decodes(num_outputs: int) -> None:
    """A request with output, or with a computed prompt, was taken to decode. A resumed request has output and
    recomputes its KV; in chunks, beyond its prompt, it seemed to decode."""
    host = Host(max_num_batched_tokens=4, max_num_seqs=1, **NO_CACHE)
    request = host.add("a", 5, max_tokens=num_outputs + 2)
    while request.num_output_tokens < num_outputs:
        host.step()
    host.park("a")
    host.ready("a")
    told = []
    while request.num_output_tokens == num_outputs:
        output = host.schedule()
        told.append((request.phase, tokens_of(output)["a"], bool(output.samples[0])))
        host.update(output)
    total = 5 + num_outputs
    chunks = [min(4, total - start) for start in range(0, total, 4)]
    assert told == [("prefill", n, index == len(chunks) - 1) for index, n in enumerate(chunks)]
    assert request.phase == "decoding"


# ------------------------------------------------------------ blocks, and what is in them


def test_blocks_shared_by_two_finishing_requests_are_freed_once() -> None:
    """All tables of a step were freed at once with `counts[blocks] -= 1`, which subtracts only once if a block occurs
    twice: the block leaked, or was free while it was held."""
    host = Host()
    prompt = host.prompt(8)
    host.add("a", [*prompt, 1], max_tokens=2)
    host.add("b", [*prompt, 2], max_tokens=2)
    output = host.step()
    assert blocks_of(output, "a")[:2] == blocks_of(output, "b")[:2]
    host.step()
    assert host.stats().num_running == 0
    assert host.stats().num_free_blocks == 16


def test_only_computed_blocks_of_a_prefix_are_cache_hits() -> None:
    """All blocks of a prompt could be found as soon as they were allocated, also those of later chunks: the second
    request read blocks that were not written yet. nano-vLLM with chunks, ATOM."""
    host = Host(max_num_batched_tokens=12, long_prefill_token_threshold=8)
    prompt = host.prompt(24)
    host.add("first", prompt)
    host.add("second", prompt)
    output = host.step()
    assert tokens_of(output) == {"first": 8, "second": 4}
    assert cached_of(output) == {"first": 0, "second": 8}


def test_without_share_within_step_blocks_of_the_step_are_no_hits() -> None:
    """Two requests of one step shared a block that one of them wrote in that step, in a host whose rows do not wait for
    each other."""
    host = Host(share_within_step=False)
    prompt = host.prompt(8)
    host.add("first", prompt)
    host.add("second", prompt)
    assert cached_of(host.step()) == {"first": 0, "second": 0}


@pytest.mark.parametrize("aborted", [False, True])
def test_blocks_of_a_failed_step_are_no_cache_hits(aborted: bool) -> None:
    """The step did not run, or its request was aborted before, and its unwritten blocks stayed in the prefix cache:
    vLLM, which registers blocks when they are allocated."""
    host = Host(max_steps_in_flight=2)
    prompt = host.prompt(12)
    host.add("first", prompt)
    output = host.schedule()
    if aborted:
        host.abort("first")
    host.fail(output)
    if not aborted:
        host.abort("first")
    host.add("second", prompt)
    assert cached_of(host.step()) == {"second": 0}


@pytest.mark.parametrize("preempt_running", [False, True])
def test_after_a_reset_kv_of_running_requests_is_no_cache_hit(preempt_running: bool) -> None:
    """The cache was emptied, and requests that ran at that moment put back their blocks when they finished: KV of the
    old weights. vLLM refuses the reset while anything runs, or preempts it."""
    host = Host(max_steps_in_flight=2)
    prompt = host.prompt(12)
    host.add("old", prompt, max_tokens=3)
    in_flight = host.schedule()
    host.scheduler.reset_prefix_cache(host.now, preempt_running=preempt_running)
    host.scheduler.check_invariants()
    host.add("new", [*prompt, *host.prompt(1)], max_tokens=8)
    host.update(in_flight)
    if not preempt_running:
        host.finish("old", FinishReason.STOP)
        assert cached_of(host.step()) == {"new": 0}
        return
    output = host.step()
    assert cached_of(output)["old"] == 0, "its own KV from before the reset is gone, too"


def test_a_block_half_computed_at_a_reset_is_no_cache_hit() -> None:
    """The request had published nothing when the cache was emptied. Its first block, half of it with KV of the old
    weights, was completed afterwards and put into the new cache."""
    host = Host(long_prefill_token_threshold=2)  # which holds while there are other requests
    prompt = host.prompt(12)
    host.add("old", prompt)
    host.add("other", 30)
    assert tokens_of(host.step())["old"] == 2
    host.reset_prefix_cache()
    assert tokens_of(host.step())["old"] == 2
    host.add("new", prompt)
    assert cached_of(host.step()) == {"new": 0}


def test_an_admission_does_not_evict_its_own_cache_hits() -> None:
    """The cache hit was counted, and the allocation then took the request's own cached blocks, which were free: it
    overwrote the KV that it was about to read. Or the hit grew between check and allocation, and the number of tokens
    to compute was stale (nano-vLLM)."""
    host = Host(num_blocks=5, max_model_len=20)
    prompt = host.prompt(8)
    host.add("writes", [*prompt, 1], max_tokens=1)
    host.run_to_end()
    host.add("holds", 8, max_tokens=12)
    host.step()
    assert host.stats().num_cached_free_blocks == 2 and host.stats().num_free_blocks == 3
    host.add("reads", [*prompt, *host.prompt(8)], max_tokens=2)
    output = host.step()
    assert names(output.admitted) == []
    assert host.explain("reads").missing == 2, (
        "2 free cached blocks and 2 new ones are needed, and 2 are free after holds' third"
    )
    host.abort("holds")
    output = host.step()
    assert cached_of(output) == {"reads": 8} and tokens_of(output) == {"reads": 8}
    table = blocks_of(output, "reads")
    assert len(set(table)) == 4


def test_an_adapter_named_like_a_cache_salt_shares_no_cached_blocks() -> None:
    """The key of a block had adapter name and cache salt as bare strings, one after the other: vLLM, and in another
    form SGLang."""
    host = Host(max_loras=2)
    prompt = host.prompt(8)
    host.add("adapter", [*prompt, 1], max_tokens=1, adapter=("secret", 0))
    host.run_to_end()
    host.add("salt", [*prompt, 1], max_tokens=1, cache_salt="secret")
    assert cached_of(host.step()) == {"salt": 0}
    host.add("both", [*prompt, 1], max_tokens=1, cache_salt="secret", adapter=("secret", 0))
    assert cached_of(host.step()) == {"both": 0}


# ------------------------------------------------------------ adapters and pauses


def test_a_partial_prefill_counts_against_the_adapter_slots() -> None:
    """Only decoding requests were counted. A partial prefill brought one adapter too many into the step: SGLang
    crashed."""
    host = Host(max_loras=1, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    host.add("chunked", 12, adapter=("one", 0))
    host.add("other", 4, adapter=("two", 0))
    for _ in range(2):
        assert tokens_of(host.step()) == {"chunked": 4}
    assert host.explain("other").reason is Reason.ADAPTER_SLOTS


def test_pausing_twice_is_undone_by_one_resume() -> None:
    """Pauses were counted, or the second one saved the paused state as the state to return to, so one resume was not
    enough."""
    host = Host()
    request = host.add("a", 4, max_tokens=2)
    for mode in (PauseMode.ALL, PauseMode.ALL, PauseMode.ADMISSIONS):
        host.scheduler.pause(host.now, mode)
        assert tokens_of(host.step()) == {}
    host.scheduler.resume(host.now)
    host.run_to_end()
    assert request.status is RequestStatus.FINISHED_LENGTH


# ------------------------------------------------------------ KV from elsewhere, and embeddings


@pytest.mark.parametrize("order", ["abort first", "loaded first", "abort after its admission"])
def test_an_abort_and_the_end_of_a_load_may_come_in_any_order(order: str) -> None:
    """The blocks of an aborted load were free at once, while the device still wrote them; or they were kept for an end
    of the load that had already been reported; or the end concerned a finished request, and an assertion stopped the
    engine: vLLM, in different versions."""
    host, connector = connected()
    connector.offers["a"] = (8, True)
    host.add("a", 12)
    (load,) = host.step().loads
    if order == "abort first":
        host.abort("a")
        requests = [host.add(name, 28, max_tokens=1) for name in ("b", "c")]
        taken = {block for output in host.run_to_end() for block in output.block_ids.tolist()}
        assert len(taken) == 14 and not taken & set(load.block_ids.tolist()), "the device may still write the others"
        assert host.transfer_done(load.transfer_id) is None
        assert [request.num_output_tokens for request in requests] == [1, 1]
    else:
        host.transfer_done(load.transfer_id)
        if order == "abort after its admission":
            assert cached_of(host.step()) == {"a": 8}
        host.abort("a")
    host.step()
    assert (host.stats().num_free_blocks, host.stats().num_transfers) == (16, 0)
    connector.offers["a"] = (0, False)
    again = host.add("a", 8, max_tokens=2)
    with pytest.raises(UnknownTransfer):
        host.transfer_done(load.transfer_id)
    host.run_to_end()
    assert again.output_token_ids.tolist() == reference_output(again.prompt_token_ids, 2)


def test_a_loaded_request_and_a_head_without_blocks_do_not_deadlock() -> None:
    """The head of the queue lacked blocks that a loaded request behind it held, and the loaded one had to wait behind
    the head: a deadlock, with offloading to host memory in vLLM."""
    host, connector = connected(max_model_len=40)
    connector.offers["loaded"] = (24, True)
    host.add("runs", 20, max_tokens=3)
    loaded = host.add("loaded", 28, max_tokens=2)
    (load,) = [load for _ in range(2) for load in host.step().loads]
    first = host.add("first", 38, max_tokens=2, arrival_time=0.0)
    host.transfer_done(load.transfer_id)
    host.step()
    told = host.explain("first")
    assert (told.reason, host.explain("loaded").blocker) == (Reason.FULL_SEQUENCE, "first")
    assert [holder.request_id for holder in told.holders] == ["runs", "loaded"]
    host.run_to_end()
    assert (first.num_output_tokens, loaded.num_output_tokens) == (2, 2)


def test_a_request_that_waits_holds_no_embeddings() -> None:
    """It took its entry in the encoder cache before its blocks, and kept it when blocks were missing, or while its KV
    was loaded. Running requests had no space for their own embeddings: a deadlock in vLLM."""
    host, connector = connected(encoder_budget=8, encoder_cache_size=8, num_blocks=10, max_model_len=24)
    connector.offers["loads"] = (8, True)
    host.add("runs", 16, max_tokens=8)
    host.step()
    host.add("loads", 20, max_tokens=1, encoder_inputs=[EncoderInput("picture", 10, 8)])
    (load,) = host.step().loads
    assert host.stats().encoder_cache_usage == 0.0
    for _ in range(4):
        host.step()
    host.transfer_done(load.transfer_id, num_loaded_tokens=0)
    host.step()
    assert host.explain("loads").reason is Reason.FULL_SEQUENCE
    assert host.stats().encoder_cache_usage == 0.0
    host.run_to_end()
    assert host.stats().num_encoder_computed == 8
