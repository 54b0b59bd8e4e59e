"""Irregular files (pipes, sockets, devices, directories, links), and files that are too large."""

from __future__ import annotations

import os
import socket
import threading
from io import BufferedReader, BytesIO
from pathlib import Path

import pytest

from pointsman import files
from pointsman.files import open_input, open_regular, read_input, read_regular, read_text_lines, represented, shown


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_regular_file_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 4) == read_input(tmp_path / "link") == b"text"


def test_a_pipe_is_refused_as_regular_file_without_waiting(pipe: Path) -> None:
    with pytest.raises(OSError, match="it is a named pipe; give a regular file"):
        open_regular(pipe)


def test_irregular_files_are_refused_by_kind(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for read in (open_regular, open_input):
            with pytest.raises(OSError, match="it is a socket"):
                read(tmp_path / "socket")
            with pytest.raises(OSError, match="it is a directory"):
                read(tmp_path)
            with pytest.raises(FileNotFoundError):
                read(tmp_path / "absent")
    with pytest.raises(OSError, match="it is a device"):
        open_regular("/dev/zero")


def test_circular_symbolic_links_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(tmp_path / "a")


def test_waiting_for_a_silent_pipe_is_logged(
    pipe: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "SILENT", 0.05)
    said = threading.Event()
    monkeypatch.setattr(files.logger, "warning", lambda *arguments: said.set())

    def write() -> None:
        assert said.wait(30)
        pipe.write_text("late")

    writer = threading.Thread(target=write)
    writer.start()
    assert read_input(pipe) == b"late"
    writer.join()


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 10**12)
    for read in (read_regular, read_input):
        with pytest.raises(OSError, match="more than 1,000 bytes"):
            read(path, 1000)
    with pytest.raises(OSError, match="more than 1,000 bytes"):
        read_input("/dev/zero", 1000)
    with BufferedReader(open_input("/dev/zero")) as endless, pytest.raises(ValueError, match="line 1: longer than"):
        next(read_text_lines(endless))


def test_checking_that_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("old", "new", "link"):
        files.check_writable(tmp_path / name)
    for name in ("nowhere/new", "."):
        with pytest.raises(OSError):
            files.check_writable(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["link", "old"]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "old").read_text() == "precious"


def test_lines_that_are_not_utf_8_are_reported() -> None:
    lines = read_text_lines(BytesIO(b"\xef\xbb\xbfone\n\ntwo\n\xff\n"))
    assert [next(lines) for _ in range(3)] == ["one\n", "\n", "two\n"]
    with pytest.raises(ValueError, match="line 4: not UTF-8 text"):
        next(lines)


def test_repr_of_any_value_is_shortened_to_one_line() -> None:
    assert shown("a\nb") == "a b" and represented([1, "x"]) == "[1, 'x']"
    assert shown("x" * 100, 10) == "xxxxxxx..." and len(represented([[0] * 10**5] * 10**5)) == 80
