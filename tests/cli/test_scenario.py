"""`pointsman simulate --scenario` and `--seeds`."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pointsman.cli import scenario as command
from pointsman.cli.progress_bar import ProgressBar
from pointsman.sim.scenarios import SCENARIOS
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused
from tests.sim.test_scenarios import TINY

Run = Callable[..., Finished]
SHORT_RUN = ("--requests", "40")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scenario that runs within milliseconds."""
    monkeypatch.setattr(command, "scenario", {"tiny": TINY}.__getitem__)


@pytest.mark.usefixtures("tiny")
def test_a_scenario_prints_its_claim_figures_and_verdicts(pointsman: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    finished = pointsman("simulate", "--scenario", "tiny", "--device", "l40s", "--html", page)
    assert finished.code == 0, finished.err
    assert finished.err == ""
    for words in ("More slots are no faster", "two <slots>", "tok/s", "does not hold", "L40S", "calibrate with a log"):
        assert words in finished.out
    assert max(map(len, finished.out.splitlines())) <= 100
    HTMLParser().feed(page.read_text())
    assert "does not hold" in page.read_text()


@pytest.mark.usefixtures("tiny")
def test_scenario_json_is_one_object_with_figures_and_checks(pointsman: Run) -> None:
    (found,) = pointsman("simulate", "--scenario", "tiny", "--seed", 3, "--seeds", 2, "--json").json_lines
    assert found["seeds"] == [3, 4]
    first, second = found["rows"]
    assert first["variant"] == "one slot"
    assert first["config"]["max_num_seqs"] == 1
    figure = first["figures"]["end-to-end"]
    assert figure["low"] < figure["value"] < figure["high"]
    assert second["figures"]["none"]["value"] is None
    assert [check["holds"] for check in found["checks"]] == [False]
    assert any("2 seeds" in note for note in found["notes"])


@pytest.mark.usefixtures("tiny")
def test_ctrl_c_prints_the_finished_variants_of_a_scenario(pointsman: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.sim.simulator._PROGRESS_EVERY", 1)

    def interrupt(bar: ProgressBar, num_finished: int, now: float) -> None:
        if num_finished > 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "update", interrupt)
    finished = pointsman("simulate", "--scenario", "tiny")
    assert finished.code == 130
    assert "one slot" in finished.out
    assert "two <slots>" not in finished.out
    assert "holds" not in finished.out
    assert "Interrupted" in finished.out


def test_simulate_lists_scenarios_with_their_claims(pointsman: Run) -> None:
    out = pointsman("simulate", "--list").out
    for each in SCENARIOS.values():
        assert f"{each.name} " in out
        assert each.claim in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["chunksize"], ["no scenario is called 'chunksize'", "nearest: chunk-size", "--list"]),
        (["zzz"], ["'zzz'", *SCENARIOS]),
        (["watermark", "--rate", "2"], ["--rate", "--scenario", "leave it out"]),
        (["watermark", "--watermark", "0.1"], ["--watermark has no effect beside --scenario"]),
        (["watermark", "--replicas", "2"], ["--replicas", "--scenario"]),
        (["watermark", "--preset", "vllm"], ["--preset", "--scenario"]),
        (["watermark", "--seeds", "0"], ["--seeds is 0", "at least 1"]),
        (["watermark", "--seed", "-1"], ["--seed is -1", "at least 0"]),
        (["watermark", "--html", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
    ],
)
def test_bad_scenario_options_are_refused(pointsman: Run, args: list[str], words: list[str]) -> None:
    check_refused(pointsman("simulate", "--scenario", *args), *words)


# ---------------------------------------------------------------------- several seeds of a generated workload


def test_simulate_prints_means_and_intervals_for_several_seeds(pointsman: Run) -> None:
    single = [pointsman("simulate", *SHORT_RUN, "--seed", seed, "--json").json_lines[-1] for seed in (5, 6, 7)]
    (found,) = pointsman("simulate", *SHORT_RUN, "--seed", 5, "--seeds", 3, "--json").json_lines
    assert found["num_seeds"] == 3
    assert "seeds 5 to 7" in found["workload"]
    assert found["counts"]["arrived"] == 120
    for name in ("p50", "p99"):
        values = [each["ttft"][name]["value"] for each in single]
        assert len(set(values)) == 3
        estimate = found["ttft"][name]
        assert estimate["value"] == pytest.approx(sum(values) / 3)
        assert estimate["low"] < estimate["value"] < estimate["high"]
    assert "Student's t" in found["method"]


def test_simulate_prints_the_range_of_seeds(pointsman: Run) -> None:
    finished = pointsman("simulate", *SHORT_RUN, "--users", 3, "--seeds", 2)
    assert finished.code == 0, finished.err
    assert "seeds 0 to 1" in " ".join(finished.out.split())
    assert "mean over 2 runs that differ in their seed" in " ".join(finished.out.split())


def test_ctrl_c_prints_the_results_of_complete_seeds(pointsman: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.sim.simulator._PROGRESS_EVERY", 1)

    def interrupt(bar: ProgressBar, num_finished: int, now: float) -> None:
        if num_finished > 90:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "update", interrupt)
    finished = pointsman("simulate", *SHORT_RUN, "--seeds", 4, "--json")
    assert finished.code == 130
    (found,) = finished.json_lines
    assert found["num_seeds"] == 2
    assert not found["is_complete"]
    assert found["counts"]["finished"] == 80
    assert any("2 of 4 seeds" in note for note in found["notes"])


def test_several_seeds_with_a_trace_are_refused(pointsman: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,100,10\n")
    check_refused(pointsman("simulate", "--trace", path, "--seeds", 3), "--seeds is 3", "trace", "leave --seeds out")
    check_refused(pointsman("simulate", *SHORT_RUN, "--seeds", 0), "--seeds is 0", "at least 1")
