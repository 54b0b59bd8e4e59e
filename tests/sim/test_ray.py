"""`pointsman tune` on a real Ray cluster of two nodes, which this test starts. Each node is a process of its own, as on
two machines, and runs one of the search's workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from _ray_cluster import Cluster, cluster, environment
from _server_process import free_port, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ["--model", "llama-3.1-8b", "--device", "h100", "--requests", "100", "--ttft-p99", "1s", "--itl-p99", "50ms"]
SEARCH = [*SERVICE, "--trials", "10", "--json"]
ENVIRONMENT = environment()


@pytest.fixture(scope="module")
def alone(ray_python: Path) -> str:
    """The output of the search without a cluster."""
    found = tuned(ray_python, "--workers", "1")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["num_trials"] >= 10
    return found.stdout


def tuned(python: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "pointsman", "tune", *SEARCH, *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=300)


def num_workers(running: Cluster) -> int:
    """Number of CPUs in use."""
    return running.asked("int(ray.cluster_resources()['CPU'] - ray.available_resources().get('CPU', 0))")


def test_a_search_on_two_ray_nodes_equals_a_search_in_one_process(
    ray_python: Path, alone: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also with fewer workers than it has CPUs."""
    with cluster(ray_python, tmp_path_factory.mktemp("r"), num_nodes=2) as running:
        found = tuned(ray_python, "--ray", running.address)
        assert found.returncode == 0, found.stderr
        assert found.stdout == alone
        assert tuned(ray_python, "--ray", running.address, "--workers", "1").stdout == alone


def test_a_search_on_a_local_ray_cluster_equals_a_search_without_ray(ray_python: Path, alone: str) -> None:
    found = tuned(ray_python, "--ray", "local", "--workers", "2")
    assert found.returncode == 0, found.stderr
    assert found.stdout == alone


def test_a_cluster_address_that_does_not_answer_is_an_error(ray_python: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    found = tuned(ray_python, "--ray", address)
    assert found.returncode == 2
    assert address in found.stderr and "ray start --head" in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr


def test_a_node_that_dies_ends_the_search_with_an_error(
    ray_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with cluster(ray_python, tmp_path_factory.mktemp("r"), num_nodes=2) as running:
        command = [ray_python, "-m", "pointsman", "tune", *SERVICE, "--trials", "3000", "--ray", running.address]
        search = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT, env=ENVIRONMENT)
        try:
            wait_until(lambda: num_workers(running) == 2, 120, "both nodes work")
            os.killpg(running.nodes[1].pid, signal.SIGKILL)
            error = search.communicate(timeout=240)[1].decode()
        finally:
            search.kill()
            search.wait()
        words = " ".join(error.split())
        assert search.returncode == 2 and "a worker on the Ray cluster failed" in words, error
        assert "pointsman[ray] installed" in words and "Traceback" not in words
