"""The scenarios of `policies.py` are what they say, its figures are those of the simulation, and a miss is a miss."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import policies
import pytest
from _common import AZURE_TRACE
from _policy_agents import AGENTS_AND_GREED, AGENTS_BESIDE_FLOOD
from _policy_azure import AZURE
from _policy_chats_and_documents import CHATS_AND_DOCUMENTS
from _policy_long_outputs import LONG_OUTPUTS
from _policy_mooncake import MOONCAKE, MOONCAKE_TRACE, num_distinct_blocks
from _policy_scenario import GAP_TARGET, LOADS, TTFT_TARGET, highest_speed, measure
from _policy_tenants import TENANTS
from policies import CAPACITY, COMPARISONS, SCENARIOS, Comparison, Results, Target, judged

from pointsman.sim.simulator import simulate

needs_azure = pytest.mark.skipif(not AZURE_TRACE.exists(), reason=f"no trace at {AZURE_TRACE}")
needs_mooncake = pytest.mark.skipif(not MOONCAKE_TRACE.exists(), reason=f"no trace at {MOONCAKE_TRACE}")


# ---------------------------------------------------------------------- scenarios


@needs_azure
def test_the_tenants_send_the_azure_requests_and_the_heavy_one_most_of_them() -> None:
    azure, tenants = AZURE.arrivals(0.52), TENANTS.arrivals(0.52)
    assert len(azure) == len(tenants) == 6_000
    lengths = [[(t, r.num_prompt_tokens, r.num_output_tokens) for t, r in each] for each in (azure, tenants)]
    assert lengths[0] == lengths[1]
    counts = np.unique([request.tenant for _, request in tenants], return_counts=True)
    shares = dict(zip(*(each.tolist() for each in counts), strict=True))
    assert shares["heavy"] == pytest.approx(4_200, rel=0.03)
    assert [shares[f"light-{n}"] for n in (1, 2, 3)] == pytest.approx([600] * 3, rel=0.15)


def test_a_speed_changes_times_alone() -> None:
    slow, fast = (LONG_OUTPUTS.arrivals(speed) for speed in (0.5, 1.0))
    assert [r for _, r in slow] == [r for _, r in fast]
    assert [t for t, _ in slow] == pytest.approx([2 * t for t, _ in fast])
    outputs = np.array([request.num_output_tokens for _, request in slow])
    assert np.median(outputs[outputs < 1_000]) == pytest.approx(150, rel=0.1)
    assert np.median(outputs[outputs > 1_000]) == pytest.approx(3_000, rel=0.1)
    assert np.mean(outputs > 1_000) == pytest.approx(0.3, abs=0.03)


def test_a_document_comes_every_ten_seconds_whatever_the_rate_of_chats() -> None:
    for speed in (36.0, 48.0):
        arrivals = CHATS_AND_DOCUMENTS.arrivals(speed)
        times = np.array([time for time, request in arrivals if request.num_prompt_tokens == 30_000])
        assert np.diff(times) == pytest.approx(10.0)
        assert times[-1] == pytest.approx(arrivals[-1][0], abs=20)


def test_agents_come_back_with_what_they_sent_and_the_flood_asks_for_more() -> None:
    agents = [request for _, request in AGENTS_BESIDE_FLOOD.arrivals(6.0) if request.tenant == "agents"]
    assert agents == [request for _, request in AGENTS_AND_GREED.arrivals(6.0) if request.tenant == "agents"]
    known = [sum(turn.num_new_tokens + turn.num_output_tokens for turn in each.turns) for each in agents]
    assert sum(known) / sum(each.num_prompt_tokens for each in agents) == pytest.approx(0.83, abs=0.01)
    asked = {(each.tenant, each.retention) for _, each in AGENTS_AND_GREED.arrivals(6.0)}
    assert asked == {("agents", 75.0), ("agents", None), ("flood", 3600.0)}


@needs_mooncake
def test_the_pool_of_mooncake_is_a_quarter_of_what_keeps_every_prefix() -> None:
    assert MOONCAKE.config.num_blocks == num_distinct_blocks() // 4


@pytest.mark.parametrize("name", SCENARIOS)
def test_speeds_grow_with_the_load(name: str) -> None:
    speeds = [SCENARIOS[name].speeds[load] for load in LOADS]
    assert speeds == sorted(set(speeds)) and len(speeds) == 3


# ---------------------------------------------------------------------- figures


@needs_azure
def test_figures_are_those_of_the_simulation() -> None:
    found = measure(TENANTS, 5.0, {"watermark": 0.01}, 300)  # so fast that blocks run out
    config = TENANTS.config.replace(watermark=0.01)
    outcome = simulate(TENANTS.workload(5.0, 300), config, TENANTS.step_time, is_stepping=True)
    timings, stats = outcome.timings, outcome.stats[0]
    ttft = timings.first_token - timings.arrival
    assert (found.requests, found.preemptions) == (300, stats.num_preemptions)
    assert found.preemptions > 0 < found.recomputed_tokens
    assert found.recomputed_share == pytest.approx(stats.num_recomputed_tokens / stats.num_scheduled_tokens)
    assert found.ttft_mean == pytest.approx(ttft.mean()) and found.ttft_max == pytest.approx(ttft.max())
    good = (ttft <= TTFT_TARGET) & (timings.max_gap <= GAP_TARGET)
    assert found.goodput == pytest.approx(good.mean())
    assert found.within_target == pytest.approx(np.mean(ttft <= 5.0))
    light = np.array([request.tenant != "heavy" for request in outcome.requests])
    assert found.light_ttft_mean == pytest.approx(ttft[light].mean())
    assert found.ttft_mean_of["heavy"] == pytest.approx(ttft[~light].mean())
    assert found.prefix_hit_share is None
    assert found.wait_growth > 0.1  # far above saturation


def test_the_highest_speed_lies_between_one_within_the_limits_and_one_beyond_them() -> None:
    limits = {"ttft_p99": 5.0}
    found = highest_speed(LONG_OUTPUTS, {"watermark": 0.05}, limits, 200, tolerance=0.1)
    assert measure(LONG_OUTPUTS, found, {"watermark": 0.05}, 200).ttft_p99 <= 5.0
    assert measure(LONG_OUTPUTS, 1.15 * found, {"watermark": 0.05}, 200).ttft_p99 > 5.0


def test_no_speed_meets_a_limit_that_none_can_meet() -> None:
    assert highest_speed(LONG_OUTPUTS, {}, {"ttft_p50": 0.0}, 10) == 0.0


# ---------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("target", "beaten", "is_higher_better", "full", "quick"),
    [
        (Target(limit=0.5), 50.0, False, 25.0, 37.5),  # half as long; in the quick form a quarter less
        (Target(limit=1.1), 0.4, True, 0.44, 0.42),
        (Target(limit=1.03), 100.0, False, 103.0, 106.0),  # a tolerance
        (Target(limit=1.0), 100.0, False, 100.0, 100.0),
        (Target(limit=0.98), 1.0, True, 0.98, 0.96),
        (Target(limit=2.0, relative=False), 22.0, False, 2.0, 12.0),
        (Target(limit=0.9, relative=False), 0.4, True, 0.9, 0.65),
        (Target(limit=2.0, relative=False), 1.0, False, 2.0, 2.0),
    ],
)
def test_the_quick_form_asks_for_half_of_the_gain(
    target: Target, beaten: float, is_higher_better: bool, full: float, quick: float
) -> None:
    assert target.bound(beaten, is_higher_better, quick=False) == pytest.approx(full)
    assert target.bound(beaten, is_higher_better, quick=True) == pytest.approx(quick)


def comparison(**values: Any) -> Comparison:
    """A row on few requests."""
    given: dict[str, Any] = {
        "question": "how much stays free",
        "scenario": "long-outputs",
        "load": "above",
        "policy": {"watermark": 0.05},
        "figure": "preemptions",
        "target": Target(limit=0.5),
    }
    return Comparison(**{**given, **values})


def results(row: Comparison, num_requests: int) -> Results:
    """Of its simulations."""
    found = Results()
    found.run(row.jobs(num_requests), num_workers=1)
    return found


def test_the_best_of_what_meets_a_limit_has_to_be_beaten() -> None:
    limits = [{"max_num_seqs": number} for number in (4, 8, 256)]
    row = comparison(policy=limits[1], against=limits, figure="ttft_mean")
    found = results(row, 60)
    gaps = [found.found[job].itl_p99 for job in row.jobs(60)[1:]]  # type: ignore[union-attr]
    waits = [found.found[job].ttft_mean for job in row.jobs(60)[1:]]  # type: ignore[union-attr]
    assert len(set(gaps)) == len(set(waits)) == 3
    for limit in gaps:
        answer = judged(replace(row, given=("itl_p99", limit)), found, 60, quick=False)
        assert not isinstance(answer, str)
        assert answer.before == min(wait for wait, gap in zip(waits, gaps, strict=True) if gap <= limit)
    assert "nothing to beat" in str(judged(replace(row, given=("itl_p99", 0.0)), found, 60, quick=False))


def test_settings_that_are_the_scenarios_own_are_simulated_once() -> None:
    row = comparison(policy={"watermark": 0.0}, against=({}, {"max_num_seqs": 256}))
    assert len(set(row.jobs(60))) == 1


def test_a_capacity_is_a_figure() -> None:
    row = comparison(policy={"max_num_seqs": 4}, figure=CAPACITY, limits={"ttft_p99": 2.0}, target=Target(limit=1.0))
    answer = judged(row, results(row, 60), 60, quick=False)
    assert not isinstance(answer, str)
    assert answer.before > 1.2 * answer.after > 0  # all wait for the four that run
    assert not answer.is_met


def verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], row: Comparison) -> tuple[int, Any]:
    """The exit code of `--quick --check` with this row alone, and its JSON line."""
    monkeypatch.setattr(policies, "COMPARISONS", (row,))
    monkeypatch.setattr(policies, "NUM_QUICK", 130)
    monkeypatch.setattr(sys, "argv", ["policies.py", "--quick", "--check", "--workers", "1"])
    code = policies.main()
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    ("values", "code", "said"),
    [
        ({}, 0, None),
        ({"target": Target(limit=0.0)}, 0, None),
        ({"policy": {"watermark": 0.001}, "target": Target(limit=0.01)}, 1, "target: at most"),
        ({"policy": {"victim": "nobody"}}, 1, "not measured"),
        ({"policy": {"generosity": 3}}, 1, "generosity is no setting"),
        ({"figure": "light_ttft_mean"}, 1, "there is no light_ttft_mean"),
    ],
)
def test_a_target_that_is_missed_or_not_measured_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    code: int,
    said: str | None,
) -> None:
    found, figures = verdict(monkeypatch, capsys, comparison(**values))
    assert found == code, figures
    assert (said is None) == (figures["missed"] == [])
    if said is not None:
        assert said in figures["missed"][0]


@pytest.mark.parametrize("row", COMPARISONS, ids=lambda row: row.name)
def test_every_row_names_what_there_is(row: Comparison) -> None:
    assert row.scenario in SCENARIOS
    assert row.figure == CAPACITY or row.figure in policies.Figures.__dataclass_fields__
    assert (row.figure == CAPACITY) == (row.limits is not None)


def test_settings_of_the_command_line() -> None:
    read: Callable[[str], tuple[str, Any]] = policies.setting
    assert read("watermark=0.02") == ("watermark", 0.02)
    assert read("enable_prefix_caching=true") == ("enable_prefix_caching", True)
    assert read("order=fair:weight=3") == ("order", "fair:weight=3")
    with pytest.raises(policies.argparse.ArgumentTypeError, match="write it like"):
        read("watermark")
