"""Eviction policies: the blocks that each policy retains."""

from __future__ import annotations

import io
from typing import Any

import pytest

from pointsman.core import ConfigError, PolicyError, Recorder, Request, RequestRefused, replay
from pointsman.core.policy.eviction import LRU, Retention
from tests.core.helpers import Host, cached_of, small_config


def run(host: Host, name: str, prompt: Any, max_tokens: int = 1, **fields: Any) -> int:
    request = host.add(name, prompt, max_tokens=max_tokens, **fields)
    host.run_to_end()
    return request.num_cached_tokens


def questions_beside_chats(eviction: str, num_rounds: int) -> tuple[int, int]:
    """Three documents, each used twice in a row by requests of one output token, beside unique prompts with longer
    outputs. Returns the cached tokens of the first request of each pair, in the first and the second half."""
    host = Host(eviction=eviction, num_blocks=24)
    documents = [host.prompt(12) for _ in range(3)]
    cached = []
    for index in range(num_rounds):
        cached.append(run(host, f"first {index}", [*documents[index % 3], *host.prompt(3)]))
        run(host, f"second {index}", [*documents[index % 3], *host.prompt(3)])
        for place in range(2):
            run(host, f"chat {index} {place}", 12, max_tokens=6)
    half = num_rounds // 2
    return sum(cached[:half]), sum(cached[half:])


def test_policy_reuse_learns_which_requests_share_prefixes() -> None:
    assert questions_beside_chats("lru", 24)[1] == 0
    assert questions_beside_chats("reuse", 24)[1] == 12 * 12


def test_policy_reuse_retains_no_blocks_without_cache_hits() -> None:
    host = Host(eviction="reuse")
    for index in range(20):
        run(host, f"r{index}", 9)
        assert host.stats().num_retained_blocks == 0


def test_policy_reuse_adapts_to_changed_traffic() -> None:
    """When questions stop and chats are reused, chats are retained instead."""
    host = Host(eviction="reuse", num_blocks=24)
    document = host.prompt(12)
    for index in range(10):
        run(host, f"question {index}", [*document, *host.prompt(3)])
    assert host.stats().num_retained_blocks > 0
    chats = [host.prompt(12) for _ in range(2)]
    for index in range(100):
        run(host, f"question again {index}", 15)
        run(host, f"chat {index}", chats[index % 2], max_tokens=6)
    policy = host.scheduler._kv.eviction
    assert policy is not None
    asked = host.add("probe", 12, max_tokens=1)
    host.run_to_end()
    assert policy.retained(asked, 3, 0.0)[0] == 0


def test_requests_without_a_retention_get_the_default_retention() -> None:
    for spec, retained in (("retention", 0), ("retention:default=1000", 2)):
        host = Host(eviction=spec)
        run(host, "a", 9)
        assert host.stats().num_retained_blocks == retained
        run(host, "b", 9, retention=0.0)
        assert host.stats().num_retained_blocks == retained


@pytest.mark.parametrize("eviction", ["retention", "reuse"])
def test_no_block_of_a_request_outside_the_prefix_cache_is_retained(eviction: str) -> None:
    host = Host(eviction=eviction)
    for index in range(3):
        run(host, f"r{index}", [*range(9)], use_prefix_cache=False, retention=100.0)
    assert host.stats().num_retained_blocks == 0


@pytest.mark.parametrize("eviction", ["lru", "retention", "reuse"])
def test_eviction_policies_affect_admission_only_through_cache_hits(eviction: str) -> None:
    """Without shared prefixes every policy decides the same steps."""
    seen = []
    for each in ("lru", eviction):
        host = Host(eviction=each, num_blocks=10)
        for index in range(12):
            host.add(f"r{index}", 5 + index % 7, max_tokens=6, retention=1000.0, tenant=f"t{index % 2}")
        seen.append([(o.rows.tolist(), o.num_scheduled_tokens.tolist()) for o in host.run_to_end()])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), 10**400, "soon", True])
def test_an_invalid_retention_is_refused(value: Any) -> None:
    with pytest.raises(RequestRefused, match=r"retention is .*; give seconds, at least 0, or None"):
        Request("a", [1], arrival_time=0.0, max_tokens=1, retention=value)


def test_invalid_eviction_settings_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"no eviction policy is called 'lfu'; did you mean lru\? choose one of lru, retention, reuse"
    ):
        Host(eviction="lfu")
    with pytest.raises(ConfigError, match="share of eviction 'reuse' is '2'; it must be between 0 and 1"):
        Host(eviction="reuse:share=2")
    with pytest.raises(ConfigError, match=r"share of eviction 'retention' is '0'; it must be between 0\.001 and 1"):
        Host(eviction="retention:share=0")
    with pytest.raises(ConfigError, match="eviction is 'reuse', but enable_prefix_caching is off"):
        small_config(eviction="reuse", enable_prefix_caching=False)


@pytest.mark.parametrize("eviction", ["retention:share=0.4", "reuse"])
def test_a_recording_with_an_eviction_policy_replays(eviction: str) -> None:
    file = io.StringIO()
    host = Host(recorder=Recorder(file), eviction=eviction, num_blocks=12)
    shared = host.prompt(8)
    for index in range(20):
        prompt = [*shared, *host.prompt(index % 5 + 1)] if index % 3 else 11
        run(host, f"r{index}", prompt, max_tokens=1 + index % 4, retention=float(index % 7), tenant=f"t{index % 2}")
    assert host.stats().num_evictions and host.stats().prefix_hits
    assert host.scheduler.policies[eviction.partition(":")[0]] == 1
    assert f'"eviction":"{eviction}"' in file.getvalue() and '"retention":6.0' in file.getvalue()
    assert replay(file.getvalue().splitlines()).num_steps == host.stats().num_steps


def test_explain_says_how_long_a_prefix_is_retained() -> None:
    host = Host(eviction="retention:share=0.5")
    run(host, "before", 9, tenant="a", retention=100.0)
    host.add("now", 9, tenant="a", retention=30.0)
    host.add("other", 9, tenant="b", retention=30.0)
    host.add("plain", 9)
    host.step()
    words = "Its prefix is retained for 30 s after its end; its tenant retains"
    assert host.explain("now").sentence == f"now runs. {words} 2 of at most 8 KV blocks."
    assert host.explain("other").sentence.endswith(f"{words} 0 of at most 4 KV blocks.")
    assert "retained" not in host.explain("plain").sentence


class Everything(LRU):
    """Retains all blocks for ever."""

    name = "everything"
    share = 1.0
    answer: Any = None

    def retained(self, request: Request, num_blocks: int, now: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or (num_blocks, float("inf"), 7)


def test_a_custom_eviction_policy_decides_which_blocks_are_retained() -> None:
    host = Host(eviction=Everything())
    prompt = host.prompt(9)
    run(host, "a", prompt)
    for index in range(10):
        run(host, f"flood {index}", 15, use_prefix_cache=False)
    host.add("again", prompt)
    assert cached_of(host.step()) == {"again": 8}


@pytest.mark.parametrize(
    "answer",
    [
        ValueError("boom"),
        (99, 1.0, 0),
        (1, float("nan"), 0),
        (1, 10**400, 0),
        (1, 1.0, -1),
        (1, 1.0, 2**31),
        (1, 1.0, 2**63),
        5,
    ],
    ids=str,
)
def test_a_failing_eviction_policy_fails_the_next_step_retaining_nothing(answer: Any) -> None:
    policy = Everything()
    policy.answer = answer
    host = Host(eviction=policy)
    host.add("a", 9, max_tokens=1)
    host.add("b", 9, max_tokens=4)
    host.step()
    assert host.stats().num_retained_blocks == 0
    with pytest.raises(PolicyError, match="eviction 'everything': retained"):
        host.schedule()
    policy.answer = None
    host.run_to_end()
    assert host.stats().num_retained_blocks == 3, "the request that finished since"


def test_an_eviction_object_without_all_attributes_is_refused() -> None:
    with pytest.raises(ConfigError, match="the object has no started, retained"):
        Host(eviction=type("Half", (), {"name": "half", "share": 1.0, "per_tenant": False})())
    with pytest.raises(ConfigError, match=r"share of eviction 'everything' is 1.5; it must be a number from 0 to 1"):
        Host(eviction=type("Greedy", (Everything,), {"share": 1.5})())


def test_an_eviction_share_of_0_retains_nothing() -> None:
    host = Host(eviction=Retention(share=0.0))
    run(host, "a", 9, retention=100.0)
    assert host.stats().num_retained_blocks == 0
