"""Runs one part in its own process: `python -m gpu_check.part MODULE:FUNCTION FINDINGS --device DEVICE [--tiny]`.

It imports the module, waits for a line with its time limit in seconds on standard input, and calls the function with a
`Setting`. When its standard input ends, because the check itself was killed, it kills itself and its children. Exit
code 1: the function raised, or one of its checks failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from gpu_check.findings import Findings


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a part."""

    device: str
    """PyTorch's name of the device."""
    tiny: bool
    """Whether sizes are small enough for a CPU to compute them in seconds."""
    end: float
    """Time at which the part will be killed, by `time.monotonic`."""
    findings: Findings

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def seconds_left(self) -> float:
        return self.end - monotonic()


def _read_line() -> str:
    """A line from standard input, unbuffered, because the thread below continues to read."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line.decode()


def _end_with_the_check() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("function")
    parser.add_argument("findings", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    module, _, name = arguments.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    line = _read_line()
    if not line:  # the check has ended
        return 1
    threading.Thread(target=_end_with_the_check, daemon=True).start()
    is_judged = arguments.device != "cpu" and not arguments.tiny
    findings = Findings(arguments.findings, is_judged=is_judged)
    function(Setting(arguments.device, arguments.tiny, monotonic() + float(line), findings))
    return 1 if findings.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
