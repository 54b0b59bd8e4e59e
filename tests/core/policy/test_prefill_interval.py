"""The interval between steps that compute prompts, while requests decode."""

from __future__ import annotations

import io

import pytest

from pointsman.core import ConfigError, InvalidTransition, PauseMode, Reason, Recorder
from pointsman.core.replay import replay
from tests.core.helpers import Host, tokens_of


def test_prompts_are_computed_once_in_an_interval() -> None:
    host = Host(prefill_interval=3, num_blocks=60)
    host.add("a", 4)
    assert tokens_of(host.step()) == {"a": 4}, "no request decodes"
    host.add("b", 4)
    assert tokens_of(host.step()) == {"a": 1}
    assert host.explain("b").reason is Reason.PREFILL_INTERVAL
    assert "held back between the steps that compute prompts" in host.explain("b").sentence
    assert tokens_of(host.step()) == {"a": 1}
    assert tokens_of(host.step()) == {"a": 1, "b": 4}
    host.add("c", 4)
    assert [tokens_of(host.step()) for _ in range(3)] == [{"a": 1, "b": 1}] * 2 + [{"a": 1, "b": 1, "c": 4}]
    assert host.scheduler.stats().deferrals["prefill_interval"] == 4


def test_a_partial_prefill_waits_for_the_interval_too() -> None:
    host = Host(prefill_interval=2, num_blocks=60)
    host.add("a", 4)
    host.step()
    host.step()
    host.add("long", 40)
    assert tokens_of(host.step()) == {"a": 1, "long": 15}
    assert tokens_of(host.step()) == {"a": 1}
    assert host.explain("long").reason is Reason.PREFILL_INTERVAL
    assert tokens_of(host.step()) == {"a": 1, "long": 15}


def test_prompts_are_not_held_back_while_no_request_decodes() -> None:
    host = Host(prefill_interval=9, num_blocks=60)
    host.add("long", 40)
    assert [tokens_of(host.step()) for _ in range(3)] == [{"long": 16}, {"long": 16}, {"long": 8}]


def test_a_request_with_a_single_uncached_token_is_not_held_back() -> None:
    host = Host(prefill_interval=5, num_blocks=60)
    shared = host.prompt(9)
    host.add("before", shared, max_tokens=1)
    host.run_to_end()
    for _ in range(5):
        host.step()
    host.add("a", 4)
    host.step()
    host.add("cached", shared)
    assert tokens_of(host.step()) == {"a": 1, "cached": 1}


def test_a_backlog_ends_the_interval() -> None:
    """The budget leaves a request in the queue, so the capacity and not the interval bounds prompts."""
    host = Host(prefill_interval=4, num_blocks=60, max_num_seqs=8)
    host.add("a", 4)
    for _ in range(4):
        host.step()
    for name in "bcde":
        host.add(name, 8)
    assert tokens_of(host.step()) == {"a": 1, "b": 8, "c": 7}
    assert tokens_of(host.step()) == {"a": 1, "b": 1, "c": 1, "d": 8, "e": 5}
    host.add("f", 4)
    assert "f" not in tokens_of(host.step()), "the queue was empty after the step before"


def test_the_interval_holds_after_plain_steps_done_at_once() -> None:
    host = Host(prefill_interval=4, num_blocks=60)
    host.add("a", 4, max_tokens=40)
    host.step()
    assert host.scheduler.guaranteed_steps(2) == 2
    now = host.now + 1
    host.scheduler.advance([now, now + 1, now + 2], [1])
    host.now = now + 2
    host.add("b", 4)
    assert tokens_of(host.step()) == {"a": 1}, "the third step after the prompt of a"
    assert tokens_of(host.step()) == {"a": 1, "b": 4}


def test_held_back_steps_are_guaranteed_up_to_the_interval() -> None:
    host = Host(prefill_interval=6, num_blocks=60)
    host.add("a", 4, max_tokens=40)
    host.step()
    host.add("b", 4)
    host.step()
    assert host.explain("b").reason is Reason.PREFILL_INTERVAL
    assert host.scheduler.guaranteed_steps(30) == 4
    now = host.now + 1
    host.scheduler.advance([now + step for step in range(5)], [1])
    host.now = now + 4
    assert tokens_of(host.step()) == {"a": 1, "b": 4}


def test_priority_preemption_waits_for_the_interval() -> None:
    host = Host(prefill_interval=3, order="priority", max_num_seqs=1)
    host.add("a", 4, priority=2)
    host.step()
    host.add("urgent", 4, priority=1)
    assert tokens_of(host.step()) == {"a": 1}
    assert tokens_of(host.step()) == {"a": 1}
    assert tokens_of(host.step()) == {"urgent": 4}


def test_a_failed_step_computes_its_prompts_in_the_next_step() -> None:
    host = Host(prefill_interval=9, num_blocks=60)
    host.add("a", 4)
    host.step()
    for _ in range(8):
        host.step()
    host.add("b", 4)
    output = host.schedule()
    assert tokens_of(output) == {"a": 1, "b": 4}
    host.scheduler.fail(output, host.now)
    assert tokens_of(host.step()) == {"a": 1, "b": 4}


def test_a_pause_of_admissions_leaves_a_backlog() -> None:
    host = Host(prefill_interval=9, num_blocks=60)
    host.add("a", 4)
    host.step()
    for _ in range(8):
        host.step()
    host.add("b", 4)
    host.scheduler.pause(host.now, PauseMode.ADMISSIONS)
    host.step()
    host.scheduler.resume(host.now)
    assert tokens_of(host.step()) == {"a": 1, "b": 4}


# ---------------------------------------------------------------------- the host decides


def test_the_host_holds_prompts_back() -> None:
    host = Host(prefill_interval="host", num_blocks=60)
    host.add("a", 4)
    host.scheduler.hold_prefills(True, host.now)
    assert host.scheduler.holds_prefills
    assert tokens_of(host.step()) == {"a": 4}, "no request decodes"
    host.add("b", 4)
    assert [tokens_of(host.step()) for _ in range(3)] == [{"a": 1}] * 3
    host.scheduler.hold_prefills(False, host.now)
    assert tokens_of(host.step()) == {"a": 1, "b": 4}


def test_a_recording_with_held_prompts_replays() -> None:
    file = io.StringIO()
    host = Host(recorder=Recorder(file), prefill_interval="host", num_blocks=60)
    host.add("a", 4)
    host.step()
    host.add("b", 4)
    host.scheduler.hold_prefills(True, host.now)
    host.step()
    host.scheduler.hold_prefills(False, host.now)
    host.run_to_end()
    assert replay(file.getvalue().splitlines(keepends=True)).num_requests == 2
    again = file.getvalue().replace('"is_held":true', '"is_held":false')
    with pytest.raises(Exception, match="was"):
        replay(again.splitlines(keepends=True))


def test_the_host_decides_only_where_the_configuration_says_so() -> None:
    with pytest.raises(InvalidTransition, match=r'prefill_interval is 3, .* set it to "host"'):
        Host(prefill_interval=3).scheduler.hold_prefills(True, 1.0)
    assert not Host().scheduler.holds_prefills


@pytest.mark.parametrize(
    "value, message",
    [(0, "prefill_interval is 0; it must be between 1"), ("never", "prefill_interval is 'never'; give a number of")],
)
def test_an_impossible_interval_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Host(prefill_interval=value)


def test_an_interval_needs_mixed_batching() -> None:
    with pytest.raises(ConfigError, match='prefill_interval is 4, and works with batching "mixed" alone'):
        Host(prefill_interval=4, batching="static")
