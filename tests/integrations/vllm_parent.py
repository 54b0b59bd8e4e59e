"""The parent of processes that use vLLM: a script for the environment with vLLM.

    python vllm_parent.py   reads a JSON line for every process to start, prints one when it has ended

Importing vLLM takes more processor time than most of what the tests do with it. Here it is imported once, and every
script runs in a fork that begins where the imports have ended.
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
from typing import Any


def import_vllm() -> None:
    """Almost all that an engine imports; no thread is started, so a fork is sound."""
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.async_llm
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401


def fork_engines() -> None:
    """Undo what vLLM's CPU platform does: the processes of an engine would import everything again."""
    from vllm.platforms.cpu import CpuPlatform

    hook = CpuPlatform.check_and_update_config.__func__

    def forking(cls: Any, vllm_config: Any) -> None:
        hook(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(forking)


def run(arguments: list[str]) -> None:
    """As `python ARGUMENTS` would."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def become(job: dict[str, Any]) -> int:
    """Be the process that was asked for; its exit code."""
    os.setpgid(0, 0)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["stdout"], os.O_WRONLY | os.O_CREAT),
        (2, job["stderr"], os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(path, flags), number)
    os.environ.update(job["environment"])
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
    """The exit code of a child; None: it took too long, and was killed with all its own."""
    descriptor = os.pidfd_open(pid)
    in_time = select.select([descriptor], [], [], timeout)[0]
    os.close(descriptor)
    if not in_time:
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if in_time else None


def main() -> None:
    import_vllm()
    fork_engines()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            sys.exit(become(job))
        print(json.dumps({"code": wait(pid, job["timeout"])}), flush=True)


if __name__ == "__main__":
    main()
