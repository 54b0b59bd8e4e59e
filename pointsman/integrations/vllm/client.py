"""The other end of the control socket: what the command line asks a vLLM that runs. It needs no vLLM."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS_TO_ANSWER = 30.0


class ControlUnavailable(Exception):
    """Nobody answers. The message says why, and what to do."""


class Refused(Exception):
    """The question was not answered, for the reason that is the message."""


class Connection:
    """A connection to a control socket.

    Raises:
        ControlUnavailable: nobody listens there.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        if not hasattr(socket, "AF_UNIX"):
            raise ControlUnavailable("this Python has no Unix sockets; ask on the machine where vLLM runs")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(SECONDS_TO_ANSWER)
        try:
            self._socket.connect(path)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise ControlUnavailable(_why(path, error)) from None
        self._lines = self._socket.makefile("rb")

    def ask(self, kind: str, *, file: int | None = None, **arguments: Any) -> dict[str, Any]:
        """The first line of the answer; `file` is the descriptor of one to hand over.

        Raises:
            Refused: there is none.
            ControlUnavailable: nobody answers in time, or any more.
        """
        line = json.dumps({"ask": kind, **arguments}).encode() + b"\n"
        try:
            if file is None:
                self._socket.sendall(line)
            else:
                socket.send_fds(self._socket, [line], [file])
        except OSError as error:
            raise ControlUnavailable(_why(self._path, error)) from None
        return self.next_line(SECONDS_TO_ANSWER)

    def next_line(self, seconds: float | None = None) -> dict[str, Any]:
        """The next line of the answer; None waits as long as it takes. Raises as `ask`."""
        self._socket.settimeout(seconds)
        try:
            line = self._lines.readline()
        except OSError as error:
            raise ControlUnavailable(_why(self._path, error)) from None
        if not line:
            raise ControlUnavailable(f"vLLM closed the connection on {self._path}; it may have ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer

    def wait_for_line(self, seconds: float | None) -> dict[str, Any] | None:
        """As `next_line`; None if none comes within so many seconds. To be called when nothing of one has come."""
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return None
        except OSError as error:
            raise ControlUnavailable(_why(self._path, error)) from None
        return self.next_line(SECONDS_TO_ANSWER)

    def say_no_more(self) -> None:
        """Close this end: what goes on is to end."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise ControlUnavailable(_why(self._path, error)) from None

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextmanager
def connect(path: str) -> Iterator[Connection]:
    """A connection that is closed with the context. Raises ControlUnavailable."""
    connection = Connection(path)
    try:
        yield connection
    finally:
        connection.close()


def _why(path: str, error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"vLLM did not answer on {path} in time; it is stuck in a step, or has too much to do"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens on {path} any more; vLLM has ended. A new one tells its socket in its log"
    if isinstance(error, FileNotFoundError):
        return f"there is no socket {path}; vLLM's log tells its name at the start"
    if isinstance(error, PermissionError):
        return f"the socket {path} is not yours; ask as the user who runs vLLM, or as root"
    if isinstance(error, OSError) and os.path.exists(path) and error.strerror:
        return f"cannot ask on {path}: {error.strerror}"
    return f"{path} is no socket: {error}"
