"""Adapters (LoRA): the cap on running adapters, skipped requests, and claims, which bound the wait."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.core import Adapter, ConfigError, ParkReason, Reason, Request, RequestRefused
from pointsman.core.policy.order import FirstComeFirstServed
from pointsman.core.step.admission import MAX_SKIPPED
from tests.core.helpers import Host, cached_of, names, tokens_of


def roomy(**overrides: Any) -> Host:
    """A host with two adapter slots, and enough sequence slots, tokens and blocks for all requests."""
    values = {"num_blocks": 4000, "max_num_seqs": 128, "max_num_batched_tokens": 512, "max_loras": 2}
    return Host(**{**values, **overrides})


def add(host: Host, request_id: str, adapter: str | None = None, **fields: Any) -> Request:
    return host.add(request_id, fields.pop("prompt", 2), adapter=adapter and (adapter, 1), **fields)


# ------------------------------------------------------------------ the cap


def test_no_step_runs_more_adapters_than_there_are_slots() -> None:
    host = roomy()
    for index in range(12):
        add(host, f"r{index}", adapter="abcdef"[index % 6], max_tokens=1 + index % 3)
    for output in host.run_to_end():
        assert len({adapter for adapter in output.adapters if adapter}) <= 2


def test_an_output_names_the_adapter_of_each_row() -> None:
    host = roomy()
    add(host, "plain")
    add(host, "a", "x")
    assert host.step().adapters == [None, Adapter("x", 1)]


def test_a_request_holds_an_adapter_slot_during_chunked_prefill() -> None:
    host = roomy(max_loras=1, max_num_batched_tokens=128, long_prefill_token_threshold=4)
    add(host, "long", "x", prompt=20)
    add(host, "other", "y")
    assert tokens_of(host.step()) == {"long": 4}
    assert tokens_of(host.step()) == {"long": 4}
    assert host.explain("other").reason is Reason.ADAPTER_SLOTS


def test_two_versions_of_an_adapter_are_two_adapters() -> None:
    host = roomy(max_loras=1)
    host.add("old", 2, adapter=("x", 1), max_tokens=2)
    host.add("new", 2, adapter=("x", 2))
    host.add("same", 2, adapter=("x", 1), max_tokens=2)
    assert names(host.step().requests) == ["old", "same"]
    host.step()
    assert names(host.step().requests) == ["new"]


def test_requests_without_an_adapter_need_no_slot() -> None:
    host = roomy(max_loras=1)
    add(host, "a", "x")
    add(host, "b", "y")
    add(host, "plain")
    assert names(host.step().requests) == ["a", "plain"]


@pytest.mark.parametrize("leave", ["end", "abort", "park", "fail"])
def test_an_adapter_slot_is_freed_when_its_last_request_leaves(leave: str) -> None:
    host = roomy(max_loras=1)
    add(host, "a", "x", max_tokens=1)
    if leave != "fail":
        add(host, "b", "x", max_tokens=3)
        add(host, "c", "y")
        assert names(host.step().requests) == ["a", "b"]
        assert names(host.step().requests) == ["b"], "b still runs with the adapter of a"
    if leave == "end":
        host.step()
    elif leave == "abort":
        host.abort("b")
    elif leave == "park":
        host.park("b")
    else:
        host.fail(host.schedule())
        host.park("a")
        add(host, "c", "y")
    assert names(host.step().requests) == ["c"]


def test_a_preempted_request_needs_a_slot_again() -> None:
    host = roomy(max_loras=1)
    add(host, "a", "x")
    add(host, "b", "y")
    host.step()
    host.park("a")
    assert names(host.step().requests) == ["b"]
    host.ready("a")
    add(host, "plain")
    assert names(host.step().requests) == ["b", "plain"]
    told = host.explain("a")
    assert (told.reason, told.position) == (Reason.ADAPTER_SLOTS, 0)


# ------------------------------------------------------------------ skipped requests


def test_a_request_without_an_adapter_slot_does_not_block_the_queue() -> None:
    host = roomy()
    for request_id, adapter in (("a", "x"), ("b", "y"), ("c", "z"), ("d", "x"), ("e", "w"), ("f", None)):
        add(host, request_id, adapter)
    assert names(host.step().requests) == ["a", "b", "d", "f"]
    assert [host.explain(name).position for name in "ce"] == [0, 1]


def test_a_blocked_request_behind_a_skipped_one_blocks_the_queue() -> None:
    host = Host(max_loras=1, num_blocks=6, max_model_len=24)
    add(host, "a", "x", prompt=8)
    add(host, "b", "y", prompt=1)
    add(host, "large", prompt=20)
    add(host, "small", prompt=1)
    assert names(host.step().requests) == ["a"]
    reasons = [host.explain(name).reason for name in ("b", "large", "small")]
    assert reasons == [Reason.ADAPTER_SLOTS, Reason.FULL_SEQUENCE, Reason.BEHIND]
    assert host.explain("small").blocker == "large"
    assert host.stats().num_waiting_by_reason == {"adapter_slots": 1, "full_sequence": 1, "behind": 1}
    assert host.stats().deferrals["adapter_slots"] == 1
    assert host.stats().deferrals["full_sequence"] == 0, "only the head of the queue is counted"


@pytest.mark.parametrize("order", ["fcfs", "priority", "fcfs-front", "priority-by-arrival"])
def test_a_skipped_request_keeps_its_place_in_every_order(order: str) -> None:
    host = roomy(order=order, max_loras=1)
    add(host, "first", "x", max_tokens=4)
    for request_id in ("a", "b", "c"):
        add(host, request_id, "y", max_tokens=8)
    host.step()
    for request_id in ("a", "b", "c"):  # each has run before, c lost its row last
        host.park(request_id)
    host.ready("c")
    host.ready("a")
    host.ready("b")
    places = [host.explain(name).position for name in "abc"]
    for _ in range(3):
        host.step()
        assert [host.explain(name).position for name in "abc"] == places
    assert names(host.step().requests) == sorted("abc", key=lambda name: places["abc".index(name)])


def test_a_step_skips_a_bounded_number_of_waiting_requests() -> None:
    class Counting(FirstComeFirstServed):
        name = "counting"
        pops = 0

        def pop(self) -> Request:
            self.pops += 1
            return super().pop()

    order = Counting()
    host = roomy(order=order, max_loras=1)
    add(host, "a", "x", max_tokens=50)
    host.step()
    for index in range(3 * MAX_SKIPPED):
        add(host, f"r{index}", f"adapter {index}")
    add(host, "plain")
    order.pops = 0
    assert names(host.step().requests) == ["a"]
    assert order.pops == MAX_SKIPPED
    assert host.explain(f"r{MAX_SKIPPED + 1}").reason is Reason.BEHIND
    assert host.explain(f"r{MAX_SKIPPED + 1}").blocker == f"r{MAX_SKIPPED}"


def test_a_head_without_sequence_slot_blocks_the_queue() -> None:
    host = Host(max_num_seqs=1, max_loras=1)
    add(host, "a", "x")
    add(host, "b", "y")
    add(host, "c", "x")
    host.step()
    assert host.explain("b").reason is Reason.SEQUENCE_LIMIT


# ------------------------------------------------------------------ claims


def test_endless_requests_of_one_adapter_do_not_starve_another_adapter() -> None:
    """After `max_overtakes` bypasses it claims a slot, and starts when the running requests of another adapter end."""
    host = roomy(max_loras=1, max_overtakes=5)
    add(host, "x0", "x", max_tokens=3)
    host.step()
    waiting = add(host, "y", "y", max_tokens=3)
    for step in range(1, 40):
        add(host, f"x{step}", "x", max_tokens=3)  # one more each step, so that x would always run
        output = host.step()
        if "y" in names(output.requests):
            break
    assert waiting.num_bypassed == 5
    assert step <= 5 + 3, "five were admitted, and the last of them ran three steps"
    assert Adapter("x", 1) not in output.adapters


def test_a_skipped_request_claims_only_the_adapter_slot_held_longest() -> None:
    host = roomy(max_overtakes=0)
    add(host, "x1", "x", max_tokens=20)
    host.step()
    add(host, "y1", "y", max_tokens=2)
    host.step()
    for request_id, adapter in (("claims", "z"), ("x2", "x"), ("y2", "y"), ("z2", "z")):
        add(host, request_id, adapter, max_tokens=2)
    assert names(host.step().admitted) == ["y2"], "x has run longest, so no request starts with it"
    add(host, "second claim", "w", max_tokens=2)
    add(host, "y3", "y")
    assert names(host.step().admitted) == [], "now y is retired too"
    assert host.explain("y3").reason is Reason.ADAPTER_SLOTS
    order = [request.request_id for output in host.run_to_end() for request in output.admitted]
    assert order == ["claims", "x2", "z2", "second claim", "y3"], "each waits behind the claims before it"


def test_preempted_requests_of_an_adapter_with_a_claimed_slot_finish() -> None:
    host = roomy(max_loras=1, max_overtakes=0)
    add(host, "a", "x", max_tokens=9)
    add(host, "b", "x", max_tokens=4)
    host.step()
    add(host, "claims", "y")
    add(host, "new", "x")
    host.park("b")
    assert names(host.step().requests) == ["a"]
    host.ready("b")
    assert names(host.step().requests) == ["a", "b"]
    outputs = host.run_to_end()
    order = [request.request_id for output in outputs for request in output.admitted]
    assert order == ["claims", "new"]


def test_a_claimed_adapter_slot_does_not_delay_more_urgent_requests() -> None:
    host = roomy(order="priority", displace=False, max_loras=1, max_overtakes=0)
    add(host, "a", "x", priority=0, max_tokens=20)
    host.step()
    add(host, "claims", "y", priority=5)
    add(host, "urgent", "x", priority=1)
    add(host, "behind", "x", priority=5)
    assert names(host.step().requests) == ["a", "urgent"]


def test_an_abort_ends_the_request_s_claim_of_an_adapter_slot() -> None:
    host = roomy(max_loras=1, max_overtakes=0)
    add(host, "a", "x")
    add(host, "claims", "y")
    add(host, "b", "x")
    assert names(host.step().requests) == ["a"]
    host.abort("claims")
    assert names(host.step().requests) == ["a", "b"]


def test_bypasses_are_counted_again_after_a_preemption() -> None:
    host = roomy(max_loras=1, max_overtakes=1)
    add(host, "x1", "x", max_tokens=2)
    y = add(host, "y", "y")
    add(host, "x2", "x", max_tokens=1)
    host.step()
    assert y.num_bypassed == 1
    host.step()
    assert names(host.step().requests) == ["y"]
    host.park("y")
    assert y.num_bypassed == 0


def test_requests_without_adapter_run_while_all_slots_are_claimed() -> None:
    host = roomy(max_loras=1, max_overtakes=0)
    for request_id, adapter in (("a", "x"), ("b", "y"), ("c", "z"), ("d", "x"), ("e", None)):
        add(host, request_id, adapter)
    assert names(host.step().requests) == ["a", "e"]
    host.run_to_end()


# ------------------------------------------------------------------ priority preemption


def test_priority_preempts_the_adapter_with_the_fewest_requests() -> None:
    host = roomy(order="priority")
    for request_id, adapter in (("x1", "x"), ("x2", "x"), ("y1", "y")):
        add(host, request_id, adapter, priority=5)
    host.step()
    add(host, "urgent", "z", priority=0)
    output = host.step()
    assert (names(output.preempted), names(output.admitted)) == (["y1"], ["urgent"])


def test_no_preemption_for_a_slot_that_an_equally_urgent_request_holds() -> None:
    host = roomy(order="priority", max_loras=1)
    add(host, "x1", "x", priority=5)
    add(host, "x2", "x", priority=0)
    host.step()
    add(host, "urgent", "y", priority=0)
    add(host, "x3", "x", priority=7)
    output = host.step()
    assert (names(output.preempted), names(output.admitted)) == ([], ["x3"])


def test_priority_preemption_frees_adapter_and_sequence_slot_together() -> None:
    host = roomy(order="priority", max_loras=1, max_num_seqs=2)
    add(host, "x", "x", priority=1)
    add(host, "plain", priority=9)
    host.step()
    add(host, "urgent", "y", priority=0)
    output = host.step()
    assert (names(output.preempted), names(output.admitted)) == (["x"], ["urgent"])


# ------------------------------------------------------------------ the prefix cache


def test_adapters_and_their_versions_separate_the_prefix_cache() -> None:
    host = roomy(max_loras=9)
    prompt = host.prompt(9)
    found = {}
    variants: dict[str, Any] = {
        "x": {"adapter": ("x", 1)},
        "x again": {"adapter": Adapter("x", 1)},
        "newer": {"adapter": ("x", 2)},
        "text": {"adapter": ("x", "1")},
        "y": {"adapter": ("y", 1)},
        "plain": {},
        "salt": {"cache_salt": "x"},
        "salt and x": {"cache_salt": "x", "adapter": ("x", 1)},
    }
    for name, fields in variants.items():
        host.add(name, prompt, max_tokens=1, **fields)
        found |= cached_of(host.step())
    assert found == {name: 8 if name == "x again" else 0 for name in variants}


def test_requests_of_one_step_share_a_prefix_only_with_an_equal_adapter() -> None:
    host = roomy()
    prompt = host.prompt(9)
    for name, adapter in (("a", ("x", 1)), ("b", ("y", 1)), ("c", ("x", 1))):
        host.add(name, prompt, adapter=adapter)
    assert cached_of(host.step()) == {"a": 0, "b": 0, "c": 8}


# ------------------------------------------------------------------ explanations, refusals


def test_explain_names_the_adapters_that_hold_the_slots() -> None:
    host = roomy()
    for request_id, adapter in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z")):
        add(host, request_id, adapter)
    host.step()
    since = host.now - 1  # `schedule` is the call before the last
    host.step()
    told = host.explain("d")
    assert (told.reason, told.missing, told.since, told.blocker) == (Reason.ADAPTER_SLOTS, 1, since, "a")
    assert told.adapter_slots == {Adapter("x", 1): 2, Adapter("y", 1): 1}
    assert list(told.adapter_slots) == [Adapter("x", 1), Adapter("y", 1)], "the one that came first is first"
    assert host.explain("a").adapter_slots == {}


def test_a_parked_request_is_not_deferred_for_adapter_slots() -> None:
    host = roomy(max_loras=1)
    add(host, "a", "x")
    add(host, "b", "y")
    host.step()
    host.park("b", ParkReason.GRAMMAR)
    assert host.explain("b").reason is Reason.PARKED


def test_a_request_with_an_adapter_is_refused_if_max_loras_is_0() -> None:
    host = Host()
    with pytest.raises(RequestRefused, match=r"adapter 'x' and max_loras is 0.*raise max_loras"):
        add(host, "a", "x")


@pytest.mark.parametrize("adapter", ["x", ("x",), ("", 1), ("x", None), ("x", True), (1, "x"), ("x", 1.0), 5])
def test_an_invalid_adapter_is_refused(adapter: Any) -> None:
    with pytest.raises(RequestRefused, match=r"adapter is .*give \(name, version\)"):
        Request("a", [1], arrival_time=0.0, max_tokens=1, adapter=adapter)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_loras": -1}, "max_loras is -1; it must be between 0 and"),
        ({"max_loras": 1, "max_overtakes": -1}, "max_overtakes is -1; it must be between 0 and"),
        ({"max_overtakes": 3}, "max_overtakes is 3, but has no effect without adapters"),
    ],
)
def test_negative_max_loras_and_max_overtakes_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Host(**values)
