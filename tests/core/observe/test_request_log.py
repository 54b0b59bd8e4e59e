"""The log of a request: its events in order, with the times of the calls."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.core import FinishReason, ParkReason, Request, RequestEventType
from tests.core.helpers import EOS, Host


def log_of(request: Request) -> list[tuple[str, float]]:
    return [(event.type.name, event.timestamp) for event in request.events]


def logging_host(**config: Any) -> Host:
    return Host(log_request_events=True, **config)


def test_the_event_log_has_all_events_of_a_request_in_order() -> None:
    host = logging_host(max_num_batched_tokens=4, max_num_seqs=2)
    request = host.add("a", 6, eos_token_ids=(EOS,))  # at 1
    host.step()  # 2 and 3: a chunk
    host.step()  # 4 and 5: the rest, and a token
    host.step({"a": EOS})  # 6 and 7
    expected = [("QUEUED", 1.0), ("SCHEDULED", 2.0), ("FIRST_TOKEN", 5.0), ("FINISHED", 7.0)]
    assert log_of(request) == expected
    assert request.events[-1].detail == "stop"


def test_a_first_and_last_token_is_logged_before_the_end() -> None:
    host = logging_host()
    request = host.add("a", max_tokens=1)
    host.step()
    assert [name for name, _ in log_of(request)] == ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"]


def test_a_preemption_and_the_resumption_are_logged() -> None:
    host = logging_host(num_blocks=4, max_model_len=16)
    first, second = host.add("a", 4, max_tokens=9), host.add("b", 4, max_tokens=9)
    host.run_to_end()
    assert [name for name, _ in log_of(first)] == ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"]
    kinds = [name for name, _ in log_of(second)]
    assert kinds == ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "PREEMPTED", "RESUMED", "FINISHED"]
    times = [time for _, time in log_of(second)]
    assert times == sorted(times)


def test_parking_is_logged_with_its_cause() -> None:
    host = logging_host()
    request = host.add("a", park=ParkReason.GRAMMAR)
    host.ready("a")
    host.step()
    host.park("a", ParkReason.REMOTE_KVS)
    host.finish("a", FinishReason.DEADLINE)
    kinds = [(event.type, event.detail) for event in request.events]
    assert kinds == [
        (RequestEventType.PARKED, "waiting_for_grammar"),
        (RequestEventType.QUEUED, ""),
        (RequestEventType.SCHEDULED, ""),
        (RequestEventType.FIRST_TOKEN, ""),
        (RequestEventType.PARKED, "waiting_for_remote_kvs"),
        (RequestEventType.FINISHED, "deadline"),
    ]


def test_a_rolled_back_admission_is_logged() -> None:
    host = logging_host()
    request = host.add("a")
    host.fail(host.schedule())
    host.step()
    assert [name for name, _ in log_of(request)] == ["QUEUED", "SCHEDULED", "ROLLED_BACK", "SCHEDULED", "FIRST_TOKEN"]


def test_a_first_token_after_a_preemption_is_logged() -> None:
    host = logging_host(max_steps_in_flight=2)
    request = host.add("a")
    output = host.schedule()
    host.park("a")
    host.update(output)
    assert [name for name, _ in log_of(request)] == ["QUEUED", "SCHEDULED", "PARKED", "FIRST_TOKEN"]


@pytest.mark.parametrize(("max_tokens", "first"), [(1, ["FIRST_TOKEN"]), (0, [])])
def test_a_first_token_that_completes_a_prompt_part_is_logged(max_tokens: int, first: list[str]) -> None:
    """The next part is already there, and replaces the output before the update returns."""
    host = logging_host(max_steps_in_flight=2)
    request = host.add("a", 8, max_tokens=max_tokens, more_input=True)
    output = host.schedule()
    host.extend("a", 4, max_tokens=2)
    host.park("a", ParkReason.GRAMMAR)
    host.update(output)
    assert request.num_output_tokens == 0 and request.num_prompt_tokens == 12
    expected = ["QUEUED", "SCHEDULED", "PARKED", *first]
    assert [name for name, _ in log_of(request)] == expected
    host.ready("a")
    host.run_to_end()
    assert [name for name, _ in log_of(request)] == [*expected, "QUEUED", "RESUMED", "FIRST_TOKEN", "FINISHED"]


def test_explanations_contain_a_copy_of_the_event_log() -> None:
    host = logging_host()
    request = host.add("a")
    explained = host.explain("a").events
    host.step()
    assert len(explained) == 1 and explained[0] is request.events[0]


def test_the_first_three_event_types_are_those_of_vllm() -> None:
    assert [(kind.name, int(kind)) for kind in list(RequestEventType)[:3]] == [
        ("QUEUED", 1),
        ("SCHEDULED", 2),
        ("PREEMPTED", 3),
    ]


def test_the_event_log_is_off_by_default() -> None:
    host = Host()
    request = host.add("a", max_tokens=2)
    host.run_to_end()
    assert request.events == ()
