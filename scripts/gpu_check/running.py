"""Runs the parts, each in its own process, which is killed at its limit.

While a part runs, the process of the next part does its imports and then waits, so imports take no device time. It does
not use the device before it gets the signal to begin.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from gpu_check.findings import Found, read_findings

LOG_LINES = 25
"""Number of lines of a failed part's output that the report shows."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check."""

    letter: str
    name: str
    title: str
    function: str
    """"module:function", which gets a `Setting`."""
    seconds: float
    """Time limit of the part, in seconds."""
    on_cpu: Mapping[str, str] = field(default_factory=dict)
    """Environment variables if the device is a CPU."""


PARTS = (
    Part(
        "a", "kernels", "kernels against float64 and PyTorch", "gpu_check.parts.kernels:run", 80,
        {"TRITON_INTERPRET": "1"},
    ),
    Part("b", "tokens", "tokens of the demo model against a CPU's", "gpu_check.parts.tokens:run", 60),
    Part("c", "decode", "decode steps against the bandwidth", "gpu_check.parts.decode:run", 120),
    Part("g", "preemption", "preemption, prefixes, aborts, KV contents", "gpu_check.parts.preemption:run", 45),
    Part("d", "prefill", "prompts against a matrix product", "gpu_check.parts.prefill:run", 50),
    Part("f", "serving", "the server under load", "gpu_check.parts.serving:run", 80),
    Part("h", "simulator", "step times, and the simulator's error", "gpu_check.parts.simulator:run", 70),
    Part("e", "throughput", "256 requests at once, beside transformers", "gpu_check.parts.throughput:run", 150),
)  # fmt: skip
"""The parts in the order in which they run: the most important ones first, in case the time is short."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run of the check."""

    device: str = "cuda"
    tiny: bool = False


@dataclass(slots=True)
class Result:
    """The result of a part."""

    part: Part
    status: str
    """"passed", "failed", "killed" at its limit, or "not run" because no time was left."""
    seconds: float
    found: Found
    log: str = ""
    """The last lines of its output, unless it passed."""

    @property
    def is_passed(self) -> bool:
        return self.status == "passed"

    def to_dict(self) -> dict[str, Any]:
        """The fields as data for JSON."""
        about = {"name": self.part.name, "status": self.status, "seconds": round(self.seconds, 2)}
        return about | self.found.to_dict() | ({"log": self.log} if self.log else {})


class PartProcess:
    """The process of one part, which waits for `run`.

    Args:
        folder: folder of its findings and its output.
    """

    def __init__(self, part: Part, options: Options, folder: Path) -> None:
        self.part = part
        self._findings = folder / f"{part.letter}.findings"
        self._log = folder / f"{part.letter}.log"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if options.device == "cpu":
            environment |= part.on_cpu
        command = [
            sys.executable, "-m", "gpu_check.part", part.function, str(self._findings),
            "--device", options.device, *(["--tiny"] if options.tiny else []),
        ]  # fmt: skip
        with self._log.open("wb") as log:
            # Its own session, so that its child processes end with it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def run(self, seconds: float) -> Result:
        """Start the part and wait for its end, at most `seconds`; then kill it."""
        begun = monotonic()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has failed already
            self._process.stdin.write(f"{seconds}\n".encode())
            self._process.stdin.flush()  # not closed, because its end means that this process has ended
        try:
            status = "passed" if self._process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "killed"
        self.kill()
        log = "" if status == "passed" else self._last_lines()
        return Result(self.part, status, monotonic() - begun, read_findings(self._findings), log)

    def kill(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _last_lines(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])


def run_parts(
    parts: Sequence[Part],
    options: Options,
    seconds: float,
    *,
    begins: Callable[[Part], None],
    ends: Callable[[Result], None],
) -> list[Result]:
    """Run parts one after the other.

    Args:
        seconds: limit of all parts together; a part gets its own limit, or the remaining time if that is less.
        begins: called before each part.
        ends: called after each part, with its result.
    """
    end = monotonic() + seconds
    results: list[Result] = []
    waiting: PartProcess | None = None
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        try:
            waiting = PartProcess(parts[0], options, Path(folder)) if parts else None
            for number, part in enumerate(parts):
                process, waiting = waiting, None
                assert process is not None
                try:
                    if number + 1 < len(parts):
                        waiting = PartProcess(parts[number + 1], options, Path(folder))
                    limit = min(part.seconds, end - monotonic())
                    begins(part)
                    result = process.run(limit) if limit > 0 else Result(part, "not run", 0.0, Found())
                finally:
                    process.kill()
                results.append(result)
                ends(result)
        finally:
            if waiting is not None:
                waiting.kill()
    return results
