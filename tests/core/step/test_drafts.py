"""Speculation: drafts from their proposal to their acceptance or rejection."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    ConfigError,
    ProposalError,
    Recorder,
    Request,
    SchedulerOutput,
    StepOrderError,
    StepResult,
    StepResultError,
    UnknownRequest,
    replay,
)
from pointsman.core.state import batch
from tests.core.helpers import EOS, Host, drafts_of, names, reference_output, small_config, tokens_of
from tests.forms import short_or_long

WRONG = 998  # the model never samples it


def speculative(**overrides: Any) -> Host:
    """A host with up to 3 drafts per request and step."""
    return Host(**{"num_draft_tokens": 3, "max_num_batched_tokens": 16, "max_num_seqs": 4, **overrides})


def right(request: Request, count: int) -> list[int]:
    """The next `count` tokens that the model will sample for a request."""
    return reference_output(request.all_token_ids, count)


def decoding(host: Host, request_id: str = "a", prompt: int = 4, **fields: Any) -> tuple[Request, SchedulerOutput]:
    """A request that has sampled its first token, and the output of that step."""
    request = host.add(request_id, prompt, **fields)
    return request, host.step()


# ---------------------------------------------------------------------- one request


def test_a_step_computes_and_counts_the_newest_token_and_the_drafts() -> None:
    host = speculative()
    request, output = decoding(host)
    drafts = right(request, 3)
    newest = int(request.output_token_ids[-1])
    assert host.propose(output, {"a": drafts}) == 3
    output = host.schedule()
    assert (tokens_of(output), drafts_of(output, 0)) == ({"a": 4}, drafts)
    assert host.scheduler.input_token_ids(output).tolist() == [newest, *drafts]
    assert names(output.decode) == ["a"]
    assert (request.num_computed_tokens, request.num_pending) == (8, 1)
    assert host.update(output).counts.tolist() == [4]
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 5)
    assert (request.num_tokens, request.num_computed_tokens, request.num_pending) == (9, 8, 0)
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, 3)


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_rejected_drafts_are_recomputed_in_the_same_slots(num_right: int) -> None:
    host = speculative()
    request, output = decoding(host)
    host.propose(output, {"a": [*right(request, num_right), WRONG, WRONG, WRONG][:3]})
    output = host.step()
    assert output.num_draft_tokens.tolist() == [3]
    assert request.num_tokens == 4 + 1 + num_right + 1
    assert request.num_computed_tokens == request.num_tokens - 1
    assert len(output.blocks(0)) == 1, "for positions 4 to 7"
    assert host.explain("a").num_blocks == 2
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 16)
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, num_right)


def test_steps_with_drafts_give_the_tokens_of_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "RECENT_WITH_DRAFTS", 64)
    max_tokens = short_or_long(250, 590)
    host = speculative(max_model_len=600, num_blocks=600, block_size=1)
    request, output = decoding(host, max_tokens=max_tokens)
    steps = 0
    while not request.is_finished:
        length = steps % 4
        host.propose(output, {"a": [*right(request, length // 2), *[WRONG] * (length - length // 2)]})
        output = host.step()
        steps += 1
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, max_tokens), (
        "past many flushes"
    )
    assert steps < max_tokens


def test_a_stop_token_among_accepted_drafts_ends_the_request_there() -> None:
    host = speculative()
    prompt = host.prompt(4)
    stop = reference_output(prompt, 4)[2]
    request = host.add("a", prompt, stop_token_ids=(stop,))
    host.propose(host.step(), {"a": right(request, 3)})
    update = host.update(host.schedule())
    assert update.counts.tolist() == [2], "the second of four"
    assert (request.finish_reason.value, request.stop_reason) == ("stop", stop)  # type: ignore[union-attr]
    assert request.output_token_ids.tolist() == reference_output(prompt, 3)
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, 2), "the third is dropped"
    assert host.stats().num_free_blocks == 16


@pytest.mark.parametrize("stops", [{"eos_token_ids": (EOS,)}, {"eos_token_ids": (EOS,), "stop_token_ids": (5,)}])
def test_eos_among_accepted_drafts_ends_a_request_after_min_tokens(stops: dict[str, Any]) -> None:
    host = speculative()
    for request_id, min_tokens in (("a", 0), ("b", 4)):
        host.add(request_id, 2, min_tokens=min_tokens, **stops)
    host.propose(host.step(), {"a": [1, EOS, 2], "b": [1, EOS, 2]})
    output = host.schedule()
    update = host.scheduler.update(output, StepResult([1, EOS, 2, 3, 1, EOS, 2, 3], [4, 4]), host.now)
    host.scheduler.check_invariants()
    assert names(update.finished) == ["a"]
    assert (update.counts.tolist(), update.token_ids.tolist()) == ([2, 4], [1, EOS, 1, EOS, 2, 3])


def test_drafts_never_exceed_the_token_limit() -> None:
    host = speculative()
    request, output = decoding(host, max_tokens=4)
    assert host.propose(output, {"a": right(request, 3)}) == 2
    assert host.update(host.schedule()).counts.tolist() == [3]
    assert request.is_finished
    last, output = decoding(host, "b", max_tokens=2)
    assert host.propose(output, {"b": right(last, 3)}) == 0, "its next token is its last"


# ---------------------------------------------------------------------- rows without drafts


@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_drafts_are_cut_exactly_at_the_token_limit(max_tokens: int) -> None:
    """Another request, far from its own limit, runs during the whole test."""
    host = speculative()
    other, _ = decoding(host, "other", max_tokens=60)
    request, output = decoding(host, max_tokens=max_tokens + 1)
    while not request.is_finished:
        left = max_tokens + 1 - request.num_output_tokens
        for _ in range(2):  # proposed again, the answer is the same
            drafts = {"a": right(request, 3), "other": [WRONG] * 3}
            assert host.propose(output, drafts) == min(3, left - 1) + 3
        output = host.step()
    assert request.num_output_tokens == max_tokens + 1 and not other.is_finished


def test_a_partial_prefill_gets_no_drafts() -> None:
    host = speculative()
    host.add("a", 20)
    assert host.propose(host.step(), {"a": [1, 2, 3]}) == 0
    assert host.step().num_draft_tokens.tolist() == [0]


def test_stale_drafts_are_dropped() -> None:
    host = speculative()
    _, first = decoding(host)
    assert host.propose(first, {"a": [1, 2]}) == 2
    output = host.schedule()
    assert host.propose(first, {"a": [3]}) == 0, "the next step is out"
    assert drafts_of(output, 0) == [1, 2]
    host.update(output)
    assert host.propose(first, {"a": [3]}) == 0, "another step has been updated since"
    host.propose(output, {"a": [4]})
    host.park("a")
    assert host.propose(output, {"a": [5]}) == 0, "the request has no row"
    host.ready("a")
    assert host.step().num_draft_tokens.tolist() == [0], "a request that loses its row loses its drafts"


def test_a_later_proposal_replaces_an_earlier_one() -> None:
    host = speculative()
    _, output = decoding(host)
    host.propose(output, {"a": [1, 2, 3]})
    assert host.propose(output, {"a": [4]}) == 1
    assert drafts_of(host.schedule(), 0) == [4]


def test_waiting_drafts_returns_the_drafts_of_the_next_step() -> None:
    host = speculative()
    _, output = decoding(host)
    host.add("b")
    assert host.scheduler.waiting_drafts("a") == host.scheduler.waiting_drafts("b") == []
    host.propose(output, {"a": [1, 2, 3]})
    assert (host.scheduler.waiting_drafts("a"), host.scheduler.waiting_drafts("b")) == ([1, 2, 3], [])
    output = host.schedule()
    assert host.scheduler.waiting_drafts("a") == [], "they are in flight"
    host.update(output)
    host.propose(output, {"a": [4], "b": [5, 6]})
    assert (host.scheduler.waiting_drafts("a"), host.scheduler.waiting_drafts("b")) == ([4], [5, 6])
    host.park("a")
    assert (host.scheduler.waiting_drafts("a"), host.scheduler.waiting_drafts("b")) == ([], [5, 6])
    with pytest.raises(UnknownRequest):
        host.scheduler.waiting_drafts("c")


def test_only_rows_with_drafts_in_flight_wait_for_their_result() -> None:
    host = speculative(max_steps_in_flight=2)
    host.add("a")
    host.add("b")
    first = host.step()
    host.propose(first, {"a": [WRONG, WRONG]})
    verifying, second = host.schedule(), host.schedule()
    assert (tokens_of(verifying), tokens_of(second)) == ({"a": 3, "b": 1}, {"b": 1})
    host.update(verifying)
    assert host.propose(verifying, {"a": [7], "b": [7]}) == 1, "b has a sample in flight"
    assert tokens_of(host.schedule()) == {"a": 2, "b": 1}


def test_draft_table_limits_drafts_by_the_number_of_running_requests() -> None:
    host = speculative(draft_table=((2, 1), (3, 0)))
    scheduled = []
    for request_id in "abc":
        host.add(request_id, max_tokens=40)
        output = host.step()
        while output.num_draft_tokens.any() or len(output.admitted):
            host.propose(output, {name: [WRONG] * 3 for name in "abc"})
            scheduled.append((host.scheduler.max_drafts, (output := host.step()).num_draft_tokens.tolist()))
            if len(scheduled) % 2 == 0:
                break
    assert scheduled[:4] == [(3, [3]), (3, [3]), (1, [1, 1]), (1, [1, 1])]
    assert scheduled[4] == (0, [0, 0, 0])


def test_drafts_that_the_long_prefill_threshold_cuts_are_dropped() -> None:
    host = speculative(max_num_seqs=1, max_num_batched_tokens=8, long_prefill_token_threshold=3)
    _, output = decoding(host, prompt=2)
    host.add("waiting")
    host.propose(output, {"a": [WRONG] * 3})
    assert tokens_of(host.step()) == {"a": 3}, "the threshold limits every request"
    assert tokens_of(host.step()) == {"a": 1}


# ---------------------------------------------------------------------- blocks


def test_drafts_never_cause_a_preemption() -> None:
    host = speculative(num_blocks=4, max_model_len=16)
    host.add("a", 6, max_tokens=4)
    host.add("b", 7, max_tokens=4)
    output = host.step()
    assert host.stats().num_free_blocks == 0
    host.propose(output, {"a": [WRONG] * 3, "b": [WRONG] * 3})
    output = host.schedule()
    assert (names(output.preempted), output.num_draft_tokens.tolist()) == ([], [1, 0]), "free slots of the last blocks"
    host.update(output)
    host.run_to_end()


def test_blocks_allocated_for_drafts_are_used_by_later_tokens() -> None:
    host = speculative(block_size=1, num_blocks=32)
    _, output = decoding(host, prompt=2, max_tokens=12)
    host.propose(output, {"a": [WRONG] * 3})
    assert len(host.step().block_ids) == 4
    assert [len(host.step().block_ids) for _ in range(4)] == [0, 0, 0, 1]


def test_a_rejected_draft_is_never_found_in_the_prefix_cache() -> None:
    host = speculative()
    request, output = decoding(host, prompt=6, max_tokens=10)
    host.propose(output, {"a": [WRONG] * 3})
    output = host.schedule()
    host.park("a")  # while its drafts are in flight
    host.update(output)
    host.ready("a")
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 10)
    known = [*request.prompt_token_ids.tolist(), int(request.output_token_ids[0])]
    liar = host.add("b", [*known, WRONG, 1], max_tokens=1)
    host.step()
    assert liar.num_cached_tokens == 4


def test_accepted_drafts_are_appended_to_a_request_that_lost_its_row() -> None:
    host = speculative()
    request, output = decoding(host)
    host.propose(output, {"a": [*right(request, 2), WRONG]})
    output = host.schedule()
    host.park("a")
    assert (request.num_pending, request.num_computed_tokens) == (1, 0)
    assert host.update(output).counts.tolist() == [3]
    assert (request.num_pending, request.num_tokens) == (0, 8)
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, 2)
    host.ready("a")
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 16)


def test_a_failed_step_is_rolled_back_and_its_drafts_are_dropped() -> None:
    host = speculative()
    request, output = decoding(host)
    host.propose(output, {"a": [1, 2, 3]})
    host.fail(host.schedule())
    assert (request.num_computed_tokens, request.num_pending) == (4, 0)
    assert tokens_of(host.step()) == {"a": 1}


def test_only_the_failed_row_of_rows_with_drafts_finishes() -> None:
    host = speculative()
    host.add("a")
    b = host.add("b")
    output = host.step()
    host.propose(output, {"a": [1, 2], "b": [*right(b, 1)]})
    output = host.schedule()
    update = host.scheduler.update(output, StepResult(right(b, 2), [0, 2], {0: "nan"}), host.now)
    host.scheduler.check_invariants()
    assert (names(update.finished), update.counts.tolist(), b.num_output_tokens) == (["a"], [0, 2], 3)


def test_an_urgent_request_gets_the_blocks_that_drafts_would_take() -> None:
    host = speculative(order="priority", num_blocks=4, max_model_len=16)
    _, output = decoding(host, prompt=4, priority=1)
    host.propose(output, {"a": [WRONG] * 3})
    host.add("urgent", 8, priority=0)
    output = host.step()
    assert tokens_of(output) == {"a": 1, "urgent": 8}


# ---------------------------------------------------------------------- statistics, recordings


def test_counters_count_proposed_scheduled_and_accepted_drafts() -> None:
    host = speculative(draft_table=((2, 2),))
    a, b = host.add("a"), host.add("b")
    host.propose(host.step(), {"a": [*right(a, 1), WRONG, WRONG], "b": right(b, 3)})
    host.step()
    stats = host.stats()
    assert (stats.num_proposed_tokens, stats.num_draft_tokens) == (6, 4)
    assert (stats.num_drafts, stats.num_accepted_tokens, stats.num_accepted_tokens_per_pos) == (2, 3, (2, 1, 0))


def test_later_writes_to_the_host_s_arrays_have_no_effect() -> None:
    host = speculative()
    request, output = decoding(host)
    tokens, counts = np.array(right(request, 3), dtype=np.int32), np.array([3])
    host.scheduler.propose(output, tokens, counts, 0.0)
    expected = [*tokens.tolist(), *right(request, 4)[3:]]
    tokens[:], counts[:] = WRONG, 0
    output = host.schedule()
    result = StepResult(np.array(expected, dtype=np.int32), np.array([4]))
    update = host.scheduler.update(output, result, host.now)
    result.token_ids[:], result.counts[:] = WRONG, 1  # type: ignore[index]
    assert (update.token_ids.tolist(), update.counts.tolist()) == (expected, [4])
    with pytest.raises(ValueError, match="read-only"):
        update.counts[0] = 1
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 5)
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, 3)


def test_a_recording_with_drafts_replays() -> None:
    file = io.StringIO()
    host = speculative(recorder=Recorder(file), draft_table=((4, 1),))
    request, output = decoding(host)
    while not request.is_finished:
        host.propose(output, {"a": np.array([*right(request, 1), WRONG])})  # type: ignore[dict-item]
        output = host.step()
    report = replay(file.getvalue().splitlines())
    assert report.num_steps == host.stats().num_steps


@pytest.mark.parametrize(
    ("budget", "proposed", "verified"),
    [
        (16, (3, 3, 3, 3), (3, 3, 3, 3)),
        (15, (3, 3, 3, 3), (2, 2, 2, 2)),
        (15, (3, 3, 3, 2), (3, 3, 3, 2)),
        (8, (3, 3, 3, 3), (1, 1, 1, 1)),
        (7, (3, 0, 3, 0), (1, 0, 1, 0)),
        (7, (3, 3, 3, 3), (0, 0, 0, 0)),
        (4, (3, 3, 3, 3), (0, 0, 0, 0)),
    ],
)
def test_a_small_token_budget_cuts_the_drafts_of_all_rows_equally(
    budget: int, proposed: tuple[int, ...], verified: tuple[int, ...]
) -> None:
    host = speculative(max_num_batched_tokens=budget)
    requests = [host.add(name, 1, max_tokens=20) for name in "abcd"]
    output = host.step()
    assert len(output.requests) == 4
    host.propose(output, {one.request_id: right(one, n) for one, n in zip(requests, proposed, strict=True)})
    output = host.step()
    assert tuple(output.num_draft_tokens.tolist()) == verified
    assert tuple(output.num_scheduled_tokens.tolist()) == tuple(1 + n for n in verified), "each row decodes"
    while not all(one.is_finished for one in requests):
        host.propose(output, {one.request_id: right(one, 3) for one in output.requests})
        output = host.step()
        host.scheduler.check_invariants()
    assert all(one.output_token_ids.tolist() == reference_output(one.prompt_token_ids, 20) for one in requests)


def padding(output: SchedulerOutput) -> dict[str, list[int]]:
    """The placeholders of each row that has placeholders."""
    return {
        request.request_id: drafts_of(output, index)
        for index, request in enumerate(output.requests)
        if -1 in drafts_of(output, index)
    }


def test_a_request_s_first_step_of_one_token_is_padded_beside_decodes() -> None:
    """Rows of one token and three placeholders, whether the prompt is one token or all but one are cached."""
    host = speculative(pad_first_decodes=True, max_num_batched_tokens=16, block_size=4)
    first = host.add("a", 1, max_tokens=12)
    output = host.step()
    assert padding(output) == {}, "nothing else decodes, and nothing is cached"
    b = host.add("b", 1, max_tokens=12)
    output = host.schedule()
    assert padding(output) == {"b": [-1] * 3} and tokens_of(output) == {"a": 1, "b": 4}
    host.scheduler.check_invariants()
    host.update(output)
    assert (b.num_computed_tokens, b.num_tokens) == (1, 2), "no placeholder is accepted"
    host.add("long", list(range(9)), max_tokens=1)
    c = host.add("c", 1, max_tokens=12)
    output = host.step()
    assert padding(output) == {"c": [-1] * 3}, "a prefill that begins in the same step does not count as continued"
    while not c.is_finished:
        host.step()
        host.scheduler.check_invariants()
    again = host.add("again", list(range(9)), max_tokens=12)  # two blocks of it are cached, and one token is not
    output = host.step()
    assert output.num_cached_tokens.tolist() == [8] and padding(output) == {"again": [-1] * 3}
    while not again.is_finished:
        host.step()
    for request in (first, b, c, again):
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 12)


def test_no_first_step_is_padded_beside_a_prefill_or_past_max_model_len() -> None:
    host = speculative(pad_first_decodes=True, max_num_batched_tokens=8, max_model_len=12)
    host.add("a", list(range(11)), max_tokens=1)
    assert tokens_of(host.step()) == {"a": 8}
    host.add("b", 1, max_tokens=4)
    output = host.step()
    assert tokens_of(output) == {"a": 3, "b": 1}, "a continues its prefill"
    host.step()
    host.add(
        "c", list(range(9)), max_tokens=2
    )  # 8 tokens are cached: with three placeholders and a sample it would be 13
    output = host.step()
    assert output.num_cached_tokens.tolist() == [8] and padding(output) == {}


def test_a_first_step_waits_for_the_budget_of_its_placeholders() -> None:
    for budget, tokens in ((4, {"a": 1}), (3, {"a": 1, "b": 1})):
        host = speculative(pad_first_decodes=True, max_num_batched_tokens=budget, max_num_seqs=3)
        host.add("a", 1, max_tokens=2)
        host.step()
        host.add("b", 1, max_tokens=2)
        assert tokens_of(host.step()) == tokens
        assert host.step().num_rows, "it does not wait for ever"


def test_placeholders_take_no_reserved_block() -> None:
    """The request starts without placeholders."""
    for watermark, drafts in ((0.0, {"b": [-1] * 3}), (0.3, {})):
        host = speculative(pad_first_decodes=True, block_size=1, num_blocks=11, max_model_len=10, watermark=watermark)
        host.add("a", 4, max_tokens=5)
        host.step()
        host.add("b", 1, max_tokens=5)
        output = host.schedule()
        assert padding(output) == drafts and "b" in tokens_of(output)


def test_a_first_step_that_samples_nothing_is_not_padded() -> None:
    """Such a request finishes with its first step, and its placeholders would count as computed: a connector would be
    asked to send their KV."""
    host = speculative(pad_first_decodes=True, max_num_batched_tokens=16)
    host.add("a", 1, max_tokens=12)
    host.step()
    prefilled = host.add("b", 1, max_tokens=0)
    output = host.schedule()
    assert tokens_of(output) == {"a": 1, "b": 1}
    assert prefilled.num_computed_tokens == 1
    host.update(output)
    assert prefilled.is_finished
    host.scheduler.check_invariants()


def test_a_first_step_is_not_padded_when_blocks_are_short() -> None:
    host = speculative(pad_first_decodes=True, num_blocks=3, block_size=2, max_model_len=6, max_num_seqs=2)
    host.add("a", 2, max_tokens=2)
    host.step()
    host.add("b", 1, max_tokens=1)
    output = host.step()
    assert tokens_of(output) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("tokens", "budget", "expected"),
    [
        (2, 16, {"a": 1, "b": 1}),
        (4, 16, {"a": 1, "b": 4}),
        (2, 4, {"a": 1, "b": 1}),  # it does not wait for budget for placeholders that it cannot have
    ],
)
def test_a_first_step_is_padded_as_far_as_limits_on_drafts_allow(
    tokens: int, budget: int, expected: dict[str, int]
) -> None:
    host = speculative(
        pad_first_decodes=True, max_num_batched_tokens=budget, token_limits=(f"prefill-threshold:tokens={tokens}",)
    )
    host.add("a", 1, max_tokens=4)
    host.step()
    host.add("b", 1, max_tokens=4)
    assert tokens_of(host.step()) == expected


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1; it must be between 0 and"),
        ({"num_draft_tokens": 3, "draft_table": ((2, 4),)}, "allows 4 drafts with 2 or more running.*only 3"),
        ({"num_draft_tokens": 3, "draft_table": ((2, 1), (2, 0))}, "running requests in draft_table is 2; .*between 3"),
        ({"num_draft_tokens": 3, "draft_table": ((0, 1),)}, "running requests in draft_table is 0; .*between 1"),
        ({"num_draft_tokens": 3, "draft_table": ((1, -1),)}, "drafts in draft_table is -1"),
        ({"num_draft_tokens": 3, "draft_table": (1, 2)}, "draft_table is .*give pairs"),
        ({"pad_first_decodes": True}, "pad_first_decodes=True needs num_draft_tokens"),
        ({"num_draft_tokens": 3, "draft_table": ((2, 1),), "pad_first_decodes": True}, "an empty draft_table"),
        ({"draft_table": ((1, 0),)}, "draft_table is .*no drafts; raise num_draft_tokens"),
    ],
)
def test_invalid_knobs_of_speculation_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(**overrides)


def test_a_draft_table_may_come_from_json() -> None:
    assert small_config(num_draft_tokens=3, draft_table=[[2, 1]]).draft_table == ((2, 1),)


@pytest.mark.parametrize(
    ("token_ids", "counts", "message"),
    [
        ([1], [1, 0], r"counts has shape \(2,\); give one number for each of the 1 row"),
        ([1], [2], r"token_ids has shape \(1,\) and counts asks for 2"),
        ([1] * 4, [4], "counts has 4 drafts for a row, but num_draft_tokens is 3; propose 0 to 3"),
        ([], [-1], "counts has -1 drafts for a row"),
        ([-1], [1], "token id -1 is proposed"),
        ([2**31], [1], "token id 2147483648 is proposed"),
        ([1.5], [1], "token_ids must be a flat sequence of integers"),
        ([1], ["x"], "counts must be a flat sequence of integers"),
    ],
)
def test_an_invalid_proposal_is_refused_and_not_kept(token_ids: Any, counts: Any, message: str) -> None:
    host = speculative()
    _, output = decoding(host)
    with pytest.raises(ProposalError, match=message):
        host.scheduler.propose(output, token_ids, counts, host.now)
    assert tokens_of(host.step()) == {"a": 1}


def test_drafts_for_a_step_in_flight_are_refused() -> None:
    host = speculative()
    host.add("a")
    output = host.schedule()
    with pytest.raises(StepOrderError, match="cannot be proposed for step 0 before its update"):
        host.propose(output, {"a": [1]})
    host.fail(output)
    with pytest.raises(StepOrderError, match="cannot be proposed for step 0"):
        host.propose(output, {"a": [1]})


@pytest.mark.parametrize("counts", [[0], [4], [-1], [1, 1], [1.0]])
def test_a_result_has_one_token_and_up_to_one_more_per_draft(counts: list[Any]) -> None:
    host = speculative()
    request, output = decoding(host)
    host.propose(output, {"a": right(request, 2)})
    output = host.schedule()
    with pytest.raises(StepResultError, match=r"counts is .*, but must be between \[1\] and \[3\] in this step"):
        host.scheduler.update(output, StepResult([1] * int(sum(counts)), counts), host.now)
    assert host.update(output).counts.tolist() == [3]


def test_a_result_without_counts_rejects_all_drafts() -> None:
    host = speculative()
    request, output = decoding(host)
    host.propose(output, {"a": right(request, 2)})
    host.scheduler.update(host.schedule(), StepResult(right(request, 1)), host.now)
    host.scheduler.check_invariants()
    assert (request.num_output_tokens, request.num_computed_tokens) == (2, 5)
