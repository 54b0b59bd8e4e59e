"""Processes that are forked from one that has imported what they need, and watched as those of `subprocess` are.

    python fork_server.py DESCRIPTOR   a script: forks what it is asked for over a socket

An engine process spends most of its start on importing PyTorch. In the fork server that is done once, and every engine
begins where the imports have ended. No thread may run in it, or a fork is not sound: it says so, and ends.
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
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_MESSAGE = 1 << 16
_STATUS = 4  # bytes of an exit code


class ForkedProcess:
    """What `subprocess.Popen` is to a process that was started. Made by `ForkServer.start`."""

    def __init__(self, args: Sequence[str], pid: int, status: int) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self.stderr: Any = None
        self._status = status

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            if self.returncode is None:
                code = os.read(self._status, _STATUS)
                self.returncode = int.from_bytes(code, "little", signed=True)
                os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has run `prepare`, and forks.

    Args:
        prepare: a function that imports what its children need, as "module:function".
    """

    def __init__(self, prepare: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = Path(__file__).parents[1]
        paths = [str(root), str(root / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), prepare],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            )
        atexit.register(self.close)

    def start(
        self, function: str, arguments: Sequence[str], *, descriptors: Sequence[int], environment: Mapping[str, str]
    ) -> ForkedProcess:
        """A process that calls "module:function" with `arguments`, in which "{n}" is the nth descriptor's number there.

        Args:
            function: what it calls; it ends with what that returns, or with the code of SystemExit.
            arguments: of the function.
            descriptors: its standard input, output and error output, and further ones.
            environment: its variables.

        Raises:
            RuntimeError: the fork server has ended; it said why.
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
            raise RuntimeError(f"the fork server ended with {self._process.wait()}")
        return ForkedProcess([function, *arguments], int(answer), status)

    def close(self) -> None:
        """End it; what it has started goes on."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.wait()


def function_of(name: str) -> Callable[..., Any]:
    """The function "module:function"."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def _become(job: dict[str, Any], descriptors: list[int]) -> int:
    """Be the process that was asked for; its exit code."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = function_of(job["function"])(*(each.format(*descriptors) for each in job["arguments"]))
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    return int(code or 0)


def serve(control: socket.socket, prepare: str) -> None:
    """Fork until there is nobody any more who could ask."""
    function_of(prepare)()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        sys.exit(f"after {prepare} there are {len(threads)} threads, so nothing can be forked")
    gc.freeze()
    running: dict[int, tuple[int, int]] = {}  # by a descriptor of the process: its id, and where its code goes
    while True:
        for ready in select.select([control, *running], [], [])[0]:
            if ready is not control:
                pid, status = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(ready)
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, code.to_bytes(_STATUS, "little", signed=True))
                os.close(status)
                continue
            message, received, _, _ = socket.recv_fds(control, _MESSAGE, 16)
            if not message:
                return
            status, *descriptors = received
            pid = os.fork()
            if pid == 0:
                for other in (control.fileno(), status, *running, *(status for _, status in running.values())):
                    os.close(other)
                code = _become(json.loads(message), descriptors)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            for descriptor in descriptors:
                os.close(descriptor)
            running[os.pidfd_open(pid)] = (pid, status)
            control.send(str(pid).encode())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        serve(sock, sys.argv[2])
