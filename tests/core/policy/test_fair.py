"""The order "fair": the virtual token counter, the tokens that count, and the bound on the difference of service."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.core import ConfigError, Scheduler
from pointsman.core.policy.fair import Fair, read_weights
from tests.core.helpers import Host, names, small_config
from tests.forms import short_or_long


def fair_host(**overrides: Any) -> tuple[Host, Fair]:
    host = Host(**{"order": "fair", "max_num_seqs": 1, "enable_prefix_caching": False, **overrides})
    order = host.scheduler._parts.table.queue
    assert isinstance(order, Fair)
    return host, order


def admission_order(host: Host) -> list[str]:
    return [name for output in host.run_to_end() for name in names(output.admitted)]


def test_the_least_served_tenant_is_admitted_next() -> None:
    host, order = fair_host()
    for index in range(4):
        host.add(f"a{index}", 4, max_tokens=2, tenant="a")
    host.add("b0", 10, max_tokens=1, tenant="b")
    host.add("b1", 4, max_tokens=1, tenant="b")
    assert [host.explain(name).position for name in ("a0", "a3", "b0")] == [0, 3, 4]
    assert admission_order(host) == ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert order.served("a") == 4 * (4 + 2 * 2)
    assert order.served("b") == 10 + 4 + 2 * 2


def test_within_a_tenant_fcfs_with_preempted_requests_first() -> None:
    host, _ = fair_host(max_num_seqs=2)
    host.add("a0", 4, max_tokens=4, tenant="a")
    host.add("b0", 4, max_tokens=20, tenant="b")
    host.step()
    host.add("a2", 4, max_tokens=1, tenant="a")
    host.add("a1", 4, max_tokens=1, tenant="a", arrival_time=0.0)
    host.park("a0")
    host.ready("a0")
    assert admission_order(host) == ["a0", "a1", "a2"]


def test_a_tenant_s_weight_divides_its_service_counter() -> None:
    host, order = fair_host(order="fair:weights=gold/3+free/1,output_weight=1")
    for index in range(8):
        host.add(f"gold{index}", 5, max_tokens=1, tenant="gold")
        host.add(f"free{index}", 5, max_tokens=1, tenant="free")
    first = admission_order(host)[:8]
    assert Counter(name[:4] for name in first) == {"gold": 6, "free": 2}
    assert order.served("gold") == pytest.approx(8 * 6 / 3, rel=1e-5)


def test_a_tenant_gains_no_advantage_while_it_is_idle() -> None:
    host, order = fair_host()
    host.add("b", 4, max_tokens=1, tenant="b")
    host.step()
    for index in range(5):
        host.add(f"a{index}", 4, max_tokens=8, tenant="a")
        host.step()
    for index in range(5, 8):
        host.add(f"a{index}", 4, max_tokens=8, tenant="a")
    while not order.served("a") >= 40:
        host.step()
    host.add("b0", 4, max_tokens=8, tenant="b")
    assert order.served("b") == order.served("a")


def test_a_new_tenant_starts_at_the_counter_of_the_last_tenant() -> None:
    host, order = fair_host(max_num_seqs=4)
    host.add("a", 8, max_tokens=8, tenant="a")
    host.step()
    host.step()
    host.add("b", 4, max_tokens=1, tenant="b")
    assert order.served("b") == order.served("a") == 8 + 2 * 2


def test_cached_and_recomputed_tokens_do_not_count_as_service() -> None:
    host, order = fair_host(enable_prefix_caching=True, max_num_seqs=2)
    prompt = host.prompt(9)
    host.add("a", prompt, max_tokens=1, tenant="a")
    host.run_to_end()
    assert order.served("a") == 9 + 2
    host.add("b", prompt, max_tokens=4, tenant="b")
    lifted = order.served("b")
    host.step()
    host.step()
    assert order.served("b") == lifted + 1 + 2 * 2, "8 of its 9 tokens were cached"
    host.reset_prefix_cache(preempt_running=True)
    assert order.served("b") == lifted + 1 + 2 * 2
    host.run_to_end()
    assert order.served("b") == lifted + 1 + 2 * 4


def test_an_admission_of_a_failed_step_does_not_count_as_service() -> None:
    host, order = fair_host()
    host.add("a", 8, max_tokens=2, tenant="a")
    output = host.schedule()
    assert order.served("a") == 8
    host.fail(output)
    assert order.served("a") == 0
    host.run_to_end()
    assert order.served("a") == 8 + 2 * 2


def test_outputs_of_aborted_and_preempted_requests_count_as_service() -> None:
    host, order = fair_host(max_num_seqs=2)
    host.add("a", 4, max_tokens=9, tenant="a")
    host.add("b", 4, max_tokens=9, tenant="b")
    for _ in range(3):
        host.step()
    host.abort("a")
    host.park("b")
    assert order.served("a") == order.served("b") == 4 + 2 * 3
    host.ready("b")
    host.run_to_end()
    assert order.served("b") == 4 + 2 * 9


def test_explain_says_how_much_more_a_tenant_was_served() -> None:
    host, _ = fair_host()
    host.add("a0", 8, max_tokens=2, tenant="a")
    host.add("a1", 8, max_tokens=2, tenant="a")
    host.add("b0", 8, max_tokens=2, tenant="b")
    host.step()
    assert host.explain("a1").sentence == (
        "a1 waits behind b0, which waits: all sequence slots are taken. fair: tenant a has had 10 tokens more than "
        "tenant b."
    )
    host.add("b1", 8, max_tokens=2, tenant="b")
    assert host.explain("b1").sentence == "b1 waits behind b0, which waits: all sequence slots are taken."


def test_idle_tenants_are_removed() -> None:
    host, order = fair_host(max_num_seqs=4)
    for index in range(200):
        host.add(f"r{index}", 4, max_tokens=2, tenant=f"tenant {index}")
        host.step()
    host.run_to_end()
    assert len(order._tenants) <= 140
    assert len(order._outputs) <= 256
    assert not order._runs
    assert len(order._heap) <= 130


def test_fair_order_guarantees_steps_until_another_tenant_is_next() -> None:
    host, order = fair_host(max_num_seqs=3, num_blocks=64, max_num_batched_tokens=32)
    for index in range(2):
        host.add(f"a{index}", 4, max_tokens=50, tenant="a")
    host.add("b0", 12, max_tokens=50, tenant="b")
    host.step()
    host.add("a2", 4, max_tokens=4, tenant="a")
    assert order.guaranteed_steps(30) == 30, "one tenant alone waits"
    host.add("b1", 4, max_tokens=4, tenant="b")
    host.step()
    assert (order.served("a"), order.served("b")) == (16, 16), "a adds 4 in a step, b 2; a came first"
    assert (names([order.peek()]), order.guaranteed_steps(30)) == (["a2"], 1)
    host.step()
    assert (order.served("a"), order.served("b")) == (20, 18)
    assert (names([order.peek()]), order.guaranteed_steps(30)) == (["b1"], 1), (
        "18 + 2 is not below 20, so one step is guaranteed"
    )


@pytest.mark.parametrize(
    "spec, what",
    [
        ("fair:weights=gold", "write each part as NAME/WEIGHT"),
        ("fair:weights=gold/0", "a weight of 0.001 to 1000"),
        ("fair:weights=gold/nan", "a weight of 0.001 to 1000"),
        ("fair:weights=gold/2+gold/3", "names tenant 'gold' twice"),
        ("fair:input_weight=0", "input_weight of order 'fair'"),
        ("fair:output_weight=many", "give a number"),
    ],
)
def test_invalid_tenant_weights_are_refused(spec: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Scheduler(small_config(order=spec))


def test_a_tenant_name_may_have_a_slash() -> None:
    assert read_weights("team/a/2+b/0.5") == {"team/a": 2.0, "b": 0.5}
    assert read_weights("") == {}


@settings(max_examples=short_or_long(12, 120), deadline=None)
@given(data=st.data())
def test_two_backlogged_tenants_are_served_equally_within_the_bound(data: st.DataObject) -> None:
    """In any interval in which both have waiting requests, the difference is at most 2 max(w_in L, w_out M) / the lower
    weight. The pool is so small that requests are preempted."""
    weight = data.draw(st.sampled_from([1, 2, 3]))
    host, order = fair_host(
        order=f"fair:weights=a/{weight}",
        max_num_seqs=data.draw(st.integers(1, 3)),
        num_blocks=data.draw(st.integers(8, 14)),
        max_model_len=28,
        full_sequence_must_fit=False,
    )
    lengths = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 12)), min_size=8, max_size=12)
    longest = 0
    for tenant in "abc":
        for index, (prompt, output) in enumerate(data.draw(lengths)):
            host.add(f"{tenant}{index}", prompt, max_tokens=output, tenant=tenant)
            longest = max(longest, prompt)
    series: list[tuple[float, float]] = []  # served to a and b while both wait
    most = 0
    while True:
        output = host.schedule()
        most = max(most, sum(request.token_limit for request in host.scheduler.running))
        waiting = {request.tenant for request in order}
        if not {"a", "b"} <= waiting:
            break
        series.append((order.served("a"), order.served("b")))
        host.update(output)
    bound = 2 * max(longest, 2 * most)
    differences = [a - b for a, b in series]
    if differences:
        assert max(differences) - min(differences) <= bound
    host.update(output)
    host.run_to_end()
    assert not order._runs
    assert not len(order)
