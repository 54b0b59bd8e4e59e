"""Fixtures of the server's tests: a real server on the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _server_process import ServerProcess, start_server


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """`pointsman serve` on the demo model, with defaults; shared by all tests of a process, so leave it idle."""
    with start_server("--model", "demo") as running:
        yield running
