"""The arguments of `build_app`: options of `pointsman serve`, under the same names, and options of the deployments.

    model=demo num_blocks=512 order=priority               options of each replica, with the checks of the command line
    num_replicas=2 ray_actor_options='{"num_cpus": 2}'     options of the deployment of engines, with Serve's names

`serve run` passes text. Numbers and yes/no are parsed from it, and mappings and lists are read as JSON. A configuration
file of Serve passes values with their types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pointsman.cli.config_file import KINDS, option_type, typed
from pointsman.cli.errors import CommandError
from pointsman.cli.serve import FILE_OPTIONS, ServeSettings, serve_settings
from pointsman.core.errors import did_you_mean

NO_MEANING = {
    "host": "Serve's proxies listen; set http_options in a configuration file of Serve, or use serve start --http-host",
    "port": "Serve's proxies listen; set http_options in a configuration file of Serve, or use serve start --http-port",
    "drain_delay": "Serve's proxies stop sending requests by themselves; leave drain_delay out",
}
"""Options of `pointsman serve` that have no meaning on a Ray cluster, each with the remedy."""
SERVE_OPTIONS: dict[str, Any] = {
    "num_replicas": int,
    "autoscaling_config": dict,
    "ray_actor_options": dict,
    "max_replicas_per_node": int,
    "placement_group_bundles": list,
    "placement_group_strategy": str,
    "health_check_period_s": float,
    "health_check_timeout_s": float,
    "api_ray_actor_options": dict,
    "check_resources": bool,
}
"""Options of the deployments, with their types: Serve's own, and two of Pointsman's (the last two)."""
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class RayError(ValueError):
    """An argument or the cluster is wrong; the message is one line with the value, the limit and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """The arguments of `build_app`, checked as far as possible without a cluster."""

    serve: ServeSettings
    """Settings of each replica, and of the API."""
    num_replicas: int = 1
    """Number of replicas of engines; with autoscaling, the maximum number."""
    autoscaling: dict[str, Any] | None = None
    """Serve's `autoscaling_config` without the keys that this application sets itself; None: a fixed number of
    replicas.
    """
    target_ongoing_requests: float | None = None
    """Target number of open requests for each replica, from `autoscaling_config`; None: the number of requests that the
    replica's engines can run at the same time."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Options of the deployment of engines."""
    api_actor_options: dict[str, Any] = field(default_factory=dict)
    """`ray_actor_options` of the API's deployment."""
    check_resources: bool = True
    """Whether it is an error if the cluster lacks the nodes for all replicas."""

    @property
    def engines_per_replica(self) -> int:
        """Number of engine processes in each replica."""
        return int(self.serve.options.get("data_parallel_size", 1))

    @property
    def num_engines(self) -> int:
        """Maximum number of engines at the same time."""
        return self.num_replicas * self.engines_per_replica


def read_arguments(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> RaySettings:
    """Check arguments by name, and convert them to settings.

    Args:
        arguments: the arguments, as Serve passes them.
        environment: environment variables; these may hold secrets.

    Raises:
        RayError: an argument is unknown, has a wrong type, or is out of range.
    """
    values: dict[str, Any] = {}
    for given, value in arguments.items():
        name = str(given).replace("-", "_")
        if name in NO_MEANING:
            raise RayError(f"{given} has no effect on Ray: {NO_MEANING[name]}")
        if name in values:
            raise RayError(f"{given} is given twice; leave one out")
        if name in SERVE_OPTIONS:
            values[name] = read_value(name, value, SERVE_OPTIONS[name])
        elif name == "config":
            values[name] = read_value(name, value, str)
        elif name in FILE_OPTIONS:
            kind = option_type(FILE_OPTIONS[name])
            try:
                values[name] = typed("arguments", name, read_value(name, value, kind), FILE_OPTIONS[name])
            except CommandError as error:
                raise RayError(str(error)) from None
        else:
            near = did_you_mean(name, [*FILE_OPTIONS, *SERVE_OPTIONS]).rstrip()
            hint = near or "pointsman serve --help lists the options of the server"
            raise RayError(f"{given} is not an argument of build_app; {hint}")
    own = {name: values.pop(name) for name in SERVE_OPTIONS if name in values}
    config = values.pop("config", None)
    try:
        serve = serve_settings(values, config, environment)
    except CommandError as error:
        raise RayError(str(error)) from None
    return add_deployment_options(serve, own)


def read_value(name: str, value: Any, kind: Any) -> Any:
    """The value of an argument, with the type `kind`; text is converted to this type.

    Raises:
        RayError: the text cannot be converted, or the value has a wrong type.
    """
    if not isinstance(value, str) or kind is str:
        read = value
    elif kind is bool:
        read = WORDS.get(value.lower(), value)
    elif kind in (int, float):
        try:
            read = kind(value)
        except ValueError:
            read = value
    elif kind == list[str]:
        read = _parse_json_or(value, value) if value.startswith("[") else value
    else:
        read = _parse_json_or(value, value)
    if kind is float and isinstance(read, int) and not isinstance(read, bool):
        read = float(read)
    if kind in (bool, int, float, dict, list) and (
        not isinstance(read, kind) or (kind is not bool and isinstance(read, bool))
    ):
        raise RayError(f"{name} is {value!r}; it must be {NAMES.get(kind) or KINDS[kind]}")
    return read


NAMES: dict[Any, str] = {dict: "a mapping, in text as JSON, like '{\"num_cpus\": 2}'", list: "a list, in text as JSON"}


def _parse_json_or(text: str, default: Any) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return default


def add_deployment_options(serve: ServeSettings, own: dict[str, Any]) -> RaySettings:
    """The settings of the application, from settings for `pointsman serve` and the options of the deployments (`own`).

    Raises:
        RayError: an option is out of range, or two options contradict each other.
    """
    own = dict(own)
    engines = int(serve.options.get("data_parallel_size", 1))
    if engines < 1:
        raise RayError(f"data_parallel_size is {engines}, but each replica runs at least one engine; give at least 1")
    num_replicas = own.pop("num_replicas", None)
    autoscaling = own.pop("autoscaling_config", None)
    target = None
    if autoscaling is not None:
        if num_replicas is not None:
            raise RayError("num_replicas and autoscaling_config both set the number of replicas; give one of them")
        autoscaling, target = _split_autoscaling_config(autoscaling)
        num_replicas = autoscaling["max_replicas"]
    elif num_replicas is None:
        num_replicas = 1
    if num_replicas < 1:
        raise RayError(f"num_replicas is {num_replicas}; it must be at least 1")
    actor_options = dict(own.pop("ray_actor_options", {}))
    if "placement_group_bundles" not in own:
        num_cpus = actor_options.setdefault("num_cpus", engines)
        if isinstance(num_cpus, bool) or not isinstance(num_cpus, (int, float)) or num_cpus < 0:
            raise RayError(f"ray_actor_options: num_cpus is {num_cpus!r}; it must be a number, 0 or more")
        if 0 < num_cpus < engines:
            raise RayError(
                f"data_parallel_size is {engines}, but num_cpus in ray_actor_options is {num_cpus:g}; each engine "
                f"needs a core, so raise num_cpus to {engines}, or lower data_parallel_size"
            )
    own.setdefault("health_check_period_s", HEALTH_CHECK_PERIOD)
    return RaySettings(
        serve=serve,
        num_replicas=num_replicas,
        autoscaling=autoscaling,
        target_ongoing_requests=target,
        api_actor_options={"num_cpus": 0, **own.pop("api_ray_actor_options", {})},
        check_resources=own.pop("check_resources", True),
        engine_options={"ray_actor_options": actor_options, **own},
    )


HEALTH_CHECK_PERIOD = 1.0
"""Seconds between checks that the engines of a replica run; Serve replaces the replica after three failed checks."""


def _split_autoscaling_config(config: dict[str, Any]) -> tuple[dict[str, Any], float | None]:
    """Split `autoscaling_config` into the configuration for Serve and the target of open requests for each replica."""
    config = dict(config)
    if "policy" in config:
        raise RayError(
            "autoscaling_config: policy cannot be set, as this application has its own policy; leave policy out"
        )
    target = config.pop("target_ongoing_requests", None)
    if target is not None and (isinstance(target, bool) or not isinstance(target, (int, float)) or not target > 0):
        raise RayError(f"autoscaling_config: target_ongoing_requests is {target!r}; it must be a number above 0")
    config.setdefault("min_replicas", 1)
    config.setdefault("max_replicas", max(1, config["min_replicas"]))
    for name in ("min_replicas", "max_replicas"):
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RayError(f"autoscaling_config: {name} is {value!r}; it must be an integer of at least 1")
    if config["max_replicas"] < config["min_replicas"]:
        raise RayError(
            f"autoscaling_config: max_replicas is {config['max_replicas']}, but min_replicas is "
            f"{config['min_replicas']}; raise max_replicas"
        )
    return config, target
