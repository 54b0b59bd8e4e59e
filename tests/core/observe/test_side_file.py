"""Recording and film files: the effect of a full, slow or missing disk on them and on their writer."""

from __future__ import annotations

import errno
import io
import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from pointsman.core import BackgroundFile, Recorder, replay
from pointsman.core.observe.film import FilmRecorder
from pointsman.core.observe.side_file import SideFile
from pointsman.web.film import Film
from tests.core.helpers import Host

LINE = "a line of some bytes\n"
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


class Disk(FileIO):
    """A file on a disk with `num_free` free bytes."""

    num_free = 0
    error = errno.ENOSPC

    def write(self, data: Any, /) -> int:
        if not self.num_free:
            raise OSError(self.error, os.strerror(self.error))
        written = super().write(memoryview(data)[: self.num_free])
        self.num_free -= written
        return written


def disk(path: Path, num_free: int, error: int = errno.ENOSPC) -> Disk:
    made = Disk(path, "w")
    made.num_free, made.error = num_free, error
    return made


def until(is_true: Callable[[], object]) -> None:
    limit = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < limit
        time.sleep(0.005)


def work(host: Host, names: str = "abcdef") -> None:
    for name in names:
        host.add(name, 9, max_tokens=12)
    host.run_to_end()
    assert host.scheduler.stats().finished["length"] == len(names)


# ---------------------------------------------------------------------- a file with a thread of its own


def test_all_pieces_are_in_the_file_after_close(tmp_path: Path) -> None:
    file = BackgroundFile.create(tmp_path / "f")
    assert [file.write(LINE) for _ in range(1000)] == [len(LINE)] * 1000
    file.close()
    assert (tmp_path / "f").read_text() == LINE * 1000
    assert (file.num_bytes, file.num_waiting_bytes, file.ended_by) == (1000 * len(LINE), 0, "")
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_ends_the_file_after_its_last_whole_piece(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends: list[int] = []
    file = BackgroundFile(disk(tmp_path / "f", num_free=50), "the file")
    file.on_end = lambda: ends.append(threading.get_ident())
    for _ in range(10):
        file.write(LINE)
    until(lambda: file.ended_by)
    file.write(LINE)
    file.write(LINE)
    file.close()
    assert (tmp_path / "f").read_text() == LINE * 2
    assert ends == [threading.get_ident()], "once, in the writer's thread"
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(logged) == 1
    assert "the file is written no further: No space left on device" in logged[0]


def test_a_file_that_waits_for_free_space_continues_without_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.core.observe.side_file.SECONDS_BETWEEN_TRIES", 0.01)
    raw = disk(tmp_path / "f", num_free=50)
    file = BackgroundFile(raw, when_full="wait")
    lines = [f"line {number}\n" for number in range(500)]
    for line in lines:
        file.write(line)
    until(lambda: raw.num_free == 0)
    time.sleep(0.1)
    assert not file.ended_by and file.num_waiting_bytes > 0
    raw.num_free = 1 << 20
    file.close()
    assert (tmp_path / "f").read_text() == "".join(lines)
    assert not file.ended_by


def test_a_file_on_a_full_disk_ends_when_too_many_bytes_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.core.observe.side_file.SECONDS_BETWEEN_TRIES", 0.01)
    raw = disk(tmp_path / "f", num_free=0)
    file = BackgroundFile(raw, when_full="wait", max_waiting_bytes=100)
    file.write(LINE)
    until(lambda: file._is_full)
    for _ in range(10):
        file.write(LINE)
    assert file.ended_by == "the disk is full, and more than 100 bytes would wait in memory"
    assert file.num_waiting_bytes <= 100
    raw.num_free = 1 << 20
    file.write(LINE)
    file.close()
    assert (tmp_path / "f").read_text() == LINE * 4, "the waiting pieces are written, and nothing after a gap"


def test_close_ends_a_file_that_waits_for_free_disk_space(tmp_path: Path) -> None:
    file = BackgroundFile(disk(tmp_path / "f", num_free=30), when_full="wait")
    for _ in range(10):
        file.write(LINE)
    began = time.monotonic()
    file.close()
    assert time.monotonic() - began < 2
    assert file.ended_by == "No space left on device"
    assert (tmp_path / "f").read_text() == LINE


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG])
def test_only_a_full_disk_makes_the_file_wait(tmp_path: Path, error: int) -> None:
    file = BackgroundFile(disk(tmp_path / "f", num_free=0, error=error), when_full="wait")
    file.write(LINE)
    until(lambda: file.ended_by)
    assert file.ended_by == os.strerror(error)
    file.close()


def test_a_disk_that_hangs_delays_no_call(tmp_path: Path) -> None:
    answers = threading.Event()

    class Hung(FileIO):
        def write(self, data: Any, /) -> int:
            answers.wait()
            return super().write(data)

    file = BackgroundFile(Hung(tmp_path / "f", "w"), max_waiting_bytes=1000)
    began = time.monotonic()
    for _ in range(100):
        file.write(LINE)
    assert file.ended_by == "the disk is too slow, and more than 1,000 bytes would wait in memory"
    file.close(timeout=0.1)
    assert time.monotonic() - began < 2
    answers.set()


@pytest.mark.parametrize("how", ["deleted", "its directory removed"])
def test_a_file_that_is_deleted_is_reported(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = BackgroundFile.create(folder / "f")
    file.write(LINE)
    until(lambda: file.num_bytes)
    (folder / "f").unlink()
    if how != "deleted":
        folder.rmdir()
    file.write(LINE)
    until(lambda: file.ended_by)
    assert file.ended_by == "the file was deleted"
    file.close()


def test_writing_continues_to_a_renamed_file(tmp_path: Path) -> None:
    file = BackgroundFile.create(tmp_path / "f")
    file.write(LINE)
    until(lambda: file.num_bytes)
    (tmp_path / "f").rename(tmp_path / "g")
    file.write(LINE)
    file.close()
    assert (tmp_path / "g").read_text() == LINE * 2


def test_a_file_shortened_by_another_program_gets_no_zeros(tmp_path: Path) -> None:
    file = BackgroundFile.create(tmp_path / "f")
    for _ in range(10):
        file.write(LINE)
    until(lambda: file.num_bytes)
    os.truncate(tmp_path / "f", len(LINE))
    file.write(LINE)
    until(lambda: file.ended_by)
    file.close()
    assert (tmp_path / "f").read_text() == LINE
    assert file.ended_by == "another program has shortened the file"


def test_an_error_at_close_is_reported(tmp_path: Path) -> None:
    class Deferred(FileIO):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    file = BackgroundFile(Deferred(tmp_path / "f", "w"))
    file.write(LINE)
    file.close()
    assert "when it was closed; its end may be missing" in file.ended_by


def test_the_file_size_limit_of_the_process_ends_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = BackgroundFile.create(tmp_path / "f", when_full="wait")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
        for _ in range(10):
            file.write(LINE)
        until(lambda: file.ended_by)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.close()
    assert file.ended_by == "File too large"
    assert (tmp_path / "f").read_text() == LINE * 2


def test_nothing_is_written_to_a_closed_file(tmp_path: Path) -> None:
    file = BackgroundFile.create(tmp_path / "f")
    file.close()
    file.close()
    file.write(LINE)
    assert (file.ended_by, file.num_waiting_bytes) == ("it is closed", 0)


def test_a_file_on_a_pipe_ends_when_the_reader_closes_the_pipe() -> None:
    reader, writer = os.pipe()
    file = BackgroundFile(FileIO(writer, "w"))
    file.write(LINE)
    assert os.read(reader, 100) == LINE.encode()
    os.close(reader)
    file.write(LINE)
    until(lambda: file.ended_by)
    assert file.ended_by == "Broken pipe"
    file.close()


# ---------------------------------------------------------------------- recordings and films


@needs_full
def test_a_recording_on_a_full_disk_does_not_affect_the_scheduler() -> None:
    file = BackgroundFile(FileIO("/dev/full", "w"))
    host = Host(recorder=Recorder(file))
    work(host)
    until(lambda: file.ended_by)
    assert host.scheduler.recording == ("No space left on device", 0)
    host.scheduler.check_invariants()
    file.close()


@pytest.mark.parametrize("num_free", [0, 10, 700, 1500, 2000, 3333])
def test_a_recording_that_ended_early_replays_up_to_its_end(tmp_path: Path, num_free: int) -> None:
    file = BackgroundFile(disk(tmp_path / "f", num_free))
    work(Host(recorder=Recorder(file)))
    file.close()
    assert file.ended_by
    lines = (tmp_path / "f").read_text().splitlines(keepends=True)
    assert all(line.endswith("\n") for line in lines)
    if lines:
        assert replay(lines).num_calls == len(lines) - 1


@pytest.mark.parametrize("kind", ["raises", "takes a part", "is closed"])
def test_a_failing_file_of_the_caller_ends_only_the_recording(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    class Own(io.StringIO):
        num_lines = 0

        def write(self, line: str, /) -> int:
            self.num_lines += 1
            if self.num_lines < 5:
                return super().write(line)
            if kind == "raises":
                raise RuntimeError("boom")
            if kind == "takes a part":
                return super().write(line[:3])
            raise ValueError("I/O operation on closed file")

    own = Own()
    host = Host(recorder=Recorder(own))
    work(host)
    host.scheduler.check_invariants()
    assert replay(io.StringIO(own.getvalue())).num_calls == 3
    assert len(caplog.records) == 1


def filmed(file: Any) -> None:
    host = Host()
    recorder = FilmRecorder(file)
    host.scheduler.start_film(recorder)
    work(host)
    host.scheduler.remove_listener(recorder)
    recorder.close()


def test_a_film_cut_off_by_a_full_disk_is_readable_and_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.core.observe.film.EVENTS_IN_A_CHUNK", 8)
    whole = io.BytesIO()
    filmed(whole)
    file = BackgroundFile(disk(tmp_path / "f", num_free=len(whole.getvalue()) - 100))
    filmed(file)
    file.close()
    assert file.ended_by == "No space left on device"
    film = Film.read(tmp_path / "f")
    assert film.num_steps > 0 and not film.is_complete


def test_a_file_created_with_raises_raises_write_errors() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        SideFile(Full(), raises=True).write(b"x")
