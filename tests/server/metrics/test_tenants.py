"""Counts by tenant: exact while there are few tenants, bounded and never falling when there are many."""

from __future__ import annotations

import random
from collections import Counter

from pointsman.server.metrics.tenants import MAX_KNOWN, MAX_NAMED, TenantCounts


def serve(counts: TenantCounts, tenant: str, prompt: int, generated: int) -> None:
    """Count a request from its start to its finish."""
    count = counts.open(tenant)
    count.num_prompt_tokens += prompt
    count.num_unstarted -= 1
    count.num_generated_tokens += generated
    counts.close(count, is_started=True)


def test_single_tenant_has_no_series() -> None:
    counts = TenantCounts()
    assert counts.readings() == ({}, {}, {}, {})
    serve(counts, "", 10, 5)
    assert counts.readings() == ({}, {}, {}, {})
    serve(counts, "b", 1, 2)
    assert counts.readings() == ({"": 10, "b": 1}, {"": 5, "b": 2}, {"": 0, "b": 0}, {"": 0, "b": 0})


def test_configured_tenants_have_counters_at_zero_from_the_start() -> None:
    assert TenantCounts(["a", "b", "a"]).readings()[0] == {"a": 0, "b": 0}


def test_open_requests_are_counted_with_and_without_a_first_token() -> None:
    counts = TenantCounts(["a", "b"])
    first, second = counts.open("a"), counts.open("a")
    assert counts.readings()[2:] == ({"a": 2, "b": 0}, {"a": 2, "b": 0})
    first.num_unstarted -= 1
    assert counts.readings()[2:] == ({"a": 2, "b": 0}, {"a": 1, "b": 0})
    counts.close(first, is_started=True)
    counts.close(second, is_started=False)
    assert counts.readings()[2:] == ({"a": 0, "b": 0}, {"a": 0, "b": 0})


def test_only_tenants_with_the_most_tokens_have_their_own_series() -> None:
    counts, rng = TenantCounts(), random.Random(0)
    weights = {f"t{number}": 1 if number % 20 else 500 for number in range(400)}  # 20 heavy ones, most come late
    given: Counter[str] = Counter()
    named: set[str] = set()
    before: dict[str, float] = {}
    for scrape in range(40):
        for tenant in rng.sample(sorted(weights), 300):
            serve(counts, tenant, weights[tenant], weights[tenant])
            given[tenant] += 2 * weights[tenant]
        prompt, generated, *_ = counts.readings()
        assert prompt == generated and len(prompt) == MAX_NAMED + 1
        for tenant, value in prompt.items():
            assert value >= before.get(tenant, 0), (scrape, tenant)
        assert 2 * sum(prompt.values()) <= given.total()
        named |= prompt.keys()
        before = prompt
    assert {tenant for tenant, weight in weights.items() if weight > 1} < before.keys()
    assert len(named) <= MAX_NAMED + 20 + 1, "the light ones do not alternate"
    assert all(2 * value <= given[tenant] for tenant, value in before.items() if tenant != "other")


def test_tokens_of_forgotten_tenants_remain_in_the_sums() -> None:
    counts = TenantCounts()
    for number in range(3 * MAX_KNOWN):
        serve(counts, f"t{number}", 3, 4)
    prompt, generated, *_ = counts.readings()
    assert sum(prompt.values()) == 9 * MAX_KNOWN and sum(generated.values()) == 12 * MAX_KNOWN
    assert len(counts._known) <= MAX_KNOWN + 1


def test_tenant_named_other_counts_as_other() -> None:
    counts = TenantCounts(["a"])
    serve(counts, "other", 3, 4)
    assert counts.readings()[0] == {"a": 0, "other": 3}
