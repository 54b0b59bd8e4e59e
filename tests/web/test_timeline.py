"""A film as curves and as a picture."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.core import Request, Scheduler, SchedulerConfig
from pointsman.core.observe.film import FilmRecorder
from pointsman.core.observe.film_format import FilmError, Op
from pointsman.web.film import Film
from pointsman.web.plot import draw, means
from pointsman.web.story import life_of
from pointsman.web.timeline import DECODE, PREFILL, WAITING, timeline_of
from tests.web.test_film import CONFIG, run

BUSY = [(14, 20), (10, 20), (6, 20), (30, 3)]


def film_of(lengths: list[tuple[int, int]], **changes: Any) -> Film:
    return Film(io.BytesIO(run(lengths, **changes)[0]))


def test_prefill_and_decode_tokens_add_up_to_all_computed() -> None:
    """Every prompt token, and every token lost to a preemption, is prefilled once; every other token is decoded."""
    film = film_of(BUSY, enable_prefix_caching=False)
    timeline, _ = timeline_of(film)
    lost = sum(event.fields["lost"] for event in film.events(0, None) if event.op is Op.PREEMPTED)
    resumed = int(timeline.num_preemptions.sum())
    assert resumed > 0
    total = timeline.num_prefill_tokens.sum() + timeline.num_decode_tokens.sum()
    generated = sum(output for _, output in BUSY)
    assert total == sum(prompt for prompt, _ in BUSY) + generated - len(BUSY) + lost
    # A request that had its first token computes the newest one together with its lost tokens.
    assert 0 <= timeline.num_prefill_tokens.sum() - sum(prompt for prompt, _ in BUSY) - lost <= resumed


def test_curves_match_the_states_of_their_film() -> None:
    film = film_of(BUSY)
    timeline, _ = timeline_of(film)
    for frame in range(0, len(film.frames), 3):
        state = film.state_at(frame)
        assert state.is_cached is not None
        seen = timeline.num_running[frame], timeline.num_waiting[frame], timeline.num_free_blocks[frame]
        assert seen == (len(state.running), len(state.waiting), (state.num_references() == 0).sum())
        tokens = timeline.num_prefill_tokens[frame] + timeline.num_decode_tokens[frame]
        assert tokens == sum(row.num_tokens for row in state.batch)
        if state.blocker is not None:
            assert timeline.blocked[frame] == state.requests[state.blocker].reason


def test_spans_of_requests_match_their_lives() -> None:
    film = film_of(BUSY)
    _, spans = timeline_of(film)
    seconds: dict[tuple[int, bool], float] = defaultdict(float)
    for span in spans:
        seconds[span.number, span.kind in (PREFILL, DECODE)] += span.end - span.begin
    for number in range(len(BUSY)):
        life = life_of(film, number)
        assert seconds[number, True] == pytest.approx(life.ran)
        assert seconds[number, False] == pytest.approx(sum(life.waited.values()))
    assert {span.kind for span in spans} == {PREFILL, DECODE, WAITING}


def test_means_keep_the_area_under_the_curve() -> None:
    rng = np.random.default_rng(1)
    edges, values = np.cumsum(rng.random(5001)), rng.random(5000)
    grid, mean = means(edges, values, 100)
    assert len(mean) == 100
    assert (mean * np.diff(grid)).sum() == pytest.approx((values * np.diff(edges)).sum())


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_picture_of_a_busy_run_is_legible(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    figure = draw(film_of(BUSY), "a $title$")
    path = tmp_path / f"run.{kind}"
    figure.savefig(path)
    assert path.stat().st_size > 10_000
    assert_legible(figure)
    batch, pool, requests, queue = figure.axes
    assert [text.get_text() for text in requests.get_yticklabels()] == ["r0", "r1", "r2", "r3"]
    assert pool.get_legend_handles_labels()[1][0] == "KV blocks in use, of 12"
    assert batch.get_legend_handles_labels()[1] == ["decode", "prefill", "budget 16"]
    assert any(label.startswith("blocks, ") for label in queue.get_legend_handles_labels()[1])


def assert_legible(figure: Any) -> None:
    """Check that no two parts of the picture overlap."""
    assert [round(axes.get_position().height, 2) for axes in figure.axes] == [0.17, 0.17, 0.38, 0.17]


def test_picture_of_a_run_without_preemptions_says_so(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    film = film_of([(9, 4), (20, 5)], num_blocks=40)
    figure = draw(film, "easy")
    figure.savefig(tmp_path / "easy.png")
    assert_legible(figure)
    _, pool, requests, _ = figure.axes
    assert requests.get_legend_handles_labels()[1][:2] == ["prefill", "decode"]
    assert pool.get_legend_handles_labels()[1][1] == "0 preemptions"
    nothing = Scheduler(SchedulerConfig(**CONFIG))
    recorder = FilmRecorder(file := io.BytesIO())
    nothing.start_film(recorder)
    nothing.remove_listener(recorder)
    recorder.close()
    with pytest.raises(FilmError, match="no step"):
        draw(Film(io.BytesIO(file.getvalue())), "nothing")


def test_a_film_of_one_step_can_be_drawn() -> None:
    """A film of one step, with an id that is not a valid label."""
    pytest.importorskip("matplotlib")
    scheduler = Scheduler(SchedulerConfig(**CONFIG))
    file = io.BytesIO()
    recorder = FilmRecorder(file)
    scheduler.start_film(recorder)
    scheduler.add(Request("$\\frac{a\n<b>" * 9, range(5), arrival_time=0.0, max_tokens=1), 0.0)
    scheduler.schedule(0.0)
    scheduler.remove_listener(recorder)
    recorder.close()
    draw(Film(io.BytesIO(file.getvalue())), "one").savefig(io.BytesIO(), format="svg")
