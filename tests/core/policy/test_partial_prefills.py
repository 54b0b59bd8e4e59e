"""Caps on partial prefills: requests that wait, requests that bypass them, and the bound."""

from __future__ import annotations

from typing import Any

from pointsman.core import Reason
from tests.core.helpers import Host, names, tokens_of


def capped(**config: Any) -> Host:
    """A host with a budget of 16, and at most 6 tokens for a request."""
    values = {"num_blocks": 80, "max_model_len": 100, "max_num_seqs": 8, "long_prefill_token_threshold": 6}
    return Host(**{**values, **config})


def test_a_second_partial_prefill_waits_and_short_prompts_bypass() -> None:
    host = capped(max_num_partial_prefills=1)
    host.add("first", 13)
    host.add("second", 13)
    host.add("short", 4)
    host.add("third", 7)
    assert tokens_of(host.step()) == {"first": 6, "short": 4}, "6 tokens remain for the third, and it has 7"
    waiting = host.explain("second")
    assert (waiting.reason, waiting.missing, waiting.blocker) == (Reason.PARTIAL_PREFILLS, 1, "first")
    assert host.explain("third").reason is Reason.PARTIAL_PREFILLS
    assert tokens_of(host.step()) == {"first": 6, "short": 1}
    assert tokens_of(host.step()) == {"first": 1, "short": 1, "second": 6}, "the first is done in this step"


def test_cached_tokens_do_not_make_a_prefill_partial() -> None:
    host = capped(max_num_partial_prefills=1)
    shared = host.prompt(13)
    host.add("a", shared, max_tokens=1)
    host.run_to_end()
    host.add("long", 30)
    host.add("known", [*shared, 1])
    assert tokens_of(host.step()) == {"long": 6, "known": 2}


def test_a_cap_of_2_allows_two_partial_prefills() -> None:
    host = capped(max_num_partial_prefills=2)
    for request_id in "abc":
        host.add(request_id, 20)
    assert tokens_of(host.step()) == {"a": 6, "b": 6}
    assert host.explain("c").reason is Reason.PARTIAL_PREFILLS


def test_long_prompts_have_a_separate_cap() -> None:
    host = capped(max_num_partial_prefills=3, max_long_partial_prefills=1, max_num_batched_tokens=17)
    host.add("long", 20)
    host.add("long too", 20)
    host.add("cut", 6)
    host.add("cut too", 6)
    assert tokens_of(host.step()) == {"long": 6, "cut": 6, "cut too": 5}, "the last is partial and not long"
    assert host.explain("long too").reason is Reason.PARTIAL_PREFILLS


def test_the_default_threshold_is_4_per_cent_of_the_model_length() -> None:
    host = capped(max_num_partial_prefills=2, long_prefill_token_threshold=0)
    assert host.config.prefill_threshold == 4
    host.add("a", 10)
    host.add("b", 10)
    assert tokens_of(host.step()) == {"a": 4, "b": 4}
    assert capped(max_num_partial_prefills=1, long_prefill_token_threshold=0).config.prefill_threshold == 0


def test_bypasses_of_a_waiting_prefill_are_bounded() -> None:
    """After `max_overtakes` bypasses it blocks the queue, even for requests that would fit."""
    host = capped(max_num_partial_prefills=1, max_overtakes=3, max_num_seqs=3)
    host.add("first", 90, max_tokens=2)
    second = host.add("second", 90, max_tokens=2)
    admitted = []
    for number in range(12):
        host.add(f"short {number}", 2, max_tokens=1)
        admitted += names(host.step().admitted)
    assert admitted == ["first", "short 0", "short 1", "short 2"]
    assert second.num_bypassed == 3
    assert host.explain("short 3").blocker == "second"
    while "second" not in admitted:
        admitted += names(host.step().admitted)
    assert admitted[4] == "second"


def test_a_resumed_request_also_waits_for_the_cap() -> None:
    host = capped(max_num_partial_prefills=1, enable_prefix_caching=False)
    host.add("a", 40)
    host.step()
    host.park("a")
    host.add("b", 40)
    host.step()
    host.ready("a")
    assert tokens_of(host.step()) == {"b": 6}
    assert host.explain("a").reason is Reason.PARTIAL_PREFILLS


def test_a_failed_step_restores_the_number_of_partial_prefills() -> None:
    host = capped(max_num_partial_prefills=1, max_steps_in_flight=2)
    host.add("a", 8)
    host.add("b", 20)
    host.step()
    finishing = host.schedule()
    assert tokens_of(finishing) == {"a": 2, "b": 6}
    host.fail(finishing)
    assert tokens_of(host.step()) == {"a": 2, "b": 6}


def test_no_preemption_for_a_request_that_the_cap_defers() -> None:
    host = capped(order="priority", max_num_partial_prefills=1, max_num_seqs=2)
    host.add("long", 40, priority=0)
    host.add("lazy", 2, priority=5, max_tokens=30)
    host.step()
    host.add("urgent", 20, priority=1)
    assert not host.step().preempted, "the sequence slot of lazy would be free, but the cap would still be reached"
    host.add("short", 6, priority=2)
    host.abort("urgent")
    assert names(host.step().preempted) == ["lazy"]
