"""Gaps between beats are found where they are, also in a loop that is held; attacks fit into the server's limit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from benchmarks import _server_beats
from benchmarks._server_attacks import ATTACKS, MAX_BYTES, Attack
from benchmarks._server_beats import Beats, keep_beating


class Clock:
    """What `_server_beats` reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(_server_beats, "monotonic", lambda: self.now)

    def beat_at(self, beats: Beats, *times: float) -> None:
        for self.now in times:
            beats.add()


def test_the_longest_gap_is_of_the_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats, clock = Beats(tmp_path / "beats"), Clock(monkeypatch)
    clock.beat_at(beats, 1, 5, 6, 8, 9)
    clock.now = 9.5
    assert beats.longest_gap(5.5, 9.2).seconds == 2  # not the 4 before it
    assert beats.longest_gap(4.9, 9.2).seconds == 4  # a gap that overlaps counts whole
    clock.now = 20.0
    assert beats.longest_gap(5.5, 20.0).seconds == 11  # the last beat has none after it


def test_another_process_sees_the_newest_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server_beats, "CAPACITY", 4)
    writer, reader, clock = Beats(tmp_path / "beats"), Beats(tmp_path / "beats"), Clock(monkeypatch)
    clock.beat_at(writer, 1, 50, 51, 53, 56, 57)
    assert reader.count == 6
    assert reader.longest_gap(0, 57).seconds == 3  # the first two have been overwritten


def test_a_loop_that_is_held_does_not_beat(tmp_path: Path) -> None:
    beats = Beats(tmp_path / "beats")

    async def main() -> tuple[float, float]:
        keep_beating(asyncio.get_running_loop(), beats)
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        while time.monotonic() < begin + 0.2:
            pass
        time.sleep(0.1)
        await asyncio.sleep(0.05)
        return begin, time.monotonic()

    gap = beats.longest_gap(*asyncio.run(main()))
    assert beats.count > 2
    assert gap.seconds >= 0.3
    assert 0 < gap.cpu_seconds < gap.seconds


def test_a_stream_is_timed_by_its_events(tmp_path: Path) -> None:
    """Headers and comments are no tokens."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            for event in (b": wait\n\n", b"data: 1\n\n", b"data: 2\n\n"):
                time.sleep(0.1)
                self.wfile.write(event)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    command = [sys.executable, "-S", _server_beats.__file__, "read", str(tmp_path / "beats"), str(server.server_port)]
    try:
        subprocess.run(command, input=b"GET / HTTP/1.0\r\n\r\n", check=True, timeout=30)
    finally:
        thread.join(30)
        server.server_close()
    assert Beats(tmp_path / "beats").count == 2


@pytest.mark.in_turn
@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_an_attack_fits_into_a_body(attack: Attack) -> None:
    """A body beyond the limit would be refused before it is read."""
    request = attack.request()
    assert request.startswith(f"POST {attack.path} ".encode())
    if "4 MB" in attack.name:
        assert len(request) > 0.9 * MAX_BYTES
