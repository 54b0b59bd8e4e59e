"""`pointsman tune` on a real Ray cluster of two nodes, which this test starts: each is a process of its own, as on two
machines, and one of the search's workers runs on each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import ray_env
from _server_process import free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ["--model", "llama-3.1-8b", "--device", "h100", "--requests", "100", "--ttft-p99", "1s", "--itl-p99", "50ms"]
SEARCH = [*SERVICE, "--trials", "10", "--json"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # the nodes are on this machine
}


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with Ray."""
    if ray_env.make([]) != 0:
        pytest.skip("Ray cannot be installed here; python benchmarks/ray_env.py says why")
    return ray_env.python_of()


@pytest.fixture(scope="module")
def alone(python: Path) -> str:
    """What the search prints without a cluster."""
    found = tuned(python, "--workers", "1")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["num_trials"] >= 10
    return found.stdout


def tuned(python: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "pointsman", "tune", *SEARCH, *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=300)


@contextmanager
def node(python: Path, *options: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A node of a cluster with one CPU; all its processes end with the block."""
    command = [python.with_name("ray"), "start", "--num-cpus", "1", "--object-store-memory", "100000000", "--block"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def asked(python: Path, address: str, expression: str) -> int:
    """What a cluster says; 0 while it does not answer."""
    ask = f"import ray; ray.init({address!r}, logging_level='ERROR'); print({expression})"
    try:
        found = subprocess.run([python, "-c", ask], capture_output=True, text=True, env=ENVIRONMENT, timeout=30)
    except subprocess.TimeoutExpired:
        return 0
    return int(found.stdout.split()[-1]) if found.returncode == 0 else 0


def num_workers(python: Path, address: str) -> int:
    """CPUs that are taken."""
    return asked(python, address, "int(ray.cluster_resources()['CPU'] - ray.available_resources().get('CPU', 0))")


@contextmanager
def cluster(python: Path, folder: Path, num_nodes: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a cluster of so many nodes, and what runs them, the head first."""
    address = f"127.0.0.1:{free_port()}"
    port = address.rpartition(":")[2]
    head = ["--head", "--port", port, "--include-dashboard=false", "--temp-dir", str(folder / "ray")]
    with ExitStack() as stack:
        nodes = [stack.enter_context(node(python, *head, log=folder / "head.log"))]
        deadline = time.monotonic() + 120
        while True:
            up = asked(python, address, "int(ray.cluster_resources().get('CPU', 0))")
            if up == num_nodes:
                break
            if up and len(nodes) < num_nodes:
                log = folder / f"node{len(nodes)}.log"
                nodes.append(stack.enter_context(node(python, "--address", address, log=log)))
            assert time.monotonic() < deadline, (folder / "head.log").read_text()
            time.sleep(0.5)
        yield address, nodes


def test_a_cluster_of_two_nodes_finds_the_same(
    python: Path, alone: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also with fewer workers than it has CPUs."""
    with cluster(python, tmp_path_factory.mktemp("r"), num_nodes=2) as (address, _):
        found = tuned(python, "--ray", address)
        assert found.returncode == 0, found.stderr
        assert found.stdout == alone
        assert tuned(python, "--ray", address, "--workers", "1").stdout == alone


def test_a_cluster_of_this_machine_finds_the_same(python: Path, alone: str) -> None:
    found = tuned(python, "--ray", "local", "--workers", "2")
    assert found.returncode == 0, found.stderr
    assert found.stdout == alone


def test_an_address_that_does_not_answer_is_an_error(python: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    found = tuned(python, "--ray", address)
    assert found.returncode == 2
    assert address in found.stderr and "ray start --head" in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr


def test_a_node_that_dies_ends_the_search_with_an_error(python: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("r")
    with cluster(python, folder, num_nodes=2) as (address, nodes):
        command = [python, "-m", "pointsman", "tune", *SERVICE, "--trials", "3000", "--ray", address]
        search = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT, env=ENVIRONMENT)
        try:
            wait_until(lambda: num_workers(python, address) == 2, 120, "both nodes work")
            os.killpg(nodes[1].pid, signal.SIGKILL)
            error = search.communicate(timeout=240)[1].decode()
        finally:
            search.kill()
            search.wait()
        words = " ".join(error.split())
        assert search.returncode == 2 and "a worker on the Ray cluster failed" in words, error
        assert "pip install 'pointsman[ray]'" in words and "Traceback" not in words
