"""Runs every command of the pages about vLLM against a real vLLM; checks that installing Pointsman changes nothing in
vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from _server_process import free_port
from _server_sides import write_vllm_metadata
from prometheus_client.parser import text_string_to_metric_families
from vllm_env import python_of

from pointsman.cli.vllm import METRICS
from tests.integrations.vllm_process import DEMO, NEEDS_VLLM, ROOT, vllm_parent
from tests.test_docs import VLLM, blocks, commands

MODEL, SOCKET = "Qwen/Qwen3-0.6B", "/tmp/pointsman.sock"
"""The path in the documents."""
COMMANDS = [
    *dict.fromkeys(
        line for page in VLLM[::-1] for _, language, text in blocks(page) if language == "sh" for line in commands(text)
    )
]
"""Each command once, in the order of the guide."""

pytestmark = NEEDS_VLLM


@dataclass
class Server:
    """A running vLLM server."""

    url: str
    socket: Path
    log: Path

    def complete(self, name: str, max_tokens: int) -> str:
        body = {"prompt": "The import statement", "max_tokens": max_tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-request-id": name},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["id"]


SERVE = """
import os, sys
path, stub, log, pid = sys.argv[1:5]
sys.path.insert(0, stub)
for number in 1, 2:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
with open(pid, "w") as file:
    file.write(str(os.getpid()))
sys.argv = [path, *sys.argv[5:]]
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""
"""The command `vllm`, in a process that has imported vLLM."""
INFORMED = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1"}


@contextlib.contextmanager
def serving(folder: Path, version: str) -> Iterator[Server]:
    """The server that the documents start, smaller."""
    (line,) = (line for line in COMMANDS if line.startswith("vllm serve"))
    path, log, pid = folder / "pointsman.sock", folder / "log", folder / "pid"
    words = shlex.split(line.replace(MODEL, str(DEMO)).replace(SOCKET, str(path)))
    port = free_port()
    words[words.index("--max-num-seqs") + 1] = "1"  # so that requests wait
    words[-1] = words[-1].replace("}}", ', "victim": "latest"}}')
    words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32"]
    words += ["--max-model-len", "2048", "--block-size", "32", "--max-num-batched-tokens", "2048"]
    command = [python_of().parent / words[0], write_vllm_metadata(folder / "stub", version), log, pid, *words[1:]]
    ended: list[subprocess.CompletedProcess[str]] = []
    process = threading.Thread(
        target=lambda: ended.append(vllm_parent().run("-c", SERVE, *command, timeout=400, **INFORMED))
    )
    process.start()
    try:
        server = Server(f"http://127.0.0.1:{port}", path, log)
        until = time.monotonic() + 240
        while True:
            assert process.is_alive() and time.monotonic() < until, (ended, log.exists() and log.read_text()[-4000:])
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=5):
                break
            time.sleep(0.5)
        yield server
        os.kill(int(pid.read_text()), signal.SIGTERM)
        process.join(60)
    finally:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.killpg(int(pid.read_text()), signal.SIGKILL)
        process.join()


def run(line: str, server: Server, cwd: Path, *, code: int = 0) -> str:
    """A command of the documents, in an environment without vLLM."""
    words = shlex.split(line.replace(SOCKET, str(server.socket)))
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def played(line: str, server: Server, cwd: Path) -> str:
    """The page of `pointsman play`, which runs until Ctrl-C."""
    command = [sys.executable, "-m", *shlex.split(line.replace(SOCKET, str(server.socket)))]
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with urllib.request.urlopen(process.stdout.readline().partition("#")[0], timeout=30) as answer:
            page: str = answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    return page


def test_commands_of_the_vllm_documents_run_in_order(tmp_path: Path, vllm_version: str) -> None:
    with serving(tmp_path, vllm_version) as server:
        asking = [line for line in COMMANDS if SOCKET in line and line.startswith("pointsman")]
        assert len(asking) == 6
        names = ["first", "my-request", "third"]
        lengths = [1500, 16, 16]  # the first runs while the others wait and are explained
        threads = [threading.Thread(target=server.complete, args=args) for args in zip(names, lengths, strict=True)]
        for thread in threads:
            thread.start()
            time.sleep(0.5)
        table, one, every = (run(line, server, tmp_path) for line in asking[:3])
        assert table.startswith("1 running, 2 waiting, 0 parked") and "sequence_limit" in table and "behind" in table
        assert re.match(
            r"cmpl-my-request-0-\w+ waits for 1 more sequence slot: all sequence slots are taken. "
            r"Held by cmpl-first-0-\w+ \(1\).",
            one,
        )
        found = [json.loads(line) for line in every.splitlines()]
        assert [re.sub("-0-.*", "", request["id"]) for request in found] == [f"cmpl-{name}" for name in names]
        assert "<title>Live: " in played(asking[3], server, tmp_path)
        metrics = {family.name: family for family in text_string_to_metric_families(run(asking[4], server, tmp_path))}
        assert {f"{name}_total" if f"{name}_total" in METRICS else name for name in metrics} >= set(METRICS)
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            theirs = {family.name for family in text_string_to_metric_families(answer.read().decode())}
        assert not theirs & metrics.keys()
        for thread in threads:
            thread.join()
        recording = threading.Thread(target=run, args=(asking[5], server, tmp_path))
        recording.start()
        until = time.monotonic() + 60
        while not (tmp_path / "run.jsonl").exists() or not (tmp_path / "run.jsonl").stat().st_size:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert server.complete("recorded", 8) == "cmpl-recorded"
        recording.join()
        replays = [line for line in COMMANDS if line.startswith("pointsman replay")]
        printed = run(replays[0], server, tmp_path)
        assert re.match(r"\d+ steps replayed \(\d+ calls, 1 requests, 0 preemptions\): no difference", printed)
    run(asking[0], server, tmp_path, code=1)  # the server has ended
    log = server.log.read_text()
    assert "Pointsman 0.1.0 schedules for vLLM 0.32.0" in log
    assert "order fcfs, 2048 tokens and 1 requests a step" in log and "victim latest" in log
    assert f"pointsman explain --socket {server.socket}" in log


def test_the_readme_and_the_vllm_documents_start_vllm_alike() -> None:
    (start,) = (text for _, language, text in blocks(ROOT / "README.md") if language == "text" and "vllm check" in text)
    given = [" ".join(shlex.split(line, comments=True)) for line in commands(start)]
    tested = [" ".join(shlex.split(line, comments=True)) for line in COMMANDS]
    assert len(given) == 4 and [line for line in given if line not in tested] == []


def check_vllm(*options: str) -> subprocess.CompletedProcess[str]:
    """The documents' `check` command with further options, in vLLM's environment."""
    (line,) = (line for line in COMMANDS if line.startswith("pointsman vllm check"))
    return vllm_parent().run("-m", *shlex.split(line.replace(MODEL, str(DEMO))), *options, timeout=300)


def test_vllm_check_reports_success_and_the_knobs() -> None:
    done = check_vllm("--additional-config", '{"pointsman": {"decode_reserve": "mean", "socket": ""}}')
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM 0.32.0: Pointsman 0.1.0 supports it (" in done.stdout
    assert "--scheduler-cls pointsman.integrations.vllm.Scheduler" in done.stdout
    assert re.search(r"max_num_seqs +64 +\(--max-num-seqs\)", done.stdout)
    assert re.search(r"decode_reserve +mean +\(--additional-config\)", done.stdout)
    assert "no socket" in done.stdout
    assert "a recording by Observer: the simulator takes it" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("it will work: "))
    assert shlex.split(line)[3:] == [
        *("vllm", "serve", str(DEMO), "--scheduler-cls", "pointsman.integrations.vllm.Scheduler"),
        *("--max-num-seqs", "64", "--additional-config"),
        '{"pointsman": {"decode_reserve": "mean", "socket": ""}}',
    ]
    assert re.search(r"  1 group: \d+ layers of FullAttentionSpec, blocks of \d+ tokens", done.stdout)


def test_vllm_check_reports_all_problems() -> None:
    done = check_vllm(
        "--kv-cache-metrics",
        "--kv-transfer-config",
        '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}',
        "--additional-config",
        '{"pointsman": {"max_seqs": 2}}',
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for words in ("leave --kv-cache-metrics out", "leave --kv-transfer-config out", "max_seqs", "or leave --sched"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-num-seqs", "many"], "vLLM rejects these options"),
        (["--no-such-option"], "vLLM has no option --no-such-option; vllm serve --help=all lists"),
        (
            ["--scheduler-cls", "pointsman.Scheduler"],
            "--scheduler-cls is pointsman.Scheduler, but this command checks only",
        ),
        (["--max-num-seqs", "0"], "vLLM cannot run"),
    ],
)
def test_vllm_check_reports_options_that_vllm_rejects(options: list[str], words: str) -> None:
    done = check_vllm(*options)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and "Traceback" not in done.stderr


def test_installing_changes_nothing_in_vllm() -> None:
    pip = [python_of(), "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation", str(ROOT)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("Would install")] == [
        "Would install pointsman-0.1.0"
    ]
