"""Servers and engine processes that need not import anything: forked from a process that has run an engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from _server_process import ServerProcess

from tests import fork_server as fork_servers
from tests.fork_server import ForkedProcess, ForkServer

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""What was forked cannot compute with more threads: PyTorch's are not forked with it."""


def prepare() -> None:
    """Import what an engine process imports, at its start and with its first model, and load the compiled kernels."""
    import torch

    import pointsman.cli.serve
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
    """What `python -m pointsman.server.engine_process` does."""
    from pointsman.server.engine_process import main

    return main(int(descriptor))


@cache
def fork_server() -> ForkServer:
    """One for all tests of this process."""
    return fork_servers.connection or fork_servers.launch("tests.server.forked_engines:prepare")


def popen(command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> ForkedProcess:
    """As `subprocess.Popen` would start an engine process."""
    with open(os.devnull) as nothing:
        return fork_server().start(
            "tests.server.forked_engines:run_engine",
            [3],
            descriptors=[nothing.fileno(), 1, 2, *pass_fds],
            environment=os.environ | ONE_THREAD,
        )


SUBPROCESS = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
"""In place of the module where engines are started."""


def run_command(*arguments: str) -> None:
    """What `python -m pointsman` does; an engine process is forked as well."""
    from pointsman.cli import main
    from pointsman.server.service import engine_client

    fork_server.cache_clear()
    engine_client.subprocess = SUBPROCESS  # type: ignore[assignment]
    main(list(arguments))


class ForkedServer(ServerProcess):
    """A server whose engine process is not its child."""

    @property
    def engine_pid(self) -> int:
        return fork_server().started_by(self.pid)


def start_server(
    *arguments: str, environment: Mapping[str, str | None] | None = None, timeout: float = 120
) -> ServerProcess:
    """As `_server_process.start_server`, and forked."""
    merged: dict[str, Any] = {**os.environ, **(environment or {}), **ONE_THREAD}
    log, theirs = os.pipe()
    with open(os.devnull) as nothing, open(theirs, "wb") as stderr:
        process = fork_server().start(
            "tests.server.forked_engines:run_command",
            ["serve", "--port", "0", *arguments],
            descriptors=[nothing.fileno(), 1, stderr.fileno()],
            environment={name: value for name, value in merged.items() if value is not None},
        )
    process.stderr = open(log, errors="replace")  # noqa: SIM115 - it is read to its end, and closed with the process
    server = ForkedServer(process)  # type: ignore[arg-type]
    server.wait_ready(timeout)
    return server
