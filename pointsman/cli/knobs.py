"""Knobs: turns options of the command line into arguments of `Engine`: presets, sizes in bytes, checks before
loading."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pointsman.cli.scheduler_options import NUMBERS_OR_WORDS
from pointsman.core import ConfigError, Scheduler, SchedulerConfig
from pointsman.core.kv.connector import RecordedConnector
from pointsman.core.presets import PRESETS
from pointsman.engine.kv.events import KVEventsConfig
from pointsman.engine.machine import has_gpu_driver
from pointsman.engine.params.engine_args import (
    SCHEDULER_NAMES,
    KVKnobs,
    check_utilization,
    scheduler_defaults,
    speculation_knobs,
    wants_one_group,
)
from pointsman.files import represented

SIZES = {"kv_cache_bytes", "kv_offload_bytes", "kv_store_bytes"}
"""Knobs that accept sizes like 64MiB."""
NO_LIMITS = "none"
"""Value of `--token-limit` that turns all token limits off."""
_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= {f"{_prefix}ib": 1024**_power, _prefix: 1024**_power, f"{_prefix}b": 1000**_power}
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def engine_arguments(knobs: Mapping[str, Any], preset: str | None = None) -> dict[str, Any]:
    """Arguments of `Engine`: those of a preset, overridden by the given knobs.

    The scheduler's knobs are checked here, before seconds are spent on loading a model.

    Raises:
        ValueError: a value is out of range, two knobs contradict each other, or there is no such preset.
    """
    arguments = dict(knobs)
    if (num_threads := arguments.pop("threads", None)) is not None:
        if num_threads < 1:
            raise ValueError(f"--threads is {num_threads}; it must be at least 1")
        arguments["num_threads"] = num_threads
    if arguments.get("stream_interval", 1) < 1:
        raise ValueError(f"--stream-interval is {arguments['stream_interval']}; it must be at least 1 (every token)")
    if "kv_events_config" in arguments:
        arguments["kv_events_config"] = kv_events_config(arguments["kv_events_config"])
    if "speculative_config" in arguments:
        speculative_config = json_object("speculative_config", arguments.pop("speculative_config"))
        arguments |= speculation_knobs(speculative_config, arguments)
    if not 0 <= arguments.get("watchdog_seconds", 0) < math.inf:
        raise ValueError(
            f"--watchdog-seconds is {arguments['watchdog_seconds']}; it must be at least 0 (0: no watchdog)"
        )
    for name in SIZES & arguments.keys():
        arguments[name] = size(arguments[name], name)
    if "kv_cache_bytes" in arguments and "num_blocks" in arguments:
        raise ValueError("--num-blocks and --kv-cache-bytes both set the size of the pool; give one of them")
    arguments = scheduler_values(arguments)
    own = {name: value for name, value in arguments.items() if name in SCHEDULER_NAMES}
    preset = "default" if preset is None else preset
    if preset not in PRESETS:  # `SchedulerConfig` also has presets of other systems, for comparison and not for serving
        raise ConfigError(f"no preset is called {preset!r}; choose one of {', '.join(PRESETS)}")
    # Only the engine knows whether PyTorch can use the GPU; it checks the knobs again with its defaults.
    device = arguments.get("device", "auto")
    on_gpu = device.startswith("cuda") or (device == "auto" and has_gpu_driver())
    device_type = "cuda" if on_gpu else "cpu"
    check_utilization(arguments.get("gpu_memory_utilization"), device_type)
    scheduler = scheduler_defaults(PRESETS[preset] | own, device_type)
    defaults = {name: value for name, value in scheduler.items() if name not in PRESETS[preset]}
    stand_ins = {"num_blocks": 1, "max_model_len": 1}  # the model determines these knobs
    config = SchedulerConfig.preset(preset, **(stand_ins | defaults | own))
    kv_knobs = KVKnobs(**{field.name: arguments[field.name] for field in fields(KVKnobs) if field.name in arguments})
    kv_knobs.check(config)
    wants_one_group(arguments.get("disable_hybrid_kv_cache_manager"))
    Scheduler(config, connector=RecordedConnector(saves_evicted=False) if kv_knobs.is_on else None)
    return PRESETS[preset] | arguments


def scheduler_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values; scheduler knobs that are text on the command line are parsed.

    Raises:
        ValueError: a text does not have the form of its knob.
    """
    values = dict(given)
    readers = {
        "draft_table": draft_table,
        "token_limits": token_limits,
        **dict.fromkeys(NUMBERS_OR_WORDS, number_or_word),
    }
    for name in readers.keys() & values.keys():
        values[name] = readers[name](values[name])
    return values


def kv_events_config(text: str) -> dict[str, Any]:
    """The fields of `KVEventsConfig`, from JSON.

    Raises:
        ValueError: `text` is not a JSON object, or has other fields.
    """
    values = json_object("kv_events_config", text)
    KVEventsConfig.of(values)
    return values


def json_object(name: str, text: str) -> dict[str, Any]:
    """The value of a knob that is written in JSON.

    Raises:
        ValueError: `text` is not a JSON object.
    """
    option = f"--{name.replace('_', '-')}"
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} is {text!r}, not JSON ({error.msg}); write it like {{}}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{option} is {text!r}; it must be a JSON object, like {{}}")
    return values


def draft_table(text: str) -> tuple[tuple[int, ...], ...]:
    """The pairs (number of running requests, number of drafts) in a text like 16:2,64:0.

    Raises:
        ValueError: `text` does not have this form.
    """
    try:
        pairs = tuple(tuple(int(number) for number in pair.split(":")) for pair in text.split(","))
    except ValueError:
        pairs = ()
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"draft_table is {text!r}; give pairs of running requests and drafts, like 16:2,64:0")
    return pairs


def token_limits(names: Sequence[str]) -> list[str]:
    """The named token limits; "none" alone means an empty list, which an option cannot express.

    Raises:
        ValueError: "none" is combined with other names.
    """
    if NO_LIMITS not in names:
        return list(names)
    if len(names) > 1:
        others = ", ".join(name for name in names if name != NO_LIMITS) or NO_LIMITS
        raise ValueError(f"--token-limit {NO_LIMITS} excludes all other limits, but {others} is given; leave one out")
    return []


def number_or_word(value: int | str) -> int | str:
    """`value` as an integer if it is one, otherwise the word, which the scheduler's configuration checks."""
    try:
        return int(value)
    except ValueError:
        return value


def size(value: int | str, name: str) -> int:
    """Bytes of "64MiB", "64M" (the same), "64MB" (64,000,000), "1.5GiB", or of a plain number.

    Args:
        name: name of the option, for errors.

    Raises:
        ValueError: `value` is not a size, or less than one byte.
    """
    text = str(value)
    found = _SIZE.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"{name} {represented(text)} is not a size; write for example 64MiB, 512KiB or 1.5GiB")
    num_bytes = int(float(found[1]) * _UNITS[found[2].lower()])
    if num_bytes < 1:
        raise ValueError(f"{name} {text!r} is less than one byte; write for example 64MiB")
    return num_bytes
