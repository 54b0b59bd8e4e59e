"""Starts servers, engine processes and grammar compilers without imports: forked from a process that has run an
engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from _server_process import ServerProcess

from tests import fork_server as fork_servers
from tests.fork_server import ForkedProcess, ForkServer

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Forked processes can compute with one thread only: PyTorch's threads are not forked."""


def prepare() -> None:
    """Import the modules of an engine process, at its start and with its first model, and load the compiled kernels."""
    import torch

    import pointsman.cli.serve
    import pointsman.engine.grammar.worker
    import pointsman.server.api.app
    import pointsman.server.engine_process
    import pointsman.server.serve  # noqa: F401
    from pointsman.engine import Engine, SamplingParams

    torch.set_num_threads(1)
    engine = Engine("demo", num_blocks=16, max_model_len=64, num_threads=1)
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=4))  # no text: tokenizers start threads
    while engine.has_unfinished_requests():
        engine.step()


def run_engine(descriptor: str) -> int:
    """Like `python -m pointsman.server.engine_process`; its grammar compiler is forked as well."""
    from pointsman.server.engine_process import main

    with forked_processes():
        return main(int(descriptor))


def run_compiler(descriptor: str) -> None:
    """Like `python pointsman/engine/grammar/worker.py`."""
    from pointsman.engine.grammar.worker import main

    main(int(descriptor))


def run_command(*arguments: str) -> None:
    """Like `python -m pointsman`; the processes that it starts are forked as well."""
    from pointsman.cli import main

    with forked_processes():
        main(list(arguments))


@cache
def fork_server() -> ForkServer:
    """The fork server for all tests of this process."""
    return fork_servers.connection or fork_servers.launch("tests.forked_engines:prepare")


def start_command(
    *arguments: str, descriptors: Sequence[int], environment: Mapping[str, str] | None = None
) -> ForkedProcess:
    """Start `python -m pointsman ARGUMENTS`.

    Args:
        arguments: arguments of the command.
        descriptors: its standard input, output and error output.
        environment: environment variables of the process; None: those of this process.
    """
    environment = os.environ if environment is None else environment
    return fork_server().start(
        "tests.forked_engines:run_command", arguments, descriptors=descriptors, environment=environment
    )


@contextmanager
def forked_processes() -> Iterator[None]:
    """A context in which engine processes and grammar compilers are forked."""
    from pointsman.engine.grammar import process as grammar_process
    from pointsman.server.service import engine_client

    with pytest.MonkeyPatch.context() as patch:
        for module, function in ((engine_client, "run_engine"), (grammar_process, "run_compiler")):
            patch.setattr(module, "subprocess", _Subprocess(f"tests.forked_engines:{function}"))
        yield


class _Subprocess:
    """Replaces `subprocess` in a module that starts one kind of process, whose last argument is a descriptor."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, function: str) -> None:
        self._function = function

    def Popen(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        stdin: int,
        env: Mapping[str, str] | None = None,
    ) -> ForkedProcess:
        with open(os.devnull) as nothing:
            return fork_server().start(
                self._function,
                [3],
                descriptors=[nothing.fileno(), 1, 2, *pass_fds],
                environment={**(os.environ if env is None else env), **ONE_THREAD},
            )


class ForkedServer(ServerProcess):
    """A server whose engine process is not its child."""

    @property
    def engine_pids(self) -> list[int]:
        return fork_server().started_by(self.pid)


def start_server(
    *arguments: str, environment: Mapping[str, str | None] | None = None, timeout: float = 120
) -> ServerProcess:
    """As `_server_process.start_server`, but forked; without warm-up, unless an argument asks for it."""
    if "--warm-up" not in arguments:  # saves processor time; most tests do not need it
        arguments = ("--no-warm-up", *arguments)
    merged: dict[str, Any] = {**os.environ, **(environment or {}), **ONE_THREAD}
    log, theirs = os.pipe()
    with open(os.devnull) as nothing, open(theirs, "wb") as stderr:
        process = start_command(
            *("serve", "--port", "0", *arguments),
            descriptors=[nothing.fileno(), 1, stderr.fileno()],
            environment={name: value for name, value in merged.items() if value is not None},
        )
    process.stderr = open(log, errors="replace")  # noqa: SIM115 - it is read to its end, and closed with the process
    server = ForkedServer(process)  # type: ignore[arg-type]
    server.wait_ready(timeout)
    return server
