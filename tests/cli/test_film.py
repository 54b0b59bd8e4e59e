"""`pointsman film`: makes a film from a recording, and prints it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman.core import Recorder, Request, Scheduler, SchedulerConfig, StepResult
from pointsman.core.observe.film_format import MAGIC
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused

Run = Callable[..., Finished]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two requests, of which the second waits for the first."""
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        config = SchedulerConfig(num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=1)
        scheduler = Scheduler(config, recorder=Recorder(file))
        for name in ("first", "[bold]second[/bold]"):
            scheduler.add(Request(name, range(6), arrival_time=1.0, max_tokens=2), 1.0)
        for step in range(4):
            output = scheduler.schedule(1.0 + step)
            scheduler.update(output, StepResult([7] * int(output.samples.sum())), 2.0 + step)
    return path


def test_the_film_of_a_recording_is_written_beside_the_recording(pointsman: Run, recording: Path) -> None:
    made = pointsman("film", recording)
    assert made.code == 0 and recording.with_suffix(".film").stat().st_size < 4000
    assert "2 requests, 4 steps, 4.0 s" in made.out
    assert "2 admissions, 0 preemptions, 0 evicted blocks, 2 finished, 0 refused" in made.out
    shorter = pointsman("film", recording, "--no-blocks", "-o", recording.with_name("other.film"))
    assert shorter.code == 0
    assert "blocks" not in pointsman("film", recording.with_name("other.film"), "--step", "1").out


@pytest.mark.parametrize("options", [(), ("--preemptions",), ("--waits", "3")])
def test_film_says_that_a_recording_has_no_steps_yet(pointsman: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        Scheduler(SchedulerConfig(num_blocks=8, max_model_len=32), recorder=Recorder(file))
    shown = pointsman("film", path, *options)
    assert shown.code == 0 and shown.out.splitlines()[-1].startswith("The run has no steps yet: nothing was scheduled")


def test_film_prints_the_state_at_a_step(pointsman: Run, recording: Path) -> None:
    pointsman("film", recording, "-o", recording.with_name("other.film"))
    shown = pointsman("film", recording.with_name("other.film"), "--step", "1")
    assert shown.code == 0, shown.err
    assert "step 1, at 1.000 s" in shown.out and "blocks: 2 in use, 6 free" in shown.out
    assert "  [bold]second[/bold]: sequence limit, most of it held by first" in shown.out


def test_film_prints_the_life_of_a_request(pointsman: Run, recording: Path) -> None:
    shown = pointsman("film", recording, "--request", "[bold]second[/bold]")
    assert shown.out.splitlines()[-2:] == [
        "ran 2.000 s, waited 2.000 s:",
        "     2.000 s  sequence limit  all sequence slots are taken",
    ]


def test_film_finds_a_request_by_the_id_that_the_client_knows(pointsman: Run, tmp_path: Path) -> None:
    """A server runs the completion cmpl-a as the request cmpl-a-1f, or cmpl-a-0-1f and cmpl-a-1-1f."""
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_model_len=32), recorder=Recorder(file))
        for name in ("cmpl-a-0-1f", "cmpl-a-1-1f", "cmpl-ab-2e"):
            scheduler.add(Request(name, range(6), arrival_time=1.0, max_tokens=2), 1.0)
    first, second = pointsman("film", path, "--request", "cmpl-a").out.split("\n\n")
    assert "cmpl-a-0-1f is added" in first and "cmpl-a-1-1f is added" in second
    film = path.with_suffix(".film")
    assert pointsman("film", film, "--request", "cmpl-a-1-1f").out == second
    check_refused(pointsman("film", film, "--request", "cmpl-ac"), "no request 'cmpl-ac'")


def test_film_prints_the_longest_waits_and_the_preemptions(pointsman: Run, recording: Path) -> None:
    shown = pointsman("film", recording, "--waits", "5")
    rows = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert rows[2] == "[bold]second[/bold] 2.000 2.000 sequence limit 2.000"
    assert rows[3] == "sequence limit: all sequence slots are taken"
    assert "first" not in shown.out and rows[-1].startswith("Next: --request ID")
    film = recording.with_suffix(".film")
    assert pointsman("film", film, "--preemptions").out == "0 preemptions in 4 steps, 0 tokens computed again\n"
    check_refused(pointsman("film", film, "--waits", "0"), "--waits", "greater than or equal to 1")
    path = recording.with_name("short.jsonl")
    with path.open("w") as file:
        config = SchedulerConfig(num_blocks=5, block_size=4, max_model_len=16, full_sequence_must_fit=False)
        scheduler = Scheduler(config, recorder=Recorder(file))
        for name in ("first", "second"):
            scheduler.add(Request(name, range(ord(name[0]), ord(name[0]) + 8), arrival_time=1.0, max_tokens=8), 1.0)
        for step in range(6):
            output = scheduler.schedule(1.0 + step)
            scheduler.update(output, StepResult([7] * int(output.samples.sum())), 2.0 + step)
    *_, last, count = pointsman("film", path, "--preemptions").out.splitlines()
    assert "second is preempted: it needs a block itself, and none is free; second was the last one" in last, last
    assert last.endswith("; it did not resume") and count == "1 preemption in 6 steps, 0 tokens computed again"
    check_refused(pointsman("film", film, "--waits", "1", "--preemptions"), "--waits and --preemptions", "one of them")


def test_film_page_and_plot_of_a_film_without_steps_are_refused(pointsman: Run, tmp_path: Path) -> None:
    path = tmp_path / "idle.jsonl"
    with path.open("w") as file:
        scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_model_len=32), recorder=Recorder(file))
        scheduler.add(Request("a\x1b[31m\nb", range(6), arrival_time=1.0, max_tokens=2), 1.0)
    assert "1 request, 0 steps" in pointsman("film", path).out
    film = path.with_suffix(".film")
    check_refused(pointsman("film", film, "--step", "0"), "nothing was scheduled")
    check_refused(pointsman("plot", film), "nothing to draw")
    check_refused(pointsman("play", film), "nothing was scheduled")
    assert not film.with_suffix(".png").exists() and not film.with_suffix(".html").exists()
    life = pointsman("film", film, "--request", "a\x1b[31m\nb").out
    assert "\x1b" not in life and len(life.splitlines()) == 2


def test_invalid_options_and_files_are_refused(pointsman: Run, recording: Path, tmp_path: Path) -> None:
    pointsman("film", recording)
    film = recording.with_suffix(".film")
    check_refused(pointsman("film", film, "--step", "17"), "the film has no step 17; it has 0 to 3")
    check_refused(pointsman("film", film, "--request", "third"), "no request 'third'; it has 2: 'first'")
    check_refused(pointsman("film", film, "-o", "x.film"), "is a film already")
    for command in ("film", "plot", "play"):  # what is read is not replaced
        before = recording.read_bytes()
        again = recording.rename(recording.with_suffix(".json"))
        check_refused(pointsman(command, again, "-o", again), "is the input file")
        assert again.rename(recording).read_bytes() == before
    data = film.read_bytes()
    cut = tmp_path / "cut.film"
    cut.write_bytes(data[:-1])
    assert "was cut off" in pointsman("film", cut, "--step", "1").out
    check_refused(pointsman("film", tmp_path / "nothing"), "cannot read")
    check_refused(pointsman("film", recording, "-o", tmp_path / "none" / "x.film"), "cannot write")
    broken = tmp_path / "broken.film"
    broken.write_bytes(film.read_bytes().replace(b'"format_version":3', b'"format_version":9'))
    check_refused(pointsman("film", broken), "format version 9, and this library reads version 3")
    recording.write_text("no recording\n")
    check_refused(pointsman("film", recording), "is neither a film nor a recording")
    assert film.exists() and len(list(recording.parent.glob("*.part"))) == 0


def test_a_picture_is_drawn_of_a_recording_and_of_a_film(pointsman: Run, recording: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = pointsman("plot", recording)
    assert drawn.code == 0 and recording.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    pointsman("film", recording)
    drawn = pointsman("plot", recording.with_suffix(".film"), "-o", tmp_path / "run.svg")
    assert drawn.code == 0 and "<svg" in (tmp_path / "run.svg").read_text()
    assert pointsman("plot", recording, "-o", tmp_path / "run.json").code == 0
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    check_refused(pointsman("plot", recording, "-o", "run.gif3"), "must end with one of", "'gif3'")
    check_refused(pointsman("plot", tmp_path / "nothing.film"), "cannot read")


def test_a_page_is_made_of_a_recording_and_of_a_film(pointsman: Run, recording: Path, tmp_path: Path) -> None:
    made = pointsman("play", recording)
    assert made.code == 0 and made.out == f"{recording.with_suffix('.html')}\n"
    page = recording.with_suffix(".html").read_text()
    assert "Content-Security-Policy" in page and "{" + "film}" not in page and "[bold]" not in page  # it is packed
    pointsman("film", recording)
    other = pointsman("play", recording.with_suffix(".film"), "-o", tmp_path / "other.html")
    assert other.code == 0 and (tmp_path / "other.html").stat().st_size > 20_000
    check_refused(pointsman("play", recording, "-o", tmp_path / "none" / "x.html"), "cannot write")
    (tmp_path / "broken.film").write_bytes(recording.with_suffix(".film").read_bytes()[:200])
    check_refused(pointsman("play", tmp_path / "broken.film"), "broken.film: ")


def test_files_too_large_for_memory_are_refused_early(pointsman: Run, tmp_path: Path) -> None:
    huge, endless = tmp_path / "huge.film", tmp_path / "endless.jsonl"
    for path, begin in ((huge, MAGIC), (endless, b"{")):
        with path.open("wb") as file:
            file.write(begin)
            file.truncate(5 << 30)
    check_refused(pointsman("play", huge), "huge.film has 5,368,709,120 bytes as a film", "--no-blocks")
    for command in ("play", "film"):
        check_refused(pointsman(command, endless), "line 1: longer than 16,777,216 bytes")


def test_a_page_compares_two_runs(pointsman: Run, recording: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    again.write_bytes(recording.read_bytes())
    made = pointsman("play", recording, again)
    page = recording.with_name(f"{recording.stem}-again.html")
    assert made.out == f"{page}\n"
    assert 'id="film"' in page.read_text() and 'id="film2"' in page.read_text()
    check_refused(pointsman("play", recording, tmp_path / "nobody.film"), "nobody.film")
    check_refused(pointsman("play", recording, again, "-o", again), "again.jsonl")
