"""The place of a request, and the calls that move it: park, ready, abort, finish, set_priority."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pointsman.core import (
    DuplicateRequest,
    FinishReason,
    InvalidTransition,
    ParkReason,
    Request,
    RequestStatus,
    UnknownRequest,
)
from tests.core.helpers import EOS, Host, names, reference_output, tokens_of

# ---------------------------------------------------------------------- parking


@pytest.mark.parametrize("reason", list(ParkReason), ids=lambda reason: reason.value)
def test_a_request_parked_when_added_is_not_queued_until_ready(reason: ParkReason) -> None:
    host = Host()
    request = host.add("a", 4, park=reason)
    assert request.status is reason.status
    assert tokens_of(host.step()) == {}
    assert host.scheduler.has_unfinished_requests()
    stats = host.stats()
    assert (stats.num_waiting, stats.num_parked) == (0, {reason.status.value: 1})
    host.ready("a")
    assert request.status is RequestStatus.WAITING
    assert tokens_of(host.step()) == {"a": 4}


def test_a_parked_head_does_not_block_the_queue() -> None:
    host = Host()
    host.add("a", 4, park=ParkReason.GRAMMAR)
    host.add("b", 4)
    assert tokens_of(host.step()) == {"b": 4}


def test_a_parked_request_keeps_its_place_by_arrival() -> None:
    host = Host(max_num_seqs=1)
    host.add("a", 4)
    host.add("b", 4)
    host.add("c", 4)
    host.park("b")
    host.park("a")
    host.ready("a")
    host.ready("b")
    assert [host.explain(request_id).position for request_id in "abc"] == [0, 1, 2]


def test_parking_a_running_request_frees_its_blocks_and_keeps_its_tokens() -> None:
    host = Host()
    request = host.add("a", 8, max_tokens=6)
    for _ in range(3):
        host.step()
    before = request.output_token_ids.tolist()
    host.park("a", ParkReason.STREAMING_REQ)
    assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert host.stats().num_free_blocks == 16
    assert request.output_token_ids.tolist() == before
    assert request.num_preemptions == 1, "it counts as one"
    output = host.step()
    assert (names(output.preempted), output.num_rows) == (["a"], 0), "it is reported to the workers"
    host.ready("a")
    assert request.status is RequestStatus.PREEMPTED
    assert names(host.step().resumed) == ["a"]
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 6)


def test_a_parked_preempted_request_returns_to_the_front() -> None:
    host = Host(max_num_seqs=1, order="priority")
    host.add("lazy", 4, priority=5)
    host.step()
    host.add("urgent", 4, priority=0, max_tokens=3)
    host.step()
    host.park("lazy")
    host.ready("lazy")
    host.add("lazy too", 4, priority=5, arrival_time=-1.0)
    outputs = host.run_to_end()
    assert [name for output in outputs for name in names(output.admitted)] == ["lazy", "lazy too"]


def test_parking_again_only_changes_the_reason() -> None:
    host = Host()
    request = host.add("a", 4, park=ParkReason.GRAMMAR)
    host.park("a", ParkReason.REMOTE_KVS)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert host.stats().num_parked == {"waiting_for_remote_kvs": 1}
    host.ready("a")
    assert request.status is RequestStatus.WAITING


def test_a_request_parked_twice_stays_preempted() -> None:
    host = Host()
    request = host.add("a", 4)
    host.step()
    host.park("a", ParkReason.GRAMMAR)
    host.park("a", ParkReason.REMOTE_KVS)
    host.ready("a")
    assert request.status is RequestStatus.PREEMPTED
    assert request.num_preemptions == 1


def test_a_parked_request_can_fail() -> None:
    host = Host()
    request = host.add("a", 4, park=ParkReason.GRAMMAR)
    assert host.finish("a", FinishReason.ERROR, detail="the grammar does not compile") is request
    assert (request.status, request.finish_detail) == (RequestStatus.FINISHED_ERROR, "the grammar does not compile")
    assert not host.scheduler.has_unfinished_requests()
    assert names(host.step().finished) == ["a"]


def test_ready_is_refused_for_requests_that_are_not_parked() -> None:
    host = Host()
    host.add("a", 4)
    for status in ("WAITING", "RUNNING"):
        with pytest.raises(InvalidTransition, match=rf"request 'a' is {status}, not parked; ready\(\) does not apply"):
            host.ready("a")
        host.step()


@pytest.mark.parametrize(
    "call",
    [
        lambda host: host.park("ghost"),
        lambda host: host.ready("ghost"),
        lambda host: host.set_priority("ghost", 1),
        lambda host: host.explain("ghost"),
    ],
    ids=["park", "ready", "set_priority", "explain"],
)
def test_a_request_that_was_never_added_is_unknown(call: Callable[[Host], object]) -> None:
    with pytest.raises(UnknownRequest, match=r"^no request 'ghost' is waiting, parked or running; it may have ended$"):
        call(Host())


@pytest.mark.parametrize(
    "call",
    [lambda host: host.park("a"), lambda host: host.ready("a"), lambda host: host.set_priority("a", 1)],
    ids=["park", "ready", "set_priority"],
)
def test_a_finished_request_is_unknown_even_before_it_is_reported(call: Callable[[Host], object]) -> None:
    host = Host()
    request = host.add("a", 4)
    host.abort("a")
    with pytest.raises(UnknownRequest, match="it may have ended"):
        call(host)
    assert request.status is RequestStatus.FINISHED_ABORTED


# ---------------------------------------------------------------------- abort and finish


def waiting(host: Host) -> None:
    host.add("filler", 4)
    host.step()
    host.add("a", 4)


def running(host: Host) -> None:
    host.add("a", 9)
    host.step()
    host.step()


def prefilling(host: Host) -> None:
    host.add("a", 30)
    host.step()


def parked(host: Host) -> None:
    host.add("a", 4, park=ParkReason.REMOTE_KVS)


def parked_after_running(host: Host) -> None:
    running(host)
    host.park("a")


def preempted(host: Host) -> None:
    running(host)
    host.park("a")
    host.ready("a")


@pytest.mark.parametrize(
    "state", [waiting, running, prefilling, parked, parked_after_running, preempted], ids=lambda state: state.__name__
)
def test_an_abort_in_any_place_returns_all_blocks(state: Callable[[Host], None]) -> None:
    host = Host(max_num_seqs=1)
    state(host)
    request = host.scheduler.get_request("a")
    assert host.abort("a") is request
    assert request is not None
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED_ABORTED, FinishReason.ABORT)
    assert (request.row, request.phase) == (None, "finished")
    assert host.scheduler.get_request("a") is None
    host.abort("filler")
    assert host.stats().num_free_blocks == 16
    assert not host.scheduler.has_unfinished_requests()
    assert "a" in names(host.step().finished)


def test_abort_of_an_unknown_or_finished_request_returns_none() -> None:
    host = Host()
    assert host.abort("ghost") is None
    host.add("a", 4, max_tokens=1)
    host.step()
    assert host.abort("a") is None
    host.step()
    assert host.abort("a") is None


def test_an_ended_request_keeps_its_tokens() -> None:
    host = Host()
    request = host.add("a", 4)
    for _ in range(3):
        host.step()
    host.abort("a")
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 3)


def test_finish_applies_the_host_s_reason_and_keep_tokens() -> None:
    host = Host()
    request = host.add("a", 4)
    for _ in range(5):
        host.step()
    ended = host.finish("a", FinishReason.STOP, keep_tokens=3, detail="stop string", stop_reason="\n\n")
    assert ended is request
    assert (request.status, request.finish_detail) == (RequestStatus.FINISHED_STOPPED, "stop string")
    assert request.stop_reason == "\n\n"
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 3)
    assert names(host.step().finished) == ["a"]


@pytest.mark.parametrize(("keep_tokens", "kept"), [(0, 0), (5, 5), (99, 5), (None, 5)])
def test_keep_tokens_removes_output_tokens_and_never_adds_any(keep_tokens: int | None, kept: int) -> None:
    host = Host()
    request = host.add("a", 4)
    for _ in range(5):
        host.step()
    host.finish("a", FinishReason.STOP, keep_tokens=keep_tokens)
    assert request.num_output_tokens == kept


def test_a_sample_in_flight_when_the_host_ends_a_request_is_dropped() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 4)
    first, second = host.schedule(), host.schedule()
    host.update(first)
    host.finish("a", FinishReason.STOP, keep_tokens=1)
    assert host.update(second).counts.tolist() == [0]
    assert request.num_output_tokens == 1


def test_invalid_finishes_are_refused_and_change_nothing() -> None:
    host = Host()
    request = host.add("a", 4)
    with pytest.raises(InvalidTransition, match="request 'a' was accepted, so its finish reason cannot be REFUSED"):
        host.scheduler.finish("a", FinishReason.REFUSED, 0.0)
    with pytest.raises(ValueError, match="keep_tokens is -1; give 0 or more"):
        host.scheduler.finish("a", FinishReason.STOP, 0.0, keep_tokens=-1)
    assert request.status is RequestStatus.WAITING
    host.run_to_end()


# ---------------------------------------------------------------------- ids


@pytest.mark.parametrize("state", [waiting, running, parked, preempted], ids=lambda state: state.__name__)
def test_an_id_in_use_is_refused_and_the_first_request_continues(state: Callable[[Host], None]) -> None:
    host = Host(max_num_seqs=1)
    state(host)
    first = host.scheduler.get_request("a")
    with pytest.raises(
        DuplicateRequest, match=r"request id 'a' is in use .*; an id is free once an output has reported"
    ):
        host.add("a", 4)
    assert host.scheduler.get_request("a") is first


def test_a_request_id_is_free_once_an_output_reported_its_finish() -> None:
    host = Host()
    first = host.add("a", 4, max_tokens=1)
    host.step()
    assert first.is_finished
    with pytest.raises(DuplicateRequest, match="FINISHED_LENGTH"):
        host.add("a", 4)
    assert names(host.step().finished) == ["a"]
    second = host.add("a", 4, max_tokens=1)
    host.run_to_end()
    assert second.is_finished and second is not first


def test_each_finished_request_is_reported_once() -> None:
    host = Host()
    for request_id in "abc":
        host.add(request_id, 4, eos_token_ids=(EOS,))
    host.step({"b": EOS})
    host.abort("c")
    told = [names(host.step().finished) for _ in range(3)]
    assert told == [["b", "c"], [], []]


def test_a_request_that_was_never_scheduled_is_reported_too_if_it_ends() -> None:
    host = Host()
    host.add("a", 4)
    host.abort("a")
    output = host.schedule()
    assert (names(output.finished), output.num_rows) == (["a"], 0)


def test_a_request_object_can_be_added_only_once() -> None:
    host = Host()
    request = host.add("a", 4, max_tokens=1)
    host.run_to_end()
    host.step()
    with pytest.raises(InvalidTransition, match="request 'a' was already added once; create a new Request"):
        host.scheduler.add(request, 0.0)
    other = Request("b", [1], arrival_time=0.0, max_tokens=1)
    host.scheduler.add(other, 0.0)
    with pytest.raises(DuplicateRequest):
        host.scheduler.add(other, 0.0)


# ---------------------------------------------------------------------- priority


def test_a_new_priority_reorders_the_queue_immediately() -> None:
    host = Host(order="priority", max_num_seqs=1)
    for request_id, priority in [("a", 1), ("b", 2), ("c", 3)]:
        host.add(request_id, 4, priority=priority)
    host.set_priority("c", 0)
    host.set_priority("a", 9)
    assert {name: host.explain(name).position for name in "abc"} == {"c": 0, "b": 1, "a": 2}
    assert names(host.step().admitted) == ["c"]


def test_a_parked_request_is_queued_by_its_new_priority_when_ready() -> None:
    host = Host(order="priority", max_num_seqs=1)
    host.add("a", 4, priority=1)
    host.add("b", 4, priority=2, park=ParkReason.GRAMMAR)
    host.set_priority("b", 0)
    assert host.explain("a").position == 0
    host.ready("b")
    assert (host.explain("b").position, host.explain("a").position) == (0, 1)


def test_setting_an_unchanged_priority_does_nothing() -> None:
    host = Host(order="priority", max_num_seqs=1)
    host.add("a", 4)
    host.add("b", 4)
    host.set_priority("a", 0)
    assert host.explain("a").position == 0


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, 2**70, 1.5, "high", None], ids=str)
def test_a_priority_out_of_range_is_refused_before_anything_changes(priority: object) -> None:
    host = Host(order="priority", max_num_seqs=1)
    running_one = host.add("a", 4, priority=1)
    host.step()
    waiting_one = host.add("b", 4, priority=2)
    for request in (running_one, waiting_one):
        with pytest.raises(ValueError, match="priority is"):
            host.set_priority(request.request_id, priority)  # type: ignore[arg-type]
        host.scheduler.check_invariants()
    assert (running_one.priority, waiting_one.priority) == (1, 2)
    host.run_to_end()


@pytest.mark.parametrize("reason", ["stop", FinishReason.STOP])
def test_a_finish_reason_may_be_given_by_its_value(reason: FinishReason) -> None:
    host = Host()
    request = host.add("a", 4)
    host.step()
    host.scheduler.finish("a", reason, host.now)
    host.scheduler.check_invariants()
    assert request.finish_reason is FinishReason.STOP


def test_finish_and_park_with_an_unknown_reason_change_nothing() -> None:
    host = Host()
    host.add("a", 4)
    host.step()
    for call in (host.scheduler.finish, host.scheduler.park):
        with pytest.raises(ValueError, match="coffee"):
            call("a", "coffee", host.now)  # type: ignore[operator]
        host.scheduler.check_invariants()
    assert host.explain("a").status.name == "RUNNING"
