"""What imports on a system that lacks what Linux has: no `fcntl`, no `resource`, no Unix sockets, no uvloop.

The modules are imported in a process in which these are hidden, and the libraries of the engine and the server, too:
what is pure then imports, and what is not fails for a library's sake, never for the system's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HIDDEN = """
import importlib, json, os, pkgutil, signal, socket, sys

SYSTEM = {"fcntl", "resource", "uvloop", "grp", "pwd", "posix_ipc", "pty", "readline", "syslog", "termios", "tty"}
LIBRARIES = {"torch", "transformers", "safetensors", "numba", "tokenizers", "xgrammar", "vllm", "zmq", "msgspec"}
LIBRARIES |= {"huggingface_hub", "fastapi", "starlette", "uvicorn", "httptools", "prometheus_client", "yaml", "httpx2"}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SYSTEM | LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in SYSTEM & sys.modules.keys():
    del sys.modules[name]
sys.meta_path.insert(0, Hidden())
for module, names in {
    socket: ["AF_UNIX"],
    os: ["fork", "register_at_fork", "sched_getaffinity", "getuid", "geteuid", "memfd_create", "O_ASYNC", "fchmod"],
    signal: ["SIGALRM", "SIGCHLD", "SIGHUP", "SIGIO", "SIGKILL", "SIGUSR1", "ITIMER_REAL", "setitimer"],
}.items():
    for name in names:
        delattr(module, name)
"""

IMPORT_ALL = """
import pointsman
missing = {}
for found in pkgutil.walk_packages(pointsman.__path__, "pointsman.", onerror=lambda name: None):
    if found.name == "pointsman.__main__":
        continue
    try:
        importlib.import_module(found.name)
        missing[found.name] = None
    except ModuleNotFoundError as error:
        missing[found.name] = error.name
    except Exception as error:
        missing[found.name] = f"{type(error).__name__}: {error}"
print(json.dumps([missing, sorted(LIBRARIES)]))
"""


def run_without_system_features(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program, in a process that lacks all that; its arguments are `sys.argv[1:]`."""
    return subprocess.run(
        [sys.executable, "-c", HIDDEN + program, *arguments], capture_output=True, text=True, check=False
    )


@cache
def missing_import_of_each_module() -> tuple[dict[str, str | None], set[str]]:
    """By module: what it lacks to be imported, None where nothing; and the libraries that were hidden."""
    run = run_without_system_features(IMPORT_ALL)
    assert run.returncode == 0, run.stderr
    lacks, libraries = json.loads(run.stdout)
    return lacks, set(libraries)


def is_a_program(module: str) -> bool:
    """Started as a process of its own, after a check; imported by nothing."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return '\nif __name__ == "__main__":' in file.read_text()


def test_modules_fail_to_import_only_for_lack_of_a_library() -> None:
    lacks, libraries = missing_import_of_each_module()
    needy = {
        module: what
        for module, what in lacks.items()
        if what is not None and what.partition(".")[0] not in libraries and not is_a_program(module)
    }
    assert needy == {}


@pytest.mark.parametrize(
    "package", ["pointsman.core", "pointsman.cli", "pointsman.version", "pointsman.traces", "pointsman.sim"]
)
def test_core_cli_and_simulator_import_without_engine_libraries(package: str) -> None:
    lacks, _ = missing_import_of_each_module()
    inside = {module: what for module, what in lacks.items() if f"{module}.".startswith(f"{package}.")}
    pure = {module: what for module, what in inside.items() if what != "httpx2"}  # the client of `pointsman chat`
    assert inside
    assert len(inside) - len(pure) == (package == "pointsman.cli")
    assert {module for module, what in pure.items() if what is not None} == set()


def test_data_types_of_engine_and_clients_import_without_libraries() -> None:
    """What a caller says and gets, what crosses between processes, and clients: plain data, on any system."""
    program = """
import pointsman, pointsman.server, pointsman.integrations.vllm.client
from pointsman import SamplingParams
from pointsman.engine import (
    EngineDeadError, EngineStats, GrammarError, Logprob, ModelLoadError, PoolingParams, RequestOutput,
    RequestOutputKind, StructuredOutputsParams,
)
print(SamplingParams(max_tokens=3).max_tokens)
"""
    run = run_without_system_features(program)
    assert (run.returncode, run.stdout) == (0, "3\n"), run.stderr


def test_help_of_the_command_line_works_without_libraries() -> None:
    run = run_without_system_features("from pointsman.cli import main; main()", "--help")
    assert run.returncode == 0, run.stderr
    assert "generate" in run.stdout


def test_serve_and_explain_report_that_unix_sockets_are_missing() -> None:
    run = run_without_system_features("from pointsman.cli import main; main()", "serve")
    assert run.returncode == 2
    assert run.stderr == (
        "pointsman: error: serve needs Unix sockets, which this Python lacks; run it on Linux or macOS\n"
    )
    run = run_without_system_features("from pointsman.cli import main; main()", "explain", "--socket", "vllm.sock")
    assert run.stderr == (
        "pointsman: error: this Python has no Unix sockets; run this command on the machine where vLLM runs\n"
    )


def test_structured_output_reports_that_it_needs_linux() -> None:
    program = """
LIBRARIES.clear()  # this one may have what is installed
import numpy
from pointsman.engine.grammar.process import GrammarServer, GrammarError
try:
    GrammarServer()
except GrammarError as error:
    print(error)
"""
    run = run_without_system_features(program)
    assert run.stdout.startswith("structured output needs Linux"), run.stderr
