"""`explain` and `metrics` of a running `pointsman serve`, by its URL."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.cli.conftest import Finished
from tests.forked_engines import start_server

Run = Callable[..., Finished]
KEY = "the-operators-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a server with one sequence slot, on which one request runs and two wait."""
    options = ("--port", "0", "--no-warm-up", "--max-num-seqs", "1", "--operator-key", KEY)
    with start_server(*options) as server:
        body = {"prompt": "The import statement", "max_tokens": 400, "ignore_eos": True, "temperature": 0}

        def complete() -> None:
            headers = {"Content-Type": "application/json"}
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{server.url}/v1/completions", data, headers)
            with suppress(OSError):  # the server ended
                urllib.request.urlopen(request, timeout=120).read()

        for _ in range(3):
            threading.Thread(target=complete, daemon=True).start()
        yield server.url


@pytest.mark.e2e
def test_explain_shows_why_requests_of_a_server_wait(pointsman: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_OPERATOR_KEY", KEY)
    for _ in range(100):
        done = pointsman("explain", "--url", url)
        if "1 running, 2 waiting, 0 parked" in done.out:
            break
        time.sleep(0.1)
    assert done.code == 0 and "1 running, 2 waiting, 0 parked" in done.out
    assert "sequence_limit" in done.out
    waiting = [line for line in pointsman("explain", "--url", f"{url}/v1", "--json").json_lines if line["reason"]]
    assert {line["reason"] for line in waiting} <= {"sequence_limit", "behind"} and waiting
    one = pointsman("explain", "--url", url, waiting[0]["id"])
    assert one.code == 0 and "waits for" in one.out


@pytest.mark.e2e
def test_metrics_prints_those_of_a_server(pointsman: Run, url: str) -> None:
    done = pointsman("metrics", "--url", url, "--operator-key", KEY)
    assert done.code == 0 and "# TYPE vllm:num_requests_running gauge" in done.out


@pytest.mark.e2e
def test_live_prints_the_address_of_the_page(pointsman: Run, url: str) -> None:
    assert pointsman("live", "--url", url).out == f"{url}/live\n"


@pytest.mark.e2e
def test_questions_that_a_server_refuses_are_errors(pointsman: Run, url: str) -> None:
    refused = pointsman("explain", "--url", url, "--operator-key", "wrong")
    assert refused.code == 1 and f"{url}/v1/requests answers 401: " in refused.err
    unknown = pointsman("explain", "--url", url, "--operator-key", KEY, "cmpl-unknown")
    assert unknown.code == 1 and "no request 'cmpl-unknown' is waiting" in unknown.err
    both = pointsman("explain", "--url", url, "--socket", "s")
    assert both.code == 2 and "--url belongs to a pointsman serve" in both.err
    limit = pointsman("explain", "--url", url, "--limit", "0")
    assert limit.code == 2 and "--limit is 0; it must be at least 1" in limit.err


@pytest.mark.parametrize("body", [b'{"object": "list"}', b"[]", b"<html>"])
def test_another_server_at_the_url_is_named(pointsman: Run, body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{other.server_port}"
        done = pointsman("explain", "--url", url)
        thread.join()
    assert done.code == 1 and f"{url}/v1/requests is no page of pointsman serve; check --url" in done.err


def test_a_key_that_no_header_can_have_is_refused(pointsman: Run) -> None:
    done = pointsman("explain", "--operator-key", "a\nb")
    assert done.code == 2 and "the key has characters other than printable ASCII" in done.err


def test_a_server_on_this_machine_is_asked_without_a_proxy(
    pointsman: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert pointsman("live", "--url", url).code == 0
