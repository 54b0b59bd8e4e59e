"""Fixtures of the server's tests: a real server on the demo model, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from _server_process import ServerProcess

from tests.forked_engines import forked_processes, start_server
from tests.server.engine_pool import engine_pool


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """`pointsman serve` on the demo model, with defaults. All tests of a process share it, so leave it idle."""
    with start_server("--model", "demo") as running:
        yield running


@pytest.fixture(autouse=True, scope="session")
def engines() -> Iterator[None]:
    """Fork engine processes during the session; at its end, end the engines that remain in the pool."""
    with forked_processes():
        yield
        engine_pool().close()


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    """An HTTP client of the server of `server`."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[Any]:
    """OpenAI's client of the server of `server`, without retries."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
