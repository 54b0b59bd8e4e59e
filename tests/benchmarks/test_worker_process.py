"""Contenders answer in turn, stand still in between, and leave nothing behind."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks._worker_process import WorkerFailed, WorkerProcess

ROOT = Path(__file__).resolve().parents[2]
ECHO = """
import json, sys
for line in sys.stdin:
    print(line.strip(), flush=True)
"""
BUSY = """
import os, signal, sys, threading
is_child = os.fork() == 0  # of the worker's, as engines have one
signal.alarm(60)  # whatever goes wrong in the test, it ends
if is_child:
    while True:
        pass
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
for line in sys.stdin:
    print("{}", flush=True)
"""


@contextmanager
def worker(program: str, **environment: str | None) -> Iterator[WorkerProcess]:
    process = WorkerProcess("test", [sys.executable, "-c", program], environment)
    try:
        yield process
    finally:
        process.close()


def test_answers_in_turn() -> None:
    with worker(ECHO) as process:
        for i in range(3):
            assert process.ask("echo", value=i) == {"command": "echo", "value": i}
        assert process.is_alive
    assert not process.is_alive


def test_environment_is_given_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_TEST_TAKEN", "1")
    program = "import json, os\ninput()\nprint(json.dumps(dict(os.environ)), flush=True)\ninput()"
    with worker(program, POINTSMAN_TEST_GIVEN="2", POINTSMAN_TEST_TAKEN=None) as process:
        seen = process.ask("environment")
    assert seen["POINTSMAN_TEST_GIVEN"] == "2"
    assert "POINTSMAN_TEST_TAKEN" not in seen


def test_stands_still_between_turns() -> None:
    with worker(BUSY) as process:
        process.ask("start")
        before = process.cpu_seconds()
        if before is None:
            pytest.skip("no /proc to read processor time from")
        time.sleep(0.3)
        assert process.cpu_seconds() == before  # neither its threads nor its child ran
        process.ask("again")
        after = process.cpu_seconds()
        assert after is not None
        assert after >= before


def test_death_is_told_with_its_last_words() -> None:
    with worker("import sys; input(); sys.exit('no such model')") as process:
        with pytest.raises(WorkerFailed, match=r"(?s)died at 'open'.*no such model"):
            process.ask("open")
        assert not process.is_alive
        with pytest.raises(WorkerFailed, match="died at 'run'"):
            process.ask("run")


def test_time_runs_out() -> None:
    with worker("import time; input(); time.sleep(60)") as process:
        start = time.perf_counter()
        with pytest.raises(WorkerFailed, match="did not answer 'run'"):
            process.ask("run", timeout=0.2)
        assert time.perf_counter() - start < 10
        assert not process.is_alive


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads process states from /proc")
@pytest.mark.parametrize("hang_up", ["SIG_DFL", "SIG_IGN"], ids=["in a terminal", "under nohup"])
def test_nothing_is_left_when_the_driver_is_killed(hang_up: str) -> None:
    program = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGHUP, signal.{hang_up})\n"
        "from benchmarks._worker_process import WorkerProcess\n"
        f"worker = WorkerProcess('test', [sys.executable, '-c', {BUSY!r}], {{}})\n"
        "worker.ask('start')\n"
        "print(worker._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    # A session of its own, as a terminal's: the group must be orphaned by the driver's death, not before.
    driver = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    assert driver.stdout is not None
    group = int(driver.stdout.readline())
    try:
        assert wait_until(lambda: set(members(group).values()) == {"T"})
        driver.kill()
        driver.wait()
        driver.stdout.close()
        assert wait_until(lambda: not members(group))
    finally:
        if members(group):
            os.killpg(group, signal.SIGKILL)


def members(group: int) -> dict[int, str]:
    """States, as /proc has them, of the group's processes that have not ended; T is stopped."""
    found = {}
    for stat in glob.iglob("/proc/[0-9]*/stat"):
        try:
            fields = Path(stat).read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found[int(stat.split("/")[2])] = fields[0]
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition came to hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
