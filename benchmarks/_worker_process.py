"""Process of a contender, seen from the driver: it gets one command at a time, and is stopped in between.

Idle engines disturb others: OpenMP threads spin, and an engine process polls its queue. So each worker gets a process
group of its own, engine processes included. The group is stopped (SIGSTOP) while it is idle, and continues (SIGCONT)
when it gets a command. If the driver dies, the kernel sends SIGHUP to the stopped group, which ends it.
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
    """The worker died or overran its time; the message ends with its last output."""


class WorkerProcess:
    """A process that replies to each JSON line with one JSON line.

    Args:
        name: for messages.
        command: the program and its arguments.
        environment: variables in addition to or in place of the driver's own; None removes one.
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
            preexec_fn=_exit_when_the_parent_ends,
        )
        self._stop()

    def ask(self, command: str, timeout: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Run a command on the worker, and wait for its reply; it is stopped again when this returns.

        Args:
            command: the name of the command; `arguments` are its fields.
            timeout: seconds after which the worker is given up, and ended.

        Raises:
            WorkerFailed: no reply came.
        """
        assert self._process.stdin and self._process.stdout
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            # A reply is one line, and nothing follows it, so no part of the next can lie in the buffer unseen.
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
        """CPU time of the group's living processes so far; None without /proc."""
        if not Path("/proc/self/stat").exists():
            return None
        ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in self._stats("[0-9]*/stat"))
        return ticks / os.sysconf("SC_CLK_TCK")

    def reset_peak_bytes(self) -> None:
        """Reset `peak_bytes`, if there is a /proc."""
        for process in self._processes():
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5")

    def peak_bytes(self) -> int | None:
        """Sum of the peak resident memory of the group's processes; None without /proc.

        Pages that several processes share, and files mapped into memory, count for each.
        """
        kibibytes = 0
        for process in self._processes():
            with suppress(OSError):  # it has just ended
                status = Path(f"/proc/{process}/status").read_text()
                kibibytes += int(status.partition("VmHWM:")[2].split(maxsplit=1)[0])
        return kibibytes << 10 or None

    def close(self) -> None:
        """Let the process end by itself; processes of its group that remain after a while are killed."""
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
        """Stop the group, and wait until its threads stand: on a busy machine they continue for milliseconds."""
        self._signal(signal.SIGSTOP)
        latest = time.monotonic() + SECONDS_TO_STOP
        # T is stopped; Z (a zombie) and X (dead) do not run either.
        while any(fields[0] not in "TZX" for _, fields in self._stats("[0-9]*/task/[0-9]*/stat")):
            if time.monotonic() > latest:
                return  # a thread waits in the kernel, and will stop when it returns
            time.sleep(0.001)

    def _processes(self) -> list[str]:
        return [process for process, fields in self._stats("[0-9]*/stat") if fields[0] not in "ZX"]

    def _stats(self, pattern: str) -> Iterator[tuple[str, list[str]]]:
        """The id of each of the group's processes or threads, and its fields of /proc from the state on."""
        group = str(self._process.pid)
        for stat in glob.iglob(f"/proc/{pattern}"):  # `Path.glob` fails if a process ends meanwhile
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
        except ProcessLookupError:  # it has ended
            return


def _exit_when_the_parent_ends() -> None:
    """Restore SIGHUP: a driver under `nohup` ignores it, and its child processes would, too."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
