"""`pointsman live`: the decisions of a running vLLM, in a page on this machine."""

from __future__ import annotations

import http.client
import io
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from _server_process import free_port

from pointsman.cli import main
from pointsman.cli.live import live_server
from pointsman.web.film import Film
from pointsman.web.live import read_records
from tests.integrations.vllm_operated import operated, stepping


def test_the_live_page_gets_the_film_of_a_running_scheduler(tmp_path: Path) -> None:
    with operated(tmp_path / "s") as host:
        server = live_server(host.control.path)
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            connection.request("GET", "/")
            page = connection.getresponse().read().decode()
            assert "<title>Live: the &quot;demo&quot;</title>" in page and "connect-src 'self'" in page
            assert server.token not in page
            connection.request("GET", "/live/film")
            answer = connection.getresponse()
            assert answer.status == 401 and b"the token is missing" in answer.read()
            host.add("a", max_tokens=40)
            connection.request("GET", "/live/film", headers={"authorization": f"Bearer {server.token}"})
            answer, stream = connection.getresponse(), b""
            with stepping(host):
                while "P" not in [kind for kind, _ in read_records(stream)]:
                    stream += answer.read1(1 << 16)
            (_, header), *_, (_, part) = read_records(stream)
            assert [one.request_id for one in Film(io.BytesIO(header + part)).requests] == ["a"]
            connection.close()
        finally:
            server.close()
            thread.join()


def test_live_serves_on_the_given_port_and_says_how_to_reach_it(tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "out"
    with operated(tmp_path / "s") as host, out.open("w") as file:
        command = [sys.executable, "-m", "pointsman", "live", "--socket", host.control.path, "--port", str(port)]
        with subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE, text=True) as process:
            until = time.monotonic() + 60
            while not out.read_text():  # a file, to which Python writes only when it flushes
                assert time.monotonic() < until and process.poll() is None
                time.sleep(0.05)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                assert b"<title>Live: " in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
    url, words, *_ = out.read_text().splitlines()
    assert url.startswith(f"http://127.0.0.1:{port}/#token=") and f"`ssh -L {port}:127.0.0.1:{port} HOST`" in words


def test_a_taken_port_of_the_live_page_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with operated(tmp_path / "s") as host, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port, message in (
            (taken.getsockname()[1], "choose another --port"),
            (65536, "--port is 65536; it must be"),
        ):
            with pytest.raises(SystemExit) as ended:
                main(["live", "--socket", host.control.path, "--port", str(port)])
            assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--socket", "nowhere"], "there is no socket nowhere"),
        (["--socket", "s", "--url", "http://127.0.0.1:1"], "--url belongs to a pointsman serve; leave one out"),
        (["--port", "8080"], "--port is 8080, but a pointsman serve has the page on its own port; leave --port out"),
        (
            ["--url", "127.0.0.1:1"],
            "--url is '127.0.0.1:1', not an HTTP address; write for example http://127.0.0.1:8000",
        ),
        (["--url", "http://[bad"], "--url is 'http://[bad', not an HTTP address"),
        (["--url", "http://127.0.0.1:99999"], "--url is 'http://127.0.0.1:99999', not an HTTP address"),
        (
            ["--url", "http://127.0.0.1:1"],
            "no server answers at http://127.0.0.1:1 ([Errno 111] Connection refused); start one with pointsman serve, "
            "or give its --url, or --socket for a vLLM",
        ),
    ],
)
def test_wrong_live_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["live", *words])
    assert ended.value.code
    assert message in " ".join(capsys.readouterr().err.split())
