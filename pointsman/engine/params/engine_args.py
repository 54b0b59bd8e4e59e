"""The scheduler's knobs as arguments of `Engine`: the fields of `SchedulerConfig`, without those that an engine sets.

It imports no PyTorch, so that the command line can check knobs before it loads a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pointsman.core import ConfigError, SchedulerConfig

DEFAULTS: Mapping[str, Any] = {"block_size": 32, "max_num_seqs": 64, "max_num_batched_tokens": 512}
"""Where an engine's defaults differ from those of `SchedulerConfig`: for small models on a CPU."""

_NOT_TAKEN = {
    "num_reserved_blocks": "the engine's KV pool has no reserved blocks",
    "enable_kv_cache_events": "events are kept when kv_events_config says where to publish them",
    "max_loras": "the engine has no adapters",
    "encoder_budget": "the engine has no encoder inputs",
    "encoder_cache_size": "the engine has no encoder inputs",
}

NAMES = frozenset(field.name for field in fields(SchedulerConfig)) - _NOT_TAKEN.keys()
"""What an engine takes, by name."""


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SchedulerConfig`: the knobs that were given, and an engine's defaults.

    Raises:
        TypeError: the scheduler has no such knob.
        ConfigError: it has, but with an engine it would have no effect.
    """
    for name, value in given.items():
        if name in _NOT_TAKEN:
            raise ConfigError(f"{name} is {value!r}, but {_NOT_TAKEN[name]}; leave it out")
        if name not in NAMES:
            raise TypeError(f"Engine has no argument {name!r}, and SchedulerConfig has no such field")
    return {**DEFAULTS, **given}
