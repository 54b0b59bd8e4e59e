"""`pointsman capacity`: the result, its interval, and cases without one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman.cli.progress_bar import ProgressBar
from pointsman.sim.capacity import Capacity, Question, find_capacity
from pointsman.sim.hull import Hull
from pointsman.sim.neighbours import Neighbour
from pointsman.sim.profile import EngineSettings, Profile
from pointsman.sim.step_time import LinearStepTime, StepLoad
from pointsman.sim.workers import Runner
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused

Run = Callable[..., Finished]
SMALL = ("--requests", 20, "--samples", 2, "--prompt-tokens", 1500, "--output-tokens", 4)
"""A search that takes little time."""


def profile(max_rows: int) -> Profile:
    """A profile of a log with at most this number of requests at a time."""
    hull = Hull.of_loads([StepLoad(1, 1, 1, 1, 0), StepLoad(3000, max_rows, 1000 * max_rows, 10**9, max_rows)])
    return Profile(
        step_time=LinearStepTime(per_step=8e-3, per_token=6e-5),
        settings=EngineSettings(num_blocks=3000, max_model_len=10_000, async_scheduling=False),
        hull=hull,
        source="log.jsonl",
        kind="requests",
        num_requests=40,
        num_train=20,
    )


@pytest.fixture
def profiled(tmp_path: Path) -> tuple[object, ...]:
    """Options with step times that have no alternatives: one search instead of six."""
    profile(max_rows=100_000).save(tmp_path / "wide.json")
    return (*SMALL, "--profile", tmp_path / "wide.json")


def words(finished: Finished, code: int | None = 0) -> str:
    assert code is None or finished.code == code, finished.err
    return " ".join(finished.out.split())


def test_capacity_prints_its_interval_and_a_row_for_each_load(pointsman: Run) -> None:
    finished = pointsman("capacity", *SMALL, "--ttft-target", "300ms")
    printed = words(finished)
    assert "KV blocks of 16 tokens" in finished.out.splitlines()[0]
    assert "calibrate with a log" in printed
    assert "TTFT at most 300 ms, for at least 99 % of the requests" in printed
    rows = [line for line in finished.out.splitlines() if line.endswith((" yes", " no"))]
    assert len(rows) >= 2
    assert re.search(r"Capacity: [\d.]+ requests/s \(90 %: [\d.]+ to [\d.]+\) on 1 replica\.", printed)
    assert "samples, each with a seed of its own, 20 requests each, and 6 plausible step times" in printed
    assert "too short to show" in printed
    assert "Power at the capacity" in printed and "estimated from the datasheet" in printed
    assert max(map(len, finished.out.splitlines())) <= 100


def test_capacity_json_has_the_interval_and_the_loads(pointsman: Run) -> None:
    given = (*SMALL, "--ttft-target", "300ms", "--itl-target", "2s", "--share", 0.9, "--confidence", "80%")
    (found,) = pointsman("capacity", *given, "--price-per-hour", 3, "--json").json_lines
    assert found["targets"] == {"ttft": 0.3, "itl": 2.0, "e2e": None, "itl_of": "pooled", "share": 0.9}
    capacity, sampling = found["capacity"], found["capacity_of_best_step_times"]
    assert capacity["low"] <= sampling["low"] <= capacity["value"] == sampling["value"] <= capacity["high"]
    assert (found["confidence"], found["unit"], found["is_complete"]) == (0.8, "rate", True)
    assert len(found["alternatives"]) == 5
    assert found["at"] in found["loads"] and found["beyond"] in found["loads"]
    assert found["at"]["share"]["value"] >= 0.9 > found["beyond"]["share"]["value"]
    assert found["answer"].startswith("Capacity: ")
    cost, at = found["cost"], found["at"]
    tokens = (at["prompt_tokens_per_second"] + at["output_tokens_per_second"]) * capacity["value"] / at["load"]
    assert cost["price_per_million_tokens"] == pytest.approx(3 / 3600 / tokens * 1e6)
    assert 100 < cost["watts"] <= 700


def test_capacity_warns_if_its_result_exceeds_the_profiled_loads(pointsman: Run, tmp_path: Path) -> None:
    """The warning is about a load within the targets, not about overloads."""
    saved = profile(max_rows=4)
    saved.save(tmp_path / "profile.json")
    given = ("capacity", *SMALL, "--ttft-target", "1s", "--profile", tmp_path / "profile.json")
    assert re.search(r"% of the simulated time has more requests in a step than its 4,", words(pointsman(*given)))
    (found,) = pointsman(*given, "--json").json_lines
    assert any("more positions read in a step than its 4,000" in note for note in found["notes"])
    profile(max_rows=100_000).save(tmp_path / "profile.json")
    assert "extrapolated" not in words(pointsman(*given))


def test_capacity_prints_the_fewest_replicas_for_a_rate(pointsman: Run, profiled: tuple[object, ...]) -> None:
    given = (*profiled, "--ttft-target", "500ms", "--replicas", "2-3", "--requests-per-second")
    assert "Even 3 replicas miss the targets with 5,000 requests/s" in words(
        pointsman("capacity", *given, 5000), code=3
    )
    enough = words(pointsman("capacity", *given, 1))
    assert "2 replicas" in enough and "the fewest of the range, meet the targets with 1 requests/s" in enough


@pytest.mark.long
def test_capacity_finds_users_and_the_fewest_replicas_for_users(pointsman: Run) -> None:
    lengths = ("--requests", 40, "--samples", 2, "--prompt-tokens", 4000, "--output-tokens", 20, "--ttft-target", "1s")
    finished = pointsman("capacity", *lengths, "--think", "exponential:2")
    printed = words(finished)
    heading = next(line for line in finished.out.splitlines() if "TTFT p99" in line)
    assert heading.split()[:2] == ["users", "requests/s"]
    answer = re.search(r"Capacity: (\d+) users \(90 %: (\d+) to (\d+)\) on 1 replica\.", printed)
    assert answer is not None and int(answer[2]) <= int(answer[1]) <= int(answer[3]) and int(answer[1]) > 1
    users = 3 * int(answer[3])
    (found,) = pointsman("capacity", *lengths, "--users", users, "--replicas", "1-8", "--json").json_lines
    assert found["unit"] == "replicas" and 2 <= found["capacity"]["value"] <= 6
    assert f"with {users} users" in found["answer"]


def test_capacity_reports_targets_met_at_every_rate_or_at_no_rate(pointsman: Run, profiled: tuple[object, ...]) -> None:
    nothing = words(pointsman("capacity", *profiled, "--ttft-target", "1ms"), code=3)
    assert "Nothing meets the targets: even with one request each 1,000 s, 0 %" in nothing
    assert "TTFT p99 is" in nothing and "set longer targets, or take a faster device" in nothing
    everything = words(pointsman("capacity", *profiled, "--ttft-target", "1h"))
    assert "Every load meets the targets: with all at once, 100 %" in everything
    assert "raise --requests" in everything


@pytest.mark.long
def test_capacity_tries_other_limits_of_a_step_if_the_itl_is_missed(pointsman: Run) -> None:
    """Prompts of 8,000 tokens fill a step of the default budget, which takes far longer than the ITL target."""
    lengths = ("--requests", 30, "--samples", 2, "--prompt-tokens", 8000, "--output-tokens", 50)
    given = (*lengths, "--itl-target", "60ms", "--itl-of", "request", "--ttft-target", "20s")
    printed = words(pointsman("capacity", *given))
    assert re.search(r"Capacity: .* with --max-num-batched-tokens \d+ on 1 replica", printed)
    assert "With the default --max-num-batched-tokens 8192 " in printed
    kept = words(pointsman("capacity", *given, "--max-num-batched-tokens", 8192, "--max-num-seqs", 256), code=None)
    assert "TPOT p99 limits the result" in kept or "Nothing meets" in kept
    assert "with --max-num-batched-tokens" not in kept


@pytest.mark.long
def test_a_target_on_every_gap_is_stricter_than_one_on_the_pooled_itl(pointsman: Run) -> None:
    """A long prompt delays one token of each other request, so few gaps are long, but most requests have a long gap."""
    lengths = ("--prompt-tokens", 1500, "--output-tokens", 300, "--requests", 100, "--samples", 4)
    given = (*lengths, "--itl-target", "40ms", "--max-num-batched-tokens", 8192, "--max-num-seqs", 256, "--json")
    pooled, gap = (pointsman("capacity", *given, "--itl-of", kind).json_lines[0] for kind in ("pooled", "gap"))
    assert pooled["capacity"]["value"] > 1.5 * gap["capacity"]["value"]
    assert pooled["at"]["figures"]["itl_p99"] <= 0.04


def test_capacity_compares_devices_with_price_and_power(pointsman: Run) -> None:
    given = (*SMALL, "--ttft-target", "300ms", "--device", "h100,l40s", "--price-per-hour", "3,1")
    finished = pointsman("capacity", *given)
    printed = words(finished)
    lines = finished.out.splitlines()
    heading = next(place for place, line in enumerate(lines) if "kWh" in line and "prompt" in line)
    rows = [line for line in lines[heading + 1 :] if "requests/s" in line]
    assert [row.split()[0] for row in rows] == ["H100-SXM", "L40S"]
    assert "Price at the capacity" in printed
    check_refused(pointsman("capacity", "--device", "h100,l40s", "--price-per-hour", "3"), "1 prices", "2 devices")


def test_capacity_uses_stretches_of_the_whole_trace_from_its_start(pointsman: Run, tmp_path: Path) -> None:
    rows = [f"2023-11-16 {hour:02}:{minute:02}:00.0,100,10" for hour in range(5) for minute in range(60)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    given = ("capacity", "--trace", trace, "--requests", 25, "--samples", 2, "--ttft-target", "60ms")
    printed = words(pointsman(*given))
    assert "The trace has 300 requests in 299 min, 0.0167 a second." in printed
    assert "stretches of the trace, 25 requests each" in printed
    later = words(pointsman(*given, "--start", "60min"))
    assert "The trace has 240 requests in 239 min, 0.0167 a second." in later
    check_refused(pointsman(*given, "--start", "9h"), "--start is 9h", "the last request", "earlier start")


def test_capacity_names_refused_requests_as_the_reason_of_its_failure(pointsman: Run, tmp_path: Path) -> None:
    finished = pointsman("capacity", "--requests", 20, "--prompt-tokens", 300_000)
    assert finished.code == 2
    for word in ("requests of a sample are refused", "300000 tokens", "max_model_len is 131072", "shorten the prompt"):
        assert word in finished.err
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(f'{{"timestamp": {1000 * i}, "input_length": {length}, "output_length": 6}}\n' for i, length in
                enumerate((20, 20, 300_000, 20) * 8))
    )  # fmt: skip
    found = words(pointsman("capacity", "--trace", path), code=3)
    assert "Nothing meets" in found
    assert "requests can never run" in found
    assert "shorten the requests that can never run" in found and "faster device" not in found


def test_ctrl_c_prints_the_estimate_so_far(
    pointsman: Run, profiled: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def interrupt(bar: ProgressBar, num_finished: int, now: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "update", interrupt)
    finished = pointsman("capacity", *profiled, "--ttft-target", "1s")
    assert finished.code == 130
    assert "Interrupted" in finished.out
    assert finished.err == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--replicas", "1-0"], ["--replicas is '1-0'", "1-16"]),
        (["--replicas", "many"], ["--replicas is 'many'", "1-16"]),
        (["--share", "2"], ["--share is 2", "below 1"]),
        (["--within", "0"], ["--within is '0'", "above 0"]),
        (["--confidence", "100%"], ["--confidence is 100%", "below 100%"]),
        (["--requests", "1"], ["--requests is 1", "at least 20"]),
        (["--workers", "0"], ["--workers is 0", "at least 1"]),
        (["--price-per-hour", "cheap"], ["--price-per-hour is 'cheap'", "like 3,1.2"]),
        (["--itl-of", "gap"], ["--itl-of has no effect", "--itl-target"]),
        (["--itl-of", "some", "--itl-target", "1s"], ["--itl-of is 'some'", "pooled, request, gap"]),
        (["--start", "10min"], ["--start has no effect alone", "--trace"]),
        (["--device", "h100,,l40s"], ["--device is 'h100,,l40s'", "names"]),
        (["--requests-per-second", "5"], ["--requests-per-second", "--replicas 1-16"]),
        (["--users", "5"], ["--users has no effect", "--replicas 1-16"]),
        (["--think", "5", "--replicas", "1-3"], ["--think", "needs the number of users"]),
        (["--think", "5", "--arrivals", "poisson:9"], ["--arrivals has no effect with --think", "--sessions"]),
        (["--users", "5", "--replicas", "1-3", "--requests-per-second", "9"], ["--requests-per-second", "--users"]),
        (["--users", "0", "--replicas", "1-3"], ["--users is 0", "at least 1"]),
        (["--replicas", "1-3", "--requests-per-second", "-1"], ["--requests-per-second is -1", "above 0"]),
        (["--routing", "least-loaded"], ["--routing", "--replicas 2"]),
        (["--ttft-target", "soon"], ["--ttft-target is 'soon'", "500ms"]),
        (["--think", "-3"], ["--think: value is -3", "at least 0"]),
        (["--prompt-tokens", "lognormal:10"], ["--prompt-tokens: 'lognormal:10' has 1 values", "median,sigma"]),
        (["--arrivals", "poisson:0"], ["--arrivals: 'poisson:0'", "above 0"]),
        (["--trace", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
        (["--model", "Llama-3.1-70B"], ["Llama-3.1-70B needs", "tensor parallelism"]),
    ],
)
def test_bad_capacity_options_are_refused(pointsman: Run, args: list[str], words: list[str]) -> None:
    check_refused(pointsman("capacity", *args), *words)


def test_capacity_refuses_a_trace_whose_requests_arrive_together(pointsman: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 5, "input_length": 20, "output_length": 6}\n' * 3)
    check_refused(pointsman("capacity", "--trace", path), str(path), "all arrive at the same time", "--arrivals")


@pytest.mark.parametrize("has_neighbour", [False, True])
def test_an_interruption_of_the_long_search_keeps_the_short_ones_result(
    pointsman: Run, monkeypatch: pytest.MonkeyPatch, has_neighbour: bool
) -> None:
    calls: list[Question] = []

    def find(question: Question, runner: Runner) -> Capacity:
        calls.append(question)
        return find_capacity(question, runner) if len(calls) == 1 else Capacity()  # interrupted before an estimate

    def neighbour(question: Question, found: Capacity, *others: object) -> Neighbour | None:
        config = question.config.replace(max_num_batched_tokens=1024)
        return Neighbour("max_num_batched_tokens", 1024, config, found) if has_neighbour else None

    monkeypatch.setattr("pointsman.cli.capacity.find_capacity", find)
    monkeypatch.setattr("pointsman.cli.capacity.best_neighbour", neighbour)
    printed = words(pointsman("capacity", *SMALL, "--ttft-target", "300ms"), 130)
    assert len(calls) == 2
    assert "Interrupted: this is the estimate so far. Capacity: " in printed
    assert "--max-num-batched-tokens" not in printed
