"""The Kubernetes manifest: its parts fit together, and to the options and routes of server and router."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import router_env
import yaml
from _environment import python_in
from _router_process import READINESS

from pointsman.cli.app import command_named
from pointsman.cli.server_client import OPERATOR_KEY_VARIABLE
from pointsman.server.serve import SECONDS_TO_REPORT

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
MANIFEST = FOLDER / "pointsman.yaml"
PARSE = """
import argparse, sys
from vllm_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser)
print(parser.parse_args(sys.argv[1:]).worker_urls)
"""


@pytest.fixture(scope="module")
def parts() -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name."""
    everything = list(yaml.safe_load_all(MANIFEST.read_text()))
    found = {(part["kind"], part["metadata"]["name"]): part for part in everything}
    assert len(found) == len(everything)
    return found


@pytest.fixture(scope="module")
def server(parts: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """The pod of a server."""
    pod: dict[str, Any] = parts["StatefulSet", "pointsman"]["spec"]["template"]["spec"]
    return pod


@pytest.fixture(scope="module")
def router(parts: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """The router's container."""
    (container,) = parts["Deployment", "pointsman-router"]["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def probes(container: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]
        assert probe["httpGet"]["port"] in [port["name"] for port in container["ports"]]
        yield kind, probe


def test_kubernetes_selectors_match_the_labels_and_ports_of_pods(parts: dict[tuple[str, str], dict[str, Any]]) -> None:
    pods = [part["spec"]["template"] for (kind, _), part in parts.items() if kind in ("StatefulSet", "Deployment")]
    for (kind, name), part in parts.items():
        selector = part["spec"]["selector"]
        labels = selector.get("matchLabels", selector)
        (pod,) = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
        if kind == "Service":
            (container,) = pod["spec"]["containers"]
            names = [port["name"] for port in container["ports"]]
            assert all(port["targetPort"] in names for port in part["spec"]["ports"]), name


def test_serve_accepts_the_options_and_probes_of_the_manifest(server: dict[str, Any]) -> None:
    (container,) = server["containers"]
    options = command_named("serve").make_context("serve", list(container["args"])).params
    assert options["allowed_host"] == ["pointsman-0.pointsman", "pointsman-1.pointsman"]
    assert options["host"] == "0.0.0.0" and options["port"] == container["ports"][0]["containerPort"]
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes(container)}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    variables = [one["name"] for one in container["env"]]
    assert OPERATOR_KEY_VARIABLE in variables
    # Kubernetes kills after this time, which begins with SIGTERM.
    needed = options["drain_delay"] + options["drain_timeout"] + SECONDS_TO_REPORT
    assert needed < server["terminationGracePeriodSeconds"] <= needed + 15
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert next(one["value"] for one in container["env"] if one["name"] == "NUMBA_CACHE_DIR") in mounted
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in server["volumes"]}


def test_router_in_the_manifest_checks_the_readiness_of_every_server(
    parts: dict[tuple[str, str], dict[str, Any]], router: dict[str, Any]
) -> None:
    arguments = router["args"]
    stateful = parts["StatefulSet", "pointsman"]
    service, port = stateful["spec"]["serviceName"], parts["Service", "pointsman"]["spec"]["ports"][0]["port"]
    assert ("Service", service) in parts and parts["Service", service]["spec"]["clusterIP"] == "None"
    urls = [argument for argument in arguments if argument.startswith("http://")]
    assert urls == [f"http://pointsman-{index}.{service}:{port}" for index in range(stateful["spec"]["replicas"])]
    asked = [part for argument in arguments for part in argument.split("=")]
    pairs = list(zip(READINESS[::2], READINESS[1::2], strict=True))
    assert all((name, value) in list(pairwise(asked)) for name, value in pairs)
    assert f"--port={router['ports'][0]['containerPort']}" in arguments
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    (delay,) = [one.partition("=")[2] for one in container["args"] if one.startswith("--drain-delay=")]
    assert float(delay) > 2 * float(dict(pairs)["--health-check-interval-secs"])
    assert len(list(probes(router))) == 3


def test_images_in_the_manifest_are_built_by_the_dockerfile(server: dict[str, Any], router: dict[str, Any]) -> None:
    recipe = (FOLDER / "Dockerfile").read_text()
    for image, target in ((server["containers"][0]["image"], "server"), (router["image"], "router")):
        assert f"--target {target} -t {image} ." in recipe and re.search(rf"^FROM \S+ AS {target}$", recipe, re.M)
    assert f"vllm-router=={router_env.ROUTER_VERSION}" in recipe
    assert router["image"].endswith(f":{router_env.ROUTER_VERSION}")
    extras = re.search(r"\.whl\)\[([\w,-]+)\]", recipe)
    declared = re.findall(r"^([\w-]+) = \[$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert extras is not None and set(extras[1].split(",")) <= set(declared)


@pytest.mark.long
@pytest.mark.e2e
def test_kubernetes_and_the_router_accept_the_manifest(router: dict[str, Any]) -> None:
    if router_env.make([]) != 0:
        pytest.skip("the router's environment cannot be made here; python benchmarks/router_env.py says why")
    python = python_in(router_env.ENVIRONMENT)
    for version in ("1.30", "1.37"):
        command = [python, "-m", "kubernetes_validate", "-k", version, "--strict", MANIFEST]
        checked = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert (checked.stdout + checked.stderr).count(" passed for ") == MANIFEST.read_text().count("\napiVersion: ")
    parsed = subprocess.run([python, "-c", PARSE, *router["args"]], capture_output=True, text=True, timeout=60)
    assert parsed.returncode == 0, parsed.stderr
    assert parsed.stdout.count("http://pointsman-") == 2
