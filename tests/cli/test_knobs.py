"""Knobs become arguments of the engine: presets, sizes in bytes, errors before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pointsman.cli import knobs as knobs_module
from pointsman.cli.knobs import engine_arguments
from pointsman.core.presets import PRESETS
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused

Run = Callable[..., Finished]


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the GPU of the machine that runs the tests, if there is one."""
    monkeypatch.setattr(knobs_module, "has_gpu_driver", lambda: False)


def test_knobs_are_checked_with_the_defaults_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"max_num_seqs": 513}
    for on_gpu in ({"device": "cuda"}, {"device": "cuda:1"}):
        assert engine_arguments(many | on_gpu) == many | on_gpu
    with pytest.raises(ValueError, match="max_num_batched_tokens is 512, less than max_num_seqs 513"):
        engine_arguments(many)
    monkeypatch.setattr(knobs_module, "has_gpu_driver", lambda: True)
    assert engine_arguments(many) == many
    with pytest.raises(ValueError, match="max_num_batched_tokens is 512, less than max_num_seqs 513"):
        engine_arguments(many | {"device": "cpu"})
    presets = {"max_num_batched_tokens": 200}
    assert engine_arguments(presets) == presets, "the default number of requests fits it"


def test_gpu_memory_utilization_is_checked_before_a_model_is_loaded() -> None:
    share = {"gpu_memory_utilization": 0.5, "device": "cuda"}
    assert engine_arguments(share) == share
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 1\.5; .* above 0 and at most 1"):
        engine_arguments({"gpu_memory_utilization": 1.5})
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0\.5 and device is cpu, .*; give kv_cache_bytes"):
        engine_arguments({"gpu_memory_utilization": 0.5})


def test_the_engine_gets_only_the_given_options() -> None:
    assert engine_arguments({}) == {}
    assert engine_arguments({"threads": 2, "dtype": "bfloat16"}) == {"num_threads": 2, "dtype": "bfloat16"}
    assert engine_arguments({"kv_cache_bytes": "1.5MiB"}) == {"kv_cache_bytes": 3 * 2**19}
    assert engine_arguments({"kv_cache_bytes": 4096}) == {"kv_cache_bytes": 4096}
    assert engine_arguments({"kv_offload_bytes": "2KiB"}) == {"kv_offload_bytes": 2048}
    store = {"kv_store": "there", "kv_store_role": "consumer", "kv_load_timeout": 2.5, "kv_load_failure_policy": "fail"}
    assert engine_arguments(store) == store
    events = '{"endpoint": "tcp://127.0.0.1:*"}'
    assert engine_arguments({"kv_events_config": events}) == {"kv_events_config": {"endpoint": "tcp://127.0.0.1:*"}}
    speculation = '{"method": "ngram", "num_speculative_tokens": 4}'
    assert engine_arguments({"speculative_config": speculation}) == {"num_draft_tokens": 4}
    assert engine_arguments({"decode_reserve": "64"}) == {"decode_reserve": 64}
    assert engine_arguments({"decode_reserve": "mean"}) == {"decode_reserve": "mean"}


def test_the_word_none_turns_all_token_limits_off() -> None:
    assert engine_arguments({"token_limits": ["none"]}) == {"token_limits": []}
    assert engine_arguments({"token_limits": ["none"]}, "auto")["token_limits"] == []
    assert engine_arguments({"token_limits": ["prefill-gap:seconds=0.2"]}) == {
        "token_limits": ["prefill-gap:seconds=0.2"]
    }


@pytest.mark.parametrize("name", PRESETS)
def test_given_knobs_override_a_preset(name: str) -> None:
    assert engine_arguments({}, name) == PRESETS[name]
    assert engine_arguments({"max_num_seqs": 3}, name) == PRESETS[name] | {"max_num_seqs": 3}


@pytest.mark.parametrize(
    ("knobs", "preset", "message"),
    [
        ({"max_num_seqs": 513}, None, "max_num_batched_tokens is 512, less than max_num_seqs 513"),
        ({"max_num_batched_tokens": 63}, None, "max_num_batched_tokens is 63, less than max_num_seqs 64"),
        ({"max_num_batched_tokens": 63}, "low-latency", "less than max_num_seqs 64"),
        ({"max_num_batched_tokens": 511}, "short-requests", "less than max_num_seqs 512"),
        ({"long_prefill_token_threshold": 8}, "short-requests", "enable_chunked_prefill is off"),
        ({"kv_events_config": "tcp://*:1"}, None, "not JSON"),
        ({"kv_events_config": "[]"}, None, "must be a JSON object"),
        ({"kv_events_config": '{"port": 1}'}, None, "no field 'port'; its fields are enable_kv_cache_events"),
        ({"kv_events_config": '{"hwm": 0}'}, None, "hwm is 0"),
        ({"speculative_config": "ngram"}, None, "--speculative-config is 'ngram', not JSON"),
        (
            {"speculative_config": '{"method": "eagle"}'},
            None,
            "method is 'eagle'; the only supported method is \"ngram\"",
        ),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}', "num_draft_tokens": 2},
            None,
            "speculative_config and num_draft_tokens 2 both set speculation",
        ),
        ({"kv_offload_bytes": "many"}, None, "many"),
        ({"kv_offload_bytes": "1GiB", "enable_prefix_caching": False}, None, "enable_prefix_caching is off"),
        ({"kv_store_role": "producer"}, None, "there is no kv_store"),
        ({"kv_store": "there", "kv_store_role": "reader"}, None, "kv_store_role is 'reader'; choose one of both, prod"),
        (
            {"kv_store": "there", "kv_store_role": "consumer", "kv_store_bytes": "1GiB"},
            None,
            "kv_store_role consumer writes nothing",
        ),
        ({"kv_store": "there", "kv_load_timeout": 0}, None, "kv_load_timeout is 0"),
        ({"kv_store": "there", "kv_store_role": "producer", "kv_load_timeout": 1}, None, "no request waits for KV"),
        ({"kv_load_failure_policy": "fail"}, None, "no request waits for KV"),
        ({"decode_reserve": "median"}, None, "decode_reserve is 'median'"),
        ({"displace": True}, None, 'under order "fcfs"'),
        ({"order": "random"}, None, "no order policy is called 'random'"),
        ({"token_limits": ["none", "prefill-gap"]}, None, "but prefill-gap is given; leave one out"),
        ({}, "quick", "no preset is called 'quick'"),
    ],
)
def test_impossible_knobs_are_refused_before_a_model_is_loaded(
    knobs: dict[str, Any], preset: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_arguments(knobs, preset)


def test_generate_accepts_presets(pointsman: Run, model: str) -> None:
    check_refused(pointsman("generate", "--preset", "quick"), "'quick'", "short-requests")
    run = ["generate", "--model", model, "--prompt", "abc", "--prompt", "abd", "--max-tokens", 3, "--json"]
    mixed = pointsman(*run, "--preset", "low-latency")
    static = pointsman(*run, "--preset", "static", "--max-num-seqs", 1)
    assert mixed.code == static.code == 0
    assert "static_batch" in static.summary["deferrals"] or "sequence_limit" in static.summary["deferrals"]
    assert not mixed.summary["deferrals"]
