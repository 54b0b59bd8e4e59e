"""`pointsman live`: the decisions of a running vLLM, in a page on this machine."""

from __future__ import annotations

import http.client
import io
import threading
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--socket", "nowhere"], "there is no socket nowhere"),
        (["--socket", "s", "--url", "http://127.0.0.1:1"], "--url belongs to a pointsman serve; leave one out"),
        (
            ["--url", "127.0.0.1:1"],
            "--url is '127.0.0.1:1', not an HTTP address; write for example http://127.0.0.1:8000",
        ),
        (["--url", "http://[bad"], "--url is 'http://[bad', not an HTTP address"),
        (["--url", "http://127.0.0.1:99999"], "--url is 'http://127.0.0.1:99999', not an HTTP address"),
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1 ([Errno 111] Connection refused)"),
    ],
)
def test_wrong_live_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["live", *words])
    assert ended.value.code
    assert message in " ".join(capsys.readouterr().err.split())
