"""Tunables: the settings of the scheduler that a search tries, and the values of each.

The knobs declare their values in `core/config.py` (`Tried`). The policies are all registered ones
(`core/policy/registry.py`), installed packages included. Each policy declares which values of its parameters to try.
Values of a setting with an order are listed in that order, so that a search can try a value and its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeAlias

from pointsman.core import SchedulerConfig
from pointsman.core.config import scheduler_knobs
from pointsman.core.policy.registry import known

REPLICAS = "replicas"
"""Name of the setting for the number of replicas, the only one that is not a setting of the scheduler."""
Point: TypeAlias = tuple[Any, ...]
"""A point of a space: a value for each of its settings, in the space's order."""


@dataclass(frozen=True, slots=True)
class Tunable:
    """A setting and the values to try."""

    name: str
    """Name of a field of `SchedulerConfig`, or `REPLICAS`."""
    values: tuple[Any, ...]
    is_ordered: bool = True
    """Whether the values are sorted, so that neighbouring values have similar effects."""
    is_for_short_pool: bool = False
    """Whether the setting makes a difference only if KV blocks run out."""

    def neighbours_of(self, value: Any) -> list[Any]:
        """The values directly below and above `value` in the list; if the values have no order, all other values."""
        if not self.is_ordered:
            return [other for other in self.values if other != value]
        at = self.values.index(value)
        return [*self.values[max(0, at - 1) : at], *self.values[at + 1 : at + 2]]

    def with_value(self, value: Any) -> Tunable:
        """The same setting, with `value` among its values."""
        if value in self.values:
            return self
        at = len(self.values)
        if self.is_ordered:
            at = next((index for index, other in enumerate(self.values) if other and other > value), at)
        return replace(self, values=(*self.values[:at], value, *self.values[at:]))


HAVE_KNOBS = frozenset({"watermark", "full-sequence", "decode", "mean-decode", "prefill-threshold"})
"""Reserve and limit policies that are set by knobs of their own, so a search does not try them as policies."""
_TRIED = sorted(
    ((name, knob.tried) for name, knob in scheduler_knobs().items() if knob.tried is not None),
    key=lambda each: each[1].rank,
)
NAMES = tuple(name for name, _ in _TRIED)
"""Fields of `SchedulerConfig` that a search may set, those with the largest effect first."""
DESIGN = {name: tried.first for name, tried in _TRIED if tried.first}
"""First values of some settings; a search begins with all their combinations."""


def tunables(varied: frozenset[str]) -> tuple[Tunable, ...]:
    """All settings of the scheduler, with the policies that can make a difference. `varied` names the request fields
    that differ between requests ("priority", "tenant", "retention").

    Raises:
        ConfigError: an installed package's policy cannot be loaded.
    """
    found = []
    for name, tried in _TRIED:
        policies = scheduler_knobs()[name].policy is not None
        values = _policies(name, varied) if policies else tried.values
        found.append(Tunable(name, values, tried.is_ordered and not policies, tried.is_for_short_pool))
    return tuple(found)


def _policies(name: str, varied: frozenset[str]) -> tuple[Any, ...]:
    """The values of a knob that holds a policy, or several policies."""
    knob = scheduler_knobs()[name]
    assert knob.policy is not None
    found = policy_specs(knob.policy.kind, varied)
    if not knob.is_list_of_policies:
        return (None, *found) if knob.is_optional else tuple(found)
    pairs = []
    if knob.policy.kind == "reserve":  # reserves add up; of several limits the lowest one applies
        pairs = [pair for pair in combinations(found, 2) if not any(":" in spec for spec in pair)]
    return ((), *((spec,) for spec in found), *pairs)


def policy_specs(kind: str, varied: frozenset[str]) -> list[str]:
    """Every policy of a kind in its text form: with its defaults, and with each other value that it declares to try."""
    found = []
    for name, policy in known(kind).items():
        # Even a TTFT target that is equal for all requests makes a difference: a request past its target is preempted.
        if name in HAVE_KNOBS or not policy.reads - {"ttft_target"} <= varied:
            continue
        found.append(name)
        found += [
            f"{name}:{each.name}={value}" for each in policy.parameters for value in each.tried if value != each.default
        ]
    return found


class Space:
    """The settings of a search, and the configurations that their values stand for.

    Args:
        base: the start of a search; its values are among those to try.
        fixed: settings that keep the value of `base`.
        replicas: minimum and maximum number of replicas.
        varied: request fields that differ between requests, see `tunables`.
    """

    def __init__(
        self,
        base: SchedulerConfig,
        *,
        fixed: frozenset[str] = frozenset(),
        replicas: tuple[int, int] = (1, 1),
        varied: frozenset[str] = frozenset(),
    ) -> None:
        self._base = base
        if not base.enable_prefix_caching:
            fixed |= {"eviction"}
        self._fewest = replicas[0]
        chosen = [each.with_value(getattr(base, each.name)) for each in tunables(varied) if each.name not in fixed]
        low, high = replicas
        if low < high:
            chosen.append(Tunable(REPLICAS, tuple(range(low, high + 1))))
        self.tunables: tuple[Tunable, ...] = tuple(chosen)
        self.base: Point = tuple(low if each.name == REPLICAS else getattr(base, each.name) for each in chosen)
        """The values of the base configuration, on the fewest replicas."""

    def settings(self, point: Point) -> dict[str, Any]:
        """The values of a point by setting name."""
        return {each.name: value for each, value in zip(self.tunables, point, strict=True)}

    def make_point(self, settings: Mapping[str, Any]) -> Point:
        """The base point with other values; if two settings contradict each other, the nearest consistent point.

        Otherwise, values with the same meaning would be tried as if they differed.
        """
        values = {**self.settings(self.base), **settings}
        budget = values.get("max_num_batched_tokens", self._base.max_num_batched_tokens)
        if "max_num_seqs" in values and values["max_num_seqs"] > budget and self._base.batching != "prefill-first":
            values["max_num_seqs"] = self._max_value_up_to("max_num_seqs", budget)
        if values.get("long_prefill_token_threshold", 0) >= budget:
            values["long_prefill_token_threshold"] = 0
        return tuple(values[each.name] for each in self.tunables)

    def config(self, point: Point) -> SchedulerConfig:
        """The configuration of a point, with the base's number of blocks.

        Raises:
            ConfigError: the base has a setting that contradicts the point.
        """
        knobs = self.settings(point)
        knobs.pop(REPLICAS, None)
        if knobs.get("full_sequence_must_fit") is False:
            knobs["count_owed_blocks"] = True  # a preset may set it to False, which has no effect here
        return self._base.replace(**knobs)

    def num_replicas(self, point: Point) -> int:
        """The number of replicas of a point."""
        return int(self.settings(point).get(REPLICAS, self._fewest))

    def changed_settings(self, point: Point) -> list[str]:
        """The scheduler's settings in which the point differs from the base, without settings that had to change
        because of another setting."""
        settings, base = self.settings(point), self.settings(self.base)
        return [
            each.name
            for each in self.tunables
            if each.name != REPLICAS and self.make_point({**settings, each.name: base[each.name]}) != point
        ]

    def neighbours(self, point: Point, names: Sequence[str]) -> list[tuple[str, Point]]:
        """(setting, point) of all points that differ from `point` in one of the settings `names`, by one value in the
        list."""
        settings = self.settings(point)
        found: list[tuple[str, Point]] = []
        for each in self.tunables:
            if each.name in names:
                for value in each.neighbours_of(settings[each.name]):
                    other = self.make_point({**settings, each.name: value})
                    if other != point and all(other != known for _, known in found):
                        found.append((each.name, other))
        return found

    def _max_value_up_to(self, name: str, limit: int) -> int:
        (tunable,) = (each for each in self.tunables if each.name == name)
        return int(max((value for value in tunable.values if value <= limit), default=limit))
