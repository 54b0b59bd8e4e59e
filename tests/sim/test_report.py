"""Reports: the figures match the simulation, the intervals cover, and the files can be read."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pointsman.core import SchedulerConfig
from pointsman.sim.outcome import UNFINISHED
from pointsman.sim.report import Report, combine, figures
from pointsman.sim.report.course import Levels, average_levels, courses, downsample_levels
from pointsman.sim.report.intervals import (
    CELLS,
    Distribution,
    Draws,
    consecutive_blocks,
    estimate_distribution,
    student_t_percentile,
    weighted_percentiles,
)
from pointsman.sim.report.page import STYLE, write_html
from pointsman.sim.report.perfetto import write_trace
from pointsman.sim.report.summary import gap_blocks
from pointsman.sim.report.table import print_report
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import SimRequest
from tests.sim.test_simulator import STEP_TIME, Listed, config, workload

PERCENTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return simulate(workload(3, 110), config(), STEP_TIME)


@pytest.fixture(scope="module")
def fleet() -> Outcome:
    return simulate(workload(4, 120), config(), STEP_TIME, num_replicas=3)


def empty() -> Outcome:
    return simulate(Listed([], {}), config(), STEP_TIME)


def single() -> Outcome:
    """A prompt of 100 tokens in two steps, then two steps of one token; as in the simulator's tests."""
    return simulate(
        Listed([(5.0, SimRequest("a", 100, 3))], {}), config(), LinearStepTime(per_step=1.0, per_token=0.01)
    )


def all_refused() -> Outcome:
    return simulate(Listed([(0.0, SimRequest("long", 300, 3))], {}), config(), STEP_TIME)


def cut_short() -> Outcome:
    return simulate(workload(3), config(), STEP_TIME, until=0.2)


def is_as_numpy(found: Distribution, values: np.ndarray[Any, Any]) -> None:
    assert found.count == len(values)
    assert found.mean.value == pytest.approx(values.mean())
    assert found.max.value == values.max()
    for name, percent in PERCENTILES.items():
        assert getattr(found, name).value == pytest.approx(np.percentile(values, percent)), name


# ---------------------------------------------------------------------- percentiles and intervals


@pytest.mark.parametrize("seed", range(5))
def test_weighted_percentiles_are_those_of_repeated_values(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, counts = np.sort(rng.exponential(size=50)), rng.integers(1, 40, size=50)
    shares = np.linspace(0, 1, 101)
    expected = np.quantile(values.repeat(counts), shares)
    np.testing.assert_allclose(weighted_percentiles(values, counts, shares.tolist()), expected, rtol=1e-12)


@pytest.mark.parametrize("num_values", [CELLS // 2, 10 * CELLS])
def test_a_resample_with_each_block_once_equals_all_values(num_values: int) -> None:
    """If cells hold several values, the figures agree up to the width of a cell."""
    values = np.random.default_rng(1).exponential(size=num_values)
    draws = Draws(40, 3, seed=0)
    draws.times[:] = 1.0
    found = estimate_distribution(values, None, consecutive_blocks(num_values, 40), draws)
    for name in ("mean", *PERCENTILES):
        estimate = getattr(found, name)
        assert estimate.low == pytest.approx(estimate.value, rel=0.02), name
        assert estimate.high == pytest.approx(estimate.value, rel=0.02), name


def test_repeated_values_and_counts_have_the_same_intervals() -> None:
    rng = np.random.default_rng(2)
    values, counts = rng.exponential(size=400), rng.integers(1, 5, size=400)
    blocks, draws = consecutive_blocks(400, 40), Draws(40, 200, seed=0)
    counted = estimate_distribution(values, counts, blocks, draws)
    repeated = estimate_distribution(values.repeat(counts), None, blocks.repeat(counts), draws)
    assert counted.count == repeated.count
    for name in ("mean", *PERCENTILES):
        one, other = getattr(counted, name), getattr(repeated, name)
        assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high)), name


def test_intervals_cover_the_true_value() -> None:
    """Correlated neighbours: an autoregressive process of known distribution, in 60 runs.

    95 % intervals cover in 57 of them. With blocks of one value, which assume independence, far fewer do.
    """
    truth = {"mean": 0.0, "p50": 0.0, "p90": 1.2816}
    num_runs, num_values = 60, 600
    in_blocks, one_by_one = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0)
    rng = np.random.default_rng(5)
    for run in range(num_runs):
        noise = rng.normal(size=num_values + 100) * np.sqrt(1 - 0.8**2)
        values = np.array(list(itertools.accumulate(noise, lambda last, new: 0.8 * last + new)))[100:]
        for hits, num_blocks in ((in_blocks, 24), (one_by_one, num_values)):
            if num_blocks == num_values and run % 4:
                continue
            found = estimate_distribution(
                values, None, consecutive_blocks(num_values, num_blocks), Draws(num_blocks, 100, run)
            )
            for name, true in truth.items():
                estimate = getattr(found, name)
                hits[name] += estimate.low <= true <= estimate.high
    for name in truth:
        assert 0.88 <= in_blocks[name] / num_runs <= 1, (name, in_blocks)
        assert one_by_one[name] / (num_runs / 4) <= 0.8, (name, one_by_one)


def test_too_few_values_have_no_interval(outcome: Outcome) -> None:
    report = figures(outcome, config())
    assert report.ttft.count < 500
    assert report.ttft.p50.low is not None
    assert report.ttft.p99.low is None  # fewer than five values lie beyond
    assert report.itl.p99.low is not None
    assert report.ttft.max.low is None
    assert f"500 resamples of {math.isqrt(outcome.timings.count)} blocks" in report.method
    assert figures(outcome, config(), num_bootstrap=0).ttft.p50.low is None
    assert "fewer than the 100" in figures(single(), config()).method


def test_percentiles_of_students_t_match_the_table() -> None:
    for degrees, expected in {1: 12.706, 4: 2.776, 5: 2.571, 6: 2.447, 9: 2.262, 39: 2.023}.items():
        assert student_t_percentile(degrees) == pytest.approx(expected, rel=1e-3)


def test_the_same_seed_gives_the_same_report(outcome: Outcome) -> None:
    assert figures(outcome, config(), seed=1) == figures(outcome, config(), seed=1)
    assert figures(outcome, config(), seed=1) != figures(outcome, config(), seed=2)


# ---------------------------------------------------------------------- figures


@pytest.mark.parametrize("name", ["outcome", "fleet"])
def test_latencies_in_the_report_match_the_timings(name: str, request: pytest.FixtureRequest) -> None:
    outcome: Outcome = request.getfixturevalue(name)
    timings, report = outcome.timings, figures(outcome, config())
    is_as_numpy(report.ttft, timings.first_token - timings.arrival)
    is_as_numpy(report.e2e, timings.last_token - timings.arrival)
    is_as_numpy(report.queue, timings.scheduled - timings.arrival)
    several = timings.num_output_tokens > 1
    tpot = (timings.last_token - timings.first_token)[several] / (timings.num_output_tokens[several] - 1)
    is_as_numpy(report.tpot, tpot)
    values, counts = timings.gaps()
    is_as_numpy(report.itl, values.repeat(counts))


def test_decodes_in_one_run_and_single_steps_have_equal_reports() -> None:
    fast = figures(simulate(workload(6, 30), config(), STEP_TIME), config(), num_bootstrap=0)
    slow = figures(simulate(workload(6, 30), config(), STEP_TIME, is_stepping=True), config(), num_bootstrap=0)
    for name in ("counts", "seconds", "ttft", "e2e", "itl", "rows_per_step", "tokens_per_step", "busy", "slots_used"):
        assert _numbers(getattr(fast, name)) == pytest.approx(_numbers(getattr(slow, name)), rel=1e-9), name
    assert _numbers(fast.running) == pytest.approx(_numbers(slow.running), rel=1e-9)


def test_figures_of_a_single_request_match_its_steps() -> None:
    report = figures(single(), config(), ttft_target=3.0, itl_target=1.1, price_per_hour=3600.0)
    assert report.ttft.p99.value == pytest.approx(3.0)
    assert report.tpot.mean.value == report.itl.p50.value == pytest.approx(1.01)
    assert report.queue.max.value == 0.0
    assert report.seconds.value == pytest.approx(5.02)
    assert report.requests_per_second.value == pytest.approx(1 / 5.02)
    assert report.output_tokens_per_second.value == pytest.approx(3 / 5.02)
    assert report.total_tokens_per_second.value == pytest.approx(103 / 5.02)
    assert report.price_per_million_output_tokens.value == pytest.approx(5.02 / 3 * 1e6)
    assert report.running.mean.value == report.busy.value == pytest.approx(1.0)
    assert report.tokens_per_step.max.value == 64
    assert report.budget_used.value == pytest.approx(102 / (4 * 64))
    assert report.slots_used.value == pytest.approx(1 / 12)
    assert report.kv_cache_usage.max.value == pytest.approx(13 / 64)
    assert report.goodput is not None
    assert report.goodput.share.value == 1.0


def test_idle_time_lowers_means_over_time() -> None:
    """Two requests of two steps, four seconds apart: four of six seconds are busy."""
    two = Listed([(1.0, SimRequest("a", 4, 2)), (5.0, SimRequest("b", 4, 2))], {})
    report = figures(simulate(two, config(), LinearStepTime(per_step=1.0)), config())
    assert report.seconds.value == 6.0
    assert report.busy.value == report.running.mean.value == pytest.approx(4 / 6)
    assert report.running.max.value == 1.0


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_busy_time_is_the_time_of_all_steps(num_replicas: int) -> None:
    for seed in range(3):
        outcome = simulate(workload(seed, 40), config(), LinearStepTime(per_step=0.003), num_replicas=num_replicas)
        report = figures(outcome, config(), num_bootstrap=0)
        assert report.busy.value == pytest.approx(0.003 * report.counts.num_steps / outcome.seconds / num_replicas)


def test_goodput_is_the_share_that_meets_all_targets(outcome: Outcome) -> None:
    timings = outcome.timings
    ttft, e2e = timings.first_token - timings.arrival, timings.last_token - timings.arrival
    targets = {"ttft_target": np.median(ttft), "itl_target": np.median(timings.max_gap), "e2e_target": np.median(e2e)}
    good = (ttft <= targets["ttft_target"]) & (timings.max_gap <= targets["itl_target"])
    good &= e2e <= targets["e2e_target"]
    given = {name: float(value) for name, value in targets.items()}
    goodput = figures(outcome, config(), **given, itl_of="gap").goodput
    assert goodput is not None
    assert 0 < good.sum() < timings.count
    assert goodput.share.value == pytest.approx(good.mean())
    assert goodput.requests_per_second.value == pytest.approx(good.sum() / outcome.seconds)
    assert goodput.share.low is not None
    assert goodput.share.low < goodput.share.value
    assert figures(outcome, config()).goodput is None
    never = figures(outcome, config(), ttft_target=0.0).goodput
    assert never is not None
    assert never.share.value == 0.0


def test_unfinished_and_refused_requests_miss_the_targets() -> None:
    report = figures(cut_short(), config(), e2e_target=1e9)
    counts = report.counts
    assert counts.unfinished > 0
    assert report.goodput is not None
    assert report.goodput.share.value == pytest.approx(counts.finished / counts.arrived)
    assert any("unfinished" in note for note in report.notes)
    refused = figures(all_refused(), config(), e2e_target=1e9)
    assert refused.counts.refused == 1
    assert refused.goodput is not None
    assert refused.goodput.share.value == 0.0


def test_report_counts_preemptions_and_prefix_cache_hits() -> None:
    settings = config(num_blocks=33, full_sequence_must_fit=False, order="priority")
    outcome = simulate(workload(3), settings, STEP_TIME)
    (stats,), report = outcome.stats, figures(outcome, settings)
    assert report.counts.preemptions["memory"] > 0
    assert sum(report.counts.preemptions.values()) == stats.num_preemptions == outcome.timings.num_preemptions.sum()
    assert report.counts.recomputed_tokens == stats.num_recomputed_tokens > 0
    assert report.prefix_hit_rate.value == stats.prefix_hits / stats.prefix_queries
    without = config(enable_prefix_caching=False)
    assert figures(simulate(workload(3), without, STEP_TIME), without).prefix_hit_rate.value is None


@pytest.mark.parametrize("name", ["outcome", "fleet"])
def test_bootstrap_blocks_contain_gaps_of_nearby_times(name: str, request: pytest.FixtureRequest) -> None:
    """Each block has its share of the gaps, and runs of decodes count at the time when they happened."""
    outcome: Outcome = request.getfixturevalue(name)
    values, counts = outcome.timings.gaps()
    runs = courses(outcome)
    blocks = gap_blocks(runs, len(values), 10)
    assert len(blocks) == len(values)
    shares = np.bincount(blocks, counts, 10) / counts.sum()
    assert shares.min() > 0.05
    assert shares.max() < 0.2
    later = np.concatenate([run.num_steps - 1 for run in runs])
    rows = np.concatenate([run.num_rows for run in runs])
    assert (later @ rows) == counts[len(values) - later.sum() :].sum()


# ---------------------------------------------------------------------- several seeds


def _of_seeds(settings: SchedulerConfig, **options: Any) -> list[Report]:
    return [figures(simulate(workload(seed, 20), settings, STEP_TIME), settings, **options) for seed in range(4)]


def test_combined_reports_have_the_interval_over_seeds() -> None:
    reports = _of_seeds(config(), ttft_target=0.1)
    both = combine(reports)
    values = np.array([report.ttft.p99.value for report in reports])
    half = 3.182446 * values.std(ddof=1) / 2
    found = both.ttft.p99
    assert (found.value, found.low, found.high) == pytest.approx(
        (values.mean(), values.mean() - half, values.mean() + half)
    )
    assert both.counts.finished == sum(report.counts.finished for report in reports)
    assert both.num_seeds == 4
    assert "4 runs that differ in their seed" in both.method
    assert both.requests_per_second.low is not None
    json.dumps(both.to_dict(), allow_nan=False)
    assert combine(reports[:1]) == reports[0]


def test_only_similar_reports_are_combined() -> None:
    with pytest.raises(ValueError, match="no reports"):
        combine([])
    with pytest.raises(ValueError, match="differ in nothing but their seed"):
        combine([figures(single(), config()), figures(single(), config(), ttft_target=1.0)])
    assert combine([figures(single(), config()), figures(empty(), config())]).ttft.p50.value is None


# ---------------------------------------------------------------------- what is written


class _Tags(HTMLParser):
    """Checks that tags are closed in order, and collects text."""

    _VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.policy = ""
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        values = dict(attrs)
        assert not any(name.startswith("on") or name in ("style", "src", "href") for name in values)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        if tag not in self._VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _page(outcome: Outcome, report: Report, path: Path, **options: Any) -> tuple[str, _Tags]:
    write_html(report, outcome, path, **options)
    page, tags = path.read_text(encoding="utf-8"), _Tags()
    tags.feed(page)
    tags.close()
    assert not tags.open
    return page, tags


@pytest.mark.parametrize("name", ["outcome", "fleet"])
def test_the_report_page_is_self_contained(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    outcome: Outcome = request.getfixturevalue(name)
    report = figures(outcome, config(), ttft_target=0.5)
    page, tags = _page(outcome, report, tmp_path / "report.html")
    assert not re.search(r"https?:|//|url\(|@import", page)
    assert tags.seen.count("svg") == 5
    assert "nan" not in page.lower().replace("finance", "")
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    assert tags.policy.startswith("default-src 'none'; ")
    assert f"'sha256-{digest}'" in tags.policy
    assert "unsafe" not in tags.policy
    assert "inter-token latency" in tags.text
    assert "prefers-color-scheme: dark" in page


def test_hostile_names_are_escaped_on_the_report_page(tmp_path: Path) -> None:
    name = "<script>alert('\u202e\x00\ud800')</script>\" onload=x"
    outcome = simulate(Listed([(0.0, SimRequest(name, 300, 3))], {}), config(), STEP_TIME)
    page, tags = _page(outcome, figures(outcome, config()), tmp_path / "report.html", title="<img src=x>")
    assert "script" not in tags.seen
    assert "img" not in tags.seen
    assert "&lt;script&gt;" in page
    assert "<script>alert(" in tags.text
    assert not re.search("[\u202e\x00\ud800]", page)


@pytest.mark.parametrize("make", [empty, single, all_refused, cut_short])
def test_empty_and_tiny_runs_give_a_report(make: Any, tmp_path: Path) -> None:
    outcome = make()
    report = figures(outcome, config(), ttft_target=1.0, price_per_hour=1.0)
    json.dumps(report.to_dict(), allow_nan=False)
    _page(outcome, report, tmp_path / "report.html")
    write_trace(outcome, tmp_path / "trace.json")
    text = _printed(report)
    if not report.counts.finished:
        assert ("No request arrived." in text) or ("No request finished" in text)


def test_the_table_fits_100_columns() -> None:
    slow = LinearStepTime(per_step=3.0, per_row=0.5)
    outcome = simulate(workload(3, 120), config(), slow)
    text = _printed(figures(outcome, config(), ttft_target=0.5, itl_target=0.1, e2e_target=20, price_per_hour=98.7))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    assert "price" in text
    for word in ("TTFT, s", "ITL, per gap", "TPOT, per request", "95 % intervals", "preemptions"):
        assert word in text


def _printed(report: Report) -> str:
    file = io.StringIO()
    print_report(report, Console(file=file, width=100))
    return file.getvalue()


@pytest.mark.parametrize("name", ["outcome", "fleet"])
def test_slices_of_the_perfetto_trace_are_nested(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    outcome: Outcome = request.getfixturevalue(name)
    write_trace(outcome, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    requests = [event for event in slices if event["name"].startswith("request")]
    assert len(requests) == outcome.timings.count
    by_track: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in slices:
        by_track.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in by_track.values():
        open_until: list[int] = []
        for event in sorted(
            events, key=lambda event: (event["ts"], -event["dur"], not event["name"].startswith("request"))
        ):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1]
            assert len(open_until) <= 1
            open_until.append(event["ts"] + event["dur"])
    assert {event["pid"] for event in requests} == set(range(len(outcome.timelines)))
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"running", "waiting", "KV use, %"}
    assert "cut" not in trace["otherData"]


def test_a_long_perfetto_trace_is_shortened_with_a_note(outcome: Outcome, tmp_path: Path) -> None:
    write_trace(outcome, tmp_path / "trace.json", max_requests=7, max_points=50)
    trace = json.loads((tmp_path / "trace.json").read_text())
    requests = [event for event in trace["traceEvents"] if event.get("name", "").startswith("request ")]
    assert len(requests) == 7
    assert trace["otherData"]["cut"] == f"only the first 7 of {outcome.timings.count} requests are shown"
    running = [event["args"]["value"] for event in trace["traceEvents"] if event["name"] == "running"]
    assert len(running) <= 50
    assert max(running) == figures(outcome, config(), num_bootstrap=0).running.max.value


def test_downsampling_keeps_the_extremes() -> None:
    rng = np.random.default_rng(0)
    course = Levels(np.sort(rng.random(10_000)), rng.random(10_000), 1.0)
    kept = downsample_levels(course, 200)
    assert 100 <= len(kept.times) <= 200
    assert (np.diff(kept.times) > 0).all()
    assert kept.values.max() == course.values.max()
    assert kept.values.min() == course.values.min()
    assert downsample_levels(kept, 200) is kept


def test_averages_over_intervals_keep_the_mean() -> None:
    course = Levels(np.array([0.0, 1.0, 4.0]), np.array([2.0, 0.0, 6.0]), 6.0)
    assert average_levels(course, 3).values.tolist() == pytest.approx([1.0, 0.0, 6.0])
    assert average_levels(course, 7).mean == pytest.approx(course.mean)


def test_report_notes_that_the_run_was_interrupted() -> None:
    def interrupt(num_finished: int, now: float) -> None:
        raise KeyboardInterrupt

    outcome = simulate(workload(3, 200), config(), STEP_TIME, progress=interrupt)
    assert (outcome.timings.reason == UNFINISHED).any()
    report = figures(outcome, config())
    assert not report.is_complete
    assert any("interrupted" in note for note in report.notes)
    assert "interrupted" in _printed(report)


def _numbers(value: Any) -> list[float]:
    """All numbers in it, in order."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in _numbers(part)]
    if isinstance(value, int | float):
        return [float(value)]
    names = getattr(value, "__slots__", ())
    return [number for name in names for number in _numbers(getattr(value, name))]
