"""Urgency: values are refused without effect on this server, or beyond the operator's limits."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pointsman.core import SchedulerConfig
from pointsman.core.policy.registry import fields_read, known
from pointsman.server.config import ServerConfig
from pointsman.server.service.urgency import check_priority_is_read, check_retention, check_urgency
from pointsman.server.wire.errors import ApiError
from tests.server.engine_info import SCHEDULER, engine_info
from tests.server.orders import ByUrgency

NOTHING: set[str] = set()


def scheduler(**knobs: Any) -> dict[str, Any]:
    return SchedulerConfig(num_blocks=100, max_model_len=1000, **knobs).to_dict()


@pytest.mark.parametrize(
    ("knobs", "read"),
    [
        ({}, NOTHING),
        ({"order": "fcfs-front"}, NOTHING),
        ({"order": "priority"}, {"priority"}),
        ({"order": "priority", "victim": "latest"}, {"priority"}),
        ({"order": "priority-by-arrival"}, {"priority"}),
        ({"victim": "lowest-priority"}, {"priority"}),
        ({"order": ByUrgency()}, {"priority", "ttft_target"}),  # of a package: may read anything
    ],
    ids=lambda value: (
        "-".join(str(getattr(each, "name", each)) for each in value.values()) or "none"
        if isinstance(value, dict)
        else ""
    ),
)
def test_fields_read_returns_the_fields_that_configured_policies_use(knobs: dict[str, Any], read: set[str]) -> None:
    assert fields_read(scheduler(**knobs)) == read


def test_fields_read_ignores_the_parameters_of_policies() -> None:
    assert fields_read({"order": "earliest-ttft:default=2", "victim": None}) == {"ttft_target"}
    assert fields_read({"order": "fair:weights=a", "victim": "latest"}) == NOTHING


READS = {
    "fcfs": set(),
    "fcfs-front": set(),
    "priority": {"priority"},
    "priority-by-arrival": {"priority"},
    "shortest-prefill": set(),
    "earliest-ttft": {"ttft_target"},
    "fair": set(),
    "longest-prefix": set(),
    "latest": set(),
    "least-cost": set(),
    "lowest-priority": {"priority"},
    "lru": set(),
    "retention": {"retention"},
    "reuse": set(),
}


@pytest.mark.parametrize("kind", ["order", "victim", "eviction"])
def test_fields_read_is_right_for_every_built_in_policy(kind: str) -> None:
    built_in = {name for name, policy in known(kind).items() if policy.__module__.startswith("pointsman.")}
    assert built_in <= READS.keys()
    for name in built_in:
        assert fields_read({kind: name}) == READS[name], name


BY_PRIORITY = engine_info(scheduler=scheduler(order="priority"))
BY_TARGET = engine_info(scheduler={**SCHEDULER.to_dict(), "order": "earliest-ttft:late=0"})


@pytest.mark.parametrize(
    ("priority", "ttft_target", "info", "bounds", "param", "words"),
    [
        (3, None, engine_info(), {}, "priority", "priority is 3, .* order fcfs, .* order priority"),
        (-1, None, BY_TARGET, {}, "priority", "priority is -1, .* order earliest-ttft:late=0"),
        (-6, None, BY_PRIORITY, {"min_request_priority": -5}, "priority", "priority is -6, .* -5 at least: raise it"),
        (-1, None, BY_PRIORITY, {"min_request_priority": 0}, "priority", "priority is -1, .* 0 at least: raise it"),
        (0, 2.0, engine_info(), {}, "ttft_target", "ttft_target is 2 s, .* order fcfs, .* order earliest-ttft"),
        (0, 2.0, BY_PRIORITY, {}, "ttft_target", "ttft_target is 2 s, .* order priority, .* leave it out"),
        (0, 0.25, BY_TARGET, {"min_ttft_target": 0.5}, "ttft_target", "ttft_target is 0.25 s; .* 0.5 s at least"),
    ],
)
def test_priority_or_target_is_refused_if_unread_or_too_urgent(
    priority: int, ttft_target: float | None, info: Any, bounds: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        check_urgency(priority, ttft_target, info, ServerConfig(**bounds))
    assert (caught.value.status_code, caught.value.param) == (400, param)
    assert re.fullmatch(f"{words}.*", caught.value.detail), caught.value.detail


def test_priority_and_target_within_the_limits_are_accepted() -> None:
    bounds = ServerConfig(min_request_priority=-5, min_ttft_target=0.5)
    for priority in (-5, 0, 99):
        check_urgency(priority, None, BY_PRIORITY, bounds)
    for target in (0.5, 60.0):
        check_urgency(0, target, BY_TARGET, bounds)
    check_urgency(0, None, engine_info(), bounds)
    check_urgency(-(2**63), None, BY_PRIORITY, ServerConfig())
    check_priority_is_read(-99, BY_PRIORITY)  # of an operator


BY_RETENTION = engine_info(scheduler=scheduler(eviction="retention:share=0.3"))


@pytest.mark.parametrize(
    ("retention", "info", "words"),
    [
        (5.0, engine_info(), "retention is 5 s, .* eviction policy lru, which ignores it; .* eviction retention"),
        (0.0, engine_info(scheduler=scheduler(eviction="reuse")), "retention is 0 s, .* eviction policy reuse"),
        (60.5, BY_RETENTION, "retention is 60.5 s; this server takes 60 s at most: lower it"),
    ],
)
def test_retention_is_refused_if_unread_or_too_long(retention: float, info: Any, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_retention(retention, info, ServerConfig(max_retention=60.0))
    assert (caught.value.status_code, caught.value.param) == (400, "retention")
    assert re.fullmatch(f"{words}.*", caught.value.detail), caught.value.detail


def test_retention_within_the_limit_is_accepted() -> None:
    for retention in (None, 0.0, 60.0):
        check_retention(retention, BY_RETENTION, ServerConfig(max_retention=60.0))
    check_retention(None, engine_info(), ServerConfig())
