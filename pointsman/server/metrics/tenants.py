"""TenantCounts: counts tokens and requests by tenant, with a bounded number of labels.

Clients may choose the tenant's name (`--tenant-from`), so at most `MAX_NAMED` tenants have their own series, and all
other tenants share the series `OTHER`. The first tenants get series of their own. An unnamed tenant replaces the named
tenant with the fewest tokens as soon as the unnamed one has more than twice as many. So heavy tenants have their own
series, and two similar tenants do not alternate. A series counts only tokens from the time that its tenant was named,
so that no counter falls.

Counting happens once per delta, so it only adds to an attribute of a `TenantCount`; a scrape computes the sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pointsman.server.config import OTHER

MAX_NAMED = 32
"""Maximum number of tenants with their own series."""
MAX_KNOWN = 1024
"""Maximum number of known tenants; beyond it, tenants without an open request are forgotten."""


class TenantCount:
    """Totals and open requests of one tenant. The code that counts writes the fields directly.

    Args:
        name: name of the tenant.
    """

    __slots__ = ("exposed_generated", "exposed_prompt", "name", "num_generated_tokens", "num_open", "num_prompt_tokens",
                 "num_unstarted", "taken_generated", "taken_prompt")  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_prompt_tokens = 0
        """Number of prompt tokens of all requests that reached their first token."""
        self.num_generated_tokens = 0
        self.num_open = 0
        """Number of requests that have not finished."""
        self.num_unstarted = 0
        """Number of open requests without a first token."""
        # `taken_...`: the amounts that a series contains already; `exposed_...`: the values of the tenant's own series.
        self.taken_prompt = self.taken_generated = 0
        self.exposed_prompt = self.exposed_generated = 0

    @property
    def weight(self) -> int:
        """Number of all tokens of the tenant; tenants with many have their own series."""
        return self.num_prompt_tokens + self.num_generated_tokens


class TenantCounts:
    """The counts of all tenants.

    Args:
        names: names of tenants that are known from the start.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._known: dict[str, TenantCount] = {}
        self._named: set[str] = set()
        self._others = TenantCount(OTHER)
        """The series `OTHER`: its fields `exposed_...` are the tokens that all tenants had while they had no series of
        their own."""
        for name in names:
            self._count_of(name)

    def open(self, tenant: str) -> TenantCount:
        """Count a new request of a tenant; returns the tenant's counts."""
        count = self._count_of(tenant)
        count.num_open += 1
        count.num_unstarted += 1
        return count

    def close(self, count: TenantCount, *, is_started: bool) -> None:
        """Count a request of a tenant as finished; `is_started`: whether the request had a first token."""
        count.num_open -= 1
        if not is_started:
            count.num_unstarted -= 1
        if len(self._known) > MAX_KNOWN and not count.num_open and count.name not in self._named:
            self._add_new_tokens(count)
            del self._known[count.name]

    def readings(self) -> tuple[dict[str, float], dict[str, float], dict[str, float], dict[str, float]]:
        """Four dictionaries by tenant: prompt tokens, generated tokens, open requests, open requests without a first
        token. Empty while there is only one tenant, as its values are those of the server.
        """
        for count in self._known.values():
            self._add_new_tokens(count)
        self._reassign_series()
        if len(self._known) < 2:
            return {}, {}, {}, {}
        named = [self._known[name] for name in sorted(self._named)]
        prompt: dict[str, float] = {count.name: count.exposed_prompt for count in named}
        generated: dict[str, float] = {count.name: count.exposed_generated for count in named}
        num_open: dict[str, float] = {count.name: count.num_open for count in named}
        num_unstarted: dict[str, float] = {count.name: count.num_unstarted for count in named}
        others = [count for count in self._known.values() if count.name not in self._named]
        if others or self._others.exposed_prompt or self._others.exposed_generated:
            # A client may choose the name `OTHER` for its tenant, which then counts as one of the unnamed tenants.
            for series, value in (
                (prompt, self._others.exposed_prompt),
                (generated, self._others.exposed_generated),
                (num_open, sum(count.num_open for count in others)),
                (num_unstarted, sum(count.num_unstarted for count in others)),
            ):
                series[OTHER] = value
        return prompt, generated, num_open, num_unstarted

    def named(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """Sums `amounts`, which are given by tenant: one sum for each tenant with its own series, and one sum under
        `OTHER` for all other tenants. Empty while there is only one tenant."""
        if len(self._known) < 2:
            return {}
        found = dict.fromkeys(sorted(self._named), 0.0)
        for tenant, amount in amounts.items():
            label = tenant if tenant in self._named else OTHER
            found[label] = found.get(label, 0.0) + amount
        return found

    def _count_of(self, tenant: str) -> TenantCount:
        count = self._known.get(tenant)
        if count is None:
            count = self._known[tenant] = TenantCount(tenant)
            if len(self._named) < MAX_NAMED and tenant != OTHER:
                self._named.add(tenant)
        return count

    def _add_new_tokens(self, count: TenantCount) -> None:
        """Add a tenant's tokens since the last call to its own series, or to that of `OTHER`."""
        series = count if count.name in self._named else self._others
        series.exposed_prompt += count.num_prompt_tokens - count.taken_prompt
        series.exposed_generated += count.num_generated_tokens - count.taken_generated
        count.taken_prompt, count.taken_generated = count.num_prompt_tokens, count.num_generated_tokens

    def _reassign_series(self) -> None:
        """Replace the named tenants with the fewest tokens by unnamed tenants that have more than twice as many."""
        others = [count for name, count in self._known.items() if name not in self._named and name != OTHER]
        if not others:
            return
        others.sort(key=lambda count: -count.weight)
        named = sorted((self._known[name] for name in self._named), key=lambda count: count.weight)
        for heavy, light in zip(others, named, strict=False):
            if heavy.weight <= 2 * light.weight:
                break
            self._named.remove(light.name)
            self._named.add(heavy.name)
            light.exposed_prompt = light.exposed_generated = 0
