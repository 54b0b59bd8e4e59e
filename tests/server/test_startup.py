"""The start-up log: five lines, with a working curl, and without secrets."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from pointsman.core import KVGroup, SchedulerConfig
from pointsman.server.config import ServerConfig
from pointsman.server.startup import reachable, startup_lines
from tests.server.engine_info import engine_info

URL = "http://127.0.0.1:8000"
INFO = engine_info()


def test_startup_has_five_lines() -> None:
    what, fits, knobs, limits, where = startup_lines([INFO], ServerConfig(served_model_name=("a",)), URL)
    for part in ("a (/models/a)", "2.8 M parameters", "float32", "cpu", "numba", "1,000 tokens"):
        assert part in what
    # A request of 1,000 tokens takes 32 blocks of 32 tokens.
    for part in ("100 blocks of 32 tokens", "3 MiB", "bfloat16", "3,200 tokens", "3.1 requests of full length"):
        assert part in fits
    for part in ("max_num_seqs 7", "max_num_batched_tokens 8192", "watermark 0.25", "order fcfs"):
        assert part in knobs
    for part in ("7 requests run", "1,024 more wait", "deadline none", "max_tokens 1,000", "4.0 MiB"):
        assert part in limits
    assert f"{URL} - " in where
    everywhere = startup_lines([INFO], ServerConfig(host="0.0.0.0"), URL)[-1]
    assert f"{URL} (on 0.0.0.0) - " in everywhere


def test_several_engines_are_listed_with_their_processes() -> None:
    lines = startup_lines([INFO, engine_info(pid=9)], ServerConfig(), URL)
    assert lines[1].endswith("2, each as in the next two lines: engine 0 is process 1, engine 1 is process 9")
    assert "14 requests run" in lines[4]
    on_gpus = startup_lines([engine_info(device="cuda:0"), engine_info(pid=9, device="cuda:1")], ServerConfig(), URL)
    assert on_gpus[1].endswith(": engine 0 is process 1 on cuda:0, engine 1 is process 9 on cuda:1")


def test_capacity_line_shows_groups_of_layers() -> None:
    """A request of 1,000 tokens takes 32 blocks of full attention and, while it decodes, 3 of each window of 64."""
    config = SchedulerConfig(
        num_blocks=100, max_model_len=1000, block_size=32, max_num_batched_tokens=256,
        kv_groups=(KVGroup("window", 64), KVGroup(), KVGroup("window", 64)),
    )  # fmt: skip
    sizes = {"kv_cache_tokens": config.num_full_length_tokens, "full_length_requests": config.num_full_length}
    _, fits, knobs, *_ = startup_lines([engine_info(scheduler=config.to_dict(), **sizes)], ServerConfig(), URL)
    assert "100 blocks of 32 tokens in 2 groups of a window of 64, 1 of full attention, 3 MiB" in fits
    # The most that one takes: 32 + 2 * (ceil((63 + 256) / 32) + 1) = 54; the others have (100 - 54) / (32 + 2 * 3).
    assert f"room for {int((1 + 46 / 38) * 1000):,} tokens, or 2.2 requests of full length" in fits
    assert "kv_groups" not in knobs


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({}, []),
        ({"order": "fcfs", "watermark": 0.0, "enable_chunked_prefill": True}, []),
        ({"batching": "static", "enable_prefix_caching": False}, ["batching static", "enable_prefix_caching off"]),
        ({"order": "priority", "victim": "latest", "displace": False}, ["victim latest", "displace off"]),
        ({"decode_reserve": "mean", "max_loras": 3}, ["decode_reserve mean", "max_loras 3"]),
        ({"max_steps_in_flight": 2, "num_reserved_blocks": 1}, []),
    ],
    ids=str,
)
def test_scheduler_line_shows_step_size_order_and_changed_knobs(knobs: dict[str, Any], said: list[str]) -> None:
    sizes = {"num_blocks": 100, "max_model_len": 1000, "block_size": 32, "max_num_seqs": 7}
    config = SchedulerConfig(**{**sizes, **knobs})
    line = startup_lines([engine_info(scheduler=config.to_dict())], ServerConfig(), URL)[2]
    always = ["max_num_seqs 7", "max_num_batched_tokens 8192", f"order {config.order}"]
    told = line.removeprefix("scheduler").strip().split(", ")
    assert told[:3] == always and sorted(told[3:]) == sorted(said)


def test_limits_line_shows_configured_limits() -> None:
    config = ServerConfig(
        max_waiting_requests=0, max_waiting_prompt_tokens=5000, max_deadline=2.5, max_tokens_limit=64, max_n=3
    )
    limits = startup_lines([INFO], config, URL)[3]
    for part in ("0 more wait", "waiting prompt tokens 5,000", "deadline 2.5 s", "max_tokens 64", "n 3"):
        assert part in limits
    assert "at least" not in limits and "tenants" not in limits
    config = ServerConfig(min_request_priority=-5, min_ttft_target=0.5, tenant_from="header:X-Tenant")
    for part in ("priority at least -5", "TTFT target at least 0.5 s", "tenants by header:X-Tenant"):
        assert part in startup_lines([INFO], config, URL)[3]


@pytest.mark.parametrize("name", ["demo", "it's", 'a "b" $c `d`', "naïve \\n"])
@pytest.mark.parametrize("keys", [(), ("sesame",)])
def test_example_curl_is_valid_shell_and_contains_no_key(name: str, keys: tuple[str, ...]) -> None:
    lines = startup_lines([INFO], ServerConfig(served_model_name=(name, "b"), api_keys=keys), URL)
    assert "sesame" not in "\n".join(lines)
    words = shlex.split(lines[-1].partition("try it: ")[2])
    assert words[:2] == ["curl", f"{URL}/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == name
    assert ("Authorization: Bearer $POINTSMAN_API_KEY" in words) is bool(keys)


@pytest.mark.parametrize(
    ("host", "keys", "said"),
    [
        ("127.0.0.1", (), "no API key: every user of this machine"),
        ("::1", (), "no API key: every user of this machine"),
        ("localhost", (), "no API key: every user of this machine"),
        ("0.0.0.0", (), "NO API KEY: every machine may call"),
        ("192.0.2.7", (), "NO API KEY"),
        ("0.0.0.0", ("k",), "an API key is asked for"),
    ],
)
def test_limits_line_warns_about_missing_keys(host: str, keys: tuple[str, ...], said: str) -> None:
    assert said in startup_lines([INFO], ServerConfig(host=host, api_keys=keys), URL)[3]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "operators: every user of this machine, without a key"),
        ({"api_keys": ("sesame",)}, "operators: none, as there is no operator key"),
        ({"operator_keys": ("sesame",)}, "operators: an operator key is asked for"),
        ({"api_keys": ("sesame",), "operator_keys": ("oil",)}, "operators: an operator key is asked for"),
    ],
)
def test_limits_line_names_the_operators(keys: dict[str, Any], said: str) -> None:
    assert said in startup_lines([INFO], ServerConfig(**keys), URL)[3]


@pytest.mark.parametrize(
    ("host", "keys", "operators"),
    [
        ("127.0.0.1", {}, None),
        ("localhost", {}, None),
        ("0.0.0.0", {"api_keys": ("k",)}, None),
        ("0.0.0.0", {}, "a program on this machine"),
        ("::", {}, "a program on this machine"),
        ("gpu1", {"operator_keys": ("k",)}, "an operator key"),
    ],
)
def test_open_line_lists_what_other_machines_may_do(host: str, keys: dict[str, Any], operators: str | None) -> None:
    lines = startup_lines([INFO], ServerConfig(host=host, **keys), URL)
    found = [line for line in lines if line.startswith("open ")]
    assert len(found) == (operators is not None) and len(lines) == 5 + len(found)
    if operators is not None:
        (line,) = found
        for part in (host, "other machines", "/v1/completions", "/metrics", f"needs {operators};", "--api-key-file"):
            assert part in line


def test_logged_url_replaces_wildcard_addresses() -> None:
    assert reachable("http://0.0.0.0:80") == "http://127.0.0.1:80"
    assert reachable("http://[::]:80") == "http://[::1]:80"
    assert reachable("http://example.org:80") == "http://example.org:80"


def test_names_are_shown_without_control_characters() -> None:
    info = engine_info(model="/models/\x1b[2J\nb")
    for line in startup_lines([info], ServerConfig(served_model_name=("x\x07",)), URL):
        assert line.isprintable()
