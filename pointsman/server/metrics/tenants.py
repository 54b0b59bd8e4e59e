"""TenantCounts: tokens and requests by tenant, under a bounded number of labels.

A tenant may be whatever a client sends (`--tenant-from`), so at most `MAX_NAMED` tenants have series of their own, and
all others together are `OTHER`. The first to come have them; one of the others takes over the series of the tenant with
fewest tokens when it has had more than twice as many. So the heavy tenants have a name, and two of like weight do not
take turns. A series counts what came while its tenant was named, so that no counter falls.

Counting happens once per delta, so it is an addition to a slot of a `TenantCount`; the sums are made at a scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pointsman.server.config import OTHER

MAX_NAMED = 32
"""Tenants with series of their own."""
MAX_KNOWN = 1024
"""Tenants that are remembered without an open request."""


class TenantCount:
    """What one tenant has had, and has now. Its users write the fields.

    Args:
        name: of the tenant.
    """

    __slots__ = ("exposed_generated", "exposed_prompt", "name", "num_generated_tokens", "num_open", "num_prompt_tokens",
                 "num_unstarted", "taken_generated", "taken_prompt")  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_prompt_tokens = 0
        """Of requests that reached their first token."""
        self.num_generated_tokens = 0
        self.num_open = 0
        """Requests that have not finished."""
        self.num_unstarted = 0
        """Of these, requests without a first token."""
        # What was taken over into a series already, and what the series of its own says.
        self.taken_prompt = self.taken_generated = 0
        self.exposed_prompt = self.exposed_generated = 0

    @property
    def weight(self) -> int:
        """All its tokens."""
        return self.num_prompt_tokens + self.num_generated_tokens


class TenantCounts:
    """The counts of all tenants.

    Args:
        names: of tenants that are known from the start.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._known: dict[str, TenantCount] = {}
        self._named: set[str] = set()
        self._others = TenantCount(OTHER)
        """Its `exposed_...` are those of all tenants while they had no name."""
        for name in names:
            self._count_of(name)

    def open(self, tenant: str) -> TenantCount:
        """A request of a tenant begins; what it counts into."""
        count = self._count_of(tenant)
        count.num_open += 1
        count.num_unstarted += 1
        return count

    def close(self, count: TenantCount, *, is_started: bool) -> None:
        """A request has finished, with a first token or without."""
        count.num_open -= 1
        if not is_started:
            count.num_unstarted -= 1
        if len(self._known) > MAX_KNOWN and not count.num_open and count.name not in self._named:
            self._take(count)
            del self._known[count.name]

    def readings(self) -> tuple[dict[str, float], dict[str, float], dict[str, float], dict[str, float]]:
        """By tenant: prompt tokens, generated tokens, open requests, and those without a first token. Empty while
        there is one tenant alone, whose figures are those of the server.
        """
        for count in self._known.values():
            self._take(count)
        self._rename()
        if len(self._known) < 2:
            return {}, {}, {}, {}
        named = [self._known[name] for name in sorted(self._named)]
        prompt: dict[str, float] = {count.name: count.exposed_prompt for count in named}
        generated: dict[str, float] = {count.name: count.exposed_generated for count in named}
        num_open: dict[str, float] = {count.name: count.num_open for count in named}
        num_unstarted: dict[str, float] = {count.name: count.num_unstarted for count in named}
        others = [count for count in self._known.values() if count.name not in self._named]
        if others or self._others.exposed_prompt or self._others.exposed_generated:
            # A client may call itself so: then it is one of them.
            for series, value in (
                (prompt, self._others.exposed_prompt),
                (generated, self._others.exposed_generated),
                (num_open, sum(count.num_open for count in others)),
                (num_unstarted, sum(count.num_unstarted for count in others)),
            ):
                series[OTHER] = value
        return prompt, generated, num_open, num_unstarted

    def named(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """Amounts by tenant under the same labels; empty while there is one tenant alone."""
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

    def _take(self, count: TenantCount) -> None:
        """Put what is new of a tenant into the series where it belongs."""
        series = count if count.name in self._named else self._others
        series.exposed_prompt += count.num_prompt_tokens - count.taken_prompt
        series.exposed_generated += count.num_generated_tokens - count.taken_generated
        count.taken_prompt, count.taken_generated = count.num_prompt_tokens, count.num_generated_tokens

    def _rename(self) -> None:
        """Give the heaviest of the others the series of the lightest that have one, where they differ enough."""
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
