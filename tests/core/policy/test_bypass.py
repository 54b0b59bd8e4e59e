"""The reserve "bypass": requests that bypass one that waits for blocks, their bound, and the blocks kept for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pointsman.core import Reason, Request
from pointsman.core.policy.reserve import Demand, Reserve
from pointsman.core.state.interfaces import View
from pointsman.core.step.search import Search
from tests.core.helpers import Host, names


def host_with_a_long_head(**config: Any) -> Host:
    """Of 16 blocks of 4 tokens "first" holds 9 and will hold 10; "long" needs 11."""
    host = Host(**{"reserves": ("bypass",), "enable_prefix_caching": False, "max_num_batched_tokens": 64, **config})
    host.add("first", 36, max_tokens=6)
    host.step()
    host.add("long", 44, max_tokens=2)
    return host


def test_a_short_request_bypasses_a_long_one_that_waits_for_blocks() -> None:
    host = host_with_a_long_head()
    host.add("short", 4, max_tokens=2)
    output = host.step()
    assert names(output.admitted) == ["short"]
    assert host.explain("long").reason in (Reason.BLOCKS, Reason.FULL_SEQUENCE)
    host.run_to_end()


def test_without_bypass_a_long_request_blocks_the_queue() -> None:
    host = host_with_a_long_head(reserves=())
    host.add("short", 4, max_tokens=2)
    assert names(host.step().admitted) == []
    assert host.explain("short").reason is Reason.BEHIND


def test_blocks_released_while_the_head_waits_are_kept_for_it() -> None:
    host = host_with_a_long_head(reserves=("bypass:kept=1",))
    host.add("a", 16, max_tokens=2)  # 5 blocks in the end; 6 are free
    assert names(host.step().admitted) == ["a"]
    host.step()  # a ends with this step, and 6 blocks are free again; those that a released are kept for the head
    assert host.scheduler.num_running == 1
    host.add("b", 12, max_tokens=2)
    host.step()
    assert host.explain("b").reason is Reason.BYPASS
    assert "kept for a request before it" in host.explain("b").sentence
    outputs = host.run_to_end()
    assert next(name for output in outputs for name in names(output.admitted)) == "long"


@pytest.mark.parametrize("bound", [1, 3])
def test_the_parameter_bound_limits_how_many_requests_bypass_one(bound: int) -> None:
    host = host_with_a_long_head(reserves=(f"bypass:bound={bound},kept=0",), max_num_seqs=2)
    host.scheduler.abort("first", host.now)
    keeper = host.add("keeper", 36, max_tokens=12, arrival_time=0.0)
    for index in range(8):
        host.add(f"short{index}", 2, max_tokens=1)
    admitted = [name for output in host.run_to_end() for name in names(output.admitted)]
    assert keeper.is_finished
    assert admitted.index("long") - admitted.index("keeper") - 1 <= bound
    assert admitted[1 : 1 + bound] == [f"short{index}" for index in range(bound)]


def test_the_bypass_bound_holds_within_one_step() -> None:
    host = host_with_a_long_head(reserves=("bypass:bound=2,kept=0",), max_num_seqs=16)
    for index in range(6):
        host.add(f"short{index}", 1, max_tokens=30)
    long = host.scheduler.get_request("long")
    assert long is not None
    for _ in range(3):
        host.step()
        assert long._state.num_bypassed <= 2
    assert host.scheduler.num_running == 3, "first, and two that bypassed"


def test_bypass_does_not_change_priority_preemption() -> None:
    started = []
    for reserves in ((), ("bypass:kept=1",)):
        host = Host(order="priority", reserves=reserves, num_blocks=16, enable_prefix_caching=False)
        host.add("low", 36, max_tokens=20, priority=5)
        for _ in range(4):
            host.step()
        host.add("wide", 44, max_tokens=2, priority=5)
        host.step()
        host.step()
        host.add("urgent", 40, max_tokens=2, priority=1)
        started.append(names(host.step().admitted))
    assert started[0] == started[1] == ["urgent"]


def test_no_blocks_are_kept_for_an_aborted_request() -> None:
    host = host_with_a_long_head(reserves=("bypass:kept=1",))
    host.step()
    host.abort("long")
    host.add("b", 20, max_tokens=1)
    assert names(host.step().admitted) == ["b"]


class Watching(Reserve):
    """Keeps no block free, and notes how many requests wait at each check."""

    name = "watching"

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def blocks(self, request: Request, demand: Demand, view: View) -> int:
        self.seen.append((request.request_id, demand.num_waiting))
        return 0


def test_reserves_count_the_bypassed_requests_as_waiting() -> None:
    watching = Watching()
    host = host_with_a_long_head(reserves=("bypass", watching))
    for name in ("a", "b"):
        host.add(name, 4, max_tokens=2)
    assert names(host.step().admitted) == ["a", "b"]
    seen = [(name, waiting) for name, waiting in watching.seen if name != "first"]
    assert seen == [("long", 3), ("a", 3), ("b", 2)], "long waits while a and b start"
    host.run_to_end()


RESERVES: list[tuple[str, ...]] = [
    ("bypass:bound=3,kept=0",),
    ("bypass:bound=3", "watermark:share=0.1"),
    ("growth:scale=4", "bypass:bound=3"),
]


def decisions(monkeypatch: pytest.MonkeyPatch, seed: int, *, keeps_searches: bool) -> list[Any]:
    """The decisions of a random workload."""
    with monkeypatch.context() as patch:
        if not keeps_searches:
            patch.setattr(Search, "is_done", lambda *_: False)
        chance = random.Random(seed)
        host = Host(
            reserves=RESERVES[seed % len(RESERVES)],
            num_blocks=20,
            max_num_seqs=6,
            enable_prefix_caching=seed % 3 > 0,
            full_sequence_must_fit=seed % 4 > 0,
            enable_chunked_prefill=seed % 5 > 0,
            order="priority" if seed % 7 == 0 else "fcfs",
        )
        shared = host.prompt(8)
        found: list[Any] = []
        for number in range(120):
            if chance.random() < 0.4:
                length = chance.choice([1, 2, 3, 5, 9, 15])
                prompt = [*shared[: 4 * chance.randrange(3)], *host.prompt(length)][:16]
                host.add(f"r{number}", prompt, max_tokens=chance.randint(1, 9), priority=chance.randrange(3))
            if chance.random() < 0.05 and host.scheduler.running:
                host.abort(chance.choice([request.request_id for request in host.scheduler.running]))
            output = host.step()
            found.append((names(output.requests), output.num_scheduled_tokens.tolist(), output.block_ids.tolist()))
            found.append((names(output.admitted), names(output.preempted)))
        found += [names(output.admitted) for output in host.run_to_end()]
        return found


@pytest.mark.parametrize("seed", range(16))
def test_skipping_searches_for_bypassing_requests_changes_no_decision(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    kept = decisions(monkeypatch, seed, keeps_searches=True)
    assert kept == decisions(monkeypatch, seed, keeps_searches=False)


def test_a_queue_without_a_bypassing_request_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_with_a_long_head(num_blocks=12)
    for index in range(20):
        host.add(f"also-long-{index}", 40, max_tokens=2)
    host.step()
    checked: list[str] = []
    check = host.scheduler._admission.check

    def counting(request: Any, *rest: Any) -> Any:
        checked.append(request.request_id)
        return check(request, *rest)

    monkeypatch.setattr(host.scheduler._admission, "check", counting)
    host.step()
    host.step()
    assert checked == ["long", "long"]
    host.add("short", 1, max_tokens=1)
    host.step()
    assert "short" in checked
