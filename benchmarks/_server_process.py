"""Runs a real `pointsman serve` process, for benchmarks and tests."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_URL = re.compile(r"http://[^\s'\"/]+:\d+")


class ServerFailed(RuntimeError):
    """The server did not come up; the message ends with its log."""


class ServerProcess:
    """A server. Made by `start_server`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: list[str] = []
        self._has_url = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if not self.url and (found := _URL.search(line)):
                self.url = found[0]
                self._has_url.set()
        self._has_url.set()

    def wait_ready(self, timeout: float) -> None:
        """Wait until it reports its address.

        Raises:
            ServerFailed: it ended, or took too long.
        """
        self._has_url.wait(timeout)
        if not self.url:
            self.kill()
            raise ServerFailed(f"the server did not start within {timeout:g} s; its log:\n{self.log()}")

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def pid(self) -> int:
        """Process id of the API process."""
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        """Process id of the engine process, the newest if there are several.

        Raises:
            ProcessLookupError: it has ended.
        """
        if not (pids := self.engine_pids):
            raise ProcessLookupError("the server has no engine process")
        return pids[-1]

    @property
    def engine_pids(self) -> list[int]:
        """Process ids of the living engine processes, in the order of their start."""
        found = []
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                if b"pointsman.server.engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    def log(self) -> str:
        """Its output so far."""
        return "".join(self._lines)

    def signal(self, number: int) -> None:
        """Send a signal to the API process."""
        self._process.send_signal(number)

    def wait(self, timeout: float) -> int:
        """Wait for its end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        return self._process.wait(timeout)

    def stop(self, timeout: float = 60) -> int:
        """End it as a supervisor would, with SIGTERM; its exit code."""
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        self._reader.join(5)
        return self._process.returncode

    def kill(self) -> None:
        """End it at once; its engine process follows."""
        self._process.kill()
        self._process.wait(30)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process.poll() is None:
            self.stop()


def start_server(
    *arguments: str,
    environment: Mapping[str, str | None] | None = None,
    timeout: float = 120,
    program: Sequence[str] = ("-m", "pointsman", "serve"),
) -> ServerProcess:
    """Start a server on a free port of 127.0.0.1, and wait until it serves.

    Args:
        arguments: options of `pointsman serve`.
        environment: variables beside or in place of this process's; None removes one.
        timeout: seconds to come up.
        program: arguments of Python; another program than `pointsman serve` must serve in the same process.

    Raises:
        ServerFailed: the server did not start.
    """
    merged: dict[str, Any] = {**os.environ, **(environment or {})}
    process = subprocess.Popen(
        [sys.executable, *program, "--port", "0", *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={name: value for name, value in merged.items() if value is not None},
    )
    server = ServerProcess(process)
    server.wait_ready(timeout)
    return server


def resident_bytes(pid: int) -> int:
    """Memory that a process holds, in bytes."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used, all threads, to the nanosecond; /proc counts hundredths of a second.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) makes the number of its clock


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is not in use now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_until(condition: Any, timeout: float, what: str) -> None:
    """Poll until `condition()` is true.

    Raises:
        TimeoutError: it was not within `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"this did not happen within {timeout:g} s: {what}")
        time.sleep(0.05)
