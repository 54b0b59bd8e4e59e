"""The progress bar of long work."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import pytest
from rich.console import Console

from pointsman.cli.film import film_recording
from pointsman.cli.progress_bar import ProgressBar
from pointsman.core import Recorder, Request, Scheduler, SchedulerConfig, StepResult


def test_long_work_shows_progress_and_the_remaining_time() -> None:
    for is_terminal, quiet in ((True, 0.0), (True, 60.0), (False, 0.0)):
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=is_terminal, width=100)
        with ProgressBar("simulated", 1000, console, quiet) as bar:
            bar.update(250, 12.5)
        text = shown.getvalue()
        if is_terminal and not quiet:
            assert "250 requests simulated, 12 s of virtual time" in text
            assert "-:--:--" in text  # after one reading the remaining time is not known
        else:
            assert text == ""


def test_a_replay_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_model_len=32), recorder=Recorder(file))
        for number in (0.0, 1.0, 2.0):
            scheduler.add(Request(f"r{number}", range(6), arrival_time=number, max_tokens=1), number)
            scheduler.update(scheduler.schedule(number), StepResult([7]), number + 1)
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    shows_at_once = functools.partial(ProgressBar, console=console, quiet=0.0)
    monkeypatch.setattr("pointsman.cli.film.ProgressBar", shows_at_once)
    film_recording(path, io.BytesIO())
    assert "0 MB of run.jsonl replayed, 1 lines" in shown.getvalue()
