"""A script for `forking.py`: imports modules once, and forks processes that need them.

    python forking_parent.py MODULES...   reads a JSON line for every process to start, prints one when it has ended

Importing PyTorch or vLLM takes more processor time than most tests. Here it is done once, and every process begins
after the imports. The imports must start no thread, or a fork is unsafe.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import sys
import traceback
from importlib import import_module
from types import ModuleType
from typing import Any


def run(arguments: list[str]) -> None:
    """Run like `python ARGUMENTS`."""
    how, *rest = arguments
    if how == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif how == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(how, run_name="__main__")


def become(job: dict[str, Any]) -> int:
    """Run as the requested process; returns its exit code."""
    os.setpgid(0, 0)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["stdout"], os.O_WRONLY | os.O_CREAT),
        (2, job["stderr"], os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(path, flags), number)
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    try:
        run(job["arguments"])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def wait(pid: int, timeout: float) -> int | None:
    """The exit code of a child; None: the child took too long, and was killed with its own children."""
    descriptor = os.pidfd_open(pid)
    in_time = select.select([descriptor], [], [], timeout)[0]
    os.close(descriptor)
    if not in_time:
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if in_time else None


def main() -> None:
    for name in sys.argv[1:]:
        import_module(name)
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            sys.exit(become(job))
        print(json.dumps({"code": wait(pid, job["timeout"])}), flush=True)


if __name__ == "__main__":
    main()
