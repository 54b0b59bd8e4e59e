"""Whole scenarios: the parts of the scheduler together."""

from __future__ import annotations

import hashlib
import io
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from pointsman.core import FinishReason, ParkReason, Recorder, RequestStatus, SchedulerConfig
from tests.core.helpers import EOS, Host, names, reference_output, tokens_of


def test_one_request_runs_from_its_prompt_to_its_last_token() -> None:
    host = Host()
    request = host.add("a", 6, max_tokens=3)
    outputs = host.run_to_end()
    assert [tokens_of(output) for output in outputs] == [{"a": 6}, {"a": 1}, {"a": 1}]
    assert [output.step_id for output in outputs] == [0, 1, 2]
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 3)
    assert host.stats().num_free_blocks == 16


def test_requests_join_and_leave_at_every_step() -> None:
    host = Host(max_num_seqs=2)
    host.add("a", 2, max_tokens=1)
    host.add("b", 2, max_tokens=4)
    host.add("c", 2, max_tokens=2)
    host.add("d", 2, max_tokens=1)
    steps = [names(output.requests) for output in host.run_to_end()]
    assert steps == [["a", "b"], ["b", "c"], ["b", "c"], ["b", "d"]]


def test_many_requests_in_a_small_pool_all_finish_within_the_limits() -> None:
    host = Host(num_blocks=10, max_model_len=40, max_num_seqs=5, max_num_batched_tokens=12)
    requests = [host.add(f"r{index}", 1 + 5 * index % 17, max_tokens=3 + 7 * index % 15) for index in range(30)]
    for output in host.run_to_end(max_steps=2000):
        assert output.num_rows <= 5
        assert output.total_num_scheduled_tokens == sum(tokens_of(output).values()) <= 12
        assert output.num_rows > 0 or not host.scheduler.has_unfinished_requests(), "while any can run, one runs"
    for request in requests:
        wanted = min(request.max_tokens, 41 - request.num_prompt_tokens)
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, wanted)
    stats = host.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (10, 0, 0)


def test_under_fcfs_requests_are_admitted_in_order_of_arrival() -> None:
    host = Host(num_blocks=8, max_model_len=32)
    for index in range(12):
        host.add(f"r{index:02}", 3 + index % 7, max_tokens=9)
    first_admissions = [name for output in host.run_to_end() for name in names(output.new)]
    assert first_admissions == sorted(first_admissions)


def test_a_pool_of_one_block_works() -> None:
    host = Host(num_blocks=1)
    a = host.add("a", 2, max_tokens=20)
    b = host.add("b", 3, max_tokens=1)
    host.run_to_end()
    assert (a.num_output_tokens, a.finish_detail) == (3, "kv_capacity")
    assert b.num_output_tokens == 1


def test_blocks_of_one_token_work() -> None:
    host = Host(block_size=1, num_blocks=12, max_model_len=12)
    requests = [host.add(f"r{index}", 3, max_tokens=6) for index in range(4)]
    host.run_to_end()
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 6)


def test_several_requests_with_one_prompt_compute_it_once() -> None:
    host = Host(max_num_batched_tokens=64, max_num_seqs=4)
    first = host.add("s0", 17, max_tokens=5)
    for index in range(1, 4):
        host.add(f"s{index}", first.prompt_token_ids, max_tokens=5)
    assert tokens_of(host.step()) == {"s0": 17, "s1": 1, "s2": 1, "s3": 1}
    assert host.stats().num_free_blocks == 16 - (5 + 3)


def test_a_conversation_computes_only_the_new_tokens_of_each_turn() -> None:
    host = Host(num_blocks=32)
    history: list[int] = host.prompt(8)
    computed = []
    for turn in range(4):
        request = host.add(f"turn {turn}", history, max_tokens=5)
        outputs = host.run_to_end()
        computed.append(int(outputs[0].num_scheduled_tokens[0]))
        history = [*request.all_token_ids.tolist(), *host.prompt(3)]
    assert computed == [8, 4, 4, 4], "8 history tokens a turn more, all cached but the unfinished block"


def test_a_request_added_between_schedule_and_update_runs_in_the_next_step() -> None:
    host = Host()
    host.add("a", 4)
    output = host.schedule()
    host.add("b", 4)
    host.update(output)
    assert tokens_of(host.step()) == {"a": 1, "b": 4}


def test_queued_parked_and_running_requests_are_unfinished() -> None:
    host = Host(max_steps_in_flight=2)
    unfinished = host.scheduler.has_unfinished_requests
    assert not unfinished()
    host.add("a", 4, max_tokens=1)
    assert unfinished()
    output = host.schedule()
    assert unfinished()
    host.park("a")
    assert unfinished()
    host.update(output)
    assert not unfinished(), "the returned sample was its last token"


# ---------------------------------------------------------------------- the static preset


def static_config(**overrides: int) -> dict[str, Any]:
    config = SchedulerConfig.preset("static", num_blocks=64, max_model_len=64, block_size=4)
    return {**config.to_dict(), "max_num_batched_tokens": 64, **overrides}


def test_a_static_batch_keeps_its_slots_until_its_last_request_finishes() -> None:
    host = Host(**static_config(max_num_seqs=2))
    host.add("short", 2, max_tokens=1)
    host.add("long", 2, max_tokens=4)
    host.add("next", 2, max_tokens=1)
    host.add("last", 2, max_tokens=1)
    steps = [names(output.requests) for output in host.run_to_end()]
    assert steps == [["short", "long"], ["long"], ["long"], ["long"], ["next", "last"]]
    assert host.stats().deferrals["static_batch"] == 3


def test_a_request_preempted_from_a_static_batch_joins_the_next_one() -> None:
    host = Host(**static_config(num_blocks=4, max_model_len=16, max_num_seqs=2))
    requests = [host.add(request_id, 8, max_tokens=6) for request_id in "abc"]
    admissions = [names(output.admitted) for output in host.run_to_end() if output.num_continued == 0]
    assert admissions[0] == ["a", "b"]
    assert admissions[1][0] == "b", "preempted, so it is at the front"
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 6)


def test_a_static_batch_lasts_as_long_as_its_longest_request() -> None:
    def num_steps(**overrides: Any) -> int:
        host = Host(**{**static_config(max_num_seqs=8), **overrides})
        for group in range(4):
            host.add(f"long {group}", 2, max_tokens=50)
            for index in range(7):
                host.add(f"short {group}.{index}", 2, max_tokens=5)
        return len(host.run_to_end())

    assert num_steps() == 4 * 50
    assert num_steps(batching="mixed") <= 4 * 50 // 3


# ---------------------------------------------------------------------- the same calls, the same decisions


def busy_recording() -> str:
    """The recording of a run with every kind of call, memory pressure, sharing, and two steps in flight."""
    file = io.StringIO()
    host = Host(
        recorder=Recorder(file),
        num_blocks=12,
        max_model_len=48,
        num_reserved_blocks=1,
        order="priority",
        watermark=0.1,
        long_prefill_token_threshold=6,
        max_steps_in_flight=2,
    )
    shared = host.prompt(9)
    for index in range(10):
        prompt = [*shared[: index % 10], *host.prompt(3 + index % 4)]
        park = ParkReason.GRAMMAR if index == 4 else None
        salt = "x" if index % 5 == 0 else None
        host.add(
            f"r{index}",
            prompt,
            max_tokens=8 + index,
            priority=index % 3,
            cache_salt=salt,
            park=park,
            eos_token_ids=(EOS,),
        )
    in_flight = []
    for step in range(200):
        if not host.scheduler.has_unfinished_requests():
            break
        in_flight.append(host.schedule())
        if step == 3:
            host.ready("r4")
        if step == 5:
            host.fail(in_flight.pop())
        if step == 7:
            host.reset_prefix_cache()
        if step == 9:
            host.abort("r2")
            host.set_priority("r7", -1)
        if step == 11:
            host.finish("r5", FinishReason.STOP, keep_tokens=1)
        if len(in_flight) == 2:
            host.update(in_flight.pop(0), {"r1": EOS} if step == 13 else None)
    assert host.stats().num_preemptions > 2
    assert not host.scheduler.has_unfinished_requests()
    return file.getvalue()


def test_the_same_calls_give_the_same_outputs_byte_for_byte() -> None:
    assert busy_recording() == busy_recording()


def test_outputs_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import hashlib; from tests.core.test_scheduler import busy_recording;"
        "print(hashlib.sha256(busy_recording().encode()).hexdigest())"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == hashlib.sha256(busy_recording().encode()).hexdigest()


@pytest.mark.parametrize("order", ["fcfs", "priority", "fcfs-front", "shortest-prefill", "fair"])
def test_waiting_lists_requests_in_admission_order(order: str) -> None:
    host = Host(order=order, max_num_seqs=1, enable_prefix_caching=False)
    chance = random.Random(7)
    for number in range(12):
        tenant = chance.choice(("", "a", "b"))
        host.add(f"r{number}", chance.randrange(1, 9), max_tokens=1, priority=chance.randrange(3), tenant=tenant)
    host.abort("r5")
    while host.scheduler.waiting:
        told = host.scheduler.waiting
        assert len(told) == host.scheduler.num_queued
        output = host.step()
        if output.admitted:
            assert output.admitted[0] is told[0]
