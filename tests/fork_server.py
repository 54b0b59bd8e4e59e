"""Forks processes from one that has imported their modules, with an interface like `subprocess`.

An engine process spends most of its start on importing PyTorch. The fork server imports it once, and every engine
begins after the imports. A fork is unsafe while threads run in the fork server: if there are any, it reports that and
exits.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_MESSAGE = 1 << 16
_STATUS = 4  # bytes of an exit code


class ForkedProcess:
    """Like `subprocess.Popen`, for a forked process. Made by `ForkServer.start`.

    Attributes:
        stderr: for whoever has connected it.
    """

    def __init__(self, args: Sequence[str], pid: int, status: int) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self.stderr: Any = None
        self._status = status
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._status)

    def poll(self) -> int | None:
        """The exit code of the process, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; returns its exit code.

        Raises:
            subprocess.TimeoutExpired: the process has not ended in time.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._lock:
                if self.returncode is None:
                    self.returncode = int.from_bytes(os.read(self._status, _STATUS), "little", signed=True)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the process a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM)."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process immediately (SIGKILL)."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that forks further processes; or a forked process's connection to that process (`connection`)."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def start(
        self,
        function: str,
        arguments: Sequence[str | int],
        *,
        descriptors: Sequence[int],
        environment: Mapping[str, str],
    ) -> ForkedProcess:
        """Start a process that calls a function with `arguments`; a number n among them is replaced by the nth
        descriptor.

        Args:
            function: what it calls, as "module:function"; it ends with what that returns, or with SystemExit.
            arguments: of the function.
            descriptors: its standard input, output and error output, and further ones.
            environment: its variables.

        Raises:
            RuntimeError: the fork server has exited; it printed why.
        """
        status, theirs = os.pipe()
        try:
            job = {"function": function, "arguments": list(arguments), "environment": dict(environment)}
            message = json.dumps({**job, "cwd": os.getcwd()}).encode()
            socket.send_fds(self._socket, [message], [theirs, *descriptors])
            answer = self._socket.recv(_MESSAGE)
        except OSError:
            answer = b""
        finally:
            os.close(theirs)
        if not answer:
            raise RuntimeError("the fork server has ended; it says why on its error output")
        return ForkedProcess([function, *map(str, arguments)], int(answer), status)

    def started_by(self, pid: int) -> list[int]:
        """The processes that the process `pid` has started through its own connection, and that have not ended, in the
        order of their start.

        Raises:
            ProcessLookupError: the fork server has no process `pid`.
        """
        self._socket.send(json.dumps({"started_by": pid}).encode())
        found: list[int] = json.loads(self._socket.recv(_MESSAGE))
        if not found:
            raise ProcessLookupError(f"process {pid} has started none that runs")
        return found


def launch(prepare: str) -> ForkServer:
    """A fork server, which ends with this process.

    Args:
        prepare: a function that imports what its children need, as "module:function".
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root = Path(__file__).parents[1]
    paths = [str(root), str(root / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), prepare],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

    def close() -> None:
        ours.close()
        process.wait()

    atexit.register(close)
    return ForkServer(ours)


connection: ForkServer | None = None
"""In a forked process: the fork server to ask for further processes."""


def function_of(name: str) -> Callable[..., Any]:
    """The function "module:function"."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def _become(job: dict[str, Any], descriptors: list[int], sock: socket.socket) -> NoReturn:
    """Run as the requested process, until it exits."""
    global connection
    connection = ForkServer(sock)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    if "torch" in sys.modules:  # the first use recreates its thread pool, and two first uses at once would fail
        sys.modules["torch"].set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = [each if isinstance(each, str) else str(descriptors[each]) for each in job["arguments"]]
    try:
        code = function_of(job["function"])(*arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0))


class _Forking:
    """The loop of the fork server, in its own process.

    Args:
        control: connection to the process that launched the server; when this connection closes, the server ends.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._askers = {control: 0}  # process ids
        self._running: dict[int, tuple[int, int, int]] = {}  # by descriptor: (id, asker, descriptor for the code)

    def run(self) -> None:
        """Fork processes on request until all clients have closed their connections."""
        while True:
            for ready in select.select([*self._askers, *self._running], [], [])[0]:
                if isinstance(ready, int):
                    self._end(ready)
                elif not self._answer(ready):
                    if ready is self._control:
                        return
                    del self._askers[ready]
                    ready.close()

    def _end(self, process: int) -> None:
        pid, _, status = self._running.pop(process)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(process)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, code.to_bytes(_STATUS, "little", signed=True))
        os.close(status)

    def _answer(self, sock: socket.socket) -> bool:
        """Answer one request; returns False if the client has ended: a process can be killed between its request and
        the answer."""
        try:
            message, received, _, _ = socket.recv_fds(sock, _MESSAGE, 16)
        except ConnectionResetError:
            return False
        if not message:
            return False
        answer = self._answer_to(json.loads(message), self._askers[sock], received)
        try:
            sock.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _answer_to(self, job: dict[str, Any], asker: int, received: list[int]) -> bytes:
        """The started processes, as JSON; or the id of a newly started one."""
        if "started_by" in job:
            pids = [pid for pid, each, _ in self._running.values() if each == job["started_by"]]
            return json.dumps(pids).encode()
        status, *descriptors = received
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            os.close(status)
            self._forget()
            _become(job, descriptors, theirs)
        for descriptor in descriptors:
            os.close(descriptor)
        theirs.close()
        self._running[os.pidfd_open(pid)] = (pid, asker, status)
        self._askers[ours] = pid
        return str(pid).encode()

    def _forget(self) -> None:
        """In the new process: close the descriptors of other processes."""
        for sock in self._askers:
            sock.close()
        for process, (_, _, status) in self._running.items():
            os.close(process)
            os.close(status)


def main(descriptor: int, prepare: str) -> None:
    """Run as a fork server."""
    with socket.socket(fileno=descriptor) as control:
        function_of(prepare)()
        threads = os.listdir("/proc/self/task")
        if len(threads) > 1:
            sys.exit(f"after {prepare} there are {len(threads)} threads, so nothing can be forked")
        gc.freeze()
        _Forking(control).run()


if __name__ == "__main__":
    # As an imported module, so that others share its `connection`.
    importlib.import_module("tests.fork_server").main(int(sys.argv[1]), sys.argv[2])
