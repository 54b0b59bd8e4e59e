"""`pointsman chat` against a real server, and against sockets with broken responses."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx2 = pytest.importorskip("httpx2")
pytest.importorskip("fastapi")

from _server_process import ServerProcess, wait_until  # noqa: E402

from pointsman.cli.chat import Chat, TurnError  # noqa: E402
from tests.cli.conftest import Finished  # noqa: E402
from tests.cli.test_bad_input import check_refused  # noqa: E402
from tests.forked_engines import start_server  # noqa: E402

ROOT = Path(__file__).parents[2]
KEY = "open-sesame"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """The demo model behind an API key."""
    with start_server("--num-blocks", "256", environment={"POINTSMAN_API_KEY": KEY}) as running:
        yield running


def talk(url: str, *args: object, lines: str, key: str | None = KEY) -> Finished:
    command = [sys.executable, "-m", "pointsman", "chat", "--url", url, *map(str, args)]
    done = subprocess.run(
        command, input=lines.encode(), capture_output=True, timeout=120, cwd=ROOT, env=environment(key), check=False
    )
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())


def environment(key: str | None) -> dict[str, str]:
    merged = {name: value for name, value in os.environ.items() if name != "POINTSMAN_API_KEY"}
    return merged if key is None else merged | {"POINTSMAN_API_KEY": key}


def complete(server: ServerProcess, messages: list[dict[str, str]], max_tokens: int) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens}
    answer = httpx2.post(
        f"{server.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    )
    return str(answer.json()["choices"][0]["message"]["content"])


# ---------------------------------------------------------------------- a real server


@pytest.mark.e2e
def test_chat_sends_each_input_line_with_the_history(server: ServerProcess) -> None:
    questions = ["What is a list?", "And a tuple, naïvely?"]
    finished = talk(
        server.url + "/v1/",
        *("--system", "You explain Python.", "--temperature", 0, "--max-tokens", 12),
        lines=f"{questions[0]}\n\n{questions[1]}\n",
    )
    messages = [{"role": "system", "content": "You explain Python."}]
    expected = ""
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = complete(server, messages, 12)
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert finished.out == expected
    assert finished.code == 0
    assert "maximum number of tokens" in finished.err  # both were cut at 12


@pytest.mark.e2e
def test_a_wrong_key_model_or_address_fails_before_the_first_turn(server: ServerProcess) -> None:
    for key in (None, "wrong"):
        check_refused(talk(server.url, lines="hello\n", key=key), "wants an API key", "--api-key", "401")
    check_refused(talk(server.url, "--api-key", "schlüssel", lines="hello\n"), "ASCII")
    check_refused(talk(server.url, "--model", "gpt", lines="hello\n"), "no model 'gpt'", "it has: demo")
    check_refused(talk("ftp://127.0.0.1", lines="hello\n"), "--url", "http://127.0.0.1:8000")
    check_refused(talk(server.url + "/nothing", lines="hello\n"), "404")


@pytest.mark.e2e
def test_the_error_for_an_unreachable_server_contains_no_password() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as taken:
        port = taken.server_address[1]
    finished = talk(f"http://user:hidden@127.0.0.1:{port}", lines="hello\n")
    assert finished.code == 1
    (error,) = finished.errors
    assert f"cannot reach http://127.0.0.1:{port}" in error and "pointsman serve" in error
    assert "hidden" not in finished.err and "Traceback" not in finished.err


@pytest.mark.e2e
def test_the_conversation_continues_after_a_refused_message(server: ServerProcess) -> None:
    long = "word " * 20_000  # longer than the model's 16,384 tokens
    finished = talk(server.url, "--temperature", 0, "--max-tokens", 5, lines=f"{long}\nA list\n")
    assert finished.code == 2
    (error,) = finished.errors
    assert "400" in error and "16384" in error.replace(",", "")
    assert complete(server, [{"role": "user", "content": "A list"}], 5) in finished.out


# ---------------------------------------------------------------------- broken servers

MODELS = json.dumps({"data": [{"id": "demo"}]})


class Canned(socketserver.ThreadingTCPServer):
    """Answers every POST with the same bytes, and closes."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, answer: list[bytes]) -> None:
        self.answer = answer
        self.asked: list[Any] = []
        self.num_cut_off = 0
        """Number of responses whose reader disconnected."""
        super().__init__(("127.0.0.1", 0), CannedHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class CannedHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, Canned)
        start = self.rfile.readline()
        length = 0
        while (line := self.rfile.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        if start.startswith(b"GET"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + MODELS.encode())
            return
        server.asked.append(json.loads(self.rfile.read(length)))
        try:
            for part in server.answer:
                self.wfile.write(part)
                self.wfile.flush()
                time.sleep(0.0005)
        except OSError:
            server.num_cut_off += 1


@contextlib.contextmanager
def canned(*answer: bytes) -> Iterator[tuple[Canned, Chat]]:
    with Canned(list(answer)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with httpx2.Client(base_url=server.url, trust_env=False) as client:
            yield server, Chat(client, {"model": "demo"})
        server.shutdown()


SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


def test_chat_reads_a_stream_that_is_split_at_any_byte() -> None:
    pieces = ["naïve ", "two\nlines\u2028and\x85three ", "😀", "", " end"]
    stream = b"".join(map(chunk, pieces)) + b": a comment\n\n" + b'data: {"choices": []}\n\n' + DONE
    for size in (1, 7, 1000):
        parts = [stream[start : start + size] for start in range(0, len(stream), size)]
        with canned(SSE, *parts) as (server, chat):
            assert list(chat.ask("q")) == [piece for piece in pieces if piece]
            assert chat.messages == [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "".join(pieces)},
            ]
            list(chat.ask("again"))
            assert [message["content"] for message in server.asked[1]["messages"]] == ["q", "".join(pieces), "again"]


def test_a_lone_surrogate_is_sent_as_a_question_mark() -> None:
    with canned(SSE, chunk("a"), DONE) as (server, chat):
        list(chat.ask("half \ud83d"))
        assert server.asked[0]["messages"] == [{"role": "user", "content": "half ?"}]


ERROR = json.dumps({"error": {"message": "the engine\nhas ended", "type": "InternalServerError", "code": 500}}).encode()


@pytest.mark.parametrize(
    ("answer", "message", "exit_code"),
    [
        ([SSE, chunk("some"), b"data: " + ERROR + b"\n\n", DONE], "stopped the completion: the engine has ended", 1),
        ([SSE, chunk("some")], "the connection ended before the completion", 1),
        ([SSE, chunk("some", "stop")], "the connection ended before the completion", 1),
        ([SSE, b"data: {\n\n", DONE], "sent an invalid chunk", 1),
        ([SSE, b"data: 5\n\n", DONE], "sent an invalid chunk", 1),
        ([SSE, b'data: {"choices": [{}]}\n\n', DONE], "sent an invalid chunk", 1),
        ([b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>"], "text/event-stream", 1),
        ([b"HTTP/1.1 500 Oops\r\nConnection: close\r\n\r\n" + ERROR], "the engine has ended (HTTP 500)", 1),
        ([b"HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\n\r\n<b>\x1b[2J</b>"], "<b>", 1),
        ([b"HTTP/1.1 429 Busy\r\nRetry-After: 7\r\nConnection: close\r\n\r\n" + ERROR], "try again in 7 s", 1),
        ([b"HTTP/1.1 400 Bad\r\nConnection: close\r\n\r\n" + ERROR], "(HTTP 400)", 2),
        ([b"HTTP/1.1 301 Moved\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"], "(HTTP 301)", 1),
        ([b"nonsense\r\n\r\n"], "the connection failed", 1),
        ([], "the connection failed", 1),
    ],
)
def test_a_failed_turn_is_reported_and_not_added_to_the_history(
    answer: list[bytes], message: str, exit_code: int
) -> None:
    with canned(*answer) as (_, chat):
        with pytest.raises(TurnError) as raised:
            list(chat.ask("q"))
        assert message in str(raised.value)
        assert str(raised.value).isprintable()
        assert raised.value.exit_code == exit_code
        assert chat.messages == []


def test_the_history_keeps_the_received_part_of_a_stopped_completion() -> None:
    with canned(SSE, chunk("one "), chunk("two "), chunk("three"), DONE) as (_, chat):
        answer = chat.ask("q")
        assert next(answer) + next(answer) == "one two "
        answer.close()
        assert chat.messages[1:] == [{"role": "assistant", "content": "one two "}]
        chat.ask("never read").close()
        assert len(chat.messages) == 2


@pytest.mark.e2e
def test_chat_removes_control_characters_on_a_terminal() -> None:
    with canned(SSE, chunk("a\x1b[2Jb\nc\x07", "deadline"), DONE) as (server, _):
        finished = talk(server.url, lines="q\n", key=None)
    assert finished.out == "a�[2Jb\nc�\n"
    assert "deadline" in finished.err
    assert finished.code == 0


class Terminal:
    """What is shown on a pseudo-terminal, and its keyboard."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._shown = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Wait until `text` is shown; earlier output is forgotten."""
        assert self.shows(text, seconds), f"not shown: {text!r}; but: {self._shown[-500:]!r}"

    def shows(self, text: str, seconds: float) -> bool:
        """Whether `text` is shown within this time."""
        end = time.monotonic() + seconds
        while text not in self._shown:
            if time.monotonic() > end:
                return False
            if select.select([self._master], [], [], 0.1)[0]:
                self._shown += os.read(self._master, 65536).decode(errors="replace")
        self._shown = self._shown.partition(text)[2]
        return True


@pytest.mark.e2e
def test_ctrl_c_stops_a_completion_and_ctrl_d_ends_the_conversation() -> None:
    with canned(SSE, *[chunk("word ")] * 100_000, DONE) as (server, _):
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "pointsman", "chat", "--url", server.url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=environment(None) | {"TERM": "dumb"},
        )
        os.close(slave)
        terminal = Terminal(master)
        try:
            terminal.wait_for("> ")
            for _ in range(20):  # nothing to stop: a new line; readline misses a signal while it sets itself up
                os.kill(process.pid, signal.SIGINT)
                if terminal.shows("> ", seconds=1):
                    break
            else:
                pytest.fail("Ctrl-C at the prompt shows no new one")
            for turn, question in enumerate(("first", "second")):
                terminal.type(f"{question}\n")
                terminal.wait_for("word word word")
                os.kill(process.pid, signal.SIGINT)
                terminal.wait_for("(stopped)")
                terminal.wait_for("> ")
                wait_until(lambda turn=turn: server.num_cut_off == turn + 1, 10, "the server noticed")
            terminal.type("\x04")
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            os.close(master)
    first, second = (request["messages"] for request in server.asked)
    assert [message["content"] for message in first] == ["first"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[1]["content"].startswith("word word word")
