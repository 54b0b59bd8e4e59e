"""`stalled`: finds requests without progress."""

from __future__ import annotations

import io

import pytest

from pointsman.core import ParkReason, PauseMode, Reason, Recorder
from tests.core.helpers import Host, connected


def stalled(host: Host, seconds: float) -> list[tuple[str, float]]:
    """(request, seconds) of the stalled requests."""
    return [
        (stall.explanation.request_id, host.now - stall.since) for stall in host.scheduler.stalled(host.now, seconds)
    ]


def wait(host: Host, seconds: float) -> None:
    """Let time pass without calls."""
    host.now += seconds


def test_a_waiting_request_stalls_and_a_running_one_does_not() -> None:
    host = Host(max_num_seqs=1, max_num_batched_tokens=8)
    host.add("runs", 4, max_tokens=50)
    host.add("waits", 4)
    assert stalled(host, 20.0) == []
    for _ in range(10):
        host.step()
    assert stalled(host, 20.0) == [("waits", 20.0)]
    (stall,) = host.scheduler.stalled(host.now, 20.0)
    assert (stall.explanation.reason, stall.explanation.blocker) == (Reason.SEQUENCE_LIMIT, "runs")


def test_chunks_tokens_admissions_and_preemptions_are_progress() -> None:
    host = Host(max_num_batched_tokens=4)
    host.add("a", 12, max_tokens=8)
    for act in (*[host.step] * 6, lambda: host.park("a"), lambda: host.ready("a"), host.step):
        assert stalled(host, 5.0) == []
        wait(host, 4.0)
        act()
    assert stalled(host, 5.0) == []
    wait(host, 5.0)
    assert [name for name, _ in stalled(host, 5.0)] == ["a"], "it runs, and its step never comes back"


def test_the_stall_of_a_parked_request_has_its_cause() -> None:
    host = Host()
    host.add("a", 4, park=ParkReason.GRAMMAR)
    stalled(host, 30.0)
    wait(host, 30.0)
    (stall,) = host.scheduler.stalled(host.now, 30.0)
    assert stall.explanation.reason is Reason.PARKED


def test_a_request_that_waits_for_its_caller_does_not_stall() -> None:
    host = Host()
    host.add("a", 4, max_tokens=0, more_input=True)
    host.step()
    stalled(host, 10.0)
    wait(host, 60.0)
    assert stalled(host, 10.0) == []
    host.extend("a", 4)
    assert stalled(host, 10.0) == []
    wait(host, 10.0)
    assert [name for name, _ in stalled(host, 10.0)] == ["a"], "the step that its part needs is not executed"


def test_the_stall_of_an_endless_load_names_the_transfer() -> None:
    host, connector = connected()
    connector.offers["a"] = (8, True)
    host.add("a", 12)
    (load,) = host.step().loads
    stalled(host, 30.0)
    wait(host, 30.0)
    (stall,) = host.scheduler.stalled(host.now, 30.0)
    assert (stall.explanation.reason, stall.explanation.transfer) == (Reason.KV_LOAD, load.transfer_id)


def test_the_longest_stall_comes_first_and_progress_ends_a_stall() -> None:
    host = Host(max_num_seqs=1)
    for request_id in ("runs", "first"):
        host.add(request_id, 4, max_tokens=30)
    host.step()
    stalled(host, 1.0)
    host.add("second", 4)
    stalled(host, 1.0)
    wait(host, 10.0)
    host.step()
    assert [name for name, _ in stalled(host, 10.0)] == ["first", "second"]
    host.abort("runs")
    host.step()
    assert [name for name, _ in stalled(host, 10.0)] == ["second"]


@pytest.mark.parametrize("mode", PauseMode)
def test_paused_requests_do_not_stall(mode: PauseMode) -> None:
    host = Host(max_num_seqs=1)
    host.add("runs", 4)
    host.add("waits", 4)
    host.step()
    stalled(host, 10.0)
    host.scheduler.pause(host.now, mode)
    stalled(host, 10.0)
    wait(host, 60.0)
    assert [name for name, _ in stalled(host, 10.0)] == (["runs"] if mode is PauseMode.ADMISSIONS else [])
    host.scheduler.resume(host.now)
    assert stalled(host, 10.0) == []
    wait(host, 10.0)
    assert sorted(name for name, _ in stalled(host, 10.0)) == ["runs", "waits"]


def test_checks_for_stalls_are_not_recorded() -> None:
    recording = io.StringIO()
    host = Host(recorder=Recorder(recording))
    host.add("a", 4)
    lines = len(recording.getvalue().splitlines())
    stalled(host, 1.0)
    assert len(recording.getvalue().splitlines()) == lines
