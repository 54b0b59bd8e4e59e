"""`pointsman play --sandbox`: it serves until Ctrl-C, and what is refused."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused

Run = Callable[..., Finished]


@pytest.mark.e2e
def test_it_serves_until_ctrl_c(pointsman: Run, tmp_path: Path) -> None:
    """With the requests of a film."""
    film = tmp_path / "run.film"
    assert pointsman("simulate", "--requests", 7, "--seed", 1, "--film", film).code == 0
    command = [sys.executable, "-m", "pointsman", "play", film, "--sandbox"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address, _, token = process.stdout.readline().strip().partition("#token=")
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert b"Sandbox: run.film" in answer.read()
        ask = urllib.request.Request(f"{address}state", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(ask, timeout=30) as answer:
            assert len(json.load(answer)["requests"]) == 7
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, error) == (0, "")


def test_what_is_refused(pointsman: Run, tmp_path: Path) -> None:
    check_refused(pointsman("play"), "nothing to play", "--sandbox")
    check_refused(pointsman("play", "run.film", "--port", 8000), "--port is 8000", "--sandbox")
    check_refused(pointsman("play", "--sandbox", "--out", "x.html"), "--out", "leave one of them out")
    check_refused(pointsman("play", "a.film", "b.film", "--sandbox"), "b.film", "leave it out")
    check_refused(pointsman("play", "--sandbox", "--port", 65536), "--port is 65536", "65535")
    check_refused(pointsman("play", tmp_path / "none.film", "--sandbox"), "none.film")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check_refused(pointsman("play", "--sandbox", "--port", taken.getsockname()[1]), "choose another --port")
