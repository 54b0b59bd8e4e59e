"""The control socket: a Unix socket that answers questions of operators, in JSON lines.

    -> {"ask": "explain", "limit": 100}
    <- {"requests": [...], "counts": {...}}        or {"error": "..."}

One thread accepts connections, and each client has its own thread. So a client that reads slowly or not at all delays
no other client; such a client is disconnected after `CLIENT_SECONDS`. If `MAX_CLIENTS` clients are connected, a new
client replaces the client that has asked nothing for the longest time. The questions and answers are in `operation.py`;
this module is independent of vLLM and of the scheduler.
"""

from __future__ import annotations

import atexit
import glob
import itertools
import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from pointsman.core import ConfigError
from pointsman.web.places import Places

MAX_CLIENTS = 16
BACKLOG = 128
"""Maximum number of connections that wait to be accepted; the operating system refuses further connections."""
MAX_QUESTION = 4096
"""Maximum size of a question (a line that a client sends), in bytes."""
CLIENT_SECONDS = 60.0
"""Maximum time for a client to read an answer or to send its next question, in seconds."""
MAX_FILES = 4
"""Maximum number of file descriptors that a client has sent and that no question has used yet; further descriptors are
closed."""
SECONDS_BETWEEN_TRIES = 0.1
"""Seconds between two attempts: to accept a connection while the process can open no further file, or to lock a
folder."""
LOCK_SECONDS = 5.0
"""Maximum time to wait for another process's lock on the folder of a socket, in seconds."""
MAX_PATH = 107
"""Maximum length of a socket's path on Linux, in bytes."""


class ControlError(ValueError):
    """A question that cannot be answered. The client gets the message."""


class Client:
    """The connection to a client, with the file descriptors that the client sent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._files: list[int] = []

    def questions(self) -> Iterator[dict[str, Any]]:
        """The client's questions, until the client closes the connection.

        Raises:
            ControlError: a question is too long, or not a JSON object; the client's later input must not be read.
            OSError: the client has disconnected, or was silent for too long.
        """
        ends = time.monotonic() + CLIENT_SECONDS
        while True:
            line, newline, rest = bytes(self._buffer).partition(b"\n")
            if newline:
                self._buffer = bytearray(rest)
                yield _parse_question(line)
                ends = time.monotonic() + CLIENT_SECONDS
            elif len(self._buffer) > MAX_QUESTION:
                raise ControlError(f"the question is longer than {MAX_QUESTION} bytes")
            elif (seconds := ends - time.monotonic()) <= 0:
                raise TimeoutError
            elif not self._receive(seconds):
                return

    def has_input(self, seconds: float) -> bool:
        """Whether the client sends something, or closes the connection, within `seconds`."""
        try:
            return bool(self._buffer) or not self._receive(seconds) or bool(self._buffer)
        except TimeoutError:
            return False

    def send(self, answer: dict[str, Any]) -> None:
        """Send an answer as one line of JSON."""
        self._connection.settimeout(CLIENT_SECONDS)
        self._connection.sendall(json.dumps(answer, separators=(",", ":")).encode() + b"\n")

    def take_file(self) -> int | None:
        """Take a file descriptor that the client sent; the caller must close it. None: there is none."""
        return self._files.pop(0) if self._files else None

    def close_files(self) -> None:
        """Close received file descriptors that no control message has claimed."""
        while self._files:
            os.close(self._files.pop())

    def _receive(self, seconds: float) -> bool:
        self._connection.settimeout(seconds)
        data, files, _, _ = socket.recv_fds(self._connection, MAX_QUESTION, 1)
        self._files += files
        for file in self._files[MAX_FILES:]:
            os.close(file)
        del self._files[MAX_FILES:]
        self._buffer += data
        return bool(data)


Answer = Callable[[dict[str, Any], Client], Generator[dict[str, Any], None, None]]
"""Function that yields the lines of the answer to a client's question. Raises ControlError."""


class ControlSocket:
    """Listens for clients until `close` is called or the process exits.

    Args:
        path: path of the socket; None: a new path in a folder that only this user can access.
        answer: computes the answer to a question; called in the client's own thread.

    Raises:
        ConfigError: the path cannot be used, or another process listens on it.
    """

    def __init__(self, path: str | None, answer: Answer) -> None:
        self.path = os.path.abspath(new_socket_path() if path is None else path)
        self._answer = answer
        self._listening = _listen(self.path)
        self._inode = os.stat(self.path).st_ino
        self._places = Places(MAX_CLIENTS)
        self._is_closed = False
        threading.Thread(target=self._accept, name="pointsman-control", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        """Stop listening, and remove the socket. May be called twice."""
        atexit.unregister(self.close)
        self._is_closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        with suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:  # not the socket of a later process at this path
                os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(SECONDS_BETWEEN_TRIES)  # the process can open no file at the moment
                continue
            if self._places.acquire(connection):
                try:
                    threading.Thread(
                        target=self._serve, args=(connection,), name="pointsman-client", daemon=True
                    ).start()
                except RuntimeError:  # the process can start no thread
                    self._places.release(connection)
                    connection.close()
            else:
                with connection, suppress(OSError):
                    Client(connection).send({"error": f"{MAX_CLIENTS} clients are connected already; try again later"})

    def _serve(self, connection: socket.socket) -> None:
        client = Client(connection)
        try:
            with connection, suppress(OSError):  # the client has disconnected
                try:
                    for question in client.questions():
                        self._places.mark_used(connection)
                        self._reply(client, question)
                        self._places.mark_idle(connection)
                except ControlError as error:
                    client.send({"error": str(error)})
        finally:
            client.close_files()
            self._places.release(connection)

    def _reply(self, client: Client, question: dict[str, Any]) -> None:
        try:
            with closing(self._answer(question, client)) as lines:
                for line in lines:
                    client.send(line)
        except ControlError as error:
            client.send({"error": str(error)})


def check_socket_path(path: str) -> None:
    """Check that a `ControlSocket` can listen on `path`, without leaving a socket there.

    Raises:
        ConfigError: as for `ControlSocket`.
    """
    path = os.path.abspath(path)
    with closing(_listen(path)):
        os.unlink(path)


def new_socket_path() -> str:
    """A path for this process in a folder that only this user can access. Sockets of killed processes are removed from
    that folder, because vLLM usually kills its engine process."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    if not _is_private(folder):
        folder = os.path.join(tempfile.gettempdir(), f"pointsman-{os.getuid()}")
        with suppress(OSError):
            os.mkdir(folder, 0o700)
        if not _is_private(folder):  # another user has created a folder of this name
            folder = tempfile.mkdtemp(prefix="pointsman-")
    with _lock_folder(folder):
        for left in glob.glob(os.path.join(glob.escape(folder), "vllm-*.sock")):
            with suppress(ConfigError, OSError):
                _remove_dead_socket(left)
        names = (f"vllm-{os.getpid()}{f'-{n}' if n > 1 else ''}.sock" for n in itertools.count(1))
        return next(path for name in names if not os.path.exists(path := os.path.join(folder, name)))


def _is_private(folder: str) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _listen(path: str) -> socket.socket:
    if len(os.fsencode(path)) > MAX_PATH:
        raise ConfigError(
            f"the path of the control socket, {path}, is longer than {MAX_PATH} bytes; choose a shorter path"
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _lock_folder(os.path.dirname(path)):
            _remove_dead_socket(path)
            os.fchmod(listening.fileno(), 0o600)  # Linux binds with this mode, so other users never have access
            listening.bind(path)
            os.chmod(path, 0o600)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on the control socket {path}: {error.strerror}; choose another path"
        ) from None
    except ConfigError:
        listening.close()
        raise
    return listening


@contextmanager
def _lock_folder(folder: str) -> Iterator[None]:
    """Lock a folder against other processes that remove or create sockets in it. Any user with read access to the
    folder can hold the lock, so after `LOCK_SECONDS` the caller continues without the lock."""
    import fcntl  # Windows lacks `fcntl`, but has clients, which import this module

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ends = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < ends:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(SECONDS_BETWEEN_TRIES)
            else:
                break
        yield
    finally:
        os.close(descriptor)


def _remove_dead_socket(path: str) -> None:
    """Remove the socket at `path` if its process has exited. Raises ConfigError if the path is in use."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"the control socket cannot be {path}, which exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except TimeoutError:  # the process runs, and is busy
            raise ConfigError(f"another process listens on the control socket {path}; choose another path") from None
        else:
            raise ConfigError(f"another process listens on the control socket {path}; choose another path")


def _parse_question(line: bytes) -> dict[str, Any]:
    try:
        question = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        raise ControlError("the question is not JSON; send one JSON object on each line") from None
    if not isinstance(question, dict):
        raise ControlError("the question is not a JSON object; send one JSON object on each line")
    return question
