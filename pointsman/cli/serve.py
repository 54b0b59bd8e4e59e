"""Settings of `pointsman serve`: computes the settings of engine and server from the options.

A value comes from the command line, otherwise from the configuration file, otherwise from the preset, otherwise from
the default of the engine or the server. Secrets come only from the command line, a file of their own, or the
environment; nothing else comes from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pointsman.cli import options
from pointsman.cli.config_file import read_config
from pointsman.cli.errors import CommandError
from pointsman.cli.knobs import engine_arguments, size
from pointsman.cli.server_client import API_KEY_VARIABLE, OPERATOR_KEY_VARIABLE
from pointsman.core.observe.side_file import WhenFull
from pointsman.files import MAX_MESSAGE, MAX_SETTINGS, MAX_WRITTEN, read_input, shown
from pointsman.server.config import ServerConfig, is_key
from pointsman.server.service.heartbeat import MIN_TIMEOUT

KEY_FILES = {"API": "api_key_file", "operator": "operator_key_file"}
FILE_OPTIONS = {"preset": options.Preset, **options.SERVER, **options.KNOBS}
"""Options that a configuration file may set, except secrets."""
RUN_OPTIONS = (
    "data_parallel_size",
    "engine_timeout",
    "log_stats_interval",
    "max_engine_restarts",
    "max_resumes",
    "max_step_retries",
    "record",
    "record_when_full",
    "warm_up",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of the engine and the server."""

    engine: dict[str, Any]
    """Arguments of `Engine`, the model among them."""
    server: ServerConfig
    options: dict[str, Any]
    """The other arguments of `pointsman.server.serve.run`."""
    places: Mapping[str, str]
    """File and line that set a value, by the name that an error message uses (an option, an API key)."""

    def message_with_place(self, error: ValueError) -> str:
        """The error's message. If the message names a value from a file, the place of the first such value is
        prefixed."""
        return _message_with_place(error, self.places)


def serve_settings(
    values: Mapping[str, Any],
    config_path: str | None,
    environment: Mapping[str, str],
    default_model: Callable[[], str] = lambda: "demo",
) -> ServeSettings:
    """The settings of `pointsman serve`, checked as far as possible without a model.

    Args:
        values: options of the command line by name; None or an empty list if not given.
        config_path: path of the configuration file; None: there is no file.
        environment: environment variables, which may hold secrets.
        default_model: function that returns the model if neither the command line nor the file names one.

    Raises:
        CommandError: a value or a file cannot be used.
    """
    settings, places = read_config(config_path, FILE_OPTIONS) if config_path is not None else ({}, {})
    given = options.given(values)
    settings |= given
    places = {name: place for name, place in places.items() if name not in given}
    places |= {f"{kind} key": settings[name] for kind, name in KEY_FILES.items() if name in settings}
    preset = settings.pop("preset", None)
    knobs = {name: settings.pop(name) for name in options.KNOBS if name in settings}
    model = settings.pop("model") if "model" in settings else default_model()
    if model:  # an empty name is refused with the model, in words about the model
        settings.setdefault("served_model_name", [model])
    if "chat_template" in settings:
        places["chat_template"] = settings["chat_template"]
    others = {name: settings.pop(name) for name in RUN_OPTIONS if name in settings}
    try:
        engine = {"model": model, **engine_arguments(knobs, preset)}
        if "seed" in settings:
            engine["seed"] = settings.pop("seed")
        _check_run_options(others)
        server = _server_config(settings, environment)
    except ValueError as error:
        raise CommandError(_message_with_place(error, places)) from None
    return ServeSettings(engine=engine, server=server, options=others, places=places)


def _message_with_place(error: ValueError, places: Mapping[str, str]) -> str:
    message = shown(str(error), MAX_MESSAGE)
    words = message.replace("-", "_")
    named = next((place for name, place in places.items() if re.search(rf"\b{name}\b", words)), None)
    return message if named is None or named in message else f"{named}: {message}"


def _check_run_options(values: dict[str, Any]) -> None:
    """Check the options that belong neither to the engine nor to `ServerConfig`; an interval of 0 seconds between
    statistics lines becomes None.

    Raises:
        CommandError, ValueError: an option is out of range, or the recording cannot be written.
    """
    interval, retries, record = (values.get(name) for name in ("log_stats_interval", "max_step_retries", "record"))
    if interval is not None:
        if not 0 <= interval < float("inf"):
            raise ValueError(f"--log-stats-interval is {interval:g}; it must be at least 0 seconds (0: no lines)")
        values["log_stats_interval"] = interval or None
    if retries is not None and retries < 0:
        raise ValueError(f"--max-step-retries is {retries}; it must be at least 0 (0: no retries)")
    if (restarts := values.get("max_engine_restarts")) is not None and restarts < 0:
        raise ValueError(f"--max-engine-restarts is {restarts}; it must be at least 0 (0: no restarts)")
    if (resumes := values.get("max_resumes")) is not None and resumes < 0:
        raise ValueError(f"--max-resumes is {resumes}; it must be at least 0 (0: requests of a dead engine fail)")
    if (timeout := values.get("engine_timeout")) and not MIN_TIMEOUT <= timeout < float("inf"):
        raise ValueError(
            f"--engine-timeout is {timeout:g}; it must be at least {MIN_TIMEOUT:g} seconds, or 0 (no timeout)"
        )
    if (when_full := values.get("record_when_full")) is not None:
        if when_full not in get_args(WhenFull):
            raise ValueError(f"--record-when-full is {when_full!r}; it must be {' or '.join(get_args(WhenFull))}")
        if record is None:
            raise ValueError("--record-when-full has no effect without --record; name its file or leave it out")
    if record is not None:
        _check_writable(record)


def _server_config(settings: dict[str, Any], environment: Mapping[str, str]) -> ServerConfig:
    settings = dict(settings)
    api_keys, names = _pop_keys("api", settings, environment.get(API_KEY_VARIABLE))
    operator_keys, _ = _pop_keys("operator", settings, environment.get(OPERATOR_KEY_VARIABLE))
    for name in ("max_request_bytes", "max_total_request_bytes"):
        if name in settings:
            settings[name] = size(settings[name], name)
    if "chat_template" in settings:
        settings["chat_template"] = _read_text_file("chat template", settings["chat_template"], MAX_WRITTEN)
    settings["served_model_name"] = tuple(settings.get("served_model_name", ()))
    settings["allowed_host"] = tuple(settings.get("allowed_host", ()))
    if any(names):
        settings["api_key_names"] = names
    return ServerConfig(api_keys=api_keys, operator_keys=operator_keys, **settings)


def _pop_keys(kind: str, settings: dict[str, Any], variable: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The keys from the command line, otherwise from the file, otherwise from the variable, with their names. Removes
    the keys from `settings`. API keys in a file may have names (`name:key`); all other keys have the name "".

    A file or a variable without a key is an error, because the operator set it to restrict access.

    Args:
        kind: "api" or "operator".
        settings: settings of the server.
        variable: value of the environment variable; None: it is not set.
    """
    name = "API key" if kind == "api" else "operator key"
    given, path = settings.pop(f"{kind}_key", []), settings.pop(f"{kind}_key_file", None)
    if given:
        return tuple(given), ("",) * len(given)
    if path is not None:
        text = _read_text_file(f"{name}s", path, MAX_SETTINGS)
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if not lines:
            raise CommandError(f"{path} holds no {name}; write one a line, or leave --{kind}-key-file out")
        keys, names = _split_names(lines, path) if kind == "api" else ([line for _, line in lines], [""] * len(lines))
        for (number, _), key in zip(lines, keys, strict=True):
            if not is_key(key):
                raise CommandError(f"{path}, line {number}: the {name} holds characters other than printable ASCII")
        return tuple(keys), tuple(names)
    if variable is not None:
        if not variable.strip():
            which = API_KEY_VARIABLE if kind == "api" else OPERATOR_KEY_VARIABLE
            raise CommandError(f"the environment variable {which} is empty; set it to a key, or unset it")
        return (variable.strip(),), ("",)
    return (), ()


def _split_names(lines: list[tuple[int, str]], path: str) -> tuple[list[str], list[str]]:
    """The keys and names of numbered lines like `key` or `name:key`.

    Raises:
        CommandError: a line with a colon lacks its name or its key.
    """
    keys, names = [], []
    for place, (number, line) in enumerate(lines, 1):
        name, colon, key = (part.strip() for part in line.partition(":"))
        if colon and not (name and key):
            lacks = "key after" if name else "name before"
            raise CommandError(
                f"{path}, line {number}: API key {place} has no {lacks} the colon; write NAME:KEY, or KEY alone"
            )
        keys.append(key if colon else name)
        names.append(name if colon else "")
    return keys, names


def _read_text_file(what: str, path: str, max_bytes: int) -> str:
    try:
        return read_input(path, max_bytes).decode("utf-8-sig")
    except OSError as error:
        raise CommandError(f"cannot read the {what} in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"the {what} in {path} is not UTF-8 text; save it as UTF-8") from None


def _check_writable(path: str) -> None:
    """Raise if a recording cannot be written, before a model is loaded. The content of the file is not changed yet."""
    try:
        with Path(path).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise CommandError(f"cannot write the recording {path}: {error.strerror}") from None
