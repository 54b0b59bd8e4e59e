"""Start, serving and exit of a server, seen by its supervisor and clients: real processes, sockets and signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from _server_process import ServerFailed, ServerProcess, processor_seconds, wait_until
from _server_process import start_server as start_separate_server

from pointsman.engine.errors import ModelLoadError
from pointsman.engine.text.tokenizer import PLAIN_CHAT_TEMPLATE, model_directory, read_tokenizer
from pointsman.server.config import ServerConfig
from pointsman.server.serve import AddressError, check_chat_template, listening, run, url_of, warm_tokenizer
from tests.forked_engines import start_server

pytestmark = pytest.mark.e2e

SECRET = "Nobody else shall read this"
SMALL = ("--model", "demo", "--num-blocks", "256", "--max-num-seqs", "4", "--threads", "1")


def completion(server: ServerProcess, max_tokens: int, **fields: Any) -> httpx.Response:
    body = {"model": "demo", "prompt": SECRET, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


class Client(threading.Thread):
    """One request in its own thread, with its response or its failure."""

    def __init__(self, server: ServerProcess, max_tokens: int, *, stream: bool = False) -> None:
        super().__init__(daemon=True)
        self._server, self._max_tokens, self._stream = server, max_tokens, stream
        self.status = 0
        self.text = ""
        self.ended = 0.0
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            answer = completion(self._server, self._max_tokens, stream=self._stream)
            self.status, self.text = answer.status_code, answer.text
        except httpx.HTTPError as error:
            self.failure = error
        self.ended = time.monotonic()

    @property
    def finish_reason(self) -> str | None:
        reason: str | None = json.loads(self.text)["choices"][0]["finish_reason"]
        return reason


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {"temperature": 0}),
    "sampled": (
        "completions",
        {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    ),
    "streamed": ("completions", {"stream": True}),
    "echoed": ("completions", {"echo": True, "prompt_logprobs": 1, "logit_bias": {"5": 1}, "stop": ["zzz"]}),
    "json_object": ("chat/completions", {"response_format": {"type": "json_object"}}),
    "json_schema": (
        "chat/completions",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"b": {"type": "integer"}}}},
            }
        },
    ),
    "chat": ("chat/completions", {"logprobs": True}),
    "embedding": ("embeddings", {}),
}
TIME_OF_LOADING = "pointsman:engine_process_cpu_seconds_total"
WARM = 0.3
"""Seconds that the first request of a kind may take beyond a later one."""


def check_warm(server: ServerProcess, clock: Callable[[ServerProcess], float]) -> None:
    """The first request of each kind takes no longer than later ones."""
    late = {}
    for kind, (route, fields) in KINDS.items():
        body: dict[str, Any] = {"model": "demo", **fields}
        if route == "embeddings":
            body["input"] = SECRET
        elif route == "completions":
            body |= {"prompt": SECRET, "max_tokens": 4}
        else:
            body |= {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8}
        seconds = []
        for _ in range(4):
            started = clock(server)
            answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
            assert answer.status_code == 200, f"{kind}: {answer.text}"
            seconds.append(clock(server) - started)
        if seconds[0] > min(seconds[1:]) + WARM:
            late[kind] = seconds
    assert not late


def processor_time(server: ServerProcess) -> float:
    """Processor time of all processes of a server, in seconds. Unlike wall time, it does not depend on other load."""
    pids = [server.pid, server.engine_pid]
    for task in Path(f"/proc/{server.engine_pid}/task").iterdir():
        pids += map(int, (task / "children").read_text().split())  # the process that compiles grammars
    return sum(map(processor_seconds, pids))


def num_running(server: ServerProcess) -> int:
    return len(httpx.get(f"{server.url}/v1/requests", timeout=20).json()["data"])


def test_server_starts_warm_serves_requests_and_exits() -> None:
    with start_separate_server(*SMALL) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 200
        check_warm(server, processor_time)
        answer = completion(server, 8)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        assert "x-engine" not in answer.headers
        assert server.engine_pid != server.pid
        engine_pid = server.engine_pid
        assert server.stop() == 0
        assert not Path(f"/proc/{engine_pid}").exists()
    assert SECRET not in server.log()  # no prompt in the log


def test_template_failure_at_warm_up_is_reported_to_requests(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = read_tokenizer(model_directory("demo"))
    with caplog.at_level("INFO", "pointsman.server.serve"):
        warm_tokenizer(tokenizer, None)
        assert not caplog.records
        warm_tokenizer(tokenizer, "{{ raise_exception('only from Mondays on') }}")
    (record,) = caplog.records
    assert "only from Mondays on" in record.getMessage()


@pytest.mark.long
def test_server_starts_warm_with_an_empty_kernel_cache(tmp_path: Path) -> None:
    with start_separate_server(*SMALL, environment={"NUMBA_CACHE_DIR": str(tmp_path)}, timeout=300) as server:
        check_warm(server, lambda _: time.perf_counter())
        log = server.log()
        assert log.index("warmed up in") < log.index("listening")


def test_warm_up_does_not_count_in_metrics() -> None:
    with start_server(*SMALL, "--warm-up", "--log-requests", "--log-request-events") as server:
        assert "warmed up in" in server.log() and "warm-up" not in server.log()
        metrics = httpx.get(f"{server.url}/metrics").text
        counts = re.findall(r"^((?:vllm|pointsman):\w+_(?:total|count|sum)(?:{.*})?) (\S+)$", metrics, re.MULTILINE)
        assert len(counts) > 20 and {name for name, value in counts if float(value)} <= {TIME_OF_LOADING}
        assert num_running(server) == 0
        assert completion(server, 4).json()["usage"]["prompt_tokens_details"] in (None, {"cached_tokens": 0})


def test_sigterm_finishes_open_requests_and_refuses_new_ones() -> None:
    with start_server(*SMALL, "--drain-delay", "0.5", "--drain-timeout", "120") as server:
        clients = [Client(server, 400) for _ in range(6)]  # two of them wait
        wait_until(lambda: num_running(server) == 6, 20, "six requests are there")
        server.signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, 10, "the server is not ready")
        wait_until(lambda: completion(server, 1).status_code == 503, 10, "the server refuses requests")
        late = completion(server, 8)
        assert late.status_code == 503 and int(late.headers["retry-after"]) >= 1 and "error" in late.json()
        assert server.wait(120) == 0
        for client in clients:
            client.join(10)
            assert client.failure is None and client.status == 200
            assert json.loads(client.text)["usage"]["completion_tokens"] == 400


def test_drain_aborts_requests_after_its_timeout() -> None:
    with start_server(*SMALL, "--drain-timeout", "0.5") as server:
        clients = [Client(server, 1500) for _ in range(3)]
        wait_until(lambda: num_running(server) == 3, 20, "three requests are there")
        started = time.monotonic()
        assert server.stop() == 0 and time.monotonic() - started < 10
        for client in clients:
            client.join(10)
            assert (client.status, client.finish_reason) == (200, "abort")


def test_drain_delay_accepts_requests_and_second_signal_ends_it() -> None:
    with start_server(*SMALL, "--drain-delay", "60") as server, httpx.Client(base_url=server.url) as kept:
        client = Client(server, 1500)
        wait_until(lambda: num_running(server) == 1, 20, "the request is there")
        assert "connection" not in kept.get("/ready").headers
        server.signal(signal.SIGINT)
        wait_until(lambda: kept.get("/ready").status_code == 503, 10, "the server is not ready")
        assert kept.get("/health").status_code == 200
        assert completion(server, 8).status_code == 200
        # The next request on this connection would find no server: it is closed behind an answer.
        wait_until(lambda: kept.get("/health").headers.get("connection") == "close", 10, "connections end")
        started = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.wait(15) == 0 and time.monotonic() - started < 5
        client.join(10)


def test_a_second_signal_ends_an_engine_that_hangs() -> None:
    with start_server(*SMALL) as server:
        os.kill(server.engine_pid, signal.SIGSTOP)
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        time.sleep(0.5)
        server.signal(signal.SIGTERM)
        assert server.wait(15) == 0 and time.monotonic() - started < 5


def test_hang_of_the_only_engine_fails_requests_and_exits_with_error() -> None:
    with start_server(*SMALL, "--engine-timeout", "2") as server, httpx.Client(base_url=server.url) as http:
        clients = [Client(server, 1500, stream=number % 2 == 0) for number in range(4)]
        wait_until(lambda: num_running(server) == 4, 20, "four requests are there")
        stopped = time.monotonic()
        os.kill(server.engine_pid, signal.SIGSTOP)
        wait_until(lambda: http.get("/health").status_code == 503, 15, "the hang is noticed")
        said = http.get("/health").json()["error"]["message"]
        assert "has given no sign of life for" in said and "--engine-timeout" in said
        assert server.wait(20) == 1
        for client in clients:
            client.join(10)
            assert client.failure is None and client.ended - stopped < 15
            assert client.status in (200, 500) and "no sign of life" in client.text


def test_a_drain_beside_an_engine_that_hangs_ends_in_time() -> None:
    with start_server(*SMALL, "--engine-timeout", "60", "--drain-timeout", "1") as server:
        client = Client(server, 1500)
        wait_until(lambda: num_running(server) == 1, 20, "the request is there")
        os.kill(server.engine_pid, signal.SIGSTOP)
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait(30) == 0 and time.monotonic() - started < 20
        client.join(10)
        assert client.ended


def test_server_continued_after_sigstop_keeps_its_engine() -> None:
    """As after Ctrl-Z, or on a machine that sleeps, with either process continuing first."""
    with start_server(*SMALL, "--engine-timeout", "2") as server:
        for first in ("server", "engine"):
            client = Client(server, 200)
            wait_until(lambda: num_running(server) == 1, 20, "the request is there")
            pids = {"server": server.pid, "engine": server.engine_pid}
            for pid in pids.values():
                os.kill(pid, signal.SIGSTOP)
            time.sleep(5)
            os.kill(pids.pop(first), signal.SIGCONT)
            time.sleep(0.5)
            os.kill(pids.popitem()[1], signal.SIGCONT)
            client.join(30)
            assert client.finish_reason == "length"
        assert "no sign of life" not in server.log()


def test_slow_reader_gets_its_whole_response_during_a_drain() -> None:
    """Complete for the server is not yet complete for the client: the last megabytes are in its buffers."""
    body = {"prompt": [5] * 1500, "max_tokens": 4, "prompt_logprobs": 20, "n": 4}
    content = json.dumps(body).encode()
    with start_server(*SMALL, "--drain-timeout", "30") as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(20)
        slow.connect(("127.0.0.1", server.port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        slow.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        answer = slow.recv(1000)  # it has been computed
        server.signal(signal.SIGTERM)
        time.sleep(5)
        while part := slow.recv(1 << 16):
            answer += part
        assert server.wait(30) == 0
    header, _, rest = answer.partition(b"\r\n\r\n")
    length = int(header.lower().partition(b"content-length: ")[2].split()[0])
    assert length == len(rest) > 4_000_000
    assert len(json.loads(rest)["choices"]) == 4


def test_killed_engine_fails_requests_and_exits_with_error() -> None:
    with start_server(*SMALL) as server:
        clients = [Client(server, 1500, stream=number % 2 == 0) for number in range(6)]
        wait_until(lambda: num_running(server) == 6, 20, "six requests are there")
        engine_pid = server.engine_pid
        killed = time.monotonic()
        os.kill(engine_pid, signal.SIGKILL)
        assert server.wait(20) != 0
        for client in clients:
            client.join(10)
            assert client.ended - killed < 5
            if client.failure is None and client.status == 200:  # a stream that had begun
                assert '"error"' in client.text and "SIGKILL" in client.text
            elif client.failure is None:
                assert client.status == 500 and "SIGKILL" in json.loads(client.text)["error"]["message"]
        assert "SIGKILL" in server.log()


def test_the_engine_does_not_outlive_the_server() -> None:
    with start_server(*SMALL) as server:
        engine_pid = server.engine_pid
        client = Client(server, 1500)
        wait_until(lambda: num_running(server) == 1, 20, "the request is there")
        server.kill()
        wait_until(lambda: not Path(f"/proc/{engine_pid}").exists(), 15, "the engine process has ended")
        client.join(10)


def test_port_in_use_is_reported_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = pytest.raises(
            AddressError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use.* --port"
        )
        with refused, listening(ServerConfig(port=port)):
            pass
        with pytest.raises(ServerFailed) as caught:
            start_server("--model", "demo", "--port", str(port), timeout=30)
        assert "Address already in use" in str(caught.value) and "Traceback" not in str(caught.value)
        assert "loading the model" not in str(caught.value)


def test_missing_model_is_reported_before_any_process_is_started(tmp_path: Path) -> None:
    for model, why in (("/nowhere", "no model directory at /nowhere"), (tmp_path, f"{tmp_path} has no config.json")):
        with pytest.raises(ModelLoadError, match=why):
            run({"model": str(model)}, ServerConfig(port=0), data_parallel_size=2)
    with pytest.raises(ServerFailed) as caught:
        start_server("--model", "/nowhere", timeout=60)
    assert "no model directory at /nowhere" in str(caught.value)
    assert "loading the model" not in str(caught.value)


def test_broken_tokenizer_is_reported_as_the_only_error(tmp_path: Path) -> None:
    """The end of the engine process, which follows from it, is no second error."""
    model = tmp_path / "model"
    shutil.copytree(model_directory("demo") or "", model)
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ServerFailed) as caught:
        start_server("--model", str(model), timeout=60)
    assert "tokenizer" in str(caught.value)
    assert "SIGKILL" not in str(caught.value) and "out of memory" not in str(caught.value)


def test_broken_chat_template_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}\n{{ message.content }")
    command = [sys.executable, "-m", "pointsman", "serve", "--model", "demo", "--port", "0"]
    ended = subprocess.run([*command, "--chat-template", str(template)], stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 2
    (error,) = ended.stderr.splitlines()
    assert error.startswith(f"pointsman: error: {template}: chat_template cannot be used: unexpected '}}' (line 2); ")


def test_url_of_returns_the_address_and_port_of_the_socket() -> None:
    with listening(ServerConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert url_of(sock, "::1") == f"http://[::1]:{port}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (" \n", "is empty"),
        ("{% for message in messages %}\n{{ message.content }\n{% endfor %}", r"unexpected '}' \(line 2\)"),
        ("{% for message in messages %}", r"Unexpected end of template.*\(line 1\)"),
        ("{{ messages[0].content | no_such_filter }}", r"No filter named 'no_such_filter'.* \(line 1\)"),
        ("{{ messages[1].content }}", "has no element 1"),
        ("{{ raise_exception('no users here') }}", "no users here"),
    ],
)
def test_invalid_chat_template_is_reported_in_one_line(template: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^chat_template .*({why}).* leave it out for the model's own$") as caught:
        check_chat_template(template, "demo")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        PLAIN_CHAT_TEMPLATE,
        "{{ eos_token + messages[0].content }}",  # special tokens are the tokenizer's
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ messages | tojson }}",
        "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}{{ strftime_now('%Y') }}",
    ],
)
def test_valid_chat_template_is_accepted(template: str) -> None:
    check_chat_template(template, "demo")


def test_chat_template_is_not_checked_without_a_tokenizer(tmp_path: Path) -> None:
    check_chat_template("{{ messages | no_such_filter }}", tmp_path)  # prompts will be token ids in any case
