"""The knobs about KV outside the pool, for whoever checks them before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman.core import ConfigError, SchedulerConfig

STORE_ROLES = ("both", "producer", "consumer")
"""What an engine does with the store: write what it computed, read what is there, or both."""


@dataclass(frozen=True, slots=True)
class KVKnobs:
    """Where KV goes besides the pool, as the arguments of `Engine` say it."""

    kv_offload_bytes: int | None = None
    kv_store: str | Path | None = None
    kv_store_role: str = "both"
    kv_store_bytes: int | None = None

    @property
    def is_on(self) -> bool:
        """Whether there is any place for KV besides the pool."""
        return self.kv_offload_bytes is not None or self.kv_store is not None

    @property
    def loads_later(self) -> bool:
        """Whether requests may wait for loads."""
        return self.kv_store is not None and self.kv_store_role != "producer"

    def check(self, config: SchedulerConfig) -> None:
        """Whether they are in range, and fit each other and the scheduler's knobs.

        Raises:
            ConfigError: they do not.
        """
        for name in ("kv_offload_bytes", "kv_store_bytes"):
            value: Any = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} is {value!r}; give a number of bytes of at least 1, or None")
        if self.kv_store_role not in STORE_ROLES:
            raise ConfigError(f"kv_store_role is {self.kv_store_role!r}; choose one of {', '.join(STORE_ROLES)}")
        if self.kv_store is None and (self.kv_store_role != "both" or self.kv_store_bytes is not None):
            name = "kv_store_role" if self.kv_store_bytes is None else "kv_store_bytes"
            raise _without_effect(name, getattr(self, name), "there is no kv_store; give it a directory")
        if self.kv_store_role == "consumer" and self.kv_store_bytes is not None:
            raise _without_effect("kv_store_bytes", self.kv_store_bytes, "a consumer writes nothing; set it elsewhere")
        for name in ("kv_offload_bytes", "kv_store"):
            if getattr(self, name) is not None and not config.enable_prefix_caching:
                raise _without_effect(name, getattr(self, name), "enable_prefix_caching is off; switch it on")
        for name, default in (("kv_load_failure_policy", "recompute"), ("kv_load_timeout", None)):
            if getattr(config, name) != default and not self.loads_later:
                why = "no request waits for KV; give a kv_store, in the role both or consumer"
                raise _without_effect(name, getattr(config, name), why)


def _without_effect(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{name} is {str(value)!r} and would have no effect, because {why}")
