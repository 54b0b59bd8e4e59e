"""Engine processes that need not import anything: forked from one that has run an engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from tests.fork_server import ForkedProcess, ForkServer


def prepare() -> None:
    """Import what an engine process imports, at its start and with its first model, and load the compiled kernels."""
    import torch

    import pointsman.server.engine_process  # noqa: F401
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
    return ForkServer("tests.server.forked_engines:prepare")


def popen(command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> ForkedProcess:
    """As `subprocess.Popen` would start an engine process."""
    with open(os.devnull) as nothing:
        return fork_server().start(
            "tests.server.forked_engines:run_engine",
            ["{3}"],
            descriptors=[nothing.fileno(), 1, 2, *pass_fds],
            environment=os.environ,
        )


SUBPROCESS = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
"""In place of the module where engines are started."""
