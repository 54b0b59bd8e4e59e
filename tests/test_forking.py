"""Forked processes behave to their caller like started ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forking import ForkingParent


@pytest.fixture(scope="module")
def parent() -> Iterator[ForkingParent]:
    parent = ForkingParent(sys.executable, ["decimal"], os.environ)
    yield parent
    parent.close()


@pytest.mark.parametrize(
    ("program", "code", "out", "err"),
    [
        ("import sys; print(__name__, sys.argv[1:])", 0, "__main__ ['a']\n", ""),
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('no')", 1, "", "no\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, "", ""),
        ("import os; print(os.environ['GIVEN'], os.getcwd())", 0, "yes /\n", ""),
        ("import sys; print('decimal' in sys.modules, sys.stdin.read())", 0, "True \n", ""),
        ("import atexit; atexit.register(print, 'the end')", 0, "the end\n", ""),
    ],
)
def test_forked_run_returns_output_and_exit_code(
    parent: ForkingParent, program: str, code: int, out: str, err: str
) -> None:
    done = parent.run("-c", program, "a", timeout=30, cwd=Path("/"), GIVEN="yes")
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_forked_run_returns_the_traceback_of_an_exception(parent: ForkingParent) -> None:
    done = parent.run("-c", "1 / 0", timeout=30)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_forked_run_accepts_scripts_and_modules(parent: ForkingParent, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv)")
    assert parent.run(script, "a", timeout=30).stdout == f"{[str(script), 'a']}\n"
    assert parent.run("-m", "this", timeout=30).stdout.startswith("The Zen of Python")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_forked_run_beyond_its_timeout_is_killed_with_its_children(parent: ForkingParent) -> None:
    program = "import subprocess; own = subprocess.Popen(['sleep', '60']); print(own.pid, flush=True); own.wait()"
    with pytest.raises(subprocess.TimeoutExpired) as late:
        parent.run("-c", program, timeout=1)
    until = time.monotonic() + 10
    while is_running(int(late.value.stdout)):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert parent.run("-c", "print(1)", timeout=30).stdout == "1\n", "the next is not affected"


def test_forking_parent_reports_a_module_that_cannot_be_imported() -> None:
    parent = ForkingParent(sys.executable, ["no.such.module"], os.environ)
    with pytest.raises(RuntimeError, match="the process that forks ended with 1"):
        parent.run("-c", "1", timeout=30)
    parent.close()
