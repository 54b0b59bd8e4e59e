"""Pointsman on a Ray cluster: a Ray Serve application.

    serve run pointsman.integrations.ray:build_app model=/models/qwen3-0.6b num_replicas=2

    client -> Serve's proxy -> Api (one replica) -> engines, in the replicas of EngineHost, on any node

`Api` is the API process of `pointsman serve`. Its engines are processes on the nodes of the cluster; each engine
connects to `Api` (`server/service/remote.py`). So requests are routed by exact blocks of tokens. When an engine, its
replica or its node fails, another engine continues the requests of that engine. Serve places the replicas, scales them
by the number of waiting requests, and replaces replicas that fail or whose engines have failed.

    arguments.py    the arguments of `serve run`: options of `pointsman serve`, and Serve's own
    cluster.py      checks of the cluster before anything starts
    deployments.py  the two deployments
    status.py       reads the application's status for the API
    autoscaling.py  computes the number of replicas

This is the one entry point that is not below `pointsman.cli`: it starts a server on a cluster, as `pointsman serve`
starts a server on one machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pointsman.integrations.ray.arguments import RayError, read_arguments


def build_app(arguments: Mapping[str, Any]) -> Any:
    """Build the Serve application, for `serve run`, `serve build` and the configuration files of Serve.

    Args:
        arguments: options by name, as text (`serve run`) or with their types (a configuration file): the options of
            `pointsman serve`, which apply to each replica, and the options of a deployment (`arguments.py`).

    Raises:
        RayError: an option is wrong; the cluster cannot be reached, is too small for the replicas, or lacks the model;
            or the port of Serve's proxy is in use.
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
        raise shorten_for_cli(error) from None


def shorten_for_cli(error: RayError) -> Exception:
    """The error as one line if the caller is a command line; otherwise unchanged."""
    import click

    if click.get_current_context(silent=True) is None:
        return error

    class Wrong(click.ClickException):
        exit_code = 2

    return Wrong(str(error))
