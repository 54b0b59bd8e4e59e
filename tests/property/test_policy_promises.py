"""Promises under every policy of the registry: a step runs something, all requests finish, and none waits longer than
its order's bound (docs/reference/policies.md)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pointsman.core import Request
from pointsman.core.policy.registry import KINDS, built_in, known
from tests.core.helpers import Host
from tests.forms import seeds

from .policies import FIELDS, SMALL, spec_of
from .workload import SeededChooser

RUNS = seeds(2, 20)
BOUND_RUNS = seeds(6, 70)
AGEING, EVERY = 2.0, 3
LONGEST = 24
CHOSEN = [(kind, name) for kind in KINDS for name in known(kind)]
Passes = Callable[[Request, Request], bool]

ORDERS: dict[str, tuple[str, Passes]] = {
    "fcfs": ("fcfs", lambda first, later: False),
    "fcfs-front": ("fcfs-front", lambda first, later: False),
    "priority": ("priority", lambda first, later: later.priority < first.priority),
    "priority-by-arrival": ("priority-by-arrival", lambda first, later: later.priority < first.priority),
    "shortest-prefill": (
        f"shortest-prefill:ageing={AGEING}",
        lambda first, later: later.arrival_time - first.arrival_time < first.num_prompt_tokens / AGEING,
    ),
    "longest-prefix": (
        f"longest-prefix:ageing={AGEING}",
        lambda first, later: later.arrival_time - first.arrival_time < LONGEST / AGEING,
    ),
    "earliest-ttft": (f"earliest-ttft:every={EVERY}", lambda first, later: True),  # its bound is a count, see below
    "fair": ("fair", lambda first, later: later.tenant != first.tenant),  # between tenants: tests/core/policy/test_fair
}
"""By order policy: its specification in these tests, and whether it may admit a request before an earlier one."""


def crowded_host(**policies: Any) -> Host:
    """A pool that holds about three of the requests below, so that most are preempted or wait."""
    return Host(**{"num_blocks": 14, "max_model_len": 48, "max_num_seqs": 6, "max_num_batched_tokens": 24, **policies})


def add_some(host: Host, draw: random.Random, number: int) -> Request:
    """A request of any length, tenant, priority and target, that arrives now; half of them share a prefix."""
    length = draw.choice((2, 5, 9, LONGEST))
    return host.add(
        f"r{number}",
        list(range(length)) if draw.randrange(2) else length,
        max_tokens=draw.choice((1, 4, 14)),
        priority=draw.randrange(3),
        tenant=f"tenant {draw.randrange(2)}",
        ttft_target=draw.choice((None, 3.0, 30.0)),
    )


@pytest.mark.parametrize(("kind", "name"), CHOSEN)
def test_under_every_policy_steps_run_rows_and_all_requests_end(kind: str, name: str) -> None:
    """Promise 4, with each policy beside others at random."""
    for seed in RUNS:
        draw, choose = random.Random(seed), SeededChooser(seed)
        policies: dict[str, Any] = {"order": spec_of(choose, "order", draw.choice(list(known("order"))))}
        policies["victim"] = spec_of(choose, "victim", draw.choice(list(known("victim"))))
        field, spec = FIELDS.get(kind, kind), spec_of(choose, kind, name)
        policies[field] = (spec,) if field in FIELDS.values() else spec
        host = crowded_host(enable_prefix_caching=kind == "eviction" or seed % 2 == 0, **policies)
        requests = []
        while len(requests) < 14:
            for _ in range(draw.choice((0, 0, 1, 3))):
                requests.append(add_some(host, draw, len(requests)))
            output = host.step()
            assert output.total_num_scheduled_tokens or not host.scheduler.has_unfinished_requests(), policies
        outputs = host.run_to_end(3_000)
        assert all(output.total_num_scheduled_tokens for output in outputs if output.num_rows or len(outputs) > 1)
        assert all(request.is_finished for request in requests), policies


def test_the_bypass_bound_is_tested_for_every_order_policy() -> None:
    assert set(ORDERS) == {name for name in known("order") if built_in("order", name)}
    assert set(SMALL) <= {name for kind in KINDS for name in known(kind)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reserves", [(), ("watermark:share=0.1", "bypass:bound=2,kept=0")], ids=["", "bypass"])
def test_no_request_is_bypassed_more_often_than_its_order_allows(order: str, reserves: tuple[str, ...]) -> None:
    """Promise 5: new requests are admitted before an earlier one only if the order allows it, plus two with `bypass`.
    Under "earliest-ttft" a request with n deadlines before its own is one of the next (n + 1) * every admissions."""
    spec, may_pass = ORDERS[order]
    num_passed = 0
    for seed in BOUND_RUNS:
        draw = random.Random(seed)
        host = crowded_host(order=spec, reserves=reserves, displace=None)
        requests: list[Request] = []
        beyond: dict[Request, int] = {}
        since: dict[Request, list[Request]] = {}  # requests admitted while it waited
        while len(requests) < 16 or host.scheduler.has_unfinished_requests():
            for _ in range(draw.choice((0, 0, 1, 2)) if len(requests) < 16 else 0):
                requests.append(add_some(host, draw, len(requests)))
            waiting = [request for request in requests if request.status.name == "WAITING"]
            for request in host.step().admitted:
                if request not in waiting:
                    continue  # preempted requests come first under every order
                waiting.remove(request)
                for other in waiting:
                    since.setdefault(other, []).append(request)
                    if other.arrival_time < request.arrival_time:
                        num_passed += 1
                        beyond[other] = beyond.get(other, 0) + (not may_pass(other, request))
        assert max(beyond.values(), default=0) <= (2 if reserves else 0), f"seed {seed}"
        if order == "earliest-ttft" and not reserves:
            for request, admitted in since.items():
                earlier = sum(deadline(other) <= deadline(request) for other in admitted)
                assert len(admitted) < (earlier + 1) * EVERY + earlier, f"seed {seed}: {request}"
    assert (num_passed > 0) == (not order.startswith("fcfs") or bool(reserves)), "the runs say something"


def deadline(request: Request) -> float:
    """The deadline of a request's first token, with the default target of `earliest-ttft`."""
    return request.arrival_time + (5.0 if request.ttft_target is None else request.ttft_target)
