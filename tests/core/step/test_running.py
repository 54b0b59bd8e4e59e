"""How running requests advance: chunks, decodes, budget and blocks."""

from __future__ import annotations

import numpy as np

from tests.core.helpers import Host, blocks_of, names, reference_output, tokens_of


def test_a_long_prompt_is_computed_in_chunks_beside_requests_that_decode() -> None:
    host = Host(max_num_batched_tokens=8)
    short = host.add("short", 4)
    host.step()
    long = host.add("long", 20)
    outputs = [host.step() for _ in range(4)]
    assert [tokens_of(output) for output in outputs] == [
        {"short": 1, "long": 7},
        {"short": 1, "long": 7},
        {"short": 1, "long": 6},
        {"short": 1, "long": 1},
    ]
    assert [output.samples.tolist() for output in outputs] == [[True, False], [True, False], [True, True], [True, True]]
    assert [names(output.prefill) for output in outputs] == [["long"], ["long"], ["long"], []]
    assert [names(output.decode) for output in outputs] == [["short"], ["short"], ["short"], ["short", "long"]]
    assert (short.num_output_tokens, long.num_output_tokens) == (5, 2), "decoding never paused"


def test_chunked_prefill_does_not_change_output_tokens() -> None:
    host = Host(max_num_batched_tokens=5)
    requests = [host.add(f"r{index}", 3 + 4 * index, max_tokens=6) for index in range(4)]
    host.run_to_end()
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 6)


def test_when_the_budget_is_short_rows_advance_in_admission_order() -> None:
    host = Host(max_num_batched_tokens=8)
    host.add("a", 12)
    host.add("b", 12)
    assert [tokens_of(host.step()) for _ in range(4)] == [
        {"a": 8},
        {"a": 4, "b": 4},
        {"a": 1, "b": 7},
        {"a": 1, "b": 1},
    ]


def test_continued_rows_come_first_and_keep_their_admission_order() -> None:
    host = Host(order="priority", max_num_batched_tokens=32)
    for request_id, priority in [("c", 5), ("b", 3), ("a", 1)]:
        host.add(request_id, 2, priority=priority)
        host.step()
    host.add("urgent", 2, priority=0)
    output = host.step()
    assert names(output.requests) == ["c", "b", "a", "urgent"]
    assert output.num_continued == 3


def test_a_row_gets_a_block_only_when_its_blocks_are_full() -> None:
    host = Host()
    host.add("a", 3, max_tokens=8)
    told = [len(output.block_ids) for output in host.run_to_end()]
    assert told == [1, 0, 1, 0, 0, 0, 1, 0]


def test_the_blocks_of_outputs_add_up_to_the_block_table() -> None:
    host = Host(max_num_batched_tokens=6)
    for index in range(3):
        host.add(f"r{index}", 5, max_tokens=8)
    told: dict[int, list[int]] = {}
    while host.scheduler.has_unfinished_requests():
        output = host.schedule()
        for index, (row, serial) in enumerate(zip(output.rows.tolist(), output.serials.tolist(), strict=True)):
            told.setdefault(serial, []).extend(output.blocks(index).tolist())
            assert host.scheduler.block_table[row, : len(told[serial])].tolist() == told[serial]
            end = int(output.num_computed_tokens[index] + output.num_scheduled_tokens[index])
            assert len(told[serial]) == -(-end // 4), "just enough blocks for what is computed"
        host.update(output)


def test_input_token_ids_are_the_tokens_to_compute_row_after_row() -> None:
    host = Host(max_num_batched_tokens=8)
    short = host.add("short", 4)
    host.step()
    long = host.add("long", 20)
    output = host.schedule()
    expected = [int(short.all_token_ids[-1]), *long.prompt_token_ids[:7].tolist()]
    assert host.scheduler.input_token_ids(output).tolist() == expected
    assert host.scheduler.input_token_ids(output).dtype == np.int32
    host.update(output)
    output = host.schedule()
    expected = [int(short.all_token_ids[-1]), *long.prompt_token_ids[7:14].tolist()]
    assert host.scheduler.input_token_ids(output).tolist() == expected


def test_input_token_ids_of_a_resumed_request_include_its_output() -> None:
    host = Host()
    request = host.add("a", 6)
    for _ in range(4):
        host.step()
    host.park("a")
    host.ready("a")
    output = host.schedule()
    assert output.num_cached_tokens.tolist() == [8]
    assert host.scheduler.input_token_ids(output).tolist() == request.all_token_ids[8:].tolist()


def test_input_token_ids_of_a_one_token_chunk_are_that_token() -> None:
    host = Host(long_prefill_token_threshold=1)
    request = host.add("a", 5, max_tokens=1)
    host.add("other", 9)  # so that the threshold holds
    fed = []
    for _ in range(5):
        output = host.schedule()
        assert tokens_of(output) == {"a": 1, "other": 1}
        fed.append(int(host.scheduler.input_token_ids(output)[0]))
        host.update(output)
    assert fed == request.prompt_token_ids.tolist() and request.is_finished


def test_an_empty_step_has_no_input_token_ids() -> None:
    host = Host()
    assert host.scheduler.input_token_ids(host.schedule()).shape == (0,)


def test_all_tokens_except_the_last_are_inputs_once_and_in_order() -> None:
    host = Host(max_num_batched_tokens=7, max_num_seqs=3)
    requests = [host.add(f"r{index}", 4 + 3 * index, max_tokens=9) for index in range(5)]
    fed: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while host.scheduler.has_unfinished_requests():
        output = host.schedule()
        tokens = host.scheduler.input_token_ids(output).tolist()
        for name, count in tokens_of(output).items():
            fed[name] += tokens[:count]
            tokens = tokens[count:]
        assert tokens == []
        host.update(output)
    assert host.stats().num_preemptions == 0
    for request in requests:
        assert fed[request.request_id] == request.all_token_ids.tolist()[:-1]


def test_columns_of_the_batch_grow_with_the_number_of_rows() -> None:
    host = Host(num_blocks=400, max_num_seqs=150, max_num_batched_tokens=600)
    requests = [host.add(f"r{index}", 3, max_tokens=4) for index in range(150)]
    assert host.step().num_rows == 150
    host.run_to_end()
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 4)


# ---------------------------------------------------------------------- several steps in flight


def test_a_further_step_may_be_scheduled_while_the_first_executes() -> None:
    host = Host(max_steps_in_flight=3)
    request = host.add("a", 4, max_tokens=6)
    outputs = [host.schedule() for _ in range(3)]
    assert [output.num_computed_tokens.tolist() for output in outputs] == [[0], [4], [5]]
    assert request.num_pending == 3
    for output in outputs:
        host.update(output)
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 3)


def test_a_row_whose_sample_in_flight_reaches_its_limit_is_not_scheduled() -> None:
    host = Host(max_steps_in_flight=4)
    host.add("a", 4, max_tokens=2)
    outputs = [host.schedule() for _ in range(4)]
    assert [tokens_of(output) for output in outputs] == [{"a": 4}, {"a": 1}, {}, {}]
    for output in outputs:
        host.update(output)
    assert not host.scheduler.has_unfinished_requests()


def test_a_row_at_its_limit_waits_while_others_continue() -> None:
    host = Host(max_steps_in_flight=3)
    host.add("a", 4, max_tokens=1)
    host.add("b", 4, max_tokens=9)
    outputs = [host.schedule() for _ in range(3)]
    assert [tokens_of(output) for output in outputs] == [{"a": 4, "b": 4}, {"b": 1}, {"b": 1}]


def test_chunks_of_one_prompt_may_be_in_flight_together() -> None:
    host = Host(max_steps_in_flight=3, max_num_batched_tokens=8)
    request = host.add("a", 20, max_tokens=3)
    outputs = [host.schedule() for _ in range(3)]
    assert [tokens_of(output) for output in outputs] == [{"a": 8}, {"a": 8}, {"a": 4}]
    assert [output.samples.tolist() for output in outputs] == [[False], [False], [True]]
    for output in outputs:
        host.update(output)
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 3)


def test_only_requests_with_runs_ahead_off_wait_for_their_samples() -> None:
    """Alone, beside a steadily decoding row, and beside a prompt in chunks; again after a preemption."""
    host = Host(max_steps_in_flight=2, max_num_batched_tokens=8)
    request = host.add("a", 12, max_tokens=9, runs_ahead=False)
    host.add("b", 2, max_tokens=9)
    outputs = [host.schedule(), host.schedule()]
    assert [tokens_of(output) for output in outputs] == [{"a": 8}, {"a": 4, "b": 2}], "its chunks need no sample"
    host.update(outputs[0])
    third = host.schedule()
    host.update(outputs[1])
    host.add("c", 10, max_tokens=1)
    fourth = host.schedule()
    host.update(third)
    fifth = host.schedule()
    assert [tokens_of(output) for output in (third, fourth, fifth)] == [
        {"b": 1},
        {"a": 1, "b": 1, "c": 6},
        {"b": 1, "c": 4},
    ]
    host.park("a")
    host.ready("a")
    for output in (fourth, fifth):
        host.update(output)
    outputs = [host.schedule(), host.schedule()]
    assert "a" in names(outputs[0].admitted) and "a" not in tokens_of(outputs[1])
    for output in outputs:
        host.update(output)
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 9)


def test_can_advance_is_false_if_a_further_step_would_be_empty() -> None:
    host = Host(max_steps_in_flight=3)
    assert not host.scheduler.can_advance()
    host.add("a", 4, max_tokens=2)
    host.add("b", 4, max_tokens=9, runs_ahead=False)
    assert host.scheduler.can_advance(), "two are queued"
    first = host.schedule()
    assert host.scheduler.can_advance(), "a runs ahead"
    second = host.schedule()
    assert tokens_of(second) == {"a": 1}
    assert not host.scheduler.can_advance(), "a finishes with its sample in flight, and b needs its sampled token"
    host.update(first)
    assert host.scheduler.can_advance()
    assert host.scheduler.outputs_in_flight == (second,)
    host.update(second)
    assert host.scheduler.outputs_in_flight == ()
    assert host.scheduler.has_unreported_ends, "a has ended"
    assert [request.request_id for request in host.scheduler.unreported_ends] == ["a"]
    assert tokens_of(host.step()) == {"b": 1}
    assert not host.scheduler.has_unreported_ends and host.scheduler.unreported_ends == ()


def test_a_row_is_reused_only_after_every_step_that_names_it() -> None:
    host = Host(max_steps_in_flight=3)
    host.add("a", 4)
    first, second = host.schedule(), host.schedule()
    row = int(first.rows[0])
    host.abort("a")
    host.add("b", 4)
    third = host.schedule()
    assert int(third.rows[0]) != row
    host.update(first)
    host.update(second)
    host.add("c", 4)
    assert row in host.schedule().rows.tolist()
    assert blocks_of(third, "b"), "the blocks need no such care: a host executes its steps in order"


def test_prefill_first_never_mixes_prompts_and_decodes_after_preemption() -> None:
    """b finds no block and is itself the victim, so no prompt advances; c's must not advance beside a's decoding."""
    knobs = {"batching": "prefill-first", "shortage": "look-ahead", "victim": "lowest-priority"}
    sizes = {"num_blocks": 6, "block_size": 1, "max_model_len": 6, "max_num_batched_tokens": 8}
    host = Host(**knobs, **sizes, full_sequence_must_fit=False, long_prefill_token_threshold=1)
    for name, length, priority in (("a", 2, 0), ("b", 3, 2), ("c", 3, 1)):
        host.add(name, length, priority=priority, max_tokens=3)
    host.step()
    host.step()
    output = host.step()
    assert tokens_of(output) == {"a": 1} and names(output.preempted) == ["b"]
    assert tokens_of(host.step()) == {"c": 1}
    host.run_to_end()
