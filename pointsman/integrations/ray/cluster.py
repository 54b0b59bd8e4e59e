"""Checks before the application starts: the cluster answers and has capacity for the replicas, its nodes have the
model, and the port of Serve's proxy is free.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman.engine.machine import num_cores
from pointsman.engine.sources.find import is_path
from pointsman.integrations.ray.arguments import RayError, RaySettings

SECONDS_TO_CONNECT = 10.0
SECONDS_TO_LOOK = 60.0
"""Time for each node to report whether it has the model, including the start of a process on the node."""
AMOUNTS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""Ray's names of resources in the options of actors, each with Ray's name of the same resource on nodes."""


@dataclass(frozen=True, slots=True)
class Node:
    """A running node of the cluster."""

    id: str
    """Ray's id of the node; "": the cluster is not started yet."""
    address: str
    resources: Mapping[str, float]


def check_cluster(settings: RaySettings) -> None:
    """Raise if the replicas could not start.

    Raises:
        RayError: the cluster cannot be reached, or has too few resources for the replicas; a node lacks the model; or
            the port of Serve's proxy is in use.
    """
    with nodes_of(*cluster_address()) as nodes:
        needs = replica_needs(settings.engine_options)
        if settings.check_resources:
            check_capacity(nodes, needs, settings)
        model = str(settings.serve.engine["model"])
        if Path(model).is_absolute():
            api = replica_needs({"ray_actor_options": settings.api_actor_options})
            check_model(model, [one for one in nodes if num_fitting(one, needs) or num_fitting(one, api)])
        elif is_path(model) or (model != "demo" and Path(model).exists()):
            raise RayError(f"model is {model!r}; nodes do not share a working directory, so give an absolute path")
        check_port(nodes)


def cluster_address() -> tuple[str | None, str]:
    """The address of the cluster that `serve run` will use, and its source: --address, RAY_ADDRESS, or the file that
    `ray start` writes. Address None: `serve run` starts a cluster.
    """
    context = command()
    own = os.environ.get("RAY_ADDRESS") or None
    given = (None if context is None else context.params.get("address")) or own
    name = "RAY_ADDRESS" if given == own else "--address"
    if given not in (None, "auto"):
        return given, name
    try:
        return address_file().read_text().strip() or given, str(address_file())
    except OSError:
        return given, name


def address_file() -> Path:
    """The file to which `ray start` writes the address of this machine's cluster; `ray stop` removes it."""
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    return Path(folder, "ray", "ray_current_cluster")


def command() -> Any:
    """click's context of the command (such as `serve run`) that builds the application; None: a program or the cluster
    builds the application."""
    import click

    return click.get_current_context(silent=True)


@contextmanager
def nodes_of(address: str | None, address_source: str) -> Iterator[list[Node]]:
    """The nodes of a cluster. If the cluster runs, this process is connected to it within the context.

    Args:
        address: address of the cluster's head; None or "local": there is no cluster yet.
        address_source: the source of the address.

    Raises:
        RayError: the cluster cannot be reached.
    """
    import ray
    from ray.exceptions import AuthenticationError

    connects = not ray.is_initialized()
    if connects and address in (None, "local"):
        yield [this_machine()]
        return
    if connects:
        assert address is not None
        try:
            check_that_it_answers(address)
            ray.init(address, log_to_driver=False, logging_level="ERROR", namespace="serve")
        except AuthenticationError as error:
            raise RayError(
                f"the Ray cluster at {address} refuses the token of this machine: {error.message}; set "
                "RAY_AUTH_MODE=token, and copy the head's ~/.ray/auth_token"
            ) from None
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            remedy = "give the host:port that ray start --head printed"
            if address_source == str(address_file()):
                remedy = "start its head again, or forget it with ray stop, which removes that file"
            raise RayError(f"cannot reach a Ray cluster at {address} ({address_source}): {reason}; {remedy}") from None
    try:
        yield [
            Node(one["NodeID"], one["NodeManagerAddress"], one.get("Resources", {}))
            for one in ray.nodes()
            if one["Alive"]
        ]
    finally:
        if connects:
            ray.shutdown()


def this_machine() -> Node:
    """This machine as the node that it would be if Ray were started here without options."""
    return Node("", "this machine", {"CPU": float(num_cores())})


def check_that_it_answers(address: str) -> None:
    """Raise without delay if nothing listens at a cluster's address. Ray itself tries to connect for minutes, and
    prints a line every few seconds.

    Raises:
        ConnectionError: nothing listens at the address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):  # a word such as auto, not host:port
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(str(error)) from None


def check_port(nodes: Sequence[Node]) -> None:
    """Raise if `serve run` is about to start Serve's proxies, and the proxies' port is in use on this machine. With a
    configuration file nothing is checked: it has a port of its own, and is read in the cluster after the proxies have
    started.

    Raises:
        RayError: another program uses the port.
    """
    import ray
    from ray.serve.config import HTTPOptions

    context = command()
    if context is None or context.info_name != "run":
        return
    if all(node.id for node in nodes) and ray.util.list_named_actors():  # an actor of Serve's: Serve runs
        return
    options = HTTPOptions()
    if options.host is None:
        return
    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((options.host, options.port))
        except OSError as error:
            raise RayError(
                f"Serve's proxy cannot listen on {options.host} port {options.port}: {error.strerror}; end the program "
                "that uses the port, or first start Serve on another port: serve start --http-port PORT"
            ) from None


# ---------------------------------------------------------------------------------------------------- resources


def replica_needs(options: Mapping[str, Any]) -> dict[str, float]:
    """The resources that one replica needs, by Ray's name on nodes. With a placement group: the sum of the group's
    bundles."""
    needs: dict[str, float] = {}
    for bundle in options.get("placement_group_bundles") or ():
        for name, amount in bundle.items():
            needs[name] = needs.get(name, 0.0) + amount
    if needs:
        return needs
    actor = options.get("ray_actor_options", {})
    amounts = {AMOUNTS[name]: actor[name] for name in AMOUNTS if actor.get(name)}
    return {**amounts, **actor.get("resources", {})}


def num_fitting(node: Node, needs: Mapping[str, float]) -> float:
    """Number of replicas for which a node has the resources; infinity if a replica needs no resources."""
    return min(
        (node.resources.get(name, 0.0) // amount for name, amount in needs.items() if amount), default=float("inf")
    )


def check_capacity(nodes: Sequence[Node], needs: Mapping[str, float], settings: RaySettings) -> None:
    """Raise if the nodes, without any load, have too few resources for the replicas that are to start.

    Raises:
        RayError: the resources do not suffice; the message has the resources that each replica needs and that each node
            has.
    """
    options = settings.engine_options
    if options.get("placement_group_bundles"):  # a placement group may spread over several nodes
        everything: dict[str, float] = {}
        for node in nodes:
            for name, amount in node.resources.items():
                everything[name] = everything.get(name, 0.0) + amount
        fitting = num_fitting(Node("", "", everything), needs)
    else:
        max_per_node = options.get("max_replicas_per_node") or float("inf")
        fitting = sum(min(num_fitting(node, needs), max_per_node) for node in nodes)
    scaling = settings.autoscaling
    name, wanted = (
        ("num_replicas", settings.num_replicas) if scaling is None else ("min_replicas", scaling["min_replicas"])
    )
    if fitting >= wanted:
        return
    each = ", ".join(f"{resource} {amount:g}" for resource, amount in needs.items()) or "nothing"
    have = "; ".join(
        f"{node.address}: "
        + ", ".join(f"{resource} {node.resources.get(resource, 0.0):g}" for resource in needs or ["CPU"])
        for node in nodes
    )
    limit = options.get("max_replicas_per_node")
    at_most = "" if limit is None else f", at most {limit} on a node"
    raise RayError(
        f"{name} is {wanted}, but the cluster has capacity for {fitting:g}: each replica needs {each}{at_most}, and "
        f"the nodes have {have}; lower {name} or the needs of a replica (ray_actor_options), add nodes, or give "
        "check_resources=false if the cluster adds nodes by itself"
    )


# ---------------------------------------------------------------------------------------------------- the model


def check_model(model: str, nodes: Sequence[Node]) -> None:
    """Raise if a node lacks the directory or file of the model.

    Raises:
        RayError: a node lacks the model; the message has all such nodes.
    """
    if all(not node.id for node in nodes):
        lacking = [] if Path(model).exists() else [node.address for node in nodes]
    else:
        lacking = nodes_without(model, nodes)
    if lacking:
        raise RayError(
            f"model is {model}, but there is no such directory on {', '.join(lacking)}; copy it there, give a path "
            "that all nodes share, or require a resource that these nodes lack (ray_actor_options, "
            "api_ray_actor_options)"
        )


def nodes_without(path: str, nodes: Sequence[Node]) -> list[str]:
    """The addresses of the nodes that have no directory or file `path`, or do not report in time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def has_model(path: str) -> bool:  # sent by value: a node needs only Python for it
        import os

        return os.path.exists(path)

    look = ray.remote(num_cpus=0, max_retries=0)(has_model)
    asked = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(path): node
        for node in nodes
    }
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SECONDS_TO_LOOK)
    having = {asked[one].id for one in answered if ray.get(one)}
    return [node.address for node in nodes if node.id not in having]
