"""`pointsman capacity`: the result, its bracket, and cases without one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman.cli.capacity import _is_missed_by_gaps
from pointsman.cli.progress_bar import ProgressBar
from pointsman.sim.capacity import Probe
from pointsman.sim.hull import Hull
from pointsman.sim.profile import EngineSettings, Profile
from pointsman.sim.report.summary import Targets
from pointsman.sim.step_time import LinearStepTime, StepLoad
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused

Run = Callable[..., Finished]
SMALL = ("--requests", 50, "--tolerance", 0.2)


def profile(max_rows: int) -> Profile:
    """A profile of a log with at most this number of requests at a time."""
    hull = Hull.of_loads([StepLoad(1, 1, 1, 1, 0), StepLoad(3000, max_rows, 1000 * max_rows, 10**7, max_rows)])
    return Profile(
        step_time=LinearStepTime(per_step=8e-3, per_token=6e-5),
        settings=EngineSettings(num_blocks=3000, max_model_len=10_000, async_scheduling=False),
        hull=hull,
        source="log.jsonl",
        kind="requests",
        num_requests=40,
        num_train=20,
    )


def words(finished: Finished, code: int = 0) -> str:
    assert finished.code == code, finished.err
    return " ".join(finished.out.split())


def test_capacity_prints_a_bracket_and_a_row_for_each_probe(pointsman: Run) -> None:
    finished = pointsman("capacity", *SMALL, "--ttft-target", "1s")
    printed = words(finished)
    assert "KV blocks of 16 tokens" in finished.out.splitlines()[0]
    assert "calibrate with a log" in printed
    assert "TTFT at most 1 s; for at least 0.99 of the requests" in printed
    assert "50 requests" in printed
    rows = [line for line in finished.out.splitlines() if line.endswith((" yes", " no"))]
    assert len(rows) >= 4
    assert "all at once" in rows[1]
    assert "requests/s on 1 replica (" in printed
    assert "too short to show" in printed
    assert max(map(len, finished.out.splitlines())) <= 100


def test_capacity_json_has_the_search_interval_and_the_probes(pointsman: Run) -> None:
    given = (*SMALL, "--ttft-target", "1s", "--itl-target", "2s", "--share", 0.9)
    first, second = (pointsman("capacity", *given, "--json") for _ in range(2))
    assert first.code == 0, first.err
    assert first.out == second.out
    (found,) = first.json_lines
    assert found["targets"] == {"ttft": 1.0, "itl": 2.0, "share": 0.9}
    assert found["meets"]["share"] >= 0.9 > found["misses"]["share"]
    assert found["meets"]["rate"] < found["misses"]["rate"] <= found["meets"]["rate"] * 1.2
    assert found["meets"] in found["probes"] and found["misses"] in found["probes"]
    assert found["answer"].startswith("Capacity: ")
    assert found["is_complete"] is True


def test_capacity_warns_if_its_result_exceeds_the_profiled_loads(pointsman: Run, tmp_path: Path) -> None:
    """The warning is about the probe that meets the targets, not about overloaded probes."""
    saved = profile(max_rows=4)
    saved.save(tmp_path / "profile.json")
    given = ("capacity", *SMALL, "--ttft-target", "1s", "--profile", tmp_path / "profile.json")
    assert re.search(r"% of the simulated time has more requests in a step than its 4,", words(pointsman(*given)))
    (found,) = pointsman(*given, "--json").json_lines
    assert any("more positions read in a step than its 4,000" in note for note in found["notes"])
    profile(max_rows=100_000).save(tmp_path / "profile.json")
    assert "extrapolated" not in words(pointsman(*given))


def test_capacity_prints_the_fewest_replicas_for_a_rate(pointsman: Run) -> None:
    given = ("--replicas", "1-4", "--requests-per-second", 60, "--requests", 150, "--ttft-target", "1s", "--json")
    finished = pointsman("capacity", *given)
    assert finished.code == 0, finished.err
    (found,) = finished.json_lines
    assert found["meets"]["num_replicas"] == found["misses"]["num_replicas"] + 1
    assert f"{found['meets']['num_replicas']} replicas meet the targets at 60 requests/s" in found["answer"]


def test_capacity_reports_a_replica_range_above_or_below_the_need(pointsman: Run) -> None:
    given = ("--requests", 60, "--ttft-target", "500ms", "--replicas", "2-3", "--requests-per-second")
    assert "Even 3 replicas miss the targets at 1e+04 requests/s" in words(
        pointsman("capacity", *given, 10_000), code=3
    )
    assert "2 replicas are enough at 1 requests/s, the fewest of 2 to 3" in words(pointsman("capacity", *given, 1))


def test_capacity_finds_maximum_users_and_fewest_replicas_for_users(pointsman: Run) -> None:
    lengths = ("--requests", 40, "--prompt-tokens", 4000, "--output-tokens", 20, "--ttft-target", "1s")
    finished = pointsman("capacity", *lengths, "--think", "exponential:2", "--tolerance", 0.2)
    printed = words(finished)
    heading = next(line for line in finished.out.splitlines() if "TTFT p99" in line)
    assert heading.split()[:2] == ["users", "requests/s"]
    assert "from another number of users" in printed
    answer = re.search(r"Capacity: (\d+) users on 1 replica \((\d+) meet the targets, (\d+) do not\)", printed)
    assert answer is not None and 1 < int(answer[1]) == int(answer[2]) < int(answer[3]) <= 1.2 * int(answer[1]) + 1
    (found,) = pointsman("capacity", *lengths, "--users", 60, "--replicas", "1-8", "--json").json_lines
    assert found["meets"]["num_users"] == 60
    assert found["meets"]["num_replicas"] == found["misses"]["num_replicas"] + 1
    assert f"{found['meets']['num_replicas']} replicas meet the targets with 60 users" in found["answer"]


def test_the_search_for_users_ends_at_a_maximum_that_meets_all_targets(
    pointsman: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.cli.simulation.MAX_OF_USERS", 40)
    lengths = ("--requests", 2, "--prompt-tokens", 10, "--output-tokens", 1, "--ttft-target", "1h")
    found = words(pointsman("capacity", *lengths, "--think", 1))
    assert "At least 64 users meet the targets" in found and "raise --requests" in found


def test_capacity_reports_targets_met_at_every_rate_or_at_no_rate(pointsman: Run) -> None:
    given = ("--requests", 20, "--prompt-tokens", 1000, "--output-tokens", 10)
    nothing = words(pointsman("capacity", *given, "--ttft-target", "1ms"), code=3)
    assert "Nothing meets the targets: even with one request each 1,000 s, 0.00 %" in nothing
    assert "TTFT p99 is" in nothing and "set longer targets, or take a faster device" in nothing
    everything = words(pointsman("capacity", *given, "--ttft-target", "1h"))
    assert "Every rate meets the targets: all 20 requests at once, 100.00 %" in everything
    assert "--requests" in everything


def test_capacity_prints_a_remedy_for_a_missed_itl_target(pointsman: Run) -> None:
    given = ("--requests", 30, "--prompt-tokens", 8000, "--output-tokens", 50, "--itl-target", "30ms")
    assert "smaller --max-num-batched-tokens" in words(pointsman("capacity", *given, "--tolerance", 1))


def test_the_itl_target_limits_each_requests_longest_gap(pointsman: Run) -> None:
    """A long prompt delays one token of each other request, so few gaps are long, but most requests have a long gap."""
    lengths = ("--prompt-tokens", 6000, "--output-tokens", 300, "--requests", 60, "--tolerance", 0.5)
    finished = pointsman("capacity", *lengths, "--itl-target", "30ms")
    printed = words(finished)
    assert "holds for every gap of a request" in printed and "which vllm bench prints, is" in printed
    assert "at most 8,192 tokens and 256 requests in a step" in printed
    assert "--max-num-batched-tokens (here 8192)" in printed
    (heading,) = [line for line in finished.out.splitlines() if "within targets" in line]
    assert heading.index("ITL p99") < heading.index("longest gap p99")
    (found,) = pointsman("capacity", *lengths, "--itl-target", "30ms", "--json").json_lines
    assert found["misses"]["itl_p99"] < found["misses"]["longest_gap_p99"]


def test_capacity_names_the_part_of_the_trace_that_it_used(pointsman: Run, tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:{minute:02}:00.0000000,100,{10 if minute < 20 else 40}" for minute in range(40)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    part = words(pointsman("capacity", "--trace", trace, "--requests", 20, "--ttft-target", "1s"))
    told = (
        "The trace has 40 requests in 39 min, 0.0167 a second; taken are the first 20, 19 min of it, with 10 tokens in "
        "the mean output (all: 25). --requests 40 takes all."
    )
    assert part.count(told) == 2, "before the probes, and behind them"
    whole = words(pointsman("capacity", "--trace", trace, "--ttft-target", "1s"))
    assert whole.count("The trace has 40 requests in 39 min, 0.0167 a second.") == 1 and "takes all" not in whole


def test_capacity_names_refused_requests_as_the_reason_of_its_failure(pointsman: Run, tmp_path: Path) -> None:
    for options in ([], ["--think", 5], ["--replicas", "1-3"]):
        finished = pointsman("capacity", "--requests", 5, "--prompt-tokens", 300_000, *options)
        assert finished.code == 2
        for word in ("requests are refused", "300000 tokens", "max_model_len is 131072", "shorten the prompt"):
            assert word in finished.err
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(f'{{"timestamp": {1000 * i}, "input_length": {length}, "output_length": 6}}\n' for i, length in
                enumerate((20, 300_000, 20, 20)))
    )  # fmt: skip
    found = words(pointsman("capacity", "--trace", path), code=3)
    assert "Nothing meets" in found
    assert "1 of 4 requests can never run" in found
    assert "shorten the requests that can never run" in found and "faster device" not in found


@pytest.mark.parametrize(
    ("longest_gap", "ttft", "num_refused", "is_said"),
    [
        (0.15, 0.2, 0, True),
        (0.096, 0.2, 0, True),  # less than 1 % too many requests miss
        (0.096, 0.49, 0, False),
        (0.15, 0.6, 0, False),
        (0.096, 0.2, 1, False),
        (0.15, 0.2, 1, True),
    ],
)
def test_the_metric_nearest_to_its_target_selects_the_remedy(
    longest_gap: float, ttft: float, num_refused: int, is_said: bool
) -> None:
    """TTFT at most 500 ms, gaps at most 100 ms."""
    probe = Probe(1.0, 1, 0.9895, ttft, 0.01, 2.0, longest_gap, 1.0, 2000, num_refused, meets=False)
    assert _is_missed_by_gaps(probe, Targets(0.5, 0.1)) is is_said


def test_ctrl_c_prints_the_capacity_bracket_so_far(pointsman: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def interrupt(bar: ProgressBar, num_finished: int, now: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "update", interrupt)
    finished = pointsman("capacity", "--requests", 1500, "--output-tokens", 5, "--ttft-target", "1s")
    assert finished.code == 130
    assert "Interrupted" in finished.out
    assert finished.err == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--replicas", "1-0"], ["--replicas is '1-0'", "1-16"]),
        (["--replicas", "many"], ["--replicas is 'many'", "1-16"]),
        (["--share", "2"], ["--share is 2", "at most 1"]),
        (["--tolerance", "0"], ["--tolerance is 0", "above 0"]),
        (["--requests", "1"], ["--requests is 1", "at least 2"]),
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
