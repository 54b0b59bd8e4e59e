"""The client of the control socket, with which the command line queries a running vLLM. Importable without vLLM."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ANSWER_SECONDS = 30.0


class ControlUnavailable(Exception):
    """The control socket gave no answer. The message has the reason and the remedy."""


class Refused(Exception):
    """The question was refused. The message is the reason."""


class Connection:
    """A connection to a control socket.

    Raises:
        ControlUnavailable: no process listens on the socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        if not hasattr(socket, "AF_UNIX"):
            raise ControlUnavailable("this Python has no Unix sockets; run this command on the machine where vLLM runs")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_SECONDS)
        try:
            self._socket.connect(path)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise ControlUnavailable(_make_unavailable(path, error)) from None
        self._lines = self._socket.makefile("rb")

    def ask(self, kind: str, *, file: int | None = None, **arguments: Any) -> dict[str, Any]:
        """Ask a question, and return the first line of the answer; `file` is a file descriptor to send with the
        question.

        Raises:
            Refused: the question was refused.
            ControlUnavailable: no answer arrived in time, or the connection was closed.
        """
        line = json.dumps({"ask": kind, **arguments}).encode() + b"\n"
        try:
            if file is None:
                self._socket.sendall(line)
            else:
                socket.send_fds(self._socket, [line], [file])
        except BrokenPipeError:
            pass  # the server refused before the question, and its line with the reason has arrived
        except OSError as error:
            raise ControlUnavailable(_make_unavailable(self._path, error)) from None
        return self.next_line(ANSWER_SECONDS)

    def next_line(self, seconds: float | None = None) -> dict[str, Any]:
        """The next line of the answer, within `seconds`; None: without a time limit. Raises as `ask`."""
        self._socket.settimeout(seconds)
        try:
            line = self._lines.readline()
        except OSError as error:
            raise ControlUnavailable(_make_unavailable(self._path, error)) from None
        if not line:
            raise ControlUnavailable(f"vLLM closed the connection on {self._path}; it may have ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer

    def wait_for_line(self, seconds: float | None) -> dict[str, Any] | None:
        """The next line of the answer; None if no line begins to arrive within `seconds` (None: wait without a time
        limit). Raises as `ask`. Must not be called while a line has been read only in part."""
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return None
        except OSError as error:
            raise ControlUnavailable(_make_unavailable(self._path, error)) from None
        return self.next_line(ANSWER_SECONDS)

    def end_input(self) -> None:
        """Close the sending side of the connection, which ends a recording."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise ControlUnavailable(_make_unavailable(self._path, error)) from None

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextmanager
def connect(path: str) -> Iterator[Connection]:
    """A connection to the control socket at `path`, which is closed when the context ends. Raises
    ControlUnavailable."""
    connection = Connection(path)
    try:
        yield connection
    finally:
        connection.close()


def _make_unavailable(path: str, error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"vLLM did not answer on {path} in time; it is stuck in a step, or overloaded"
    if isinstance(error, ConnectionRefusedError):
        return f"no process listens on {path}; that vLLM has exited. A new one names its socket in its log"
    if isinstance(error, FileNotFoundError):
        return f"there is no socket {path}; vLLM's log names it at the start"
    if isinstance(error, PermissionError):
        return f"the socket {path} is not yours; ask as the user who runs vLLM, or as root"
    if isinstance(error, OSError) and os.path.exists(path) and error.strerror:
        return f"cannot ask on {path}: {error.strerror}"
    return f"{path} is not a socket: {error}"
