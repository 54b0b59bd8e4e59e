"""A contender's process, seen from the driver: asked one thing at a time, and standing still in between.

Engines are bad neighbours: idle OpenMP threads spin, and an engine process polls its queue. So each worker gets a
process group of its own, which is stopped (SIGSTOP) whenever it is not its turn, engine processes and all, and goes
on (SIGCONT) when it is asked something. Should the driver die, the kernel hangs up (SIGHUP) on a group that it leaves
stopped, which ends it.
"""

from __future__ import annotations

import glob
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS_TO_END = 20
SECONDS_TO_STOP = 2


class WorkerFailed(RuntimeError):
    """The worker died or overran its time; the message ends with what it printed last."""


class WorkerProcess:
    """A process that replies to each JSON line with one JSON line.

    Args:
        name: for messages.
        command: the program and its arguments.
        environment: variables beside or in place of the driver's own; None removes one.
    """

    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str | None]) -> None:
        self.name = name
        merged = {**os.environ, **environment}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process lives
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={name: value for name, value in merged.items() if value is not None},
            process_group=0,
            preexec_fn=_heed_hang_up,
        )
        self._stop()

    def ask(self, command: str, timeout: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Have the worker do something, and wait for its answer; it stands still again when this returns.

        Args:
            command: what to do; `arguments` go with it.
            timeout: seconds after which the worker is given up, and ended.

        Raises:
            WorkerFailed: no answer came.
        """
        assert self._process.stdin and self._process.stdout
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            # An answer is one line, and nothing follows it, so no part of the next can lie in the buffer unseen.
            if not select.select([self._process.stdout], [], [], timeout)[0]:
                self._end()
                raise WorkerFailed(f"{self.name} did not answer {command!r} within {timeout:.0f} s")
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._end()
            self._errors.seek(0)
            raise WorkerFailed(f"the {self.name} worker died at {command!r}:\n{self._errors.read()[-4000:]}")
        self._stop()
        return dict(json.loads(answer))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def cpu_seconds(self) -> float | None:
        """CPU time of the group's living processes so far; None where there is no /proc to read it from."""
        if not Path("/proc/self/stat").exists():
            return None
        ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in self._stats("[0-9]*/stat"))
        return ticks / os.sysconf("SC_CLK_TCK")

    def forget_peak(self) -> None:
        """Have `peak_bytes` count from now on, where there is a /proc to say so."""
        for process in self._processes():
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5")

    def peak_bytes(self) -> int | None:
        """Peak of the resident memory of each process of the group, summed up; None where there is no /proc.

        Pages that several processes share, and files mapped into memory, count for each.
        """
        kibibytes = 0
        for process in self._processes():
            with suppress(OSError):  # it has just ended
                status = Path(f"/proc/{process}/status").read_text()
                kibibytes += int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
        return kibibytes << 10 or None

    def close(self) -> None:
        """Let the process end by itself; whatever of its group is left after a while is killed."""
        if self._process.stdin and not self._process.stdin.closed:
            self._signal(signal.SIGCONT)
            try:
                self._process.stdin.close()
                self._process.wait(SECONDS_TO_END)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                pass
        self._end()

    def _end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _stop(self) -> None:
        """Stop the group, and wait until its threads stand: on a busy machine they run on for milliseconds."""
        self._signal(signal.SIGSTOP)
        latest = time.monotonic() + SECONDS_TO_STOP
        # T is stopped; Z (a zombie) and X (dead) do not run either.
        while any(fields[0] not in "TZX" for _, fields in self._stats("[0-9]*/task/[0-9]*/stat")):
            if time.monotonic() > latest:
                return  # one waits in the kernel, and will stop where it leaves it
            time.sleep(0.001)

    def _processes(self) -> list[str]:
        return [process for process, fields in self._stats("[0-9]*/stat") if fields[0] not in "ZX"]

    def _stats(self, pattern: str) -> Iterator[tuple[str, list[str]]]:
        """The id of each of the group's processes or threads, and its fields of /proc from the state on."""
        group = str(self._process.pid)
        for stat in glob.iglob(f"/proc/{pattern}"):  # that of `Path` fails if a process ends while it looks
            try:
                identity, _, rest = Path(stat).read_text().partition(" ")
            except OSError:  # it has just ended
                continue
            fields = rest.rpartition(")")[2].split()  # the name, in parentheses, may contain anything
            if fields[2] == group:
                yield identity, fields

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:  # it is over
            return


def _heed_hang_up() -> None:
    """Under `nohup` a driver ignores it, and so would whatever it starts."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
