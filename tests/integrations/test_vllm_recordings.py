"""Recordings that begin while vLLM runs: when they begin, that they replay, and that they cannot harm the scheduler."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest

from pointsman.core import replay
from pointsman.integrations.vllm.client import Connection, Refused, connect
from pointsman.integrations.vllm.recordings import RecordingFile
from tests.integrations.vllm_operated import Operated, operated


def begin(connection: Connection, path: Path) -> dict[str, object]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        return connection.ask("record", file=descriptor)
    finally:
        os.close(descriptor)


def end(connection: Connection) -> dict[str, object]:
    connection.end_input()
    return last_line(connection)


def last_line(connection: Connection) -> dict[str, object]:
    """The line with the end of the recording; a line about its first step may precede it."""
    line = connection.next_line(30)
    return connection.next_line(30) if line == {"state": "stepping"} else line


def until(is_true: Callable[[], object]) -> None:
    limit = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def work(host: Operated, names: str) -> None:
    for name in names:
        host.add(name, length=9, max_tokens=12)
    host.run_to_end()


def test_recording_an_idle_scheduler_begins_immediately_and_replays(tmp_path: Path) -> None:
    with operated(tmp_path / "s", num_blocks=8, max_model_len=24) as host, connect(str(tmp_path / "s")) as connection:
        work(host, "abc")
        assert begin(connection, tmp_path / "r") == {"state": "recording"}
        work(host, "defg")
        done = end(connection)
    report = replay((tmp_path / "r").read_text().splitlines())
    assert (report.num_requests, report.num_steps) == (4, done["num_steps"])
    assert done["num_bytes"] == (tmp_path / "r").stat().st_size and not done["ended_by"]


def test_the_client_is_notified_of_the_first_step_only(tmp_path: Path) -> None:
    with operated(tmp_path / "s") as host, connect(str(tmp_path / "s")) as connection:
        begin(connection, tmp_path / "r")
        assert connection.wait_for_line(0.5) is None
        work(host, "a")
        assert connection.next_line(30) == {"state": "stepping"}
        work(host, "b")
        assert connection.wait_for_line(0.5) is None
        assert end(connection)["state"] == "done"


def test_a_recording_waits_until_there_are_no_requests(tmp_path: Path) -> None:
    with operated(tmp_path / "s") as host, connect(str(tmp_path / "s")) as connection:
        host.add("a")
        host.step()
        host.add("b")
        assert begin(connection, tmp_path / "r") == {"state": "waiting", "num_running": 1, "num_waiting": 1}
        host.run_to_end()
        work(host, "c")  # without a pause: only the scheduler could see the idle moment
        assert connection.next_line(30) == {"state": "recording"}
        work(host, "d")
        end(connection)
    assert replay((tmp_path / "r").read_text().splitlines()).num_requests == 2


def test_a_cancelled_recording_is_empty(tmp_path: Path) -> None:
    with operated(tmp_path / "s") as host, connect(str(tmp_path / "s")) as connection:
        host.add("a")
        begin(connection, tmp_path / "r")
        assert end(connection) == {"state": "cancelled"}
        work(host, "b")
    assert (tmp_path / "r").read_bytes() == b""


def test_a_recording_ends_when_its_client_disconnects(tmp_path: Path) -> None:
    with operated(tmp_path / "s") as host:
        with connect(str(tmp_path / "s")) as connection:
            begin(connection, tmp_path / "r")
        until = time.monotonic() + 10
        while host.recordings.current is not None:
            assert time.monotonic() < until
            time.sleep(0.01)
        work(host, "a")
    assert len((tmp_path / "r").read_text().splitlines()) == 1, "the header"


def test_a_second_recording_at_the_same_time_is_refused(tmp_path: Path) -> None:
    with operated(tmp_path / "s"), connect(str(tmp_path / "s")) as first, connect(str(tmp_path / "s")) as second:
        begin(first, tmp_path / "r")
        with pytest.raises(Refused, match="another recording is already under way"):
            begin(second, tmp_path / "r2")
        end(first)
        assert begin(second, tmp_path / "r2") == {"state": "recording"}


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_recording_of_unsupported_settings_is_refused_at_once(tmp_path: Path, is_busy: bool) -> None:
    """A recording with images, for example. If it waited, the engine would fail when the recording begins."""
    with operated(tmp_path / "s", encoder_budget=8, encoder_cache_size=8) as host:
        if is_busy:
            host.add("a")
        for _ in range(2):
            with connect(str(tmp_path / "s")) as connection, pytest.raises(Refused, match="with encoder_budget"):
                begin(connection, tmp_path / "r")
        work(host, "bc")
        assert host.core.stats().finished["length"] == 2 + is_busy


def test_a_pipe_is_refused_because_it_could_block_the_scheduler(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    refused = pytest.raises(Refused, match="only be written to a regular file")
    with operated(tmp_path / "s"), connect(str(tmp_path / "s")) as connection, refused:
        begin(connection, tmp_path / "pipe")
    os.close(reader)


def test_recordings_leave_no_file_descriptor_open(tmp_path: Path) -> None:
    with operated(tmp_path / "s"):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with connect(str(tmp_path / "s")) as connection:
                begin(connection, tmp_path / "r")
                end(connection)
            with connect(str(tmp_path / "s")) as connection, open(tmp_path / "r") as file:
                connection.ask("metrics", file=file.fileno())
        until = time.monotonic() + 10
        while len(os.listdir("/proc/self/fd")) > before:
            assert time.monotonic() < until, os.listdir("/proc/self/fd")
            time.sleep(0.01)


def test_a_recording_ends_with_a_whole_line_at_its_size_limit(tmp_path: Path) -> None:
    file = RecordingFile(FileIO(tmp_path / "r", "w"), "r", max_bytes=3000)
    with operated(tmp_path / "s", record=file) as host:
        work(host, "abc")
        assert "longer than 3000 bytes" in file.ended_by
        assert host.core.stats().finished["length"] == 3
    lines = (tmp_path / "r").read_text().splitlines()
    assert replay(lines).num_calls == len(lines) - 1 > 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_ends_the_recording_and_not_the_scheduler(tmp_path: Path) -> None:
    file = RecordingFile(FileIO("/dev/full", "w"), "r")
    with operated(tmp_path / "s", record=file) as host:
        work(host, "a")
        until(lambda: file.ended_by)
        assert "No space left" in file.ended_by
        assert host.core.stats().finished["length"] == 1


def test_the_client_is_notified_when_a_recording_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.integrations.vllm.recordings.MAX_BYTES", 2500)
    with operated(tmp_path / "s") as host, connect(str(tmp_path / "s")) as connection:
        begin(connection, tmp_path / "r")
        work(host, "abcdef")
        assert "longer than 2500 bytes" in str(last_line(connection)["ended_by"])
        assert connection.ask("metrics")["stats"]["num_added"] == 6


def test_the_file_of_a_recording_from_the_start_is_private(tmp_path: Path) -> None:
    file = RecordingFile.create(tmp_path / "r")
    with operated(tmp_path / "s", record=file) as host, connect(str(tmp_path / "s")) as connection:
        with pytest.raises(Refused, match="already under way"):
            begin(connection, tmp_path / "r2")
        work(host, "ab")
        until(lambda: not file.num_waiting_bytes)
        assert replay((tmp_path / "r").read_text().splitlines()).num_requests == 2, "while it is recorded"
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o600


def test_a_recording_begins_while_another_thread_steps(tmp_path: Path) -> None:
    """Idle moments are short: a request arrives as soon as the last one has finished."""
    with operated(tmp_path / "s") as host, connect(str(tmp_path / "s")) as connection:
        ended = threading.Event()

        def run() -> None:
            number = 0
            while not ended.is_set():
                work(host, "xyz")
                number += 1

        thread = threading.Thread(target=run)
        thread.start()
        try:
            answer = begin(connection, tmp_path / "r")
            if answer["state"] == "waiting":
                assert connection.next_line(30) == {"state": "recording"}
            time.sleep(0.3)
            assert end(connection)["state"] == "done"
        finally:
            ended.set()
            thread.join()
    assert replay((tmp_path / "r").read_text().splitlines()).num_requests > 3
