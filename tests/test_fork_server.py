"""A fork server outlives its clients."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests import fork_server
from tests.fork_server import ForkServer


def nothing() -> None:
    """Exit without imports."""


def succeed() -> int:
    return 7


def ask_and_be_killed() -> None:
    """Ask often, and read no answer."""
    assert fork_server.connection is not None
    for _ in range(20):
        fork_server.connection._socket.send(json.dumps({"started_by": os.getpid()}).encode())
    os.kill(os.getpid(), signal.SIGKILL)


def ask_for_a_process_and_be_killed() -> None:
    """Ask for processes, and read no answer."""
    assert fork_server.connection is not None
    _status, theirs = os.pipe()
    job = {"function": "tests.test_fork_server:succeed", "arguments": [], "environment": {}, "cwd": "/"}
    for _ in range(5):
        fork_server.socket.send_fds(fork_server.connection._socket, [json.dumps(job).encode()], [theirs, 0, 1, 2])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return fork_server.launch("tests.test_fork_server:nothing")


def run(server: ForkServer, function: str) -> int:
    process = server.start(f"tests.test_fork_server:{function}", [], descriptors=[0, 1, 2], environment=os.environ)
    return process.wait(30)


@pytest.mark.parametrize("function", ["ask_and_be_killed", "ask_for_a_process_and_be_killed"])
def test_killed_client_of_the_fork_server_does_not_affect_others(server: ForkServer, function: str) -> None:
    for _ in range(5):
        assert run(server, function) == -signal.SIGKILL
    assert run(server, "succeed") == 7
