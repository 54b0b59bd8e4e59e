"""Fields of requests that only policies read, as clients set them in `vllm_xargs`; warns of those without effect."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from pointsman.core import SchedulerConfig
from pointsman.core.errors import did_you_mean
from pointsman.core.policy.registry import fields_read, readers_of
from pointsman.files import represented

logger = logging.getLogger("vllm.pointsman")  # vLLM's log configuration applies to it

PREFIX = "pointsman_"
FOR_POLICIES = {
    "pointsman_tenant": "tenant",
    "pointsman_ttft_target": "ttft_target",
    "pointsman_retention": "retention",
}
"""Keys of `extra_args` in sampling parameters (`vllm_xargs` of a request over HTTP), with the names of the core's
fields."""
MAX_WARNED = 16
"""Maximum number of keys that a scheduler warns of, since clients choose the keys."""


class FieldWarnings:
    """Logs one warning for each key of a request that has no effect.

    Args:
        config: the configuration of the scheduler, whose policies read the fields.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        # Films show the tenant, whether or not a policy reads it.
        read = fields_read(config.to_dict()) | {"tenant"}
        self._unread = {key: field for key, field in FOR_POLICIES.items() if field not in read}
        self._warned: set[str] = set()

    def check(self, extra_args: Mapping[str, Any] | None) -> None:
        """Warn of the keys in a request's `extra_args` that have no effect and that no warning has named yet."""
        for key in self._without_effect(extra_args or {}):
            if key not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(key)
                logger.warning("%s", self._warning(key))

    def _without_effect(self, keys: Mapping[str, Any]) -> Iterator[str]:
        for key in keys:
            if key in self._unread or (key.startswith(PREFIX) and key not in FOR_POLICIES):
                yield key

    def _warning(self, key: str) -> str:
        if key in self._unread:
            readers = " or ".join(readers_of(self._unread[key]))
            return (
                f"a request has {key} in vllm_xargs, and no policy here reads it, so it has no effect: leave it out, "
                f"or set {readers} in --additional-config"
            )
        return (
            f"a request has {represented(key)} in vllm_xargs, which is unknown and has no effect; "
            f"{did_you_mean(key, FOR_POLICIES)}the keys are {', '.join(FOR_POLICIES)}"
        )
