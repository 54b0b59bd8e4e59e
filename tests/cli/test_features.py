"""Options of drafts and adapters of `pointsman simulate`, `capacity`, `tune` and `calibrate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pointsman.sim.speculation import Speculation
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused
from tests.cli.test_capacity import profile
from tests.cli.test_simulate import report
from tests.sim.observed_logs import observed_lines, write_observed

Run = Callable[..., Finished]
SHORT_RUN = ("simulate", "--requests", 40)
DRAFTS = ("--num-draft-tokens", 3, "--acceptance", "0.9,0.8,0.7")


def test_simulated_drafts_save_steps_and_are_counted(pointsman: Run) -> None:
    plain = report(pointsman(*SHORT_RUN, "--json"))
    drafted = report(pointsman(*SHORT_RUN, *DRAFTS, "--json"))
    assert drafted["counts"]["generated_tokens"] == plain["counts"]["generated_tokens"]
    assert drafted["config"]["num_draft_tokens"] == 3
    assert drafted["tpot"]["mean"]["value"] < 0.6 * plain["tpot"]["mean"]["value"]
    (note,) = [note for note in drafted["notes"] if note.startswith("Drafts: ")]
    assert "verified drafts were accepted" in note
    printed = " ".join(pointsman(*SHORT_RUN, *DRAFTS).out.split())
    assert "at most 3 drafts for each request and step, accepted with probability 0.9, 0.8, 0.7" in printed
    assert "(3.12 tokens a step)" in printed


def test_the_drafters_time_slows_steps_down(pointsman: Run) -> None:
    tpots = [
        report(pointsman(*SHORT_RUN, *DRAFTS, "--drafter-time", time, "--json"))["tpot"]["mean"]["value"]
        for time in ("0%", "50%", "20ms")
    ]
    assert 1.3 * tpots[0] < tpots[1] < tpots[2]


def test_num_speculative_tokens_is_another_name(pointsman: Run) -> None:
    found = report(pointsman(*SHORT_RUN, "--num-speculative-tokens", 2, "--acceptance", "length:1.5", "--json"))
    assert found["config"]["num_draft_tokens"] == 2


def test_a_profile_with_drafts_needs_no_further_option(pointsman: Run, tmp_path: Path) -> None:
    made = profile(max_rows=64)
    settings = replace(made.settings, num_draft_tokens=2)
    drafts = Speculation(acceptance=(0.9, 0.9), proposal=(0.5, 1.0))
    replace(made, settings=settings, speculation=drafts).save(tmp_path / "p.json")
    found = report(pointsman(*SHORT_RUN, "--profile", tmp_path / "p.json", "--json"))
    assert found["config"]["num_draft_tokens"] == 2
    assert found["config"]["max_steps_in_flight"] == 1
    without = report(pointsman(*SHORT_RUN, "--profile", tmp_path / "p.json", "--num-draft-tokens", 0, "--json"))
    assert without["tpot"]["mean"]["value"] > found["tpot"]["mean"]["value"]


def test_requests_with_adapters_wait_for_slots_and_cost_time(pointsman: Run, tmp_path: Path) -> None:
    given = (*SHORT_RUN, "--arrivals", "poisson:20", "--json")
    plain, one, free = (
        report(pointsman(*given, *more))["e2e"]["mean"]["value"]
        for more in (
            (),
            ("--adapters", "uniform:8"),
            ("--adapters", "uniform:8", "--max-loras", 8),
        )
    )
    assert one > 1.2 * plain  # one adapter at a time
    assert free == pytest.approx(plain, rel=0.05)
    costly = report(pointsman(*given, "--adapters", "8", "--max-loras", 8, "--adapter-time", "50%"))
    assert costly["tpot"]["mean"]["value"] > 1.3 * report(pointsman(*given))["tpot"]["mean"]["value"]


def test_adapters_are_drawn_for_traces_users_and_sessions(pointsman: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = (f"2023-11-16 18:00:{second:02}.0,{100 + 40 * second},{10 + second}\n" for second in range(20))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    for workload in (("--trace", trace), ("--users", 4, "--requests", 20), ("--sessions", 5)):
        found = report(pointsman("simulate", *workload, "--adapters", "zipf:5,1.5", "--json"))
        assert found["config"]["max_loras"] == 1
        assert found["counts"]["refused"] == 0


def test_capacity_and_tune_know_drafts_and_adapters(pointsman: Run) -> None:
    given = ("--prompt-tokens", "300", "--output-tokens", "64", *DRAFTS, "--adapters", 4, "--max-loras", 4)
    found = json.loads(pointsman("capacity", *given, "--requests", 20, "--samples", 2, "--json").out)
    assert found["config"]["num_draft_tokens"] == 3
    assert found["config"]["max_loras"] == 4
    tuned = json.loads(pointsman("tune", *given, "--requests", 20, "--trials", 3, "--workers", 1, "--json").out)
    assert '"num_speculative_tokens": 3' in tuned["commands"]["vllm"]
    assert "--enable-lora --max-loras 4" in tuned["commands"]["vllm"]
    assert "--num-draft-tokens 3" in tuned["commands"]["pointsman"]


def test_compare_simulates_the_drafts_of_a_recording(pointsman: Run, tmp_path: Path) -> None:
    drafts = Speculation(acceptance=(0.7, 0.5), proposal=(0.8, 0.9))
    log = write_observed(tmp_path / "r.jsonl", observed_lines(120, drafts=drafts, num_adapters=2, adapter_share=0.2))
    found = json.loads(pointsman("vllm", "compare", log, "--json", "--setting", "num_draft_tokens=0").out)
    assert abs(found["check"]["e2e_bias"]) < 0.05
    rows = found["rows"]
    assert rows["num_draft_tokens=0"]["tpot_p50"] > 1.3 * rows["vLLM, simulated"]["tpot_p50"]


def test_calibrate_reports_the_drafts_of_a_recording(pointsman: Run, tmp_path: Path) -> None:
    log = write_observed(tmp_path / "r.jsonl", observed_lines(60, drafts=Speculation(acceptance=(0.7, 0.5))))
    finished = pointsman("calibrate", log, "--output", tmp_path / "p.json")
    assert "drafts are proposed in 100% of a request's decode steps" in " ".join(finished.out.split())
    assert json.loads((tmp_path / "p.json").read_text())["speculation"]["proposal"][0] == 1.0


@pytest.mark.parametrize(
    "args, words",
    [
        (("--num-draft-tokens", 2), ["--num-draft-tokens is 2", "give --acceptance"]),
        (("--acceptance", "0.5"), ["--acceptance has no effect", "--num-draft-tokens"]),
        (("--drafter-time", "2ms"), ["--drafter-time has no effect", "--num-draft-tokens"]),
        (("--num-draft-tokens", 2, "--acceptance", "2.1"), ["'2.1'", "from 0 to 1", "length:2.4"]),
        (("--num-draft-tokens", 3, "--acceptance", "0.5,0.4"), ["num_draft_tokens is 3", "2 draft(s)"]),
        ((*DRAFTS, "--drafter-time", "7"), ["--drafter-time is 7", "no unit"]),
        ((*DRAFTS, "--drafter-time", "x%"), ["--drafter-time is 'x%'", "0%"]),
        ((*DRAFTS, "--max-steps-in-flight", 2), ["max_steps_in_flight 2", "set max_steps_in_flight to 1"]),
        (("--adapter-time", "5%"), ["--adapter-time has no effect", "--adapters"]),
        (("--adapters", 2, "--adapter-time", "5ms"), ["--adapter-time is '5ms'", "share"]),
        (("--adapters", "many"), ["--adapters", "'many'", "zipf:20,1.2"]),
        (("--adapters", "0"), ["--adapters", "is 0", "at least 1"]),
    ],
)
def test_bad_options_of_drafts_and_adapters_are_refused(
    pointsman: Run, args: tuple[object, ...], words: list[str]
) -> None:
    check_refused(pointsman(*SHORT_RUN, *args), *words)
