"""Pauses: what stops, what continues, and that all requests continue unchanged afterwards."""

from __future__ import annotations

import pytest

from pointsman.core import ParkReason, PauseMode, Reason
from tests.core.helpers import EOS, Host, names, reference_output, tokens_of


def test_a_paused_scheduler_schedules_nothing_until_it_resumes() -> None:
    host = Host()
    running, waiting = host.add("a", 6, max_tokens=5), None
    host.step()
    host.step()
    host.pause()
    waiting = host.add("b", 4, max_tokens=2)
    for _ in range(3):
        output = host.step()
        assert (output.total_num_scheduled_tokens, names(output.requests)) == (0, [])
    assert running.num_output_tokens == 2 and host.explain("a").num_blocks == 2
    host.resume()
    assert tokens_of(host.step()) == {"a": 1, "b": 4}
    host.run_to_end()
    assert running.output_token_ids.tolist() == reference_output(running.prompt_token_ids, 5)
    assert waiting.output_token_ids.tolist() == reference_output(waiting.prompt_token_ids, 2)
    assert host.stats().num_preemptions == 0


def test_paused_admissions_let_running_requests_finish() -> None:
    host = Host()
    host.add("a", max_tokens=3)
    host.step()
    host.add("b", max_tokens=2)
    host.pause(PauseMode.ADMISSIONS)
    assert [names(host.step().requests) for _ in range(3)] == [["a"], ["a"], []]
    assert host.stats().num_running == 0 and host.stats().num_waiting == 1
    host.resume()
    assert names(host.step().admitted) == ["b"]


def test_a_request_preempted_during_a_pause_waits_for_its_end() -> None:
    host = Host(num_blocks=4, max_model_len=16)
    host.add("a", 8, max_tokens=8)
    host.add("b", 4, max_tokens=8)
    host.step()
    host.pause(PauseMode.ADMISSIONS)
    outputs = [host.step() for _ in range(8)]
    assert "b" in [name for output in outputs for name in names(output.preempted)]
    assert host.stats().num_running == 0 and host.explain("b").reason is Reason.PAUSED
    host.resume()
    host.run_to_end()
    assert host.stats().finished["length"] == 2


def test_steps_in_flight_at_a_pause_are_updated() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 4, max_tokens=3)
    first, second = host.schedule(), host.schedule()
    host.pause()
    assert host.scheduler.num_steps_in_flight == 2
    host.update(first)
    empty = host.schedule()
    host.update(second)
    host.update(empty)
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)


def test_after_a_step_fails_in_a_pause_full_block_tables_are_sent() -> None:
    host = Host()
    host.add("a", 8, max_tokens=4)
    host.step()
    output = host.schedule()
    host.pause()
    host.fail(output)
    assert host.step().resync  # "a" has not been sent its blocks yet
    host.resume()
    output = host.step()
    assert output.resync and len(output.blocks(0)) == 3
    assert not host.step().resync


def test_pause_and_resume_can_be_repeated_and_the_last_mode_applies() -> None:
    host = Host()
    host.add("a", max_tokens=4)
    assert host.scheduler.pause_mode is None
    host.resume()
    host.pause()
    host.pause()
    assert host.scheduler.pause_mode is PauseMode.ALL
    host.pause(PauseMode.ADMISSIONS)
    assert host.scheduler.pause_mode is PauseMode.ADMISSIONS
    host.resume()
    host.resume()
    assert host.scheduler.pause_mode is None
    assert names(host.step().requests) == ["a"]


def test_rows_that_a_full_pause_stopped_have_no_reason_after_the_pause() -> None:
    host = Host()
    host.add("a")
    host.add("b")
    host.add("c", park=ParkReason.GRAMMAR)
    host.step()
    host.pause()
    host.park("b")  # it releases its blocks, which the next step reports
    host.ready("c")
    output = host.step()
    assert (output.requests, names(output.preempted)) == ((), ["b"])
    assert host.explain("a").reason is Reason.PAUSED
    host.pause(PauseMode.ADMISSIONS)
    assert host.explain("a").reason is None
    assert names(host.step().requests) == ["a"]


def test_a_pause_with_an_unknown_mode_changes_nothing() -> None:
    host = Host()
    with pytest.raises(ValueError, match="gentle"):
        host.scheduler.pause(1.0, "gentle")  # type: ignore[arg-type]
    assert host.scheduler.pause_mode is None


def test_requests_can_be_added_parked_readied_and_ended_while_paused() -> None:
    host = Host()
    host.add("a")
    host.step()
    host.pause()
    host.add("b")
    host.add("c", park=ParkReason.GRAMMAR)
    host.ready("c")
    host.park("a")
    host.abort("b")
    assert names(host.step().finished) == ["b"]
    host.ready("a")
    host.resume()
    assert names(host.step().admitted) == ["a", "c"]


def test_no_priority_preemption_while_admissions_are_paused() -> None:
    host = Host(order="priority", max_num_seqs=1)
    host.add("a", max_tokens=9, priority=1)
    host.step()
    host.add("b", priority=0)
    host.pause(PauseMode.ADMISSIONS)
    assert names(host.step().requests) == ["a"]
    host.resume()
    assert names(host.step().requests) == ["b"]


def test_a_pause_explains_only_requests_that_wait_for_it() -> None:
    host = Host(max_num_seqs=1)
    for name in ("running", "head", "behind"):
        host.add(name)
    host.add("parked", park=ParkReason.REMOTE_KVS)
    host.step()
    held = host.explain("head")
    assert held.reason is Reason.SEQUENCE_LIMIT

    def reasons() -> list[Reason | None]:
        return [host.explain(name).reason for name in ("running", "head", "behind", "parked")]

    host.pause()
    since = host.now
    assert reasons() == [Reason.PAUSED, Reason.PAUSED, Reason.PAUSED, Reason.PARKED]
    assert host.explain("head").since == since and host.explain("head").blocker is None
    assert host.stats().num_waiting_by_reason == {"paused": 2}
    host.pause(PauseMode.ADMISSIONS)
    assert reasons() == [None, Reason.PAUSED, Reason.PAUSED, Reason.PARKED]
    host.step()
    host.step()
    assert host.stats().deferrals["paused"] == 2
    host.resume()
    assert reasons() == [None, Reason.SEQUENCE_LIMIT, Reason.BEHIND, Reason.PARKED]
    assert host.explain("head").since == held.since


@pytest.mark.parametrize("batching", ["mixed", "static", "prefill-first"])
def test_every_kind_of_batching_can_be_paused(batching: str) -> None:
    host = Host(batching=batching, shortage="replan" if batching != "prefill-first" else "in-order")
    request = host.add("a", 20, max_tokens=4, eos_token_ids=(EOS,))
    host.step()
    for mode in PauseMode:
        host.pause(mode)
        ran = names(host.step().requests)
        assert ran == ([] if mode is PauseMode.ALL else ["a"])
        host.resume()
        host.step()
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 4)
