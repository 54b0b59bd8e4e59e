"""Every knob is checked when the configuration is built, and the message names the remedy."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from pointsman.core import ConfigError, Scheduler, SchedulerConfig
from pointsman.core.presets import PRESETS, SYSTEMS
from pointsman.core.state.numbers import MAX_INT
from tests.core.helpers import small_config

POSITIVE = [
    "num_blocks",
    "max_model_len",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_steps_in_flight",
]
NOT_NEGATIVE = ["num_reserved_blocks", "long_prefill_token_threshold"]


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, MAX_INT + 1])
def test_a_count_out_of_range_is_reported_with_its_limits(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is {value}; it must be between 1 and {MAX_INT}"):
        small_config(**{name: value})


@pytest.mark.parametrize("name", NOT_NEGATIVE)
def test_a_negative_amount_is_reported_with_its_limits(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is -1; it must be between 0 and {MAX_INT}"):
        small_config(**{name: -1})


@pytest.mark.parametrize("name", POSITIVE + NOT_NEGATIVE)
@pytest.mark.parametrize("value", [1.0, "8", True, None])
def test_a_count_must_be_an_integer(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .*; it must be an integer"):
        small_config(**{name: value})


@pytest.mark.parametrize("value", [-0.01, 1.0, 1.5, float("nan"), float("inf")])
def test_the_watermark_is_a_share_of_the_pool(value: float) -> None:
    with pytest.raises(ConfigError, match=r"watermark is .*; it must be from 0 to less than 1, as a share of the pool"):
        small_config(watermark=value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batching": "dynamic"}, 'batching is \'dynamic\'; choose "mixed", "prefill-first" or "static"'),
        ({"num_reserved_blocks": 16}, "num_reserved_blocks is 16 of num_blocks 16: no block is left.*raise num_blocks"),
        (
            {"max_num_batched_tokens": 3},
            "max_num_batched_tokens is 3, less than max_num_seqs 4.*raise max_num_batched_tokens or lower",
        ),
        (
            {"long_prefill_token_threshold": 8, "enable_chunked_prefill": False},
            "long_prefill_token_threshold is 8 but enable_chunked_prefill is off.*set it to 0 or turn",
        ),
        (
            {"share_within_step": False, "enable_prefix_caching": False},
            "share_within_step=False has no effect without prefix caching; leave it at its default",
        ),
        (
            {"long_prefill_token_threshold": 16, "max_num_batched_tokens": 16},
            "long_prefill_token_threshold is 16, not below max_num_batched_tokens 16, so it would have no effect",
        ),
        ({"displace": "no"}, "displace is 'no'; it must be True or False"),
        ({"displace": True}, 'displace=True has no effect under order "fcfs"; use order="priority" or leave'),
        ({"displace": True, "order": "priority", "batching": "static"}, "displace=True has no effect .*static"),
        ({"displace": True, "order": "fcfs-front"}, 'displace=True has no effect under order "fcfs-front"'),
        ({"displace": True, "order": "priority-by-arrival"}, "displace=True has no effect .*by-arrival"),
        ({"long_prefill_token_threshold_adaptive": True}, "so there is no threshold to adapt"),
        ({"decode_reserve": -1}, "decode_reserve is -1; it must be between 0 and"),
        ({"decode_reserve": "median"}, "decode_reserve is 'median'; give a number of tokens, or \"mean\""),
        ({"first_chunk_only": 1}, "first_chunk_only is 1; it must be True or False"),
        (
            {"split_encoder_inputs": 1, "encoder_budget": 8},
            'split_encoder_inputs is 1; it must be True, False or "begun"',
        ),
        ({"keep_embeddings": 1, "encoder_budget": 8}, "keep_embeddings is 1; it must be True or False"),
        ({"admission_charge": "half"}, 'admission_charge is \'half\'; choose "uncached", "whole-fits" or "whole"'),
        ({"shortage": "panic"}, 'shortage is \'panic\'; choose "replan", "in-order" or "look-ahead"'),
        ({"batching": "prefill-first"}, 'batching "prefill-first" allocates blocks row by row .*; set shortage to'),
        (
            {"max_num_active_seqs": 5},
            'max_num_active_seqs is 5, more than max_num_seqs 4; lower it, or use batching="pre',
        ),
        ({"count_common_prefix": True, "enable_prefix_caching": False}, "so requests share no blocks"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills is 0; it must be between 1"),
        ({"max_num_partial_prefills": 2, "enable_chunked_prefill": False}, "no prefill is partial"),
        ({"max_long_partial_prefills": 1}, "long_prefill_token_threshold is 0, so no prompt counts as long"),
        (
            {"max_long_partial_prefills": 2, "max_num_partial_prefills": 2},
            "max_long_partial_prefills is 2, not below max_num_partial_prefills 2, so",
        ),
        ({"enable_kv_cache_events": True, "enable_prefix_caching": False}, "events is on, .* so no block is cached"),
        ({"max_num_active_seqs": 0}, "max_num_active_seqs is 0; it must be between 1"),
        (
            {"count_owed_blocks": False, "full_sequence_must_fit": False},
            "count_owed_blocks=False has no effect without full_sequence_must_fit",
        ),
        (
            {"admit_after_preemption": True, "batching": "static"},
            'admit_after_preemption=True works with batching "mixed" and not "static"',
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_combination_that_cannot_work_or_has_no_effect_is_an_error(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(**overrides)


@pytest.mark.parametrize(
    "overrides",
    [{"watermark": "0.1"}, {"order": None}, {"order": 5}, {"victim": 5}, {"enable_chunked_prefill": "no"}],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_a_config_error(overrides: dict[str, Any]) -> None:
    (name,) = overrides
    with pytest.raises(ConfigError, match=name):
        Scheduler(small_config(**overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"order": "lifo"},
            "no order policy is called 'lifo'; choose one of fcfs, priority, fcfs-front, priority-by-arrival,",
        ),
        (
            {"victim": "oldest"},
            r"no victim policy is called 'oldest'; did you mean latest\? choose one of latest, lowest-priority, least",
        ),
    ],
)
def test_an_unknown_policy_is_an_error_when_the_scheduler_is_made(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scheduler(small_config(**overrides))


def test_a_config_error_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="block_size"):
        small_config(block_size=0)


def test_only_num_blocks_and_max_model_len_have_no_default() -> None:
    required = {
        field.name
        for field in dataclasses.fields(SchedulerConfig)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    assert required == {"num_blocks", "max_model_len"}
    Scheduler(SchedulerConfig(num_blocks=100, max_model_len=1024))


def test_a_configuration_is_immutable_and_replace_checks_it_again() -> None:
    config = small_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_blocks = 99  # type: ignore[misc]
    assert config.replace(num_blocks=99).num_blocks == 99
    assert config.num_blocks == 16
    with pytest.raises(ConfigError, match="num_blocks is 0"):
        config.replace(num_blocks=0)


def test_a_preset_is_a_set_of_values_with_overrides_on_top() -> None:
    static = SchedulerConfig.preset("static", num_blocks=8, max_model_len=32)
    assert static.batching == "static"
    assert static == SchedulerConfig(num_blocks=8, max_model_len=32, batching="static")
    assert SchedulerConfig.preset("static", num_blocks=8, max_model_len=32, batching="mixed").batching == "mixed"
    with pytest.raises(ConfigError, match="no preset is called 'fast'; choose one of default, static"):
        SchedulerConfig.preset("fast", num_blocks=8, max_model_len=32)


def test_an_override_drops_preset_values_that_lose_their_effect() -> None:
    config = SchedulerConfig.preset("vllm", num_blocks=8, max_model_len=32, full_sequence_must_fit=False)
    assert config.count_owed_blocks
    with pytest.raises(ConfigError, match="count_owed_blocks=False has no effect"):
        SchedulerConfig.preset(
            "vllm", num_blocks=8, max_model_len=32, full_sequence_must_fit=False, count_owed_blocks=False
        )


@pytest.mark.parametrize(
    ("name", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
    [
        ("low-latency", 64, 2048, True),
        ("high-throughput", 256, 16384, True),
        ("long-context", 128, 8192, True),
        ("short-requests", 512, 4096, False),
    ],
)
def test_starting_presets_have_the_documented_values(
    name: str, max_num_seqs: int, max_num_batched_tokens: int, enable_chunked_prefill: bool
) -> None:
    config = SchedulerConfig.preset(name, num_blocks=100, max_model_len=1024)
    assert config == SchedulerConfig(
        num_blocks=100,
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
    )


@pytest.mark.parametrize("name", PRESETS | SYSTEMS)
def test_every_preset_makes_a_scheduler(name: str) -> None:
    config = Scheduler(SchedulerConfig.preset(name, num_blocks=100, max_model_len=1024)).config
    assert SchedulerConfig.preset("default", **config.to_dict()) == config


def test_reserved_blocks_are_not_usable() -> None:
    config = small_config(num_reserved_blocks=3)
    assert config.num_usable_blocks == 13
    assert config.num_usable_tokens == 52


def test_a_configuration_can_be_written_to_and_read_from_json() -> None:
    config = small_config(order="priority", victim="latest", watermark=0.25, displace=False)
    assert SchedulerConfig(**json.loads(json.dumps(config.to_dict()))) == config
