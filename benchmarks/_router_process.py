"""Runs a real `vllm-router` process in front of servers, for benchmarks and tests."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from _server_process import free_port
from router_env import ENVIRONMENT, ROUTER_VERSION, is_complete, router_of

READINESS = [
    *("--health-check-endpoint", "/ready"),
    *("--health-check-interval-secs", "2"),
    *("--health-failure-threshold", "1"),
    *("--health-success-threshold", "1"),
]
"""Options with which a draining server gets no new requests."""


class RouterMissing(RuntimeError):
    """The router is not installed."""


class RouterFailed(RuntimeError):
    """The router did not come up; the message ends with its log."""


class RouterProcess:
    """A router. Made by `start_router`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, output: Path) -> None:
        self._process = process
        self._output = output
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """The output of the router so far."""
        return self._output.read_text(errors="replace")

    def wait_ready(self, timeout: float) -> None:
        """Wait until it forwards requests.

        Raises:
            RouterFailed: it ended, or took too long.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if (code := self._process.poll()) is not None:
                raise RouterFailed(f"the router ended with exit code {code}; its log:\n{self.log()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise RouterFailed(f"the router did not start within {timeout:g} s; its log:\n{self.log()}")

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)
        self._output.unlink(missing_ok=True)


def find_router(environment: Path = ENVIRONMENT) -> Path:
    """The router's command.

    Raises:
        RouterMissing: it is not installed there, or in another version.
    """
    if not is_complete(environment):
        raise RouterMissing(
            f"vllm-router {ROUTER_VERSION} (and what tests need beside it) is not installed in {environment}; run "
            "python benchmarks/router_env.py"
        )
    return router_of(environment)


def start_router(urls: Sequence[str], *options: str, port: int | None = None, timeout: float = 120) -> RouterProcess:
    """Start a router on 127.0.0.1, and wait until it forwards requests.

    Args:
        urls: URLs of the servers; at least one of them responds.
        options: of `vllm-router`, beside the servers and the ports.
        port: to listen on; None: a free one.
        timeout: seconds to come up.

    Raises:
        RouterMissing: it is not installed.
        RouterFailed: it did not come up.
    """
    router, port = find_router(), port or free_port()
    command = [str(router), "--worker-urls", *urls, "--port", str(port), "--prometheus-port", str(free_port())]
    # Without it, the router looks for missing servers again only after 30 s.
    command += ["--worker-startup-check-interval", "1", *options]
    descriptor, name = tempfile.mkstemp(prefix="router-", suffix=".log")
    with os.fdopen(descriptor, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    started = RouterProcess(process, port, Path(name))
    try:
        started.wait_ready(timeout)
    except BaseException:
        started.__exit__()
        raise
    return started
