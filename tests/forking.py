"""Runs processes without imports: forked from a process that has imported the modules."""

from __future__ import annotations

import atexit
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


class ForkingParent:
    """A process that has imported modules, and forks others.

    Args:
        python: the interpreter.
        modules: the modules that it imports.
        environment: environment variables of the process and of its children.
    """

    def __init__(self, python: Path | str, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [python, Path(__file__).with_name("forking_parent.py"), *modules]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        atexit.register(self.close)

    def run(
        self, *arguments: object, timeout: float, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([python, *arguments])`, with further variables in its environment.

        Raises:
            TimeoutExpired: the forked process took more than `timeout` seconds.
            RuntimeError: the forking process has exited, because a module cannot be imported.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        command = [str(argument) for argument in arguments]
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            job = {"arguments": command, "environment": variables, "timeout": timeout, "cwd": str(cwd or Path.cwd())}
            self._process.stdin.write(json.dumps({**job, "stdout": str(out), "stderr": str(err)}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the process that forks ended with {self._process.wait()}; it told why on stderr")
            code = json.loads(answer)["code"]
            if code is None:
                raise subprocess.TimeoutExpired(command, timeout, out.read_text(), err.read_text())
            return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())

    def close(self) -> None:
        """End the forking process."""
        atexit.unregister(self.close)
        self._process.communicate()
