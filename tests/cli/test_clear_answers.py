"""Commands that got a weak answer from their first users: the answer names the value, the limit and the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman.core.observe.film_format import MAGIC
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused

Run = Callable[..., Finished]

PAGE = b"<!DOCTYPE html>\n<title>A course</title>\n"
FILM = MAGIC + bytes([0xCB, 0x00, 0x00, 0x00])


@pytest.mark.parametrize(
    "args",
    [
        ("simulate", "--ttft-target"),
        ("simulate", "--itl-target"),
        ("capacity", "--ttft-target"),
        ("capacity", "--itl-target"),
        ("tune", "--ttft-p99"),
        ("tune", "--itl-target"),
        ("tune", "--e2e-p99"),
    ],
)
def test_a_time_without_a_unit_is_refused(pointsman: Run, args: tuple[str, str]) -> None:
    if args[0] == "tune":
        pytest.importorskip("optuna")
    check_refused(pointsman(*args, "500"), "is 500, which has no unit", "write 500ms or 500s")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--arrivals", "poisson"], ["poisson needs a rate, like poisson:4"]),
        (["--arrivals", "gamma"], ["a rate and a coefficient of variation, like gamma:4,2"]),
        (["--arrivals", "poison:4"], ["unknown form 'poison'", "did you mean poisson?"]),
        (["--arrivals", "4"], ["'4' names no arrival process", "poisson:4 or constant:4"]),
        (["--arrivals", "poisson:x"], ["'x' is not a number", "like poisson:4"]),
        (["--prompt-tokens", "lognormal"], ["a median and a standard deviation", "like lognormal:150,0.8"]),
        (["--prompt-tokens", "values:"], ["values needs one or more numbers, like values:10,20,500"]),
        (["--prompt-tokens", "mix"], ["mix needs distributions with probabilities, like mix:0.7*"]),
    ],
)
def test_a_distribution_without_its_values_names_what_it_needs(
    pointsman: Run, args: list[str], words: list[str]
) -> None:
    check_refused(pointsman("simulate", *args), *words)


@pytest.mark.parametrize(("given", "near"), [("fifo", "fcfs"), ("sjf", "shortest-prefill"), ("priorty", "priority")])
def test_an_unknown_policy_names_the_nearest_one(pointsman: Run, given: str, near: str) -> None:
    for command in ("simulate", "generate"):
        refused = pointsman(command, "--order", given)
        check_refused(refused, f"no order policy is called '{given}'; did you mean {near}? choose one of fcfs, ")
        assert "pass an object" not in refused.err


@pytest.mark.parametrize("command", ["simulate", "capacity"])
def test_an_unknown_model_names_the_nearest_three(pointsman: Run, command: str) -> None:
    for given, near in (("NoSuchModel", None), ("lama-3.1-8b-instrct", "Llama-3.1-8B-Instruct")):
        refused = pointsman(command, "--model", given)
        check_refused(refused, f"no model is called '{given}'; nearest: ", "`pointsman simulate --list` shows all")
        found = re.search(r"nearest: (.*?)\. `", refused.err)
        assert found is not None and len(found[1].split(", ")) == 3
        assert near is None or near in found[1]


# ---------------------------------------------------------------------- files of another kind


def test_a_film_or_a_page_in_place_of_a_recording_is_named(pointsman: Run, tmp_path: Path) -> None:
    film, page, text = tmp_path / "run.film", tmp_path / "course.html", tmp_path / "notes.txt"
    film.write_bytes(FILM)
    page.write_bytes(PAGE)
    text.write_text("notes\n")
    check_refused(pointsman("replay", film), f"{film} is a film, which cannot be replayed; give the recording")
    for command in (("replay",), ("film",), ("play",), ("sandbox",), ("plot", "-o", tmp_path / "a.json")):
        check_refused(pointsman(*command, page), f"{page} is a page (HTML), neither a film nor a recording; give ")
        check_refused(pointsman(*command, text), f"{text} is neither a film nor a recording", "a line of JSON")


def test_a_film_or_a_page_in_place_of_a_trace_or_log_is_named(pointsman: Run, tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    for content, kind in ((FILM, "a film"), (PAGE, "a page")):
        path = tmp_path / "file"
        path.write_bytes(content)
        for command in (("simulate", "--trace"), ("generate", "--trace"), ("calibrate",)):
            check_refused(pointsman(*command, path), f"the file is {kind}; give ")
        check_refused(pointsman("vllm", "compare", path), f"{path} is {kind}; give the recording of vLLM's scheduler")


@pytest.mark.parametrize(
    "report",
    [
        "args:\n  target: http://localhost:8000\nbenchmarks:\n- config: {}\n",
        "metadata:\n  version: 1\nbenchmarks: []\n",
        "Run Info,Run Info,Timings\nRun ID,Benchmark ID,Start Time\n",
        "Type,Run Id,Id,Name\n",
    ],
)
def test_other_reports_of_guidellm_are_answered_with_its_json_report(
    pointsman: Run, tmp_path: Path, report: str
) -> None:
    pytest.importorskip("scipy")
    path = tmp_path / "benchmarks"
    path.write_text(report)
    for command in (("simulate", "--trace"), ("calibrate",)):
        check_refused(pointsman(*command, path), "a report of guidellm as YAML or CSV", "--output-path x.json")


def test_learn_says_that_it_made_a_folder(pointsman: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pointsman.web.course import build

    monkeypatch.setattr(build, "LESSONS", build.LESSONS[:1])
    folder = tmp_path / "new"
    assert pointsman("learn", "--out", f"{folder}/").err == f"pointsman: made the folder {folder}\n"
    assert pointsman("learn", "--out", f"{folder}/").err == ""


# ---------------------------------------------------------------------- overload, and a search that finds nothing

LENGTHS = ("--prompt-tokens", 2000, "--output-tokens", 64, "--max-num-seqs", 16)


def test_an_overloaded_simulation_says_that_the_queue_grows(pointsman: Run) -> None:
    finished = pointsman("simulate", *LENGTHS, "--arrivals", "poisson:60", "--requests", 600)
    text = " ".join(finished.out.split())
    found = re.search(r"The queue grows without end: (\S+) requests a second arrive, (\S+) are served; these", text)
    assert finished.code == 0 and found is not None
    assert text.endswith("these figures depend on the length of the run.")
    assert float(found[2]) < float(found[1])
    report = json.loads(pointsman("simulate", *LENGTHS, "--arrivals", "poisson:60", "--requests", 600, "--json").out)
    assert f"{report['overload']['arriving_per_second']['value']:.3g}" == found[1]
    assert f"{report['overload']['served_per_second']['value']:.3g}" == found[2]


@pytest.mark.parametrize(
    "args",
    [
        ("--arrivals", "poisson:4"),  # below the capacity
        ("--arrivals", "gamma:4,4"),
        ("--arrivals", "bursts:4,50"),
        ("--arrivals", "bursts:4,600"),  # one burst
        ("--users", "100"),  # a closed loop
        ("--sessions", "100"),
    ],
)
def test_no_overload_is_reported_for_a_load_that_is_served(pointsman: Run, args: tuple[str, str]) -> None:
    count = () if "--sessions" in args else ("--requests", 600)
    report = json.loads(pointsman("simulate", *LENGTHS, *args, *count, "--json").out)
    assert report["overload"] is None


def test_a_search_that_finds_nothing_has_an_exit_code_of_its_own(pointsman: Run) -> None:
    given = ("capacity", "--requests", 20, "--prompt-tokens", 1000, "--output-tokens", 10, "--ttft-target", "1ms")
    assert pointsman(*given).code == 3
    assert pointsman(*given, "--json").code == 3
    assert pointsman(*given, "--replicas", "1-2").code == 3
    assert "3: nothing meets the targets" in " ".join(pointsman("capacity", "--help").out.split())
