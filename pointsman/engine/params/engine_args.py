"""Checks the arguments of `Engine` before a model is loaded: for the scheduler, KV outside the pool and drafts.

| arguments | checked by |
| --- | --- |
| fields of `SchedulerConfig` | `with_defaults`; for an engine that streams, after `with_prefill_gap` |
| `gpu_memory_utilization` | `check_utilization` |
| `kv_offload_bytes`, `kv_store`, `kv_store_role`, `kv_store_bytes` | `KVKnobs.check` |
| `disable_hybrid_kv_cache_manager` | `wants_one_group` |
| `speculative_config`, in vLLM's form | `speculation_knobs`, which converts it to the other arguments |
| `prompt_lookup_min`, `prompt_lookup_max` | `check_prompt_lookup` |

This module imports no PyTorch, so that the command line can check arguments first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pointsman.core import ConfigError, SchedulerConfig

# --------------------------------------------------------------------------------------------------- the scheduler's

SCHEDULER_DEFAULTS: Mapping[str, Any] = {"block_size": 32, "max_num_seqs": 64, "max_num_batched_tokens": 512}
"""Scheduler knobs whose default for an engine on a CPU differs from that of `SchedulerConfig`; chosen for small
models."""
GPU_DEFAULTS: Mapping[str, Any] = {
    **SCHEDULER_DEFAULTS,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_steps_in_flight": 2,
}
"""Scheduler knobs whose default for an engine on a GPU differs from that of `SchedulerConfig`. The sizes of a step are
vLLM's for a server on an H100. With two steps in flight the host schedules the next step while the device computes."""

PREFILL_GAP = "prefill-gap"
"""Name of the default token limit of an engine that streams: it limits chunks so that decoding requests see no long
gap."""
CHUNK_KNOBS = (
    "enable_chunked_prefill",
    "first_chunk_only",
    "batching",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
)
"""Scheduler knobs that set how prompts are cut into chunks. If any of them differs from its default, `PREFILL_GAP` is
not added."""

_NOT_TAKEN = {
    "num_reserved_blocks": "the engine's KV pool has no reserved blocks",
    "kv_groups": "the engine derives the groups from the model's layers, unless disable_hybrid_kv_cache_manager is set",
    "enable_kv_cache_events": "the engine sets it when kv_events_config says where to publish events",
    "max_loras": "the engine has no adapters",
    "encoder_budget": "the engine has no encoder inputs",
    "encoder_cache_size": "the engine has no encoder inputs",
}

SCHEDULER_NAMES = frozenset(field.name for field in fields(SchedulerConfig)) - _NOT_TAKEN.keys()
"""Names of the scheduler's knobs that an engine accepts."""


def with_defaults(knobs: Mapping[str, Any], device_type: str = "cpu") -> dict[str, Any]:
    """Return the given knobs and, for knobs not given, an engine's defaults, as fields of `SchedulerConfig`.

    Args:
        device_type: type of the engine's device; "cuda": the defaults for a GPU, otherwise those for a CPU.

    Raises:
        TypeError: the scheduler has no such knob.
        ConfigError: a knob would have no effect in an engine.
    """
    for name, value in knobs.items():
        if name in _NOT_TAKEN:
            raise ConfigError(f"{name} is {value!r}, but {_NOT_TAKEN[name]}; leave it out")
        if name not in SCHEDULER_NAMES:
            raise TypeError(f"Engine has no argument {name!r}, and SchedulerConfig has no such field")
    return {**scheduler_defaults(knobs, device_type), **knobs}


def scheduler_defaults(knobs: Mapping[str, Any], device_type: str) -> dict[str, Any]:
    """An engine's default scheduler knobs, which depend on the given `knobs`.

    On a GPU the default is one step in flight if `num_draft_tokens` is set, because drafts need one step in flight. A
    token budget below the default `max_num_seqs` lowers this default, as in vLLM.
    """
    if device_type != "cuda":
        return dict(SCHEDULER_DEFAULTS)
    defaults = dict(GPU_DEFAULTS)
    if knobs.get("num_draft_tokens"):
        defaults["max_steps_in_flight"] = 1
    budget = knobs.get("max_num_batched_tokens")
    if isinstance(budget, int) and 0 < budget < defaults["max_num_seqs"]:
        defaults["max_num_seqs"] = budget
    return defaults


DEFAULT_UTILIZATION = 0.9
"""Default of `gpu_memory_utilization`, as in vLLM."""


def check_utilization(value: object, device_type: str) -> None:
    """Refuse a `gpu_memory_utilization` that is out of range, or that is given for a CPU.

    Args:
        value: the argument; None: it was not given.

    Raises:
        ConfigError: the value is refused.
    """
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {value!r}; give a share of the GPU's memory above 0 and at most 1, like 0.9"
        )
    if device_type != "cuda":
        raise ConfigError(
            f"gpu_memory_utilization is {value} and device is {device_type}, whose memory is not measured; give "
            "kv_cache_bytes or num_blocks, or leave it out"
        )


def with_prefill_gap(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Add the token limit `PREFILL_GAP` to the arguments of an engine that streams, unless the arguments set
    `token_limits` (also to an empty list) or one of `CHUNK_KNOBS`."""
    defaults = {field.name: field.default for field in fields(SchedulerConfig)}
    has_own = "token_limits" in knobs or any(knobs.get(name, defaults[name]) != defaults[name] for name in CHUNK_KNOBS)
    return dict(knobs) if has_own else {**knobs, "token_limits": (PREFILL_GAP,)}


# ------------------------------------------------------------------------------------------- KV outside the pool

STORE_ROLES = ("both", "producer", "consumer")
"""Roles of an engine with a KV store: "producer" writes computed KV, "consumer" reads stored KV, "both" writes and
reads."""


@dataclass(frozen=True, slots=True)
class KVKnobs:
    """The arguments of `Engine` for KV in host memory and in a KV store; the docstring of `Engine` describes each
    argument."""

    kv_offload_bytes: int | None = None
    kv_store: str | Path | None = None
    kv_store_role: str = "both"
    kv_store_bytes: int | None = None

    @property
    def is_on(self) -> bool:
        """Whether the engine keeps KV in host memory or in a KV store."""
        return self.kv_offload_bytes is not None or self.kv_store is not None

    @property
    def may_wait_for_loads(self) -> bool:
        """Whether requests may have to wait until KV is loaded from the KV store, because this engine reads a store."""
        return self.kv_store is not None and self.kv_store_role != "producer"

    def check(self, config: SchedulerConfig) -> None:
        """Check the range of each knob, and the combination of these knobs with each other and with the scheduler's
        knobs.

        Raises:
            ConfigError: a knob is out of range, or would have no effect.
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
        if config.preemption_mode != "recompute" and self.kv_offload_bytes is None:
            raise ConfigError(
                f'preemption_mode is "{config.preemption_mode}" and there is no host memory to swap to; give '
                'kv_offload_bytes, or use "recompute"'
            )
        if self.kv_store_role == "consumer" and self.kv_store_bytes is not None:
            raise _without_effect(
                "kv_store_bytes",
                self.kv_store_bytes,
                "an engine with kv_store_role consumer writes nothing; set it in the engines that write",
            )
        for name in ("kv_offload_bytes", "kv_store"):
            if getattr(self, name) is not None and not config.enable_prefix_caching:
                raise _without_effect(name, getattr(self, name), "enable_prefix_caching is off; switch it on")
        for name, default in (("kv_load_failure_policy", "recompute"), ("kv_load_timeout", None)):
            if getattr(config, name) != default and not self.may_wait_for_loads:
                why = "no request waits for KV; give a kv_store, in the role both or consumer"
                raise _without_effect(name, getattr(config, name), why)


def _without_effect(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{name} is {str(value)!r} and would have no effect, because {why}")


# ------------------------------------------------------------------------------------------------------- KV in groups


def wants_one_group(disable: bool | None) -> bool:
    """Whether the KV of all layers is kept in one group of full attention, even if some layers have sliding windows.

    Args:
        disable: value of the engine's argument `disable_hybrid_kv_cache_manager`.

    Raises:
        ConfigError: the value is not True, False or None.
    """
    if disable is not None and not isinstance(disable, bool):
        raise ConfigError(f"disable_hybrid_kv_cache_manager is {disable!r}; give True, False or None")
    return disable is True


# ----------------------------------------------------------------------------------------------------------- drafts

DEFAULT_MIN_NGRAM, DEFAULT_MAX_NGRAM = 2, 5
SPECULATIVE_KEYS = {
    "num_speculative_tokens": "num_draft_tokens",
    "prompt_lookup_min": "prompt_lookup_min",
    "prompt_lookup_max": "prompt_lookup_max",
}
"""Key of `speculative_config` -> the argument that it sets."""
SPECULATIVE_REMEDIES = {
    "model": "drafts come from the request's own tokens, not from a second model",
    "num_speculative_tokens_per_batch_size": "use the knob draft_table, such as ((16, 2), (64, 0))",
}


def speculation_knobs(config: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a `speculative_config` to arguments of `Engine`; their values are checked later, with all arguments.

    If only one of `prompt_lookup_min` and `prompt_lookup_max` is given, both get its value, as in vLLM. If neither is
    given, both get the engine's defaults, a wider range than vLLM's 5 and 5; outputs do not depend on the range.

    Args:
        config: the `speculative_config`, a mapping; a key with the value None counts as missing.
        others: arguments of `Engine` that are given in addition.

    Raises:
        ConfigError: a method or key is not supported, the number of tokens is missing, or a knob is also set directly.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f'speculative_config is {config!r}; give a mapping, like {{"method": "ngram", "num_speculative_tokens": 5}}'
        )
    values = {key: value for key, value in config.items() if value is not None}
    method = values.pop("method", None)
    if method != "ngram":
        raise ConfigError(
            f'speculative_config: method is {method!r}; the only supported method is "ngram" (prompt lookup)'
        )
    for key in values:
        if key not in SPECULATIVE_KEYS:
            remedy = SPECULATIVE_REMEDIES.get(key, f"supported are method, {', '.join(SPECULATIVE_KEYS)}")
            raise ConfigError(f"speculative_config: {key} is not supported; {remedy}")
    tokens = values.get("num_speculative_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens is {tokens!r}; it must be an integer of at least 1, the "
            "maximum number of draft tokens of a request in a step"
        )
    for one, other in (("prompt_lookup_min", "prompt_lookup_max"), ("prompt_lookup_max", "prompt_lookup_min")):
        if one in values:
            values.setdefault(other, values[one])
    for knob in SPECULATIVE_KEYS.values():
        if knob in others:
            raise ConfigError(f"speculative_config and {knob} {others[knob]!r} both set speculation; give one of them")
    return {SPECULATIVE_KEYS[key]: value for key, value in values.items()}


def check_prompt_lookup(config: SchedulerConfig, min_ngram: int | None, max_ngram: int | None) -> tuple[int, int]:
    """Check `prompt_lookup_min` and `prompt_lookup_max`, and return them; None is replaced by the default.

    Raises:
        ConfigError: a knob is out of range, or does not fit the scheduler's knobs.
    """
    if not config.num_draft_tokens and (min_ngram is not None or max_ngram is not None):
        raise ConfigError(
            f"prompt_lookup_min is {min_ngram} and prompt_lookup_max {max_ngram}, and no drafts are looked up, so they "
            "would have no effect; set num_draft_tokens or leave them out"
        )
    min_ngram = DEFAULT_MIN_NGRAM if min_ngram is None else min_ngram
    max_ngram = DEFAULT_MAX_NGRAM if max_ngram is None else max_ngram
    for name, value in (("prompt_lookup_min", min_ngram), ("prompt_lookup_max", max_ngram)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1, a number of tokens")
    if min_ngram > max_ngram:
        raise ConfigError(
            f"prompt_lookup_min is {min_ngram}, more than prompt_lookup_max, {max_ngram}; lower prompt_lookup_min"
        )
    if config.num_draft_tokens and config.max_steps_in_flight > 1:
        raise ConfigError(
            f"num_draft_tokens is {config.num_draft_tokens} and max_steps_in_flight {config.max_steps_in_flight}: "
            "drafts need the newest token, which is not known with several steps in flight; set only one of these knobs"
        )
    return min_ngram, max_ngram
