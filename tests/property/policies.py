"""Draws the policies of random configurations from the registry, so that new policies are tried without a change here;
and tells the checks their properties."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pointsman.core import SchedulerConfig
from pointsman.core.policy.registry import KINDS, known, parsed

from .workload import Chooser

FIELDS = {"reserve": "reserves", "limit": "token_limits"}
"""Fields of the configuration whose names differ from the kind's."""
DEFAULTS = {each.name: each.default for each in fields(SchedulerConfig)}
SMALL: dict[str, tuple[str, ...]] = {
    "bypass": ("bypass:bound=2", "bypass:bound=4,kept=0"),
    "decode": ("decode:tokens=4",),
    "decode-share": ("decode-share:share=2",),
    "earliest-ttft": ("earliest-ttft:default=3,every=3",),
    "fair": ("fair", "fair:weights=tenant 0/2"),
    "growth": ("growth:scale=8",),
    "least-cost": ("least-cost:max_preemptions=1", "least-cost:max_preemptions=4"),
    "longest-prefix": ("longest-prefix:ageing=2",),
    "prefill-gap": ("prefill-gap:seconds=3,least=2",),
    "prefill-threshold": ("prefill-threshold:tokens=2",),
    "shortest-prefill": ("shortest-prefill:ageing=2", "shortest-prefill:bound=5"),
    "target-itl": ("target-itl:seconds=3,least=2",),
    "watermark": ("watermark:share=0.1",),
}
"""Parameters that suit pools of twelve blocks; others have their defaults, or the values that `tune` tries."""
IN_SEQUENCE = ("fcfs", "priority", "fcfs-front", "priority-by-arrival")
"""Orders whose sequence the ledger knows. The sequence of other orders is taken from the scheduler; their own tests
check it, and under them no request may be skipped."""
SKIPS: dict[str, Any] = {
    "max_loras": 0,
    "max_num_partial_prefills": None,
    "max_long_partial_prefills": None,
    "encoder_budget": 0,
    "encoder_cache_size": 0,
}
"""Knobs with which no request is skipped, with a connector beside them."""


def draw_policies(choose: Chooser, overrides: dict[str, Any], *, has_connector: bool) -> dict[str, Any]:
    """Knobs that choose policies, for a configuration with these overrides. None with `"policies": False` among the
    overrides, which is taken out of them."""
    if not overrides.pop("policies", True):
        return {}
    drawn: dict[str, Any] = {}
    for kind in KINDS:
        field = FIELDS.get(kind, kind)
        if field in overrides or not choose.chance(40):
            continue
        name = choose.choice(tuple(known(kind)))
        if isinstance(DEFAULTS[field], tuple):
            specs = _some(choose, kind, name)
            if all(overrides.get(knob, value) == value for knob, value in needed_by({field: specs}).items()):
                drawn[field] = specs
        elif kind != "order" or name in IN_SEQUENCE or not (has_connector or any(map(overrides.get, SKIPS))):
            drawn[field] = spec_of(choose, kind, name)
    return drawn


def _some(choose: Chooser, kind: str, name: str) -> tuple[str, ...]:
    """One or two policies of a kind that allows several."""
    names = {name: None, choose.choice(tuple(known(kind))): None} if choose.chance(40) else {name: None}
    return tuple(spec_of(choose, kind, each) for each in names)


def needed_by(knobs: dict[str, Any]) -> dict[str, Any]:
    """Further knobs that the chosen policies need: chunked prefill for limits, and no skipping for orders whose
    sequence the ledger does not know."""
    needed: dict[str, Any] = {} if is_in_sequence(knobs.get("order", "fcfs")) else dict(SKIPS)
    limits = knobs.get("token_limits", ())
    if limits:
        needed["enable_chunked_prefill"] = True
    if any(map(_sets_budget, limits)):
        needed["first_chunk_only"] = False
    return needed


def _sets_budget(limit: str) -> bool:
    return hasattr(known("limit")[parsed(limit)[0]], "step_budget")


def sets_budget(config: SchedulerConfig) -> bool:
    """Whether a limit sets the budget of each step, to an unknown value."""
    return any(_sets_budget(str(limit)) for limit in config.token_limits)


def spec_of(choose: Chooser, kind: str, name: str) -> str:
    """A policy's name with parameters."""
    if name in SMALL:
        return choose.choice(SMALL[name])
    values = {each.name: choose.choice((each.default, *each.tried)) for each in known(kind)[name].parameters}
    given = ",".join(f"{key}={value}" for key, value in values.items() if value != "")
    return f"{name}:{given}" if given else name


def is_in_sequence(order: str) -> bool:
    """Whether the ledger knows in which sequence requests are admitted."""
    return parsed(order)[0] in IN_SEQUENCE


def parameter(config: SchedulerConfig, kind: str, name: str, key: str) -> list[float]:
    """The value of a parameter of each policy of a name that a configuration has."""
    default = next(each.default for each in known(kind)[name].parameters if each.name == key)
    given = [parsed(str(spec)) for spec in getattr(config, FIELDS.get(kind, kind))]
    return [float(values.get(key, default)) for found, values in given if found == name]


def has_unknown_reserve(config: SchedulerConfig) -> bool:
    """Whether a reserve keeps a number of blocks that the checks do not know."""
    understood = {"watermark", "full-sequence", "decode", "mean-decode", "growth", "bypass"}
    return any(parsed(str(spec))[0] not in understood for spec in config.reserves)
