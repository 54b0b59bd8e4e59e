"""Pointsman on a Ray cluster: a Ray Serve application.

    serve run pointsman.integrations.ray:build_app model=/models/qwen3-0.6b num_replicas=2

    client -> Serve's proxy -> Api (one replica) -> engines, in the replicas of EngineHost, on any node

`Api` is the API process of `pointsman serve`, and its engines are processes on the nodes of the cluster, which connect
to it (`server/service/remote.py`). So requests are routed by exact blocks of tokens, and when an engine, its replica or
its node dies, its requests go on in another one. Serve places the replicas, replaces those that die or whose engines
did, and scales them by the requests that wait.

    arguments.py    what `serve run` passes: the options of `pointsman serve`, and Serve's own
    cluster.py      what is checked before anything starts
    deployments.py  the two deployments
    status.py       what the API reads from the application's status
    autoscaling.py  how many replicas are wanted

The one entry point that is not below `pointsman.cli`: to a cluster it is what `pointsman serve` is to a machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pointsman.integrations.ray.arguments import RayError, read_arguments


def build_app(arguments: Mapping[str, Any]) -> Any:
    """The Serve application. For `serve run`, `serve build` and the configuration files of Serve.

    Args:
        arguments: options by name, as text (`serve run`) or with their types (a configuration file): those of
            `pointsman serve`, which hold for each replica, and those of a deployment (`arguments.py`).

    Raises:
        RayError: an option is wrong, the cluster cannot be reached, is too small for the replicas, has not the model,
            or the port of Serve's proxy is taken.
    """
    try:
        settings = read_arguments(arguments, os.environ)
        try:
            from pointsman.integrations.ray.cluster import check_cluster
            from pointsman.integrations.ray.deployments import application
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("pointsman"):
                raise
            raise RayError(f"this needs {error.name}; install it with: pip install 'pointsman[server,ray]'") from None
        check_cluster(settings)
        return application(settings)
    except RayError as error:
        raise for_the_caller(error) from None


def for_the_caller(error: RayError) -> Exception:
    """The error as one line, where the caller is a command line; else as it is."""
    import click

    if click.get_current_context(silent=True) is None:
        return error

    class Wrong(click.ClickException):
        exit_code = 2

    return Wrong(str(error))
