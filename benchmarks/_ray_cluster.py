"""A Ray cluster on this machine, for tests and benchmarks. Each node has processes of its own, as on two machines."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from _server_process import free_port

from pointsman.server.service.engine_client import ENGINE_PROCESS

ROOT = Path(__file__).resolve().parent.parent
MARK = "POINTSMAN_CLUSTER"
"""An environment variable of all processes of a cluster, which identifies them."""
SECONDS_TO_START = 600.0
BUILD_APP = "pointsman.integrations.ray:build_app"


def environment(**more: str) -> dict[str, str]:
    """The environment variables of every process of a cluster."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # the nodes are on this machine
        "TERM": "dumb",
        **more,
    }


@dataclass
class Cluster:
    """A running cluster.

    Attributes:
        python: the interpreter of an environment with Ray.
        address: address of its head.
        nodes: process of each node, the head first.
        environment: of all its processes.
    """

    python: Path
    address: str
    environment: Mapping[str, str]
    folder: Path
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def asked(self, expression: str) -> int:
        """The value of an expression on the cluster; 0 while it does not respond."""
        ask = f"import ray; ray.init({self.address!r}, logging_level='ERROR'); print({expression})"
        command = [self.python, "-c", ask]
        try:
            found = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=60)
        except subprocess.TimeoutExpired:
            return 0
        return int(found.stdout.split()[-1]) if found.returncode == 0 else 0

    def processes(self, part: str) -> list[int]:
        """Processes of the cluster whose command line has this part, in ascending order of their numbers."""
        mark = f"{MARK}={self.environment[MARK]}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if part.encode() in (entry / "cmdline").read_bytes() and mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:  # it has ended, or belongs to another user
                    continue
        return sorted(found)

    @property
    def engines(self) -> list[int]:
        """Process ids of the engines of the cluster."""
        return self.processes(ENGINE_PROCESS)


@contextmanager
def cluster(python: Path, folder: Path, num_nodes: int, *, num_cpus: int = 1, **variables: str) -> Iterator[Cluster]:
    """A cluster; all its processes end with the block.

    Args:
        python: the interpreter of an environment with Ray.
        folder: for its logs.
        num_nodes: at least 1.
        num_cpus: CPUs that each node reports.
        variables: environment variables of all its processes.

    Raises:
        RuntimeError: a node does not start; with its output.
        TimeoutError: it takes longer than `SECONDS_TO_START`; with the head's output.
    """
    address = f"127.0.0.1:{free_port()}"
    variables = environment(**variables, **{MARK: uuid.uuid4().hex})
    running = Cluster(python, address, variables, folder)
    head = ["--head", "--port", address.rpartition(":")[2], "--include-dashboard=false"]
    with ExitStack() as stack:
        # Ray's sockets lie behind 60 characters of its own in it, and a socket's path has 107 at most.
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True))
        stack.callback(_end_all, running)
        running.nodes.append(_node(running, num_cpus, *head, "--temp-dir", short, log="head.log"))
        deadline = time.monotonic() + SECONDS_TO_START
        while True:
            up = running.asked("len([1 for node in ray.nodes() if node['Alive']])")
            if up == num_nodes:
                break
            if up and len(running.nodes) < num_nodes:
                log = f"node{len(running.nodes)}.log"
                running.nodes.append(_node(running, num_cpus, "--address", address, log=log))
            if any(node.poll() is not None for node in running.nodes):
                raise RuntimeError("".join(log.read_text() for log in sorted(folder.glob("*.log"))))
            if time.monotonic() > deadline:
                raise TimeoutError((folder / "head.log").read_text())
            time.sleep(0.5)
        yield running


def _node(running: Cluster, num_cpus: int, *options: str, log: str) -> subprocess.Popen[bytes]:
    command = [running.python.with_name("ray"), "start", "--num-cpus", str(num_cpus)]
    command += ["--object-store-memory", "100000000", "--block", *options]
    with (running.folder / log).open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=running.environment, start_new_session=True
        )


def _end_all(running: Cluster) -> None:
    for node in reversed(running.nodes):
        _end(node)
    for pid in running.processes(""):  # processes that a killed node has left
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _end(node: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(node.pid, number)
        except ProcessLookupError:
            break
        try:
            node.wait(20)
            break
        except subprocess.TimeoutExpired:
            continue
    node.wait()


@contextmanager
def application(
    running: Cluster, *arguments: str, target: str = BUILD_APP
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run the application with `serve run` until it is ready; returns the port of Serve's proxy, and the process.

    Args:
        running: the cluster.
        arguments: of `build_app`.
        target: the application, or a configuration file of Serve.
    """
    port = free_port()
    start_serve(running, port)
    log = running.folder / "serve.log"
    command = [running.python.with_name("serve"), "run", "--address", running.address, target, *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=running.environment, cwd=ROOT)
    try:
        wait_ready(process, port, log)
        yield port, process
    finally:
        process.send_signal(signal.SIGINT)  # also ends its application
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start_serve(running: Cluster, port: int) -> None:
    """Start Serve without an application, with a proxy only on the head: all nodes are on one machine.

    Raises:
        RuntimeError: it does not start; with its output.
    """
    options = ["--http-host", "127.0.0.1", "--http-port", str(port), "--proxy-location", "HeadOnly"]
    command = [running.python.with_name("serve"), "start", "--address", running.address, *options]
    environment = running.environment
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS_TO_START)
    if found.returncode != 0:
        raise RuntimeError(f"serve start failed:\n{found.stdout}{found.stderr}")


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when requests are accepted.

    Raises:
        TimeoutError: they are not accepted; with the log.
    """
    deadline = time.monotonic() + SECONDS_TO_START
    while not is_ready(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(log.read_text()[-5000:])
        time.sleep(0.5)


def is_ready(port: int) -> bool:
    """Whether the application accepts requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
