"""From knobs as the user gave them to arguments of `Engine`: a preset underneath, sizes in bytes, checked at once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pointsman.cli.options import NUMBERS_OR_WORDS
from pointsman.cli.units import parse_size
from pointsman.core import ConfigError, Scheduler, SchedulerConfig
from pointsman.core.kv.connector import RecordedConnector
from pointsman.core.presets import PRESETS
from pointsman.engine.kv.events import KVEventsConfig
from pointsman.engine.params.engine_args import SCHEDULER_DEFAULTS, SCHEDULER_NAMES, KVKnobs, speculation_knobs

SIZES = {"kv_cache_bytes", "kv_offload_bytes", "kv_store_bytes"}
"""Knobs that may be given like 64MiB."""


def engine_arguments(knobs: Mapping[str, Any], preset: str | None = None) -> dict[str, Any]:
    """Arguments of `Engine` for the knobs that were given, on top of those of a preset.

    The scheduler's knobs are checked here, rather than after a model has been loaded for seconds.

    Raises:
        ValueError: a value is out of range, two knobs contradict each other, or no preset has that name.
    """
    arguments = dict(knobs)
    if (num_threads := arguments.pop("threads", None)) is not None:
        if num_threads < 1:
            raise ValueError(f"--threads is {num_threads}; it must be at least 1")
        arguments["num_threads"] = num_threads
    if arguments.get("stream_interval", 1) < 1:
        raise ValueError(f"--stream-interval is {arguments['stream_interval']}; it must be at least 1: every token")
    if "kv_events_config" in arguments:
        arguments["kv_events_config"] = kv_events_config(arguments["kv_events_config"])
    if "speculative_config" in arguments:
        config = json_object("speculative_config", arguments.pop("speculative_config"))
        arguments |= speculation_knobs(config, arguments)
    if not 0 <= arguments.get("watchdog_seconds", 0) < math.inf:
        raise ValueError(f"--watchdog-seconds is {arguments['watchdog_seconds']}; give 0 or more seconds, 0 for never")
    for name in SIZES & arguments.keys():
        arguments[name] = size(arguments[name])
    if "kv_cache_bytes" in arguments and "num_blocks" in arguments:
        raise ValueError("--num-blocks and --kv-cache-bytes both set the size of the pool; give one of them")
    if "draft_table" in arguments:
        arguments["draft_table"] = draft_table(arguments["draft_table"])
    for name in NUMBERS_OR_WORDS & arguments.keys():
        arguments[name] = number_or_word(arguments[name])
    own = {name: value for name, value in arguments.items() if name in SCHEDULER_NAMES}
    preset = "default" if preset is None else preset
    if preset not in PRESETS:  # the scheduler knows more: systems to compare with, which are not for serving
        raise ConfigError(f"no preset is called {preset!r}; choose one of {', '.join(PRESETS)}")
    defaults = {name: value for name, value in SCHEDULER_DEFAULTS.items() if name not in PRESETS[preset]}
    stand_ins = {"num_blocks": 1, "max_model_len": 1}  # which the model decides
    config = SchedulerConfig.preset(preset, **(stand_ins | defaults | own))
    kv_knobs = KVKnobs(**{field.name: arguments[field.name] for field in fields(KVKnobs) if field.name in arguments})
    kv_knobs.check(config)
    Scheduler(config, connector=RecordedConnector(saves_evicted=False) if kv_knobs.is_on else None)
    return PRESETS[preset] | arguments


def kv_events_config(text: str) -> dict[str, Any]:
    """The fields of `KVEventsConfig`, from JSON.

    Raises:
        ValueError: it is no JSON object, or not of such fields.
    """
    values = json_object("kv_events_config", text)
    KVEventsConfig.of(values)
    return values


def json_object(name: str, text: str) -> dict[str, Any]:
    """The value of a knob that is written in JSON.

    Raises:
        ValueError: it is no JSON object.
    """
    option = f"--{name.replace('_', '-')}"
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} is {text!r}, no JSON ({error.msg}); write it like {{}}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{option} is {text!r}; it must be a JSON object, like {{}}")
    return values


def draft_table(text: str) -> tuple[tuple[int, ...], ...]:
    """Pairs of running requests and drafts, of text like 16:2,64:0.

    Raises:
        ValueError: it is none.
    """
    try:
        pairs = tuple(tuple(int(number) for number in pair.split(":")) for pair in text.split(","))
    except ValueError:
        pairs = ()
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"draft_table is {text!r}; give pairs of running requests and drafts, like 16:2,64:0")
    return pairs


def number_or_word(value: int | str) -> int | str:
    """A whole number as such; whatever else it is, the scheduler's configuration knows, or says what it must be."""
    try:
        return int(value)
    except ValueError:
        return value


def size(value: int | str) -> int:
    """Bytes, of a number or of text like 64MiB.

    Raises:
        ValueError: it means none, or less than one byte.
    """
    return parse_size(str(value))
