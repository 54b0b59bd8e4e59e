"""The control socket: access, answers, and that no client can block the scheduler."""

from __future__ import annotations

import base64
import errno
import fcntl
import io
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from pointsman.core import ConfigError
from pointsman.integrations.vllm import control
from pointsman.integrations.vllm.client import Connection, Refused, connect
from pointsman.integrations.vllm.control import MAX_CLIENTS, ControlSocket, check_socket_path
from pointsman.web.film import Film
from pointsman.web.live import read_records
from tests.integrations.vllm_operated import Operated, operated, stepping


def ask(path: Path, kind: str, **arguments: Any) -> dict[str, Any]:
    with connect(str(path)) as connection:
        return connection.ask(kind, **arguments)


def raw(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(path)
    return sock


NOBODY = cast(control.Client, None)


def nobody(question: dict[str, Any], client: control.Client) -> Any:
    yield {}


# ------------------------------------------------------------------ the socket


def test_control_socket_is_private_and_removed_on_close(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with operated(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def dead_socket(path: Path) -> Path:
    """A socket as a killed process leaves it."""
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(path))
    left.close()
    return path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files; the user has no private folder."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_default_control_socket_is_in_a_private_folder(temporary: Path) -> None:
    with operated(None) as host:
        path = Path(host.control.path)
        assert path.parent == temporary / f"pointsman-{os.getuid()}" and str(os.getpid()) in path.name
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert ask(path, "explain")["requests"] == []
    assert list(path.parent.iterdir()) == []


def test_a_process_may_have_several_control_sockets(temporary: Path) -> None:
    with operated(None) as one, operated(None) as other:
        one.add("a")
        found = [len(ask(Path(host.control.path), "explain")["requests"]) for host in (one, other)]
    assert found == [1, 0]


def test_sockets_of_killed_processes_are_removed(temporary: Path) -> None:
    with operated(None) as host:
        folder = Path(host.control.path).parent
        live = Path(host.control.path).rename(folder / "vllm-1.sock")
        dead, other = dead_socket(folder / "vllm-2.sock"), dead_socket(folder / "mine.sock")
        with operated(None):
            assert live.exists() and other.exists() and not dead.exists()


def test_socket_is_not_put_in_a_folder_that_others_can_access(temporary: Path) -> None:
    taken = temporary / f"pointsman-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o755)
    with operated(None) as host:
        folder = Path(host.control.path).parent
        assert folder != taken and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(("mode", "used"), [(0o700, True), (0o755, False)])
def test_runtime_folder_is_used_only_if_it_is_private(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, mode: int, used: bool
) -> None:
    runtime = temporary / "run"
    runtime.mkdir()
    runtime.chmod(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with operated(None) as host:
        assert (Path(host.control.path).parent == runtime) is used
    assert list(runtime.iterdir()) == []


def test_the_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = dead_socket(tmp_path / "s")
    with operated(path):
        assert ask(path, "explain")["requests"] == []


def test_path_of_a_live_socket_is_refused_and_the_socket_kept(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with operated(path):
        with pytest.raises(ConfigError, match="another process listens on the control socket"):
            ControlSocket(str(path), nobody)
        assert ask(path, "explain")["requests"] == []


def test_close_keeps_a_newer_socket_at_the_same_path(tmp_path: Path) -> None:
    path = tmp_path / "s"
    host = Operated(path)
    path.rename(tmp_path / "moved")
    with operated(path):
        host.close()
        assert ask(path, "explain")["requests"] == []


def test_a_locked_folder_does_not_block_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LOCK_SECONDS", 0.3)
    folder = os.open(tmp_path, os.O_RDONLY)  # in a shared folder, as any user may
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with operated(tmp_path / "s"):
            assert ask(tmp_path / "s", "explain")["requests"] == []
    finally:
        os.close(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "which exists and is not a socket"),
        ("nowhere/s", "cannot listen on the control socket .*No such file"),
        ("x" * 200, "is longer than 107 bytes"),
    ],
)
def test_an_unusable_socket_path_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match=words):
        ControlSocket(str(tmp_path / name), nobody)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("name", ["s", "file", "nowhere/s", "used", "dead"])
def test_a_checked_socket_path_is_refused_as_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("precious")
    with operated(tmp_path / "old"):
        (tmp_path / "old").rename(tmp_path / "dead")
    with operated(tmp_path / "used"):
        before = {path.name for path in tmp_path.iterdir()}
        try:
            check_socket_path(str(tmp_path / name))
        except ConfigError as checked:
            with pytest.raises(ConfigError) as started:
                ControlSocket(str(tmp_path / name), nobody)
            assert name in ("file", "nowhere/s", "used") and str(checked) == str(started.value)
        else:
            assert name in ("s", "dead")
        assert {path.name for path in tmp_path.iterdir()} == before - ({"dead"} & {name})
        assert ask(tmp_path / "used", "explain")["requests"] == []


def test_exit_of_the_process_removes_the_socket(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.integrations.vllm_operated import Operated; "
        "host = Operated(Path(sys.argv[1])); assert Path(sys.argv[1]).exists()"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "s"], check=True, cwd=Path(__file__).parents[2])
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ questions


def test_requests_are_explained_oldest_first(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with operated(path) as host:
        for name in ("a-0-x", "a-1-y", "b", "c"):
            host.add(name, priority=3)
        host.step()
        answer = ask(path, "explain")
        assert answer["counts"] == {"running": 2, "waiting": 2, "parked": 0}
        assert [request["id"] for request in answer["requests"]] == ["a-0-x", "a-1-y", "b", "c"]
        b, c = answer["requests"][2:]
        assert (b["state"], b["reason"], b["position"], b["missing"]) == ("waiting", "sequence_limit", 0, 1)
        assert b["holders"] == [{"id": name, "amount": 1, "what": ""} for name in ("a-0-x", "a-1-y")]
        assert c["explanation"] == "c waits behind b, which waits: all sequence slots are taken."
        assert (b["num_prompt_tokens"], b["max_tokens"], b["num_blocks"], b["priority"]) == (6, 8, 0, 3)
        assert 0 <= b["waiting_for"] <= b["age"] < 60
        assert (answer["requests"][0]["num_output_tokens"], answer["requests"][0]["num_blocks"]) == (1, 2)
        assert [request["id"] for request in ask(path, "explain", limit=3)["requests"]] == ["a-0-x", "a-1-y", "b"]


def test_a_request_is_found_by_its_id_or_its_completion_id(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with operated(path) as host:
        for name in ("a-0-x", "a-1-y", "ab", "cmpl-sent-1-0-z"):
            host.add(name)
        assert [request["id"] for request in ask(path, "explain", id="a")["requests"]] == ["a-0-x", "a-1-y"]
        assert [request["id"] for request in ask(path, "explain", id="ab")["requests"]] == ["ab"]
        for sent in ("cmpl-sent-1", "sent-1"):
            assert [request["id"] for request in ask(path, "explain", id=sent)["requests"]] == ["cmpl-sent-1-0-z"]
        with pytest.raises(Refused, match="no request 'b' is waiting, parked or running"):
            ask(path, "explain", id="b")


def watched(connection: Connection, line: dict[str, Any], num_films: int) -> list[Film]:
    """The next parts of a live film."""
    header, films = b"", []
    while True:
        for kind, data in read_records(base64.b64decode(line["records"])):
            if kind == "H":
                header = data
            elif kind == "P":
                films.append(Film(io.BytesIO(header + data)))
        if len(films) >= num_films:
            return films
        line = connection.next_line(10)


def test_two_clients_watch_while_the_scheduler_steps(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with operated(path) as host:
        for name in ("a", "b", "c"):
            host.add(name, max_tokens=50)
        with connect(str(path)) as one, connect(str(path)) as other:
            lines = one.ask("film"), other.ask("film")
            with stepping(host):
                films = [watched(one, lines[0], 3), watched(other, lines[1], 3)]
            assert len(host.core._listeners) == 1
        for found in films:
            steps = [frame.step_id for film in found for frame in film.frames]
            assert steps == list(range(steps[0], steps[0] + len(steps)))
        assert {one.request_id for film in films[0] for one in film.requests} == {"a", "b", "c"}
        ends = time.monotonic() + 10
        while host.core._listeners and time.monotonic() < ends:
            time.sleep(0.01)
        assert host.core._listeners == ()  # without watchers no listener is left


def test_questions_are_answered_while_the_engine_is_idle(tmp_path: Path) -> None:
    with operated(tmp_path / "s") as host:
        host.add("a")
        host.run_to_end()
        assert ask(tmp_path / "s", "explain")["counts"] == {"running": 0, "waiting": 0, "parked": 0}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"hello\n", "not JSON"),
        (b"[1]\n", "not a JSON object"),
        (b'{"ask": "explode"}\n', "the question 'explode' is unknown"),
        (b"{}\n", "the question None is unknown"),
        (b'{"ask": "explain", "limit": 0}\n', "limit is 0; it must be an integer from 1 to 1000"),
        (b'{"ask": "explain", "limit": "x"}\n', "limit is 'x'"),
        (b'{"ask": "explain", "id": 7}\n', "no request 7"),
        (b'{"ask": "explain", "id": ["a"]}\n', "no request ['a']"),
        (b"[" * 4000 + b"\n", "not JSON"),
        (b'{"ask": "record"}\n', "the question 'record' came without a file descriptor"),
        (b"x" * 5000, "longer than 4096 bytes"),
    ],
)
def test_malformed_questions_get_an_error_and_other_clients_continue(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "s"
    with operated(path), raw(str(path)) as sock:
        sock.sendall(line)
        assert words in json.loads(sock.makefile().readline())["error"]
        assert ask(path, "explain")["requests"] == []


def test_a_client_may_ask_repeatedly_and_send_a_line_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with operated(path), raw(str(path)) as sock:
        lines = sock.makefile()
        sock.sendall(b'{"ask": "explain"}\n{"ask": "met')
        assert "requests" in json.loads(lines.readline())
        sock.sendall(b'rics"}\n')
        assert "stats" in json.loads(lines.readline())


def test_idle_clients_do_not_block_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with operated(path), ExitStack() as stack:
        clients = [stack.enter_context(raw(str(path))) for _ in range(MAX_CLIENTS)]
        for client in [*clients, clients[0]]:  # the first client asks last
            client.sendall(b'{"ask": "explain"}\n')
            assert "requests" in json.loads(client.makefile().readline())
        time.sleep(0.2)  # until the client's thread waits again
        clients += [stack.enter_context(raw(str(path))) for _ in range(MAX_CLIENTS // 2)]
        assert ask(path, "explain")["requests"] == []
        for replaced in clients[1 : 1 + MAX_CLIENTS // 2]:
            assert replaced.recv(1) == b""
        clients[0].sendall(b'{"ask": "explain"}\n')
        assert "requests" in json.loads(clients[0].makefile().readline())


def test_the_number_of_concurrent_clients_is_bounded(tmp_path: Path) -> None:
    path, goes_on = tmp_path / "s", threading.Event()

    def slow(question: dict[str, Any], client: control.Client) -> Any:
        yield {"begun": True}
        goes_on.wait(10)
        yield {}

    listening = ControlSocket(str(path), slow)
    try:
        with ExitStack() as stack:
            clients = [stack.enter_context(raw(str(path))) for _ in range(MAX_CLIENTS)]
            for client in clients:
                client.sendall(b"{}\n")
                assert client.recv(100) == b'{"begun":true}\n'
            with pytest.raises(Refused, match="16 clients are connected already"):
                ask(path, "explain")
            goes_on.set()
            for client in clients:
                assert client.recv(100) == b"{}\n"
            assert ask(path, "explain") == {"begun": True}
    finally:
        goes_on.set()
        listening.close()


def test_a_refused_client_of_the_socket_gets_the_reason(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        with connect(str(tmp_path / "s")) as connection:
            with listening.accept()[0] as accepted:
                accepted.sendall(b'{"error":"try again later"}\n')
            with pytest.raises(Refused, match="try again later"):
                connection.ask("explain")


@pytest.mark.parametrize("sent", [b"", b"x"], ids=["silent", "a byte now and then"])
def test_a_silent_client_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(control, "CLIENT_SECONDS", 0.2)
    with operated(tmp_path / "s"), raw(str(tmp_path / "s")) as sock:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < began + 5:
                sock.sendall(sent)
                time.sleep(0.02)
                if not sent and sock.recv(1) == b"":
                    raise BrokenPipeError
        assert time.monotonic() < began + 5


def test_unused_file_descriptors_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with operated(path), raw(str(path)) as sock, (tmp_path / "file").open("w") as file:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(40):
            socket.send_fds(sock, [b" "], [file.fileno()])
            time.sleep(0.002)
        assert len(os.listdir("/proc/self/fd")) - before <= control.MAX_FILES + 1
        sock.sendall(b'{"ask": "explain"}\n')
        assert "requests" in json.loads(sock.makefile().readline())


def test_listening_survives_a_shortage_of_file_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    class Exhausted(socket.socket):
        def accept(self) -> Any:
            tries.append(1)
            if len(tries) == 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(control.socket, "socket", Exhausted)
    path = tmp_path / "s"
    with operated(path):
        for _ in range(3):
            assert ask(path, "explain")["requests"] == []
    assert len(tries) >= 4


# ------------------------------------------------------------------ clients cannot block the scheduler


def test_a_client_that_does_not_read_delays_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with operated(path) as host, raw(str(path)) as lazy:
        for number in range(300):
            host.add(f"r{number}")
        lazy.settimeout(0.2)
        with pytest.raises(TimeoutError):
            while True:  # until the buffers between the two are full
                lazy.sendall(b'{"ask": "explain", "limit": 1000}\n' * 50)
        began = time.monotonic()
        for _ in range(20):
            host.step()
        assert len(ask(path, "explain", limit=300)["requests"]) == len(host.of_id)
        assert time.monotonic() - began < control.CLIENT_SECONDS / 4


def test_answering_a_question_waits_for_the_scheduler_lock(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with operated(path) as host:
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(ask(path, "metrics")))
        with host.lock:
            thread.start()
            time.sleep(0.2)
            assert not answers
        thread.join(timeout=10)
        assert len(answers) == 1


def test_answering_questions_takes_at_most_a_tenth_of_the_time(tmp_path: Path) -> None:
    with operated(tmp_path / "s") as host:
        for number in range(300):
            host.add(f"r{number}")
        began, cpu = time.monotonic(), time.thread_time()
        for _ in range(5):
            (answer,) = host.questions.answer({"ask": "explain", "limit": 1000}, NOBODY)
            assert len(answer["requests"]) == 300
        spent = time.thread_time() - cpu
        next(host.questions.answer({"ask": "metrics"}, NOBODY))  # begins after the pause of the fifth answer
        assert time.monotonic() - began > 6 * spent


def test_questions_during_steps_see_a_consistent_scheduler(tmp_path: Path) -> None:
    path = tmp_path / "s"
    errors: list[BaseException] = []

    def ask_on() -> None:
        try:
            for _ in range(40):
                for request in ask(path, "explain", limit=1000)["requests"]:
                    assert request["num_computed_tokens"] <= request["num_prompt_tokens"] + request["num_output_tokens"]
                    assert (request["state"] == "running") == (request["num_blocks"] > 0)
        except BaseException as error:
            errors.append(error)

    with operated(path, num_blocks=14) as host, stepping(host):
        threads = [threading.Thread(target=ask_on) for _ in range(3)]
        for thread in threads:
            thread.start()
        number = 0
        while any(thread.is_alive() for thread in threads):
            if len(host.of_id) < 50:
                host.add(f"r{number}", length=6 + number % 20, max_tokens=9)
                number += 1
            time.sleep(0.001)
        with host.lock:  # between steps, as for operators' questions
            host.core.check_invariants()
    assert not errors, errors[0]
    assert number > 20
