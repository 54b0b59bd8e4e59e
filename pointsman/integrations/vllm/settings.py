"""Settings: converts vLLM's flags, and the further knobs in `--additional-config`, to the core's `SchedulerConfig`.

    vllm serve MODEL --scheduler-cls pointsman.integrations.vllm.Scheduler \\
        --additional-config '{"pointsman": {"decode_reserve": "mean", "victim": "latest"}}'
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from pointsman.core import ConfigError, SchedulerConfig
from pointsman.core.errors import did_you_mean
from pointsman.core.presets import PRESETS, SYSTEMS
from pointsman.integrations.vllm.encoder_inputs import encoder_sizes
from pointsman.integrations.vllm.support import NEWEST, is_before

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FLAGS = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_active_seqs": "--max-num-active-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_model_len": "--max-model-len",
    "block_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
    "num_reserved_blocks": "",
    "kv_groups": "",
    "max_steps_in_flight": "--async-scheduling",
    "enable_chunked_prefill": "--enable-chunked-prefill",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "long_prefill_token_threshold_adaptive": "--long-prefill-token-threshold-adaptive",
    "enable_prefix_caching": "--enable-prefix-caching",
    "prefill_interval": "--prefill-schedule-interval",
    "watermark": "--watermark",
    "full_sequence_must_fit": "--scheduler-reserve-full-isl",
    "max_loras": "--max-loras",
    "num_draft_tokens": "--speculative-config",
    "encoder_budget": "--max-num-batched-tokens",
    "encoder_cache_size": "--max-num-batched-tokens",
    "split_encoder_inputs": "--disable-chunked-mm-input",
    "keep_embeddings": "",
    "enable_kv_cache_events": "--kv-events-config",
}
"""Knobs that a flag of vLLM sets, each with its flag; "": the model determines the knob. vLLM's flags keep their
meaning."""
_NOT_HERE = {
    "share_within_step",
    "log_request_events",
    "count_common_prefix",
    "kv_load_failure_policy",
    "kv_load_timeout",
    "preemption_mode",
    "pad_first_decodes",
}

KNOBS = frozenset(field.name for field in fields(SchedulerConfig)) - FLAGS.keys() - _NOT_HERE
"""Knobs that `--additional-config` may set, besides the knobs of the drop-in itself."""
_OF_DROP_IN = frozenset({"preset", "socket", "record", "max_retention", "untested_version"})
MAX_RETENTION = 600.0
"""Default of `max_retention`, in seconds."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings for Pointsman in `--additional-config`."""

    knobs: Mapping[str, Any]
    """Values of fields of `SchedulerConfig`, including the fields of a preset."""
    socket: str | None
    """Path of the control socket; "": no socket; None: a new path in a private folder."""
    record: str | None
    """Path of a recording from vLLM's start; None: no recording."""
    max_retention: float = MAX_RETENTION
    """Maximum retention of a request, in seconds."""
    untested_version: bool = False
    """Whether to start with a version of vLLM that was not tested, if no assumption about it is known to be broken."""


def read_settings(additional_config: Any, version: str = NEWEST) -> Settings:
    """Read the object under the key "pointsman" in vLLM's `additional_config`.

    Args:
        additional_config: vLLM's value of `--additional-config`.
        version: version of vLLM whose decisions the preset "vllm" makes.

    Raises:
        ConfigError: the value under "pointsman" is not an object, or has a key that is unknown or that a flag of vLLM
            sets; or a key for Pointsman is outside of that object.
    """
    given = _pointsman_section(additional_config, KNOBS | _OF_DROP_IN)
    if not isinstance(given, Mapping):
        raise ConfigError(f"pointsman in --additional-config is {given!r}; it must be an object with knobs")
    knobs = dict(given)
    preset = knobs.pop("preset", "default")
    socket = knobs.pop("socket", None)
    record = knobs.pop("record", None)
    retention = knobs.pop("max_retention", MAX_RETENTION)
    if not isinstance(retention, (int, float)) or isinstance(retention, bool) or not 0 <= retention < math.inf:
        raise ConfigError(
            f"max_retention in --additional-config is {retention!r}; it must be a number of seconds, at least 0"
        )
    untested = knobs.pop("untested_version", False)
    if not isinstance(untested, bool):
        raise ConfigError(f"untested_version in --additional-config is {untested!r}; it must be true or false")
    for name, value in (("socket", socket), ("record", record)):
        if value is not None and not _is_path(value):
            raise ConfigError(f"{name} in --additional-config is {value!r}; it must be a path")
    if preset not in (presets := ("default", "auto", *SYSTEMS)):
        raise ConfigError(
            f"preset in --additional-config is {preset!r}; choose one of {', '.join(presets)} (other presets, such as "
            f"{next(name for name in PRESETS if name not in presets)}, set knobs that vLLM's own flags set)"
        )
    if preset == "vllm" and is_before(version, "0.33"):
        preset = "vllm-0.32"
    for name in knobs:
        if name in FLAGS:
            raise ConfigError(
                f"{name} in --additional-config has no effect: vLLM takes it from {FLAGS[name] or 'the model'}; leave "
                "it out"
            )
        if name == "preemption_mode":
            raise ConfigError(
                f"preemption_mode is {knobs[name]!r}: swapping needs host memory behind the KV cache, and with this "
                "scheduler vLLM has none, as KV connectors do not run; leave preemption_mode out"
            )
        if name not in KNOBS:
            known = sorted(KNOBS | _OF_DROP_IN)
            raise ConfigError(
                f"{name} in --additional-config is unknown; {did_you_mean(name, known)}choose from {', '.join(known)}"
            )
    of_preset = {name: value for name, value in (PRESETS | SYSTEMS)[preset].items() if name in KNOBS}
    return Settings({**of_preset, **knobs}, socket, record, retention, untested)


def read_observer_settings(additional_config: Any) -> str | None:
    """The path of `Observer`'s recording, from the object under the key "pointsman" in vLLM's `additional_config`;
    None: the default path.

    Raises:
        ConfigError: the value under "pointsman" is not an object, or has a key other than "record"; or "record" is
            outside of that object.
    """
    given = _pointsman_section(additional_config, {"record"})
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'pointsman in --additional-config is {given!r}; it must be an object like {{"record": FILE}}'
        )
    if others := sorted(set(given) - {"record"}):
        raise ConfigError(
            f"{others[0]} in --additional-config has no effect on Observer, as vLLM makes every decision; leave "
            "this key out, or run pointsman.integrations.vllm.Scheduler"
        )
    record = given.get("record")
    if record is not None and not _is_path(record):
        raise ConfigError(f"record in --additional-config is {record!r}; it must be a path")
    return record


def _is_path(value: Any) -> bool:
    """Whether the value can be the name of a file."""
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _pointsman_section(additional_config: Any, keys: Set[str]) -> Any:
    """The value under the key "pointsman"; an empty mapping if the key is missing.

    Raises:
        ConfigError: the key "pointsman" is missing, and one of `keys` is at the top level, where it has no effect.
    """
    if not isinstance(additional_config, Mapping):
        return {}
    if "pointsman" not in additional_config and (outside := sorted(keys & additional_config.keys())):
        value = json.dumps(additional_config[outside[0]], default=str)
        raise ConfigError(
            f'{outside[0]} in --additional-config is not under the key "pointsman", so nothing reads it: write '
            f'{{"pointsman": {{"{outside[0]}": {value}}}}}, or add "pointsman": {{}} if it is for another plugin'
        )
    return additional_config.get("pointsman", {})


def scheduler_config(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_size: int,
    knobs: Mapping[str, Any],
    version: str = NEWEST,
) -> SchedulerConfig:
    """The core's configuration for vLLM's flags and the further knobs. The flags have the meaning that they have in
    `version` of vLLM.

    Raises:
        ConfigError: a knob is out of range, or has no effect.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    budget = scheduler.max_num_scheduled_tokens
    budget = scheduler.max_num_batched_tokens if budget is None else budget
    threshold = scheduler.long_prefill_token_threshold
    threshold = threshold if threshold < budget else 0  # vLLM accepts a larger threshold, which has no effect
    events = vllm_config.kv_events_config
    encoder_budget, encoder_cache_size = encoder_sizes(vllm_config)
    order = "priority" if scheduler.policy == "priority" else "fcfs"
    num_blocks = kv_cache_config.num_blocks
    if getattr(kv_cache_config, "kv_cache_groups", None) == []:  # no KV is stored, so blocks never run out
        num_blocks = 1 + scheduler.max_num_seqs * -(-vllm_config.model_config.max_model_len // block_size)
    values: dict[str, Any] = {
        "num_blocks": num_blocks,
        "num_reserved_blocks": 1,  # vLLM's null block
        "block_size": block_size,
        "max_model_len": vllm_config.model_config.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_active_seqs": getattr(scheduler, "max_num_active_seqs", None),
        "max_num_batched_tokens": budget,
        "max_steps_in_flight": vllm_config.max_concurrent_batches,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "long_prefill_token_threshold": threshold,
        "long_prefill_token_threshold_adaptive": threshold > 0
        and getattr(scheduler, "long_prefill_token_threshold_adaptive", False),
        "prefill_interval": _prefill_interval(vllm_config, version),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "watermark": _to_usable_share(scheduler.watermark, kv_cache_config.num_blocks),
        "full_sequence_must_fit": scheduler.scheduler_reserve_full_isl,
        "max_loras": vllm_config.lora_config.max_loras if vllm_config.lora_config is not None else 0,
        "num_draft_tokens": vllm_config.num_speculative_tokens,
        "enable_kv_cache_events": events is not None and events.enable_kv_cache_events,
        "encoder_budget": encoder_budget,
        "encoder_cache_size": encoder_cache_size,
        "split_encoder_inputs": _splits_encoder_inputs(vllm_config, version) if encoder_budget else True,
        "keep_embeddings": not (encoder_budget and vllm_config.model_config.is_encoder_decoder),
        "order": order,
    }
    settled = {**values, **knobs}
    if settled["order"] == "fcfs-front" and order == "priority":  # "fcfs-front" was set by the preset "vllm"
        settled["order"] = "priority-by-arrival"
    # As in vLLM's own scheduler: its workers capture graphs of decodes in which all rows have equally many tokens.
    settled["pad_first_decodes"] = bool(settled["num_draft_tokens"]) and not settled.get("draft_table")
    if not settled["full_sequence_must_fit"]:  # `count_owed_blocks`, from a preset, has no effect then
        settled.pop("count_owed_blocks", None)
    return SchedulerConfig(**settled)


def _prefill_interval(vllm_config: VllmConfig, version: str) -> int | Literal["host"]:
    """The interval, as a value of `prefill_interval`. The engine core aligns the intervals of data parallel engines,
    and passes its decision to `schedule`. Before vLLM 0.33, other engines have no interval."""
    interval: int = getattr(vllm_config.scheduler_config, "prefill_schedule_interval", 1)
    if interval == 1:
        return 1
    if getattr(vllm_config.parallel_config, "data_parallel_size", 1) > 1:
        return "host"
    return 1 if is_before(version, "0.33") else interval


def _splits_encoder_inputs(vllm_config: VllmConfig, version: str) -> bool | Literal["begun"]:
    """Whether a chunk of a prompt may end within an image, as a value of `split_encoder_inputs`."""
    if not getattr(vllm_config.scheduler_config, "disable_chunked_mm_input", False):
        return True
    return "begun" if is_before(version, "0.33") else False


def _to_usable_share(share: float, num_blocks: int) -> float:
    """Convert vLLM's watermark, a `share` of all `num_blocks`, to a share of the usable blocks: the result is the same
    number of blocks. vLLM rounds this number down."""
    blocks = int(share * num_blocks)
    return min(math.nextafter(1.0, 0.0), (blocks + 0.5) / (num_blocks - 1)) if blocks else 0.0
